//! Where everything meets: entries come out of the rings, are checked, and go to the device; its completions find their
//! operations and go back into the rings.
//!
//! This file is the way of an operation that ends at once. What waits is in `held.rs`, memory and its rights in
//! `access.rs`, connections in `connect.rs`.

use core::hint::cold_path;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{Ordering, fence};

use verbring_slab::{Arena, Slab, SlabHandle, Table};
use verbring_sys::{CLASSES, Device, Memory as DeviceMemory, Mr, Posted, Qp, Status, Wc, Wr, WrOp};

use crate::config::{Config, EngineError};
use crate::cqe::{BLOCK, Cqe, VALUE, block};
use crate::fast::Fast;
use crate::flight::Flights;
use crate::key::{Access, ImportInfo, Memory, WindowInfo, index};
use crate::notice::Notice;
use crate::peer::{Peer, PeerInfo, Peers};
use crate::port::{Keep, Port};
use crate::ring::{AppEnd, EngineEnd, MAX_ENTRIES, Parts, ring_bytes};
use crate::sqe::{ADD, BUF, MAX_INLINE, Opcode, SILENT, Sqe};

/// Ports of an engine, its own included.
pub const MAX_PORTS: usize = 8;
/// Notices kept for a later `control`.
pub(crate) const NOTICES: usize = 64;
/// Bytes of a slab that a completion can name: 2^32 units of 64.
const MAX_SLAB: u64 = 1 << 38;
/// Completions taken from the device in one go.
const WCS: usize = 16;

/// The engine's side of a port.
pub(crate) struct PortEnd {
    pub(crate) end: EngineEnd,
    /// Cqes that operations in flight may still need.
    pub(crate) owed: u32,
    pub(crate) chain: Option<Chain>,
    pub(crate) slab: Option<SlabHandle>,
    slab_key: u32,
    pub(crate) _keep: Keep,
}

/// Both ends' view of one pair of rings.
struct Rings {
    engine: Parts,
    app: Parts,
}

impl Rings {
    /// Lays out rings in an arena; the application attaches to them as it would to anybody's.
    ///
    /// # Safety
    /// Both ends keep the arena.
    unsafe fn carve(arena: &mut Arena, sq: u32, cq: u32) -> Result<Rings, EngineError> {
        // SAFETY: the caller's promise.
        unsafe {
            let base = arena.block(ring_bytes(sq, cq), 128)?;
            let engine = Parts::create(base, sq, cq);
            let app = Parts::attach(base, ring_bytes(sq, cq)).map_err(|_| EngineError::NotARing)?;
            Ok(Rings { engine, app })
        }
    }
}

/// A chain of linked entries that is not over yet.
#[derive(Clone, Copy)]
pub(crate) struct Chain {
    pub(crate) id: u32,
    pub(crate) peer: u32,
    pub(crate) class: u8,
    pub(crate) has_failed: bool,
}

/// One engine: polled, single-threaded, generic over its device.
///
/// It is also its own [`Port`]: `push`, `put`, `reap` and the like are that type's.
// Whole lines: nothing of another engine lies in one of them.
#[repr(align(64))]
pub struct Engine<D: Device> {
    // The device goes first: after its drop nothing touches memory any more.
    pub(crate) device: D,
    pub(crate) ports: heapless::Vec<PortEnd, MAX_PORTS>,
    pub(crate) peers: Peers,
    pub(crate) flights: Flights,
    pub(crate) imports: Table<Memory>,
    pub(crate) import_infos: Table<ImportInfo>,
    pub(crate) locals: Table<Memory>,
    pub(crate) windows: Table<WindowInfo>,
    /// For each window, a bit for each peer that it was granted to.
    pub(crate) grants: Table<u64>,
    /// Revoked imports that are still mapped.
    pub(crate) doomed: u32,
    /// Position of the next operation in flight among all.
    pub(crate) next_order: u64,
    /// Told by `control`, found while somebody waited for something else.
    pub(crate) notices: heapless::Deque<Notice, NOTICES>,
    pub(crate) next_deadline: u64,
    pub(crate) next_chain: u32,
    /// What the device completed; between two polls it means nothing.
    wcs: [Wc; WCS],
    pub(crate) config: Config,
    own: Port,
    /// Keeps the rings and tables, whatever became of the ports. The last field: dropped last.
    #[cfg(feature = "std")]
    _keep: Keep,
    /// The rings and tables lie in it; the ports of other threads keep it too.
    #[cfg(not(feature = "std"))]
    _arena: Arena,
}

