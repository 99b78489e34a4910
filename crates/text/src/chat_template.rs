//! Chat templates: a conversation becomes the text that the model was trained on.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use baton_formats::{Metadata, ModelFile};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, merge_maps};
use minijinja::{Environment, Error, ErrorKind, Value, context};

use crate::caught::caught;
use crate::conversation::{Arguments, Conversation, json_value, message_value};
use crate::date::strftime;
use crate::error::TextError;
use crate::guard::{Author, Guard, Marker};
use crate::jinja_functions;
use crate::model_folder;
use crate::output::OutputFormat;
use crate::render_failure::{RenderFailure, describe};
use crate::special::without;
use crate::template_probe;
use crate::template_source::{self, MAX_FILTERS};
use crate::tokenizer::Tokenizer;

/// The template of the mock engine's model, in the manner of ChatML.
pub const MOCK_CHAT_TEMPLATE: &str = "{% if tools %}<|im_start|>system\nAsk for tools in <tool_call></tool_call>:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}\
     {% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
     {% for call in message.tool_calls or [] %}<tool_call>\n{\"name\": {{ call.function.name | tojson }}, \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
     {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Longest template, bytes; the longest in use have about 20,000.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Instructions of one rendering: about 50 per message, so a hundred thousand messages. 64 bytes of
/// data that a template makes or goes through count as one more, so that a template holds 320 MB at
/// most.
pub(crate) const MAX_INSTRUCTIONS: u64 = 5_000_000;
/// Depth of the engine, of which a call of a macro takes four: 64 calls within each other.
const MAX_RECURSION: usize = 256;
/// Longest text rendered, bytes.
const MAX_OUTPUT_BYTES: usize = 32 << 20;
/// Most names that a warning is given for.
const MAX_WARNINGS: usize = 16;
/// The template of a model that has several.
const DEFAULT: &str = "default";
/// The one for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// A conversation as a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// With marks if contents spell control tokens.
    pub(crate) marked: String,
    /// What those are.
    pub(crate) mark: Option<char>,
}

impl RenderedPrompt {
    /// The text. What it says of control tokens cannot be told any more from the template's own:
    /// [`Tokenizer::encode_prompt`] tokenizes it.
    pub fn text(&self) -> String {
        without(&self.marked, self.mark).into_owned()
    }

    /// Bytes of the text.
    pub fn bytes(&self) -> usize {
        let marks = self.mark.map_or(0, |mark| self.marked.matches(mark).count() * mark.len_utf8());
        self.marked.len() - marks
    }
}

/// Special tokens by the names that templates know: `bos_token`; also lists of them.
pub(crate) type SpecialTokens = Vec<(String, serde_json::Value)>;

/// A compiled chat template; clones share it.
///
/// A template is untrusted: it sees nothing but the conversation, the special tokens and the date,
/// and its instructions, recursion, data and output are bounded.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    special_tokens: SpecialTokens,
    guard: Arc<Guard>,
    /// The default one first.
    templates: Vec<NamedTemplate>,
    output_format: Arc<OutputFormat>,
    warnings: Vec<String>,
}

#[derive(Debug, Clone)]
struct NamedTemplate {
    name: &'static str,
    arguments: Arguments,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a Jinja template as Hugging Face writes them, for prompts of a model with this
    /// tokenizer. It is rendered for a few conversations, to see that it can be.
    pub fn from_source(source: &str, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        Self::named(vec![(DEFAULT.to_owned(), source.to_owned())], tokenizer, Vec::new())
    }

