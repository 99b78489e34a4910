//! How long answers get: a distribution learned from those that ended.

/// Buckets per doubling of the length.
const PER_OCTAVE: f64 = 4.0;
/// The last bucket begins at 2^17 tokens.
const BUCKETS: usize = 69;
/// Answers that the guess before the first one counts as.
const PRIOR: f64 = 4.0;
/// When so many are counted, each loses half its weight: the traffic changes with the hours.
const FULL: f64 = 8192.0;

/// Distribution of the tokens of an answer.
#[derive(Debug, Clone)]
pub struct OutputLength {
    counts: [f64; BUCKETS],
    total: f64,
}

fn bucket(tokens: u32) -> usize {
    let octaves = f64::from(tokens.max(1)).log2();
    ((octaves * PER_OCTAVE) as usize).min(BUCKETS - 1)
}

/// Tokens in the middle of a bucket.
fn middle(bucket: usize) -> f64 {
    ((bucket as f64 + 0.5) / PER_OCTAVE).exp2()
}

impl OutputLength {
    /// Begins with a guess: answers of about `tokens` tokens.
    pub fn new(tokens: u32) -> Self {
        let mut counts = [0.0; BUCKETS];
        counts[bucket(tokens)] = PRIOR;
        Self { counts, total: PRIOR }
    }

    /// An answer ended with so many tokens.
    pub fn observe(&mut self, tokens: u32) {
        self.counts[bucket(tokens)] += 1.0;
        self.total += 1.0;
        if self.total > FULL {
            self.counts = self.counts.map(|count| count / 2.0);
            self.total /= 2.0;
        }
    }

    /// Tokens expected of a whole answer that may have `max_tokens`.
    pub fn mean(&self, max_tokens: u32) -> f64 {
        self.expected_left(0, max_tokens)
    }

    /// Tokens that an answer of which `done` are there is expected to go on for: the mean over
    /// those that got at least so far.
    pub fn expected_left(&self, done: u32, max_tokens: u32) -> f64 {
        let limit = f64::from(max_tokens);
        let from = bucket(done.saturating_add(1));
        let longer = (from..BUCKETS).map(|bucket| (self.counts[bucket], middle(bucket).min(limit)));
        let (weight, sum) = longer.fold((0.0, 0.0), |(weight, sum), (count, tokens)| {
            (weight + count, sum + count * (tokens - f64::from(done)).max(1.0))
        });
        // Longer than any seen: as long again as it is.
        let expected = if weight > 0.0 { sum / weight } else { f64::from(done.max(1)) };
        expected.min((limit - f64::from(done)).max(0.0))
    }

    /// Probability that an answer of which `done` tokens are there gets more than `tokens` in all.
    pub fn survival(&self, done: u32, tokens: u32) -> f64 {
        if tokens <= done {
            return 1.0;
        }
        let from = |bucket: usize| self.counts[bucket..].iter().sum::<f64>();
        let so_far = from(bucket(done.saturating_add(1)));
        if so_far > 0.0 { (from(bucket(tokens)) / so_far).min(1.0) } else { 0.5 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_length_learns_distribution_of_answers() {
        let mut lengths = OutputLength::new(200);
        assert!((150.0..260.0).contains(&lengths.mean(4096)), "{}", lengths.mean(4096));
        // Half of them short, half long.
        for n in 0..2000 {
            lengths.observe(if n % 2 == 0 { 10 } else { 1000 });
        }
        assert!((450.0..560.0).contains(&lengths.mean(4096)), "{}", lengths.mean(4096));
        assert!(lengths.survival(0, 14) < 0.6 && lengths.survival(0, 900) > 0.4);
        let left = lengths.expected_left(100, 4096);
        assert!((800.0..1000.0).contains(&left), "{left}: it must be one of the long ones");
        assert_eq!(lengths.expected_left(4000, 4096), 96.0, "longer than any: as long again, up to the limit");
        assert_eq!(lengths.mean(5), 5.0);
        assert_eq!(lengths.survival(5, 5), 1.0);
        let fresh = lengths.survival(0, 100);
        let old = lengths.survival(50, 100);
        assert!((0.45..0.55).contains(&fresh) && old > 0.99, "{fresh} {old}");
        assert!(lengths.mean(64) < 64.0);
    }

    #[test]
    fn output_length_weights_recent_answers_more() {
        let mut lengths = OutputLength::new(10);
        (0..100_000).for_each(|_| lengths.observe(10));
        (0..20_000).for_each(|_| lengths.observe(500));
        assert!(lengths.mean(4096) > 400.0);
    }
}
