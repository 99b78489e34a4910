//! Clients that send too much, too slowly or nothing, that do not read, and where they may call
//! what.

use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster};
use baton_proto::v1;
use bytes::BufMut;
use futures::stream::{self, StreamExt, TryStreamExt};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tonic::Code;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Channel, Endpoint};

const SECOND: Duration = Duration::from_secs(1);
/// Longer than any answer here takes.
const LATE: Duration = Duration::from_secs(30);

fn http(cluster: &Cluster) -> &str {
    cluster.conductor.ready.http.as_deref().unwrap()
}

fn post(length: usize, body: &str) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

async fn send(address: &str, request: &str) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    Ok(stream)
}

/// What comes until the connection ends.
async fn rest(stream: &mut TcpStream) -> anyhow::Result<String> {
    let mut answer = Vec::new();
    // Some connections end with a reset.
    let _ = tokio::time::timeout(LATE, stream.read_to_end(&mut answer)).await.context("it does not end")?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

async fn ask(address: &str, request: &str) -> anyhow::Result<String> {
    rest(&mut send(address, request).await?).await
}

async fn ask_small(cluster: &Cluster) -> anyhow::Result<()> {
    let body = json!({"prompt": "x".repeat(3000), "max_tokens": 1}).to_string();
    let answer = ask(http(cluster), &post(body.len(), &body)).await?;
    anyhow::ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(())
}

pub async fn channel(address: &str) -> anyhow::Result<Channel> {
    Ok(Endpoint::from_shared(format!("http://{address}"))?.connect().await?)
}

#[tokio::test]
async fn silent_connections_and_stalled_bodies_are_closed() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let mut silent = send(http(&cluster), "").await?;
    let mut grpc = send(&cluster.conductor.ready.grpc, "").await?;
    let mut half = send(http(&cluster), &post(100, r#"{"prompt":"#)).await?;
    let (silent, _, half) = tokio::try_join!(rest(&mut silent), rest(&mut grpc), rest(&mut half))?;
    assert_eq!(silent, "");
    assert!(half.starts_with("HTTP/1.1 408") && half.contains("invalid_request_error"), "{half}");
    ask_small(&cluster).await?;
    cluster.stop().await
}

#[tokio::test]
async fn idle_connections_over_limit_do_not_block_new_clients() -> anyhow::Result<()> {
    let cluster = Cluster::mock().conductor_flags(&["--max-connections", "8"]).start().await?;
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(http(&cluster)).await?);
    }
    ask_small(&cluster).await?;
    assert_eq!(rest(&mut silent[0]).await?, "");
    cluster.stop().await
}

#[tokio::test]
async fn idle_connections_leave_file_descriptors_for_requests() -> anyhow::Result<()> {
    let cluster = Cluster::mock().descriptors(256).start().await?;
    let mut silent = Vec::new();
    for _ in 0..240 {
        silent.push(TcpStream::connect(http(&cluster)).await?);
    }
    for _ in 0..20 {
        tokio::time::timeout(SECOND, ask_small(&cluster)).await.context("a small prompt beside them")??;
    }
    cluster.stop().await
}

#[tokio::test]
async fn request_bodies_share_a_budget_that_recovers() -> anyhow::Result<()> {
    let cluster = Cluster::mock().conductor_flags(&["--max-body-bytes-total", "400000"]).start().await?;
    let large = json!({"prompt": "x".repeat(25_000), "max_tokens": 1}).to_string();
    let large = post(large.len(), &large);
    let half = send(http(&cluster), &post(250_500, &" ".repeat(250_000))).await?;
    // All of it has to be there: if the two grow at once, either may be refused.
    tokio::time::sleep(SECOND).await;
    let refused = async || Ok(ask(http(&cluster), &large).await?.starts_with("HTTP/1.1 429"));
    cluster.wait_for("refusal", 5 * SECOND, refused).await?;
    let answer = ask(http(&cluster), &large).await?;
    assert!(answer.contains("retry-after: 1") && answer.contains("\"type\":\"overloaded\""), "{answer}");
    ask_small(&cluster).await?;
    drop(half);
    let served = async || Ok(ask(http(&cluster), &large).await?.starts_with("HTTP/1.1 200"));
    cluster.wait_for("recovery", 5 * SECOND, served).await?;
    cluster.stop().await
}

