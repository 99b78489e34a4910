//! Cost models: how long prefill and decode steps take, fitted online to what the nodes report.
//!
//! A prefill step takes `base + a * rows + b * attended tokens`, a decode step `base + a *
//! sequences + b * KV tokens`. One model serves all nodes of a class (same role, kv_class and
//! model). Each node has a factor to it, which follows slowly. So a new node profits from what the
//! others measured. One slow step does not make a node look worse than its twin.

mod output;
mod residual;
mod transfer;

use std::time::{Duration, Instant};

use baton_types::NodeProfile;

pub use output::OutputLength;
pub use residual::Residuals;
pub use transfer::TransferCost;

/// Weights of a linear model, as a normal distribution around the best guess. Bayesian linear
/// regression, updated one observation at a time. That is recursive least squares with a forgetting
/// factor (Ljung, System Identification, section 11.2).
#[derive(Debug, Clone)]
struct LinearFit {
    weights: [f64; 3],
    covariance: [[f64; 3]; 3],
    /// The covariance does not grow past its start by forgetting.
    prior: [f64; 3],
}

/// Old observations lose 1 % of their weight with each new one.
const FORGETTING: f64 = 0.99;
/// Variance of a relative observation: steps of the same shape differ by about a fifth.
const NOISE: f64 = 0.04;
/// One observation counts as this many times its prediction at most, and as this part of it at
/// least. A hiccup is not a new machine.
const OUTLIER: f64 = 4.0;
/// Shortest step that the models predict.
const MIN_SECONDS: f64 = 1e-5;

fn dot(a: &[f64; 3], b: &[f64; 3]) -> f64 {
    a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
}

impl LinearFit {
    /// Around `weights`, as uncertain as `spread` (standard deviations).
    fn new(weights: [f64; 3], spread: [f64; 3]) -> Self {
        let prior = spread.map(|s| s * s);
        let row = |i: usize| std::array::from_fn(|j| if i == j { prior[i] } else { 0.0 });
        Self { weights, covariance: std::array::from_fn(row), prior }
    }

    fn predict(&self, x: &[f64; 3]) -> f64 {
        dot(&self.weights, x).max(MIN_SECONDS)
    }

    /// Takes in that `x` took `seconds`. Errors count relative to the prediction, so that long
    /// steps do not drown short ones.
    fn update(&mut self, x: &[f64; 3], seconds: f64) {
        let scale = 1.0 / self.predict(x);
        let x = x.map(|value| value * scale);
        let observed = (seconds * scale).clamp(1.0 / OUTLIER, OUTLIER);
        let px: [f64; 3] = std::array::from_fn(|i| dot(&self.covariance[i], &x));
        let denominator = FORGETTING * NOISE + dot(&px, &x);
        let error = observed - dot(&self.weights, &x);
        for (weight, gain) in self.weights.iter_mut().zip(&px) {
            *weight += gain / denominator * error;
        }
        self.keep_positive();
        for (row, gain) in self.covariance.iter_mut().zip(&px) {
            for (value, other) in row.iter_mut().zip(&px) {
                *value -= gain * other / denominator;
            }
        }
        self.forget();
    }

    /// Time that grows with less work is noise: what is below 0 becomes 0, and the others what they
    /// are expected to be then. Steps of nearly the same shape tell only the sum. Were the others
    /// left alone, such steps would push one weight up as long as another is kept at 0.
    fn keep_positive(&mut self) {
        for _ in 0..3 {
            let below = |&i: &usize| self.weights[i] < 0.0 && self.covariance[i][i] > 0.0;
            let Some(i) = (0..3).find(below) else { break };
            let excess = self.weights[i] / self.covariance[i][i];
            for j in 0..3 {
                self.weights[j] -= self.covariance[j][i] * excess;
            }
            self.weights[i] = 0.0;
        }
        self.weights = self.weights.map(|weight| weight.max(0.0));
    }

    fn forget(&mut self) {
        let bounded = (0..3).all(|i| self.covariance[i][i] / FORGETTING <= self.prior[i]);
        if bounded {
            self.covariance = self.covariance.map(|row| row.map(|value| value / FORGETTING));
        }
    }
}

/// Used if a node could not measure itself: about a small model on a few cores.
const DEFAULT_PREFILL: [f64; 3] = [5e-3, 2e-3, 1e-7];
const DEFAULT_DECODE: [f64; 3] = [10e-3, 2e-3, 1e-6];
/// Rows of a chunk if the node does not say, until a larger one was seen.
const DEFAULT_CHUNK: u32 = 512;

