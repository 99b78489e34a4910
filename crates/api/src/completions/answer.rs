//! Answers to completions.

use std::sync::Arc;

use baton_proto::token_text;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::{self, TokenLogprobs};
use serde::Serialize;

use super::Prompt;
use super::offset::{Offset, align};
use crate::Decode;
use crate::answer::{Answer, Chunk, Head};
use crate::common::{Object, StreamOptions, TotalUsage};
use crate::error::{Failure, to_json};
use crate::logprobs::{Columns, Scored};

/// What is asked for of each prompt.
#[derive(Debug, Clone, Copy)]
pub(super) struct AnswerOptions {
    /// Answers that are given.
    pub(super) n: u32,
    /// Answers that are generated.
    pub(super) best_of: u32,
    /// Nothing of the answer is told.
    pub(super) is_scoring: bool,
    /// Whether log-probabilities are given.
    pub(super) logprobs: bool,
}

/// Puts a completion together.
pub(super) struct CompletionAnswer {
    head: Head,
    options: AnswerOptions,
    prompts: Vec<Echo>,
    /// Of all prompts: `best_of` for each.
    choices: Vec<Choice>,
    usage: TotalUsage,
    /// Of what was told already.
    so_far: TotalUsage,
    decode: Arc<Decode>,
}

/// A prompt that an answer begins with.
struct Echo {
    /// Until it was told.
    prompt: Option<Prompt>,
    tokens: Vec<u32>,
}

/// One answer to one prompt.
#[derive(Default)]
struct Choice {
    text: String,
    logprobs: Vec<Scored>,
    /// Where what comes next begins.
    offset: Offset,
    /// Of the tokens generated, in sum.
    logprob: f64,
    generated: u32,
    finish_reason: Option<String>,
}

/// Some more of an answer.
#[derive(Default)]
struct Piece {
    text: String,
    logprobs: Vec<Scored>,
}

impl Piece {
    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.logprobs.is_empty()
    }
}

impl Choice {
    fn delta(&mut self, delta: v1::Delta) -> Piece {
        let scored = delta.token_ids.iter().zip(delta.logprobs).map(|(&token, logprobs)| {
            self.logprob += f64::from(logprobs.logprob.unwrap_or_default());
            self.generated += 1;
            let offset = self.offset.push(logprobs.bytes());
            Scored { token, logprobs, offset }
        });
        let logprobs = scored.collect();
        Piece { text: delta.text, logprobs }
    }

    /// How likely its tokens were, in the mean.
    fn score(&self) -> f64 {
        self.logprob / f64::from(self.generated.max(1))
    }
}

#[derive(Serialize)]
struct ChoiceJson<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Columns<'a>>,
    finish_reason: Option<&'a str>,
}

impl CompletionAnswer {
    pub(super) fn new(head: Head, prompts: Vec<Option<Prompt>>, options: AnswerOptions, decode: Arc<Decode>) -> Self {
        let choices = prompts.len() * options.best_of as usize;
        Self {
            head,
            options,
            prompts: prompts.into_iter().map(|prompt| Echo { prompt, tokens: Vec::new() }).collect(),
            choices: std::iter::repeat_with(Choice::default).take(choices).collect(),
            usage: TotalUsage::default(),
            so_far: TotalUsage::default(),
            decode,
        }
    }

    fn object<'a, C>(&'a self, choices: Vec<C>) -> Object<'a, C> {
        let Head { id, model, created, .. } = &self.head;
        Object { id, object: "text_completion", created: *created, model, choices, usage: None }
    }

    /// Of request number `index`.
    fn choices_of(&self, index: usize) -> std::ops::Range<usize> {
        let best_of = self.options.best_of as usize;
        index * best_of..(index + 1) * best_of
    }

    /// The text that answers to prompt number `index` begin with, if it is told now.
    fn echoed(&mut self, index: usize) -> Option<Vec<u8>> {
        match self.prompts[index].prompt.take()? {
            Prompt::Text(text) => Some(text.into_bytes()),
            Prompt::Tokens(tokens) => Some((self.decode)(&tokens)),
        }
    }

    /// The prompt, with the log-probabilities of its tokens.
    fn scored_prompt(&mut self, index: usize, positions: Vec<TokenLogprobs>) -> Vec<Chunk> {
        let Some(echo) = self.echoed(index) else { return Vec::new() };
        let tokens = std::mem::take(&mut self.prompts[index].tokens);
        let (text, token_bytes) = token_text(&tokens.first().map(|&token| (self.decode)(&[token])).unwrap_or_default());
        let first = TokenLogprobs { text, token_bytes, ..Default::default() };
        // What follows the last position is the first token of the answer.
        let all: Vec<_> = tokens.into_iter().zip([first].into_iter().chain(positions)).collect();
        let offsets = align(&echo, all.iter().map(|(_, logprobs)| logprobs.bytes()));
        let scored = all.into_iter().zip(offsets).map(|((token, logprobs), offset)| Scored { token, logprobs, offset });
        let scored: Vec<_> = scored.collect();
        let mut told = Vec::new();
        for choice in self.choices_of(index) {
            self.choices[choice].offset = Offset::after(&echo);
            let text = String::from_utf8_lossy(&echo).into_owned();
            told.extend(self.put(choice, Piece { text, logprobs: scored.clone() }));
        }
        told
    }

    /// Sends some more of answer number `index`, or keeps it.
    fn put(&mut self, index: usize, piece: Piece) -> Option<Chunk> {
        if !self.head.streams {
            let choice = &mut self.choices[index];
            choice.text.push_str(&piece.text);
            // Those that only tell which answer is best are in the sum.
            if self.options.logprobs {
                choice.logprobs.extend(piece.logprobs);
            }
            return None;
        }
        let choice = ChoiceJson {
            index,
            text: &piece.text,
            // A stream does not know where a stop string will end it.
            logprobs: self.options.logprobs.then_some(Columns { scored: &piece.logprobs, end: usize::MAX }),
            finish_reason: self.choices[index].finish_reason.as_deref(),
        };
        let is_last = choice.finish_reason.is_some() && self.is_whole();
        let StreamOptions { include_usage, continuous_usage_stats, .. } = self.head.options;
        let usage = match include_usage {
            Some(true) => Some(continuous_usage_stats.then(|| self.so_far.json(None))),
            Some(false) => None,
            // Clients that say nothing of it find it in the last chunk.
            None => is_last.then(|| Some(self.usage.json(None))),
        };
        Some(Chunk { event: None, data: to_json(&Object { usage, ..self.object(vec![choice]) }) })
    }

    /// The best answers to prompt number `index`, best first.
    fn best(&self, index: usize) -> Vec<&Choice> {
        let mut choices: Vec<_> = self.choices[self.choices_of(index)].iter().collect();
        if self.options.best_of > self.options.n {
            choices.sort_by(|a, b| b.score().total_cmp(&a.score()));
            choices.truncate(self.options.n as usize);
        }
        choices
    }
}

