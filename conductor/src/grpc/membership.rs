//! `baton.v1.NodeRegistration`: what nodes call.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::{PROTOCOL_VERSION, check_protocol_version, required, v1};
use baton_types::NodeInfo;
use tonic::{Request, Response, Status};

use crate::frontend::Frontend;
use crate::membership::join;
use crate::unjoined::NotJoined;

/// How often nodes register again.
const REGISTER_INTERVAL: Duration = Duration::from_secs(2);

/// The service over a frontend.
pub struct NodeRegistrationService(pub Arc<Frontend>);

#[tonic::async_trait]
impl v1::node_registration_server::NodeRegistration for NodeRegistrationService {
    async fn register(&self, request: Request<v1::RegisterRequest>) -> Result<Response<v1::RegisterResponse>, Status> {
        let request = request.into_inner();
        let info = required("node", request.node).and_then(NodeInfo::try_from);
        if let Err(error) = check_protocol_version(request.protocol_version) {
            if let Ok(info) = &info {
                let now = self.0.clock.now();
                self.0.unjoined.on_not_joined(now, info, NotJoined::Refused, &error.to_string());
            }
            return Err(error.into());
        }
        let info = info?;
        let no_session = self.0.unjoined.reason(&info).unwrap_or_default();
        join(&self.0, info).map_err(|refused| baton_proto::status(refused.kind, refused.message, None))?;
        Ok(Response::new(v1::RegisterResponse {
            protocol_version: PROTOCOL_VERSION,
            conductor_id: self.0.id.to_string(),
            interval_ms: REGISTER_INTERVAL.as_millis() as u32,
            no_session,
        }))
    }
}