/// A fit that begins with a node's own profile, or with the defaults if that is empty or nonsense.
/// What was measured is wrong by half of itself at most as a rule. With a looser prior a few steps
/// of similar shape, which cannot tell one weight from another, could lead to any prediction for a
/// larger one.
fn seeded(profile: [f64; 3], defaults: [f64; 3]) -> LinearFit {
    let usable = profile.iter().all(|w| w.is_finite() && *w >= 0.0) && profile.iter().any(|w| *w > 0.0);
    if !usable {
        return LinearFit::new(defaults, defaults.map(|weight| 2.0 * weight));
    }
    // What was not measured may be anything.
    let spread = |i: usize| if profile[i] > 0.0 { 0.5 * profile[i] } else { 2.0 * defaults[i] };
    LinearFit::new(profile, std::array::from_fn(spread))
}

/// Time of prefill, for one class of nodes.
#[derive(Debug, Clone)]
pub struct PrefillCost {
    fit: LinearFit,
    chunk: u32,
    /// Whether the node says how large its chunks are. The last one before a partial prefill may be
    /// larger.
    is_told: bool,
}

impl PrefillCost {
    /// Seeded with what a node measured at start.
    pub fn new(profile: &NodeProfile) -> Self {
        let weights = [profile.prefill_base, profile.prefill_per_token, profile.prefill_per_token_pair];
        let (chunk, is_told) = match profile.chunk_tokens {
            0 => (DEFAULT_CHUNK, false),
            told => (told, true),
        };
        Self { fit: seeded(weights, DEFAULT_PREFILL), chunk, is_told }
    }

    /// Seconds of a step of `rows` rows that attend to `attended` tokens in sum.
    pub fn step(&self, rows: u32, attended: u64) -> f64 {
        self.fit.predict(&[1.0, f64::from(rows), attended as f64])
    }

    /// Rows of a full chunk.
    pub fn chunk_rows(&self) -> u32 {
        self.chunk
    }

    /// Seconds to compute a prompt of `tokens` tokens of which the first `cached` are here.
    pub fn prompt(&self, tokens: u32, cached: u32) -> f64 {
        self.prompt_in_chunks(tokens, cached, self.chunk)
    }

    /// The same in chunks of so many rows.
    pub fn prompt_in_chunks(&self, tokens: u32, cached: u32, chunk: u32) -> f64 {
        self.in_steps(tokens.saturating_sub(cached).div_ceil(chunk.max(1)).max(1), tokens, cached)
    }

    /// The same in one step, however many they are.
    pub fn one_chunk(&self, tokens: u32, cached: u32) -> f64 {
        self.in_steps(1, tokens, cached)
    }

    fn in_steps(&self, steps: u32, tokens: u32, cached: u32) -> f64 {
        let uncached = f64::from(tokens.saturating_sub(cached));
        let up_to = |n: u32| f64::from(n) * (f64::from(n) + 1.0) / 2.0;
        self.fit.predict(&[f64::from(steps), uncached, up_to(tokens) - up_to(tokens.min(cached))])
    }

    fn observe(&mut self, rows: u32, attended: u64, seconds: f64) {
        if !self.is_told {
            self.chunk = self.chunk.max(rows);
        }
        self.fit.update(&[1.0, f64::from(rows), attended as f64], seconds);
    }
}

/// Time of a decode step, for one class of nodes.
#[derive(Debug, Clone)]
pub struct DecodeCost {
    fit: LinearFit,
}

impl DecodeCost {
    /// Seeded with what a node measured at start.
    pub fn new(profile: &NodeProfile) -> Self {
        let weights = [profile.decode_base, profile.decode_per_sequence, profile.decode_per_kv_token];
        Self { fit: seeded(weights, DEFAULT_DECODE) }
    }

    /// Seconds of a step of `sequences` sequences that attend to `kv_tokens` tokens in sum.
    pub fn step(&self, sequences: u32, kv_tokens: u64) -> f64 {
        self.fit.predict(&[1.0, f64::from(sequences), kv_tokens as f64])
    }

    fn observe(&mut self, sequences: u32, kv_tokens: u64, seconds: f64) {
        self.fit.update(&[1.0, f64::from(sequences), kv_tokens as f64], seconds);
    }
}

