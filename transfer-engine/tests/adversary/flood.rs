//! Peers that ask for more than an owner has: connections, and memory for its books.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use baton_transfer_engine::{SegmentDescriptor, SpanPair, TransportChoice};
use baton_types::GrantId;
use tokio::task::JoinSet;

use crate::hostile::{CONNECT_MS, GRANTED, PROGRESS_MS, Scene, grant};
use crate::node::LONG;
use crate::peer::Peer;
use crate::raw::{Raw, Reply, VERSION, commit, frame, hello, kind, rejected, via};

const CONNECTIONS: u64 = 10_000;
/// As many are tried at a time.
const AT_A_TIME: u64 = 200;
/// As many are taken, by default.
const MAX_CONNECTIONS: u64 = 1024;
/// And as many more may be in their handshake.
const MAX_HANDSHAKES: u64 = 256;
/// Within which a peer that is new gets its first batch through.
const NEWCOMER: Duration = Duration::from_secs(5);
/// Trailers of parts of one batch, which its owner keeps account of.
const TRAILERS: u32 = 1_000_000;
/// Connections that keep their owner busy: more than it has threads.
const BUSY: u64 = 4;
/// By how much that may grow the owner's memory.
const BOOKS: u64 = 8 << 20;

/// Lets this process have as many files as it may.
#[allow(unsafe_code)] // setrlimit(2) has no safe form in the standard library
pub fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls only read or write the structure, which lives here.
    let set = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit)
    };
    assert_eq!(set, 0);
    assert!(limit.rlim_max >= 4096, "the tests need 4096 open files, the limit is {}", limit.rlim_max);
}

