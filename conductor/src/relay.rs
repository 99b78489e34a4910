//! Relays one request's events to its client, through as many attempts as it takes.
//!
//! An attempt that fails is started over on other nodes: sampling has no hidden state, so the same tokens come again, and [`Output`] drops those that the
//! client has. A token that came out differently ends the request with an error instead: tokens already sent never change.

use std::pin::Pin;
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_runtime::Phase;
use baton_scheduler::Placement;
use baton_text::Tokenizer;
use baton_types::{
    Attempt, DecodeEvent, ErrorKind, FetchReport, FinishReason, KvTransfer, NodeId, PrefillEvent, Refused, RequestKey,
    Tbt, Timeline, TokenId, TokenLogprobs, Ttft, Usage,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::Sleep;

use crate::accuracy::{Estimate, Pair};
use crate::error::GenerateError;
use crate::front_door::{FrontDoor, Job, Outgoing};
use crate::live::{Entry, LiveEvent, Told};
use crate::moves::Moves;
use crate::output::{Output, OutputToken, Piece};
use crate::records::RequestEnd;
use crate::tally::Kept;

/// How long the report of the hand-over may come after the last token.
const HANDOVER_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a request whose node was lost waits for one that can take it over.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(10);
/// How often it looks.
const RECOVERY_POLL: Duration = Duration::from_millis(100);

type Responses = mpsc::Sender<Outgoing>;

/// One request on its way.
pub struct Relay {
    pub(crate) job: Job,
    pub(crate) placement: Placement,
    pub(crate) attempt: Attempt,
    /// The last attempt that there was, whatever became of it.
    pub(crate) last_attempt: Attempt,
    /// How often it was placed again after a failure.
    retries: u32,
    failed_nodes: Vec<NodeId>,
    /// Its way to another decode node.
    pub(crate) moves: Moves,
    pub(crate) entry: Entry,
    out: Responses,
    interrupted: Interrupted,
    /// When the last event came from its node.
    heard: Instant,
    /// Looks, now and then, how long ago that is: setting a timer for each token would cost more than relaying it.
    silence: Pin<Box<Sleep>>,
    pub(crate) output: Output,
    arrived: Instant,
    /// When the attempt was placed.
    placed: Instant,
    /// When the prefill node said that it begins.
    prefill_started: Instant,
    /// Which attempt gave the first token, and how long after it was placed.
    first_token: Option<(Attempt, Duration)>,
    last_token: Option<Instant>,
    /// Between the pieces of the output.
    gaps: Vec<Duration>,
    pub(crate) timeline: Timeline,
    cached_tokens: u32,
    prompt_logprobs_sent: bool,
    pub(crate) finish: Option<FinishReason>,
    /// Whether no report of a hand-over is to come: the prefill node is done with the request.
    pub(crate) transfer_settled: bool,
    /// Whether the last token said so: the decode node is done with the request.
    pub(crate) ended_by_node: bool,
}

/// What ends a request from outside: its client left, or aborted it, or this conductor goes down. Waited for once and for all: to wait anew for each token would cost more than to relay it. It ends once.
type Interrupted = futures::future::Fuse<BoxFuture<'static, GenerateError>>;

fn interrupted(door: &FrontDoor, entry: &Entry, out: &Responses) -> Interrupted {
    let (out, aborted, shutdown) = (out.clone(), entry.aborted.clone(), door.shutdown.clone());
    let interrupted = async move {
        tokio::select! {
            () = out.closed() => GenerateError::Aborted,
            () = aborted.cancelled() => GenerateError::Aborted,
            () = shutdown.wait_for(Phase::Closing) => GenerateError::going_down(),
        }
    };
    interrupted.boxed().fuse()
}

/// Where a request stands after an event.
enum Progress {
    Going,
    Finished,
}

impl Relay {
    /// A request that has just been placed for the first time.
    pub fn new(
        door: &FrontDoor,
        job: Job,
        placement: Placement,
        entry: Entry,
        out: Responses,
        arrived: Instant,
    ) -> Result<Self, GenerateError> {
        let output = job.output(&door.model)?;
        let placed = door.clock.now();
        let timeline = Timeline { placement: placed - arrived, ..Timeline::default() };
        Ok(Self {
            job,
            placement,
            attempt: Attempt(0),
            last_attempt: Attempt(0),
            retries: 0,
            moves: Moves::default(),
            failed_nodes: Vec::new(),
            interrupted: interrupted(door, &entry, &out),
            heard: placed,
            silence: Box::pin(baton_runtime::sleep(door.limits.stall_timeout)),
            entry,
            out,
            output,
            arrived,
            placed,
            prefill_started: placed,
            first_token: None,
            last_token: None,
            gaps: Vec::new(),
            timeline,
            cached_tokens: 0,
            prompt_logprobs_sent: false,
            finish: None,
            transfer_settled: false,
            ended_by_node: false,
        })
    }

    pub(crate) fn key(&self) -> RequestKey {
        RequestKey { request: self.job.request, attempt: self.attempt }
    }

    /// Relays until the request ends, one way or the other.
    pub async fn run(&mut self, door: &FrontDoor) {
        let outcome = self.relay(door).await.map(|()| self.finish.unwrap_or(FinishReason::Length));
        self.give_move_up(door);
        // A stop string ends the output while the decode node goes on.
        let nodes_are_done = outcome.is_ok() && self.ended_by_node;
        // Where one token was asked for, its number says nothing of answers.
        if outcome.is_ok() && self.placement.decode.is_some() {
            door.finished(self.key(), self.usage().completion_tokens);
        }
        door.end(self.key(), &self.placement, !nodes_are_done);
        self.timeline.total = door.clock.now() - self.arrived;
        door.metrics.on_end(&outcome, &self.timeline, &self.usage());
        let tbt = Tbt::of_gaps(&mut self.gaps);
        door.tally.lock().goodput.on_end(door.clock.now(), self.kept(&outcome, tbt));
        if outcome.is_ok() {
            self.learn(door, tbt);
        }
        self.record_end(&outcome, tbt);
        let last = match outcome {
            Ok(finish) => Ok(response(Event::Finished(Box::new(self.finished(finish))))),
            Err(error) => Err(error),
        };
        // The client may be gone, or not read; the request is over all the same.
        self.entry.leave();
        let last = Outgoing { response: last, heard: None };
        let _ = tokio::time::timeout(door.limits.stall_timeout, self.out.send(last)).await;
    }

    /// Whether the objectives were kept.
    fn kept(&self, outcome: &Result<FinishReason, GenerateError>, tbt: Option<Tbt>) -> Kept {
        match outcome {
            Ok(_) if self.job.is_met_by(self.timeline.ttft, tbt) => Kept::Met,
            Err(GenerateError::Aborted) => Kept::Unknown,
            Ok(_) | Err(_) => Kept::Missed,
        }
    }

    fn record_end(&self, outcome: &Result<FinishReason, GenerateError>, tbt: Option<Tbt>) {
        let (outcome, timeline, usage) = (outcome.clone(), self.timeline.clone(), self.usage());
        if let Some(record) = &self.job.record {
            let (decode, first_token) = (self.placement.decode.clone(), self.first_token.map(|(attempt, _)| attempt));
            record.end(RequestEnd { outcome, timeline, usage, tbt, decode, first_token });
        }
    }

    /// Says what came of the predictions. Of a request that was placed again nothing is said: what was predicted of its first attempt is not what served it.
    fn learn(&self, door: &FrontDoor, tbt: Option<Tbt>) {
        if self.attempt != Attempt(0) {
            return;
        }
        let placement = &self.placement;
        let Ttft(ttft) = placement.estimated_ttft;
        let transfer = &self.timeline.kv_transfer;
        let exposed = (transfer.bytes > 0).then_some(transfer.exposed);
        let output = placement.decode.as_ref().map(|_| f64::from(self.output.len()));
        let times = [
            (Estimate::Ttft, Some(ttft + placement.pace), self.first_token.map(|(_, ttft)| ttft)),
            (Estimate::Tbt, placement.estimated_tbt.map(|Tbt(tbt)| tbt), tbt.map(|Tbt(tbt)| tbt)),
            (Estimate::Transfer, placement.estimated_exposed, exposed),
        ];
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        let times = times.map(|(estimate, predicted, measured)| (estimate, seconds(predicted), seconds(measured)));
        let output = (Estimate::Output, Some(placement.estimated_output_tokens), output);
        for (estimate, predicted, measured) in times.into_iter().chain([output]) {
            if let Some(pair) = predicted.zip(measured).and_then(|(predicted, measured)| Pair::new(predicted, measured))
            {
                door.metrics.on_estimate(estimate, pair);
                door.tally.lock().accuracy.observe(estimate, pair);
            }
        }
    }

    async fn relay(&mut self, door: &FrontDoor) -> Result<(), GenerateError> {
        let accepted = v1::Accepted {
            request_id: self.job.request.to_string(),
            model: door.model.name.clone(),
            prompt_token_ids: self.job.tokens.to_vec(),
            seed: self.job.sampling.seed,
        };
        self.send(door, Event::Accepted(accepted)).await?;
        loop {
            let Some(event) = self.next_event(door).await? else { return Ok(()) };
            let progress = match self.on_event(door, event).await {
                Ok(progress) => progress,
                Err(error) => self.place_again(door, error).await?,
            };
            if matches!(progress, Progress::Finished) {
                return Ok(());
            }
        }
    }

    /// The next event; `None` where the output is complete and the report of the hand-over did not come in time.
    async fn next_event(&mut self, door: &FrontDoor) -> Result<Option<LiveEvent>, GenerateError> {
        loop {
            match self.any_event(door).await? {
                Some(told) if self.moves.is_to(told.attempt) => self.on_moving(door, told.event),
                // What was on its way when the attempt failed must not fail the next one.
                Some(told) if told.attempt != self.attempt => {}
                told => return Ok(told.map(|told| told.event)),
            }
        }
    }

    async fn any_event(&mut self, door: &FrontDoor) -> Result<Option<Told>, GenerateError> {
        let stall = door.limits.stall_timeout;
        let patience = if self.finish.is_some() { HANDOVER_REPORT_TIMEOUT } else { stall };
        loop {
            tokio::select! {
                // An event that is here goes first, and is what there nearly always is.
                biased;
                told = self.entry.events.recv() => {
                    let told = told.ok_or(GenerateError::Aborted)?;
                    if !matches!(told.event, LiveEvent::Offered(_)) {
                        self.heard = self.heard.max(told.at);
                    }
                    return Ok(Some(told));
                }
                error = &mut self.interrupted => return Err(error),
                () = &mut self.silence => {
                    let due = self.heard + patience;
                    if door.clock.now() >= due {
                        return if self.finish.is_some() { Ok(None) } else { Err(GenerateError::Stalled(stall)) };
                    }
                    self.silence.as_mut().reset(due.into());
                }
            }
        }
    }

    async fn on_event(&mut self, door: &FrontDoor, event: LiveEvent) -> Result<Progress, GenerateError> {
        match event {
            LiveEvent::Prefill(event) => self.on_prefill(door, event).await,
            LiveEvent::Decode(event) => self.on_decode(door, event).await,
            LiveEvent::Offered(output_tokens) => {
                self.on_offered(door, output_tokens);
                Ok(self.progress())
            }
            // What the prefill node had to do is done: the decode node has everything.
            LiveEvent::NodeLost(node) if self.transfer_settled && self.placement.decode.as_ref() != Some(&node) => {
                Ok(self.progress())
            }
            LiveEvent::NodeLost(node) if !self.placement.nodes().contains(&node) => Ok(self.progress()),
            LiveEvent::NodeLost(node) => {
                let refused = Refused { kind: ErrorKind::Unavailable, message: "the node was lost".to_owned() };
                Err(GenerateError::Node { node, refused })
            }
        }
    }

    async fn on_prefill(&mut self, door: &FrontDoor, event: PrefillEvent) -> Result<Progress, GenerateError> {
        match event {
            PrefillEvent::Started { queue, cached_tokens } => {
                self.prefill_started = door.clock.now();
                self.timeline.prefill_queue = queue;
                self.cached_tokens += cached_tokens;
                Ok(Progress::Going)
            }
            PrefillEvent::Fetched(report) if self.moves.has_moved() => {
                self.on_taken(door, report);
                Ok(Progress::Going)
            }
            PrefillEvent::Fetched(report) => {
                self.on_fetched(door, report);
                Ok(Progress::Going)
            }
            PrefillEvent::FirstToken { token, logprobs, prompt_logprobs, finish, compute } => {
                self.timeline.prefill_compute = compute;
                if !prompt_logprobs.is_empty() && !self.prompt_logprobs_sent {
                    let next = self.job.tokens.iter().skip(1).map(|token| Some(*token)).chain([None]);
                    let positions = next.zip(&prompt_logprobs);
                    let positions = positions.map(|(token, l)| with_texts(&door.model.tokenizer, token, l)).collect();
                    self.send(door, Event::PromptLogprobs(v1::PromptLogprobs { positions })).await?;
                    self.prompt_logprobs_sent = true;
                }
                self.transfer_settled |= finish.is_some();
                self.on_first_token(door, OutputToken { token, logprobs, finish }).await
            }
            PrefillEvent::HandedOver(transfer) => {
                self.on_handed_over(transfer);
                Ok(self.progress())
            }
            PrefillEvent::Failed(refused) if self.moves.has_moved() => {
                door.metrics.on_move_failed();
                Err(self.decode_failed(refused))
            }
            PrefillEvent::Failed(refused) => Err(GenerateError::Node { node: self.placement.prefill.clone(), refused }),
            PrefillEvent::DecodeFailed(refused) => Err(self.decode_failed(refused)),
            PrefillEvent::GrantRefused(refused) => {
                self.on_grant_refused(door, &refused)?;
                Ok(Progress::Going)
            }
            // No request's.
            PrefillEvent::Copied(_) => Ok(Progress::Going),
        }
    }

    async fn on_first_token(&mut self, door: &FrontDoor, token: OutputToken) -> Result<Progress, GenerateError> {
        door.cluster().on_first_token(door.clock.now(), self.key());
        if token.finish.is_none() && !self.placement.pace.is_zero() {
            self.pace().await?;
        }
        self.on_token(door, 0, token).await
    }

    /// Keeps the first token back, a step at most, so that the gap to the next one is not longer than the others.
    async fn pace(&mut self) -> Result<(), GenerateError> {
        tokio::select! {
            () = baton_runtime::sleep(self.placement.pace) => Ok(()),
            error = &mut self.interrupted => Err(error),
        }
    }

    /// A prefix came from another node, or did not.
    fn on_fetched(&mut self, door: &FrontDoor, report: FetchReport) {
        door.fetched(self.key(), &self.placement, &report);
        if let Some(reason) = report.failure {
            tracing::info!(request = %self.job.request, attempt = self.attempt.0, %reason, "a prefix could not be brought and is computed");
            return;
        }
        self.cached_tokens += report.tokens;
        let (bytes, transport, elapsed) = (report.bytes, report.transport, report.elapsed);
        self.timeline.prefix_fetch = Some(KvTransfer { bytes, transport, elapsed, ..KvTransfer::default() });
    }

    fn on_handed_over(&mut self, transfer: KvTransfer) {
        self.timeline.kv_transfer = transfer;
        self.transfer_settled = true;
    }

    async fn on_decode(&mut self, door: &FrontDoor, event: DecodeEvent) -> Result<Progress, GenerateError> {
        match event {
            DecodeEvent::Token { index, token, logprobs, finish, queue } => {
                if let Some(queue) = queue {
                    self.timeline.decode_queue = queue;
                }
                if index == 0 {
                    // The decode node computed the tail of the prompt.
                    self.timeline.prefill_compute = door.clock.now().saturating_duration_since(self.prefill_started);
                    return self.on_first_token(door, OutputToken { token, logprobs, finish }).await;
                }
                self.on_token(door, index, OutputToken { token, logprobs, finish }).await
            }
            DecodeEvent::Failed(refused) => Err(self.decode_failed(refused)),
        }
    }

    fn decode_failed(&self, refused: Refused) -> GenerateError {
        let node = self.placement.decode.clone().unwrap_or_else(|| self.placement.prefill.clone());
        GenerateError::Node { node, refused }
    }

    async fn on_token(&mut self, door: &FrontDoor, index: u32, token: OutputToken) -> Result<Progress, GenerateError> {
        self.ended_by_node |= token.finish.is_some();
        let piece = self.output.push(index, token).map_err(|error| GenerateError::FrontDoor {
            kind: ErrorKind::DataLoss,
            message: error.to_string(),
            retry_after: None,
        })?;
        if let Some(piece) = piece {
            self.on_piece(door, piece).await?;
        }
        Ok(self.progress())
    }

    async fn on_piece(&mut self, door: &FrontDoor, piece: Piece) -> Result<(), GenerateError> {
        let now = door.clock.now();
        match self.last_token.replace(now) {
            None => {
                self.timeline.ttft = now - self.arrived;
                self.first_token = Some((self.attempt, now - self.placed));
            }
            Some(before) => {
                door.metrics.on_token_gap(now - before);
                self.gaps.push(now - before);
            }
        }
        self.finish = piece.finish;
        if self.finish.is_some() {
            self.silence.as_mut().reset((now + HANDOVER_REPORT_TIMEOUT).into());
        }
        let logprobs = |token: &OutputToken| {
            token.logprobs.as_ref().map(|l| with_texts(&door.model.tokenizer, Some(token.token), l))
        };
        let delta = v1::Delta {
            index: piece.index,
            token_ids: piece.tokens.iter().map(|token| token.token).collect(),
            logprobs: piece.tokens.iter().filter_map(logprobs).collect(),
            text: piece.text,
        };
        self.send(door, Event::Delta(delta)).await
    }

    fn progress(&self) -> Progress {
        if self.finish.is_some() && self.transfer_settled { Progress::Finished } else { Progress::Going }
    }

    /// Starts over on other nodes after a failure that another node may not have; gives the error back where that cannot help.
    async fn place_again(&mut self, door: &FrontDoor, error: GenerateError) -> Result<Progress, GenerateError> {
        if self.finish.is_some() {
            // The client has everything: only the report of the hand-over is missing.
            return Ok(Progress::Finished);
        }
        let GenerateError::Node { node, refused } = &error else { return Err(error) };
        let helps = matches!(refused.kind, ErrorKind::Unavailable | ErrorKind::Overloaded);
        if helps && self.go_on_at_other(door) {
            return Ok(Progress::Going);
        }
        if !helps || self.retries + 1 >= door.limits.max_attempts {
            return Err(error);
        }
        tracing::warn!(request = %self.job.request, attempt = self.attempt.0, %node, reason = %refused, "placing the request again");
        door.metrics.on_retry();
        if let Some(record) = &self.job.record {
            record.failed(&error);
        }
        door.end(self.key(), &self.placement, true);
        self.failed_nodes.push(node.clone());
        self.retries += 1;
        self.last_attempt.0 += 1;
        let attempt = self.last_attempt;
        // Its own reason says more than that no node is left.
        let placement = self.place_elsewhere(door, attempt).await.ok_or(error)?;
        self.attempt = attempt;
        self.cached_tokens = 0;
        self.timeline.prefix_fetch = None;
        self.placement = placement;
        self.placed = door.clock.now();
        self.prefill_started = self.placed;
        // Its new nodes have not been silent so far.
        self.heard = self.placed;
        self.transfer_settled = false;
        self.ended_by_node = false;
        self.moves.on_placed();
        Ok(Progress::Going)
    }

    /// A placement on other nodes, or on those that failed, should they be back: a supervisor starts a node again within seconds. `None` where none is to be had
    /// in time, or nobody waits any more.
    async fn place_elsewhere(&mut self, door: &FrontDoor, attempt: Attempt) -> Option<Placement> {
        let deadline = door.clock.now() + RECOVERY_PATIENCE;
        loop {
            let others = door.place(&self.job, attempt, &self.failed_nodes, &self.entry, self.arrived);
            match others.or_else(|_| door.place(&self.job, attempt, &[], &self.entry, self.arrived)) {
                Ok(placement) => return Some(placement),
                Err(error) if error.kind() == ErrorKind::Invalid || door.clock.now() >= deadline => return None,
                Err(_) => {}
            }
            tokio::select! {
                () = baton_runtime::sleep(RECOVERY_POLL) => {}
                _ = &mut self.interrupted => return None,
            }
        }
    }

    /// Waits for a client that is slow, and for nothing that must not wait.
    async fn send(&mut self, door: &FrontDoor, event: Event) -> Result<(), GenerateError> {
        // The first token may be kept back on purpose.
        let heard = matches!(&event, Event::Delta(delta) if delta.index > 0).then_some(self.heard);
        let outgoing = match self.out.try_send(Outgoing { response: Ok(response(event)), heard }) {
            Ok(()) => return Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(GenerateError::Aborted),
            Err(mpsc::error::TrySendError::Full(outgoing)) => outgoing,
        };
        tokio::select! {
            sent = self.out.send(outgoing) => sent.map_err(|_| GenerateError::Aborted),
            error = &mut self.interrupted => Err(error),
            () = baton_runtime::sleep(door.limits.stall_timeout) => Err(GenerateError::Stalled(door.limits.stall_timeout)),
        }
    }

    fn usage(&self) -> Usage {
        let prompt_tokens = self.job.tokens.len() as u32;
        Usage { prompt_tokens, completion_tokens: self.output.len(), cached_tokens: self.cached_tokens }
    }

    fn finished(&self, finish: FinishReason) -> v1::Finished {
        v1::Finished {
            finish_reason: finish.as_str().into(),
            usage: Some((&self.usage()).into()),
            timeline: Some((&self.timeline).into()),
            prefill_node: self.placement.prefill.to_string(),
            decode_node: self.placement.decode.as_ref().map(ToString::to_string).unwrap_or_default(),
        }
    }
}

/// Log-probabilities for a client, who has no vocabulary: with the texts of the token that was taken and of its alternatives.
fn with_texts(tokenizer: &Tokenizer, taken: Option<TokenId>, logprobs: &TokenLogprobs) -> v1::TokenLogprobs {
    let text = |token| String::from_utf8_lossy(tokenizer.token_bytes(token).unwrap_or_default()).into_owned();
    let mut wire = v1::TokenLogprobs::from(logprobs);
    wire.text = taken.map(text).unwrap_or_default();
    for top in &mut wire.top {
        top.text = text(top.token_id);
    }
    wire
}

fn response(event: Event) -> v1::GenerateResponse {
    v1::GenerateResponse { event: Some(event) }
}
