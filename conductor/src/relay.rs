//! One request between its nodes, the cluster and its client: carries out what `RequestCore`
//! decides.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proto::v1::generate_response::Event;
use baton_proto::v1::node_command::Command;
use baton_proto::{token_text, v1};
use baton_runtime::{Phase, Waited, within};
use baton_scheduler::{OutputToken, RequestCore, RequestEffect, RequestError, RequestNote};
use baton_text::Tokenizer;
use baton_types::{
    Attempt, ErrorKind, FinishReason, NodeId, NodeInfo, NodeRole, PrefillJob, Refused, RequestKey, Slo, Tbt, TokenId,
    TokenLogprobs, Ttft,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use crate::decision_log::{OpenRecord, RequestEnd};
use crate::error::GenerateError;
use crate::frontend::{Frontend, Outgoing};
use crate::leader::{Answer, Decided, PendingAnswer};
use crate::live::{Entry, LiveEvent, TimedEvent};
use crate::other_answers::Decodes;
use crate::output::{OutputText, Part};
use crate::prediction_errors::{Estimate, Pair};
use crate::unread::{Lost, Unread};
use crate::window_stats::ObjectiveOutcome;

type Outcome = Result<FinishReason, RequestError>;

/// What the one that places is asked.
#[derive(Debug)]
enum Question {
    /// Which nodes serve an attempt, so long after the request's arrival?
    Nodes { key: RequestKey, waited: Duration, since: Instant },
    /// Which other decode node grants what this one refused?
    Other { key: RequestKey, from: NodeId, refused: Refused },
    /// Which other decode node goes on, as this attempt?
    Migrate { to: RequestKey },
}

/// One request on its way. Dropped before its end, it is aborted.
pub struct Relay {
    frontend: Arc<Frontend>,
    core: RequestCore,
    /// Which of the request's answers it is.
    completion: u32,
    /// Told once its nodes hold the prompt; `None` once it was, or if no other answer waits for it.
    decodes: Option<Decodes>,
    text: OutputText,
    record: OpenRecord,
    entry: Entry,
    unread: Unread,
    interrupted: Interrupted,
    /// The question that is not answered.
    asked: Option<(Question, oneshot::Receiver<Answer>)>,
    /// Fires when the core wants to be woken, or before. The core's time moves on with each token,
    /// and a timer for each would cost more than relaying it.
    timer: Waited,
    /// When it fires; `None` once it has.
    timer_set: Option<Instant>,
    /// When what is being told to the client came from its node.
    heard: Option<Instant>,
    /// Why the client cannot be told more.
    gone: Option<RequestError>,
}

/// What ends a request from outside: its client left, or aborted it, or this conductor goes down.
/// Waited for once and for all: to wait anew for each token would cost more than to relay it. It
/// ends once.
type Interrupted = futures::future::Fuse<BoxFuture<'static, RequestError>>;

fn interrupted(frontend: &Frontend, entry: &Entry, unread: &Unread) -> Interrupted {
    let left = unread.closed();
    let aborted = entry.aborted.clone();
    let shutdown = frontend.shutdown.clone();
    let interrupted = async move {
        tokio::select! {
            () = left => RequestError::Aborted,
            () = aborted.cancelled() => RequestError::Aborted,
            () = shutdown.wait_for(Phase::Closing) => RequestError::GoingDown,
        }
    };
    interrupted.boxed().fuse()
}

impl Relay {
    /// A request that has not been placed.
    pub fn new(
        frontend: Arc<Frontend>,
        completion: u32,
        decodes: Option<Decodes>,
        core: RequestCore,
        text: OutputText,
        record: OpenRecord,
        entry: Entry,
        out: mpsc::Sender<Outgoing>,
    ) -> Self {
        let unread = Unread::new(out, &frontend.unread);
        let interrupted = interrupted(&frontend, &entry, &unread);
        let timer = Box::pin(std::future::ready(()));
        let timer_set = None;
        let asked = None;
        let heard = None;
        let gone = None;
        Self {
            frontend,
            core,
            completion,
            decodes,
            text,
            record,
            entry,
            unread,
            interrupted,
            asked,
            timer,
            timer_set,
            heard,
            gone,
        }
    }

    fn now(&self) -> Instant {
        self.frontend.clock.now()
    }

    /// Ends an answer that was taken in with another one and is not served after all.
    pub async fn refused(mut self, error: GenerateError) {
        self.send_last(Outgoing { response: Err(error), heard: None }).await;
    }

    /// Waits until the request is taken in, which may be at once, or refused.
    pub async fn admitted(&mut self, own: Slo) -> Result<(), GenerateError> {
        loop {
            match self.carry_out() {
                Some(Err(error)) => return Err(self.not_taken(error, own)),
                Some(Ok(_)) => return Ok(()),
                None if self.core.is_admitted() => return Ok(()),
                None => self.wait().await,
            }
        }
    }

    fn not_taken(&mut self, error: RequestError, own: Slo) -> GenerateError {
        let error = GenerateError::from(error).with_setter(own);
        let timeline = self.core.timeline().clone();
        let usage = self.core.usage();
        let outcome = Err(error.clone());
        self.record.end(RequestEnd { outcome, timeline, usage, tbt: None, decode: None, first_token: None });
        error
    }

    /// Relays until the request ends, one way or the other.
    pub async fn run(&mut self) {
        if self.completion == 0 {
            let accepted = v1::Accepted {
                request_id: self.core.job().request.to_string(),
                model: self.frontend.model.name().to_owned(),
                prompt_token_ids: self.core.job().tokens.to_vec(),
                seed: self.core.job().sampling.seed,
            };
            self.send(Event::Accepted(accepted));
        }
        let outcome = loop {
            if let Some(outcome) = self.carry_out() {
                break outcome;
            }
            self.wait().await;
        };
        self.end(outcome).await;
    }

    /// Waits for whatever comes first, and tells the core.
    async fn wait(&mut self) {
        if !self.unread.is_empty() {
            // Also while one event follows the other.
            self.flush();
        }
        let stalls = self.unread.stalls_at(self.frontend.limits().request.stall_timeout);
        if let Some(due) = self.core.next_wakeup().into_iter().chain(stalls).min()
            && self.timer_set.is_none_or(|set| due < set)
        {
            self.timer = self.frontend.clock.sleep_until(due);
            self.timer_set = Some(due);
        }
        if self.timer_set.is_some_and(|set| set <= self.now()) {
            return self.on_time();
        }
        let clock = &self.frontend.clock;
        let is_behind = !self.unread.is_empty();
        tokio::select! {
            // An event that is here goes first, and is what there nearly always is.
            biased;
            told = self.entry.events.recv() => match told {
                Some(told) => self.on_timed_event(told),
                None => self.core.on_abort(self.now()),
            },
            error = &mut self.interrupted => self.cut_off(error),
            answer = answered(&mut self.asked), if self.asked.is_some() => self.on_later(answer),
            () = &mut self.timer, if self.timer_set.is_some() => self.on_time(),
            room = self.unread.room(|| clock.now()), if is_behind => {
                if let Err(lost) = room {
                    self.lose(lost);
                }
            }
        }
    }

    fn on_later(&mut self, answer: Option<Answer>) {
        let Some((question, _)) = self.asked.take() else { return };
        // Without an answer, it is one to an attempt that is over.
        if let Some(answer) = answer {
            self.on_answer(question, answer);
        }
    }

    fn on_timed_event(&mut self, told: TimedEvent) {
        self.heard = Some(told.at);
        match told.event {
            // What another node says of it is none of its business.
            LiveEvent::Node(node, attempt, event) if self.core.is_at(attempt, &node) => {
                self.core.on_event(self.now(), attempt, event);
            }
            LiveEvent::Node(node, attempt, _) => {
                let request = self.core.job().request;
                tracing::debug!(%request, attempt = attempt.0, %node, "a node spoke of a request that it does not have");
            }
            LiveEvent::NodeDeparture(start, away) => {
                self.core.on_node_away(self.now(), told.at, &start, away);
            }
        }
    }

    fn on_time(&mut self) {
        self.timer_set = None;
        self.heard = None;
        let now = self.now();
        let stall = self.frontend.limits().request.stall_timeout;
        if self.unread.stalls_at(stall).is_some_and(|at| at <= now) {
            return self.cut_off(RequestError::Stalled(stall));
        }
        if self.frontend.shutdown.phase() >= Phase::Draining {
            self.core.on_draining(now);
        }
        self.core.on_wakeup(now);
    }

    fn flush(&mut self) {
        if let Err(lost) = self.unread.flush(self.now()) {
            self.lose(lost);
        }
    }

    fn lose(&mut self, lost: Lost) {
        self.cut_off(match lost {
            Lost::Gone => RequestError::Aborted,
            Lost::TooMuch(bytes) => RequestError::Unread(bytes),
        });
    }

    /// The client is told nothing more.
    fn cut_off(&mut self, error: RequestError) {
        let now = self.now();
        match &error {
            RequestError::GoingDown => self.core.on_closing(now),
            RequestError::Stalled(_) | RequestError::Unread(_) => self.core.on_client_stalled(now, error.clone()),
            _ => self.core.on_abort(now),
        }
        self.gone.get_or_insert(error);
    }

    /// Carries out what the core wants; the outcome once the request has ended.
    fn carry_out(&mut self) -> Option<Outcome> {
        while let Some(effect) = self.core.poll_effect() {
            #[cfg(test)]
            crate::tests::seen::effect(&effect);
            match effect {
                RequestEffect::Place { key, exclude, waited } => {
                    let wanted = self.core.placement_request(key, &exclude, waited);
                    let since = self.now();
                    let asked = self.frontend.ask_for_nodes(&wanted);
                    self.on_asked(Question::Nodes { key, waited, since }, asked);
                }
                RequestEffect::AskReselect { key, from, refused } => {
                    let asked = self.frontend.ask_for_other(key, &from);
                    self.on_asked(Question::Other { key, from, refused }, asked);
                }
                RequestEffect::PlaceMigration(question) => {
                    let to = question.migrated;
                    let asked = self.frontend.ask_for_migration(question);
                    self.on_asked(Question::Migrate { to }, asked);
                }
                RequestEffect::Submit { node, job } => self.submit(&node, &job),
                RequestEffect::Reselect { node, reselect } => {
                    // If the session ended, the loss of the prefill node is on its way here.
                    self.frontend.nodes.send(&node, Command::Reselect((&reselect).into()));
                }
                RequestEffect::Abort { node, key } => {
                    self.frontend.nodes.send(&node, Command::Abort(key.into()));
                }
                RequestEffect::UpdateLedger { key, entry } => self.frontend.update_ledger(key, &entry),
                RequestEffect::PromptLogprobs(logprobs) => {
                    let next = self.core.job().tokens.iter().skip(1).map(|token| Some(*token)).chain([None]);
                    let tokenizer = &self.frontend.model.tokenizer;
                    let positions = next.zip(&logprobs).map(|(token, l)| with_texts(tokenizer, token, l)).collect();
                    self.send(Event::PromptLogprobs(v1::PromptLogprobs { positions }));
                }
                RequestEffect::Deliver { index, gap, tokens } => self.deliver(index, gap, tokens),
                RequestEffect::Note(note) => self.note(note),
                RequestEffect::End(outcome) => {
                    let outcome = self.gone.clone().map_or(outcome, Err);
                    return Some(
                        outcome.map(|finish| if self.text.is_stopped() { FinishReason::Stop } else { finish }),
                    );
                }
            }
        }
        None
    }

    fn on_asked(&mut self, question: Question, asked: PendingAnswer) {
        match asked {
            PendingAnswer::Ready(answer) => self.on_answer(question, answer),
            // What was asked before is over: only one question is open at a time.
            PendingAnswer::Later(later) => self.asked = Some((question, later)),
        }
    }

    fn on_answer(&mut self, question: Question, answer: Answer) {
        match (question, answer) {
            (Question::Nodes { key, waited, since }, Answer::Placed(decided)) => {
                self.frontend.metrics.placement.record(self.now().saturating_duration_since(since).as_secs_f64());
                let Decided { at, placed, grounds } = *decided;
                if let Ok(to) = &placed {
                    self.entry.goes_to(to.placement.nodes());
                    let is_decode = |info: &NodeInfo| info.role == NodeRole::Decode;
                    if self.frontend.cluster().node(&to.placement.prefill).is_some_and(|node| is_decode(node.info())) {
                        self.frontend.metrics.on_prompt_at_decode();
                    }
                }
                let decision = placed.as_ref().map(|to| to.placement.clone()).map_err(Clone::clone);
                self.record.decided(key.attempt, waited, decision, grounds);
                self.core.on_placed(at, key, placed);
            }
            (Question::Other { key, from, refused }, Answer::Reselected(to)) => {
                self.entry.goes_to(to.iter().map(|to| to.node.clone()));
                self.core.on_reselected(self.now(), key, &from, refused, to);
            }
            (Question::Migrate { to }, Answer::Migrated(chosen)) => {
                self.entry.goes_to(chosen.iter().map(|chosen| chosen.to.node.clone()));
                self.core.on_migration_placed(to, chosen);
            }
            (question, answer) => tracing::error!(?question, ?answer, "an answer to another question"),
        }
    }

    fn submit(&mut self, node: &NodeId, job: &PrefillJob) {
        if job.output_tokens > 0 {
            tracing::debug!(request = %job.key.request, attempt = job.key.attempt.0, %node, output_tokens = job.output_tokens, is_migration = job.is_migration, "asking another node to go on");
        }
        if job.partial_prefill_tokens > 0 {
            self.frontend.metrics.on_partial_prefill();
        }
        // A node that left since it was chosen may have left before this request was known to be
        // there: then the request is not told.
        let gone = {
            let cluster = self.frontend.cluster();
            self.core.needed().iter().find(|start| !cluster.is_here(start)).map(|start| start.node.clone())
        };
        let unreachable = gone.or_else(|| {
            let job = v1::PrefillJob { term: self.frontend.desk.term(), ..job.into() };
            let sent = self.frontend.nodes.send(node, Command::Prefill(job));
            (!sent).then(|| node.clone())
        });
        if let Some(node) = unreachable {
            self.core.on_unreachable(self.now(), &node);
        }
    }

    fn deliver(&mut self, index: u32, gap: Option<Duration>, tokens: Vec<OutputToken>) {
        if index > self.core.first_index() {
            self.tell_decodes();
        }
        if let Some(gap) = gap {
            self.frontend.metrics.on_token_gap(gap);
        }
        let piece = self.text.push(tokens);
        if piece.stopped {
            self.core.on_stopped(self.now(), index + piece.tokens.len() as u32);
        }
        let tokenizer = &self.frontend.model.tokenizer;
        let logprobs = |token: &OutputToken| {
            // The token that ends the output is not part of its text, nor is a special one.
            let is_shown = token.finish != Some(FinishReason::Stop) && self.text.shows(token.token);
            let shown = is_shown.then_some(token.token);
            Some(with_texts(tokenizer, shown, token.logprobs.as_ref()?))
        };
        let mut of_tokens = v1::Delta {
            index,
            token_ids: piece.tokens.iter().map(|token| token.token).collect(),
            logprobs: piece.tokens.iter().filter_map(logprobs).collect(),
            ..v1::Delta::default()
        };
        let next = index + piece.tokens.len() as u32;
        for Part { reasoning, text, tool_calls } in piece.parts {
            let more = v1::Delta { index: next, ..v1::Delta::default() };
            let of_tokens = std::mem::replace(&mut of_tokens, more);
            self.send(Event::Delta(v1::Delta { reasoning, text, tool_calls, ..of_tokens }));
        }
    }

    /// Its decode node goes on with it: both of its nodes hold the prompt.
    fn tell_decodes(&mut self) {
        let Some(placement) = self.core.placement() else { return };
        if let Some(decodes) = self.decodes.take() {
            // The client may be gone, and its other answers with it.
            let _ = decodes.send(placement.nodes());
        }
    }

    fn note(&self, note: RequestNote) {
        let request = self.core.job().request;
        let attempt = self.core.attempt().0;
        let metrics = &self.frontend.metrics;
        match note {
            RequestNote::Queued => {
                metrics.on_queued();
                self.frontend.window_stats.lock().admission.queued += 1;
            }
            RequestNote::Retried { attempt, why } => {
                tracing::warn!(%request, attempt = attempt.0, reason = %why, "placing the request again");
                metrics.on_retry();
                self.record.failed(&why);
                if why.kind() == ErrorKind::DataLoss {
                    self.forget_prefix();
                }
            }
            RequestNote::GrantRefused { from, to, refused } => {
                metrics.on_grant_refused(to.is_some());
                if let Some(node) = to {
                    tracing::info!(%request, attempt, %node, reason = %refused, "another decode node takes the request");
                    self.record.turned(&format_args!("{node} instead of {from}: {refused}"));
                }
            }
            RequestNote::WentOn { node, output_tokens } => {
                self.record.turned(&format_args!("{node} after {output_tokens} tokens"));
            }
            RequestNote::Fetched(report) => {
                metrics.on_migrated(&report);
                if let Some(reason) = report.failure {
                    tracing::info!(%request, attempt, %reason, "a sequence that migrated is computed");
                }
            }
            RequestNote::MigrationFailed { reason } => {
                tracing::debug!(%request, reason, "the request stays at its decode node");
                metrics.on_migration_failed();
            }
            RequestNote::FetchFailed(reason) => {
                tracing::info!(%request, attempt, %reason, "a prefix could not be fetched and is computed");
            }
        }
    }

    /// What is cached of the prompt is no good: the nodes that have it forget it, whichever of them
    /// it was fetched from.
    fn forget_prefix(&self) {
        let block_hashes = baton_proto::hashes_to_bytes(&self.core.job().block_hashes);
        let forget = v1::ForgetPrefixCommand { block_hashes };
        self.frontend.nodes.send_all(&Command::ForgetPrefix(forget));
    }

    /// Who cannot be told is not told again.
    fn send(&mut self, event: Event) {
        if self.gone.is_some() {
            return;
        }
        // The first token may be kept back on purpose.
        let heard = self.heard.filter(|_| matches!(&event, Event::Delta(delta) if delta.index > 0));
        let response = Ok(response(self.completion, event));
        if let Err(lost) = self.unread.send(self.now(), Outgoing { response, heard }) {
            self.lose(lost);
        }
    }

    /// The last message, after what the client has not read. Its request takes nothing from others
    /// any more; the client has as long as a request may take.
    async fn send_last(&mut self, last: Outgoing) {
        if self.gone.is_some() {
            self.unread.clear();
        }
        if self.unread.is_empty() {
            self.entry.leave();
        }
        self.unread.send_last(self.now(), last);
        let limits = self.frontend.limits();
        let clock = Arc::clone(&self.frontend.clock);
        let drained = self.unread.drain(limits.request.stall_timeout, &*clock);
        tokio::select! {
            _ = within(&*clock, limits.max_time, drained) => {}
            _ = &mut self.interrupted => {}
        }
    }

    /// The request is over: tells its client, its other answers, the metrics and the records.
    async fn end(&mut self, outcome: Outcome) {
        let outcome = outcome.map_err(GenerateError::from);
        let timeline = self.core.timeline().clone();
        let usage = self.core.usage();
        let tbt = self.core.tbt();
        self.frontend.metrics.on_end(&outcome, &timeline, &usage);
        let kept = match &outcome {
            Ok(_) if self.core.job().is_met_by(timeline.ttft, tbt) => ObjectiveOutcome::Met,
            Err(error) if error.is_aborted() => ObjectiveOutcome::Unknown,
            Ok(_) | Err(_) => ObjectiveOutcome::Missed,
        };
        self.frontend.window_stats.lock().goodput.on_end(self.now(), kept);
        if outcome.is_ok() {
            self.tell_decodes();
            self.learn(tbt);
        }
        let placement = self.core.placement();
        let decode = placement.and_then(|placement| placement.decode.clone());
        let calls_tools = self.text.has_calls() && !self.text.is_stopped();
        let finished = outcome.as_ref().ok().map(|finish| v1::Finished {
            finish_reason: match finish {
                FinishReason::Stop if calls_tools => "tool_calls".into(),
                finish => finish.as_str().into(),
            },
            stop_sequence: self.text.stop_sequence().unwrap_or_default().into(),
            usage: Some((&usage).into()),
            timeline: Some((&timeline).into()),
            prefill_node: placement.map(|placement| placement.prefill.to_string()).unwrap_or_default(),
            decode_node: decode.as_ref().map(ToString::to_string).unwrap_or_default(),
        });
        let first_token = self.core.first_token().map(|(attempt, _)| attempt);
        self.record.end(RequestEnd { outcome: outcome.clone(), timeline, usage, tbt, decode, first_token });
        let last = match (finished, outcome) {
            (Some(finished), _) => Ok(response(self.completion, Event::Finished(Box::new(finished)))),
            (None, Err(error)) => Err(error),
            (None, Ok(_)) => return,
        };
        self.send_last(Outgoing { response: last, heard: None }).await;
    }

    /// Says what came of the predictions. Of a request that was placed again nothing is said: what
    /// was predicted of its first attempt is not what served it.
    fn learn(&self, tbt: Option<Tbt>) {
        let Some(placement) = self.core.placement().filter(|_| self.core.attempt() == Attempt(0)) else { return };
        let Ttft(ttft) = placement.predicted_ttft;
        let transfer = &self.core.timeline().kv_transfer;
        let exposed = (transfer.bytes > 0).then_some(transfer.exposed);
        let output = placement.decode.as_ref().map(|_| f64::from(self.core.usage().completion_tokens));
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        let pairs = [
            (
                Estimate::Ttft,
                seconds(Some(ttft + placement.first_token_delay)),
                seconds(self.core.first_token().map(|(_, ttft)| ttft)),
            ),
            (Estimate::Tbt, seconds(placement.predicted_tbt.map(|Tbt(tbt)| tbt)), seconds(tbt.map(|Tbt(tbt)| tbt))),
            (Estimate::Transfer, seconds(placement.predicted_exposed), seconds(exposed)),
            (Estimate::Output, Some(placement.predicted_output_tokens), output),
        ];
        for (estimate, predicted, measured) in pairs {
            let pair = predicted.zip(measured).and_then(|(predicted, measured)| Pair::new(predicted, measured));
            if let Some(pair) = pair {
                self.frontend.metrics.on_estimate(estimate, pair);
                self.frontend.window_stats.lock().prediction_errors.observe(estimate, pair);
            }
        }
    }
}

impl Drop for Relay {
    /// If it is dropped early, by a panic or because the client leaves before placement, nothing
    /// stays charged and no node stays at work.
    fn drop(&mut self) {
        let now = self.now();
        self.core.on_abort(now);
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                RequestEffect::UpdateLedger { key, entry } => self.frontend.update_ledger(key, &entry),
                RequestEffect::Abort { node, key } => {
                    self.frontend.nodes.send(&node, Command::Abort(key.into()));
                }
                _ => {}
            }
        }
    }
}

async fn answered(asked: &mut Option<(Question, oneshot::Receiver<Answer>)>) -> Option<Answer> {
    match asked {
        Some((_, later)) => later.await.ok(),
        None => None,
    }
}

/// Log-probabilities for a client, who has no vocabulary: with the texts of the token that was
/// taken, if it has one, and of its alternatives.
fn with_texts(tokenizer: &Tokenizer, taken: Option<TokenId>, logprobs: &TokenLogprobs) -> v1::TokenLogprobs {
    let text = |token| token_text(tokenizer.token_bytes(token).unwrap_or_default());
    let mut wire = v1::TokenLogprobs::from(logprobs);
    (wire.text, wire.token_bytes) = taken.map(text).unwrap_or_default();
    for top in &mut wire.top {
        (top.text, top.token_bytes) = text(top.token_id);
    }
    wire
}

fn response(completion: u32, event: Event) -> v1::GenerateResponse {
    v1::GenerateResponse { event: Some(event), completion }
}
