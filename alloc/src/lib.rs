//! Memory of verbring: the mappings, the tables carved from them, and the slab.
//!
//! * [`Region`] (feature `std`) makes and owns every mapping: private or shared, in the largest pages to be had, and
//!   says which it got.
//! * [`Arena`] hands out fixed-capacity [`Table`]s from one mapping at start.
//! * [`Slab`] carves one mapping, registered once, into move-only blocks ([`Buf`]).
//!
//! Nothing here allocates after creation. Without `std` the memory comes from the caller.
#![no_std]

#[cfg(feature = "std")]
extern crate std;

mod arena;
#[cfg(feature = "std")]
mod region;
mod slab;

pub use arena::{Arena, ArenaFull, Table, View};
#[cfg(feature = "std")]
pub use region::{Pages, Region, RegionError, RegionOptions};
pub use slab::{Buf, MAX_CLASSES, RawBuf, SizeClass, Slab, SlabError, SlabHandle, StaleBuf};
