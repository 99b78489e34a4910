//! What a block of a class and an age is worth, learned.
//!
//! Per class and age there are two sums: hits and exposure. Exposure is the epochs that blocks
//! spent at that age. Their ratio is the chance of a hit in the next epoch. Over the rest of a
//! block's life these chances give the expected hits and the time until the hit, or the end of what
//! is known. Their ratio is the density (LHD, Beckmann et al., NSDI 2018, section 4).
//!
//! The constants are round ones. They lose nowhere to LRU or LFU on the first halves of Mooncake's
//! conversation and synthetic traces, at 1,000 to 30,000 blocks. Half or twice as much of one moves
//! a hit rate by 0.02 at most.

use super::super::Position;

/// Classes of blocks, from the least used: last of its prompt, used once, twice, three times, more
/// often.
pub(super) const CLASSES: usize = 5;
/// Bins of age: two per octave of epochs, the last for all that is older.
const BINS: usize = 16;
/// Epochs in which a block that was released is still counted.
pub(super) const WINDOW: u64 = 128;
/// What counts of the sums from one epoch to the next: half in 139 epochs, in which about nine
/// times the cache is released.
const DECAY: f64 = 0.995;
/// Blocks of a prompt, about: they are used again together, so that this many are one piece of
/// evidence.
const PROMPT: f64 = 30.0;
/// Weight of what is believed without evidence, in blocks seen for an epoch: some prompts.
const PRIOR: f64 = 1000.0;

/// The class of a block that was used so often. A parent's is never below its child's.
pub(super) fn class(uses: u8, position: Position) -> usize {
    match uses {
        0 | 1 => usize::from(!position.is_last()),
        uses => usize::from(uses).min(CLASSES - 1),
    }
}

/// Sums and densities of each class.
#[derive(Debug)]
pub(super) struct Densities {
    classes: [Class; CLASSES],
    epoch: u64,
}

#[derive(Debug, Clone)]
struct Class {
    /// Blocks released in each of the last epochs that were not hit or lost since.
    waiting: [u64; WINDOW as usize],
    hits: [f64; BINS],
    exposure: [f64; BINS],
    density: [f64; BINS],
}

impl Densities {
    pub(super) fn new() -> Self {
        let empty =
            Class { waiting: [0; WINDOW as usize], hits: [0.0; BINS], exposure: [0.0; BINS], density: [0.0; BINS] };
        Self { classes: std::array::from_fn(|_| empty.clone()), epoch: 0 }
    }

    /// Hits per block and epoch that blocks of this class, released in this epoch, promise. It
    /// never grows with age, and never falls with the class.
    pub(super) fn density(&self, class: usize, epoch: u64) -> f64 {
        self.classes[class].density[bin(self.epoch - epoch)]
    }

    /// A block is released.
    pub(super) fn on_release(&mut self, class: usize) {
        self.classes[class].waiting[slot(self.epoch)] += 1;
    }

    /// A block that was released in `epoch` is used again.
    pub(super) fn on_hit(&mut self, class: usize, epoch: u64) {
        if self.on_loss(class, epoch) {
            self.classes[class].hits[bin(self.epoch - epoch)] += 1.0;
        }
    }

    /// Whether a block that was released in `epoch` is used again will not be known. `false` if it
    /// did not count any more.
    pub(super) fn on_loss(&mut self, class: usize, epoch: u64) -> bool {
        let counted = self.epoch - epoch < WINDOW;
        if counted {
            self.classes[class].waiting[slot(epoch)] -= 1;
        }
        counted
    }

    /// Counts the epoch that ends and learns from it.
    pub(super) fn next_epoch(&mut self) {
        for class in &mut self.classes {
            class.count(self.epoch);
        }
        self.epoch += 1;
        for class in &mut self.classes {
            class.waiting[slot(self.epoch)] = 0;
        }
        self.learn();
    }

    fn learn(&mut self) {
        let prior = self.pooled();
        let mut below = [0.0; BINS];
        for class in &mut self.classes {
            class.learn(&prior, &below);
            below = class.density;
        }
    }

    /// Chance of a hit per bin, of all classes together. If nothing was seen, it falls as one over
    /// the age: hits as likely in each octave.
    fn pooled(&self) -> [f64; BINS] {
        let mut pooled = [0.0; BINS];
        let mut younger = 0.0;
        for (bin, chance) in pooled.iter_mut().enumerate() {
            let sum = |of: fn(&Class) -> &[f64; BINS]| self.classes.iter().map(|class| of(class)[bin]).sum::<f64>();
            *chance = (sum(|class| &class.hits) + PRIOR * younger) / (sum(|class| &class.exposure) + PRIOR);
            younger = *chance * width(bin) / width(bin + 1);
        }
        pooled
    }
}