/// Connections, of which each says `greeting(its number)`. Those that are not refused at once stay.
async fn crowd_in(victim: &mut Peer, owner: &SegmentDescriptor, greeting: impl Fn(u64) -> Vec<u8>) -> Vec<Raw> {
    let mut kept = Vec::new();
    let mut refused = 0;
    let before = victim.usage().await.files;
    for first in (0..CONNECTIONS).step_by(AT_A_TIME as usize) {
        let mut wave = Vec::new();
        for connection in first..first + AT_A_TIME {
            let mut raw = Raw::connect(owner).await.unwrap();
            raw.send(&greeting(connection)).await;
            wave.push(raw);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        let files = victim.usage().await.files - before;
        assert!(files <= MAX_CONNECTIONS + MAX_HANDSHAKES, "{files} more files are open");
        for mut raw in wave {
            if !raw.has_heard() {
                kept.push(raw);
                continue;
            }
            match raw.reply().await {
                Reply::Reject(code) => {
                    assert_eq!((code, raw.reply().await), (rejected::FULL, Reply::Closed));
                    refused += 1;
                }
                Reply::Welcome => kept.push(raw),
                // Taken, and its time is over.
                Reply::Closed => {}
                other => panic!("{other:?}"),
            }
        }
    }
    println!("{CONNECTIONS} connections: {refused} refused as too many, {} not refused so far", kept.len());
    kept
}

/// Ten thousand connections that say nothing.
pub async fn silent_connections(transport: TransportChoice) {
    raise_file_limit();
    let mut scene = Scene::set(transport).await;
    scene
        .endures("silent connections", async |victim, descriptor| {
            let kept = crowd_in(victim, descriptor, |_| Vec::new()).await;
            let begun = Instant::now();
            let limit = Duration::from_millis(CONNECT_MS + 500);
            for mut raw in kept {
                let end = raw.reply_within(limit.saturating_sub(begun.elapsed()) + Duration::from_millis(1)).await;
                // One that the victim had not come to yet may still be told that it is one too
                // many.
                assert!(matches!(end, Some(Reply::Closed | Reply::Reject(rejected::FULL))), "{end:?}");
            }
        })
        .await;
    newcomer(&scene.descriptor, transport, &mut scene.victim).await;
}

/// Ten thousand connections that greet well and stay.
pub async fn idle_connections(transport: TransportChoice) {
    raise_file_limit();
    let mut scene = Scene::set(transport).await;
    let kept = scene
        .endures("idle connections", async |victim, descriptor| {
            // Under many names: a limit for each would not help.
            let names: Vec<_> = (0..100).map(|name| format!("squatter{name}")).collect();
            let name = |connection: u64| names[connection as usize % names.len()].as_str();
            crowd_in(victim, descriptor, |connection| {
                hello(VERSION, connection, (name(connection), 1), ("victim", 1), via(descriptor))
            })
            .await
        })
        .await;
    newcomer(&scene.descriptor, transport, &mut scene.victim).await;
    drop(kept);
}

/// Connections that begin a frame and do not go on.
pub async fn half_heads(transport: TransportChoice) {
    raise_file_limit();
    let mut scene = Scene::set(transport).await;
    let mut raws = Vec::new();
    for connection in 0..100 {
        raws.push(scene.hostile(connection).await);
    }
    scene
        .endures("half heads", async |_, _| {
            for raw in &mut raws {
                raw.send(&[2, 0, 0, 0]).await;
            }
            let begun = Instant::now();
            let limit = Duration::from_millis(2 * PROGRESS_MS + 500);
            for raw in &mut raws {
                let end = raw.reply_within(limit.saturating_sub(begun.elapsed()) + Duration::from_millis(1)).await;
                assert_eq!(end, Some(Reply::Closed), "a head that does not go on");
            }
        })
        .await;
}

/// A peer that the victim has not seen yet gets a batch through.
async fn newcomer(descriptor: &SegmentDescriptor, transport: TransportChoice, victim: &mut Peer) {
    victim.grant(300, ("newcomer", 1), GRANTED, LONG).await;
    let mut newcomer = Peer::start("newcomer", transport, 4096).await;
    newcomer.aim(descriptor).await;
    let begun = Instant::now();
    let span = SpanPair { local_offset: 0, remote_offset: GRANTED.start, len: 4096 };
    newcomer.write(1, GrantId(300), &[span]).await;
    let outcome = newcomer.outcome().await;
    assert!(outcome.is_ok() && begun.elapsed() <= NEWCOMER, "a newcomer, after {:?}: {outcome:?}", begun.elapsed());
    println!("a newcomer's first batch took {:.1?}", begun.elapsed());
}

/// A batch that has 4 billion parts, says its writer, and a million trailers of them.
pub async fn endless_batch(transport: TransportChoice) {
    let mut scene = Scene::set(transport).await;
    let raw = scene.hostile(1).await;
    let before = scene.victim.usage().await.resident;
    let replies = scene.endures("an endless batch", async |_, _| send_trailers(raw).await).await;
    let growth = scene.victim.usage().await.resident.saturating_sub(before);
    println!("{TRAILERS} trailers of one batch: {growth} bytes, replies {replies:?}");
    assert!(growth <= BOOKS, "a batch of one peer took {growth} bytes of the owner's memory");
}

/// Returns how often each reply came.
async fn send_trailers(mut raw: Raw) -> HashMap<String, u32> {
    let mut replies = HashMap::new();
    for first in (0..TRAILERS).step_by(200) {
        let some: Vec<u8> =
            (first..first + 200).flat_map(|part| commit(1, grant::HOSTILE, 0, (part, u32::MAX), 0)).collect();
        raw.send(&some).await;
        for _ in 0..200 {
            let reply = raw.reply().await;
            let end = reply == Reply::Closed;
            *replies.entry(format!("{reply:?}")).or_default() += 1;
            if end {
                return replies;
            }
        }
    }
    replies
}

/// Frames that cost the victim work, need no answer, and never stop coming.
pub async fn busy_peers(transport: TransportChoice) {
    let mut scene = Scene::set(transport).await;
    let mut raws = Vec::new();
    for connection in 0..BUSY {
        raws.push(scene.hostile(connection).await);
    }
    let one = frame(kind::CANCEL, &[1u64.to_be_bytes(), grant::UNKNOWN.to_be_bytes()].concat());
    let many = one.repeat(10_000);
    let frames = scene
        .endures("busy peers", async |_, _| {
            let mut floods = JoinSet::new();
            for raw in raws {
                floods.spawn(flood(raw, many.clone(), Instant::now() + Duration::from_secs(2)));
            }
            floods.join_all().await.into_iter().sum::<u64>() / one.len() as u64
        })
        .await;
    println!("busy peers: {frames} frames");
}

/// Sends the same, again and again. Returns the bytes.
async fn flood(mut raw: Raw, bytes: Vec<u8>, until: Instant) -> u64 {
    let mut sent = 0;
    while Instant::now() < until && raw.try_send(&bytes).await.is_ok() {
        sent += bytes.len() as u64;
    }
    sent
}
