//! A [`Device`] made of an [`Rnic`]: what a NIC does not do by itself.
//!
//! A class is a reliable connection of its own. Whatever needs more than one work request of the NIC, or has to wait for
//! something, waits in a queue here, and what follows it in its class waits too:
//!
//! * A message waits until the peer has posted a receive for it: the peer writes how many it ever posted into a line of
//!   memory that it was given at the handshake. The NIC's own way (a negative acknowledgement, and another try after a
//!   while) is not used. Messages arrive in memory of the device, so one that is too long for its receive is cut.
//! * A swap is a compare-and-swap, repeated until it succeeds.
//! * A flush is a read behind everything else.
//! * A signal on a NIC that does not keep writes in order is a write fenced by such a read.
//!
//! Control packets travel over a [`Carrier`].

use core::hash::Hasher;
use core::net::IpAddr;
use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::vec::Vec;

use siphasher::sip::SipHasher24;
use verbring_slab::{Arena, ArenaFull, Table};

use crate::channel::{
    Body, Channel, GREETING_BYTES, Grant, Heard, Medium, PACKET_BYTES, Packet, Reason, answer_stranger,
};
use crate::rnic::{
    AsyncEvent, MrAccess, MrKeys, PostError, QpAddress, RecvWr, Rnic, RnicCaps, RnicWc, SendFlags, SendOp, SendWr,
    WcOp, WcStatus,
};
use crate::wr::Receive;
use crate::{
    CLASSES, Cancel, Caps, Device, DeviceError, Domain, Event, Granted, Level, Link, Memory, Message, Mr, Posted, Qp,
    Rights, Status, Wc, Wr, WrOp, copy,
};

/// Bytes of the longest message.
pub const MAX_SEND: u32 = 4096;
/// Operations of a queue pair that wait here, and receives that it holds.
const DEPTH: u32 = 64;
/// Registrations.
const MAX_MRS: usize = 256;
/// Bytes of the slot of a work request: the result of an atomic, or the data of a short write.
const SLOT: u32 = 16;
/// Bytes of a line: for each class the receives that the peer ever posted, then a word to be read.
const LINE: usize = 64;
/// Where a flush reads.
const PROBE: u64 = 16;
/// Work requests of the NIC that are kept for what the device does by itself: telling receives, behind a probe.
const RESERVED: u32 = 2;

/// What control packets travel over. A route is a way to one peer: a stream, or an address.
pub trait Carrier {
    /// A way to a peer.
    type Route: Copy + PartialEq;

    /// Whether packets can be lost.
    fn medium(&self) -> Medium;

    /// A way to the peer at an address.
    fn open(&mut self, address: &str, now: u64) -> Result<Self::Route, DeviceError>;

    /// Sends a packet: false if the way is jammed, and it is to be tried again.
    fn send(&mut self, route: Self::Route, packet: &[u8; PACKET_BYTES], now: u64) -> Result<bool, DeviceError>;

    /// What came, or ended.
    fn receive(&mut self, now: u64) -> Option<Arrival<Self::Route>>;

    /// Gives a way up.
    fn close(&mut self, route: Self::Route);

    /// The address that the peer's packets come from, where that is known.
    fn peer_ip(&self, route: Self::Route) -> Option<IpAddr>;
}

/// What came over a [`Carrier`].
#[derive(Clone, Copy, Debug)]
pub enum Arrival<R> {
    /// A packet.
    Packet {
        /// Where it came from.
        route: R,
        /// Its bytes.
        bytes: [u8; PACKET_BYTES],
    },
    /// A way ended.
    Closed {
        /// Which.
        route: R,
        /// Why.
        cause: DeviceError,
    },
}

/// How large a device is.
#[derive(Clone, Copy, Debug)]
pub struct RcOptions {
    /// Connections; rounded up to a power of two.
    pub max_links: u32,
}

impl Default for RcOptions {
    fn default() -> RcOptions {
        RcOptions { max_links: 16 }
    }
}

/// What a work request of the NIC is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An operation that ends with it.
    User(u64),
    /// The same, with a value.
    Value(u64),
    /// Something that has no end of its own.
    Part,
    /// The peer is told of receives.
    Credit,
    /// The first look of a swap, and each try.
    SwapLook,
    SwapTry,
}

/// Where the local bytes of a work request are.
enum Place {
    /// Where it says.
    Own,
    /// In its slot.
    Slot,
    /// They travel with it.
    Data([u64; 2], u32),
}

/// A swap at the head of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Swap {
    None,
    /// The NIC is at it.
    Asked,
    /// The word was found to be this.
    Found(u64),
    /// A compare-and-swap with this is under way.
    Tried(u64),
}

/// A message that lies in the device's memory.
#[derive(Clone, Copy)]
struct Arrived {
    slot: u32,
    len: u32,
    imm: u32,
}

/// A queue in a table: where it begins, and how many.
#[derive(Clone, Copy, Default)]
struct Row {
    first: u32,
    len: u32,
}

impl Row {
    fn push(&mut self) -> u32 {
        self.len += 1;
        self.first.wrapping_add(self.len - 1)
    }

    fn pop(&mut self) {
        self.first = self.first.wrapping_add(1);
        self.len -= 1;
    }

    /// The position of the first, which leaves the row.
    fn take(&mut self) -> Option<u32> {
        let first = self.first;
        (self.len != 0).then(|| {
            self.pop();
            first
        })
    }

    /// Takes the first entry that `is_it` names (by its place in the row) out of the part of a table that is `queue`'s;
    /// what follows moves up. False if there is none.
    fn remove<T: Copy>(&mut self, table: &mut Table<T>, queue: u32, is_it: impl Fn(u32, &T) -> bool) -> bool {
        let first = self.first;
        let at = |i: u32| queue * DEPTH + first.wrapping_add(i) % DEPTH;
        let Some(found) = (0..self.len).find(|i| is_it(*i, table.at(at(*i)))) else { return false };
        for i in found..self.len - 1 {
            *table.at_mut(at(i)) = *table.at(at(i + 1));
        }
        self.len -= 1;
        true
    }
}

#[derive(Clone, Copy)]
struct Queue {
    /// 0: the place is free.
    qp: u32,
    down: Option<Status>,
    /// Operations that the NIC does not have yet, and work requests that it has.
    waiting: Row,
    sent: Row,
    swap: Swap,
    receives: Row,
    arrived: Row,
    /// Messages ever sent; receives ever told to the peer, and to be told.
    messages: u32,
    told: u32,
    granted: u32,
    is_telling: bool,
    /// Receives that were told and then cancelled.
    surplus: u32,
    /// The peer's line.
    theirs: u64,
    their_key: u32,
}

const FREE: Queue = Queue {
    qp: 0,
    down: None,
    waiting: Row { first: 0, len: 0 },
    sent: Row { first: 0, len: 0 },
    swap: Swap::None,
    receives: Row { first: 0, len: 0 },
    arrived: Row { first: 0, len: 0 },
    messages: 0,
    told: 0,
    granted: 0,
    is_telling: false,
    surplus: 0,
    theirs: 0,
    their_key: 0,
};