/// Sends bytes as a message.
#[derive(Default)]
pub struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = tonic::Status;

    fn encode(&mut self, item: Vec<u8>, dst: &mut EncodeBuf<'_>) -> Result<(), tonic::Status> {
        dst.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = ();
    type Error = tonic::Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<()>, tonic::Status> {
        Ok(Some(()))
    }
}

/// A field of a message that has a message or a text, encoded; numbers up to 15.
pub fn field(number: u8, payload: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut length = payload.len();
    while length > 0x7f {
        field.push(length as u8 | 0x80);
        length >>= 7;
    }
    field.push(length as u8);
    field.extend(payload);
    field
}

/// A request whose conversation has so many empty messages.
fn empty_messages(count: usize) -> Vec<u8> {
    field(3, &field(1, &[]).repeat(count))
}

#[tokio::test]
async fn conductor_memory_is_bounded_under_large_bodies() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let body = format!("{{\"prompt\": [1{}]}}", ",1".repeat((32 << 20) - 10));
    let request = post(body.len(), &body);
    let posts = futures::future::join_all((0..16).map(|_| ask(http(&cluster), &request)));
    let small = async {
        for _ in 0..10 {
            ask_small(&cluster).await?;
            tokio::time::sleep(SECOND / 50).await;
        }
        anyhow::Ok(())
    };
    let (answers, small) = tokio::join!(posts, small);
    small.context("a small prompt beside them")?;
    for answer in answers {
        let answer = answer?;
        let refused = ["HTTP/1.1 429", "HTTP/1.1 413", "HTTP/1.1 400"].iter().any(|status| answer.starts_with(status));
        assert!(refused, "{answer:?}");
    }

    let letters = json!({"prompt": "a".repeat((8 << 20) - 1), "max_tokens": 1}).to_string();
    let answer = tokio::time::timeout(SECOND, ask(http(&cluster), &post(letters.len(), &letters))).await??;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");

    let mut client = tonic::client::Grpc::new(channel(&cluster.conductor.ready.grpc).await?);
    for count in [16_000_000, 65_537] {
        client.ready().await?;
        let path = "/baton.v1.Inference/Generate".parse()?;
        let request = tonic::Request::new(empty_messages(count));
        let refused = client.server_streaming(request, path, Raw).await.map(drop).unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "messages: more than 65536 entries"));
    }
    let peak = cluster.conductor.peak_bytes()?;
    assert!(peak < 1 << 30, "{} MiB", peak >> 20);
    cluster.stop().await
}

#[tokio::test]
async fn stream_of_client_that_does_not_read_is_cut_off() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("conductor.toml");
    std::fs::write(&config, "stall_timeout_s = 1.0")?;
    let flags = ["--config", config.to_str().context("path")?];
    let cluster = Cluster::mock().conductor_flags(&flags).node_flags(&["--mock-base-us", "100"]).start().await?;

    let body =
        json!({"prompt": "x", "max_tokens": 20_000, "stream": true, "logprobs": 20, "ignore_eos": true}).to_string();
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4096)?;
    let mut slow = socket.connect(http(&cluster).parse()?).await?;
    slow.write_all(post(body.len(), &body).as_bytes()).await?;
    let request = Ask::text("x").max_tokens(20_000).ignore_eos().sampling(|sampling| sampling.logprobs = Some(20));
    let mut stream = cluster.inference().generate(request.0).await?.into_inner();
    stream.message().await?;

    let ended = async || {
        let conductor = &cluster.conductor;
        let running = conductor.metric("baton_conductor_requests_running").await?;
        Ok(running + conductor.metric("baton_conductor_requests_waiting").await? == 0.0)
    };
    cluster.wait_for("end of both requests", LATE, ended).await?;
    cluster.wait_idle(5 * SECOND).await?;
    let answer = rest(&mut slow).await?;
    assert!(answer.starts_with("HTTP/1.1 200") && !answer.contains("[DONE]"), "it is cut off");
    let end = loop {
        match stream.message().await {
            Ok(Some(response)) => {
                assert!(!matches!(response.event, Some(v1::generate_response::Event::Finished(_))), "it is cut off");
            }
            end => break end,
        }
    };
    assert_eq!(end.unwrap_err().code(), Code::DeadlineExceeded);
    cluster.stop().await
}