impl<D: Device> Deref for Engine<D> {
    type Target = Port;
    fn deref(&self) -> &Port {
        &self.own
    }
}

impl<D: Device> DerefMut for Engine<D> {
    fn deref_mut(&mut self) -> &mut Port {
        &mut self.own
    }
}

/// What became of an entry that was started.
pub(crate) enum Started {
    Done(u64),
    /// The device has `parts` work requests of it, perhaps with the second still to come, perhaps with its end decided.
    Posted {
        parts: u8,
        needs_second: bool,
        fate: Option<Status>,
    },
    Full,
    Refused(Status),
}

impl<D: Device> Engine<D> {
    /// An engine over a device, its rings and tables in `arena`. The slab, if there is one, is registered with the device
    /// and belongs to the engine's own port.
    pub fn new(device: D, arena: Arena, slab: Option<Slab>, config: Config) -> Result<Engine<D>, EngineError> {
        let mut arena = arena;
        config.check()?;
        #[cfg(not(feature = "std"))]
        if !arena.is_static() {
            // Without std the port has nothing to keep the arena with.
            return Err(EngineError::NotStatic);
        }
        let peers = Table::<Peer>::capacity_for(config.max_peers);
        let windows = Table::<Memory>::capacity_for(config.max_windows);
        let (sq, cq) = (config.sq_entries.next_power_of_two(), config.cq_entries.next_power_of_two());
        // SAFETY: the engine and its port keep the arena as long as they use what is carved here.
        let (rings, peers, flights, imports, import_infos, locals, window_infos, grants) = unsafe {
            (
                Rings::carve(&mut arena, sq, cq)?,
                Peers {
                    table: arena.table(peers, |_| Peer::NONE)?,
                    infos: arena.table(peers, |_| PeerInfo::NONE)?,
                    waiting: arena.table(peers.div_ceil(64), |_| 0)?,
                    waiting_count: 0,
                },
                Flights::new(&mut arena, config.max_outstanding)?,
                arena.table(config.max_imports, |_| Memory::NONE)?,
                arena.table(config.max_imports, |_| ImportInfo::NONE)?,
                arena.table(windows, |_| Memory::NONE)?,
                arena.table(windows, |_| WindowInfo::NONE)?,
                arena.table(windows * peers.div_ceil(64), |_| 0)?,
            )
        };
        #[cfg(feature = "std")]
        let keep = std::sync::Arc::new(arena);
        #[cfg(feature = "std")]
        let own = Port::new(AppEnd::new(rings.app), keep.clone());
        #[cfg(not(feature = "std"))]
        let (keep, own) = ((), Port::new(AppEnd::new(rings.app), ()));
        let mut engine = Engine {
            device,
            ports: heapless::Vec::new(),
            peers,
            flights,
            imports,
            import_infos,
            locals,
            windows: window_infos,
            grants,
            doomed: 0,
            next_order: 0,
            notices: heapless::Deque::new(),
            next_deadline: u64::MAX,
            next_chain: 0,
            wcs: [Wc::new(0, Qp(0), Status::Success); WCS],
            config,
            own,
            #[cfg(feature = "std")]
            _keep: keep.clone(),
            #[cfg(not(feature = "std"))]
            _arena: arena,
        };
        if let Some((slab, key)) = engine.add_port_end(rings.engine, slab, keep)? {
            engine.own.set_slab(slab, key);
        }
        Ok(engine)
    }

