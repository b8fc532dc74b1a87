//! Queue pairs whose work the calling CPU does itself: the data path of `local` and `shm`.
//!
//! A put is a store or copy by the initiator, a get a copy, an atomic a CPU atomic. What can be done at once is done in
//! `post`; long copies are cut into slices, one a poll for each queue pair, so that another class gets through; sends
//! wait for credit. The control side (who is connected, what is mapped where) belongs to the devices built on this.

use core::hint::cold_path;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering, fence};

use verbring_slab::{Arena, ArenaFull, Table};

use crate::lane::{CLOSED, Corrupt, DEAD, Inbox, Lane, MAX_SEND, Outbox, REVISION};
use crate::wr::Receive;
use crate::{CLASSES, Cancel, Caps, Domain, Level, Posted, Qp, Status, Wc, Wr, WrOp, copy};

/// Bytes copied for a queue pair in one call: what an urgent operation may have to wait for (about 20 us).
pub(crate) const SLICE: u32 = 256 * 1024;
/// Pending work requests a queue pair holds.
pub(crate) const DEPTH: u32 = 64;

/// What such a device can do.
pub(crate) const fn caps(name: &'static str) -> Caps {
    Caps {
        name,
        completion: Level::Visible,
        atomics: true,
        domain: Domain::Cpu,
        ordered_signal: true,
        can_cancel: true,
        max_send: MAX_SEND,
        drain_bound_ns: 0,
    }
}

/// The queue pairs of all connections, and what they may reach.
pub struct CpuNic {
    /// Class by class, so that the urgent ones are polled first: index is class * links + link.
    qps: Table<CpuQp>,
    /// For each queue pair whether work may be done at once.
    gates: Table<Gate>,
    /// `DEPTH` entries for each queue pair.
    pending: Table<Pending>,
    receives: Table<Receive>,
    /// A bit for each queue pair that `poll` has to look at.
    busy: Table<u64>,
    /// How many bits are set.
    busy_count: u32,
    imports: Table<Import>,
    links: u32,
}

// SAFETY: the pointers in it name memory that the contract of `Device::post` and of `Lane` keeps valid.
unsafe impl Send for CpuNic {}

/// One compare says that a queue pair is up, that nothing is pending or held there, and that the other side revoked
/// nothing since this one looked: while all that is so, it is the other side's door and what was seen there.
struct Gate {
    door: NonNull<AtomicU64>,
    seen: u64,
}

/// A door that nobody opens.
static SHUT: AtomicU64 = AtomicU64::new(0);

impl Gate {
    fn shut() -> Gate {
        Gate { door: NonNull::from(&SHUT), seen: 1 }
    }

    #[inline(always)]
    fn is_open(&self) -> bool {
        // SAFETY: a gate has the door of a queue pair that is up, or a static one.
        unsafe { self.door.as_ref() }.load(Ordering::Acquire) == self.seen
    }
}

struct CpuQp {
    /// The status that everything ends with; none while the queue pair is up.
    down: Option<Status>,
    /// Pending work requests.
    queued: u32,
    /// See [`Device::hold`](crate::Device::hold).
    is_held: bool,
    /// The other side's door, valid while the queue pair is up.
    door: NonNull<AtomicU64>,
    /// What was seen there when no import from there was stale; none if that is not known.
    seen: Option<u64>,
    /// Ring positions in `pending` and `receives`.
    first: u32,
    received: u32,
    waiting: u32,
    /// Credits that cancelled receives left behind.
    surplus: u32,
    /// Long copies each behind the other: where the last ends, and the bytes of all.
    row_end: u64,
    row_len: u64,
    ends: Option<Ends>,
}

struct Ends {
    inbox: Inbox,
    outbox: Outbox,
    ours: Lane,
}

#[derive(Clone, Copy)]
struct Pending {
    wr: Wr,
    /// Bytes copied so far.
    done: u32,
}

/// What a peer granted.
#[derive(Clone, Copy)]
pub(crate) struct Import {
    pub(crate) link: u32,
    /// The peer's lane and registration, and the epoch that the grant is of.
    pub(crate) theirs: Option<Lane>,
    pub(crate) mr: u32,
    pub(crate) epoch: u32,
}

impl Import {
    /// Whether its owner still lets us in. What was read before this call was read while it did.
    fn is_current(&self) -> bool {
        // On weaker CPUs a load may pass earlier ones: the copy's loads come first.
        fence(Ordering::Acquire);
        self.theirs.is_some_and(|lane| lane.epoch(self.mr).load(Ordering::Acquire) == self.epoch)
    }
}

