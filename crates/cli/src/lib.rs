//! `baton`, the operator's command: starts a cluster on one machine, asks it, and shows what it
//! does.
//!
//! `args` is the command line; each command has a module of its name. `up` starts and supervises
//! processes. `bench`, `score` and `simulate` are other crates'. Everything else is a client of a
//! conductor's gRPC services.
//!
//! **Invariant**: what is meant for programs goes to stdout, what is meant for people watching goes
//! to stderr. A command that fails says why in one line and ends with the exit status of
//! [`CliError::exit_status`].

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod answer;
mod args;
mod cache;
mod chaos;
mod chat;
mod client;
mod drain;
mod error;
mod explain;
mod generate;
mod load;
mod logprobs;
mod nodes;
mod paths;
mod prompt;
mod record;
mod report;
mod screen;
mod settings;
mod table;
mod timeline;
mod up;
mod version;
mod watch;

pub use args::{Cli, Command, wants_json};
pub use error::CliError;

/// Runs the command to its end.
pub fn run(cli: Cli) -> Result<(), CliError> {
    if let Command::Bench(command) = &cli.command {
        // It has a runtime of its own, as the nodes have.
        return Ok(baton_bench::run(command, cli.json)?);
    }
    if let Command::Score(args) = &cli.command {
        return Ok(baton_bench::score::run(args, cli.json)?);
    }
    if let Command::Simulate(args) = &cli.command {
        return Ok(baton_sim::run(args, cli.json)?);
    }
    // One thread is enough for a client, and `up` needs it: a child's parent-death signal is bound
    // to the thread that started the child.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        match &cli.command {
            Command::Up(args) => up::run(args, cli.json).await,
            Command::Generate(args) => generate::run(args, &cli.conductor, cli.json).await,
            Command::Chat(args) => chat::run(args, &cli.conductor, cli.json).await,
            Command::Explain(args) => explain::run(args, &cli.conductor, cli.json).await,
            Command::Cache(args) => cache::run(args, &cli.conductor, cli.json).await,
            Command::Load(args) => load::run(args, &cli.conductor, cli.json).await,
            Command::Settings(command) => settings::run(command, &cli.conductor, cli.json).await,
            Command::Chaos(args) => chaos::run(args, &cli.conductor, cli.json).await,
            Command::Drain(args) => drain::drain(args, &cli.conductor, cli.json).await,
            Command::Undrain(args) => drain::undrain(args, &cli.conductor, cli.json).await,
            Command::Nodes(args) => nodes::run(args, &cli.conductor, cli.json).await,
            Command::Bench(_) | Command::Score(_) | Command::Simulate(_) => Ok(()), // have run above
            Command::Version => version::run(&cli.conductor, cli.is_conductor_given, cli.json).await,
        }
    });
    outcome.map_err(|error| error.at(&cli.conductor))
}
