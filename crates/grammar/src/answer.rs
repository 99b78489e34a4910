//! What a whole answer may be: thoughts, then text, a form, or calls of tools, with the marks that
//! the model writes between them.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::io::Write as _;

use baton_text::{OutputFormat, ReasoningMarks, Tokenizer, ToolCallFormat};
use serde_json::{Map, Value};

use crate::form::{THE_SCHEMA, json_rule, lark_string};
use crate::schema::{Demand, Problem};
use crate::verdicts::Digest;
use crate::{Form, GrammarError};

/// A tool that an answer may ask for.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments, an object.
    pub parameters: Map<String, Value>,
    /// Whether a schema that cannot be held to is an error, and its objects have no properties but
    /// those it names. Otherwise what it says beyond is left to the model.
    pub is_strict: bool,
}

impl Tool {
    fn demand(&self) -> Demand {
        if self.is_strict { Demand::Strict } else { Demand::Lenient }
    }

    /// What errors call the schema.
    fn schema_name(&self) -> String {
        format!("the parameters of '{}'", self.name)
    }
}

/// Which calls of tools an answer has.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Calls {
    /// None.
    #[default]
    None,
    /// As the model likes; if it asks for a tool, then as the tool's schema says.
    May(Vec<Tool>),
    /// Nothing else.
    Must(Vec<Tool>),
}

impl Calls {
    /// Tools that the answer may call.
    fn tools(&self) -> &[Tool] {
        match self {
            Self::None => &[],
            Self::May(tools) | Self::Must(tools) => tools,
        }
    }
}

/// Where an answer's thoughts are, if the model marks such.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thoughts {
    /// It begins inside them: the prompt has opened them.
    Begun,
    /// It has none: the prompt has closed them.
    Over,
    /// It may begin with them, and the mark that opens them.
    MayCome,
}

/// What an answer may be.
#[derive(Debug)]
pub struct Answer<'a> {
    /// The model's marks.
    pub format: &'a OutputFormat,
    /// The model's tokens.
    pub tokenizer: &'a Tokenizer,
    /// Where its thoughts are.
    pub thoughts: Thoughts,
    /// The form of what it says; `None`: any.
    pub form: Option<Form>,
    /// Which calls of tools it has.
    pub calls: Calls,
    /// Whether one call is all that it may have.
    pub one_call: bool,
}

/// Places of tools' schemas of which only the types are left, by the tool's name.
pub(crate) type Loosened = HashMap<String, HashSet<String>>;
/// Writes the rule of a tool's arguments.
type ToolRule<'r> = &'r mut dyn FnMut(&Tool) -> Result<String, GrammarError>;

/// A schema that a grammar has.
pub(crate) struct AnswerSchema {
    /// What errors call it.
    pub(crate) name: String,
    /// The tool whose it is; empty for the schema of the answer.
    pub(crate) tool: String,
    pub(crate) schema: Value,
    pub(crate) demand: Demand,
}

impl AnswerSchema {
    pub(crate) fn error(&self, pointer: String, what: String) -> GrammarError {
        Problem { pointer, what }.of(&self.name)
    }
}

/// White space that models write after marks.
const SPACE: &str = r"/[ \t\n\r]{0,8}/";
/// Any text.
const TEXT: &str = r"/(.|\n)*/";