/// What became of an operation that was to be given to the NIC.
enum Given {
    Yes,
    NotYet,
    Refused(Status),
}

struct Registration {
    /// Keeps a shared region.
    memory: Memory,
    rights: Rights,
    local: MrKeys,
    remote: Option<MrKeys>,
}

struct Connection<R> {
    channel: Channel,
    route: R,
    incoming: bool,
    since: u64,
    is_up: bool,
    /// Our epoch of the connection that it replaces, as the peer says; 0: none.
    replaces: u32,
    addresses: [QpAddress; CLASSES],
    /// The peer's NIC does.
    does_atomics: bool,
    line: MrKeys,
    /// What the carrier did not take.
    unsent: Option<[u8; PACKET_BYTES]>,
    lost: Option<DeviceError>,
    is_told: bool,
}

impl<R> Connection<R> {
    /// A connection that is not up yet. `incoming`: the other side asked for it, and says what it replaces.
    fn new(
        channel: Channel,
        route: R,
        incoming: Option<u32>,
        addresses: [QpAddress; CLASSES],
        line: MrKeys,
        now: u64,
    ) -> Connection<R> {
        Connection {
            channel,
            route,
            incoming: incoming.is_some(),
            since: now,
            is_up: false,
            replaces: incoming.unwrap_or(0),
            addresses,
            does_atomics: false,
            line,
            unsent: None,
            lost: None,
            is_told: false,
        }
    }
}

/// The device.
pub struct RcDevice<N: Rnic, C: Carrier> {
    // The NIC goes first: after its drop nothing touches memory any more.
    rnic: N,
    carrier: C,
    caps: Caps,
    rnic_caps: RnicCaps,
    queues: Table<Queue>,
    waiting: Table<Wr>,
    sent: Table<Kind>,
    receives: Table<Receive>,
    arrived: Table<Arrived>,
    busy: Table<u64>,
    must_ring: bool,
    /// Memory of the device's own: slots, messages, and lines.
    memory: *mut u8,
    local: MrKeys,
    links: Vec<Option<Connection<C::Route>>>,
    mrs: Vec<Option<Registration>>,
    events: VecDeque<Event>,
    node: u64,
    /// What epochs are made from, and how many there were.
    secret: u64,
    epochs: u64,
    now: u64,
    _arena: Arena,
}

// SAFETY: the pointers name memory of its own, and what the contract of `Device::post` keeps valid.
unsafe impl<N: Rnic + Send, C: Carrier + Send> Send for RcDevice<N, C> where C::Route: Send {}

const RECV: u64 = 1 << 63;

fn wr_id(queue: u32, position: u32) -> u64 {
    u64::from(queue) << 32 | u64::from(position)
}

impl<N: Rnic, C: Carrier> RcDevice<N, C> {
    /// Bytes for each queue pair: slots, and the messages that can arrive.
    fn queue_bytes(sq_depth: u32) -> usize {
        (sq_depth * SLOT) as usize + (DEPTH * MAX_SEND) as usize
    }

    /// The bytes of an arena that such a device takes.
    pub fn bytes(rnic: &RnicCaps, options: RcOptions) -> usize {
        let links = Table::<Queue>::capacity_for(options.max_links);
        let qps = links * CLASSES as u32;
        Table::<Queue>::bytes(qps)
            + Table::<Wr>::bytes(qps * DEPTH)
            + Table::<Kind>::bytes(qps * rnic.sq_depth.next_power_of_two())
            + Table::<Receive>::bytes(qps * DEPTH)
            + Table::<Arrived>::bytes(qps * DEPTH)
            + Table::<u64>::bytes(qps.div_ceil(64))
            + links as usize * LINE
            + qps as usize * Self::queue_bytes(rnic.sq_depth.next_power_of_two())
            + 8192
    }

    /// A device over a NIC, without connections. `node` is the incarnation id of its engine; `secret` is a random
    /// number that nobody else knows.
    ///
    /// # Errors
    /// The NIC is too small, or the arena has fewer than [`RcDevice::bytes`].
    pub fn new(
        mut rnic: N,
        carrier: C,
        mut arena: Arena,
        options: RcOptions,
        node: u64,
        secret: u64,
    ) -> Result<RcDevice<N, C>, DeviceError> {
        let rnic_caps = *rnic.caps();
        if rnic_caps.rq_depth < DEPTH || rnic_caps.sq_depth < 8 {
            return Err(DeviceError::Full { what: "places of the NIC's queues", limit: rnic_caps.rq_depth });
        }
        let links = Table::<Queue>::capacity_for(options.max_links);
        let qps = links * CLASSES as u32;
        let depth = rnic_caps.sq_depth.next_power_of_two();
        let full = |_: ArenaFull| DeviceError::Full { what: "bytes of the device's arena", limit: 0 };
        let bytes = links as usize * LINE + qps as usize * Self::queue_bytes(depth);
        // SAFETY: the arena is kept beside the tables, and dropped after them and the NIC (fields are dropped in their
        // order).
        unsafe {
            let memory = arena.block(bytes, 4096).map_err(full)?.as_ptr();
            let local = rnic.reg_mr(memory, bytes, MrAccess::LOCAL_WRITE)?;
            Ok(RcDevice {
                caps: Caps {
                    name: rnic_caps.name,
                    completion: Level::Delivered,
                    atomics: rnic_caps.atomics,
                    domain: Domain::Nic,
                    ordered_signal: true,
                    can_cancel: false,
                    max_send: MAX_SEND,
                    drain_bound_ns: 0,
                },
                queues: arena.table(qps, |_| FREE).map_err(full)?,
                waiting: arena.table(qps * DEPTH, |_| Wr::EMPTY).map_err(full)?,
                sent: arena.table(qps * depth, |_| Kind::Part).map_err(full)?,
                receives: arena.table(qps * DEPTH, |_| Receive::EMPTY).map_err(full)?,
                arrived: arena.table(qps * DEPTH, |_| Arrived { slot: 0, len: 0, imm: 0 }).map_err(full)?,
                busy: arena.table(qps.div_ceil(64), |_| 0).map_err(full)?,
                must_ring: false,
                memory,
                local,
                links: (0..links).map(|_| None).collect(),
                mrs: Vec::new(),
                events: VecDeque::new(),
                node,
                secret,
                epochs: 0,
                now: 0,
                rnic,
                carrier,
                rnic_caps,
                _arena: arena,
            })
        }
    }

    /// The NIC.
    pub fn rnic(&self) -> &N {
        &self.rnic
    }

    /// The NIC, to be set up.
    ///
    /// # Safety
    /// No queue pair or registration of the device's is ended.
    pub unsafe fn rnic_mut(&mut self) -> &mut N {
        &mut self.rnic
    }

    /// What control packets travel over.
    pub fn carrier(&self) -> &C {
        &self.carrier
    }

    fn links_mask(&self) -> u32 {
        self.links.len() as u32 - 1
    }

    fn link_of(&self, queue: u32) -> Link {
        Link(queue & self.links_mask())
    }

    fn depth(&self) -> u32 {
        self.rnic_caps.sq_depth.next_power_of_two()
    }

