//! What a model thinks before it answers.

use super::mark::MarkFinder;
use super::{Events, MAX_HELD_BYTES};

/// The marks around what a model thinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningMarks {
    /// `<think>` and `</think>`: DeepSeek R1, QwQ, Qwen 3, SmolLM3.
    Think,
    /// `[THINK]` and `[/THINK]`: Magistral.
    BracketThink,
}

impl ReasoningMarks {
    /// Before it.
    pub fn open(self) -> &'static str {
        match self {
            Self::Think => "<think>",
            Self::BracketThink => "[THINK]",
        }
    }

    /// After it.
    pub fn close(self) -> &'static str {
        match self {
            Self::Think => "</think>",
            Self::BracketThink => "[/THINK]",
        }
    }
}

/// Takes what a model thinks out of its answer. That is at the beginning only: later, a mark is
/// text. White space next to the marks is left out, but for what comes before the first.
#[derive(Debug, Clone)]
pub(crate) struct Reasoning {
    stage: Stage,
    close: MarkFinder,
}

#[derive(Debug, Clone)]
enum Stage {
    /// White space and the opening mark may come.
    Begin {
        open: &'static str,
        matched: usize,
        held: String,
        starts_in_reasoning: bool,
    },
    /// After the opening mark.
    Opened,
    Inside,
    /// After the closing mark.
    Closed,
    Answer,
}

impl Reasoning {
    /// If the prompt ends with the opening mark, the model may still write one.
    pub(crate) fn new(marks: ReasoningMarks, starts_in_reasoning: bool) -> Self {
        let stage = Stage::Begin { open: marks.open(), matched: 0, held: String::new(), starts_in_reasoning };
        Self { stage, close: MarkFinder::new(marks.close()) }
    }

    /// Takes text in; returns what belongs to the answer.
    pub(crate) fn push(&mut self, text: &str, events: &mut Events) -> String {
        let mut answer = String::new();
        for (at, character) in text.char_indices() {
            if matches!(self.stage, Stage::Answer) {
                answer.push_str(&text[at..]);
                break;
            }
            self.step(character, events, &mut answer);
        }
        answer
    }

    /// The text ended; returns what belongs to the answer.
    pub(crate) fn finish(&mut self, events: &mut Events) -> String {
        let mut answer = String::new();
        match &mut self.stage {
            Stage::Begin { held, starts_in_reasoning: false, .. } => answer = std::mem::take(held),
            Stage::Begin { held, .. } => events.reasoning(held.trim_ascii_start()),
            Stage::Inside => events.reasoning(&self.close.take()),
            Stage::Opened | Stage::Closed | Stage::Answer => {}
        }
        self.stage = Stage::Answer;
        answer
    }

    fn step(&mut self, character: char, events: &mut Events, answer: &mut String) {
        let is_space = character.is_ascii_whitespace();
        match &mut self.stage {
            Stage::Begin { open, matched, held, starts_in_reasoning } => {
                held.push(character);
                if open[*matched..].starts_with(character) {
                    *matched += 1;
                    if *matched == open.len() {
                        self.stage = Stage::Opened;
                    }
                } else if !is_space || *matched > 0 || held.len() > MAX_HELD_BYTES {
                    let held = std::mem::take(held);
                    if *starts_in_reasoning {
                        self.stage = Stage::Opened;
                        held.chars().for_each(|character| self.step(character, events, answer));
                    } else {
                        self.stage = Stage::Answer;
                        answer.push_str(&held);
                    }
                }
            }
            Stage::Opened | Stage::Closed if is_space => {}
            Stage::Opened => {
                self.stage = Stage::Inside;
                self.step(character, events, answer);
            }
            Stage::Inside => {
                if self.close.push(character, |text| events.reasoning(text)) {
                    self.close.take();
                    self.stage = Stage::Closed;
                }
            }
            Stage::Closed | Stage::Answer => {
                self.stage = Stage::Answer;
                answer.push(character);
            }
        }
    }
}