    /// The engine's side of a port. The slab is registered, and given back with its key.
    fn add_port_end(
        &mut self,
        ring: Parts,
        slab: Option<Slab>,
        keep: Keep,
    ) -> Result<Option<(Slab, u32)>, EngineError> {
        let place = self.free_port();
        if place.is_none() && self.ports.is_full() {
            return Err(EngineError::TooManyPorts);
        }
        let end = EngineEnd::new(ring);
        let mut end = PortEnd { end, owed: 0, chain: None, slab: None, slab_key: 0, _keep: keep };
        let slab = match slab {
            None => None,
            Some(mut slab) => {
                let (base, len) = slab.data();
                if len as u64 > MAX_SLAB {
                    return Err(EngineError::SlabTooLarge);
                }
                end.slab = Some(slab.handle());
                // SAFETY: the handle in `ports` keeps the slab's memory as long as it is registered.
                end.slab_key = unsafe { self.register_slab(DeviceMemory::Private { base, len }) }?;
                Some((slab, end.slab_key))
            }
        };
        match place.and_then(|place| self.ports.get_mut(place)) {
            Some(place) => *place = end,
            None => self.ports.push(end).map_err(|_| EngineError::TooManyPorts)?,
        }
        Ok(slab)
    }

    /// The place of a port whose application is gone and to which nothing is owed; its slab is registered no more.
    fn free_port(&mut self) -> Option<usize> {
        // The first place is the engine's own, for good.
        let is_free = |port: &PortEnd| port.owed == 0 && port.end.is_app_gone();
        let place = (1..self.ports.len()).find(|place| self.ports.get(*place).is_some_and(is_free))?;
        let slab_key = core::mem::take(&mut self.ports.get_mut(place)?.slab_key);
        if slab_key != 0 {
            self.deregister_slab(slab_key);
        }
        Some(place)
    }

    /// Another port, for another thread: rings of their own, and a slab of their own if one is given. The place of a port
    /// that was dropped is used again.
    #[cfg(feature = "std")]
    pub fn add_port(&mut self, slab: Option<Slab>) -> Result<Port, EngineError> {
        use verbring_slab::{Region, RegionOptions};
        let (sq, cq) = (self.config.sq_entries.next_power_of_two(), self.config.cq_entries.next_power_of_two());
        let bytes = ring_bytes(sq, cq) + 128;
        let no_memory = EngineError::Device(verbring_sys::DeviceError::System { call: "mmap", errno: 12 });
        let region = Region::private(bytes, RegionOptions::default()).map_err(|_| no_memory)?;
        let mut arena = Arena::from_region(region);
        // SAFETY: both ends keep the arena.
        let rings = unsafe { Rings::carve(&mut arena, sq, cq) }?;
        let keep = std::sync::Arc::new(arena);
        let mut port = Port::new(AppEnd::new(rings.app), keep.clone());
        if let Some((slab, key)) = self.add_port_end(rings.engine, slab, keep)? {
            port.set_slab(slab, key);
        }
        Ok(port)
    }

    /// The device, to be looked at.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, to be set up before the engine uses it.
    ///
    /// # Safety
    /// It is not replaced, and no connection, registration or import that the engine knows of is ended behind its back.
    pub unsafe fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Operations in flight.
    pub fn outstanding(&self) -> u32 {
        self.flights.live
    }

    /// Takes the entries that were pushed, and starts each, or holds it, or ends it in error: how many. Entries stay in
    /// the ring while the completion ring has no room for theirs.
    #[inline]
    pub fn submit(&mut self, now: u64) -> u32 {
        let (mut total, mut more) = (0, 0u32);
        for (index, port) in self.ports.iter_mut().enumerate() {
            if port.end.has_more() {
                total += port.submit_puts(&mut self.device, &self.imports, &self.locals);
                if port.end.has_more() {
                    total += port.submit_any(&mut self.device, &self.imports, &self.locals);
                    more |= u32::from(port.end.has_more()) << index;
                }
            }
        }
        if more != 0 {
            total += self.submit_rest(more, now);
        }
        if total != 0 {
            self.device.ring(now);
        }
        total
    }

