//! One-sided communication through rings: an application pushes sqes, the engine executes them on a device, and
//! completions come back as cqes. Polled only; no heap, lock, system call or panic between `push` and `reap`.
//!
//! ```text
//! app --Sqe--> SQ --> submit(now): checked, started, or held --Wr--> Device --> the peer's memory
//! app <--Cqe-- CQ <-- poll(now):   ended                     <--Wc-- Device
//! ```
//! * [`Engine`] drives one [`Device`]; [`Port`] is the application's end of its rings, which the engine also has for
//!   itself: everything that can be called on a port can be called on an engine.
//! * [`Window`] is memory that peers may reach, [`Buf`] a block that only this process may; [`Remote`] is what one side
//!   hands to the other to let it in.
//! * `pinned` (feature `std`) runs an engine on a core of its own.
//!
//! Time is nanoseconds of a monotonic clock of the caller's choice, always an argument.
#![no_std]

#[cfg(feature = "std")]
extern crate std;

mod access;
mod config;
mod connect;
mod cqe;
mod engine;
mod fast;
mod flight;
mod held;
mod key;
mod message;
mod notice;
mod peer;
#[cfg(feature = "std")]
pub mod pinned;
mod port;
mod remote;
mod ring;
mod sqe;
mod sync;
#[cfg(feature = "std")]
mod wait;
mod window;

pub use access::AccessError;
pub use config::{Config, EngineError};
pub use cqe::Cqe;
pub use engine::{Engine, MAX_PORTS};
pub use key::{ImportState, PeerId, RemoteKey, Target};
pub use notice::Notice;
pub use peer::PeerState;
pub use port::{Batch, Completion, Opts, Port, PushError};
pub use remote::{REMOTE_BYTES, Remote, RemoteError};
pub use ring::{MAX_ENTRIES, RING_VERSION, ring_bytes};
pub use sqe::{Local, MAX_INLINE, Opcode, Signal, Sqe, SqeFlags};
pub use verbring_slab::{Arena, Buf, SizeClass, Slab, SlabError};
#[cfg(feature = "std")]
pub use verbring_slab::{Pages, Region, RegionError, RegionOptions};
#[cfg(feature = "shm")]
pub use verbring_sys::shm::{Shm, ShmOptions};
pub use verbring_sys::{Caps, Device, DeviceError, Domain, Level, Memory, Rights, Status};
#[cfg(feature = "std")]
pub use wait::{Clock, WaitError, open_with};
#[cfg(feature = "shm")]
pub use wait::{ShmEngine, open_shm};
pub use window::Window;

/// Who may go to, and be shared with, another thread; and that a device can stand behind a `dyn` where speed does not
/// matter.
mod threads {
    use static_assertions::{assert_impl_all, assert_not_impl_any, assert_obj_safe};
    use verbring_sys::local::Local;

    assert_obj_safe!(crate::Device);
    assert_impl_all!(crate::Window: Send, Sync);
    assert_impl_all!(crate::Remote: Send, Sync, Copy);
    assert_impl_all!(crate::Port: Send);
    assert_not_impl_any!(crate::Port: Sync, Clone);
    assert_impl_all!(crate::Engine<Local>: Send);
    assert_not_impl_any!(crate::Engine<Local>: Sync, Clone);
    #[cfg(feature = "shm")]
    assert_impl_all!(crate::Engine<crate::Shm>: Send);
}
