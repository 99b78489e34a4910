//! Writes regular expressions in the syntax of Rust's.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::LazyLock;

use regex_syntax::hir::{Class, ClassUnicode, Hir, HirKind};

use super::language::{Automaton, TOO_COMPLEX};
use super::syntax::{Node, all};

/// Longest expression of an automaton, bytes.
const MAX_BYTES: usize = 8 << 10;
/// Most states of an automaton that is written.
const MAX_STATES: usize = 96;
/// Classes of more ranges are written with properties of Unicode.
const MANY_RANGES: usize = 40;

/// Properties of Unicode that patterns name.
static PROPERTIES: LazyLock<Vec<(String, ClassUnicode)>> = LazyLock::new(|| {
    let names = ["L", "Lu", "Ll", "M", "N", "P", "S", "Z", "Extended_Pictographic"];
    let class = |name: &str| {
        let text = format!("\\p{{{name}}}");
        match regex_syntax::parse(&text).map(Hir::into_kind) {
            Ok(HirKind::Class(Class::Unicode(class))) => Some((text, class)),
            _ => None,
        }
    };
    names.into_iter().filter_map(class).collect()
});

/// How an expression binds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Binding {
    Either,
    Concat,
    /// One that may be repeated.
    One,
}

/// A written expression.
#[derive(Clone)]
struct Written {
    text: String,
    binding: Binding,
}

impl Written {
    fn bound(&self, binding: Binding) -> String {
        if self.binding >= binding { self.text.clone() } else { format!("(?:{})", self.text) }
    }

    fn either(&self, other: &Self) -> Self {
        if self.text == other.text {
            return self.clone();
        }
        Self { text: format!("{}|{}", self.text, other.text), binding: Binding::Either }
    }

    fn then(&self, other: &Self) -> Self {
        if self.text.is_empty() {
            return other.clone();
        }
        if other.text.is_empty() {
            return self.clone();
        }
        let text = self.bound(Binding::Concat) + &other.bound(Binding::Concat);
        Self { text, binding: Binding::Concat }
    }

    fn repeated(&self, times: &str) -> Self {
        if self.text.is_empty() {
            return self.clone();
        }
        Self { text: self.bound(Binding::One) + times, binding: Binding::Concat }
    }
}

/// An expression that does not look around, but for ends at its ends.
pub(super) fn of_node(node: &Node) -> String {
    node_written(node).text
}

fn node_written(node: &Node) -> Written {
    let text = |text: &str| Written { text: text.to_owned(), binding: Binding::One };
    match node {
        Node::Class(class) => Written { text: class_text(class), binding: Binding::One },
        Node::Concat(nodes) => {
            let parts = nodes.iter().map(|node| node_written(node).bound(Binding::Concat));
            Written { text: parts.collect(), binding: Binding::Concat }
        }
        Node::Either(nodes) => {
            let parts: Vec<_> = nodes.iter().map(|node| node_written(node).text).collect();
            Written { text: parts.join("|"), binding: Binding::Either }
        }
        Node::Repeat { node, min, max } => {
            let one = node_written(node);
            match (min, max) {
                (0, None) => one.repeated("*"),
                (1, None) => one.repeated("+"),
                (0, Some(1)) => one.repeated("?"),
                (min, None) => one.repeated(&format!("{{{min},}}")),
                (min, Some(max)) => one.repeated(&format!("{{{min},{max}}}")),
            }
        }
        Node::Start => text("^"),
        Node::End => text("$"),
        Node::WordBoundary { .. } | Node::Ahead { .. } => text(""),
    }
}

/// Characters of a class, or of what it is not if that is shorter.
fn class_text(class: &ClassUnicode) -> String {
    if let [range] = class.ranges() {
        if range.start() == range.end() {
            return char_text(range.start());
        }
    }
    if *class == all() {
        return "(?s:.)".to_owned();
    }
    let mut others = class.clone();
    others.negate();
    let (sign, shorter) = if others.ranges().len() < class.ranges().len() { ("^", &others) } else { ("", class) };
    if shorter.ranges().is_empty() {
        return "[^\\x{0}-\\x{10FFFF}]".to_owned();
    }
    let mut text = format!("[{sign}");
    let mut shorter = shorter.clone();
    if shorter.ranges().len() > MANY_RANGES {
        for (name, property) in PROPERTIES.iter() {
            let mut missing = property.clone();
            missing.difference(&shorter);
            if missing.ranges().is_empty() {
                text.push_str(name);
                shorter.difference(property);
            }
        }
    }
    for range in shorter.ranges() {
        text.push_str(&char_text(range.start()));
        if range.start() < range.end() {
            text.push('-');
            text.push_str(&char_text(range.end()));
        }
    }
    text.push(']');
    text
}

