//! Nonsense in, one clear error out, and the cluster goes on serving.

use std::path::Path;
use std::process::{Output, Stdio};

use baton_cluster_tests::{Ask, Cluster, binary, model};
use tempfile::TempDir;
use tokio::process::Command;

/// Runs a binary of the workspace to its end.
async fn run(name: &str, arguments: &[&str], stdin: Option<&[u8]>) -> anyhow::Result<Output> {
    use tokio::io::AsyncWriteExt;
    let mut command = Command::new(binary(name)?);
    for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("BATON_")) {
        command.env_remove(key);
    }
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn()?;
    let mut pipe = child.stdin.take().expect("piped");
    if let Some(bytes) = stdin {
        // A process that refuses early closes its end.
        let _ = pipe.write_all(bytes).await;
    }
    drop(pipe);
    Ok(tokio::time::timeout(std::time::Duration::from_secs(60), child.wait_with_output()).await??)
}

fn error_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// One failed `baton generate`: its status is not 0, its error is one line and names what is wrong.
async fn refused(cluster: &Cluster, arguments: &[&str], stdin: Option<&[u8]>, names: &str) -> anyhow::Result<()> {
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let mut all = vec!["--conductor", &conductor, "generate"];
    all.extend(arguments);
    let output = run("baton", &all, stdin).await?;
    let error = error_of(&output);
    anyhow::ensure!(!output.status.success(), "{arguments:?} was served: {}", String::from_utf8_lossy(&output.stdout));
    anyhow::ensure!(error.to_lowercase().contains(names), "{arguments:?}: '{error}' does not name {names}");
    anyhow::ensure!(!error.contains("panicked"), "{arguments:?}: {error}");
    Ok(())
}

fn write(folder: &TempDir, name: &str, bytes: &[u8]) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

#[tokio::test]
async fn invalid_requests_are_refused_by_field_and_cluster_still_serves() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let files = tempfile::tempdir()?;
    let huge = write(&files, "huge", &vec![b'a'; 20 << 20]);
    let broken = write(&files, "broken", b"caf\xe9 \xff\xfe");
    let beyond = write(&files, "beyond", b"[1, 2, 512]");
    let long = write(&files, "long", format!("[{}]", vec!["33"; 40_000].join(",")).as_bytes());
    let not_json = write(&files, "not.json", b"[{\"role\": \"user\"");
    let empty = write(&files, "empty.json", b"[]");

    refused(&cluster, &["--raw", ""], None, "prompt").await?;
    refused(&cluster, &["--token-ids", &empty], None, "prompt").await?;
    refused(&cluster, &["--messages", &empty], None, "messages").await?;
    refused(&cluster, &["--token-ids", &long], None, "context").await?;
    refused(&cluster, &["--model", "gpt-7", "hi"], None, "gpt-7").await?;
    refused(&cluster, &["--temperature", "-1", "hi"], None, "temperature").await?;
    refused(&cluster, &["--temperature=-1", "hi"], None, "temperature").await?;
    refused(&cluster, &["--temperature", "NaN", "hi"], None, "temperature").await?;
    refused(&cluster, &["--top-p", "0", "hi"], None, "top").await?;
    refused(&cluster, &["--max-tokens", "0", "hi"], None, "max").await?;
    refused(&cluster, &["--token-ids", &beyond], None, "512").await?;
    refused(&cluster, &["--raw", "--prompt-file", &huge], None, "bytes").await?;
    refused(&cluster, &["--raw", "--prompt-file", &broken], None, "utf-8").await?;
    refused(&cluster, &["--raw", "--prompt-file", "-"], Some(b"\xff\xff"), "utf-8").await?;
    refused(&cluster, &["--prompt-file", "/no/such/file"], None, "/no/such/file").await?;
    refused(&cluster, &["--messages", &not_json], None, "messages: not json").await?;
    refused(&cluster, &["--stop", "", "hi"], None, "stop").await?;

    let (code, message) = cluster.refused(Ask::text(&"a".repeat(20 << 20))).await;
    assert_eq!(code, tonic::Code::InvalidArgument, "{message}");
    assert!(message.contains("bytes"), "{message}");

    let answer = cluster.ask(Ask::text("still here?").max_tokens(5)).await?;
    assert_eq!(answer.token_ids.len(), 5);
    cluster.wait_idle(std::time::Duration::from_secs(1)).await?;
    cluster.stop().await
}

