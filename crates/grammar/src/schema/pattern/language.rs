//! Languages of regular expressions that look around, as finite automata.
//!
//! An expression with look-aheads is compiled from its end to its start: what a part may be depends
//! on all that comes after it, which intersections and complements say. Derivatives make an
//! automaton of that (Brzozowski, "Derivatives of Regular Expressions", 1964).

use std::collections::{HashMap, HashSet};

use regex_syntax::hir::ClassUnicode;

use super::syntax::{Node, all, word};

/// Most classes of characters that an expression tells apart.
const MAX_BLOCKS: usize = 64;
/// Most states of an automaton.
const MAX_STATES: usize = 256;
/// Most terms that are made for an expression.
const MAX_TERMS: usize = 10_000;
/// Most parts that are looked at, those that are repeated each time anew.
const MAX_STEPS: usize = 20_000;
/// Most times that a part that looks around is repeated by writing it out.
const MAX_UNROLLED: u32 = 64;

pub(super) const TOO_COMPLEX: &str = "the regex is too complex";

/// A set of blocks of characters.
type Blocks = u64;
type Term = usize;

/// What may come after a place, by what came before it: nothing, a character of a word, or another
/// one.
type Rest = [Term; 3];

#[derive(Clone, PartialEq, Eq, Hash)]
enum Expression {
    Empty,
    Class(Blocks),
    Concat(Term, Term),
    Either(Vec<Term>),
    Both(Vec<Term>),
    Not(Term),
    Star(Term),
    /// A language that is defined by itself: the index of its definition.
    Recursive(usize),
}

/// The automaton of a language.
pub(super) struct Automaton {
    /// The state after each block of characters.
    pub(super) next: Vec<Vec<usize>>,
    pub(super) accepts: Vec<bool>,
    /// The characters of each block.
    pub(super) blocks: Vec<ClassUnicode>,
}

impl Automaton {
    /// The automaton of the whole texts in which an expression is found.
    ///
    /// # Errors
    /// It costs too much.
    pub(super) fn new(node: &Node) -> Result<Self, String> {
        let mut terms = Terms::new(node)?;
        let rest = [terms.all; 3];
        // It may begin anywhere.
        let anywhere = Node::Concat(vec![Node::any().times(0, None), node.clone()]);
        let [language, ..] = terms.before(&anywhere, rest)?;
        terms.automaton(language)
    }

    /// Whether a text is of the language.
    pub(super) fn accepts(&self, text: &str) -> bool {
        let mut state = 0;
        for c in text.chars() {
            let holds = |class: &ClassUnicode| class.ranges().iter().any(|r| (r.start()..=r.end()).contains(&c));
            let Some(block) = self.blocks.iter().position(holds) else { return false };
            state = self.next[state][block];
        }
        self.accepts[state]
    }

    /// Whether there is no text in it.
    pub(super) fn is_empty(&self) -> bool {
        // Every state is reached from the first.
        !self.accepts.contains(&true)
    }

    /// Which states lead to one that accepts.
    pub(super) fn live(&self) -> Vec<bool> {
        let mut live = self.accepts.clone();
        loop {
            let before = live.iter().filter(|live| **live).count();
            for (state, row) in self.next.iter().enumerate() {
                live[state] |= row.iter().any(|&next| live[next]);
            }
            if live.iter().filter(|live| **live).count() == before {
                return live;
            }
        }
    }

