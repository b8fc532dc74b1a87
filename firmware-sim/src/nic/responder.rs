//! The target's half of a queue pair: does what peers ask for, once, and answers in their order.

use core::sync::atomic::Ordering;

use verbring_sys::copy;
use verbring_sys::rnic::{AsyncEvent, MrAccess, WcOp, WcStatus};

use super::fifo::Fifo;
use super::qp::{Qp, QpState};
use super::{Defect, MAX_RD_ATOMIC, Nic, packets_of};
use crate::packet::{Header, NO_CREDITS, Nak, Opcode, Syndrome, credit_code};
use crate::psn;

/// A read or atomic that was asked for: kept, so that it can be answered again (IBTA volume 1, 9.7.5.1: responder
/// resources).
#[derive(Clone, Copy)]
pub(super) struct Resource {
    /// The first sequence number; 0: nothing.
    first: u64,
    packets: u32,
    rkey: u32,
    address: u64,
    len: u32,
    /// What an atomic found.
    atomic: Option<u64>,
    msn: u64,
}

impl Resource {
    pub(super) const NONE: Resource =
        Resource { first: 0, packets: 0, rkey: 0, address: 0, len: 0, atomic: None, msn: 0 };

    fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }
}

/// An answer that is to be sent: of a resource, from one packet up to another.
#[derive(Clone, Copy)]
struct Answer {
    resource: u32,
    /// The first packet of the request that is answered, which may ask for the rest of an earlier one.
    from: u64,
    next: u64,
    end: u64,
    is_first_time: bool,
}

/// A message whose packets are coming.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Message {
    None,
    Send { received: u32 },
    Write { address: u64, rkey: u32, left: u32, len: u32 },
}

pub(super) struct Responder {
    /// The next sequence number that is new.
    expected: u64,
    /// Messages done.
    msn: u64,
    /// Writes ever begun.
    writes: u64,
    message: Message,
    /// Receives ever posted and used up.
    pub(super) posted: u32,
    pub(super) taken: u32,
    /// The gap, or the want of a receive, was told.
    is_gap_told: bool,
    next_resource: u32,
    answers: Fifo<Answer, { MAX_RD_ATOMIC as usize }>,
    /// To be said when all answers are sent.
    last_word: Option<(u64, Syndrome)>,
    /// Credits as they were told last.
    told: u8,
    /// What the queue pair failed with: said again to whoever asks again.
    verdict: Option<(u64, Nak)>,
    has_heard: bool,
}

impl Responder {
    pub(super) const fn new() -> Responder {
        Responder {
            expected: 0,
            msn: 0,
            writes: 0,
            message: Message::None,
            posted: 0,
            taken: 0,
            is_gap_told: false,
            next_resource: 0,
            answers: Fifo::new(),
            last_word: None,
            told: NO_CREDITS,
            verdict: None,
            has_heard: false,
        }
    }

    /// Receives that were posted before stay.
    pub(super) fn start(&mut self, psn: u32) {
        self.expected = psn::start(psn);
    }

    pub(super) fn receives(&self) -> u32 {
        self.posted.wrapping_sub(self.taken)
    }

    /// A receive was posted: whether the peer is to be told now, because it was told that there are none.
    pub(super) fn tell_credits(&mut self) -> bool {
        let is_due = self.told == 0 && self.has_heard && self.last_word.is_none();
        if is_due {
            self.say(self.expected - 1, Syndrome::Ack { credits: 0 });
        }
        is_due
    }

    fn say(&mut self, psn: u64, syndrome: Syndrome) {
        self.last_word = Some((psn, syndrome));
    }
}

