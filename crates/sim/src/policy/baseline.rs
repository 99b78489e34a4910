//! Prefill load at arrival (Mooncake, section 7.1). The second look of the paper, at the decode
//! node when the prompt is computed, is the decode node's own: it refuses the grant.

use baton_scheduler::{AdmissionPolicy, Assessment, Excess};

/// Looks at the prefill load only.
#[derive(Debug)]
pub(super) struct Baseline;

impl AdmissionPolicy for Baseline {
    fn name(&self) -> &'static str {
        "baseline"
    }

    fn boxed_clone(&self) -> Box<dyn AdmissionPolicy> {
        Box::new(Self)
    }

    fn admit(&mut self, request: &Assessment) -> Result<(), Excess> {
        request.check_ttft(request.ttft)
    }
}
