//! The ports and what is served on each.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::middleware;
use baton_proto::{FILE_DESCRIPTORS, MAX_MESSAGE_BYTES, v1};
use baton_runtime::serve::{ConnectionLimits, Connections, Port, Protocol, connections_within_descriptors};
use baton_runtime::settings::BadSetting;
use baton_runtime::{TaskSet, Telemetry};
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic_health::pb::health_server::HealthServer;

use crate::budget::Budget;
use crate::coalesce::Coalesced;
use crate::config::Settings;
use crate::front_door::FrontDoor;
use crate::grpc::{ClusterService, HealthService, InferenceService, Intake, take_in};
use crate::http;

/// The listeners, bound and not served yet.
pub struct Ports {
    grpc: TcpListener,
    http: TcpListener,
    clients: Connections,
    limits: ConnectionLimits,
    budget: Budget,
}

/// Where they listen.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// gRPC.
    pub grpc: SocketAddr,
    /// HTTP.
    pub http: SocketAddr,
}

impl Ports {
    /// Binds what the settings name. Answers that clients do not read are ended after `stall`.
    pub async fn bind(settings: &Settings, stall: Duration) -> anyhow::Result<Self> {
        Ok(Self {
            grpc: listen("grpc", &settings.grpc).await?,
            http: listen("http", &settings.http).await?,
            clients: Connections::new(connections_within_descriptors(settings.max_connections)),
            budget: Budget::new(settings.max_body_bytes_total),
            limits: ConnectionLimits { stall, ..ConnectionLimits::default() },
        })
    }

    /// Where they listen.
    pub fn addresses(&self) -> std::io::Result<Addresses> {
        Ok(Addresses { grpc: self.grpc.local_addr()?, http: self.http.local_addr()? })
    }

    /// Serves until `tasks` are cancelled.
    pub fn serve(self, door: &Arc<FrontDoor>, telemetry: &Telemetry, tasks: &TaskSet) -> anyhow::Result<()> {
        let (connections, limits) = (self.clients, self.limits);
        let grpc = Port {
            name: "grpc",
            listener: self.grpc,
            protocol: Protocol::Http2,
            limits,
            connections: connections.clone(),
        };
        let relayed = door.metrics.relayed.clone();
        let coalesced = move |socket| Coalesced::new(socket, relayed.clone());
        grpc.serve_with(grpc_routes(door, self.budget.clone())?, coalesced, tasks);
        let http = Port { name: "http", listener: self.http, protocol: Protocol::Http1, limits, connections };
        http.serve(http::router(Arc::clone(door), telemetry.clone(), self.budget), tasks);
        Ok(())
    }
}

async fn listen(key: &'static str, address: &str) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    Ok(listener.map_err(|error| {
        BadSetting::unavailable(key, format!("cannot listen on '{address}': {error} (expected host:port that is free)"))
    })?)
}

fn grpc_routes(door: &Arc<FrontDoor>, budget: Budget) -> anyhow::Result<Routes> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let inference = v1::inference_server::InferenceServer::new(InferenceService(Arc::clone(door)))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let cluster = v1::cluster_server::ClusterServer::new(ClusterService(Arc::clone(door)));
    let health = HealthServer::new(HealthService(Arc::clone(door)));
    let intake = Arc::new(Intake::new(FILE_DESCRIPTORS, budget)?);
    let ours = Routes::new(inference).add_service(cluster).into_axum_router();
    let ours = ours.layer(middleware::from_fn_with_state(intake, take_in));
    Ok(Routes::from(ours).add_service(health).add_service(reflection).prepare())
}
