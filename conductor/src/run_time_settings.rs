//! What may change while a conductor serves, and what is in force of it.

use std::sync::Arc;
use std::time::Duration;

use baton_membership::{ChangeError, Etcd, SettingsStore, SharedSettings};
use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_runtime::settings::{self, BadSetting, Loaded, SettingsError};
use baton_runtime::telemetry::{LogFilter, set_log_filter};
use baton_runtime::{Clock, within};
use baton_scheduler::{AdmissionKind, Cluster, ClusterConfig, PlacementKind, Policies, PromptsAtDecode, RequestLimits};
use baton_types::{ErrorKind, NodeId, Slo, Tbt, Ttft};
use tokio::sync::watch;

use crate::config::{STALL_TIMEOUTS, Settings, parsed, positive_seconds};
use crate::error::GenerateError;
use crate::frontend::{Frontend, FrontendLimits};

/// Settings that may change at run time. The others say what a process is, and take a restart.
pub const AT_RUN_TIME: [&str; 14] = [
    "admission",
    "fetch_prefixes",
    "log",
    "max_attempts",
    "max_overtaken_s",
    "max_request_s",
    "max_requests",
    "max_wait_ms",
    "partial_prefill",
    "placement",
    "prompts_at_decode",
    "queue_timeout_s",
    "tbt_slo_ms",
    "ttft_slo_ms",
];
/// Longest value, bytes.
const MAX_VALUE_BYTES: usize = 1024;
/// One of so many of the requests served at once may wait in the admission queue.
const QUEUED_SHARE: usize = 32;
/// How long a change may take to be in force where it was made: it was checked before.
const IN_FORCE: Duration = Duration::from_secs(5);

/// What settings that may change decide, checked.
#[derive(Debug)]
pub struct Rules {
    /// Bounds of requests.
    pub limits: FrontendLimits,
    cluster: ClusterConfig,
    placement: PlacementKind,
    admission: AdmissionKind,
    log: LogFilter,
}

impl Rules {
    /// Of settings.
    ///
    /// # Errors
    /// One of them is out of its range, or does not go with another one.
    pub fn new(settings: &Settings) -> Result<Self, BadSetting> {
        settings::within("max_requests", settings.max_requests, 1..=1_000_000)?;
        settings::within("max_attempts", settings.max_attempts, 1..=100)?;
        let stall_timeout = settings::seconds("stall_timeout_s", settings.stall_timeout_s, STALL_TIMEOUTS)?;
        let queue_timeout = positive_seconds("queue_timeout_s", settings.queue_timeout_s)?;
        let max_overtaken = positive_seconds("max_overtaken_s", settings.max_overtaken_s)?;
        if max_overtaken > queue_timeout / 2 {
            // Who waited for others must still be served before the queue's own deadline.
            let problem = format!("{max_overtaken:?}, but must be at most half of queue_timeout_s, {queue_timeout:?}");
            return Err(BadSetting::invalid("max_overtaken_s", problem));
        }
        let limits = FrontendLimits {
            max_requests: settings.max_requests,
            default_slo: Slo {
                ttft: settings.ttft_slo_ms.of("ttft_slo_ms")?.map(Ttft),
                tbt: settings.tbt_slo_ms.of("tbt_slo_ms")?.map(Tbt),
            },
            max_time: positive_seconds("max_request_s", settings.max_request_s)?,
            request: RequestLimits { stall_timeout, max_attempts: settings.max_attempts },
        };
        let cluster = ClusterConfig {
            fetches: settings.fetch_prefixes,
            max_wait: settings.max_wait_ms.of("max_wait_ms")?,
            max_overtaken,
            queue_timeout,
            max_queued: (settings.max_requests / QUEUED_SHARE).max(1),
            prompts_at_decode: parsed::<PromptsAtDecode>("prompts_at_decode", &settings.prompts_at_decode)?,
            takes_partial_prefills: settings.partial_prefill,
            ..ClusterConfig::default()
        };
        let placement = parsed("placement", &settings.placement)?;
        let admission = parsed("admission", &settings.admission)?;
        let log = settings.log.parse()?;
        Ok(Self { limits, cluster, placement, admission, log })
    }

