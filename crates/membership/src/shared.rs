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
/// second is made on top of the first. What etcd says counts, whatever its version is, unless etcd
/// has lost its data or has gone back to an earlier state.
pub struct SettingsStore {
    etcd: Option<Etcd>,
    /// The member of etcd that is asked: after each error, the next one.
    member: AtomicUsize,
    clock: Arc<dyn Clock>,
    known: watch::Sender<Arc<SharedSettings>>,
    /// One change at a time, and one look. The revision at which what is known was written.
    revision: Mutex<i64>,
}

/// The key as it is in etcd.
struct Stored {
    settings: SharedSettings,
    /// 0: there is none.
    mod_revision: i64,
}

impl Stored {
    /// Whether it is from before what is known: etcd has lost data. A version alone does not say
    /// so. It may be any number that was written there.
    fn is_older(&self, known: &SharedSettings, revision: i64) -> bool {
        self.mod_revision < revision && self.settings.version < known.version
    }
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
            revision: Mutex::default(),
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
        let mut revision = self.revision.lock().await;
        let Some(etcd) = &self.etcd else {
            let known = Arc::clone(&self.known.borrow());
            return Ok(self.learn(next(&known).map_err(ChangeError::Refused)?));
        };
        let mut client = self.connect_to_any(etcd).await?;
        for _ in 0..MAX_ATTEMPTS {
            let stored = self.read(&mut client, etcd).await?;
            let known = Arc::clone(&self.known.borrow());
            let before = if stored.is_older(&known, *revision) { &*known } else { &stored.settings };
            let settings = next(before).map_err(ChangeError::Refused)?;
            let written = self.write(&mut client, etcd, &settings, stored.mod_revision).await;
            if let Some(written) = written.map_err(ChangeError::Unknown)? {
                *revision = written;
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
                EtcdError::Key { .. } if wait == RETRY => {
                    tracing::error!(%error, "what is set at run time is not understood: the settings stay");
                }
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
                            self.on_put(value.mod_revision(), parse(etcd, value)?).await;
                        }
                    }
                }
            }
        }
    }

    async fn look(&self, client: &mut Client, etcd: &Etcd) -> Result<(), EtcdError> {
        let mut revision = self.revision.lock().await;
        let stored = self.read(client, etcd).await?;
        let known = Arc::clone(&self.known.borrow());
        if !stored.is_older(&known, *revision) {
            *revision = stored.mod_revision;
            self.learn(stored.settings);
        } else if let Some(written) = self.write(client, etcd, &known, stored.mod_revision).await? {
            *revision = written;
            tracing::warn!(version = known.version, "etcd has lost what was set at run time: it is there again");
        }
        Ok(())
    }

    /// The watch says that the key was written. It may be late.
    async fn on_put(&self, mod_revision: i64, settings: SharedSettings) {
        let mut revision = self.revision.lock().await;
        if mod_revision > *revision {
            *revision = mod_revision;
            self.learn(settings);
        }
    }

    fn learn(&self, settings: SharedSettings) -> Arc<SharedSettings> {
        let settings = Arc::new(settings);
        self.known.send_if_modified(|known| {
            let is_new = **known != *settings;
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

    /// The revision at which it was written: it is not if the key has been written since that one.
    async fn write(
        &self,
        client: &mut Client,
        etcd: &Etcd,
        settings: &SharedSettings,
        mod_revision: i64,
    ) -> Result<Option<i64>, EtcdError> {
        let value = serde_json::to_vec(settings).unwrap_or_default();
        let is_as_read = Compare::mod_revision(key(etcd), CompareOp::Equal, mod_revision);
        let txn = Txn::new().when([is_as_read]).and_then([TxnOp::put(key(etcd), value, None)]);
        let done = answered(&*self.clock, client.txn(txn)).await?;
        let revision = done.header().map_or(0, etcd_client::ResponseHeader::revision);
        Ok(done.succeeded().then_some(revision))
    }
}

fn key(etcd: &Etcd) -> String {
    format!("{}/settings", etcd.prefix)
}

fn parse(etcd: &Etcd, value: &KeyValue) -> Result<SharedSettings, EtcdError> {
    serde_json::from_slice(value.value()).map_err(|error| EtcdError::key(key(etcd), &error.to_string()))
}

#[cfg(test)]
mod tests {
    use baton_runtime::ManualClock;

    use super::*;

    fn settings(version: u64, by: &str) -> SharedSettings {
        SharedSettings { version, by: by.into(), ..SharedSettings::default() }
    }

    #[test]
    fn stored_settings_are_older_only_if_etcd_has_lost_data() {
        let known = settings(5, "known");
        let is_older =
            |version, mod_revision| Stored { settings: settings(version, ""), mod_revision }.is_older(&known, 100);
        assert!(is_older(0, 0) && is_older(4, 99), "lost, and restored from before");
        assert!(!is_older(4, 101) && !is_older(0, 101), "overwritten since: it counts");
        assert!(!is_older(6, 3) && !is_older(5, 3), "lost, and set again by another conductor");
        let nonsense = settings(u64::MAX, "a liar");
        assert!(!Stored { settings: settings(1, "me"), mod_revision: 101 }.is_older(&nonsense, 100));
    }

    #[tokio::test]
    async fn late_watch_does_not_replace_a_later_write() {
        let store = SettingsStore::new(None, Arc::new(ManualClock::default()));
        let known = store.known();
        store.on_put(7, settings(2, "second")).await;
        store.on_put(6, settings(u64::MAX, "late")).await;
        assert_eq!(known.borrow().by, "second");
        store.on_put(8, settings(u64::MAX, "a liar")).await;
        store.on_put(9, settings(1, "me")).await;
        assert_eq!(known.borrow().by, "me", "versions say nothing of what was written last");
    }

    #[tokio::test]
    async fn without_etcd_each_change_counts_whatever_its_version() {
        let store = SettingsStore::new(None, Arc::new(ManualClock::default()));
        for (version, by) in [(u64::MAX, "first"), (1, "second")] {
            let next = |_: &SharedSettings| Ok::<_, std::convert::Infallible>(settings(version, by));
            store.change(next).await.unwrap();
            assert_eq!(store.known().borrow().by, by);
        }
    }
}
