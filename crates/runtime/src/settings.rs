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
    /// A flag that cannot be read as text.
    #[error("command line: {0}")]
    Flags(String),
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
    for (key, value) in flag_values(flags)? {
        if !value.is_null() {
            layers.set::<T>(&key, value, flag_name(&key))?;
        }
    }
    layers.finish()
}

/// The environment of this process. Unlike [`std::env::vars`] it does not panic over a variable that is not UTF-8; such a one is no setting.
pub fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

fn flag_name(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

fn flag_values(flags: &impl Serialize) -> Result<Map<String, Value>, SettingsError> {
    // JSON has no NaN and would drop it without a word; TOML has.
    if let Ok(table) = toml::Table::try_from(flags) {
        for (key, value) in &table {
            check_finite(key, value, &flag_name(key))?;
        }
    }
    match serde_json::to_value(flags) {
        Ok(value) => Ok(object(&value)),
        Err(error) => Err(SettingsError::Flags(error.to_string())),
    }
}

fn check_finite(key: &str, value: &toml::Value, origin: &str) -> Result<(), SettingsError> {
    match value {
        toml::Value::Float(number) if !number.is_finite() => Err(SettingsError::Invalid {
            key: key.to_owned(),
            value: number.to_string(),
            origin: origin.to_owned(),
            expected: "expected a finite number".to_owned(),
        }),
        _ => Ok(()),
    }
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
            check_finite(&key, &value, &path.display().to_string())?;
            let value = serde_json::to_value(value).map_err(|error| not_toml(error.to_string()))?;
            self.set::<T>(&key, value, path.display().to_string())?;
        }
        Ok(())
    }

    /// Variables that name no setting are somebody else's.
    fn environment<T: DeserializeOwned>(&mut self, name: &str, value: String) -> Result<(), SettingsError> {
        let Some(key) = name.strip_prefix("BATON_").map(str::to_ascii_lowercase) else { return Ok(()) };
        let Some(default) = self.values.get(&key) else { return Ok(()) };
        // The variable is text; the setting's default says what it is to be. One without a default takes it as text where it can.
        let parsed: Option<Value> = serde_json::from_str(&value).ok();
        let text = Value::String(value);
        let value = match (default, parsed) {
            (Value::String(_), _) | (_, None) => text,
            (Value::Null, Some(parsed)) if self.fits::<T>(&key, text.clone()).is_err() => parsed,
            (Value::Null, Some(_)) => text,
            (_, Some(parsed)) => parsed,
        };
        self.set::<T>(&key, value, name.to_owned())
    }

    /// Whether the settings hold with this value.
    fn fits<T: DeserializeOwned>(&self, key: &str, value: Value) -> Result<(), String> {
        let mut values = self.values.clone();
        values.insert(key.to_owned(), value);
        serde_json::from_value::<T>(Value::Object(values)).map(drop).map_err(|error| error.to_string())
    }

    /// Sets one key, and checks it by itself, so that an error can name it.
    fn set<T: DeserializeOwned>(&mut self, key: &str, value: Value, origin: String) -> Result<(), SettingsError> {
        if !self.values.contains_key(key) {
            let known = self.values.keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(SettingsError::Unknown { key: key.to_owned(), origin, known });
        }
        if let Err(expected) = self.fits::<T>(key, value.clone()) {
            return Err(SettingsError::Invalid { key: key.to_owned(), value: value.to_string(), origin, expected });
        }
        self.values.insert(key.to_owned(), value);
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
        limit: Option<u32>,
        grace_s: f64,
    }

    impl Default for Sample {
        fn default() -> Self {
            Self { listen: "127.0.0.1:0".into(), threads: 1, model: None, name: None, limit: None, grace_s: 1.0 }
        }
    }

    #[derive(Serialize, Default)]
    struct Flags {
        threads: Option<u32>,
        grace_s: Option<f64>,
        model: Option<PathBuf>,
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
        let loaded =
            load::<Sample>(Some(config.path()), environment, &Flags { threads: Some(4), ..Flags::default() }).unwrap();
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

    #[test]
    fn a_variable_becomes_what_a_setting_without_default_takes() {
        let environment = env(&[("BATON_LIMIT", "7"), ("BATON_NAME", "7"), ("BATON_GRACE_S", "2")]);
        let settings = load::<Sample>(None, environment, &Flags::default()).unwrap().settings;
        assert_eq!((settings.limit, settings.name.as_deref(), settings.grace_s), (Some(7), Some("7"), 2.0));
        let error = load::<Sample>(None, env(&[("BATON_LIMIT", "-7")]), &Flags::default()).unwrap_err().to_string();
        assert!(error.contains("limit: -7 (from BATON_LIMIT)") && error.contains("u32"), "{error}");
    }

    #[test]
    fn not_a_number_is_refused_in_every_layer() {
        let flags = Flags { grace_s: Some(f64::NAN), ..Flags::default() };
        let error = load::<Sample>(None, env(&[]), &flags).unwrap_err().to_string();
        assert!(error.contains("grace_s: NaN (from --grace-s)"), "{error}");
        let config = file("grace_s = nan");
        assert!(load::<Sample>(Some(config.path()), env(&[]), &Flags::default()).is_err());
        assert!(load::<Sample>(None, env(&[("BATON_GRACE_S", "NaN")]), &Flags::default()).is_err());
    }

    #[test]
    fn a_path_that_is_not_utf8_is_an_error_and_not_a_panic() {
        use std::os::unix::ffi::OsStrExt;
        let model = PathBuf::from(std::ffi::OsStr::from_bytes(b"/m\xff"));
        let flags = Flags { model: Some(model), ..Flags::default() };
        assert!(matches!(load::<Sample>(None, env(&[]), &flags), Err(SettingsError::Flags(_))));
    }
}
