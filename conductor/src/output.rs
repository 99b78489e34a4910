//! One answer's text: detokenizes the tokens as they come, ends at a stop string, and tells
//! reasoning, text and tool calls apart.

use baton_proto::v1::ToolCallDelta;
use baton_runtime::random_u64;
use baton_scheduler::OutputToken;
use baton_text::{Detokenizer, OutputEvent, OutputParser, StopOutcome, StopStrings, Tokenizer};
use baton_types::{FinishReason, TokenId};

use crate::error::GenerateError;
use crate::prompt::CheckedRequest;

/// What the client gets next.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Piece {
    /// The tokens, up to the one that completes a stop string.
    pub tokens: Vec<OutputToken>,
    /// What is final now; it may lag behind the tokens. Never empty.
    pub parts: Vec<Part>,
    /// Whether a stop string ended the text.
    pub stopped: bool,
}

/// Some reasoning, then some text, then some calls.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Part {
    /// What the model thinks.
    pub reasoning: String,
    /// What it says.
    pub text: String,
    /// What it asks tools for.
    pub tool_calls: Vec<ToolCallDelta>,
}

/// See the module's text.
#[derive(Clone)]
pub struct OutputText {
    detokenizer: Detokenizer,
    stops: StopStrings,
    stop_strings: Vec<String>,
    /// Stop strings are not looked for in the text of so many tokens.
    min_tokens: u32,
    tokens: u32,
    /// The stop string that ended it.
    stopped_at: Option<usize>,
    parser: Option<OutputParser>,
    /// Calls so far.
    calls: u32,
}

impl OutputText {
    /// Of no token yet.
    pub fn new(tokenizer: &Tokenizer, request: &CheckedRequest) -> Result<Self, GenerateError> {
        let stops = StopStrings::new(&request.stop);
        let detokenizer = match &request.parser {
            Some((_, shown)) => tokenizer.detokenizer_showing(shown),
            None => tokenizer.detokenizer(),
        };
        Ok(Self {
            detokenizer,
            stops: stops.map_err(|error| GenerateError::invalid("stop", error.to_string()))?,
            stop_strings: request.stop.clone(),
            min_tokens: request.sampling.min_tokens,
            tokens: 0,
            stopped_at: None,
            parser: request.parser.as_ref().map(|(parser, _)| parser.clone()),
            calls: 0,
        })
    }

    /// Whether a stop string ended it.
    pub fn is_stopped(&self) -> bool {
        self.stopped_at.is_some()
    }

    /// The stop string that ended it.
    pub fn stop_sequence(&self) -> Option<&str> {
        self.stop_strings.get(self.stopped_at?).map(String::as_str)
    }

    /// Whether it asked for a tool.
    pub fn has_calls(&self) -> bool {
        self.calls > 0
    }

    /// Whether a token's text is part of the answer's.
    pub fn shows(&self, token: TokenId) -> bool {
        self.detokenizer.shows(token)
    }

    /// Takes in the next tokens.
    pub fn push(&mut self, tokens: Vec<OutputToken>) -> Piece {
        let mut piece = Piece::default();
        let mut text = String::new();
        let mut is_over = false;
        for token in tokens {
            if self.is_stopped() {
                break;
            }
            self.tokens += 1;
            // The token that ends the output is not part of its text.
            if token.finish != Some(FinishReason::Stop) {
                let more = self.detokenizer.push(token.token);
                self.search(&more, &mut text);
            }
            if token.finish.is_some() {
                let rest = self.detokenizer.finish();
                self.search(&rest, &mut text);
                text.push_str(&self.stops.finish());
                is_over = true;
            }
            piece.tokens.push(token);
        }
        piece.stopped = self.is_stopped();
        piece.parts = self.parts(text, is_over || piece.stopped);
        piece
    }

    fn search(&mut self, text: &str, out: &mut String) {
        if self.is_stopped() || text.is_empty() {
            return;
        }
        if self.tokens < self.min_tokens {
            return out.push_str(text);
        }
        match self.stops.push(text) {
            StopOutcome::Emit(text) => out.push_str(&text),
            StopOutcome::Stopped { text_before, matched } => {
                out.push_str(&text_before);
                self.stopped_at = Some(matched);
            }
        }
    }

    fn parts(&mut self, text: String, is_over: bool) -> Vec<Part> {
        let Some(parser) = &mut self.parser else { return vec![Part { text, ..Part::default() }] };
        let mut events = parser.push(&text);
        if is_over {
            events.extend(parser.finish());
        }
        let mut parts = vec![Part::default()];
        for event in events {
            self.add(event, &mut parts);
        }
        parts
    }

    /// What comes in another order begins a part of its own.
    fn add(&mut self, event: OutputEvent, parts: &mut Vec<Part>) {
        let last = parts.last_mut().filter(|part| match &event {
            OutputEvent::Reasoning(_) => part.text.is_empty() && part.tool_calls.is_empty(),
            OutputEvent::Text(_) => part.tool_calls.is_empty(),
            OutputEvent::CallBegins { .. } | OutputEvent::CallArguments(_) => true,
        });
        let part = match last {
            Some(part) => part,
            None => {
                parts.push(Part::default());
                let last = parts.len() - 1;
                &mut parts[last]
            }
        };
        match event {
            OutputEvent::Reasoning(more) => part.reasoning.push_str(&more),
            OutputEvent::Text(more) => part.text.push_str(&more),
            OutputEvent::CallBegins { name } => {
                part.tool_calls.push(ToolCallDelta { index: self.calls, id: call_id(), name, ..Default::default() });
                self.calls += 1;
            }
            OutputEvent::CallArguments(arguments) => {
                let index = self.calls.saturating_sub(1);
                match part.tool_calls.last_mut().filter(|call| call.index == index) {
                    Some(call) => call.arguments.push_str(&arguments),
                    None => part.tool_calls.push(ToolCallDelta { index, arguments, ..Default::default() }),
                }
            }
        }
    }
}

