//! From what was typed to the prompt of a request.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::structured_output::Form;
use baton_proto::{MAX_MESSAGE_BYTES, v1};
use clap::Args;
use serde_json::Value;

use crate::args::{GenerateArgs, PlacementArgs, RequestArgs, parse_file};
use crate::error::CliError;

/// Most bytes read of a file: what a message to the conductor can hold, with room for everything
/// else in it.
const MAX_INPUT_BYTES: u64 = MAX_MESSAGE_BYTES as u64 - (64 << 10);

/// Where the prompt is.
#[derive(Debug, Args)]
pub struct PromptArgs {
    /// Take this prompt; - reads it from stdin
    #[arg(group = "source", required_unless_present_any = ["prompt_file", "messages", "token_ids"])]
    pub prompt: Option<String>,
    /// Read the prompt from a file, or from stdin with -
    #[arg(long, value_name = "FILE", group = "source", value_parser = parse_file)]
    pub prompt_file: Option<PathBuf>,
    /// Read a conversation from a file: a JSON list of {role, content}, as in OpenAI's API
    #[arg(long, value_name = "FILE", group = "source", value_parser = parse_file)]
    pub messages: Option<PathBuf>,
    /// Read the prompt as token ids from a file: a JSON list of numbers
    #[arg(long, value_name = "FILE", group = "source", value_parser = parse_file)]
    pub token_ids: Option<PathBuf>,
    /// Take the prompt without a chat template, and parse special tokens in it
    #[arg(long, conflicts_with_all = ["messages", "token_ids"])]
    pub raw: bool,
}

impl PromptArgs {
    /// Reads what there is to read.
    pub fn load(&self) -> Result<Prompt, CliError> {
        if let Some(path) = &self.messages {
            return Ok(conversation(parse_messages(&read("--messages", path)?)?));
        }
        if let Some(path) = &self.token_ids {
            return Ok(Prompt::TokenIds(v1::TokenIds { ids: parse_token_ids(&read("--token-ids", path)?)? }));
        }
        let (field, text) = match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) if prompt == "-" => ("prompt", read("prompt", Path::new("-"))?),
            (Some(prompt), _) => ("prompt", prompt.clone()),
            (None, Some(path)) => ("--prompt-file", read("--prompt-file", path)?),
            (None, None) => return Err(CliError::invalid("prompt", "missing")),
        };
        if text.is_empty() {
            return Err(CliError::invalid(field, "empty: at least one character is needed"));
        }
        if self.raw {
            return Ok(Prompt::Text(v1::TextPrompt { text, parse_special: true }));
        }
        Ok(conversation(vec![message("user", text)]))
    }
}

impl GenerateArgs {
    /// The request.
    pub fn wire(&self) -> Result<v1::GenerateRequest, CliError> {
        let mut prompt = self.prompt.load()?;
        if let Prompt::Messages(messages) = &mut prompt {
            messages.tools = self.tools()?;
        }
        let mut request = self.request.request(prompt);
        request.n = self.n;
        request.idempotency_key.clone_from(&self.idempotency_key);
        let schema = self.schema.as_deref().map(|given| json("--schema", given).map(|(text, _)| text)).transpose()?;
        if let Some(sampling) = &mut request.sampling {
            sampling.logprobs = self.logprobs;
            sampling.prompt_logprobs = self.prompt_logprobs;
            sampling.structured_output =
                schema.map(|schema| v1::StructuredOutput { form: Some(Form::JsonSchema(schema)) });
        }
        Ok(request)
    }

    /// The tools, each of which may stand alone or in a list.
    fn tools(&self) -> Result<Vec<String>, CliError> {
        let mut tools = Vec::new();
        for given in &self.tool {
            match json("--tool", given)? {
                (_, Value::Array(list)) => tools.extend(list.into_iter().map(tool)),
                (_, one) => tools.push(tool(one)),
            }
        }
        Ok(tools)
    }
}