    /// Does one operation past the rings: its completion, whose level is that of any other (silent or not). None, and
    /// nothing was done, if it cannot be done at once, is wrong, or comes behind entries of this engine's own port that
    /// were not submitted: then push it. For one operation alone this is the shortest way; entries of other ports are not
    /// looked at.
    ///
    /// ```
    /// # use verbring::{Cqe, Device, Engine, Sqe, Target};
    /// fn store<D: Device>(engine: &mut Engine<D>, to: Target, now: u64) -> Option<Cqe> {
    ///     let sqe = Sqe::put_word(42, to).user_data(7);
    ///     if let Some(done) = engine.execute(&sqe) {
    ///         return Some(done);
    ///     }
    ///     engine.push(sqe).ok()?;
    ///     engine.submit(now);
    ///     None // It comes by poll and reap.
    /// }
    /// ```
    #[inline(always)]
    pub fn execute(&mut self, sqe: &Sqe) -> Option<Cqe> {
        let port = self.ports.first()?;
        if port.end.taken() != self.own.pushed() || port.chain.is_some() {
            cold_path();
            return None;
        }
        let (imports, locals) = (self.imports.view(), self.locals.view());
        let value = Fast { device: &mut self.device, imports, locals }.one(sqe)?;
        Some(Cqe { user_data: sqe.cookie(), status: Status::Success, imm: 0, value })
    }

    /// What could not be done at once, and what is behind it, of the ports whose bits are set.
    #[cold]
    #[inline(never)]
    fn submit_rest(&mut self, mut ports: u32, now: u64) -> u32 {
        let mut total = 0;
        while ports != 0 {
            let index = ports.trailing_zeros() as usize;
            ports &= ports - 1;
            let (mut taken, mut in_vain) = (0, 0);
            // An application that pushes meanwhile does not keep the engine here.
            while taken < MAX_ENTRIES {
                let Some(more) = self.submit_next(index, now) else { break };
                taken += more;
                let Some(port) = self.ports.get_mut(index) else { break };
                // Where nothing can be done at once, two tries are enough.
                if in_vain < 2 {
                    let done = port.submit_any(&mut self.device, &self.imports, &self.locals);
                    in_vain = if done == 0 { in_vain + 1 } else { 0 };
                    taken += done;
                }
                if !port.end.has_more() {
                    break;
                }
            }
            total += taken;
        }
        total
    }

    /// Looks for room, or takes one entry: how many; None if there is neither.
    fn submit_next(&mut self, index: usize, now: u64) -> Option<u32> {
        let port = self.ports.get_mut(index)?;
        if port.end.must_look() {
            return port.end.look(port.owed).then_some(0);
        }
        let sqe = port.end.take()?;
        port.end.tell();
        let has_chain = port.chain.is_some();
        self.submit_other(index, &sqe, has_chain, now);
        Some(1)
    }

    /// An entry that could not be done at once.
    fn submit_other(&mut self, port: usize, sqe: &Sqe, has_chain: bool, now: u64) {
        // A plain operation to a peer that nothing is held for, outside of any chain.
        if is_plain(sqe) && !has_chain && !self.flights.is_full() {
            let class = sqe.class_bits() as usize & (CLASSES - 1);
            let qp = self.peers.get(sqe.peer()).filter(|peer| peer.is_open[class]).map(|peer| peer.qp(class));
            if let Some(qp) = qp {
                return match self.start(sqe, qp, self.flights.next_wr_id()) {
                    Started::Done(value) => self.complete(port, sqe, Status::Success, 0, value),
                    started => self.after_start(port, sqe, started, u64::MAX, 0),
                };
            }
        }
        self.submit_slow(port, *sqe, now);
    }

