//! Settings in layers: defaults < TOML file < `BATON_…` environment < flags. A variable that is set
//! and empty is not set.
//!
//! An error about a setting names it as it was given: the flag as typed, the variable, or the
//! file's key and the file ([`Origins::name`]).
//!
//! A settings struct is plain data: flat, and declared once, by [`settings!`](crate::settings!).
//! Its keys are the TOML file's keys, the flags' names (`-` for `_`) and, in capitals after
//! `BATON_`, the environment's.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ffi::OsString;
use std::fmt::{Display, Write as _};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_types::ErrorKind;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::error_chain;

/// Exit status of a process whose settings are wrong.
pub const EXIT_BAD_SETTINGS: u8 = 2;
/// Exit status of a process that failed.
const EXIT_FAILURE: u8 = 1;

/// A setting is wrong.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("--config: cannot read {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("--config: {path} is not TOML: {reason}")]
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
    #[error("{name}: {problem}")]
    Invalid {
        /// The setting, as it was given.
        name: String,
        /// What was given, and the form that is expected.
        problem: String,
    },
}

/// A setting has the right form and cannot be used: out of range, a file that is not there, an
/// address that is taken.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct BadSetting {
    /// Its key.
    pub key: &'static str,
    /// The value, what is wrong with it, and what to do.
    pub problem: String,
    /// [`ErrorKind::Invalid`], or what may be another time: [`ErrorKind::Unavailable`].
    pub kind: ErrorKind,
}

impl BadSetting {
    /// It will never do.
    pub fn invalid(key: &'static str, problem: impl Into<String>) -> Self {
        Self { key, problem: problem.into(), kind: ErrorKind::Invalid }
    }

    /// It may do another time.
    pub fn unavailable(key: &'static str, problem: impl Into<String>) -> Self {
        Self { key, problem: problem.into(), kind: ErrorKind::Unavailable }
    }
}

/// Longest name of something that is served.
const MAX_NAME_BYTES: usize = 256;
/// Most names that one thing may have.
const MAX_NAMES: usize = 64;

/// A value that is within its range.
///
/// # Errors
/// It is not, or is no number.
pub fn within<T: PartialOrd + Display>(key: &'static str, value: T, range: RangeInclusive<T>) -> Result<T, BadSetting> {
    let least = range.start();
    let most = range.end();
    if range.contains(&value) {
        return Ok(value);
    }
    Err(BadSetting::invalid(key, format!("{value}, but must be {least} to {most}")))
}

/// A name that people and programs read: printable, and short.
///
/// # Errors
/// It is not.
pub fn name(key: &'static str, value: &str) -> Result<(), BadSetting> {
    let is_printable = !value.contains(|letter: char| letter.is_control());
    if (1..=MAX_NAME_BYTES).contains(&value.len()) && is_printable && value.trim() == value {
        return Ok(());
    }
    let form = format!("1 to {MAX_NAME_BYTES} bytes, without control characters or spaces around them");
    Err(BadSetting::invalid(key, format!("{value:?}, but must have {form}")))
}

/// Names of something that are within bounds: at most 64, each as [`name`] says.
///
/// # Errors
/// Too many names are given, or one is out of its bounds.
pub fn names(key: &'static str, values: &[String]) -> Result<(), BadSetting> {
    if values.len() > MAX_NAMES {
        return Err(BadSetting::invalid(key, format!("{} names, but must be at most {MAX_NAMES}", values.len())));
    }
    values.iter().try_for_each(|value| name(key, value))
}

/// Reads a list, or a text of its entries with commas between them.
///
/// # Errors
/// The value is neither.
pub fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a list, or a text with commas")]
    enum List {
        Entries(Vec<String>),
        Text(String),
    }
    Ok(match List::deserialize(deserializer)? {
        List::Entries(entries) => entries,
        List::Text(text) => {
            text.split(',').map(str::trim).filter(|entry| !entry.is_empty()).map(ToOwned::to_owned).collect()
        }
    })
}