/// A process that cannot start: a status that is not 0, and an error that names what is wrong.
async fn cannot_start(name: &str, arguments: &[&str], names: &str) -> anyhow::Result<()> {
    let output = run(name, arguments, None).await?;
    let error = error_of(&output);
    anyhow::ensure!(!output.status.success(), "{name} {arguments:?} started");
    anyhow::ensure!(error.contains(names), "{name} {arguments:?}: '{error}' does not name {names}");
    anyhow::ensure!(!error.contains("panicked"), "{name} {arguments:?}: {error}");
    Ok(())
}

#[tokio::test]
async fn invalid_settings_stop_the_start_and_are_named() -> anyhow::Result<()> {
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let files = tempfile::tempdir()?;
    let config = write(&files, "baton.toml", b"chunk_tokens = \"many\"\n");
    let unknown = write(&files, "unknown.toml", b"chunk_tokns = 5\n");
    let http = ["--http", "127.0.0.1:0"];

    cannot_start("baton-conductor", &["--engine", "mock", "--grpc", &address, http[0], http[1]], &address).await?;
    cannot_start("baton-conductor", &["--engine", "mock", "--grpc", "nonsense", http[0], http[1]], "grpc").await?;
    cannot_start("baton-conductor", &["--grpc", "127.0.0.1:0", http[0], http[1]], "model").await?;
    cannot_start(
        "baton-conductor",
        &["--engine", "warp", "--grpc", "127.0.0.1:0", http[0], http[1]],
        "--engine: 'warp'",
    )
    .await?;
    cannot_start(
        "baton-conductor",
        &["--model", "/no/such.gguf", "--grpc", "127.0.0.1:0", http[0], http[1]],
        "/no/such.gguf",
    )
    .await?;
    for node in ["baton-prefill", "baton-decode"] {
        cannot_start(
            node,
            &["--engine", "mock", "--listen", &address],
            &format!("--listen: cannot listen on '{address}'"),
        )
        .await?;
        cannot_start(node, &["--engine", "mock", "--transfer-listen", &address], &address).await?;
        cannot_start(node, &["--model", "/no/such.gguf"], "/no/such.gguf").await?;
        cannot_start(node, &["--engine", "mock", "--name", "two words"], "--name: ").await?;
        cannot_start(node, &["--engine", "mock", "--config", &config], "chunk_tokens").await?;
        cannot_start(node, &["--engine", "mock", "--config", &unknown], "chunk_tokns").await?;
        cannot_start(node, &["--engine", "mock", "--kv-dtype", "f8"], "--kv-dtype: 'f8': expected one of").await?;
        cannot_start(node, &["--engine", "mock", "--transport", "tpc"], "--transport: 'tpc': expected auto").await?;
        cannot_start(
            node,
            &["--engine", "mock", "--transfer-shm-folder", "/no/such/folder", "--transport", "shm"],
            "--transport: shm (socket folder /no/such/folder): ",
        )
        .await?;
        cannot_start(node, &["--engine", "mock", "--conductor", "not an address"], "--conductor: 'not an address'")
            .await?;
    }
    Ok(())
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn damaged_model_files_are_refused() -> anyhow::Result<()> {
    let model = model();
    let files = tempfile::tempdir()?;
    let whole = std::fs::read(&model)?;
    let truncated = write(&files, "truncated.gguf", &whole[..whole.len() / 2]);
    let mut header = whole[..1 << 20].to_vec();
    header[8..16].fill(0xff);
    let counts = write(&files, "counts.gguf", &header);
    let noise = write(&files, "noise.gguf", &vec![0x5a; 4096]);
    let lies = write(&files, "lies.safetensors", &[0xff; 64]);
    for file in [&truncated, &counts, &noise, &lies] {
        let name = Path::new(file).file_name().unwrap().to_str().unwrap();
        cannot_start("baton-prefill", &["--model", file], name).await?;
        cannot_start("baton-conductor", &["--model", file, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"], name)
            .await?;
    }
    Ok(())
}
