//! Moves bytes between registered memory of two nodes.
