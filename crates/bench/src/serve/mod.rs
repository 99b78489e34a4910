//! `baton bench serve URL`: an open loop of requests against any server, and what people would have
//! got of it.
//!
//! The server is one with OpenAI's completions (Baton, llama-server, `vllm serve`), or a conductor
//! by Baton's own gRPC. Requests are drawn ([`arrivals`]) or a trace's. Each is sent when it is
//! due, whether or not others have been answered, for people do not wait for each other. A server
//! that falls behind has more to do at once, and times count from when a request was due.
//!
//! **Invariant**: every request that is due ends exactly once. It is met (both limits), late,
//! rejected (429, 503), aborted by its client, failed, or not sent if too many were under way.

mod args;
mod arrivals;
mod gaps;
mod grpc;
mod openai;
mod outcome;
mod play;
mod reasons;
mod received;
mod report;
mod sse;
mod text;
mod trace_prompt;

use futures::future::try_join_all;
use indicatif::{ProgressBar, ProgressStyle};

use crate::BenchError;
pub use args::ServeArgs;
use arrivals::arrivals;
use play::{Server, play};
use report::Report;

/// Plays the requests, and prints the figures.
pub(crate) async fn run(args: &ServeArgs, json: bool) -> Result<(), BenchError> {
    let arrivals = arrivals(args)?;
    let servers = try_join_all(args.url.iter().map(|target| Server::connect(target, args))).await?;
    let bar = progress(arrivals.len() as u64);
    let played = play(&servers, &arrivals, args, &bar).await;
    bar.finish_and_clear();
    let due_s = arrivals.last().map_or(0.0, |last| last.due.as_secs_f64());
    let completed = played.sums.completed();
    let problem = played.sums.first_problem.clone();
    let report = Report::new(args, &servers, due_s, played);
    report.print(json).map_err(BenchError::Output)?;
    BenchError::check_served(completed, problem)
}

/// Requests that have ended, of all; shows itself on stderr, and nowhere if that is no terminal.
fn progress(requests: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{pos}/{len} {bar:40} {msg}, {elapsed}");
    ProgressBar::new(requests).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
