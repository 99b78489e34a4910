//! A Hugging Face model folder.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::header::MAX_TENSORS;
use crate::FormatError;
use crate::error::QuotedText;
use crate::map::refuse_lfs_pointer;

/// Largest `config.json`. A parsed JSON value can be fifty times its text, so this is kept near
/// what real models have (a few KB).
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Largest index; DeepSeek-V3's, with 91,000 tensors, has 9 MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Shards a model may have.
const MAX_SHARDS: usize = 1024;

const CONFIG: &str = "config.json";
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// What a folder says about its model before a shard is opened.
pub(super) struct Folder {
    /// `config.json`, an object.
    pub(super) config: Value,
    /// Names of the files with tensors.
    pub(super) shards: Vec<String>,
    /// The index, if the model has one.
    pub(super) index: Option<Index>,
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self, FormatError> {
        let config = config(&path.join(CONFIG))?;
        if path.join(SINGLE).exists() {
            return Ok(Self { config, shards: vec![SINGLE.to_owned()], index: None });
        }
        if !path.join(INDEX).exists() {
            return Err(FormatError::Missing {
                file: path.to_owned(),
                what: "file",
                name: format!("{SINGLE} or {INDEX}"),
            });
        }
        let index = Index::open(path.join(INDEX))?;
        Ok(Self { config, shards: index.shards()?, index: Some(index) })
    }
}

fn config(path: &Path) -> Result<Value, FormatError> {
    let allowed = "a JSON object";
    let config: Value = serde_json::from_slice(&read_small(path, MAX_CONFIG_BYTES)?)
        .map_err(|error| FormatError::invalid(path, "content", error, allowed))?;
    if !config.is_object() {
        return Err(FormatError::invalid(path, "content", "another JSON value", allowed));
    }
    Ok(config)
}

fn read_small(path: &Path, max_bytes: u64) -> Result<Vec<u8>, FormatError> {
    let about = std::fs::metadata(path).map_err(FormatError::io(path))?;
    if !about.is_file() {
        return Err(FormatError::invalid(path, "type", "a folder or special file", "a regular file"));
    }
    if about.len() > max_bytes {
        return Err(FormatError::invalid(path, "size", about.len(), format_args!("at most {max_bytes} bytes")));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(FormatError::io(path))?;
    file.take(max_bytes).read_to_end(&mut bytes).map_err(FormatError::io(path))?;
    refuse_lfs_pointer(path, &bytes)?;
    Ok(bytes)
}

/// `model.safetensors.index.json`: which shard has which tensor.
pub(super) struct Index {
    path: PathBuf,
    weight_map: WeightMap,
}

impl Index {
    fn open(path: PathBuf) -> Result<Self, FormatError> {
        #[derive(Deserialize)]
        struct File {
            weight_map: WeightMap,
        }

        let bytes = read_small(&path, MAX_INDEX_BYTES)?;
        let file: File = serde_json::from_slice(&bytes).map_err(|error| {
            FormatError::invalid(&path, "content", error, "an object whose weight_map has a file name for each tensor")
        })?;
        Ok(Self { path, weight_map: file.weight_map })
    }

    /// The shards' names, each once: plain names of files in the model's folder.
    fn shards(&self) -> Result<Vec<String>, FormatError> {
        let shards: BTreeSet<_> = self.weight_map.0.iter().map(|(_, shard)| shard.as_str()).collect();
        if shards.len() > MAX_SHARDS {
            let allowed = format_args!("at most {MAX_SHARDS}");
            return Err(FormatError::invalid(&self.path, "number of shards", shards.len(), allowed));
        }
        if let Some(bad) = shards.iter().find(|name| !is_shard_name(name)) {
            let allowed = "the name of a .safetensors file in the same folder";
            return Err(FormatError::invalid(&self.path, "shard in weight_map", QuotedText(bad), allowed));
        }
        Ok(shards.into_iter().map(str::to_owned).collect())
    }

    /// Checks each tensor of the index against `shard_of`, the shard that really has it.
    pub(super) fn check<'a>(&self, shard_of: impl Fn(&str) -> Option<&'a OsStr>) -> Result<(), FormatError> {
        for (tensor, shard) in &self.weight_map.0 {
            if shard_of(tensor) != Some(OsStr::new(shard)) {
                let found = format_args!("no such tensor in {}", QuotedText(shard));
                let field = format_args!("weight_map entry {}", QuotedText(tensor));
                return Err(FormatError::invalid(&self.path, field, found, "a tensor of that shard"));
            }
        }
        Ok(())
    }
}

fn is_shard_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    name.ends_with(".safetensors") && !name.starts_with('.') && name.chars().all(plain)
}

/// (tensor, shard) pairs.
struct WeightMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;

        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of file names by tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    if pairs.len() == MAX_TENSORS {
                        return Err(A::Error::custom(format_args!("more than {MAX_TENSORS} tensors")));
                    }
                    pairs.push(pair);
                }
                Ok(WeightMap(pairs))
            }
        }

        deserializer.deserialize_map(Pairs)
    }
}
