//! Patterns of schemas, in words that the library has: it knows no look-aheads.

mod automaton;
mod elimination;
mod syntax;

use std::panic::AssertUnwindSafe;

use llguidance::derivre::raw::DerivCache;
use llguidance::derivre::{ExprRef, RegexAst, RegexBuilder};
use llguidance::panic_utils::catch_unwind;
use llguidance::regex_to_lark;

use crate::budget::is_spent;
use crate::problem::problem;
use automaton::Automaton;
use syntax::{Branches, Part};

/// Most states of all automata that are made for a schema.
const MAX_STATES: usize = 4_000;
/// Most work for the patterns of a schema, as the library counts it.
const MAX_COST: u64 = 400_000;
/// Longest pattern that is written for one.
const MAX_BYTES: usize = 32 << 10;
/// Cost of an expression on which the library panics, which takes a stack trace.
const PANIC_COST: u64 = MAX_COST / 16;
const TOO_COMPLEX: &str = "the regex is too complex";

/// Work that the patterns of a schema have cost.
#[derive(Default)]
pub(super) struct Work {
    expressions: RegexBuilder,
    /// Cost of expressions that were thrown away.
    lost: u64,
    states: usize,
}

impl Work {
    /// The automaton of parts, which counts.
    fn automaton(&mut self, parts: &[Part], is_start: bool) -> Result<Automaton, String> {
        if self.states > MAX_STATES || is_spent() {
            return Err(TOO_COMPLEX.to_owned());
        }
        let automaton = Automaton::new(parts, is_start);
        // One that is too large has cost most.
        self.states += automaton.as_ref().map_or(automaton::MAX_STATES, |automaton| automaton.states);
        automaton
    }

    /// Expression of the library that finds a pattern. The library panics on some alternatives that
    /// find the same, such as `(?:-[\0-\u{10ffff}]*)$|-`.
    fn expression(&mut self, pattern: &str) -> Result<ExprRef, String> {
        self.check()?;
        let search = RegexAst::SearchRegex(regex_to_lark(pattern, "dw"));
        let made = self.caught(|work| work.expressions.mk(&search).map_err(|error| library_problem(&error)))?;
        self.check().map(|()| made)
    }

    /// Calls the library. What it leaves half done in a panic is thrown away: nothing must be built
    /// upon it.
    fn caught<T>(&mut self, call: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, String> {
        catch_unwind(AssertUnwindSafe(|| Ok(call(self)))).unwrap_or_else(|_| {
            let dropped = std::mem::take(&mut self.expressions);
            self.lost += PANIC_COST + dropped.exprset().cost();
            Err("alternatives that find the same are not supported".to_owned())
        })
    }

    fn check(&self) -> Result<(), String> {
        if self.lost + self.expressions.exprset().cost() > MAX_COST { Err(TOO_COMPLEX.to_owned()) } else { Ok(()) }
    }
}

/// Names, of these, in which a pattern of the library is found.
///
/// # Errors
/// The search costs too much.
pub(super) fn found<'n>(
    pattern: &str,
    names: impl Iterator<Item = &'n str>,
    work: &mut Work,
) -> Result<Vec<&'n str>, String> {
    let start = work.expression(pattern)?;
    work.caught(|work| {
        let mut expressions = std::mem::take(&mut work.expressions).into_exprset();
        let mut derivatives = DerivCache::new();
        let mut found = Vec::new();
        for name in names {
            let mut state = start;
            for byte in name.bytes() {
                state = derivatives.derivative(&mut expressions, state, byte);
                if work.lost + expressions.cost() > MAX_COST {
                    work.lost += expressions.cost();
                    return Err(TOO_COMPLEX.to_owned());
                }
            }
            if expressions.is_nullable(state) {
                found.push(name);
            }
        }
        work.lost += expressions.cost();
        Ok(found)
    })
}

/// Patterns for the library that are all found in the texts in which this one is found.
///
/// # Errors
/// The pattern is no regular expression, or has what is not served.
pub(super) fn written(pattern: &str, work: &mut Work) -> Result<Vec<String>, String> {
    if !syntax::looks_around(pattern) {
        work.expression(pattern)?;
        return Ok(vec![pattern.to_owned()]);
    }
    let branches = syntax::parse(pattern)?;
    conjuncts(branches).iter().map(|branches| one_written(branches, work)).collect()
}

fn one_written(branches: &Branches, work: &mut Work) -> Result<String, String> {
    if let Some(text) = syntax::plain_text(branches) {
        work.expression(&text)?;
        return Ok(text);
    }
    let text = ways(branches, &[], false, work)?;
    work.expression(&text)?;
    Ok(text)
}

/// Alternatives, each with what comes after them. `is_start`: whether they are at the start of the
/// text.
fn ways(branches: &Branches, rest: &[Part], is_start: bool, work: &mut Work) -> Result<String, String> {
    let ways = branches.iter().map(|parts| way(&[parts, rest].concat(), is_start, work));
    let text = ways.collect::<Result<Vec<_>, _>>()?.join("|");
    if text.len() > MAX_BYTES { Err(TOO_COMPLEX.to_owned()) } else { Ok(text) }
}

/// Parts up to the end of the expression. What comes after a look-ahead becomes an automaton, and
/// what comes before it stays text.
fn way(parts: &[Part], is_start: bool, work: &mut Work) -> Result<String, String> {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let is_start = if text.is_empty() { is_start } else { text == "^" };
        match part {
            Part::Text(more) => text.push_str(more),
            Part::Group(branches) => {
                let ways = ways(branches, &parts[index + 1..], is_start, work)?;
                return Ok(format!("{text}(?:{ways})"));
            }
            Part::Ahead { is, branches } => {
                let rest = &parts[index + 1..];
                let opposite = Part::Ahead { is: !is, branches: branches.clone() };
                let says_nothing = work.automaton(&[&[opposite], rest].concat(), is_start)?.is_empty();
                if !says_nothing {
                    let expression = work.automaton(&parts[index..], is_start)?.expression()?;
                    return Ok(format!("{text}(?:{expression})$"));
                }
            }
        }
    }
    Ok(text)
}

/// What the library says of an expression, in words about it.
fn library_problem(error: &impl ToString) -> String {
    problem("", &error.to_string())
}

/// An anchored expression as several of which all have to be found: look-aheads at its start are
/// such.
fn conjuncts(branches: Branches) -> Vec<Branches> {
    let [parts] = branches.as_slice() else { return vec![branches] };
    let [start @ Part::Text(text), rest @ ..] = parts.as_slice() else { return vec![branches] };
    if text != "^" {
        return vec![branches];
    }
    let aheads = rest.iter().take_while(|part| matches!(part, Part::Ahead { .. })).count();
    let (aheads, rest) = rest.split_at(aheads);
    let mut all: Vec<_> = aheads.iter().map(|ahead| vec![at_start(start, ahead)]).collect();
    all.push(vec![[std::slice::from_ref(start), rest].concat()]);
    all
}

/// A look-ahead at the start of a text.
fn at_start(start: &Part, ahead: &Part) -> Vec<Part> {
    let found = match ahead {
        Part::Ahead { is: true, branches } => Part::Group(branches.clone()),
        other => other.clone(),
    };
    vec![start.clone(), found]
}

#[cfg(test)]
mod tests;
