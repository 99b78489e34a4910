//! `baton bench replay`: plays a trace of requests against a running cluster, and says what the
//! simulator says of the same trace.
//!
//! The clients are an open loop: each request is sent at its time, whether or not others have been
//! answered. What became of each is a record as the simulator keeps it, so that both are summed up
//! by the same code.
//!
//! **Invariant**: every request that is sent ends up in the figures: completed, rejected, or
//! counted as a failure with its reason.

mod client;
mod prompt;
mod report;

use baton_sim::{ModelProfile, Outcome, SimOptions, SimulateArgs, Summary, Trace, simulate};
use clap::Args;

use crate::BenchError;
pub(crate) use client::Clients;
pub(crate) use prompt::prompt;
use report::Report;

/// Of `baton bench replay`: those of `baton simulate`, so that both can be given the same. Nodes
/// and policies are the simulator's with --compare-sim; of the live cluster they are what it was
/// started with.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// What is played, and what the simulator beside it plays.
    #[command(flatten)]
    pub simulated: SimulateArgs,
    /// Simulate the same after the replay, and print both with their ratio
    #[arg(long)]
    pub compare_sim: bool,
    /// Spread requests in turn over N connections to the conductor
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub connections: u32,
}

impl ReplayArgs {
    /// Refuses what only several simulated runs have.
    fn check(&self) -> Result<(), BenchError> {
        let args = &self.simulated;
        let given = [
            ("--compare", args.compare.is_some()),
            ("--curve", args.curve.is_some()),
            ("--fault-every", args.fault_every.is_some() && !self.compare_sim),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(BenchError::invalid(option, "only baton simulate has it")),
            None => Ok(()),
        }
    }

    fn trace(&self) -> Result<Trace, BenchError> {
        let args = &self.simulated;
        let wrong = |problem: String| BenchError::invalid("--trace", format!("{}: {problem}", args.trace.display()));
        let trace = Trace::open(&args.trace).map_err(|error| wrong(error.to_string()))?;
        let trace = trace.played(args.duration, args.jitter, args.seed);
        if trace.requests.is_empty() { Err(wrong("expected at least one request".into())) } else { Ok(trace) }
    }
}

/// Plays the trace, and prints the figures.
pub(crate) async fn run(args: &ReplayArgs, conductor: &str, json: bool) -> Result<(), BenchError> {
    args.check()?;
    let trace = args.trace()?;
    let profile = ModelProfile::load(&args.simulated.model_profile);
    let profile = profile.map_err(|error| BenchError::invalid("--model-profile", error.to_string()))?;
    let options = args.simulated.options();
    let clients = Clients::connect("--conductor", conductor, args.connections).await?;
    let played = clients.play(&trace, &options).await;
    let completed = played.records.iter().filter(|record| record.finished.is_some()).count();
    let live = Summary::of(&Outcome::of(played.records), &options);
    let simulated = args.compare_sim.then(|| simulated(&trace, &profile, options));
    let report = Report { live, simulated, failures: played.failures, late_p99_s: played.late_p99.as_secs_f64() };
    report.print(json).map_err(BenchError::Output)?;
    BenchError::check_served(completed, played.first_problem)
}

fn simulated(trace: &Trace, profile: &ModelProfile, options: SimOptions) -> Summary {
    Summary::of(&simulate(trace, profile, &options), &options)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: ReplayArgs,
    }

    fn parse(line: &str) -> ReplayArgs {
        Cli::try_parse_from(std::iter::once("replay").chain(line.split_whitespace())).unwrap().args
    }

    #[test]
    fn replay_refuses_options_of_several_runs_by_flag() {
        assert!(parse("--trace t --duration 600 --jitter 3").check().is_ok());
        for (line, option) in
            [("--compare pairs", "--compare"), ("--curve 1:2:1", "--curve"), ("--fault-every 9", "--fault-every")]
        {
            let error = parse(&format!("--trace t {line}")).check().unwrap_err();
            assert!(error.to_string().starts_with(option), "{error}");
        }
    }

    #[test]
    fn replay_names_a_missing_trace() {
        let error = parse("--trace /nowhere/t").trace().unwrap_err().to_string();
        assert!(error.starts_with("--trace: /nowhere/t: "), "{error}");
    }
}
