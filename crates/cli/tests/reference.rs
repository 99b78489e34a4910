//! `docs/cli.md` is made from the command's declaration. `BATON_UPDATE=1` writes it anew.

// Integration tests are tests as a whole.
#![allow(clippy::unwrap_used)]

use std::fmt::Write;

use clap::{Arg, Command};

/// Text in one line. Clap's has no stop at its end.
fn line(text: Option<&impl ToString>) -> String {
    let text = text.map(ToString::to_string).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Lines of at most 110 columns.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        if lines.last().is_some_and(|line| line.len() + word.len() > 110) {
            lines.push(String::new());
        }
        let line = lines.last_mut().unwrap();
        let gap = if line.is_empty() { "" } else { " " };
        line.push_str(gap);
        line.push_str(word);
    }
    lines.join("\n")
}

fn name(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default();
    let value = values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    match (arg.get_long(), arg.get_num_args().is_some_and(|values| values.takes_values())) {
        (Some(long), true) => format!("--{long} {value}"),
        (Some(long), false) => format!("--{long}"),
        (None, _) => value,
    }
}

fn section(page: &mut String, path: &str, command: &Command) {
    let depth = if command.has_subcommands() { "##" } else { "###" };
    let about = wrapped(&format!("{}.", line(command.get_about())));
    writeln!(page, "\n{depth} `{path}`\n\n{about}").unwrap();
    let is_shown =
        |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help" && (path == "baton" || !arg.is_global_set());
    let args: Vec<_> = command.get_arguments().filter(is_shown).collect();
    if !args.is_empty() {
        page.push_str("\n| argument | variable, default | what it does |\n|---|---|---|\n");
    }
    for arg in args {
        let defaults = arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy()));
        let is_shown = arg.get_action().takes_values() && !arg.is_hide_default_value_set();
        let variable = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy()));
        let defaults = variable.into_iter().chain(defaults.filter(|_| is_shown)).collect::<Vec<_>>().join(", ");
        writeln!(page, "| `{}` | {defaults} | {} |", name(arg), line(arg.get_help())).unwrap();
    }
    for command in command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help") {
        section(page, &format!("{path} {}", command.get_name()), command);
    }
}

#[test]
fn cli_page_equals_declared_command() {
    let mut command = baton_cli::Cli::declared();
    command.build();
    let mut page = String::from(
        "# `baton`, the operator's command\n\nMade from the declarations in the code; a test keeps the two equal.\n\n\
         A command that fails says why in one line. Exit status 2 is a wrong argument, 3 overloaded, 4 nothing could \
         serve,\n1 anything else. `baton bench serve` also ends with 4 if no request got its answer. `baton version` does if \
         it\nwas given conductors, and none answers.\n\nWith `--json` the line is `{\"error\": {\"kind\", \"message\"}}`, also for a wrong \
         flag.\n\nIf a flag is \
         not given, its environment variable counts, and else its default.\n",
    );
    section(&mut page, "baton", &command);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md");
    if std::env::var_os("BATON_UPDATE").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(written == page, "docs/cli.md is not what the code says: run the test with BATON_UPDATE=1");
}
