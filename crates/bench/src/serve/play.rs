//! Sends each request at its time, and hears all of them.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use indicatif::ProgressBar;
use tokio::time::timeout;

use super::args::{ServeArgs, Target};
use super::arrivals::Arrival;
use super::grpc::Grpc;
use super::openai::OpenAi;
use super::outcome::{End, Sums};
use super::received::{Problem, ReceivedAnswer};
use crate::BenchError;

/// From the beginning to when the first request can be due: time to make its prompt.
const LEAD: Duration = Duration::from_millis(20);

/// A server that answered.
pub enum Server {
    /// With OpenAI's API.
    OpenAi(Box<OpenAi>),
    /// With Baton's.
    Grpc(Grpc),
}

/// What one request came to: nothing is sent before it is polled.
type UnderWay<'a> = Pin<Box<dyn Future<Output = (End, Duration)> + Send + 'a>>;

/// What a run came to.
pub struct Played {
    /// All requests.
    pub sums: Sums,
    /// From the beginning to the last end.
    pub elapsed: Duration,
    /// Most requests under way at a time.
    pub in_flight_max: usize,
}

impl Server {
    /// Finds the model, and that there is a server.
    pub async fn connect(target: &Target, args: &ServeArgs) -> Result<Self, BenchError> {
        match target {
            Target::OpenAi(host) => OpenAi::connect(host, args).await.map(|server| Self::OpenAi(Box::new(server))),
            Target::Grpc(host) => Grpc::connect(host, args).await.map(Self::Grpc),
        }
    }

    /// Its API and its model.
    pub fn names(&self) -> (&'static str, &str) {
        match self {
            Self::OpenAi(server) => ("openai", &server.model),
            Self::Grpc(server) => ("grpc", &server.model),
        }
    }

    /// Makes a request ready: what takes time is done here, and not when it is due.
    fn request(&self, index: usize, arrival: &Arrival, due: Instant, limit: Duration) -> UnderWay<'_> {
        let max_tokens = arrival.max_tokens;
        match self {
            Self::OpenAi(server) => {
                let body = server.body(arrival);
                Box::pin(timed(due, max_tokens, limit, async move |received: &mut ReceivedAnswer| {
                    server.ask(body, received).await
                }))
            }
            Self::Grpc(server) => {
                let request = server.request(arrival);
                Box::pin(timed(due, max_tokens, limit, async move |received: &mut ReceivedAnswer| {
                    server.ask(index, request, received).await
                }))
            }
        }
    }
}

/// Asks now, and says how it ended and how late `now` was.
async fn timed<Ask>(due: Instant, max_tokens: u32, limit: Duration, ask: Ask) -> (End, Duration)
where
    Ask: AsyncFnOnce(&mut ReceivedAnswer) -> Result<(), Problem>,
{
    let slip = due.elapsed();
    let mut received = ReceivedAnswer::of_at_most(max_tokens);
    let result = timeout(limit, ask(&mut received)).await;
    let none = || Err(Problem::Aborted(format!("no end within {} s", limit.as_secs_f64())));
    (End::of(due, max_tokens, &received, result.unwrap_or_else(|_| none())), slip)
}

/// Plays all arrivals, at the servers in turn. A request that is late to end delays none that comes
/// after it.
pub async fn play(servers: &[Server], arrivals: &[Arrival], args: &ServeArgs, bar: &ProgressBar) -> Played {
    let limits = args.limits();
    let mut sums = Sums::default();
    let mut under_way = FuturesUnordered::new();
    let mut in_flight_max = 0;
    let start = baton_runtime::now() + LEAD;
    let mut ended = |(end, slip): (End, Duration), left: usize| {
        sums.add(end, slip, limits);
        bar.set_message(format!("{left} under way"));
        bar.inc(1);
    };
    for ((index, arrival), server) in arrivals.iter().enumerate().zip(servers.iter().cycle()) {
        let due = start + arrival.due;
        let request = server.request(index, arrival, due, args.timeout);
        let mut wait = std::pin::pin!(baton_runtime::sleep_until(due));
        loop {
            tokio::select! {
                () = &mut wait => break,
                Some(one) = under_way.next() => ended(one, under_way.len()),
            }
        }
        if under_way.len() >= args.most_in_flight as usize {
            ended((End::NotSent, Duration::ZERO), under_way.len());
            continue;
        }
        under_way.push(request);
        in_flight_max = in_flight_max.max(under_way.len());
        // Polls it for the first time, which sends it, however many more are due now.
        while let Some(Some(one)) = under_way.next().now_or_never() {
            ended(one, under_way.len());
        }
    }
    while let Some(one) = under_way.next().await {
        ended(one, under_way.len());
    }
    Played { sums, elapsed: start.elapsed(), in_flight_max }
}
