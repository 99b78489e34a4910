//! Answers of peers, counted before they are decoded.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use axum::body::Body;
use baton_proto::FILE_DESCRIPTORS;
use http::{Request, Response};
use tonic::transport::Channel;
use tower_service::Service;

use crate::budget::Budget;
use crate::message::{Intake, Messages};

/// A channel to a peer that may send what is small on the wire and large in memory.
#[derive(Debug, Clone)]
pub struct CountedChannel(Channel);

impl From<Channel> for CountedChannel {
    fn from(channel: Channel) -> Self {
        Self(channel)
    }
}

/// Counts without a budget: answers that are asked for are not refused for others.
fn intake() -> Arc<Intake> {
    static INTAKE: OnceLock<Arc<Intake>> = OnceLock::new();
    let new = || {
        let intake = Intake::new(FILE_DESCRIPTORS, Budget::new(usize::MAX), |_, _| 0);
        Arc::new(intake.expect("the build wrote the descriptors"))
    };
    Arc::clone(INTAKE.get_or_init(new))
}

impl Service<Request<tonic::body::Body>> for CountedChannel {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let intake = intake();
        let method = intake.method(request.uri().path());
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            Ok(answer.map(|body| match method {
                Some(method) => Body::new(Messages::new(intake, method.output, Body::new(body))),
                None => Body::new(body),
            }))
        })
    }
}
