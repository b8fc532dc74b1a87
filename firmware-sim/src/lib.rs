//! A whole RNIC in software that speaks RoCEv2, and the network it can be tested in.
//!
//! * [`packet`]: RoCEv2, byte for byte.
//! * [`nic`]: the NIC, a sans-IO core without clock, socket or allocator (`no_std`).
#![no_std]

#[cfg(any(test, feature = "std"))]
extern crate std;

pub mod nic;
pub mod packet;
pub mod psn;
pub mod random;
