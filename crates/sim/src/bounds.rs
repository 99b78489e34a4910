//! What no policy can be better than.

use std::collections::HashMap;
use std::time::Duration;

use crate::options::SimOptions;
use crate::record::RequestRecord;
use crate::trace::{Trace, TraceRequest};
use baton_profile::ModelProfile;

/// Mean time to first token, seconds, of the window's requests if each were alone on a prefill node
/// with an infinite cache. The node holds every block that any request before it had: no queue, no
/// fetch. The speed of the replay does not matter.
pub(crate) fn floor_ttft_mean(trace: &Trace, profile: &ModelProfile, options: &SimOptions) -> f64 {
    let mut sum = 0.0;
    let prompts = prompts(trace, options);
    for (tokens, cached) in &prompts {
        sum += profile.prompt(*tokens, *cached);
    }
    sum / prompts.len().max(1) as f64
}

/// Tokens of each of the window's prompts, and how many of them a request before had in whole
/// blocks, or in the trace's own.
fn prompts(trace: &Trace, options: &SimOptions) -> Vec<(u32, u32)> {
    let last = trace.requests.iter().map(|request| request.timestamp).max().unwrap_or_default();
    let mut seen = HashMap::<u64, u32>::new();
    let block = options.block_tokens;
    let of_trace = trace.block_tokens;
    let mut prompt = |request: &TraceRequest| {
        let tokens = request.input_length;
        let held = |(index, id): (usize, &u64)| Some((index as u32, *seen.get(id)?));
        let held = request.hash_ids.iter().enumerate().map_while(held);
        // Of the trace's last block there may be a part.
        let held = held.map(|(index, tokens)| index * of_trace + tokens).last().unwrap_or(0);
        for (index, id) in (0..).zip(&request.hash_ids) {
            let part = (tokens - index * of_trace).min(of_trace);
            let known = seen.entry(*id).or_default();
            *known = part.max(*known);
        }
        // The last token is always computed, so the block that it is in is.
        (options.window.contains(request.timestamp, last), (tokens, held.min(tokens - 1) / block * block))
    };
    let all: Vec<_> = trace.requests.iter().map(&mut prompt).collect();
    all.into_iter().filter(|(counted, _)| *counted).map(|(_, prompt)| prompt).collect()
}

/// The largest share of the window's requests that any policy can serve within the objectives.
///
/// All nodes of a kind are one machine that is as fast as they are together and never idle for want
/// of the right request. Prompts find every block that any request before them had. A set of
/// requests is feasible there if it is in the order of arrival, as deadlines are in that order,
/// too. The largest feasible set is that of Kise, Ibaraki and Mine (Operations Research 26, 1978).
/// One after the other is added, and if it is late, the one goes whose absence makes the rest end
/// first. The bound is the lesser of prompts' and answers'.
pub(crate) fn most_met(trace: &Trace, profile: &ModelProfile, options: &SimOptions) -> f64 {
    let last = trace.requests.iter().map(|request| request.timestamp).max().unwrap_or_default();
    let counted: Vec<_> =
        trace.requests.iter().map(|request| options.window.contains(request.timestamp, last)).collect();
    let whole = counted.iter().filter(|counted| **counted).count().max(1) as f64;
    let records = trace.requests.iter().map(|request| RequestRecord::arriving(request, options.speed));
    let records: Vec<_> = records.zip(counted).filter(|(_, counted)| *counted).map(|(record, _)| record).collect();
    let mut met = 1.0_f64;
    if let Some(ttft) = options.ttft_slo {
        // Decode nodes compute prompts, too, at the cost of a row each; chunks are free, since
        // prompts share them.
        let per_decode_node =
            profile.prefill_per_token / profile.decode_per_sequence.max(profile.prefill_per_token / 10.0);
        let speed = options.prefill as f64 + options.decode as f64 * per_decode_node;
        let work = |(tokens, cached): (u32, u32)| {
            let tokens = f64::from(tokens);
            let cached = f64::from(cached);
            let pairs = (tokens - cached) * (tokens + cached + 1.0) / 2.0;
            profile.prefill_per_token * (tokens - cached) + profile.prefill_per_token_pair * pairs
        };
        let jobs = records.iter().map(|record| record.arrived).zip(prompts(trace, options).into_iter().map(work));
        // One prompt has two nodes at most, and steps may be shorter than their mean.
        let in_time = (1.0 + per_decode_node) * (1.0 + 3.0 * profile.step_noise) * ttft.as_secs_f64();
        let jobs = jobs.filter(|(_, work)| *work <= in_time).map(|(arrived, work)| (arrived, work / speed));
        met = met.min(most_in_time(jobs, ttft) as f64 / whole);
    }
    if let Some(tbt) = options.tbt_slo.map(|tbt| tbt.as_secs_f64()) {
        // A step takes the objective at most, so that its base is at least so much of the node's
        // time; the rest is for sequences.
        let speed = options.decode as f64 * (1.0 - profile.decode_base / tbt).max(1e-9);
        let per_token = |record: &RequestRecord| {
            profile.decode_per_sequence + profile.decode_per_kv_token * f64::from(record.prompt_tokens)
        };
        let work = |record: &RequestRecord| f64::from(record.output_tokens - 1) * per_token(record) / speed;
        let longest = records.iter().map(|record| f64::from(record.output_tokens)).fold(0.0, f64::max);
        let jobs = records.iter().map(|record| (record.arrived, work(record)));
        let first = options.ttft_slo.unwrap_or(NEVER);
        met = met.min(most_in_time(jobs, first + Duration::from_secs_f64(longest * tbt)) as f64 / whole);
    }
    met
}