/// Both models of one class; a class uses the one of its role.
#[derive(Debug, Clone)]
pub struct ClassCost {
    /// Of its prefill nodes.
    pub prefill: PrefillCost,
    /// Of its decode nodes.
    pub decode: DecodeCost,
    /// Measured decode steps over predicted ones, less 1.
    decode_spread: Residuals,
    /// What the factors of its nodes are about, by their steps.
    usual: SpeedFactor,
    /// Whether a step was measured.
    is_measured: bool,
    /// Profiles of its nodes, until then.
    profiles: Vec<NodeProfile>,
}

/// Profiles that a class is seeded with, at most.
const MAX_PROFILES: usize = 16;

/// The lower median: half of the nodes of a class must lie to shift it.
fn median(profiles: &[NodeProfile]) -> NodeProfile {
    let of = |number: fn(&NodeProfile) -> f64| {
        let mut numbers: Vec<f64> = profiles.iter().map(number).collect();
        numbers.sort_by(f64::total_cmp);
        numbers.get(numbers.len().saturating_sub(1) / 2).copied().unwrap_or_default()
    };
    NodeProfile {
        prefill_base: of(|profile| profile.prefill_base),
        prefill_per_token: of(|profile| profile.prefill_per_token),
        prefill_per_token_pair: of(|profile| profile.prefill_per_token_pair),
        decode_base: of(|profile| profile.decode_base),
        decode_per_sequence: of(|profile| profile.decode_per_sequence),
        decode_per_kv_token: of(|profile| profile.decode_per_kv_token),
        ..profiles.first().copied().unwrap_or_default()
    }
}

impl ClassCost {
    /// Seeded with the profile of the first node of the class.
    pub fn new(profile: &NodeProfile) -> Self {
        Self {
            prefill: PrefillCost::new(profile),
            decode: DecodeCost::new(profile),
            decode_spread: Residuals::default(),
            usual: SpeedFactor::default(),
            is_measured: false,
            profiles: vec![*profile],
        }
    }

    /// One more node of the class. Says whether that changed what the class is seeded with: until a
    /// step is measured, that is the median of what its nodes say.
    pub fn introduce(&mut self, profile: &NodeProfile) -> bool {
        if self.is_measured || self.profiles.len() >= MAX_PROFILES {
            return false;
        }
        let mut profiles = std::mem::take(&mut self.profiles);
        profiles.push(*profile);
        let seeded = Self::new(&median(&profiles));
        *self = Self { profiles, ..seeded };
        true
    }

    /// The class's seconds as those of a node with this factor. A node that has had no step is as
    /// fast as the others are: the class's model learns from them together with their factors, and
    /// one without the other would say that it is slower, or faster.
    pub fn seconds(&self, speed: SpeedFactor, seconds: f64) -> f64 {
        seconds * self.factor(speed)
    }

    fn factor(&self, speed: SpeedFactor) -> f64 {
        if speed.is_measured { speed.factor } else { speed.factor * self.usual.factor }
    }

    /// A node's step took `ratio` times what the class's model says.
    fn follow(&mut self, speed: &mut SpeedFactor, ratio: f64) {
        speed.factor = self.factor(*speed);
        speed.is_measured = true;
        speed.follow(ratio);
        self.usual.follow(ratio);
    }

    /// By how much of itself a decode step exceeds its prediction at the quantile `q` (0 to 1): the
    /// tail of the time between tokens. 0 until enough were seen.
    pub fn decode_spread(&self, q: f64) -> f64 {
        self.decode_spread.quantile(q)
    }

    /// Time has passed: how far predictions were off long ago is forgotten.
    pub fn forget_old(&mut self, now: Instant) {
        self.decode_spread.forget_old(now);
    }

    /// A prefill node took `seconds` for a step; `factor` is its speed against the class.
    pub fn on_prefill_step(&mut self, factor: &mut SpeedFactor, rows: u32, attended: u64, seconds: f64) {
        if is_time(seconds) {
            self.is_measured = true;
            let expected = self.prefill.step(rows, attended);
            self.prefill.observe(rows, attended, seconds / self.factor(*factor));
            self.follow(factor, seconds / expected);
        }
    }

    /// A decode node takes `seconds` for a partial prefill. Its factor is that of its steps.
    pub fn on_slice(&mut self, factor: SpeedFactor, rows: u32, attended: u64, seconds: f64) {
        if is_time(seconds) {
            self.is_measured = true;
            let seconds = seconds / self.factor(factor);
            self.prefill.fit.update(&[1.0, f64::from(rows), attended as f64], seconds);
        }
    }

