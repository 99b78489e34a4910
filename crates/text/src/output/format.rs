//! How a model writes what is not text, as its chat template shows.

use baton_types::TokenId;

use super::OutputParser;
use super::calls::CallParser;
use super::family::ToolCallFormat;
use super::reasoning::{Reasoning, ReasoningMarks};
use crate::chat_template::RenderedPrompt;
use crate::tokenizer::Tokenizer;

/// How a model marks what it thinks, and which tools it asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputFormat {
    tool_calls: Option<ToolCallFormat>,
    reasoning: Option<ReasoningMarks>,
    names_tools_first: bool,
    shown_tokens: Vec<TokenId>,
}

impl OutputFormat {
    /// By the marks that the source of a chat template spells: templates write earlier answers as
    /// the model wrote them.
    pub fn detect(template_source: &str, tokenizer: &Tokenizer) -> Self {
        let tool_calls = tool_call_format(template_source);
        let reasoning = reasoning_marks(template_source);
        let calls = tool_calls.into_iter().flat_map(|format| format.marks().iter().copied());
        let thoughts = reasoning.into_iter().flat_map(|marks| [marks.open(), marks.close()]);
        let marks: Vec<_> = calls.chain(thoughts).collect();
        let names_tools_first = tool_calls == Some(ToolCallFormat::Mistral) && template_source.contains("[ARGS]");
        Self { tool_calls, reasoning, names_tools_first, shown_tokens: tokenizer.special_tokens_named(&marks) }
    }

    /// How tool calls are written; `None` if it is not known, and they are text.
    pub fn tool_calls(&self) -> Option<ToolCallFormat> {
        self.tool_calls
    }

    /// The marks around what the model thinks; `None` if there are none.
    pub fn reasoning(&self) -> Option<ReasoningMarks> {
        self.reasoning
    }

    /// Whether a call is its tool's name, `[ARGS]` and the arguments: Mistral's newer form. The
    /// parser reads both.
    pub fn names_tools_first(&self) -> bool {
        self.names_tools_first
    }

    /// Special tokens whose text the parser needs: for [`Tokenizer::detokenizer_showing`].
    pub fn shown_tokens(&self) -> &[TokenId] {
        &self.shown_tokens
    }

    /// Whether the answer to a prompt begins with what the model thinks: the prompt ends with the
    /// mark that opens it.
    pub fn starts_in_reasoning(&self, prompt: &RenderedPrompt) -> bool {
        // Contents that end so have a mark of their own inside.
        self.reasoning.is_some_and(|marks| prompt.marked.trim_ascii_end().ends_with(marks.open()))
    }

    /// Whether the prompt ends with the mark that closes what the model thinks: then it does not
    /// think.
    pub fn reasoning_is_over(&self, prompt: &RenderedPrompt) -> bool {
        self.reasoning.is_some_and(|marks| prompt.marked.trim_ascii_end().ends_with(marks.close()))
    }

    /// For one answer. `tools` are the names of those that it may ask for: the call of another one
    /// is text.
    pub fn parser(&self, starts_in_reasoning: bool, tools: Vec<String>) -> OutputParser {
        let reasoning = self.reasoning.map(|marks| Reasoning::new(marks, starts_in_reasoning));
        let format = self.tool_calls.filter(|_| !tools.is_empty());
        OutputParser::new(reasoning, format.map(|format| CallParser::new(format, tools)))
    }
}

fn tool_call_format(source: &str) -> Option<ToolCallFormat> {
    let has = |part: &str| source.contains(part);
    // Calls whose arguments are no JSON: Qwen 3 Coder, GLM 4.5, Hunyuan.
    if ["<function=", "<arg_key>", "<tool_sep>"].into_iter().any(has) {
        return None;
    }
    if has("[TOOL_CALLS]") {
        return Some(ToolCallFormat::Mistral);
    }
    if has("<tool_call>") {
        return Some(ToolCallFormat::Hermes);
    }
    // Llama 3.2 does not write the tag, and others that do not call tools so have Llama's headers.
    let is_llama = has("<|python_tag|>") || has("<|start_header_id|>") && has("\"parameters");
    (is_llama && has("tools")).then_some(ToolCallFormat::Llama3)
}

fn reasoning_marks(source: &str) -> Option<ReasoningMarks> {
    let has = |marks: &ReasoningMarks| source.contains(marks.open()) || source.contains(marks.close());
    [ReasoningMarks::BracketThink, ReasoningMarks::Think].into_iter().find(has)
}
