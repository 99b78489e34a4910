//! Log-probabilities of tokens, as the APIs write them. What is kept are the wire's own: trees of
//! JSON would take 9 KB a token.

use std::collections::HashSet;

use baton_proto::v1::{TokenLogprobs, TopLogprob};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

/// JSON has no infinity; OpenAI writes this for it.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// Half a character has bytes that its text does not show.
fn is_whole(text: &str) -> bool {
    !text.contains(char::REPLACEMENT_CHARACTER)
}

/// Leaves out the token that ended an answer, as OpenAI's newer APIs do: it has no text.
pub(crate) fn drop_end(logprobs: &mut Vec<TokenLogprobs>) {
    logprobs.retain(|logprobs| !logprobs.text.is_empty());
}

#[derive(serde::Serialize)]
struct Token<'a> {
    token: &'a str,
    logprob: f32,
    bytes: Option<&'a [u8]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Tops<'a>>,
}

struct Tops<'a>(&'a [TopLogprob], Half);

impl Serialize for Tops<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(top, half) = self;
        serializer.collect_seq(top.iter().map(|TopLogprob { text, logprob, .. }| token(text, *logprob, None, *half)))
    }
}

/// What stands for the bytes of half a character.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Half {
    Null,
    Empty,
}

fn token<'a>(text: &'a str, logprob: f32, top: Option<&'a [TopLogprob]>, half: Half) -> Token<'a> {
    let bytes = match (is_whole(text), half) {
        (true, _) => Some(text.as_bytes()),
        (false, Half::Null) => None,
        (false, Half::Empty) => Some([].as_slice()),
    };
    Token { token: text, logprob: finite(logprob), bytes, top_logprobs: top.map(|top| Tops(top, half)) }
}

/// Of chat completions and responses: a list of tokens, each with its alternatives.
#[derive(Debug)]
pub(crate) struct Tokens<'a>(pub(crate) &'a [TokenLogprobs], pub(crate) Half);

impl Serialize for Tokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(tokens, half) = self;
        let tokens = tokens.iter().map(|TokenLogprobs { logprob, top, text }| {
            token(text, logprob.unwrap_or_default(), Some(top.as_slice()), *half)
        });
        serializer.collect_seq(tokens)
    }
}

/// A token with its log-probability, as completions keep it.
pub(crate) struct Scored {
    pub(crate) token: u32,
    /// The first token of a prompt has none.
    pub(crate) logprobs: TokenLogprobs,
    /// Characters before it.
    pub(crate) offset: usize,
}

/// Of completions: lists side by side.
pub(crate) struct Columns<'a>(pub(crate) &'a [Scored]);

impl Serialize for Columns<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let scored = self.0;
        let mut columns = serializer.serialize_map(Some(4))?;
        let tokens = scored.iter().map(|scored| scored.logprobs.text.as_str());
        columns.serialize_entry("tokens", &List(tokens))?;
        let logprobs = scored.iter().map(|scored| scored.logprobs.logprob.map(finite));
        columns.serialize_entry("token_logprobs", &List(logprobs))?;
        let top = scored.iter().map(|scored| scored.logprobs.logprob.map(|own| Alternatives { scored, own }));
        columns.serialize_entry("top_logprobs", &List(top))?;
        columns.serialize_entry("text_offset", &List(scored.iter().map(|scored| scored.offset)))?;
        columns.end()
    }
}

/// A list that is never put into memory.
struct List<I>(I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for List<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(None)?;
        for item in self.0.clone() {
            list.serialize_element(&item)?;
        }
        list.end()
    }
}

/// An object of the alternatives at one position, and of the token that was taken. The best of
/// those that have one text has the text for its key, the others their ids as vLLM spells them.
struct Alternatives<'a> {
    scored: &'a Scored,
    own: f32,
}

impl Serialize for Alternatives<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Scored { token, logprobs: TokenLogprobs { top, text, .. }, .. } = self.scored;
        let own = (!top.iter().any(|top| top.token_id == *token)).then_some((*token, text.as_str(), self.own));
        let all = top.iter().map(|top| (top.token_id, top.text.as_str(), top.logprob)).chain(own);
        let mut seen = HashSet::new();
        let mut map = serializer.serialize_map(None)?;
        for (token, text, logprob) in all {
            if seen.insert(text) {
                map.serialize_entry(text, &finite(logprob))?;
            } else {
                map.serialize_entry(&format!("token_id:{token}"), &finite(logprob))?;
            }
        }
        map.end()
    }
}