    /// Checks the memory that an entry names, and gives its work to the device.
    #[inline(always)]
    pub(crate) fn start(&mut self, sqe: &Sqe, qp: Qp, wr_id: u64) -> Started {
        // One arm an operation, so that each is compiled for itself; the commonest first.
        let opcode = sqe.opcode();
        if opcode == Opcode::Put as u8 {
            return self.start_transfer(sqe, qp, wr_id, WrOp::Put, Access::Write);
        }
        if opcode == Opcode::Get as u8 {
            return self.start_transfer(sqe, qp, wr_id, WrOp::Get, Access::Read);
        }
        let wr = Wr { wr_id, len: sqe.len(), ..Wr::EMPTY };
        if opcode == Opcode::PutInline as u8 {
            if wr.len > MAX_INLINE {
                return Started::Refused(Status::BadLength);
            }
            let Some((remote, rkey)) = self.remote_of(sqe, Access::Write, wr.len) else {
                return Started::Refused(self.why_not_remote(sqe, Access::Write));
            };
            let wr = Wr { op: WrOp::PutInline, remote, rkey, operand: sqe.local(), second: sqe.operand(), ..wr };
            // SAFETY: the range was checked against a live import.
            return started(unsafe { self.device.post(qp, &wr) });
        }
        if (Opcode::FetchAdd as u8..=Opcode::Swap as u8).contains(&opcode) {
            if !sqe.offset().is_multiple_of(8) {
                return Started::Refused(Status::Misaligned);
            }
            let Some((remote, rkey)) = self.remote_of(sqe, Access::Atomic, 8) else {
                return Started::Refused(self.why_not_remote(sqe, Access::Atomic));
            };
            let wr = Wr { len: 8, remote, rkey, operand: sqe.operand(), second: sqe.local(), ..wr };
            // SAFETY: the word was checked against a live import, and is aligned, as regions are.
            return started(unsafe {
                match opcode {
                    FETCH_ADD => self.device.post(qp, &Wr { op: WrOp::FetchAdd, ..wr }),
                    COMPARE_SWAP => self.device.post(qp, &Wr { op: WrOp::CompareSwap, ..wr }),
                    _ => self.device.post(qp, &Wr { op: WrOp::Swap, ..wr }),
                }
            });
        }
        if opcode == Opcode::PutSignal as u8 {
            return self.start_put_signal(sqe, qp, wr_id);
        }
        self.start_other(sqe, qp, wr_id)
    }

    /// A put or a get.
    #[inline(always)]
    fn start_transfer(&mut self, sqe: &Sqe, qp: Qp, wr_id: u64, op: WrOp, access: Access) -> Started {
        let Some((remote, rkey)) = self.remote_of(sqe, access, sqe.len()) else {
            return Started::Refused(self.why_not_remote(sqe, access));
        };
        let Some((local, local_mr)) = self.local_of(sqe) else {
            return Started::Refused(self.why_not_local(sqe));
        };
        let wr = Wr { wr_id, op, len: sqe.len(), remote, rkey, local, local_mr, ..Wr::EMPTY };
        // SAFETY: both ranges were checked against live registrations. The local bytes are a Window's, or a block that
        // was lent to this operation.
        started(unsafe { self.device.post(qp, &wr) })
    }

    /// The address and device key of an entry's remote range.
    #[inline(always)]
    pub(crate) fn remote_of(&self, sqe: &Sqe, access: Access, len: u32) -> Option<(u64, u32)> {
        let memory = self.imports.at(index(sqe.key()));
        Some((memory.resolve(sqe.words[1], access, sqe.offset(), len)?, memory.device_key))
    }

    /// The address and registration of an entry's local range. Own memory may be both source and sink.
    #[inline(always)]
    pub(crate) fn local_of(&self, sqe: &Sqe) -> Option<(*mut u8, Mr)> {
        let memory = self.locals.at(index(sqe.lkey()));
        let address = memory.resolve(u64::from(sqe.lkey()), Access::Read, sqe.local(), sqe.len())?;
        Some((address as *mut u8, Mr(memory.device_key)))
    }

