//! The engine on a thread of its own: one step at a time, sampled there too, and reported back.

use std::sync::mpsc as std_mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_engine::{Engine, EngineError, KvArena, LogitsWanted, SequenceStep, StepObserver, logprobs, sample};
use baton_scheduler::{StepId, StepOutput, StepPlan, StepSequence};
use baton_types::Refused;
use tokio::sync::mpsc;

use crate::layer_gate::LayerGate;

/// Steps that may wait for the thread: the loops have one in flight.
const QUEUED_STEPS: usize = 2;

/// What the thread reports.
#[derive(Debug)]
pub enum EngineEvent {
    /// K and V of one layer are final for every row of the step.
    KvReady {
        /// The step.
        step: StepId,
        /// The layer.
        layer: u32,
    },
    /// The step is over.
    StepDone {
        /// The step.
        step: StepId,
        /// One output per sequence, in the plan's order.
        result: Result<Vec<StepOutput>, Refused>,
        /// How long it took, sampling included, waits for prefixes not.
        elapsed: Duration,
        /// When its last layer was computed.
        layers_ended: Instant,
    },
}

/// A step, and the prefixes that it waits for.
struct Task {
    plan: StepPlan,
    gates: Vec<LayerGate>,
}

/// Handle of the thread. Dropping it ends the thread after the step in hand.
pub struct EngineThread {
    steps: std_mpsc::SyncSender<Task>,
    thread: JoinHandle<()>,
}

impl EngineThread {
    /// Starts the thread. `watch_layers`: whether layers are reported (prefill pushes them, decode does not care). Events go to `events`, whose reader must
    /// never wait for the engine.
    pub fn start<T: From<EngineEvent> + Send + 'static>(
        engine: Box<dyn Engine>,
        watch_layers: bool,
        events: mpsc::Sender<T>,
    ) -> std::io::Result<Self> {
        let (steps, queue) = std_mpsc::sync_channel(QUEUED_STEPS);
        let body = move || run(engine, watch_layers, &queue, &events);
        let thread = std::thread::Builder::new().name("engine".into()).spawn(body)?;
        Ok(Self { steps, thread })
    }

    /// Hands a step over, with a gate for each prefix that is still coming in. `false`: the thread is gone, which is the end of the node.
    pub fn submit(&self, plan: StepPlan, gates: Vec<LayerGate>) -> bool {
        self.steps.try_send(Task { plan, gates }).is_ok()
    }

    /// Whether the thread ended: only by a panic while the handle lives.
    pub fn is_dead(&self) -> bool {
        self.thread.is_finished()
    }
}

fn run<T: From<EngineEvent>>(
    mut engine: Box<dyn Engine>,
    watch_layers: bool,
    queue: &std_mpsc::Receiver<Task>,
    events: &mpsc::Sender<T>,
) {
    while let Ok(task) = queue.recv() {
        let began = Instant::now();
        let mut times = StepTimes { layers_ended: began, waited: Duration::ZERO };
        let result = step(&mut *engine, &task, watch_layers, events, &mut times);
        let StepTimes { layers_ended, waited } = times;
        let elapsed = began.elapsed().saturating_sub(waited);
        let done = EngineEvent::StepDone { step: task.plan.id, result, elapsed, layers_ended };
        if events.blocking_send(done.into()).is_err() {
            return;
        }
    }
}

fn step<T: From<EngineEvent>>(
    engine: &mut dyn Engine,
    Task { plan, gates }: &Task,
    watch_layers: bool,
    events: &mpsc::Sender<T>,
    times: &mut StepTimes,
) -> Result<Vec<StepOutput>, Refused> {
    let batch: Vec<_> = plan.sequences.iter().map(sequence_step).collect();
    let arena = engine.arena().clone();
    let outputs = empty_outputs(plan);
    let mut observer = Observer { plan, gates, arena, watch_layers, events, times, outputs, error: None };
    let stepped = engine.step(&batch, &mut observer).and_then(|()| observer.error.take().map_or(Ok(()), Err));
    stepped.map_err(|error| Refused { kind: error.kind(), message: error.to_string() })?;
    Ok(observer.outputs)
}

fn empty_outputs(plan: &StepPlan) -> Vec<StepOutput> {
    let empty = |sequence: &StepSequence| StepOutput { key: sequence.key, sampled: None, prompt_logprobs: Vec::new() };
    plan.sequences.iter().map(empty).collect()
}

fn sequence_step(sequence: &StepSequence) -> SequenceStep<'_> {
    SequenceStep {
        tokens: &sequence.tokens[sequence.range.clone()],
        start: sequence.range.start as u32,
        block_table: &sequence.block_table,
        logits: match sequence.logits {
            baton_scheduler::LogitsWanted::None => LogitsWanted::None,
            baton_scheduler::LogitsWanted::Last => LogitsWanted::Last,
            baton_scheduler::LogitsWanted::All => LogitsWanted::All,
        },
    }
}

/// When things happened in a step.
struct StepTimes {
    layers_ended: Instant,
    /// For prefixes.
    waited: Duration,
}

/// Samples rows, reports layers and waits for prefixes while the step runs.
struct Observer<'a, T> {
    plan: &'a StepPlan,
    gates: &'a [LayerGate],
    arena: KvArena,
    watch_layers: bool,
    events: &'a mpsc::Sender<T>,
    times: &'a mut StepTimes,
    outputs: Vec<StepOutput>,
    error: Option<EngineError>,
}

impl<T> Observer<'_, T> {
    fn row(&mut self, index: usize, position: usize, logits: &[f32]) -> Result<(), EngineError> {
        let sequence = &self.plan.sequences[index];
        if sequence.logits == baton_scheduler::LogitsWanted::All {
            let next = sequence.tokens[..sequence.prompt_tokens].get(position + 1).copied();
            let top = sequence.sampling.prompt_logprobs.unwrap_or(0);
            self.outputs[index].prompt_logprobs.push(logprobs(logits, next, top)?);
        }
        if sequence.is_last_chunk && position + 1 == sequence.range.end {
            let (prompt, output) = sequence.tokens.split_at(sequence.prompt_tokens);
            let sampled = sample(logits, &sequence.sampling, prompt, output)?;
            self.outputs[index].sampled = Some((sampled.token, sampled.logprobs));
        }
        Ok(())
    }
}

impl<T: From<EngineEvent>> StepObserver for Observer<'_, T> {
    fn kv_ready(&mut self, layer: u32) {
        for (block, from_token) in self.plan.sequences.iter().filter_map(|sequence| sequence.zero_tail) {
            self.arena.zero_tail(layer, block, from_token);
        }
        if self.watch_layers {
            // The loop is gone only when the process ends; then nobody needs the layer.
            let _ = self.events.blocking_send(EngineEvent::KvReady { step: self.plan.id, layer }.into());
        }
    }

    fn await_prefix(&mut self, layer: u32) -> Result<(), EngineError> {
        if self.gates.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let here = self.gates.iter().all(|gate| gate.wait(layer));
        self.times.waited += began.elapsed();
        if here { Ok(()) } else { Err(EngineError::PrefixLost { layer }) }
    }

    fn layers_done(&mut self) {
        self.times.layers_ended = Instant::now();
    }

    fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]) {
        if self.error.is_none() {
            self.error = self.row(sequence, position as usize, logits).err();
        }
    }
}
