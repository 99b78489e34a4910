//! Patterns of schemas, in words that the library has: it knows neither look-aheads nor `\b`.

mod expression;
mod language;
mod syntax;

use language::Automaton;
pub(super) use syntax::{Node, parse};

/// The class of no character.
pub(super) fn no_char() -> regex_syntax::hir::ClassUnicode {
    syntax::class(&[])
}

/// An expression as a pattern for the library.
pub(super) fn written(node: &Node) -> Result<String, String> {
    if is_plain(node) { Ok(expression::of_node(node)) } else { expression::of_automaton(&Automaton::new(node)?) }
}

/// An expression as expressions that have to be found all: look-aheads at its start are such.
pub(super) fn conjuncts(node: Node) -> Vec<Node> {
    let Node::Concat(mut nodes) = node else { return vec![node] };
    let is_ahead = |node: &Node| matches!(node, Node::Ahead { .. });
    let is_anchored = nodes.first() == Some(&Node::Start);
    let aheads = nodes.iter().skip(1).take_while(|node| is_ahead(node)).count();
    if !is_anchored || aheads == 0 {
        return vec![Node::Concat(nodes)];
    }
    let mut all = Vec::new();
    for ahead in nodes.drain(1..=aheads) {
        match ahead {
            Node::Ahead { is: true, node } => {
                // One that begins with the start does so already.
                let parts = if let Node::Concat(parts) = *node { parts } else { vec![*node] };
                all.push(Node::Concat([vec![Node::Start], parts].concat()));
            }
            ahead => all.push(Node::Concat(vec![Node::Start, ahead])),
        }
    }
    all.push(Node::Concat(nodes));
    all
}

/// The whole texts in which all of these are found, and none of the others. `None`: there is no
/// such text.
pub(super) fn both(found: &[&Node], others: &[&Node]) -> Result<Option<String>, String> {
    let search = |node: &Node| Node::Concat(vec![Node::any().times(0, None), node.clone()]);
    let ahead = |is, node: &Node| Node::Ahead { is, node: Box::new(search(node)) };
    let mut parts = vec![Node::Start];
    parts.extend(found.iter().map(|node| ahead(true, node)));
    parts.extend(others.iter().map(|node| ahead(false, node)));
    let automaton = Automaton::new(&Node::Concat(parts))?;
    if automaton.is_empty() { Ok(None) } else { expression::of_automaton(&automaton).map(Some) }
}

/// Whether an expression is found in a text.
pub(super) fn finds(node: &Node, text: &str) -> Result<bool, String> {
    Ok(Automaton::new(node)?.accepts(text))
}

/// Whether the library takes an expression: it has ends of the text at the ends of the alternatives
/// alone.
pub(super) fn is_plain(node: &Node) -> bool {
    match node {
        Node::Either(nodes) => nodes.iter().all(is_plain_alternative),
        node => is_plain_alternative(node),
    }
}

fn is_plain_alternative(node: &Node) -> bool {
    let Node::Concat(nodes) = node else { return !node.looks() };
    let mut nodes = nodes.as_slice();
    while let [Node::Start, rest @ ..] = nodes {
        nodes = rest;
    }
    let nodes = if let [rest @ .., Node::End] = nodes { rest } else { nodes };
    !nodes.iter().any(Node::looks)
}

#[cfg(test)]
mod tests;
