//! RoCEv2 over the UDP of the kernel: a batched socket, and the device on it.

mod calls;
mod carrier;
mod device;
mod message;
mod socket;
mod wire;

pub use carrier::TcpCarrier;
pub use device::{UdpDevice, UdpOptions, open};
pub use socket::{Failure, MAX_PACKET, Options, PORT, Packet, Socket, Stats};
pub use wire::UdpWire;