#[tokio::test]
async fn operator_and_node_ports_serve_only_their_own_apis() -> anyhow::Result<()> {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

    let flags = ["--operators", "127.0.0.1:0", "--nodes", "127.0.0.1:0"];
    let cluster = Cluster::mock().conductor_flags(&flags).start().await?;
    let ready = cluster.conductor.ready.clone();
    let operators = ready.operators.context("no operators' port")?;
    let clients = channel(&ready.grpc).await?;
    let of_operators = channel(&operators).await?;
    let of_nodes = channel(&ready.nodes.context("no nodes' port")?).await?;

    let list = async |channel: &Channel| {
        let mut client = v1::cluster_client::ClusterClient::new(channel.clone());
        client.list_nodes(v1::ListNodesRequest {}).await.map(|nodes| nodes.into_inner().nodes.len())
    };
    let register = async |channel: &Channel| {
        let mut client = v1::node_registration_client::NodeRegistrationClient::new(channel.clone());
        client.register(v1::RegisterRequest::default()).await.unwrap_err()
    };
    let models = async |channel: &Channel| {
        let mut client = v1::inference_client::InferenceClient::new(channel.clone());
        client.list_models(v1::ListModelsRequest {}).await.map(drop).map_err(|status| status.code())
    };
    let reflection = async |channel: &Channel| {
        let list = MessageRequest::ListServices(String::new());
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
        let mut client = ServerReflectionClient::new(channel.clone());
        let answer = client.server_reflection_info(tokio_stream::once(request)).await;
        answer.map(drop).map_err(|status| status.code())
    };
    assert_eq!(list(&of_operators).await?, 2);
    for others in [&clients, &of_nodes] {
        assert_eq!(list(others).await.unwrap_err().code(), Code::Unimplemented);
        assert_eq!(reflection(others).await, Err(Code::Unimplemented));
    }
    assert_eq!(reflection(&of_operators).await, Ok(()));
    assert_eq!(register(&of_nodes).await.code(), Code::InvalidArgument, "it is there");
    for others in [&clients, &of_operators] {
        let refused = register(others).await;
        let told = "this port does not serve /baton.v1.NodeRegistration/Register; operators and nodes may have ports of their own";
        assert_eq!((refused.code(), refused.message()), (Code::Unimplemented, told));
    }
    assert_eq!(models(&clients).await, Ok(()));
    for others in [&of_operators, &of_nodes] {
        assert_eq!(models(others).await, Err(Code::Unimplemented));
    }

    let fetch = async |address: &str, path: &str| {
        let answer =
            ask(address, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).await?;
        anyhow::Ok((answer[9..12].to_owned(), answer))
    };
    for (path, clients, of_operators) in
        [("/metrics", "404", "200"), ("/health", "200", "200"), ("/ready", "200", "200"), ("/v1/models", "200", "404")]
    {
        assert_eq!(fetch(http(&cluster), path).await?.0, clients, "{path}");
        assert_eq!(fetch(&operators, path).await?.0, of_operators, "{path}");
    }
    for foreign in ["host: evil.example", "host: localhost\r\norigin: https://evil.example"] {
        for (address, path) in [(&*operators, "/metrics"), (http(&cluster), "/ready")] {
            let asked = format!("GET {path} HTTP/1.1\r\n{foreign}\r\nconnection: close\r\n\r\n");
            let answer = ask(address, &asked).await?;
            assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
        }
    }
    let drained = "POST /baton.v1.Cluster/Drain HTTP/1.1\r\nhost: localhost\r\norigin: null\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\n\0\0\0\0\0";
    let answer = ask(&operators, drained).await?;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("no web page may call this port"), "{answer}");
    assert!(fetch(&operators, "/ready").await?.1.contains("\"decode_nodes\":1"));
    assert!(fetch(http(&cluster), "/ready").await?.1.ends_with("{\"status\":\"ready\"}"));

    let answer = cluster.ask(Ask::text("hi").max_tokens(3)).await?;
    assert_eq!((answer.finished.prefill_node.as_str(), answer.finished.decode_node.as_str()), ("", ""));
    cluster.stop().await
}

