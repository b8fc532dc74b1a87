//! The initiator's half of a queue pair: cuts messages into packets, and has them sent again until they are answered.

use verbring_sys::copy;
use verbring_sys::rnic::{AsyncEvent, MrAccess, SendFlags, SendOp, WcStatus};

use super::fifo::Fifo;
use super::qp::{Qp, QpState, Wqe};
use super::{Defect, MAX_RD_ATOMIC, NEVER, Nic, packets_of};
use crate::packet::{Header, Nak, Opcode, Syndrome, credits_of, rnr_ns};
use crate::psn;

/// Packets that one request of a read asks for at most; a longer read is several requests.
const READ_PACKETS: u32 = 32;

/// A read or atomic that was asked for and is not answered.
#[derive(Clone, Copy, Debug)]
struct Asked {
    first: u64,
    packets: u32,
}

pub(super) struct Requester {
    /// Work requests ever posted, numbered, begun to be sent to their end, and completed; in this order the larger first.
    pub(super) posted: u32,
    numbered: u32,
    next: u32,
    pub(super) done: u32,
    /// The number of the next packet of a new message.
    next_psn: u64,
    /// The next packet to be sent, and the one behind the last that ever was.
    cursor: u64,
    sent: u64,
    /// The oldest packet that is not answered.
    unanswered: u64,
    asked: Fifo<Asked, { MAX_RD_ATOMIC as usize }>,
    /// Packets from here on are worth asking for an acknowledgement again.
    ask_ack_from: u64,
    retries_left: u8,
    rnr_left: u8,
    /// When what was sent is taken for lost.
    pub(super) timer: u64,
    /// Nothing is sent until then: the peer had no receive. 0: nothing to wait for.
    pub(super) wait_until: u64,
    /// The packet that an answer was found to be missing for: not to be found again before there is progress.
    gap_at: u64,
    /// Messages ever begun.
    messages: u64,
    /// The last message that the peer has a receive for, if it tells.
    credit: Option<u64>,
}

impl Requester {
    pub(super) const fn new() -> Requester {
        Requester {
            posted: 0,
            numbered: 0,
            next: 0,
            done: 0,
            next_psn: 0,
            cursor: 0,
            sent: 0,
            unanswered: 0,
            asked: Fifo::new(),
            ask_ack_from: 0,
            retries_left: 0,
            rnr_left: 0,
            timer: NEVER,
            wait_until: 0,
            gap_at: 0,
            messages: 0,
            credit: None,
        }
    }

    pub(super) fn start(&mut self, psn: u32, retry_count: u8, rnr_retry: u8) {
        let first = psn::start(psn);
        (self.next_psn, self.cursor, self.sent, self.unanswered) = (first, first, first, first);
        (self.ask_ack_from, self.retries_left, self.rnr_left) = (first, retry_count, rnr_retry);
    }

    fn under_way(&self) -> u64 {
        self.cursor.saturating_sub(self.unanswered)
    }
}

fn is_read_or_atomic(wqe: &Wqe) -> bool {
    matches!(wqe.wr.op, SendOp::Read | SendOp::CompareSwap | SendOp::FetchAdd)
}

fn is_local(wqe: &Wqe) -> bool {
    matches!(wqe.wr.op, SendOp::BindWindow | SendOp::LocalInvalidate)
}

/// Whether a message uses up a receive of the peer.
fn needs_receive(wqe: &Wqe) -> bool {
    match wqe.wr.op {
        SendOp::Send | SendOp::SendInvalidate => true,
        SendOp::Write => wqe.wr.flags.contains(SendFlags::IMM),
        _ => false,
    }
}

impl Nic {
    fn wqe(&self, place: u32, position: u32) -> &Wqe {
        self.sq.at(self.sq_place(place, position))
    }

    /// The next packet of a queue pair's requests.
    pub(super) fn transmit_request(&mut self, now: u64, place: u32, buffer: &mut [u8]) -> Option<usize> {
        loop {
            let qp = self.qps.at(place);
            if !qp.can_send() || qp.req.next == qp.req.posted || qp.req.wait_until > now {
                return None;
            }
            let is_local = is_local(self.wqe(place, qp.req.next));
            if qp.req.next == qp.req.numbered && !self.number(place) {
                return None;
            }
            if is_local {
                // Done when it was numbered.
                let req = &mut self.qps.at_mut(place).req;
                req.next = req.next.wrapping_add(1);
                self.retire(place);
                continue;
            }
            return self.send_packet(now, place, buffer);
        }
    }

