//! Other processes of this host, over shared memory.
//!
//! A device listens under a name: an abstract Unix socket (unix(7)) of its user, whose peers must be of the same user.
//! A connection is that socket, which carries a [`Channel`] and memfds, and two lanes. What a peer may reach is a region of its own,
//! mapped by both; so a put is a copy or a store by the initiator. A helper thread sleeps until a peer is gone, and says
//! so in the lane, where the data path finds it by a plain load.

mod socket;
mod watch;

use core::sync::atomic::{AtomicU32, Ordering};
use std::boxed::Box;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::string::{String, ToString};
use std::sync::Arc;
use std::vec::Vec;

use rustix::event::epoll;
use verbring_slab::{Arena, Pages, Region, RegionError, RegionOptions};

use crate::channel::{Body, Channel, GREETING_BYTES, Grant, HANDSHAKE_NS, Heard, Medium, Packet, Reason};
use crate::cpu_nic::{self, Import};
use crate::lane::{CLOSED, DEAD, LANE_BYTES, Lane};
use crate::mrs::Mrs;
use crate::{
    Cancel, Caps, CpuNic, Device, DeviceError, Event, Granted, Link, Memory, Message, Mr, Posted, Qp, Rights, Status,
    Wc, Wr,
};
use socket::Received;
use watch::Watch;

/// What the devices say of themselves beside their lanes: nothing.
const GREETING: [u8; GREETING_BYTES] = [0; GREETING_BYTES];
/// Packets of one connection, and connections, that one call of `control` takes.
const BATCH: usize = 16;
/// The data of the listener in the epoll set; connections have their numbers.
const LISTENER: u64 = u64::MAX;

/// How large a device is.
#[derive(Clone, Copy, Debug)]
pub struct ShmOptions {
    /// Connections; rounded up to a power of two.
    pub max_links: u32,
    /// Imported regions; rounded up to a power of two.
    pub max_imports: u32,
}

impl Default for ShmOptions {
    fn default() -> ShmOptions {
        ShmOptions { max_links: 64, max_imports: 256 }
    }
}

/// The device.
pub struct Shm {
    nic: CpuNic,
    mrs: Mrs,
    links: Vec<Option<Connection>>,
    /// The mappings of imports, by rkey.
    imports: Vec<Option<Region>>,
    events: VecDeque<Event>,
    /// Changed by the watcher each time it marked a lane.
    deaths: Arc<AtomicU32>,
    deaths_seen: u32,
    name: String,
    node: u64,
    caps: Caps,
    epoll: OwnedFd,
    listener: OwnedFd,
    rejected: u64,
    /// The process that made it.
    pid: u32,
    _arena: Arena,
}

struct Connection {
    state: State,
    socket: OwnedFd,
    /// The descriptors of the grants that wait in the channel, in their order.
    grants: VecDeque<OwnedFd>,
    /// What the channel gave out and the socket has not taken yet.
    unsent: Option<(Packet, Option<OwnedFd>)>,
    incoming: bool,
    /// `Event::Up` was told, and its queue pairs are open.
    is_up: bool,
    /// Before the lanes: fields are dropped in their order, and the watch looks at one.
    watch: Option<Watch>,
    /// The lane that the peer writes to, and the one that it made.
    ours: Region,
    theirs: Option<Region>,
}

enum State {
    /// Accepted then, and has said nothing yet.
    Silent {
        since: u64,
    },
    Talking(Box<Channel>),
    Down,
}

fn system(call: &'static str) -> impl Fn(rustix::io::Errno) -> DeviceError {
    move |errno| DeviceError::System { call, errno: errno.raw_os_error() }
}

/// Drawn, and not counted: who knows it may replace the connection, so no other peer may guess it from its own.
fn new_epoch() -> Result<u32, DeviceError> {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(system("getrandom"))?;
    Ok(u32::from_le_bytes(bytes).max(1))
}

fn region_error(error: RegionError) -> DeviceError {
    match error {
        RegionError::System { call, source, .. } => {
            DeviceError::System { call, errno: source.raw_os_error().unwrap_or(0) }
        }
        RegionError::NotARegion(why) => DeviceError::Protocol(why),
        _ => DeviceError::NotSupported("map this memory: the system has too little"),
    }
}

