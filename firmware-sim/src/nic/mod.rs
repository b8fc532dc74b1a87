//! The NIC itself: a complete initiator and target of reliable connections, without a clock, a socket or an allocator.
//!
//! ```text
//! post_send, post_recv --> requester.rs --> poll_transmit --> wire
//! poll_cq <-- completions <-- responder.rs, requester.rs <-- handle_packet <-- wire
//!                                 memory.rs: who may touch what; placement.rs: when it gets there
//! ```
//! Rules are those of IBTA volume 1, chapter 9 (transport) and 10, 11 (verbs).

mod fifo;
mod memory;
mod placement;
mod qp;
mod requester;
mod responder;

use core::net::IpAddr;

use heapless::Deque;
use verbring_slab::{Arena, ArenaFull, Table};
use verbring_sys::rnic::{
    AsyncEvent, MrAccess, MrKeys, PostError, RecvWr, RnicWc, SendFlags, SendOp, SendWr, WcOp, WcStatus,
};

use memory::Keys;
pub use memory::Pd;
pub use placement::Delay;
use placement::Placement;
pub use qp::{MAX_INLINE, ModifyError, QpState, Transition};
use qp::{Qp, Wqe};
use responder::Resource;

use crate::packet::{Header, Ip, MAX_MTU, Opcode};
use crate::psn;
use crate::random::Random;

/// Reads and atomics under way on a queue pair, in each direction.
pub const MAX_RD_ATOMIC: u8 = 16;
/// Bytes of the longest message.
pub const MAX_MESSAGE: u32 = 1 << 30;
/// Events kept for `async_event`; of too many the oldest goes.
const EVENTS: usize = 64;
/// No time at all.
const NEVER: u64 = u64::MAX;

/// What a NIC is made with.
#[derive(Clone, Copy, Debug)]
pub struct NicConfig {
    /// Its address: of its packets, and the only one that it listens to.
    pub address: IpAddr,
    /// Queue pairs.
    pub max_qps: u32,
    /// Completion queues.
    pub max_cqs: u32,
    /// Entries of each.
    pub cq_depth: u32,
    /// Sends of a queue pair.
    pub sq_depth: u32,
    /// Receives of a queue pair.
    pub rq_depth: u32,
    /// Registrations and memory windows.
    pub max_keys: u32,
    /// Packets that a queue pair has under way.
    pub window: u32,
    /// Each time that a lost packet is sent again it is waited for twice as long as before.
    pub backs_off: bool,
    /// What it cannot do, or does badly.
    pub weakness: Weakness,
    /// Of everything random in it: keys, numbers of queue pairs, delays.
    pub seed: u64,
}

impl NicConfig {
    /// A middling NIC at an address.
    pub const fn new(address: IpAddr) -> NicConfig {
        NicConfig {
            address,
            max_qps: 64,
            max_cqs: 4,
            cq_depth: 4096,
            sq_depth: 128,
            rq_depth: 64,
            max_keys: 256,
            window: 128,
            backs_off: false,
            weakness: Weakness::NONE,
            seed: 0,
        }
    }

    /// The bytes of an arena that such a NIC takes.
    pub const fn bytes(&self) -> usize {
        let qps = Table::<Qp>::capacity_for(self.max_qps);
        Table::<Qp>::bytes(qps)
            + Table::<Wqe>::bytes(qps * Table::<Wqe>::capacity_for(self.sq_depth))
            + Table::<RecvWr>::bytes(qps * Table::<RecvWr>::capacity_for(self.rq_depth))
            + Table::<Resource>::bytes(qps * MAX_RD_ATOMIC as u32)
            + Table::<u64>::bytes(qps.div_ceil(64))
            + Table::<Cq>::bytes(self.max_cqs)
            + Table::<RnicWc>::bytes(
                Table::<Cq>::capacity_for(self.max_cqs) * Table::<RnicWc>::capacity_for(self.cq_depth),
            )
            + Keys::bytes(self.max_keys)
            + Placement::bytes(self.weakness.delay)
            + 4096
    }
}

