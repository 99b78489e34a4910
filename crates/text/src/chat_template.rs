//! Chat templates: a conversation becomes the text that the model was trained on.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use baton_formats::ModelFile;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};

use crate::date::strftime;
use crate::error::TextError;
use crate::model_folder;
use crate::tojson::tojson;
use crate::tokenizer::Tokenizer;

/// The template of the mock engine's model, in the manner of ChatML.
pub const MOCK_CHAT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
     {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Longest template, bytes; the longest in use have about 20,000.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Instructions of one rendering: about 50 per message, so a hundred thousand messages.
const MAX_INSTRUCTIONS: u64 = 5_000_000;
/// Nested calls of macros.
const MAX_RECURSION: usize = 64;
/// Longest text rendered, bytes.
const MAX_OUTPUT_BYTES: usize = 32 << 20;
const NAME: &str = "chat";

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// A compiled chat template; clones share it.
///
/// A template is untrusted: it sees nothing but the messages and the special tokens, and its instructions, recursion, repetitions and output are bounded. What
/// the template engine does not bound is the size of a string that a template builds by doubling one in a variable, so a model's template is to be trusted with the
/// memory of the process, as the model's file is.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    bos_token: String,
    eos_token: String,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a Jinja template as Hugging Face writes them; its `bos_token` and `eos_token` are empty.
    pub fn from_source(source: &str) -> Result<Self, TextError> {
        if source.len() > MAX_SOURCE_BYTES {
            let problem = format!("{} bytes, but at most {MAX_SOURCE_BYTES} are taken", source.len());
            return Err(TextError::Template(problem));
        }
        let mut environment = Environment::new();
        environment.set_syntax(python_whitespace()?);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|error| TextError::Template(describe(&error)))?;
        Ok(Self { environment: Arc::new(environment), bos_token: String::new(), eos_token: String::new() })
    }

    /// The chat template of a model, where it has one: from GGUF metadata, or from `chat_template.jinja` or `tokenizer_config.json` next to safetensors.
    pub fn from_model(model: &ModelFile, tokenizer: &Tokenizer) -> Result<Option<Self>, TextError> {
        let source = match model {
            ModelFile::Gguf(gguf) => gguf.metadata().str("tokenizer.chat_template")?.map(ToOwned::to_owned),
            ModelFile::Safetensors(safetensors) => model_folder::chat_template(model_folder::of(safetensors.path()))?,
        };
        let Some(source) = source else { return Ok(None) };
        let bos = tokenizer.token_text(tokenizer.bos());
        let eos = tokenizer.token_text(tokenizer.eos_ids().first().copied());
        Ok(Some(Self::from_source(&source)?.with_special_tokens(&bos, &eos)))
    }

    /// Sets the text of the special tokens that the template may name.
    pub fn with_special_tokens(mut self, bos_token: &str, eos_token: &str) -> Self {
        self.bos_token = bos_token.to_owned();
        self.eos_token = eos_token.to_owned();
        self
    }

    /// The prompt of a conversation, to be tokenized with its special tokens parsed and none added. `add_generation_prompt`: it ends where the assistant's answer
    /// begins. `strftime_now` is not defined, so that the text does not depend on the day and prefixes stay reusable.
    pub fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, TextError> {
        self.render_with(messages, add_generation_prompt, None)
    }

    /// As [`render`](Self::render), with a date (in UTC) for templates that state one.
    pub fn render_at(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        now: SystemTime,
    ) -> Result<String, TextError> {
        let strftime_now = move |format: String| {
            strftime(&format, now).map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
        };
        self.render_with(messages, add_generation_prompt, Some(Value::from_function(strftime_now)))
    }

    fn render_with(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        strftime_now: Option<Value>,
    ) -> Result<String, TextError> {
        let mut variables = context! {
            messages => messages.iter().map(value).collect::<Vec<_>>(),
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
            // Hugging Face defines both: templates ask whether they are none.
            tools => Value::from(()),
            documents => Value::from(()),
        };
        if let Some(strftime_now) = strftime_now {
            variables = context! { strftime_now => strftime_now, ..variables };
        }
        let template = self.environment.get_template(NAME).map_err(|error| TextError::Template(describe(&error)))?;
        let mut output = BoundedOutput::default();
        let rendered = template.render_captured_to(variables, &mut output).map(|_| ());
        if output.full {
            let problem = format!("the chat template gives more than {MAX_OUTPUT_BYTES} bytes");
            return Err(TextError::Messages(problem));
        }
        rendered.map_err(|error| refusal(&error))?;
        String::from_utf8(output.bytes).map_err(|error| TextError::Template(error.to_string()))
    }
}