    /// Begins a work request: gives it its packet numbers. False if it has to wait, or failed.
    fn number(&mut self, place: u32) -> bool {
        let qp = self.qps.at(place);
        let req = &qp.req;
        let at = self.sq_place(place, req.numbered);
        let wqe = self.sq.at(at);
        let must_wait = qp.state == QpState::SendQueueDrain
            || (wqe.wr.flags.contains(SendFlags::FENCE) && !req.asked.is_empty())
            // Beyond what the peer has receives for, one message may try (IBTA volume 1, 9.7.7.2.2).
            || (needs_receive(wqe) && req.credit.is_some_and(|c| req.messages >= c) && req.under_way() != 0);
        if must_wait {
            return false;
        }
        let mut packets = 0;
        if !is_local(wqe) {
            packets = if matches!(wqe.wr.op, SendOp::CompareSwap | SendOp::FetchAdd) {
                1
            } else {
                packets_of(wqe.wr.len, qp.mtu)
            };
        }
        let req = &mut self.qps.at_mut(place).req;
        req.numbered = req.numbered.wrapping_add(1);
        let first = req.next_psn;
        req.next_psn += u64::from(packets);
        req.messages += u64::from(packets != 0);
        let message = req.messages;
        let entry = self.sq.at_mut(at);
        (entry.first, entry.packets, entry.message) = (first, packets, message);
        packets != 0 || self.do_local(place, at)
    }

    /// What happens in this NIC alone. False if it failed, and with it the queue pair.
    fn do_local(&mut self, place: u32, at: u32) -> bool {
        let (number, pd) = (self.qps.at(place).number, self.qps.at(place).pd);
        let wr = &self.sq.at(at).wr;
        let done = match wr.op {
            SendOp::BindWindow => {
                let range = (wr.local as u64, u64::from(wr.len));
                self.keys.bind(wr.rkey, number, pd, wr.lkey, range, wr.access)
            }
            _ => {
                self.placement.finish_all();
                self.keys.invalidate(wr.rkey, number)
            }
        };
        if done.is_err() {
            let position = self.qps.at(place).req.numbered.wrapping_sub(1);
            self.fail_at(place, position, WcStatus::MwBindErr);
        }
        done.is_ok()
    }

    /// A work request cannot be done. Those before it that are not answered are cut off with it.
    fn fail_at(&mut self, place: u32, position: u32, status: WcStatus) {
        // The first one that ends is the cause of all: an earlier one has an unknown fate.
        let is_oldest = self.qps.at(place).req.done == position;
        let cause = if is_oldest { status } else { WcStatus::RetryExcErr };
        if matches!(status, WcStatus::LocProtErr | WcStatus::BadRespErr) {
            let qp = self.qps.at(place).number;
            self.event(AsyncEvent::QpFatal { qp });
        }
        self.fail(place, Some(cause));
    }

