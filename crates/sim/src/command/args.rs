//! Options of `baton simulate`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::SimulateError;
use super::numbers::{
    Curve, MillisOrOff, block_tokens, millis_or_off, positive_millis, positive_seconds, seconds, speed, threshold,
};
use crate::faults::FaultKind;
use crate::options::{Feature, SimOptions, Window};
use crate::policy::{SimAdmission, SimPlacement};
use crate::trace::{BLOCK_TOKENS, MAX_BLOCK_TOKENS};

/// Of `baton simulate`. Times are seconds.
#[derive(Debug, Clone, Args)]
pub struct SimulateArgs {
    /// Play the requests of this file, one JSON object per line, also gzipped. Keys: timestamp
    /// (ms), input_length, output_length (tokens), and hash_ids (of blocks) if prompts begin alike
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// Take hash_ids as of blocks of N tokens. Without it, as the lengths of the prompts tell
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_BLOCK_TOKENS)))]
    pub trace_block_tokens: Option<u32>,
    /// Simulate N prefill nodes
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub prefill: u32,
    /// Simulate N decode nodes
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub decode: u32,
    /// Choose nodes by this policy: random, round-robin, load-balance, cache-aware, mooncake,
    /// min-total-delay
    #[arg(long, value_name = "POLICY", default_value = "min-total-delay")]
    pub placement: SimPlacement,
    /// Admit requests by this policy: none (admits all), baseline, early, predictive, value-density
    #[arg(long, value_name = "POLICY", default_value = "value-density")]
    pub admission: SimAdmission,
    /// Play the trace X times as fast as recorded
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true, value_parser = speed)]
    pub speed: f64,
    /// Simulate nodes with this model and machine: llama2-70b-a800, llama3-70b-a800, or fitted:FILE
    #[arg(long, value_name = "PROFILE", default_value = "llama3-70b-a800")]
    pub model_profile: String,
    /// Set the objective of the time to first token, in milliseconds
    #[arg(long, value_name = "MS", allow_negative_numbers = true, value_parser = positive_millis)]
    pub ttft_slo_ms: Option<Duration>,
    /// Set the objective of the time between tokens, in milliseconds. It bounds the mean of a
    /// request's longest tenth of gaps
    #[arg(long, value_name = "MS", allow_negative_numbers = true, value_parser = positive_millis)]
    pub tbt_slo_ms: Option<Duration>,
    /// Reject requests predicted to wait longer than this for others, in milliseconds, or off
    #[arg(long, value_name = "MS", default_value = "30000", value_parser = millis_or_off)]
    pub max_wait_ms: MillisOrOff,
    /// Limit a prompt's wait for room at a prefill node, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    #[arg(allow_negative_numbers = true, value_parser = positive_seconds)]
    pub queue_timeout_s: Duration,
    /// Limit how long a request may be overtaken in a prefill queue, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30")]
    #[arg(allow_negative_numbers = true, value_parser = positive_seconds)]
    pub max_overtaken_s: Duration,
    /// Seed all that is random; the same seed gives the same figures
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Delay each arrival by a random time up to this, in seconds. Use it for traces with coarse
    /// timestamps
    #[arg(long, value_name = "SECONDS", default_value = "0", allow_negative_numbers = true, value_parser = seconds)]
    pub jitter: Duration,
    /// Play only the first part of the trace's time, this long in seconds
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = positive_seconds)]
    pub duration: Option<Duration>,
    /// Use N tokens per KV block, a divisor of 512
    #[arg(long, value_name = "N", default_value_t = BLOCK_TOKENS, value_parser = block_tokens)]
    pub block_tokens: u32,
    /// Leave out one feature: shortest-first, lhd, partial-prefill, prompts-at-decode, migration,
    /// smoothing, admission-queue
    #[arg(long, value_name = "FEATURE")]
    pub without: Option<Feature>,
    /// Placement mooncake: fetch the longest prefix if a node's own is shorter by this factor.
    /// Without it, by 1.5
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true, value_parser = threshold)]
    pub balancing_threshold: Option<f64>,
    /// Cache N blocks per prefill node. Without it, the profile's number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub cache_blocks: Option<u32>,
    /// Give each decode node N blocks. Without it, the profile's number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub decode_blocks: Option<u32>,
    /// Give each prefill node an SSD tier of N blocks
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=10_000_000))]
    pub ssd_blocks: u32,
    /// Count only requests of this part of the trace's time: all, first-half, second-half. All are
    /// played
    #[arg(long, value_name = "PART", default_value = "all")]
    pub window: Window,
    /// Run every policy of a kind, or with and without each feature, otherwise as given
    #[arg(long, value_enum, value_name = "KIND")]
    pub compare: Option<Compare>,
    /// Run at each of these speeds
    #[arg(long, value_name = "FROM:TO:STEP", conflicts_with = "speed")]
    pub curve: Option<Curve>,
    /// Inject a fault at this mean interval, in seconds of the run. A node dies or hangs, or a
    /// message, step or disk fails. Every block's contents are checked
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = positive_seconds)]
    pub fault_every: Option<Duration>,
    /// Inject only this fault, as in kill. Without it, every kind
    #[arg(long, value_name = "KIND", requires = "fault_every")]
    pub fault: Option<FaultKind>,
}

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Compare {
    /// Every placement policy
    Placement,
    /// Every admission policy
    Admission,
    /// Baton's placement and admission, Mooncake's, and a cache-aware router's
    Pairs,
    /// The defaults, and the same without each feature
    Features,
}