    /// The line of a link: written by the peer.
    fn line(&self, link: Link) -> *mut u8 {
        let at = (link.0 & self.links_mask()) as usize * LINE;
        // SAFETY: inside the device's memory.
        unsafe { self.memory.add(at) }
    }

    fn queue_memory(&self, queue: u32) -> *mut u8 {
        let index = (queue & (self.queues.capacity() - 1)) as usize;
        let at = self.links.len() * LINE + index * Self::queue_bytes(self.depth());
        // SAFETY: inside the device's memory.
        unsafe { self.memory.add(at) }
    }

    fn slot(&self, queue: u32, position: u32) -> *mut u8 {
        // SAFETY: inside the queue's memory.
        unsafe { self.queue_memory(queue).add((position % self.depth() * SLOT) as usize) }
    }

    fn message(&self, queue: u32, slot: u32) -> *mut u8 {
        let at = self.depth() * SLOT + slot % DEPTH * MAX_SEND;
        // SAFETY: inside the queue's memory.
        unsafe { self.queue_memory(queue).add(at as usize) }
    }

    fn set_busy(&mut self, queue: u32) {
        *self.busy.at_mut(queue / 64) |= 1 << (queue % 64);
    }

    fn set_idle(&mut self, queue: u32) {
        *self.busy.at_mut(queue / 64) &= !(1 << (queue % 64));
    }

    /// Where the receives of a queue's class stand in a line.
    fn credits_at(&self, queue: u32) -> u64 {
        8 * u64::from(queue / self.links.len() as u32 % CLASSES as u32)
    }

    fn free(&self, queue: u32) -> u32 {
        (self.rnic_caps.sq_depth - RESERVED).saturating_sub(self.queues.at(queue).sent.len)
    }

    /// Gives a work request to the NIC.
    fn post_work(&mut self, queue: u32, kind: Kind, wr: SendWr, place: Place) -> Result<(), Status> {
        let q = self.queues.at(queue);
        let (qp, position) = (q.qp, q.sent.first.wrapping_add(q.sent.len));
        let slot = self.slot(queue, position);
        let mut wr = SendWr { wr_id: wr_id(queue, position), ..wr };
        let mut words = [0; 2];
        match place {
            Place::Own => {}
            Place::Data(data, len) if self.rnic_caps.max_inline >= len => {
                words = data.map(u64::to_le);
                (wr.len, wr.local) = (len, words.as_mut_ptr().cast());
                wr.flags |= SendFlags::INLINE;
            }
            Place::Data([first, second], len) => {
                // SAFETY: a slot has 16 bytes, and is not in use.
                unsafe { copy::copy_words(slot, first, second, len) };
                (wr.len, wr.local, wr.lkey) = (len, slot, self.local.lkey);
            }
            Place::Slot => (wr.len, wr.local, wr.lkey) = (8, slot, self.local.lkey),
        }
        // SAFETY: local memory is a slot, or what the poster of the operation promised.
        let posted = unsafe { self.rnic.post_send(qp, &wr) };
        let _ = words;
        match posted {
            Ok(()) => {
                let position = self.queues.at_mut(queue).sent.push();
                let depth = self.depth();
                *self.sent.at_mut(queue * depth + position % depth) = kind;
                self.must_ring = true;
                Ok(())
            }
            Err(PostError::NotSupported) => Err(Status::NotSupported),
            Err(PostError::Misaligned) => Err(Status::Misaligned),
            Err(_) => Err(Status::DeviceFault),
        }
    }

    /// A read that pushes everything before it into the peer's memory.
    fn probe(&mut self, queue: u32, kind: Kind) -> Result<(), Status> {
        let Queue { theirs, their_key, .. } = *self.queues.at(queue);
        let read = SendWr { op: SendOp::Read, remote: theirs + PROBE, rkey: their_key, ..SendWr::EMPTY };
        self.post_work(queue, kind, read, Place::Slot)
    }

    /// Gives an operation to the NIC, if it need not wait.
    fn give(&mut self, queue: u32, wr: &Wr) -> Given {
        let free = self.free(queue);
        let to = SendWr { remote: wr.remote, rkey: wr.rkey, len: wr.len, ..SendWr::EMPTY };
        let user = Kind::User(wr.wr_id);
        let sent = match wr.op {
            WrOp::Put | WrOp::Get => return self.give_transfer(queue, wr, free),
            _ if free < 2 => return Given::NotYet,
            WrOp::PutInline => self.post_work(queue, user, to, Place::Data([wr.operand, wr.second], wr.len.min(SLOT))),
            WrOp::FetchAdd => {
                let add = SendWr { op: SendOp::FetchAdd, swap_add: wr.operand, ..to };
                self.post_work(queue, Kind::Value(wr.wr_id), add, Place::Slot)
            }
            WrOp::CompareSwap => {
                let swap = SendWr { op: SendOp::CompareSwap, compare: wr.second, swap_add: wr.operand, ..to };
                self.post_work(queue, Kind::Value(wr.wr_id), swap, Place::Slot)
            }
            WrOp::SignalStore | WrOp::SignalAdd => self.give_signal(queue, wr, to),
            WrOp::Flush => self.probe(queue, user),
            WrOp::Send => return self.give_message(queue, wr),
            WrOp::Swap => return self.give_swap(queue, wr),
            WrOp::Recv => Err(Status::BadOpcode),
        };
        sent.map_or_else(Given::Refused, |()| Given::Yes)
    }

    /// A put or a get: several work requests if it is longer than what the NIC takes in one.
    fn give_transfer(&mut self, queue: u32, wr: &Wr, free: u32) -> Given {
        let max = self.rnic_caps.max_message;
        if free < wr.len.div_ceil(max).max(1) {
            return Given::NotYet;
        }
        let op = if wr.op == WrOp::Put { SendOp::Write } else { SendOp::Read };
        let lkey = self.lkey(wr.local_mr);
        let mut done = 0;
        loop {
            let len = (wr.len - done).min(max);
            let (local, remote) = (wr.local.wrapping_add(done as usize), wr.remote + u64::from(done));
            let part = SendWr { op, local, lkey, remote, rkey: wr.rkey, len, ..SendWr::EMPTY };
            done += len;
            let kind = if done == wr.len { Kind::User(wr.wr_id) } else { Kind::Part };
            if let Err(status) = self.post_work(queue, kind, part, Place::Own) {
                return Given::Refused(status);
            }
            if done == wr.len {
                return Given::Yes;
            }
        }
    }

    /// Where writes may overtake each other, a read goes behind those that were posted, and a fence holds the next one until
    /// that is answered: the flags of a write that comes after all of them.
    fn push_writes(&mut self, queue: u32) -> Result<SendFlags, Status> {
        if self.rnic_caps.ordered_writes {
            return Ok(SendFlags::SIGNALED);
        }
        self.probe(queue, Kind::Part)?;
        Ok(SendFlags::SIGNALED | SendFlags::FENCE)
    }

