//! The peer table: who is connected, and what is under way to each.

use verbring_slab::Table;
use verbring_sys::{CLASSES, Link, Qp, Status};

use crate::flight::Channel;
use crate::key::{PeerId, index, next_id};

/// How a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// The handshake is under way.
    Connecting,
    /// Operations go through.
    Up,
    /// It is lost; operations end with this status. `reconnect` keeps the id, `disconnect` frees its place.
    Failed(Status),
}

/// One peer.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Peer {
    /// For each class whether an operation may start at once: the peer is up, and nothing is held.
    pub(crate) is_open: [bool; CLASSES],
    pub(crate) qps: [Qp; CLASSES],
    /// 0: the place is free.
    pub(crate) id: u32,
    /// The last id of this place.
    last_id: u32,
    pub(crate) link: Link,
    pub(crate) state: PeerState,
    pub(crate) node: u64,
    pub(crate) channels: [Channel; CLASSES],
}

const _: () = assert!(size_of::<Peer>() == 64);

/// What an operation does not need of a peer: the names of its connection, by which a later one says that it replaces it.
#[derive(Clone, Copy)]
pub(crate) struct PeerInfo {
    /// Own epoch of the connection, 0 before it was ever up; and the peer's.
    pub(crate) epoch: u32,
    pub(crate) peer_epoch: u32,
    /// Own epoch of the connection that it replaced, or is to replace; 0: none.
    pub(crate) replaced: u32,
    /// This side made the connection that replaces.
    pub(crate) is_own: bool,
}

impl PeerInfo {
    pub(crate) const NONE: PeerInfo = PeerInfo { epoch: 0, peer_epoch: 0, replaced: 0, is_own: false };
}

impl Peer {
    /// A place that is free.
    pub(crate) const NONE: Peer = Peer {
        is_open: [false; CLASSES],
        qps: [Qp(0); CLASSES],
        id: 0,
        last_id: 0,
        link: Link(0),
        state: PeerState::Connecting,
        node: 0,
        channels: [Channel::EMPTY; CLASSES],
    };

    #[inline(always)]
    pub(crate) fn channel(&self, class: usize) -> &Channel {
        &self.channels[class & (CLASSES - 1)]
    }

    #[inline(always)]
    pub(crate) fn channel_mut(&mut self, class: usize) -> &mut Channel {
        &mut self.channels[class & (CLASSES - 1)]
    }

    #[inline(always)]
    pub(crate) fn qp(&self, class: usize) -> Qp {
        self.qps[class & (CLASSES - 1)]
    }
}

const _: () = assert!(CLASSES.is_power_of_two());

/// The peers of an engine.
pub(crate) struct Peers {
    pub(crate) table: Table<Peer>,
    pub(crate) infos: Table<PeerInfo>,
    /// A bit for each peer that has something waiting.
    pub(crate) waiting: Table<u64>,
    /// How many bits are set.
    pub(crate) waiting_count: u32,
}

impl Peers {
    /// A place for a new connection; none if all are taken.
    pub(crate) fn add(&mut self, link: Link, qps: [Qp; CLASSES], state: PeerState, node: u64) -> Option<PeerId> {
        let index = self.table.iter().position(|p| p.id == 0)? as u32;
        let peer = self.table.at_mut(index);
        let id = next_id(peer.last_id, index);
        let is_open = [state == PeerState::Up; CLASSES];
        *peer = Peer { id, last_id: id, link, qps, state, node, is_open, ..Peer::NONE };
        *self.infos.at_mut(index) = PeerInfo::NONE;
        Some(PeerId(id))
    }

