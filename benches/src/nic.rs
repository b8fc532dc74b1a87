//! Two NICs back to back, one packet at a time.

use std::net::{IpAddr, Ipv4Addr};

use verbring_sim::nic::{Nic, NicConfig, Transition};
use verbring_sim::packet::{Ip, MAX_PACKET};
use verbring_slab::Region;
use verbring_sys::rnic::{MrAccess, MrKeys, RnicWc, SendOp, SendWr, WcStatus};
use verbring_tests::arena;

const BYTES: usize = 1 << 16;

struct Side {
    nic: Nic,
    cq: u32,
    qp: u32,
    address: IpAddr,
    memory: Region,
    keys: MrKeys,
}

/// Two of them, connected; what the first asks for; a packet between them.
pub struct Nics {
    a: Side,
    b: Side,
    wr: SendWr,
    packet: Box<[u8; MAX_PACKET]>,
    len: usize,
}

fn side(node: u8) -> Side {
    let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, node));
    let config = NicConfig { seed: node.into(), ..NicConfig::new(address) };
    let mut nic = Nic::new(arena(config.bytes()), config).expect("room for a NIC");
    let (pd, cq) = (nic.alloc_pd(), nic.create_cq().expect("a completion queue"));
    let qp = nic.create_qp(pd, cq, cq).expect("a queue pair");
    let memory = Region::private(BYTES, Default::default()).expect("memory");
    // SAFETY: the region is kept beside the NIC, which goes first.
    let keys = unsafe { nic.reg_mr(pd, memory.base().as_ptr(), BYTES, 1 << 40, MrAccess::all()) };
    Side { nic, cq, qp, address, memory, keys: keys.expect("a key") }
}

impl Side {
    fn connect(&mut self, peer: IpAddr, dest_qp: u32) {
        let receive = Transition::ReadyToReceive {
            peer,
            dest_qp,
            mtu: 4096,
            rq_psn: 5,
            max_dest_rd_atomic: 16,
            min_rnr_timer: 1,
        };
        let send = Transition::ReadyToSend { sq_psn: 5, timeout: 14, retry_count: 7, rnr_retry: 7, max_rd_atomic: 16 };
        for step in [Transition::Init { access: MrAccess::all() }, receive, send] {
            self.nic.modify_qp(self.qp, step).expect("a step");
        }
    }
}

fn nics(op: SendOp, len: u32) -> Box<Nics> {
    let (mut a, mut b) = (side(1), side(2));
    a.connect(b.address, b.qp);
    b.connect(a.address, a.qp);
    let wr = SendWr {
        op,
        len,
        local: a.memory.base().as_ptr(),
        lkey: a.keys.lkey,
        remote: b.keys.iova,
        rkey: b.keys.rkey,
        swap_add: 1,
        ..SendWr::EMPTY
    };
    let mut nics = Box::new(Nics { a, b, wr, packet: Box::new([0; MAX_PACKET]), len: 0 });
    // The code and the tables are touched before anything is counted.
    for _ in 0..3 {
        nic_round(&mut nics);
    }
    nics
}

/// Writes of 8 bytes.
pub fn nic_writes() -> Box<Nics> {
    nics(SendOp::Write, 8)
}

/// Writes of 4 KiB, in one packet.
pub fn nic_writes_4k() -> Box<Nics> {
    nics(SendOp::Write, 4096)
}

/// Fetching adds.
pub fn nic_adds() -> Box<Nics> {
    nics(SendOp::FetchAdd, 8)
}

/// With a write of 8 bytes on its way.
pub fn nic_write_sent() -> Box<Nics> {
    let mut nics = nic_writes();
    nic_out(&mut nics);
    nics
}

/// With a read of 4 KiB asked for.
pub fn nic_read_asked() -> Box<Nics> {
    let mut nics = nics(SendOp::Read, 4096);
    nic_out(&mut nics);
    nic_in(&mut nics);
    nics
}

/// A request is posted, and its packet leaves the first NIC: its length.
#[inline(always)]
pub fn nic_out(nics: &mut Nics) -> usize {
    // SAFETY: its local memory is registered and kept.
    let posted = unsafe { nics.a.nic.post_send(nics.a.qp, &nics.wr) };
    let sent = nics.a.nic.poll_transmit(1, &mut nics.packet[..]);
    nics.len = sent.filter(|_| posted.is_ok()).map_or(0, |sent| sent.len);
    nics.len
}

/// It comes in at the second.
#[inline(always)]
pub fn nic_in(nics: &mut Nics) {
    let packet = nics.packet.get(..nics.len).unwrap_or_default();
    nics.b.nic.handle_packet(1, &Ip::new(nics.a.address, nics.b.address), packet);
}

/// The second's answer leaves it: its length.
#[inline(always)]
pub fn nic_answer(nics: &mut Nics) -> usize {
    nics.len = nics.b.nic.poll_transmit(1, &mut nics.packet[..]).map_or(0, |sent| sent.len);
    nics.len
}

/// It comes in at the first.
#[inline(always)]
pub fn nic_answered(nics: &mut Nics) {
    let packet = nics.packet.get(..nics.len).unwrap_or_default();
    nics.a.nic.handle_packet(1, &Ip::new(nics.b.address, nics.a.address), packet);
}

/// From the post to the completion: how many completions.
#[inline(always)]
pub fn nic_round(nics: &mut Nics) -> usize {
    nic_out(nics);
    nic_in(nics);
    nic_answer(nics);
    nic_answered(nics);
    // What is not written is no success.
    let empty = RnicWc { status: WcStatus::BadRespErr, ..RnicWc::EMPTY };
    let mut wcs = [empty; 1];
    let count = nics.a.nic.poll_cq(nics.a.cq, &mut wcs);
    count * usize::from(wcs[0].status == WcStatus::Success)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is counted is done.
    #[test]
    fn rounds_complete() {
        for mut nics in [nic_writes(), nic_writes_4k(), nic_adds()] {
            assert_eq!(nic_round(&mut nics), 1);
        }
        let mut sent = nic_write_sent();
        nic_in(&mut sent);
        assert_ne!(nic_answer(&mut sent), 0);
        let mut asked = nic_read_asked();
        assert!(nic_answer(&mut asked) > 4096);
    }
}
