//! The files next to safetensors.

use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use baton_formats::ModelFile;
use baton_text::{ChatMessage, ChatTemplate, Conversation, EncodeOptions, TextError, Tokenizer};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder with one tensor, a tokenizer, and the files given; a string is written as it is.
fn folder(files: &[(&str, Value)]) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).expect("a file");
    let header = json!({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).to_string();
    let tensors = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
    write("model.safetensors", &tensors);
    write("config.json", br#"{"model_type": "llama", "eos_token_id": 2}"#);
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/smollm.json");
    write("tokenizer.json", &fs::read(tokenizer).expect("the fixture"));
    for (name, value) in files {
        let text = value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
        write(name, text.as_bytes());
    }
    folder
}

fn open(folder: &TempDir) -> ModelFile {
    ModelFile::open(folder.path()).expect("a model")
}

fn refusal(files: &[(&str, Value)]) -> TextError {
    Tokenizer::from_model(&open(&folder(files))).expect_err("refused")
}

#[test]
fn model_folder_gives_tokenizer_end_tokens_and_chat_template() {
    let folder = folder(&[
        ("generation_config.json", json!({"eos_token_id": [1, 0], "bos_token_id": 0})),
        (
            "tokenizer_config.json",
            json!({"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}),
        ),
    ]);
    let model = open(&folder);
    let tokenizer = Tokenizer::from_model(&model).expect("a tokenizer");
    assert_eq!((tokenizer.eos_ids(), tokenizer.bos(), tokenizer.add_bos()), (&[1, 0, 2][..], Some(0), false));
    let plain = EncodeOptions { add_special: true, parse_special: false };
    assert_eq!(tokenizer.decode(&tokenizer.encode("Hi 42 é", plain).expect("text"), Default::default()), "Hi 42 é");
    let template = ChatTemplate::from_model(&model, &tokenizer).expect("it compiles").expect("there is one");
    let hello = ChatMessage { role: "user".into(), content: "hello".into(), ..ChatMessage::default() };
    let prompt = template.render(&Conversation::new(vec![hello]), UNIX_EPOCH).expect("a message");
    assert_eq!(prompt.text(), "<|endoftext|>hello<|im_end|>");
}

#[test]
fn chat_template_is_found_where_the_hub_keeps_it() {
    let source = |files: &[(&str, Value)]| {
        let folder = folder(files);
        let model = open(&folder);
        let tokenizer = Tokenizer::from_model(&model).expect("a tokenizer");
        ChatTemplate::from_model(&model, &tokenizer).map(|template| {
            template.map(|template| template.render(&Conversation::new(Vec::new()), UNIX_EPOCH).expect("text").text())
        })
    };
    let list = json!({"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]});
    assert_eq!(source(&[("tokenizer_config.json", list.clone())]).expect("it compiles").as_deref(), Some("default"));
    let both = [("tokenizer_config.json", list), ("chat_template.jinja", "file".into())];
    assert_eq!(source(&both).expect("it compiles").as_deref(), Some("file"));
    let named = json!({"chat_template": {"default": "of an object"}});
    assert_eq!(source(&[("tokenizer_config.json", named)]).expect("it compiles").as_deref(), Some("of an object"));
    let processor = [("chat_template.json", json!({"chat_template": "of a processor"}))];
    assert_eq!(source(&processor).expect("it compiles").as_deref(), Some("of a processor"));
    assert_eq!(source(&[]).expect("nothing is wrong"), None);
    assert!(
        source(&[("chat_template.jinja", "{% if %}".into())])
            .expect_err("bad")
            .to_string()
            .starts_with("chat template: ")
    );
}

#[test]
fn chat_template_for_tools_and_special_tokens_are_those_of_the_folder() {
    let config = json!({
        "bos_token": null,
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<|pad|>"},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ additional_special_tokens | join }}",
    });
    let folder = folder(&[("tokenizer_config.json", config)]);
    fs::create_dir(folder.path().join("additional_chat_templates")).expect("a folder");
    fs::write(folder.path().join("additional_chat_templates/tool_use.jinja"), "for tools").expect("a file");
    let model = open(&folder);
    let tokenizer = Tokenizer::from_model(&model).expect("a tokenizer");
    let template = ChatTemplate::from_model(&model, &tokenizer).expect("it compiles").expect("there is one");
    let mut conversation = Conversation::new(Vec::new());
    assert_eq!(template.render(&conversation, UNIX_EPOCH).expect("text").text(), "<|im_end|><|pad|><a><b>");
    conversation.tools = vec![json!({"type": "function"})];
    assert_eq!(template.render(&conversation, UNIX_EPOCH).expect("text").text(), "for tools");
}

#[test]
fn invalid_tokenizer_file_of_model_folder_is_named() {
    let beyond = refusal(&[("generation_config.json", json!({"eos_token_id": 99_999}))]).to_string();
    assert!(beyond.starts_with("tokenizer: eos_token_id: 99999, but there are"), "{beyond}");
    let broken = refusal(&[("tokenizer_config.json", "{".into())]).to_string();
    assert!(broken.contains("tokenizer_config.json: EOF"), "{broken}");
    let folder = folder(&[]);
    fs::remove_file(folder.path().join("tokenizer.json")).expect("it is there");
    let missing = Tokenizer::from_model(&open(&folder)).expect_err("refused").to_string();
    assert!(missing.contains("tokenizer.json: missing"), "{missing}");
}