    /// The rest of `start`: what names no import.
    #[inline(never)]
    fn start_other(&mut self, sqe: &Sqe, qp: Qp, wr_id: u64) -> Started {
        let mut wr = Wr { wr_id, len: sqe.len(), ..Wr::EMPTY };
        (wr.op, wr.imm) = match Opcode::from_raw(sqe.opcode()) {
            Some(Opcode::Send) => (WrOp::Send, sqe.aux()),
            Some(Opcode::Recv) => (WrOp::Recv, 0),
            Some(Opcode::Flush) => (WrOp::Flush, 0),
            _ => return Started::Refused(Status::BadOpcode),
        };
        if wr.op == WrOp::Flush {
            wr.len = 0;
            if self.is_flush_double()
                && let Some((other, second)) = self.second_of(sqe, wr_id)
            {
                // SAFETY: a flush touches no memory.
                return unsafe { self.post_both((qp, &wr), (other, &second), true) };
            }
        } else if wr.op == WrOp::Send && wr.len > self.device.caps().max_send {
            return Started::Refused(Status::BadLength);
        } else {
            let Some((local, local_mr)) = self.local_of(sqe) else {
                return Started::Refused(self.why_not_local(sqe));
            };
            (wr.local, wr.local_mr) = (local, local_mr);
        }
        // SAFETY: as in `start`.
        started(unsafe { self.device.post(qp, &wr) })
    }

    /// A put and the signal behind it. Where the device does not keep them in order, the signal waits for the put, and
    /// for all before it.
    #[inline(never)]
    fn start_put_signal(&mut self, sqe: &Sqe, qp: Qp, wr_id: u64) -> Started {
        let Some((remote, rkey)) = self.remote_of(sqe, Access::Write, sqe.len()) else {
            return Started::Refused(self.why_not_remote(sqe, Access::Write));
        };
        let Some((local, local_mr)) = self.local_of(sqe) else {
            return Started::Refused(self.why_not_local(sqe));
        };
        let put = &Wr { wr_id, len: sqe.len(), remote, rkey, local, local_mr, ..Wr::EMPTY };
        let Some((_, signal)) = self.second_of(sqe, put.wr_id) else {
            return Started::Refused(self.why_not_remote(sqe, self.access_of_signal(sqe)));
        };
        let is_ordered = self.device.caps().ordered_signal;
        // SAFETY: as in `start`; the word was checked, and is aligned.
        unsafe { self.post_both((qp, put), (qp, &signal), is_ordered) }
    }

    /// Posts both work requests of an operation; the second one only when the first has ended, if the device does not keep
    /// them in order.
    ///
    /// # Safety
    /// As [`Device::post`].
    unsafe fn post_both(&mut self, first: (Qp, &Wr), second: (Qp, &Wr), is_ordered: bool) -> Started {
        // SAFETY: the caller's promise.
        let posted = unsafe { self.device.post(first.0, first.1) };
        let under_way = match posted {
            Posted::Done(_) => 0,
            Posted::Pending if is_ordered => 1,
            Posted::Pending => return Started::Posted { parts: 1, needs_second: true, fate: None },
            Posted::Full => return Started::Full,
            Posted::Refused(status) => return Started::Refused(status),
        };
        // SAFETY: as above.
        match (unsafe { self.device.post(second.0, second.1) }, under_way) {
            (Posted::Done(_), 0) => Started::Done(0),
            (Posted::Refused(status), 0) => Started::Refused(status),
            (Posted::Refused(status), _) => Started::Posted { parts: 1, needs_second: false, fate: Some(status) },
            (Posted::Full, parts) => Started::Posted { parts, needs_second: true, fate: None },
            (Posted::Done(_), parts) => Started::Posted { parts, needs_second: false, fate: None },
            (Posted::Pending, parts) => Started::Posted { parts: parts + 1, needs_second: false, fate: None },
        }
    }

    /// An add is an atomic, wherever it is done.
    pub(crate) fn access_of_signal(&self, sqe: &Sqe) -> Access {
        if sqe.flag_bits() & ADD != 0 { Access::Atomic } else { Access::Write }
    }

