//! The files that lie next to safetensors and say how text becomes tokens.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use baton_types::TokenId;
use serde_json::Value;

use crate::end_tokens::end_tokens;
use crate::error::TextError;
use crate::tokenizer::Parts;
use crate::tokenizer_json;
use crate::vocabulary::Vocabulary;

/// Largest file read; the largest `tokenizer.json` in use have about 35 MB.
const MAX_FILE_BYTES: u64 = 128 << 20;

/// The folder of a model that was opened as a folder or as a file in it.
pub(crate) fn of(path: &Path) -> &Path {
    if path.is_dir() { path } else { path.parent().unwrap_or(path) }
}

/// The tokenizer of a folder.
pub(crate) fn parts(folder: &Path) -> Result<Parts, TextError> {
    let missing =
        || file_error(&folder.join("tokenizer.json"), "missing: the model has no tokenizer that Baton can read");
    let bytes = read(folder, "tokenizer.json")?.ok_or_else(missing)?;
    let mut parts = tokenizer_json::parts(&bytes)?;
    let configs = [json(folder, "generation_config.json")?, json(folder, "config.json")?];
    let names = json(folder, "tokenizer_config.json")?;
    let mut ends: Vec<TokenId> = configs.iter().flat_map(|config| ids(&config["eos_token_id"])).collect();
    ends.extend(named(&parts.vocabulary, &names["eos_token"]));
    check_ids("eos_token_id", &ends, &parts.vocabulary)?;
    parts.eos = end_tokens(ends.into_iter().chain(std::mem::take(&mut parts.eos)), []);
    if parts.bos.is_none() {
        let first = configs.iter().flat_map(|config| ids(&config["bos_token_id"])).next();
        parts.bos = named(&parts.vocabulary, &names["bos_token"]).or(first);
        check_ids("bos_token_id", parts.bos.as_slice(), &parts.vocabulary)?;
    }
    Ok(parts)
}

/// The sources of the chat templates by their names, as Hugging Face reads them. Files of their own
/// go before the field of `tokenizer_config.json`, which is a text or a list. The file of a
/// processor comes last.
pub(crate) fn chat_templates(folder: &Path) -> Result<Vec<(String, String)>, TextError> {
    let mut templates = Vec::new();
    if let Some(source) = text(folder, "chat_template.jinja")? {
        templates.push(("default".to_owned(), source));
    }
    let more = folder.join("additional_chat_templates");
    if let Some(source) = text(&more, "tool_use.jinja")? {
        templates.push(("tool_use".to_owned(), source));
    }
    for file in ["tokenizer_config.json", "chat_template.json"] {
        if !templates.iter().any(|(name, _)| name == "default") {
            let given = json(folder, file)?;
            templates.extend(listed(&given["chat_template"]));
        }
    }
    Ok(templates)
}

/// Names and sources of one template, of a list of named ones, or of an object of them.
fn listed(templates: &Value) -> Vec<(String, String)> {
    let pair = |name: &str, source: &Value| source.as_str().map(|source| (name.to_owned(), source.to_owned()));
    match templates {
        Value::Array(list) => {
            list.iter().filter_map(|entry| pair(entry["name"].as_str()?, &entry["template"])).collect()
        }
        Value::Object(named) => named.iter().filter_map(|(name, source)| pair(name, source)).collect(),
        one => pair("default", one).into_iter().collect(),
    }
}

/// The special tokens that Hugging Face gives to templates by name. One that is null is
/// empty.
pub(crate) fn special_tokens(folder: &Path) -> Result<Vec<(String, Value)>, TextError> {
    const NAMES: [&str; 7] =
        ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let files = [json(folder, "tokenizer_config.json")?, json(folder, "special_tokens_map.json")?];
    let text = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(Value::from);
    let mut tokens = Vec::new();
    for name in NAMES {
        if let Some(given) = files.iter().find_map(|file| file.get(name)) {
            tokens.push((name.to_owned(), text(given).unwrap_or_else(|| "".into())));
        }
    }
    let list = files.iter().find_map(|file| file["additional_special_tokens"].as_array());
    if let Some(list) = list {
        tokens.push(("additional_special_tokens".to_owned(), list.iter().filter_map(text).collect()));
    }
    Ok(tokens)
}

/// One id, or a list of them.
fn ids(value: &Value) -> Vec<TokenId> {
    let one = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match value {
        Value::Array(list) => list.iter().filter_map(one).collect(),
        value => one(value).into_iter().collect(),
    }
}

/// The id of a token given by its text, or by an object that holds its text.
fn named(vocabulary: &Vocabulary, value: &Value) -> Option<TokenId> {
    let text = value.as_str().or_else(|| value["content"].as_str())?;
    (0..vocabulary.len() as TokenId)
        .find(|&id| vocabulary.is_special(id) && vocabulary.bytes(id) == Some(text.as_bytes()))
}

fn check_ids(field: &str, ids: &[TokenId], vocabulary: &Vocabulary) -> Result<(), TextError> {
    match ids.iter().find(|&&id| id as usize >= vocabulary.len()) {
        Some(id) => Err(TextError::model(field, format!("{id}, but there are {} tokens", vocabulary.len()))),
        None => Ok(()),
    }
}

fn text(folder: &Path, name: &str) -> Result<Option<String>, TextError> {
    let Some(bytes) = read(folder, name)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|_| file_error(&folder.join(name), "no UTF-8"))
}

/// A JSON file; null if there is none.
pub(crate) fn json(folder: &Path, name: &str) -> Result<Value, TextError> {
    let Some(bytes) = read(folder, name)? else { return Ok(Value::Null) };
    serde_json::from_slice(&bytes).map_err(|error| file_error(&folder.join(name), error))
}

fn read(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, TextError> {
    let path = folder.join(name);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(file_error(&path, error)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|error| file_error(&path, error))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(file_error(&path, format!("larger than {MAX_FILE_BYTES} bytes")));
    }
    if baton_formats::is_lfs_pointer(&bytes) {
        return Err(file_error(&path, baton_formats::LFS_POINTER));
    }
    Ok(Some(bytes))
}

fn file_error(path: &Path, problem: impl ToString) -> TextError {
    TextError::File { path: path.display().to_string(), problem: problem.to_string() }
}
