//! A device around another one that is harsher than any real NIC: nothing is done when `post` returns, queue pairs
//! complete in an order drawn from a seed, failures come on request, and a failed completion is full of poison.

use heapless::Deque;

use crate::{
    CLASSES, Cancel, Caps, Device, DeviceError, Event, Link, Memory, Message, Mr, Posted, Qp, Rights, Status, Wc, Wr,
    WrOp,
};

/// Connections that a deferred device can have.
const MAX_LINKS: usize = 16;
const QPS: usize = MAX_LINKS * CLASSES;
/// Work requests waiting in one queue pair.
pub(crate) const DEPTH: usize = 32;
/// Stands in every field of a failed completion that means nothing.
const POISON: u64 = 0xdead_dead_dead_dead;

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// One in so many polls of a queue pair with work does some of it; 1: each.
    pub lateness: u32,
    /// One in so many work requests fails and breaks its queue pair; 0: none.
    pub failures: u32,
    /// The status of such a failure.
    pub status: Status,
    /// Work that has started can be cancelled.
    pub can_cancel: bool,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults { lateness: 3, failures: 0, status: Status::DeviceFault, can_cancel: true }
    }
}

struct Queue {
    waiting: Deque<Wr, DEPTH>,
    /// Work requests that the inner device answered with pending.
    inner: u32,
    /// What the queue pair broke with.
    broken: Option<Status>,
    fail_next: Option<Status>,
}

/// `D`, deferred.
pub struct Deferred<D> {
    inner: D,
    caps: Caps,
    random: u64,
    queues: [Queue; QPS],
    /// Bounds the search for work: queue pairs are used from below.
    used: usize,
    /// What may go wrong; can be changed at any time.
    pub faults: Faults,
}

impl<D: Device> Deferred<D> {
    /// Defers `inner`; the same seed gives the same order.
    pub fn new(inner: D, seed: u64, faults: Faults) -> Deferred<D> {
        let caps = Caps { name: "deferred", can_cancel: faults.can_cancel, ..*inner.caps() };
        const EMPTY: Queue = Queue { waiting: Deque::new(), inner: 0, broken: None, fail_next: None };
        Deferred { inner, caps, random: seed | 1, queues: [EMPTY; QPS], used: 0, faults }
    }

    /// The device inside.
    pub fn inner(&mut self) -> &mut D {
        &mut self.inner
    }

    /// The next work request that would be done on this queue pair fails, and breaks it.
    pub fn fail_next(&mut self, qp: Qp, status: Status) {
        if let Some(queue) = self.queues.get_mut(qp.0 as usize) {
            queue.fail_next = Some(status);
        }
    }

    /// xorshift64*: enough to draw an order from.
    fn draw(&mut self, below: u32) -> u32 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let high = (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32;
        ((u64::from(high) * u64::from(below)) >> 32) as u32
    }

    /// Does the oldest work request of a queue pair: its completion, unless it is still under way.
    fn step(&mut self, index: usize) -> Option<Wc> {
        let fails = self.faults.failures != 0 && self.draw(self.faults.failures) == 0;
        let queue = self.queues.get_mut(index)?;
        let wr = *queue.waiting.front()?;
        let qp = Qp(index as u32);
        let injected = queue.fail_next.take().or(fails.then_some(self.faults.status));
        let failed = match (queue.broken, injected) {
            (Some(_), _) => Some(Status::ConnectionLost),
            (None, Some(status)) => {
                queue.broken = Some(status);
                Some(status)
            }
            (None, None) => None,
        };
        let wc = match failed {
            Some(status) => poisoned(wr.wr_id, qp, status),
            // Done only when nothing earlier is under way inside.
            // SAFETY: its poster's promise holds until it ends.
            None => match unsafe { self.inner.post(qp, &wr) } {
                Posted::Done(value) => Wc { value, ..Wc::new(wr.wr_id, qp, Status::Success) },
                Posted::Refused(status) => poisoned(wr.wr_id, qp, status),
                Posted::Full => return None,
                Posted::Pending => {
                    queue.inner += 1;
                    queue.waiting.pop_front();
                    return None;
                }
            },
        };
        queue.waiting.pop_front();
        Some(wc)
    }
}

