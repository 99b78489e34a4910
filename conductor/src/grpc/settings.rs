//! Settings at run time on the wire.

use std::sync::Arc;

use baton_proto::v1;
use baton_runtime::Phase;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::frontend::Frontend;
use crate::run_time_settings::{AT_RUN_TIME, InForce};

pub(super) type Changes = ReceiverStream<Result<v1::RunTimeSettings, Status>>;

pub(super) fn response(in_force: &InForce) -> v1::RunTimeSettings {
    let InForce { shared, settings } = in_force;
    let setting = |key: &str| v1::RunTimeSetting {
        key: key.to_owned(),
        value: settings.value(key),
        origin: settings.origins.told(key),
    };
    v1::RunTimeSettings {
        version: shared.version,
        by: shared.by.clone(),
        set_at_ms: shared.set_at_ms,
        settings: AT_RUN_TIME.map(setting).to_vec(),
    }
}

/// What is in force now and after each change. A drain does not wait for those who watch.
pub(super) fn changes(frontend: &Arc<Frontend>) -> Changes {
    let (out, changes) = mpsc::channel(1);
    let frontend = Arc::clone(frontend);
    frontend.clone().tasks.spawn_request("settings watch", async move {
        let mut in_force = frontend.settings.in_force();
        loop {
            let told = response(&in_force.borrow_and_update());
            tokio::select! {
                sent = out.send(Ok(told)) => if sent.is_err() {
                    return;
                },
                () = frontend.shutdown.wait_for(Phase::Draining) => return,
            }
            tokio::select! {
                changed = in_force.changed() => if changed.is_err() {
                    return;
                },
                () = out.closed() => return,
                () = frontend.shutdown.wait_for(Phase::Draining) => return,
            }
        }
    });
    ReceiverStream::new(changes)
}
