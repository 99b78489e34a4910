//! Registration: the node tells its conductors where it is, again and again. Each address that a
//! conductor's name has is a conductor.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::{PROTOCOL_VERSION, check_protocol_version, url, v1};
use baton_runtime::settings::BadSetting;
use baton_runtime::{Clock, Phase, Shutdown, TaskSet};
use baton_types::{ErrorKind, NodeInfo};
use futures::StreamExt;
use futures::future::{AbortHandle, Aborted, BoxFuture, abortable};
use futures::stream::FuturesUnordered;
use tonic::transport::{Channel, Endpoint, Uri};

/// Waits between attempts while the conductor cannot be reached.
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// How often a name is looked up.
const LOOK_UP: Duration = Duration::from_secs(5);
/// How long the conductor may take to answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Of so many registrations without a session one is logged: one a minute.
const NO_SESSION_LOG: u32 = 30;

/// Most names, and most addresses of each.
const MAX_CONDUCTORS: usize = 16;

/// Where there is a conductor, or several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    host: String,
    port: u16,
}

/// The conductors that the settings name.
pub fn names(conductors: &str) -> Result<Vec<Name>, BadSetting> {
    let named: Vec<_> = conductors.split(',').map(str::trim).collect();
    if named.len() > MAX_CONDUCTORS {
        let problem = format!("{} addresses, but at most {MAX_CONDUCTORS} are taken", named.len());
        return Err(BadSetting::invalid("conductor", problem));
    }
    named.into_iter().map(name).collect()
}

fn name(conductor: &str) -> Result<Name, BadSetting> {
    let wrong =
        || BadSetting::invalid("conductor", format!("'{conductor}' is not an address of the form http://host:port"));
    let uri: Uri = url(conductor).parse().map_err(|_| wrong())?;
    match (uri.scheme_str(), uri.host(), uri.port_u16(), uri.path()) {
        (Some("http"), Some(host), Some(port), "" | "/") => {
            Ok(Name { host: host.trim_matches(['[', ']']).to_owned(), port })
        }
        _ => Err(wrong()),
    }
}

impl Name {
    async fn addresses(&self) -> io::Result<BTreeSet<SocketAddr>> {
        let all: Vec<_> = tokio::net::lookup_host((self.host.as_str(), self.port)).await?.collect();
        // A conductor that has addresses of both kinds is one conductor.
        let is_wanted = |address: &&SocketAddr| address.is_ipv4() || !all.iter().any(SocketAddr::is_ipv4);
        Ok(all.iter().filter(is_wanted).copied().take(MAX_CONDUCTORS).collect())
    }
}

/// Registers with all conductors of a name, until this node goes down: the sessions that it has are
/// told of that.
pub fn start_registration(
    conductor: Name,
    info: Arc<NodeInfo>,
    tasks: &TaskSet,
    shutdown: Shutdown,
    clock: Arc<dyn Clock>,
) {
    let end = tasks.clone();
    tasks.spawn("registration", async move {
        tokio::select! {
            () = keep_registered(&conductor, &info, &*clock) => {}
            // Conductors that go down at the same time are no news.
            () = shutdown.wait_for(Phase::NotReady) => {}
            () = end.cancelled() => {}
        }
        end.cancelled().await;
        Ok::<(), anyhow::Error>(())
    });
}

/// Registers with all conductors of a name, for ever.
async fn keep_registered(name: &Name, info: &NodeInfo, clock: &dyn Clock) {
    let register = |address: SocketAddr| -> BoxFuture<'_, ()> {
        Box::pin(async move { register_at(&format!("http://{address}"), info, clock).await })
    };
    keep_up(&name.host, || Box::pin(name.addresses()), register, clock).await;
}