const NO_IMPORT: Import = Import { link: 0, theirs: None, mr: 0, epoch: 0 };

impl CpuNic {
    /// The bytes of an arena that this takes.
    pub const fn bytes(links: u32, imports: u32) -> usize {
        let qps = links * CLASSES as u32;
        Table::<CpuQp>::bytes(qps)
            + Table::<Gate>::bytes(qps)
            + Table::<Pending>::bytes(qps * DEPTH)
            + Table::<Receive>::bytes(qps * DEPTH)
            + Table::<u64>::bytes(qps.div_ceil(64))
            + Table::<Import>::bytes(imports)
    }

    /// Queue pairs for so many connections (rounded up to a power of two) and imports.
    ///
    /// # Safety
    /// `arena` outlives it.
    pub unsafe fn new(arena: &mut Arena, links: u32, imports: u32) -> Result<CpuNic, ArenaFull> {
        let links = Table::<CpuQp>::capacity_for(links);
        let qps = links * CLASSES as u32;
        // SAFETY: the caller keeps the arena.
        unsafe {
            Ok(CpuNic {
                qps: arena.table(qps, |_| CpuQp::new())?,
                gates: arena.table(qps, |_| Gate::shut())?,
                pending: arena.table(qps * DEPTH, |_| Pending { wr: Wr::EMPTY, done: 0 })?,
                receives: arena.table(qps * DEPTH, |_| Receive::EMPTY)?,
                busy: arena.table(qps.div_ceil(64), |_| 0)?,
                busy_count: 0,
                imports: arena.table(imports, |_| NO_IMPORT)?,
                links,
            })
        }
    }

    /// Connections it has room for.
    pub fn links(&self) -> u32 {
        self.links
    }

    /// The queue pair of a class of a connection.
    pub fn qp(&self, link: u32, class: usize) -> Qp {
        Qp((class % CLASSES) as u32 * self.links + (link & (self.links - 1)))
    }

    /// The connection of a queue pair.
    #[inline(always)]
    fn link_of(&self, qp: Qp) -> u32 {
        qp.0 & (self.links - 1)
    }

    /// Opens the queue pairs of a connection.
    ///
    /// # Safety
    /// Both lanes stay mapped until `close` of this connection.
    pub unsafe fn open(&mut self, link: u32, ours: Lane, theirs: Lane) {
        for class in 0..CLASSES {
            let qp = self.qp(link, class);
            let q = self.qps.at_mut(qp.0);
            *q = CpuQp::new();
            q.down = None;
            q.door = NonNull::from(theirs.door());
            // Whatever happened before is part of what will be granted.
            q.seen = Some(theirs.door().load(Ordering::Acquire) & !(CLOSED | DEAD));
            q.ends = Some(Ends { inbox: ours.inbox(class), outbox: theirs.outbox(class), ours });
            self.set_gate(qp.0);
        }
    }

    /// The connection is lost: what is pending ends by `poll` with `cause`, what is posted from now on at once.
    pub fn fail(&mut self, link: u32, cause: Status) {
        for class in 0..CLASSES {
            let qp = self.qp(link, class);
            let q = self.qps.at_mut(qp.0);
            if q.down.is_none() {
                q.down = Some(cause);
                self.set_gate(qp.0);
                self.set_busy(qp.0);
            }
        }
    }

    /// Ends a connection: nothing touches its lanes or the memory of its work requests any more, and what was pending
    /// ends without a Wc. The other side finds the door closed.
    pub fn close(&mut self, link: u32) {
        if let Some(ends) = &self.qps.at(self.qp(link, 0).0).ends {
            ends.ours.door().fetch_or(CLOSED, Ordering::Release);
        }
        for class in 0..CLASSES {
            let qp = self.qp(link, class);
            *self.qps.at_mut(qp.0) = CpuQp::new();
            self.set_gate(qp.0);
        }
        for import in self.imports.iter_mut() {
            if import.theirs.is_some() && import.link == link {
                *import = NO_IMPORT;
            }
        }
    }

    /// Why a queue pair is down; none while it is up.
    #[inline]
    pub fn down(&self, qp: Qp) -> Option<Status> {
        self.qps.at(qp.0).down
    }