impl Nic {
    /// A request came.
    pub(super) fn handle_request(&mut self, now: u64, place: u32, header: &Header, payload: &[u8]) {
        let qp = self.qps.at(place);
        if let Some((psn, nak)) = qp.resp.verdict {
            // It was told, and that may have been lost.
            self.qps.at_mut(place).resp.say(psn, Syndrome::Nak(nak));
            self.activate(place);
            return;
        }
        if !qp.can_receive() {
            self.counters.no_qp += 1;
            return;
        }
        if !qp.resp.has_heard {
            self.qps.at_mut(place).resp.has_heard = true;
            if self.qps.at(place).state == QpState::ReadyToReceive {
                let qp = self.qps.at(place).number;
                self.event(AsyncEvent::CommunicationEstablished { qp });
            }
        }
        let expected = self.qps.at(place).resp.expected;
        let wide = psn::widen(expected, header.psn);
        if wide < expected && !self.has(Defect::NoDuplicateDetection) {
            self.handle_duplicate(place, header, wide);
        } else if wide > expected && !self.has(Defect::GapsIgnored) {
            self.counters.out_of_sequence += 1;
            let resp = &mut self.qps.at_mut(place).resp;
            if !core::mem::replace(&mut resp.is_gap_told, true) {
                resp.say(expected, Syndrome::Nak(Nak::Sequence));
                self.counters.nak_sequence += 1;
                self.activate(place);
            }
        } else {
            self.qps.at_mut(place).resp.is_gap_told = false;
            self.handle_new(now, place, header, payload);
        }
    }

    fn handle_new(&mut self, now: u64, place: u32, header: &Header, payload: &[u8]) {
        use Opcode as O;
        let (mtu, message) = (self.qps.at(place).mtu as usize, self.qps.at(place).resp.message);
        // Every packet but the last is full, and no other is (IBTA volume 1, 9.7.4.1.5, 9.7.4.1.6).
        let fits = match header.opcode {
            O::SendFirst | O::SendMiddle | O::WriteFirst | O::WriteMiddle => payload.len() == mtu,
            O::SendLast | O::SendLastImm | O::SendLastInvalidate | O::WriteLast | O::WriteLastImm => {
                (1..=mtu).contains(&payload.len())
            }
            _ => payload.len() <= mtu,
        };
        let continues = match header.opcode {
            O::SendMiddle | O::SendLast | O::SendLastImm | O::SendLastInvalidate => {
                matches!(message, Message::Send { .. })
            }
            O::WriteMiddle | O::WriteLast | O::WriteLastImm => matches!(message, Message::Write { .. }),
            _ => message == Message::None,
        };
        if !fits || !continues {
            return self.refuse(place, Nak::InvalidRequest);
        }
        match header.opcode {
            O::SendFirst
            | O::SendMiddle
            | O::SendLast
            | O::SendLastImm
            | O::SendOnly
            | O::SendOnlyImm
            | O::SendLastInvalidate
            | O::SendOnlyInvalidate => self.take_send(place, header, payload),
            O::WriteFirst | O::WriteMiddle | O::WriteLast | O::WriteLastImm | O::WriteOnly | O::WriteOnlyImm => {
                self.take_write(now, place, header, payload);
            }
            O::ReadRequest => self.take_read(place, header),
            O::CompareSwap | O::FetchAdd => self.take_atomic(now, place, header),
            _ => self.refuse(place, Nak::InvalidRequest),
        }
    }

    /// The request is the last that this queue pair takes.
    fn refuse(&mut self, place: u32, nak: Nak) {
        match nak {
            Nak::Sequence | Nak::InvalidRequest => self.counters.nak_invalid += 1,
            Nak::RemoteAccess => self.counters.nak_access += 1,
            Nak::RemoteOperational => self.counters.nak_operational += 1,
        }
        let qp = self.qps.at_mut(place);
        let (number, psn) = (qp.number, qp.resp.expected);
        qp.resp.verdict = Some((psn, nak));
        qp.resp.say(psn, Syndrome::Nak(nak));
        let event = match nak {
            Nak::RemoteAccess => AsyncEvent::QpAccessError { qp: number },
            Nak::RemoteOperational => AsyncEvent::QpFatal { qp: number },
            _ => AsyncEvent::QpRequestError { qp: number },
        };
        self.event(event);
        self.fail(place, None);
        self.counters.qp_errors += 1;
        self.activate(place);
    }

