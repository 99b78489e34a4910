//! `baton bench serve`, as a person uses it. The servers are a real cluster, over both of its
//! protocols, and ones that refuse, fall silent or break.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use baton_cluster_tests::{Cluster, bench_output, bench_report};
use serde_json::Value;

const ENDS: [&str; 7] = ["met", "late", "rejected_429", "rejected_503", "aborted", "failed", "not_sent"];
const SECOND: Duration = Duration::from_secs(1);

async fn report(url: &str, options: &str) -> anyhow::Result<Value> {
    let words = ["serve", url].into_iter().chain(options.split_whitespace()).chain(["--json"]);
    bench_report(&words.collect::<Vec<_>>()).await
}

/// The same of a run in which no request got its answer: that is an error with its first reason.
async fn nothing_served(url: &str, options: &str, reason: &str) -> anyhow::Result<Value> {
    let words = ["serve", url].into_iter().chain(options.split_whitespace()).chain(["--json"]);
    let output = bench_output(&words.collect::<Vec<_>>()).await?;
    let error: Value = serde_json::from_slice(&output.stderr)?;
    assert_eq!((output.status.code(), &error["error"]["kind"]), (Some(4), &"unavailable".into()), "{error}");
    let said = format!("no request succeeded; the first one ended with: {reason}");
    assert!(error["error"]["message"].as_str().unwrap().starts_with(&said), "{error}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// In the order of [`ENDS`]; their sum is all that were due.
#[track_caller]
fn ends(report: &Value) -> [u64; 7] {
    let ends = ENDS.map(|end| report["ends"][end].as_u64().unwrap_or_else(|| panic!("{end}: {report}")));
    assert_eq!(Some(ends.iter().sum()), report["requests"].as_u64(), "{report}");
    ends
}

/// A server that treats each connection so, on a thread of its own each, until the test ends. Gives
/// its URL.
fn server(treat: impl Fn(TcpStream) -> std::io::Result<()> + Send + Clone + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let treat = treat.clone();
            std::thread::spawn(move || treat(stream));
        }
    });
    url
}

/// Reads one request, head and body.
fn read_request(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut request = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&request);
        let length = text.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
        if text.split_once("\r\n\r\n").is_some_and(|(_, body)| body.len() >= length.unwrap_or(0)) {
            return Ok(text.into_owned());
        }
        match stream.read(&mut piece)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => request.extend_from_slice(&piece[..n]),
        }
    }
}