    /// Looks at the door of a connection, which may have been closed by its owner or by this side's watcher.
    pub(crate) fn look_at_door(&mut self, link: u32) {
        let qp = self.qp(link, 0);
        let q = self.qps.at(qp.0);
        if q.down.is_none() {
            // SAFETY: the queue pair is up.
            let door = unsafe { q.door.as_ref() }.load(Ordering::Acquire);
            if let Some(cause) = gone(door) {
                self.fail(link, cause);
            }
        }
    }

    /// Puts an import into the table; none if that is full.
    pub(crate) fn import(&mut self, import: Import) -> Option<u32> {
        // Without a lane it would be a free place.
        import.theirs?;
        let rkey = self.imports.iter().position(|i| i.theirs.is_none())? as u32;
        *self.imports.at_mut(rkey) = import;
        // It may be stale already: then the next operation is checked.
        self.set_seen(import.link, None);
        let qp = self.qp(import.link, 0);
        let q = self.qps.at(qp.0);
        if q.down.is_none() {
            // SAFETY: the queue pair is up.
            let door = unsafe { q.door.as_ref() }.load(Ordering::Acquire);
            if gone(door).is_none() {
                self.settle(qp, door);
            }
        }
        Some(rkey)
    }

    /// Whether there is such an import.
    pub(crate) fn is_import(&self, rkey: u32) -> bool {
        self.imports.at(rkey).theirs.is_some()
    }

    /// Takes an import out of the table: which connection's it was.
    pub fn release(&mut self, rkey: u32) -> Option<u32> {
        let import = core::mem::replace(self.imports.at_mut(rkey), NO_IMPORT);
        import.theirs.map(|_| import.link)
    }

    /// Writes the epoch of a registration where the other side of a connection finds it.
    pub(crate) fn grant(&mut self, link: u32, mr: u32, epoch: u32) {
        if let Some(ends) = &self.qps.at(self.qp(link, 0).0).ends {
            ends.ours.epoch(mr).store(epoch, Ordering::Release);
        }
    }

    /// Takes the door of a connection as seen, if no import from there is stale: then nothing that it told is left to
    /// find. The door is read before the epochs, and its owner writes it after them.
    fn settle(&mut self, qp: Qp, door: u64) {
        let link = self.link_of(qp);
        let mut imports = self.imports.iter().filter(|i| i.theirs.is_some() && i.link == link);
        if imports.all(Import::is_current) {
            self.set_seen(link, Some(door));
        }
    }

    fn set_seen(&mut self, link: u32, seen: Option<u64>) {
        for class in 0..CLASSES {
            let qp = self.qp(link, class);
            self.qps.at_mut(qp.0).seen = seen;
            self.set_gate(qp.0);
        }
    }

    /// After each change of what a gate stands for.
    fn set_gate(&mut self, qp: u32) {
        let q = self.qps.at(qp);
        *self.gates.at_mut(qp) = match q.seen {
            Some(seen) if q.down.is_none() && q.queued == 0 && !q.is_held => Gate { door: q.door, seen },
            _ => Gate::shut(),
        };
    }

    /// Tells every connection that the epoch of a registration changed.
    pub(crate) fn revoke(&mut self, mr: u32, epoch: u32) {
        for link in 0..self.links {
            if let Some(ends) = &self.qps.at(self.qp(link, 0).0).ends {
                ends.ours.epoch(mr).store(epoch, Ordering::Release);
                ends.ours.door().fetch_add(REVISION, Ordering::AcqRel);
            }
        }
    }

    /// See [`Device::hold`](crate::Device::hold).
    pub fn hold(&mut self, qp: Qp, is_held: bool) {
        self.qps.at_mut(qp.0).is_held = is_held;
        self.set_gate(qp.0);
    }