    /// The smallest automaton of the language: states that no text tells apart are one (Moore).
    pub(super) fn minimized(&self) -> Self {
        let mut group_of: Vec<usize> = self.accepts.iter().map(|accepts| usize::from(*accepts)).collect();
        let mut groups = 0;
        loop {
            let mut index = HashMap::new();
            let mut refined = Vec::with_capacity(group_of.len());
            for (state, row) in self.next.iter().enumerate() {
                let after: Vec<_> = row.iter().map(|&next| group_of[next]).collect();
                let count = index.len();
                refined.push(*index.entry((group_of[state], after)).or_insert(count));
            }
            group_of = refined;
            if index.len() == groups {
                break;
            }
            groups = index.len();
        }
        // Groups are numbered as their first states are met: the first has the first state.
        let mut next = Vec::with_capacity(groups);
        let mut accepts = Vec::with_capacity(groups);
        for (state, row) in self.next.iter().enumerate() {
            if group_of[state] == next.len() {
                next.push(row.iter().map(|&next| group_of[next]).collect());
                accepts.push(self.accepts[state]);
            }
        }
        Self { next, accepts, blocks: self.blocks.clone() }
    }
}

/// Terms of languages over the blocks of characters that an expression tells apart.
struct Terms {
    blocks: Vec<ClassUnicode>,
    word: Blocks,
    expressions: Vec<Expression>,
    /// Whether the empty text is of each language.
    nullable: Vec<bool>,
    ids: HashMap<Expression, Term>,
    derivatives: HashMap<(Term, usize), Term>,
    definitions: Vec<Term>,
    steps: usize,
    none: Term,
    empty: Term,
    all: Term,
}

impl Terms {
    fn new(node: &Node) -> Result<Self, String> {
        let blocks = blocks(node)?;
        let mut terms = Self {
            blocks,
            word: 0,
            expressions: Vec::new(),
            nullable: Vec::new(),
            ids: HashMap::new(),
            derivatives: HashMap::new(),
            definitions: Vec::new(),
            steps: 0,
            none: 0,
            empty: 0,
            all: 0,
        };
        terms.word = terms.blocks_of(&word());
        terms.none = terms.term(Expression::Class(0), false)?;
        terms.empty = terms.term(Expression::Empty, true)?;
        terms.all = terms.term(Expression::Not(terms.none), true)?;
        Ok(terms)
    }

    fn every(&self) -> Blocks {
        Blocks::MAX >> (Blocks::BITS as usize - self.blocks.len())
    }

    fn blocks_of(&self, class: &ClassUnicode) -> Blocks {
        let is_in = |block: &ClassUnicode| {
            let Some(first) = block.ranges().first() else { return false };
            class.ranges().iter().any(|range| (range.start()..=range.end()).contains(&first.start()))
        };
        let bits = self.blocks.iter().enumerate().filter(|(_, block)| is_in(block));
        bits.fold(0, |blocks, (index, _)| blocks | 1 << index)
    }

    fn term(&mut self, expression: Expression, nullable: bool) -> Result<Term, String> {
        if let Some(&term) = self.ids.get(&expression) {
            return Ok(term);
        }
        if self.expressions.len() >= MAX_TERMS {
            return Err(TOO_COMPLEX.to_owned());
        }
        let term = self.expressions.len();
        self.ids.insert(expression.clone(), term);
        self.expressions.push(expression);
        self.nullable.push(nullable);
        Ok(term)
    }

    fn class(&mut self, blocks: Blocks) -> Result<Term, String> {
        self.term(Expression::Class(blocks), false)
    }

    fn concat(&mut self, a: Term, b: Term) -> Result<Term, String> {
        if a == self.none || b == self.none {
            return Ok(self.none);
        }
        if a == self.empty {
            return Ok(b);
        }
        if b == self.empty {
            return Ok(a);
        }
        if a == self.all && b == self.all {
            return Ok(a);
        }
        let mut parts = Vec::new();
        let mut last = a;
        while let Expression::Concat(first, second) = self.expressions[last] {
            parts.push(first);
            last = second;
        }
        parts.push(last);
        let mut all = b;
        for part in parts.into_iter().rev() {
            let nullable = self.nullable[part] && self.nullable[all];
            all = self.term(Expression::Concat(part, all), nullable)?;
        }
        Ok(all)
    }

    fn either(&mut self, terms: &[Term]) -> Result<Term, String> {
        self.combined(terms, true)
    }

    fn both(&mut self, terms: &[Term]) -> Result<Term, String> {
        self.combined(terms, false)
    }

