//! The command line of a binary whose settings are declared by [`settings!`](crate::settings!).

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use crate::settings::{self, Declared, EXIT_BAD_SETTINGS, Loaded, default_of, flag_name};

/// Parses the command line, loads the settings, runs, and turns the outcome into an exit status.
/// `about` says what the binary does.
pub fn main_of<T: Declared, E: AsRef<dyn Error>>(
    binary: &'static str,
    about: &'static str,
    run: impl FnOnce(Loaded<T>) -> Result<(), E>,
) -> ExitCode {
    let matches = command::<T>(binary, about).get_matches();
    let config = matches.get_one::<PathBuf>("config");
    let loaded = settings::load::<T>(config.map(PathBuf::as_path), settings::environment(), given::<T>(&matches));
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("{binary}: {error}");
            return ExitCode::from(EXIT_BAD_SETTINGS);
        }
    };
    if matches.get_flag("print-config") {
        print!("{}", loaded.print());
        return ExitCode::SUCCESS;
    }
    let origins = loaded.origins.clone();
    match run(loaded) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let (said, status) = origins.last_words(error.as_ref());
            eprintln!("{binary}: {said}");
            ExitCode::from(status)
        }
    }
}

/// A command with a flag for each setting.
pub fn command<T: Declared>(binary: &'static str, about: &'static str) -> Command {
    let config = Arg::new("config")
        .long("config")
        .value_name("FILE")
        .value_parser(value_parser!(PathBuf))
        .help("Read settings from this TOML file; the environment (BATON_...) and flags override it");
    let print_config = Arg::new("print-config")
        .long("print-config")
        .action(ArgAction::SetTrue)
        .help("Print each setting and its source, and exit");
    let flags = T::SETTINGS.iter().map(|setting| {
        let flag = Arg::new(setting.key)
            .long(flag_name(setting.key).trim_start_matches('-').to_owned())
            .value_name(setting.value_name)
            .allow_negative_numbers(true)
            .help(setting.about().replace('`', ""));
        match default_of::<T>(setting.key) {
            Some(default) => flag.default_value(default),
            None => flag,
        }
    });
    Command::new(binary).version(env!("CARGO_PKG_VERSION")).about(about).args([config, print_config]).args(flags)
}

/// The settings that were given as flags, as text.
fn given<T: Declared>(matches: &ArgMatches) -> impl Iterator<Item = (&'static str, String)> {
    let is_given = |key| matches.value_source(key) == Some(clap::parser::ValueSource::CommandLine);
    let keys = T::SETTINGS.iter().map(|setting| setting.key);
    keys.filter(move |key| is_given(key)).filter_map(|key| Some((key, matches.get_one::<String>(key)?.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::settings! {
        /// A few settings.
        pub struct Few {
            /// Listen on `this`
            /// address.
            listen: String = "127.0.0.1:0".into(), "ADDR";
            /// Use this name.
            name: Option<String> = None, "NAME";
            /// Ask these.
            peers: Vec<String> = Vec::new(), "ADDRS";
            /// Take this long.
            #[serde(rename = "grace_s")]
            grace_s: f64 = 30.0, "SECONDS";
        }
    }

    fn flags(line: &[&str]) -> Vec<(&'static str, String)> {
        let matches = command::<Few>("two", "Test").try_get_matches_from([&["two"], line].concat()).unwrap();
        given::<Few>(&matches).collect()
    }

    #[test]
    fn flags_are_declared_with_help_and_default() {
        let help = command::<Few>("two", "Test").render_help().to_string();
        assert!(help.contains("--listen <ADDR>") && help.contains("Listen on this address [default: 127.0.0.1:0]"));
        assert!(help.contains("--grace-s <SECONDS>") && help.contains("Take this long [default: 30]"), "{help}");
        assert!(help.contains("Use this name\n"), "a setting without a default has none: {help}");
        assert!(help.contains("Ask these\n"), "an empty list is none: {help}");
    }

    #[test]
    fn value_that_is_not_utf8_is_an_error_and_not_a_panic() {
        use std::os::unix::ffi::OsStrExt;
        let line = ["few".as_ref(), "--name".as_ref(), std::ffi::OsStr::from_bytes(b"/m\xff")];
        assert!(command::<Few>("few", "Test").try_get_matches_from(line).is_err());
    }

    #[test]
    fn defaults_of_flags_do_not_override_other_layers() {
        assert_eq!(flags(&[]), []);
        assert_eq!(flags(&["--grace-s", "-1"]), [("grace_s", "-1".to_owned())]);
        assert_eq!(flags(&["--name", "n", "--listen=x"]), [("listen", "x".to_owned()), ("name", "n".to_owned())]);
    }
}
