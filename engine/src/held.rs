//! Operations that do not end when they are submitted: fences, links, flushes, signals behind puts, deadlines,
//! cancellation, and the loss of a peer.

use verbring_sys::{Cancel, Device, DeviceError, Level, Link, Posted, Status, Wc};

use crate::engine::{Chain, Engine, Started};
use crate::flight::{NONE, State};
use crate::key::PeerId;
use crate::notice::Notice;
use crate::peer::PeerState;
use crate::sqe::{ADD, BUF, FENCE, LINK, Opcode, SILENT, Sqe, deadline_ns};

/// The flags that go with an opcode.
const fn allowed(opcode: Opcode) -> u8 {
    match opcode {
        Opcode::Nop | Opcode::Cancel => SILENT,
        Opcode::Recv => BUF,
        Opcode::PutInline | Opcode::FetchAdd | Opcode::CompareSwap | Opcode::Swap => FENCE | LINK | SILENT,
        Opcode::Flush => LINK | SILENT,
        Opcode::PutSignal => FENCE | LINK | SILENT | ADD | BUF,
        Opcode::Put | Opcode::Get | Opcode::Send => FENCE | LINK | SILENT | BUF,
    }
}

/// A link that the device was told to forget.
const NO_LINK: Link = Link(u32::MAX);

impl<D: Device> Engine<D> {
    /// The way of an entry that is not plain: every check, in order, with its own error.
    #[inline(never)]
    pub(crate) fn submit_slow(&mut self, port: usize, mut sqe: Sqe, now: u64) {
        // As it came: what is wrong with an entry does not end its chain.
        let is_linked = sqe.flag_bits() & LINK != 0;
        let (peer, class) = (sqe.peer(), sqe.class_bits());
        let outcome = self.consider(port, &mut sqe, now);
        if let Err(status) = outcome {
            self.complete(port, &sqe, status, 0, 0);
        }
        let Some(port) = self.ports.get_mut(port) else { return };
        if !is_linked {
            // A chain ends at the first entry without LINK.
            port.chain = None;
        } else if outcome.is_err() {
            let id = port.chain.map_or(0, |chain| chain.id);
            port.chain = Some(Chain { id, peer, class, has_failed: true });
        }
    }