    /// Writes the packet at the cursor.
    fn send_packet(&mut self, now: u64, place: u32, buffer: &mut [u8]) -> Option<usize> {
        let window = u64::from(self.config.window);
        let qp = self.qps.at(place);
        let req = &qp.req;
        let wqe = self.wqe(place, req.next);
        let (end, is_read_or_atomic) = (wqe.end(), is_read_or_atomic(wqe));
        let room = window.saturating_sub(req.under_way());
        if room == 0 {
            return None;
        }
        let (index, wr) = ((req.cursor - wqe.first) as u32, &wqe.wr);
        let offset = index * qp.mtu;
        let mut header = Header::new(Opcode::Acknowledge, qp.dest_qp, psn::wire(req.cursor));
        if self.has(Defect::PsnOffByOne) && wqe.packets > 2 && index >= wqe.packets / 2 {
            header.psn = psn::wire(req.cursor + 1);
        }
        (header.rkey, header.imm) = (wr.rkey, wr.imm);
        header.address = wr.remote;
        let (mut packets, mut payload) = (1, 0);
        if is_read_or_atomic {
            if req.asked.len() >= usize::from(qp.max_rd) {
                return None;
            }
            match wr.op {
                SendOp::Read => {
                    packets = (wqe.packets - index).min(READ_PACKETS);
                    // All at once or not at all: small requests would take the places of long ones.
                    if u64::from(packets) > room && req.under_way() != 0 {
                        return None;
                    }
                    header.opcode = Opcode::ReadRequest;
                    header.address = wr.remote.wrapping_add(u64::from(offset));
                    header.length = (wr.len - offset).min(packets * qp.mtu);
                }
                SendOp::CompareSwap => {
                    header.opcode = Opcode::CompareSwap;
                    (header.value, header.compare) = (wr.swap_add, wr.compare);
                }
                _ => {
                    header.opcode = Opcode::FetchAdd;
                    header.value = wr.swap_add;
                }
            }
        } else {
            let (is_last, has_imm) = (index + 1 == wqe.packets, wr.flags.contains(SendFlags::IMM));
            header.opcode = match wr.op {
                SendOp::Write => Opcode::of_write(index, wqe.packets, has_imm),
                _ => Opcode::of_send(index, wqe.packets, has_imm, wr.op == SendOp::SendInvalidate),
            };
            header.length = wr.len;
            header.solicited = is_last && wr.flags.contains(SendFlags::SOLICITED);
            header.ack_request = is_last || req.cursor >= req.ask_ack_from;
            payload = (wr.len - offset).min(qp.mtu) as usize;
            if !self.load_payload(place, wqe, offset, payload, header.opcode.header_bytes(), buffer) {
                let position = self.qps.at(place).req.next;
                self.fail_at(place, position, WcStatus::LocProtErr);
                return None;
            }
        }
        let len = self.seal(place, &header, payload, buffer)?;
        let quarter = window.div_ceil(4);
        let req = &mut self.qps.at_mut(place).req;
        if is_read_or_atomic {
            req.asked.push_back(Asked { first: req.cursor, packets });
        }
        if header.ack_request {
            req.ask_ack_from = req.cursor + quarter;
        }
        let resent = req.cursor < req.sent;
        req.cursor += u64::from(packets);
        req.sent = req.sent.max(req.cursor);
        if req.cursor == end {
            req.next = req.next.wrapping_add(1);
        }
        if req.timer == NEVER {
            self.start_timer(now, place);
        }
        self.counters.resent += u64::from(resent);
        Some(len)
    }

    /// Brings the payload of a packet to its place in `buffer`. False if the local key does not allow it.
    fn load_payload(&self, place: u32, wqe: &Wqe, offset: u32, len: usize, at: usize, buffer: &mut [u8]) -> bool {
        let Some(to) = buffer.get_mut(at..at + len) else { return false };
        let wr = &wqe.wr;
        if wr.flags.contains(SendFlags::INLINE) {
            let from = offset as usize;
            return wqe.inline.get(from..from + len).map(|bytes| to.copy_from_slice(bytes)).is_some();
        }
        let from = (wr.local as u64).wrapping_add(u64::from(offset));
        let pd = self.qps.at(place).pd;
        if self.keys.check_local(wr.lkey, pd, from, len as u64, MrAccess::empty()).is_err() {
            return false;
        }
        // SAFETY: registered, and valid until the work request ends; `to` has `len` bytes.
        unsafe { copy::copy(to.as_mut_ptr(), from as *const u8, len) };
        true
    }

    fn start_timer(&mut self, now: u64, place: u32) {
        let qp = self.qps.at_mut(place);
        let tries = if self.config.backs_off { qp.retry_count - qp.req.retries_left } else { 0 };
        qp.req.timer = now.saturating_add(qp.timeout_ns.saturating_mul(1 << tries));
        self.next_timeout = self.next_timeout.min(qp.req.timer);
    }

    /// Everything from the oldest packet that is not answered is sent again.
    fn go_back(&mut self, place: u32) {
        let skip = u64::from(self.has(Defect::ResendsTooLate));
        let req = &self.qps.at(place).req;
        let (target, mut next) = (req.unanswered, req.done);
        let numbered = req.numbered;
        while next != numbered && self.wqe(place, next).end() <= target {
            next = next.wrapping_add(1);
        }
        let is_long = next != numbered && self.wqe(place, next).packets > 2;
        let req = &mut self.qps.at_mut(place).req;
        req.asked.clear();
        req.cursor = target + if is_long && req.cursor > target + 1 { skip } else { 0 };
        (req.next, req.ask_ack_from, req.gap_at) = (next, target, target);
        req.timer = NEVER;
        self.activate(place);
    }

    /// Nothing was answered in time.
    pub(super) fn timed_out(&mut self, now: u64, place: u32) {
        let req = &mut self.qps.at_mut(place).req;
        if req.unanswered == req.sent {
            req.timer = NEVER;
            return;
        }
        self.counters.timeouts += 1;
        self.retry(now, place);
    }

