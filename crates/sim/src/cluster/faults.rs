//! What goes wrong, and when.

use std::time::Duration;

use baton_types::Generation;

use super::World;
use super::node::Node;
use super::wire::{CONDUCTOR, Disturbance, Event, Input, Start};
use crate::faults::FaultKind;

/// Until the conductor notices that a process is gone, and until it is back, as `baton up` starts a
/// mock node again.
const NOTICE: Duration = Duration::from_millis(1);
const RESTART: Duration = Duration::from_secs(1);
/// How long a process that is asked to end may take.
const GRACE: Duration = Duration::from_secs(10);
/// The longest that a fault that passes lasts, and that a slow message takes more.
const LONGEST: Duration = Duration::from_secs(20);
const SLOWEST: Duration = Duration::from_millis(500);
/// Until a node whose session broke has another one, at most: nodes register every two seconds.
const REGISTERED_WITHIN: Duration = Duration::from_secs(2);

impl World<'_> {
    /// Something goes wrong some time after `from`.
    pub(super) fn await_fault(&mut self, from: Duration) {
        if let Some(every) = self.options.fault_every {
            let after = self.chance.exponential(every.as_secs_f64());
            self.wire.queue.after(from + Duration::from_secs_f64(after), Event::Fault);
        }
    }

    /// Something goes wrong now, or with what a node does next.
    pub(super) fn on_fault(&mut self) {
        self.await_fault(Duration::ZERO);
        let drawn = self.chance.below(FaultKind::ALL.len() as u64) as usize;
        let fault = self.options.fault.unwrap_or(FaultKind::ALL[drawn]);
        let node = self.chance.below(self.nodes.len() as u64) as usize;
        let now = self.wire.now();
        let lasts = LONGEST.mul_f64(self.chance.unit().powi(2));
        let wire = &mut self.wire;
        match fault {
            FaultKind::Kill => self.end_process(node),
            FaultKind::Pause => {
                let hung_until = &mut self.nodes[node].hung_until;
                *hung_until = (now + lasts).max(*hung_until);
            }
            FaultKind::Drain => {
                let start = self.nodes[node].start;
                if self.chance.below(2) == 0 {
                    wire.at(now, start, Input::Drain);
                    wire.queue.after(GRACE, Event::GraceOver(start));
                } else {
                    wire.at(now, start, Input::DrainOrdered(true));
                    wire.at(now + lasts, start, Input::DrainOrdered(false));
                }
            }
            FaultKind::Partition => {
                // Any other process.
                let other = (node + 1 + self.chance.below(self.nodes.len() as u64) as usize) % (self.nodes.len() + 1);
                let other = if other == self.nodes.len() { CONDUCTOR } else { other };
                wire.disturbances.push(Disturbance { between: (node, Some(other)), until: now + lasts, delay: None });
            }
            FaultKind::Slow => {
                let delay = Some(SLOWEST.mul_f64(self.chance.unit()));
                wire.disturbances.push(Disturbance { between: (node, None), until: now + lasts, delay });
            }
            FaultKind::Session => {
                let start = self.nodes[node].start;
                self.frontend.on_left(wire, start);
                wire.at(now, start, Input::SessionClosed);
                wire.queue.after(REGISTERED_WITHIN.mul_f64(self.chance.unit()), Event::Returned(start));
            }
            FaultKind::Abort => {
                let chance = &mut self.chance;
                if !self.frontend.abort(wire, |count| chance.below(count)) {
                    return;
                }
            }
            FaultKind::Message
            | FaultKind::Events
            | FaultKind::Step
            | FaultKind::Push
            | FaultKind::Fetch
            | FaultKind::Disk => return self.nodes[node].arm(fault),
        }
        self.wire.note(fault);
    }

    /// A node's process ends, and is started again.
    pub(super) fn end_process(&mut self, node: usize) {
        let now = self.wire.now();
        let before = self.nodes[node].start;
        let start = Start { generation: Generation(before.generation.0 + 1), ..before };
        self.nodes[node].on_killed(&mut self.wire);
        self.nodes[node] = Node::new(now, start, &self.configs[node], self.profile, self.chance.next_u64());
        if let Some(contents) = &mut self.wire.contents {
            contents.clear(node);
        }
        self.wire.queue.after(NOTICE, Event::Left(before));
        self.wire.queue.after(RESTART, Event::Returned(start));
    }

    /// A node has a session with the conductor again.
    pub(super) fn on_returned(&mut self, start: Start) {
        if self.frontend.has_session(start.node) {
            return;
        }
        if let Some(until) = self.wire.cut_until(start.node, CONDUCTOR) {
            return self.wire.queue.at(until, Event::Returned(start));
        }
        self.frontend.on_joined(&mut self.wire, start.node, self.nodes[start.node].info.clone());
        if !std::mem::replace(&mut self.nodes[start.node].reports, true) {
            self.wire.at(self.wire.now(), start, Input::Report);
        }
    }

    /// Until when the node hangs that this would happen at.
    pub(super) fn hung_until(&self, event: &Event) -> Option<std::time::Instant> {
        let start = match event {
            Event::Node(start, _) | Event::Command(start, ..) => start,
            Event::FetchedLayer { reader: start, .. } | Event::Pushed { from: start, .. } => start,
            _ => return None,
        };
        let node = &self.nodes[start.node];
        (node.start == *start && node.hung_until > self.wire.now()).then_some(node.hung_until)
    }
}