/// Has something go on for each address that is found, as long as it is.
async fn keep_up<'a>(
    name: &str,
    find: impl Fn() -> BoxFuture<'a, io::Result<BTreeSet<SocketAddr>>>,
    begin: impl Fn(SocketAddr) -> BoxFuture<'a, ()>,
    clock: &dyn Clock,
) {
    let mut known = BTreeMap::<SocketAddr, AbortHandle>::new();
    let mut under_way = FuturesUnordered::new();
    let mut wait = RETRY;
    loop {
        let next = match meanwhile(&mut under_way, find()).await {
            Ok(found) => {
                for (address, gone) in known.extract_if(.., |address, _| !found.contains(address)) {
                    tracing::info!(name, %address, "no conductor has this address any more");
                    gone.abort();
                }
                for address in found {
                    known.entry(address).or_insert_with(|| {
                        let (begun, handle) = abortable(begin(address));
                        under_way.push(begun);
                        handle
                    });
                }
                wait = RETRY;
                LOOK_UP
            }
            // Those that are known stay.
            Err(error) => {
                tracing::warn!(name, %error, retry_in = ?wait, "cannot look the conductors up");
                let longer = (wait * 2).min(RETRY_MAX);
                std::mem::replace(&mut wait, longer)
            }
        };
        meanwhile(&mut under_way, clock.sleep(next)).await;
    }
}

/// Waits, while registrations go on.
async fn meanwhile<T, F>(under_way: &mut FuturesUnordered<F>, wait: impl Future<Output = T>) -> T
where
    F: Future<Output = Result<(), Aborted>>,
{
    let mut wait = pin!(wait);
    loop {
        tokio::select! {
            // One of those that were aborted.
            _ = under_way.next(), if !under_way.is_empty() => {}
            done = &mut wait => return done,
        }
    }
}

/// Registrations in a row after which the conductor had no session with the node.
#[derive(Default)]
struct WithoutSession(u32);

impl WithoutSession {
    /// The conductor says why it has none, or nothing. Whether to log it.
    fn on_registered(&mut self, reason: &str) -> bool {
        if reason.is_empty() {
            self.0 = 0;
            return false;
        }
        self.0 += 1;
        self.0 % NO_SESSION_LOG == 1
    }
}

/// Registers for ever. Neither the loss of a conductor nor its refusal stops the node: it registers
/// again by itself, and other conductors may have taken it.
async fn register_at(conductor: &str, info: &NodeInfo, clock: &dyn Clock) {
    let endpoint = match Endpoint::from_shared(conductor.to_owned()) {
        Ok(endpoint) => endpoint.connect_timeout(CALL_TIMEOUT).timeout(CALL_TIMEOUT),
        Err(error) => return tracing::error!(conductor, %error, "cannot register"),
    };
    let mut client = v1::node_registration_client::NodeRegistrationClient::new(endpoint.connect_lazy());
    let mut wait = RETRY;
    let mut known = None;
    let mut without_session = WithoutSession::default();
    loop {
        match register_once(&mut client, info).await {
            Ok(response) => {
                if known.as_ref() != Some(&response.conductor_id) {
                    tracing::info!(conductor, id = response.conductor_id, "registered");
                    known = Some(response.conductor_id);
                }
                let reason = response.no_session;
                if without_session.on_registered(&reason) {
                    tracing::warn!(
                        conductor,
                        advertises = info.address,
                        reason,
                        "registered, but the conductor has no session with this node (advertise_host)"
                    );
                }
                wait = RETRY;
                clock.sleep(Duration::from_millis(u64::from(response.interval_ms.clamp(100, 60_000)))).await;
            }
            Err(NotRegistered::Refused(reason)) => {
                // It may be restarted with other settings.
                tracing::error!(conductor, reason, retry_in = ?RETRY_MAX, "the conductor refuses this node");
                clock.sleep(RETRY_MAX).await;
            }
            Err(NotRegistered::Failed { reason, is_answer }) => {
                // Once is no news: the conductor may be about to start, or this node to stop.
                match wait {
                    RETRY if !is_answer => tracing::info!(conductor, reason, retry_in = ?wait, "cannot register"),
                    _ => tracing::warn!(conductor, reason, retry_in = ?wait, "cannot register"),
                }
                clock.sleep(wait).await;
                wait = (wait * 2).min(RETRY_MAX);
            }
        }
    }
}

/// Why a conductor has not taken the node.
enum NotRegistered {
    /// It does not want such a node.
    Refused(String),
    /// It cannot be reached, or does not take the node now.
    Failed {
        /// What the connection or the conductor says.
        reason: String,
        /// The conductor says it.
        is_answer: bool,
    },
}

