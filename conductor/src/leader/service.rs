//! `baton.v1.Leader`: what other conductors call on the one that leads.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::follower_message::Message;
use baton_types::{ConductorId, Declared, FromLeader, Question, ToLeader};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::desk::{Answer, Decided, DecisionReasons, Following};
use crate::frontend::Frontend;
use crate::grpc::explain;

/// Answers that may wait for a conductor; it is not read from while they do.
const QUEUED_ANSWERS: usize = 256;
/// How long a conductor may take to say who it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// The service over a frontend.
pub struct LeaderService(pub Arc<Frontend>);

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
        let first = first.filter(|first| matches!(first.message, Some(Message::Greet(_)))).map(ToLeader::try_from);
        let Some(ToLeader::Greet { conductor, attempts }) = first.transpose()? else {
            return Err(Status::invalid_argument("message: the first one must be a greeting"));
        };
        let (answers, stream) = mpsc::channel(QUEUED_ANSWERS);
        let Some(follower) = Follower::new(&self.0, conductor, &attempts) else {
            return Err(Status::failed_precondition("this conductor does not lead"));
        };
        self.0.tasks.spawn_request("follower", follower.serve(messages, answers));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// Another conductor, while its stream lasts.
struct Follower {
    frontend: Arc<Frontend>,
    following: Following,
}

impl Follower {
    fn new(frontend: &Arc<Frontend>, who: ConductorId, attempts: &[Declared]) -> Option<Self> {
        let following = frontend.on_follower(who, attempts)?;
        tracing::info!(conductor = %who, attempts = attempts.len(), "another conductor follows");
        Some(Self { frontend: Arc::clone(frontend), following })
    }

    async fn serve(
        self,
        mut messages: Streaming<v1::FollowerMessage>,
        answers: mpsc::Sender<Result<v1::LeaderMessage, Status>>,
    ) {
        let frontend = Arc::clone(&self.frontend);
        tokio::select! {
            ended = self.relay(&mut messages, &answers) => if let Err(status) = ended {
                // If the follower is gone, it is not read.
                let _ = answers.send(Err(status)).await;
            },
            () = self.following.over.cancelled() => {}
            () = frontend.tasks.cancelled() => {}
        }
        tracing::info!(conductor = %self.following.of.who, "a follower's stream is over");
    }

    async fn relay(
        &self,
        messages: &mut Streaming<v1::FollowerMessage>,
        answers: &mpsc::Sender<Result<v1::LeaderMessage, Status>>,
    ) -> Result<(), Status> {
        let tell = async |message: FromLeader<v1::ExplainResponse>| {
            answers.send(Ok(message.into())).await.map_err(|_| Status::cancelled("gone"))
        };
        tell(FromLeader::Greeted { term: self.following.of.term }).await?;
        if let Some(settles) = self.following.of.settles {
            self.frontend.clock.sleep_until(settles).await;
        }
        while let Some(message) = messages.message().await? {
            match message.try_into()? {
                ToLeader::Ask(question) => {
                    if let Some(answer) = self.frontend.on_follower_asked(&self.following, &question) {
                        tell(told(&question, answer)).await?;
                    }
                }
                ToLeader::LedgerUpdate(key, entry) => {
                    self.frontend.on_follower_ledger_update(&self.following, key, &entry)
                }
                ToLeader::Greet { .. } => return Err(Status::invalid_argument("message: a second greeting")),
            }
        }
        Ok(())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.frontend.on_follower_gone(&self.following);
    }
}

/// An answer as it is told to the conductor that asked.
fn told(question: &Question, answer: Answer) -> FromLeader<v1::ExplainResponse> {
    let key = question.key();
    let why = |grounds, prompt_tokens| match grounds {
        DecisionReasons::Own(explanation) => Some(explain::response(prompt_tokens, &explanation)),
        DecisionReasons::FromLeader(explanation) => Some(*explanation),
        DecisionReasons::NoLeader => None,
    };
    match answer {
        // Who asked knows how long its prompt is.
        Answer::Placed(decided) => {
            let Decided { placed, grounds, .. } = *decided;
            FromLeader::Placed { key, placed: Box::new(placed), why: why(grounds, 0) }
        }
        Answer::Reselected(to) => FromLeader::Reselected(key, to),
        Answer::Migrated(to) => FromLeader::Migrated(key, to),
        Answer::Explained(grounds) => {
            let prompt_tokens = if let Question::Explain(of) = question { of.prompt_tokens } else { 0 };
            FromLeader::Explained(key, why(grounds, prompt_tokens))
        }
    }
}
