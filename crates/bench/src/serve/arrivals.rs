//! Which requests come, and when.

use std::time::Duration;

use baton_sim::{Random, Trace, TraceRequest};

use super::args::ServeArgs;
use super::text::prose;
use super::trace_prompt::trace_prompt;
use crate::BenchError;

/// Most requests of a run.
const MAX_REQUESTS: usize = 1_000_000;

/// One request of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// From the beginning of the run.
    pub due: Duration,
    /// Most tokens of the answer.
    pub max_tokens: u32,
    source: Source,
}

/// What a prompt is made of. It is made when it is needed: all of a trace's together may be larger
/// than memory.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    Text { prefix_seed: u64, prefix_chars: u32, seed: u64, chars: u32 },
    Trace { request: TraceRequest, block_tokens: u32 },
}

/// A prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Plain text.
    Text(String),
    /// Tokens that every model has.
    Tokens(Vec<u32>),
}

impl Arrival {
    /// Makes the prompt.
    pub fn prompt(&self) -> Prompt {
        match &self.source {
            Source::Text { prefix_seed, prefix_chars, seed, chars } => {
                Prompt::Text(prose(*prefix_seed, *prefix_chars as usize) + &prose(*seed, *chars as usize))
            }
            Source::Trace { request, block_tokens } => Prompt::Tokens(trace_prompt(request, *block_tokens)),
        }
    }
}

/// The requests of a run, in the order of time; at least one.
pub fn arrivals(args: &ServeArgs) -> Result<Vec<Arrival>, BenchError> {
    let all = match (&args.trace, args.rate) {
        (Some(path), _) => {
            let wrong = |problem: String| BenchError::invalid("--trace", format!("{}: {problem}", path.display()));
            of_trace(Trace::open(path, args.trace_block_tokens).map_err(|error| wrong(error.to_string()))?, args)
        }
        (None, Some(rate)) => drawn(rate, args),
        (None, None) => return Err(BenchError::invalid("--rate", "expected this or --trace")),
    };
    match all.len() {
        0 => Err(BenchError::invalid("--duration", "no request is due in that time")),
        n if n > MAX_REQUESTS => {
            Err(BenchError::invalid("--requests", format!("more than {MAX_REQUESTS} would be sent")))
        }
        _ => Ok(all),
    }
}

fn of_trace(trace: Trace, args: &ServeArgs) -> Vec<Arrival> {
    let trace = trace.played(
        args.duration.map(|duration| duration.mul_f64(args.speed)),
        args.jitter.unwrap_or_default(),
        args.seed,
    );
    let block_tokens = trace.block_tokens;
    let one = |request: TraceRequest| Arrival {
        due: request.timestamp.div_f64(args.speed),
        max_tokens: request.output_length,
        source: Source::Trace { request, block_tokens },
    };
    trace.requests.into_iter().take(args.requests.map_or(usize::MAX, |n| n as usize)).map(one).collect()
}