    fn retry(&mut self, _now: u64, place: u32) {
        let req = &mut self.qps.at_mut(place).req;
        if req.retries_left == 0 {
            self.fail(place, Some(WcStatus::RetryExcErr));
            return;
        }
        req.retries_left -= 1;
        self.go_back(place);
    }

    /// Takes everything before `end` as answered, but for reads and atomics, which only their answers answer. Whether one
    /// of those stood in the way: its answer was lost.
    fn acknowledge(&mut self, now: u64, place: u32, end: u64) -> bool {
        let takes_reads = self.has(Defect::AckCompletesReads);
        let qp = self.qps.at(place);
        let (before, numbered) = (qp.req.unanswered, qp.req.numbered);
        let (mut to, mut at, mut is_gap) = (before, qp.req.done, false);
        while at != numbered {
            let wqe = self.wqe(place, at);
            if is_read_or_atomic(wqe) && to < wqe.end() && !takes_reads {
                to = to.max(end.min(wqe.first));
                is_gap = end > to;
                break;
            }
            if wqe.end() > end {
                to = to.max(end);
                break;
            }
            to = to.max(wqe.end());
            at = at.wrapping_add(1);
        }
        self.answered(now, place, to);
        is_gap
    }

    /// Everything before `to` is answered.
    fn answered(&mut self, now: u64, place: u32, to: u64) {
        let Qp { retry_count, rnr_retry, .. } = *self.qps.at(place);
        let req = &mut self.qps.at_mut(place).req;
        if to <= req.unanswered {
            return;
        }
        req.unanswered = to;
        (req.retries_left, req.rnr_left) = (retry_count, rnr_retry);
        let is_behind = req.cursor < to;
        req.timer = NEVER;
        if req.sent > to {
            self.start_timer(now, place);
        }
        if is_behind {
            // It was sent again, and the first answer came after all.
            self.go_back(place);
            if self.qps.at(place).req.sent > to {
                self.start_timer(now, place);
            }
        }
        self.retire(place);
        self.activate(place);
    }

    /// Completes what is answered.
    fn retire(&mut self, place: u32) {
        loop {
            let req = &self.qps.at(place).req;
            if req.done == req.next || req.done == req.numbered || self.wqe(place, req.done).end() > req.unanswered {
                break;
            }
            self.complete_send(place, WcStatus::Success);
        }
        self.look_drained(place);
    }

    /// A queue pair that drains, and has nothing under way: that is told.
    pub(super) fn look_drained(&mut self, place: u32) {
        let qp = self.qps.at(place);
        if qp.state == QpState::SendQueueDrain && qp.req.done == qp.req.numbered {
            let qp = qp.number;
            self.event(AsyncEvent::SqDrained { qp });
        }
    }

    /// An answer came.
    pub(super) fn handle_response(&mut self, now: u64, place: u32, header: &Header, payload: &[u8]) {
        let qp = self.qps.at(place);
        let wide = psn::widen(qp.req.unanswered, header.psn);
        // Behind what was sent, or before the acknowledgement that can come twice.
        if !qp.can_send() || wide >= qp.req.sent || wide + 1 < qp.req.unanswered {
            self.counters.stale_responses += 1;
            return;
        }
        match header.opcode {
            Opcode::Acknowledge => self.handle_ack(now, place, header, wide),
            Opcode::AtomicAcknowledge => self.handle_data(now, place, header, &header.value.to_ne_bytes(), wide),
            _ => self.handle_data(now, place, header, payload, wide),
        }
    }