    /// Templates by their names. As in Hugging Face, `tool_use` is for conversations with tools,
    /// and `default` for all others. If there is none of this name, it is the first.
    fn named(
        mut sources: Vec<(String, String)>,
        tokenizer: &Tokenizer,
        special_tokens: SpecialTokens,
    ) -> Result<Self, TextError> {
        let default = sources.iter().position(|(name, _)| name == DEFAULT).unwrap_or(0);
        let tool_use = sources.iter().position(|(name, _)| name == TOOL_USE).filter(|&at| at != default);
        let mut used = vec![(DEFAULT, std::mem::take(&mut sources[default].1))];
        used.extend(tool_use.map(|at| (TOOL_USE, std::mem::take(&mut sources[at].1))));
        let mut environment = Environment::new();
        environment.set_syntax(python_whitespace()?);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_recursion_limit(MAX_RECURSION);
        jinja_functions::add(&mut environment);
        let mut warnings = Vec::new();
        for (name, source) in &mut used {
            let name = *name;
            *source = template_source::with_plain_newlines(source).into_owned();
            let about = |problem: String| about(name, &problem);
            add_template(&mut environment, name, source).map_err(|problem| TextError::Template(about(problem)))?;
            warnings.extend(unknown_names(&environment, source).into_iter().map(about));
        }
        // Calls of tools are looked for in the template for tools first.
        let all: Vec<&str> = used.iter().rev().map(|(_, source)| source.as_str()).collect();
        let template = Self {
            environment: Arc::new(environment),
            special_tokens: with_bos_and_eos(special_tokens, tokenizer),
            guard: Arc::new(Guard::new(tokenizer.added().to_vec())?),
            templates: used.iter().map(|&(name, _)| NamedTemplate { name, arguments: Arguments::Object }).collect(),
            output_format: Arc::new(OutputFormat::detect(&all.join("\n"), tokenizer)),
            warnings,
        };
        template.probed()
    }

    /// Renders each template for a few conversations: whether it takes any, what fails, and in what
    /// form it takes the arguments of calls.
    fn probed(mut self) -> Result<Self, TextError> {
        for index in 0..self.templates.len() {
            let NamedTemplate { name, .. } = self.templates[index];
            let render = |conversation: &Conversation, arguments| {
                self.render_named(name, arguments, conversation, SystemTime::UNIX_EPOCH).map(|prompt| prompt.text())
            };
            let found = template_probe::probe(render).map_err(|problem| TextError::Template(about(name, &problem)))?;
            self.templates[index].arguments = found.arguments;
            self.warnings.extend(found.warnings.iter().map(|problem| about(name, problem)));
        }
        Ok(self)
    }

    /// The chat template of a model, if it has one: from GGUF metadata, or from the files next to
    /// safetensors.
    pub fn from_model(model: &ModelFile, tokenizer: &Tokenizer) -> Result<Option<Self>, TextError> {
        let (sources, special_tokens) = match model {
            ModelFile::Gguf(gguf) => {
                (gguf_templates(gguf.metadata())?, gguf_special_tokens(gguf.metadata(), tokenizer)?)
            }
            ModelFile::Safetensors(safetensors) => {
                let folder = model_folder::of(safetensors.path());
                (model_folder::chat_templates(folder)?, model_folder::special_tokens(folder)?)
            }
        };
        if sources.is_empty() {
            return Ok(None);
        }
        Self::named(sources, tokenizer, special_tokens).map(Some)
    }

    /// Sets the text of the special tokens that the template may name, if they are not the
    /// tokenizer's.
    pub fn with_special_tokens(mut self, bos_token: &str, eos_token: &str) -> Self {
        self.special_tokens.retain(|(name, _)| name != "bos_token" && name != "eos_token");
        self.special_tokens.push(("bos_token".to_owned(), bos_token.into()));
        self.special_tokens.push(("eos_token".to_owned(), eos_token.into()));
        self
    }

    /// How the model writes its answers, as the template shows.
    pub fn output_format(&self) -> &OutputFormat {
        &self.output_format
    }