fn char_text(c: char) -> String {
    if c.is_ascii_alphanumeric() || " _".contains(c) || c.is_alphabetic() {
        return c.to_string();
    }
    let mut text = String::new();
    // Nothing is ever written that `String` cannot take.
    let _ = write!(text, "\\x{{{:X}}}", u32::from(c));
    text
}

/// The expression of an automaton's language, for whole texts.
///
/// # Errors
/// It is too long.
pub(super) fn of_automaton(automaton: &Automaton) -> Result<String, String> {
    let smallest = automaton.minimized();
    if smallest.next.len() > MAX_STATES {
        return Err(TOO_COMPLEX.to_owned());
    }
    let mut edges = edges(&smallest);
    let mut states: Vec<usize> = (0..smallest.next.len()).collect();
    while let Some(position) = cheapest(&edges, &states) {
        let state = states.swap_remove(position);
        eliminate(&mut edges, state);
        if edges.values().map(|edge| edge.text.len()).sum::<usize>() > MAX_BYTES {
            return Err(TOO_COMPLEX.to_owned());
        }
    }
    let text = edges.remove(&(START, END)).map_or_else(|| class_text(&ClassUnicode::empty()), |edge| edge.text);
    Ok(format!("^(?:{text})$"))
}

/// A state before the first, and one after those that accept.
const START: usize = usize::MAX - 1;
const END: usize = usize::MAX;

type Edges = BTreeMap<(usize, usize), Written>;

fn edges(automaton: &Automaton) -> Edges {
    let empty = Written { text: String::new(), binding: Binding::One };
    let mut classes: BTreeMap<(usize, usize), ClassUnicode> = BTreeMap::new();
    let live = automaton.live();
    for (from, row) in automaton.next.iter().enumerate() {
        for (block, &to) in automaton.blocks.iter().zip(row) {
            if live[from] && live[to] {
                classes.entry((from, to)).or_insert_with(ClassUnicode::empty).union(block);
            }
        }
    }
    let classes = classes.into_iter();
    let mut edges: Edges =
        classes.map(|(ends, class)| (ends, Written { text: class_text(&class), binding: Binding::One })).collect();
    edges.insert((START, 0), empty.clone());
    for (state, accepts) in automaton.accepts.iter().enumerate() {
        if *accepts {
            edges.insert((state, END), empty.clone());
        }
    }
    edges
}

/// What eliminating a state costs.
#[derive(Clone, Copy, Default)]
struct Cost {
    entering: usize,
    leaving: usize,
    bytes: usize,
}

/// The state whose elimination writes least, by its position.
fn cheapest(edges: &Edges, states: &[usize]) -> Option<usize> {
    let mut costs: BTreeMap<usize, Cost> = BTreeMap::new();
    for ((from, to), edge) in edges {
        if from != to {
            let entered = costs.entry(*to).or_default();
            entered.entering += 1;
            entered.bytes += edge.text.len();
            costs.entry(*from).or_default().leaving += 1;
        }
        costs.entry(*from).or_default().bytes += edge.text.len();
    }
    let cost = |position: &usize| {
        let Cost { entering, leaving, bytes } = costs.get(&states[*position]).copied().unwrap_or_default();
        entering * leaving * (bytes + 1)
    };
    (0..states.len()).min_by_key(cost)
}

/// Takes a state out: who came through it goes past it.
fn eliminate(edges: &mut Edges, state: usize) {
    let again = edges.remove(&(state, state)).map(|edge| edge.repeated("*"));
    let (of_state, others): (Edges, Edges) =
        std::mem::take(edges).into_iter().partition(|((from, to), _)| *from == state || *to == state);
    *edges = others;
    for ((from, to), entering) in &of_state {
        if *to != state {
            continue;
        }
        let entering = again.as_ref().map_or_else(|| entering.clone(), |again| entering.then(again));
        for ((_, to), leaving) in of_state.iter().filter(|((from, _), _)| *from == state) {
            let path = entering.then(leaving);
            let ends = (*from, *to);
            let joined = match edges.remove(&ends) {
                Some(edge) if edge.text.is_empty() => path.repeated("?"),
                Some(edge) if path.text.is_empty() => edge.repeated("?"),
                Some(edge) => edge.either(&path),
                None => path,
            };
            edges.insert(ends, joined);
        }
    }
}