fn poisoned(wr_id: u64, qp: Qp, status: Status) -> Wc {
    Wc { wr_id, qp, status, vendor_err: 0, imm: POISON as u32, value: POISON }
}

// SAFETY: a work request is either in a queue here or was handed to the inner device, never both; each place ends it
// once, and only the inner device touches memory.
unsafe impl<D: Device> Device for Deferred<D> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn register(&mut self, memory: Memory, rights: Rights) -> Result<Mr, DeviceError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.register(memory, rights) }
    }

    fn deregister(&mut self, mr: Mr) -> Result<(), DeviceError> {
        self.inner.deregister(mr)
    }

    fn revoke(&mut self, mr: Mr) -> Result<(), DeviceError> {
        self.inner.revoke(mr)
    }

    fn connect(&mut self, address: &str, replaces: u32, now: u64) -> Result<Link, DeviceError> {
        self.inner.connect(address, replaces, now)
    }

    fn disconnect(&mut self, link: Link) {
        self.inner.disconnect(link);
        for class in 0..CLASSES {
            let qp = self.inner.qp(link, class);
            if let Some(queue) = self.queues.get_mut(qp.0 as usize) {
                queue.waiting.clear();
                (queue.inner, queue.broken, queue.fail_next) = (0, None, None);
            }
        }
    }

    fn qp(&self, link: Link, class: usize) -> Qp {
        self.inner.qp(link, class)
    }

    fn send(&mut self, link: Link, message: &Message, grant: Option<Mr>) -> Result<(), DeviceError> {
        self.inner.send(link, message, grant)
    }

    fn keep(&mut self, rkey: u32) {
        self.inner.keep(rkey);
    }

    fn release(&mut self, rkey: u32) {
        self.inner.release(rkey);
    }

    fn control(&mut self, now: u64) -> Option<Event> {
        self.inner.control(now)
    }

    unsafe fn post(&mut self, qp: Qp, wr: &Wr) -> Posted {
        let Some(queue) = self.queues.get_mut(qp.0 as usize) else {
            return Posted::Refused(Status::PeerUnknown);
        };
        if let Some(status) = self.inner.down(qp) {
            return Posted::Refused(status);
        }
        if queue.broken.is_some() {
            return Posted::Refused(Status::ConnectionLost);
        }
        // A receive waits in any case; deferring it would only let it overtake its cancellation.
        if wr.op == WrOp::Recv {
            // SAFETY: the caller's promise is the same.
            return unsafe { self.inner.post(qp, wr) };
        }
        match queue.waiting.push_back(*wr) {
            Ok(()) => {
                self.used = self.used.max(qp.0 as usize + 1);
                Posted::Pending
            }
            Err(_) => Posted::Full,
        }
    }

    fn ring(&mut self, now: u64) {
        self.inner.ring(now);
    }

    fn poll(&mut self, now: u64, wcs: &mut [Wc]) -> usize {
        let mut count = self.inner.poll(now, wcs);
        for wc in wcs.iter().take(count) {
            if let Some(queue) = self.queues.get_mut(wc.qp.0 as usize) {
                queue.inner = queue.inner.saturating_sub(1);
            }
        }
        // Each round a queue pair of the seed's choice, and as many rounds as there are queue pairs.
        for _ in 0..self.used {
            let index = self.draw(self.used as u32) as usize;
            if self.draw(self.faults.lateness.max(1)) != 0 {
                continue;
            }
            let Some(place) = wcs.get_mut(count) else { break };
            if let Some(wc) = self.step(index) {
                *place = wc;
                count += 1;
            }
        }
        count
    }

    fn cancel(&mut self, qp: Qp, wr_id: u64) -> Cancel {
        if !self.faults.can_cancel {
            return Cancel::Unable;
        }
        let Some(queue) = self.queues.get_mut(qp.0 as usize) else { return Cancel::Unable };
        let before = queue.waiting.len();
        queue.waiting.retain(|wr| wr.wr_id != wr_id);
        if queue.waiting.len() < before { Cancel::NotStarted } else { self.inner.cancel(qp, wr_id) }
    }

    fn down(&self, qp: Qp) -> Option<Status> {
        let broken = self.queues.get(qp.0 as usize).and_then(|q| q.broken.map(|_| Status::ConnectionLost));
        self.inner.down(qp).or(broken)
    }
}
