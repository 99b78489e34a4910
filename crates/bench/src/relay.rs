//! `baton bench relay`: many streams at once through one conductor, and by how much it unsettles
//! their cadence.
//!
//! A node gives each of its sequences a token per step, all at once. If the nodes are mocks without
//! noise, steps follow each other evenly. A stream's mean gap is then the node's step, whatever the
//! way of the tokens takes. What a gap is longer than that mean has been added on the way: by the
//! conductor, by the node's timer, or by this client, which share a machine. So the figures are
//! upper bounds of what the conductor adds.

use std::time::{Duration, Instant};

use baton_proto::v1::generate_response::Event;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{self, GenerateRequest, SamplingParameters, TokenIds};
use baton_sim::Random;
use clap::Args;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::time::timeout_at;
use tonic::Status;
use tonic::transport::Channel;

use crate::BenchError;
use crate::replay::Clients;

/// Streams of one connection: as many as a server commonly allows at once.
const STREAMS_PER_CONNECTION: u32 = 100;
/// Time between the first and the last stream's start, for each stream.
const START_EVERY: Duration = Duration::from_millis(2);
/// From the last start to the measurement.
const WARM_UP: Duration = Duration::from_secs(3);
/// Longest gap that is told apart, microseconds.
const MAX_GAP_US: u64 = 60_000_000;

/// Of `baton bench relay`.
#[derive(Debug, Args)]
pub struct RelayArgs {
    /// Keep N streams open at once
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub streams: u32,
    /// Send N tokens per prompt
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub prompt_tokens: u32,
    /// Measure for this long after all streams have begun, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Ask for N tokens per stream. The bench ends it before, and fails if it runs out
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
}

/// What was measured. Times in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RelayReport {
    /// Streams that were under way from the beginning to the end of the measurement.
    pub streams: usize,
    /// Their tokens per second.
    pub tokens_per_s: f64,
    /// Mean gap between two tokens of a stream: the nodes' step.
    pub gap_mean_ms: f64,
    /// What half of the gaps are longer than their stream's mean, at most.
    pub added_p50_ms: f64,
    /// What 90 % are, at most.
    pub added_p90_ms: f64,
    /// What 99 % are, at most.
    pub added_p99_ms: f64,
    /// What all are, at most.
    pub added_max_ms: f64,
    /// Share of messages with more than one token: their gaps were merged on the way.
    pub merged_share: f64,
}

/// Opens the streams, measures, and prints the figures.
pub(crate) async fn run(args: &RelayArgs, conductor: &str, json: bool) -> Result<(), BenchError> {
    let clients = Clients::connect("--conductor", conductor, args.streams.div_ceil(STREAMS_PER_CONNECTION)).await?;
    let start = baton_runtime::now();
    let from = start + START_EVERY * args.streams + WARM_UP;
    let to = from + Duration::from_secs(args.seconds);
    let open = |stream: u32| {
        listen(clients.client(stream as usize), request(args, stream), start + START_EVERY * stream, from, to)
    };
    let mut under_way: FuturesUnordered<_> = (0..args.streams).map(open).collect();
    let mut heard = Vec::with_capacity(args.streams as usize);
    while let Some(stream) = under_way.next().await {
        heard.push(stream.map_err(|status| BenchError::control("conductor", status.message().to_owned()))?);
    }
    let report = RelayReport::of(&heard, args.seconds)?;
    report.print(json).map_err(BenchError::Output)
}

/// A prompt of its own for each stream: nothing is cached.
fn request(args: &RelayArgs, stream: u32) -> GenerateRequest {
    let mut random = Random::new(u64::from(stream));
    let ids = (0..args.prompt_tokens).map(|_| 32 + random.below(95) as u32).collect();
    GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(TokenIds { ids })),
        sampling: Some(SamplingParameters {
            max_tokens: Some(args.max_tokens),
            ignore_eos: true,
            ..SamplingParameters::default()
        }),
        ..GenerateRequest::default()
    }
}

/// What one stream heard during the measurement.
#[derive(Debug, Default)]
struct Heard {
    /// When each message with tokens came.
    at: Vec<Instant>,
    tokens: u64,
    merged: u64,
}

