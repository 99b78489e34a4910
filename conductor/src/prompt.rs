//! From a client's request to tokens and checked parameters.

use baton_api::{MAX_NODES, TooLong, nodes};
use baton_grammar::{Effort, GrammarCompiler, Thoughts};
use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt as WirePrompt;
use baton_runtime::Clock;
use baton_scheduler::{Refusal, RequestError, SequenceLimits as Limits};
use baton_text::{
    ChatMessage, ChatTemplate, Conversation, EncodeOptions, ModelLimits, StopStrings, TextError, Tokenizer, ToolCall,
};
use baton_types::{
    ErrorKind, InvalidSampling, MAX_BAD_WORDS, MAX_GRAMMAR_BYTES, SamplingDefaults, SamplingParams, Slo, Tbt, TokenId,
    Ttft,
};

use prost::Message;
use serde_json::Value;

use crate::answer_form::{AnswerForm, Reader};
use crate::error::GenerateError;

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 65_536;
/// Most tools, and most documents.
const MAX_TOOLS: usize = 1024;
/// Most JSON of tools, and of template variables: as values they may take sixteen times as much.
const MAX_TOOL_BYTES: usize = 1 << 20;
const MAX_VARIABLE_BYTES: usize = 64 << 10;
/// Most log-probabilities of a prompt. Each takes up to 20 bytes on the wire, and a message between
/// processes has 32 MiB.
const MAX_PROMPT_LOGPROBS: usize = 1 << 20;
/// Longest word that may be banned, bytes.
const MAX_BAD_WORD_BYTES: usize = 60;
/// Output length if the request does not say.
const DEFAULT_MAX_TOKENS: u32 = 256;

/// What the conductor knows of the model: enough to turn text into tokens and back.
pub struct TextModel {
    /// Names by which clients may ask for it. The first is that of answers, and of nodes.
    pub names: Vec<String>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// Compiles grammars of structured output.
    pub grammars: GrammarCompiler,
    /// Largest prompt taken, bytes of text.
    pub max_prompt_bytes: usize,
    /// Bytes of the longest token: a text has so many tokens at least.
    pub longest_token: usize,
    /// Sampling of HTTP requests that leave it open.
    pub sampling_defaults: SamplingDefaults,
    /// What its files say of how much it takes.
    pub limits: ModelLimits,
    /// What day it is, for chat templates that say so.
    pub clock: Arc<dyn Clock>,
}

/// What lowered a request's limit of output tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CappedBy {
    /// The model's context; only of limits that the client set.
    Context,
    /// The KV that the largest node holds.
    Nodes,
}

impl CappedBy {
    /// Every one.
    pub const ALL: [Self; 2] = [Self::Context, Self::Nodes];

    /// Name of the reason in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Context => "context",
            Self::Nodes => "nodes",
        }
    }
}

/// A request, checked.
#[derive(Debug, Clone)]
pub struct CheckedRequest {
    /// The prompt; not empty.
    pub tokens: Vec<TokenId>,
    /// Every range is checked; `max_tokens` fits into the context, and beside the prompt into the
    /// largest node.
    pub sampling: SamplingParams,
    /// Whether `max_tokens` is less than was asked for.
    pub capped: Option<CappedBy>,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Tells reasoning and tool calls from text; `None`: everything is text.
    pub parser: Option<Reader>,
    /// Objectives of this request.
    pub slo: Slo,
    /// How long it may take.
    pub timeout: Option<Duration>,
    /// Larger goes first.
    pub priority: i32,
}

/// A request whose prompt is tokens. What it says of its answer is still to be made a grammar.
pub struct TokenizedRequest {
    checked: CheckedRequest,
    form: AnswerForm,
    /// Whether the chat template says how the model marks what is not text.
    is_rendered: bool,
    thoughts: Thoughts,
    ignores_eos: bool,
}

/// A request whose grammar was tried.
pub enum Grammared {
    /// A request that is checked, with its grammar if it has one.
    Checked(Box<CheckedRequest>),
    /// A request whose grammar takes more effort than was made.
    Costly(Box<TokenizedRequest>),
}

