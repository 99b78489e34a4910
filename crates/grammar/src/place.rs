//! Compiles an answer's grammar, and finds the place of a schema that the library refuses.

use std::collections::HashSet;
use std::sync::Arc;

use crate::answer::{AnswerSchema, Loosened};
use crate::budget::{aside, is_spent};
use crate::form::json_rule;
use crate::problem::TOO_COMPLEX;
use crate::schema::{Demand, inner_places};
use crate::{Answer, Effort, GrammarCompiler, GrammarError};

/// Most places that are compiled by themselves to find those that are refused.
const MAX_TRIED: usize = 64;
/// Most bytes of forms and tools that are tried with a small effort.
const MAX_SMALL_BYTES: u64 = 8 << 10;
/// Most places of one answer of which only the types are left.
const MAX_LOOSENED: usize = 8;

/// The grammar of an answer, which compiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedGrammar {
    /// The grammar, for nodes.
    pub text: Arc<str>,
    /// What was left out of the schemas of tools that are not strict.
    pub dropped: Vec<String>,
}

impl Answer<'_> {
    /// The grammar, compiled once to see that it can be; `None` if any answer will do. Takes as
    /// long as the effort says: not for the async threads, unless that is [`Effort::Known`].
    ///
    /// # Errors
    /// The grammar cannot be written or compiled: the error names the place in the schema. Or the
    /// effort is too small.
    pub fn checked_grammar(
        &self,
        compiler: &GrammarCompiler,
        effort: Effort,
    ) -> Result<Option<CheckedGrammar>, GrammarError> {
        if !self.has_grammar() {
            return Ok(None);
        }
        let (digest, bytes) = self.digest();
        if let Some(verdict) = compiler.verdict(&digest) {
            return verdict;
        }
        let is_tried = effort == Effort::Full || effort == Effort::Small && bytes <= MAX_SMALL_BYTES;
        if !is_tried {
            return Err(GrammarError::Costly);
        }
        let verdict = aside(effort.budget(), || self.checked_here(compiler, effort));
        if !matches!(verdict, Err(GrammarError::Costly | GrammarError::NoThread(_))) {
            compiler.remember(digest, &verdict);
        }
        verdict
    }

    /// What is known after an effort: a small one is not the last word on what costs much.
    fn checked_here(&self, compiler: &GrammarCompiler, effort: Effort) -> Result<Option<CheckedGrammar>, GrammarError> {
        let checked = self.checked_within(compiler, effort);
        let is_costly = checked.as_ref().is_err_and(|error| is_spent() || error.to_string().contains(TOO_COMPLEX));
        if effort == Effort::Small && is_costly { Err(GrammarError::Costly) } else { checked }
    }

    fn checked_within(
        &self,
        compiler: &GrammarCompiler,
        effort: Effort,
    ) -> Result<Option<CheckedGrammar>, GrammarError> {
        let mut loosened = Loosened::new();
        let mut search = Search { compiler, effort, left: MAX_TRIED };
        for _ in 0..=MAX_LOOSENED {
            let Some((text, dropped)) = self.written(&loosened)? else { return Ok(None) };
            let Err(error) = compiler.check_here(&text, effort) else {
                return Ok(Some(CheckedGrammar { text: Arc::from(text), dropped }));
            };
            let Some((schema, pointer, what)) = self.refused_place(&mut search, &loosened)? else { return Err(error) };
            let is_new = schema.demand == Demand::Lenient
                && loosened.entry(schema.tool.clone()).or_default().insert(pointer.clone());
            if !is_new || is_spent() {
                return Err(schema.error(pointer, what));
            }
        }
        let problem = "its tools' schemas have too much that is not served: name fewer tools in allowed_tools";
        Err(GrammarError::Invalid(problem.to_owned()))
    }

    /// The innermost schema that is refused by itself, and why.
    fn refused_place(
        &self,
        search: &mut Search<'_>,
        loosened: &Loosened,
    ) -> Result<Option<(AnswerSchema, String, String)>, GrammarError> {
        let none = HashSet::new();
        for schema in self.schemas()? {
            let loosened = loosened.get(&schema.tool).unwrap_or(&none);
            if let Some((pointer, what)) = search.innermost(&schema, loosened) {
                return Ok(Some((schema, pointer, what)));
            }
        }
        Ok(None)
    }
}

struct Search<'c> {
    compiler: &'c GrammarCompiler,
    effort: Effort,
    /// How many more places may be compiled.
    left: usize,
}

impl Search<'_> {
    fn innermost(&mut self, schema: &AnswerSchema, loosened: &HashSet<String>) -> Option<(String, String)> {
        let mut found = (String::new(), self.problem(schema, "", loosened)?);
        let mut seen = HashSet::new();
        loop {
            let inner = inner_places(&schema.schema, &found.0);
            let inner: Vec<_> = inner.into_iter().filter(|pointer| seen.insert(pointer.clone())).collect();
            let deeper = inner.into_iter().find_map(|pointer| {
                let what = self.problem(schema, &pointer, loosened)?;
                Some((pointer, what))
            });
            match deeper {
                Some(deeper) => found = deeper,
                None => return Some(found),
            }
        }
    }

    /// Why a place is refused by itself.
    fn problem(&mut self, schema: &AnswerSchema, pointer: &str, loosened: &HashSet<String>) -> Option<String> {
        if is_spent() {
            return None;
        }
        self.left = self.left.checked_sub(1)?;
        let (rule, _) = json_rule(&schema.schema, pointer, schema.demand, loosened).ok()?;
        // This thread has the stack for it already, and its time is measured.
        self.compiler.compile_here(&format!("start: {rule}\n"), self.effort).err().map(|error| error.to_string())
    }
}