impl Shm {
    /// Listens under `name`. `node` is the incarnation id of the engine: never 0, and another for each engine.
    pub fn bind(name: &str, node: u64, options: ShmOptions) -> Result<Shm, DeviceError> {
        let listener = socket::listen(name)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)
            .map_err(system("epoll_ctl"))?;
        let bytes = CpuNic::bytes(options.max_links, options.max_imports) + 4096;
        let mut arena = Arena::from_region(Region::private(bytes, RegionOptions::default()).map_err(region_error)?);
        let full = DeviceError::Full { what: "bytes of the device's arena", limit: bytes as u32 };
        // SAFETY: the arena is kept beside it, and dropped after it (fields are dropped in their order).
        let nic = unsafe { CpuNic::new(&mut arena, options.max_links, options.max_imports) }.map_err(|_| full)?;
        Ok(Shm {
            links: (0..nic.links()).map(|_| None).collect(),
            imports: (0..options.max_imports.next_power_of_two()).map(|_| None).collect(),
            nic,
            mrs: Mrs::new(),
            events: VecDeque::new(),
            deaths: Arc::new(AtomicU32::new(0)),
            deaths_seen: 0,
            name: name.to_string(),
            node,
            caps: cpu_nic::caps("shm"),
            epoll,
            listener,
            rejected: 0,
            pid: std::process::id(),
            _arena: arena,
        })
    }

    /// The name it listens under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pages that its tables lie in.
    pub fn pages(&self) -> Option<Pages> {
        self._arena.pages()
    }

    /// Connections that were turned away before they were up: of other users, of other versions, or not of verbring.
    pub fn rejected(&self) -> u64 {
        self.rejected
    }

    /// A new connection over `socket`, which comes back if there can be none.
    fn add(&mut self, socket: OwnedFd, state: State) -> Result<Link, (DeviceError, OwnedFd)> {
        match self.prepare(&socket) {
            Err(error) => Err((error, socket)),
            Ok((index, ours)) => {
                self.links[index] = Some(Connection {
                    incoming: matches!(state, State::Silent { .. }),
                    state,
                    socket,
                    grants: VecDeque::new(),
                    unsent: None,
                    is_up: false,
                    watch: None,
                    ours,
                    theirs: None,
                });
                Ok(Link(index as u32))
            }
        }
    }

    /// The place and the lane of a new connection.
    fn prepare(&self, socket: &OwnedFd) -> Result<(usize, Region), DeviceError> {
        let full = DeviceError::Full { what: "connections", limit: self.links.len() as u32 };
        let index = self.links.iter().position(Option::is_none).ok_or(full)?;
        // A lane is small and touched all over: huge pages would be wasted on it.
        let small = RegionOptions { largest: Pages::Small, smallest: Pages::Small, lock: false };
        let ours = Region::shared(LANE_BYTES, small).map_err(region_error)?;
        ours.seal_seals().map_err(region_error)?;
        // SAFETY: the region is kept by the connection; nobody has it yet.
        unsafe { Lane::create(ours.base()) };
        epoll::add(&self.epoll, socket, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)
            .map_err(system("epoll_ctl"))?;
        Ok((index, ours))
    }

    fn accept(&mut self, now: u64) {
        for _ in 0..BATCH {
            let Ok(Some(socket)) = socket::accept(&self.listener) else { return };
            let refused = match socket::check_user(&socket) {
                Err(_) => Some((Reason::User, socket)),
                Ok(()) => {
                    self.evict_silent();
                    match self.add(socket, State::Silent { since: now }) {
                        // Who said hello already is not silent.
                        Ok(link) => {
                            self.read(link, now);
                            None
                        }
                        Err((_, socket)) => Some((Reason::Full, socket)),
                    }
                }
            };
            if let Some((reason, socket)) = refused {
                self.rejected += 1;
                let _ = socket::send(&socket, &Packet::reject_unheard(reason), None);
            }
        }
    }

    /// Connections that others began, and that say nothing, must not take every place: the oldest makes room.
    fn evict_silent(&mut self) {
        let since = |c: &Connection| if let State::Silent { since } = c.state { Some(since) } else { None };
        let silent = self.links.iter().enumerate().filter_map(|(i, c)| Some((since(c.as_ref()?)?, i)));
        if silent.clone().count() * 2 >= self.links.len()
            && let Some((_, oldest)) = silent.min()
        {
            self.answer(Link(oldest as u32), &Packet::reject_unheard(Reason::Full));
            self.lose(Link(oldest as u32), DeviceError::TimedOut);
        }
    }

    /// The connection is over, as seen from the control side.
    fn lose(&mut self, link: Link, cause: DeviceError) {
        let Some(connection) = self.links[link.0 as usize].as_mut() else { return };
        if matches!(connection.state, State::Down) {
            return;
        }
        connection.state = State::Down;
        let was_up = core::mem::take(&mut connection.is_up);
        (connection.unsent, connection.grants) = (None, VecDeque::new());
        let _ = epoll::delete(&self.epoll, &connection.socket);
        if connection.incoming && !was_up {
            // Nobody was told of it.
            self.rejected += 1;
            self.links[link.0 as usize] = None;
            return;
        }
        let status = if cause == DeviceError::Died { Status::PeerDead } else { Status::ConnectionLost };
        self.nic.fail(link.0, status);
        self.events.push_back(Event::Down { link, cause });
    }

    /// Why a connection ended whose socket did: a side that closes says so in its lane first.
    fn how_it_ended(&self, link: Link) -> DeviceError {
        let theirs = self.links[link.0 as usize].as_ref().and_then(|c| c.theirs.as_ref());
        // SAFETY: the region is kept by the connection.
        match theirs.and_then(|region| unsafe { Lane::attach(region.base()) }) {
            Some(lane) if lane.door().load(Ordering::Acquire) & CLOSED == 0 => DeviceError::Died,
            _ => DeviceError::Closed,
        }
    }

    fn read(&mut self, link: Link, now: u64) {
        for _ in 0..BATCH {
            let Some(connection) = self.links[link.0 as usize].as_ref() else { return };
            if matches!(connection.state, State::Down) {
                return;
            }
            let outcome = match socket::receive(&connection.socket) {
                Ok(Received::Nothing) => return,
                Ok(Received::Closed) => Err(self.how_it_ended(link)),
                Ok(Received::Packet(packet, fd)) => self.take(link, &packet, fd, now),
                Ok(Received::Garbage(error, answer)) => {
                    if let (Some(answer), State::Silent { .. }) = (answer, &connection.state) {
                        self.answer(link, &answer);
                    }
                    Err(error)
                }
                Err(error) => Err(error),
            };
            if let Err(cause) = outcome {
                return self.lose(link, cause);
            }
        }
    }

    /// A last word, if the socket takes it.
    fn answer(&self, link: Link, packet: &Packet) {
        if let Some(connection) = self.links[link.0 as usize].as_ref() {
            let _ = socket::send(&connection.socket, packet, None);
        }
    }

    fn take(&mut self, link: Link, packet: &Packet, fd: Option<OwnedFd>, now: u64) -> Result<(), DeviceError> {
        let Some(connection) = self.links[link.0 as usize].as_mut() else { return Ok(()) };
        let State::Talking(channel) = &mut connection.state else {
            return self.take_hello(link, packet, fd, now);
        };
        match (channel.handle(now, packet)?, fd) {
            (Some(Heard::Welcome { greeting, .. }), fd) => {
                connection.take_lane(&greeting, fd)?;
                self.came_up(link)
            }
            (Some(Heard::Ready), None) => self.came_up(link),
            (Some(Heard::Message { message, grant }), fd) => {
                let granted = match (grant, fd) {
                    (Some(grant), Some(fd)) => self.take_grant(link, grant, fd)?,
                    (None, None) => None,
                    _ => return Err(DeviceError::Protocol("a grant and its descriptor come together")),
                };
                self.events.push_back(Event::Message { link, message, granted });
                Ok(())
            }
            (None, None) => Ok(()),
            (_, Some(_)) => Err(DeviceError::Protocol("a descriptor that belongs to nothing")),
        }
    }

    /// The first packet of a connection that the other side began.
    fn take_hello(&mut self, link: Link, packet: &Packet, fd: Option<OwnedFd>, now: u64) -> Result<(), DeviceError> {
        let channel = Channel::accept(packet, self.node, new_epoch()?, GREETING, Medium::Stream, now)?;
        let Some(connection) = self.links[link.0 as usize].as_mut() else { return Ok(()) };
        if let Body::Hello { greeting, .. } = &packet.body {
            connection.take_lane(greeting, fd)?;
        }
        connection.state = State::Talking(channel.into());
        connection.flush()
    }

    /// Both sides have each other's lane, and know it.
    fn came_up(&mut self, link: Link) -> Result<(), DeviceError> {
        let Some(connection) = self.links[link.0 as usize].as_mut() else { return Ok(()) };
        let State::Talking(channel) = &connection.state else { return Ok(()) };
        let (node, epoch, peer_epoch) = (channel.peer_node(), channel.epoch(), channel.peer_epoch());
        let replaces = if connection.incoming { channel.replaces() } else { 0 };
        // SAFETY: the connection keeps both regions until the queue pairs are closed.
        let ours = unsafe { Lane::attach(connection.ours.base()) };
        // SAFETY: as above.
        let theirs = connection.theirs.as_ref().and_then(|region| unsafe { Lane::attach(region.base()) });
        let (Some(ours), Some(theirs)) = (ours, theirs) else { return Err(NO_LANE) };
        // SAFETY: the lane is mapped until the watch was dropped: `Connection` drops the watch first.
        let watch = unsafe { Watch::new(&connection.socket, theirs, self.deaths.clone()) }?;
        connection.watch = Some(watch);
        connection.is_up = true;
        let incoming = connection.incoming;
        // SAFETY: as above.
        unsafe { self.nic.open(link.0, ours, theirs) };
        self.events.push_back(Event::Up { link, node, incoming, epoch, peer_epoch, replaces });
        match self.links[link.0 as usize].as_mut() {
            Some(connection) => connection.flush(),
            None => Ok(()),
        }
    }

    /// Maps what was granted. Where there is no room, the message arrives without it, and the engine sees that.
    fn take_grant(&mut self, link: Link, grant: Grant, fd: OwnedFd) -> Result<Option<Granted>, DeviceError> {
        if grant.base != 0 {
            return Err(DeviceError::Protocol("memory that is mapped here begins where it is mapped"));
        }
        let region = Region::adopt(fd, grant.len as usize, grant.writable).map_err(region_error)?;
        let theirs = self.links[link.0 as usize].as_ref().and_then(|c| c.theirs.as_ref());
        // SAFETY: the connection keeps the region as long as it has imports.
        let theirs = theirs.and_then(|region| unsafe { Lane::attach(region.base()) });
        if theirs.is_none() {
            return Err(DeviceError::Protocol("its lane is none any more"));
        }
        let import = Import { link: link.0, theirs, mr: grant.mr, epoch: grant.epoch };
        let Some(rkey) = self.nic.import(import) else { return Ok(None) };
        let (base, len) = (region.base().as_ptr() as u64, region.len() as u64);
        self.imports[rkey as usize] = Some(region);
        Ok(Some(Granted { rkey, base, len, writable: grant.writable, atomics: true }))
    }

    fn work(&mut self, now: u64) {
        let mut ready = [const { core::mem::MaybeUninit::uninit() }; 32];
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = epoll::wait(&self.epoll, &mut ready, Some(&at_once)).map_or(&mut [][..], |(ready, _)| ready);
        for event in ready {
            match event.data.u64() {
                LISTENER => self.accept(now),
                link => self.read(Link(link as u32), now),
            }
        }
        for link in (0..self.links.len() as u32).map(Link) {
            let Some(connection) = self.links[link.0 as usize].as_mut() else { continue };
            let outcome = match &mut connection.state {
                State::Down => continue,
                State::Silent { since } if now.saturating_sub(*since) > HANDSHAKE_NS => Err(DeviceError::TimedOut),
                State::Silent { .. } => Ok(()),
                State::Talking(channel) => channel.handle_timeout(now).and_then(|()| connection.flush()),
            };
            if let Err(cause) = outcome {
                self.lose(link, cause);
            } else if self.is_up(link) {
                self.nic.look_at_door(link.0);
                if self.nic.down(self.nic.qp(link.0, 0)).is_some() {
                    self.lose(link, self.how_it_ended(link));
                }
            }
        }
    }

    fn is_up(&self, link: Link) -> bool {
        self.links.get(link.0 as usize).and_then(Option::as_ref).is_some_and(|c| c.is_up)
    }

    #[cold]
    #[inline(never)]
    fn somebody_died(&mut self) {
        self.deaths_seen = self.deaths.load(Ordering::Acquire);
        for link in 0..self.nic.links() {
            self.nic.look_at_door(link);
        }
    }
}

