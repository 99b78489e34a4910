//! What goes wrong in a simulated cluster.

use crate::named::named;

named! {
    /// Something that goes wrong.
    FaultKind {
        /// A node's process ends, with all that it holds. It is started again within a second.
        Kill = "kill",
        /// A node does nothing for some seconds.
        Pause = "pause",
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
        /// A read of another node's blocks fails, or comes late. If it fails, a part of it may be
        /// anything.
        Fetch = "fetch",
        /// A write or a read of an SSD fails, or the read comes late.
        Disk = "disk",
    }
}