/// Hugging Face compiles templates so.
fn python_whitespace() -> Result<SyntaxConfig, TextError> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.map_err(|error| TextError::Template(describe(&error)))
}

fn value(message: &ChatMessage) -> Value {
    Value::from_pairs([("role", message.role.as_str()), ("content", message.content.as_str())])
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The messages are blamed: a template that compiles and fails does so for the conversation it got.
fn refusal(error: &Error) -> TextError {
    let problem = match error.kind() {
        ErrorKind::OutOfFuel => format!("the chat template takes more than {MAX_INSTRUCTIONS} instructions"),
        _ => format!("the chat template refuses them: {}", describe(error)),
    };
    TextError::Messages(problem)
}

/// One line, without the excerpt of the source.
fn describe(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), ToOwned::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
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
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn messages(pairs: &[(&str, &str)]) -> Vec<ChatMessage> {
        pairs.iter().map(|&(role, content)| ChatMessage { role: role.into(), content: content.into() }).collect()
    }

    fn render(source: &str) -> Result<String, TextError> {
        let template = ChatTemplate::from_source(source)?.with_special_tokens("<s>", "</s>");
        template.render(&messages(&[("user", "Hi <b> \"é\""), ("assistant", "Yes.")]), true)
    }

    #[test]
    fn the_mock_model_has_a_template() {
        let template = ChatTemplate::from_source(MOCK_CHAT_TEMPLATE).unwrap();
        let text = template.render(&messages(&[("user", "hello")]), true).unwrap();
        assert_eq!(text, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n");
        assert_eq!(template.render(&messages(&[("user", "x")]), false).unwrap(), "<|im_start|>user\nx<|im_end|>\n");
    }

    #[test]
    fn templates_use_the_python_that_they_expect() {
        let source = "{{ bos_token }}{% for m in messages %}\n  {% if m['content'].startswith('Hi') %}\n[INST] {{ m.content.split('<')[0].strip() }} [/INST]\n  {% else %}\n{{ m.content.upper() + eos_token }}\n  {% endif %}\n{% endfor %}";
        assert_eq!(render(source).unwrap(), "<s>[INST] Hi [/INST]\nYES.</s>\n");
        assert_eq!(
            render("{% if tools is not none %}tools{% endif %}{% for m in messages %}{% break %}{% endfor %}ok")
                .unwrap(),
            "ok"
        );
        assert_eq!(
            render("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}").unwrap(),
            "26 Jul 2024"
        );
    }

    #[test]
    fn json_is_that_of_python() {
        let json = render("{{ messages[0] | tojson }}{{ [1, {}, 'a'] | tojson }}").unwrap();
        assert_eq!(json, r#"{"role": "user", "content": "Hi <b> \"é\""}[1, {}, "a"]"#);
        assert_eq!(render("{{ {'a': [1, 2]} | tojson(indent=2) }}").unwrap(), "{\n  \"a\": [\n    1,\n    2\n  ]\n}");
    }

    #[test]
    fn the_date_is_given_by_the_caller() {
        let template = ChatTemplate::from_source("{{ strftime_now('%d %b %Y') }}").unwrap();
        let now = UNIX_EPOCH + Duration::from_secs(951_782_400);
        assert_eq!(template.render_at(&[], false, now).unwrap(), "29 Feb 2000");
        assert!(template.render(&[], false).is_err());
    }

    #[test]
    fn a_template_refuses_with_its_own_words() {
        let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err().to_string();
        assert_eq!(error, "the chat template refuses them: roles must alternate (line 1)");
    }

    #[test]
    fn a_hostile_template_ends_with_an_error() {
        let limits = [
            ("{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}", "instructions"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses"),
            ("{{ 'x' * 90000000 }}", "bytes"),
            ("{{ 'x' * 900000000000 }}", "too large"),
            ("{% include 'etc/passwd' %}", "refuses"),
            ("{{ messages.__class__.__mro__ }}", "refuses"),
        ];
        for (source, expected) in limits {
            let error = render(source).unwrap_err();
            assert!(error.to_string().contains(expected), "{source}: {error}");
        }
    }

    #[test]
    fn a_bad_template_does_not_compile() {
        for source in
            ["{% if %}", "{{ x", "{% endfor %}", &"(".repeat(100_000), &format!("{{{{ {} }}}}", "(".repeat(100_000))]
        {
            match ChatTemplate::from_source(source) {
                Err(TextError::Template(_)) => {}
                Ok(_) => assert!(source.starts_with("((("), "{source} is text"),
                Err(other) => panic!("{other}"),
            }
        }
        assert!(ChatTemplate::from_source(&"x".repeat(MAX_SOURCE_BYTES + 1)).is_err());
    }
}
