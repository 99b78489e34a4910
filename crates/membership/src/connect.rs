//! The way to etcd.

use std::time::Duration;

use baton_runtime::{Clock, within};
use etcd_client::{Client, ConnectOptions};

use crate::{Etcd, EtcdError};

/// How long etcd may take to answer.
const ANSWER: Duration = Duration::from_secs(1);

/// A connection to one of its members.
pub(crate) async fn connect(etcd: &Etcd, clock: &dyn Clock) -> Result<Client, EtcdError> {
    let options = ConnectOptions::new().with_connect_timeout(ANSWER);
    answered(clock, Client::connect(&etcd.endpoints, Some(options))).await
}

/// What etcd says in time.
pub(crate) async fn answered<T>(
    clock: &dyn Clock,
    asked: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, EtcdError> {
    Ok(within(clock, ANSWER, asked).await.ok_or(EtcdError::Silent(ANSWER))??)
}
