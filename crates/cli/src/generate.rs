//! `baton generate`.

use std::io::IsTerminal;

use crate::answer::{Ended, answer};
use crate::args::GenerateArgs;
use crate::client::Conductor;
use crate::error::CliError;
use crate::logprobs;
use crate::report::{Record, ToolCall};
use crate::screen::{Paint, line};
use crate::timeline;

/// Generates completions: the first one's text to stdout as it comes, then what else there is, or
/// one JSON object at the end, of several completions a list. A person is told the request's id.
pub async fn run(args: &GenerateArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let request = args.wire()?;
    let mut conductor = Conductor::connect(conductor).await?;
    if args.n > 1 && !json {
        line(&heading(1, args.n))?;
    }
    match answer(&mut conductor, request, json).await.map_err(CliError::with_flag)? {
        Ended::Finished(record) => show(&record, args.timeline, json),
        Ended::Interrupted(record) => Err(CliError::Interrupted(interruption(&record))),
    }
}

fn heading(completion: usize, n: u32) -> String {
    format!("== {completion} of {n} ==")
}

fn show(record: &Record, with_timeline: bool, json: bool) -> Result<(), CliError> {
    let report = record.report();
    if json {
        line(&to_json(record)?)?;
    } else {
        let n = record.completions().count() as u32;
        for (index, completion) in (1..).zip(record.completions()) {
            // The text of the first one is there already.
            if index > 1 {
                line(&format!("\n{}\n{}", heading(index, n), completion.text()))?;
            }
            rest(completion)?;
        }
    }
    let paint = Paint::stderr();
    if with_timeline {
        eprintln!("{}", timeline::render(&report, paint));
    } else if !json && std::io::stderr().is_terminal() {
        eprintln!("{}", paint.dim(&format!("request {}", report.request_id)));
    }
    Ok(())
}

/// A completion's calls of tools, a JSON object a line, and its log-probabilities.
fn rest(completion: &Record) -> Result<(), CliError> {
    for ToolCall { name, arguments, .. } in completion.tool_calls() {
        let call = serde_json::json!({ "name": name, "arguments": arguments });
        line(&call.to_string())?;
    }
    if let Some(tables) = logprobs::render(completion, Paint::stdout()) {
        line(&format!("\n{tables}"))?;
    }
    Ok(())
}

fn to_json(record: &Record) -> Result<String, CliError> {
    let reports: Vec<_> = record.completions().map(Record::report).collect();
    let text = match &reports[..] {
        [one] => serde_json::to_string(one),
        several => serde_json::to_string(several),
    };
    Ok(text.map_err(std::io::Error::from)?)
}

fn interruption(record: &Record) -> String {
    match record.request_id() {
        "" => "Ctrl-C: the request was aborted before it was placed".to_owned(),
        id => format!("Ctrl-C: request {id} was aborted"),
    }
}
