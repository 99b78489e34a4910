//! What an operator sees: the real `baton` command against a real cluster with the mock engine.

use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, binary};
use baton_proto::v1::generate_response::Event;
use serde_json::Value;
use tokio::process::Command;

const SECOND: Duration = Duration::from_secs(1);

fn prompt(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens).map(|i| 32 + (i * 7 + salt * 13) % 90).collect()
}

pub async fn baton(cluster: &Cluster, arguments: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new(binary("baton")?);
    for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("BATON_")) {
        command.env_remove(key);
    }
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    command.args(["--conductor", &conductor]).args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    Ok(command.output().await?)
}

async fn json(cluster: &Cluster, arguments: &[&str]) -> anyhow::Result<Value> {
    let output = baton(cluster, &[arguments, &["--json"]].concat()).await?;
    anyhow::ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{arguments:?}: {}", String::from_utf8_lossy(&output.stdout)))
}

/// Asks again until the answer is what it must become.
pub async fn until(cluster: &Cluster, arguments: &[&str], done: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
    let mut last = Value::Null;
    for _ in 0..100 {
        last = json(cluster, arguments).await?;
        if done(&last) {
            return Ok(last);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    anyhow::bail!("{arguments:?} stays at {last}")
}

#[tokio::test]
async fn load_command_reports_admission_goodput_and_prediction_errors() -> anyhow::Result<()> {
    let cluster = Cluster::mock().prefill(2).start().await?;
    let before = json(&cluster, &["load"]).await?;
    assert_eq!((before["prefill"].as_array().unwrap().len(), before["decode"].as_array().unwrap().len()), (2, 1));
    assert!(
        before["prediction_errors"].as_array().unwrap().iter().all(|row| row["count"] == 0 && row["bias"].is_null())
    );

    for salt in 0..5 {
        cluster.ask(Ask::tokens(prompt(200, salt)).max_tokens(12).ignore_eos()).await?;
    }
    let one = cluster.ask(Ask::tokens(prompt(50, 9)).max_tokens(1)).await?;
    assert_eq!(one.token_ids.len(), 1);
    let mut late = Ask::tokens(prompt(200, 7));
    late.0.slo.get_or_insert_default().ttft_ms = Some(0.001);
    let (code, message) = cluster.refused(late).await;
    assert_eq!(code, tonic::Code::ResourceExhausted, "{message}");
    cluster.refused(Ask::tokens(prompt(200, 7)).sampling(|sampling| sampling.temperature = Some(-1.0))).await;

    let after = until(&cluster, &["load"], |load| load["goodput"]["ended"] == 6).await?;
    let admission = &after["admission"];
    assert_eq!((&admission["admitted"], &admission["rejected"]), (&6.into(), &1.into()), "{admission}");
    assert_eq!(admission["rejections"][0]["message"].as_str(), Some(message.as_str()));
    assert!(admission["rejections"][0]["retry_after_s"].is_null(), "idle nodes would be late, too: {admission}");
    assert_eq!((&after["goodput"]["within"], &after["goodput"]["aborted"]), (&6.into(), &0.into()));
    let mut given_up =
        cluster.inference().generate(Ask::tokens(prompt(200, 8)).max_tokens(2000).ignore_eos().0).await?;
    given_up.get_mut().message().await?;
    drop(given_up);
    let later = until(&cluster, &["load"], |load| load["goodput"]["aborted"] == 1).await?;
    assert_eq!(
        (&later["goodput"]["ended"], &later["goodput"]["within"]),
        (&6.into(), &6.into()),
        "neither met nor missed"
    );
    let counts = ["ttft", "tbt", "transfer", "output"].map(|name| {
        let row = after["prediction_errors"].as_array().unwrap().iter().find(|row| row["quantity"] == name).unwrap();
        let count = row["count"].as_u64().unwrap();
        if count > 0 {
            assert!(row["error_p50"].as_f64() <= row["error_p90"].as_f64(), "{row}");
            assert!(row["predicted_p50"].as_f64() > Some(0.0) && row["measured_p50"].as_f64() > Some(0.0), "{row}");
        }
        count
    });
    assert_eq!((counts[0], counts[1], counts[3]), (6, 5, 5), "one token has neither gaps nor an answer");
    assert!(counts[2] <= 5, "a push that compute hid whole has no relative error");
    assert_eq!(after["prediction_errors"][3]["measured_p50"], 12.0);
    let rates =
        after["prefill"].as_array().unwrap().iter().filter(|node| node["tokens_per_second"].as_f64() > Some(0.0));
    assert!(rates.count() >= 1, "{after}");
    assert!(after["decode"][0]["step_s"].as_f64() > Some(0.0) && after["decode"][0]["tbt_s"].is_null(), "{after}");
    let (_, metrics) = cluster.http("/metrics", None).await?;
    let line = "baton_conductor_prediction_error_ratio_count{quantity=\"ttft\"} 6";
    assert!(metrics.contains(line), "{line} in:\n{metrics}");
    assert!(metrics.contains("baton_conductor_measured_tokens_sum{quantity=\"output\"} 60"), "{metrics}");

    let shown = String::from_utf8(baton(&cluster, &["load"]).await?.stdout)?;
    assert!(shown.starts_with("PREFILL") && shown.contains("7 admitted, 1 rejected"), "{shown}");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn ended_request_is_explained_by_its_id() -> anyhow::Result<()> {
    let cluster = Cluster::mock().prefill(2).start().await?;
    let answer = cluster.ask(Ask::tokens(prompt(200, 1)).max_tokens(12).ignore_eos()).await?;
    let record = until(&cluster, &["explain", &answer.request_id], |record| !record["end"].is_null()).await?;
    let decisions = record["decisions"].as_array().unwrap();
    assert_eq!((decisions.len(), &decisions[0]["attempt"], &decisions[0]["times"]), (1, &0.into(), &1.into()));
    let explained = &decisions[0]["explanation"];
    assert_eq!(explained["placed"]["prefill"].as_str(), Some(answer.finished.prefill_node.as_str()), "{record}");
    assert_eq!(explained["placed"]["decode"].as_str(), Some(answer.finished.decode_node.as_str()));
    let verdicts = explained["prefill"].as_array().unwrap().iter().map(|row| row["verdict"].as_str().unwrap());
    let mut verdicts: Vec<_> = verdicts.collect();
    verdicts.sort_unstable();
    assert_eq!(verdicts, ["chosen", "not chosen"]);
    let end = &record["end"];
    assert_eq!((&end["finish_reason"], &end["output_tokens"]), (&"length".into(), &12.into()), "{end}");
    assert_eq!(end["kv_transfer"]["bytes"].as_u64(), Some(answer.kv_transfer().bytes));
    for time in ["ttft_s", "predicted_ttft_s", "tbt_s", "predicted_tbt_s"] {
        assert!(end[time].as_f64() > Some(0.0), "{time} in {end}");
    }

    // Refused requests have an id, too: it is in the log.
    let mut late = Ask::tokens(prompt(200, 7));
    late.0.slo.get_or_insert_default().ttft_ms = Some(0.001);
    let (_, message) = cluster.refused(late).await;
    let ended = request_lines(&cluster)?;
    assert_eq!(ended.len(), 2, "one line a request: {ended:#?}");
    let [served, refused] = [&ended[0], &ended[1]].map(String::as_str);
    for part in [
        &format!("request={}", answer.request_id),
        "outcome=\"length\"",
        "output_tokens=12",
        "decode_verdicts=\"1 chosen\"",
    ] {
        assert!(served.contains(part), "{part} in {served}");
    }
    let id = refused.split("request=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    let record = json(&cluster, &["explain", &id[..8]]).await?;
    assert_eq!(record["request_id"], id, "its first digits are enough");
    assert_eq!(record["end"]["failure"]["message"].as_str(), Some(message.as_str()), "{record}");
    let decided = record["decisions"][0]["explanation"]["rejected"]["message"].as_str().unwrap();
    assert_eq!(message, format!("{decided} (the request's ttft_slo_ms)"));

    let unknown = baton(&cluster, &["explain", &"0".repeat(32)]).await?;
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert_eq!(unknown.status.code(), Some(2));
    assert!(said.contains("is among the last 2 that this conductor keeps (if it is a prompt,"), "{said}");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn explain_lists_each_attempt_of_a_request() -> anyhow::Result<()> {
    let mut cluster = Cluster::mock().decode(2).node_flags(&["--mock-base-us", "10000"]).start().await?;
    let ask = Ask::tokens(prompt(200, 4)).max_tokens(40).ignore_eos();
    let mut stream = cluster.inference().generate(ask.0).await?.into_inner();
    let mut id = String::new();
    let mut tokens = 0;
    let mut killed = String::new();
    while let Some(response) = stream.message().await? {
        match response.event {
            Some(Event::Accepted(accepted)) => id = accepted.request_id,
            Some(Event::Delta(delta)) => tokens += delta.token_ids.len(),
            _ => {}
        }
        if tokens >= 5 && killed.is_empty() {
            let running = json(&cluster, &["explain", &id]).await?;
            assert!(running["end"].is_null(), "{running}");
            let placed = &running["decisions"][0]["explanation"]["placed"];
            killed = placed["decode"].as_str().unwrap().to_owned();
            cluster.decode.remove(usize::from(killed == "decode-1")).kill().await?;
        }
    }
    assert_eq!(tokens, 40);
    let record = until(&cluster, &["explain", &id], |record| !record["end"].is_null()).await?;
    let decisions = record["decisions"].as_array().unwrap();
    let [first, last] = [&decisions[0], &decisions[decisions.len() - 1]];
    assert_eq!((&first["attempt"], &last["attempt"]), (&0.into(), &1.into()), "{record}");
    assert!(first["failure"].as_str().unwrap().starts_with(&format!("{killed}: ")), "{first}");
    assert!(last["failure"].is_null() && last["at_s"].as_f64() > first["at_s"].as_f64(), "{last}");
    let verdict_on_killed =
        last["explanation"]["decode"].as_array().unwrap().iter().find(|row| row["node"] == killed.as_str());
    assert!(verdict_on_killed.unwrap()["verdict"].as_str().unwrap().starts_with("left out: "), "{last}");
    assert_eq!((&record["end"]["finish_reason"], &record["end"]["output_tokens"]), (&"length".into(), &40.into()));
    let lines = request_lines(&cluster)?;
    assert!(lines.len() == 1 && lines[0].contains("attempts=2"), "{lines:#?}");
    let load = json(&cluster, &["load"]).await?;
    assert_eq!(load["prediction_errors"][0]["count"], 0, "what was placed again says nothing of predictions: {load}");
    cluster.stop().await
}

#[tokio::test]
async fn explain_shows_request_queued_at_admission_as_one_decision() -> anyhow::Result<()> {
    let cluster = Cluster::mock()
        .decode_flags(&["--max-running", "1", "--max-waiting", "1"])
        .node_flags(&["--mock-base-us", "10000"])
        .start()
        .await?;
    // Two slots, and two requests that take them.
    let ask = Ask::tokens(prompt(100, 0)).max_tokens(150).ignore_eos();
    let mut holders = Vec::new();
    for _ in 0..2 {
        let mut holder = cluster.inference().generate(ask.0.clone()).await?.into_inner();
        holder.message().await?;
        holders.push(holder);
    }
    let mut patient = ask;
    patient.0.slo.get_or_insert_default().ttft_ms = Some(30_000.0);
    let waiting = cluster.ask(patient);
    let ending = async {
        until(&cluster, &["load"], |load| load["admission"]["queued_now"] == 1).await?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(holders);
        anyhow::Ok(())
    };
    let (answer, ended) = tokio::join!(waiting, ending);
    ended?;
    let answer = answer?;
    let record = until(&cluster, &["explain", &answer.request_id], |record| !record["end"].is_null()).await?;
    let decisions = record["decisions"].as_array().unwrap();
    assert_eq!(decisions.len(), 2, "{record}");
    assert_eq!(decisions[0]["explanation"]["rejected"]["waits"], true);
    assert!(decisions[0]["times"].as_u64() >= Some(1) && decisions[1]["times"] == 1, "{record}");
    assert_eq!(decisions[1]["explanation"]["placed"]["decode"], "decode-0");
    let load = json(&cluster, &["load"]).await?;
    let counts = ["admitted", "rejected", "queued", "queued_now"].map(|name| load["admission"][name].as_u64());
    assert_eq!(counts, [Some(3), Some(0), Some(1), Some(0)], "{load}");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn cache_command_shows_looks_up_and_clears() -> anyhow::Result<()> {
    let cluster = Cluster::mock().prefill(2).start().await?;
    // Four requests begin with the same 320 tokens; each goes on with 100 of its own.
    let shared = prompt(320, 1);
    for salt in 2..6 {
        let tokens = [shared.clone(), prompt(100, salt)].concat();
        cluster.ask(Ask::tokens(tokens).max_tokens(3).ignore_eos()).await?;
    }
    cluster.wait_idle(SECOND).await?;
    let cached = |status: &Value| -> u64 {
        let nodes = status["nodes"].as_array().unwrap().iter();
        nodes.map(|node| node["blocks_cached"].as_u64().unwrap()).sum()
    };
    // 26 full blocks of each on the decode node, of which 20 are the same.
    let held = until(&cluster, &["cache"], |status| {
        let decode = &status["nodes"][2];
        decode["blocks_cached"].as_u64() >= Some(44) && decode["indexed_blocks"] == decode["blocks_cached"]
    })
    .await?;
    assert_eq!(held["nodes"].as_array().unwrap().len(), 3);
    let hottest = &held["prefixes"][0];
    assert_eq!(hottest["tokens"], 320, "{held}");
    assert!((3.9..=4.0).contains(&hottest["requests"].as_f64().unwrap()), "{hottest}");
    assert!(hottest["nodes"].as_array().unwrap().contains(&"decode-0".into()), "{hottest}");
    assert_eq!(held["prefixes"].as_array().unwrap().len(), 1, "what came once is not hot: {held}");

    let folder = tempfile::tempdir()?;
    let file = folder.path().join("ids.json");
    std::fs::write(&file, serde_json::to_string(&[shared, prompt(50, 99)].concat())?)?;
    let file = file.display().to_string();
    let found = json(&cluster, &["cache", "lookup", "--token-ids", &file]).await?;
    assert_eq!(found["prompt_tokens"], 370);
    let decode = found["matches"].as_array().unwrap().iter().find(|row| row["node"] == "decode-0").unwrap();
    assert_eq!((&decode["tokens"], &decode["role"]), (&320.into(), &"decode".into()), "{found}");

    assert_eq!(json(&cluster, &["cache", "clear", "decode-0"]).await?["nodes"], serde_json::json!(["decode-0"]));
    let one = until(&cluster, &["cache"], |status| status["nodes"][2]["blocks_cached"] == 0).await?;
    assert!(cached(&one) > 0, "the prefill nodes keep theirs: {one}");
    let all = json(&cluster, &["cache", "clear"]).await?;
    assert_eq!(all["nodes"].as_array().unwrap().len(), 3);
    let empty = |status: &Value| {
        let nodes = status["nodes"].as_array().unwrap().iter();
        nodes.clone().all(|node| node["blocks_cached"] == 0 && node["indexed_blocks"] == 0)
    };
    until(&cluster, &["cache"], empty).await?;
    let found = json(&cluster, &["cache", "lookup", "--token-ids", &file]).await?;
    assert_eq!(found["matches"], serde_json::json!([]));
    let unknown = baton(&cluster, &["cache", "clear", "prefill-9"]).await?;
    assert_eq!(unknown.status.code(), Some(2), "{}", String::from_utf8_lossy(&unknown.stderr));
    // What is not cached is computed again, and the nodes account for every block.
    let again = cluster.ask(Ask::tokens(prompt(320, 1)).max_tokens(3)).await?;
    assert_eq!(again.cached_tokens(), 0);
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

/// The lines that the conductor's log has of requests.
fn request_lines(cluster: &Cluster) -> anyhow::Result<Vec<String>> {
    let log = std::fs::read_to_string(cluster.folder().join("conductor.log"))?;
    Ok(log.lines().filter(|line| line.contains("request ended")).map(str::to_owned).collect())
}