    fn give_signal(&mut self, queue: u32, wr: &Wr, to: SendWr) -> Result<(), Status> {
        let user = Kind::User(wr.wr_id);
        let to = SendWr { flags: self.push_writes(queue)?, ..to };
        if wr.op == WrOp::SignalStore {
            return self.post_work(queue, user, to, Place::Data([wr.operand, 0], 8));
        }
        self.post_work(queue, user, SendWr { op: SendOp::FetchAdd, swap_add: wr.operand, ..to }, Place::Slot)
    }

    fn give_message(&mut self, queue: u32, wr: &Wr) -> Given {
        let word = self.line(self.link_of(queue)) as u64 + self.credits_at(queue);
        // SAFETY: a word of a line, aligned.
        let credits = unsafe { copy::load_signal(word) } as u32;
        let left = credits.wrapping_sub(self.queues.at(queue).messages);
        // A peer that takes back what it told waits for itself.
        if left == 0 || left > u32::MAX / 2 {
            return Given::NotYet;
        }
        let message = SendWr {
            op: SendOp::Send,
            flags: SendFlags::SIGNALED | SendFlags::IMM,
            imm: wr.imm,
            local: wr.local,
            lkey: self.lkey(wr.local_mr),
            len: wr.len,
            ..SendWr::EMPTY
        };
        if let Err(status) = self.post_work(queue, Kind::User(wr.wr_id), message, Place::Own) {
            return Given::Refused(status);
        }
        let q = self.queues.at_mut(queue);
        q.messages = q.messages.wrapping_add(1);
        Given::Yes
    }

    /// One step of a swap, which stays at the head of its queue until it succeeded.
    fn give_swap(&mut self, queue: u32, wr: &Wr) -> Given {
        let to = SendWr { remote: wr.remote, rkey: wr.rkey, ..SendWr::EMPTY };
        let (sent, next) = match self.queues.at(queue).swap {
            Swap::None => {
                let look = SendWr { op: SendOp::FetchAdd, swap_add: 0, ..to };
                (self.post_work(queue, Kind::SwapLook, look, Place::Slot), Swap::Asked)
            }
            Swap::Found(old) => {
                let swap = SendWr { op: SendOp::CompareSwap, compare: old, swap_add: wr.operand, ..to };
                (self.post_work(queue, Kind::SwapTry, swap, Place::Slot), Swap::Tried(old))
            }
            Swap::Asked | Swap::Tried(_) => return Given::NotYet,
        };
        if let Err(status) = sent {
            return Given::Refused(status);
        }
        self.queues.at_mut(queue).swap = next;
        Given::NotYet
    }

    /// A work request of the NIC ended: what ends with it.
    fn completed(&mut self, wc: &RnicWc) -> Option<Wc> {
        let queue = (wc.wr_id >> 32) as u32 & (self.queues.capacity() - 1);
        if self.queues.at(queue).qp == 0 {
            return None;
        }
        if wc.wr_id & RECV != 0 {
            return self.message_came(queue, wc);
        }
        let (qp, depth) = (Qp(queue), self.depth());
        let q = self.queues.at_mut(queue);
        let position = q.sent.first;
        q.sent.pop();
        let kind = *self.sent.at(queue * depth + position % depth);
        self.set_busy(queue);
        if wc.status != WcStatus::Success {
            let status = self.failed(queue, wc.status);
            let wr_id = match kind {
                Kind::User(wr_id) | Kind::Value(wr_id) => wr_id,
                Kind::SwapLook | Kind::SwapTry => self.end_swap(queue),
                Kind::Part | Kind::Credit => return None,
            };
            return Some(Wc { vendor_err: wc.vendor_err, ..Wc::new(wr_id, qp, status) });
        }
        // SAFETY: a word of the queue's memory, aligned.
        let value = unsafe { copy::word(self.slot(queue, position) as u64) }.load(Ordering::Relaxed);
        match kind {
            Kind::User(wr_id) => Some(Wc::new(wr_id, qp, Status::Success)),
            Kind::Value(wr_id) => Some(Wc { value, ..Wc::new(wr_id, qp, Status::Success) }),
            Kind::Part => None,
            Kind::Credit => {
                self.queues.at_mut(queue).is_telling = false;
                None
            }
            Kind::SwapLook => {
                self.queues.at_mut(queue).swap = Swap::Found(value);
                None
            }
            Kind::SwapTry if self.queues.at(queue).swap == Swap::Tried(value) => {
                let wr_id = self.end_swap(queue);
                Some(Wc { value, ..Wc::new(wr_id, qp, Status::Success) })
            }
            Kind::SwapTry => {
                self.queues.at_mut(queue).swap = Swap::Found(value);
                None
            }
        }
    }

    /// The swap at the head of a queue is over: its wr_id.
    fn end_swap(&mut self, queue: u32) -> u64 {
        let q = self.queues.at_mut(queue);
        q.swap = Swap::None;
        let first = q.waiting.first;
        if q.waiting.len != 0 {
            q.waiting.pop();
        }
        self.waiting.at(queue * DEPTH + first % DEPTH).wr_id
    }

    /// The NIC says that a queue pair failed: what its work request ends with. The whole connection is lost.
    fn failed(&mut self, queue: u32, status: WcStatus) -> Status {
        let (status, cause) = match status {
            WcStatus::RemAccessErr | WcStatus::RemInvReqErr => (Status::RemoteRefused, DeviceError::Closed),
            WcStatus::RetryExcErr => (Status::ConnectionLost, DeviceError::NoAnswer),
            WcStatus::RemOpErr | WcStatus::WrFlushErr | WcStatus::RnrRetryExcErr => {
                (Status::ConnectionLost, DeviceError::Closed)
            }
            _ => (Status::DeviceFault, DeviceError::Protocol("its NIC's answers make no sense")),
        };
        self.lose(self.link_of(queue), cause);
        status
    }

    /// A connection is lost: what is pending ends by `poll`, and `control` tells.
    fn lose(&mut self, link: Link, cause: DeviceError) {
        let Some(Some(connection)) = self.links.get_mut(link.0 as usize) else { return };
        if connection.lost.is_some() {
            return;
        }
        connection.lost = Some(cause);
        let status = if cause == DeviceError::Died { Status::PeerDead } else { Status::ConnectionLost };
        for class in 0..CLASSES {
            let queue = self.queue_of(link, class);
            let q = self.queues.at_mut(queue);
            q.down = Some(status);
            let qp = q.qp;
            self.rnic.fail_qp(qp);
            self.set_busy(queue);
        }
    }

    fn queue_of(&self, link: Link, class: usize) -> u32 {
        (class % CLASSES) as u32 * self.links.len() as u32 + (link.0 & self.links_mask())
    }

    /// A message lies in the device's memory, or the NIC gave its place up.
    fn message_came(&mut self, queue: u32, wc: &RnicWc) -> Option<Wc> {
        let slot = wc.wr_id as u32;
        if wc.status != WcStatus::Success || wc.op != WcOp::Recv {
            self.failed(queue, wc.status);
            return None;
        }
        let q = self.queues.at_mut(queue);
        if q.arrived.len == DEPTH {
            return None;
        }
        let at = q.arrived.push() % DEPTH;
        let len = wc.byte_len.min(MAX_SEND);
        *self.arrived.at_mut(queue * DEPTH + at) = Arrived { slot, len, imm: wc.imm.unwrap_or(0) };
        self.set_busy(queue);
        self.deliver(queue)
    }