    fn consider(&mut self, port: usize, sqe: &mut Sqe, now: u64) -> Result<(), Status> {
        let opcode = Opcode::from_raw(sqe.opcode()).ok_or_else(|| {
            // Nothing else of it is believed.
            sqe.words[0] &= 0xffff_ffff;
            Status::BadOpcode
        })?;
        if sqe.flag_bits() & !allowed(opcode) != 0 {
            // A block that was lent comes back; a flag that means nothing does nothing.
            let known = u64::from(allowed(opcode)) << 40;
            sqe.words[0] = sqe.words[0] & !(0xff << 40) | sqe.words[0] & known & !(u64::from(SILENT | LINK) << 40);
            return Err(Status::BadFlags);
        }
        if sqe.reserved() != 0 {
            return Err(Status::BadReserved);
        }
        if sqe.class_bits() as usize >= verbring_sys::CLASSES {
            return Err(Status::BadClass);
        }
        let class = sqe.class_bits();
        let before = self.ports.get(port).and_then(|p| p.chain);
        if let Some(chain) = before {
            if chain.has_failed {
                return Err(Status::Cancelled);
            }
            if chain.peer != sqe.peer() || chain.class != class {
                return Err(Status::BadLink);
            }
        }
        let mut chain = 0;
        if before.is_some() || sqe.flag_bits() & LINK != 0 {
            chain = before.map_or_else(|| self.new_chain(), |chain| chain.id);
            if let Some(port) = self.ports.get_mut(port) {
                port.chain = Some(Chain { id: chain, peer: sqe.peer(), class, has_failed: false });
            }
        }
        let mut deadline = u64::MAX;
        if sqe.deadline_units() != 0 {
            deadline = deadline_ns(sqe.deadline_units(), now);
            if now >= deadline {
                return Err(Status::DeadlineExceeded);
            }
        }
        match opcode {
            Opcode::Nop => {
                self.complete(port, sqe, Status::Success, 0, 0);
                return Ok(());
            }
            Opcode::Cancel => {
                self.cancel(port, sqe.operand(), now)?;
                self.complete(port, sqe, Status::Success, 0, 0);
                return Ok(());
            }
            _ => {}
        }
        let peer = self.peers.get(sqe.peer()).ok_or(Status::PeerUnknown)?;
        match peer.state {
            PeerState::Up => {}
            PeerState::Connecting => return Err(Status::NotReady),
            PeerState::Failed(status) => return Err(status),
        }
        let class = class as usize;
        let channel = peer.channel(class);
        let is_idle = peer.channels.iter().all(|c| c.first == NONE);
        let is_barrier = sqe.flag_bits() & FENCE != 0 || opcode == Opcode::Flush;
        let must_wait = opcode != Opcode::Recv
            && (!peer.is_open[class] || (is_barrier && !is_idle) || (before.is_some() && channel.first != NONE));
        let qp = peer.qp(class);
        if self.flights.is_full() {
            return Err(Status::TooManyOutstanding);
        }
        if must_wait {
            // What is wrong with it is said now, not when its turn comes.
            self.check(sqe, opcode)?;
            return self.hold(port, sqe, deadline, chain);
        }
        match self.start(sqe, qp, self.flights.next_wr_id()) {
            Started::Done(value) => self.complete(port, sqe, Status::Success, 0, value),
            Started::Refused(status) => return Err(status),
            Started::Full if opcode == Opcode::Recv => return Err(Status::TooManyOutstanding),
            other => self.after_start(port, sqe, other, deadline, chain),
        }
        Ok(())
    }

    fn new_chain(&mut self) -> u32 {
        self.next_chain = self.next_chain.wrapping_add(1).max(1);
        self.next_chain
    }

    /// The checks of `start`, without starting.
    fn check(&self, sqe: &Sqe, opcode: Opcode) -> Result<(), Status> {
        use crate::key::Access;
        use crate::sqe::MAX_INLINE;
        let (access, len) = match opcode {
            Opcode::Put | Opcode::PutSignal => (Access::Write, sqe.len()),
            Opcode::PutInline if sqe.len() > MAX_INLINE => return Err(Status::BadLength),
            Opcode::PutInline => (Access::Write, sqe.len()),
            Opcode::Get => (Access::Read, sqe.len()),
            Opcode::Send if sqe.len() > self.device.caps().max_send => return Err(Status::BadLength),
            Opcode::FetchAdd | Opcode::CompareSwap | Opcode::Swap if !sqe.offset().is_multiple_of(8) => {
                return Err(Status::Misaligned);
            }
            _ => (Access::Atomic, 8),
        };
        if !matches!(opcode, Opcode::Send | Opcode::Flush) {
            self.remote_of(sqe, access, len).ok_or_else(|| self.why_not_remote(sqe, access))?;
        }
        if opcode == Opcode::PutSignal {
            self.second_of(sqe, 0).ok_or_else(|| self.why_not_remote(sqe, self.access_of_signal(sqe)))?;
        }
        if matches!(opcode, Opcode::Put | Opcode::Get | Opcode::PutSignal | Opcode::Send) {
            self.local_of(sqe).ok_or_else(|| self.why_not_local(sqe))?;
        }
        Ok(())
    }

