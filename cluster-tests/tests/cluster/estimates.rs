//! How good the predictions of the time to first token are, with a real model under load. Takes ten
//! minutes of an otherwise idle machine: `make test-long`.

use std::time::{Duration, Instant};

use baton_cluster_tests::{Ask, Cluster, model};
use baton_proto::v1;
use baton_types::{Random, quantile};
use tokio::task::JoinSet;

const REQUESTS: usize = 200;
/// What the cost models learn from before they are judged.
const WARM_UP: usize = 30;
/// Of what the prefill node can compute.
const LOAD: f64 = 0.7;

fn random_tokens(random: &mut Random, len: usize) -> Vec<u32> {
    (0..len).map(|_| 1000 + (random.next_u64() % 40_000) as u32).collect()
}

/// Prompts of 20 to 2,000 tokens, as many short ones as long ones on a scale of ratios. Every
/// second one begins with most of an earlier one. With the tokens that have to be computed.
fn prompts(random: &mut Random) -> Vec<(Vec<u32>, usize)> {
    let mut prompts: Vec<(Vec<u32>, usize)> = Vec::new();
    for n in 0..REQUESTS {
        let len = (20.0 * 100f64.powf(random.unit())) as usize;
        let earlier: Vec<usize> = (0..n).filter(|earlier| prompts[*earlier].0.len() >= len.max(64)).collect();
        let prompt = match earlier.len() {
            0 => (random_tokens(random, len), len),
            _ if n % 2 == 0 => (random_tokens(random, len), len),
            candidates => {
                let shared = len * 3 / 4;
                let from = &prompts[earlier[random.next_u64() as usize % candidates]].0;
                let prompt: Vec<u32> =
                    from[..shared].iter().copied().chain(random_tokens(random, len - shared)).collect();
                (prompt, len - shared / 16 * 16)
            }
        };
        prompts.push(prompt);
    }
    prompts
}

async fn seconds_per_token(cluster: &Cluster, random: &mut Random) -> anyhow::Result<f64> {
    let mut measured = Vec::new();
    for _ in 0..3 {
        let answer = cluster.ask(Ask::tokens(random_tokens(random, 600)).max_tokens(2)).await?;
        measured.push(answer.ttft.as_secs_f64() / 600.0);
    }
    measured.sort_by(f64::total_cmp);
    Ok(measured[1])
}

/// What the conductor recalls of a request: its time to first token, as predicted at placement and
/// as measured at the frontend.
struct Judged {
    predicted: f64,
    measured: f64,
    /// For the reader of a bad one.
    details: String,
}

impl Judged {
    fn error(&self) -> f64 {
        (self.predicted - self.measured).abs() / self.measured
    }
}

async fn judged(cluster: &Cluster, n: usize, computed: usize, request_id: String) -> anyhow::Result<Judged> {
    let record = cluster.operator().explain_by_id(v1::ExplainByIdRequest { request_id }).await?.into_inner();
    let end = record.end.unwrap();
    let timeline = end.timeline.unwrap();
    let usage = end.usage.unwrap();
    let predicted = end.predicted_ttft_s.unwrap();
    let measured = end.ttft_s.unwrap();
    let decision = record.decisions.first().and_then(|decision| decision.explanation.as_ref());
    let terms = decision.map(|explanation| format!("{:?}", explanation.prefill)).unwrap_or_default();
    let details = format!(
        "{n:3}: {predicted:6.3} s predicted, {measured:6.3} s measured; prompt {}, cached {}, expected to compute {computed}; {timeline:?}; {terms}",
        usage.prompt_tokens, usage.cached_tokens
    );
    Ok(Judged { predicted, measured, details })
}

#[tokio::test]
#[ignore = "takes ten minutes of an idle machine (make test-long), and needs a model: BATON_MODEL"]
async fn predicted_ttft_is_near_measured_ttft() -> anyhow::Result<()> {
    let model = model();
    let cluster = Cluster::model(&model).start().await?;
    let mut random = Random::new(5);
    let per_token = seconds_per_token(&cluster, &mut random).await?;
    let prompts = prompts(&mut random);
    let work: Vec<usize> = prompts.iter().map(|(_, computed)| *computed).collect();
    let computed: usize = work.iter().sum();
    let between = computed as f64 * per_token / REQUESTS as f64 / LOAD;
    println!(
        "{:.2} ms a token; {computed} tokens to compute in {REQUESTS} requests, one every {between:.2} s",
        per_token * 1e3
    );
    let mut tasks = JoinSet::new();
    let mut at = Instant::now();
    for (n, (prompt, _)) in prompts.into_iter().enumerate() {
        at += Duration::from_secs_f64(-between * (1.0 - random.unit()).ln());
        tokio::time::sleep_until(at.into()).await;
        let mut client = cluster.inference();
        let output = 8 + (random.next_u64() % 25) as u32;
        tasks.spawn(async move {
            let ask = Ask::tokens(prompt).max_tokens(output).ignore_eos();
            let mut stream = client.generate(ask.0).await?.into_inner();
            let mut id = String::new();
            while let Some(response) = stream.message().await? {
                if let Some(v1::generate_response::Event::Accepted(accepted)) = response.event {
                    id = accepted.request_id;
                }
            }
            anyhow::Ok((n, id))
        });
    }
    let mut ids = vec![String::new(); REQUESTS];
    while let Some(done) = tasks.join_next().await {
        let (n, id) = done??;
        ids[n] = id;
    }
    let mut judgements = Vec::new();
    for (n, id) in ids.into_iter().enumerate().skip(WARM_UP) {
        judgements.push(judged(&cluster, n, work[n], id).await?);
    }
    judgements.sort_by(|a, b| a.error().total_cmp(&b.error()));
    let errors: Vec<f64> = judgements.iter().map(Judged::error).collect();
    let mut ratios: Vec<f64> = judgements.iter().map(|judged| judged.predicted / judged.measured).collect();
    ratios.sort_by(f64::total_cmp);
    for judged in &judgements {
        println!("{}", judged.details);
    }
    println!(
        "|predicted - measured| / measured: median {:.3}, p90 {:.3}; predicted / measured: p10 {:.3}, median {:.3}, p90 {:.3}",
        quantile(&errors, 0.5),
        quantile(&errors, 0.9),
        quantile(&ratios, 0.1),
        quantile(&ratios, 0.5),
        quantile(&ratios, 0.9)
    );
    assert_eq!(errors.len(), REQUESTS - WARM_UP);
    assert!(quantile(&errors, 0.5) < 0.15 && quantile(&errors, 0.9) < 0.35);
    cluster.stop().await
}