    /// See [`Device::post_now`](crate::Device::post_now).
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub unsafe fn post_now(&mut self, qp: Qp, wr: &Wr) -> Option<u64> {
        // SAFETY: there is such a queue pair.
        let gate = unsafe { self.gates.at_unchecked(qp.0) };
        if !gate.is_open() {
            cold_path();
            return None;
        }
        let len = wr.len as usize;
        // SAFETY: the caller's promise.
        unsafe {
            match wr.op {
                WrOp::Put => {
                    if !copy::copy_up_to(wr.remote as *mut u8, wr.local, len, SLICE as usize) {
                        return None;
                    }
                }
                WrOp::Get => {
                    if !copy::copy_up_to(wr.local, wr.remote as *const u8, len, SLICE as usize) {
                        return None;
                    }
                    // What was read counts only if nothing was revoked meanwhile; the copy's loads come first.
                    fence(Ordering::Acquire);
                    if !gate.is_open() {
                        cold_path();
                        return None;
                    }
                }
                WrOp::PutInline => copy::copy_words(wr.remote as *mut u8, wr.operand, wr.second, wr.len),
                WrOp::FetchAdd | WrOp::CompareSwap | WrOp::Swap | WrOp::SignalStore | WrOp::SignalAdd => {
                    return Some(word_operation(wr));
                }
                WrOp::Flush => {}
                WrOp::Send | WrOp::Recv => return None,
            }
        }
        Some(0)
    }

    /// See [`Device::post`](crate::Device::post).
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    pub unsafe fn post(&mut self, qp: Qp, wr: &Wr) -> Posted {
        // SAFETY: the caller's promise.
        if let Some(value) = unsafe { self.post_now(qp, wr) } {
            return Posted::Done(value);
        }
        let q = self.qps.at_mut(qp.0);
        if let Some(cause) = q.down {
            return Posted::Refused(cause);
        }
        if wr.op == WrOp::Recv {
            if q.waiting == DEPTH {
                return Posted::Full;
            }
            let at = qp.0 * DEPTH + (q.received.wrapping_add(q.waiting) % DEPTH);
            *self.receives.at_mut(at) = Receive::of(wr);
            q.waiting += 1;
            match (q.surplus, &mut q.ends) {
                (0, Some(ends)) => ends.inbox.grant(),
                (0, None) => {}
                (_, _) => q.surplus -= 1,
            }
            self.set_busy(qp.0);
            return Posted::Pending;
        }
        if let Err(status) = self.check(qp, wr) {
            return Posted::Refused(status);
        }
        let queued = self.qps.at(qp.0).queued;
        if queued == DEPTH {
            return Posted::Full;
        }
        let mut work = Pending { wr: *wr, done: 0 };
        if queued == 0 && (wr.len <= SLICE || wr.op == WrOp::Send) {
            // SAFETY: the caller's promise; the queue pair is up and nothing is before it.
            match unsafe { self.work_on(qp, &mut work) } {
                Ok(Some(value)) => return Posted::Done(value),
                Ok(None) => {}
                Err(status) => return Posted::Refused(status),
            }
        }
        let q = self.qps.at_mut(qp.0);
        *self.pending.at_mut(qp.0 * DEPTH + (q.first.wrapping_add(q.queued) % DEPTH)) = work;
        q.queued += 1;
        self.set_gate(qp.0);
        self.set_busy(qp.0);
        Posted::Pending
    }

    /// Whether the connection is there, and the import still what was granted. Out of line: it is called when the door
    /// moved, or for work that is slow anyway.
    #[cold]
    #[inline(never)]
    fn check(&mut self, qp: Qp, wr: &Wr) -> Result<(), Status> {
        let q = self.qps.at(qp.0);
        if let Some(cause) = q.down {
            return Err(cause);
        }
        // SAFETY: the queue pair is up.
        let door = unsafe { q.door.as_ref() }.load(Ordering::Acquire);
        if let Some(cause) = gone(door) {
            self.fail(self.link_of(qp), cause);
            return Err(cause);
        }
        if matches!(wr.op, WrOp::Send | WrOp::Recv | WrOp::Flush) {
            return Ok(());
        }
        if !self.imports.at(wr.rkey).is_current() {
            return Err(Status::StaleEpoch);
        }
        if self.qps.at(qp.0).seen != Some(door) {
            self.settle(qp, door);
        }
        Ok(())
    }