/// Nine letters and digits: templates of Mistral's models take no other ids.
fn call_id() -> String {
    const CHARACTERS: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let mut random = random_u64();
    let mut character = || {
        let character = CHARACTERS[(random % CHARACTERS.len() as u64) as usize];
        random /= CHARACTERS.len() as u64;
        char::from(character)
    };
    (0..9).map(|_| character()).collect()
}

#[cfg(test)]
mod tests {
    use baton_text::OutputFormat;
    use baton_types::{SamplingParams, Slo};

    use super::*;

    fn request(stops: &[&str]) -> CheckedRequest {
        CheckedRequest {
            capped: None,
            tokens: vec![1],
            sampling: SamplingParams::default(),
            stop: stops.iter().map(|stop| (*stop).to_owned()).collect(),
            parser: None,
            slo: Slo::default(),
            timeout: None,
            priority: 0,
        }
    }

    fn output(stops: &[&str]) -> OutputText {
        OutputText::new(&Tokenizer::bytes(), &request(stops)).unwrap()
    }

    fn token(byte: u8, finish: Option<FinishReason>) -> OutputToken {
        OutputToken { token: u32::from(byte), logprobs: None, finish }
    }

    fn text(piece: &Piece) -> String {
        piece.parts.iter().map(|part| part.text.as_str()).collect()
    }

    #[test]
    fn stop_string_over_several_tokens_ends_output_before_it() {
        let mut out = output(&["x", "cd"]);
        let pieces: Vec<_> = b"abc".iter().map(|&b| out.push(vec![token(b, None)])).collect();
        let said: String = pieces.iter().map(text).collect();
        assert_eq!((said.as_str(), out.is_stopped()), ("ab", false));
        let last = out.push(vec![token(b'd', None), token(b'e', None)]);
        assert_eq!((last.tokens.len(), text(&last).as_str(), last.stopped), (1, "", true), "what follows is dropped");
        assert_eq!(out.push(vec![token(b'f', None)]).tokens, []);
        assert_eq!(out.stop_sequence(), Some("cd"));
    }

    #[test]
    fn stop_string_before_min_tokens_is_ignored() {
        let mut out = OutputText { min_tokens: 3, ..output(&["b"]) };
        let pieces: Vec<_> = b"abab".iter().map(|&b| out.push(vec![token(b, None)])).collect();
        let said: String = pieces.iter().map(text).collect();
        assert_eq!((said.as_str(), out.is_stopped()), ("aba", true));
    }

    #[test]
    fn withheld_beginning_of_stop_string_is_emitted_at_the_end() {
        let mut out = output(&["zz"]);
        out.push(vec![token(b'a', None)]);
        let held = out.push(vec![token(b'z', None)]);
        assert_eq!((text(&held).as_str(), held.tokens.len()), ("", 1));
        let last = out.push(vec![token(b'!', Some(FinishReason::Length))]);
        assert_eq!((text(&last).as_str(), last.stopped), ("z!", false));
    }

    #[test]
    fn special_token_is_no_part_of_the_text() {
        let out = output(&[]);
        let special = Tokenizer::bytes().special_token("<|im_start|>").unwrap();
        assert_eq!((out.shows(special), out.shows(u32::from(b'a'))), (false, true));
    }

    #[test]
    fn stop_token_adds_no_text() {
        let mut out = output(&[]);
        let last = out.push(vec![token(b'a', None), token(b'b', Some(FinishReason::Stop))]);
        assert_eq!((text(&last).as_str(), last.tokens.len(), last.stopped), ("a", 2, false));
    }

    #[test]
    fn output_is_parsed_into_reasoning_text_and_tool_calls() {
        let format = OutputFormat::detect("<think></think>{{ tools }}<tool_call>", &Tokenizer::bytes());
        let parser = Some((format.parser(true, vec!["f".into()]), format.shown_tokens().to_vec()));
        let request = CheckedRequest { parser, ..request(&["STOP"]) };
        let said = "why</think>Say: <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>then<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>STOP";
        let bytes = |said: &str| said.bytes().map(|byte| token(byte, None)).collect::<Vec<_>>();
        let mut whole = OutputText::new(&Tokenizer::bytes(), &request).unwrap();
        let piece = whole.push(bytes(said));
        let shapes: Vec<_> =
            piece.parts.iter().map(|part| (part.reasoning.as_str(), part.text.trim(), part.tool_calls.len())).collect();
        assert_eq!(shapes, [("why", "Say:", 1), ("", "then", 1)]);
        assert!(piece.stopped && whole.has_calls());

        let mut out = OutputText::new(&Tokenizer::bytes(), &request).unwrap();
        let calls: Vec<_> = bytes(said)
            .into_iter()
            .flat_map(|token| out.push(vec![token]).parts)
            .flat_map(|part| part.tool_calls)
            .collect();
        let named: Vec<_> = calls.iter().filter(|call| !call.name.is_empty()).collect();
        assert_eq!(named.iter().map(|call| (call.index, call.id.len())).collect::<Vec<_>>(), [(0, 9), (1, 9)]);
        let arguments: String =
            calls.iter().filter(|call| call.index == 0).map(|call| call.arguments.as_str()).collect();
        assert_eq!(arguments, "{\"a\": 1}");
    }
}