/// Without an objective the first token may come at any time.
const NEVER: Duration = Duration::from_secs(1_000_000_000);

/// How many jobs, given by arrival and seconds of work in the order of arrival, one machine can end
/// within `limit` of their arrival.
fn most_in_time(jobs: impl Iterator<Item = (Duration, f64)>, limit: Duration) -> usize {
    let limit = limit.as_secs_f64();
    // Of the jobs that are done without a pause up to now: arrival, begin and work.
    let mut busy = Vec::<(f64, f64, f64)>::new();
    let mut done = 0;
    let mut end = 0.0_f64;
    for (arrival, work) in jobs {
        let arrival = arrival.as_secs_f64();
        if arrival >= end {
            done += busy.len();
            busy.clear();
        }
        let begin = arrival.max(end);
        busy.push((arrival, begin, work));
        end = begin + work;
        if end <= arrival + limit {
            continue;
        }
        // Without a job, those after it begin earlier by its work, but none before its arrival.
        let mut room = f64::INFINITY;
        let mut best = (0.0, busy.len() - 1);
        for (index, (arrival, begin, work)) in busy.iter().enumerate().rev() {
            let gain = room.min(*work);
            if gain > best.0 {
                best = (gain, index);
            }
            room = room.min(begin - arrival);
        }
        let (_, _, mut gap) = busy.remove(best.1);
        for (arrival, begin, _) in &mut busy[best.1..] {
            gap = gap.min(*begin - *arrival);
            *begin -= gap;
        }
        end = busy.last().map_or(0.0, |(_, begin, work)| begin + work);
    }
    done + busy.len()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::options::Window;
    use crate::trace::BLOCK_TOKENS;

    fn request(second: u64, input_length: u32, hash_ids: &[u64]) -> TraceRequest {
        let timestamp = Duration::from_secs(second);
        TraceRequest { timestamp, input_length, output_length: 1, hash_ids: hash_ids.to_vec() }
    }

    fn floor(requests: Vec<TraceRequest>, window: Window) -> f64 {
        let trace = Trace { name: String::new(), requests, block_tokens: BLOCK_TOKENS };
        {
            let options = SimOptions { window, ..SimOptions::default() };
            floor_ttft_mean(&trace, &ModelProfile::load("llama3-70b-a800").unwrap(), &options)
        }
    }

    #[test]
    fn ttft_floor_takes_blocks_of_any_earlier_request_as_cached() {
        let profile = ModelProfile::load("llama3-70b-a800").unwrap();
        let requests = vec![request(0, 1100, &[1, 2, 3]), request(9, 1600, &[1, 2, 3, 4])];
        // The third block of the first request is not full, so its id is not one that is kept.
        let first = profile.prompt(1100, 0);
        let second = profile.prompt(1600, 1024);
        assert_eq!(floor(requests.clone(), Window::All), (first + second) / 2.0);
        assert_eq!(floor(requests.clone(), Window::FirstHalf), first);
        assert_eq!(floor(requests, Window::SecondHalf), second);
    }

    #[test]
    fn ttft_floor_computes_the_last_token() {
        let profile = ModelProfile::load("llama3-70b-a800").unwrap();
        let requests = vec![request(0, 1024, &[1, 2]), request(9, 1024, &[1, 2])];
        assert_eq!(floor(requests, Window::SecondHalf), profile.prompt(1024, 512));
    }

    #[test]
    fn most_requests_in_time_leave_out_the_longest() {
        let most = |jobs: &[(u64, f64)], limit| {
            most_in_time(jobs.iter().map(|(at, work)| (Duration::from_secs(*at), *work)), Duration::from_secs(limit))
        };
        assert_eq!(most(&[], 1), 0);
        assert_eq!(most(&[(0, 1.0), (0, 1.0), (0, 1.0)], 2), 2);
        assert_eq!(most(&[(0, 5.0), (0, 2.0), (0, 2.0)], 5), 2, "the long one goes");
        assert_eq!(most(&[(0, 9.0), (1, 1.0)], 5), 1, "one that cannot be in time is not waited for");
        assert_eq!(most(&[(0, 2.0), (10, 2.0), (20, 2.0)], 2), 3, "pauses are no help, and no harm");
        // The second could begin a second earlier at most, so that the first is worth that much
        // only.
        assert_eq!(most(&[(0, 5.0), (4, 3.0), (4, 3.0)], 5), 2);
    }

    #[test]
    fn ttft_floor_of_no_requests_is_zero() {
        assert_eq!(floor(Vec::new(), Window::All), 0.0);
    }
}
