//! Expressions of automata: states are taken out one by one, and the ways through them become
//! expressions.

use std::collections::BTreeMap;

use regex_syntax::hir::{Class, ClassUnicode, Hir, Repetition};

use super::TOO_COMPLEX;

/// Largest expression of an automaton: characters and what combines them.
const MAX_SIZE: usize = 8_000;
/// Most states that are taken out.
const MAX_STATES: usize = 250;
/// A state before the first one.
const START: usize = usize::MAX - 1;
/// A state after those that accept.
const END: usize = usize::MAX;

/// What leads from one state to another.
#[derive(Clone)]
struct Edge {
    expression: Hir,
    size: usize,
}

impl Edge {
    fn nothing() -> Self {
        Self { expression: Hir::empty(), size: 0 }
    }

    fn then(&self, other: &Self) -> Self {
        let expression = Hir::concat(vec![self.expression.clone(), other.expression.clone()]);
        Self { expression, size: self.size + other.size }
    }

    fn or(&self, other: &Self) -> Self {
        let expression = Hir::alternation(vec![self.expression.clone(), other.expression.clone()]);
        Self { expression, size: self.size + other.size + 1 }
    }

    fn repeated(self) -> Self {
        let repetition = Repetition { min: 0, max: None, greedy: true, sub: Box::new(self.expression) };
        Self { expression: Hir::repetition(repetition), size: self.size + 1 }
    }
}

/// An automaton by its edges.
#[derive(Default)]
pub(super) struct Edges {
    classes: BTreeMap<(usize, usize), ClassUnicode>,
    accepting: Vec<usize>,
}

impl Edges {
    pub(super) fn add(&mut self, from: usize, to: usize, class: &ClassUnicode) {
        self.classes.entry((from, to)).or_insert_with(ClassUnicode::empty).union(class);
    }

    pub(super) fn accept(&mut self, state: usize) {
        self.accepting.push(state);
    }

    /// Whether any state accepts.
    pub(super) fn accepts(&self) -> bool {
        !self.accepting.is_empty()
    }

    /// The expression of the automaton's language, for whole texts.
    ///
    /// # Errors
    /// The expression is too long.
    pub(super) fn expression(self, states: usize) -> Result<Hir, String> {
        if states > MAX_STATES {
            return Err(TOO_COMPLEX.to_owned());
        }
        let classes = self.classes.into_iter().map(|(ends, class)| {
            let size = 2 * class.ranges().len();
            (ends, Edge { expression: Hir::class(Class::Unicode(class)), size })
        });
        let mut edges: BTreeMap<_, _> = classes.collect();
        edges.insert((START, 0), Edge::nothing());
        edges.extend(self.accepting.into_iter().map(|state| ((state, END), Edge::nothing())));
        let mut left: Vec<_> = (0..states).collect();
        while let Some(position) = cheapest(&edges, &left) {
            eliminate(&mut edges, left.swap_remove(position))?;
        }
        Ok(edges.remove(&(START, END)).map_or_else(Hir::fail, |edge| edge.expression))
    }
}

/// What eliminating a state writes.
#[derive(Default)]
struct Cost {
    entering: usize,
    leaving: usize,
    size: usize,
}

/// The state whose elimination writes least, by its position.
fn cheapest(edges: &BTreeMap<(usize, usize), Edge>, states: &[usize]) -> Option<usize> {
    let mut costs: BTreeMap<usize, Cost> = BTreeMap::new();
    for ((from, to), edge) in edges.iter().filter(|((from, to), _)| from != to) {
        let left = costs.entry(*from).or_default();
        left.leaving += 1;
        left.size += edge.size;
        let entered = costs.entry(*to).or_default();
        entered.entering += 1;
        entered.size += edge.size;
    }
    (0..states.len()).min_by_key(|position| {
        costs.get(&states[*position]).map_or(0, |cost| cost.entering * cost.leaving * (cost.size + 1))
    })
}

/// Takes a state out: what led through it leads past it.
fn eliminate(edges: &mut BTreeMap<(usize, usize), Edge>, state: usize) -> Result<(), String> {
    let again = edges.remove(&(state, state)).map_or_else(Edge::nothing, Edge::repeated);
    let entering: Vec<_> = edges.extract_if(.., |(_, to), _| *to == state).collect();
    let leaving: Vec<_> = edges.extract_if(.., |(from, _), _| *from == state).collect();
    let mut size: usize = edges.values().map(|edge| edge.size).sum();
    for ((from, _), first) in &entering {
        for ((_, to), last) in &leaving {
            let path = first.then(&again).then(last);
            size += path.size;
            if size > MAX_SIZE {
                return Err(TOO_COMPLEX.to_owned());
            }
            let joined = edges.remove(&(*from, *to)).map_or_else(|| path.clone(), |edge| edge.or(&path));
            edges.insert((*from, *to), joined);
        }
    }
    Ok(())
}
