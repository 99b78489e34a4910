//! What is played: a trace on a machine.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::SimulateError;
use super::args::SimulateArgs;
use crate::bounds::floor_ttft_mean;
use crate::trace::Trace;
use baton_profile::ModelProfile;

/// A trace on a machine, ready to be played.
#[derive(Debug)]
pub(crate) struct Workload {
    /// The trace's file name.
    pub name: String,
    pub trace: Trace,
    pub profile: ModelProfile,
    pub jitter: Duration,
    /// Mean time to first token of the counted requests with an infinite cache and no queue,
    /// seconds.
    pub floor_ttft_mean_s: f64,
}

impl Workload {
    pub(crate) fn load(args: &SimulateArgs) -> Result<Self, SimulateError> {
        let profile = ModelProfile::load(&args.model_profile)?;
        let smallest = profile.cache_tokens.min(profile.decode_kv_tokens);
        if smallest < u64::from(args.block_tokens) {
            let problem = format!("{}, but a node of the profile holds {smallest} tokens", args.block_tokens);
            return Err(SimulateError::invalid("--block-tokens", problem));
        }
        let trace = read(&args.trace, args.trace_block_tokens)?.played(args.duration, args.jitter, args.seed);
        let floor_ttft_mean_s = floor_ttft_mean(&trace, &profile, &args.options());
        let name = args.trace.file_name().unwrap_or(args.trace.as_os_str()).to_string_lossy().into_owned();
        Ok(Self { name, trace, profile, jitter: args.jitter, floor_ttft_mean_s })
    }

    /// From the first arrival to the last one, at the recorded speed.
    pub(crate) fn span(&self) -> Duration {
        let times = || self.trace.requests.iter().map(|request| request.timestamp);
        times().max().unwrap_or_default() - times().min().unwrap_or_default()
    }

    /// Why the figures would mislead, if they would.
    pub(crate) fn warning(&self) -> Option<String> {
        let bucket = bucket(&self.trace).filter(|_| self.jitter.is_zero())?;
        let requests = self.trace.requests.len();
        let seconds = bucket.as_secs_f64();
        Some(format!(
            "{}: its {requests} requests arrive in batches about {seconds:.1} s apart, so that bursts are measured; --jitter {seconds:.0} spreads them",
            self.name
        ))
    }
}

fn read(path: &Path, block_tokens: Option<u32>) -> Result<Trace, SimulateError> {
    let error = |problem: String| SimulateError::Trace { path: path.display().to_string(), problem };
    let trace = Trace::open(path, block_tokens).map_err(|open| error(open.to_string()))?;
    if trace.requests.is_empty() {
        return Err(error("expected at least one request".to_owned()));
    }
    Ok(trace)
}

/// Gaps between timestamps that are shorter are not buckets: only a burst of many within one second
/// would be.
const MIN_BUCKET: Duration = Duration::from_millis(500);

/// The usual gap between two timestamps, if they are far apart and two requests or more share each
/// of them, as a mean.
fn bucket(trace: &Trace) -> Option<Duration> {
    let times: BTreeSet<_> = trace.requests.iter().map(|request| request.timestamp).collect();
    let mut gaps: Vec<_> = times.iter().zip(times.iter().skip(1)).map(|(one, next)| *next - *one).collect();
    gaps.sort_unstable();
    let median = gaps.get(gaps.len() / 2).copied()?;
    (median >= MIN_BUCKET && 2 * times.len() <= trace.requests.len()).then_some(median)
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse;
    use super::super::fixture::trace_file;
    use super::*;

    fn load(path: &Path, rest: &str) -> Result<Workload, SimulateError> {
        Workload::load(&parse(&format!("--trace {} {rest}", path.display())).unwrap())
    }

    #[test]
    fn workload_errors_name_the_option_and_the_file() {
        let missing = load(Path::new("/nowhere/t"), "").unwrap_err().to_string();
        assert!(missing.starts_with("--trace /nowhere/t: ") && missing.contains("No such file"), "{missing}");
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(load(file.path(), "").unwrap_err().to_string().contains("at least one request"));
        std::fs::write(file.path(), "no trace").unwrap();
        assert!(matches!(load(file.path(), ""), Err(SimulateError::Trace { .. })));
        let profile = load(file.path(), "--model-profile best").unwrap_err().to_string();
        assert!(profile.starts_with("--model-profile: 'best'"), "{profile}");
    }

    #[test]
    fn profile_whose_node_holds_no_block_is_refused() {
        let small = ModelProfile { cache_tokens: 500, ..ModelProfile::load("llama3-70b-a800").unwrap() };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), serde_json::to_string(&small).unwrap()).unwrap();
        let trace = trace_file(60, |n| n * 700);
        let error = load(trace.path(), &format!("--model-profile fitted:{}", file.path().display())).unwrap_err();
        assert_eq!(error.to_string(), "--block-tokens: 512, but a node of the profile holds 500 tokens");
    }

    #[test]
    fn coarse_trace_timestamps_give_a_warning() {
        let coarse = trace_file(60, |n| n / 6 * 3000);
        let warning = load(coarse.path(), "").unwrap().warning().unwrap();
        assert!(warning.contains("60 requests") && warning.contains("--jitter 3"), "{warning}");
        assert_eq!(load(coarse.path(), "--jitter 3").unwrap().warning(), None);
        assert_eq!(load(trace_file(60, |n| n * 700).path(), "").unwrap().warning(), None);
        assert_eq!(load(trace_file(60, |n| n / 6).path(), "").unwrap().warning(), None, "milliseconds are fine");
    }
}
