//! `baton.v1.Inference`: what clients call.

use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use baton_intake::MessageBudget;
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_types::{ErrorKind, NodeRole, ParseIdError, RequestId};
use tokio_stream::Stream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::coalesce::Unwritten;
use crate::error::GenerateError;
use crate::frontend::{Frontend, Responses, new_request_id};

/// Metadata of a call that was refused.
const REQUEST_ID: &str = "x-request-id";

/// The service over a frontend.
pub struct InferenceService {
    /// The frontend.
    pub frontend: Arc<Frontend>,
    /// Whether answers name the nodes that served them.
    pub names_nodes: bool,
}

/// A request's responses; dropping it (the client went away) aborts the request.
pub struct ResponseStream {
    responses: Responses,
    /// Answers whose end was not told yet; none after an error.
    unfinished: u32,
    names_nodes: bool,
    /// Of the connection that they are written to.
    unwritten: Unwritten,
}

impl Stream for ResponseStream {
    type Item = Result<v1::GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(mut outgoing) = ready!(self.responses.poll_recv(cx)) else {
            // Its client did not read for too long, or there is a bug. Without a status it would
            // look like an answer.
            let cut_off = || Err(baton_proto::status(ErrorKind::DeadlineExceeded, "the answer was cut off", None));
            return Poll::Ready((std::mem::take(&mut self.unfinished) > 0).then(cut_off));
        };
        if let Ok(v1::GenerateResponse { event: Some(Event::Finished(finished)), .. }) = &mut outgoing.response
            && !self.names_nodes
        {
            finished.prefill_node.clear();
            finished.decode_node.clear();
            if let Some(timeline) = &mut finished.timeline {
                timeline.kv_transfer = None;
                timeline.prefix_fetch = None;
                timeline.migrated = None;
            }
        }
        self.unfinished = match &outgoing.response {
            Ok(v1::GenerateResponse { event: Some(Event::Finished(_)), .. }) => self.unfinished.saturating_sub(1),
            Ok(_) => self.unfinished,
            Err(_) => 0,
        };
        if let Some(heard) = outgoing.heard {
            self.unwritten.push(heard);
        }
        Poll::Ready(Some(outgoing.response.map_err(|error| Status::from(&error))))
    }
}

#[tonic::async_trait]
impl v1::inference_server::Inference for InferenceService {
    type GenerateStream = ResponseStream;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<ResponseStream>, Status> {
        let unwritten = request.extensions().get::<Unwritten>().cloned().unwrap_or_default();
        let taken_in = request.extensions().get::<MessageBudget>().and_then(MessageBudget::take).map(Arc::new);
        let call_timeout = call_timeout(request.metadata())?;
        let mut request = request.into_inner();
        if let Some(of_call) = call_timeout {
            let own = request.timeout_ms.filter(|own| *own != 0.0);
            request.timeout_ms = Some(own.map_or(of_call, |own| own.min(of_call)));
        }
        let unfinished = request.n.max(1);
        let id = new_request_id();
        let responses =
            self.frontend.generate(id, request, taken_in).await.map_err(|error| with_id(Status::from(&error), id))?;
        Ok(Response::new(ResponseStream { responses, unfinished, names_nodes: self.names_nodes, unwritten }))
    }

    async fn abort(&self, request: Request<v1::AbortRequest>) -> Result<Response<v1::AbortResponse>, Status> {
        let id: RequestId = parse_id(&request.into_inner().request_id)?;
        if self.frontend.live.abort(id) {
            return Ok(Response::new(v1::AbortResponse {}));
        }
        let problem = format!("request {id} is not running on this conductor");
        Err(Status::from(&GenerateError::NotFound { field: "request_id", problem }))
    }

    async fn list_models(&self, _: Request<v1::ListModelsRequest>) -> Result<Response<v1::ListModelsResponse>, Status> {
        let mut card = self.frontend.model_card();
        if !self.names_nodes {
            card.prefill_nodes = 0;
            card.decode_nodes = 0;
            card.fingerprint.clear();
        }
        Ok(Response::new(v1::ListModelsResponse { models: vec![card] }))
    }
}

/// What operators find a refused request by.
fn with_id(mut status: Status, id: RequestId) -> Status {
    // Digits can stand in metadata.
    if let Ok(id) = id.to_string().parse() {
        status.metadata_mut().insert(REQUEST_ID, id);
    }
    status
}

/// How long the call may take, milliseconds: at most eight digits and a unit, as in `200m`.
fn call_timeout(metadata: &MetadataMap) -> Result<Option<f64>, Status> {
    let Some(given) = metadata.get("grpc-timeout") else { return Ok(None) };
    let text = given.to_str().unwrap_or_default();
    let bad =
        || Status::invalid_argument(format!("grpc-timeout: '{text}', but must be digits and one of H, M, S, m, u, n"));
    let (digits, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(bad)?;
    let millis = match unit {
        "H" => 3_600_000.0,
        "M" => 60_000.0,
        "S" => 1000.0,
        "m" => 1.0,
        "u" => 1e-3,
        "n" => 1e-6,
        _ => return Err(bad()),
    };
    let is_number = (1..=8).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
    let count: u32 = Some(digits).filter(|_| is_number).and_then(|digits| digits.parse().ok()).ok_or_else(bad)?;
    // Nothing at all would be no limit.
    Ok(Some((f64::from(count) * millis).max(1e-3)))
}

/// An id, or a part of one, from a field `request_id`.
pub(super) fn parse_id<T: FromStr<Err = ParseIdError>>(text: &str) -> Result<T, Status> {
    text.parse().map_err(|error: ParseIdError| Status::from(&GenerateError::invalid("request_id", error.to_string())))
}

impl Frontend {
    /// The model as it is served now; sizes are 0 while no node is ready.
    pub fn model_card(&self) -> v1::Model {
        let limits = self.node_limits();
        let cluster = self.cluster();
        let ready = || cluster.nodes().filter(|node| node.is_ready());
        let count = |role| ready().filter(|node| node.info().role == role).count() as u32;
        v1::Model {
            name: self.model.name().to_owned(),
            context_length: limits.map_or(0, |limits| limits.context_length),
            max_model_len: limits.map_or(0, |limits| limits.sequence),
            vocab_size: limits.map_or(0, |limits| limits.vocab_size),
            fingerprint: ready().next().map(|node| node.info().layout.fingerprint().to_string()).unwrap_or_default(),
            prefill_nodes: count(NodeRole::Prefill),
            decode_nodes: count(NodeRole::Decode),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeout_metadata_is_parsed_or_refused() {
        let of = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            call_timeout(&metadata).map_err(|status| status.code())
        };
        assert_eq!(call_timeout(&MetadataMap::new()).unwrap(), None);
        assert_eq!(
            [of("200m"), of("3S"), of("1H"), of("50u")],
            [200.0, 3000.0, 3_600_000.0, 0.05].map(|ms| Ok(Some(ms)))
        );
        assert_eq!(of("0n"), Ok(Some(1e-3)), "over at once");
        for bad in ["", "S", "1", "123456789S", "-1S", "1.5S", "1X", "1s"] {
            assert_eq!(of(bad), Err(tonic::Code::InvalidArgument), "{bad}");
        }
    }
}