impl TextModel {
    /// The name of answers.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// The checks that cost nothing: what is too large is refused before it waits for its turn.
    pub fn check_size(&self, request: &v1::GenerateRequest) -> Result<(), GenerateError> {
        let form = request.sampling.as_ref().and_then(|sampling| sampling.structured_output.as_ref());
        check_bytes("structured_output", form.map_or(0, Message::encoded_len), MAX_GRAMMAR_BYTES)?;
        match &request.prompt {
            Some(WirePrompt::Text(prompt)) => self.check_bytes("text", prompt.text.len()),
            Some(WirePrompt::Messages(prompt)) => {
                check_count("messages", prompt.messages.len(), MAX_MESSAGES)?;
                check_count("tools", prompt.tools.len(), MAX_TOOLS)?;
                check_count("allowed_tools", prompt.allowed_tools.len(), MAX_TOOLS)?;
                check_count("documents", prompt.documents.len(), MAX_TOOLS)?;
                self.check_bytes("messages", prompt.messages.iter().map(message_bytes).sum())?;
                check_bytes("tools", prompt.tools.iter().map(String::len).sum(), MAX_TOOL_BYTES)?;
                self.check_bytes("documents", prompt.documents.iter().map(String::len).sum())?;
                check_bytes("template_variables", prompt.template_variables.len(), MAX_VARIABLE_BYTES)
            }
            Some(WirePrompt::TokenIds(_)) | None => Ok(()),
        }
    }

    fn check_bytes(&self, field: &'static str, bytes: usize) -> Result<(), GenerateError> {
        check_bytes(field, bytes, self.max_prompt_bytes)
    }

    /// Refuses a text that cannot fit before it is tokenized.
    fn check_least_tokens(&self, bytes: usize, limits: Limits) -> Result<(), GenerateError> {
        let least = bytes / self.longest_token.max(1);
        if least <= limits.prompt_soon as usize {
            return Ok(());
        }
        Err(too_long(least, false, limits))
    }

    /// Checks a request and tokenizes its prompt. Takes milliseconds for a long prompt: not for the
    /// async threads.
    pub fn tokenized(
        &self,
        request: v1::GenerateRequest,
        limits: Limits,
        random_seed: u64,
    ) -> Result<TokenizedRequest, GenerateError> {
        self.check_model(&request.model)?;
        self.check_size(&request)?;
        let wire = request.sampling.unwrap_or_default();
        // The cheap checks come first: a bad parameter must not cost tokenizing a long prompt.
        StopStrings::new(&wire.stop).map_err(|error| GenerateError::invalid("stop", error.to_string()))?;
        let mut sampling = self.sampling(&wire, limits, random_seed)?;
        let slo = slo(request.slo.unwrap_or_default())?;
        let timeout = timeout(request.timeout_ms)?;
        // The HTTP APIs ask for so many if their client does not say.
        let asked = wire.max_tokens.filter(|&tokens| tokens < u32::MAX);
        let Prompt { tokens, form, is_rendered, thoughts } = self
            .tokens(request.prompt, wire.structured_output, limits)
            .map_err(|error| error.with_completion(asked))?;
        check_tokens(&tokens, limits).map_err(|error| error.with_completion(asked))?;
        check_prompt_logprobs(tokens.len(), sampling.prompt_logprobs)?;
        let capped = cap_output(&mut sampling, asked, tokens.len() as u32, limits);
        let priority = request.priority;
        let stop = wire.stop;
        let checked = CheckedRequest { tokens, sampling, capped, stop, parser: None, slo, timeout, priority };
        Ok(TokenizedRequest { checked, form, is_rendered, thoughts, ignores_eos: wire.ignore_eos })
    }

    /// The last of the checks: the grammar of the answer, compiled once to see that it can be, and
    /// how the answer is read. Takes as long as the effort says.
    pub fn with_grammar(&self, request: TokenizedRequest, effort: Effort) -> Result<Grammared, GenerateError> {
        let format = self.template.as_ref().filter(|_| request.is_rendered).map(ChatTemplate::output_format);
        let resolved = request.form.resolve(format, request.thoughts, &self.tokenizer, &self.grammars, effort)?;
        let Some((grammar, parser)) = resolved else { return Ok(Grammared::Costly(Box::new(request))) };
        let TokenizedRequest { mut checked, ignores_eos, .. } = request;
        if grammar.is_some() && ignores_eos {
            let problem = "beside structured output or a choice of tools: the output ends with its form";
            return Err(GenerateError::invalid("ignore_eos", problem));
        }
        checked.sampling.grammar = grammar;
        checked.parser = parser;
        checked.sampling.validate().map_err(invalid_sampling)?;
        Ok(Grammared::Checked(Box::new(checked)))
    }

