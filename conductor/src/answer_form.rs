//! What an answer may be and how it is read: structured output, tools and reasoning become a
//! grammar and a parser.

use std::sync::Arc;

use baton_grammar::{Answer, Calls, Effort, Form, GrammarCompiler, GrammarError, Thoughts, Tool};
use baton_proto::v1;
use baton_proto::v1::structured_output::Form as WireForm;
use baton_proto::v1::tool_choice::Choice;
use baton_text::{OutputFormat, OutputParser, Tokenizer};
use baton_types::TokenId;
use serde_json::{Map, Value, json};

use crate::error::GenerateError;

/// Longest name of a tool, bytes.
const MAX_NAME_BYTES: usize = 128;

/// What a request says of the form of its answer.
#[derive(Debug, Default)]
pub struct AnswerForm {
    tools: Vec<Tool>,
    choice: Option<Choice>,
    one_call: bool,
    /// There are more tools in the prompt than may be asked for.
    is_narrowed: bool,
    form: Option<Form>,
}

/// How an answer is read, with the special tokens whose text that takes.
pub type Reader = (OutputParser, Vec<TokenId>);
/// The grammar of an answer, and how it is read.
pub type Resolved = (Option<Arc<str>>, Option<Reader>);

impl AnswerForm {
    /// What is said beside a prompt without tools.
    ///
    /// # Errors
    /// The form is none.
    pub fn new(form: Option<v1::StructuredOutput>) -> Result<Self, GenerateError> {
        Ok(Self { form: wire_form(form)?, ..Self::default() })
    }

    /// The same, with these tools of a prompt, and what it says of them.
    ///
    /// # Errors
    /// A tool is none, or what says which are asked for names none of them.
    pub fn with_tools(mut self, tools: &mut [Value], prompt: &v1::MessagesPrompt) -> Result<Self, GenerateError> {
        let numbered = tools.iter_mut().enumerate();
        self.tools = numbered.map(|(index, json)| tool(index, json)).collect::<Result<Vec<_>, _>>()?;
        let allowed = &prompt.allowed_tools;
        if let Some(name) = allowed.iter().find(|name| !self.has_tool(name)) {
            return Err(no_tool("allowed_tools", name));
        }
        if !allowed.is_empty() {
            let all = self.tools.len();
            self.tools.retain(|tool| allowed.contains(&tool.name));
            self.is_narrowed = self.tools.len() < all;
        }
        self.choice = prompt.tool_choice.as_ref().and_then(|choice| choice.choice.clone());
        match &self.choice {
            Some(Choice::Required(true)) if self.tools.is_empty() => {
                Err(GenerateError::invalid("tool_choice", "required, but there are no tools"))
            }
            Some(Choice::Name(name)) if self.is_narrowed && !self.has_tool(name) => {
                Err(GenerateError::invalid("tool_choice", format!("'{}' is none of allowed_tools", shown(name))))
            }
            Some(Choice::Name(name)) if !self.has_tool(name) => Err(no_tool("tool_choice", name)),
            _ => Ok(Self { one_call: prompt.one_tool_call, ..self }),
        }
    }

