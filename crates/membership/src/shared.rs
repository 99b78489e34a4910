//! Settings that all conductors share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_runtime::Clock;
use etcd_client::{Client, Compare, CompareOp, EventType, GetOptions, KeyValue, Txn, TxnOp, WatchOptions};
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, watch};

use crate::connect::{answered, connect};
use crate::{Etcd, EtcdError};

/// How often etcd is asked, beside the watch: that may be silent at a member that is cut off.
const LOOK: Duration = Duration::from_secs(1);
/// Waits between attempts while etcd cannot be reached.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// How often a change is tried if others change settings at the same time.
const MAX_ATTEMPTS: u32 = 8;

/// Values that were set at run time, all of them. Each change makes a new version.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedSettings {
    /// 1 for the first change; 0: nothing was ever set.
    pub version: u64,
    /// By setting, as they were given.
    pub values: BTreeMap<String, String>,
    /// Who made this version, by their own word.
    pub by: String,
    /// When, milliseconds since 1970.
    pub set_at_ms: u64,
}

/// Why nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError<E> {
    /// The change is not wanted.
    #[error("{0}")]
    Refused(E),
    /// etcd cannot be asked: nothing was changed.
    #[error("etcd: {0}; settings stay as they were")]
    Etcd(#[from] EtcdError),
    /// etcd was asked to write, and what came of that it did not say.
    #[error("etcd: {0}; the change may have been made: look at the settings again")]
    Unknown(EtcdError),
    /// Others change settings all the time.
    #[error("others changed settings at the same time, {MAX_ATTEMPTS} times: try again")]
    Contended,
}

/// Keeps what is set, in etcd if there is one. **Invariant**: of two changes at the same time, the
/// second is made on top of the first. Versions only grow, also if etcd loses its data or goes back
/// to an earlier state.
pub struct SettingsStore {
    etcd: Option<Etcd>,
    /// The member of etcd that is asked: after each error, the next one.
    member: AtomicUsize,
    clock: Arc<dyn Clock>,
    known: watch::Sender<Arc<SharedSettings>>,
    /// One change at a time.
    changing: Mutex<()>,
}

/// The key as it is in etcd.
struct Stored {
    settings: SharedSettings,
    /// 0: there is none.
    mod_revision: i64,
}

impl SettingsStore {
    /// Of conductors that name the same etcd. Without one the settings are this process's, and end
    /// with it.
    pub fn new(etcd: Option<Etcd>, clock: Arc<dyn Clock>) -> Self {
        Self {
            etcd,
            member: AtomicUsize::default(),
            clock,
            known: watch::Sender::default(),
            changing: Mutex::default(),
        }
    }

    /// What is set, as far as is known here, and each change of it.
    pub fn known(&self) -> watch::Receiver<Arc<SharedSettings>> {
        self.known.subscribe()
    }

    /// Makes the next version of what is set, and gives it. `next` is called again if another
    /// change came first.
    ///
    /// # Errors
    /// `next` refuses, or etcd does.
    pub async fn change<E>(
        &self,
        next: impl Fn(&SharedSettings) -> Result<SharedSettings, E> + Send,
    ) -> Result<Arc<SharedSettings>, ChangeError<E>> {
        let _one_at_a_time = self.changing.lock().await;
        let Some(etcd) = &self.etcd else {
            let known = Arc::clone(&self.known.borrow());
            return Ok(self.learn(next(&known).map_err(ChangeError::Refused)?));
        };
        let mut client = self.connect_to_any(etcd).await?;
        for _ in 0..MAX_ATTEMPTS {
            let stored = self.read(&mut client, etcd).await?;
            let known = Arc::clone(&self.known.borrow());
            let before = if stored.settings.version < known.version { &*known } else { &stored.settings };
            let settings = next(before).map_err(ChangeError::Refused)?;
            let written = self.write(&mut client, etcd, &settings, stored.mod_revision).await;
            if written.map_err(ChangeError::Unknown)? {
                return Ok(self.learn(settings));
            }
        }
        Err(ChangeError::Contended)
    }

    /// A member that answers.
    async fn connect_to_any(&self, etcd: &Etcd) -> Result<Client, EtcdError> {
        let mut tried = 1;
        loop {
            match self.connect_to_one(etcd).await {
                Err(error) if tried >= etcd.endpoints.len() => return Err(error),
                Err(_) => self.next_member(),
                Ok(client) => return Ok(client),
            }
            tried += 1;
        }
    }

    async fn connect_to_one(&self, etcd: &Etcd) -> Result<Client, EtcdError> {
        let mut client = connect(etcd, self.member.load(Ordering::Relaxed), &*self.clock).await?;
        // One that hangs takes connections.
        answered(&*self.clock, client.get(key(etcd), Some(GetOptions::new().with_count_only()))).await?;
        Ok(client)
    }