    /// No receive is posted: the peer is to try again later.
    fn not_ready(&mut self, place: u32) {
        self.counters.nak_rnr += 1;
        let timer = self.qps.at(place).rnr_timer;
        let resp = &mut self.qps.at_mut(place).resp;
        // What follows is not in sequence, and that needs no telling.
        resp.is_gap_told = true;
        resp.told = 0;
        resp.say(resp.expected, Syndrome::RnrNak { timer });
        self.activate(place);
    }

    /// A packet was taken. `ends`: with it a message.
    fn advance(&mut self, place: u32, header: &Header, packets: u32, ends: bool) {
        let too_early = u64::from(self.has(Defect::AckTooEarly));
        let resp = &mut self.qps.at_mut(place).resp;
        resp.expected += u64::from(packets);
        resp.msn += u64::from(ends);
        // What was to be said of earlier packets is said by what follows.
        if header.ack_request {
            resp.say(resp.expected - 1 + too_early, Syndrome::Ack { credits: 0 });
            self.activate(place);
        }
    }

    fn take_send(&mut self, place: u32, header: &Header, payload: &[u8]) {
        use Opcode as O;
        let Qp { pd, .. } = *self.qps.at(place);
        let resp = &self.qps.at(place).resp;
        if resp.receives() == 0 {
            return self.not_ready(place);
        }
        let received = match resp.message {
            Message::Send { received } => received,
            _ => 0,
        };
        let at = self.rq_place(place, resp.taken);
        let receive = *self.rq.at(at);
        let len = payload.len() as u32;
        if receive.len.saturating_sub(received) < len {
            self.complete_recv(place, WcStatus::LocLenErr, WcOp::Recv, 0, None);
            return self.refuse(place, Nak::InvalidRequest);
        }
        let to = (receive.local as u64).wrapping_add(u64::from(received));
        if self.keys.check_local(receive.lkey, pd, to, u64::from(len), MrAccess::LOCAL_WRITE).is_err() {
            self.complete_recv(place, WcStatus::LocProtErr, WcOp::Recv, 0, None);
            return self.refuse(place, Nak::RemoteOperational);
        }
        if len != 0 {
            // SAFETY: registered for writing, and valid until the receive ends.
            unsafe { copy::copy(to as *mut u8, payload.as_ptr(), payload.len()) };
        }
        let received = received + len;
        let ends = !matches!(header.opcode, O::SendFirst | O::SendMiddle);
        self.qps.at_mut(place).resp.message = if ends { Message::None } else { Message::Send { received } };
        if matches!(header.opcode, O::SendLastInvalidate | O::SendOnlyInvalidate) {
            let number = self.qps.at(place).number;
            self.placement.finish_all();
            if self.keys.invalidate(header.imm, number).is_err() {
                return self.refuse(place, Nak::RemoteAccess);
            }
        }
        if ends {
            self.placement.finish_qp(self.qps.at(place).number);
            let imm = header.opcode.has_imm().then_some(header.imm);
            self.complete_recv(place, WcStatus::Success, WcOp::Recv, received, imm);
        }
        self.advance(place, header, 1, ends);
    }