impl SimulateArgs {
    /// Checks what no single option can know.
    pub(crate) fn check(&self) -> Result<(), SimulateError> {
        let compares = matches!(self.compare, Some(Compare::Placement | Compare::Pairs));
        let uses_mooncake = compares || matches!(self.placement, SimPlacement::Mooncake { .. });
        if self.balancing_threshold.is_some() && !uses_mooncake {
            let placement = self.placement.as_str();
            let problem = format!("only placement mooncake has one, and this is {placement}");
            return Err(SimulateError::invalid("--balancing-threshold", problem));
        }
        if self.without == Some(Feature::ShortestFirst) && self.placement != SimPlacement::MIN_TOTAL_DELAY {
            let problem = format!("only placement min-total-delay has it, and this is {}", self.placement.as_str());
            return Err(SimulateError::invalid("--without shortest-first", problem));
        }
        if self.without.is_some() && self.compare.is_some() {
            return Err(SimulateError::invalid("--without", "not beside --compare, which sets it itself"));
        }
        if self.compare == Some(Compare::Features) && self.placement != SimPlacement::MIN_TOTAL_DELAY {
            let problem =
                format!("features are those of placement min-total-delay, and this is {}", self.placement.as_str());
            return Err(SimulateError::invalid("--compare", problem));
        }
        let options = self.options();
        if options.max_overtaken > options.queue_timeout / 2 {
            // What waits for others must still be served before the queue's own deadline.
            let problem = format!(
                "{:?}, but must be at most half of --queue-timeout-s, {:?}",
                options.max_overtaken, options.queue_timeout
            );
            return Err(SimulateError::invalid("--max-overtaken-s", problem));
        }
        Ok(())
    }

    /// The run that is asked for, if nothing is compared.
    pub fn options(&self) -> SimOptions {
        let options = SimOptions {
            prefill: self.prefill as usize,
            decode: self.decode as usize,
            placement: self.tuned(self.placement),
            admission: self.admission,
            without: None,
            speed: self.speed,
            ttft_slo: self.ttft_slo_ms,
            tbt_slo: self.tbt_slo_ms,
            max_wait: self.max_wait_ms.0,
            max_overtaken: self.max_overtaken_s,
            queue_timeout: self.queue_timeout_s,
            seed: self.seed,
            window: self.window,
            block_tokens: self.block_tokens,
            cache_blocks: self.cache_blocks,
            decode_blocks: self.decode_blocks,
            ssd_blocks: self.ssd_blocks,
            is_cramped: false,
            fault_every: self.fault_every,
            fault: self.fault,
        };
        self.without.map_or(options, |feature| options.without(feature))
    }