    fn combined(&mut self, terms: &[Term], is_either: bool) -> Result<Term, String> {
        let (unit, zero) = if is_either { (self.none, self.all) } else { (self.all, self.none) };
        let mut flat = Vec::new();
        let mut blocks = if is_either { 0 } else { self.every() };
        let mut has_class = false;
        for &term in terms {
            match &self.expressions[term] {
                Expression::Either(inner) if is_either => flat.extend(inner),
                Expression::Both(inner) if !is_either => flat.extend(inner),
                _ => flat.push(term),
            }
        }
        flat.retain(|&term| match self.expressions[term] {
            Expression::Class(class) => {
                has_class = true;
                blocks = if is_either { blocks | class } else { blocks & class };
                false
            }
            _ => term != unit,
        });
        if has_class {
            let class = self.class(blocks)?;
            if class != unit {
                flat.push(class);
            }
        }
        flat.sort_unstable();
        flat.dedup();
        let has_opposite = flat.iter().any(|&term| match self.expressions[term] {
            Expression::Not(inner) => flat.binary_search(&inner).is_ok(),
            _ => false,
        });
        if has_opposite || flat.contains(&zero) {
            return Ok(zero);
        }
        match flat.as_slice() {
            [] => Ok(unit),
            &[term] => Ok(term),
            _ if is_either => {
                let nullable = flat.iter().any(|&term| self.nullable[term]);
                self.term(Expression::Either(flat), nullable)
            }
            _ => {
                let nullable = flat.iter().all(|&term| self.nullable[term]);
                self.term(Expression::Both(flat), nullable)
            }
        }
    }

    fn not(&mut self, term: Term) -> Result<Term, String> {
        match self.expressions[term] {
            Expression::Not(inner) => Ok(inner),
            _ => self.term(Expression::Not(term), !self.nullable[term]),
        }
    }

    fn star(&mut self, term: Term) -> Result<Term, String> {
        match self.expressions[term] {
            Expression::Empty => Ok(term),
            Expression::Class(0) => Ok(self.empty),
            Expression::Class(blocks) if blocks == self.every() => Ok(self.all),
            Expression::Star(_) => Ok(term),
            _ => self.term(Expression::Star(term), true),
        }
    }