/// How a NIC is worse than the best. All of it is allowed to real ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weakness {
    /// It does no atomics, neither for its user nor for peers.
    pub no_atomics: bool,
    /// Immediates do not travel with writes.
    pub no_imm: bool,
    /// Bytes of an inline send; at most [`MAX_INLINE`].
    pub max_inline: u32,
    /// Reads and atomics under way; at most [`MAX_RD_ATOMIC`].
    pub max_rd_atomic: u8,
    /// Bytes of a payload at most.
    pub max_mtu: u32,
    /// Written memory is there later, and in some other order.
    pub delay: Option<Delay>,
    /// Fields of failed completions that mean nothing are full of rubbish.
    pub poison: bool,
}

impl Weakness {
    /// As good as it can be.
    pub const NONE: Weakness = Weakness {
        no_atomics: false,
        no_imm: false,
        max_inline: MAX_INLINE as u32,
        max_rd_atomic: MAX_RD_ATOMIC,
        max_mtu: MAX_MTU as u32,
        delay: None,
        poison: false,
    };
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// What happened so far.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters { $($(#[doc = $doc])+ pub $name: u64,)+ }

        impl Counters {
            /// Names and values.
            pub fn all(&self) -> [(&'static str, u64); [$(stringify!($name)),+].len()] {
                [$((stringify!($name), self.$name),)+]
            }
        }
    };
}

counters! {
    /// Packets sent.
    sent,
    /// Packets that came, of whatever kind.
    received,
    /// They were not of RoCEv2, or not for this NIC.
    malformed,
    /// Their ICRC was wrong.
    bad_icrc,
    /// They named no queue pair that listens, or came from another port than its peer's.
    no_qp,
    /// Requests that had been done already.
    duplicates,
    /// Requests behind a gap.
    out_of_sequence,
    /// Answers to nothing.
    stale_responses,
    /// Negative acknowledgements sent: requests are missing.
    nak_sequence,
    /// The request makes no sense.
    nak_invalid,
    /// The key does not allow it.
    nak_access,
    /// The NIC cannot.
    nak_operational,
    /// No receive is posted.
    nak_rnr,
    /// Packets sent again.
    resent,
    /// Times that nothing came in time.
    timeouts,
    /// Queue pairs that failed.
    qp_errors,
}

