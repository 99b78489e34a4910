//! Several answers to one prompt.

use std::time::Duration;

use baton_cluster_tests::{Answer, Ask, Cluster, model};
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::structured_output::Form;

const SECOND: Duration = Duration::from_secs(1);

fn texts(answers: &[Answer]) -> Vec<&str> {
    answers.iter().map(|answer| answer.text.as_str()).collect()
}

/// Line 6 of what several answers have to show.
#[tokio::test]
async fn request_with_n_answers_computes_its_prompt_once() -> anyhow::Result<()> {
    let cluster = Cluster::model(&model()).prefill(2).decode(2).start().await?;
    let words: Vec<_> = (0..).map(|n| format!("word{n}")).take(500).collect();
    let ask = |salt: &str| {
        let mut prompt = format!("{salt} {}", words.join(" "));
        prompt.truncate(3180);
        Ask::text(&prompt).max_tokens(24).seeded(7, 0.9)
    };
    let computed = async || {
        let mut rows = 0.0;
        for node in &cluster.prefill {
            rows += node.metric("baton_node_step_tokens_total").await?;
        }
        for node in &cluster.decode {
            rows += node.metric("baton_decode_partial_prefill_tokens_total").await?;
        }
        anyhow::Ok(rows)
    };
    let before = computed().await?;
    let answers = cluster.answers(ask("a").n(4)).await?;
    let tokens = answers[0].prompt_token_ids.len();
    let rows = computed().await? - before;
    println!(
        "{tokens} tokens of prompt, {rows} computed, cached: {:?}",
        answers.iter().map(Answer::cached_tokens).collect::<Vec<_>>()
    );
    assert!(tokens >= 1500 && rows as usize <= tokens + 3 * 16, "{rows} of {tokens}");
    let pair = |answer: &Answer| (answer.finished.prefill_node.clone(), answer.finished.decode_node.clone());
    assert!(answers.iter().all(|answer| pair(answer) == pair(&answers[0])), "all at the same nodes");
    cluster.wait_idle(SECOND).await?;

    // As four requests of their own, whatever is cached by now.
    let mut alone = Vec::new();
    for seed in 7..11 {
        alone.push(cluster.ask(ask("a").seeded(seed, 0.9)).await?);
    }
    assert_eq!(texts(&answers), texts(&alone));
    assert!(texts(&answers).iter().any(|text| *text != answers[0].text), "they differ");
    cluster.stop().await
}

#[tokio::test]
async fn n_answers_survive_decode_node_death_and_abort_together() -> anyhow::Result<()> {
    let mut cluster = Cluster::mock().prefill(1).decode(2).decode_flags(&["--mock-token-us", "3000"]).start().await?;
    let ask = || Ask::text("a prompt").max_tokens(60).ignore_eos().seeded(1, 1.0);
    let expected = cluster.answers(ask().n(3)).await?;
    let mut stream = cluster.inference().generate(ask().n(3).0).await?.into_inner();
    let mut tokens = vec![Vec::new(); 3];
    let mut killed = false;
    let mut finished = 0;
    while let Some(response) = stream.message().await? {
        match response.event {
            Some(Event::Delta(delta)) => tokens[response.completion as usize].extend(delta.token_ids),
            Some(Event::Finished(_)) => finished += 1,
            _ => {}
        }
        if !killed && tokens.iter().all(|tokens| tokens.len() > 10) {
            let nodes = cluster.nodes().await?;
            let busy = nodes.iter().filter(|node| node.placed == 3).filter_map(|node| Some(&node.info.as_ref()?.name));
            let busy = busy.clone().find(|name| name.starts_with("decode")).expect("one decode node has all").clone();
            cluster.decode.remove(usize::from(busy == "decode-1")).kill().await?;
            killed = true;
        }
    }
    assert_eq!((killed, finished), (true, 3));
    let whole: Vec<_> = expected.iter().map(|answer| answer.token_ids.clone()).collect();
    assert_eq!(tokens, whole, "nothing lost, repeated or changed");

    // One that is aborted ends all.
    let mut stream = cluster.inference().generate(ask().max_tokens(5000).n(3).0).await?.into_inner();
    let accepted = stream.message().await?.and_then(|response| response.event);
    let Some(Event::Accepted(accepted)) = accepted else { panic!("{accepted:?}") };
    let request_id = accepted.request_id;
    cluster.inference().abort(v1::AbortRequest { request_id }).await?;
    let status = loop {
        match stream.message().await {
            Ok(message) => assert!(message.is_some(), "it ended as if it was whole"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), tonic::Code::Cancelled);
    cluster
        .wait_for("no request", SECOND * 5, || async {
            Ok(cluster.http("/ready", None).await?.1.contains("\"requests\":0"))
        })
        .await?;
    cluster.stop().await
}

/// Nor do they wait for each other if there is room, whatever they may take at most.
#[tokio::test]
async fn n_answers_on_an_idle_cluster_do_not_wait_for_each_other() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let choices = v1::Choices { texts: vec!["yes".into(), "no".into()] };
    // Eight times 20,000 tokens are more than a node has room for.
    let ask = Ask::text("a prompt").max_tokens(20_000).form(Form::Choices(choices)).n(8);
    let began = std::time::Instant::now();
    assert_eq!(cluster.answers(ask).await?.len(), 8);
    assert!(began.elapsed() < 4 * SECOND, "{:?}", began.elapsed());
    cluster.stop().await
}