    /// The oldest message goes into the oldest receive, if there are both.
    fn deliver(&mut self, queue: u32) -> Option<Wc> {
        let q = self.queues.at(queue);
        if q.arrived.len == 0 || q.receives.len == 0 || q.down.is_some() {
            return None;
        }
        let message = *self.arrived.at(queue * DEPTH + q.arrived.first % DEPTH);
        let receive = *self.receives.at(queue * DEPTH + q.receives.first % DEPTH);
        let from = self.message(queue, message.slot);
        // SAFETY: the message lies in the device's memory; the receive has so much room.
        unsafe { copy::copy(receive.local, from, message.len.min(receive.room) as usize) };
        let q = self.queues.at_mut(queue);
        q.arrived.pop();
        q.receives.pop();
        self.post_message_room(queue, message.slot);
        let status = if message.len > receive.room { Status::Truncated } else { Status::Success };
        Some(Wc { imm: message.imm, value: u64::from(message.len), ..Wc::new(receive.wr_id, Qp(queue), status) })
    }

    /// Gives the NIC a place for a message.
    fn post_message_room(&mut self, queue: u32, slot: u32) {
        let wr = RecvWr {
            wr_id: RECV | wr_id(queue, slot),
            local: self.message(queue, slot),
            len: MAX_SEND,
            lkey: self.local.lkey,
        };
        let qp = self.queues.at(queue).qp;
        // SAFETY: the device's own memory. Of a queue pair that failed nothing is expected any more.
        let _ = unsafe { self.rnic.post_recv(qp, &wr) };
    }

    /// Whatever a queue can do now. Completions go to `wcs`, from `count` on.
    fn work(&mut self, queue: u32, wcs: &mut [Wc], count: &mut usize) {
        let mut tell = |wc: Wc| {
            if let Some(place) = wcs.get_mut(*count) {
                *place = wc;
                *count += 1;
            }
            *count < wcs.len()
        };
        while let Some(wc) = self.deliver(queue) {
            if !tell(wc) {
                return;
            }
        }
        if let Some(status) = self.queues.at(queue).down {
            // The NIC's come first.
            if self.queues.at(queue).sent.len == 0 {
                while let Some(wr_id) = self.take_waiting(queue).or_else(|| self.take_receive(queue)) {
                    if !tell(Wc::new(wr_id, Qp(queue), status)) {
                        return;
                    }
                }
                self.set_idle(queue);
            }
            return;
        }
        while self.queues.at(queue).waiting.len != 0 {
            let first = self.queues.at(queue).waiting.first;
            let wr = *self.waiting.at(queue * DEPTH + first % DEPTH);
            match self.give(queue, &wr) {
                Given::NotYet => break,
                Given::Yes => self.queues.at_mut(queue).waiting.pop(),
                Given::Refused(status) => {
                    let q = self.queues.at_mut(queue);
                    q.swap = Swap::None;
                    // Its answer comes in the order of its queue.
                    if q.sent.len != 0 {
                        break;
                    }
                    q.waiting.pop();
                    if !tell(Wc::new(wr.wr_id, Qp(queue), status)) {
                        return;
                    }
                }
            }
        }
        self.tell_receives(queue);
        // A message waits for a line that the peer writes; everything else for a completion of the NIC.
        if self.queues.at(queue).waiting.len == 0 {
            self.set_idle(queue);
        }
    }

    fn take_waiting(&mut self, queue: u32) -> Option<u64> {
        let first = self.queues.at_mut(queue).waiting.take()?;
        Some(self.waiting.at(queue * DEPTH + first % DEPTH).wr_id)
    }

    fn take_receive(&mut self, queue: u32) -> Option<u64> {
        let first = self.queues.at_mut(queue).receives.take()?;
        Some(self.receives.at(queue * DEPTH + first % DEPTH).wr_id)
    }

    /// Tells the peer how many receives were ever posted, one write at a time. Where writes may overtake each other, a read
    /// goes between them: an older number must not be the last to arrive.
    fn tell_receives(&mut self, queue: u32) {
        let Queue { told, granted, is_telling, down, theirs, their_key, sent, .. } = *self.queues.at(queue);
        if told == granted || is_telling || down.is_some() || sent.len + RESERVED > self.rnic_caps.sq_depth {
            return;
        }
        // The one before may be on its way still, and must not come last.
        let Ok(flags) = self.push_writes(queue) else { return };
        let write = SendWr { remote: theirs + self.credits_at(queue), rkey: their_key, flags, ..SendWr::EMPTY };
        if self.post_work(queue, Kind::Credit, write, Place::Data([u64::from(granted), 0], 8)).is_ok() {
            let q = self.queues.at_mut(queue);
            (q.told, q.is_telling) = (granted, true);
        }
    }

    fn lkey(&self, mr: Mr) -> u32 {
        self.mrs.get(mr.0 as usize).and_then(Option::as_ref).map_or(0, |registration| registration.local.lkey)
    }

    fn registration(&mut self, mr: Mr) -> Result<&mut Registration, DeviceError> {
        self.mrs.get_mut(mr.0 as usize).and_then(Option::as_mut).ok_or(DeviceError::NoSuchMr)
    }

    /// Registers memory for peers.
    ///
    /// # Safety
    /// As [`Device::register`].
    unsafe fn register_remote(rnic: &mut N, memory: &Memory, rights: Rights) -> Result<Option<MrKeys>, DeviceError> {
        if rights.is_empty() {
            return Ok(None);
        }
        let mut access = MrAccess::empty();
        if rights.contains(Rights::READ) {
            access |= MrAccess::REMOTE_READ;
        }
        if rights.contains(Rights::WRITE) {
            access |= MrAccess::REMOTE_WRITE | MrAccess::LOCAL_WRITE;
        }
        if rights.contains(Rights::ATOMIC) {
            access |= MrAccess::REMOTE_ATOMIC | MrAccess::LOCAL_WRITE;
        }
        let (base, len) = memory.range();
        // SAFETY: the caller's promise.
        unsafe { rnic.reg_mr(base.as_ptr(), len, access) }.map(Some)
    }
}

/// What a device says in the handshake.
///
/// ```text
/// offset  bytes  what
///      0   2 x 8  for each class: number of its queue pair, first sequence number
///     16       8  address of the line, as the other side names it
///     24       4  its key
///     28       4  bytes of a payload at most
///     32       1  reads and atomics that are answered at one time
///     33       1  bit 0: it does atomics
///     36      16  address of its port, IPv4 mapped
/// ```
/// Little-endian; the rest is zero, and is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Greeting {
    addresses: [QpAddress; CLASSES],
    line: u64,
    line_key: u32,
    atomics: bool,
}

