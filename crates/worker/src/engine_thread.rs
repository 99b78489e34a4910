//! The engine on a thread of its own: one step at a time, sampled there too, and reported back.

use std::sync::{Arc, mpsc as std_mpsc};
use std::time::{Duration, Instant};

use baton_engine::{
    Engine, EngineError, KvArena, LayerSlice, LogitsWanted, SequenceStep, StepObserver, logprobs, sample,
};
use baton_grammar::{GrammarCompiler, Mask};
use baton_scheduler::{MAX_PREFIX_WAIT_PER_STEP, StepId, StepOutput, StepPlan, StepSequence, StepSlice};
use baton_types::{ConductorId, Refused, RequestKey, TokenId};
use tokio::sync::mpsc;

use crate::engine_watch::EngineProgress;
use crate::layer_barrier::LayerBarrier;
use crate::masks::{MaskDesk, Masks};

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
    /// A prefix has not come in time, and the engine goes on without: what the step gives for the
    /// sequence from here on means nothing.
    PrefixLate {
        /// The step.
        step: StepId,
        /// Whose prefix it is.
        key: RequestKey,
    },
    /// The step is over.
    StepDone(StepDone),
    /// The mask that a request was prepared for, or that was late for a step, is made.
    MaskReady(RequestKey),
}

/// What a step gave, and how long it took.
#[derive(Debug)]
pub struct StepDone {
    /// The step.
    pub step: StepId,
    /// One output per sequence, in the plan's order, and one of its slice.
    pub result: Result<Vec<StepOutput>, Refused>,
    /// How long it took, sampling included, waits for prefixes not.
    pub elapsed: Duration,
    /// How much of that its slice took.
    pub slice: Duration,
    /// When its last layer was computed.
    pub layers_ended: Instant,
}

/// A prefix that is still coming in, and whose it is.
pub type AwaitedPrefix = (RequestKey, LayerBarrier);

/// A step, and the prefixes that it waits for.
struct Task {
    plan: StepPlan,
    barriers: Vec<AwaitedPrefix>,
}

/// Handle of the thread. Dropping it ends the thread after the step in hand.
pub struct EngineThread {
    steps: std_mpsc::SyncSender<Task>,
    progress: Arc<EngineProgress>,
    masks: Arc<MaskDesk>,
}

impl EngineThread {
    /// Starts the thread. `watch_layers`: whether layers are reported (prefill pushes them, decode
    /// does not care). Events go to `events`, whose reader must never wait for the engine; they end
    /// when the thread does, by a panic or with the handle. `grammars` compiles those of structured
    /// output.
    pub fn start(
        engine: Box<dyn Engine>,
        grammars: GrammarCompiler,
        watch_layers: bool,
        events: mpsc::Sender<EngineEvent>,
    ) -> std::io::Result<Self> {
        let (steps, queue) = std_mpsc::sync_channel(QUEUED_STEPS);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let masks = MaskDesk::start(grammars, events.downgrade(), (threads / 2).max(1))?;
        let step_masks = Masks::new(Arc::clone(&masks));
        let progress = Arc::new(EngineProgress::default());
        let reporter = StepReporter { events, progress: Arc::clone(&progress), watch_layers };
        let body = move || run(engine, step_masks, &queue, &reporter);
        std::thread::Builder::new().name("engine".into()).spawn(body)?;
        Ok(Self { steps, progress, masks })
    }

    /// Compiles a request's grammar and makes the mask after `output`, aside from steps;
    /// [`EngineEvent::MaskReady`] follows. `true`: it is made already, and nothing follows.
    pub fn prepare(&self, key: RequestKey, conductor: ConductorId, grammar: &Arc<str>, output: &[TokenId]) -> bool {
        self.masks.prepare(key, conductor, grammar, output)
    }

    /// Forgets the grammars of requests that are over here.
    pub fn forget(&self, keys: &[RequestKey]) {
        self.masks.forget(keys);
    }