const NO_LANE: DeviceError = DeviceError::Protocol("it is not a lane");

impl Connection {
    /// Maps the lane that came with a hello or welcome.
    fn take_lane(&mut self, greeting: &[u8; GREETING_BYTES], fd: Option<OwnedFd>) -> Result<(), DeviceError> {
        if *greeting != GREETING {
            return Err(DeviceError::Protocol("a greeting that means nothing"));
        }
        let region = Region::adopt(fd.ok_or(NO_LANE)?, self.ours.len(), true).map_err(region_error)?;
        // SAFETY: the region is kept beside the lane.
        unsafe { Lane::attach(region.base()) }.ok_or(NO_LANE)?;
        self.theirs = Some(region);
        Ok(())
    }

    /// Sends what the channel has and the socket takes.
    fn flush(&mut self) -> Result<(), DeviceError> {
        let State::Talking(channel) = &mut self.state else { return Ok(()) };
        loop {
            if self.unsent.is_none() {
                // Time means nothing to a stream that is sent.
                let Some(packet) = channel.poll_transmit(0) else { return Ok(()) };
                let fd = match packet.body {
                    Body::Hello { .. } | Body::Welcome { .. } => Some(self.ours.hand_out().map_err(region_error)?),
                    Body::Message { grant: Some(_), .. } => self.grants.pop_front(),
                    _ => None,
                };
                self.unsent = Some((packet, fd));
            }
            if let Some((packet, fd)) = &self.unsent
                && !socket::send(&self.socket, packet, fd.as_ref().map(AsFd::as_fd))?
            {
                return Ok(());
            }
            self.unsent = None;
        }
    }
}

