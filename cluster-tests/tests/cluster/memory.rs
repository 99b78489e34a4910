//! Bodies that are small on the wire and large in memory: a conductor that has a gibibyte goes on,
//! and so do those who ask it for little.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Cluster, ControlGroup};
use futures::future::join_all;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;

use crate::limits::{Raw, channel, field};

/// Memory of the conductor.
const LIMIT: u64 = 1 << 30;
/// Connections that post, one body after the other.
const ATTACKERS: u64 = 8;
/// Bodies that they post.
const BODIES: u64 = 48;
/// Longer than any answer takes.
const LATE: Duration = Duration::from_secs(60);
/// Between two prompts of the honest client.
const PAUSE: Duration = Duration::from_millis(100);

/// A generator of random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn of<'a>(&mut self, texts: &[&'a str]) -> &'a str {
        texts[self.below(texts.len() as u64) as usize]
    }

    /// A list of so many bytes, of values that take far more memory than text.
    fn list(&mut self, bytes: usize) -> String {
        let item = self.of(&[
            r#"{"":0}"#,
            "[[[[[[]]]]]]",
            r#""""#,
            "{}",
            r#"{"a":{"b":{"c":[]}}}"#,
            "[1]",
            r#"{"type":"object","properties":{"a":{}}}"#,
        ]);
        format!("[{}]", vec![item; (bytes / (item.len() + 1)).max(1)].join(","))
    }

    /// A path, and a body for it.
    fn body(&mut self) -> (&'static str, String) {
        let bytes = 1 << (12 + self.below(12));
        let list = self.list(bytes);
        let quoted = json!(format!("{{\"a\":{list}}}"));
        let user = r#"{"role":"user","content":"x"}"#;
        let chat = |fields: String| ("/v1/chat/completions", format!(r#"{{"max_tokens":1,{fields}}}"#));
        let said = |messages: String| chat(format!(r#""messages":[{messages},{user}]"#));
        let many = |item: &str| vec![item; (bytes / (item.len() + 1)).max(1)].join(",");
        match self.below(16) {
            0 => chat(format!(r#""messages":[{user}],"documents":[{{"a":{list}}}]"#)),
            1 => chat(format!(r#""messages":[{user}],"documents":{list}"#)),
            2 => {
                let tool = format!(r#"{{"type":"function","function":{{"name":"f","parameters":{{"a":{list}}}}}}}"#);
                chat(format!(r#""messages":[{user}],"tools":[{tool}]"#))
            }
            3 => said(format!(
                r#"{{"role":"assistant","tool_calls":[{{"id":"a","function":{{"name":"f","arguments":{quoted}}}}}]}}"#
            )),
            4 => said(format!(
                r#"{{"role":"assistant","tool_calls":[{{"function":{{"name":"f","arguments":{{"a":{list}}}}}}}]}}"#
            )),
            5 => said(many(&format!(
                r#"{{"role":"assistant","tool_calls":[{}]}}"#,
                vec![r#"{"function":{"name":""}}"#; 1000].join(",")
            ))),
            6 => said(many(r#"{"role":"u"}"#)),
            7 => said(many(&format!(r#"{{"role":"user","content":[{}]}}"#, vec![r#""""#; 4000].join(",")))),
            8 => chat(format!(r#""messages":[{user}],"metadata":{list},"chat_template_kwargs":{{"a":{list}}}"#)),
            9 => {
                let schema =
                    format!(r#"{{"type":"json_schema","json_schema":{{"name":"s","schema":{{"a":{list}}}}}}}"#);
                chat(format!(r#""messages":[{user}],"response_format":{schema}"#))
            }
            10 => ("/v1/completions", format!(r#"{{"prompt":[{}],"max_tokens":1}}"#, many("1"))),
            11 => ("/v1/completions", format!(r#"{{"prompt":"x","logit_bias":{{{}}}}}"#, many(r#""7":1"#))),
            12 => (
                "/v1/responses",
                format!(r#"{{"max_output_tokens":16,"input":[{}]}}"#, many(r#"{"role":"user","content":""}"#)),
            ),
            13 => {
                let call = format!(r#"{{"type":"function_call","call_id":"a","name":"f","arguments":{quoted}}}"#);
                ("/v1/responses", format!(r#"{{"max_output_tokens":16,"input":[{call},{user}]}}"#))
            }
            14 => {
                let block = format!(r#"{{"type":"tool_use","id":"a","name":"f","input":{{"a":{list}}}}}"#);
                let messages = format!(r#"{{"role":"assistant","content":[{block}]}},{user}"#);
                ("/v1/messages", format!(r#"{{"max_tokens":1,"messages":[{messages}]}}"#))
            }
            _ => ("/detokenize", format!(r#"{{"tokens":[{}]}}"#, many("511"))),
        }
    }
}

/// Posts a body and gives the status, as soon as it is known. 0: the connection was reset, as it
/// may be if a body is refused before it was sent.
async fn post(address: &str, path: &str, body: &str) -> anyhow::Result<u16> {
    let mut stream = TcpStream::connect(address).await?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    // A body that is refused is not read to its end.
    let _ = stream.write_all(body.as_bytes()).await;
    let mut answer = [0; 256];
    let Ok(read) = tokio::time::timeout(LATE, stream.read(&mut answer)).await.context("no answer")? else {
        return Ok(0);
    };
    let status = String::from_utf8_lossy(&answer[..read]);
    status.split(' ').nth(1).and_then(|status| status.parse().ok()).with_context(|| format!("no status: {status:?}"))
}

/// Messages of gRPC that are far larger in memory, and the method that takes them.
fn messages(random: &mut Random) -> (&'static str, Vec<u8>) {
    let count = 1 << (10 + random.below(14));
    let generate = "/baton.v1.Inference/Generate";
    let said = |message: Vec<u8>| (generate, field(3, &message));
    let said_by = |fields: Vec<u8>| said(field(1, &fields));
    match random.below(7) {
        0 => said(field(1, &[]).repeat(count)),
        1 => said(field(2, b"{}").repeat(count)),
        2 => said(field(3, format!("{{\"a\":{}}}", random.list(count)).as_bytes())),
        3 => said_by(field(5, &[]).repeat(count)),
        4 => said_by(field(5, &field(3, format!("{{\"a\":{}}}", random.list(count)).as_bytes()))),
        5 => (generate, field(4, &field(1, &vec![1; count]))),
        // Attempts that a follower declares.
        _ => ("/baton.v1.Leader/Follow", field(1, &field(3, &[]).repeat(count))),
    }
}

/// Sends messages of gRPC until it is told to stop; gives what they were answered.
async fn send(address: &str, mut random: Random, stop: &AtomicBool) -> anyhow::Result<Vec<Code>> {
    let mut client = tonic::client::Grpc::new(channel(address).await?);
    let mut codes = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let (path, message) = messages(&mut random);
        client.ready().await?;
        let request = tonic::Request::new(tokio_stream::once(message));
        let path = path.parse()?;
        let call = async {
            let mut answer = client.streaming(request, path, Raw).await?.into_inner();
            answer.message().await.map(drop)
        };
        let answer = tokio::time::timeout(LATE, call).await.context("no answer over gRPC")?;
        codes.push(answer.err().map_or(Code::Ok, |status| status.code()));
    }
    Ok(codes)
}

/// Time to the first token of a prompt of 3 kB.
async fn ttft(address: &str, salt: u64) -> anyhow::Result<Duration> {
    let prompt = format!("{salt:08}{}", "honest words of a prompt ".repeat(120));
    let body = json!({"prompt": prompt, "max_tokens": 2, "stream": true}).to_string();
    let began = Instant::now();
    let status = post(address, "/v1/completions", &body).await?;
    anyhow::ensure!(status == 200, "{status}");
    Ok(began.elapsed())
}

/// The middle one of what prompts measured one after the other take, until `over` says so.
async fn median_ttft(address: &str, salt: u64, over: impl Fn(usize) -> bool) -> anyhow::Result<(Duration, usize)> {
    let mut all = Vec::new();
    while !over(all.len()) {
        all.push(ttft(address, salt + all.len() as u64).await.context("the prompt of 3 kB")?);
        tokio::time::sleep(PAUSE).await;
    }
    all.sort();
    Ok((all[all.len() / 2], all.len()))
}

async fn survives(time: Duration, seed: u64) -> anyhow::Result<()> {
    let group = ControlGroup::new(LIMIT);
    if let Err(reason) = &group {
        println!("no control group ({reason:#}): the conductor's memory is measured, and not limited");
    }
    let mut builder = Cluster::mock().node_flags(&["--mock-base-us", "30000"]);
    if let Ok(group) = &group {
        builder = builder.conductor_group(group);
    } else {
        builder = builder.conductor_flags(&["--max-body-bytes-total", &(LIMIT / 10).to_string()]);
    }
    let cluster = builder.start().await?;
    let address = cluster.conductor.ready.http.as_deref().context("no HTTP port")?;
    let (calm, _) = median_ttft(address, 0, |prompts| prompts == 20).await?;

    println!("seed {seed}");
    let mut random = Random(seed);
    let bodies: Vec<_> = (0..BODIES).map(|_| random.body()).collect();
    let stop = AtomicBool::new(false);
    let attack = async |attacker: u64| {
        let mut random = Random(seed ^ attacker);
        let mut statuses = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let (path, body) = &bodies[random.below(BODIES) as usize];
            statuses.push(post(address, path, body).await.with_context(|| format!("{path} {}", &body[..80]))?);
        }
        anyhow::Ok(statuses)
    };
    let began = Instant::now();
    let honest = async {
        let honest = median_ttft(address, 1000, |_| began.elapsed() > time).await;
        stop.store(true, Ordering::Relaxed);
        honest
    };
    let calls = send(&cluster.conductor.ready.grpc, Random(seed), &stop);
    let (honest, attacks, calls) = tokio::join!(honest, join_all((1..ATTACKERS).map(attack)), calls);
    let calls = calls.context("gRPC")?;
    let (under, prompts) = honest?;
    let statuses: Vec<u16> = attacks.into_iter().collect::<anyhow::Result<Vec<_>>>()?.concat();
    let of = |status| statuses.iter().filter(|found| **found == status).count();
    let peak = cluster.conductor.peak_bytes()?;
    let ratio = under.as_secs_f64() / calm.as_secs_f64();
    println!(
        "{} bodies: {} served, {} refused (400), {} too large (413), {} without room (429); {} messages; peak {} MiB; TTFT of {prompts} prompts of 3 kB {under:?} beside them, {calm:?} without: {ratio:.2}",
        statuses.len(),
        of(200),
        of(400),
        of(413),
        of(429),
        calls.len(),
        peak >> 20,
    );
    assert!(calls.len() > 10 && calls.contains(&Code::InvalidArgument), "{calls:?}");
    assert!(statuses.len() > 50 && of(400) > 0 && of(200) > 0, "{statuses:?}");
    assert!([0, 200, 400, 413, 429].map(of).iter().sum::<usize>() == statuses.len(), "{statuses:?}");
    assert!(peak < LIMIT * 9 / 10, "{} MiB", peak >> 20);
    assert!(ratio <= 3.0, "{under:?} beside them, {calm:?} without");
    // What was taken goes back.
    let returned = async || Ok(cluster.conductor.resident_bytes()? < LIMIT / 5);
    cluster.wait_for("return of what was freed", Duration::from_secs(10), returned).await?;
    cluster.stop().await
}

/// Jobs of a session, a megabyte on the wire and sixteen in memory, or more; from eight conductors.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_survives_hostile_messages_of_conductors() -> anyhow::Result<()> {
    const CACHE: u64 = 16 << 20;
    let cluster = Cluster::mock().node_flags(&["--cache-bytes", &CACHE.to_string()]).start().await?;
    let node = &cluster.prefill[0];
    let job = |fields: Vec<u8>| field(2, &fields);
    let words = job(field(3, &field(15, &[]).repeat(15_000_000)));
    let tokens = job(field(2, &vec![1; 30 << 20]));
    let session = async |conductor: usize| {
        let mut client = tonic::client::Grpc::new(channel(&node.ready.grpc).await?);
        let mut codes = Vec::new();
        for message in [&words, &tokens] {
            let greeting = field(1, &[&[8, 1][..], &field(2, format!("{conductor:016x}").as_bytes())].concat());
            client.ready().await?;
            let messages = tonic::Request::new(tokio_stream::iter([greeting, message.clone()]));
            let answer = client.streaming(messages, "/baton.v1.Node/Session".parse()?, Raw).await;
            let Ok(answer) = answer else {
                codes.push(Code::Unknown);
                continue;
            };
            let mut events = answer.into_inner();
            // Until the node ends the session.
            let ended = async { while events.message().await.is_ok_and(|event| event.is_some()) {} };
            codes.push(tokio::time::timeout(LATE, ended).await.map_or(Code::DeadlineExceeded, |()| Code::Ok));
        }
        anyhow::Ok(codes)
    };
    let codes = join_all((1..=8).map(session)).await.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let peak = node.peak_bytes()?;
    println!("{codes:?}; peak {} MiB", peak >> 20);
    assert!(peak < CACHE + (1 << 30), "{} MiB", peak >> 20);
    let address = cluster.conductor.ready.http.as_deref().context("no HTTP port")?;
    ttft(address, 0).await.context("a prompt after them")?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conductor_in_a_gibibyte_survives_hostile_bodies() -> anyhow::Result<()> {
    survives(Duration::from_secs(20), 49).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes ten minutes: make test-long"]
async fn conductor_in_a_gibibyte_survives_hostile_bodies_for_ten_minutes() -> anyhow::Result<()> {
    survives(Duration::from_secs(600), baton_runtime::random_u64()).await
}
