//! The clients: each request at its time, over a few connections.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_proto::v1::generate_response::Event;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{self, GenerateRequest, SamplingParameters, ServiceLevelObjectives, TokenIds};
use baton_proto::{MAX_MESSAGE_BYTES, url};
use baton_runtime::innermost;
use baton_sim::{RequestRecord, SimOptions, Trace, TraceRequest};
use baton_types::Tbt;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::prompt::prompt;
use crate::BenchError;
use crate::reasons::Reasons;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A request without an end this long after its arrival is counted as a failure.
const LONGEST: Duration = Duration::from_secs(900);
/// How often people are told how far it is.
const PROGRESS_EVERY: Duration = Duration::from_secs(30);

/// Connections to a conductor.
pub(crate) struct Clients(Vec<InferenceClient<Channel>>);

/// What became of a trace.
#[derive(Debug, Default)]
pub(super) struct Played {
    /// In the order of arrival.
    pub records: Vec<RequestRecord>,
    /// Requests that neither completed nor were rejected, by reason.
    pub failures: BTreeMap<String, usize>,
    /// Why the first request that did not complete did not, a rejection included.
    pub first_problem: Option<String>,
    /// 99 % of the requests were sent at most this long after their time: what this machine did not
    /// manage.
    pub late_p99: Duration,
}

/// What became of one request.
struct Ended {
    index: usize,
    record: RequestRecord,
    late: Duration,
    problem: Option<Problem>,
}

/// Why a request did not complete.
enum Problem {
    /// It was refused at admission.
    Rejected(String),
    /// Anything else.
    Failed(String),
}

impl Problem {
    fn reason(&self) -> &str {
        match self {
            Self::Rejected(reason) | Self::Failed(reason) => reason,
        }
    }
}

impl Clients {
    /// Connects to `host:port` or `http://host:port`, which `flag` gave.
    pub(crate) async fn connect(flag: &'static str, conductor: &str, connections: u32) -> Result<Self, BenchError> {
        let wrong = |problem: String| BenchError::invalid(flag, format!("{conductor}: {problem}"));
        let endpoint = Endpoint::from_shared(url(conductor)).map_err(|error| wrong(error.to_string()))?;
        let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true);
        let mut clients = Vec::new();
        for _ in 0..connections {
            let channel = endpoint.connect().await;
            let channel = channel.map_err(|error| {
                BenchError::control("conductor", format!("cannot reach {conductor}: {}", innermost(&error)))
            })?;
            clients.push(InferenceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES));
        }
        Ok(Self(clients))
    }

    /// That of one request, by its number.
    pub(crate) fn client(&self, request: usize) -> InferenceClient<Channel> {
        self.0[request % self.0.len()].clone()
    }

    /// Sends every request at its time, and waits for the end of all.
    pub(super) async fn play(&self, trace: &Trace, options: &SimOptions) -> Played {
        let start = baton_runtime::now();
        let slo = ServiceLevelObjectives {
            ttft_ms: options.ttft_slo.map(|slo| slo.as_secs_f64() * 1e3),
            tbt_ms: options.tbt_slo.map(|slo| slo.as_secs_f64() * 1e3),
        };
        let one = |(index, request): (usize, &'_ TraceRequest)| {
            let client = self.client(index);
            let request = request.clone();
            let record = RequestRecord::arriving(&request, options.speed);
            ask(index, client, request, slo, start, record)
        };
        let mut under_way: FuturesUnordered<_> = trace.requests.iter().enumerate().map(one).collect();
        let mut ended = Vec::new();
        let mut progress = baton_runtime::interval(PROGRESS_EVERY);
        loop {
            tokio::select! {
                next = under_way.next() => match next {
                    Some(one) => ended.push(one),
                    None => break,
                },
                _ = progress.tick() => {
                    let seconds = start.elapsed().as_secs();
                    let all = trace.requests.len();
                    eprintln!("baton: replay: {seconds} s, {} of {all} requests have ended", ended.len());
                }
            }
        }
        played(ended)
    }
}

fn played(mut ended: Vec<Ended>) -> Played {
    ended.sort_by_key(|one| one.index);
    let mut late: Vec<_> = ended.iter().map(|one| one.late).collect();
    late.sort_unstable();
    let late_p99 = late.get((late.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default();
    let mut failures = Reasons::default();
    let problems = || ended.iter().filter_map(|one| one.problem.as_ref());
    for problem in problems() {
        if let Problem::Failed(reason) = problem {
            failures.add(reason);
        }
    }
    let first_problem = problems().next().map(|problem| problem.reason().to_owned());
    let records = ended.into_iter().map(|one| one.record).collect();
    Played { records, failures: failures.into_map(), first_problem, late_p99 }
}

/// Sends one request at its time, and hears it to its end.
async fn ask(
    index: usize,
    mut client: InferenceClient<Channel>,
    request: TraceRequest,
    slo: ServiceLevelObjectives,
    start: Instant,
    mut record: RequestRecord,
) -> Ended {
    let due = start + record.arrived;
    baton_runtime::sleep_until(due).await;
    let wire = GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(TokenIds { ids: prompt(&request) })),
        sampling: Some(SamplingParameters {
            max_tokens: Some(record.output_tokens),
            ignore_eos: true,
            ..SamplingParameters::default()
        }),
        slo: Some(slo),
        ..GenerateRequest::default()
    };
    let late = due.elapsed();
    let mut heard = Heard { due, start, accepted: false, tokens: Vec::new() };
    let outcome = timeout(LONGEST, heard.hear(&mut client, wire, &mut record)).await;
    let problem = match outcome {
        Ok(Ok(())) => heard.sum_up(&mut record).map(Problem::Failed),
        Ok(Err(status)) => Some(reject(&status, heard.accepted, &mut record)),
        Err(_) => Some(Problem::Failed(format!("no end within {} s", LONGEST.as_secs()))),
    };
    Ended { index, record, late, problem }
}

