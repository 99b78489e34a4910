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

/// The source of the chat template: a file of its own, or a field of `tokenizer_config.json`, which
/// may be a list of named templates.
pub(crate) fn chat_template(folder: &Path) -> Result<Option<String>, TextError> {
    if let Some(bytes) = read(folder, "chat_template.jinja")? {
        let not_text = |_| file_error(&folder.join("chat_template.jinja"), "no UTF-8");
        return String::from_utf8(bytes).map(Some).map_err(not_text);
    }
    let config = json(folder, "tokenizer_config.json")?;
    let template = &config["chat_template"];
    let default = template.as_array().and_then(|list| list.iter().find(|entry| entry["name"] == "default"));
    let template = default.map_or(template, |entry| &entry["template"]);
    Ok(template.as_str().map(ToOwned::to_owned))
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