impl Greeting {
    fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        for (class, address) in self.addresses.iter().enumerate() {
            bytes[8 * class..8 * class + 4].copy_from_slice(&address.qp.to_le_bytes());
            bytes[8 * class + 4..8 * class + 8].copy_from_slice(&address.psn.to_le_bytes());
        }
        let [QpAddress { ip, mtu, max_rd_atomic, .. }, _] = self.addresses;
        bytes[16..24].copy_from_slice(&self.line.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.line_key.to_le_bytes());
        bytes[28..32].copy_from_slice(&mtu.to_le_bytes());
        (bytes[32], bytes[33]) = (max_rd_atomic, u8::from(self.atomics));
        let ip = match ip {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        bytes[36..52].copy_from_slice(&ip.octets());
        bytes
    }

    fn decode(bytes: &[u8; GREETING_BYTES]) -> Option<Greeting> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut ip = [0; 16];
        ip.copy_from_slice(&bytes[36..52]);
        let ip = core::net::Ipv6Addr::from(ip);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let (mtu, max_rd_atomic) = (u32_at(28), bytes[32]);
        if !matches!(mtu, 256 | 512 | 1024 | 2048 | 4096) {
            return None;
        }
        let addresses = core::array::from_fn(|class| QpAddress {
            ip,
            qp: u32_at(8 * class),
            psn: u32_at(8 * class + 4),
            mtu,
            max_rd_atomic,
        });
        let line = u64::from(u32_at(16)) | u64::from(u32_at(20)) << 32;
        // All of it has an address.
        line.checked_add(LINE as u64)?;
        let greeting = Greeting { addresses, line, line_key: u32_at(24), atomics: bytes[33] & 1 != 0 };
        (greeting.encode() == *bytes).then_some(greeting)
    }
}

impl<N: Rnic, C: Carrier> RcDevice<N, C> {
    /// A place for a connection, with its queue pairs: its greeting. What was made goes again if something is missing.
    fn prepare(&mut self) -> Result<(Link, MrKeys, Greeting), DeviceError> {
        self.evict_silent();
        let full = DeviceError::Full { what: "connections", limit: self.links.len() as u32 };
        let link = Link(self.links.iter().position(Option::is_none).ok_or(full)? as u32);
        let line = self.line(link);
        // SAFETY: a line of the device's memory, which no peer reaches yet.
        unsafe { line.write_bytes(0, LINE) };
        let access = MrAccess::LOCAL_WRITE | MrAccess::REMOTE_WRITE | MrAccess::REMOTE_READ;
        // SAFETY: it lies in the arena, and ends with the connection.
        let keys = unsafe { self.rnic.reg_mr(line, LINE, access) }?;
        let mut addresses = Vec::new();
        for _ in 0..CLASSES {
            match self.rnic.create_qp() {
                Ok(address) => addresses.push(address),
                Err(error) => {
                    for address in addresses {
                        self.rnic.destroy_qp(address.qp);
                    }
                    let _ = self.rnic.dereg_mr(keys);
                    return Err(error);
                }
            }
        }
        let addresses: [QpAddress; CLASSES] = core::array::from_fn(|class| addresses[class]);
        for (class, address) in addresses.iter().enumerate() {
            let queue = self.queue_of(link, class);
            *self.queues.at_mut(queue) = Queue { qp: address.qp, down: Some(Status::NotReady), ..FREE };
            for slot in 0..DEPTH {
                self.post_message_room(queue, slot);
            }
        }
        let greeting = Greeting { addresses, line: keys.iova, line_key: keys.rkey, atomics: self.rnic_caps.atomics };
        Ok((link, keys, greeting))
    }

    fn new_epoch(&mut self) -> u32 {
        // Whoever names an epoch may take its connection over, so one is not to be guessed from another.
        loop {
            self.epochs += 1;
            let mut hasher = SipHasher24::new_with_keys(self.secret, self.node);
            hasher.write_u64(self.epochs);
            let epoch = hasher.finish() as u32;
            if epoch != 0 && self.links.iter().flatten().all(|c| c.channel.epoch() != epoch) {
                return epoch;
            }
        }
    }

    /// Connects the queue pairs of a connection to what the peer said.
    fn join(&mut self, link: Link, greeting: &[u8; GREETING_BYTES]) -> Result<(), DeviceError> {
        let Some(Some(connection)) = self.links.get(link.0 as usize) else { return Err(DeviceError::NoSuchLink) };
        let theirs = Greeting::decode(greeting).ok_or(DeviceError::Protocol("what its device says makes no sense"))?;
        // Packets would go to somebody who did not ask for them.
        if self.carrier.peer_ip(connection.route).is_some_and(|ip| ip != theirs.addresses[0].ip) {
            return Err(DeviceError::Protocol("its NIC is at another address than itself"));
        }
        let own = connection.addresses;
        for (class, (own, peer)) in own.iter().zip(&theirs.addresses).enumerate() {
            self.rnic.connect_qp(own, peer)?;
            let queue = self.queue_of(link, class);
            let q = self.queues.at_mut(queue);
            (q.down, q.theirs, q.their_key) = (None, theirs.line, theirs.line_key);
        }
        if let Some(Some(connection)) = self.links.get_mut(link.0 as usize) {
            connection.does_atomics = theirs.atomics;
        }
        Ok(())
    }

    /// Everything that came over the carrier, or is due.
    fn carry(&mut self, now: u64) {
        // A peer that talks without end does not keep the caller here.
        for _ in 0..256 {
            match self.carrier.receive(now) {
                Some(Arrival::Packet { route, bytes }) => self.hear(now, route, &bytes),
                Some(Arrival::Closed { route, cause }) => self.end_all(route, cause),
                None => break,
            }
        }
        while let Some(event) = self.rnic.async_event() {
            let (AsyncEvent::QpFatal { qp } | AsyncEvent::QpRequestError { qp } | AsyncEvent::QpAccessError { qp }) =
                event
            else {
                continue;
            };
            let queue = self.queues.iter().position(|q| q.qp == qp);
            if let Some(queue) = queue {
                self.lose(self.link_of(queue as u32), DeviceError::Protocol("a request that its NIC may not make"));
            }
        }
        for link in (0..self.links.len() as u32).map(Link) {
            let Some(Some(connection)) = self.links.get_mut(link.0 as usize) else { continue };
            if connection.lost.is_some() {
                continue;
            }
            if let Err(cause) = connection.channel.handle_timeout(now) {
                self.end(link, cause);
                continue;
            }
            self.talk(link, now);
        }
        for link in (0..self.links.len() as u32).map(Link) {
            let Some(Some(connection)) = self.links.get_mut(link.0 as usize) else { continue };
            if let (Some(cause), false) = (connection.lost, connection.is_told) {
                if connection.incoming && !connection.is_up {
                    // Nobody was told of it.
                    self.disconnect(link);
                    continue;
                }
                connection.is_told = true;
                self.events.push_back(Event::Down { link, cause });
            }
        }
    }

    /// A connection is over, up or not.
    fn end(&mut self, link: Link, cause: DeviceError) {
        let Some(Some(connection)) = self.links.get(link.0 as usize) else { return };
        if connection.incoming && !connection.is_up {
            // Nobody was told of it.
            self.disconnect(link);
        } else {
            self.lose(link, cause);
        }
    }

