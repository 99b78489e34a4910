//! Chat templates, and conversations for them.

use std::time::{Duration, UNIX_EPOCH};

use baton_text::{ChatMessage, ChatTemplate, Conversation, MOCK_CHAT_TEMPLATE, Tokenizer, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::fixture;
use crate::input::{join, parts, text};

pub(super) const WORDS: &[&str] = &[
    "{{",
    "}}",
    "{%",
    "%}",
    "{%-",
    "-%}",
    "{#",
    "#}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if ",
    "{% else %}",
    "{% elif ",
    "{% endif %}",
    "{% set x = ",
    "{% set ns = namespace(x='a') %}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% macro f(a) %}",
    "{% endmacro %}",
    "{% call f() %}",
    "{% endcall %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% raw %}",
    "{% endraw %}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{% break %}",
    "{% continue %}",
    "{% with a=1 %}",
    "{% endwith %}",
    "{% do ",
    "{% autoescape true %}",
    "{% include 'chat' %}",
    "{% extends 'chat' %}",
    "{% import 'chat' as c %}",
    "{% block b %}",
    "{% endblock %}",
    "messages",
    "message",
    "['content']",
    "[0]",
    "[-1]",
    "[::-1]",
    "[9999999999:]",
    "loop.index0",
    "loop.previtem",
    "loop(",
    "recursive",
    "loop.cycle(",
    "range(100000)",
    " | tojson(indent=99999)",
    " | join(",
    " | length",
    " | items",
    " | map('upper')",
    " | selectattr(",
    " | batch(3)",
    " | slice(3)",
    " | groupby(",
    " | indent(99999999)",
    " | replace('', 'aaaa')",
    " | default(",
    " | trim",
    " | sort",
    " | unique",
    " | list",
    " | dictsort",
    " | safe",
    " | escape",
    " | urlencode",
    " | pprint",
    " | chain(",
    " | zip(",
    " | format(",
    "'%9999999d'",
    ".split('')",
    ".strip()",
    ".replace('', 'xxxxx')",
    ".join(",
    ".format(",
    "'{:>999999999}'",
    ".upper()",
    ".title()",
    ".startswith(",
    ".count('')",
    ".items()",
    ".ljust(",
    ".zfill(",
    " ~ ",
    " * 99999",
    " ** ",
    " // 0",
    " % 0",
    " in ",
    " is string",
    " is defined",
    " not ",
    "strftime_now('%Y')",
    "strftime_now(",
    "'%999999999d'",
    "raise_exception('x')",
    "namespace(",
    "dict(",
    "lipsum(",
    "cycler(",
    "joiner(",
    "debug()",
    "\"role\":",
    "\"tool_calls\":",
    "\"arguments\":",
    "\"tools\":",
    "\"documents\":",
    "\"variables\":",
];

/// What a client says.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Said {
    messages: Vec<SaidMessage>,
    tools: Vec<Value>,
    documents: Vec<Value>,
    variables: Map<String, Value>,
    ends: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SaidMessage {
    role: String,
    content: String,
    name: String,
    reasoning: String,
    tool_calls: Vec<Called>,
    tool_call_id: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Called {
    id: String,
    name: String,
    arguments: String,
}

impl From<Said> for Conversation {
    fn from(said: Said) -> Self {
        let call = |Called { id, name, arguments }| ToolCall { id, name, arguments };
        let message = |said: SaidMessage| ChatMessage {
            role: said.role,
            content: said.content,
            name: said.name,
            reasoning: said.reasoning,
            tool_calls: said.tool_calls.into_iter().map(call).collect(),
            tool_call_id: said.tool_call_id,
        };
        Self {
            messages: said.messages.into_iter().map(message).collect(),
            tools: said.tools,
            documents: said.documents,
            variables: said.variables,
            add_generation_prompt: !said.ends,
            continue_final_message: false,
        }
    }
}

/// Parts: the template, and the conversation as JSON.
pub(super) fn render(input: &[u8]) {
    thread_local! {
        static TOKENIZER: Tokenizer = Tokenizer::bytes();
    }
    let [source, said] = parts(input);
    TOKENIZER.with(|tokenizer| {
        let Ok(template) = ChatTemplate::from_source(text(source), tokenizer) else { return };
        let conversation = Conversation::from(serde_json::from_slice::<Said>(said).unwrap_or_default());
        let now = UNIX_EPOCH + Duration::from_secs(951_782_400);
        let Ok(prompt) = template.render(&conversation, now) else { return };
        assert!(prompt.bytes() <= prompt.text().len());
        let format = template.output_format();
        let _ = (format.starts_in_reasoning(&prompt), format.reasoning_is_over(&prompt));
        if prompt.bytes() < 1 << 20 {
            tokenizer.encode_prompt(&prompt).expect("a short text");
        }
    });
}

const CONVERSATION: &str = r#"{"messages":[{"role":"system","content":"Be <|im_end|>"},{"role":"user","content":"é "},{"role":"assistant","content":"x","reasoning":"hm","tool_calls":[{"id":"c","name":"f","arguments":"{\"a\":1}"}]},{"role":"tool","content":"4","tool_call_id":"c"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"documents":[{"title":"t","text":"x"}],"variables":{"enable_thinking":false}}"#;

/// Templates that models have, and the tests' own.
pub(super) fn seeds() -> Vec<Vec<u8>> {
    let chats: Vec<Value> =
        serde_json::from_slice(&fixture("crates/text/tests/fixtures/chat.json")).expect("a fixture of JSON");
    let own = [
        MOCK_CHAT_TEMPLATE,
        "{% set ns = namespace(n=0) %}{% for m in messages | reverse %}{% set ns.n = ns.n + loop.index %}{{ m['content'][:2] }}{% endfor %}{{ ns.n }}",
        "{% macro show(v) %}{{ v | tojson(indent=2) }}{% endmacro %}{{ show(tools) }}{{ strftime_now('%d %b %Y') }}{{ documents | map(attribute='title') | join(', ') }}",
        "{%- generation -%} {{ messages[-1].content.split(' ')[0] ~ eos_token }} {%- endgeneration -%}",
    ];
    let given = chats.iter().filter_map(|chat| chat["template"].as_str());
    let mut templates: Vec<_> = given.chain(own).collect();
    templates.dedup();
    templates.iter().map(|template| join(&[template.as_bytes(), CONVERSATION.as_bytes()])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_template_seeds_are_rendered_or_refuse_the_conversation() {
        for seed in seeds() {
            let [source, said] = parts(&seed);
            let template = ChatTemplate::from_source(text(source), &Tokenizer::bytes()).expect("a template");
            let conversation = serde_json::from_slice::<Said>(said).expect("a conversation").into();
            if let Err(error) = template.render(&conversation, UNIX_EPOCH) {
                assert!(error.to_string().contains("on them") || error.to_string().contains("refuses them"), "{error}");
            }
        }
    }
}
