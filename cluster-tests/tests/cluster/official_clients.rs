//! The official clients of OpenAI and Anthropic, gRPC's for Python and Schemathesis, as they are:
//! the scripts of `clients/`.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{Builder, Cluster, binary, model};
use tokio::process::Command;

/// Longest run of a script. The 10,000 requests of Schemathesis take two minutes on a slow machine.
const LIMIT: Duration = Duration::from_secs(240);

fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}

/// A cluster with a model and the chat template of a family.
fn family(model: &Path, name: &str) -> Builder {
    let template = clients().join("templates").join(format!("{name}.jinja"));
    Cluster::model(model).conductor_flags(&["--chat-template", &template.display().to_string()])
}

/// Runs a script to its end; what it prints is the test's output.
async fn python(script: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let python = std::env::var_os("BATON_PYTHON").context("BATON_PYTHON names a Python (make test sets it)")?;
    let mut command = Command::new(python);
    command.arg(clients().join(script)).args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("no_proxy", "127.0.0.1");
    let status = tokio::time::timeout(LIMIT, command.status()).await;
    let status = status.with_context(|| format!("{script} did not end"))??;
    anyhow::ensure!(status.success(), "{script}: {status}");
    Ok(())
}

/// Runs a script of which the cluster's HTTP address is the first argument.
async fn run(script: &str, cluster: &Cluster, options: &[&str]) -> anyhow::Result<()> {
    let address = cluster.conductor.ready.http.as_deref().context("no HTTP port")?;
    python(script, &[&[address], options].concat()).await
}

async fn api(script: &str) -> anyhow::Result<()> {
    let cluster = family(&model(), "hermes2").start().await?;
    run(script, &cluster, &[]).await?;
    cluster.stop().await
}

async fn conversations(name: &str, options: &[&str]) -> anyhow::Result<()> {
    let cluster = family(&model(), name).start().await?;
    run("families.py", &cluster, options).await?;
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn openai_client_chat_completions_work() -> anyhow::Result<()> {
    api("openai_chat.py").await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn openai_client_completions_work() -> anyhow::Result<()> {
    api("openai_completions.py").await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn openai_client_responses_work() -> anyhow::Result<()> {
    api("openai_responses.py").await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn anthropic_client_messages_work() -> anyhow::Result<()> {
    api("anthropic_messages.py").await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn grpc_client_generate_works() -> anyhow::Result<()> {
    let cluster = family(&model(), "hermes2").start().await?;
    run("grpc_generate.py", &cluster, &[&cluster.conductor.ready.grpc]).await?;
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn official_protoc_accepts_every_file() -> anyhow::Result<()> {
    python("protoc.py", &[]).await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn python_operator_example_lists_explains_and_drains() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    run("grpc_cluster.py", &cluster, &[&cluster.conductor.ready.grpc]).await?;
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn python_examples_use_next_conductor_if_first_is_unreachable() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let ready = &cluster.conductor.ready;
    let http = ready.http.as_deref().context("no HTTP port")?;
    for (example, flag, address) in [("generate.py", "--conductor", &*ready.grpc), ("openai_chat.py", "--http", http)] {
        let example = Path::new("../../examples/python").join(example);
        // Nothing listens at port 1.
        python(&example.to_string_lossy(), &[flag, &format!("127.0.0.1:1,{address}"), "Hi"]).await?;
    }
    cluster.stop().await
}

#[tokio::test]
async fn rust_example_streams_an_answer() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let mut example = Command::new(binary("examples/generate")?);
    let output = example.arg("Hi").env("BATON_CONDUCTOR", &cluster.conductor.ready.grpc).output().await?;
    assert!(output.status.success() && !output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn http_answers_match_the_openapi_document() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    run("openapi.py", &cluster, &[]).await?;
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn official_clients_retry_an_overloaded_conductor() -> anyhow::Result<()> {
    let cluster = Cluster::mock().conductor_flags(&["--max-requests", "1"]).start().await?;
    run("busy.py", &cluster, &[]).await?;
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn llama3_template_tool_calls_round_trip_through_clients() -> anyhow::Result<()> {
    conversations("llama3", &[]).await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn hermes2_template_tool_calls_round_trip_through_clients() -> anyhow::Result<()> {
    conversations("hermes2", &[]).await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn qwen25_template_tool_calls_round_trip_through_clients() -> anyhow::Result<()> {
    conversations("qwen25", &[]).await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn qwen3_template_tool_calls_round_trip_through_clients() -> anyhow::Result<()> {
    conversations("qwen3", &["--thinks"]).await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn mistral_template_tool_calls_round_trip_through_clients() -> anyhow::Result<()> {
    conversations("mistral", &[]).await
}

#[tokio::test]
#[ignore = "needs the official clients: scripts/python-clients.sh"]
async fn mistral_args_template_tool_calls_round_trip_through_clients() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let special = folder.path().join("special-marks.gguf");
    python("special_marks.py", &[&model().display().to_string(), &special.display().to_string()]).await?;
    let cluster = family(&special, "mistral_args").start().await?;
    run("families.py", &cluster, &["--untrained-marks"]).await?;
    cluster.stop().await
}