    /// Sends what a connection's channel has to say.
    fn talk(&mut self, link: Link, now: u64) {
        loop {
            let Some(Some(connection)) = self.links.get_mut(link.0 as usize) else { return };
            let next = connection.unsent.take().or_else(|| connection.channel.poll_transmit(now).map(|p| p.encode()));
            let Some(bytes) = next else { return };
            let route = connection.route;
            match self.carrier.send(route, &bytes, now) {
                Ok(true) => {}
                Ok(false) => {
                    connection.unsent = Some(bytes);
                    return;
                }
                Err(cause) => return self.end(link, cause),
            }
        }
    }

    /// A packet came.
    fn hear(&mut self, now: u64, route: C::Route, bytes: &[u8]) {
        let is_stream = self.carrier.medium() == Medium::Stream;
        let packet = match Packet::decode(bytes) {
            Ok(packet) => packet,
            Err(cause) => {
                if let Some(answer) = Packet::reject_version(bytes) {
                    let _ = self.carrier.send(route, &answer.encode(), now);
                }
                if is_stream {
                    self.end_route(route, cause);
                    return;
                }
                for connection in self.links.iter_mut().flatten().filter(|c| c.route == route) {
                    let _ = connection.channel.handle_undecodable(cause);
                }
                return;
            }
        };
        let is_it = |c: &Option<Connection<C::Route>>| {
            c.as_ref().is_some_and(|c| c.route == route && c.channel.is_for(&packet))
        };
        let found = self.links.iter().position(is_it);
        let Some(index) = found else {
            let is_taken = self.links.iter().flatten().any(|c| c.route == route);
            match packet.body {
                // A stream carries one connection.
                _ if is_stream && is_taken => {
                    self.end_route(route, DeviceError::Protocol("a packet of another connection"));
                }
                Body::Hello { replaces, greeting } => self.welcome(now, route, &packet, replaces, &greeting),
                _ => {
                    if let Some(answer) = answer_stranger(&packet) {
                        let _ = self.carrier.send(route, &answer.encode(), now);
                    }
                    if is_stream {
                        self.carrier.close(route);
                    }
                }
            }
            return;
        };
        let link = Link(index as u32);
        let Some(Some(connection)) = self.links.get_mut(index) else { return };
        if connection.lost.is_some() {
            return;
        }
        match connection.channel.handle(now, &packet) {
            Err(cause) => self.end(link, cause),
            Ok(None) => {}
            Ok(Some(Heard::Welcome { greeting, .. })) => match self.join(link, &greeting) {
                Ok(()) => self.came_up(link),
                Err(cause) => self.end(link, cause),
            },
            Ok(Some(Heard::Ready)) => self.came_up(link),
            Ok(Some(Heard::Message { grant: Some(grant), .. })) if grant.base.checked_add(grant.len).is_none() => {
                self.end(link, DeviceError::Protocol("memory beyond the last address"));
            }
            Ok(Some(Heard::Message { message, grant })) => {
                let granted = grant.map(|grant| Granted {
                    rkey: grant.mr,
                    base: grant.base,
                    len: grant.len,
                    writable: grant.writable,
                    atomics: connection.does_atomics && self.rnic_caps.atomics,
                });
                self.events.push_back(Event::Message { link, message, granted });
            }
        }
    }

    fn came_up(&mut self, link: Link) {
        let Some(Some(connection)) = self.links.get_mut(link.0 as usize) else { return };
        connection.is_up = true;
        let (node, incoming, epoch) = (connection.channel.peer_node(), connection.incoming, connection.channel.epoch());
        let (peer_epoch, replaces) = (connection.channel.peer_epoch(), connection.replaces);
        self.events.push_back(Event::Up { link, node, incoming, epoch, peer_epoch, replaces });
    }

    /// Every connection over a route is over.
    fn end_all(&mut self, route: C::Route, cause: DeviceError) {
        for link in (0..self.links.len() as u32).map(Link) {
            if self.links[link.0 as usize].as_ref().is_some_and(|c| c.route == route) {
                self.end(link, cause);
            }
        }
    }

    fn end_route(&mut self, route: C::Route, cause: DeviceError) {
        self.end_all(route, cause);
        self.carrier.close(route);
    }

    fn reject(&mut self, now: u64, route: C::Route, hello: &Packet, reason: Reason) {
        if let Some(packet) = hello.reject(reason) {
            let _ = self.carrier.send(route, &packet.encode(), now);
        }
    }

    /// Somebody wants to connect.
    fn welcome(&mut self, now: u64, route: C::Route, hello: &Packet, replaces: u32, greeting: &[u8; GREETING_BYTES]) {
        let Ok((link, line, ours)) = self.prepare() else {
            self.reject(now, route, hello, Reason::Full);
            if self.carrier.medium() == Medium::Stream {
                self.carrier.close(route);
            }
            return;
        };
        let epoch = self.new_epoch();
        // It is a hello: the caller looked.
        let accepted = Channel::accept(hello, self.node, epoch, ours.encode(), self.carrier.medium(), now);
        let Ok(channel) = accepted else { return };
        self.links[link.0 as usize] = Some(Connection::new(channel, route, Some(replaces), ours.addresses, line, now));
        match self.join(link, greeting) {
            Ok(()) => self.talk(link, now),
            Err(cause) => self.end(link, cause),
        }
    }

    /// Connections that others began, and that say nothing, must not keep anybody out: the oldest makes room.
    fn evict_silent(&mut self) {
        if self.links.iter().any(Option::is_none) {
            return;
        }
        let silent = self.links.iter().enumerate().filter_map(|(i, c)| {
            let connection = c.as_ref().filter(|c| c.incoming && !c.is_up)?;
            Some((connection.since, i))
        });
        if let Some((_, oldest)) = silent.min() {
            self.disconnect(Link(oldest as u32));
        }
    }
}