    /// Empty names the model, too.
    pub fn check_model(&self, model: &str) -> Result<(), GenerateError> {
        if model.is_empty() || self.names.iter().any(|name| name == model) {
            return Ok(());
        }
        let asked: String = model.chars().take(128).collect();
        let problem = format!("there is no '{asked}'; this cluster serves '{}'", self.names.join("', '"));
        Err(GenerateError::NotFound { field: "model", problem })
    }

    fn tokens(
        &self,
        prompt: Option<WirePrompt>,
        form: Option<v1::StructuredOutput>,
        limits: Limits,
    ) -> Result<Prompt, GenerateError> {
        let encode = |field, text: &str, options| {
            self.check_bytes(field, text.len())?;
            self.check_least_tokens(text.len(), limits)?;
            self.tokenizer.encode(text, options).map_err(|error| text_error(field, &error))
        };
        let tokens = match prompt {
            None => return Err(GenerateError::invalid("prompt", "missing: give text, messages or token ids")),
            Some(WirePrompt::TokenIds(ids)) => ids.ids,
            Some(WirePrompt::Text(prompt)) => {
                let options = EncodeOptions { add_special: true, parse_special: prompt.parse_special };
                encode("text", &prompt.text, options)?
            }
            Some(WirePrompt::Messages(prompt)) => return self.rendered(prompt, form, limits),
        };
        let form = AnswerForm::new(form)?;
        Ok(Prompt { tokens, form, is_rendered: false, thoughts: Thoughts::Over })
    }

    fn rendered(
        &self,
        mut prompt: v1::MessagesPrompt,
        form: Option<v1::StructuredOutput>,
        limits: Limits,
    ) -> Result<Prompt, GenerateError> {
        if prompt.messages.is_empty() {
            return Err(GenerateError::invalid("messages", "empty: at least one message is needed"));
        }
        let template = self.template.as_ref().ok_or_else(|| {
            let problem =
                format!("the model '{}' has no chat template: send text instead (baton generate --raw)", self.name());
            GenerateError::invalid("messages", problem)
        })?;
        check_nodes(&prompt)?;
        let mut conversation = conversation(&mut prompt)?;
        let form = AnswerForm::new(form)?.with_tools(&mut conversation.tools, &prompt)?;
        let now = UNIX_EPOCH + Duration::from_millis(self.clock.unix_ms());
        let rendered = template.render(&conversation, now).map_err(|error| text_error("messages", &error))?;
        self.check_least_tokens(rendered.bytes(), limits)?;
        let tokens = self.tokenizer.encode_prompt(&rendered).map_err(|error| text_error("messages", &error))?;
        let format = template.output_format();
        let thoughts = match () {
            () if format.starts_in_reasoning(&rendered) => Thoughts::Begun,
            () if format.reasoning_is_over(&rendered) => Thoughts::Over,
            () => Thoughts::MayCome,
        };
        Ok(Prompt { tokens, form, is_rendered: true, thoughts })
    }

    fn sampling(
        &self,
        wire: &v1::SamplingParameters,
        limits: Limits,
        random_seed: u64,
    ) -> Result<SamplingParams, GenerateError> {
        let default = SamplingParams::default();
        let mut stop_token_ids = wire.stop_token_ids.clone();
        if let Some(id) = stop_token_ids.iter().find(|&&id| id >= limits.vocab_size) {
            let problem = format!("token {id}, but the vocabulary has {} tokens", limits.vocab_size);
            return Err(GenerateError::invalid("stop_token_ids", problem));
        }
        if stop_token_ids.len() > 64 {
            return Err(GenerateError::invalid(
                "stop_token_ids",
                format!("{} tokens, but at most 64 are taken", stop_token_ids.len()),
            ));
        }
        let mut logit_bias: Vec<_> = wire.logit_bias.iter().map(|(&token, &bias)| (token, bias)).collect();
        // A map has no order, and what nodes get must not depend on it.
        logit_bias.sort_unstable_by_key(|&(token, _)| token);
        if let Some((id, _)) = logit_bias.last().filter(|&&(id, _)| id >= limits.vocab_size) {
            let problem = format!("token {id}, but the vocabulary has {} tokens", limits.vocab_size);
            return Err(GenerateError::invalid("logit_bias", problem));
        }
        if !wire.ignore_eos {
            stop_token_ids.extend(self.tokenizer.eos_ids());
        }
        let params = SamplingParams {
            temperature: wire.temperature.unwrap_or(default.temperature),
            top_k: wire.top_k.unwrap_or(default.top_k),
            top_p: wire.top_p.unwrap_or(default.top_p),
            min_p: wire.min_p.unwrap_or(default.min_p),
            repetition_penalty: wire.repetition_penalty.unwrap_or(default.repetition_penalty),
            presence_penalty: wire.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: wire.frequency_penalty.unwrap_or(default.frequency_penalty),
            seed: wire.seed.unwrap_or(random_seed),
            max_tokens: wire.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
            stop_token_ids,
            logit_bias,
            min_tokens: wire.min_tokens,
            bad_words: self.bad_words(&wire.bad_words)?,
            grammar: None,
            logprobs: wire.logprobs,
            prompt_logprobs: wire.prompt_logprobs,
        };
        params.validate().map_err(invalid_sampling)?;
        Ok(params)
    }

