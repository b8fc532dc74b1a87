//! A device whose peers live in the same address space. It needs no operating system.
//!
//! Two devices are joined by a [`Wire`], which both keep. Work is done at once by the initiator, as on shared memory.
//! An importer keeps a shared region until it let go of it; other memory has to outlive every importer. Revoking is exact
//! as long as both ends are driven by one thread: with one address space there is no old mapping to cut off, so a put
//! that another thread is in the middle of runs to its end.

use core::cell::UnsafeCell;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};

use heapless::{Deque, Vec};
use spin::Mutex;
use verbring_slab::{Arena, ArenaFull};

use crate::cpu_nic::{self, Import};
use crate::lane::{LANE_BYTES, Lane};
use crate::mrs::Mrs;
use crate::{
    Cancel, Caps, CpuNic, Device, DeviceError, Event, Granted, Link, Memory, Message, Mr, Posted, Qp, Rights, Status,
    Wc, Wr,
};

/// The most connections of a local device.
pub const MAX_LINKS: usize = 16;
/// Control messages under way in one direction.
const MESSAGES: usize = 32;
const IMPORTS: u32 = 256;

/// What two local devices share: a lane for each direction, and control messages.
#[repr(align(4096))]
pub struct Wire {
    lanes: UnsafeCell<[[u8; LANE_BYTES]; 2]>,
    control: [Mutex<Deque<Packet, MESSAGES>>; 2],
    is_used: AtomicBool,
}

// SAFETY: the lanes are reached by atomics and racing copies only, the rest is made for several threads.
unsafe impl Sync for Wire {}

struct Packet {
    message: Message,
    grant: Option<Grant>,
}

struct Grant {
    mr: u32,
    epoch: u32,
    /// Keeps a shared region until the importer let go of it.
    memory: Memory,
    rights: Rights,
}

const _: () = assert!(LANE_BYTES.is_multiple_of(64));

impl Wire {
    /// A wire that joins nothing yet. It fits a static.
    pub const fn new() -> Wire {
        Wire {
            lanes: UnsafeCell::new([[0; LANE_BYTES]; 2]),
            control: [const { Mutex::new(Deque::new()) }; 2],
            is_used: AtomicBool::new(false),
        }
    }

    fn lane(&self, side: usize) -> NonNull<u8> {
        // SAFETY: `lanes` is not null; the offset lies in it.
        unsafe { NonNull::new_unchecked(self.lanes.get().cast::<u8>().add((side % 2) * LANE_BYTES)) }
    }
}

impl Default for Wire {
    fn default() -> Wire {
        Wire::new()
    }
}

/// Keeps a wire.
#[derive(Clone)]
#[non_exhaustive]
pub enum WireRef {
    /// A wire of the program.
    Static(&'static Wire),
    /// A wire on the heap.
    #[cfg(feature = "std")]
    Shared(std::sync::Arc<Wire>),
}

#[cfg(feature = "std")]
impl WireRef {
    /// A new wire on the heap.
    pub fn new() -> WireRef {
        // Made in place: a wire is larger than some stacks.
        let mut wire = std::boxed::Box::<Wire>::new_uninit();
        // SAFETY: all-zero bytes are the lanes of an unused wire; the two other fields are written.
        let wire = unsafe {
            let at = wire.as_mut_ptr();
            core::ptr::addr_of_mut!((*at).lanes).write_bytes(0, 1);
            core::ptr::addr_of_mut!((*at).control).write([const { Mutex::new(Deque::new()) }; 2]);
            core::ptr::addr_of_mut!((*at).is_used).write(AtomicBool::new(false));
            wire.assume_init()
        };
        WireRef::Shared(wire.into())
    }
}

#[cfg(feature = "std")]
impl Default for WireRef {
    fn default() -> WireRef {
        WireRef::new()
    }
}

impl Deref for WireRef {
    type Target = Wire;
    fn deref(&self) -> &Wire {
        match self {
            WireRef::Static(wire) => wire,
            #[cfg(feature = "std")]
            WireRef::Shared(wire) => wire,
        }
    }
}

/// The device.
pub struct Local {
    nic: CpuNic,
    mrs: Mrs,
    /// What imports keep alive, by rkey.
    imports: [Option<Memory>; IMPORTS as usize],
    links: Vec<Option<Connection>, MAX_LINKS>,
    node: u64,
    caps: Caps,
    _arena: Arena,
}

struct Connection {
    wire: WireRef,
    /// Which end of the wire this is.
    side: usize,
    peer: u64,
    incoming: bool,
    is_announced: bool,
    is_down_announced: bool,
}

impl Local {
    /// The bytes of an arena that a device takes.
    pub const fn bytes() -> usize {
        CpuNic::bytes(MAX_LINKS as u32, IMPORTS) + 4096
    }

    /// A device without connections. `node` is the incarnation id of its engine.
    pub fn new(mut arena: Arena, node: u64) -> Result<Local, ArenaFull> {
        // SAFETY: the arena is kept beside it, and dropped after it (fields are dropped in their order).
        let nic = unsafe { CpuNic::new(&mut arena, MAX_LINKS as u32, IMPORTS) }?;
        let imports = [const { None }; IMPORTS as usize];
        let caps = cpu_nic::caps("local");
        Ok(Local { nic, mrs: Mrs::new(), imports, links: Vec::new(), node, caps, _arena: arena })
    }

