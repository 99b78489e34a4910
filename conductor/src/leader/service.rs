//! `baton.v1.Leader`: what other conductors call on the one that leads.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1::follower_message::Message;
use baton_proto::v1::leader_message::Message as Told;
use baton_proto::{check_protocol_version, required, v1};
use baton_scheduler::Declared;
use baton_types::{ConductorId, ErrorKind};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::desk::Following;
use super::wire;
use crate::front_door::FrontDoor;

/// Answers that may wait for a conductor; it is not read from while they do.
const QUEUED_ANSWERS: usize = 256;
/// How long a conductor may take to say who it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// The service over a front door.
pub struct LeaderService(pub Arc<FrontDoor>);

type Answers = Pin<Box<dyn Stream<Item = Result<v1::LeaderMessage, Status>> + Send>>;

#[tonic::async_trait]
impl v1::leader_server::Leader for LeaderService {
    type FollowStream = Answers;

    async fn follow(&self, request: Request<Streaming<v1::FollowerMessage>>) -> Result<Response<Answers>, Status> {
        let mut messages = request.into_inner();
        let first = tokio::select! {
            first = messages.message() => first?,
            () = self.0.clock.sleep(GREETING_TIMEOUT) => return Err(Status::deadline_exceeded("no greeting came")),
        };
        let Some(Message::Greet(greet)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("message: the first one must be a greeting"));
        };
        check_protocol_version(greet.protocol_version)?;
        let who: ConductorId = greet
            .conductor_id
            .parse()
            .map_err(|error| baton_proto::status(ErrorKind::Invalid, format!("conductor_id: {error}"), None))?;
        let attempts = greet.attempts.into_iter().map(wire::declared).collect::<Result<Vec<_>, _>>()?;
        let (answers, stream) = mpsc::channel(QUEUED_ANSWERS);
        let Some(follower) = Follower::new(&self.0, who, &attempts) else {
            return Err(Status::failed_precondition("this conductor does not lead"));
        };
        self.0.tasks.spawn_request("follower", follower.serve(messages, answers));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// Another conductor, while its stream lasts.
struct Follower {
    door: Arc<FrontDoor>,
    following: Following,
}

impl Follower {
    fn new(door: &Arc<FrontDoor>, who: ConductorId, attempts: &[Declared]) -> Option<Self> {
        let following = door.on_follower(who, attempts)?;
        tracing::info!(conductor = %who, attempts = attempts.len(), "another conductor follows");
        Some(Self { door: Arc::clone(door), following })
    }

    async fn serve(
        self,
        mut messages: Streaming<v1::FollowerMessage>,
        answers: mpsc::Sender<Result<v1::LeaderMessage, Status>>,
    ) {
        let door = Arc::clone(&self.door);
        tokio::select! {
            ended = self.relay(&mut messages, &answers) => if let Err(status) = ended {
                // If it is gone, nobody reads it.
                let _ = answers.send(Err(status)).await;
            },
            () = self.following.reign.over.cancelled() => {}
            () = door.tasks.cancelled() => {}
        }
        tracing::info!(conductor = %self.following.who, "another conductor's stream is over");
    }

    async fn relay(
        &self,
        messages: &mut Streaming<v1::FollowerMessage>,
        answers: &mpsc::Sender<Result<v1::LeaderMessage, Status>>,
    ) -> Result<(), Status> {
        let tell = async |message: Told| {
            let message = v1::LeaderMessage { message: Some(message) };
            answers.send(Ok(message)).await.map_err(|_| Status::cancelled("gone"))
        };
        tell(Told::Greeted(v1::Greeted { term: self.following.reign.term })).await?;
        if let Some(settles) = self.following.reign.settles {
            self.door.clock.sleep_until(settles).await;
        }
        while let Some(message) = messages.message().await? {
            let message = required("message", message.message)?;
            if let Some(answer) = self.door.on_follower_message(&self.following, message)? {
                tell(answer).await?;
            }
        }
        Ok(())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.door.on_follower_gone(&self.following);
    }
}
