//! Clients that ask again, with the same idempotency key.

use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, Etcd, model};
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use crate::leaders::{LIMIT, channel, conductor};

fn keyed(ask: Ask) -> v1::GenerateRequest {
    v1::GenerateRequest { idempotency_key: "order 7".into(), ..ask.0 }
}

/// Reads until it has so many tokens, or all that come.
async fn tokens(stream: &mut Streaming<v1::GenerateResponse>, most: usize) -> anyhow::Result<Vec<u32>> {
    let mut tokens = Vec::new();
    while tokens.len() < most
        && let Some(message) = stream.message().await?
    {
        if let Some(Event::Delta(delta)) = message.event {
            tokens.extend(delta.token_ids);
        }
    }
    Ok(tokens)
}

#[tokio::test]
async fn request_with_repeated_idempotency_key_is_served_once() -> anyhow::Result<()> {
    let cluster = Cluster::mock().node_flags(&["--mock-base-us", "10000"]).start().await?;
    let ask = keyed(Ask::text("once upon a time").max_tokens(100).ignore_eos());
    let mut first = cluster.inference().generate(ask.clone()).await?.into_inner();
    let head = tokens(&mut first, 30).await?;
    let other = v1::GenerateRequest { n: 2, ..ask.clone() };
    let refused = cluster.inference().generate(other).await.err().context("it is refused")?;
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
    drop(first);
    let mut second = cluster.inference().generate(ask).await?.into_inner();
    let all = tokens(&mut second, usize::MAX).await?;
    assert!(all.len() == 100 && all.starts_with(&head));
    assert_eq!(cluster.conductor.metric("baton_conductor_requests_attached_total").await?, 1.0);
    let served: f64 = cluster.conductor.metric("baton_conductor_generation_tokens_total").await?;
    assert_eq!(served, 100.0, "its tokens were computed once");
    cluster.stop().await
}

/// Nothing is drawn anew: the seed follows from the key.
#[tokio::test]
#[ignore = "needs BATON_MODEL and etcd"]
async fn etcd_keyed_stream_gets_same_tokens_from_another_conductor() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let path = model();
    let engine = ["--model", path.to_str().context("the model's path")?];
    let first = conductor(&etcd, &engine, folder.path(), "first").await?;
    let second = conductor(&etcd, &engine, folder.path(), "second").await?;
    let both = format!("{},{}", first.ready.grpc, second.ready.grpc);
    let builder = Cluster::model(&path);
    let _nodes = [
        builder.start_node("prefill", 0, &both, folder.path()).await?,
        builder.start_node("decode", 0, &both, folder.path()).await?,
    ];
    let drawn = |sampling: &mut v1::SamplingParameters| sampling.temperature = Some(1.0);
    let story = format!("Tell me a story about {} and the moon.", "a fox, a hen, ".repeat(20));
    let ask = keyed(Ask::user(&story).max_tokens(200).ignore_eos().sampling(drawn));
    let answered = async |channel: Channel| loop {
        // Not all nodes are there at first.
        match v1::inference_client::InferenceClient::new(channel.clone()).generate(ask.clone()).await {
            Ok(stream) => return stream.into_inner(),
            Err(_) => baton_runtime::sleep(Duration::from_millis(50)).await,
        }
    };
    let mut stream = tokio::time::timeout(LIMIT, answered(channel(&first).await?)).await?;
    let began = baton_runtime::now();
    let head = tokens(&mut stream, 100).await?;
    let took = began.elapsed();
    first.kill().await?;
    assert!(tokens(&mut stream, 200).await.is_err(), "it ends with its conductor");
    let began = baton_runtime::now();
    let mut stream = tokio::time::timeout(LIMIT, answered(channel(&second).await?)).await?;
    let again = tokens(&mut stream, 100).await?;
    println!(
        "100 tokens took {:.2} s; asked for at another conductor, after the first one died, {:.2} s",
        took.as_secs_f64(),
        began.elapsed().as_secs_f64()
    );
    assert_eq!(again, head);
    assert_eq!(tokens(&mut stream, 200).await?.len(), 100, "it goes on to its end");
    Ok(())
}
