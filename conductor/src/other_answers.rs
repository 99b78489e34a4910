//! The answers of a request after its first one.
//!
//! They begin once the first one's decode node goes on with it. Then both of its nodes hold the
//! prompt, and the others compute at most its last block. Each is a request of its own to the
//! cluster, with the seed of the first plus its number. It is placed, migrated and recovered alone.

use std::sync::Arc;
use std::time::Instant;

use baton_scheduler::RequestJob;
use baton_types::{NodeId, SamplingParams, Slo};
use tokio::sync::{mpsc, oneshot};

use crate::frontend::{Frontend, Outgoing};
use crate::live::Entry;
use crate::output::OutputText;

/// Told the nodes of the first answer once they hold the prompt; dropped if it ends before.
pub type Decodes = oneshot::Sender<Vec<NodeId>>;

/// See the module's text.
pub struct OtherAnswers {
    first_decodes: oneshot::Receiver<Vec<NodeId>>,
    /// Their places among the requests served, from the beginning on: there is room for all or for
    /// none.
    entries: Vec<Entry>,
    /// Of the first one, and when that arrived.
    job: RequestJob,
    arrived: Instant,
    /// The request's own.
    objectives: Slo,
    text: OutputText,
    out: mpsc::Sender<Outgoing>,
}

impl OtherAnswers {
    /// Those that have these places, beside the first one; `None` if there are none.
    pub fn new(
        entries: Vec<Entry>,
        first: &RequestJob,
        arrived: Instant,
        objectives: Slo,
        text: &OutputText,
        out: &mpsc::Sender<Outgoing>,
    ) -> Option<(Self, Decodes)> {
        if entries.is_empty() {
            return None;
        }
        let (decodes, first_decodes) = oneshot::channel();
        let (job, text, out) = (first.clone(), text.clone(), out.clone());
        Some((Self { first_decodes, entries, job, arrived, objectives, text, out }, decodes))
    }

    /// Serves them, each by a task of its own. One that waits for room lets those after it wait,
    /// too.
    pub async fn run(self, frontend: &Arc<Frontend>) {
        // If the first one ends without, its error has told the client.
        let Ok(first_completion_nodes) = self.first_decodes.await else { return };
        for (completion, entry) in (1..).zip(self.entries) {
            let now = frontend.clock.now();
            let job = RequestJob {
                request: entry.request(),
                sampling: Arc::new(sampling_of(&self.job.sampling, completion)),
                timeout: self.job.timeout.saturating_sub(now.saturating_duration_since(self.arrived)),
                first_completion_nodes: first_completion_nodes.clone(),
                ..self.job.clone()
            };
            let mut relay = frontend.relay(completion, None, now, job, self.text.clone(), entry, self.out.clone());
            match relay.admitted(self.objectives).await {
                Ok(()) => frontend.tasks.spawn_request("relay", async move { relay.run().await }),
                // The whole answer ends with it.
                Err(error) => return relay.refused(error).await,
            }
        }
    }
}

/// How another answer is drawn. The log-probabilities of the prompt come with the first one.
fn sampling_of(first: &SamplingParams, completion: u32) -> SamplingParams {
    SamplingParams { seed: first.seed.wrapping_add(completion.into()), prompt_logprobs: None, ..first.clone() }
}
