//! Settings in layers: defaults < TOML file < `BATON_…` environment < flags.
//!
//! A settings struct is plain data: flat, `Serialize + Deserialize + Default`, with `deny_unknown_fields`. Its keys are the TOML file's keys, the flags'
//! names (`-` for `_`) and, in capitals after `BATON_`, the environment's.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Exit status of a process whose settings are wrong.
pub const EXIT_BAD_SETTINGS: u8 = 2;

/// A setting is wrong.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("config: cannot read {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("config: {path} is not TOML: {reason}")]
    NotToml {
        /// The file.
        path: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// No such setting.
    #[error("{key}: there is no such setting (in {origin}); there are: {known}")]
    Unknown {
        /// The key.
        key: String,
        /// Where it was given.
        origin: String,
        /// The keys that there are.
        known: String,
    },
    /// The value does not have the form of the setting.
    #[error("{key}: {value} (from {origin}): {expected}")]
    Invalid {
        /// The key.
        key: String,
        /// What was given.
        value: String,
        /// Where it was given.
        origin: String,
        /// The form that is expected.
        expected: String,
    },
}

/// Settings and where each value came from.
#[derive(Debug, Clone)]
pub struct Loaded<T> {
    /// The settings.
    pub settings: T,
    /// Key to the layer that decided it.
    pub origins: BTreeMap<String, String>,
}

/// Puts the layers together. `flags` serializes to the keys given on the command line, with `null` for those that were not.
pub fn load<T: Serialize + DeserializeOwned + Default>(
    config: Option<&Path>,
    environment: impl Iterator<Item = (String, String)>,
    flags: &impl Serialize,
) -> Result<Loaded<T>, SettingsError> {
    let mut layers = Layers::new::<T>();
    if let Some(path) = config {
        layers.file::<T>(path)?;
    }
    for (name, value) in environment {
        layers.environment::<T>(&name, value)?;
    }
    for (key, value) in object(flags) {
        if !value.is_null() {
            let origin = format!("--{}", key.replace('_', "-"));
            layers.set::<T>(&key, value, origin)?;
        }
    }
    layers.finish()
}

fn object(value: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(map)) => map,
        // A settings struct is flat plain data by its contract.
        other => unreachable!("settings must serialize to an object: {other:?}"),
    }
}

struct Layers {
    values: Map<String, Value>,
    origins: BTreeMap<String, String>,
}

impl Layers {
    fn new<T: Serialize + Default>() -> Self {
        let values = object(&T::default());
        let origins = values.keys().map(|key| (key.clone(), "default".to_owned())).collect();
        Self { values, origins }
    }

    fn file<T: DeserializeOwned>(&mut self, path: &Path) -> Result<(), SettingsError> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| SettingsError::Unreadable { path: path.to_owned(), source })?;
        let not_toml = |reason: String| SettingsError::NotToml { path: path.to_owned(), reason };
        let table: toml::Table = toml::from_str(&text).map_err(|error| not_toml(error.to_string()))?;
        for (key, value) in table {
            let value = serde_json::to_value(value).map_err(|error| not_toml(error.to_string()))?;
            self.set::<T>(&key, value, path.display().to_string())?;
        }
        Ok(())
    }

    /// Variables that name no setting are somebody else's.
    fn environment<T: DeserializeOwned>(&mut self, name: &str, value: String) -> Result<(), SettingsError> {
        let Some(key) = name.strip_prefix("BATON_").map(str::to_ascii_lowercase) else { return Ok(()) };
        let Some(default) = self.values.get(&key) else { return Ok(()) };
        // The variable is text; the setting's default says what it is to be.
        let parsed = match default {
            Value::String(_) | Value::Null => None,
            _ => serde_json::from_str(&value).ok(),
        };
        self.set::<T>(&key, parsed.unwrap_or(Value::String(value)), name.to_owned())
    }

    /// Sets one key, and checks it by itself, so that an error can name it.
    fn set<T: DeserializeOwned>(&mut self, key: &str, value: Value, origin: String) -> Result<(), SettingsError> {
        if !self.values.contains_key(key) {
            let known = self.values.keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(SettingsError::Unknown { key: key.to_owned(), origin, known });
        }
        let text = value.to_string();
        self.values.insert(key.to_owned(), value);
        if let Err(error) = serde_json::from_value::<T>(Value::Object(self.values.clone())) {
            return Err(SettingsError::Invalid {
                key: key.to_owned(),
                value: text,
                origin,
                expected: error.to_string(),
            });
        }
        self.origins.insert(key.to_owned(), origin);
        Ok(())
    }

    fn finish<T: DeserializeOwned>(self) -> Result<Loaded<T>, SettingsError> {
        let settings = serde_json::from_value(Value::Object(self.values)).map_err(|error| SettingsError::Invalid {
            key: "settings".to_owned(),
            value: String::new(),
            origin: "defaults".to_owned(),
            expected: error.to_string(),
        })?;
        Ok(Loaded { settings, origins: self.origins })
    }
}