    /// A cluster without nodes that decides by them.
    pub fn cluster(&self) -> Cluster {
        Cluster::new(self.cluster, Policies::new(self.placement, self.admission))
    }
}

/// What a conductor goes by.
#[derive(Debug, Clone)]
pub struct InForce {
    /// What was set at run time.
    pub shared: Arc<SharedSettings>,
    /// All settings, with it.
    pub settings: Loaded<Settings>,
}

/// A conductor's settings while it runs.
pub struct RunTimeSettings {
    /// Those that it was started with.
    own: Loaded<Settings>,
    store: SettingsStore,
    in_force: watch::Sender<InForce>,
}

impl RunTimeSettings {
    /// Of a conductor that was started with these.
    pub fn new(own: Loaded<Settings>, etcd: Option<Etcd>, clock: Arc<dyn Clock>) -> Self {
        let in_force = InForce { shared: Arc::default(), settings: own.clone() };
        Self { own, store: SettingsStore::new(etcd, clock), in_force: watch::Sender::new(in_force) }
    }

    /// What is in force, and each change of it.
    pub fn in_force(&self) -> watch::Receiver<InForce> {
        self.in_force.subscribe()
    }

    /// All settings with these values, checked as at a start.
    pub(crate) fn with(&self, shared: &SharedSettings) -> Result<(Loaded<Settings>, Rules), RefusedSetting> {
        let known = |key: &&str| AT_RUN_TIME.contains(key);
        let values = shared.values.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let settings = self.own.with(values.filter(|(key, _)| known(key)))?;
        let rules = Rules::new(&settings.settings)?;
        Ok((settings, rules))
    }

    /// The next version, with some values set and others, of which nothing is given, as each
    /// conductor was started with.
    pub(crate) fn next(
        &self,
        before: &SharedSettings,
        change: &[(String, String)],
        by: &str,
        set_at_ms: u64,
    ) -> Result<SharedSettings, RefusedSetting> {
        let mut values = before.values.clone();
        for (key, value) in change {
            // One that another version of Baton set, and this one does not have, can be unset.
            if !(value.is_empty() && values.contains_key(key)) {
                check_key(key)?;
            }
            if value.len() > MAX_VALUE_BYTES {
                return Err(refused(key, format!("{} bytes, but must be at most {MAX_VALUE_BYTES}", value.len())));
            }
            if value.is_empty() {
                values.remove(key)
            } else {
                values.insert(key.clone(), value.clone())
            };
        }
        // It counts changes, and says nothing of which is the later one: versions may begin again.
        let version = before.version.checked_add(1).unwrap_or(1);
        let next = SharedSettings { version, values, by: by.to_owned(), set_at_ms };
        self.with(&next)?;
        Ok(next)
    }
}

