//! Where a request's time went, for people.

use baton_bench::seconds;

use crate::report::Report;
use crate::screen::Paint;

/// The timeline as a few lines.
pub fn render(report: &Report, paint: Paint) -> String {
    let mut rows = vec![
        ("request", report.request_id.clone()),
        ("queue", queue(report)),
        ("cached tokens", cached(report)),
        ("prefill", format!("{} on {}", seconds(report.timeline.prefill_compute_s), node(&report.prefill_node))),
        ("KV transferred", transferred(report)),
        ("TTFT", seconds(report.ttft_s)),
        ("TBT", gaps(report)),
        ("output", output(report)),
    ];
    if let Some(migrations) = migrations(report) {
        rows.insert(5, ("decode migrated", migrations));
    }
    let row = |(name, value)| format!("  {} {value}", paint.dim(&format!("{name:<14}")));
    let rows: Vec<_> = rows.into_iter().map(row).collect();
    format!("{}\n{}", paint.bold("timeline"), rows.join("\n"))
}

/// Where it went on at another decode node.
fn migrations(report: &Report) -> Option<String> {
    let migrated = report.migrated.as_ref()?;
    let times = if migrated.times == 1 { "once".to_owned() } else { format!("{} times", migrated.times) };
    let transport = migrated.transport.as_deref().unwrap_or("-");
    let brought = bytes(migrated.bytes);
    let time = seconds(migrated.seconds);
    Some(format!("{times}, to {}: {brought} fetched over {transport} in {time}", node(&report.decode_node)))
}

fn queue(report: &Report) -> String {
    let timeline = &report.timeline;
    let placement = seconds(timeline.placement_s);
    let prefill = seconds(timeline.prefill_queue_s);
    format!("{prefill} for prefill, {} for decode; placement took {placement}", seconds(timeline.decode_queue_s))
}

fn cached(report: &Report) -> String {
    let cached = format!("{} of {}", report.cached_tokens, report.prompt_tokens);
    let Some(fetch) = &report.prefix_fetch else { return cached };
    let transport = fetch.transport.as_deref().unwrap_or("-");
    format!("{cached}; {} fetched over {transport} in {}", bytes(fetch.bytes), seconds(fetch.seconds))
}

fn transferred(report: &Report) -> String {
    let transfer = &report.kv_transfer;
    match &transfer.transport {
        None => "nothing".to_owned(),
        Some(transport) => format!(
            "{} over {transport} to {} in {}, {} of it exposed beyond compute",
            bytes(transfer.bytes),
            node(&report.decode_node),
            seconds(transfer.seconds),
            seconds(transfer.exposed_seconds)
        ),
    }
}

fn gaps(report: &Report) -> String {
    let gaps = &report.tbt_s;
    match (gaps.mean, gaps.p50, gaps.p99, gaps.tail10, gaps.max) {
        (Some(mean), Some(p50), Some(p99), Some(tail), Some(longest)) => format!(
            "{} mean, {} median, {} p99, {} mean of the longest tenth, {} longest",
            seconds(mean),
            seconds(p50),
            seconds(p99),
            seconds(tail),
            seconds(longest)
        ),
        _ => "-".to_owned(),
    }
}

fn output(report: &Report) -> String {
    let tokens = report.completion_tokens;
    let total = seconds(report.timeline.total_s);
    format!("{tokens} tokens in {total}, finish reason: {}", report.finish_reason)
}

fn node(name: &Option<String>) -> &str {
    name.as_deref().unwrap_or("-")
}

/// `1.5 MiB`.
pub fn bytes(value: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if value < 1024 {
        return format!("{value} B");
    }
    let mut scaled = value as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if scaled < 1024.0 {
            break;
        }
        scaled /= 1024.0;
        unit = next;
    }
    format!("{scaled:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_proto::v1;
    use baton_proto::v1::generate_response::Event;

    use super::*;
    use crate::report::Record;

    #[test]
    fn byte_units_fit_their_values() {
        assert_eq!(
            [bytes(1023), bytes(1536), bytes(5 << 20), bytes(3 << 30)],
            ["1023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB"]
        );
    }

    #[test]
    fn timeline_shows_every_stage_of_a_request() {
        let transfer = v1::KvTransfer {
            bytes: 3 << 20,
            transport: "tcp".into(),
            seconds: 0.040,
            exposed_seconds: 0.002,
            bytes_at_compute_end: 0,
        };
        let timeline = v1::Timeline {
            prefill_queue_s: 0.007,
            prefill_compute_s: 0.5,
            ttft_s: 0.6,
            migrations: 2,
            migrated: Some(v1::KvTransfer { bytes: 2048, seconds: 0.003, ..transfer.clone() }),
            kv_transfer: Some(transfer),
            ..Default::default()
        };
        let finished = v1::Finished {
            usage: Some(v1::Usage { prompt_tokens: 45, completion_tokens: 1, cached_tokens: 32 }),
            timeline: Some(timeline),
            finish_reason: "stop".into(),
            prefill_node: "prefill-0".into(),
            decode_node: "decode-1".into(),
            ..Default::default()
        };
        let mut record = Record::default();
        record
            .take(
                v1::GenerateResponse { event: Some(Event::Finished(Box::new(finished))), completion: 0 },
                Duration::from_secs(1),
            )
            .unwrap();
        let text = render(&record.report(), Paint::none());
        for part in [
            "7.0 ms for prefill",
            "32 of 45",
            "500.0 ms on prefill-0",
            "3.0 MiB over tcp to decode-1 in 40.0 ms, 2.0 ms of it exposed",
            "2 times, to decode-1: 2.0 KiB fetched over tcp in 3.0 ms",
            "600.0 ms",
            "1 tokens in 0 us, finish reason: stop",
        ] {
            assert!(text.contains(part), "'{part}' in:\n{text}");
        }
    }
}
