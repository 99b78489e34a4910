//! More than the cluster can do, over HTTP, from clients that say nothing of objectives. A request
//! that would wait for too long is refused, with a time to come again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_cluster_tests::{Cluster, HttpAnswer, binary};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// A prompt of 100 tokens takes a node so long.
const COMPUTE: Duration = Duration::from_millis(200);
/// So many come in the time of one.
const OVERLOAD: u32 = 10;
const REQUESTS: u64 = 80;
const MAX_WAIT: Duration = Duration::from_secs(1);

async fn slow_cluster(max_wait: &str) -> anyhow::Result<Arc<Cluster>> {
    let cluster = Cluster::mock()
        .node_flags(&["--mock-token-us", "2000", "--mock-base-us", "0"])
        .conductor_flags(&["--max-wait-ms", max_wait, "--prompts-at-decode", "short"])
        .start()
        .await?;
    Ok(Arc::new(cluster))
}

async fn baton(cluster: &Cluster, command: &[&str]) -> anyhow::Result<std::process::Output> {
    let conductor = ["--conductor", &cluster.conductor.ready.grpc, "--json"];
    Ok(tokio::process::Command::new(binary("baton")?).args(conductor).args(command).output().await?)
}

fn completion(salt: u64, tokens: u64) -> String {
    let prompt: Vec<_> = (0..tokens).map(|i| 33 + (i * 7 + salt * 31 + i * salt) % 80).collect();
    json!({"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": true}).to_string()
}

/// Ten times what the prefill node can do: the answers in the order of arrival, and how long each
/// took.
async fn overload(cluster: &Arc<Cluster>) -> anyhow::Result<Vec<(HttpAnswer, Duration)>> {
    let mut tasks = JoinSet::new();
    for n in 0..REQUESTS {
        let cluster = Arc::clone(cluster);
        tasks.spawn(async move {
            let asked = Instant::now();
            let answer = cluster.http_with("/v1/completions", &[], Some(&completion(n, 100))).await?;
            anyhow::Ok((n, answer, asked.elapsed()))
        });
        tokio::time::sleep(COMPUTE / OVERLOAD).await;
    }
    let mut answers = Vec::new();
    while let Some(answer) = tasks.join_next().await {
        answers.push(answer??);
    }
    answers.sort_by_key(|(n, ..)| *n);
    Ok(answers.into_iter().map(|(_, answer, took)| (answer, took)).collect())
}

#[tokio::test]
async fn request_with_too_long_wait_is_refused_with_retry_after() -> anyhow::Result<()> {
    let cluster = slow_cluster("1000").await?;
    // Alone in the cluster: what it takes itself does not count.
    let long = cluster.http_with("/v1/completions", &[], Some(&completion(0, 1500))).await?;
    assert_eq!(long.status, 200, "{long:?}");

    let overloading = tokio::spawn({
        let cluster = Arc::clone(&cluster);
        async move { overload(&cluster).await }
    });
    tokio::time::sleep(Duration::from_millis(600)).await;
    // In the middle of it, the operator's command is told the same, unless it comes in the moment
    // in which a request is admitted. (A prompt much shorter would go before the others.)
    let prompt = "one more; ".repeat(12);
    let mut said = baton(&cluster, &["generate", "--raw", &prompt, "--max-tokens", "2"]).await?;
    for _ in 0..10 {
        if said.status.success() {
            said = baton(&cluster, &["generate", "--raw", &prompt, "--max-tokens", "2"]).await?;
        }
    }
    let error: Value = serde_json::from_slice(&said.stderr)?;
    let answers = overloading.await??;

    let mut refused = 0;
    let mut waits = 0;
    let mut after = Vec::new();
    for (HttpAnswer { status, headers, body }, _) in &answers {
        match status {
            200 => {}
            429 => {
                refused += 1;
                let body: Value = serde_json::from_str(body)?;
                // Its own wait, that of others, or what its prompt costs: which of them comes first
                // differs from run to run.
                assert_eq!(body["error"]["type"], "overloaded", "{body}");
                let message = body["error"]["message"].as_str().unwrap_or_default();
                waits += u64::from(message.starts_with("the request would wait ") && message.contains("for others"));
                after.push(headers["retry-after"].parse::<u64>()?);
            }
            _ => panic!("{status}: {body}"),
        }
    }
    assert!(refused > REQUESTS / 2 && refused < REQUESTS, "{refused} of {REQUESTS}");
    assert!(waits > refused / 2, "{waits} of {refused} are told how long they would wait");
    assert!(after.iter().all(|seconds| (1..=2).contains(seconds)), "{after:?}");
    assert_eq!(said.status.code(), Some(3), "{error}");
    assert_eq!(error["error"]["kind"], "overloaded", "{error}");
    let load: Value = serde_json::from_slice(&baton(&cluster, &["load"]).await?.stdout)?;
    assert_eq!(load["admission"]["rejected"], refused + 1, "{load}");

    // Without it, most of those that were refused wait for longer.
    let open = slow_cluster("off").await?;
    let waited = overload(&open).await?;
    assert!(waited.iter().all(|(answer, _)| answer.status == 200), "nothing is refused");
    let late = answers
        .iter()
        .zip(&waited)
        .filter(|((answer, _), (_, took))| answer.status == 429 && took.saturating_sub(COMPUTE) > MAX_WAIT);
    let late = late.count() as u64;
    println!("{refused} of {REQUESTS} refused; {late} of them would have waited for more than {MAX_WAIT:?}");
    assert!(late * 10 >= refused * 8, "{late} of {refused}");
    Ok(())
}