    /// What is wrong with the template, as far as it was seen when it was loaded. Conversations
    /// that need none of it are rendered.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The prompt of a conversation. A template that states the date states that of `now`, in UTC.
    ///
    /// [`TextError::Messages`] blames the conversation, [`TextError::Template`] the template.
    pub fn render(&self, conversation: &Conversation, now: SystemTime) -> Result<RenderedPrompt, TextError> {
        let has_tools = !conversation.tools.is_empty();
        let wanted = if has_tools { TOOL_USE } else { DEFAULT };
        let template = self.templates.iter().find(|template| template.name == wanted);
        let Some(template) = template.or(self.templates.first()) else {
            return Err(TextError::Template("there is none".to_owned()));
        };
        self.render_named(template.name, template.arguments, conversation, now)
            .map_err(|failure| failure.into_error(conversation.is_plain()))
    }

    fn render_named(
        &self,
        name: &str,
        arguments: Arguments,
        conversation: &Conversation,
        now: SystemTime,
    ) -> Result<RenderedPrompt, RenderFailure> {
        let marker = Marker::new(&self.guard, &conversation.used_marks())
            .ok_or_else(|| RenderFailure::Messages("use every noncharacter from U+FDD0 to U+FDEF".to_owned()))?;
        let template = self.environment.get_template(name).map_err(RenderFailure::Engine)?;
        let variables = self.variables(arguments, conversation, &marker, now);
        let mut output = BoundedOutput::default();
        let rendered = without_panic(|| template.render_captured_to(variables, &mut output).map(|_| ()));
        if output.full {
            let problem = format!("the chat template gives more than {MAX_OUTPUT_BYTES} bytes");
            return Err(RenderFailure::Messages(problem));
        }
        rendered.map_err(RenderFailure::Engine)?;
        let not_text = |_| RenderFailure::Engine(Error::new(ErrorKind::BadSerialization, "no UTF-8"));
        let mut marked = String::from_utf8(output.bytes).map_err(not_text)?;
        if let Some(last) = conversation.messages.last()
            && conversation.continue_final_message
        {
            cut_after(&mut marked, &marker.content(&last.content, Author::Model))?;
        }
        let mark = Some(marker.mark()).filter(|&mark| marked.contains(mark));
        Ok(RenderedPrompt { marked, mark })
    }

    fn variables(
        &self,
        arguments: Arguments,
        conversation: &Conversation,
        marker: &Marker<'_>,
        now: SystemTime,
    ) -> Value {
        let json = |json: &serde_json::Value| json_value(json, marker);
        // Hugging Face defines both: templates ask whether they are none.
        let list =
            |of: &[serde_json::Value]| if of.is_empty() { Value::from(()) } else { of.iter().map(json).collect() };
        let messages: Vec<_> =
            conversation.messages.iter().map(|message| message_value(message, arguments, marker)).collect();
        let given = conversation.variables.iter().map(|(name, value)| (name.as_str(), json(value)));
        let tokens = self.special_tokens.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let strftime_now = move |format: &str| {
            strftime(format, now).map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
        };
        let fixed = context! {
            messages => messages,
            add_generation_prompt => conversation.add_generation_prompt,
            tools => list(&conversation.tools),
            documents => list(&conversation.documents),
        };
        let clock = context! { strftime_now => Value::from_function(strftime_now) };
        // The first that has a name gives its value.
        merge_maps([fixed, Value::from_pairs(given), Value::from_pairs(tokens), clock])
    }
}

/// Takes off a rendered text what the template put behind its last content, as transformers does
/// (`continue_final_message`). White space around the content stays if the template left it there.
fn cut_after(rendered: &mut String, content: &str) -> Result<(), RenderFailure> {
    let said = content.trim();
    let start = if said.is_empty() { None } else { rendered.rfind(said) };
    let Some(start) = start else {
        let problem = "the last message cannot be continued: the chat template does not show its content as it is";
        return Err(RenderFailure::Messages(problem.to_owned()));
    };
    let behind = content.trim_start();
    let length = if rendered[start..].starts_with(behind) { behind.len() } else { said.len() };
    rendered.truncate(start + length);
    Ok(())
}