/// Gaps between requests are exponential, so their number in any time is Poisson's. Each request
/// takes the same number of draws, so that a longer run begins as a shorter one.
fn drawn(rate: f64, args: &ServeArgs) -> Vec<Arrival> {
    let most = args.requests.map_or(MAX_REQUESTS + 1, |n| n as usize);
    let mut random = Random::new(args.seed);
    let mut due_s = 0.0;
    let mut next = || {
        due_s += random.exponential(1.0 / rate);
        let chars = args.prompt_chars.pick(random.unit());
        let prefix = random.below(u64::from(args.prefixes));
        let seed = random.next_u64();
        // Of numbers of its own: times and prompts are the same, whatever the answers' lengths.
        let max_tokens = args.max_tokens.pick(Random::new(!seed).unit());
        // Prefixes are of the run, not of a request.
        let prefix_seed = Random::new(!args.seed ^ prefix).next_u64();
        let source = Source::Text { prefix_seed, prefix_chars: args.shared_prefix_chars, seed, chars };
        Arrival { due: Duration::from_secs_f64(due_s), max_tokens, source }
    };
    let in_time = |arrival: &Arrival| args.duration.is_none_or(|duration| arrival.due < duration);
    std::iter::repeat_with(&mut next).take(most).take_while(in_time).collect()
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse;
    use super::*;

    fn of(line: &str) -> Vec<Arrival> {
        arrivals(&parse(line).unwrap()).unwrap()
    }

    fn text(arrival: &Arrival) -> String {
        match arrival.prompt() {
            Prompt::Text(text) => text,
            Prompt::Tokens(_) => panic!("tokens"),
        }
    }

    #[test]
    fn arrivals_of_a_seed_repeat_and_a_longer_run_extends_them() {
        let line = "--rate 5 --prompt-chars 30,600 --prefixes 3 --shared-prefix-chars 40";
        let short = of(&format!("{line} --requests 20"));
        let long = of(&format!("{line} --requests 200"));
        assert_eq!(short[..], long[..20]);
        assert_ne!(short, of(&format!("{line} --requests 20 --seed 2")));
        assert!(long.windows(2).all(|pair| pair[0].due <= pair[1].due));
    }

    #[test]
    fn poisson_arrivals_have_the_rate_and_exponential_gaps() {
        let all = of("--rate 50 --requests 20000");
        let seconds = all.last().unwrap().due.as_secs_f64();
        assert!((20_000.0 / seconds / 50.0 - 1.0).abs() < 0.03, "{seconds} s");
        let gaps: Vec<_> = all.windows(2).map(|pair| (pair[1].due - pair[0].due).as_secs_f64()).collect();
        let longer = gaps.iter().filter(|gap| **gap > 1.0 / 50.0).count() as f64 / gaps.len() as f64;
        assert!((longer - (-1_f64).exp()).abs() < 0.02, "{longer} of the gaps are longer than the mean");
    }

    #[test]
    fn arrivals_end_at_duration_or_number_of_requests() {
        assert_eq!(of("--rate 1").len(), 100);
        let all = of("--rate 100 --duration 10s");
        assert!((900..1100).contains(&all.len()) && all.iter().all(|one| one.due < Duration::from_secs(10)));
        assert_eq!(of("--rate 100 --duration 10s --requests 7").len(), 7);
        let never = arrivals(&parse("--rate 0.001 --duration 1ms").unwrap()).unwrap_err();
        assert!(never.to_string().starts_with("--duration"), "{never}");
    }

    #[test]
    fn arrivals_mix_prompt_lengths_and_shared_prefixes() {
        let all = of("--rate 1 --requests 200 --prompt-chars 30:3,600:1 --prefixes 2 --shared-prefix-chars 50");
        let texts: Vec<_> = all.iter().map(text).collect();
        let short = texts.iter().filter(|text| text.len() == 80).count();
        assert!((120..180).contains(&short) && texts.iter().all(|text| [80, 650].contains(&text.len())), "{short}");
        let mut prefixes: Vec<_> = texts.iter().map(|text| &text[..50]).collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        assert_eq!(prefixes.len(), 2);
        let mut own: Vec<_> = texts.iter().map(|text| &text[50..80]).collect();
        own.sort_unstable();
        own.dedup();
        assert_eq!(own.len(), 200, "nothing else is shared");
    }

    #[test]
    fn max_tokens_mix_changes_no_other_draw_of_arrivals() {
        let line = "--rate 5 --requests 400 --prompt-chars 30,600 --prefixes 3 --shared-prefix-chars 40";
        let one = of(&format!("{line} --max-tokens 16"));
        let mixed = of(&format!("{line} --max-tokens 16:3,256"));
        let long = mixed.iter().filter(|arrival| arrival.max_tokens == 256).count();
        assert!((60..140).contains(&long), "{long} of 400");
        let short = |arrival: &Arrival| Arrival { max_tokens: 16, ..arrival.clone() };
        assert_eq!(mixed.iter().map(short).collect::<Vec<_>>(), one);
        assert_eq!(mixed, of(&format!("{line} --max-tokens 16:3,256")), "by the seed alone");
        let both = mixed.iter().filter(|arrival| arrival.max_tokens == 256 && text(arrival).len() > 600).count();
        assert!((25..75).contains(&both), "half of the long answers are of long prompts: {both} of 400");
    }

    #[test]
    fn arrivals_match_known_splitmix64_draws() {
        let all = of("--rate 5 --prompt-chars 30,600 --prefixes 3 --seed 7 --max-tokens 9 --requests 4");
        let draws = |arrival: &Arrival| match arrival.source {
            Source::Text { seed, chars, .. } => (arrival.due.as_micros(), chars, seed),
            Source::Trace { .. } => panic!("a trace"),
        };
        // Computed apart from this code: SplitMix64's numbers, four a request.
        let expected = [
            (98_803, 30, 10_753_165_928_301_472_203),
            (219_260, 30, 6_051_947_643_683_389_182),
            (248_094, 30, 17_706_551_433_532_105_516),
            (748_349, 600, 10_114_117_652_854_834_680),
        ];
        assert_eq!(all.iter().map(draws).collect::<Vec<_>>(), expected);
        assert!(all.iter().all(|arrival| arrival.max_tokens == 9));
    }

    #[test]
    fn trace_arrivals_are_scaled_by_speed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../sim/tests/fixtures/small.jsonl");
        let once = of(&format!("--trace {path}"));
        let twice = of(&format!("--trace {path} --speed 2 --requests 50"));
        assert_eq!((once.len(), twice.len()), (200, 50));
        assert_eq!(once[49].due, twice[49].due * 2);
        assert!(matches!(once[0].prompt(), Prompt::Tokens(ids) if !ids.is_empty()));
        let spread = of(&format!("--trace {path} --jitter 3s"));
        assert!(spread.len() == 200 && spread.is_sorted_by_key(|arrival| arrival.due));
        assert_ne!(spread, once);
        let error = arrivals(&parse("--trace /nowhere/t").unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("--trace: /nowhere/t: "), "{error}");
    }
}
