//! `baton.v1.Cluster`: what operators call.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::{PROTOCOL_VERSION, required, v1};
use baton_runtime::within;
use baton_scheduler::{ClusterNode, NodeState};
use baton_types::{NodeInfo, RequestId};
use tonic::{Request, Response, Status};

use crate::decision_log::Found;
use crate::error::GenerateError;
use crate::frontend::{Frontend, MAX_CLIENT_ID_BYTES};
use crate::nodes::NodeSessions;

/// Ids that are told if several begin alike, the latest ones.
const TOLD_IDS: usize = 8;
/// How long one node may take for its check.
const INTEGRITY_TIMEOUT: Duration = Duration::from_secs(5);

/// The service over a frontend.
pub struct ClusterService(pub Arc<Frontend>);

#[tonic::async_trait]
impl v1::cluster_server::Cluster for ClusterService {
    type WatchSettingsStream = super::settings::Changes;

    async fn get_settings(&self, _: Request<v1::GetSettingsRequest>) -> Result<Response<v1::RunTimeSettings>, Status> {
        Ok(Response::new(super::settings::response(&self.0.settings.in_force().borrow())))
    }

    async fn set_settings(
        &self,
        request: Request<v1::SetSettingsRequest>,
    ) -> Result<Response<v1::RunTimeSettings>, Status> {
        let v1::SetSettingsRequest { values, by } = request.into_inner();
        let values: Vec<_> = values.into_iter().collect();
        let changed = self.0.change_settings(&values, &by).await.map_err(|error| Status::from(&error))?;
        Ok(Response::new(super::settings::response(&changed)))
    }

    async fn watch_settings(
        &self,
        _: Request<v1::WatchSettingsRequest>,
    ) -> Result<Response<Self::WatchSettingsStream>, Status> {
        Ok(Response::new(super::settings::changes(&self.0)))
    }

    async fn list_nodes(&self, _: Request<v1::ListNodesRequest>) -> Result<Response<v1::ListNodesResponse>, Status> {
        let now = self.0.clock.now();
        let cluster = self.0.cluster();
        let nodes = cluster.nodes().map(|node| v1::NodeStatus {
            info: Some(node.info().into()),
            state: node.state().as_str().into(),
            load: (!node.state().is_gone()).then(|| node.load().into()),
            report_age_s: now.saturating_duration_since(node.reported()).as_secs_f64(),
            placed: node.placed() as u32,
            transfer: self.0.transfers.of(&node.info().node).as_ref().map(Into::into),
        });
        let nodes = nodes.collect();
        drop(cluster);
        let unjoined = self.0.unjoined.lately(now).into_iter().map(|(start, unjoined)| v1::UnjoinedNode {
            name: start.node.to_string(),
            role: unjoined.role.as_str().into(),
            generation: start.generation.to_string(),
            address: unjoined.address,
            state: unjoined.why.as_str().into(),
            reason: unjoined.reason,
            asked_age_s: now.saturating_duration_since(unjoined.asked).as_secs_f64(),
        });
        Ok(Response::new(v1::ListNodesResponse { nodes, unjoined: unjoined.collect() }))
    }