    /// How far it is.
    pub(crate) fn progress(&self) -> Arc<EngineProgress> {
        Arc::clone(&self.progress)
    }

    /// Submits a step, with a barrier for each prefix that is still coming in. `false`: the thread
    /// is gone, which is the end of the node.
    pub fn submit(&self, plan: StepPlan, barriers: Vec<AwaitedPrefix>) -> bool {
        self.steps.try_send(Task { plan, barriers }).is_ok()
    }
}

/// Whom the thread tells.
struct StepReporter {
    events: mpsc::Sender<EngineEvent>,
    progress: Arc<EngineProgress>,
    watch_layers: bool,
}

fn run(mut engine: Box<dyn Engine>, mut masks: Masks, queue: &std_mpsc::Receiver<Task>, reporter: &StepReporter) {
    while let Ok(task) = queue.recv() {
        reporter.progress.begin(&task.plan);
        // Times of steps are the machine's: they say what compute takes, and are compared with the
        // transfer engine's, which keeps the machine's clock.
        let began = baton_runtime::now();
        let step_id = task.plan.id;
        let mut times = StepTimes { layers_ended: began, waited: Duration::ZERO, slice: Duration::ZERO };
        let sequences = task.plan.sequences.iter().chain(task.plan.slice.as_ref().map(|slice| &slice.sequence));
        masks.begin(sequences);
        let result = step(&mut *engine, &mut masks, task, reporter, &mut times);
        let StepTimes { layers_ended, waited, slice } = times;
        let elapsed = began.elapsed().saturating_sub(waited);
        let done = EngineEvent::StepDone(StepDone { step: step_id, result, elapsed, slice, layers_ended });
        reporter.progress.end();
        if reporter.events.blocking_send(done).is_err() {
            return;
        }
        masks.end();
    }
}

fn step(
    engine: &mut dyn Engine,
    masks: &mut Masks,
    Task { plan: StepPlan { id, sequences, slice }, barriers }: Task,
    reporter: &StepReporter,
    times: &mut StepTimes,
) -> Result<Vec<StepOutput>, Refused> {
    let outputs = if sequences.is_empty() {
        Ok(Vec::new())
    } else {
        let mut observer = Observer::new(id, &sequences, engine.arena().clone(), masks, reporter, times);
        observer.barriers = barriers;
        observer.watch_layers = reporter.watch_layers;
        let batch: Vec<_> = sequences.iter().map(sequence_step).collect();
        let stepped = engine.step(&batch, &mut observer);
        observer.outputs(stepped)
    };
    let with_slice = outputs.and_then(|mut outputs| {
        let sliced = slice.map(|slice| step_slice(engine, masks, id, slice, reporter, times)).transpose()?;
        outputs.extend(sliced.into_iter().flatten());
        Ok(outputs)
    });
    with_slice.map_err(|error| Refused { kind: error.kind(), message: error.to_string() })
}

fn step_slice(
    engine: &mut dyn Engine,
    masks: &mut Masks,
    id: StepId,
    StepSlice { sequence, layers, mut hidden }: StepSlice,
    reporter: &StepReporter,
    times: &mut StepTimes,
) -> Result<Vec<StepOutput>, EngineError> {
    let mut observer =
        Observer::new(id, std::slice::from_ref(&sequence), engine.arena().clone(), masks, reporter, times);
    let slice = LayerSlice { sequence: sequence_step(&sequence), layers, hidden: &mut hidden };
    let began = baton_runtime::now();
    let stepped = engine.step_layers(slice, &mut observer);
    observer.times.slice = began.elapsed();
    let mut outputs = observer.outputs(stepped)?;
    outputs[0].hidden = hidden;
    Ok(outputs)
}

fn empty_output(sequence: &StepSequence) -> StepOutput {
    StepOutput {
        key: sequence.key,
        sampled: None,
        prompt_logprobs: Vec::new(),
        hidden: Vec::new(),
        failed: None,
        is_mask_late: false,
    }
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
    /// Of the slice.
    slice: Duration,
}