    fn has_tool(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == *name)
    }

    /// Whether the model is to ask for tools, or may.
    fn has_calls(&self) -> bool {
        !self.tools.is_empty() && !matches!(self.choice, Some(Choice::None(true)))
    }

    /// Whether calls have to match the schemas of their tools: calls that must come, and calls that
    /// may if the request says something of them. Without, the model writes as it likes.
    fn holds_calls(&self) -> bool {
        let must = matches!(self.choice, Some(Choice::Required(true) | Choice::Name(_)));
        let is_bound = self.form.is_some() || self.one_call || self.is_narrowed;
        self.has_calls() && (must || is_bound || self.tools.iter().any(|tool| tool.is_strict))
    }

    /// The grammar, compiled once to see that it can be, and how the answer is read; `None` if that
    /// takes more effort. A `format` of none is that of a prompt without a chat template: then
    /// everything is text.
    ///
    /// # Errors
    /// What is asked for cannot be enforced.
    pub fn resolve(
        &self,
        format: Option<&OutputFormat>,
        thoughts: Thoughts,
        tokenizer: &Tokenizer,
        compiler: &GrammarCompiler,
        effort: Effort,
    ) -> Result<Option<Resolved>, GenerateError> {
        let field = if self.form.is_some() { "structured_output" } else { "tools" };
        let plain = OutputFormat::default();
        let has_calls = self.has_calls();
        let read_as = format.unwrap_or(&plain);
        if has_calls && read_as.tool_calls().is_none() {
            let problem = "the model's chat template has no tool calls: start the conductor with --chat-template FILE, or send tool_choice none";
            return Err(GenerateError::invalid("tools", problem));
        }
        let names = if has_calls { self.tools.iter().map(|tool| tool.name.clone()).collect() } else { Vec::new() };
        let reads = has_calls || read_as.reasoning().is_some();
        let reader =
            reads.then(|| (read_as.parser(thoughts == Thoughts::Begun, names), read_as.shown_tokens().to_vec()));
        let (calls, one_call) = self.calls();
        let answer = Answer { format: read_as, tokenizer, thoughts, form: self.form.clone(), calls, one_call };
        let grammar = match answer.checked_grammar(compiler, effort) {
            Ok(Some(grammar)) => grammar,
            Ok(None) => return Ok(Some((None, reader))),
            Err(GrammarError::Costly) => return Ok(None),
            Err(error @ GrammarError::NoThread(_)) => return Err(GenerateError::overloaded(error.to_string())),
            Err(error) => return Err(GenerateError::invalid(field, error.to_string())),
        };
        if !grammar.dropped.is_empty() {
            tracing::info!("schemas of tools are held to but for this: {}", grammar.dropped.join("; "));
        }
        Ok(Some((Some(grammar.text), reader)))
    }

    /// Calls as the grammar knows them, and whether there is one at most.
    fn calls(&self) -> (Calls, bool) {
        if !self.holds_calls() {
            return (Calls::None, false);
        }
        let tools = self.tools.clone();
        match &self.choice {
            Some(Choice::Required(true)) => (Calls::Must(tools), self.one_call),
            Some(Choice::Name(name)) => {
                (Calls::Must(tools.into_iter().filter(|tool| tool.name == *name).collect()), true)
            }
            _ => (Calls::May(tools), self.one_call),
        }
    }
}

/// A tool as clients describe it. What says nothing to the model is taken out of it.
fn tool(index: usize, json: &mut Value) -> Result<Tool, GenerateError> {
    let invalid = |problem: &str| GenerateError::invalid("tools", format!("number {index}: {problem}"));
    let function = json.get_mut("function").and_then(Value::as_object_mut);
    let function = function.ok_or_else(|| invalid("expected {\"type\": \"function\", \"function\": {...}}"))?;
    let strict = function.shift_remove("strict");
    let name = function.get("name").and_then(Value::as_str).ok_or_else(|| invalid("its function has no name"))?;
    if !(1..=MAX_NAME_BYTES).contains(&name.len()) {
        return Err(invalid(&format!("a name of {} bytes, but 1 to {MAX_NAME_BYTES} are taken", name.len())));
    }
    let is_strict = strict == Some(Value::Bool(true));
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => no_arguments(),
        Some(Value::Object(schema)) if schema.is_empty() => no_arguments(),
        // PHP has one empty value for lists and objects.
        Some(Value::Array(values)) if values.is_empty() && !is_strict => no_arguments(),
        Some(Value::Object(schema)) if is_strict && schema.get("type").is_none_or(|kind| kind == "object") => {
            schema.clone()
        }
        Some(Value::Object(schema)) if !is_strict && schema.get("type").is_none_or(has_object) => of_object(schema),
        Some(_) => return Err(invalid("its parameters are no schema of a JSON object")),
    };
    Ok(Tool { name: name.to_owned(), parameters, is_strict })
}

/// Whether types are not said, or have that of objects, in any case.
fn has_object(types: &Value) -> bool {
    let is_object = |name: &Value| name.as_str().is_some_and(|name| name.eq_ignore_ascii_case("object"));
    match types {
        Value::Null => true,
        Value::Array(names) => names.iter().any(is_object),
        name => is_object(name),
    }
}

/// A schema of objects alone, whatever else it is of.
fn of_object(schema: &Map<String, Value>) -> Map<String, Value> {
    let mut schema = schema.clone();
    schema.shift_remove("nullable");
    schema.insert("type".to_owned(), "object".into());
    schema
}

