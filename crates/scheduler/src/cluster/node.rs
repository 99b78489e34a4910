//! One node as the conductor sees it.

use std::time::{Duration, Instant};

use baton_kv_cache::NodeSlot;
use baton_types::{Load, NodeInfo};

use super::node_forecast::LastSteps;
use super::predictor::Introduced;
use super::trust::Trust;
use crate::cost::SpeedFactor;
use crate::ledger::NodeCharges;

/// Whether a node can take requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// It can.
    Ready,
    /// It missed reports: only if no other node can.
    Suspect,
    /// It finishes what it has.
    Draining,
    /// It finished what it had, and left.
    Drained,
    /// It is gone unexpectedly.
    Lost,
}

impl NodeState {
    /// `ready`, `suspect`, `draining`, `drained` or `lost`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Lost => "lost",
        }
    }

    /// Whether the node is not here any more.
    pub const fn is_gone(self) -> bool {
        matches!(self, Self::Drained | Self::Lost)
    }
}

/// A node, its last report, and what it was charged.
#[derive(Debug)]
pub struct ClusterNode {
    info: NodeInfo,
    state: NodeState,
    load: Load,
    reported: Instant,
    /// When it left; none while it is here.
    left: Option<Instant>,
    joined: Instant,
    pub(crate) charges: NodeCharges,
    /// Index of its cost models.
    pub(super) class: usize,
    /// Number of its KV compatibility class.
    pub(super) kv_class: usize,
    pub(super) speed: SpeedFactor,
    pub(super) last_steps: LastSteps,
    /// In the prefix index; none if that is full.
    pub(super) slot: Option<NodeSlot>,
    /// Whether what it holds was forgotten since its last report.
    pub(super) is_expired: bool,
    /// An operator asked it to drain. Its reports say so too, but later.
    drain_ordered: bool,
    pub(super) trust: Trust,
}

impl ClusterNode {
    /// `kv_class` is the number of its KV compatibility class.
    pub(super) fn new(
        now: Instant,
        info: NodeInfo,
        introduced: Introduced,
        kv_class: usize,
        slot: Option<NodeSlot>,
    ) -> Self {
        let Introduced { class, speed } = introduced;
        Self {
            info,
            state: NodeState::Ready,
            load: Load::default(),
            reported: now,
            left: None,
            joined: now,
            charges: NodeCharges::default(),
            class,
            kv_class,
            speed,
            last_steps: LastSteps::default(),
            slot,
            is_expired: false,
            drain_ordered: false,
            trust: Trust::default(),
        }
    }

    /// How it introduced itself.
    pub fn info(&self) -> &NodeInfo {
        &self.info
    }

    /// Whether it can take requests.
    pub fn state(&self) -> NodeState {
        self.state
    }

    /// Whether it is [`NodeState::Ready`].
    pub fn is_ready(&self) -> bool {
        self.state == NodeState::Ready
    }

    /// Whether it may still give a request room.
    pub(super) fn takes_grants(&self) -> bool {
        matches!(self.state, NodeState::Ready | NodeState::Suspect)
    }

    /// Its last report.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// When the last report came, or when it joined.
    pub fn reported(&self) -> Instant {
        self.reported
    }

    /// When it left; none while it is here.
    pub(super) fn left(&self) -> Option<Instant> {
        self.left
    }

    /// Requests placed there that have not ended.
    pub fn placed(&self) -> usize {
        self.charges.requests
    }

    /// When it joined.
    pub(super) fn joined(&self) -> Instant {
        self.joined
    }

    /// How far it is into its slow start, 0 to 1.
    pub(super) fn warmth(&self, now: Instant, slow_start: Duration) -> f64 {
        let age = now.saturating_duration_since(self.joined);
        if age >= slow_start { 1.0 } else { age.as_secs_f64() / slow_start.as_secs_f64() }
    }

    pub(super) fn on_load(&mut self, now: Instant, load: Load) {
        if self.state.is_gone() {
            return;
        }
        // From its own word on, its reports say it all: another conductor may have it take requests
        // again.
        let ordered = std::mem::take(&mut self.drain_ordered);
        self.drain_ordered = ordered && !load.draining;
        self.state = if load.draining || ordered {
            NodeState::Draining
        } else if load.stalled {
            NodeState::Suspect
        } else {
            NodeState::Ready
        };
        self.load = load;
        self.reported = now;
        self.is_expired = false;
    }

    pub(super) fn on_suspect(&mut self) {
        if self.state == NodeState::Ready {
            self.state = NodeState::Suspect;
        }
    }

    /// From now on, and whatever a report says that is on its way.
    pub(super) fn on_drain_ordered(&mut self) {
        if !self.state.is_gone() {
            self.drain_ordered = true;
            self.state = NodeState::Draining;
        }
    }

    /// Its reports say from when on it takes requests again.
    pub(super) fn on_undrain_ordered(&mut self) {
        self.drain_ordered = false;
    }

    pub(super) fn on_left(&mut self, now: Instant, state: NodeState) {
        self.state = state;
        self.left = Some(now);
        self.charges = NodeCharges::default();
    }
}