    fn take_write(&mut self, now: u64, place: u32, header: &Header, payload: &[u8]) {
        use Opcode as O;
        let begins = matches!(header.opcode, O::WriteFirst | O::WriteOnly | O::WriteOnlyImm);
        let ends = !matches!(header.opcode, O::WriteFirst | O::WriteMiddle);
        // Looked at before a byte is written: the packet comes again.
        if header.opcode.has_imm() && self.qps.at(place).resp.receives() == 0 {
            return self.not_ready(place);
        }
        if header.opcode.has_imm() && self.config.weakness.no_imm {
            return self.refuse(place, Nak::InvalidRequest);
        }
        let Qp { pd, access, number, .. } = *self.qps.at(place);
        let (address, rkey, left, len) = match self.qps.at(place).resp.message {
            Message::Write { address, rkey, left, len } => (address, rkey, left, len),
            _ => (header.address, header.rkey, header.length, header.length),
        };
        let bytes = payload.len() as u32;
        if bytes > left || (ends && bytes != left) || (begins && len > super::MAX_MESSAGE) {
            return self.refuse(place, Nak::InvalidRequest);
        }
        // At the beginning for all of it, later again for what comes: it may have been taken back.
        let range = if begins { len } else { bytes };
        let lenient = u64::from(self.has(Defect::BoundsOffByOne) && range > 0);
        let granted = self
            .keys
            .check_remote(rkey, number, pd, address, u64::from(range) - lenient, MrAccess::REMOTE_WRITE)
            .ok()
            .filter(|_| access.contains(MrAccess::REMOTE_WRITE));
        // Nothing is written to nowhere, and that needs no key (IBTA volume 1, 9.7.4.1.3).
        let Some(to) = granted.or((len == 0).then_some(0)) else {
            return self.refuse(place, Nak::RemoteAccess);
        };
        if bytes != 0 {
            self.qps.at_mut(place).resp.writes += u64::from(begins);
            let write = self.qps.at(place).resp.writes;
            let mut payload = payload;
            if self.has(Defect::PaddingEatsPayload) && !payload.len().is_multiple_of(4) {
                payload = payload.get(..payload.len() & !3).unwrap_or(payload);
            }
            // SAFETY: registered for writing by peers; `dereg_mr` finishes what is under way.
            unsafe { self.placement.write(now, &mut self.random, number, write, to, payload) };
        }
        let (address, left) = (address.wrapping_add(u64::from(bytes)), left - bytes);
        self.qps.at_mut(place).resp.message =
            if ends { Message::None } else { Message::Write { address, rkey, left, len } };
        if header.opcode.has_imm() {
            self.placement.finish_qp(number);
            self.complete_recv(place, WcStatus::Success, WcOp::RecvWriteImm, len, Some(header.imm));
        }
        self.advance(place, header, 1, ends);
    }

    fn take_read(&mut self, place: u32, header: &Header) {
        let Qp { pd, access, number, mtu, .. } = *self.qps.at(place);
        let len = header.length;
        if len > super::MAX_MESSAGE {
            return self.refuse(place, Nak::InvalidRequest);
        }
        let is_granted = access.contains(MrAccess::REMOTE_READ)
            && self
                .keys
                .check_remote(header.rkey, number, pd, header.address, u64::from(len), MrAccess::REMOTE_READ)
                .is_ok();
        if !is_granted && len != 0 {
            return self.refuse(place, Nak::RemoteAccess);
        }
        let packets = packets_of(len, mtu);
        let resp = &self.qps.at(place).resp;
        let resource = Resource {
            first: resp.expected,
            packets,
            rkey: header.rkey,
            address: header.address,
            len,
            atomic: None,
            msn: resp.msn + 1,
        };
        self.answer_with(place, header, resource);
    }