impl Class {
    fn count(&mut self, epoch: u64) {
        self.hits.iter_mut().chain(&mut self.exposure).for_each(|sum| *sum *= DECAY);
        for age in 0..WINDOW.min(epoch + 1) {
            self.exposure[bin(age)] += self.waiting[slot(epoch - age)] as f64;
        }
    }

    /// How many times as often as all classes together blocks of this one, at the same ages, are
    /// hit.
    fn level(&self, prior: &[f64; BINS]) -> f64 {
        let expected: f64 = self.exposure.iter().zip(prior).map(|(exposure, chance)| exposure * chance).sum();
        (self.hits.iter().sum::<f64>() + PROMPT) / (expected + PROMPT)
    }

    /// From the oldest bin to the youngest, and up from the class below. No density grows with age
    /// or falls with the class: so children are evicted first, and what was seen too rarely is made
    /// good for.
    fn learn(&mut self, prior: &[f64; BINS], below: &[f64; BINS]) {
        let level = self.level(prior);
        let mut hits = 0.0;
        let mut epochs = 0.0;
        let mut older = 0.0;
        for bin in (0..BINS).rev() {
            let chance = (self.hits[bin] + PRIOR * level * prior[bin]) / (self.exposure[bin] + PRIOR);
            let missed = 1.0 / (1.0 + chance * width(bin));
            hits = 1.0 - missed + missed * hits;
            epochs = width(bin) * (1.0 + missed) / 2.0 + missed * epochs;
            older = f64::max(older, hits / epochs);
            self.density[bin] = older.max(below[bin]);
        }
    }
}

fn slot(epoch: u64) -> usize {
    (epoch % WINDOW) as usize
}

/// Bin of an age in epochs: 0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, ..
fn bin(age: u64) -> usize {
    if age < 2 {
        return age as usize;
    }
    let octave = age.ilog2();
    let upper_half = (age >> (octave - 1)) & 1;
    (2 * octave as usize + upper_half as usize).min(BINS - 1)
}

/// Ages in a bin.
fn width(bin: usize) -> f64 {
    if bin < 2 { 1.0 } else { (1u64 << (bin / 2 - 1)) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ages(bin_wanted: usize) -> usize {
        (0..WINDOW).filter(|age| bin(*age) == bin_wanted).count()
    }

    #[test]
    fn lhd_age_bins_have_their_declared_width() {
        for bin in 0..14 {
            assert_eq!(ages(bin) as f64, width(bin), "bin {bin}");
        }
        assert_eq!((bin(WINDOW), bin(u64::MAX)), (14, BINS - 1));
    }

    #[test]
    fn lhd_class_rises_with_uses_and_fresh_last_block_is_lowest() {
        let inner = Position { depth: 3, length: 9 };
        let last = Position { depth: 8, length: 9 };
        assert_eq!([1, 2, 3, 4, 255].map(|uses| class(uses, inner)), [1, 2, 3, 4, 4]);
        assert_eq!([1, 2].map(|uses| class(uses, last)), [0, 2]);
    }

    /// Every epoch 100 blocks of each class are released. Of class 1 none is used again, of class 3
    /// half in the next epoch but one.
    fn taught() -> Densities {
        let mut densities = Densities::new();
        for epoch in 0..60 {
            for _ in 0..100 {
                densities.on_release(1);
                densities.on_release(3);
            }
            for _ in 0..if epoch < 2 { 0 } else { 50 } {
                densities.on_hit(3, epoch - 2);
            }
            densities.next_epoch();
        }
        densities
    }

    #[test]
    fn lhd_density_of_reused_class_is_higher_until_reuse_is_overdue() {
        let densities = taught();
        let at = |class, age| densities.density(class, densities.epoch - age);
        assert!(at(3, 1) > 2.0 * at(1, 1), "{} {}", at(3, 1), at(1, 1));
        assert!(at(3, 1) > 2.0 * at(3, 4), "{} {}", at(3, 1), at(3, 4));
    }

    #[test]
    fn lhd_density_falls_with_age_and_rises_with_class() {
        let densities = taught().classes.map(|class| class.density);
        for class in 0..CLASSES {
            assert!(densities[class].is_sorted_by(|younger, older| younger >= older));
            let lower = &densities[class.saturating_sub(1)];
            assert!(densities[class].iter().zip(lower).all(|(own, lower)| own >= lower));
        }
    }

    #[test]
    fn lhd_does_not_count_blocks_released_before_its_window() {
        let mut densities = Densities::new();
        densities.on_release(1);
        (0..WINDOW).for_each(|_| densities.next_epoch());
        assert!(!densities.on_loss(1, 0));
        densities.on_hit(1, 0);
        assert_eq!(densities.classes[1].hits, [0.0; BINS]);
    }
}