#[tokio::test]
async fn web_pages_call_only_if_named_and_only_with_json() -> anyhow::Result<()> {
    let cluster = Cluster::mock().conductor_flags(&["--cors-origins", "https://a.example"]).start().await?;
    let preflight = |origin: &str| {
        format!(
            "OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\norigin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n\r\n"
        )
    };
    let answer = ask(http(&cluster), &preflight("https://a.example")).await?;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for header in ["allow-origin: https://a.example", "allow-headers: authorization", "allow-methods: GET,POST"] {
        assert!(answer.contains(&format!("access-control-{header}")), "{header}: {answer}");
    }
    let answer = ask(http(&cluster), &preflight("https://b.example")).await?;
    assert!(answer.starts_with("HTTP/1.1 403") && !answer.contains("allow-origin"), "{answer}");
    let models = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\norigin: https://a.example\r\n\r\n";
    let answer = ask(http(&cluster), models).await?;
    assert!(answer.contains("access-control-expose-headers: x-request-id,request-id,retry-after"), "{answer}");

    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let right = post(body.len(), &body);
    let json = "content-type: application/json\r\n";
    let with = |headers: &str| right.replace(json, &format!("{json}{headers}\r\n"));
    let named = |host: &str| right.replace("host: localhost", &format!("host: {host}"));
    let requests = [
        (right.replace(json, ""), "415"),
        (right.replace(json, "content-type: text/plain\r\n"), "415"),
        (right.replace(json, "content-type: application/x-www-form-urlencoded\r\n"), "415"),
        (right.replace(json, "origin: https://b.example\r\n"), "403"),
        (with("origin: https://b.example"), "403"),
        (named("evil.example"), "403"),
        (named("127.0.0.1.evil.example:80"), "403"),
        (right.replace("json\r\n", "json; charset=utf-8\r\n"), "200"),
        (with("origin: https://a.example"), "200"),
        (named("[::1]:80"), "200"),
        (named("a.example"), "200"),
    ];
    for (request, status) in requests {
        let answer = ask(http(&cluster), &request).await?;
        assert_eq!(&answer[9..12], status, "{request}: {answer}");
    }
    let node = cluster.prefill[0].ready.http.as_deref().context("it has an HTTP port")?;
    for foreign in ["host: evil.example", "host: localhost\r\norigin: https://a.example"] {
        let asked = format!("GET /metrics HTTP/1.1\r\n{foreign}\r\nconnection: close\r\n\r\n");
        assert!(ask(node, &asked).await?.starts_with("HTTP/1.1 403"), "{foreign}");
    }
    cluster.stop().await
}

/// The last of what may be asked is a figure, so it is printed, too.
#[tokio::test]
#[ignore = "takes a minute and 20,000 descriptors: make test-long"]
async fn ten_thousand_idle_streams_take_little_memory() -> anyhow::Result<()> {
    const STREAMS: u64 = 10_000;
    // A decode step takes minutes: all but the first tokens are waited for.
    let nodes =
        ["--mock-token-us", "100000", "--max-running", "6000", "--max-waiting", "6000", "--cache-blocks", "200000"];
    let cluster = Cluster::mock()
        .conductor_flags(&["--max-wait-ms", "off"])
        .prefill_flags(&["--max-waiting", "6000"])
        .decode(2)
        .decode_flags(&nodes)
        .start()
        .await?;
    let before = cluster.conductor.resident_bytes()?;
    let body = json!({"prompt": "hello there", "max_tokens": 200, "ignore_eos": true, "stream": true}).to_string();
    let request = post(body.len(), &body);
    let open = async |_| {
        let mut stream = send(http(&cluster), &request).await?;
        let mut first = [0; 4096];
        let read = tokio::time::timeout(LATE, stream.read(&mut first)).await??;
        let said = String::from_utf8_lossy(&first[..read]).into_owned();
        anyhow::ensure!(said.starts_with("HTTP/1.1 200"), "{said}");
        Ok(stream)
    };
    let streams: Vec<_> = stream::iter(0..STREAMS).map(open).buffer_unordered(32).try_collect().await?;
    tokio::time::sleep(5 * SECOND).await;
    let each = (cluster.conductor.resident_bytes()? - before) / STREAMS;
    println!("{} KiB for each of {STREAMS} idle streams", each >> 10);
    assert!(each < 50 << 10, "{each} bytes");
    // It cannot be stopped in order: its steps take minutes.
    drop((streams, cluster));
    Ok(())
}