/// Samples rows, reports layers and waits for prefixes while the step runs.
struct Observer<'a> {
    step: StepId,
    sequences: &'a [StepSequence],
    /// Those that the step still waits for.
    barriers: Vec<AwaitedPrefix>,
    /// Those that it has given up.
    late: Vec<RequestKey>,
    arena: KvArena,
    masks: &'a mut Masks,
    watch_layers: bool,
    reporter: &'a StepReporter,
    times: &'a mut StepTimes,
    outputs: Vec<StepOutput>,
}

impl<'a> Observer<'a> {
    /// One that waits for nothing and reports no layers.
    fn new(
        step: StepId,
        sequences: &'a [StepSequence],
        arena: KvArena,
        masks: &'a mut Masks,
        reporter: &'a StepReporter,
        times: &'a mut StepTimes,
    ) -> Self {
        let outputs = sequences.iter().map(empty_output).collect();
        let barriers = Vec::new();
        let late = Vec::new();
        Self { step, sequences, barriers, late, arena, masks, watch_layers: false, reporter, times, outputs }
    }

    fn outputs(self, stepped: Result<(), EngineError>) -> Result<Vec<StepOutput>, EngineError> {
        stepped.map(|()| self.outputs)
    }

    /// An error of a row is of its sequence: the others of the step have theirs.
    fn row(&mut self, index: usize, position: usize, logits: &[f32]) -> Result<(), Refused> {
        let refused = |error: EngineError| Refused { kind: error.kind(), message: error.to_string() };
        let sequence = &self.sequences[index];
        if sequence.logits == baton_scheduler::LogitsWanted::All {
            let next = sequence.tokens[..sequence.prompt_tokens].get(position + 1).copied();
            let top = sequence.sampling.prompt_logprobs.unwrap_or(0);
            self.outputs[index].prompt_logprobs.push(logprobs(logits, next, top).map_err(refused)?);
        }
        if sequence.is_last_chunk && position + 1 == sequence.range.end {
            let mask = match sequence.sampling.grammar {
                Some(_) => self.masks.take(sequence.key)?,
                None => None,
            };
            if sequence.sampling.grammar.is_some() && mask.is_none() {
                self.outputs[index].is_mask_late = true;
                return Ok(());
            }
            let (prompt, output) = sequence.tokens.split_at(sequence.prompt_tokens);
            let sampled = sample(logits, &sequence.sampling, prompt, output, mask.as_ref().map(Mask::words));
            let sampled = sampled.map_err(refused)?;
            self.outputs[index].sampled = Some((sampled.token, sampled.logprobs));
        }
        Ok(())
    }
}