    async fn check_integrity(
        &self,
        _: Request<v1::CheckClusterIntegrityRequest>,
    ) -> Result<Response<v1::CheckClusterIntegrityResponse>, Status> {
        // A node that was drained has said goodbye: there is no node to ask, and nothing wrong with
        // that.
        let asked = |node: &&ClusterNode| node.state() != NodeState::Drained;
        let infos: Vec<NodeInfo> = self.0.cluster().nodes().filter(asked).map(|node| node.info().clone()).collect();
        let mut nodes = Vec::with_capacity(infos.len());
        for (start, unjoined) in self.0.unjoined.lately(self.0.clock.now()) {
            let problem = format!("{}: {}", unjoined.why.as_str(), unjoined.reason);
            nodes.push(v1::NodeIntegrity { node: start.node.to_string(), problem, load: None });
        }
        for info in infos {
            let (problem, load) = match within(&*self.0.clock, INTEGRITY_TIMEOUT, check_node(&info)).await {
                Some(Ok(response)) => (response.problem, response.load),
                Some(Err(problem)) => (problem, None),
                None => (format!("no answer within {INTEGRITY_TIMEOUT:?}"), None),
            };
            nodes.push(v1::NodeIntegrity { node: info.node.to_string(), problem, load });
        }
        Ok(Response::new(v1::CheckClusterIntegrityResponse { nodes }))
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Result<Response<v1::ExplainResponse>, Status> {
        let request = required("request", request.into_inner().request)?;
        Ok(Response::new(self.0.explain(request).await.map_err(|error| Status::from(&error))?))
    }

    async fn cluster_load(
        &self,
        _: Request<v1::ClusterLoadRequest>,
    ) -> Result<Response<v1::ClusterLoadResponse>, Status> {
        Ok(Response::new(super::load::response(&self.0)))
    }

    async fn explain_by_id(
        &self,
        request: Request<v1::ExplainByIdRequest>,
    ) -> Result<Response<v1::ExplainByIdResponse>, Status> {
        let id = request.into_inner().request_id;
        let told: String = id.chars().take(MAX_CLIENT_ID_BYTES).collect();
        let error = match self.0.decision_log.find(&id) {
            Found::One(record) => return Ok(Response::new(super::explain::record(&record))),
            Found::None => {
                let kept = self.0.decision_log.len();
                let problem = format!("no request '{told}' is among the last {kept} that this conductor keeps");
                GenerateError::NotFound { field: "request_id", problem }
            }
            Found::Several(ids) => GenerateError::invalid("request_id", several(&told, &ids)),
        };
        Err(Status::from(&error))
    }

    async fn cache_status(
        &self,
        request: Request<v1::CacheStatusRequest>,
    ) -> Result<Response<v1::CacheStatusResponse>, Status> {
        Ok(Response::new(super::cache::status(&self.0, request.into_inner().top)))
    }

    async fn cache_lookup(
        &self,
        request: Request<v1::CacheLookupRequest>,
    ) -> Result<Response<v1::CacheLookupResponse>, Status> {
        let request = required("request", request.into_inner().request)?;
        let found = super::cache::lookup(&self.0, request).await.map_err(|error| Status::from(&error))?;
        Ok(Response::new(found))
    }

    async fn clear_cache(
        &self,
        request: Request<v1::ClearCacheRequest>,
    ) -> Result<Response<v1::ClearCacheResponse>, Status> {
        let told = super::cache::clear(&self.0, &request.into_inner().node).map_err(|error| Status::from(&error))?;
        Ok(Response::new(told))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        super::drain::order(&self.0, &request.into_inner().node, true).map_err(|error| Status::from(&error))?;
        Ok(Response::new(v1::DrainResponse {}))
    }

    async fn undrain(&self, request: Request<v1::UndrainRequest>) -> Result<Response<v1::UndrainResponse>, Status> {
        super::drain::order(&self.0, &request.into_inner().node, false).map_err(|error| Status::from(&error))?;
        Ok(Response::new(v1::UndrainResponse {}))
    }

    async fn version(&self, _: Request<v1::VersionRequest>) -> Result<Response<v1::VersionResponse>, Status> {
        Ok(Response::new(v1::VersionResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            protocol_version: PROTOCOL_VERSION,
            conductor_id: self.0.id.to_string(),
            leads: self.0.desk.leads(),
            ready: self.0.is_ready(),
        }))
    }
}

/// What is told of requests that an id names all.
fn several(id: &str, ids: &[RequestId]) -> String {
    let told: Vec<_> = ids.iter().take(TOLD_IDS).map(ToString::to_string).collect();
    let more = ids.len().saturating_sub(TOLD_IDS);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{} requests have '{id}' or begin with it; give one of their ids: {}{more}", ids.len(), told.join(", "))
}

async fn check_node(info: &NodeInfo) -> Result<v1::CheckIntegrityResponse, String> {
    let mut client = NodeSessions::client(&info.address).await.map_err(|error| error.to_string())?;
    let response = client.check_integrity(v1::CheckIntegrityRequest {}).await;
    response.map(Response::into_inner).map_err(|status| status.message().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ambiguous_request_id_lists_at_most_eight_matches() {
        let ids: Vec<_> = (1..=10).map(RequestId).collect();
        let two = several("000000", &ids[..2]);
        let listed = "00000000000000000000000000000001, 00000000000000000000000000000002";
        assert_eq!(two, format!("2 requests have '000000' or begin with it; give one of their ids: {listed}"));
        assert!(several("000000", &ids).ends_with("00000008 and 2 more"));
    }
}
