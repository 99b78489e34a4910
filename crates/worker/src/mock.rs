//! What the settings make of a mock node: the engine's time, the sizes and the start-up profile of
//! the model that it stands for.

use std::sync::Arc;
use std::time::Duration;

use baton_engine::{MockAnswers, MockOptions};
use baton_profile::{CONTEXT_TOKENS, ModelProfile, StepCost};
use baton_runtime::settings::BadSetting;
use baton_runtime::{error_chain, random_u64};
use baton_types::{NodeProfile, NodeRole};

use crate::config::Settings;
use crate::pacer::LinkPacer;

/// The profile that `mock_profile` names, if it does. The settings take over what it says of a
/// node: `chunk_tokens` and `max_running`, and `cache_blocks` if that is 0.
pub(crate) fn take_profile(settings: &mut Settings, role: NodeRole) -> anyhow::Result<Option<ModelProfile>> {
    let Some(name) = settings.mock_profile.as_deref() else { return Ok(None) };
    let bad = |problem: String| BadSetting::invalid("mock_profile", problem);
    if settings.engine != "mock" {
        anyhow::bail!(bad(format!("'{name}', but the engine is '{}'", settings.engine)));
    }
    let profile = ModelProfile::load(name).map_err(|error| bad(error_chain(&error)))?;
    settings.chunk_tokens = profile.chunk_tokens;
    settings.max_running = profile.max_running;
    if settings.cache_blocks == 0 {
        let tokens = match role {
            NodeRole::Prefill => profile.cache_tokens,
            NodeRole::Decode => profile.decode_kv_tokens,
        };
        let blocks = tokens / u64::from(settings.block_tokens.max(1));
        let too_many = |_| bad(format!("{blocks} blocks are too many; give fewer with --cache-blocks"));
        settings.cache_blocks = u32::try_from(blocks).map_err(too_many)?;
    }
    Ok(Some(profile))
}

/// Context of a mock that gives answers, as models of agents have; in blocks of 16 tokens its arena
/// holds two.
const ANSWERS_CONTEXT_TOKENS: u32 = 131_072;
const ANSWERS_BLOCKS: u32 = 16_384;