impl StepObserver for Observer<'_> {
    fn kv_ready(&mut self, layer: u32) {
        self.reporter.progress.mark();
        for (block, from_token) in self.sequences.iter().filter_map(|sequence| sequence.zero_tail) {
            self.arena.zero_tail(layer, block, from_token);
        }
        if self.watch_layers {
            // The loop is gone only when the process ends; then the layer is not needed.
            let _ = self.reporter.events.blocking_send(EngineEvent::KvReady { step: self.step, layer });
        }
    }

    fn await_prefix(&mut self, layer: u32) {
        for (key, barrier) in std::mem::take(&mut self.barriers) {
            let began = baton_runtime::now();
            let here = barrier.wait(layer, MAX_PREFIX_WAIT_PER_STEP.saturating_sub(self.times.waited));
            self.times.waited += began.elapsed();
            self.reporter.progress.mark();
            if here {
                self.barriers.push((key, barrier));
                continue;
            }
            // The loop hears it before it hears of anything that is computed from here on; it is
            // gone only when the process ends.
            let _ = self.reporter.events.blocking_send(EngineEvent::PrefixLate { step: self.step, key });
            self.late.push(key);
        }
    }

    fn layers_done(&mut self) {
        self.reporter.progress.mark();
        self.times.layers_ended = baton_runtime::now();
    }

    fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]) {
        self.reporter.progress.mark();
        // What is no KV may lead to what is no number; it is not wanted.
        let is_late = self.late.contains(&self.sequences[sequence].key);
        if self.outputs[sequence].failed.is_none() && !is_late {
            self.outputs[sequence].failed = self.row(sequence, position as usize, logits).err();
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_engine::{MockEngine, MockOptions};
    use baton_types::{Attempt, BlockId, RequestId, SamplingParams};

    use super::*;
    use crate::layer_barrier::layer_barrier;

    fn key(n: u128) -> RequestKey {
        RequestKey { request: RequestId(n), attempt: Attempt(0) }
    }

    /// The second block of a prompt of two.
    fn sequence(n: u32, awaits_prefix: bool) -> StepSequence {
        StepSequence {
            key: key(n.into()),
            tokens: Arc::new((0..32).map(|token| token + n).collect()),
            prompt_tokens: 32,
            range: 16..32,
            block_table: Arc::new(vec![BlockId(2 * n), BlockId(2 * n + 1)]),
            logits: baton_scheduler::LogitsWanted::Last,
            zero_tail: None,
            sampling: Arc::new(SamplingParams::default()),
            is_last_chunk: true,
            awaits_prefix,
        }
    }

    #[test]
    fn stalled_prefix_fetches_delay_the_step_briefly_and_fail_alone() {
        let engine = MockEngine::new(MockOptions::default()).unwrap();
        let (events, mut heard) = mpsc::channel::<EngineEvent>(100);
        let grammars = GrammarCompiler::new(&baton_text::Tokenizer::bytes()).unwrap();
        let thread = EngineThread::start(Box::new(engine), grammars, true, events).unwrap();
        let mut barriers = Vec::new();
        // Eight stall after their first layer, one is lost, one comes.
        let keepers: Vec<_> = (0..8)
            .map(|n| {
                let (keeper, barrier) = layer_barrier();
                keeper.open(1);
                barriers.push((key(n), barrier));
                keeper
            })
            .collect();
        let (lost, barrier) = layer_barrier();
        barriers.push((key(8), barrier));
        drop(lost);
        let (good, barrier) = layer_barrier();
        good.end();
        barrier.finish();
        barriers.push((key(9), barrier));
        let sequences = (0..11).map(|n| sequence(n, n < 10)).collect();
        let began = Instant::now();
        assert!(thread.submit(StepPlan { id: StepId(7), sequences, slice: None }, barriers));

        let mut late = Vec::new();
        let mut before_layer_1 = None;
        let (outputs, elapsed) = loop {
            match heard.blocking_recv().unwrap() {
                EngineEvent::PrefixLate { step, key } => {
                    assert_eq!(step, StepId(7));
                    late.push(key);
                }
                EngineEvent::KvReady { layer: 1, .. } => before_layer_1 = Some(late.len()),
                EngineEvent::KvReady { .. } | EngineEvent::MaskReady(_) => {}
                EngineEvent::StepDone(done) => break (done.result.unwrap(), done.elapsed),
            }
        };
        let took = began.elapsed();
        assert!(
            took < MAX_PREFIX_WAIT_PER_STEP * 3 / 2 && elapsed < MAX_PREFIX_WAIT_PER_STEP / 2,
            "{took:?}, of it computed: {elapsed:?}"
        );
        late.sort();
        assert_eq!((late, before_layer_1), ((0..9).map(key).collect(), Some(9)), "told before it goes on");
        let sampled: Vec<_> =
            outputs.iter().filter(|output| output.sampled.is_some()).map(|output| output.key).collect();
        assert_eq!(sampled, [key(9), key(10)]);
        drop(keepers);
    }
}