    /// A decode node took `seconds` for a step.
    pub fn on_decode_step(
        &mut self,
        now: Instant,
        factor: &mut SpeedFactor,
        sequences: u32,
        kv_tokens: u64,
        seconds: f64,
    ) {
        if is_time(seconds) {
            self.is_measured = true;
            let expected = self.decode.step(sequences, kv_tokens);
            let own = self.factor(*factor);
            self.decode_spread.observe(now, 1.0, seconds / (expected * own));
            self.decode.observe(sequences, kv_tokens, seconds / own);
            self.follow(factor, seconds / expected);
        }
    }
}

/// Seconds as a time: 0 if they are negative or no number, 11 days at most.
/// `Duration::from_secs_f64` rounds more exactly and takes several times as long, which a placement
/// over a thousand nodes notices.
pub(crate) fn duration(seconds: f64) -> Duration {
    // What is no number becomes 0 as an integer.
    Duration::from_nanos((seconds.clamp(0.0, 1e6) * 1e9) as u64)
}

fn is_time(seconds: f64) -> bool {
    seconds.is_finite() && seconds > 0.0
}

/// How many times as long as its class a node takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpeedFactor {
    factor: f64,
    /// Whether it comes from steps, and not from the start-up profile alone.
    is_measured: bool,
}

impl Default for SpeedFactor {
    fn default() -> Self {
        Self { factor: 1.0, is_measured: false }
    }
}

impl SpeedFactor {
    /// From two start-up measurements. Nodes that start together disturb each other: below a factor
    /// of 2 the difference says nothing.
    pub fn from_profiles(own: f64, class: f64) -> Self {
        let ratio = own / class;
        let tells = ratio.is_finite() && ratio > 0.0 && !(0.5..=2.0).contains(&ratio);
        let factor = if tells { ratio.clamp(0.05, 20.0) } else { 1.0 };
        Self { factor, is_measured: false }
    }

    /// Whether a step of it was measured.
    pub(crate) fn is_measured(self) -> bool {
        self.is_measured
    }

