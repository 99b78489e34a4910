//! What is asked of an index. What can be prepared is prepared before the clock starts, in the form
//! that the index takes.

use super::measure::{self, Round};
use super::workload::{Batch, Block, Workload};
use crate::BenchError;

/// An index of which node holds which blocks.
pub trait Index {
    /// Its name in the table.
    const NAME: &str;
    /// Hashes of all blocks, and what else it names things by.
    type Names;
    /// A prompt's blocks.
    type Prompt;
    /// What a lookup finds.
    type Matches;

    /// Names of everything.
    fn names(workload: &Workload) -> Self::Names;
    /// An empty index.
    fn new(names: &Self::Names) -> Self;
    /// Takes a batch without applying it. Not timed.
    fn enqueue(&mut self, names: &Self::Names, batch: &Batch);
    /// Applies all batches taken. Timed; includes freeing those that the index takes by value.
    fn drain(&mut self, names: &Self::Names);
    /// A prompt in the index's form. Not timed.
    fn prompt(names: &Self::Names, blocks: &[Block]) -> Self::Prompt;
    /// How many leading blocks each node holds. Timed; may leave the prompt empty, if the index
    /// takes it by value.
    fn lookup(&self, prompt: &mut Self::Prompt) -> Self::Matches;
    /// The same as numbers of nodes, ordered by them. Not timed.
    fn depths(&self, matches: Self::Matches) -> Vec<(u32, u32)>;
}

/// An index with its type left behind.
#[derive(Debug, Clone, Copy)]
pub struct Contender {
    pub(super) name: &'static str,
    /// Bytes per entry, once every answer has been compared.
    pub(super) check: fn(&Workload) -> Result<f64, BenchError>,
    /// Fills and asks it.
    pub(super) round: fn(&Workload) -> Round,
}

impl Contender {
    /// Of that type.
    pub const fn of<I: Index>() -> Self {
        Self { name: I::NAME, check: measure::check::<I>, round: measure::round::<I> }
    }
}