    /// The second work request of an operation, and its queue pair: the word of a `put_signal` (none if that is out of
    /// bounds), or the flush of the peer's other class.
    #[inline(always)]
    pub(crate) fn second_of(&self, sqe: &Sqe, wr_id: u64) -> Option<(Qp, Wr)> {
        let peer = self.peers.get(sqe.peer())?;
        let class = sqe.class_bits() as usize;
        let wr = Wr { wr_id: wr_id | 1, ..Wr::EMPTY };
        if sqe.opcode() == Opcode::Flush as u8 {
            return Some((peer.qp(class ^ 1), Wr { op: WrOp::Flush, ..wr }));
        }
        let remote = self.imports.at(index(sqe.key()));
        let word = u64::from(sqe.aux()) * 8;
        let address = remote.resolve(sqe.words[1], self.access_of_signal(sqe), word, 8)?;
        let op = if sqe.flag_bits() & ADD != 0 { WrOp::SignalAdd } else { WrOp::SignalStore };
        let signal = Wr { op, len: 8, rkey: remote.device_key, remote: address, operand: sqe.operand(), ..wr };
        Some((peer.qp(class), signal))
    }

    /// Writes the completion of an operation that ended, unless it was silent and succeeded; a block comes back either
    /// way.
    #[inline(always)]
    pub(crate) fn complete(&mut self, port: usize, sqe: &Sqe, status: Status, imm: u32, value: u64) {
        let Some(port) = self.ports.get_mut(port) else { return };
        if sqe.flag_bits() & BUF != 0 {
            port.complete_block(sqe, status, imm, value);
        } else if sqe.flag_bits() & SILENT == 0 || !status.is_success() {
            let flag = if has_value(sqe.opcode()) { VALUE } else { 0 };
            port.end.complete(sqe.cookie(), status as u16, flag, imm, value);
        }
    }

    /// Takes what the device completed, starts what waited for it, and ends what is late: how many operations ended.
    #[inline]
    pub fn poll(&mut self, now: u64) -> u32 {
        let mut total = 0;
        loop {
            let count = self.device.poll(now, &mut self.wcs);
            if count == 0 {
                break;
            }
            total += self.completed_all(count);
            if count < WCS {
                break;
            }
        }
        if self.peers.waiting_count != 0 || now >= self.next_deadline {
            total += self.advance_and_expire(now);
        }
        total
    }

    #[inline(never)]
    fn completed_all(&mut self, count: usize) -> u32 {
        for i in 0..count.min(WCS) {
            let wc = self.wcs[i];
            self.completed(&wc);
        }
        count as u32
    }

    #[inline(never)]
    fn advance_and_expire(&mut self, now: u64) -> u32 {
        if self.peers.waiting_count != 0 {
            self.advance_all(now);
        }
        if now >= self.next_deadline { self.expire(now) } else { 0 }
    }

    /// The level that a completion of an operation to this peer means, and what else the device can do.
    pub fn caps(&self) -> &verbring_sys::Caps {
        self.device.caps()
    }
}

/// For each opcode the flags that make an entry not plain; bit 8 for opcodes that never are.
const NOT_PLAIN: [u16; 16] = {
    let mut table = [0x100; 16];
    let plain = [
        (Opcode::Put, SILENT | BUF),
        (Opcode::PutInline, SILENT),
        (Opcode::Get, SILENT | BUF),
        (Opcode::PutSignal, SILENT | BUF | ADD),
        (Opcode::Send, SILENT | BUF),
        (Opcode::FetchAdd, SILENT),
        (Opcode::CompareSwap, SILENT),
        (Opcode::Swap, SILENT),
    ];
    let mut i = 0;
    while i < plain.len() {
        table[plain[i].0 as usize] = !plain[i].1 as u16;
        i += 1;
    }
    table
};