/// A time in seconds that is within its range.
///
/// # Errors
/// It is not, or is no number.
pub fn seconds(key: &'static str, value: f64, range: RangeInclusive<f64>) -> Result<Duration, BadSetting> {
    let seconds = within(key, value, range)?;
    Duration::try_from_secs_f64(seconds).map_err(|error| BadSetting::invalid(key, format!("{value}: {error}")))
}

/// What decided the value of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// None was given.
    Default,
    /// The file of `--config`.
    File(PathBuf),
    /// An environment variable.
    Variable(String),
    /// A flag.
    Flag,
    /// Set for the whole cluster while it runs.
    Shared,
}

/// Where each value came from, and so what to call its setting.
#[derive(Debug, Clone, Default)]
pub struct Origins {
    layers: BTreeMap<String, Origin>,
    keys: BTreeSet<&'static str>,
}

impl Origins {
    /// What decided a setting's value.
    pub fn of(&self, key: &str) -> &Origin {
        self.layers.get(key).unwrap_or(&Origin::Default)
    }

    /// A setting's name as its value was given: `--threads`, `BATON_THREADS`, or
    /// `threads (in baton.toml)`. Of a value that was not given it is the flag that changes it.
    pub fn name(&self, key: &str) -> String {
        match self.of(key) {
            Origin::Default if self.keys.contains(key) => flag_name(key),
            Origin::Default => key.to_owned(),
            Origin::File(path) => format!("{key} (in {})", path.display()),
            Origin::Variable(name) => name.clone(),
            Origin::Flag => flag_name(key),
            Origin::Shared => key.to_owned(),
        }
    }

