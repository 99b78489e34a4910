//! The frontend: tokenizes, places, admits, relays.
//!
//! `main` calls [`run`]. `frontend` takes a request in, and `relay` carries it between its nodes
//! and its client. `membership` and `nodes` keep the sessions with the nodes; `grpc` and `http`
//! translate. What decides is `baton_scheduler`: its `Cluster` and its `RequestCore`.
//!
//! **Invariant**: every accepted request ends exactly once, with `Finished` or with an error, and
//! its charges end with it.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod config;
pub mod fuzz;
pub mod metrics;

mod answer_form;
mod checks;
mod coalesce;
mod cors;
mod decision_log;
mod error;
mod etcd;
mod frontend;
mod grpc;
mod health;
mod http;
mod keyed;
mod leader;
mod live;
mod membership;
mod nodes;
mod other_answers;
mod output;
mod ports;
mod prediction_errors;
mod prompt;
mod relay;
mod run_time_settings;
mod server;
#[cfg(test)]
mod tests;
mod transfers;
mod turns;
mod unjoined;
mod unread;
mod window_stats;

pub use error::GenerateError;
pub use run_time_settings::AT_RUN_TIME;
pub use server::run;

/// What the binary does.
pub const ABOUT: &str = "Serve clients and place requests in a Baton cluster";
