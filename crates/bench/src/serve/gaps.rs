//! Gaps between tokens, counted by length.

use std::time::Duration;

use serde::Serialize;

use crate::stats::Latencies;

/// Upper edges of the buckets, milliseconds. Each is longer than the one before by a quarter to two
/// thirds: fine enough to tell two servers apart. They are part of the JSON's form.
const EDGES_MS: [u64; 24] =
    [1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 125, 150, 200, 300, 500, 1_000, 2_000, 5_000, 10_000];
/// Characters of the longest bar.
const BAR: usize = 40;

/// How many gaps there were of each length.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GapCounts {
    counts: [u64; EDGES_MS.len() + 1],
    longest: Option<Duration>,
    fine: Latencies,
}

/// The same for programs: `counts[i]` gaps are up to `edges_s[i]` long and longer than the edge
/// before; the last count is of those beyond the last edge.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GapHistogram {
    edges_s: Vec<f64>,
    counts: Vec<u64>,
}

impl GapCounts {
    /// One more.
    pub fn add(&mut self, gap: Duration) {
        let bucket = EDGES_MS.partition_point(|edge| Duration::from_millis(*edge) < gap);
        self.counts[bucket] += 1;
        self.longest = self.longest.max(Some(gap));
        self.fine.add(gap);
    }

    /// What this part of the gaps is at most, seconds; `None` if there was none.
    pub fn quantile_s(&self, part: f64) -> Option<f64> {
        self.longest.map(|_| self.fine.quantile_us(part) as f64 / 1e6)
    }

    /// The longest; `None` if there was none.
    pub fn longest(&self) -> Option<Duration> {
        self.longest
    }

    /// For programs.
    pub fn histogram(&self) -> GapHistogram {
        GapHistogram { edges_s: EDGES_MS.map(|ms| ms as f64 / 1e3).to_vec(), counts: self.counts.to_vec() }
    }

    /// For people: a line for each bucket from the first that has gaps to the last.
    pub fn lines(&self) -> Vec<String> {
        let most = self.counts.iter().copied().max().unwrap_or(0);
        let filled = |bucket: &usize| self.counts[*bucket] > 0;
        let first = (0..self.counts.len()).find(filled);
        let last = (0..self.counts.len()).rev().find(filled);
        let (Some(first), Some(last)) = (first, last) else { return Vec::new() };
        (first..=last).map(|bucket| line(bucket, self.counts[bucket], most)).collect()
    }
}

fn line(bucket: usize, count: u64, most: u64) -> String {
    let edge = match EDGES_MS.get(bucket) {
        Some(ms) => format!("<= {ms} ms"),
        None => format!("> {} ms", EDGES_MS[EDGES_MS.len() - 1]),
    };
    // Whatever was there shows.
    let bar = "#".repeat((count as f64 / most.max(1) as f64 * BAR as f64).ceil() as usize);
    format!("{edge:>12}  {bar:<BAR$} {count}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(milliseconds: &[u64]) -> GapCounts {
        let mut counts = GapCounts::default();
        milliseconds.iter().for_each(|ms| counts.add(Duration::from_millis(*ms)));
        counts
    }

    #[test]
    fn gap_quantiles_match_the_recorded_gaps() {
        let all: Vec<_> = (1..=100).collect();
        let of = counts(&all);
        let near = |part: f64, seconds: f64| (of.quantile_s(part).unwrap() - seconds).abs() < seconds / 500.0;
        assert!(near(0.5, 0.05) && near(0.99, 0.099) && near(1.0, 0.1));
        assert_eq!(counts(&[]).quantile_s(0.5), None);
    }

    #[test]
    fn gap_histogram_edge_belongs_to_its_bucket() {
        let histogram = counts(&[0, 1, 2, 3, 4, 5, 10_000, 10_001]).histogram();
        assert_eq!(histogram.counts.len(), histogram.edges_s.len() + 1);
        assert_eq!((&histogram.counts[..4], &histogram.counts[23..]), (&[2, 1, 1, 2][..], &[1, 1][..]));
        assert_eq!((histogram.edges_s[0], histogram.edges_s[3]), (0.001, 0.005));
        assert!(histogram.edges_s.is_sorted());
    }

    #[test]
    fn gap_histogram_is_drawn_from_first_to_last_filled_bucket() {
        let lines = counts(&[6, 6, 6, 6, 12]).lines();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert_eq!(lines[0], format!("     <= 7 ms  {} 4", "#".repeat(40)));
        assert_eq!(lines[1], format!("    <= 10 ms  {} 0", " ".repeat(40)));
        assert_eq!(lines[2], format!("    <= 15 ms  {}{} 1", "#".repeat(10), " ".repeat(30)));
        assert!(GapCounts::default().lines().is_empty());
        assert!(counts(&[60_000]).lines()[0].contains("> 10000 ms"));
    }
}