    fn next_member(&self) {
        self.member.fetch_add(1, Ordering::Relaxed);
    }

    /// Follows what is set, for ever. While etcd is unreachable, what is known stays.
    pub async fn run(&self) {
        let Some(etcd) = &self.etcd else { return std::future::pending().await };
        let mut wait = RETRY;
        loop {
            let Err(error) = self.follow(etcd, &mut wait).await;
            // Who leads is learnt from the same etcd, and says that it is unreachable.
            match error {
                EtcdError::Key { .. } => tracing::error!(%error, "what is set at run time is not understood"),
                _ => tracing::debug!(%error, "etcd is unreachable: the settings stay"),
            }
            self.next_member();
            self.clock.sleep(wait).await;
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    async fn follow(&self, etcd: &Etcd, wait: &mut Duration) -> Result<std::convert::Infallible, EtcdError> {
        let mut client = connect(etcd, self.member.load(Ordering::Relaxed), &*self.clock).await?;
        // From before the look: what is seen twice is the same.
        let mut changes = answered(&*self.clock, client.watch(key(etcd), Some(WatchOptions::new()))).await?;
        self.look(&mut client, etcd).await?;
        *wait = RETRY;
        loop {
            tokio::select! {
                () = self.clock.sleep(LOOK) => self.look(&mut client, etcd).await?,
                change = changes.message() => {
                    let change = change?.ok_or_else(|| EtcdError::WatchEnded("closed".to_owned()))?;
                    if change.canceled() {
                        return Err(EtcdError::WatchEnded(change.cancel_reason().to_owned()));
                    }
                    for event in change.events() {
                        if let (EventType::Put, Some(value)) = (event.event_type(), event.kv()) {
                            self.learn(parse(etcd, value)?);
                        }
                    }
                }
            }
        }
    }

    async fn look(&self, client: &mut Client, etcd: &Etcd) -> Result<(), EtcdError> {
        let stored = self.read(client, etcd).await?;
        let known = Arc::clone(&self.known.borrow());
        if stored.settings.version >= known.version {
            self.learn(stored.settings);
        } else if self.write(client, etcd, &known, stored.mod_revision).await? {
            tracing::warn!(version = known.version, "etcd has lost what was set at run time: it is there again");
        }
        Ok(())
    }

    fn learn(&self, settings: SharedSettings) -> Arc<SharedSettings> {
        let settings = Arc::new(settings);
        self.known.send_if_modified(|known| {
            // What was read may be from before a change of this process.
            let is_new = **known != *settings && settings.version >= known.version;
            if is_new {
                *known = Arc::clone(&settings);
            }
            is_new
        });
        settings
    }

    async fn read(&self, client: &mut Client, etcd: &Etcd) -> Result<Stored, EtcdError> {
        let found = answered(&*self.clock, client.get(key(etcd), None)).await?;
        found.kvs().first().map_or_else(
            || Ok(Stored { settings: SharedSettings::default(), mod_revision: 0 }),
            |value| Ok(Stored { settings: parse(etcd, value)?, mod_revision: value.mod_revision() }),
        )
    }

    /// Whether it was written: it is not if the key has been written since that revision.
    async fn write(
        &self,
        client: &mut Client,
        etcd: &Etcd,
        settings: &SharedSettings,
        mod_revision: i64,
    ) -> Result<bool, EtcdError> {
        let value = serde_json::to_vec(settings).unwrap_or_default();
        let is_as_read = Compare::mod_revision(key(etcd), CompareOp::Equal, mod_revision);
        let txn = Txn::new().when([is_as_read]).and_then([TxnOp::put(key(etcd), value, None)]);
        Ok(answered(&*self.clock, client.txn(txn)).await?.succeeded())
    }
}

fn key(etcd: &Etcd) -> String {
    format!("{}/settings", etcd.prefix)
}

fn parse(etcd: &Etcd, value: &KeyValue) -> Result<SharedSettings, EtcdError> {
    serde_json::from_slice(value.value()).map_err(|error| EtcdError::Key { key: key(etcd), problem: error.to_string() })
}

#[cfg(test)]
mod tests {
    use baton_runtime::ManualClock;

    use super::*;

    #[test]
    fn older_shared_settings_do_not_replace_newer_ones() {
        let store = SettingsStore::new(None, Arc::new(ManualClock::default()));
        let of = |version, by: &str| SharedSettings { version, by: by.into(), ..SharedSettings::default() };
        store.learn(of(2, "second"));
        store.learn(of(1, "first"));
        assert_eq!(store.known().borrow().by, "second");
    }
}