    /// A process's last words, and its exit status, for an error that ended it.
    pub fn last_words(&self, error: &(dyn Error + 'static)) -> (String, u8) {
        let mut causes = std::iter::successors(Some(error), |cause: &&(dyn Error + 'static)| (*cause).source());
        match causes.find_map(|cause| cause.downcast_ref::<BadSetting>()) {
            Some(BadSetting { key, problem, kind: ErrorKind::Invalid }) => {
                (format!("{}: {problem}", self.name(key)), EXIT_BAD_SETTINGS)
            }
            Some(BadSetting { key, problem, .. }) => (format!("{}: {problem}", self.name(key)), EXIT_FAILURE),
            None => (error_chain(error), EXIT_FAILURE),
        }
    }

    /// As [`Origin`]'s name in what is printed.
    pub fn told(&self, key: &str) -> String {
        match self.of(key) {
            Origin::Default => "default".to_owned(),
            Origin::Shared => "set at run time".to_owned(),
            Origin::File(path) => path.display().to_string(),
            Origin::Variable(_) | Origin::Flag => self.name(key),
        }
    }
}

/// Settings and where each value came from.
#[derive(Debug, Clone)]
pub struct Loaded<T> {
    /// The settings.
    pub settings: T,
    /// What decided each of them.
    pub origins: Origins,
}

impl<T> From<T> for Loaded<T> {
    /// As if none had been given.
    fn from(settings: T) -> Self {
        Self { settings, origins: Origins::default() }
    }
}

/// A setting as it is declared.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Its key.
    pub key: &'static str,
    /// Its doc comment, with a blank before each line.
    pub doc: &'static str,
    /// What its flag takes, as help shows it.
    pub value_name: &'static str,
}

impl Setting {
    /// What it does: sentences without a stop at the end.
    pub fn about(&self) -> &'static str {
        self.doc.trim().trim_end_matches('.')
    }
}

/// A struct of settings, made by [`settings!`](crate::settings!).
pub trait Declared: Serialize + DeserializeOwned + Default {
    /// In the order of their declaration.
    const SETTINGS: &'static [Setting];
}

/// Declares a struct of settings: their doc comments, types, defaults and the names of their
/// values. It is plain data with `deny_unknown_fields`. Help, the layers of [`load`] and
/// `docs/configuration.md` are made from it.
#[macro_export]
macro_rules! settings {
    (
        $(#[doc = $about:literal])+
        pub struct $name:ident {
            $(
                $(#[doc = $doc:literal])+
                $(#[serde($($serde:tt)*)])?
                $key:ident: $type:ty = $default:expr, $value_name:literal;
            )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $(
                $(#[doc = $doc])+
                $(#[serde($($serde)*)])?
                pub $key: $type,
            )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($key: $default,)+ }
            }
        }

        impl $crate::settings::Declared for $name {
            const SETTINGS: &'static [$crate::settings::Setting] = &[$(
                $crate::settings::Setting { key: stringify!($key), doc: concat!($($doc),+), value_name: $value_name },
            )+];
        }
    };
}

/// The default of a setting as it would be given; `None`: it has none, or an empty one.
pub fn default_of<T: Declared>(key: &str) -> Option<String> {
    Loaded::from(T::default()).value(key).filter(|value| !value.is_empty() && value != "[]")
}

/// A number in a form that JSON does not have: `.5`, `+4`, `04`.
fn plain_number(text: &str) -> Option<Value> {
    let whole = text.parse::<u64>().ok().map(Value::from);
    whole.or_else(|| text.parse::<f64>().ok().and_then(|number| Some(serde_json::Number::from_f64(number)?.into())))
}

/// Puts the layers together. `flags` are the keys and values given on the command line.
///
/// # Errors
/// A key that is no setting, or a value that has not its form.
pub fn load<T: Declared>(
    config: Option<&Path>,
    environment: impl Iterator<Item = (String, String)>,
    flags: impl IntoIterator<Item = (&'static str, String)>,
) -> Result<Loaded<T>, SettingsError> {
    let mut layers = Layers::new::<T>();
    if let Some(path) = config {
        layers.file::<T>(path)?;
    }
    for (name, value) in environment {
        layers.environment::<T>(&name, value)?;
    }
    for (key, value) in flags {
        layers.text::<T>(key, value, Origin::Flag)?;
    }
    layers.finish()
}

/// The environment of this process. Unlike [`std::env::vars`] it does not panic over a variable
/// that is not UTF-8; such a one is no setting.
pub fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// A variable of this process's environment; one that is empty is not set.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The flag of a setting.
pub fn flag_name(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

fn check_finite(name: String, value: &toml::Value) -> Result<(), SettingsError> {
    match value {
        toml::Value::Float(number) if !number.is_finite() => {
            Err(SettingsError::Invalid { name, problem: format!("{number}: expected a finite number") })
        }
        _ => Ok(()),
    }
}

/// What is wrong with a value, by what serde says of it, which may have the value in it already.
fn problem(value: &Value, said: &str) -> String {
    let plain = value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
    let Some((_, expected)) = said.rsplit_once(", expected ") else {
        let quoted = format!("'{plain}'");
        return if said.contains(&quoted) { said.to_owned() } else { format!("{quoted}: {said}") };
    };
    let expected = match expected {
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number, 0 or more",
        "a boolean" => "true or false",
        "f32" | "f64" => "a number",
        expected => expected,
    };
    format!("'{plain}': expected {expected}")
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
    origins: Origins,
}

impl Layers {
    /// Nothing is given yet.
    fn new<T: Declared>() -> Self {
        let keys = T::SETTINGS.iter().map(|setting| setting.key).collect();
        Self { values: object(&T::default()), origins: Origins { layers: BTreeMap::new(), keys } }
    }

    fn file<T: DeserializeOwned>(&mut self, path: &Path) -> Result<(), SettingsError> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| SettingsError::Unreadable { path: path.to_owned(), source })?;
        let not_toml = |reason: String| SettingsError::NotToml { path: path.to_owned(), reason };
        let table: toml::Table = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            not_toml(format!("line {line}: {}", error.message()))
        })?;
        for (key, value) in table {
            check_finite(format!("{key} (in {})", path.display()), &value)?;
            let value = serde_json::to_value(value).map_err(|error| not_toml(error.to_string()))?;
            self.set::<T>(&key, value, Origin::File(path.to_owned()))?;
        }
        Ok(())
    }

