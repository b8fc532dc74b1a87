//! How large an engine is, and why one cannot be made.

use core::fmt;

use verbring_slab::{ArenaFull, Table};
use verbring_sys::DeviceError;

use crate::engine::MAX_PORTS;
use crate::flight::{Flights, MAX_FLIGHTS};
use crate::key::{ImportInfo, MAX_INDEX, Memory, WindowInfo};
use crate::peer::{Peer, PeerInfo};
use crate::ring::{MAX_ENTRIES, ring_bytes};

/// How large an engine is, and who it is. Every size is rounded up to a power of two.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Entries of a submission ring.
    pub sq_entries: u32,
    /// Entries of a completion ring.
    pub cq_entries: u32,
    /// Operations that are pending at one time, in all rings together: at most half of `cq_entries`, both rounded up to
    /// powers of two.
    pub max_outstanding: u32,
    /// Connections.
    pub max_peers: u32,
    /// Registrations of own memory.
    pub max_windows: u32,
    /// Imported regions.
    pub max_imports: u32,
    /// The incarnation id: another for each engine that ever was, and the same that its device tells its peers.
    pub node: u64,
    /// What tokens are made from. Nobody else knows it.
    pub secret: [u8; 16],
}

impl Default for Config {
    /// Sizes only: `node` and `secret` are for the caller to fill in.
    fn default() -> Config {
        Config {
            sq_entries: 1024,
            cq_entries: 2048,
            max_outstanding: 1024,
            max_peers: 64,
            max_windows: 64,
            max_imports: 256,
            node: 0,
            secret: [0; 16],
        }
    }
}

impl Config {
    /// The bytes of an arena that such an engine takes.
    pub const fn bytes(&self) -> usize {
        let windows = Table::<Memory>::capacity_for(self.max_windows);
        let peers = Table::<Peer>::capacity_for(self.max_peers);
        ring_bytes(self.sq_entries.next_power_of_two(), self.cq_entries.next_power_of_two())
            + Flights::bytes(self.max_outstanding)
            + Table::<Peer>::bytes(peers)
            + Table::<PeerInfo>::bytes(peers)
            + Table::<u64>::bytes(peers.div_ceil(64))
            + Table::<Memory>::bytes(self.max_windows)
            + Table::<WindowInfo>::bytes(self.max_windows)
            + Table::<u64>::bytes(windows * peers.div_ceil(64))
            + Table::<Memory>::bytes(self.max_imports)
            + Table::<ImportInfo>::bytes(self.max_imports)
            + 4096
    }
}

impl Config {
    /// Whether every size is one that an engine can have.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        let outstanding = self.max_outstanding.checked_next_power_of_two().unwrap_or(u32::MAX);
        let sizes = [
            ("sq_entries", self.sq_entries, MAX_ENTRIES),
            ("cq_entries", self.cq_entries, MAX_ENTRIES),
            ("max_outstanding", self.max_outstanding, MAX_FLIGHTS),
            ("max_peers", self.max_peers, MAX_INDEX),
            ("max_windows", self.max_windows, MAX_INDEX),
            ("max_imports", self.max_imports, MAX_INDEX),
            // Or receives, with what was reaped and not told yet, could reserve the whole completion ring, and not even a
            // cancel would be taken.
            ("max_outstanding", outstanding, self.cq_entries.min(MAX_ENTRIES).next_power_of_two() / 2),
        ];
        match sizes.into_iter().find(|(_, value, limit)| !(1..=*limit).contains(value)) {
            Some((what, _, limit)) => Err(EngineError::Size { what, limit }),
            None => Ok(()),
        }
    }
}

/// Why an engine could not be made, or a connection not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineError {
    /// A size in the [`Config`] is 0 or too large.
    Size {
        /// Which one.
        what: &'static str,
        /// The largest.
        limit: u32,
    },
    /// The arena is too small.
    Arena(ArenaFull),
    /// The peer table is full.
    PeerTableFull {
        /// Its capacity.
        limit: u32,
    },
    /// The peer id is unknown, or was disconnected.
    NoSuchPeer,
    /// An engine has at most [`MAX_PORTS`] ports.
    TooManyPorts,
    /// The memory is no ring of this version, or not of the sizes it says.
    NotARing,
    /// Without the feature `std` the arena must lie in static memory.
    NotStatic,
    /// The slab is larger than a completion can name blocks of: 256 GiB.
    SlabTooLarge,
    /// The device said no.
    Device(DeviceError),
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineError::Size { what, limit } => write!(f, "Config::{what} must be 1 to {limit}"),
            EngineError::Arena(full) => full.fmt(f),
            EngineError::PeerTableFull { limit } => {
                write!(f, "all {limit} places for peers are taken; disconnect lost ones, or raise Config::max_peers")
            }
            EngineError::NoSuchPeer => {
                f.write_str("the peer id is unknown, or was disconnected; use connect, which gives a new one")
            }
            EngineError::TooManyPorts => write!(f, "an engine has at most {MAX_PORTS} ports, its own included"),
            EngineError::NotARing => {
                f.write_str("the memory is no ring of this version; use one release on both ends of it")
            }
            EngineError::NotStatic => {
                f.write_str("without std the arena lies in static memory; use Arena::from_static")
            }
            EngineError::SlabTooLarge => f.write_str("a slab has at most 256 GiB of blocks; make it smaller"),
            EngineError::Device(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for EngineError {}

impl From<DeviceError> for EngineError {
    fn from(error: DeviceError) -> EngineError {
        EngineError::Device(error)
    }
}

impl From<ArenaFull> for EngineError {
    fn from(full: ArenaFull) -> EngineError {
        EngineError::Arena(full)
    }
}
