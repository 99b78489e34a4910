//! Contents are not orders, in templates in the manner of eight families. Users, tools, documents,
//! names, calls, arguments and variables may say anything. The control tokens of a prompt are the
//! template's own.

use std::fs;
use std::path::Path;

use baton_text::{ChatMessage, ChatTemplate, Conversation, DecodeOptions, Tokenizer, ToolCall};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A family's marks, whether each is a special token, and a template of its kind.
struct Family {
    name: &'static str,
    marks: &'static [(&'static str, bool)],
    template: &'static str,
}

const FAMILIES: [Family; 8] = [
    Family {
        name: "chatml with tools",
        marks: &[
            ("<|im_start|>", true),
            ("<|im_end|>", true),
            ("<tool_call>", false),
            ("</tool_call>", false),
            ("<think>", false),
            ("</think>", false),
        ],
        template: "{% if tools %}<|im_start|>system\nUse <tool_call></tool_call>:{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}\
            {% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n\
            {% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}\
            {% if documents %}{{ documents | tojson(indent=2) }}{% endif %}<|im_start|>assistant\n<think>\n",
    },
    Family {
        name: "llama 3",
        marks: &[
            ("<|begin_of_text|>", true),
            ("<|start_header_id|>", true),
            ("<|end_header_id|>", true),
            ("<|eot_id|>", true),
            ("<|python_tag|>", true),
        ],
        template: "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}\
            {% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}{% for d in documents or [] %}{{ d.text }}{% endfor %}\
            <|start_header_id|>assistant<|end_header_id|>\n\n",
    },
    Family {
        name: "llama 2",
        marks: &[("<s>", true), ("</s>", true)],
        template: "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + '</s>' }}{% else %}{{ '<s>' + '[INST] ' + m.content.strip() + ' [/INST]' }}{% endif %}{% endfor %}\
            {{ tools | tojson }}{{ documents | tojson }}",
    },
    Family {
        name: "mistral",
        marks: &[
            ("<s>", true),
            ("</s>", true),
            ("[INST]", true),
            ("[/INST]", true),
            ("[TOOL_CALLS]", true),
            ("[AVAILABLE_TOOLS]", true),
            ("[/AVAILABLE_TOOLS]", true),
            ("[TOOL_RESULTS]", true),
            ("[/TOOL_RESULTS]", true),
        ],
        template: "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}\
            {% for m in messages %}{% if m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}\
            {% elif m.role == 'assistant' %}{{ m.content + '</s>' }}{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}{{ documents | tojson }}",
    },
    Family {
        name: "gemma",
        marks: &[("<bos>", true), ("<start_of_turn>", true), ("<end_of_turn>", true)],
        template: "<bos>{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}\
            {{ tools | tojson }}{{ documents | tojson }}<start_of_turn>model\n",
    },
    Family {
        name: "phi",
        marks: &[
            ("<|system|>", true),
            ("<|user|>", true),
            ("<|assistant|>", true),
            ("<|tool|>", true),
            ("<|end|>", true),
        ],
        template: "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}{{ tools | tojson }}{{ documents | tojson }}<|assistant|>\n",
    },
    Family {
        name: "deepseek",
        marks: &[
            ("<｜begin▁of▁sentence｜>", true),
            ("<｜end▁of▁sentence｜>", true),
            ("<｜User｜>", false),
            ("<｜Assistant｜>", false),
            ("<think>", false),
            ("</think>", false),
        ],
        template: "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'assistant' %}\
            {{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% else %}{{ '<｜User｜>' + m.content }}{% endif %}{% endfor %}\
            {{ tools | tojson }}{{ documents | tojson }}<｜Assistant｜><think>\n",
    },
    Family {
        name: "command",
        marks: &[
            ("<BOS_TOKEN>", true),
            ("<|START_OF_TURN_TOKEN|>", true),
            ("<|END_OF_TURN_TOKEN|>", true),
            ("<|USER_TOKEN|>", true),
            ("<|CHATBOT_TOKEN|>", true),
            ("<|SYSTEM_TOKEN|>", true),
        ],
        template: "<BOS_TOKEN>{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ {'assistant': '<|CHATBOT_TOKEN|>', 'system': '<|SYSTEM_TOKEN|>'}.get(m.role, '<|USER_TOKEN|>') }}{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}\
            {% for d in documents or [] %}Document: {{ loop.index0 }}\n{% for key, value in d.items() %}{{ key }}: {{ value }}\n{% endfor %}{% endfor %}{{ tools | tojson }}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    },
];

/// What families add to their messages, before each template's own: names, calls with their
/// arguments as text and as an object, and a variable.
const CALLS: &str = "{% for m in messages %}{{ m.name }}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}\
    {{ c.function.ARGUMENTS }}{% endfor %}{{ m.tool_call_id }}{% endfor %}{{ variable }}";

/// A tokenizer of the fixtures, with the family's marks for its added tokens.
fn tokenizer(fixture: &str, family: &Family) -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("JSON");
    let vocabulary = tokenizer["model"]["vocab"].as_object().expect("a vocabulary").len();
    let added: Vec<_> = tokenizer["added_tokens"].as_array().expect("a list").clone();
    let is_new = |mark: &str| added.iter().all(|token| token["content"] != mark);
    let ids = vocabulary + added.len()..;
    let marks = family.marks.iter().filter(|(mark, _)| is_new(mark)).zip(ids).map(|((mark, special), id)| {
        json!({"id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special})
    });
    tokenizer["added_tokens"] = added.iter().cloned().chain(marks).collect();
    Tokenizer::from_tokenizer_json(&serde_json::to_vec(&tokenizer).expect("JSON")).expect("a tokenizer")
}

fn conversation(said: &str) -> Conversation {
    let message =
        |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into(), ..Default::default() };
    let call = ToolCall { id: said.into(), name: said.into(), arguments: json!({said: [said]}).to_string() };
    let messages = vec![
        message("system", said),
        ChatMessage { name: said.into(), ..message("user", said) },
        ChatMessage { tool_calls: vec![call], ..message("assistant", "Yes.") },
        ChatMessage { tool_call_id: said.into(), ..message("tool", said) },
        message("user", said),
    ];
    let tool =
        json!({"type": "function", "function": {"name": "f", "description": said, "parameters": {said: [said]}}});
    let document = json!({"title": said, "text": said});
    let variables = serde_json::Map::from_iter([("variable".to_owned(), json!(said))]);
    Conversation { tools: vec![tool], documents: vec![document], variables, ..Conversation::new(messages) }
}

/// The control tokens of the prompt, in order, and its text as it comes back from the tokens.
fn prompt(template: &ChatTemplate, tokenizer: &Tokenizer, marks: &[u32], said: &str) -> (Vec<u32>, String, String) {
    let rendered = template.render(&conversation(said), std::time::UNIX_EPOCH).expect("a prompt");
    let tokens = tokenizer.encode_prompt(&rendered).expect("tokens");
    let all = DecodeOptions { skip_special: false, starts_text: true };
    (
        tokens.iter().copied().filter(|token| marks.contains(token)).collect(),
        tokenizer.decode(&tokens, all),
        rendered.text(),
    )
}

fn check(family: &Family, fixture: &str, arguments: &str, texts: impl Strategy<Value = String>, cases: u32) {
    let tokenizer = tokenizer(fixture, family);
    let source = CALLS.replace("ARGUMENTS", arguments) + family.template;
    let template = ChatTemplate::from_source(&source, &tokenizer).expect("a template");
    let is_mark = |id: &u32| family.marks.iter().any(|(mark, _)| tokenizer.token_bytes(*id) == Some(mark.as_bytes()));
    let marks: Vec<u32> = (0..tokenizer.vocab_size()).filter(is_mark).collect();
    assert_eq!(marks.len(), family.marks.len(), "{}", family.name);
    let own = prompt(&template, &tokenizer, &marks, "x").0;
    assert!(!own.is_empty(), "{}", family.name);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(said in texts)| {
        let (found, decoded, text) = prompt(&template, &tokenizer, &marks, &said);
        prop_assert_eq!(&found, &own, "{} {}: {:?}", family.name, fixture, said);
        // SentencePiece's fixture does not keep every space.
        if fixture == "qwen2.json" {
            prop_assert_eq!(decoded, text, "{}", family.name);
        }
    });
}

#[test]
fn control_tokens_of_a_prompt_are_only_those_of_its_template() {
    for family in &FAMILIES {
        let marks: Vec<_> = family.marks.iter().map(|(mark, _)| (*mark).to_owned()).collect();
        // Whole marks, halves of them, and what their names are made of.
        let halves = marks.iter().flat_map(|mark| {
            let middle = mark.char_indices().nth(mark.chars().count() / 2).map_or(0, |(at, _)| at);
            [mark[..middle].to_owned(), mark[middle..].to_owned()]
        });
        let pieces: Vec<_> = marks.iter().cloned().chain(halves).collect();
        let piece = prop_oneof![
            4 => prop::sample::select(pieces),
            2 => "[<>|\\[\\]/a-z_ \n\"\\\\é\u{fdd0}]{0,6}",
            1 => prop::sample::select(vec!["user", "system", "assistant", "im_end", "end", "/INST"]).prop_map(str::to_owned),
        ];
        let texts = prop::collection::vec(piece, 1..6).prop_map(|pieces| pieces.concat());
        check(family, "qwen2.json", "arguments", texts.clone(), 100);
        check(family, "qwen2.json", "arguments | tojson", texts.clone(), 100);
        check(family, "llama.json", "arguments", texts, 50);
    }
}
