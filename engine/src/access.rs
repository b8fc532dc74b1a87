//! Who may reach what: registrations, exports, imports, revocation, and the control messages about them.

use core::fmt;
use core::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};
use subtle::ConstantTimeEq;
use verbring_sys::{Device, DeviceError, Event, Granted, Link, Memory as DeviceMemory, Mr, Rights, Status};

use crate::connect::Up;
use crate::engine::Engine;
use crate::flight::State;
use crate::key::{
    Access, ImportInfo, ImportState, Memory, PeerId, RemoteKey, SLAB_KEY, WindowInfo, free_place, index, next_id,
};
use crate::message::Said;
use crate::notice::Notice;
use crate::peer::PeerState;
use crate::remote::Remote;
use crate::sqe::{Opcode, Sqe};
use crate::window::Window;

/// Events of the device that one call of `control` takes, so that peers who talk without end do not hold it.
const EVENTS: u32 = 1024;

/// Why a call about memory failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AccessError {
    /// The memory is in use. Poll, call `control`, and try again.
    Busy {
        /// Own operations in flight that name it.
        in_flight: u32,
        /// Peers that have not let go of it.
        importers: u32,
    },
    /// No place for another registration.
    WindowTableFull {
        /// The capacity.
        limit: u32,
    },
    /// No place for another import.
    ImportTableFull {
        /// The capacity.
        limit: u32,
    },
    /// The window is not, or no longer, of this engine.
    NoSuchWindow,
    /// The import is not, or no longer, of this engine.
    NoSuchImport,
    /// The window was registered without rights: it is for local use.
    NotExported,
    /// The peer id is unknown, or its connection is not up.
    NoSuchPeer,
    /// The Remote is of another engine than this peer, or of an earlier life of it.
    WrongNode {
        /// What the Remote says.
        remote: u64,
        /// What the peer is.
        peer: u64,
    },
    /// Exported memory must start at a multiple of 8, not be empty, and lie in its region.
    BadRange,
    /// The device said no.
    Device(DeviceError),
    /// The memory could not be had.
    #[cfg(feature = "std")]
    NoMemory,
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use AccessError::*;
        match self {
            Busy { in_flight, importers } => write!(
                f,
                "the memory is in use by {in_flight} own operations and {importers} peers; poll, call control, and try \
                 again"
            ),
            WindowTableFull { limit } => {
                write!(f, "all {limit} places for registrations are taken; close some, or raise Config::max_windows")
            }
            ImportTableFull { limit } => {
                write!(f, "all {limit} places for imports are taken; release some, or raise Config::max_imports")
            }
            NoSuchWindow => f.write_str("the window is not of this engine, or was closed; register the memory again"),
            NoSuchImport => f.write_str("the import is not of this engine, or was released; import the Remote again"),
            NotExported => f.write_str("the window was registered without rights; register it with some to export it"),
            NoSuchPeer => f.write_str("the peer is not connected; connect, and wait for Notice::Connected"),
            WrongNode { remote, peer } => write!(
                f,
                "the Remote is of node {remote:#x} and the peer is {peer:#x}; get a new Remote from the peer as it is now"
            ),
            BadRange => f.write_str("exported memory starts at a multiple of 8, is not empty, and lies in its region"),
            Device(error) => error.fmt(f),
            #[cfg(feature = "std")]
            NoMemory => f.write_str("the memory could not be mapped; Region::shared says why"),
        }
    }
}

impl core::error::Error for AccessError {}

impl From<DeviceError> for AccessError {
    fn from(error: DeviceError) -> AccessError {
        AccessError::Device(error)
    }
}