/// A tool as the wire has it. One without its type is a function.
fn tool(given: Value) -> String {
    if given.get("type").is_some() || !given.is_object() {
        return given.to_string();
    }
    let function = if given.get("function").is_some() { given["function"].clone() } else { given };
    serde_json::json!({ "type": "function", "function": function }).to_string()
}

/// JSON that was given as it is, or as the file that has it: its text, and what it says.
fn json(field: &str, given: &str) -> Result<(String, Value), CliError> {
    let text =
        if given.trim_start().starts_with(['{', '[']) { given.to_owned() } else { read(field, Path::new(given))? };
    let value = serde_json::from_str(&text).map_err(|error| CliError::invalid(field, format!("not JSON: {error}")))?;
    Ok((text, value))
}

impl RequestArgs {
    /// The request for a prompt.
    pub fn request(&self, prompt: Prompt) -> v1::GenerateRequest {
        let sampling = v1::SamplingParameters {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            stop: self.stop.clone(),
            stop_token_ids: self.stop_token_id.clone(),
            ignore_eos: self.ignore_eos,
            max_tokens: self.placement.max_tokens,
            ..v1::SamplingParameters::default()
        };
        v1::GenerateRequest { sampling: Some(sampling), ..self.placement.request(prompt) }
    }
}

impl PlacementArgs {
    /// The request for a prompt, sampled by default.
    pub fn request(&self, prompt: Prompt) -> v1::GenerateRequest {
        let sampling = v1::SamplingParameters { max_tokens: self.max_tokens, ..v1::SamplingParameters::default() };
        v1::GenerateRequest {
            model: self.model.clone(),
            prompt: Some(prompt),
            sampling: Some(sampling),
            priority: self.priority,
            slo: Some(v1::ServiceLevelObjectives { ttft_ms: self.ttft_slo_ms, tbt_ms: self.tbt_slo_ms }),
            ..v1::GenerateRequest::default()
        }
    }
}

/// A conversation of messages alone.
pub fn conversation(messages: Vec<v1::ChatMessage>) -> Prompt {
    Prompt::Messages(v1::MessagesPrompt { messages, ..v1::MessagesPrompt::default() })
}

/// A message of a conversation.
pub fn message(role: &str, content: String) -> v1::ChatMessage {
    v1::ChatMessage { role: role.to_owned(), content, ..v1::ChatMessage::default() }
}

/// Reads a file, or stdin for `-`, as text.
fn read(field: &str, path: &Path) -> Result<String, CliError> {
    let cannot = |error: std::io::Error| CliError::invalid(field, format!("cannot read {}: {error}", shown(path)));
    let mut bytes = Vec::new();
    let mut reader: Box<dyn Read> = match path.to_str() {
        Some("-") => Box::new(std::io::stdin().lock()),
        _ => Box::new(File::open(path).map_err(cannot)?),
    };
    reader.as_mut().take(MAX_INPUT_BYTES + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > MAX_INPUT_BYTES {
        let problem = format!("{} is larger than the {MAX_INPUT_BYTES} bytes that a request can hold", shown(path));
        return Err(CliError::invalid(field, problem));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        CliError::invalid(field, format!("{} is not UTF-8: byte {at} starts no character", shown(path)))
    })
}

fn shown(path: &Path) -> std::path::Display<'_> {
    if path == Path::new("-") { Path::new("stdin").display() } else { path.display() }
}

fn parse_list(field: &str, text: &str, expected: &str) -> Result<Vec<Value>, CliError> {
    match serde_json::from_str(text) {
        Ok(Value::Array(list)) => Ok(list),
        Ok(_) => Err(CliError::invalid(field, format!("not a list: expected {expected}"))),
        Err(error) => Err(CliError::invalid(field, format!("not JSON: {error}; expected {expected}"))),
    }
}

fn parse_token_ids(text: &str) -> Result<Vec<u32>, CliError> {
    let list = parse_list("--token-ids", text, "a list of numbers such as [1, 2, 3]")?;
    let id = |(index, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| CliError::invalid(format!("--token-ids[{index}]"), format!("{value} is not a token id")))
    };
    list.iter().enumerate().map(id).collect()
}