    /// Does a slice of a work request: its value if that finished it.
    ///
    /// # Safety
    /// As `post`; the queue pair is up, and nothing before this work request is pending.
    unsafe fn work_on(&mut self, qp: Qp, work: &mut Pending) -> Result<Option<u64>, Status> {
        let Pending { wr, done } = work;
        let slice = (wr.len - *done).min(SLICE) as usize;
        let at = *done as usize;
        // SAFETY: the caller's promise; at + slice <= len.
        unsafe {
            match wr.op {
                WrOp::Put | WrOp::Get => {
                    let remote = (wr.remote as *mut u8).add(at);
                    let local = wr.local.add(at);
                    let (to, from) = if wr.op == WrOp::Put { (remote, local) } else { (local, remote) };
                    let q = self.qps.at_mut(qp.0);
                    if at == 0 {
                        let goes_on = q.row_end == wr.remote;
                        q.row_len =
                            if goes_on { q.row_len.saturating_add(u64::from(wr.len)) } else { u64::from(wr.len) };
                        q.row_end = wr.remote.wrapping_add(u64::from(wr.len));
                    }
                    if q.row_len >= u64::from(copy::STREAM_FROM) {
                        copy::copy_stream(to, from, slice);
                    } else {
                        copy::copy(to, from, slice);
                    }
                }
                WrOp::PutInline => copy::copy_words(wr.remote as *mut u8, wr.operand, wr.second, wr.len),
                WrOp::Send => {
                    let Some(ends) = &mut self.qps.at_mut(qp.0).ends else { return Err(Status::ConnectionLost) };
                    return match ends.outbox.send(wr.local, wr.len, wr.imm) {
                        Ok(true) => Ok(Some(0)),
                        Ok(false) => Ok(None),
                        Err(Corrupt) => {
                            self.fail(self.link_of(qp), Status::ConnectionLost);
                            Err(Status::ConnectionLost)
                        }
                    };
                }
                WrOp::Recv => return Err(Status::BadOpcode),
                WrOp::Flush => return Ok(Some(0)),
                _ => return Ok(Some(word_operation(wr))),
            }
        }
        *done += slice as u32;
        let is_done = *done == wr.len;
        let wr = *wr;
        // A slice that crossed a revocation does not count.
        self.check(qp, &wr)?;
        Ok(is_done.then_some(0))
    }

    fn set_busy(&mut self, qp: u32) {
        let (word, bit) = (self.busy.at_mut(qp / 64), 1 << (qp % 64));
        self.busy_count += u32::from(*word & bit == 0);
        *word |= bit;
    }

    /// See [`Device::poll`](crate::Device::poll).
    #[inline(always)]
    pub fn poll(&mut self, wcs: &mut [Wc]) -> usize {
        if self.busy_count == 0 { 0 } else { self.poll_busy(wcs) }
    }

    #[inline(never)]
    fn poll_busy(&mut self, wcs: &mut [Wc]) -> usize {
        let mut count = 0;
        for word in 0..self.busy.capacity() {
            let mut bits = *self.busy.at(word);
            while bits != 0 {
                let qp = Qp(word * 64 + bits.trailing_zeros());
                bits &= bits - 1;
                count += self.progress(qp, wcs.get_mut(count..).unwrap_or_default());
            }
        }
        count
    }

    /// One queue pair's share of a poll: at most a slice of copying.
    #[inline(never)]
    fn progress(&mut self, qp: Qp, wcs: &mut [Wc]) -> usize {
        let mut budget = SLICE;
        let mut out = wcs.iter_mut();
        // Work, in order.
        while out.len() > 0 && self.qps.at(qp.0).queued != 0 {
            let q = self.qps.at(qp.0);
            let at = qp.0 * DEPTH + q.first % DEPTH;
            let mut work = *self.pending.at(at);
            let outcome = if let Some(cause) = q.down {
                Err(cause)
            } else if budget == 0 {
                break;
            } else {
                budget = budget.saturating_sub((work.wr.len - work.done).max(64));
                match self.check(qp, &work.wr) {
                    // SAFETY: its poster's promise holds until it ends; the queue pair is up and this is its first.
                    Ok(()) => unsafe { self.work_on(qp, &mut work) },
                    Err(status) => Err(status),
                }
            };
            let wc = match outcome {
                Ok(None) => {
                    *self.pending.at_mut(at) = work;
                    break;
                }
                Ok(Some(value)) => Wc { value, ..Wc::new(work.wr.wr_id, qp, Status::Success) },
                Err(status) => Wc::new(work.wr.wr_id, qp, status),
            };
            let q = self.qps.at_mut(qp.0);
            q.first = q.first.wrapping_add(1);
            q.queued -= 1;
            self.set_gate(qp.0);
            out.next().into_iter().for_each(|place| *place = wc);
        }
        // Receives.
        while out.len() > 0 && self.qps.at(qp.0).waiting != 0 {
            let q = self.qps.at_mut(qp.0);
            let receive = *self.receives.at(qp.0 * DEPTH + q.received % DEPTH);
            let down = q.down;
            let wc = match &mut q.ends {
                // What was sent before the connection was lost was sent.
                Some(ends) => {
                    // SAFETY: its poster's promise; the lane is mapped until `close`.
                    match unsafe { ends.inbox.take(receive.local, receive.room) } {
                        Ok(None) | Err(Corrupt) if let Some(cause) = down => Wc::new(receive.wr_id, qp, cause),
                        Ok(None) => break,
                        Ok(Some((len, imm))) => {
                            let fits = len <= receive.room;
                            let status = if fits { Status::Success } else { Status::Truncated };
                            Wc { value: u64::from(len), imm, ..Wc::new(receive.wr_id, qp, status) }
                        }
                        Err(Corrupt) => {
                            self.fail(self.link_of(qp), Status::ConnectionLost);
                            continue;
                        }
                    }
                }
                None => Wc::new(receive.wr_id, qp, q.down.unwrap_or(Status::ConnectionLost)),
            };
            let q = self.qps.at_mut(qp.0);
            q.received = q.received.wrapping_add(1);
            q.waiting -= 1;
            out.next().into_iter().for_each(|place| *place = wc);
        }
        let q = self.qps.at(qp.0);
        if q.queued == 0 && q.waiting == 0 {
            *self.busy.at_mut(qp.0 / 64) &= !(1 << (qp.0 % 64));
            self.busy_count -= 1;
        }
        let left = out.len();
        wcs.len() - left
    }

