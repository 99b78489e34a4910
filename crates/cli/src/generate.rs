//! `baton generate`.

use std::io::IsTerminal;

use crate::answer::{Ended, answer};
use crate::args::GenerateArgs;
use crate::client::Conductor;
use crate::error::CliError;
use crate::logprobs;
use crate::report::Record;
use crate::screen::{Paint, line};
use crate::timeline;

/// Generates one completion: text to stdout as it comes, then log-probabilities if asked for, or
/// one JSON object at the end. A person is told the request's id.
pub async fn run(args: &GenerateArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let mut request = args.request.request(args.prompt.load()?);
    request.idempotency_key.clone_from(&args.idempotency_key);
    if let Some(sampling) = &mut request.sampling {
        sampling.logprobs = args.logprobs;
        sampling.prompt_logprobs = args.prompt_logprobs;
    }
    let mut conductor = Conductor::connect(conductor).await?;
    match answer(&mut conductor, request, json).await.map_err(CliError::with_flag)? {
        Ended::Finished(record) => show(&record, args.timeline, json),
        Ended::Interrupted(record) => Err(CliError::Interrupted(interruption(&record))),
    }
}

fn show(record: &Record, with_timeline: bool, json: bool) -> Result<(), CliError> {
    let report = record.report();
    if json {
        line(&serde_json::to_string(&report).map_err(std::io::Error::from)?)?;
    } else if let Some(tables) = logprobs::render(record, Paint::stdout()) {
        line(&format!("\n{tables}"))?;
    }
    let paint = Paint::stderr();
    if with_timeline {
        eprintln!("{}", timeline::render(&report, paint));
    } else if !json && std::io::stderr().is_terminal() {
        eprintln!("{}", paint.dim(&format!("request {}", report.request_id)));
    }
    Ok(())
}

fn interruption(record: &Record) -> String {
    match record.request_id() {
        "" => "Ctrl-C: the request was aborted before it was placed".to_owned(),
        id => format!("Ctrl-C: request {id} was aborted"),
    }
}