/// Opens a stream at its time, hears it until `to`, and drops it. One that ends before is an error.
async fn listen(
    mut client: InferenceClient<Channel>,
    request: GenerateRequest,
    begin: Instant,
    from: Instant,
    to: Instant,
) -> Result<Heard, Status> {
    baton_runtime::sleep_until(begin).await;
    let mut stream = client.generate(request).await?.into_inner();
    let mut heard = Heard::default();
    let hear = async {
        while let Some(response) = stream.message().await? {
            let (Some(Event::Delta(delta)), now) = (response.event, baton_runtime::now()) else { continue };
            if now >= from {
                heard.at.push(now);
                heard.tokens += delta.token_ids.len() as u64;
                heard.merged += u64::from(delta.token_ids.len() > 1);
            }
        }
        Err(Status::aborted("a stream ended before the measurement did: --max-tokens is too low"))
    };
    // One timer for all of it: one for each message would be a tenth of this client's work.
    match timeout_at(to.into(), hear).await {
        Ok(ended) => ended.map(|()| heard),
        Err(_) => Ok(heard),
    }
}

impl RelayReport {
    fn of(streams: &[Heard], seconds: u64) -> Result<Self, BenchError> {
        let mut added = histogram()?;
        let mut gaps = 0_u64;
        let mut sum = Duration::ZERO;
        for stream in streams {
            let (Some(first), Some(last)) = (stream.at.first(), stream.at.last()) else { continue };
            let count = stream.at.len() as u64 - 1;
            let mean = (*last - *first).div_f64(count.max(1) as f64);
            for pair in stream.at.windows(2) {
                let longer = (pair[1] - pair[0]).saturating_sub(mean);
                added.saturating_record(longer.as_micros() as u64);
            }
            gaps += count;
            sum += *last - *first;
        }
        if gaps == 0 {
            return Err(BenchError::control("conductor", "no stream got two tokens during the measurement"));
        }
        let messages: usize = streams.iter().map(|stream| stream.at.len()).sum();
        let ms = |quantile| added.value_at_quantile(quantile) as f64 / 1e3;
        Ok(Self {
            streams: streams.iter().filter(|stream| stream.at.len() > 1).count(),
            tokens_per_s: streams.iter().map(|stream| stream.tokens).sum::<u64>() as f64 / seconds as f64,
            gap_mean_ms: sum.as_secs_f64() * 1e3 / gaps as f64,
            added_p50_ms: ms(0.5),
            added_p90_ms: ms(0.9),
            added_p99_ms: ms(0.99),
            added_max_ms: ms(1.0),
            merged_share: streams.iter().map(|stream| stream.merged).sum::<u64>() as f64 / messages as f64,
        })
    }

    fn print(&self, json: bool) -> std::io::Result<()> {
        use std::io::Write;
        let text = if json { serde_json::to_string(self)? } else { self.table() };
        writeln!(std::io::stdout(), "{text}")
    }

    fn table(&self) -> String {
        let rows = [
            ("streams", self.streams.to_string()),
            ("relayed", format!("{:.0} tokens/s", self.tokens_per_s)),
            ("gap", format!("{:.2} ms, the mean", self.gap_mean_ms)),
            (
                "added",
                format!(
                    "p50 {:.2} ms, p90 {:.2} ms, p99 {:.2} ms, max {:.2} ms",
                    self.added_p50_ms, self.added_p90_ms, self.added_p99_ms, self.added_max_ms
                ),
            ),
            ("merged", format!("{:.2} % of messages", self.merged_share * 100.0)),
        ];
        rows.map(|(name, value)| format!("{name:<10}{value}")).join("\n")
    }
}

fn histogram() -> Result<Histogram<u64>, BenchError> {
    Histogram::new_with_bounds(1, MAX_GAP_US, 3)
        .map_err(|error| BenchError::Io(std::io::Error::other(error.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(milliseconds: &[u64]) -> Heard {
        let start = Instant::now();
        let at: Vec<_> = milliseconds.iter().map(|ms| start + Duration::from_millis(*ms)).collect();
        Heard { tokens: at.len() as u64, at, merged: 0 }
    }

    #[test]
    fn relay_latency_is_what_gaps_exceed_the_mean_by() {
        let report = RelayReport::of(&[heard(&[0, 10, 20, 30, 40]), heard(&[5, 15, 28, 35, 45])], 1).unwrap();
        assert_eq!((report.streams, report.tokens_per_s, report.gap_mean_ms), (2, 10.0, 10.0));
        assert_eq!(report.added_p50_ms, 0.0);
        assert!((report.added_max_ms - 3.0).abs() < 0.01, "{report:?}");
    }

    #[test]
    fn constant_delay_adds_no_relay_latency() {
        let report = RelayReport::of(&[heard(&[500, 510, 520])], 1).unwrap();
        assert_eq!((report.added_max_ms, report.merged_share), (0.0, 0.0));
    }

    #[test]
    fn relay_report_without_two_tokens_is_an_error() {
        assert!(RelayReport::of(&[heard(&[3]), heard(&[])], 1).unwrap_err().to_string().contains("two tokens"));
    }
}
