//! A whole RNIC in software that speaks RoCEv2, and the network it can be tested in.
//!
//! * [`packet`]: RoCEv2, byte for byte.
//! * [`nic`]: the NIC, a sans-IO core without clock, socket or allocator (`no_std`).
//! * [`soft`]: the NIC with a wire, as an [`Rnic`](verbring_sys::rnic::Rnic).
//! * [`device`] (feature `std`): devices on a fabric.
//! * [`udp`] (feature `std`): a socket on UDP port 4791.
//! * [`fabric`] (feature `std`): a network of them in one thread, under one seed and virtual time.
#![no_std]

#[cfg(any(test, feature = "std"))]
extern crate std;

#[cfg(feature = "std")]
pub mod device;
#[cfg(feature = "std")]
pub mod fabric;
pub mod nic;
pub mod packet;
pub mod psn;
pub mod random;
pub mod soft;
#[cfg(feature = "std")]
pub mod udp;