    /// Joins two devices; `a` is the one that asked for it. A wire joins once.
    pub fn join(a: &mut Local, b: &mut Local, wire: WireRef) -> Result<(Link, Link), DeviceError> {
        if wire.is_used.swap(true, Ordering::AcqRel) {
            return Err(DeviceError::NotSupported("join over a wire that was used before"));
        }
        // SAFETY: the wire is kept by both connections, and the memory of its lanes is used for nothing else.
        let lanes = unsafe { [Lane::create(wire.lane(0)), Lane::create(wire.lane(1))] };
        let (of_a, of_b) = (a.free_link()?, b.free_link()?);
        let nodes = [a.node, b.node];
        for (device, link, side) in [(a, of_a, 0), (b, of_b, 1)] {
            let peer = nodes[1 - side];
            // SAFETY: the connection keeps the wire until `close`.
            unsafe { device.nic.open(link as u32, lanes[side], lanes[1 - side]) };
            let wire = wire.clone();
            device.links[link] = Some(Connection {
                wire,
                side,
                peer,
                incoming: side == 1,
                is_announced: false,
                is_down_announced: false,
            });
        }
        Ok((Link(of_a as u32), Link(of_b as u32)))
    }

    fn free_link(&mut self) -> Result<usize, DeviceError> {
        let full = DeviceError::Full { what: "connections", limit: MAX_LINKS as u32 };
        if let Some(free) = self.links.iter().position(Option::is_none) {
            return Ok(free);
        }
        self.links.push(None).map_err(|_| full)?;
        Ok(self.links.len() - 1)
    }

    fn event_of(&mut self, index: usize) -> Option<Event> {
        let link = Link(index as u32);
        let connection = self.links.get_mut(index)?.as_mut()?;
        if !connection.is_announced {
            connection.is_announced = true;
            let (node, incoming) = (connection.peer, connection.incoming);
            return Some(Event::Up { link, node, incoming, epoch: 0, peer_epoch: 0, replaces: 0 });
        }
        let packet = connection.wire.control[connection.side].lock().pop_front();
        if let Some(packet) = packet {
            let granted = packet.grant.and_then(|grant| {
                let lane = connection.wire.lane(1 - connection.side);
                // SAFETY: the connection keeps the wire.
                let theirs = unsafe { Lane::attach(lane) };
                let rkey = self.nic.import(Import { link: link.0, theirs, mr: grant.mr, epoch: grant.epoch })?;
                let writable = grant.rights.intersects(Rights::WRITE | Rights::ATOMIC);
                let (base, len) = grant.memory.range();
                if let Some(place) = self.imports.get_mut(rkey as usize) {
                    *place = Some(grant.memory);
                }
                Some(Granted { rkey, base: base.as_ptr() as u64, len: len as u64, writable, atomics: true })
            });
            return Some(Event::Message { link, message: packet.message, granted });
        }
        self.nic.look_at_door(link.0);
        if !connection.is_down_announced && self.nic.down(self.nic.qp(link.0, 0)).is_some() {
            connection.is_down_announced = true;
            return Some(Event::Down { link, cause: DeviceError::Closed });
        }
        None
    }
}

// SAFETY: `CpuNic` ends each work request once, and touches memory in `post` and `poll` only, before it answers.
unsafe impl Device for Local {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn register(&mut self, memory: Memory, rights: Rights) -> Result<Mr, DeviceError> {
        self.mrs.add(memory, rights)
    }

    fn deregister(&mut self, mr: Mr) -> Result<(), DeviceError> {
        self.revoke(mr)?;
        self.mrs.remove(mr).map(drop)
    }

    fn revoke(&mut self, mr: Mr) -> Result<(), DeviceError> {
        let epoch = self.mrs.next_epoch(mr)?;
        self.nic.revoke(mr.0, epoch);
        Ok(())
    }

    fn connect(&mut self, _address: &str, _replaces: u32, _now: u64) -> Result<Link, DeviceError> {
        Err(DeviceError::NotSupported("connect by name: local devices are joined by Local::join"))
    }

    fn disconnect(&mut self, link: Link) {
        if let Some(connection) = self.links.get_mut(link.0 as usize) {
            self.nic.close(link.0);
            *connection = None;
            for (rkey, import) in self.imports.iter_mut().enumerate() {
                if import.is_some() && !self.nic.is_import(rkey as u32) {
                    *import = None;
                }
            }
        }
    }

    fn qp(&self, link: Link, class: usize) -> Qp {
        self.nic.qp(link.0, class)
    }

    fn send(&mut self, link: Link, message: &Message, grant: Option<Mr>) -> Result<(), DeviceError> {
        let connection = self.links.get_mut(link.0 as usize).and_then(Option::as_mut).ok_or(DeviceError::NoSuchLink)?;
        let grant = match grant {
            None => None,
            Some(mr) => {
                let grant = self.mrs.get(mr)?;
                self.nic.grant(link.0, mr.0, grant.epoch);
                Some(Grant {
                    mr: mr.0,
                    epoch: grant.epoch,
                    memory: grant.registration.memory.clone(),
                    rights: grant.registration.rights,
                })
            }
        };
        let packet = Packet { message: *message, grant };
        if connection.wire.control[1 - connection.side].lock().push_back(packet).is_ok() {
            return Ok(());
        }
        // A peer that does not read its messages is lost.
        self.nic.fail(link.0, Status::ConnectionLost);
        Err(DeviceError::Full { what: "control messages that the peer has not read", limit: MESSAGES as u32 })
    }

    fn keep(&mut self, _rkey: u32) {}

    fn release(&mut self, rkey: u32) {
        if self.nic.release(rkey).is_some()
            && let Some(place) = self.imports.get_mut(rkey as usize)
        {
            *place = None;
        }
    }

    fn control(&mut self, _now: u64) -> Option<Event> {
        (0..self.links.len()).find_map(|index| self.event_of(index))
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

impl Drop for Local {
    fn drop(&mut self) {
        for link in 0..self.links.len() {
            self.disconnect(Link(link as u32));
        }
    }
}
