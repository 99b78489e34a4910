//! Log-probabilities of tokens, as the APIs write them. What is kept are the wire's own: trees of
//! JSON would take 9 KB a token.

use std::borrow::Cow;
use std::collections::HashSet;

use baton_proto::v1::{TokenLogprobs, TopLogprob};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

/// JSON has no infinity; OpenAI writes this for it.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// A token as OpenAI spells it: its text, or its bytes if some of them are no whole character.
fn spelled<'a>(text: &'a str, token_bytes: &[u8], prefix: &str) -> Cow<'a, str> {
    if token_bytes.is_empty() { Cow::Borrowed(text) } else { format!("{prefix}{}", token_bytes.escape_ascii()).into() }
}

/// Leaves out the token that ended an answer, as OpenAI's newer APIs do: it has no text.
pub(crate) fn drop_end(logprobs: &mut Vec<TokenLogprobs>) {
    logprobs.retain(|logprobs| !logprobs.text.is_empty());
}

#[derive(serde::Serialize)]
struct Token<'a> {
    token: Cow<'a, str>,
    logprob: f32,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Tops<'a>>,
}

struct Tops<'a>(&'a [TopLogprob]);

impl Serialize for Tops<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(Token::alternative))
    }
}

impl<'a> Token<'a> {
    fn alternative(top: &'a TopLogprob) -> Self {
        let token = spelled(&top.text, &top.token_bytes, "");
        Self { token, logprob: finite(top.logprob), bytes: top.bytes(), top_logprobs: None }
    }

    fn sampled(own: &'a TokenLogprobs) -> Self {
        let token = spelled(&own.text, &own.token_bytes, "");
        let logprob = finite(own.logprob.unwrap_or_default());
        Self { token, logprob, bytes: own.bytes(), top_logprobs: Some(Tops(&own.top)) }
    }
}

/// Of chat completions and responses: a list of tokens, each with its alternatives.
#[derive(Debug)]
pub(crate) struct Tokens<'a>(pub(crate) &'a [TokenLogprobs]);

impl Serialize for Tokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(Token::sampled))
    }
}

/// What completions put before the bytes of a token.
const BYTES: &str = "bytes:";

/// A token with its log-probability, as completions keep it.
#[derive(Clone)]
pub(crate) struct Scored {
    pub(crate) token: u32,
    /// The first token of a prompt has none.
    pub(crate) logprobs: TokenLogprobs,
    /// Characters before the one in which it begins.
    pub(crate) offset: usize,
}

/// Of completions: lists side by side.
pub(crate) struct Columns<'a> {
    pub(crate) scored: &'a [Scored],
    /// Characters of the text, where tokens of a stop string begin that is cut off.
    pub(crate) end: usize,
}

impl Serialize for Columns<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { scored, end } = self;
        let mut columns = serializer.serialize_map(Some(4))?;
        let tokens = scored.iter().map(|Scored { logprobs, .. }| spelled(&logprobs.text, &logprobs.token_bytes, BYTES));
        columns.serialize_entry("tokens", &List(tokens))?;
        let logprobs = scored.iter().map(|scored| scored.logprobs.logprob.map(finite));
        columns.serialize_entry("token_logprobs", &List(logprobs))?;
        let top = scored.iter().map(|scored| scored.logprobs.logprob.map(|own| Alternatives { scored, own }));
        columns.serialize_entry("top_logprobs", &List(top))?;
        columns.serialize_entry("text_offset", &List(scored.iter().map(|scored| scored.offset.min(*end))))?;
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
        let Scored { token, logprobs: TokenLogprobs { top, text, token_bytes, .. }, .. } = self.scored;
        let is_listed = top.iter().any(|top| top.token_id == *token);
        let own = (!is_listed).then(|| (*token, spelled(text, token_bytes, BYTES), self.own));
        let top = top.iter().map(|top| (top.token_id, spelled(&top.text, &top.token_bytes, BYTES), top.logprob));
        let all = top.chain(own);
        let mut seen = HashSet::new();
        let mut map = serializer.serialize_map(None)?;
        for (token, text, logprob) in all {
            let key = if seen.contains(&text) { Cow::Owned(format!("token_id:{token}")) } else { text.clone() };
            map.serialize_entry(&key, &finite(logprob))?;
            seen.insert(text);
        }
        map.end()
    }
}
