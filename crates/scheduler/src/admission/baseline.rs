//! Prefill load at arrival, decode load after the prefill (Mooncake, section 7.1).

use super::{AdmissionPolicy, Assessment, Excess};

/// Looks at the prefill load only; the decode node is looked at when the prompt is computed.
#[derive(Debug)]
pub struct Baseline;

impl AdmissionPolicy for Baseline {
    fn boxed_clone(&self) -> Box<dyn AdmissionPolicy> {
        Box::new(Self)
    }

    fn admit(&mut self, request: &Assessment) -> Result<(), Excess> {
        request.check_ttft(request.ttft)
    }
}
