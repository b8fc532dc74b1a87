//! Keys: the small numbers by which an entry names memory, and the tables behind them.
//!
//! A key is an index and a generation, so one that was given up is not taken for its successor. One compare of the whole
//! identity says that the entry exists, is of that generation, and of that peer; a missing right is a limit of 0.

use core::hint::cold_path;

use verbring_slab::Table;
use verbring_sys::{CLASSES, Domain, Mr, Qp, Rights, Status};

/// Every id has an index in the bits from this one on, and a generation around it: so an id is the offset in bytes of its
/// line of 64, once it is masked.
const INDEX_FROM: u32 = 6;
const INDEX_BITS: u32 = 12;
/// The most entries of the tables of peers, windows and imports.
pub(crate) const MAX_INDEX: u32 = 1 << INDEX_BITS;

/// In the key of a slab, and of nothing else: no Window, of whatever engine, can name one.
pub(crate) const SLAB_KEY: u32 = 1 << 31;

/// The id that follows `id` in the same place: the next generation. Never 0, and below [`SLAB_KEY`].
pub(crate) const fn next_id(id: u32, index: u32) -> u32 {
    const ABOVE: u32 = INDEX_FROM + INDEX_BITS;
    let generation = (id >> ABOVE << INDEX_FROM | id & ((1 << INDEX_FROM) - 1)).wrapping_add(1);
    let generation = generation & (u32::MAX >> (INDEX_BITS + 1));
    let generation = if generation == 0 { 1 } else { generation };
    (generation >> INDEX_FROM) << ABOVE | index << INDEX_FROM | generation & ((1 << INDEX_FROM) - 1)
}

/// The index of an id.
#[inline(always)]
pub(crate) const fn index(id: u32) -> u32 {
    id >> INDEX_FROM & (MAX_INDEX - 1)
}

/// A peer, as the engine numbers it. `reconnect` keeps the number; after `disconnect` it means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId(pub(crate) u32);

/// An imported region of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteKey {
    pub(crate) peer: PeerId,
    pub(crate) key: u32,
}

/// A place in an imported region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub(crate) key: RemoteKey,
    pub(crate) offset: u64,
}

impl RemoteKey {
    /// The place at `offset` bytes.
    #[inline(always)]
    pub const fn at(self, offset: u64) -> Target {
        Target { key: self, offset }
    }

    /// Whose region it is.
    pub const fn peer(self) -> PeerId {
        self.peer
    }
}

impl PeerId {
    /// The number, as it stands in an sqe.
    pub const fn raw(self) -> u32 {
        self.0
    }
}

/// What an operation does with memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    Atomic,
}

/// One line of a table of memory: all that a bounds check needs.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Memory {
    /// Of an import: peer and key, as in the sqe's second word. Of local memory: its key. 0: nobody.
    pub(crate) id: u64,
    pub(crate) base: u64,
    pub(crate) read_limit: u64,
    pub(crate) write_limit: u64,
    pub(crate) atomic_limit: u64,
    /// The device's name for it.
    pub(crate) device_key: u32,
    /// Of an import: the queue pairs of its peer.
    pub(crate) qps: [Qp; CLASSES],
}

const _: () = assert!(size_of::<Memory>() == 64);

impl Memory {
    pub(crate) const NONE: Memory =
        Memory { id: 0, base: 0, read_limit: 0, write_limit: 0, atomic_limit: 0, device_key: 0, qps: [Qp(0); CLASSES] };

    #[inline(always)]
    fn limit(&self, access: Access) -> u64 {
        match access {
            Access::Read => self.read_limit,
            Access::Write => self.write_limit,
            Access::Atomic => self.atomic_limit,
        }
    }

    /// The address of `offset`, if the entry is `id` and grants `access` to `len` bytes there.
    #[inline(always)]
    pub(crate) fn resolve(&self, id: u64, access: Access, offset: u64, len: u32) -> Option<u64> {
        if self.id != id {
            cold_path();
            return None;
        }
        self.range(access, offset, len)
    }

    /// The same for local memory, which may be both source and sink.
    #[inline(always)]
    pub(crate) fn resolve_local(&self, key: u32, offset: u64, len: u32) -> Option<u64> {
        if self.id as u32 != key {
            cold_path();
            return None;
        }
        self.range(Access::Read, offset, len)
    }