    fn take_atomic(&mut self, now: u64, place: u32, header: &Header) {
        let Qp { pd, access, number, .. } = *self.qps.at(place);
        if self.config.weakness.no_atomics || !header.address.is_multiple_of(8) {
            return self.refuse(place, Nak::InvalidRequest);
        }
        let granted = self.keys.check_remote(header.rkey, number, pd, header.address, 8, MrAccess::REMOTE_ATOMIC);
        let Some(at) = granted.ok().filter(|at| access.contains(MrAccess::REMOTE_ATOMIC) && at.is_multiple_of(8))
        else {
            return self.refuse(place, Nak::RemoteAccess);
        };
        if !self.has_room_for_answer(place) {
            return self.refuse(place, Nak::InvalidRequest);
        }
        self.placement.finish_qp(number);
        self.placement.finish_range(at, 8);
        // SAFETY: eight bytes, aligned, registered for atomics by peers.
        let word = unsafe { copy::word(at) };
        let old = if self.config.weakness.delay.is_some() {
            // Atomic against this NIC alone: what is read now is written later (IBV_ATOMIC_HCA).
            let old = word.load(Ordering::Relaxed);
            let new = match header.opcode {
                Opcode::FetchAdd => Some(old.wrapping_add(header.value)),
                _ => (old == header.compare).then_some(header.value),
            };
            if let Some(new) = new {
                self.qps.at_mut(place).resp.writes += 1;
                let write = self.qps.at(place).resp.writes;
                // SAFETY: as above; `dereg_mr` finishes what is under way.
                unsafe {
                    let bytes = new.to_ne_bytes();
                    self.placement.write(now, &mut self.random, number, write, at, &bytes);
                }
            }
            old
        } else if header.opcode == Opcode::FetchAdd {
            word.fetch_add(header.value, Ordering::AcqRel)
        } else {
            match word.compare_exchange(header.compare, header.value, Ordering::AcqRel, Ordering::Acquire) {
                Ok(old) | Err(old) => old,
            }
        };
        let resp = &self.qps.at(place).resp;
        let resource = Resource {
            first: resp.expected,
            packets: 1,
            rkey: header.rkey,
            address: header.address,
            len: 8,
            atomic: Some(old),
            msn: resp.msn + 1,
        };
        self.answer_with(place, header, resource);
    }

    /// The place of the resource that is used next, in the table.
    fn resource_place(&self, place: u32, slot: u32) -> u32 {
        place * u32::from(MAX_RD_ATOMIC) + slot % u32::from(MAX_RD_ATOMIC)
    }

    /// Whether the peer keeps to the number of reads and atomics that was agreed on.
    fn has_room_for_answer(&self, place: u32) -> bool {
        let qp = self.qps.at(place);
        let pending = qp.resp.answers.iter().filter(|a| a.is_first_time).count();
        pending < usize::from(qp.max_dest_rd)
    }

    fn answer_with(&mut self, place: u32, header: &Header, resource: Resource) {
        if !self.has_room_for_answer(place) {
            return self.refuse(place, Nak::InvalidRequest);
        }
        let max = u32::from(self.qps.at(place).max_dest_rd.max(1));
        let slot = self.qps.at(place).resp.next_resource % max;
        let at = self.resource_place(place, slot);
        *self.resources.at_mut(at) = resource;
        let resp = &mut self.qps.at_mut(place).resp;
        resp.next_resource = (slot + 1) % max;
        // Whoever goes on asking has had the answer that this was to repeat.
        resp.answers.retain(|a| a.resource != slot);
        let from = resource.first;
        let answer = Answer { resource: slot, from, next: from, end: resource.end(), is_first_time: true };
        resp.answers.push_back(answer);
        // The answer acknowledges everything before it.
        resp.last_word = None;
        self.advance(place, &Header { ack_request: false, ..*header }, resource.packets, true);
        self.activate(place);
    }

    /// A request that was done already: the answer was lost, or is late.
    fn handle_duplicate(&mut self, place: u32, header: &Header, wide: u64) {
        self.counters.duplicates += 1;
        match header.opcode {
            Opcode::ReadRequest | Opcode::CompareSwap | Opcode::FetchAdd => {
                let is_atomic = header.opcode != Opcode::ReadRequest;
                let max = u32::from(self.qps.at(place).max_dest_rd);
                let found = (0..max).find(|slot| {
                    let resource = self.resources.at(self.resource_place(place, *slot));
                    let range = resource.first..resource.end();
                    resource.packets != 0 && range.contains(&wide) && resource.atomic.is_some() == is_atomic
                });
                // What is not remembered is not answered: the peer gives up.
                let Some(slot) = found else { return };
                let at = self.resource_place(place, slot);
                if self.has(Defect::AtomicAnswerNotKept) && is_atomic {
                    let (number, pd, resource) =
                        (self.qps.at(place).number, self.qps.at(place).pd, self.resources.at(at));
                    let need = MrAccess::REMOTE_ATOMIC;
                    if let Ok(word) = self.keys.check_remote(resource.rkey, number, pd, resource.address, 8, need) {
                        // SAFETY: registered, and it was found aligned when it was executed.
                        let now = unsafe { copy::word(word) }.load(Ordering::Relaxed);
                        self.resources.at_mut(at).atomic = Some(now);
                    }
                }
                let qp = self.qps.at_mut(place);
                let asked = packets_of(header.length, qp.mtu);
                let end = self.resources.at(at).end().min(wide + u64::from(asked));
                let answer = Answer { resource: slot, from: wide, next: wide, end, is_first_time: false };
                qp.resp.answers.push_back(answer);
            }
            _ => {
                let resp = &mut self.qps.at_mut(place).resp;
                // What was said of something newer is not taken back.
                if resp.last_word.is_none() {
                    resp.say(resp.expected - 1, Syndrome::Ack { credits: 0 });
                }
            }
        }
        self.activate(place);
    }