impl<T: Serialize> Loaded<T> {
    /// The settings as TOML, each with where it came from: what `--print-config` prints.
    pub fn print(&self) -> String {
        let mut text = String::new();
        for (key, value) in object(&self.settings) {
            let origin = self.origins.get(&key).map_or("default", String::as_str);
            let line = match value {
                Value::Null => format!("# {key} is not set"),
                value => format!("{key} = {value}"),
            };
            // Writing to a string does not fail.
            let _ = writeln!(text, "{line:<60} # {origin}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Serialize, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        listen: String,
        threads: u32,
        model: Option<PathBuf>,
        name: Option<String>,
    }

    impl Default for Sample {
        fn default() -> Self {
            Self { listen: "127.0.0.1:0".into(), threads: 1, model: None, name: None }
        }
    }

    #[derive(Serialize, Default)]
    struct Flags {
        threads: Option<u32>,
    }

    fn env(pairs: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
        pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect::<Vec<_>>().into_iter()
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn later_layers_win_and_are_named() {
        let config = file("threads = 2\nmodel = \"/m\"\nname = \"123\"");
        let environment =
            env(&[("BATON_THREADS", "3"), ("BATON_LISTEN", "0.0.0.0:1"), ("BATON_OTHER", "x"), ("PATH", "y")]);
        let loaded = load::<Sample>(Some(config.path()), environment, &Flags { threads: Some(4) }).unwrap();
        assert_eq!(loaded.settings.threads, 4);
        assert_eq!((loaded.settings.listen.as_str(), loaded.settings.name.as_deref()), ("0.0.0.0:1", Some("123")));
        assert_eq!(loaded.origins["threads"], "--threads");
        assert_eq!(loaded.origins["listen"], "BATON_LISTEN");
        assert!(loaded.print().contains("threads = 4"), "{}", loaded.print());
        assert!(toml::from_str::<toml::Table>(&loaded.print()).is_ok(), "what is printed can be read back");
    }

    #[test]
    fn a_bad_value_is_named_with_its_source() {
        let error = load::<Sample>(None, env(&[("BATON_THREADS", "many")]), &Flags::default()).unwrap_err().to_string();
        assert!(
            error.contains("threads")
                && error.contains("many")
                && error.contains("BATON_THREADS")
                && error.contains("u32"),
            "{error}"
        );
        let config = file("thread = 2");
        let error = load::<Sample>(Some(config.path()), env(&[]), &Flags::default()).unwrap_err().to_string();
        assert!(error.starts_with("thread: there is no such setting"), "{error}");
        let missing = load::<Sample>(Some(Path::new("/nowhere")), env(&[]), &Flags::default()).unwrap_err();
        assert!(matches!(missing, SettingsError::Unreadable { .. }));
        let broken = file("threads = = 2");
        let error = load::<Sample>(Some(broken.path()), env(&[]), &Flags::default()).unwrap_err();
        assert!(matches!(error, SettingsError::NotToml { .. }));
    }
}