fn no_tool(field: &'static str, name: &str) -> GenerateError {
    GenerateError::invalid(field, format!("there is no tool '{}'", shown(name)))
}

/// So much of a name as an error repeats.
fn shown(name: &str) -> String {
    name.chars().take(MAX_NAME_BYTES).collect()
}

fn no_arguments() -> Map<String, Value> {
    match json!({ "type": "object", "properties": {}, "additionalProperties": false }) {
        Value::Object(schema) => schema,
        _ => Map::new(),
    }
}

fn wire_form(form: Option<v1::StructuredOutput>) -> Result<Option<Form>, GenerateError> {
    let Some(form) = form else { return Ok(None) };
    match form.form {
        Some(WireForm::JsonObject(true)) => Ok(Some(Form::JsonObject)),
        Some(WireForm::JsonSchema(schema)) => Ok(Some(Form::JsonSchema(schema))),
        Some(WireForm::StrictJsonSchema(schema)) => Ok(Some(Form::StrictJsonSchema(schema))),
        Some(WireForm::Regex(regex)) => Ok(Some(Form::Regex(regex))),
        Some(WireForm::Grammar(grammar)) => Ok(Some(Form::Lark(grammar))),
        Some(WireForm::Choices(choices)) => Ok(Some(Form::Choices(choices.texts))),
        Some(WireForm::JsonObject(false)) | None => Err(GenerateError::invalid("structured_output", "it has no form")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weather() -> Value {
        json!({"type": "function", "function": {"name": "weather", "strict": true, "parameters": {"type": "object"}}})
    }

    fn choice(choice: Choice) -> Option<v1::ToolChoice> {
        Some(v1::ToolChoice { choice: Some(choice) })
    }

    fn with_tools(
        tools: &mut [Value],
        tool_choice: Option<v1::ToolChoice>,
        allowed: &[&str],
    ) -> Result<AnswerForm, GenerateError> {
        let allowed_tools = allowed.iter().map(ToString::to_string).collect();
        let prompt = v1::MessagesPrompt { tool_choice, allowed_tools, ..Default::default() };
        AnswerForm::default().with_tools(tools, &prompt)
    }

    fn resolved(form: AnswerForm) -> Result<(Option<Arc<str>>, bool), String> {
        let tokenizer = Tokenizer::bytes();
        let format = OutputFormat::detect("{{ tools }}<tool_call>", &tokenizer);
        let compiler = GrammarCompiler::new(&tokenizer).unwrap();
        let resolved = form.resolve(Some(&format), Thoughts::MayCome, &tokenizer, &compiler, Effort::Full);
        resolved
            .map(Option::unwrap)
            .map(|(grammar, reader)| (grammar, reader.is_some()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn grammar_is_built_only_for_strict_or_required_tools() {
        let of = |strict: bool, choice: Option<v1::ToolChoice>| {
            let mut tools = [weather()];
            tools[0]["function"]["strict"] = strict.into();
            let form = with_tools(&mut tools, choice, &[]).unwrap();
            assert_eq!(tools[0]["function"].get("strict"), None, "the template does not see it");
            let (grammar, reads) = resolved(form).unwrap();
            (grammar.is_some(), reads)
        };
        assert_eq!(of(false, None), (false, true));
        assert_eq!(of(true, None), (true, true));
        assert_eq!(of(false, choice(Choice::Required(true))), (true, true));
        assert_eq!(of(false, choice(Choice::Name("weather".into()))), (true, true));
        assert_eq!(of(true, choice(Choice::None(true))), (false, false));
    }

    #[test]
    fn invalid_tools_and_structured_output_are_named() {
        let new = |tools: &mut [Value], choice| with_tools(tools, choice, &[]).unwrap_err().to_string();
        assert!(new(&mut [json!({"name": "f"})], None).starts_with("tools: number 0: expected"));
        assert!(
            new(&mut [weather(), json!({"function": {}})], None)
                .starts_with("tools: number 1: its function has no name")
        );
        assert_eq!(new(&mut [], choice(Choice::Required(true))), "tool_choice: required, but there are no tools");
        assert_eq!(new(&mut [weather()], choice(Choice::Name("f".into()))), "tool_choice: there is no tool 'f'");
        let form = v1::StructuredOutput { form: Some(WireForm::JsonSchema("{\"type\": \"colour\"}".into())) };
        let form = AnswerForm::new(Some(form)).unwrap();
        assert!(resolved(form).unwrap_err().starts_with("structured_output: the schema at #/type: "));
        let mut tools = [weather()];
        tools[0]["function"]["parameters"]["properties"] = json!({"a": {"pattern": "(?<=a)b"}});
        let form = with_tools(&mut tools, None, &[]).unwrap();
        let error = resolved(form).unwrap_err();
        assert!(error.starts_with("tools: the parameters of 'weather' at #/properties/a/pattern: "), "{error}");
        let empty = AnswerForm::new(Some(v1::StructuredOutput::default()));
        assert_eq!(empty.unwrap_err().to_string(), "structured_output: it has no form");
    }

    #[test]
    fn parameters_of_lenient_tools_are_objects_however_they_are_written() {
        let of = |parameters: Value, strict: bool| {
            let function = json!({"name": "f", "strict": strict, "parameters": parameters});
            let mut tools = [json!({"type": "function", "function": function})];
            let form =
                with_tools(&mut tools, choice(Choice::Required(true)), &[]).map_err(|error| error.to_string())?;
            assert_eq!(tools[0]["function"]["parameters"], parameters, "the template sees what was sent");
            let parameters = form.tools[0].parameters.clone();
            resolved(form).map(|_| Value::Object(parameters))
        };
        let properties = json!({"a": {"type": "STRING"}});
        let object = json!({"type": "object", "properties": properties});
        let of_type = |kind: Value| json!({"type": kind, "properties": properties});
        for kind in
            [json!("OBJECT"), json!("Object"), json!(["object", "null"]), json!(["NULL", "OBJECT"]), json!(null)]
        {
            assert_eq!(of(of_type(kind.clone()), false).unwrap(), object, "{kind}");
            assert!(of(of_type(kind.clone()), true).is_err(), "{kind}");
        }
        assert_eq!(of(json!({"properties": {}}), false).unwrap(), json!({"properties": {}, "type": "object"}));
        let nullable = json!({"type": "object", "nullable": true, "required": []});
        assert_eq!(of(nullable, false).unwrap(), json!({"type": "object", "required": []}));
        assert_eq!(of(json!([]), false).unwrap(), Value::Object(no_arguments()));
        for (parameters, strict) in [
            (json!([]), true),
            (json!([1]), false),
            (json!("object"), false),
            (of_type(json!("string")), false),
            (of_type(json!(["string", null])), false),
            (of_type(json!(["string", "null"])), false),
            (of_type(json!([])), false),
            (of_type(json!(1)), false),
        ] {
            let error = of(parameters.clone(), strict).unwrap_err();
            assert_eq!(error, "tools: number 0: its parameters are no schema of a JSON object", "{parameters}");
        }
    }

    #[test]
    fn allowed_tools_restrict_calls_but_not_the_template() {
        let of = |choice, allowed: &[&str]| {
            let mut tools = ["weather", "clock"].map(|name| json!({"function": {"name": name}}));
            let form = with_tools(&mut tools, choice, allowed);
            assert_eq!(tools.len(), 2);
            form
        };
        let form = of(None, &["clock"]).unwrap();
        assert!(matches!(form.calls(), (Calls::May(tools), false) if tools.len() == 1 && tools[0].name == "clock"));
        assert_eq!(resolved(form).unwrap(), resolved(of(None, &["clock", "clock"]).unwrap()).unwrap());
        let form = of(choice(Choice::Required(true)), &["clock"]).unwrap();
        assert!(matches!(form.calls(), (Calls::Must(tools), false) if tools.len() == 1));
        assert_eq!(of(None, &["weather", "clock"]).unwrap().calls(), (Calls::None, false), "all of them: no grammar");
        assert_eq!(of(None, &["f"]).unwrap_err().to_string(), "allowed_tools: there is no tool 'f'");
        let error = of(choice(Choice::Name("weather".into())), &["clock"]).unwrap_err().to_string();
        assert_eq!(error, "tool_choice: 'weather' is none of allowed_tools");
    }
}