    /// The next packet of a queue pair's answers.
    pub(super) fn transmit_response(&mut self, place: u32, buffer: &mut [u8]) -> Option<usize> {
        let qp = self.qps.at(place);
        if qp.resp.answers.is_empty() && qp.resp.last_word.is_none() {
            return None;
        }
        let credits = credit_code(qp.resp.receives());
        let Some(answer) = qp.resp.answers.front().filter(|_| qp.can_receive()) else {
            let (psn, syndrome) = self.qps.at_mut(place).resp.last_word.take()?;
            let resp = &mut self.qps.at_mut(place).resp;
            let syndrome = match syndrome {
                Syndrome::Ack { .. } => {
                    resp.told = credits;
                    Syndrome::Ack { credits }
                }
                other => other,
            };
            let msn = psn::wire(resp.msn);
            let header = Header {
                syndrome,
                msn,
                ..Header::new(Opcode::Acknowledge, self.qps.at(place).dest_qp, psn::wire(psn))
            };
            return self.seal(place, &header, 0, buffer);
        };
        let resource = *self.resources.at(self.resource_place(place, answer.resource));
        let mut header = Header::new(Opcode::AtomicAcknowledge, qp.dest_qp, psn::wire(answer.next));
        (header.syndrome, header.msn) = (Syndrome::Ack { credits }, psn::wire(resource.msn));
        let Qp { pd, number, mtu, .. } = *qp;
        let mut payload = 0;
        match resource.atomic {
            Some(old) => header.value = old,
            None => {
                let offset = (answer.next - resource.first) as u32 * mtu;
                payload = resource.len.saturating_sub(offset).min(mtu) as usize;
                let count = (answer.end - answer.from) as u32;
                header.opcode = Opcode::of_read((answer.next - answer.from) as u32, count);
                let from = resource.address.wrapping_add(u64::from(offset));
                let granted =
                    self.keys.check_remote(resource.rkey, number, pd, from, payload as u64, MrAccess::REMOTE_READ);
                let at = header.opcode.header_bytes();
                let to = buffer.get_mut(at..at + payload)?;
                let Some(from) = granted.ok().or((payload == 0).then_some(0)) else {
                    // It was taken back while it was read.
                    let resp = &mut self.qps.at_mut(place).resp;
                    resp.answers.clear();
                    resp.expected = answer.next;
                    self.refuse(place, Nak::RemoteAccess);
                    return self.transmit_response(place, buffer);
                };
                self.placement.finish_qp(number);
                if payload != 0 {
                    // SAFETY: registered for reading by peers; `to` has as many bytes.
                    unsafe { copy::copy(to.as_mut_ptr(), from as *const u8, payload) };
                }
            }
        }
        let len = self.seal(place, &header, payload, buffer)?;
        let resp = &mut self.qps.at_mut(place).resp;
        resp.told = credits;
        if let Some(front) = resp.answers.front_mut() {
            front.next += 1;
            if front.next == front.end {
                resp.answers.pop_front();
            }
        }
        Some(len)
    }
}