    /// Moves by a fiftieth of the way to what was observed.
    fn follow(&mut self, observed: f64) {
        let observed = observed.clamp(self.factor / OUTLIER, self.factor * OUTLIER);
        self.factor = (self.factor * (observed / self.factor).powf(0.02)).clamp(0.05, 20.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small generator, so that the tests need no dependency.
    struct Noise(u64);

    impl Noise {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as f64 / (1_u64 << 31) as f64
        }
    }

    #[test]
    fn cost_fit_converges_from_distant_seed_despite_noise_and_outliers() {
        let mut cost = ClassCost::new(&NodeProfile::default());
        let mut factor = SpeedFactor::default();
        let truth = |rows: f64, attended: f64| 0.02 + 4e-4 * rows + 3e-7 * attended;
        let mut noise = Noise(1);
        for n in 0..400 {
            let rows = (1.0 + noise.next() * 511.0).floor();
            let start = (noise.next() * 4000.0).floor();
            let attended = rows * start + rows * (rows + 1.0) / 2.0;
            let hiccup = if n % 50 == 7 { 30.0 } else { 1.0 };
            let seconds = truth(rows, attended) * (0.9 + 0.2 * noise.next()) * hiccup;
            cost.on_prefill_step(&mut factor, rows as u32, attended as u64, seconds);
        }
        for (rows, attended) in [(64, 3_000), (512, 131_000), (512, 2_000_000)] {
            let expected = truth(f64::from(rows), attended as f64);
            let found = cost.seconds(factor, cost.prefill.step(rows, attended));
            assert!((found / expected - 1.0).abs() < 0.25, "{rows} rows, {attended} attended: {found} for {expected}");
        }
    }

    #[test]
    fn cost_fit_stays_accurate_after_many_steps_of_one_shape() {
        // Partial prefills as a busy cluster makes them: rows, tokens attended to, and how many
        // steps told of them.
        let phases = [
            (579, 500e3, 60),
            (438, 400e3, 60),
            (454, 420e3, 60),
            (221, 233e3, 30),
            (149, 161e3, 300),
            (147, 159e3, 500),
            (157, 170e3, 500),
            (160, 174e3, 3000),
        ];
        let truth = |rows: f64, attended: f64| 0.005 + 4.5e-4 * rows + 3e-7 * attended;
        let profile = NodeProfile { prefill_per_token: 5e-4, ..NodeProfile::default() };
        for seed in 0..20 {
            let mut cost = ClassCost::new(&profile);
            let factor = SpeedFactor::default();
            let mut noise = Noise(seed);
            for (rows, attended, steps) in phases {
                for _ in 0..steps {
                    let seconds = truth(f64::from(rows), attended) * (0.6 + 0.8 * noise.next());
                    cost.on_slice(factor, rows as u32, attended as u64, seconds);
                }
                let found = cost.prefill.step(rows as u32, attended as u64) / truth(f64::from(rows), attended);
                assert!((0.75..1.25).contains(&found), "{rows} rows: {found} of what they take");
            }
        }
    }

    #[test]
    fn prompt_cost_falls_with_cached_prefix_and_rises_with_length() {
        let cost = PrefillCost::new(&NodeProfile::default());
        assert!(cost.prompt(1500, 1488) < cost.prompt(1500, 0) / 4.0);
        assert!(cost.prompt(3000, 0) > 1.9 * cost.prompt(1500, 0));
        assert!(cost.prompt(1, 5) >= MIN_SECONDS);
    }

    #[test]
    fn cost_fit_ignores_invalid_step_times() {
        let mut cost = ClassCost::new(&NodeProfile { prefill_base: f64::NAN, ..NodeProfile::default() });
        let before = cost.decode.step(4, 1000);
        let mut factor = SpeedFactor::default();
        for seconds in [f64::NAN, -1.0, 0.0, f64::INFINITY] {
            cost.on_decode_step(Instant::now(), &mut factor, 4, 1000, seconds);
        }
        assert_eq!((cost.decode.step(4, 1000), factor), (before, SpeedFactor::default()));
        assert_eq!(cost.prefill.step(1, 1), PrefillCost::new(&NodeProfile::default()).step(1, 1));
    }

    #[test]
    fn speed_factor_shows_node_slower_than_its_class() {
        let mut cost = ClassCost::new(&NodeProfile::default());
        let mut fast = SpeedFactor::default();
        let mut slow = SpeedFactor::default();
        for _ in 0..300 {
            cost.on_decode_step(Instant::now(), &mut fast, 8, 4000, 0.03);
            cost.on_decode_step(Instant::now(), &mut slow, 8, 4000, 0.09);
        }
        let step = cost.decode.step(8, 4000);
        let ratio = cost.seconds(slow, step) / cost.seconds(fast, step);
        assert!((2.5..3.5).contains(&ratio), "{ratio}");
        assert!((cost.seconds(fast, step) / 0.03 - 1.0).abs() < 0.2);
        assert_eq!(SpeedFactor::from_profiles(1.5, 1.0), SpeedFactor::default());
        assert_eq!(cost.seconds(SpeedFactor::from_profiles(4.0, 1.0), 1.0), 4.0 * cost.usual.factor);
    }

    #[test]
    fn class_is_seeded_with_the_median_of_what_its_nodes_say() {
        let profile =
            |seconds| NodeProfile { prefill_base: 0.01, prefill_per_token: seconds, ..NodeProfile::default() };
        for lie in [1e6, 1e-9] {
            let mut cost = ClassCost::new(&profile(lie));
            (0..2).for_each(|_| assert!(cost.introduce(&profile(0.001))));
            let prompt = cost.prefill.prompt(1000, 0);
            assert!((0.5..2.0).contains(&prompt), "{prompt} s of 1 s");
            cost.on_prefill_step(&mut SpeedFactor::default(), 512, 100, 0.5);
            assert!(!cost.introduce(&profile(lie)), "it is measured");
        }
    }

    #[test]
    fn node_without_a_step_is_as_fast_as_one_that_has_had_some() {
        for seconds in [0.001, 0.01, 0.1] {
            let profile = NodeProfile { decode_base: 0.01, decode_per_sequence: 0.001, ..NodeProfile::default() };
            let mut cost = ClassCost::new(&profile);
            let mut first = SpeedFactor::default();
            for _ in 0..500 {
                cost.on_decode_step(Instant::now(), &mut first, 4, 2000, seconds);
                let step = cost.decode.step(4, 2000);
                let ratio = cost.seconds(first, step) / cost.seconds(SpeedFactor::default(), step);
                assert!((0.999..1.001).contains(&ratio), "{ratio}");
            }
        }
    }
}
