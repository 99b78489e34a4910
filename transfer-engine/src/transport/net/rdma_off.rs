//! In place of `rdma` if that is not built in: nothing of it can exist.

use std::io;
use std::sync::Arc;

use baton_memory::MemoryRegion;

use super::owner::receiver::Receiver;
use super::wire::stream::Stream;
use super::writer::carrier::Carrier;
use super::writer::lane::LaneTask;
use super::writer::part::{Carried, Part};
use crate::SegmentId;

pub(crate) enum Devices {}

impl Devices {
    pub(crate) fn open(_: Option<&str>, _: Option<u32>) -> Result<Self, String> {
        Err("rdma is not built into this binary (cargo feature `rdma`)".into())
    }

    pub(crate) async fn dispatch(&self) {
        match *self {}
    }

    pub(crate) fn register(&self, _: SegmentId, _: &Arc<MemoryRegion>) -> Result<(), String> {
        match *self {}
    }

    pub(crate) fn has(&self, _: SegmentId) -> bool {
        match *self {}
    }

    pub(crate) fn addresses(&self, _: &str) -> Vec<String> {
        match *self {}
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RdmaAddress {}

impl RdmaAddress {
    pub(crate) fn parse(_: &str) -> Option<Self> {
        None
    }

    pub(crate) fn control(&self) -> &str {
        match *self {}
    }
}

impl std::fmt::Display for RdmaAddress {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {}
    }
}

pub(crate) enum RdmaCarrier {}

impl Carrier for RdmaCarrier {
    async fn carry_part(&self, _: &LaneTask, _: &Part, _: Vec<u8>) -> io::Result<Carried> {
        match *self {}
    }
}

pub(crate) async fn connect(devices: &Devices, _: &RdmaAddress, _: &Stream) -> io::Result<RdmaCarrier> {
    match *devices {}
}

pub(crate) enum Landing {}

impl Landing {
    pub(crate) async fn fence(self) {
        match self {}
    }
}

impl Receiver<'_> {
    pub(crate) async fn serve_rdma(&mut self, _: &mut Option<Landing>) -> io::Result<()> {
        Err(super::owner::receiver::invalid("rdma is not built into this binary"))
    }
}