    /// See [`Device::cancel`](crate::Device::cancel).
    pub fn cancel(&mut self, qp: Qp, wr_id: u64) -> Cancel {
        let q = self.qps.at_mut(qp.0);
        let base = qp.0 * DEPTH;
        let queued = q.queued;
        if let Some(found) =
            (0..queued).find(|i| self.pending.at(base + q.first.wrapping_add(*i) % DEPTH).wr.wr_id == wr_id)
        {
            let done = self.pending.at(base + q.first.wrapping_add(found) % DEPTH).done;
            for i in found..queued - 1 {
                let next = *self.pending.at(base + q.first.wrapping_add(i + 1) % DEPTH);
                *self.pending.at_mut(base + q.first.wrapping_add(i) % DEPTH) = next;
            }
            q.queued -= 1;
            self.set_gate(qp.0);
            return if done == 0 { Cancel::NotStarted } else { Cancel::Cut };
        }
        let waiting = q.waiting;
        if let Some(found) =
            (0..waiting).find(|i| self.receives.at(base + q.received.wrapping_add(*i) % DEPTH).wr_id == wr_id)
        {
            for i in found..waiting - 1 {
                let next = *self.receives.at(base + q.received.wrapping_add(i + 1) % DEPTH);
                *self.receives.at_mut(base + q.received.wrapping_add(i) % DEPTH) = next;
            }
            q.waiting -= 1;
            // Its credit is out and cannot be called back: the next receive goes without one.
            q.surplus += 1;
            return Cancel::NotStarted;
        }
        Cancel::Unable
    }
}

impl CpuQp {
    fn new() -> CpuQp {
        CpuQp {
            down: Some(Status::PeerUnknown),
            queued: 0,
            is_held: false,
            door: NonNull::dangling(),
            seen: None,
            first: 0,
            received: 0,
            waiting: 0,
            surplus: 0,
            row_end: 0,
            row_len: 0,
            ends: None,
        }
    }
}

/// What a door says of a connection that is over.
fn gone(door: u64) -> Option<Status> {
    match door {
        _ if door & DEAD != 0 => Some(Status::PeerDead),
        _ if door & CLOSED != 0 => Some(Status::ConnectionLost),
        _ => None,
    }
}

/// # Safety
/// `wr.remote` is valid for 8 bytes and a multiple of 8.
#[inline(always)]
unsafe fn word_operation(wr: &Wr) -> u64 {
    // SAFETY: the caller's promise.
    let word = unsafe { copy::word(wr.remote) };
    match wr.op {
        WrOp::FetchAdd => word.fetch_add(wr.operand, Ordering::SeqCst),
        WrOp::CompareSwap => match word.compare_exchange(wr.second, wr.operand, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(old) | Err(old) => old,
        },
        WrOp::Swap => word.swap(wr.operand, Ordering::SeqCst),
        WrOp::SignalAdd => {
            word.fetch_add(wr.operand, Ordering::Release);
            0
        }
        _ => {
            word.store(wr.operand, Ordering::Release);
            0
        }
    }
}