// SAFETY: `CpuNic` ends each work request once, and touches memory in `post` and `poll` only, before it answers.
unsafe impl Device for Shm {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn register(&mut self, memory: Memory, rights: Rights) -> Result<Mr, DeviceError> {
        if rights.is_empty() {
            return self.mrs.add(memory, rights);
        }
        let Memory::Shared { region, .. } = &memory else { return Err(DeviceError::NotShareable) };
        let is_writable = |rights: Rights| rights.intersects(Rights::WRITE | Rights::ATOMIC);
        // One at a time: revoking one would take the memory from under the peers of the other.
        let region = region.clone();
        if !region.begin_export() {
            return Err(DeviceError::AlreadyExported);
        }
        // Who had it from an earlier registration, and went without letting go, may have it mapped still.
        if region.is_handed_out()
            && let Err(error) = region.replace()
        {
            region.end_export();
            return Err(region_error(error));
        }
        let sealed = match (is_writable(rights), region.is_read_only()) {
            (true, true) => Err(DeviceError::RightsDiffer),
            (false, false) => region.seal_read_only().map_err(|_| DeviceError::RightsDiffer),
            _ => Ok(()),
        };
        let mr =
            sealed.and_then(|()| region.seal_seals().map_err(region_error)).and_then(|()| self.mrs.add(memory, rights));
        if mr.is_err() {
            region.end_export();
        }
        mr
    }

