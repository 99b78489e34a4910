//! The decode load of the time when the prompt would be computed (Mooncake, section 7.4).

use baton_scheduler::{AdmissionPolicy, Assessment, Excess};

/// Adds the prompts that are computed by then to the decode node's batch. Drops the answers that
/// are by then older than a fixed number of times the mean (`ClusterConfig::answer_factor`).
#[derive(Debug)]
pub(super) struct Predictive;

impl AdmissionPolicy for Predictive {
    fn name(&self) -> &'static str {
        "predictive"
    }

    fn boxed_clone(&self) -> Box<dyn AdmissionPolicy> {
        Box::new(Self)
    }

    fn admit(&mut self, request: &Assessment) -> Result<(), Excess> {
        request.check_ttft(request.ttft)?;
        request.check_decode(request.decode_then)
    }
}
