//! What a device is ([`Device`]), and the real ones.
//!
//! * [`local::Local`] (`no_std`): both ends in one address space.
//! * [`shm::Shm`] (feature `shm`): other processes of this host.
//! * [`Deferred`]: another device, harsher: it answers late, in another order, and fails on request.
//!
//! [`CpuNic`] is the part that `local` and `shm` share: queue pairs whose work the calling CPU does itself, by the
//! copies and atomics of [`copy`] and over the memory layout of [`lane`]. [`channel`] is the control channel of every
//! device that has a medium in between.
#![no_std]

#[cfg(feature = "std")]
extern crate std;

pub mod channel;
pub mod copy;
#[cfg(feature = "std")]
pub mod cpu;
mod cpu_nic;
mod deferred;
mod device;
pub mod lane;
pub mod local;
mod mrs;
#[cfg(feature = "std")]
pub mod rc;
pub mod rnic;
#[cfg(feature = "shm")]
pub mod shm;
mod status;
mod wr;

pub use cpu_nic::CpuNic;
pub use deferred::{Deferred, Faults};
pub use device::{
    CLASSES, Cancel, Caps, Device, DeviceError, Domain, Event, Granted, Level, Link, MESSAGE_BYTES, Memory, Message,
    Mr, Rights,
};
pub use status::Status;
pub use wr::{Posted, Qp, Wc, Wr, WrOp};