impl Answer<'_> {
    /// Whether there is a grammar: not any answer will do.
    pub(crate) fn has_grammar(&self) -> bool {
        self.form.is_some() || self.calls != Calls::None
    }

    /// Names all that a grammar is written from, the model's tokens aside; with its bytes.
    pub(crate) fn digest(&self) -> (Digest, u64) {
        let mut hasher = blake3::Hasher::new();
        let around = (self.format, self.thoughts, &self.form, self.one_call, std::mem::discriminant(&self.calls));
        // A hasher takes everything.
        let _ = write!(hasher, "{around:?}");
        for Tool { name, parameters, is_strict } in self.calls.tools() {
            let _ = write!(hasher, "{name:?}{is_strict}");
            let _ = serde_json::to_writer(&mut hasher, parameters);
        }
        (*hasher.finalize().as_bytes(), hasher.count())
    }

    /// The grammar in llguidance's dialect of Lark, or a list of such; `None` if any answer will
    /// do.
    ///
    /// # Errors
    /// The form is none, or the model has no way to ask for tools.
    pub fn grammar(&self) -> Result<Option<String>, GrammarError> {
        Ok(self.written(&HashMap::new())?.map(|(grammar, _)| grammar))
    }

    /// The grammar, and what was left out of the schemas of its tools; of their places that are
    /// loosened, by the tool's name, only the types are left.
    pub(crate) fn written(&self, loosened: &Loosened) -> Result<Option<(String, Vec<String>)>, GrammarError> {
        let mut written = Vec::new();
        let grammar = self.grammar_with(&mut |tool| {
            let none = HashSet::new();
            let loosened = loosened.get(&tool.name).unwrap_or(&none);
            let parameters = Value::Object(tool.parameters.clone());
            let rule = json_rule(&parameters, "", tool.demand(), loosened);
            let (rule, dropped) = rule.map_err(|problem| problem.of(&tool.schema_name()))?;
            written.extend(dropped.iter().map(|problem| format!("{} {problem}", tool.schema_name())));
            Ok(rule)
        })?;
        Ok(grammar.map(|grammar| (grammar, written)))
    }

    /// The schemas of the grammar: what errors call each, and the tool of each that has one.
    pub(crate) fn schemas(&self) -> Result<Vec<AnswerSchema>, GrammarError> {
        let mut schemas = Vec::new();
        if let (Calls::None | Calls::May(_), Some(form)) = (&self.calls, &self.form) {
            let schema = form.schema()?;
            let name = THE_SCHEMA.to_owned();
            schemas.extend(schema.map(|(schema, demand)| AnswerSchema { name, tool: String::new(), schema, demand }));
        }
        if let Calls::Must(tools) | Calls::May(tools) = &self.calls {
            schemas.extend(tools.iter().map(|tool| AnswerSchema {
                name: tool.schema_name(),
                tool: tool.name.clone(),
                schema: Value::Object(tool.parameters.clone()),
                demand: tool.demand(),
            }));
        }
        Ok(schemas)
    }

    fn grammar_with(&self, arguments: ToolRule<'_>) -> Result<Option<String>, GrammarError> {
        let (body, rules) = match (&self.calls, &self.form) {
            (Calls::None, None) => return Ok(None),
            (Calls::None, Some(_)) => ("answer".to_owned(), String::new()),
            (Calls::Must(tools), _) => ("calls".to_owned(), self.calls(tools, arguments)?),
            (Calls::May(tools), Some(_)) => ("calls | answer".to_owned(), self.calls(tools, arguments)?),
            (Calls::May(tools), None) => self.calls_or_text(tools, arguments)?,
        };
        let mut grammar = match self.format.reasoning().filter(|_| self.thoughts != Thoughts::Over) {
            None => format!("start: {body}\n"),
            Some(marks) => self.after_thoughts(marks, &body),
        };
        grammar.push_str(&rules);
        if let (Calls::None | Calls::May(_), Some(form)) = (&self.calls, &self.form) {
            let _ = writeln!(grammar, "answer: {}", form.rule()?);
            grammar = form.beside(grammar);
        }
        Ok(Some(grammar))
    }

    fn after_thoughts(&self, marks: ReasoningMarks, body: &str) -> String {
        let thoughts = self.up_to("thoughts", marks.close());
        let start = match self.thoughts {
            Thoughts::Begun => format!("thoughts {SPACE} body"),
            _ => format!("body | {} thoughts {SPACE} body", self.mark(marks.open())),
        };
        format!("start: {start}\n{thoughts}body: {body}\n")
    }

    /// A rule of text up to a mark, and with it.
    fn up_to(&self, rule: &str, mark: &str) -> String {
        match self.tokenizer.special_token(mark) {
            Some(token) => format!("{rule}: {TEXT} <[{token}]>\n"),
            None => format!("{rule}[suffix={}]: {TEXT}\n", lark_string(mark)),
        }
    }

    /// A mark, as a token if it is one.
    fn mark(&self, mark: &str) -> String {
        self.tokenizer.special_token(mark).map_or_else(|| lark_string(mark), |token| format!("<[{token}]>"))
    }

    fn format_of_calls(&self) -> Result<ToolCallFormat, GrammarError> {
        let unknown =
            || GrammarError::Invalid("the model's chat template has no form of tool calls that is known".to_owned());
        self.format.tool_calls().ok_or_else(unknown)
    }

    /// Rules of `calls`: one call or more, with the marks around them.
    fn calls(&self, tools: &[Tool], arguments: ToolRule<'_>) -> Result<String, GrammarError> {
        let format = self.format_of_calls()?;
        let opening = format.opening_mark().map(|mark| self.mark(mark)).unwrap_or_default();
        let (calls, call) = self.rules_of_calls(format);
        let mut rules = format!("calls: {opening} {calls}\n{call}");
        self.write_tools(format, tools, arguments, &mut rules)?;
        Ok(rules)
    }

    /// What comes after the mark that opens calls, and the rules for it.
    fn rules_of_calls(&self, format: ToolCallFormat) -> (String, String) {
        let again =
            |separator: &str, call: &str| if self.one_call { String::new() } else { format!(" ({separator} {call})*") };
        match format {
            ToolCallFormat::Llama3 => {
                // The tag is optional, and most of the family do not write it.
                let tag = self
                    .tokenizer
                    .special_token("<|python_tag|>")
                    .map_or_else(String::new, |tag| format!("<[{tag}]>? "));
                (format!("{tag}tool{}", again("\"; \"", "tool")), String::new())
            }
            ToolCallFormat::Hermes => {
                let open = self.mark("<tool_call>");
                let close = self.mark("</tool_call>");
                let call = format!("call: \"\\n\" tool \"\\n\" {close}\n");
                (format!("call{}", again(&format!("\"\\n\" {open}"), "call")), call)
            }
            ToolCallFormat::Mistral if self.format.names_tools_first() => {
                let open = self.mark("[TOOL_CALLS]");
                (format!("tool{}", again(&open, "tool")), String::new())
            }
            ToolCallFormat::Mistral => (format!("\"[\" tool{} \"]\"", again("\", \"", "tool")), String::new()),
        }
    }

    /// The rule of the body and further rules: any text, and calls after it.
    fn calls_or_text(&self, tools: &[Tool], arguments: ToolRule<'_>) -> Result<(String, String), GrammarError> {
        let format = self.format_of_calls()?;
        let calls = self.calls(tools, arguments)?;
        let Some(mark) = format.opening_mark() else {
            // An answer that begins like a call is one.
            return Ok((
                "calls | text".to_owned(),
                format!("{calls}text: /([ \\t\\n\\r]*[^{{ \\t\\n\\r](.|\\n)*)?/\n"),
            ));
        };
        if self.tokenizer.special_token(mark).is_some() {
            return Ok((format!("{TEXT} calls?"), calls));
        }
        // A mark that is text ends the text before it.
        let (after_mark, rules) = self.rules_of_calls(format);
        let mut rules = format!("{}called: {after_mark}\n{rules}", self.up_to("before", mark));
        self.write_tools(format, tools, arguments, &mut rules)?;
        // Marks have no other characters that say something in a regular expression.
        let escaped = mark.replace('[', "\\[").replace(']', "\\]").replace('|', "\\|");
        let _ = writeln!(rules, "text: TEXT\nTEXT: {TEXT} & ~/(.|\\n)*{escaped}(.|\\n)*/");
        Ok(("text | before called".to_owned(), rules))
    }

    /// Rules of `tool`: the name and arguments of one of them.
    fn write_tools(
        &self,
        format: ToolCallFormat,
        tools: &[Tool],
        arguments: ToolRule<'_>,
        rules: &mut String,
    ) -> Result<(), GrammarError> {
        if tools.is_empty() {
            return Err(GrammarError::Invalid("there is no tool".to_owned()));
        }
        let names: Vec<_> = (0..tools.len()).map(|index| format!("tool_{index}")).collect();
        let _ = writeln!(rules, "tool: {}", names.join(" | "));
        let field = if format == ToolCallFormat::Llama3 { "parameters" } else { "arguments" };
        for (index, tool) in tools.iter().enumerate() {
            let name = &tool.name;
            let (before, after) = if self.format.names_tools_first() {
                (format!("{} {}", lark_string(name), self.mark("[ARGS]")), "")
            } else {
                (lark_string(&format!("{{\"name\": {}, \"{field}\": ", Value::from(name.as_str()))), "\"}\"")
            };
            let arguments = arguments(tool)?;
            let _ = writeln!(rules, "tool_{index}: {before} arguments_{index} {after}\narguments_{index}: {arguments}");
        }
        Ok(())
    }
}