/// A refusal counts as the simulator's; everything else is a failure.
fn reject(status: &Status, accepted: bool, record: &mut RequestRecord) -> Problem {
    let reason = format!("{:?}: {}", status.code(), status.message());
    if status.code() != Code::ResourceExhausted || accepted {
        return Problem::Failed(reason);
    }
    record.rejected = true;
    Problem::Rejected(reason)
}

/// What a client has heard.
struct Heard {
    due: Instant,
    start: Instant,
    accepted: bool,
    /// When each token came.
    tokens: Vec<Instant>,
}

impl Heard {
    async fn hear(
        &mut self,
        client: &mut InferenceClient<Channel>,
        request: GenerateRequest,
        record: &mut RequestRecord,
    ) -> Result<(), Status> {
        let mut stream = client.generate(request).await?.into_inner();
        while let Some(response) = stream.message().await? {
            match response.event {
                Some(Event::Accepted(_)) => self.accepted = true,
                Some(Event::Delta(delta)) => self.tokens.extend(delta.token_ids.iter().map(|_| baton_runtime::now())),
                Some(Event::Finished(finished)) => self.on_finished(&finished, record),
                Some(Event::PromptLogprobs(_)) | None => {}
            }
        }
        Ok(())
    }

    fn on_finished(&self, finished: &v1::Finished, record: &mut RequestRecord) {
        record.finished = Some(self.start.elapsed());
        record.local_tokens = finished.usage.map_or(0, |usage| usage.cached_tokens);
        record.computed_tokens = record.prompt_tokens.saturating_sub(record.local_tokens);
        // "prefill-3" is node 3.
        let number = |name: &str| name.rsplit('-').next().and_then(|number| number.parse().ok());
        record.prefill = number(&finished.prefill_node);
        record.decode = number(&finished.decode_node);
    }

    /// The times of a request that has ended well; why it has not, otherwise.
    fn sum_up(&self, record: &mut RequestRecord) -> Option<String> {
        if self.tokens.len() != record.output_tokens as usize {
            record.finished = None;
            return Some(format!("ended with {} of {} tokens", self.tokens.len(), record.output_tokens));
        }
        record.ttft = self.tokens.first().map(|first| first.duration_since(self.due));
        let mut gaps: Vec<_> = self.tokens.windows(2).map(|pair| pair[1] - pair[0]).collect();
        record.tbt = Tbt::of_gaps(&mut gaps).map(|Tbt(tbt)| tbt);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> RequestRecord {
        let request =
            TraceRequest { timestamp: Duration::ZERO, input_length: 600, output_length: 3, hash_ids: vec![1, 2] };
        RequestRecord::arriving(&request, 1.0)
    }

    fn ended(index: usize, failure: Option<&str>) -> Ended {
        let problem = failure.map(|reason| Problem::Failed(reason.into()));
        Ended { index, record: record(), late: Duration::from_millis(index as u64), problem }
    }

    #[test]
    fn only_a_refusal_at_admission_counts_as_rejection() {
        let mut refused = record();
        let problem = reject(&Status::resource_exhausted("full"), false, &mut refused);
        assert!(matches!(problem, Problem::Rejected(reason) if reason.contains("full")));
        assert!(refused.rejected);
        for (status, accepted) in [(Status::resource_exhausted("late"), true), (Status::unavailable("gone"), false)] {
            let mut failed = record();
            let problem = reject(&status, accepted, &mut failed);
            assert!(matches!(problem, Problem::Failed(reason) if reason.contains(status.message())));
            assert!(!failed.rejected);
        }
    }

    #[test]
    fn replay_times_count_from_the_due_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let heard = Heard { due: at(100), start, accepted: true, tokens: vec![at(350), at(380), at(450)] };
        let mut record = record();
        assert_eq!(heard.sum_up(&mut record), None);
        assert_eq!((record.ttft, record.tbt), (Some(Duration::from_millis(250)), Some(Duration::from_millis(70))));
        let short = Heard { tokens: vec![at(350)], ..heard };
        assert_eq!(short.sum_up(&mut record).as_deref(), Some("ended with 1 of 3 tokens"));
    }

    #[test]
    fn replay_counts_failures_and_orders_records_by_arrival() {
        let rejected = Ended { problem: Some(Problem::Rejected("full".into())), ..ended(150, None) };
        let same = (0..50).map(|index| ended(index, Some("same")));
        let fine = (50..150).map(|index| ended(index, None));
        let played = played(same.chain(fine).chain([rejected]).rev().collect());
        assert_eq!((played.records.len(), played.failures.len(), played.failures["same"]), (151, 1, 50));
        assert_eq!(played.first_problem.as_deref(), Some("same"));
        assert_eq!(played.late_p99, Duration::from_millis(149));
    }
}
