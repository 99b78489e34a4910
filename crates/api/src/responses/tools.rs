//! The tools of a response: functions, custom tools whose input is a text, and namespaces of both.
//! All are functions to the model; calls come back as the client knows the tools.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use crate::chat::MAX_TOOL_NAME;
use crate::error::{BadRequest, Inside};
use crate::field::{AtMost, Ignored, JsonObject, object_or_empty_list, open_objects};
use crate::format::Schema;
use crate::tools::{MAX_TOOLS, Tool, Tools, check_name, leave_out};
use crate::warnings::warn_field;

open_objects! {
    pub(super) struct ToolFields {
        r#type: String,
        name: Option<String>,
        description: Option<String>,
        #[serde(default, deserialize_with = "object_or_empty_list")]
        parameters: Option<Schema>,
        strict: Option<bool>,
        /// Form of a custom tool's input.
        format: Option<InputFormat>,
        /// Tools of a namespace.
        tools: Option<AtMost<ToolJson, MAX_TOOLS>>,
        #[serde(default, rename = "defer_loading")]
        _defer_loading: Ignored,
        #[serde(default, rename = "allowed_callers")]
        _allowed_callers: Ignored,
        #[serde(default, rename = "output_schema")]
        _output_schema: Ignored,
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
    }

    /// The form of a custom tool's input.
    pub(super) struct InputFormat {
        r#type: String,
        syntax: Option<String>,
        definition: Option<String>,
    }
}

/// A tool that is served, or none.
#[derive(Debug, Deserialize)]
#[serde(try_from = "ToolFields")]
pub(super) enum ToolJson {
    Function { name: String, description: Option<String>, parameters: Option<Schema>, strict: Option<bool> },
    Custom { name: String, description: Option<String>, format: Option<InputFormat> },
    Namespace { name: String, description: Option<String>, tools: Vec<ToolJson> },
    LeftOut,
}

impl TryFrom<ToolFields> for ToolJson {
    type Error = Inside;

    fn try_from(tool: ToolFields) -> Result<Self, Inside> {
        let ToolFields { r#type, name, description, parameters, strict, format, tools, .. } = tool;
        let name = || name.ok_or_else(|| BadRequest::missing("name"));
        match r#type.as_str() {
            "function" => Ok(Self::Function { name: name()?, description, parameters, strict }),
            "custom" => {
                if let Some(format) = &format {
                    format.check()?;
                }
                Ok(Self::Custom { name: name()?, description, format })
            }
            "namespace" => {
                let AtMost(tools) = tools.ok_or_else(|| BadRequest::missing("tools"))?;
                if tools.iter().any(|tool| matches!(tool, Self::Namespace { .. })) {
                    return Err(
                        BadRequest::new("tools", "has a namespace in it, but only functions and custom tools").into()
                    );
                }
                Ok(Self::Namespace { name: name()?, description, tools })
            }
            // It looks for tools that are not in the prompt; here all are.
            kind if kind == "tool_search" || parameters.is_none() => {
                leave_out(kind);
                Ok(Self::LeftOut)
            }
            other => Err(BadRequest::kind("type", other, "function, custom or namespace").into()),
        }
    }
}

impl InputFormat {
    fn check(&self) -> Result<(), BadRequest> {
        let missing = |field: &str| BadRequest::missing(format!("format.{field}"));
        match self.r#type.as_str() {
            "text" => Ok(()),
            "grammar" => {
                self.definition.as_ref().ok_or_else(|| missing("definition"))?;
                match self.syntax.as_deref().ok_or_else(|| missing("syntax"))? {
                    "lark" => {
                        warn_field("format", "the model is told the grammar, and is not held to it");
                        Ok(())
                    }
                    "regex" => Ok(()),
                    other => Err(BadRequest::kind("format.syntax", other, "lark or regex")),
                }
            }
            other => Err(BadRequest::kind("format.type", other, "text or grammar")),
        }
    }

    fn grammar(&self) -> Option<(&str, &str)> {
        Some((self.syntax.as_deref()?, self.definition.as_deref()?))
    }
}

/// A tool, as its client knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    pub(super) is_custom: bool,
}

/// Names of the tools: those that the model is told, and those that the client knows.
#[derive(Debug, Default)]
pub(super) struct ToolNames {
    /// By the name that the model is told.
    origins: HashMap<String, Origin>,
}

impl ToolNames {
    /// The client's tool of what the model called.
    pub(super) fn origin(&self, wire: &str) -> Option<&Origin> {
        self.origins.get(wire)
    }

    /// What the model is told for a tool of an earlier call. One that is no tool any more keeps its
    /// name.
    pub(super) fn wire(&self, namespace: Option<&str>, name: &str) -> String {
        let is_meant = |origin: &Origin| origin.name == name && origin.namespace.as_deref() == namespace;
        let is_plain = self.origins.get(name).is_some_and(is_meant);
        match namespace {
            Some(namespace) if !is_plain && self.origins.contains_key(&qualified(namespace, name)) => {
                qualified(namespace, name)
            }
            _ => name.to_owned(),
        }
    }

    /// What the model is told for a tool: its name, or with its namespace, if two have that.
    fn add(&mut self, path: &str, namespace: Option<&str>, name: &str, is_custom: bool) -> Result<String, BadRequest> {
        check_name(path, name, MAX_TOOL_NAME)?;
        let wire = match namespace {
            Some(namespace) if self.origins.contains_key(name) => qualified(namespace, name),
            _ => name.to_owned(),
        };
        let origin = Origin { namespace: namespace.map(str::to_owned), name: name.to_owned(), is_custom };
        self.origins.insert(wire.clone(), origin);
        Ok(wire)
    }
}