impl<D: Device> Engine<D> {
    /// Registers memory with the device and the table: its key.
    ///
    /// # Safety
    /// As [`Device::register`].
    unsafe fn register_key(&mut self, memory: DeviceMemory, rights: Rights, tag: u32) -> Result<u32, AccessError> {
        let place = free_place(&self.locals).ok_or(AccessError::WindowTableFull { limit: self.locals.capacity() })?;
        let (base, len) = memory.range();
        let (base, len) = (base.as_ptr() as u64, len as u64);
        if !rights.is_empty() && (!base.is_multiple_of(8) || len == 0) {
            return Err(AccessError::BadRange);
        }
        // SAFETY: the caller's promise.
        let mr = unsafe { self.device.register(memory, rights) }?;
        let info = self.windows.at_mut(place);
        let id = next_id(info.last_id, place);
        // The epoch goes on where the last user of the place left it.
        *info = WindowInfo { last_id: id, mr, rights, epoch: info.epoch.wrapping_add(1), is_closing: false };
        let id = id | tag;
        *self.locals.at_mut(place) =
            Memory { id: u64::from(id), base, read_limit: len, write_limit: len, device_key: mr.0, ..Memory::NONE };
        Ok(id)
    }

    /// Registers the blocks of a slab, under a key that no Window has.
    pub(crate) unsafe fn register_slab(&mut self, memory: DeviceMemory) -> Result<u32, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.register_key(memory, Rights::empty(), SLAB_KEY) }.map_err(|error| match error {
            AccessError::Device(error) => error,
            _ => DeviceError::Full { what: "registrations", limit: self.locals.capacity() },
        })
    }

    /// The port that had a slab is gone, and nothing in flight names it.
    pub(crate) fn deregister_slab(&mut self, key: u32) {
        let place = index(key);
        if self.locals.at(place).id == u64::from(key) {
            let _ = self.device.deregister(self.windows.at(place).mr);
            *self.locals.at_mut(place) = Memory::NONE;
        }
    }

    /// Registers memory of the caller's: as source and sink of own operations, and for peers if `rights` are given.
    /// Registering a range twice, or one that overlaps another, gives independent windows; each has its own key. (Over
    /// shm a region is exported by one window at a time: `AlreadyExported`.)
    ///
    /// # Safety
    /// The memory is valid until the window was closed, or the engine is gone, and every clone of the window too; over a
    /// `Local` device also until every importer let go. It is not reached by Rust references meanwhile.
    pub unsafe fn register(&mut self, memory: DeviceMemory, rights: Rights) -> Result<Window, AccessError> {
        // SAFETY: the caller's promise.
        let lkey = unsafe { self.register_key(memory.clone(), rights, 0) }?;
        Ok(Window::new(lkey, memory))
    }

    /// Registers the first `len` bytes of a mapping that other processes can share. On shm rights belong to the mapping,
    /// and one window at a time exports it.
    #[cfg(feature = "std")]
    pub fn register_region(
        &mut self,
        region: std::sync::Arc<verbring_slab::Region>,
        len: usize,
        rights: Rights,
    ) -> Result<Window, AccessError> {
        if len > region.len() {
            return Err(AccessError::BadRange);
        }
        // SAFETY: the device and the window keep the region; a region gives out no references.
        unsafe { self.register(DeviceMemory::Shared { region, len }, rights) }
    }

    /// New memory of `len` bytes that peers may reach, in huge pages if it is large.
    #[cfg(feature = "std")]
    pub fn window(&mut self, len: usize, rights: Rights) -> Result<Window, AccessError> {
        use verbring_slab::{Pages, Region, RegionOptions};
        let mut pages = RegionOptions::default();
        // A huge page for a few bytes would be a waste.
        if len < 1 << 20 {
            pages.largest = Pages::Small;
        }
        let region = Region::shared(len, pages).map_err(|_| AccessError::NoMemory)?;
        self.register_region(std::sync::Arc::new(region), len, rights)
    }

    fn window_place(&self, window: &Window) -> Result<u32, AccessError> {
        let place = index(window.lkey);
        let memory = self.locals.at(place);
        // The address tells a window of another engine with the same key.
        let is_it = memory.id == u64::from(window.lkey) && memory.base == window.address();
        if is_it { Ok(place) } else { Err(AccessError::NoSuchWindow) }
    }

    /// What to hand to a peer so that it can import the window.
    pub fn remote(&self, window: &Window) -> Result<Remote, AccessError> {
        let info = self.windows.at(self.window_place(window)?);
        if info.rights.is_empty() || info.is_closing {
            return Err(AccessError::NotExported);
        }
        Ok(Remote {
            node: self.config.node,
            key: window.lkey,
            epoch: info.epoch,
            address: window.address(),
            len: window.len() as u64,
            rights: info.rights,
            domain: self.device.caps().domain,
            token: self.token(window.lkey, info.epoch),
        })
    }

    /// Whoever shows it was given the Remote: a keyed hash that only this engine can make.
    fn token(&self, key: u32, epoch: u32) -> [u8; 16] {
        let mut hasher = SipHasher24::new_with_key(&self.config.secret);
        hasher.write_u32(key);
        hasher.write_u32(epoch);
        hasher.finish128().as_bytes()
    }

    fn grant_word(&self, place: u32, peer: u32) -> (u32, u64) {
        let words = self.peers.table.capacity().div_ceil(64);
        (place * words + index(peer) / 64, 1 << (index(peer) % 64))
    }

    fn importers(&self, place: u32) -> u32 {
        let words = self.peers.table.capacity().div_ceil(64);
        (0..words).map(|i| self.grants.at(place * words + i).count_ones()).sum()
    }

    /// Tells every importer of a window to let go.
    fn revoke_from_all(&mut self, place: u32, key: u32, epoch: u32) {
        for peer in 0..self.peers.table.capacity() {
            let (id, link) = (self.peers.table.at(peer).id, self.peers.table.at(peer).link);
            let (word, bit) = self.grant_word(place, id);
            if id != 0 && *self.grants.at(word) & bit != 0 {
                let _ = self.say(id, link, Said::Revoke { key, epoch }, None);
            }
        }
    }

    fn in_flight(&self, names: impl Fn(&Sqe) -> bool) -> u32 {
        let live = (0..self.flights.capacity()).map(|i| self.flights.at(i));
        live.filter(|f| f.state != State::Free && names(&f.sqe)).count() as u32
    }

    /// Ends a registration. The first call asks every importer to let go; call it again, with `control` between, until it
    /// succeeds. Once `deadline` passed it does not wait for importers any more: they are cut off.
    ///
    /// `Busy` leaves the window as it is, but for importers, who are gone or going.
    pub fn close_window(&mut self, window: &Window, now: u64, deadline: u64) -> Result<(), AccessError> {
        let place = self.window_place(window)?;
        let info = self.windows.at_mut(place);
        let epoch = info.epoch;
        if !core::mem::replace(&mut info.is_closing, true) {
            self.revoke_from_all(place, window.lkey, epoch);
        }
        let key = window.lkey;
        let in_flight = self.in_flight(|sqe| sqe.lkey() == key && has_local(sqe));
        let importers = self.importers(place);
        if in_flight != 0 || (importers != 0 && now < deadline) {
            return Err(AccessError::Busy { in_flight, importers });
        }
        let mr = self.windows.at(place).mr;
        if importers != 0 {
            self.device.revoke(mr)?;
        }
        self.device.deregister(mr)?;
        *self.locals.at_mut(place) = Memory::NONE;
        self.clear_grants(place);
        Ok(())
    }

    fn clear_grants(&mut self, place: u32) {
        let words = self.peers.table.capacity().div_ceil(64);
        for i in 0..words {
            *self.grants.at_mut(place * words + i) = 0;
        }
    }

    /// Makes every Remote of the window worthless and cuts every importer off, at once: an access that starts after this
    /// call returned changes no byte. The contents stay, but for what other threads write during the call. The new Remote
    /// is for those who may go on.
    pub fn bump_epoch(&mut self, window: &Window) -> Result<Remote, AccessError> {
        let place = self.window_place(window)?;
        let mr = self.windows.at(place).mr;
        self.device.revoke(mr)?;
        let info = self.windows.at_mut(place);
        let revoked = info.epoch;
        info.epoch = info.epoch.wrapping_add(1);
        self.revoke_from_all(place, window.lkey, revoked);
        self.clear_grants(place);
        self.remote(window)
    }

    /// Asks the owner of a region to be let in. The key can be named once [`Notice::Imported`] came for it.
    pub fn import(&mut self, peer: PeerId, remote: &Remote) -> Result<RemoteKey, AccessError> {
        let entry = self.peers.get(peer.0).filter(|p| p.state == PeerState::Up).ok_or(AccessError::NoSuchPeer)?;
        if entry.node != remote.node {
            return Err(AccessError::WrongNode { remote: remote.node, peer: entry.node });
        }
        let link = entry.link;
        let place = self.import_infos.iter().position(|i| i.id == 0);
        let place = place.ok_or(AccessError::ImportTableFull { limit: self.imports.capacity() })? as u32;
        let info = self.import_infos.at_mut(place);
        let id = next_id(info.last_id, place);
        *info = ImportInfo {
            id,
            last_id: id,
            peer: peer.0,
            remote_key: remote.key,
            epoch: remote.epoch,
            len: remote.len,
            rights: remote.rights,
            domain: remote.domain,
            state: ImportState::Requested,
            is_asked: true,
            token: remote.token,
            doomed: None,
        };
        let said = Said::Import { key: remote.key, importer: id, epoch: remote.epoch, token: remote.token };
        if let Err(error) = self.say(peer.0, link, said, None) {
            self.import_infos.at_mut(place).id = 0;
            return Err(error.into());
        }
        Ok(RemoteKey { peer, key: id })
    }

    fn import_of(&self, key: RemoteKey) -> Option<&ImportInfo> {
        let info = self.import_infos.at(index(key.key));
        (info.id == key.key && key.key != 0 && info.peer == key.peer.0).then_some(info)
    }

    /// How an import stands; none once it was released.
    pub fn import_state(&self, key: RemoteKey) -> Option<ImportState> {
        self.import_of(key).map(|info| info.state)
    }

    /// The length of an imported region in bytes.
    pub fn import_len(&self, key: RemoteKey) -> Option<u64> {
        self.import_of(key).map(|info| info.len)
    }

    /// Gives an import up.
    pub fn release(&mut self, key: RemoteKey) -> Result<(), AccessError> {
        let info = *self.import_of(key).ok_or(AccessError::NoSuchImport)?;
        let in_flight = self.in_flight(|sqe| sqe.key() == key.key && sqe.peer() == key.peer.0);
        if in_flight != 0 {
            return Err(AccessError::Busy { in_flight, importers: 0 });
        }
        // Nothing in flight names it, so a revoked one can go now.
        if info.doomed.is_some() {
            self.sweep_doomed();
        }
        self.drop_mapping(key.key);
        self.import_infos.at_mut(index(key.key)).id = 0;
        // A request that is still under way is answered with a grant nobody waits for, which is let go of then.
        if info.state == ImportState::Ready {
            self.let_go(info.peer, info.remote_key, info.epoch);
        }
        Ok(())
    }

    /// Tells an owner that its region is not used here any more, unless another import of it is.
    fn let_go(&mut self, peer: u32, remote_key: u32, epoch: u32) {
        let is_used = self.import_infos.iter().any(|info| {
            let is_it = info.id != 0 && info.peer == peer && info.remote_key == remote_key && info.epoch == epoch;
            is_it && (info.doomed.is_some() || !matches!(info.state, ImportState::Failed(_)))
        });
        if let (false, Some(entry)) = (is_used, self.peers.get(peer)) {
            let link = entry.link;
            let _ = self.say(peer, link, Said::LetGo { key: remote_key, epoch }, None);
        }
    }

    fn drop_mapping(&mut self, id: u32) {
        let memory = core::mem::replace(self.imports.at_mut(index(id)), Memory::NONE);
        if memory.id != 0 {
            self.device.release(memory.device_key);
        }
    }

    /// Drops the mappings of revoked imports that nothing names any more.
    #[cold]
    pub(crate) fn sweep_doomed(&mut self) {
        for place in 0..self.import_infos.capacity() {
            let info = *self.import_infos.at(place);
            let Some(rkey) = info.doomed else { continue };
            if self.in_flight(|sqe| sqe.key() == info.id && sqe.peer() == info.peer && has_remote(sqe)) == 0 {
                self.import_infos.at_mut(place).doomed = None;
                self.doomed -= 1;
                self.device.release(rkey);
                self.let_go(info.peer, info.remote_key, info.epoch);
            }
        }
    }

    /// The connection to a peer is gone, and with it what was granted to it; what was imported keeps its key.
    pub(crate) fn lose_access_of(&mut self, peer: u32) {
        for place in 0..self.import_infos.capacity() {
            let info = self.import_infos.at_mut(place);
            if info.id != 0 && info.peer == peer {
                if matches!(info.state, ImportState::Requested | ImportState::Ready) {
                    info.state = ImportState::Failed(Status::ConnectionLost);
                }
                // The device forgot its imports with the connection.
                self.doomed -= u32::from(info.doomed.take().is_some());
                *self.imports.at_mut(place) = Memory::NONE;
            }
        }
        self.clear_grants_to(peer);
    }

    /// The peer is gone: after `lose_access_of` only the places of its imports are left.
    pub(crate) fn forget_imports_of(&mut self, peer: u32) {
        for place in 0..self.import_infos.capacity() {
            let info = self.import_infos.at_mut(place);
            if info.id != 0 && info.peer == peer {
                info.id = 0;
            }
        }
    }

    pub(crate) fn say(&mut self, peer: u32, link: Link, said: Said, grant: Option<Mr>) -> Result<(), DeviceError> {
        // A peer that cannot be told is lost: the device ends the connection, and says so in `control`.
        let sent = self.device.send(link, &said.encode(), grant);
        if sent.is_err() {
            self.peer_failed(peer, Status::ConnectionLost);
        }
        sent
    }

    /// Does the control work of engine and device: handshakes, imports, losses. The only call, beside those that
    /// register, import and connect, that makes system calls. Call it now and then until it has nothing to tell.
    pub fn control(&mut self, now: u64) -> Option<Notice> {
        self.notices.pop_front().or_else(|| self.control_device(now))
    }

    pub(crate) fn control_device(&mut self, now: u64) -> Option<Notice> {
        if self.doomed != 0 {
            self.sweep_doomed();
        }
        for _ in 0..EVENTS {
            let notice = match self.device.control(now)? {
                Event::Up { link, node, incoming, epoch, peer_epoch, replaces } => {
                    self.came_up(Up { link, node, incoming, epoch, peer_epoch, replaces }, now)
                }
                Event::Down { link, cause } => match self.peers.by_link(link) {
                    Some(id) => {
                        let status = if cause == DeviceError::Died { Status::PeerDead } else { Status::ConnectionLost };
                        self.peer_failed(id, status);
                        self.clear_grants_to(id);
                        Some(Notice::Lost { peer: PeerId(id), cause })
                    }
                    None => {
                        self.device.disconnect(link);
                        None
                    }
                },
                Event::Message { link, message, granted } => match (self.peers.by_link(link), Said::decode(&message)) {
                    (Some(id), Some(said)) => self.hear(id, link, said, granted),
                    (peer, _) => {
                        if let Some(granted) = granted {
                            self.device.release(granted.rkey);
                        }
                        peer.map(|id| {
                            self.break_connection(id, Status::ConnectionLost, now);
                            let cause = DeviceError::Protocol("a message that no engine says");
                            Notice::Lost { peer: PeerId(id), cause }
                        })
                    }
                },
                _ => None,
            };
            if notice.is_some() {
                return notice;
            }
        }
        None
    }

    fn clear_grants_to(&mut self, peer: u32) {
        for place in 0..self.windows.capacity() {
            let (word, bit) = self.grant_word(place, peer);
            *self.grants.at_mut(word) &= !bit;
        }
    }

    /// A peer's engine said something. Every number in it is checked.
    fn hear(&mut self, peer: u32, link: Link, said: Said, granted: Option<Granted>) -> Option<Notice> {
        if !matches!(said, Said::Grant { .. })
            && let Some(granted) = granted
        {
            self.device.release(granted.rkey);
        }
        if matches!(said, Said::Grant { .. } | Said::Deny { .. }) {
            self.ask_again(peer);
        }
        match said {
            Said::Import { key, importer, epoch, token } => {
                self.answer_import(peer, link, key, importer, epoch, &token);
                None
            }
            Said::Grant { key, importer, epoch, len, rights } => {
                let place = index(importer);
                let info = *self.import_infos.at(place);
                let is_awaited = info.is_awaited(importer, peer, key);
                let key_of_it = RemoteKey { peer: PeerId(peer), key: importer };
                match granted {
                    Some(granted) if is_awaited && granted.base.is_multiple_of(8) => {
                        self.enter_import(place, key_of_it, granted, len, rights);
                        Some(Notice::Imported { key: key_of_it })
                    }
                    Some(granted) => {
                        self.device.release(granted.rkey);
                        self.let_go(peer, key, epoch);
                        None
                    }
                    None if is_awaited => {
                        // The device had no room for the mapping.
                        self.import_infos.at_mut(place).state = ImportState::Failed(Status::TooManyOutstanding);
                        self.let_go(peer, key, epoch);
                        Some(Notice::ImportFailed { key: key_of_it, status: Status::TooManyOutstanding })
                    }
                    None => {
                        self.let_go(peer, key, epoch);
                        None
                    }
                }
            }
            Said::Deny { key, importer, status } => {
                let info = self.import_infos.at_mut(index(importer));
                let is_awaited = info.is_awaited(importer, peer, key);
                if !is_awaited {
                    return None;
                }
                info.state = ImportState::Failed(status);
                Some(Notice::ImportFailed { key: RemoteKey { peer: PeerId(peer), key: importer }, status })
            }
            Said::Revoke { key, epoch } => {
                let revoked = self.revoked(peer, key, epoch);
                self.let_go(peer, key, epoch);
                revoked
            }
            Said::LetGo { key, epoch } => {
                let place = index(key);
                if self.locals.at(place).id == u64::from(key) && self.windows.at(place).epoch == epoch {
                    let (word, bit) = self.grant_word(place, peer);
                    *self.grants.at_mut(word) &= !bit;
                }
                None
            }
        }
    }

    fn answer_import(&mut self, peer: u32, link: Link, key: u32, importer: u32, epoch: u32, token: &[u8; 16]) {
        let place = index(key);
        let info = *self.windows.at(place);
        let is_there = key != 0 && self.locals.at(place).id == u64::from(key) && !info.rights.is_empty();
        let deny = if !is_there || info.is_closing || info.epoch != epoch {
            Some(Status::StaleEpoch)
        } else if !bool::from(self.token(key, epoch).ct_eq(token)) {
            Some(Status::RemoteAccess)
        } else {
            None
        };
        if let Some(status) = deny {
            let _ = self.say(peer, link, Said::Deny { key, importer, status }, None);
            return;
        }
        let (word, bit) = self.grant_word(place, peer);
        *self.grants.at_mut(word) |= bit;
        let len = self.locals.at(place).read_limit;
        let said = Said::Grant { key, importer, epoch, len, rights: info.rights };
        let _ = self.say(peer, link, said, Some(info.mr));
    }

    /// What a grant lets one do: what owner, mapping and Remote all allow.
    fn enter_import(&mut self, place: u32, key: RemoteKey, granted: Granted, len: u64, rights: Rights) {
        let info = self.import_infos.at_mut(place);
        info.state = ImportState::Ready;
        info.rights &= rights;
        info.len = info.len.min(len).min(granted.len);
        self.device.keep(granted.rkey);
        let info = *self.import_infos.at(place);
        let limit = |right: Rights, is_possible: bool| {
            if info.rights.contains(right) && is_possible { info.len } else { 0 }
        };
        let can_do_atomics = granted.writable
            && granted.atomics
            && self.device.caps().atomics
            && info.domain == self.device.caps().domain;
        let qps = self.peers.table.at(index(key.peer.0)).qps;
        *self.imports.at_mut(place) = Memory {
            id: u64::from(key.peer.0) | u64::from(key.key) << 32,
            base: granted.base,
            read_limit: limit(Rights::READ, true),
            write_limit: limit(Rights::WRITE, granted.writable),
            atomic_limit: limit(Rights::ATOMIC, can_do_atomics),
            device_key: granted.rkey,
            qps,
        };
    }

    /// The owner took a region back: nothing of this engine touches it any more when this returns.
    fn revoked(&mut self, peer: u32, remote_key: u32, epoch: u32) -> Option<Notice> {
        let mut notice = None;
        for place in 0..self.import_infos.capacity() {
            let info = *self.import_infos.at(place);
            let is_it = info.id != 0 && info.peer == peer && info.remote_key == remote_key && info.epoch == epoch;
            if !is_it || matches!(info.state, ImportState::Failed(_)) {
                continue;
            }
            self.import_infos.at_mut(place).state = ImportState::Failed(Status::StaleEpoch);
            let mut is_named = false;
            for flight in 0..self.flights.capacity() {
                let entry = self.flights.at(flight);
                let names_it = entry.sqe.key() == info.id && entry.sqe.peer() == peer && has_remote(&entry.sqe);
                match entry.state {
                    State::Held if names_it => self.finish(flight, Status::StaleEpoch, 0, 0),
                    State::Posted | State::Draining if names_it => is_named |= !self.cut(flight, Status::StaleEpoch),
                    _ => {}
                }
            }
            self.peers.set_waiting(peer, true);
            if is_named {
                // The device goes on with it: the mapping stays until that ended.
                let memory = core::mem::replace(self.imports.at_mut(place), Memory::NONE);
                self.import_infos.at_mut(place).doomed = Some(memory.device_key);
                self.doomed += 1;
            } else {
                self.drop_mapping(info.id);
            }
            if let Some(earlier) =
                notice.replace(Notice::Revoked { key: RemoteKey { peer: PeerId(peer), key: info.id } })
            {
                self.keep_notice(earlier);
            }
        }
        notice
    }

    /// Keeps a notice for a later `control`; of too many the oldest goes.
    pub(crate) fn keep_notice(&mut self, notice: Notice) {
        if self.notices.is_full() {
            self.notices.pop_front();
        }
        let _ = self.notices.push_back(notice);
    }

    /// Why the remote side of an entry was refused.
    #[cold]
    pub(crate) fn why_not_remote(&self, sqe: &Sqe, access: Access) -> Status {
        let key = RemoteKey { peer: PeerId(sqe.peer()), key: sqe.key() };
        let missing = match self.import_of(key).map(|info| info.state) {
            Some(ImportState::Requested) => Status::NotReady,
            Some(ImportState::Failed(status)) => status,
            Some(ImportState::Ready) | None => Status::BadRemoteKey,
        };
        let why = self.imports.at(index(sqe.key())).why_not(sqe.words[1], access, missing, Status::RemoteOutOfBounds);
        let is_elsewhere = self.import_of(key).is_some_and(|info| info.domain != self.device.caps().domain);
        if why == Status::RemoteAccess && access == Access::Atomic && is_elsewhere { Status::WrongDomain } else { why }
    }

    /// Why the local side of an entry was refused.
    #[cold]
    pub(crate) fn why_not_local(&self, sqe: &Sqe) -> Status {
        let (memory, id) = (self.locals.at(index(sqe.lkey())), u64::from(sqe.lkey()));
        memory.why_not(id, Access::Read, Status::BadLocalKey, Status::LocalOutOfBounds)
    }
}

fn has_local(sqe: &Sqe) -> bool {
    let opcode = Opcode::from_raw(sqe.opcode());
    matches!(opcode, Some(Opcode::Put | Opcode::Get | Opcode::PutSignal | Opcode::Send | Opcode::Recv))
}

fn has_remote(sqe: &Sqe) -> bool {
    !matches!(Opcode::from_raw(sqe.opcode()), Some(Opcode::Send | Opcode::Recv | Opcode::Flush))
}