    /// The tokens of each word, as written inside a text and at its beginning. After a space they
    /// often are other tokens.
    fn bad_words(&self, words: &[String]) -> Result<Vec<Vec<TokenId>>, GenerateError> {
        let invalid = |problem| GenerateError::invalid("bad_words", problem);
        if words.len() > MAX_BAD_WORDS / 2 {
            return Err(invalid(format!("{} words, but at most {} are taken", words.len(), MAX_BAD_WORDS / 2)));
        }
        let mut sequences = Vec::new();
        for word in words {
            let word = word.trim_start();
            if word.is_empty() || word.len() > MAX_BAD_WORD_BYTES {
                let bytes = word.len();
                return Err(invalid(format!("a word of {bytes} bytes, but 1 to {MAX_BAD_WORD_BYTES} are taken")));
            }
            for spelling in [format!(" {word}"), word.to_owned()] {
                let options = EncodeOptions { add_special: false, parse_special: false };
                let tokens =
                    self.tokenizer.encode(&spelling, options).map_err(|error| text_error("bad_words", &error))?;
                if !sequences.contains(&tokens) {
                    sequences.push(tokens);
                }
            }
        }
        Ok(sequences)
    }
}

fn invalid_sampling(error: InvalidSampling) -> GenerateError {
    GenerateError::invalid(error.field, format!("{}, but must be {}", error.value, error.expected))
}

/// A prompt, and what is said of its answer.
struct Prompt {
    tokens: Vec<TokenId>,
    form: AnswerForm,
    /// By the chat template; without it, everything of the answer is text.
    is_rendered: bool,
    thoughts: Thoughts,
}

/// Values of a call beside those of its arguments, as the template is given it.
const CALL_NODES: usize = 6;

/// Refuses JSON that would be too large as trees, before they are made.
fn check_nodes(prompt: &v1::MessagesPrompt) -> Result<(), GenerateError> {
    let of = |texts: &[String]| texts.iter().map(|text| nodes(text)).sum::<usize>();
    let calls = prompt.messages.iter().flat_map(|message| &message.tool_calls);
    let calls = calls.map(|call| CALL_NODES + nodes(&call.arguments)).sum::<usize>();
    let of_fields = [
        ("template_variables", nodes(&prompt.template_variables)),
        ("tools", of(&prompt.tools)),
        ("documents", of(&prompt.documents)),
        ("messages", calls),
    ];
    let mut all = 0;
    for (field, nodes) in of_fields {
        all += nodes;
        if all > MAX_NODES {
            let problem = format!("more than {MAX_NODES} JSON values, with those of tools, documents and calls");
            return Err(GenerateError::invalid(field, problem));
        }
    }
    Ok(())
}