    fn deregister(&mut self, mr: Mr) -> Result<(), DeviceError> {
        let epoch = self.mrs.next_epoch(mr)?;
        self.nic.revoke(mr.0, epoch);
        let registration = self.mrs.remove(mr)?;
        if let (Memory::Shared { region, .. }, false) = (&registration.memory, registration.rights.is_empty()) {
            region.end_export();
        }
        Ok(())
    }

    fn revoke(&mut self, mr: Mr) -> Result<(), DeviceError> {
        let epoch = self.mrs.next_epoch(mr)?;
        self.nic.revoke(mr.0, epoch);
        match &self.mrs.get(mr)?.registration.memory {
            Memory::Shared { region, .. } if region.is_handed_out() => region.replace().map_err(region_error),
            _ => Ok(()),
        }
    }

    fn connect(&mut self, address: &str, replaces: u32, now: u64) -> Result<Link, DeviceError> {
        let socket = socket::connect(address)?;
        socket::check_user(&socket)?;
        let channel = Channel::connect(self.node, new_epoch()?, replaces, GREETING, Medium::Stream, now);
        let link = self.add(socket, State::Talking(channel.into())).map_err(|(error, _)| error)?;
        let flushed = self.links[link.0 as usize].as_mut().map_or(Ok(()), Connection::flush);
        if let Err(error) = flushed {
            self.links[link.0 as usize] = None;
            return Err(error);
        }
        Ok(link)
    }