fn qualified(namespace: &str, name: &str) -> String {
    format!("{}__{name}", namespace.trim_end_matches('_'))
}

/// The tools of a body, as the wire has them, and their names.
pub(super) fn wire_tools(given: &[ToolJson]) -> Result<(Tools, ToolNames), BadRequest> {
    let mut tools = Tools::default();
    let mut names = ToolNames::default();
    // Those of no namespace first: they keep their names.
    for (index, tool) in given.iter().enumerate() {
        add(&mut tools, &mut names, &format!("tools[{index}]"), None, tool)?;
    }
    for (index, tool) in given.iter().enumerate() {
        let ToolJson::Namespace { name: namespace, tools: inner, .. } = tool else { continue };
        check_name(&format!("tools[{index}].name"), namespace, MAX_TOOL_NAME)?;
        for (place, tool) in inner.iter().enumerate() {
            add(&mut tools, &mut names, &format!("tools[{index}].tools[{place}]"), Some(namespace), tool)?;
        }
    }
    Ok((tools, names))
}

fn add(
    tools: &mut Tools,
    names: &mut ToolNames,
    path: &str,
    namespace: Option<&str>,
    tool: &ToolJson,
) -> Result<(), BadRequest> {
    let path = format!("{path}.name");
    match tool {
        ToolJson::Function { name, description, parameters, strict } => {
            let name = &names.add(&path, namespace, name, false)?;
            let parameters = parameters.as_ref().map(|JsonObject(parameters)| &**parameters);
            let tool = Tool { name, description: description.as_deref(), parameters, strict: *strict };
            tools.add(&path, MAX_WIRE_NAME, &tool)
        }
        ToolJson::Custom { name, description, format } => {
            let name = &names.add(&path, namespace, name, true)?;
            let grammar = format.as_ref().and_then(InputFormat::grammar);
            let description = custom_description(description.as_deref(), grammar);
            let parameters = custom_parameters(grammar)?;
            // A pattern is enforced.
            let strict = matches!(grammar, Some(("regex", _))).then_some(true);
            let tool = Tool { name, description: Some(&description), parameters: Some(&parameters), strict };
            tools.add(&path, MAX_WIRE_NAME, &tool)
        }
        ToolJson::Namespace { .. } => Ok(()),
        ToolJson::LeftOut => {
            tools.leave_out();
            Ok(())
        }
    }
}

/// Longest name of a tool with its namespace, which the conductor takes.
const MAX_WIRE_NAME: usize = 128;

/// What the model is told of a custom tool: its input is a text.
fn custom_description(description: Option<&str>, grammar: Option<(&str, &str)>) -> String {
    let mut told = description.unwrap_or_default().to_owned();
    if let Some((syntax, definition)) = grammar {
        told.push_str(&format!("\nThe input is of this grammar ({syntax}):\n{definition}"));
    }
    told
}

fn custom_parameters(grammar: Option<(&str, &str)>) -> Result<Box<RawValue>, BadRequest> {
    let mut input = json!({ "type": "string" });
    if let Some(("regex", pattern)) = grammar {
        input["pattern"] = format!("^(?:{pattern})$").into();
    }
    let schema = json!({
        "type": "object", "properties": { "input": input }, "required": ["input"], "additionalProperties": false,
    });
    to_raw_value(&schema).map_err(|error| BadRequest::new("tools", error.to_string()))
}

/// The text that a custom tool is called with. An answer that ended inside of it has what came.
pub(super) fn custom_input(arguments: &str) -> String {
    #[derive(Deserialize)]
    struct Arguments {
        input: String,
    }
    serde_json::from_str(arguments).map_or_else(|_| arguments.to_owned(), |Arguments { input }| input)
}

/// A tool, as a response repeats it.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ToolEcho {
    Function { name: String, description: Option<String>, parameters: Option<Box<RawValue>>, strict: Option<bool> },
    Custom { name: String, description: Option<String>, format: FormatEcho },
    Namespace { name: String, description: Option<String>, tools: Vec<ToolEcho> },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum FormatEcho {
    Text,
    Grammar { syntax: String, definition: String },
}

/// The tools, as a response repeats them.
pub(super) fn echo(tools: Vec<ToolJson>) -> Vec<ToolEcho> {
    tools.into_iter().filter_map(echo_of).collect()
}

fn echo_of(tool: ToolJson) -> Option<ToolEcho> {
    match tool {
        ToolJson::Function { name, description, parameters, strict } => {
            let parameters = parameters.map(|JsonObject(parameters)| parameters);
            Some(ToolEcho::Function { name, description, parameters, strict })
        }
        ToolJson::Custom { name, description, format } => {
            let format = match format {
                Some(InputFormat { syntax: Some(syntax), definition: Some(definition), .. }) => {
                    FormatEcho::Grammar { syntax, definition }
                }
                _ => FormatEcho::Text,
            };
            Some(ToolEcho::Custom { name, description, format })
        }
        ToolJson::Namespace { name, description, tools } => {
            Some(ToolEcho::Namespace { name, description, tools: echo(tools) })
        }
        ToolJson::LeftOut => None,
    }
}
