//! The larger of both loads at arrival (Mooncake, section 7.2).

use super::{AdmissionPolicy, Assessment, Excess};

/// Looks at the decode node as it runs now, which says little of when the prompt will be computed.
/// So the loads of both pools swing against each other.
#[derive(Debug)]
pub struct Early;

impl AdmissionPolicy for Early {
    fn name(&self) -> &'static str {
        "early"
    }

    fn boxed_clone(&self) -> Box<dyn AdmissionPolicy> {
        Box::new(Self)
    }

    fn admit(&mut self, request: &Assessment) -> Result<(), Excess> {
        request.check_ttft(request.ttft)?;
        request.check_decode(request.decode_now)
    }
}