    /// The policy with the parameters that are given.
    pub(crate) fn tuned(&self, placement: SimPlacement) -> SimPlacement {
        match (placement, self.balancing_threshold) {
            (SimPlacement::Mooncake { .. }, Some(balancing_threshold)) => {
                SimPlacement::Mooncake { balancing_threshold }
            }
            _ => placement,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: SimulateArgs,
    }

    pub(crate) fn parse(line: &str) -> Result<SimulateArgs, clap::Error> {
        Cli::try_parse_from(std::iter::once("simulate").chain(line.split_whitespace())).map(|cli| cli.args)
    }

    #[test]
    fn omitted_options_are_the_simulators_defaults() {
        let args = parse("--trace t").unwrap();
        assert_eq!(args.options(), SimOptions::default());
        assert_eq!((args.jitter, args.model_profile.as_str()), (Duration::ZERO, "llama3-70b-a800"));
    }

    #[test]
    fn command_line_options_reach_the_simulator() {
        let line = "--trace t --prefill 14 --decode 2 --placement mooncake --balancing-threshold 2 --admission early --speed 2.5 \
                    --ttft-slo-ms 10000 --tbt-slo-ms 200 --max-wait-ms off --queue-timeout-s 80 --max-overtaken-s 40 \
                    --seed 7 --cache-blocks 100 --block-tokens 16 --window second-half --without partial-prefill --decode-blocks 50 --fault-every 60 --fault kill";
        let expected = SimOptions {
            prefill: 14,
            decode: 2,
            placement: SimPlacement::Mooncake { balancing_threshold: 2.0 },
            admission: SimAdmission::Production(baton_scheduler::AdmissionKind::Early),
            speed: 2.5,
            ttft_slo: Some(Duration::from_secs(10)),
            tbt_slo: Some(Duration::from_millis(200)),
            max_wait: None,
            queue_timeout: Duration::from_secs(80),
            max_overtaken: Duration::from_secs(40),
            seed: 7,
            window: Window::SecondHalf,
            cache_blocks: Some(100),
            block_tokens: 16,
            decode_blocks: Some(50),
            without: Some(Feature::PartialPrefill),
            fault_every: Some(Duration::from_secs(60)),
            fault: Some(FaultKind::Kill),
            ..SimOptions::default()
        };
        assert_eq!(parse(line).unwrap().options(), expected);
    }

    #[test]
    fn invalid_option_value_names_its_option() {
        for (line, option) in [
            ("", "--trace"),
            ("--trace t --prefill 0", "--prefill"),
            ("--trace t --decode 0", "--decode"),
            ("--trace t --decode 1025", "--decode"),
            ("--trace t --speed 0", "--speed"),
            ("--trace t --speed inf", "--speed"),
            ("--trace t --ttft-slo-ms 0", "--ttft-slo-ms"),
            ("--trace t --tbt-slo-ms -1", "--tbt-slo-ms"),
            ("--trace t --max-wait-ms never", "--max-wait-ms"),
            ("--trace t --block-tokens 100", "--block-tokens"),
            ("--trace t --trace-block-tokens 0", "--trace-block-tokens"),
            ("--trace t --jitter -1", "--jitter"),
            ("--trace t --duration 0", "--duration"),
            ("--trace t --curve 2:1:1", "--curve"),
            ("--trace t --curve 1:2:1 --speed 2", "--curve"),
            ("--trace t --placement best", "mooncake"),
            ("--trace t --admission best", "predictive"),
            ("--trace t --compare best", "--compare"),
            ("--trace t --window third", "none of all"),
            ("--trace t --cache-blocks 0", "--cache-blocks"),
            ("--trace t --without speed", "none of shortest-first"),
            ("--trace t --fault-every 1 --fault rain", "none of kill"),
            ("--trace t --fault kill", "--fault-every"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.to_string().contains(option), "{line}: {error}");
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn balancing_threshold_requires_mooncake_placement() {
        let check = |line: &str| parse(line).unwrap().check();
        let error = check("--trace t --balancing-threshold 2").unwrap_err().to_string();
        assert_eq!(error, "--balancing-threshold: only placement mooncake has one, and this is min-total-delay");
        for rest in ["--placement mooncake", "--compare placement", "--compare pairs"] {
            assert!(check(&format!("--trace t --balancing-threshold 2 {rest}")).is_ok(), "{rest}");
        }
    }
}