macro_rules! defects {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Something that is wrong with the NIC, so that tests can show that they would find it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Defect { $($(#[doc = $doc])+ $name,)+ }

        impl Defect {
            /// All of them.
            pub const ALL: &'static [Defect] = &[$(Defect::$name,)+];
        }
    };
}

defects! {
    /// Requests that were done already are done again.
    NoDuplicateDetection,
    /// An atomic that comes again is answered with the word as it is now.
    AtomicAnswerNotKept,
    /// The second half of a message is numbered one too high.
    PsnOffByOne,
    /// A request behind a gap is taken as if nothing were missing.
    GapsIgnored,
    /// A request is acknowledged that has not come yet.
    AckTooEarly,
    /// The last bytes of a packet whose length is no multiple of four are not placed.
    PaddingEatsPayload,
    /// What is sent again starts one packet too late.
    ResendsTooLate,
    /// An acknowledgement completes a read that was not answered.
    AckCompletesReads,
    /// The ICRC is not looked at.
    IcrcIgnored,
    /// The result of an atomic is that of the one before it.
    OldAtomicResult,
    /// A write is allowed one byte behind the end of its memory. No honest peer asks for that; fuzzing does.
    BoundsOffByOne,
}

struct Cq {
    is_used: bool,
    /// Entries ever written and taken.
    written: u32,
    taken: u32,
    has_overrun: bool,
}

/// A packet to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Its length.
    pub len: usize,
    /// The port it goes to.
    pub to: IpAddr,
}

/// A NIC.
pub struct Nic {
    config: NicConfig,
    qps: Table<Qp>,
    sq: Table<Wqe>,
    rq: Table<RecvWr>,
    resources: Table<Resource>,
    /// A bit for each queue pair that may have something to send.
    active: Table<u64>,
    /// Where the next search for one starts.
    turn: u32,
    cqs: Table<Cq>,
    cqes: Table<RnicWc>,
    keys: Keys,
    placement: Placement,
    events: Deque<AsyncEvent, EVENTS>,
    random: Random,
    next_timeout: u64,
    next_pd: u32,
    is_port_up: bool,
    defect: Option<Defect>,
    /// What happened so far.
    pub counters: Counters,
    _arena: Arena,
}

// SAFETY: the tables lie in its own arena; the pointers in work requests and registrations name what their posters keep
// valid, whichever thread polls.
unsafe impl Send for Nic {}

impl Nic {
    /// A NIC whose tables lie in `arena`.
    ///
    /// # Errors
    /// The arena has fewer than [`NicConfig::bytes`].
    pub fn new(mut arena: Arena, config: NicConfig) -> Result<Nic, ArenaFull> {
        let mut random = Random::new(config.seed);
        let qps = Table::<Qp>::capacity_for(config.max_qps);
        let cqs = Table::<Cq>::capacity_for(config.max_cqs);
        let window = config.window.clamp(1, 1 << 20);
        let config = NicConfig {
            sq_depth: Table::<Wqe>::capacity_for(config.sq_depth),
            rq_depth: Table::<RecvWr>::capacity_for(config.rq_depth),
            cq_depth: Table::<RnicWc>::capacity_for(config.cq_depth),
            window,
            ..config
        };
        let no_receive = RecvWr { wr_id: 0, local: core::ptr::null_mut(), len: 0, lkey: 0 };
        // SAFETY: the arena is kept beside the tables and dropped after them (fields are dropped in their order).
        unsafe {
            Ok(Nic {
                qps: arena.table(qps, |_| Qp { generation: random.any_u32(), ..Qp::new() })?,
                sq: arena.table(qps * config.sq_depth, |_| Wqe::EMPTY)?,
                rq: arena.table(qps * config.rq_depth, |_| no_receive)?,
                resources: arena.table(qps * u32::from(MAX_RD_ATOMIC), |_| Resource::NONE)?,
                active: arena.table(qps.div_ceil(64), |_| 0)?,
                turn: 0,
                cqs: arena.table(cqs, |_| Cq { is_used: false, written: 0, taken: 0, has_overrun: false })?,
                cqes: arena.table(cqs * config.cq_depth, |_| RnicWc::EMPTY)?,
                keys: Keys::new(&mut arena, config.max_keys, &mut random)?,
                placement: Placement::new(&mut arena, config.weakness.delay)?,
                events: Deque::new(),
                random,
                next_timeout: NEVER,
                next_pd: 0,
                is_port_up: true,
                defect: None,
                counters: Counters::default(),
                config,
                _arena: arena,
            })
        }
    }

    /// What it was made with; depths as they became.
    pub fn config(&self) -> &NicConfig {
        &self.config
    }

    /// Puts something wrong into it. Does nothing without the feature `defects`.
    pub fn set_defect(&mut self, defect: Option<Defect>) {
        self.defect = defect;
    }

    #[inline(always)]
    fn has(&self, defect: Defect) -> bool {
        cfg!(feature = "defects") && self.defect == Some(defect)
    }

    /// A new protection domain.
    pub fn alloc_pd(&mut self) -> Pd {
        self.next_pd += 1;
        Pd(self.next_pd)
    }

    /// Registers memory that peers address from `iova` on (ibv_reg_mr_iova(3)); none if all keys are taken, or peers get a right that needs `LOCAL_WRITE`.
    ///
    /// # Safety
    /// The memory is valid until `dereg_mr` returned or the NIC was dropped; if peers get rights it is not reached by Rust
    /// references meanwhile.
    pub unsafe fn reg_mr(&mut self, pd: Pd, base: *mut u8, len: usize, iova: u64, access: MrAccess) -> Option<MrKeys> {
        let needs = MrAccess::REMOTE_WRITE | MrAccess::REMOTE_ATOMIC;
        if access.intersects(needs) && !access.contains(MrAccess::LOCAL_WRITE) {
            return None;
        }
        self.keys.register(pd, base, len, iova, access, &mut self.random)
    }

    /// Ends a registration and the windows bound to it; false if there is none. Nothing touches the memory afterwards.
    pub fn dereg_mr(&mut self, lkey: u32) -> bool {
        // What was accepted gets there first.
        self.placement.finish_all();
        self.keys.deregister(lkey)
    }

    /// A memory window of type 2, unbound: its key, whose low byte is to be another at each bind. None if all keys are
    /// taken.
    pub fn alloc_mw(&mut self, pd: Pd) -> Option<u32> {
        self.keys.add_window(pd, &mut self.random)
    }

    /// Gives a memory window up; false if there is none.
    pub fn dealloc_mw(&mut self, rkey: u32) -> bool {
        self.placement.finish_all();
        self.keys.remove_window(rkey)
    }

    /// A completion queue; none if all are taken.
    pub fn create_cq(&mut self) -> Option<u32> {
        let place = self.cqs.iter().position(|cq| !cq.is_used)? as u32;
        *self.cqs.at_mut(place) = Cq { is_used: true, written: 0, taken: 0, has_overrun: false };
        Some(place)
    }

    /// A queue pair in state reset: its number. None if all are taken.
    pub fn create_qp(&mut self, pd: Pd, send_cq: u32, recv_cq: u32) -> Option<u32> {
        let place = self.qps.iter().position(|qp| qp.number == 0)? as u32;
        let capacity = self.qps.capacity();
        let qp = self.qps.at_mut(place);
        // A packet to an earlier one of this place finds another number. 0 and 1 are of the subnet's management.
        let number = loop {
            qp.generation = qp.generation.wrapping_add(1);
            let number = qp.generation.wrapping_mul(capacity).wrapping_add(place) & psn::MASK;
            if number > 1 {
                break number;
            }
        };
        *qp = Qp { number, generation: qp.generation, pd, send_cq, recv_cq, ..Qp::new() };
        Some(number)
    }

    /// Ends a queue pair; false if there is none. Nothing of it completes any more, nothing touches the memory of its work
    /// requests, and its completions that were not polled yet are gone.
    pub fn destroy_qp(&mut self, qp: u32) -> bool {
        let Some(place) = self.place(qp) else { return false };
        self.placement.finish_qp(qp);
        self.keys.unbind_all(qp);
        let generation = self.qps.at(place).generation;
        *self.qps.at_mut(place) = Qp { generation, ..Qp::new() };
        self.drop_completions(qp);
        true
    }

    fn drop_completions(&mut self, qp: u32) {
        for cq in 0..self.cqs.capacity() {
            let (mut from, end) = (self.cqs.at(cq).taken, self.cqs.at(cq).written);
            let mut to = from;
            while from != end {
                let wc = *self.cqes.at(self.cqe_place(cq, from));
                if wc.qp != qp {
                    let place = self.cqe_place(cq, to);
                    *self.cqes.at_mut(place) = wc;
                    to = to.wrapping_add(1);
                }
                from = from.wrapping_add(1);
            }
            self.cqs.at_mut(cq).written = to;
        }
    }

    fn cqe_place(&self, cq: u32, position: u32) -> u32 {
        (cq & (self.cqs.capacity() - 1)) * self.config.cq_depth + (position & (self.config.cq_depth - 1))
    }

    /// The place of a queue pair in the table.
    #[inline(always)]
    fn place(&self, qp: u32) -> Option<u32> {
        let place = qp & (self.qps.capacity() - 1);
        (qp != 0 && self.qps.at(place).number == qp).then_some(place)
    }

    /// The state of a queue pair.
    pub fn query_qp(&self, qp: u32) -> Option<QpState> {
        self.place(qp).map(|place| self.qps.at(place).state)
    }

    /// Takes a queue pair to another state.
    pub fn modify_qp(&mut self, qp: u32, transition: Transition) -> Result<(), ModifyError> {
        use QpState as S;
        let place = self.place(qp).ok_or(ModifyError::NoSuchQp)?;
        let weakness = self.config.weakness;
        let from = self.qps.at(place).state;
        let entry = self.qps.at_mut(place);
        match (from, transition) {
            (_, Transition::Reset) => {
                self.placement.finish_qp(qp);
                self.keys.unbind_all(qp);
                self.qps.at_mut(place).reset();
                self.drop_completions(qp);
            }
            (_, Transition::Error) => self.fail(place, None),
            (S::Reset | S::Init, Transition::Init { access }) => {
                entry.state = S::Init;
                entry.access = access;
            }
            (S::Init, Transition::ReadyToReceive { peer, dest_qp, mtu, rq_psn, max_dest_rd_atomic, min_rnr_timer }) => {
                if !matches!(mtu, 256 | 512 | 1024 | 2048 | 4096) || mtu > weakness.max_mtu {
                    return Err(ModifyError::Attribute("mtu"));
                }
                if max_dest_rd_atomic > weakness.max_rd_atomic.min(MAX_RD_ATOMIC) {
                    return Err(ModifyError::Attribute("max_dest_rd_atomic"));
                }
                if min_rnr_timer > 31 {
                    return Err(ModifyError::Attribute("min_rnr_timer"));
                }
                (entry.peer, entry.dest_qp, entry.mtu) = (peer, dest_qp & psn::MASK, mtu);
                (entry.max_dest_rd, entry.rnr_timer) = (max_dest_rd_atomic, min_rnr_timer);
                entry.resp.start(rq_psn);
                entry.state = S::ReadyToReceive;
            }
            (S::ReadyToReceive, Transition::ReadyToSend { sq_psn, timeout, retry_count, rnr_retry, max_rd_atomic }) => {
                if timeout > 31 || retry_count > 7 || rnr_retry > 7 {
                    return Err(ModifyError::Attribute("timeout, retry_count or rnr_retry"));
                }
                if max_rd_atomic > weakness.max_rd_atomic.min(MAX_RD_ATOMIC) {
                    return Err(ModifyError::Attribute("max_rd_atomic"));
                }
                entry.timeout_ns = if timeout == 0 { NEVER } else { 4096 << timeout };
                (entry.retry_count, entry.rnr_retry, entry.max_rd) = (retry_count, rnr_retry, max_rd_atomic);
                entry.req.start(sq_psn, retry_count, rnr_retry);
                entry.state = S::ReadyToSend;
                self.activate(place);
            }
            (S::SendQueueDrain, Transition::ReadyToSend { .. }) => {
                entry.state = S::ReadyToSend;
                self.activate(place);
            }
            (S::ReadyToSend, Transition::SendQueueDrain) => {
                entry.state = S::SendQueueDrain;
                self.look_drained(place);
            }
            (from, _) => return Err(ModifyError::State { from }),
        }
        Ok(())
    }

    /// Posts a send (ibv_post_send(3)). In error it is flushed.
    ///
    /// # Safety
    /// `local` is valid for `len` bytes until its completion, or a later one of its queue, was polled, or the queue pair
    /// was destroyed or reset.
    pub unsafe fn post_send(&mut self, qp: u32, wr: &SendWr) -> Result<(), PostError> {
        let place = self.place(qp).ok_or(PostError::NoSuchQp)?;
        let weakness = self.config.weakness;
        let entry = self.qps.at(place);
        if !entry.can_send() && entry.state != QpState::Error {
            return Err(PostError::State);
        }
        if entry.req.posted.wrapping_sub(entry.req.done) == self.config.sq_depth {
            return Err(PostError::Full);
        }
        if wr.len > MAX_MESSAGE {
            return Err(PostError::TooLong);
        }
        let is_write_imm = wr.flags.contains(SendFlags::IMM) && wr.op == SendOp::Write;
        let is_atomic = matches!(wr.op, SendOp::CompareSwap | SendOp::FetchAdd);
        if (weakness.no_imm && is_write_imm) || (weakness.no_atomics && is_atomic) {
            return Err(PostError::NotSupported);
        }
        if is_atomic && (!wr.remote.is_multiple_of(8) || wr.len != 8) {
            return Err(PostError::Misaligned);
        }
        let max_rd = entry.max_rd;
        if max_rd == 0 && entry.can_send() && (is_atomic || wr.op == SendOp::Read) {
            return Err(PostError::NotSupported);
        }
        let is_inline = wr.flags.contains(SendFlags::INLINE);
        let can = matches!(wr.op, SendOp::Send | SendOp::SendInvalidate | SendOp::Write);
        if is_inline && (!can || wr.len > weakness.max_inline.min(MAX_INLINE as u32)) {
            return Err(PostError::TooMuchInline);
        }
        let at = self.sq_place(place, entry.req.posted);
        // Written in its place, and no more of it than is used.
        let wqe = self.sq.at_mut(at);
        wqe.wr = *wr;
        if is_inline {
            // SAFETY: the caller's promise; the length was checked just now.
            unsafe { verbring_sys::copy::copy(wqe.inline.as_mut_ptr(), wr.local, wr.len as usize) };
        }
        let entry = self.qps.at_mut(place);
        entry.req.posted = entry.req.posted.wrapping_add(1);
        if entry.state == QpState::Error {
            self.flush(place);
        } else {
            self.activate(place);
        }
        Ok(())
    }

    /// Posts a receive (ibv_post_recv(3)). In error it is flushed.
    ///
    /// # Safety
    /// As `post_send`.
    pub unsafe fn post_recv(&mut self, qp: u32, wr: &RecvWr) -> Result<(), PostError> {
        let place = self.place(qp).ok_or(PostError::NoSuchQp)?;
        let entry = self.qps.at(place);
        if entry.state == QpState::Reset {
            return Err(PostError::State);
        }
        if entry.resp.receives() == self.config.rq_depth {
            return Err(PostError::Full);
        }
        let at = self.rq_place(place, entry.resp.posted);
        *self.rq.at_mut(at) = *wr;
        let entry = self.qps.at_mut(place);
        entry.resp.posted = entry.resp.posted.wrapping_add(1);
        if entry.state == QpState::Error {
            self.flush(place);
        } else if entry.can_receive() && entry.resp.tell_credits() {
            self.activate(place);
        }
        Ok(())
    }

    // Depths are powers of two, and positions are masked: a remainder by what the compiler does not know can panic.

    #[inline(always)]
    fn sq_place(&self, qp: u32, position: u32) -> u32 {
        qp * self.config.sq_depth + (position & (self.config.sq_depth - 1))
    }

    #[inline(always)]
    fn rq_place(&self, qp: u32, position: u32) -> u32 {
        qp * self.config.rq_depth + (position & (self.config.rq_depth - 1))
    }

    fn activate(&mut self, place: u32) {
        *self.active.at_mut(place / 64) |= 1 << (place % 64);
    }

    /// Takes completions (ibv_poll_cq(3)): how many.
    pub fn poll_cq(&mut self, cq: u32, wcs: &mut [RnicWc]) -> usize {
        let mut count = 0;
        for to in wcs {
            let entry = self.cqs.at(cq);
            if entry.taken == entry.written {
                break;
            }
            let place = self.cqe_place(cq, entry.taken);
            *to = *self.cqes.at(place);
            let entry = self.cqs.at_mut(cq);
            entry.taken = entry.taken.wrapping_add(1);
            count += 1;
        }
        count
    }

    /// The oldest event that was not asked for yet.
    pub fn async_event(&mut self) -> Option<AsyncEvent> {
        self.events.pop_front()
    }

    fn event(&mut self, event: AsyncEvent) {
        if self.events.is_full() {
            self.events.pop_front();
        }
        let _ = self.events.push_back(event);
    }

    /// The cable is in, or out: while it is out nothing is sent or heard.
    pub fn set_port(&mut self, is_up: bool) {
        if core::mem::replace(&mut self.is_port_up, is_up) != is_up {
            self.event(AsyncEvent::Port { is_up });
        }
    }

    fn complete(&mut self, cq: u32, wc: RnicWc) {
        let mut wc = wc;
        if wc.status != WcStatus::Success && self.config.weakness.poison {
            (wc.byte_len, wc.imm) = (0xdead_dead, Some(0xdead_dead));
            wc.op = if wc.op == WcOp::Send { WcOp::RecvWriteImm } else { WcOp::Send };
        }
        let entry = self.cqs.at(cq);
        if entry.written.wrapping_sub(entry.taken) == self.config.cq_depth {
            // An overrun queue is lost (ibv_create_cq(3)); it is told once.
            if !core::mem::replace(&mut self.cqs.at_mut(cq).has_overrun, true) {
                self.event(AsyncEvent::CqError { cq });
            }
            return;
        }
        let place = self.cqe_place(cq, entry.written);
        *self.cqes.at_mut(place) = wc;
        let entry = self.cqs.at_mut(cq);
        entry.written = entry.written.wrapping_add(1);
    }

    /// Puts a queue pair into error. The oldest send that is not done is the cause, if there is one, and the rest is
    /// flushed.
    fn fail(&mut self, place: u32, cause: Option<WcStatus>) {
        let qp = self.qps.at_mut(place);
        if qp.state == QpState::Error {
            return;
        }
        qp.state = QpState::Error;
        qp.req.timer = NEVER;
        self.counters.qp_errors += u64::from(cause.is_some());
        if let Some(status) = cause {
            self.complete_send(place, status);
        }
        self.flush(place);
    }

    /// Ends everything that is posted.
    fn flush(&mut self, place: u32) {
        while self.qps.at(place).req.done != self.qps.at(place).req.posted {
            self.complete_send(place, WcStatus::WrFlushErr);
        }
        while self.qps.at(place).resp.receives() != 0 {
            self.complete_recv(place, WcStatus::WrFlushErr, WcOp::Recv, 0, None);
        }
    }

    /// The oldest send is over.
    fn complete_send(&mut self, place: u32, status: WcStatus) {
        let (cq, number, done) = {
            let qp = self.qps.at(place);
            (qp.send_cq, qp.number, qp.req.done)
        };
        let SendWr { wr_id, flags, len: byte_len, .. } = self.sq.at(self.sq_place(place, done)).wr;
        self.qps.at_mut(place).req.done = done.wrapping_add(1);
        if status != WcStatus::Success || flags.contains(SendFlags::SIGNALED) {
            let vendor_err = status as u32;
            let wc = RnicWc { wr_id, status, op: WcOp::Send, qp: number, byte_len, imm: None, vendor_err };
            self.complete(cq, wc);
        }
    }

    /// The oldest receive is over.
    fn complete_recv(&mut self, place: u32, status: WcStatus, op: WcOp, byte_len: u32, imm: Option<u32>) {
        let (cq, number, taken) = {
            let qp = self.qps.at(place);
            (qp.recv_cq, qp.number, qp.resp.taken)
        };
        let at = self.rq_place(place, taken);
        let wr_id = self.rq.at(at).wr_id;
        self.qps.at_mut(place).resp.taken = taken.wrapping_add(1);
        let wc = RnicWc { wr_id, status, op, qp: number, byte_len, imm, vendor_err: status as u32 };
        self.complete(cq, wc);
    }

    /// Takes a packet from the wire. Whatever it is, it does no harm.
    pub fn handle_packet(&mut self, now: u64, ip: &Ip, bytes: &[u8]) {
        self.counters.received += 1;
        if !self.is_port_up {
            return;
        }
        let Some((header, payload)) = Header::parse(bytes) else {
            self.counters.malformed += 1;
            return;
        };
        if ip.destination != self.config.address || payload.len() > MAX_MTU {
            self.counters.malformed += 1;
            return;
        }
        if !self.has(Defect::IcrcIgnored) && !ip.is_intact(bytes) {
            self.counters.bad_icrc += 1;
            return;
        }
        // The low 15 bits name the partition (IBTA volume 1, 10.9.3).
        let is_partition = (header.pkey ^ crate::packet::DEFAULT_PKEY) & 0x7fff == 0;
        let Some(place) = self.place(header.dest_qp).filter(|_| is_partition) else {
            self.counters.no_qp += 1;
            return;
        };
        if self.qps.at(place).peer != ip.source {
            self.counters.no_qp += 1;
            return;
        }
        self.placement.advance(now);
        if header.opcode.is_response() {
            self.handle_response(now, place, &header, payload);
        } else {
            self.handle_request(now, place, &header, payload);
        }
    }

    /// Writes the next packet to be sent to `buffer`, which has [`MAX_PACKET`](crate::packet::MAX_PACKET) bytes; none if
    /// there is nothing to send. Queue pairs take turns.
    pub fn poll_transmit(&mut self, now: u64, buffer: &mut [u8]) -> Option<Transmit> {
        if !self.is_port_up {
            return None;
        }
        let words = self.active.capacity();
        // One more than there are words: the one that it starts in is looked at from both ends.
        for step in 0..=words {
            let word = (self.turn / 64 + step) & (words - 1);
            let skip = if step == 0 { self.turn % 64 } else { 0 };
            let mut bits = *self.active.at(word) & u64::MAX << skip;
            while bits != 0 {
                let place = word * 64 + bits.trailing_zeros();
                bits &= bits - 1;
                if let Some(len) = self.transmit_of(now, place, buffer) {
                    self.counters.sent += 1;
                    self.turn = (place + 1) & (self.qps.capacity() - 1);
                    return Some(Transmit { len, to: self.qps.at(place).peer });
                }
                *self.active.at_mut(word) &= !(1 << (place % 64));
            }
        }
        None
    }

    /// Answers go before requests: the peer waits for them.
    fn transmit_of(&mut self, now: u64, place: u32, buffer: &mut [u8]) -> Option<usize> {
        if self.qps.at(place).number == 0 {
            return None;
        }
        self.transmit_response(place, buffer).or_else(|| self.transmit_request(now, place, buffer))
    }

    fn seal(&self, place: u32, header: &Header, payload: usize, buffer: &mut [u8]) -> Option<usize> {
        header.seal(buffer, payload, &Ip::new(self.config.address, self.qps.at(place).peer))
    }

    /// When `handle_timeout` has something to do; `u64::MAX` if nothing is waited for.
    pub fn poll_timeout(&self) -> u64 {
        self.next_timeout.min(self.placement.next_due())
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: u64) {
        self.placement.advance(now);
        if now < self.next_timeout {
            return;
        }
        self.next_timeout = NEVER;
        for place in 0..self.qps.capacity() {
            let qp = self.qps.at(place);
            if qp.number == 0 || !qp.can_send() {
                continue;
            }
            if now >= qp.req.wait_until {
                self.qps.at_mut(place).req.wait_until = 0;
                self.activate(place);
            }
            if now >= self.qps.at(place).req.timer {
                self.timed_out(now, place);
            }
            let req = &self.qps.at(place).req;
            let waits = if req.wait_until == 0 { NEVER } else { req.wait_until };
            self.next_timeout = self.next_timeout.min(req.timer).min(waits);
        }
    }

    /// Everything that was accepted is in memory: what a flush of caches would do.
    pub fn finish_placement(&mut self) {
        self.placement.finish_all();
    }
}

/// Packets of a message. An MTU is a power of two; a division could panic.
fn packets_of(len: u32, mtu: u32) -> u32 {
    let full = (u64::from(len) + u64::from(mtu.saturating_sub(1))) >> mtu.trailing_zeros();
    (full as u32).max(1)
}

impl Opcode {
    /// The opcode of a packet of a message: of `index` out of `count`, with an immediate or a key to invalidate.
    fn of_write(index: u32, count: u32, has_imm: bool) -> Opcode {
        match (index == 0, index + 1 == count, has_imm) {
            (true, true, false) => Opcode::WriteOnly,
            (true, true, true) => Opcode::WriteOnlyImm,
            (true, false, _) => Opcode::WriteFirst,
            (false, false, _) => Opcode::WriteMiddle,
            (false, true, false) => Opcode::WriteLast,
            (false, true, true) => Opcode::WriteLastImm,
        }
    }

    fn of_send(index: u32, count: u32, has_imm: bool, invalidates: bool) -> Opcode {
        match (index == 0, index + 1 == count) {
            (true, true) if invalidates => Opcode::SendOnlyInvalidate,
            (true, true) if has_imm => Opcode::SendOnlyImm,
            (true, true) => Opcode::SendOnly,
            (true, false) => Opcode::SendFirst,
            (false, false) => Opcode::SendMiddle,
            (false, true) if invalidates => Opcode::SendLastInvalidate,
            (false, true) if has_imm => Opcode::SendLastImm,
            (false, true) => Opcode::SendLast,
        }
    }

    fn of_read(index: u32, count: u32) -> Opcode {
        match (index == 0, index + 1 == count) {
            (true, true) => Opcode::ReadOnly,
            (true, false) => Opcode::ReadFirst,
            (false, false) => Opcode::ReadMiddle,
            (false, true) => Opcode::ReadLast,
        }
    }
}
