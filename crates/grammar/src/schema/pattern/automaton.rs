//! Regular expressions with look-aheads, written without them.
//!
//! A look-ahead is an intersection of what comes after it, with a language or with its complement.
//! The library's derivatives make an automaton of that (Brzozowski, "Derivatives of Regular
//! Expressions", 1964).

use std::collections::HashMap;

use llguidance::derivre::raw::DerivCache;
use llguidance::derivre::{ExprRef, RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Look};

use super::elimination::Edges;
use super::syntax::{Branches, Part};
use super::{TOO_COMPLEX, library_problem};

/// Most sets of characters that an expression tells apart.
const MAX_BLOCKS: usize = 48;
/// Most states of an automaton.
pub(super) const MAX_STATES: usize = 1_000;
/// Most work for an automaton, as the library counts it.
const MAX_COST: u64 = 200_000;

/// An automaton of what may come from a place in a text on.
pub(super) struct Automaton {
    pub(super) states: usize,
    edges: Edges,
}

impl Automaton {
    /// An automaton of parts that look ahead, up to the end of the text. `is_start`: whether they
    /// are at the start of the text.
    ///
    /// # Errors
    /// The parts are wrong, have what is not served, or cost too much.
    pub(super) fn new(parts: &[Part], is_start: bool) -> Result<Self, String> {
        let mut language = Language { builder: RegexBuilder::new(), blocks: vec![class(&[('\0', char::MAX)])] };
        let all = language.sequence(parts, None, is_start)?;
        let all = language.builder.mk(&all).map_err(|error| library_problem(&error))?;
        language.automaton(all)
    }

    /// Whether nothing may come.
    pub(super) fn is_empty(&self) -> bool {
        // Every state is reached from the first.
        !self.edges.accepts()
    }

    /// An expression without look-aheads.
    ///
    /// # Errors
    /// The expression is too long.
    pub(super) fn expression(self) -> Result<Hir, String> {
        self.edges.expression(self.states)
    }
}

struct Language {
    builder: RegexBuilder,
    /// Sets of characters that the expression does not tell apart.
    blocks: Vec<ClassUnicode>,
}

impl Language {
    /// Parts one after the other, and what comes after them; nothing: any text. `is_start`: whether
    /// they are at the start of the text.
    fn sequence(&mut self, parts: &[Part], rest: Option<&RegexAst>, is_start: bool) -> Result<RegexAst, String> {
        let mut rest = rest.cloned();
        for (index, part) in parts.iter().enumerate().rev() {
            let is_start = is_start && parts[..index].iter().all(takes_nothing);
            let with_part = match part {
                Part::Text(text) => self.text(text, rest, is_start)?,
                Part::Group(branches) => self.either(branches, rest.as_ref(), is_start)?,
                Part::Ahead { is, branches } => {
                    let ahead = self.either(branches, None, is_start)?;
                    let ahead = if *is { ahead } else { RegexAst::Not(Box::new(ahead)) };
                    RegexAst::And(vec![ahead, rest.unwrap_or_else(any)])
                }
            };
            // What is used several times is made once.
            rest = Some(RegexAst::ExprRef(self.builder.mk(&with_part).map_err(|error| library_problem(&error))?));
        }
        Ok(rest.unwrap_or_else(any))
    }

    fn either(&mut self, branches: &Branches, rest: Option<&RegexAst>, is_start: bool) -> Result<RegexAst, String> {
        let ways = branches.iter().map(|parts| self.sequence(parts, rest, is_start));
        Ok(RegexAst::Or(ways.collect::<Result<_, _>>()?))
    }

    /// An expression without look-aheads, and what comes after it.
    fn text(&mut self, text: &str, rest: Option<RegexAst>, is_start: bool) -> Result<RegexAst, String> {
        let text = regex_to_lark(text, "dw");
        let hir = regex_syntax::parse(&text).map_err(|error| library_problem(&error))?;
        let looks = hir.properties().look_set();
        if looks.contains_word() {
            return Err(r"\b beside look-aheads is not served".to_owned());
        }
        if looks.contains(Look::Start) && !is_start || looks.contains(Look::End) && rest.is_some() {
            return Err("an end of the text in mid-regex is not served".to_owned());
        }
        self.split_blocks(&hir)?;
        let anchored = format!("^(?:{text})");
        Ok(match rest {
            None => RegexAst::SearchRegex(anchored),
            Some(rest) => RegexAst::Concat(vec![RegexAst::Regex(anchored), rest]),
        })
    }

    /// Splits the blocks by the characters that an expression tells apart.
    fn split_blocks(&mut self, hir: &Hir) -> Result<(), String> {
        match hir.kind() {
            HirKind::Literal(literal) => {
                for c in String::from_utf8_lossy(&literal.0).chars() {
                    self.split(&class(&[(c, c)]))?;
                }
            }
            HirKind::Class(Class::Unicode(class)) => self.split(class)?,
            kind => {
                for inner in kind.subs() {
                    self.split_blocks(inner)?;
                }
            }
        }
        Ok(())
    }

    fn split(&mut self, by: &ClassUnicode) -> Result<(), String> {
        let mut blocks = Vec::with_capacity(self.blocks.len() + 1);
        for block in &self.blocks {
            let mut inside = block.clone();
            inside.intersect(by);
            let mut outside = block.clone();
            outside.difference(by);
            blocks.extend([inside, outside].into_iter().filter(|part| !part.ranges().is_empty()));
        }
        self.blocks = blocks;
        if self.blocks.len() > MAX_BLOCKS { Err(TOO_COMPLEX.to_owned()) } else { Ok(()) }
    }

    fn automaton(self, language: ExprRef) -> Result<Automaton, String> {
        let mut expressions = self.builder.into_exprset();
        let mut derivatives = DerivCache::new();
        let mut states = vec![language];
        let mut numbers = HashMap::from([(language, 0)]);
        let mut edges = Edges::default();
        let mut from = 0;
        while let Some(&state) = states.get(from) {
            if expressions.is_nullable(state) {
                edges.accept(from);
            }
            for block in &self.blocks {
                let mut bytes = [0; 4];
                let first = block.ranges().first().map_or('\0', ClassUnicodeRange::start);
                let after = first.encode_utf8(&mut bytes).bytes();
                let after = after.fold(state, |state, byte| derivatives.derivative(&mut expressions, state, byte));
                if after == ExprRef::NO_MATCH {
                    continue;
                }
                let to = *numbers.entry(after).or_insert(states.len());
                if to == states.len() {
                    states.push(after);
                }
                edges.add(from, to, block);
            }
            if states.len() > MAX_STATES || expressions.cost() > MAX_COST {
                return Err(TOO_COMPLEX.to_owned());
            }
            from += 1;
        }
        Ok(Automaton { states: states.len(), edges })
    }
}

/// Whether a part leaves the place where it is.
fn takes_nothing(part: &Part) -> bool {
    match part {
        Part::Text(text) => text.is_empty() || text == "^",
        Part::Group(_) => false,
        Part::Ahead { .. } => true,
    }
}

fn any() -> RegexAst {
    RegexAst::Regex("(?s:.*)".to_owned())
}

fn class(ranges: &[(char, char)]) -> ClassUnicode {
    ClassUnicode::new(ranges.iter().map(|&(first, last)| ClassUnicodeRange::new(first, last)))
}