/// Takes out of a prompt what its template is given.
fn conversation(prompt: &mut v1::MessagesPrompt) -> Result<Conversation, GenerateError> {
    let objects = |field, texts: Vec<String>| -> Result<Vec<_>, GenerateError> {
        let object = |(index, text): (usize, String)| json_object(field, Some(index), &text).map(Value::Object);
        texts.into_iter().enumerate().map(object).collect()
    };
    let variables = match prompt.template_variables.as_str() {
        "" => serde_json::Map::new(),
        text => json_object("template_variables", None, text)?,
    };
    let continue_final_message = prompt.continue_final_message;
    if continue_final_message {
        check_continued(prompt.messages.last())?;
    }
    Ok(Conversation {
        add_generation_prompt: !continue_final_message,
        continue_final_message,
        tools: objects("tools", take(&mut prompt.tools))?,
        documents: objects("documents", take(&mut prompt.documents))?,
        variables,
        ..Conversation::new(take(&mut prompt.messages).into_iter().map(chat_message).collect())
    })
}

/// Refuses to go on with a message that is not an answer that has begun.
fn check_continued(last: Option<&v1::ChatMessage>) -> Result<(), GenerateError> {
    let problem = match last {
        Some(last) if last.role != "assistant" => "the last message is not the assistant's",
        Some(last) if !last.tool_calls.is_empty() => "the last message has tool calls, and ends with them",
        Some(last) if last.content.trim().is_empty() => "the last message is empty",
        _ => return Ok(()),
    };
    Err(GenerateError::invalid("continue_final_message", problem))
}

fn json_object(
    field: &'static str,
    index: Option<usize>,
    text: &str,
) -> Result<serde_json::Map<String, Value>, GenerateError> {
    let which = index.map_or_else(String::new, |index| format!("number {index} "));
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(GenerateError::invalid(field, format!("{which}is no JSON object"))),
        Err(error) => Err(GenerateError::invalid(field, format!("{which}is no JSON: {error}"))),
    }
}

fn chat_message(message: v1::ChatMessage) -> ChatMessage {
    let call = |call: v1::ToolCall| ToolCall { id: call.id, name: call.name, arguments: call.arguments };
    ChatMessage {
        role: message.role,
        content: message.content,
        name: message.name,
        reasoning: message.reasoning,
        tool_calls: message.tool_calls.into_iter().map(call).collect(),
        tool_call_id: message.tool_call_id,
    }
}

fn message_bytes(message: &v1::ChatMessage) -> usize {
    let v1::ChatMessage { role, content, name, reasoning, tool_calls, tool_call_id } = message;
    let call = |call: &v1::ToolCall| call.id.len() + call.name.len() + call.arguments.len();
    let texts = [role, content, name, reasoning, tool_call_id].into_iter().map(String::len).sum::<usize>();
    texts + tool_calls.iter().map(call).sum::<usize>()
}

fn check_bytes(field: &'static str, bytes: usize, most: usize) -> Result<(), GenerateError> {
    if bytes <= most {
        return Ok(());
    }
    Err(GenerateError::invalid(field, format!("{bytes} bytes of text, but at most {most} are taken")))
}

fn check_count(field: &'static str, found: usize, most: usize) -> Result<(), GenerateError> {
    if found <= most {
        return Ok(());
    }
    Err(GenerateError::invalid(field, format!("{found}, but at most {most} are taken")))
}

fn text_error(field: &'static str, error: &TextError) -> GenerateError {
    if let TextError::Template(_) = error {
        // No client can mend it.
        return GenerateError::Frontend { kind: ErrorKind::Internal, message: error.to_string(), retry_after: None };
    }
    GenerateError::invalid(field, error.to_string())
}

/// Says how much of the context can be had.
fn too_long(prompt_tokens: usize, is_exact: bool, limits: Limits) -> GenerateError {
    let max_model_len = limits.context_length.min(limits.prompt_soon.saturating_add(1));
    let context_length = limits.context_length;
    GenerateError::TooLong(TooLong { prompt_tokens, is_exact, completion_tokens: None, max_model_len, context_length })
}

fn check_tokens(tokens: &[TokenId], limits: Limits) -> Result<(), GenerateError> {
    if tokens.is_empty() {
        return Err(GenerateError::invalid("prompt", "empty: at least one token is needed"));
    }
    let n = tokens.len();
    if n > limits.prompt_soon as usize {
        return Err(too_long(n, true, limits));
    }
    if n > limits.prompt as usize {
        let most = limits.prompt;
        let message = format!("prompt: {n} tokens, but the nodes that are ready hold {most} at most");
        let retry_after = Some(Duration::from_secs(1));
        let refusal = Refusal { kind: ErrorKind::Unavailable, message, retry_after, hold: None, objective: None };
        return Err(RequestError::Refused(refusal).into());
    }
    if let Some(position) = tokens.iter().position(|&id| id >= limits.vocab_size) {
        let id = tokens[position];
        let size = limits.vocab_size;
        let problem = format!("token {id} at position {position}, but the vocabulary has {size} tokens");
        return Err(GenerateError::invalid("token_ids", problem));
    }
    Ok(())
}

