//! The NIC with a wire: an [`Rnic`] like any other.

use core::net::IpAddr;

use verbring_slab::Arena;
use verbring_sys::DeviceError;
use verbring_sys::rnic::{AsyncEvent, MrAccess, MrKeys, PostError, QpAddress, RecvWr, Rnic, RnicCaps, RnicWc, SendWr};

use crate::nic::{Nic, NicConfig, Pd, Transition};
use crate::packet::{Ip, MAX_PACKET};
use crate::psn;
use crate::random::Random;

/// What carries packets.
pub trait Wire {
    /// Hands every packet that came to `each`.
    fn receive(&mut self, now: u64, each: impl FnMut(&Ip, &[u8]));

    /// Where the next packet to be sent goes, [`MAX_PACKET`] bytes; none if what is there has to be flushed first.
    fn place(&mut self) -> Option<&mut [u8]>;

    /// The packet is written.
    fn commit(&mut self, now: u64, len: usize, to: IpAddr);

    /// Sends what was committed.
    fn flush(&mut self, now: u64);
}

/// How long a lost packet is waited for, and how often it is sent again (ibv_modify_qp(3)).
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// 4.096 us times 2 to this power.
    pub timeout: u8,
    /// More tries.
    pub retry_count: u8,
}

/// Packets that one call sends at most. A peer may ask for much to be read, often; it does not keep the caller here.
pub const BURST: usize = 256;

/// A NIC with a wire, one protection domain and one completion queue.
pub struct Soft<W: Wire> {
    nic: Nic,
    wire: W,
    caps: RnicCaps,
    pd: Pd,
    cq: u32,
    random: Random,
    patience: Patience,
    registrations: u64,
    /// There was more to be sent than a burst.
    has_more: bool,
}

impl<W: Wire> Soft<W> {
    /// A NIC of that configuration on a wire; `name` is its device's.
    ///
    /// # Errors
    /// The arena has fewer than [`NicConfig::bytes`].
    pub fn new(
        name: &'static str,
        arena: Arena,
        config: NicConfig,
        patience: Patience,
        wire: W,
    ) -> Result<Soft<W>, DeviceError> {
        let full = |what| DeviceError::Full { what, limit: 0 };
        let mut nic = Nic::new(arena, config).map_err(|_| full("bytes of the NIC's arena"))?;
        let pd = nic.alloc_pd();
        let cq = nic.create_cq().ok_or(full("completion queues"))?;
        let config = *nic.config();
        let caps = RnicCaps {
            name,
            atomics: !config.weakness.no_atomics,
            imm: !config.weakness.no_imm,
            ordered_writes: config.weakness.delay.is_none_or(|d| !d.relaxed),
            max_inline: config.weakness.max_inline,
            max_rd_atomic: config.weakness.max_rd_atomic,
            mtu: config.weakness.max_mtu,
            sq_depth: config.sq_depth,
            rq_depth: config.rq_depth,
            max_message: crate::nic::MAX_MESSAGE,
        };
        let random = Random::new(config.seed ^ 0x5eed);
        Ok(Soft { nic, wire, caps, pd, cq, random, patience, registrations: 0, has_more: false })
    }

    /// The NIC.
    pub fn nic(&self) -> &Nic {
        &self.nic
    }

    /// The NIC, to be set up.
    pub fn nic_mut(&mut self) -> &mut Nic {
        &mut self.nic
    }

    /// The wire.
    pub fn wire(&self) -> &W {
        &self.wire
    }

    /// When the NIC has something to do by itself.
    pub fn poll_timeout(&self) -> u64 {
        if self.has_more { 0 } else { self.nic.poll_timeout() }
    }

    fn transmit(&mut self, now: u64) {
        self.has_more = false;
        let mut left = BURST;
        loop {
            if left == 0 {
                self.has_more = true;
                break;
            }
            let Some(place) = self.wire.place() else {
                self.wire.flush(now);
                if self.wire.place().is_none() {
                    break;
                }
                continue;
            };
            let Some(out) = self.nic.poll_transmit(now, place) else { break };
            self.wire.commit(now, out.len, out.to);
            left -= 1;
        }
        self.wire.flush(now);
    }
}