impl Answer for CompletionAnswer {
    fn take(&mut self, index: usize, response: v1::GenerateResponse) -> Vec<Chunk> {
        let v1::GenerateResponse { event, completion } = response;
        let choice = self.choices_of(index).start + completion as usize;
        if !self.choices_of(index).contains(&choice) {
            return Vec::new();
        }
        match event {
            Some(Event::Accepted(accepted)) => {
                if self.head.id.is_empty() {
                    self.head.id = format!("cmpl-{}", accepted.request_id);
                    self.head.model = accepted.model;
                }
                self.so_far.prompt(&accepted.prompt_token_ids);
                self.prompts[index].tokens = accepted.prompt_token_ids;
                // With log-probabilities, the prompt comes when they do.
                if self.options.logprobs {
                    return Vec::new();
                }
                let Some(text) = self.echoed(index) else { return Vec::new() };
                let text = String::from_utf8_lossy(&text);
                let piece = || Piece { text: text.clone().into_owned(), ..Default::default() };
                self.choices_of(index).filter_map(|choice| self.put(choice, piece())).collect()
            }
            Some(Event::PromptLogprobs(v1::PromptLogprobs { positions })) => self.scored_prompt(index, positions),
            Some(Event::Delta(_)) if self.options.is_scoring => Vec::new(),
            Some(Event::Delta(delta)) => {
                self.so_far.output(&delta.token_ids);
                let piece = self.choices[choice].delta(delta);
                // Text may be held back. If usage is told with every chunk, it goes on all the
                // same.
                if piece.is_empty() && !self.head.options.continuous_usage_stats {
                    return Vec::new();
                }
                self.put(choice, piece).into_iter().collect()
            }
            Some(Event::Finished(finished)) => {
                let usage = finished.usage.unwrap_or_default();
                let is_scoring = self.options.is_scoring;
                let completion_tokens = if is_scoring { 0 } else { usage.completion_tokens };
                self.usage.add(completion, v1::Usage { completion_tokens, ..usage });
                let reason = if is_scoring { "length".to_owned() } else { finished.finish_reason };
                self.choices[choice].finish_reason = Some(reason);
                self.put(choice, Piece::default()).into_iter().collect()
            }
            None => Vec::new(),
        }
    }

    fn last(&mut self) -> Vec<Chunk> {
        let usage = (self.head.options.include_usage == Some(true)).then(|| {
            let usage = Some(Some(self.usage.json(None)));
            Chunk { event: None, data: to_json(&Object { usage, ..self.object::<ChoiceJson<'_>>(Vec::new()) }) }
        });
        usage.into_iter().chain([Chunk::done()]).collect()
    }

    fn failed(&mut self, failure: &Failure) -> Chunk {
        Head::failed(failure)
    }

    fn is_whole(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish_reason.is_some())
    }

    fn body(&mut self) -> String {
        let chosen = (0..self.prompts.len()).flat_map(|prompt| self.best(prompt)).enumerate();
        let choices = chosen.map(|(index, choice)| ChoiceJson {
            index,
            text: &choice.text,
            logprobs: self
                .options
                .logprobs
                .then(|| Columns { scored: &choice.logprobs, end: choice.text.chars().count() }),
            finish_reason: choice.finish_reason.as_deref(),
        });
        let usage = Some(Some(self.usage.json(None)));
        to_json(&Object { usage, ..self.object(choices.collect()) })
    }
}