fn parse_messages(text: &str) -> Result<Vec<v1::ChatMessage>, CliError> {
    let list = parse_list("--messages", text, r#"a list such as [{"role": "user", "content": "Hello"}]"#)?;
    list.iter().enumerate().map(|(index, value)| parse_message(index, value)).collect()
}

fn parse_message(index: usize, value: &Value) -> Result<v1::ChatMessage, CliError> {
    let wrong = |key: &str, problem: &str| CliError::invalid(format!("--messages[{index}]{key}"), problem);
    let object = value.as_object().ok_or_else(|| wrong("", "not an object with role and content"))?;
    if let Some(key) = object.keys().find(|key| !["role", "content"].contains(&key.as_str())) {
        return Err(wrong(&format!(".{key}"), "not supported: a message has role and content"));
    }
    let role = object.get("role").and_then(Value::as_str).ok_or_else(|| wrong(".role", "missing, or not a string"))?;
    let content = match object.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let parts: Option<Vec<&str>> = parts.iter().map(text_part).collect();
            parts
                .ok_or_else(|| wrong(".content", r#"only parts of {"type": "text", "text": "..."} are supported"#))?
                .concat()
        }
        _ => return Err(wrong(".content", "missing, or not a string")),
    };
    Ok(message(role, content))
}

fn text_part(part: &Value) -> Option<&str> {
    (part.get("type")?.as_str()? == "text").then(|| part.get("text")?.as_str())?
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn args(change: impl FnOnce(&mut PromptArgs)) -> PromptArgs {
        let mut args = PromptArgs { prompt: None, prompt_file: None, messages: None, token_ids: None, raw: false };
        change(&mut args);
        args
    }

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn error(args: &PromptArgs) -> String {
        args.load().unwrap_err().to_string()
    }

    #[test]
    fn prompt_becomes_a_user_message_unless_raw() {
        let plain = args(|a| a.prompt = Some("hi".into())).load().unwrap();
        assert_eq!(plain, conversation(vec![message("user", "hi".into())]));
        let raw = args(|a| (a.prompt, a.raw) = (Some("hi".into()), true)).load().unwrap();
        assert_eq!(raw, Prompt::Text(v1::TextPrompt { text: "hi".into(), parse_special: true }));
    }

    #[test]
    fn unreadable_prompt_file_is_named_with_the_reason() {
        assert!(error(&args(|a| a.prompt = Some(String::new()))).starts_with("prompt: empty"));
        let missing = error(&args(|a| a.prompt_file = Some("/nowhere/at/all".into())));
        assert!(missing.starts_with("--prompt-file: cannot read /nowhere/at/all: No such file"), "{missing}");
        let broken = file(b"ab\xff");
        let broken = error(&args(|a| a.prompt_file = Some(broken.path().into())));
        assert!(broken.contains("not UTF-8: byte 2"), "{broken}");
        let large = file(&vec![b'a'; MAX_INPUT_BYTES as usize + 1]);
        let large = error(&args(|a| a.prompt_file = Some(large.path().into())));
        assert!(large.contains("larger than"), "{large}");
        let folder = tempfile::tempdir().unwrap();
        assert!(error(&args(|a| a.prompt_file = Some(folder.path().into()))).contains("Is a directory"));
    }

    #[test]
    fn token_ids_file_must_be_a_list_of_u32() {
        assert_eq!(parse_token_ids("[1, 4294967295]").unwrap(), [1, u32::MAX]);
        assert_eq!(parse_token_ids("[]").unwrap(), [] as [u32; 0], "the conductor refuses an empty prompt");
        for (wrong, what) in
            [("[1, -1]", "--token-ids[1]"), ("[1.5]", "--token-ids[0]"), ("{}", "not a list"), ("[1", "not JSON")]
        {
            let error = parse_token_ids(wrong).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn messages_file_has_the_openai_form() {
        let text = r#"[{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}]"#;
        let messages = parse_messages(text).unwrap();
        assert_eq!(messages, [message("system", "a".into()), message("user", "bc".into())]);
        for (wrong, field) in [
            (r#"[{"content": "a"}]"#, "--messages[0].role"),
            (r#"[{"role": "user"}]"#, "--messages[0].content"),
            (r#"[{"role": "user", "content": [{"type": "image_url"}]}]"#, "--messages[0].content"),
            (r#"[{"role": "user", "content": "a", "tool_calls": []}]"#, "--messages[0].tool_calls"),
            (r#"["a"]"#, "--messages[0]"),
            (r#"{"role": "user"}"#, "--messages"),
        ] {
            let error = parse_messages(wrong).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field}: ")), "{wrong}: {error}");
        }
    }

    #[test]
    fn schema_and_tools_are_files_or_json() {
        use crate::args::{Cli, Command};
        use clap::Parser;
        let request = |flags: &[&str]| {
            let cli = Cli::parse_from([&["baton", "generate", "x", "--n", "3"], flags].concat());
            let Command::Generate(args) = cli.command else { panic!("another command") };
            args.wire()
        };
        let schema = file(br#"{"type": "object"}"#);
        let wrapped = file(br#"[{"type": "function", "function": {"name": "g"}}, {"name": "h"}]"#);
        let path = |file: &tempfile::NamedTempFile| file.path().to_str().unwrap().to_owned();
        let sent =
            request(&["--schema", &path(&schema), "--tool", r#"{"name": "f"}"#, "--tool", &path(&wrapped)]).unwrap();
        assert_eq!(sent.n, 3);
        let form = sent.sampling.unwrap().structured_output.unwrap().form.unwrap();
        assert_eq!(form, Form::JsonSchema(r#"{"type": "object"}"#.into()));
        let Some(Prompt::Messages(prompt)) = sent.prompt else { panic!("{:?}", sent.prompt) };
        let names = ["f", "g", "h"].map(|name| format!(r#"{{"type":"function","function":{{"name":"{name}"}}}}"#));
        assert_eq!(prompt.tools, names);
        for (flags, expected) in [
            (["--schema", "{"], "--schema: not JSON: "),
            (["--schema", "/nowhere"], "--schema: cannot read /nowhere: "),
            (["--tool", "[1"], "--tool: not JSON: "),
        ] {
            let error = request(&flags).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn every_generate_flag_reaches_the_request() {
        use crate::args::{Cli, Command};
        use clap::Parser;
        let line = "baton generate x --model m --max-tokens 1 --temperature 2 --top-k 3 --top-p 0.4 --min-p 0.5 --repetition-penalty 6 \
            --presence-penalty 7 --frequency-penalty 8 --seed 9 --stop a --stop b --stop-token-id 10 --stop-token-id 11 --ignore-eos --priority -12 \
            --ttft-slo-ms 13 --tbt-slo-ms 14";
        let Command::Generate(args) = Cli::parse_from(line.split_whitespace()).command else {
            panic!("another command")
        };
        let prompt = args.prompt.load().unwrap();
        let expected = v1::GenerateRequest {
            model: "m".into(),
            prompt: Some(prompt.clone()),
            sampling: Some(v1::SamplingParameters {
                temperature: Some(2.0),
                top_k: Some(3),
                top_p: Some(0.4),
                min_p: Some(0.5),
                repetition_penalty: Some(6.0),
                presence_penalty: Some(7.0),
                frequency_penalty: Some(8.0),
                seed: Some(9),
                max_tokens: Some(1),
                stop: vec!["a".into(), "b".into()],
                stop_token_ids: vec![10, 11],
                ignore_eos: true,
                ..v1::SamplingParameters::default()
            }),
            priority: -12,
            slo: Some(v1::ServiceLevelObjectives { ttft_ms: Some(13.0), tbt_ms: Some(14.0) }),
            ..v1::GenerateRequest::default()
        };
        assert_eq!(args.request.request(prompt), expected);
    }
}
