//! RoCEv2 packets over a UDP socket of the kernel.

mod calls;
mod message;
mod socket;

pub use socket::{Failure, MAX_PACKET, Options, PORT, Packet, Socket, Stats};
