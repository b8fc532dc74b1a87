//! Who is connected: connections that begin, that come up, and that replace others.
//!
//! A connection that is lost can be made anew under the same [`PeerId`], by either side. The side that reconnects names
//! the other side's epoch of the old connection; the other side finds its peer by that, and both ask again for what they
//! had imported. Where both sides reconnect at once, the connection of the side with the lower node stays.

use verbring_sys::{Device, DeviceError, Link, Status};

use crate::config::EngineError;
use crate::engine::Engine;
use crate::key::{ImportState, PeerId, RemoteKey};
use crate::message::Said;
use crate::notice::Notice;
use crate::peer::PeerState;

/// Imports that are asked for again at one time: a peer that has many must not fill its control channel.
const ASKED: u32 = 8;

/// What `Event::Up` says.
#[derive(Clone, Copy)]
pub(crate) struct Up {
    pub(crate) link: Link,
    pub(crate) node: u64,
    pub(crate) incoming: bool,
    pub(crate) epoch: u32,
    pub(crate) peer_epoch: u32,
    pub(crate) replaces: u32,
}

impl<D: Device> Engine<D> {
    /// The state of a peer; none once it was disconnected.
    pub fn peer_state(&self, peer: PeerId) -> Option<PeerState> {
        self.peers.get(peer.0).map(|p| p.state)
    }

    /// Starts a connection. [`Notice::Connected`] or [`Notice::Lost`] follows.
    pub fn connect(&mut self, address: &str, now: u64) -> Result<PeerId, EngineError> {
        let link = self.device.connect(address, 0, now)?;
        self.add_peer(link, PeerState::Connecting, 0)
    }

    /// Connects anew to a peer, which keeps its id. What is pending ends as `ConnectionLost` or `OutcomeUnknown`, also if
    /// the connection was up. [`Notice::Connected`] or [`Notice::Lost`] follows.
    ///
    /// Imports keep their keys. The engine asks for them again, and [`Notice::Imported`] or [`Notice::ImportFailed`] comes
    /// for each; until then operations that name one end as `NotReady`. If the peer's engine is another than before, they
    /// end as `StaleEpoch`. The other side's peer keeps its id, too, unless it was disconnected there.
    ///
    /// After an error the peer is lost, and it can be tried again.
    pub fn reconnect(&mut self, peer: PeerId, address: &str, now: u64) -> Result<(), EngineError> {
        let info = *self.peers.info(peer.0).ok_or(EngineError::NoSuchPeer)?;
        self.break_connection(peer.0, Status::ConnectionLost, now);
        let link = self.device.connect(address, info.peer_epoch, now)?;
        self.move_to(peer.0, link);
        if let Some(info) = self.peers.info_mut(peer.0) {
            (info.replaced, info.is_own) = (info.epoch, true);
        }
        Ok(())
    }

    fn add_peer(&mut self, link: Link, state: PeerState, node: u64) -> Result<PeerId, EngineError> {
        let qps = core::array::from_fn(|class| self.device.qp(link, class));
        self.peers.add(link, qps, state, node).ok_or_else(|| {
            self.device.disconnect(link);
            EngineError::PeerTableFull { limit: self.peers.table.capacity() }
        })
    }

    /// A peer whose connection was broken gets another one.
    fn move_to(&mut self, id: u32, link: Link) {
        let qps = core::array::from_fn(|class| self.device.qp(link, class));
        if let Some(peer) = self.peers.get_mut(id) {
            (peer.link, peer.qps, peer.state) = (link, qps, PeerState::Connecting);
        }
        for place in 0..self.import_infos.capacity() {
            let info = self.import_infos.at_mut(place);
            if info.id != 0 && info.peer == id && info.is_lost() {
                (info.state, info.is_asked) = (ImportState::Requested, false);
            }
        }
    }

    /// A connection is up: what to tell of it.
    pub(crate) fn came_up(&mut self, up: Up, now: u64) -> Option<Notice> {
        let mut lost = None;
        let id = match (self.peers.by_link(up.link), self.peers.replaced(up.node, up.replaces)) {
            (Some(id), _) => id,
            (None, Some(id)) => {
                if self.keeps_own(id, up) {
                    self.device.disconnect(up.link);
                    return None;
                }
                if self.peers.get(id)?.state == PeerState::Up {
                    lost = Some(Notice::Lost { peer: PeerId(id), cause: DeviceError::Closed });
                }
                self.break_connection(id, Status::ConnectionLost, now);
                self.move_to(id, up.link);
                let info = self.peers.info_mut(id)?;
                (info.replaced, info.is_own) = (up.replaces, false);
                id
            }
            // Without a place for it the connection is closed, which is what the other side sees.
            (None, None) => self.add_peer(up.link, PeerState::Up, up.node).ok()?.0,
        };
        let info = self.peers.info_mut(id)?;
        (info.epoch, info.peer_epoch) = (up.epoch, up.peer_epoch);
        let peer = self.peers.get_mut(id)?;
        let is_another = peer.node != up.node;
        (peer.state, peer.node) = (PeerState::Up, up.node);
        for class in 0..verbring_sys::CLASSES {
            self.set_open(id, class, true);
        }
        let connected = Notice::Connected { peer: PeerId(id), node: up.node, incoming: up.incoming };
        if lost.is_some() {
            self.keep_notice(connected);
        }
        if is_another {
            self.fail_imports_of(id);
        }
        for _ in 0..ASKED {
            self.ask_again(id);
        }
        lost.or(Some(connected))
    }

    /// Whether both sides reconnected at once, and this side's connection is the one that stays.
    fn keeps_own(&self, id: u32, up: Up) -> bool {
        let is_alive = self.peers.get(id).is_some_and(|p| !matches!(p.state, PeerState::Failed(_)));
        let is_own = self.peers.info(id).is_some_and(|info| info.is_own && info.replaced == up.replaces);
        is_alive && is_own && self.config.node < up.node
    }

    /// The peer's engine is another one: nothing that was imported from it exists.
    fn fail_imports_of(&mut self, id: u32) {
        for place in 0..self.import_infos.capacity() {
            let info = self.import_infos.at_mut(place);
            if info.id != 0 && info.peer == id && info.state == ImportState::Requested {
                info.state = ImportState::Failed(Status::StaleEpoch);
                let key = RemoteKey { peer: PeerId(id), key: info.id };
                self.keep_notice(Notice::ImportFailed { key, status: Status::StaleEpoch });
            }
        }
    }

    /// Asks for one import that was lost with an earlier connection.
    pub(crate) fn ask_again(&mut self, id: u32) {
        let is_next = |info: &crate::key::ImportInfo| {
            info.id != 0 && info.peer == id && info.state == ImportState::Requested && !info.is_asked
        };
        let Some(place) = self.import_infos.iter().position(is_next) else { return };
        let Some(link) = self.peers.get(id).filter(|p| p.state == PeerState::Up).map(|p| p.link) else { return };
        let info = self.import_infos.at_mut(place as u32);
        info.is_asked = true;
        let said = Said::Import { key: info.remote_key, importer: info.id, epoch: info.epoch, token: info.token };
        let _ = self.say(id, link, said, None);
    }
}
