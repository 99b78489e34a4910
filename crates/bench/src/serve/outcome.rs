//! How each request ended, and what all of them amount to.

use std::time::{Duration, Instant};

use baton_types::Tbt;

use super::gaps::GapCounts;
use super::reasons::Reasons;
use super::received::{Problem, ReceivedAnswer, Tokens, Usage};

/// What a request must keep to count as goodput.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest time to the first token.
    pub ttft: Duration,
    /// Longest mean of the longest tenth of its gaps.
    pub tbt: Duration,
}

impl Limits {
    /// As objectives are sent.
    pub fn ttft_ms(&self) -> f64 {
        self.ttft.as_secs_f64() * 1e3
    }

    /// Likewise.
    pub fn tbt_ms(&self) -> f64 {
        self.tbt.as_secs_f64() * 1e3
    }
}

/// What became of a request: one of these, once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// It got its answer.
    Completed(Answer),
    /// The server would not take it: HTTP status.
    Rejected(u16),
    /// It was given up by its client, this one or another: neither met nor late.
    Aborted(String),
    /// Anything else, with its reason.
    Failed(String),
    /// It was due while as many as may be were under way.
    NotSent,
}

/// An answer that came to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// From when the request was due to its first token.
    pub ttft: Duration,
    /// Between two tokens each, in order but for those of 0, which come last.
    pub gaps: Vec<Duration>,
    /// Tokens that came in one message with another.
    pub merged: u64,
    /// Most tokens that it was to have.
    pub max_tokens: u32,
    /// Its tokens.
    pub usage: Usage,
}

impl Answer {
    /// Tokens that were counted.
    fn tokens(&self) -> u64 {
        self.gaps.len() as u64 + 1
    }

    /// Whether it ended before it had all that was asked for.
    fn is_short(&self) -> bool {
        self.tokens() < u64::from(self.max_tokens)
    }
}

impl End {
    /// Of a request for at most so many tokens that was due at `due` and sent.
    pub fn of(due: Instant, max_tokens: u32, received: &ReceivedAnswer, result: Result<(), Problem>) -> Self {
        match result {
            Err(Problem::Rejected(status)) => Self::Rejected(status),
            Err(Problem::Aborted(reason)) => Self::Aborted(reason),
            Err(Problem::Failed(reason)) => Self::Failed(reason),
            Ok(()) => Self::completed(due, max_tokens, &received.count(), received.sizes()),
        }
    }

    /// Why it did not complete, if it was sent.
    fn problem(&self) -> Option<String> {
        match self {
            Self::Completed(_) | Self::NotSent => None,
            Self::Rejected(status) => Some(format!("rejected with HTTP {status}")),
            Self::Aborted(reason) | Self::Failed(reason) => Some(reason.clone()),
        }
    }

    fn completed(due: Instant, max_tokens: u32, tokens: &Tokens, usage: Usage) -> Self {
        let Some(first) = tokens.at.first() else { return Self::Failed("an answer without a token".to_owned()) };
        let mut gaps: Vec<_> = tokens.at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps.resize(gaps.len() + tokens.merged as usize, Duration::ZERO);
        Self::Completed(Answer { ttft: first.duration_since(due), gaps, merged: tokens.merged, max_tokens, usage })
    }
}

/// What all requests amount to.
#[derive(Debug, Default)]
pub struct Sums {
    /// Completed within both limits.
    pub met: usize,
    /// Completed otherwise.
    pub late: usize,
    /// Refused with 429.
    pub rejected_429: usize,
    /// Refused with 503.
    pub rejected_503: usize,
    /// Given up by their client.
    pub aborted: usize,
    /// Anything else that was sent.
    pub failed: usize,
    /// Not sent.
    pub not_sent: usize,
    /// Of what failed.
    pub failures: Reasons,
    /// Of what was aborted.
    pub aborts: Reasons,
    /// Why the first request that did not complete did not.
    pub first_problem: Option<String>,
    /// Of what was completed, as everything below. Seconds.
    pub ttft_s: Vec<f64>,
    /// Mean gap of each request, seconds.
    pub tbt_mean_s: Vec<f64>,
    /// Mean of the longest tenth of each request's gaps, seconds.
    pub tbt_tail_s: Vec<f64>,
    /// All gaps.
    pub gaps: GapCounts,
    /// Tokens that came in one message with another.
    pub merged: u64,
    /// Answers with fewer tokens than were asked for.
    pub short: usize,
    /// Tokens of prompts and answers.
    pub usage: Usage,
    /// How late each request was sent, seconds.
    pub slip_s: Vec<f64>,
}

impl Sums {
    /// One more. `slip` is how late it was sent.
    pub fn add(&mut self, end: End, slip: Duration, limits: Limits) {
        match &end {
            End::NotSent => {}
            _ => self.slip_s.push(slip.as_secs_f64()),
        }
        if let Some(problem) = end.problem().filter(|_| self.first_problem.is_none()) {
            self.first_problem = Some(problem);
        }
        match end {
            End::NotSent => self.not_sent += 1,
            End::Rejected(429) => self.rejected_429 += 1,
            End::Rejected(_) => self.rejected_503 += 1,
            End::Aborted(reason) => {
                self.aborted += 1;
                self.aborts.add(&reason);
            }
            End::Failed(reason) => {
                self.failed += 1;
                self.failures.add(&reason);
            }
            End::Completed(answer) => self.add_answer(answer, limits),
        }
    }