    fn handle_ack(&mut self, now: u64, place: u32, header: &Header, wide: u64) {
        match header.syndrome {
            Syndrome::Ack { credits } => {
                let is_gap = self.acknowledge(now, place, wide + 1);
                self.take_credits(place, header.msn, credits);
                let req = &self.qps.at(place).req;
                // One gap is found by every acknowledgement behind it; once is enough.
                if is_gap && req.gap_at != req.unanswered && self.qps.at(place).can_send() {
                    self.go_back(place);
                }
            }
            Syndrome::RnrNak { timer } => {
                self.acknowledge(now, place, wide);
                let qp = self.qps.at_mut(place);
                if !qp.can_send() || qp.req.unanswered != wide {
                    return;
                }
                if qp.rnr_retry != 7 {
                    if qp.req.rnr_left == 0 {
                        self.fail(place, Some(WcStatus::RnrRetryExcErr));
                        return;
                    }
                    qp.req.rnr_left -= 1;
                }
                let until = now.saturating_add(rnr_ns(timer));
                self.go_back(place);
                self.qps.at_mut(place).req.wait_until = until;
                self.next_timeout = self.next_timeout.min(until);
            }
            Syndrome::Nak(nak) => {
                let is_gap = self.acknowledge(now, place, wide);
                let qp = self.qps.at(place);
                if !qp.can_send() || wide < qp.req.unanswered {
                    return;
                }
                let status = match nak {
                    Nak::Sequence => {
                        // Told once for a gap; the same again is the answer to what was sent before it was heard.
                        if qp.req.cursor > qp.req.unanswered {
                            self.retry(now, place);
                        }
                        return;
                    }
                    Nak::InvalidRequest => WcStatus::RemInvReqErr,
                    Nak::RemoteAccess => WcStatus::RemAccessErr,
                    Nak::RemoteOperational => WcStatus::RemOpErr,
                };
                // The one before was not answered, and never will be.
                self.fail(place, Some(if is_gap { WcStatus::RetryExcErr } else { status }));
            }
        }
    }

    fn take_credits(&mut self, place: u32, msn: u32, code: u8) {
        let req = &mut self.qps.at_mut(place).req;
        let done = psn::widen(req.messages + (1 << psn::BITS), msn).saturating_sub(1 << psn::BITS);
        // Old ones may come late.
        req.credit = match (credits_of(code), req.credit) {
            (Some(credits), Some(known)) => Some(known.max(done + u64::from(credits))),
            (Some(credits), None) => Some(done + u64::from(credits)),
            (None, _) => None,
        };
        self.activate(place);
    }

    /// A packet of the answer to a read, or the answer to an atomic.
    fn handle_data(&mut self, now: u64, place: u32, header: &Header, payload: &[u8], wide: u64) {
        let Some(front) = self.qps.at(place).req.asked.front() else {
            self.counters.stale_responses += 1;
            return;
        };
        // An answer says that everything before it was done, too.
        self.acknowledge(now, place, wide.min(front.first));
        let qp = self.qps.at(place);
        let expected = qp.req.unanswered.max(front.first);
        if !qp.can_send() || wide < expected {
            self.counters.stale_responses += 1;
            return;
        }
        if wide > expected {
            if qp.req.gap_at != qp.req.unanswered {
                self.go_back(place);
            }
            return;
        }
        let index = (wide - front.first) as u32;
        let oldest = qp.req.done;
        let wqe = self.wqe(place, oldest);
        let mtu = qp.mtu;
        let offset = (wide.saturating_sub(wqe.first)) as u32 * if wqe.wr.op == SendOp::Read { mtu } else { 0 };
        // First, middle or last: it may be of an answer that was asked for twice, from different packets on.
        let is_atomic = header.opcode == Opcode::AtomicAcknowledge;
        let expected_len = match wqe.wr.op {
            SendOp::Read => wqe.wr.len.saturating_sub(offset).min(mtu) as usize,
            _ => 8,
        };
        let is_it = (wqe.first..wqe.end()).contains(&wide)
            && is_read_or_atomic(wqe)
            && is_atomic == (wqe.wr.op != SendOp::Read)
            && payload.len() == expected_len;
        if !is_it {
            self.fail_at(place, oldest, WcStatus::BadRespErr);
            return;
        }
        let to = (wqe.wr.local as u64).wrapping_add(u64::from(offset));
        let (pd, len) = (qp.pd, payload.len());
        if self.keys.check_local(wqe.wr.lkey, pd, to, len as u64, MrAccess::LOCAL_WRITE).is_err() {
            self.fail_at(place, oldest, WcStatus::LocProtErr);
            return;
        }
        if len != 0 && !(self.has(Defect::OldAtomicResult) && wqe.wr.op == SendOp::FetchAdd) {
            // SAFETY: registered for writing, and valid until the work request ends.
            unsafe { copy::copy(to as *mut u8, payload.as_ptr(), len) };
        }
        if index + 1 == front.packets {
            self.qps.at_mut(place).req.asked.pop_front();
        }
        self.answered(now, place, wide + 1);
        if header.opcode != Opcode::ReadMiddle {
            // Its AETH tells credits, too.
            if let Syndrome::Ack { credits } = header.syndrome {
                self.take_credits(place, header.msn, credits);
            }
        }
    }
}
