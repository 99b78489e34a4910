//! Supervised tasks: each has a name, and none dies unseen.

use std::borrow::Cow;
use std::fmt::Display;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Why a set of tasks ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskFailure {
    /// A task that must run as long as the process returned an error.
    #[error("task '{task}' failed: {reason}")]
    Failed {
        /// Its name.
        task: String,
        /// Its error.
        reason: String,
    },
    /// A task that must run as long as the process just returned.
    #[error("task '{0}' ended early")]
    EndedEarly(String),
    /// A task panicked.
    #[error("task '{task}' panicked: {reason}")]
    Panicked {
        /// Its name.
        task: String,
        /// The panic's message.
        reason: String,
    },
    /// Some tasks did not end in time.
    #[error("{0} tasks did not end within the deadline")]
    Stuck(usize),
}

#[derive(Default)]
struct Inner {
    tracker: TaskTracker,
    cancelled: CancellationToken,
    failure: Mutex<Option<TaskFailure>>,
}

/// The tasks of a process. Cheap to clone.
///
/// A task that was started with [`TaskSet::spawn`] must run until the set is cancelled. If it
/// fails, panics or returns before, the whole set is cancelled and [`TaskSet::join`] says why.
#[derive(Clone, Default)]
pub struct TaskSet(Arc<Inner>);

impl TaskSet {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts a task that the process cannot do without.
    pub fn spawn<E: Display>(
        &self,
        name: impl Into<Cow<'static, str>>,
        future: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        let set = self.clone();
        let name = name.into();
        self.spawn_tracked(async move {
            let failure = match futures_catch(future).await {
                Ok(Ok(())) if set.is_cancelled() => return,
                Ok(Ok(())) => TaskFailure::EndedEarly(name.into_owned()),
                Ok(Err(error)) => TaskFailure::Failed { task: name.into_owned(), reason: error.to_string() },
                Err(reason) => TaskFailure::Panicked { task: name.into_owned(), reason },
            };
            set.fail(failure);
        });
    }

    /// Starts a task that belongs to one request or session and may end. A panic ends it alone, and
    /// is logged and counted.
    pub fn spawn_request(&self, name: &'static str, future: impl Future<Output = ()> + Send + 'static) {
        self.spawn_tracked(async move {
            if let Err(reason) = futures_catch(future).await {
                tracing::error!(task = name, reason, "a task panicked");
                metrics::counter!(crate::telemetry::TASK_PANICS).increment(1);
            }
        });
    }

    #[allow(clippy::disallowed_methods)] // the one place: everything else comes through here
    fn spawn_tracked(&self, future: impl Future<Output = ()> + Send + 'static) {
        tokio::spawn(self.0.tracker.track_future(future));
    }

    fn fail(&self, failure: TaskFailure) {
        tracing::error!(%failure, "going down");
        self.0.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.cancel();
    }

    /// Asks every task to end.
    pub fn cancel(&self) {
        self.0.cancelled.cancel();
    }

    /// Whether the tasks are to end.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.is_cancelled()
    }

    /// Resolves when the tasks are to end.
    pub async fn cancelled(&self) {
        self.0.cancelled.cancelled().await;
    }

    /// The token that [`TaskSet::cancel`] cancels.
    pub fn token(&self) -> CancellationToken {
        self.0.cancelled.clone()
    }

    /// Tasks that run.
    pub fn len(&self) -> usize {
        self.0.tracker.len()
    }

    /// Whether none runs.
    pub fn is_empty(&self) -> bool {
        self.0.tracker.is_empty()
    }

    /// Cancels, waits for every task, and says what went wrong, the first failure first.
    pub async fn join(&self, deadline: Duration) -> Result<(), TaskFailure> {
        self.cancel();
        self.0.tracker.close();
        let ended = tokio::time::timeout(deadline, self.0.tracker.wait()).await;
        let failure = self.0.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match (failure, ended) {
            (Some(failure), _) => Err(failure),
            (None, Err(_)) => Err(TaskFailure::Stuck(self.len())),
            (None, Ok(())) => Ok(()),
        }
    }
}

/// Runs a future and turns a panic into its message.
async fn futures_catch<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(move |cx| {
        let poll = std::panic::catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx)));
        match poll {
            Ok(poll) => poll.map(Ok),
            Err(panic) => std::task::Poll::Ready(Err(panic_message(&*panic))),
        }
    })
    .await
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(2);

    #[tokio::test]
    async fn failed_task_cancels_its_task_set_and_is_named() {
        let tasks = TaskSet::new();
        let other = tasks.clone();
        tasks.spawn("steady", async move {
            other.cancelled().await;
            Ok::<_, String>(())
        });
        tasks.spawn("weak", async { Err::<(), _>("no luck") });
        tasks.cancelled().await;
        let failure = tasks.join(SOON).await.unwrap_err();
        assert_eq!(failure.to_string(), "task 'weak' failed: no luck");
        assert!(tasks.is_empty());
    }

    #[tokio::test]
    async fn task_that_panics_or_ends_early_is_a_failure() {
        let tasks = TaskSet::new();
        tasks.spawn("loud", async { if true { panic!("boom {}", 1) } else { Ok::<(), String>(()) } });
        tasks.cancelled().await;
        let panicked = TaskFailure::Panicked { task: "loud".into(), reason: "boom 1".into() };
        assert_eq!(tasks.join(SOON).await, Err(panicked));

        let tasks = TaskSet::new();
        tasks.spawn("short", async { Ok::<(), String>(()) });
        tasks.cancelled().await;
        assert_eq!(tasks.join(SOON).await, Err(TaskFailure::EndedEarly("short".into())));
    }

    #[tokio::test]
    async fn request_task_that_ends_or_panics_leaves_the_task_set_running() {
        let tasks = TaskSet::new();
        tasks.spawn_request("r", async {});
        tasks.spawn_request("r", async { panic!("alone") });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!tasks.is_cancelled());
        assert_eq!(tasks.join(SOON).await, Ok(()));
    }

    #[tokio::test]
    async fn stuck_task_does_not_delay_join_past_its_timeout() {
        let tasks = TaskSet::new();
        tasks.spawn_request("stuck", std::future::pending());
        assert_eq!(tasks.join(Duration::from_millis(20)).await, Err(TaskFailure::Stuck(1)));
    }
}