/// Names a template of several.
fn about(name: &str, problem: &str) -> String {
    if name == DEFAULT { problem.to_owned() } else { format!("'{name}': {problem}") }
}

fn add_template(environment: &mut Environment<'_>, name: &'static str, source: &str) -> Result<(), String> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(format!("{} bytes, but at most {MAX_SOURCE_BYTES} are taken", source.len()));
    }
    let filters = template_source::longest_chain(source);
    if filters > MAX_FILTERS {
        return Err(format!("{filters} filters in one tag, but at most {MAX_FILTERS} are taken"));
    }
    without_panic(|| environment.add_template_owned(name, template_source::rewritten(source)))
        .map_err(|error| describe(&error))
}

/// Filters and tests that are not defined; Jinja2 does not compile them. What needs none of them is
/// rendered.
fn unknown_names(environment: &Environment<'_>, source: &str) -> Vec<String> {
    let is_known = |name: &str, question: &str| {
        let answer = environment.compile_expression(question).and_then(|question| question.eval(context! { name }));
        answer.is_ok_and(|answer| answer.is_true())
    };
    let mut warnings = Vec::new();
    let mut seen = HashSet::new();
    for named in template_source::named(source) {
        let (kind, question) = if named.is_test { ("test", "name is test") } else { ("filter", "name is filter") };
        if seen.insert((kind, named.name)) && !is_known(named.name, question) && warnings.len() < MAX_WARNINGS {
            warnings.push(format!("{kind} {} is unknown (line {})", named.name, named.line));
        }
    }
    warnings
}

/// What the model's files do not say is the tokenizer's.
fn with_bos_and_eos(mut tokens: SpecialTokens, tokenizer: &Tokenizer) -> SpecialTokens {
    let own = [("bos_token", tokenizer.bos()), ("eos_token", tokenizer.eos_ids().first().copied())];
    for (name, id) in own {
        if !tokens.iter().any(|(known, _)| known == name) {
            tokens.push((name.to_owned(), tokenizer.token_text(id).into()));
        }
    }
    tokens
}

/// `tokenizer.chat_template`, and for each other name `tokenizer.chat_template.NAME`.
fn gguf_templates(metadata: &Metadata) -> Result<Vec<(String, String)>, TextError> {
    let mut sources = Vec::new();
    for (name, key) in [(DEFAULT, "tokenizer.chat_template"), (TOOL_USE, "tokenizer.chat_template.tool_use")] {
        if let Some(source) = metadata.str(key)? {
            sources.push((name.to_owned(), source.to_owned()));
        }
    }
    Ok(sources)
}

fn gguf_special_tokens(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<SpecialTokens, TextError> {
    const KEYS: [(&str, &str); 4] =
        [("unk_token", "unknown"), ("pad_token", "padding"), ("sep_token", "seperator"), ("mask_token", "mask")];
    let mut tokens = Vec::new();
    for (name, key) in KEYS {
        let id = metadata.u32(&format!("tokenizer.ggml.{key}_token_id"))?;
        if id.is_some_and(|id| tokenizer.token_bytes(id).is_some()) {
            tokens.push((name.to_owned(), tokenizer.token_text(id).into()));
        }
    }
    Ok(tokens)
}

/// Hugging Face compiles templates so.
fn python_whitespace() -> Result<SyntaxConfig, TextError> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.map_err(|error| TextError::Template(describe(&error)))
}

/// Calls the template engine, which panics on some templates: `{% import 'x' as f() %}`, for one.
/// What it left half done is dropped with the error.
fn without_panic<T>(call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let panicked = || Err(Error::new(ErrorKind::InvalidOperation, "the template engine cannot deal with it"));
    caught(call).unwrap_or_else(panicked)
}

#[derive(Default)]
struct BoundedOutput {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            self.full = true;
            return Err(io::Error::other("too much output"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