async fn register_once(
    client: &mut v1::node_registration_client::NodeRegistrationClient<Channel>,
    info: &NodeInfo,
) -> Result<v1::RegisterResponse, NotRegistered> {
    let request = v1::RegisterRequest { protocol_version: PROTOCOL_VERSION, node: Some(info.into()) };
    let response = client.register(request).await.map_err(|status| {
        let reason = baton_proto::reason_of_status(&status);
        match baton_proto::kind_of_status(&status) {
            ErrorKind::Invalid => NotRegistered::Refused(reason),
            // Only what the connection says has a cause.
            _ => NotRegistered::Failed { reason, is_answer: std::error::Error::source(&status).is_none() },
        }
    })?;
    let response = response.into_inner();
    match check_protocol_version(response.protocol_version) {
        Ok(()) => Ok(response),
        Err(error) => Err(NotRegistered::Refused(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use baton_proto::v1::node_registration_server::{NodeRegistration, NodeRegistrationServer};
    use baton_runtime::SystemClock;
    use baton_types::{Generation, KvDtype, KvLayout, NodeId, NodeProfile, NodeRole};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::testing::{TestClock, soon};

    /// What the conductor says next, and who hears that a node came.
    struct Scripted {
        answers: Mutex<VecDeque<Result<u32, ErrorKind>>>,
        came: mpsc::UnboundedSender<String>,
    }

    #[tonic::async_trait]
    impl NodeRegistration for Scripted {
        async fn register(
            &self,
            request: Request<v1::RegisterRequest>,
        ) -> Result<Response<v1::RegisterResponse>, Status> {
            let node = request.into_inner().node.map(|node| node.name).unwrap_or_default();
            self.came.send(node).unwrap();
            match self.answers.lock().unwrap().pop_front().unwrap() {
                Ok(interval_ms) => {
                    let conductor_id = "0".repeat(16);
                    Ok(Response::new(v1::RegisterResponse {
                        protocol_version: PROTOCOL_VERSION,
                        conductor_id,
                        interval_ms,
                        ..v1::RegisterResponse::default()
                    }))
                }
                Err(kind) => Err(baton_proto::status(kind, "as the test wants it", None)),
            }
        }
    }

    fn info() -> NodeInfo {
        let layout = KvLayout {
            model: 7,
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 8,
            block_tokens: 16,
            dtype: KvDtype::F16,
            num_blocks: 4,
        };
        NodeInfo {
            node: NodeId::new("p0").unwrap(),
            role: NodeRole::Prefill,
            generation: Generation(1),
            address: "http://127.0.0.1:1".into(),
            model: "m".into(),
            vocab_size: 10,
            context_length: 100,
            kv_class: "mock".into(),
            layout,
            profile: NodeProfile::default(),
            vocabulary: String::new(),
        }
    }

    #[test]
    fn conductor_addresses_are_separated_by_commas() {
        let name = |host: &str, port| Name { host: host.to_owned(), port };
        assert_eq!(names("http://a:1, b:2,[::1]:3").unwrap(), [name("a", 1), name("b", 2), name("::1", 3)]);
        for wrong in ["", "a:1,", "a", "a:1,https://b:2", "a:1/path"] {
            assert!(names(wrong).unwrap_err().to_string().contains("host:port"), "{wrong}");
        }
        let many = vec!["a:1"; MAX_CONDUCTORS + 1].join(",");
        assert!(names(&many).unwrap_err().to_string().contains("17 addresses"));
    }

    #[test]
    fn missing_session_is_logged_once_a_minute() {
        let mut without = WithoutSession::default();
        let mut logged = |reason, times: u32| (0..times).filter(|_| without.on_registered(reason)).count();
        assert_eq!((logged("", 5), logged("no route", NO_SESSION_LOG), logged("no route", 1)), (0, 1, 1));
        assert_eq!((logged("", 1), logged("no route", 2)), (0, 1), "it had one in between");
    }

    /// A conductor that gives these answers; its address, and the nodes that come.
    async fn scripted(
        tasks: &TaskSet,
        answers: VecDeque<Result<u32, ErrorKind>>,
    ) -> (SocketAddr, mpsc::UnboundedReceiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answers = Mutex::new(answers);
        let (came, coming) = mpsc::unbounded_channel();
        let end = tasks.clone();
        tasks.spawn("conductor", async move {
            let server = tonic::transport::Server::builder()
                .add_service(NodeRegistrationServer::new(Scripted { answers, came }));
            server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), end.cancelled()).await
        });
        (address, coming)
    }

    #[tokio::test]
    async fn node_that_goes_down_registers_no_more() {
        let tasks = TaskSet::new();
        let (address, mut coming) = scripted(&tasks, [Ok(100), Ok(100), Ok(100)].into()).await;
        let conductor = names(&address.to_string()).unwrap().remove(0);
        let shutdown = Shutdown::new();
        let clock = Arc::new(SystemClock);
        start_registration(conductor, Arc::new(info()), &tasks, shutdown.clone(), clock.clone());
        assert_eq!(soon("the node", coming.recv()).await.as_deref(), Some("p0"));
        shutdown.advance(Phase::NotReady);
        // Twice as long as it would wait.
        clock.sleep(Duration::from_millis(200)).await;
        assert!(coming.try_recv().is_err());
        tasks.join(Duration::from_secs(5)).await.unwrap();
    }

    #[tokio::test]
    async fn node_registers_periodically_and_backs_off_after_failures() {
        let tasks = TaskSet::new();
        let away = Err(ErrorKind::Unavailable);
        let answers = [away, away, Ok(2000), Ok(2000), away, Err(ErrorKind::Invalid), Ok(2000)];
        let (address, mut coming) = scripted(&tasks, answers.into()).await;
        let clock = TestClock::default();
        let info = info();
        let conductor = format!("http://{address}");
        let story = async {
            // Twice away; there, twice; away again, which begins with the short wait; it refuses
            // the node; and then it takes it.
            for wait in [250, 500, 2000, 2000, 250, 5000] {
                assert_eq!(coming.recv().await.unwrap(), "p0");
                clock.pass(Duration::from_millis(wait)).await;
            }
            coming.recv().await.unwrap()
        };
        let last = soon("the story", async {
            tokio::select! {
                () = register_at(&conductor, &info, &clock) => panic!("it goes on for ever"),
                last = story => last,
            }
        });
        assert_eq!(last.await, "p0");
        tasks.join(Duration::from_secs(5)).await.unwrap();
    }

    #[tokio::test]
    async fn conductor_name_is_resolved_again_and_registrations_follow() {
        let addresses = |ports: &[u16]| ports.iter().map(|port| SocketAddr::from(([10, 0, 0, 1], *port))).collect();
        let away = || Err(io::Error::other("no answer"));
        let found: Vec<io::Result<BTreeSet<SocketAddr>>> =
            vec![away(), Ok(addresses(&[1, 2])), away(), Ok(addresses(&[2, 3])), away()];
        let found = &Mutex::new(VecDeque::from(found));
        let running = &Mutex::new(BTreeSet::new());
        /// Registered until it is dropped.
        struct Here<'a>(&'a Mutex<BTreeSet<u16>>, u16);
        impl Drop for Here<'_> {
            fn drop(&mut self) {
                self.0.lock().unwrap().remove(&self.1);
            }
        }
        let find = || -> BoxFuture<'_, _> { Box::pin(async { found.lock().unwrap().pop_front().unwrap() }) };
        let begin = |address: SocketAddr| -> BoxFuture<'_, _> {
            Box::pin(async move {
                running.lock().unwrap().insert(address.port());
                let _here = Here(running, address.port());
                std::future::pending().await
            })
        };
        let clock = TestClock::default();
        let story = async {
            for (wait, there) in [(250, vec![]), (5000, vec![1, 2]), (250, vec![1, 2]), (5000, vec![2, 3])] {
                clock.pass(Duration::from_millis(wait)).await;
                assert_eq!(running.lock().unwrap().iter().copied().collect::<Vec<_>>(), there);
            }
        };
        tokio::select! {
            _ = keep_up("conductors", find, begin, &clock) => panic!("it goes on for ever"),
            () = story => {}
        }
    }
}