const _: () = assert!(MAX_PACKET < 65536);

// SAFETY: the NIC keeps its work requests' memory to their completion, and peers to what is registered.
unsafe impl<W: Wire> Rnic for Soft<W> {
    fn caps(&self) -> &RnicCaps {
        &self.caps
    }

    unsafe fn reg_mr(&mut self, base: *mut u8, len: usize, access: MrAccess) -> Result<MrKeys, DeviceError> {
        // Peers learn nothing of this process's addresses, and packets are the same in every run.
        self.registrations += 1;
        let iova = self.registrations << 40;
        let limit = self.nic.config().max_keys;
        // SAFETY: the caller's promise.
        let keys = unsafe { self.nic.reg_mr(self.pd, base, len, iova, access) };
        keys.ok_or(DeviceError::Full { what: "memory registrations", limit })
    }

    fn dereg_mr(&mut self, keys: MrKeys) -> Result<(), DeviceError> {
        if self.nic.dereg_mr(keys.lkey) { Ok(()) } else { Err(DeviceError::NoSuchMr) }
    }

    fn create_qp(&mut self) -> Result<QpAddress, DeviceError> {
        let limit = self.nic.config().max_qps;
        let full = DeviceError::Full { what: "queue pairs", limit };
        let qp = self.nic.create_qp(self.pd, self.cq, self.cq).ok_or(full)?;
        let access = MrAccess::all();
        let _ = self.nic.modify_qp(qp, Transition::Init { access });
        Ok(QpAddress {
            ip: self.nic.config().address,
            qp,
            psn: self.random.any_u32() & psn::MASK,
            mtu: self.caps.mtu,
            max_rd_atomic: self.caps.max_rd_atomic,
        })
    }

    fn connect_qp(&mut self, own: &QpAddress, peer: &QpAddress) -> Result<(), DeviceError> {
        let refused = |_| DeviceError::Protocol("its queue pair's attributes");
        let receive = Transition::ReadyToReceive {
            peer: peer.ip,
            dest_qp: peer.qp,
            mtu: own.mtu.min(peer.mtu),
            rq_psn: peer.psn,
            max_dest_rd_atomic: own.max_rd_atomic,
            min_rnr_timer: 1,
        };
        let send = Transition::ReadyToSend {
            sq_psn: own.psn,
            timeout: self.patience.timeout,
            retry_count: self.patience.retry_count,
            rnr_retry: 6,
            max_rd_atomic: own.max_rd_atomic.min(peer.max_rd_atomic),
        };
        self.nic.modify_qp(own.qp, receive).map_err(refused)?;
        self.nic.modify_qp(own.qp, send).map_err(refused)
    }

    fn fail_qp(&mut self, qp: u32) {
        let _ = self.nic.modify_qp(qp, Transition::Error);
    }

    fn destroy_qp(&mut self, qp: u32) {
        self.nic.destroy_qp(qp);
    }

    unsafe fn post_send(&mut self, qp: u32, wr: &SendWr) -> Result<(), PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.nic.post_send(qp, wr) }
    }

    unsafe fn post_recv(&mut self, qp: u32, wr: &RecvWr) -> Result<(), PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.nic.post_recv(qp, wr) }
    }

    fn ring(&mut self, now: u64) {
        self.transmit(now);
    }

    fn poll(&mut self, now: u64, wcs: &mut [RnicWc]) -> usize {
        let nic = &mut self.nic;
        self.wire.receive(now, |ip, bytes| nic.handle_packet(now, ip, bytes));
        if now >= self.nic.poll_timeout() {
            self.nic.handle_timeout(now);
        }
        self.transmit(now);
        self.nic.poll_cq(self.cq, wcs)
    }

    fn async_event(&mut self) -> Option<AsyncEvent> {
        self.nic.async_event()
    }
}