    fn add_answer(&mut self, mut answer: Answer, limits: Limits) {
        let sum: Duration = answer.gaps.iter().sum();
        let tail = Tbt::of_gaps(&mut answer.gaps).map(|Tbt(tail)| tail);
        if let Some(tail) = tail {
            self.tbt_mean_s.push(sum.as_secs_f64() / answer.gaps.len() as f64);
            self.tbt_tail_s.push(tail.as_secs_f64());
        }
        let met = answer.ttft <= limits.ttft && tail.is_none_or(|tail| tail <= limits.tbt);
        *if met { &mut self.met } else { &mut self.late } += 1;
        self.ttft_s.push(answer.ttft.as_secs_f64());
        answer.gaps.iter().for_each(|gap| self.gaps.add(*gap));
        self.merged += answer.merged;
        self.short += usize::from(answer.is_short());
        self.usage.prompt += answer.usage.prompt;
        self.usage.cached += answer.usage.cached;
        self.usage.output += answer.tokens();
    }

    /// All requests that were due.
    pub fn requests(&self) -> usize {
        self.completed() + self.rejected_429 + self.rejected_503 + self.aborted + self.failed + self.not_sent
    }

    /// Those that got their answer, however late.
    pub fn completed(&self) -> usize {
        self.met + self.late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { ttft: Duration::from_millis(500), tbt: Duration::from_millis(50) };

    /// An answer whose tokens came at these times after it was due, milliseconds, if so many were
    /// asked for.
    fn completed_of(max_tokens: u32, at: &[u64], merged: u64) -> End {
        let due = Instant::now();
        let at = at.iter().map(|ms| due + Duration::from_millis(*ms)).collect();
        let usage = Usage { prompt: 10, cached: 4, output: 0 };
        End::completed(due, max_tokens, &Tokens { at, merged }, usage)
    }

    fn completed(at: &[u64], merged: u64) -> End {
        completed_of(1, at, merged)
    }

    fn sums(ends: impl IntoIterator<Item = End>) -> Sums {
        let mut sums = Sums::default();
        ends.into_iter().for_each(|end| sums.add(end, Duration::from_millis(3), LIMITS));
        sums
    }

    #[test]
    fn each_bench_request_is_counted_in_one_outcome() {
        let failed = |reason: &str| End::Failed(reason.into());
        let sums = sums([
            completed(&[100, 140], 0),
            completed(&[501, 502], 0),
            completed(&[100, 151], 0),
            End::Rejected(429),
            End::Rejected(429),
            End::Rejected(503),
            failed("a"),
            failed("a"),
            failed("b"),
            End::Aborted("c".into()),
            End::NotSent,
            completed(&[], 0),
        ]);
        assert_eq!((sums.met, sums.late, sums.rejected_429, sums.rejected_503), (1, 2, 2, 1));
        assert_eq!((sums.failed, sums.aborted, sums.not_sent, sums.requests()), (4, 1, 1, 12));
        assert_eq!((sums.ttft_s.len(), sums.slip_s.len()), (3, 11), "what was not sent was not late");
        assert_eq!((sums.completed(), sums.first_problem.as_deref()), (3, Some("rejected with HTTP 429")));
        assert_eq!((sums.failures.into_map()["a"], sums.aborts.into_map()["c"]), (2, 1));
    }

    #[test]
    fn latency_limit_is_inclusive_and_single_token_has_no_tbt_tail() {
        assert_eq!(sums([completed(&[500, 550], 0), completed(&[500], 0)]).met, 2);
        let one = sums([completed(&[500], 0)]);
        assert_eq!((one.tbt_tail_s.len(), one.usage.output), (0, 1));
    }

    #[test]
    fn tbt_mean_and_tail_are_of_each_request() {
        // Nineteen gaps of 10 ms and one of 210 ms: the longest two are the tail.
        let mut at: Vec<u64> = (10..=29).map(|step| step * 10).collect();
        at.push(500);
        let sums = sums([completed(&at, 0)]);
        assert!((sums.tbt_mean_s[0] - 0.020).abs() < 1e-9 && (sums.tbt_tail_s[0] - 0.110).abs() < 1e-9, "{sums:?}");
        assert_eq!((sums.late, sums.gaps.longest()), (1, Some(Duration::from_millis(210))));
    }

    #[test]
    fn merged_tokens_have_no_time_between_them() {
        let sums = sums([completed(&[100, 140], 2)]);
        assert_eq!((sums.usage, sums.merged), (Usage { prompt: 10, cached: 4, output: 4 }, 2));
        assert!((sums.tbt_mean_s[0] - 0.040 / 3.0).abs() < 1e-9 && (sums.tbt_tail_s[0] - 0.040).abs() < 1e-9);
    }

    #[test]
    fn answer_with_fewer_tokens_than_asked_is_short() {
        let sums = sums([
            completed_of(3, &[100, 110, 120], 0),
            completed_of(4, &[100, 110, 120], 1),
            completed_of(4, &[100, 110, 120], 0),
            completed_of(2, &[900], 0),
            completed_of(2, &[100, 110, 120], 0),
            completed_of(4, &[], 0),
            End::Failed("a".into()),
        ]);
        assert_eq!((sums.short, sums.met, sums.late), (2, 4, 1), "however late it was, and only if it came to an end");
    }
}