    fn disconnect(&mut self, link: Link) {
        // A forked child has copies of everything, and the connections are its parent's.
        if std::process::id() != self.pid {
            return;
        }
        let Some(slot) = self.links.get_mut(link.0 as usize) else { return };
        // Queue pairs first: from then on nothing touches the lanes.
        self.nic.close(link.0);
        for (rkey, import) in self.imports.iter_mut().enumerate() {
            if import.is_some() && !self.nic.is_import(rkey as u32) {
                *import = None;
            }
        }
        if let Some(connection) = slot.take() {
            let _ = epoll::delete(&self.epoll, &connection.socket);
        }
        self.events.retain(|event| !matches!(event, Event::Message { link: of, .. } | Event::Down { link: of, .. } | Event::Up { link: of, .. } if *of == link));
    }

    fn qp(&self, link: Link, class: usize) -> Qp {
        self.nic.qp(link.0, class)
    }

    fn send(&mut self, link: Link, message: &Message, grant: Option<Mr>) -> Result<(), DeviceError> {
        if !self.is_up(link) {
            return Err(DeviceError::NoSuchLink);
        }
        let mut fd = None;
        let mut packed = None;
        if let Some(mr) = grant {
            let grant = self.mrs.get(mr)?;
            let Memory::Shared { region, .. } = &grant.registration.memory else {
                return Err(DeviceError::NotShareable);
            };
            fd = Some(region.hand_out().map_err(region_error)?);
            let writable = grant.registration.rights.intersects(Rights::WRITE | Rights::ATOMIC);
            packed = Some(Grant { mr: mr.0, epoch: grant.epoch, base: 0, len: region.len() as u64, writable });
            self.nic.grant(link.0, mr.0, grant.epoch);
        }
        let connection = self.links[link.0 as usize].as_mut().ok_or(DeviceError::NoSuchLink)?;
        let State::Talking(channel) = &mut connection.state else { return Err(DeviceError::NoSuchLink) };
        let queued = channel.send(message, packed).and_then(|()| {
            connection.grants.extend(fd);
            connection.flush()
        });
        if let Err(cause) = queued {
            self.lose(link, cause);
        }
        queued
    }

    fn keep(&mut self, rkey: u32) {
        if let Some(Some(region)) = self.imports.get(rkey as usize) {
            region.touch();
        }
    }

    fn release(&mut self, rkey: u32) {
        if self.nic.release(rkey).is_some()
            && let Some(import) = self.imports.get_mut(rkey as usize)
        {
            *import = None;
        }
    }

    fn control(&mut self, now: u64) -> Option<Event> {
        if self.events.is_empty() {
            self.work(now);
        }
        self.events.pop_front()
    }

    fn hold(&mut self, qp: Qp, is_held: bool) {
        self.nic.hold(qp, is_held);
    }

    #[inline(always)]
    unsafe fn post_now(&mut self, qp: Qp, wr: &Wr) -> Option<u64> {
        // SAFETY: the same promise.
        unsafe { self.nic.post_now(qp, wr) }
    }

    #[inline(always)]
    unsafe fn post(&mut self, qp: Qp, wr: &Wr) -> Posted {
        // SAFETY: the caller's promise is the same.
        unsafe { self.nic.post(qp, wr) }
    }

    #[inline(always)]
    fn ring(&mut self, _now: u64) {}

    #[inline(always)]
    fn poll(&mut self, _now: u64, wcs: &mut [Wc]) -> usize {
        if self.deaths.load(Ordering::Relaxed) != self.deaths_seen {
            self.somebody_died();
        }
        self.nic.poll(wcs)
    }

    fn cancel(&mut self, qp: Qp, wr_id: u64) -> Cancel {
        self.nic.cancel(qp, wr_id)
    }

    #[inline(always)]
    fn down(&self, qp: Qp) -> Option<Status> {
        self.nic.down(qp)
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        for link in 0..self.links.len() {
            self.disconnect(Link(link as u32));
        }
        if std::process::id() == self.pid {
            self.mrs.end_exports();
        }
    }
}

/// Marks a lane of a peer that is gone; the watcher's whole effect.
fn mark(lane: Lane, deaths: &AtomicU32) {
    if lane.door().load(Ordering::Acquire) & CLOSED == 0 {
        lane.door().fetch_or(DEAD, Ordering::AcqRel);
    }
    deaths.fetch_add(1, Ordering::AcqRel);
}