/// A request for many answers takes what others leave.
#[tokio::test]
async fn many_n_answers_do_not_starve_other_requests() -> anyhow::Result<()> {
    let cluster = Cluster::mock().prefill(1).decode(1).decode_flags(&["--mock-token-us", "500"]).start().await?;
    let ask = |n| Ask::text("a prompt").max_tokens(60).ignore_eos().n(n);
    let alone = gap(&cluster, ask(1)).await?;
    let mut streams = Vec::new();
    for _ in 0..3 {
        let mut stream = cluster.inference().generate(ask(64).0).await?.into_inner();
        streams.push(tokio::spawn(async move {
            let mut finished = 0;
            while let Some(response) = stream.message().await? {
                finished += usize::from(matches!(response.event, Some(Event::Finished(_))));
            }
            anyhow::Ok(finished)
        }));
    }
    cluster
        .wait_for("a batch that is full but for what is left to others", SECOND * 10, || async {
            Ok(cluster.nodes().await?.iter().any(|node| node.placed >= 48))
        })
        .await?;
    let mut gaps = Vec::new();
    for _ in 0..5 {
        gaps.push(gap(&cluster, ask(1)).await?);
    }
    println!("longest gap of a neighbour: {gaps:?}, alone {alone:?}");
    assert!(gaps.iter().all(|gap| *gap < SECOND), "{gaps:?}");
    for stream in streams {
        assert_eq!(stream.await??, 64);
    }
    cluster.stop().await
}

/// The longest time between two tokens of an answer.
async fn gap(cluster: &Cluster, ask: Ask) -> anyhow::Result<Duration> {
    let mut stream = cluster.inference().generate(ask.0).await?.into_inner();
    let mut longest = Duration::ZERO;
    let mut last = None;
    while let Some(response) = stream.message().await? {
        if matches!(response.event, Some(Event::Delta(_))) {
            let now = std::time::Instant::now();
            longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
            last = Some(now);
        }
    }
    Ok(longest)
}

#[tokio::test]
async fn n_answers_are_admitted_all_or_none() -> anyhow::Result<()> {
    let cluster = Cluster::mock().conductor_flags(&["--max-requests", "4"]).start().await?;
    let long = Ask::text("y").max_tokens(3000).ignore_eos();
    let mut running = cluster.inference().generate(long.0).await?.into_inner();
    running.message().await?;
    let (code, message) = cluster.refused(Ask::text("x").max_tokens(4).n(4)).await;
    assert_eq!(code, tonic::Code::ResourceExhausted, "{message}");
    drop(running);
    cluster.wait_idle(Duration::from_secs(5)).await?;
    assert_eq!(cluster.answers(Ask::text("x").max_tokens(4).n(4)).await?.len(), 4);
    let refused = cluster.refused(Ask::text("x").n(5)).await;
    assert_eq!(
        refused,
        (tonic::Code::InvalidArgument, "n: 5, but at most 4 answers are given".into()),
        "there never is"
    );
    // One token each: there is no decode node to wait for.
    assert_eq!(cluster.answers(Ask::text("x").max_tokens(1).n(3)).await?.len(), 3);
    cluster.stop().await
}