#[tokio::test]
async fn objectives_are_taken_from_body_then_header_then_default() -> anyhow::Result<()> {
    let cluster =
        Cluster::mock().prefill_flags(&["--mock-token-us", "2000"]).conductor_flags(&["--tbt-slo-ms", "0.001"]);
    let cluster = cluster.start().await?;
    let ask = async |headers: &[(&str, &str)], baton: Value| {
        let mut body: Value = serde_json::from_str(&completion(1, 100))?;
        body["baton"] = baton;
        cluster.http_with("/v1/completions", headers, Some(&body.to_string())).await
    };
    let says = |answer: &HttpAnswer, status: u16, part: &str| {
        assert!(answer.status == status && answer.body.contains(part), "{part}: {answer:?}");
    };
    let out_of_reach = |answer: &HttpAnswer, begins: &str, ends: &str| {
        says(answer, 429, begins);
        says(answer, 429, "even on idle nodes, the objective is ");
        says(answer, 429, ends);
        assert!(!answer.headers.contains_key("retry-after"), "{answer:?}");
        assert_eq!(answer.headers["x-should-retry"], "false", "{answer:?}");
    };
    let answer = ask(&[], json!({})).await?;
    out_of_reach(&answer, "the time between tokens would be ", "(the conductor's tbt_slo_ms)");
    let lax = json!({"tbt_slo_ms": 60_000});
    assert_eq!(ask(&[], lax.clone()).await?.status, 200, "its own goes before the cluster's");
    assert_eq!(ask(&[("x-baton-tbt-slo-ms", "60000")], json!({})).await?.status, 200);
    let tight = [("x-baton-ttft-slo-ms", "0.01")];
    let answer = ask(&tight, lax.clone()).await?;
    out_of_reach(&answer, "the time to first token would be ", "(the request's ttft_slo_ms)");
    let own = json!({"tbt_slo_ms": 60_000, "ttft_slo_ms": 60_000});
    assert_eq!(ask(&tight, own).await?.status, 200, "the body goes before the header");
    says(&ask(&[("x-baton-ttft-slo-ms", "soon")], lax).await?, 400, "x-baton-ttft-slo-ms");
    says(&ask(&[], json!({"ttft_slo_ms": 0})).await?, 400, "baton.ttft_slo_ms");
    says(&ask(&[], json!({"ttft": 1})).await?, 400, "baton.ttft: this field is not known");
    cluster.stop().await
}