/// Whether an entry is of an opcode that starts at once, and asks for nothing that would hold it.
#[inline(always)]
fn is_plain(sqe: &Sqe) -> bool {
    let flags = u16::from(sqe.flag_bits()) | 0x100;
    // Opcode above 15, class above 1, a deadline, reserved bits: none of these.
    let rest = (sqe.words[0] >> 32) & !(0x0f | 0xff << 8 | (CLASSES as u64 - 1) << 16);
    flags & NOT_PLAIN[(sqe.opcode() & 15) as usize] == 0 && rest == 0
}

const FETCH_ADD: u8 = Opcode::FetchAdd as u8;
const COMPARE_SWAP: u8 = Opcode::CompareSwap as u8;

#[inline(always)]
fn started(posted: Posted) -> Started {
    match posted {
        Posted::Done(value) => Started::Done(value),
        Posted::Pending => Started::Posted { parts: 1, needs_second: false, fate: None },
        Posted::Full => Started::Full,
        Posted::Refused(status) => Started::Refused(status),
    }
}

/// Whether a completion of this opcode carries a value: receives and atomics.
#[inline(always)]
const fn has_value(opcode: u8) -> bool {
    opcode >= Opcode::Recv as u8 && opcode <= Opcode::Swap as u8
}

const _: () = assert!(Opcode::Recv as u8 == 6 && FETCH_ADD == 7 && COMPARE_SWAP == 8 && Opcode::Swap as u8 == 9);

impl PortEnd {
    /// Does the puts that can be done at once: how many entries. Mostly there is nothing else, and nothing is made ready
    /// for it.
    #[inline(never)]
    fn submit_puts<D: Device>(&mut self, device: &mut D, imports: &Table<Memory>, locals: &Table<Memory>) -> u32 {
        if self.chain.is_some() {
            return 0;
        }
        let fast = Fast { device, imports: imports.view(), locals: locals.view() };
        let progress = fast.puts(self.end.run());
        self.end.go_on(progress)
    }

    /// Does what can be done at once: how many entries.
    #[inline(never)]
    fn submit_any<D: Device>(&mut self, device: &mut D, imports: &Table<Memory>, locals: &Table<Memory>) -> u32 {
        if self.chain.is_some() {
            return 0;
        }
        let fast = Fast { device, imports: imports.view(), locals: locals.view() };
        let progress = fast.any(self.end.run());
        self.end.go_on(progress)
    }

    #[inline(never)]
    fn complete_block(&mut self, sqe: &Sqe, status: Status, imm: u32, value: u64) {
        if sqe.flag_bits() & SILENT != 0 && status.is_success() {
            if let Some(slab) = &self.slab {
                // SAFETY: the operation that had it ended just now.
                unsafe { slab.give_back(sqe.local() as usize) };
            }
        } else {
            let is_message = sqe.opcode() == Opcode::Recv as u8 && status.is_success();
            let len = if is_message { (value as u32).min(sqe.len()) } else { sqe.len() };
            self.end.complete(sqe.cookie(), status as u16, VALUE | BLOCK, imm, block(sqe.local(), len));
        }
    }
}

impl Drop for PortEnd {
    /// Blocks in completions that nobody will read go back by themselves.
    fn drop(&mut self) {
        self.end.tell();
        self.end.leave();
        // With the one in `Port::drop`: whichever side leaves last sees that the other is gone.
        fence(Ordering::SeqCst);
        if let (true, Some(slab)) = (self.end.is_app_gone(), &self.slab) {
            for (flags, value) in self.end.unread() {
                if flags & BLOCK != 0 {
                    // SAFETY: the operation that had it ended.
                    unsafe { slab.give_back(crate::cqe::unblock(value).0 as usize) };
                }
            }
            // What was pushed and never taken.
            while let Some(sqe) = self.end.take() {
                if sqe.flag_bits() & BUF != 0 {
                    // SAFETY: no operation began.
                    unsafe { slab.give_back(sqe.local() as usize) };
                }
            }
        }
    }
}

impl<D: Device> Drop for Engine<D> {
    /// Everything that was accepted ends. What was pushed and not accepted is the port's, as if it had not been pushed.
    fn drop(&mut self) {
        self.end_all();
    }
}
