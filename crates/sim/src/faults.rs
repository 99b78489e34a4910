//! What goes wrong in a simulated cluster.

use std::str::FromStr;

macro_rules! fault_kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// Something that goes wrong.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum FaultKind { $($(#[$doc])* $kind,)* }

        impl FaultKind {
            /// Every kind.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Its name on the command line.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$kind => $name,)* }
            }
        }
    };
}

fault_kinds! {
    /// A node's process ends, with all that it holds. It is started again within a second.
    Kill = "kill",
    /// A node does nothing for some seconds.
    Hang = "hang",
    /// A node is asked to stop: it hands on what it has, ends, and is started again.
    Drain = "drain",
    /// Nothing gets from one process to another for some seconds.
    Partition = "partition",
    /// Messages to and from a node take up to half a second, for some seconds.
    Slow = "slow",
    /// The session of a node with the conductor breaks. Both live on.
    Session = "session",
    /// A question from node to node is lost, or its answer is.
    Message = "message",
    /// A message with changes of a prefix cache is lost.
    Events = "events",
    /// A client leaves.
    Abort = "abort",
    /// A step of an engine fails.
    Step = "step",
    /// A batch of writes fails. A part of it may have landed.
    Push = "push",
    /// A read of another node's blocks fails, or comes late. If it fails, a part of it may be anything.
    Fetch = "fetch",
    /// A write or a read of an SSD fails.
    Disk = "disk",
}

impl FromStr for FaultKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.iter().find(|kind| kind.as_str() == name).copied();
        let names: Vec<_> = Self::ALL.iter().map(|kind| kind.as_str()).collect();
        known.ok_or_else(|| format!("'{name}' is none of {}", names.join(", ")))
    }
}