/// Lowers the limit of the output to what the context and the largest node hold beside the prompt.
/// `asked` is the client's own limit, if it has one.
fn cap_output(
    sampling: &mut SamplingParams,
    asked: Option<u32>,
    prompt_tokens: u32,
    limits: Limits,
) -> Option<CappedBy> {
    let in_context = limits.context_length.saturating_sub(prompt_tokens);
    let at_node = limits.sequence.saturating_sub(prompt_tokens).min(in_context);
    let wanted = sampling.max_tokens;
    sampling.max_tokens = wanted.min(at_node);
    if wanted > at_node && at_node < in_context {
        return Some(CappedBy::Nodes);
    }
    asked.is_some_and(|asked| asked > in_context).then_some(CappedBy::Context)
}

/// They come in one message, from the node and to the client. One too large for a session would end
/// the session, with all of its requests.
fn check_prompt_logprobs(tokens: usize, alternatives: Option<u32>) -> Result<(), GenerateError> {
    let Some(alternatives) = alternatives else { return Ok(()) };
    let entries = tokens.saturating_mul(alternatives as usize + 1);
    if entries <= MAX_PROMPT_LOGPROBS {
        return Ok(());
    }
    let problem = format!(
        "{alternatives} beside each of {tokens} tokens are {entries} in all, but at most {MAX_PROMPT_LOGPROBS} are given"
    );
    Err(GenerateError::invalid("prompt_logprobs", problem))
}

fn slo(wire: v1::ServiceLevelObjectives) -> Result<Slo, GenerateError> {
    Ok(Slo { ttft: millis("slo.ttft_ms", wire.ttft_ms)?.map(Ttft), tbt: millis("slo.tbt_ms", wire.tbt_ms)?.map(Tbt) })
}

/// How long a request asks to be served at most.
pub fn timeout(timeout_ms: Option<f64>) -> Result<Option<Duration>, GenerateError> {
    millis("timeout_ms", timeout_ms)
}

