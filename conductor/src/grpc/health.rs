//! gRPC's standard health: of the server as a whole, whose service has no name, and of the one that
//! clients call.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1;
use futures::stream::unfold;
use tokio_stream::Stream;
use tonic::server::NamedService;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::InferenceService;
use crate::frontend::Frontend;

/// How often is looked whether what watchers were told is still true.
const WATCH_POLL: Duration = Duration::from_millis(100);

/// The service over a frontend.
pub struct HealthService(pub Arc<Frontend>);

#[tonic::async_trait]
impl Health for HealthService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        check_name(&request.get_ref().service)?;
        Ok(Response::new(health(self.0.is_ready())))
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        check_name(&request.get_ref().service)?;
        let changes = unfold((Arc::clone(&self.0), None), |(frontend, told)| async move {
            loop {
                let ready = frontend.is_ready();
                if told != Some(ready) {
                    return Some((Ok(health(ready)), (frontend, Some(ready))));
                }
                tokio::select! {
                    () = frontend.clock.sleep(WATCH_POLL) => {}
                    // The server waits for its streams.
                    () = frontend.tasks.cancelled() => return None,
                }
            }
        });
        Ok(Response::new(Box::pin(changes)))
    }
}

fn check_name(service: &str) -> Result<(), Status> {
    let inference = <v1::inference_server::InferenceServer<InferenceService> as NamedService>::NAME;
    match service {
        "" => Ok(()),
        name if name == inference => Ok(()),
        name => Err(Status::not_found(format!("service: '{name}', but health is told of '' and of '{inference}'"))),
    }
}

fn health(ready: bool) -> HealthCheckResponse {
    let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    HealthCheckResponse { status: status as i32 }
}