#[tokio::test]
async fn bench_serve_counts_every_request_once_over_http_and_grpc() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let http = cluster.conductor.ready.http.clone().unwrap();
    let grpc = cluster.conductor.ready.grpc.clone();
    let options = "--rate 100 --requests 60 --prompt-chars 50:3,400 --shared-prefix-chars 200 --prefixes 2 --max-tokens 12 --ttft-limit 30s --tbt-limit 30s";
    for (url, api) in [(format!("http://{http}"), "openai"), (format!("grpc://{grpc}"), "grpc")] {
        let found = report(&url, options).await?;
        assert_eq!(ends(&found), [60, 0, 0, 0, 0, 0, 0], "{found}");
        assert_eq!((&found["api"], &found["model"], &found["url"]), (&api.into(), &"mock".into(), &url.into()));
        assert_eq!((&found["output_tokens"], &found["goodput_share"]), (&720.into(), &1.0.into()), "{found}");
        assert_eq!(found["short"], 0, "{found}");
        // A byte is a token, and a text begins with one.
        let prompts = found["prompt_tokens"].as_u64().unwrap();
        assert!((60 * 251..60 * 601).contains(&prompts), "{found}");
        assert!(found["cached_tokens"].as_u64().unwrap() > 0, "prefixes are shared: {found}");
        let gaps: u64 = found["gaps"]["counts"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(gaps, 60 * 11, "{found}");
        assert_eq!(
            found["gaps"]["counts"].as_array().unwrap().len(),
            found["gaps"]["edges_s"].as_array().unwrap().len() + 1
        );
        let figure = |name: &str| found[name].as_f64().unwrap_or_else(|| panic!("{name}: {found}"));
        assert!(0.0 < figure("ttft_p50_s") && figure("ttft_p50_s") <= figure("ttft_p99_s"), "{found}");
        assert!(
            figure("tbt_mean_p50_s") <= figure("tbt_tail_p50_s") && figure("tbt_tail_p90_s") <= figure("gap_max_s")
        );
        assert!(figure("slip_p50_s") >= 0.0 && figure("output_tokens_per_s") > 0.0 && figure("in_flight_max") >= 1.0);
    }
    let (_, metrics) = cluster.http("/metrics", None).await?;
    assert!(metrics.contains("baton_conductor_generation_tokens_total 1440"), "what was counted was served: {metrics}");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn bench_serve_counts_late_requests_and_plays_a_trace() -> anyhow::Result<()> {
    let cluster = Cluster::mock().node_flags(&["--mock-base-us", "5000"]).start().await?;
    let url = format!("grpc://{}", cluster.conductor.ready.grpc);
    let found = report(&url, "--rate 50 --requests 20 --max-tokens 5 --tbt-limit 1ms").await?;
    assert_eq!(ends(&found), [0, 20, 0, 0, 0, 0, 0], "{found}");
    let folder = tempfile::tempdir()?;
    let trace = folder.path().join("three.jsonl");
    let line = |ms: u32, id: u32| {
        format!(r#"{{"timestamp": {ms}, "input_length": 300, "output_length": 4, "hash_ids": [{id}]}}"#)
    };
    std::fs::write(&trace, [line(0, 1), line(100, 2), line(900, 1)].join("\n"))?;
    let play = format!("--trace {} --speed 2 --ttft-limit 30s --tbt-limit 30s", trace.display());
    for url in [url, format!("http://{}", cluster.conductor.ready.http.clone().unwrap())] {
        let found = report(&url, &play).await?;
        assert_eq!(ends(&found), [3, 0, 0, 0, 0, 0, 0], "{found}");
        assert_eq!((&found["arrivals"], &found["prompt_tokens"]), (&"trace three x2".into(), &900.into()));
        assert_eq!((&found["output_tokens"], &found["short"]), (&12.into(), &0.into()), "as long as recorded: {found}");
        assert!(found["seconds"].as_f64().unwrap() >= 0.45, "the last one is due after 450 ms: {found}");
    }
    cluster.stop().await
}

#[tokio::test]
async fn bench_serve_counts_refusals_by_http_status() -> anyhow::Result<()> {
    for (status, expected) in [("429 Too Many Requests", [0, 0, 25, 0, 0, 0, 0]), ("503 Gone", [0, 0, 0, 25, 0, 0, 0])]
    {
        let url = server(move |mut stream| {
            loop {
                read_request(&mut stream)?;
                write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\n{{}}")?;
            }
        });
        let reason = format!("rejected with HTTP {}", &status[..3]);
        let found = nothing_served(&url, "--rate 200 --requests 25 --model m", &reason).await?;
        assert_eq!(ends(&found), expected, "{found}");
        assert!(found["ttft_p50_s"].is_null() && found["gap_max_s"].is_null(), "{found}");
    }
    // Nodes there are none.
    let cluster = Cluster::mock().prefill(0).decode(0).start().await?;
    for url in [
        format!("grpc://{}", cluster.conductor.ready.grpc),
        format!("http://{}", cluster.conductor.ready.http.clone().unwrap()),
    ] {
        let found = nothing_served(&url, "--rate 200 --requests 9", "rejected with HTTP 503").await?;
        assert_eq!(ends(&found), [0, 0, 0, 9, 0, 0, 0], "{found}");
    }
    cluster.stop().await
}

/// As vLLM and llama-server stream: comments, several tokens in a chunk, a chunk without text,
/// usage at the end; in pieces that end anywhere.
#[tokio::test]
async fn bench_serve_reads_streams_of_other_servers() -> anyhow::Result<()> {
    let url = server(|mut stream| {
        let asked = read_request(&mut stream)?;
        assert!(asked.contains("\"stream_options\":{\"include_usage\":true}") && asked.contains("\"ignore_eos\":true"));
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")?;
        let chunk = |text: &str, finish: &str| {
            format!(
                "data: {{\"choices\": [{{\"index\": 0, \"text\": \"{text}\", \"finish_reason\": {finish}}}], \"usage\": null}}\r\n\r\n"
            )
        };
        let usage = "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 7, \"completion_tokens\": 6}}\n\n";
        let events = [
            ": ping\n\n",
            &chunk("a", "null"),
            &chunk("", "null"),
            &chunk("b c", "null"),
            &chunk("d", "\"length\""),
            usage,
            "data: [DONE]\n\n",
        ];
        for piece in events.concat().as_bytes().chunks(37) {
            stream.write_all(piece)?;
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    });
    for (max_tokens, short) in [(6, 0), (7, 5)] {
        let options = format!("--rate 100 --requests 5 --model m --tbt-limit 10s --max-tokens {max_tokens}");
        let found = report(&url, &options).await?;
        assert_eq!(ends(&found), [5, 0, 0, 0, 0, 0, 0], "{found}");
        assert_eq!((&found["output_tokens"], &found["prompt_tokens"]), (&30.into(), &35.into()));
        assert_eq!(found["merged_share"].as_f64(), Some(10.0 / 30.0), "six tokens came in four chunks");
        assert_eq!(found["short"], short, "{found}");
    }
    Ok(())
}

#[tokio::test]
async fn bench_serve_fails_broken_streams_and_bounds_requests_in_flight() -> anyhow::Result<()> {
    let breaks = server(|mut stream| {
        read_request(&mut stream)?;
        write!(stream, "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {{\"choices\": [{{\"text\": \"a\"}}]}}\n\n")
    });
    let found = nothing_served(&breaks, "--rate 100 --requests 8 --model m", "the stream ended in mid-answer").await?;
    assert_eq!(ends(&found), [0, 0, 0, 0, 0, 8, 0], "{found}");
    assert_eq!(found["failures"]["the stream ended in mid-answer"], 8, "{found}");

    let hangs = server(|mut stream| {
        read_request(&mut stream)?;
        std::thread::sleep(20 * SECOND);
        Ok(())
    });
    let options = "--rate 1000 --requests 40 --model m --most-in-flight 3 --timeout 1s";
    let found = nothing_served(&hangs, options, "no end within 1 s").await?;
    assert_eq!(ends(&found), [0, 0, 0, 0, 3, 0, 37], "{found}");
    assert_eq!((&found["aborts"]["no end within 1 s"], &found["in_flight_max"]), (&3.into(), &3.into()), "{found}");
    // The open loop: no request waited for those that hang.
    assert!(found["seconds"].as_f64().unwrap() < 5.0, "{found}");
    Ok(())
}

#[tokio::test]
async fn bench_serve_prints_a_table_or_names_the_invalid_flag() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let url = format!("http://{}", cluster.conductor.ready.http.clone().unwrap());
    let options = "--rate 100 --requests 20 --max-tokens 8 --ttft-limit 30s --tbt-limit 30s";
    let output = bench_output(&["serve", &url].into_iter().chain(options.split(' ')).collect::<Vec<_>>()).await?;
    let text = String::from_utf8(output.stdout)?;
    for part in [
        "20 met, 0 late",
        "20, poisson 100/s",
        "TBT, tail",
        "sent late by",
        "gaps between tokens",
        "<= ",
        "; 0 answers shorter than asked",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let unknown = nothing_served(&url, "--rate 100 --requests 3 --model nope", "HTTP 404: ").await?;
    assert_eq!(ends(&unknown), [0, 0, 0, 0, 0, 3, 0], "{unknown}");
    cluster.stop().await?;

    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let unreachable = format!("http://{free}");
    for (arguments, status, said) in [
        (["serve", &unreachable, "--rate", "1"], 4, "/v1/models"),
        (["serve", "https://h:1", "--rate", "1"], 2, "grpc://HOST:PORT"),
        (["serve", &unreachable, "--trace", "/nowhere/t"], 2, "--trace: /nowhere/t"),
    ] {
        let output = bench_output(&arguments).await?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(status) && stderr.contains(said), "{arguments:?}: {stderr}");
    }
    Ok(())
}