// SAFETY: each work request is in one place (waiting here, with the NIC, or ended), and only the NIC touches its memory,
// as `Rnic` promises; a message is copied when its receive ends.
unsafe impl<N: Rnic, C: Carrier> Device for RcDevice<N, C> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn register(&mut self, memory: Memory, rights: Rights) -> Result<Mr, DeviceError> {
        let place = match self.mrs.iter().position(Option::is_none) {
            Some(place) => place,
            None if self.mrs.len() < MAX_MRS => {
                self.mrs.push(None);
                self.mrs.len() - 1
            }
            None => return Err(DeviceError::Full { what: "memory registrations", limit: MAX_MRS as u32 }),
        };
        let (base, len) = memory.range();
        // SAFETY: the caller's promise.
        let local = unsafe { self.rnic.reg_mr(base.as_ptr(), len, MrAccess::LOCAL_WRITE) }?;
        // SAFETY: as above.
        match unsafe { Self::register_remote(&mut self.rnic, &memory, rights) } {
            Ok(remote) => {
                self.mrs[place] = Some(Registration { memory, rights, local, remote });
                Ok(Mr(place as u32))
            }
            Err(error) => {
                let _ = self.rnic.dereg_mr(local);
                Err(error)
            }
        }
    }

    fn deregister(&mut self, mr: Mr) -> Result<(), DeviceError> {
        let Registration { local, remote, .. } = *self.registration(mr)?;
        if let Some(remote) = remote {
            self.rnic.dereg_mr(remote)?;
        }
        self.rnic.dereg_mr(local)?;
        self.mrs[mr.0 as usize] = None;
        Ok(())
    }

    fn revoke(&mut self, mr: Mr) -> Result<(), DeviceError> {
        let registration = self.registration(mr)?;
        let (memory, rights) = (registration.memory.clone(), registration.rights);
        let Some(old) = registration.remote.take() else { return Ok(()) };
        self.rnic.dereg_mr(old)?;
        // SAFETY: as it was registered; the registration keeps the memory.
        let fresh = unsafe { Self::register_remote(&mut self.rnic, &memory, rights) }?;
        self.registration(mr)?.remote = fresh;
        Ok(())
    }

    fn connect(&mut self, address: &str, replaces: u32, now: u64) -> Result<Link, DeviceError> {
        let route = self.carrier.open(address, now)?;
        let (link, line, ours) = match self.prepare() {
            Ok(prepared) => prepared,
            Err(error) => {
                self.carrier.close(route);
                return Err(error);
            }
        };
        let epoch = self.new_epoch();
        let channel = Channel::connect(self.node, epoch, replaces, ours.encode(), self.carrier.medium(), now);
        self.links[link.0 as usize] = Some(Connection::new(channel, route, None, ours.addresses, line, now));
        self.talk(link, now);
        Ok(link)
    }

    fn disconnect(&mut self, link: Link) {
        let Some(connection) = self.links.get_mut(link.0 as usize).and_then(Option::take) else { return };
        for class in 0..CLASSES {
            let queue = self.queue_of(link, class);
            let qp = self.queues.at(queue).qp;
            self.rnic.destroy_qp(qp);
            *self.queues.at_mut(queue) = FREE;
            self.set_idle(queue);
        }
        let _ = self.rnic.dereg_mr(connection.line);
        let _ = self.carrier.send(connection.route, &connection.channel.bye().encode(), self.now);
        self.carrier.close(connection.route);
        self.events.retain(|event| {
            let (Event::Message { link: of, .. } | Event::Down { link: of, .. } | Event::Up { link: of, .. }) = event;
            *of != link
        });
    }

    fn qp(&self, link: Link, class: usize) -> Qp {
        Qp(self.queue_of(link, class))
    }

    fn send(&mut self, link: Link, message: &Message, grant: Option<Mr>) -> Result<(), DeviceError> {
        let grant = match grant {
            None => None,
            Some(mr) => {
                let registration = self.registration(mr)?;
                let keys = registration.remote.ok_or(DeviceError::NotShareable)?;
                let len = registration.memory.range().1 as u64;
                let writable = registration.rights.intersects(Rights::WRITE | Rights::ATOMIC);
                Some(Grant { mr: keys.rkey, epoch: 0, base: keys.iova, len, writable })
            }
        };
        let connection = self.links.get_mut(link.0 as usize).and_then(Option::as_mut);
        let connection = connection.filter(|c| c.is_up && c.lost.is_none()).ok_or(DeviceError::NoSuchLink)?;
        if let Err(cause) = connection.channel.send(message, grant) {
            self.lose(link, cause);
            return Err(cause);
        }
        self.talk(link, self.now);
        Ok(())
    }

    fn keep(&mut self, _rkey: u32) {}

    fn release(&mut self, _rkey: u32) {}

    fn control(&mut self, now: u64) -> Option<Event> {
        self.now = self.now.max(now);
        if self.events.is_empty() {
            self.carry(now);
        }
        self.events.pop_front()
    }

    unsafe fn post(&mut self, qp: Qp, wr: &Wr) -> Posted {
        let queue = qp.0 & (self.queues.capacity() - 1);
        let q = self.queues.at_mut(queue);
        if q.qp == 0 {
            return Posted::Refused(Status::PeerUnknown);
        }
        if let Some(status) = q.down {
            return Posted::Refused(status);
        }
        if wr.op == WrOp::Recv {
            if q.receives.len == DEPTH {
                return Posted::Full;
            }
            let at = q.receives.push() % DEPTH;
            if q.surplus != 0 {
                q.surplus -= 1;
            } else {
                q.granted = q.granted.wrapping_add(1);
            }
            *self.receives.at_mut(queue * DEPTH + at) = Receive::of(wr);
            self.set_busy(queue);
            return Posted::Pending;
        }
        if q.waiting.len == 0 && wr.op != WrOp::Swap {
            match self.give(queue, wr) {
                Given::Yes => return Posted::Pending,
                Given::Refused(status) => return Posted::Refused(status),
                Given::NotYet => {}
            }
        }
        let q = self.queues.at_mut(queue);
        if q.waiting.len == DEPTH {
            return Posted::Full;
        }
        let at = q.waiting.push() % DEPTH;
        *self.waiting.at_mut(queue * DEPTH + at) = *wr;
        self.set_busy(queue);
        Posted::Pending
    }

    fn ring(&mut self, now: u64) {
        self.now = self.now.max(now);
        if core::mem::take(&mut self.must_ring) {
            self.rnic.ring(now);
        }
    }

    fn poll(&mut self, now: u64, wcs: &mut [Wc]) -> usize {
        self.now = self.now.max(now);
        let mut ended = [RnicWc::EMPTY; 16];
        let mut count = 0;
        while count < wcs.len() {
            // Each of the NIC's completions ends one operation at most.
            let room = (wcs.len() - count).min(ended.len());
            let found = self.rnic.poll(now, &mut ended[..room]);
            for wc in ended.iter().take(found) {
                if let Some(wc) = self.completed(wc)
                    && let Some(place) = wcs.get_mut(count)
                {
                    *place = wc;
                    count += 1;
                }
            }
            if found < room {
                break;
            }
        }
        for word in 0..self.busy.capacity() {
            let mut bits = *self.busy.at(word);
            while bits != 0 && count < wcs.len() {
                let queue = word * 64 + bits.trailing_zeros();
                bits &= bits - 1;
                self.work(queue, wcs, &mut count);
            }
        }
        self.ring(now);
        count
    }

    fn cancel(&mut self, qp: Qp, wr_id: u64) -> Cancel {
        let queue = qp.0 & (self.queues.capacity() - 1);
        let q = self.queues.at_mut(queue);
        // The head may have begun: a swap that looked.
        let has_begun = q.swap != Swap::None;
        if q.waiting.remove(&mut self.waiting, queue, |i, wr| wr.wr_id == wr_id && !(i == 0 && has_begun)) {
            return Cancel::NotStarted;
        }
        if q.receives.remove(&mut self.receives, queue, |_, receive| receive.wr_id == wr_id) {
            // It was told, and a message for it may be on its way: the next receive takes that.
            q.surplus += 1;
            return Cancel::NotStarted;
        }
        Cancel::Unable
    }

    fn down(&self, qp: Qp) -> Option<Status> {
        self.queues.at(qp.0).down
    }
}

impl<N: Rnic, C: Carrier> Drop for RcDevice<N, C> {
    fn drop(&mut self) {
        for link in 0..self.links.len() as u32 {
            self.disconnect(Link(link));
        }
    }
}
