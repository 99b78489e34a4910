//! Payload over the connection itself.

mod owner;
mod writer;

pub(crate) use writer::TcpCarrier;