/// A value that is not taken: its key, and what is wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RefusedSetting {
    #[error(transparent)]
    Form(#[from] SettingsError),
    #[error(transparent)]
    Value(#[from] BadSetting),
    #[error("{key}: {problem}")]
    Key { key: String, problem: String },
}

fn refused(key: &str, problem: String) -> RefusedSetting {
    RefusedSetting::Key { key: key.chars().take(64).collect(), problem }
}

fn check_key(key: &str) -> Result<(), RefusedSetting> {
    if AT_RUN_TIME.contains(&key) {
        return Ok(());
    }
    let is_other = serde_json::to_value(Settings::default()).is_ok_and(|all| all.get(key).is_some());
    let problem = if is_other { "takes a restart" } else { "there is no such setting" };
    Err(refused(key, format!("{problem}; at run time these change: {}", AT_RUN_TIME.join(", "))))
}

impl Frontend {
    /// Sets values for all conductors; of an empty one nothing is set any more. Gives what is in
    /// force then.
    ///
    /// # Errors
    /// A value is not taken, or etcd is unreachable. Nothing was changed.
    pub async fn change_settings(&self, change: &[(String, String)], by: &str) -> Result<InForce, GenerateError> {
        settings::name("by", by).map_err(|bad| GenerateError::invalid(bad.key, bad.problem))?;
        let unavailable = |message: String| GenerateError::Frontend {
            kind: ErrorKind::Unavailable,
            message,
            retry_after: Some(Duration::from_secs(1)),
        };
        let now_ms = self.clock.unix_ms();
        let settings = &self.settings;
        let changed = settings.store.change(|before| settings.next(before, change, by, now_ms)).await;
        let changed = changed.map_err(|error| match error {
            ChangeError::Refused(problem) => {
                let message = problem.to_string();
                GenerateError::Frontend { kind: ErrorKind::Invalid, message, retry_after: None }
            }
            error => unavailable(format!("settings: {error}")),
        })?;
        let mut in_force = settings.in_force();
        let known = settings.store.known();
        // Or another change has come since.
        let is_there = in_force.wait_for(|in_force| in_force.shared == changed || in_force.shared == *known.borrow());
        match within(&*self.clock, IN_FORCE, is_there).await {
            Some(Ok(in_force)) => Ok(in_force.clone()),
            _ => Err(unavailable(format!("settings: version {} is set and not in force here", changed.version))),
        }
    }

    /// Follows what is set, for ever.
    pub async fn follow_settings(&self) {
        let obey = async {
            let mut known = self.settings.store.known();
            loop {
                let shared = Arc::clone(&known.borrow_and_update());
                self.put_in_force(shared);
                if known.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::join!(self.settings.store.run(), obey);
    }

    /// Tells a node that joins what is set.
    pub fn tell_settings(&self, node: &NodeId) {
        let shared = Arc::clone(&self.settings.in_force.borrow().shared);
        self.nodes.send(node, Command::Settings(of_nodes(&shared)));
    }

    fn put_in_force(&self, shared: Arc<SharedSettings>) {
        let before = Arc::clone(&self.settings.in_force.borrow().shared);
        if before == shared {
            return;
        }
        let SharedSettings { version, by, set_at_ms, .. } = &*shared;
        for unknown in shared.values.keys().filter(|key| !AT_RUN_TIME.contains(&key.as_str())) {
            // Of another version of Baton.
            tracing::warn!(version, setting = unknown, "a setting that is set at run time is not known here");
        }
        let (settings, rules) = match self.settings.with(&shared) {
            Ok(checked) => checked,
            Err(error) => {
                tracing::error!(version, by, %error, "the run-time settings are rejected: the earlier ones stay in force");
                return;
            }
        };
        let changes = changes(&before, &shared);
        // It changes what every client gets.
        tracing::warn!(version, by, set_at_ms, changes, "settings changed");
        self.set_limits(rules.limits);
        self.cluster().set_rules(rules.cluster, Policies::new(rules.placement, rules.admission));
        set_log_filter(Some(&rules.log));
        self.nodes.send_all(&Command::Settings(of_nodes(&shared)));
        self.metrics.on_settings(*version);
        self.settings.in_force.send_replace(InForce { shared, settings });
    }
}

/// What nodes go by.
fn of_nodes(shared: &SharedSettings) -> v1::NodeSettings {
    v1::NodeSettings { version: shared.version, log: shared.values.get("log").cloned().unwrap_or_default() }
}

/// `ttft_slo_ms = 500, log as started`: what a version changed.
fn changes(before: &SharedSettings, after: &SharedSettings) -> String {
    let set = after.values.iter().filter(|(key, value)| before.values.get(*key) != Some(value));
    let set = set.map(|(key, value)| format!("{key} = {value}"));
    let unset = before.values.keys().filter(|key| !after.values.contains_key(*key));
    set.chain(unset.map(|key| format!("{key} as started"))).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> RunTimeSettings {
        RunTimeSettings::new(Settings::default().into(), None, Arc::new(baton_runtime::ManualClock::default()))
    }

    fn next(before: &SharedSettings, key: &str, value: &str) -> Result<SharedSettings, String> {
        let change = [(key.to_owned(), value.to_owned())];
        settings().next(before, &change, "me", 7).map_err(|error| error.to_string())
    }

    #[test]
    fn run_time_setting_keys_exist_and_are_sorted() {
        let all = serde_json::to_value(Settings::default()).unwrap();
        assert!(AT_RUN_TIME.iter().all(|key| all.get(key).is_some()));
        assert!(AT_RUN_TIME.is_sorted());
    }

    #[test]
    fn settings_version_builds_on_the_one_before() {
        let first = next(&SharedSettings::default(), "ttft_slo_ms", "500").unwrap();
        let second = next(&first, "placement", "cache-aware").unwrap();
        let third = next(&second, "ttft_slo_ms", "").unwrap();
        assert_eq!((first.version, second.version, third.version), (1, 2, 3));
        assert_eq!(third.values.keys().collect::<Vec<_>>(), ["placement"]);
        assert_eq!(changes(&first, &third), "placement = cache-aware, ttft_slo_ms as started");
        let (loaded, rules) = settings().with(&second).unwrap();
        assert_eq!(rules.limits.default_slo.ttft, Some(Ttft(Duration::from_millis(500))));
        assert_eq!(loaded.origins.told("placement"), "set at run time");
    }

    #[test]
    fn settings_version_after_the_largest_one_is_the_first() {
        for (version, expected) in [(0, 1), (u64::MAX - 1, u64::MAX), (u64::MAX, 1)] {
            let before = SharedSettings { version, ..SharedSettings::default() };
            assert_eq!(next(&before, "ttft_slo_ms", "500").unwrap().version, expected);
        }
    }

    #[test]
    fn setting_of_another_version_is_left_and_can_be_unset() {
        let values = [("replicate_prefixes", "2"), ("ttft_slo_ms", "500")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let before = SharedSettings { version: 7, values: values.into(), by: "x".to_owned(), set_at_ms: 0 };
        let (_, rules) = settings().with(&before).unwrap();
        assert_eq!(rules.limits.default_slo.ttft, Some(Ttft(Duration::from_millis(500))));
        assert!(next(&before, "replicate_prefixes", "3").is_err());
        let after = next(&before, "replicate_prefixes", "").unwrap();
        assert_eq!(after.values.keys().collect::<Vec<_>>(), ["ttft_slo_ms"]);
    }

    #[test]
    fn invalid_run_time_setting_is_refused_with_key_and_value() {
        let none = SharedSettings::default();
        for (key, value, told) in [
            ("ttft_slo_ms", "soon", "ttft_slo_ms: 'soon', but must be milliseconds, or off"),
            ("ttft_slo_ms", "0", "ttft_slo_ms: 0.0, but must be milliseconds, more than 0"),
            ("max_requests", "0", "max_requests: 0, but must be 1 to 1000000"),
            ("max_requests", "many", "max_requests: 'many': expected a whole number, 0 or more"),
            ("partial_prefill", "yes", "partial_prefill: 'yes': expected true or false"),
            ("queue_timeout_s", "1", "max_overtaken_s: 30s, but must be at most half of queue_timeout_s, 1s"),
            ("log", "loud", "log: 'loud', but must be a level"),
            ("log", "[{x=\"(a|b)*a.{60}\"}]=trace", "log: '[{x=\"(a|b)*a.{60}\"}]=trace', but must be a level"),
            ("grpc", "x", "grpc: takes a restart; at run time these change: admission"),
            ("speed", "9", "speed: there is no such setting; at run time"),
        ] {
            let error = next(&none, key, value).unwrap_err();
            assert!(error.starts_with(told), "{error}");
        }
        assert!(next(&none, "placement", "best").unwrap_err().contains("round-robin"));
        assert!(next(&none, "log", &"x".repeat(2000)).unwrap_err().contains("at most 1024"));
        // A value that something else has put into etcd.
        let values = [("log".to_owned(), "a=info,".repeat(100))].into();
        let shared = SharedSettings { version: 7, values, by: "x".to_owned(), set_at_ms: 0 };
        assert!(settings().with(&shared).unwrap_err().to_string().contains("at most 64 entries"));
    }
}