    /// Branches that are never taken: branchless checks were slower (docs/PERFORMANCE.md).
    #[inline(always)]
    fn range(&self, access: Access, offset: u64, len: u32) -> Option<u64> {
        let Some(last) = self.limit(access).checked_sub(u64::from(len)) else {
            cold_path();
            return None;
        };
        if offset > last {
            cold_path();
            return None;
        }
        Some(self.base.wrapping_add(offset))
    }

    /// Why `resolve` said no. `stale` is what to say of an id that is not there.
    #[cold]
    pub(crate) fn why_not(&self, id: u64, access: Access, missing: Status, outside: Status) -> Status {
        let longest = self.read_limit.max(self.write_limit).max(self.atomic_limit);
        if self.id != id {
            missing
        } else if self.limit(access) == 0 && longest != 0 {
            Status::RemoteAccess
        } else {
            outside
        }
    }
}

/// How an import stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImportState {
    /// The owner was asked, or will be once the connection is up again.
    Requested,
    /// Operations may name it.
    Ready,
    /// It is not, or no longer, to be had; operations end with this status.
    Failed(Status),
}

/// What an operation does not need of an import.
#[derive(Clone, Copy)]
pub(crate) struct ImportInfo {
    /// 0: the place is free.
    pub(crate) id: u32,
    pub(crate) last_id: u32,
    pub(crate) peer: u32,
    /// The owner's key.
    pub(crate) remote_key: u32,
    pub(crate) epoch: u32,
    pub(crate) len: u64,
    pub(crate) rights: Rights,
    pub(crate) domain: Domain,
    pub(crate) state: ImportState,
    /// The owner was asked over the connection that there is.
    pub(crate) is_asked: bool,
    /// To ask again, over another connection.
    pub(crate) token: [u8; 16],
    /// Revoked, and still mapped as the device's `rkey`: it cannot take work back that names it.
    pub(crate) doomed: Option<u32>,
}

impl ImportInfo {
    pub(crate) const NONE: ImportInfo = ImportInfo {
        id: 0,
        last_id: 0,
        peer: 0,
        remote_key: 0,
        epoch: 0,
        len: 0,
        rights: Rights::empty(),
        domain: Domain::Cpu,
        state: ImportState::Requested,
        is_asked: false,
        token: [0; 16],
        doomed: None,
    };
}

impl ImportInfo {
    /// Whether it went with a connection, and with another one can be had again.
    pub(crate) fn is_lost(&self) -> bool {
        self.state == ImportState::Failed(Status::ConnectionLost)
    }

    /// Whether an answer to this request is still to come.
    pub(crate) fn is_awaited(&self, id: u32, peer: u32, remote_key: u32) -> bool {
        let is_it = self.id == id && id != 0 && self.peer == peer && self.remote_key == remote_key;
        is_it && self.state == ImportState::Requested
    }
}

/// What an operation does not need of a registration.
#[derive(Clone, Copy)]
pub(crate) struct WindowInfo {
    pub(crate) last_id: u32,
    pub(crate) mr: Mr,
    pub(crate) rights: Rights,
    pub(crate) epoch: u32,
    pub(crate) is_closing: bool,
}

impl WindowInfo {
    pub(crate) const NONE: WindowInfo =
        WindowInfo { last_id: 0, mr: Mr(0), rights: Rights::empty(), epoch: 0, is_closing: false };
}

/// Finds a free place: the first whose identity is 0.
pub(crate) fn free_place(table: &Table<Memory>) -> Option<u32> {
    table.iter().position(|m| m.id == 0).map(|i| i as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against the check as one would write it with wide numbers.
        #[test]
        fn bounds(limit in any::<u64>(), offset in any::<u64>(), len in any::<u32>(), near in 0u64..20) {
            let offset = if near < 10 { limit.wrapping_sub(near) } else { offset };
            let memory = Memory { id: 7, base: 1000, write_limit: limit, ..Memory::NONE };
            let fits = u128::from(offset) + u128::from(len) <= u128::from(limit);
            prop_assert_eq!(memory.resolve(7, Access::Write, offset, len).is_some(), fits);
            prop_assert_eq!(memory.resolve(8, Access::Write, offset, len), None);
        }

        #[test]
        fn ids_differ_from_their_predecessors(start in any::<u32>(), at in 0u32..MAX_INDEX) {
            let mut seen = std::collections::BTreeSet::new();
            let mut id = next_id(start, at);
            for _ in 0..200 {
                prop_assert!(id != 0 && index(id) == at && id & SLAB_KEY == 0 && seen.insert(id));
                id = next_id(id, at);
            }
        }
    }
}