    /// What an expression may be with the rest after it.
    fn before(&mut self, node: &Node, rest: Rest) -> Result<Rest, String> {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return Err(TOO_COMPLEX.to_owned());
        }
        if !node.looks() {
            return self.plain_before(node, rest);
        }
        match node {
            Node::Class(_) => self.plain_before(node, rest),
            Node::Concat(nodes) => nodes.iter().rev().try_fold(rest, |rest, node| self.before(node, rest)),
            Node::Either(nodes) => {
                let mut all = [self.none; 3];
                for node in nodes {
                    let one = self.before(node, rest)?;
                    for (all, one) in all.iter_mut().zip(one) {
                        *all = self.either(&[*all, one])?;
                    }
                }
                Ok(all)
            }
            Node::Repeat { node, min, max } => self.repeat_before(node, *min, *max, rest),
            Node::Start => Ok([rest[0], self.none, self.none]),
            Node::End => self.restricted(rest, [self.empty; 3]),
            Node::WordBoundary { is } => {
                let word = self.class(self.word)?;
                let begins = self.concat(word, self.all)?;
                let other = self.not(begins)?;
                let [at_word, at_other] = if *is { [begins, other] } else { [other, begins] };
                self.restricted(rest, [at_word, at_other, at_word])
            }
            Node::Ahead { is, node } => {
                let mut ahead = self.before(node, [self.all; 3])?;
                if !is {
                    for term in &mut ahead {
                        *term = self.not(*term)?;
                    }
                }
                self.restricted(rest, ahead)
            }
        }
    }

    fn restricted(&mut self, mut rest: Rest, to: Rest) -> Result<Rest, String> {
        for (rest, to) in rest.iter_mut().zip(to) {
            *rest = self.both(&[*rest, to])?;
        }
        Ok(rest)
    }

    /// An expression that does not look around, which ends with a character of a word or another.
    fn plain_before(&mut self, node: &Node, rest: Rest) -> Result<Rest, String> {
        let plain = self.plain(node)?;
        if rest[0] == rest[1] && rest[1] == rest[2] {
            return Ok([self.concat(plain, rest[0])?; 3]);
        }
        let mut after = Vec::new();
        for (last, rest) in [(self.word, rest[1]), (self.every() & !self.word, rest[2])] {
            let last = self.class(last)?;
            let ends = self.concat(self.all, last)?;
            let plain = self.both(&[plain, ends])?;
            after.push(self.concat(plain, rest)?);
        }
        let mut all = rest;
        for term in &mut all {
            let stays = if self.nullable[plain] { *term } else { self.none };
            *term = self.either(&[after[0], after[1], stays])?;
        }
        Ok(all)
    }

    fn plain(&mut self, node: &Node) -> Result<Term, String> {
        match node {
            Node::Class(class) => {
                let blocks = self.blocks_of(class);
                self.class(blocks)
            }
            Node::Concat(nodes) => {
                let mut all = self.empty;
                for node in nodes.iter().rev() {
                    let one = self.plain(node)?;
                    all = self.concat(one, all)?;
                }
                Ok(all)
            }
            Node::Either(nodes) => {
                let terms = nodes.iter().map(|node| self.plain(node)).collect::<Result<Vec<_>, _>>()?;
                self.either(&terms)
            }
            Node::Repeat { node, min, max } => {
                let one = self.plain(node)?;
                if min.max(&max.unwrap_or(0)) > &(MAX_STATES as u32) {
                    return Err(TOO_COMPLEX.to_owned());
                }
                let mut all = if max.is_none() { self.star(one)? } else { self.empty };
                for _ in *min..max.unwrap_or(*min) {
                    let more = self.concat(one, all)?;
                    all = self.either(&[self.empty, more])?;
                }
                for _ in 0..*min {
                    all = self.concat(one, all)?;
                }
                Ok(all)
            }
            _ => Ok(self.none),
        }
    }

    /// A repetition of what looks around.
    fn repeat_before(&mut self, node: &Node, min: u32, max: Option<u32>, rest: Rest) -> Result<Rest, String> {
        if min.max(max.unwrap_or(0)) > MAX_UNROLLED {
            return Err(TOO_COMPLEX.to_owned());
        }
        let mut all = rest;
        if let Some(max) = max {
            for _ in min..max {
                let more = self.before(node, all)?;
                for ((all, more), rest) in all.iter_mut().zip(more).zip(rest) {
                    *all = self.either(&[more, rest])?;
                }
            }
        } else {
            all = self.star_before(node, rest)?;
        }
        for _ in 0..min {
            all = self.before(node, all)?;
        }
        Ok(all)
    }

    /// What is repeated without end is the rest, or one and the same again.
    fn star_before(&mut self, node: &Node, rest: Rest) -> Result<Rest, String> {
        let mut again = rest;
        let first = self.definitions.len();
        for (index, term) in again.iter_mut().enumerate() {
            let nullable = self.nullable[rest[index]];
            self.definitions.push(self.none);
            *term = self.term(Expression::Recursive(first + index), nullable)?;
        }
        let more = self.before(node, again)?;
        for index in 0..again.len() {
            if !self.is_guarded(more[index], first) {
                return Err(TOO_COMPLEX.to_owned());
            }
            self.definitions[first + index] = self.either(&[rest[index], more[index]])?;
        }
        Ok(again)
    }

    /// Whether a term takes a character before it comes to what is defined from here on.
    fn is_guarded(&self, term: Term, first: usize) -> bool {
        let mut seen = HashSet::new();
        let mut left = vec![term];
        while let Some(term) = left.pop() {
            if !seen.insert(term) {
                continue;
            }
            match &self.expressions[term] {
                Expression::Recursive(index) if *index >= first => return false,
                Expression::Concat(a, b) if self.nullable[*a] => left.extend([*a, *b]),
                Expression::Concat(a, _) | Expression::Not(a) | Expression::Star(a) => left.push(*a),
                Expression::Either(terms) | Expression::Both(terms) => left.extend(terms),
                Expression::Empty | Expression::Class(_) | Expression::Recursive(_) => {}
            }
        }
        true
    }

    /// What may come after a character of a block.
    fn derivative(&mut self, term: Term, block: usize) -> Result<Term, String> {
        if let Some(&known) = self.derivatives.get(&(term, block)) {
            return Ok(known);
        }
        let derivative = match self.expressions[term].clone() {
            Expression::Empty => self.none,
            Expression::Class(blocks) if blocks >> block & 1 == 1 => self.empty,
            Expression::Class(_) => self.none,
            Expression::Concat(a, b) => {
                let first = self.derivative(a, block)?;
                let first = self.concat(first, b)?;
                if self.nullable[a] {
                    let second = self.derivative(b, block)?;
                    self.either(&[first, second])?
                } else {
                    first
                }
            }
            Expression::Either(terms) => {
                let terms = self.derivatives(&terms, block)?;
                self.either(&terms)?
            }
            Expression::Both(terms) => {
                let terms = self.derivatives(&terms, block)?;
                self.both(&terms)?
            }
            Expression::Not(inner) => {
                let inner = self.derivative(inner, block)?;
                self.not(inner)?
            }
            Expression::Star(inner) => {
                let inner = self.derivative(inner, block)?;
                self.concat(inner, term)?
            }
            Expression::Recursive(index) => self.derivative(self.definitions[index], block)?,
        };
        self.derivatives.insert((term, block), derivative);
        Ok(derivative)
    }

    fn derivatives(&mut self, terms: &[Term], block: usize) -> Result<Vec<Term>, String> {
        terms.iter().map(|&term| self.derivative(term, block)).collect()
    }

    fn automaton(mut self, start: Term) -> Result<Automaton, String> {
        let mut states = vec![start];
        let mut index = HashMap::from([(start, 0)]);
        let mut next = Vec::new();
        while let Some(&term) = states.get(next.len()) {
            let mut row = Vec::with_capacity(self.blocks.len());
            for block in 0..self.blocks.len() {
                let after = self.derivative(term, block)?;
                let state = *index.entry(after).or_insert(states.len());
                if state == states.len() {
                    states.push(after);
                }
                row.push(state);
            }
            if states.len() > MAX_STATES {
                return Err(TOO_COMPLEX.to_owned());
            }
            next.push(row);
        }
        let accepts = states.iter().map(|&term| self.nullable[term]).collect();
        Ok(Automaton { next, accepts, blocks: self.blocks })
    }
}

/// The characters that an expression does not tell apart, set by set.
fn blocks(node: &Node) -> Result<Vec<ClassUnicode>, String> {
    let mut classes = vec![word()];
    let mut left = vec![node];
    while let Some(node) = left.pop() {
        match node {
            Node::Class(class) if !classes.contains(class) => classes.push(class.clone()),
            Node::Concat(nodes) | Node::Either(nodes) => left.extend(nodes),
            Node::Repeat { node, .. } | Node::Ahead { node, .. } => left.push(node),
            _ => {}
        }
        if classes.len() > MAX_BLOCKS {
            return Err(TOO_COMPLEX.to_owned());
        }
    }
    let mut blocks = vec![all()];
    for class in &classes {
        let mut parts = Vec::new();
        for block in blocks {
            let mut inside = block.clone();
            inside.intersect(class);
            let mut outside = block;
            outside.difference(class);
            parts.extend([inside, outside].into_iter().filter(|part| !part.ranges().is_empty()));
        }
        blocks = parts;
        if blocks.len() > MAX_BLOCKS {
            return Err(TOO_COMPLEX.to_owned());
        }
    }
    Ok(blocks)
}