/// A time; 0 is none.
fn millis(field: &'static str, ms: Option<f64>) -> Result<Option<Duration>, GenerateError> {
    match ms {
        None | Some(0.0) => Ok(None),
        Some(ms) => Duration::try_from_secs_f64(ms / 1e3).map(Some).map_err(|_| {
            GenerateError::invalid(field, format!("{ms:?}, but must be a positive number of milliseconds"))
        }),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use baton_runtime::ManualClock;

    use super::*;

    pub const LIMITS: Limits =
        Limits { sequence: 64, prompt: 63, prompt_soon: 63, context_length: 64, vocab_size: 300 };

    pub fn model() -> TextModel {
        let tokenizer = Tokenizer::bytes();
        let template = Some(
            ChatTemplate::from_source("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", &tokenizer)
                .unwrap(),
        );
        let grammars = GrammarCompiler::new(&tokenizer).unwrap();
        let longest_token = tokenizer.longest_token();
        TextModel {
            names: vec!["mock".into(), "alias".into()],
            tokenizer,
            template,
            grammars,
            max_prompt_bytes: 4000,
            longest_token,
            sampling_defaults: SamplingDefaults::default(),
            limits: ModelLimits::default(),
            clock: Arc::new(ManualClock::default()),
        }
    }

    #[test]
    fn failing_chat_template_is_the_servers_fault_and_a_refusal_the_messages() {
        let kind = |source: &str| {
            let mut model = model();
            model.template = Some(ChatTemplate::from_source(source, &model.tokenizer).unwrap());
            let messages = vec![v1::ChatMessage { role: "user".into(), content: "2".into(), ..Default::default() }];
            let prompt = WirePrompt::Messages(v1::MessagesPrompt { messages, ..Default::default() });
            let request = v1::GenerateRequest { prompt: Some(prompt), ..Default::default() };
            let error = model.tokenized(request, LIMITS, 1).err().unwrap();
            (error.kind(), error.to_string())
        };
        let broken = kind("{{ messages[0].content if messages[0].content != '2' else messages[0].content + 1 }}");
        assert_eq!(broken.0, ErrorKind::Internal, "{}", broken.1);
        assert!(broken.1.starts_with("chat template: "), "{}", broken.1);
        let refused = kind("{{ raise_exception('no twos') }}");
        assert_eq!(refused.0, ErrorKind::Invalid, "{}", refused.1);
    }

    #[test]
    fn only_an_answer_that_has_begun_is_continued() {
        let continued = |role: &str, content: &str| {
            let last = v1::ChatMessage { role: role.into(), content: content.into(), ..Default::default() };
            let first = v1::ChatMessage { role: "user".into(), content: "x".into(), ..Default::default() };
            let prompt =
                v1::MessagesPrompt { messages: vec![first, last], continue_final_message: true, ..Default::default() };
            v1::GenerateRequest { prompt: Some(WirePrompt::Messages(prompt)), ..Default::default() }
        };
        assert_eq!(
            field(continued("user", "y")),
            ("continue_final_message", "the last message is not the assistant's".into())
        );
        assert_eq!(field(continued("assistant", " ")), ("continue_final_message", "the last message is empty".into()));
        let tokens = model().tokenized(continued("assistant", "It is"), LIMITS, 1).unwrap().checked.tokens;
        let ending: Vec<TokenId> = "assistant: It is".bytes().map(TokenId::from).collect();
        assert!(tokens.ends_with(&ending), "{tokens:?}");
    }

    pub fn text(text: &str) -> v1::GenerateRequest {
        let prompt = WirePrompt::Text(v1::TextPrompt { text: text.into(), parse_special: false });
        v1::GenerateRequest { prompt: Some(prompt), ..Default::default() }
    }

    fn field(request: v1::GenerateRequest) -> (&'static str, String) {
        match model().tokenized(request, LIMITS, 1).err().unwrap() {
            GenerateError::Invalid { field, problem } | GenerateError::NotFound { field, problem } => (field, problem),
            GenerateError::TooLong(problem) => ("too long", problem.to_string()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn output_limit_is_capped_by_context_and_largest_node() {
        let limits = Limits { sequence: 1000, prompt: 999, prompt_soon: 999, context_length: 2000, vocab_size: 300 };
        let capped = |prompt_tokens, max_tokens| {
            let mut sampling = SamplingParams { max_tokens, ..SamplingParams::default() };
            let by = cap_output(&mut sampling, None, prompt_tokens, limits);
            (sampling.max_tokens, by)
        };
        assert_eq!(capped(100, 500), (500, None));
        assert_eq!(capped(100, u32::MAX), (900, Some(CappedBy::Nodes)));
        assert_eq!(capped(100, 901), (900, Some(CappedBy::Nodes)));
        let limits = Limits { sequence: 2000, ..limits };
        let mut sampling = SamplingParams { max_tokens: 5000, ..SamplingParams::default() };
        assert_eq!(cap_output(&mut sampling, Some(5000), 100, limits), Some(CappedBy::Context));
        sampling.max_tokens = u32::MAX;
        assert_eq!((cap_output(&mut sampling, None, 100, limits), sampling.max_tokens), (None, 1900));
    }

    #[test]
    fn prompt_is_refused_for_good_only_if_no_node_that_may_return_holds_it() {
        let limits = Limits { sequence: 64, prompt: 63, prompt_soon: 100, ..LIMITS };
        let refused = |tokens: usize, context_length| {
            let limits = Limits { context_length, ..limits };
            check_tokens(&vec![1; tokens], limits).err().map(|error| (error.kind(), error.stage()))
        };
        assert_eq!(refused(63, 64), None);
        assert_eq!(refused(64, 200), Some((ErrorKind::Unavailable, "placement")), "a larger node may be back soon");
        assert_eq!(refused(101, 200), Some((ErrorKind::Invalid, "placement")), "the nodes are too small");
        assert_eq!(refused(200, 200), Some((ErrorKind::Invalid, "validation")), "so is the context");
    }

    #[test]
    fn valid_request_gets_default_sampling() {
        let checked = model().tokenized(text("hello"), LIMITS, 9).unwrap().checked;
        assert!(checked.tokens.len() >= 5);
        assert_eq!(checked.sampling.seed, 9);
        assert_eq!(checked.sampling.max_tokens, 64 - checked.tokens.len() as u32, "capped by the context");
        assert_eq!(checked.capped, None, "a limit that the client left open is no demand");
        assert!(!checked.sampling.stop_token_ids.is_empty());
    }

    #[test]
    fn prompt_logprobs_beyond_message_size_are_refused() {
        assert!(check_prompt_logprobs(1 << 20, Some(0)).is_ok() && check_prompt_logprobs(1 << 30, None).is_ok());
        let refused = check_prompt_logprobs(131_072, Some(20)).unwrap_err();
        assert!(refused.to_string().starts_with("prompt_logprobs: 20 beside each of 131072"), "{refused}");
    }

    #[test]
    fn invalid_request_is_refused_by_field() {
        let sampling = |change: fn(&mut v1::SamplingParameters)| {
            let mut parameters = v1::SamplingParameters::default();
            change(&mut parameters);
            v1::GenerateRequest { sampling: Some(parameters), ..text("x") }
        };
        let ids = |ids: Vec<u32>| v1::GenerateRequest {
            prompt: Some(WirePrompt::TokenIds(v1::TokenIds { ids })),
            ..Default::default()
        };
        assert_eq!(field(v1::GenerateRequest { prompt: None, ..text("") }).0, "prompt");
        assert_eq!(field(ids(vec![])).0, "prompt");
        assert_eq!(field(ids(vec![1; 64])).0, "too long");
        assert_eq!(
            field(ids(vec![1, 300])),
            ("token_ids", "token 300 at position 1, but the vocabulary has 300 tokens".into())
        );
        assert_eq!(field(text(&"a".repeat(4001))).0, "text");
        let (param, problem) = field(text(&"a".repeat(64 * 16)));
        assert!(param == "too long" && problem.starts_with("at least 64 tokens, but"), "{problem}");
        assert_eq!(field(v1::GenerateRequest { model: "gpt".into(), ..text("x") }).0, "model");
        assert_eq!(field(sampling(|s| s.temperature = Some(-1.0))).0, "temperature");
        assert_eq!(field(sampling(|s| s.temperature = Some(f32::NAN))).0, "temperature");
        assert_eq!(field(sampling(|s| s.max_tokens = Some(0))).0, "max_tokens");
        assert_eq!(field(sampling(|s| s.stop = vec![String::new()])).0, "stop");
        assert_eq!(field(sampling(|s| s.stop_token_ids = vec![300])).0, "stop_token_ids");
        let slo = Some(v1::ServiceLevelObjectives { ttft_ms: Some(-1.0), tbt_ms: None });
        assert_eq!(field(v1::GenerateRequest { slo, ..text("x") }).0, "slo.ttft_ms");
        let (param, problem) = field(v1::GenerateRequest { timeout_ms: Some(1e300), ..text("x") });
        assert!(param == "timeout_ms" && problem.starts_with("1e300, but"), "{problem}");
        let messages = |change: fn(&mut v1::MessagesPrompt)| {
            let message = v1::ChatMessage { role: "user".into(), content: "x".into(), ..Default::default() };
            let mut prompt = v1::MessagesPrompt { messages: vec![message], ..Default::default() };
            change(&mut prompt);
            v1::GenerateRequest { prompt: Some(WirePrompt::Messages(prompt)), ..Default::default() }
        };
        assert_eq!(field(messages(|p| p.messages.clear())).0, "messages");
        assert_eq!(field(messages(|p| p.messages.resize_with(65_537, Default::default))).0, "messages");
        assert_eq!(field(messages(|p| p.messages[0].reasoning = "x".repeat(4001))).0, "messages");
        assert_eq!(
            field(messages(|p| p.tools = vec!["{}".into(), "[]".into()])),
            ("tools", "number 1 is no JSON object".into())
        );
        assert_eq!(field(messages(|p| p.documents = vec!["{".into()])).0, "documents");
        assert_eq!(
            field(messages(|p| p.template_variables = "1".into())),
            ("template_variables", "is no JSON object".into())
        );
        assert_eq!(field(sampling(|s| s.logit_bias.extend([(300, 1.0)]))).0, "logit_bias");
        assert_eq!(field(sampling(|s| s.bad_words = vec!["x".into(); 65])).0, "bad_words");
        assert_eq!(field(sampling(|s| s.bad_words = vec![" ".into()])).0, "bad_words");
    }
}
