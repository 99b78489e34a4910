//! The SSD tier of nodes: more than their memory holds, and what a crash or a full disk does to it.

use std::path::Path;
use std::time::Duration;

use baton_cluster_tests::{Ask, Cluster, model};

const SECOND: Duration = Duration::from_secs(1);
const PROMPT_TOKENS: u32 = 128;
const PROMPT_BLOCKS: u32 = PROMPT_TOKENS / 16;
/// A working set four times what the arena holds.
const PROMPTS: u32 = 16;
const ARENA_BLOCKS: u32 = PROMPTS * PROMPT_BLOCKS / 4;

fn ask(n: u32) -> Ask {
    let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|i| 1000 + (n * 1009 + i * 7919) % 40_000).collect();
    Ask::tokens(prompt).max_tokens(1).ignore_eos().sampling(|sampling| sampling.logprobs = Some(3))
}

/// What each prompt gave, and how many of their tokens were not computed.
async fn round(
    cluster: &Cluster,
    seen: &mut Vec<(Vec<u32>, Vec<baton_proto::v1::TokenLogprobs>)>,
) -> anyhow::Result<u32> {
    let mut cached = 0;
    for n in 0..PROMPTS {
        let answer = cluster.ask(ask(n)).await?;
        cached += answer.cached_tokens();
        let gave = (answer.token_ids, answer.logprobs);
        match seen.get(n as usize) {
            Some(expected) => assert_eq!(&gave, expected, "prompt {n}"),
            None => seen.push(gave),
        }
    }
    cluster.wait_idle(5 * SECOND).await?;
    Ok(cached)
}

fn flags(folder: &Path, bytes: u64) -> Vec<String> {
    let folder = folder.display().to_string();
    let bytes = bytes.to_string();
    ["--ssd-folder", &folder, "--ssd-bytes", &bytes].map(str::to_owned).to_vec()
}

/// A cluster of a prefill node with a small arena; prompts of one token each need no decode node
/// but one has to be there.
fn builder(model: &Path, ssd: Option<&Path>) -> baton_cluster_tests::Builder {
    let arena = ARENA_BLOCKS.to_string();
    let builder = Cluster::model(model).prefill_flags(&["--cache-blocks", &arena]);
    let Some(folder) = ssd else { return builder };
    let flags = flags(folder, 1 << 30);
    builder.prefill_flags(&flags.iter().map(String::as_str).collect::<Vec<_>>())
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn ssd_tier_serves_working_set_beyond_memory_and_survives_a_kill() -> anyhow::Result<()> {
    let model = model();
    let mut seen = Vec::new();
    let memory = builder(&model, None).start().await?;
    round(&memory, &mut seen).await?;
    let memory_alone = round(&memory, &mut seen).await?;
    memory.stop().await?;

    let folder = tempfile::tempdir()?;
    let builder = builder(&model, Some(folder.path()));
    let mut cluster = builder.clone().start().await?;
    assert_eq!(round(&cluster, &mut seen).await?, 0, "nothing is there yet");
    let with_ssd = round(&cluster, &mut seen).await?;
    let all = PROMPTS * (PROMPT_TOKENS - 16);
    println!(
        "second round, of {all} tokens that could be cached: {memory_alone} with memory alone, {with_ssd} with an SSD"
    );
    assert!(with_ssd > memory_alone && with_ssd == all, "{with_ssd} of {all}");

    // Killed while it writes: new prompts are on their way to the disk.
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let writing =
        cluster.ask(Ask::tokens((0..480u32).map(|i| 3000 + i * 31 % 30_000).collect::<Vec<_>>()).max_tokens(1));
    writing.await?;
    cluster.prefill.remove(0).kill().await?;
    cluster.wait_ready(1).await?;
    cluster.prefill.push(builder.start_node("prefill", 0, &conductor, cluster.folder()).await?);
    cluster.wait_ready(2).await?;
    let after_crash = round(&cluster, &mut seen).await?;
    println!("after a kill: {after_crash}");
    assert!(after_crash >= all - 2 * 16, "a write under way may be lost, nothing else: {after_crash} of {all}");
    cluster.stop().await
}

/// Sequences that gave way at a decode node come back from its SSD.
#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn preempted_sequences_are_read_back_from_ssd_with_same_tokens() -> anyhow::Result<()> {
    let model = model();
    let folder = tempfile::tempdir()?;
    // Memory for half of the sequences, of 8 blocks each.
    let mut decode_flags = flags(folder.path(), 1 << 30);
    decode_flags.extend(["--cache-blocks", "32", "--growth-blocks", "0"].map(str::to_owned));
    let decode_flags: Vec<_> = decode_flags.iter().map(String::as_str).collect();
    let cluster = Cluster::model(&model).decode_flags(&decode_flags).start().await?;
    let ask = |n: u32| {
        let prompt: Vec<u32> = (0..64).map(|i| 1000 + (n * 997 + i * 7919) % 40_000).collect();
        Ask::tokens(prompt).max_tokens(64).ignore_eos()
    };
    let mut alone = Vec::new();
    for n in 0..8 {
        alone.push(cluster.ask(ask(n)).await?.token_ids);
    }
    let together = futures::future::try_join_all((0..8).map(|n| cluster.ask(ask(n)))).await?;
    for (n, answer) in together.iter().enumerate() {
        assert_eq!(answer.token_ids, alone[n], "request {n}");
    }
    let load = cluster.check_integrity().await?.into_iter().find(|(node, _)| node == "decode-0").unwrap().1;
    let read = cluster.decode[0].metric("baton_node_ssd_blocks_total{outcome=\"read\"}").await?;
    println!("{} preemptions, {} blocks on the SSD, {read} read back", load.preemptions, load.blocks_ssd);
    assert!(load.preemptions > 0 && load.blocks_ssd > 32 && read > 0.0);
    cluster.wait_idle(5 * SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs root, to mount a small file system, and a model: BATON_MODEL"]
async fn full_ssd_costs_cache_hits_and_fails_no_request() -> anyhow::Result<()> {
    let model = model();
    let folder = tempfile::tempdir()?;
    // A disk of 16 MiB: room for some 40 of the working set's 128 blocks.
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs"])
        .arg(folder.path())
        .output()?;
    assert!(mounted.status.success(), "mount: {}", String::from_utf8_lossy(&mounted.stderr));
    let result = on_a_full_disk(&model, folder.path()).await;
    let unmounted = std::process::Command::new("umount").arg("-l").arg(folder.path()).status()?;
    assert!(unmounted.success());
    result
}

async fn on_a_full_disk(model: &Path, folder: &Path) -> anyhow::Result<()> {
    let cluster = builder(model, Some(folder)).start().await?;
    let mut seen = Vec::new();
    for _ in 0..3 {
        round(&cluster, &mut seen).await?;
    }
    let load = cluster.check_integrity().await?.into_iter().find(|(node, _)| node == "prefill-0").unwrap().1;
    println!("{} blocks fit the disk", load.blocks_ssd);
    assert!(load.blocks_ssd > 0 && load.blocks_ssd < PROMPTS * PROMPT_BLOCKS, "{}", load.blocks_ssd);
    let log = std::fs::read_to_string(&cluster.prefill[0].log)?;
    assert!(log.contains("the SSD tier cannot store a block"), "{log}");
    cluster.stop().await
}