    /// The peer of an id, if it is live.
    pub(crate) fn get(&self, id: u32) -> Option<&Peer> {
        let peer = self.table.at(index(id));
        (id != 0 && peer.id == id).then_some(peer)
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut Peer> {
        let peer = self.table.at_mut(index(id));
        if id != 0 && peer.id == id { Some(peer) } else { None }
    }

    pub(crate) fn by_link(&self, link: Link) -> Option<u32> {
        self.table.iter().find(|p| p.id != 0 && p.link == link).map(|p| p.id)
    }

    pub(crate) fn info(&self, id: u32) -> Option<&PeerInfo> {
        self.get(id).map(|_| self.infos.at(index(id)))
    }

    pub(crate) fn info_mut(&mut self, id: u32) -> Option<&mut PeerInfo> {
        if self.get(id).is_some() { Some(self.infos.at_mut(index(id))) } else { None }
    }

    /// The peer of this node whose connection the node says it replaces, naming our epoch of it.
    pub(crate) fn replaced(&self, node: u64, replaces: u32) -> Option<u32> {
        let is_it = |(peer, info): &(&Peer, &PeerInfo)| {
            // The second name: it tried before, or both sides do.
            peer.id != 0 && peer.node == node && (info.epoch == replaces || info.replaced == replaces)
        };
        if replaces == 0 {
            return None;
        }
        self.table.iter().zip(self.infos.iter()).find(is_it).map(|(peer, _)| peer.id)
    }

    /// Notes whether a peer has something that waits.
    pub(crate) fn set_waiting(&mut self, id: u32, is_waiting: bool) {
        let (place, bit) = (index(id) / 64, 1u64 << (index(id) % 64));
        let word = self.waiting.at_mut(place);
        if is_waiting && *word & bit == 0 {
            *word |= bit;
            self.waiting_count += 1;
        } else if !is_waiting && *word & bit != 0 {
            *word &= !bit;
            self.waiting_count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::vec::Vec;
    use verbring_slab::{Arena, Region, RegionOptions};

    proptest! {
        /// Against a map: an id finds its own connection, and nothing once that is gone.
        #[test]
        fn model(steps in prop::collection::vec((any::<bool>(), any::<usize>()), 1..200)) {
            let mut arena = Arena::from_region(Region::private(1 << 16, RegionOptions::default()).unwrap());
            // SAFETY: the arena outlives the peers.
            let (table, infos, waiting) = unsafe {
                (
                    arena.table(8, |_| Peer::NONE).unwrap(),
                    arena.table(8, |_| PeerInfo::NONE).unwrap(),
                    arena.table(1, |_| 0u64).unwrap(),
                )
            };
            let mut peers = Peers { table, infos, waiting, waiting_count: 0 };
            let mut live: BTreeMap<u32, u64> = BTreeMap::new();
            let mut gone: Vec<u32> = Vec::new();
            let mut node = 0;
            for (add, choice) in steps {
                if add {
                    node += 1;
                    match peers.add(Link(node as u32), [Qp(0); CLASSES], PeerState::Up, node) {
                        Some(PeerId(id)) => {
                            prop_assert!(live.insert(id, node).is_none() && !gone.contains(&id));
                            peers.set_waiting(id, choice % 2 == 0);
                        }
                        None => prop_assert_eq!(live.len(), 8),
                    }
                } else if !live.is_empty() {
                    let id = *live.keys().nth(choice % live.len()).unwrap();
                    live.remove(&id);
                    gone.push(id);
                    peers.set_waiting(id, false);
                    peers.get_mut(id).unwrap().id = 0;
                }
                for (id, node) in &live {
                    prop_assert_eq!(peers.get(*id).unwrap().node, *node);
                    prop_assert_eq!(peers.by_link(Link(*node as u32)), Some(*id));
                    prop_assert_eq!(peers.get(*id).unwrap().is_open, [true; CLASSES]);
                }
                prop_assert!(gone.iter().all(|id| peers.get(*id).is_none()) && peers.get(0).is_none());
                let waiting: u32 = peers.waiting.iter().map(|w| w.count_ones()).sum();
                prop_assert_eq!(peers.waiting_count, waiting);
            }
        }
    }
}