    /// Whether operations of a class of a peer may start at once, if that is up.
    pub(crate) fn set_open(&mut self, id: u32, class: usize, is_open: bool) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let is_open = is_open && peer.state == PeerState::Up;
        if let Some(place) = peer.is_open.get_mut(class) {
            *place = is_open;
            self.device.hold(peer.qp(class), !is_open);
        }
    }

    /// Puts an operation into its channel, to start later.
    fn hold(&mut self, port: usize, sqe: &Sqe, deadline: u64, chain: u32) -> Result<(), Status> {
        let flight = self.flights.take(*sqe, port as u8, State::Held).ok_or(Status::TooManyOutstanding)?;
        self.enter(flight, deadline, chain);
        self.set_open(sqe.peer(), sqe.class_bits() as usize, false);
        self.peers.set_waiting(sqe.peer(), true);
        Ok(())
    }

    /// Notes what is common to all flights.
    fn enter(&mut self, flight: u32, deadline: u64, chain: u32) {
        let entry = self.flights.at_mut(flight);
        (entry.deadline, entry.chain) = (deadline, chain);
        let (port, sqe) = (entry.port as usize, entry.sqe);
        self.next_deadline = self.next_deadline.min(deadline);
        if let Some(port) = self.ports.get_mut(port) {
            port.owed += 1;
        }
        self.flights.at_mut(flight).order = self.next_order;
        self.next_order += 1;
        if let Some(peer) = self.peers.get_mut(sqe.peer())
            && sqe.opcode() != Opcode::Recv as u8
        {
            peer.channel_mut(sqe.class_bits() as usize).push(&mut self.flights, flight);
        }
    }

    /// What follows when an entry was started and did not end. Its work requests bear the id of the next free flight.
    #[inline(never)]
    pub(crate) fn after_start(&mut self, port: usize, sqe: &Sqe, started: Started, deadline: u64, chain: u32) {
        match started {
            Started::Done(value) => self.complete(port, sqe, Status::Success, 0, value),
            Started::Refused(status) => self.complete(port, sqe, status, 0, 0),
            Started::Full => {
                if let Err(status) = self.hold(port, sqe, deadline, chain) {
                    self.complete(port, sqe, status, 0, 0);
                }
            }
            Started::Posted { parts, needs_second, fate } => {
                // There is one: the wr_id was its own.
                let Some(flight) = self.flights.take(*sqe, port as u8, State::Posted) else { return };
                self.enter(flight, deadline, chain);
                self.was_posted(flight, parts, needs_second, fate);
            }
        }
    }

    fn was_posted(&mut self, flight: u32, parts: u8, needs_second: bool, fate: Option<Status>) {
        let entry = self.flights.at_mut(flight);
        entry.state = State::Posted;
        (entry.parts, entry.needs_second) = (parts, needs_second);
        entry.fate = entry.fate.or(fate);
        let sqe = entry.sqe;
        let is_flush = sqe.opcode() == Opcode::Flush as u8 && self.is_flush_double();
        if needs_second || is_flush {
            // What follows in this class must not start before the signal, nor end before the flush of the other class.
            self.set_open(sqe.peer(), sqe.class_bits() as usize, false);
            self.peers.set_waiting(sqe.peer(), true);
        }
    }

    /// A work request ended.
    pub(crate) fn completed(&mut self, wc: &Wc) {
        let Some((flight, part)) = self.flights.of_wr_id(wc.wr_id) else { return };
        let entry = self.flights.at_mut(flight);
        if entry.state != State::Posted {
            return;
        }
        entry.parts = entry.parts.saturating_sub(1);
        let peer = entry.sqe.peer();
        if wc.status.is_success() {
            // The value is a message's length or an old value; a put or signal has none.
            if entry.parts == 0 && !(entry.needs_second && entry.fate.is_none()) {
                let status = entry.fate.unwrap_or(Status::Success);
                self.finish(flight, status, if part == 0 { wc.value } else { 0 }, wc.imm);
            }
        } else {
            let status = self.fate_of(flight, wc.status);
            let entry = self.flights.at_mut(flight);
            entry.fate = entry.fate.or(Some(status));
            if entry.parts == 0 {
                let status = entry.fate.unwrap_or(status);
                self.finish(flight, status, 0, 0);
            }
            if let Some(cause) = self.device.down(wc.qp) {
                self.peer_failed(peer, cause);
            }
        }
        // Something may have waited for it.
        if self.peers.get(peer).is_some_and(|p| p.channels.iter().any(|c| c.first_held != NONE)) {
            self.peers.set_waiting(peer, true);
        }
    }

    /// What an operation that the device had ends with, if its connection is lost.
    fn fate_of(&self, flight: u32, status: Status) -> Status {
        let sqe = &self.flights.at(flight).sqe;
        let is_lost = matches!(status, Status::ConnectionLost | Status::PeerDead);
        let is_atomic = Opcode::from_raw(sqe.opcode()).is_some_and(Opcode::is_atomic);
        // An add to a signal word cannot be repeated safely either.
        let adds = sqe.opcode() == Opcode::PutSignal as u8 && sqe.flag_bits() & ADD != 0;
        if is_lost && (is_atomic || adds) { Status::OutcomeUnknown } else { status }
    }

    /// An operation in flight ends: its one completion, and the consequences for its chain.
    pub(crate) fn finish(&mut self, flight: u32, status: Status, value: u64, imm: u32) {
        let entry = *self.flights.at(flight);
        if entry.state == State::Free {
            return;
        }
        let class = entry.sqe.class_bits() as usize;
        if let Some(peer) = self.peers.get_mut(entry.sqe.peer())
            && entry.sqe.opcode() != Opcode::Recv as u8
        {
            peer.channel_mut(class).remove(&mut self.flights, flight);
        }
        self.flights.put(flight);
        let port = entry.port as usize;
        if let Some(port) = self.ports.get_mut(port) {
            port.owed = port.owed.saturating_sub(1);
        }
        self.complete(port, &entry.sqe, status, imm, value);
        if entry.chain != 0 && !status.is_success() {
            self.fail_chain(port, entry.sqe.peer(), class, entry.chain);
        }
    }

    /// The rest of a chain ends as cancelled: what waits now, and what is still in the ring when it comes.
    fn fail_chain(&mut self, port: usize, peer: u32, class: usize, chain: u32) {
        if let Some(open) = self.ports.get_mut(port).and_then(|p| p.chain.as_mut())
            && open.id == chain
        {
            open.has_failed = true;
        }
        while let Some(next) = self.peers.get(peer).and_then(|p| self.find_held(p.channel(class).first_held, chain)) {
            // `finish` would come back here for each: cut the tie first.
            self.flights.at_mut(next).chain = 0;
            self.finish(next, Status::Cancelled, 0, 0);
        }
    }

    fn find_held(&self, first: u32, chain: u32) -> Option<u32> {
        let mut at = first;
        while at != NONE {
            if self.flights.at(at).chain == chain {
                return Some(at);
            }
            at = self.flights.at(at).next;
        }
        None
    }

    /// Starts whatever may start now, for every peer that something waits for.
    #[inline(never)]
    pub(crate) fn advance_all(&mut self, now: u64) {
        for word in 0..self.peers.waiting.capacity() {
            let mut bits = *self.peers.waiting.at(word);
            while bits != 0 {
                let place = word * 64 + bits.trailing_zeros();
                bits &= bits - 1;
                let id = self.peers.table.at(place).id;
                if id == 0 {
                    continue;
                }
                let mut waits = false;
                for class in 0..verbring_sys::CLASSES {
                    waits |= self.advance(id, class, now);
                }
                self.peers.set_waiting(id, waits);
            }
        }
    }

    /// Starts what may start in one channel: whether something still waits.
    fn advance(&mut self, id: u32, class: usize, now: u64) -> bool {
        loop {
            let Some(peer) = self.peers.get(id) else { return false };
            if peer.state != PeerState::Up {
                return false;
            }
            let channel = *peer.channel(class);
            let qp = peer.qp(class);
            let other_first = peer.channel(class ^ 1).first;
            // A second part is due before anything else starts.
            if let Some(flight) = self.find_second(channel.first, channel.first_held) {
                let entry = self.flights.at(flight);
                let is_in_order = entry.sqe.opcode() == Opcode::Flush as u8
                    || self.device.caps().ordered_signal
                    || (channel.first == flight && entry.parts == 0);
                if !is_in_order || !self.post_second(flight) {
                    return true;
                }
                continue;
            }
            if self.is_flush_double() && self.has_flush(channel.first, channel.first_held) {
                return true;
            }
            let flight = channel.first_held;
            if flight == NONE {
                self.set_open(id, class, true);
                return false;
            }
            let entry = *self.flights.at(flight);
            if now >= entry.deadline {
                self.finish(flight, Status::DeadlineExceeded, 0, 0);
                continue;
            }
            let is_barrier = entry.sqe.flag_bits() & FENCE != 0 || entry.sqe.opcode() == Opcode::Flush as u8;
            let is_first = channel.first == flight;
            let other_is_earlier = other_first != NONE && self.flights.at(other_first).order < entry.order;
            if (is_barrier && (!is_first || other_is_earlier)) || (entry.chain != 0 && !is_first) {
                return true;
            }
            match self.start(&entry.sqe, qp, self.flights.wr_id(flight, 0)) {
                Started::Done(value) => self.finish(flight, Status::Success, value, 0),
                Started::Refused(status) => self.finish(flight, status, 0, 0),
                Started::Full => return true,
                Started::Posted { parts, needs_second, fate } => {
                    if let Some(peer) = self.peers.get_mut(id) {
                        peer.channel_mut(class).held_was_posted(&self.flights);
                    }
                    self.was_posted(flight, parts, needs_second, fate);
                }
            }
        }
    }

    /// Whether each class is flushed by itself: where delivered is less than visible.
    pub(crate) fn is_flush_double(&self) -> bool {
        self.device.caps().completion < Level::Visible
    }

    /// Whether the device has a flush of this channel.
    fn has_flush(&self, first: u32, first_held: u32) -> bool {
        let mut at = first;
        while at != NONE && at != first_held {
            let entry = self.flights.at(at);
            if entry.sqe.opcode() == Opcode::Flush as u8 {
                return true;
            }
            at = entry.next;
        }
        false
    }

    /// The flight, among those that the device has, whose signal was not posted yet. It is the last of them.
    fn find_second(&self, first: u32, first_held: u32) -> Option<u32> {
        let mut at = first;
        while at != NONE && at != first_held {
            let entry = self.flights.at(at);
            if entry.needs_second {
                return Some(at);
            }
            at = entry.next;
        }
        None
    }

    /// Posts the second work request of a flight: false if the device has no room.
    fn post_second(&mut self, flight: u32) -> bool {
        let entry = *self.flights.at(flight);
        let posted = match (entry.fate, self.second_of(&entry.sqe, self.flights.wr_id(flight, 1))) {
            (Some(status), _) => Posted::Refused(status),
            // SAFETY: the word was checked just now, and is aligned.
            (None, Some((qp, second))) => unsafe { self.device.post(qp, &second) },
            (None, None) => Posted::Refused(Status::StaleEpoch),
        };
        let entry = self.flights.at_mut(flight);
        match posted {
            Posted::Full => return false,
            Posted::Pending => entry.parts += 1,
            Posted::Done(_) => {}
            Posted::Refused(status) => entry.fate = entry.fate.or(Some(status)),
        }
        entry.needs_second = false;
        if entry.parts == 0 {
            let status = entry.fate.unwrap_or(Status::Success);
            self.finish(flight, status, 0, 0);
        }
        true
    }

    /// Ends what is late: how many operations.
    #[cold]
    pub(crate) fn expire(&mut self, now: u64) -> u32 {
        let mut ended = 0;
        self.next_deadline = u64::MAX;
        for flight in 0..self.flights.capacity() {
            let entry = *self.flights.at(flight);
            if entry.state == State::Free {
                continue;
            }
            if now >= entry.deadline {
                match entry.state {
                    State::Draining => self.finish(flight, entry.fate.unwrap_or(Status::ConnectionLost), 0, 0),
                    _ => {
                        self.end_early(flight, Status::DeadlineExceeded, now);
                    }
                }
                ended += u32::from(self.flights.at(flight).state == State::Free);
            }
            let entry = self.flights.at(flight);
            if entry.state != State::Free && entry.deadline > now {
                self.next_deadline = self.next_deadline.min(entry.deadline);
            }
        }
        ended
    }

    /// Ends an operation before its time: whether that could be done without breaking the connection.
    fn end_early(&mut self, flight: u32, status: Status, now: u64) -> bool {
        let entry = *self.flights.at(flight);
        let peer = entry.sqe.peer();
        if entry.state == State::Held {
            self.finish(flight, status, 0, 0);
            self.peers.set_waiting(peer, true);
            return true;
        }
        if self.cut(flight, status) {
            return true;
        }
        if self.device.caps().can_cancel {
            // It ended in this moment; its completion is on its way.
            self.flights.at_mut(flight).deadline = u64::MAX;
            return false;
        }
        if status == Status::DeadlineExceeded {
            self.flights.at_mut(flight).fate = Some(self.fate_of_started(flight, status));
            self.break_connection(peer, Status::ConnectionLost, now);
            self.keep_notice(Notice::Lost { peer: PeerId(peer), cause: DeviceError::Deadline });
            return true;
        }
        false
    }

    /// An atomic that was cut on its way may have been executed.
    fn fate_of_started(&self, flight: u32, status: Status) -> Status {
        match self.fate_of(flight, Status::ConnectionLost) {
            Status::OutcomeUnknown => Status::OutcomeUnknown,
            _ => status,
        }
    }

    /// Takes the work requests of an operation back from the device; if that took all of them, it ends with `status`.
    pub(crate) fn cut(&mut self, flight: u32, status: Status) -> bool {
        let entry = *self.flights.at(flight);
        let Some(peer) = self.peers.get(entry.sqe.peer()) else { return false };
        let qp = peer.qp(entry.sqe.class_bits() as usize);
        let second_qp = self.second_of(&entry.sqe, 0).map_or(qp, |(qp, _)| qp);
        let mut fate = status;
        // The signal first, so that it does not come without its data.
        for part in [1, 0] {
            let qp = if part == 1 { second_qp } else { qp };
            let outcome = self.device.cancel(qp, self.flights.wr_id(flight, part));
            if outcome == Cancel::Unable {
                continue;
            }
            if outcome == Cancel::Cut {
                fate = self.fate_of_started(flight, status);
            }
            let entry = self.flights.at_mut(flight);
            entry.parts = entry.parts.saturating_sub(1);
            entry.fate = entry.fate.or(Some(fate));
        }
        let entry = self.flights.at(flight);
        if entry.parts != 0 || (entry.fate.is_none() && !entry.needs_second) {
            return false;
        }
        let (status, peer) = (entry.fate.unwrap_or(status), entry.sqe.peer());
        self.finish(flight, status, 0, 0);
        self.peers.set_waiting(peer, true);
        true
    }

    /// Ends the oldest pending operation of a port with that user_data.
    fn cancel(&mut self, port: usize, user_data: u64, now: u64) -> Result<(), Status> {
        let mut found = None;
        for flight in 0..self.flights.capacity() {
            let entry = self.flights.at(flight);
            let is_it = matches!(entry.state, State::Held | State::Posted)
                && entry.port as usize == port
                && entry.sqe.cookie() == user_data;
            if is_it && found.is_none_or(|other: u32| entry.order < self.flights.at(other).order) {
                found = Some(flight);
            }
        }
        let flight = found.ok_or(Status::NotFound)?;
        if self.end_early(flight, Status::Cancelled, now) {
            Ok(())
        } else if self.device.caps().can_cancel {
            Err(Status::NotFound)
        } else {
            Err(Status::NotSupported)
        }
    }

    /// A connection is lost: what waits ends now, what the device has ends by its completions.
    pub(crate) fn peer_failed(&mut self, id: u32, cause: Status) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if matches!(peer.state, PeerState::Failed(_)) {
            return;
        }
        peer.state = PeerState::Failed(cause);
        for class in 0..verbring_sys::CLASSES {
            self.set_open(id, class, false);
        }
        self.for_each_of(id, |engine, flight| {
            let entry = engine.flights.at_mut(flight);
            match entry.state {
                State::Held => {
                    let status = if entry.chain != 0 { Status::Cancelled } else { cause };
                    engine.finish(flight, status, 0, 0);
                }
                State::Posted if entry.needs_second => {
                    entry.needs_second = false;
                    entry.fate = entry.fate.or(Some(cause));
                    if entry.parts == 0 {
                        engine.finish(flight, cause, 0, 0);
                    }
                }
                _ => {}
            }
        });
    }

    fn for_each_of(&mut self, peer: u32, mut each: impl FnMut(&mut Self, u32)) {
        for flight in 0..self.flights.capacity() {
            let entry = self.flights.at(flight);
            if entry.state != State::Free && entry.sqe.peer() == peer {
                each(self, flight);
            }
        }
    }

    /// Gives a connection up on this side: nothing of it comes from the device any more, and every operation ends, at
    /// once or when the device can no longer touch its memory.
    pub(crate) fn break_connection(&mut self, id: u32, cause: Status, now: u64) {
        self.peer_failed(id, cause);
        let Some(peer) = self.peers.get_mut(id) else { return };
        let link = core::mem::replace(&mut peer.link, NO_LINK);
        if link == NO_LINK {
            return;
        }
        self.device.disconnect(link);
        let drain = self.device.caps().drain_bound_ns;
        self.for_each_of(id, |engine, flight| {
            if engine.flights.at(flight).state != State::Posted {
                return;
            }
            let status = engine.flights.at(flight).fate.unwrap_or(engine.fate_of(flight, cause));
            if drain == 0 {
                engine.finish(flight, status, 0, 0);
                return;
            }
            let entry = engine.flights.at_mut(flight);
            (entry.state, entry.fate, entry.deadline) = (State::Draining, Some(status), now.saturating_add(drain));
            engine.next_deadline = engine.next_deadline.min(entry.deadline);
        });
        self.lose_access_of(id);
    }

    /// Ends a connection and frees the peer's place. Its operations end as `ConnectionLost`, its imports are gone; the
    /// peer notices. For a connection that is to be made anew see [`reconnect`](Engine::reconnect).
    pub fn disconnect(&mut self, peer: PeerId, now: u64) {
        if self.peers.get(peer.0).is_none() {
            return;
        }
        self.break_connection(peer.0, Status::ConnectionLost, now);
        self.forget_imports_of(peer.0);
        self.peers.set_waiting(peer.0, false);
        if let Some(entry) = self.peers.get_mut(peer.0) {
            entry.id = 0;
        }
    }

    /// Ends everything in flight, for good: the engine is going.
    pub(crate) fn end_all(&mut self) {
        for place in 0..self.peers.table.capacity() {
            let id = self.peers.table.at(place).id;
            if id != 0 {
                self.break_connection(id, Status::ConnectionLost, 0);
            }
        }
        for flight in 0..self.flights.capacity() {
            self.finish(flight, self.flights.at(flight).fate.unwrap_or(Status::ConnectionLost), 0, 0);
        }
    }
}