    /// Variables that name no setting belong to other programs.
    fn environment<T: DeserializeOwned>(&mut self, name: &str, value: String) -> Result<(), SettingsError> {
        let Some(key) = name.strip_prefix("BATON_").map(str::to_ascii_lowercase) else { return Ok(()) };
        if value.is_empty() || !self.values.contains_key(&key) {
            return Ok(());
        }
        self.text::<T>(&key, value, Origin::Variable(name.to_owned()))
    }

    /// Sets a key to a value that was given as text.
    fn text<T: DeserializeOwned>(&mut self, key: &str, value: String, origin: Origin) -> Result<(), SettingsError> {
        let default = self.values.get(key).unwrap_or(&Value::Null);
        // A variable or flag is text; the setting's default says what it is to be. One without a
        // default takes it as text if it can.
        let parsed: Option<Value> = serde_json::from_str(&value).ok();
        let text = Value::String(value);
        let value = match (default, parsed) {
            (Value::Number(_), None) => text.as_str().and_then(plain_number).unwrap_or(text),
            (Value::String(_), _) | (_, None) => text,
            (Value::Null, Some(parsed)) if self.fits::<T>(key, text.clone()).is_err() => parsed,
            (Value::Null, Some(_)) => text,
            (_, Some(parsed)) => parsed,
        };
        self.set::<T>(key, value, origin)
    }

    /// Whether the settings hold with this value.
    fn fits<T: DeserializeOwned>(&self, key: &str, value: Value) -> Result<(), String> {
        let mut values = self.values.clone();
        values.insert(key.to_owned(), value);
        serde_json::from_value::<T>(Value::Object(values)).map(drop).map_err(|error| error.to_string())
    }

    /// Sets one key, and checks it by itself, so that an error can name it.
    fn set<T: DeserializeOwned>(&mut self, key: &str, value: Value, origin: Origin) -> Result<(), SettingsError> {
        self.origins.layers.insert(key.to_owned(), origin);
        if !self.values.contains_key(key) {
            let known = self.values.keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(SettingsError::Unknown { key: key.to_owned(), origin: self.origins.told(key), known });
        }
        if let Err(said) = self.fits::<T>(key, value.clone()) {
            return Err(SettingsError::Invalid { name: self.origins.name(key), problem: problem(&value, &said) });
        }
        self.values.insert(key.to_owned(), value);
        Ok(())
    }

    fn finish<T: DeserializeOwned>(self) -> Result<Loaded<T>, SettingsError> {
        let settings = serde_json::from_value(Value::Object(self.values));
        let settings = settings
            .map_err(|error| SettingsError::Invalid { name: "settings".to_owned(), problem: error.to_string() })?;
        Ok(Loaded { settings, origins: self.origins })
    }
}

impl<T: Serialize + DeserializeOwned> Loaded<T> {
    /// These, with values that were given as text while the process runs.
    ///
    /// # Errors
    /// One of them is no setting, or has not its form.
    pub fn with<'a>(&self, values: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, SettingsError> {
        let mut layers = Layers { values: object(&self.settings), origins: self.origins.clone() };
        for (key, value) in values {
            layers.text::<T>(key, value.to_owned(), Origin::Shared)?;
        }
        layers.finish()
    }
}