/// The answers that `mock_answers` names, if it does.
fn answers(settings: &Settings) -> Result<Option<Arc<MockAnswers>>, BadSetting> {
    let Some(path) = &settings.mock_answers else { return Ok(None) };
    let bad = |problem: String| BadSetting::invalid("mock_answers", format!("{}: {problem}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    Ok(Some(Arc::new(MockAnswers::parse(&text).map_err(bad)?)))
}

/// The engine's options.
pub(crate) fn mock_options(
    settings: &Settings,
    role: NodeRole,
    profile: Option<&ModelProfile>,
) -> Result<MockOptions, BadSetting> {
    let answers = answers(settings)?;
    let defaults = match &answers {
        None => MockOptions::default(),
        Some(_) => {
            MockOptions { context_length: ANSWERS_CONTEXT_TOKENS, num_blocks: ANSWERS_BLOCKS, ..MockOptions::default() }
        }
    };
    let cost = match (profile, role) {
        (Some(profile), NodeRole::Prefill) => profile.prefill_cost(),
        (Some(profile), NodeRole::Decode) => profile.decode_cost(),
        (None, _) => StepCost {
            base: Duration::from_micros(settings.mock_base_us).as_secs_f64(),
            per_row: Duration::from_micros(settings.mock_token_us).as_secs_f64(),
            ..defaults.cost
        },
    };
    Ok(MockOptions {
        kv_bytes_per_token: settings.mock_kv_bytes,
        block_tokens: settings.block_tokens,
        num_blocks: if settings.cache_blocks > 0 { settings.cache_blocks } else { defaults.num_blocks },
        context_length: profile.map_or(defaults.context_length, |_| CONTEXT_TOKENS),
        cost,
        seed: random_u64(),
        stuck_token: settings.mock_stuck_token,
        answers,
        ..defaults
    })
}

/// The start-up profile: the model's own numbers.
pub(crate) fn node_profile(settings: &Settings, profile: &ModelProfile) -> NodeProfile {
    NodeProfile {
        max_waiting: settings.max_waiting,
        max_running: settings.max_running,
        transfer_bytes_per_s: profile.network_bytes_per_s / scale(settings, profile),
        ..profile.node_profile()
    }
}

/// The model's KV of a token over the mock's.
fn scale(settings: &Settings, profile: &ModelProfile) -> f64 {
    profile.kv_bytes_per_token as f64 / f64::from(settings.mock_kv_bytes)
}

/// The link of a node that plays a profile.
pub(crate) fn pacer(settings: &Settings, profile: &ModelProfile) -> LinkPacer {
    LinkPacer::new(profile.network_bytes_per_s, scale(settings, profile), profile.latency())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(mock_profile: &str) -> Settings {
        Settings {
            engine: "mock".into(),
            mock_profile: Some(mock_profile.into()),
            block_tokens: 512,
            ..Settings::default()
        }
    }

    fn taken(role: NodeRole) -> (Settings, ModelProfile) {
        let mut settings = settings("llama3-70b-a800");
        let profile = take_profile(&mut settings, role).unwrap().unwrap();
        (settings, profile)
    }

    #[test]
    fn mock_node_has_the_size_and_times_of_its_profile() {
        let (settings, profile) = taken(NodeRole::Prefill);
        assert_eq!((settings.chunk_tokens, settings.max_running, settings.cache_blocks), (1024, 512, 5859));
        let options = mock_options(&settings, NodeRole::Prefill, Some(&profile)).unwrap();
        assert_eq!((options.cost, options.num_blocks, options.kv_bytes_per_token), (profile.prefill_cost(), 5859, 64));
        let (settings, profile) = taken(NodeRole::Decode);
        assert_eq!(u64::from(settings.cache_blocks), profile.decode_kv_tokens / 512);
        assert_eq!(mock_options(&settings, NodeRole::Decode, Some(&profile)).unwrap().cost, profile.decode_cost());
        let told = node_profile(&settings, &profile);
        assert_eq!((told.decode_base, told.prefill_per_token), (profile.decode_base, profile.prefill_per_token));
    }

    #[test]
    fn given_cache_blocks_override_the_mock_profile() {
        let mut settings = Settings { cache_blocks: 7, ..settings("llama2-70b-a800") };
        take_profile(&mut settings, NodeRole::Decode).unwrap();
        assert_eq!(settings.cache_blocks, 7);
    }

    #[test]
    fn settings_without_mock_profile_are_unchanged() {
        let mut settings = Settings { engine: "mock".into(), mock_base_us: 3, ..Settings::default() };
        assert_eq!(take_profile(&mut settings, NodeRole::Prefill).unwrap(), None);
        assert_eq!((settings.chunk_tokens, settings.max_running, settings.cache_blocks), (512, 64, 0));
        let options = mock_options(&settings, NodeRole::Prefill, None).unwrap();
        assert_eq!((options.cost.base, options.num_blocks, options.context_length), (3e-6, 4096, 32_768));
    }

    #[test]
    fn answers_of_a_file_come_with_the_context_of_agents() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut settings = Settings { engine: "mock".into(), ..Settings::default() };
        settings.mock_answers = Some(file.path().to_owned());
        let said = mock_options(&settings, NodeRole::Decode, None).unwrap_err().to_string();
        assert!(said.starts_with(&format!("mock_answers: {}: EOF", file.path().display())), "{said}");
        std::fs::write(file.path(), r#"[{"text": "Hi."}]"#).unwrap();
        let options = mock_options(&settings, NodeRole::Decode, None).unwrap();
        assert_eq!((options.context_length, options.num_blocks, options.answers.is_some()), (131_072, 16_384, true));
    }

    #[test]
    fn invalid_mock_profile_is_named() {
        let error =
            |mut settings: Settings| format!("{:#}", take_profile(&mut settings, NodeRole::Decode).unwrap_err());
        assert!(error(settings("gpt")).starts_with("mock_profile: 'gpt' is not a model profile"));
        let cpu = Settings { engine: "cpu".into(), ..settings("llama3-70b-a800") };
        assert_eq!(error(cpu), "mock_profile: 'llama3-70b-a800', but the engine is 'cpu'");
    }
}