impl<T: Serialize> Loaded<T> {
    /// A setting's value as it would be given; `None`: it is not set.
    pub fn value(&self, key: &str) -> Option<String> {
        match object(&self.settings).get(key)? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            // Who sets 30 reads 30, not 30.0.
            Value::Number(number) if number.is_f64() => Some(number.as_f64()?.to_string()),
            value => Some(value.to_string()),
        }
    }

    /// The settings as TOML, each with where it came from: what `--print-config` prints.
    pub fn print(&self) -> String {
        let mut text = String::new();
        for (key, value) in object(&self.settings) {
            let origin = self.origins.told(&key);
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

    use super::*;

    crate::settings! {
        /// Some settings.
        pub struct Sample {
            /// An address.
            listen: String = "127.0.0.1:0".into(), "ADDR";
            /// A number.
            threads: u32 = 1, "N";
            /// A path.
            model: Option<PathBuf> = None, "FILE";
            /// A text without a default.
            name: Option<String> = None, "NAME";
            /// A number without a default.
            limit: Option<u32> = None, "N";
            /// A time.
            grace_s: f64 = 1.0, "SECONDS";
        }
    }

    const NO_FLAGS: [(&str, String); 0] = [];

    fn flag(key: &'static str, value: &str) -> [(&'static str, String); 1] {
        [(key, value.to_owned())]
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
    fn later_settings_layer_wins_and_is_named_as_origin() {
        let config = file("threads = 2\nmodel = \"/m\"\nname = \"123\"");
        let environment =
            env(&[("BATON_THREADS", "3"), ("BATON_LISTEN", "0.0.0.0:1"), ("BATON_OTHER", "x"), ("PATH", "y")]);
        let loaded = load::<Sample>(Some(config.path()), environment, flag("threads", "4")).unwrap();
        assert_eq!(loaded.settings.threads, 4);
        assert_eq!((loaded.settings.listen.as_str(), loaded.settings.name.as_deref()), ("0.0.0.0:1", Some("123")));
        assert_eq!((loaded.origins.of("threads"), loaded.origins.name("threads")), (&Origin::Flag, "--threads".into()));
        assert_eq!(loaded.origins.name("listen"), "BATON_LISTEN");
        assert_eq!(loaded.origins.name("name"), format!("name (in {})", config.path().display()));
        assert_eq!(loaded.origins.name("grace_s"), "--grace-s", "the flag that would change it");
        assert_eq!(loaded.origins.name("ISA"), "ISA", "it is no setting");
        assert!(loaded.print().contains("threads = 4"), "{}", loaded.print());
        assert!(toml::from_str::<toml::Table>(&loaded.print()).is_ok(), "what is printed can be read back");
    }

    #[test]
    fn bad_setting_value_is_named_with_its_source() {
        let error = load::<Sample>(None, env(&[("BATON_THREADS", "many")]), NO_FLAGS).unwrap_err().to_string();
        assert_eq!(error, "BATON_THREADS: 'many': expected a whole number from 0 to 4294967295");
        let config = file("grace_s = true");
        let error = load::<Sample>(Some(config.path()), env(&[]), NO_FLAGS).unwrap_err().to_string();
        assert_eq!(error, format!("grace_s (in {}): 'true': expected a number", config.path().display()));
        let config = file("thread = 2");
        let error = load::<Sample>(Some(config.path()), env(&[]), NO_FLAGS).unwrap_err().to_string();
        assert!(error.starts_with("thread: there is no such setting"), "{error}");
        let missing = load::<Sample>(Some(Path::new("/nowhere")), env(&[]), NO_FLAGS).unwrap_err();
        assert!(matches!(missing, SettingsError::Unreadable { .. }));
        let broken = file("name = \"n\"\nthreads = = 2");
        let error = load::<Sample>(Some(broken.path()), env(&[]), NO_FLAGS).unwrap_err().to_string();
        let begins = format!("--config: {} is not TOML: line 2: ", broken.path().display());
        assert!(error.starts_with(&begins) && !error.contains('\n'), "{error}");
    }

    #[test]
    fn environment_variable_takes_type_of_setting_without_default() {
        let environment = env(&[("BATON_LIMIT", "7"), ("BATON_NAME", "7"), ("BATON_GRACE_S", "2")]);
        let settings = load::<Sample>(None, environment, NO_FLAGS).unwrap().settings;
        assert_eq!((settings.limit, settings.name.as_deref(), settings.grace_s), (Some(7), Some("7"), 2.0));
        for (given, grace_s) in [(".5", 0.5), ("5.", 5.0), ("04", 4.0), ("+4", 4.0)] {
            assert_eq!(load::<Sample>(None, env(&[]), flag("grace_s", given)).unwrap().settings.grace_s, grace_s);
        }
        let error = load::<Sample>(None, env(&[("BATON_LIMIT", "-7")]), NO_FLAGS).unwrap_err().to_string();
        assert_eq!(error, "BATON_LIMIT: '-7': expected a whole number from 0 to 4294967295");
    }

    #[test]
    fn empty_environment_variable_counts_as_not_set() {
        let config = file("threads = 2\nname = \"n\"");
        let empty = env(&[("BATON_THREADS", ""), ("BATON_NAME", ""), ("BATON_LISTEN", ""), ("BATON_LIMIT", "")]);
        let loaded = load::<Sample>(Some(config.path()), empty, NO_FLAGS).unwrap();
        let settings = &loaded.settings;
        assert_eq!((settings.threads, settings.name.as_deref(), settings.limit), (2, Some("n"), None));
        assert_eq!((settings.listen.as_str(), loaded.origins.of("listen")), ("127.0.0.1:0", &Origin::Default));
    }

    #[test]
    fn run_time_setting_overrides_all_layers_and_is_validated() {
        let loaded = load::<Sample>(None, env(&[]), flag("threads", "4")).unwrap();
        let with = loaded.with([("threads", "5"), ("limit", "6"), ("name", "7")]).unwrap();
        assert_eq!(
            (with.settings.threads, with.settings.limit, with.settings.name.as_deref()),
            (5, Some(6), Some("7"))
        );
        assert_eq!(
            (with.origins.told("threads"), with.origins.told("grace_s")),
            ("set at run time".into(), "default".into())
        );
        assert_eq!(
            (with.value("limit"), loaded.value("limit"), loaded.value("listen")),
            (Some("6".into()), None, Some("127.0.0.1:0".into()))
        );
        assert_eq!(loaded.with([("grace_s", "30")]).unwrap().value("grace_s"), Some("30".into()));
        let error = |key, value| loaded.with([(key, value)]).unwrap_err().to_string();
        assert_eq!(error("threads", "many"), "threads: 'many': expected a whole number from 0 to 4294967295");
        assert!(error("thread", "1").starts_with("thread: there is no such setting (in set at run time)"));
    }

    #[test]
    fn fatal_error_names_the_setting_as_it_was_given() {
        #[derive(Debug, thiserror::Error)]
        #[error("starting the engine")]
        struct Starting(#[source] BadSetting);

        let origins = load::<Sample>(None, env(&[("BATON_LISTEN", "x")]), flag("threads", "9")).unwrap().origins;
        let said = |bad| origins.last_words(&Starting(bad));
        let out_of_range = BadSetting::invalid("threads", "9, but must be from 1 to 8");
        assert_eq!(said(out_of_range), ("--threads: 9, but must be from 1 to 8".into(), EXIT_BAD_SETTINGS));
        let taken = BadSetting::unavailable("listen", "cannot listen on 'x'");
        assert_eq!(said(taken), ("BATON_LISTEN: cannot listen on 'x'".into(), EXIT_FAILURE));
        assert_eq!(said(BadSetting::invalid("BATON_ISA", "sse9")).0, "BATON_ISA: sse9", "what is no setting");
        assert_eq!(origins.last_words(&std::io::Error::other("broken")), ("broken".into(), EXIT_FAILURE));
    }

    #[test]
    fn setting_error_states_the_problem_once() {
        let text = |text: &str| Value::String(text.to_owned());
        for (value, said, expected) in [
            (text("f8"), "unknown variant `f8`, expected one of `f16`, `f32`", "'f8': expected one of `f16`, `f32`"),
            (text("x"), "'x' is not a policy (lru, lfu)", "'x' is not a policy (lru, lfu)"),
            (text("x"), "expected auto or none", "'x': expected auto or none"),
            (
                Value::from(-1),
                "invalid value: integer `-1`, expected usize",
                "'-1': expected a whole number, 0 or more",
            ),
        ] {
            assert_eq!(problem(&value, said), expected);
        }
    }

    #[test]
    fn nan_setting_is_refused_in_every_layer() {
        let error = load::<Sample>(None, env(&[]), flag("grace_s", "NaN")).unwrap_err().to_string();
        assert_eq!(error, "--grace-s: 'NaN': expected a number");
        let config = file("grace_s = nan");
        assert!(load::<Sample>(Some(config.path()), env(&[]), NO_FLAGS).is_err());
        assert!(load::<Sample>(None, env(&[("BATON_GRACE_S", "NaN")]), NO_FLAGS).is_err());
    }
}
