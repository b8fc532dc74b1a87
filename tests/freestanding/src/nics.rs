//! Two NICs back to back: what one sends is handed to the other. No engine, no wire, no clock.

use core::net::{IpAddr, Ipv4Addr};
use core::ptr::NonNull;

use verbring_sim::nic::{Nic, NicConfig, Transition};
use verbring_sim::packet::{Ip, MAX_PACKET};
use verbring_sys::rnic::{MrAccess, MrKeys, RnicWc, SendOp, SendWr, WcStatus};

use crate::scenario::Dealer;

/// Bytes of memory of each: the first half is written and read, then comes the word.
const BYTES: usize = 16384;
const WORD: usize = 8192;
/// Bytes of the write and the read: several packets, the last of them short and padded.
const LEN: usize = 3001;
const MTU: u32 = 1024;
/// Where peers find the memory of either.
const IOVA: u64 = 7 << 40;
/// Packets at most; a write, a read and an atomic take 9.
const PACKETS: u32 = 32;

struct Side {
    nic: Nic,
    cq: u32,
    qp: u32,
    memory: NonNull<u8>,
    keys: MrKeys,
}

fn address(node: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, node))
}

impl Side {
    fn new(dealer: &mut Dealer, node: u8) -> Result<Side, &'static str> {
        let config = NicConfig {
            max_qps: 2,
            max_cqs: 1,
            cq_depth: 8,
            sq_depth: 4,
            rq_depth: 4,
            max_keys: 4,
            seed: u64::from(node),
            ..NicConfig::new(address(node))
        };
        let mut nic = Nic::new(dealer.arena(config.bytes())?, config).map_err(|_| "no room for a NIC")?;
        let pd = nic.alloc_pd();
        let cq = nic.create_cq().ok_or("no completion queue")?;
        let qp = nic.create_qp(pd, cq, cq).ok_or("no queue pair")?;
        let memory = NonNull::from(dealer.deal(BYTES + 64)?).cast::<u8>();
        // SAFETY: 64 bytes more than needed were dealt, for the alignment.
        let memory = unsafe { memory.add(memory.align_offset(64)) };
        // SAFETY: as above; nobody else was dealt these bytes.
        unsafe { memory.write_bytes(0, BYTES) };
        // SAFETY: static memory, which nothing else refers to.
        let keys = unsafe { nic.reg_mr(pd, memory.as_ptr(), BYTES, IOVA, MrAccess::all()) };
        Ok(Side { nic, cq, qp, memory, keys: keys.ok_or("no key")? })
    }

    fn connect(&mut self, peer: IpAddr, dest_qp: u32) -> Result<(), &'static str> {
        let receive = Transition::ReadyToReceive {
            peer,
            dest_qp,
            mtu: MTU,
            rq_psn: 0xff_fffe,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 1,
        };
        let send =
            Transition::ReadyToSend { sq_psn: 0xff_fffe, timeout: 14, retry_count: 7, rnr_retry: 7, max_rd_atomic: 1 };
        for step in [Transition::Init { access: MrAccess::all() }, receive, send] {
            self.nic.modify_qp(self.qp, step).map_err(|_| "a queue pair does not connect")?;
        }
        Ok(())
    }

    fn byte(&self, offset: usize) -> u8 {
        // SAFETY: inside the memory, and no NIC is running.
        unsafe { self.memory.add(offset & (BYTES - 1)).read() }
    }

    fn set(&mut self, offset: usize, byte: u8) {
        // SAFETY: as above.
        unsafe { self.memory.add(offset & (BYTES - 1)).write(byte) }
    }

    fn word(&self) -> u64 {
        // SAFETY: inside the memory and aligned, and no NIC is running.
        unsafe { self.memory.add(WORD).cast::<u64>().read() }
    }
}

/// Runs once; the error says what went wrong.
pub(crate) fn run(dealer: &mut Dealer) -> Result<(), &'static str> {
    let (mut a, mut b) = (Side::new(dealer, 1)?, Side::new(dealer, 2)?);
    a.connect(address(2), b.qp)?;
    b.connect(address(1), a.qp)?;
    let pattern = |i: usize| (i * 11 + 5) as u8;
    for i in 0..LEN {
        a.set(i, pattern(i));
    }
    one(&mut a, &mut b, SendOp::Write, 0, 100, LEN)?;
    if !(0..LEN).all(|i| b.byte(100 + i) == pattern(i)) || b.byte(99) != 0 || b.byte(100 + LEN) != 0 {
        return Err("the write brought other bytes");
    }
    one(&mut a, &mut b, SendOp::Read, 4096, 100, LEN)?;
    if !(0..LEN).all(|i| a.byte(4096 + i) == pattern(i)) || a.byte(4095) != 0 || a.byte(4096 + LEN) != 0 {
        return Err("the read brought other bytes");
    }
    for (old, new) in [(0, 40), (40, 80)] {
        one(&mut a, &mut b, SendOp::FetchAdd, WORD, WORD, 8)?;
        if a.word() != old || b.word() != new {
            return Err("the atomic is wrong");
        }
    }
    Ok(())
}

/// Posts one request of `a`'s, carries packets until there are none, and takes its completion.
fn one(a: &mut Side, b: &mut Side, op: SendOp, local: usize, remote: usize, len: usize) -> Result<(), &'static str> {
    let wr = SendWr {
        wr_id: 9,
        op,
        local: a.memory.as_ptr().wrapping_add(local),
        lkey: a.keys.lkey,
        remote: IOVA + remote as u64,
        rkey: b.keys.rkey,
        len: len as u32,
        swap_add: 40,
        ..SendWr::EMPTY
    };
    // SAFETY: static memory.
    unsafe { a.nic.post_send(a.qp, &wr) }.map_err(|_| "not posted")?;
    let mut buffer = [0; MAX_PACKET];
    let mut left = PACKETS;
    loop {
        let (there, back) = (carry(&mut a.nic, &mut b.nic, &mut buffer), carry(&mut b.nic, &mut a.nic, &mut buffer));
        left = left.checked_sub(there + back).ok_or("too many packets")?;
        if there + back == 0 {
            break;
        }
    }
    // What is not written is no success.
    let empty = RnicWc { status: WcStatus::BadRespErr, ..RnicWc::EMPTY };
    let mut wcs = [empty; 2];
    let count = a.nic.poll_cq(a.cq, &mut wcs);
    let [wc, _] = wcs;
    if count == 1 && wc.wr_id == 9 && wc.status == WcStatus::Success { Ok(()) } else { Err("it did not succeed") }
}

/// One packet of `from`, if it has one: how many.
fn carry(from: &mut Nic, to: &mut Nic, buffer: &mut [u8; MAX_PACKET]) -> u32 {
    let Some(out) = from.poll_transmit(0, buffer) else { return 0 };
    let ip = Ip::new(from.config().address, out.to);
    to.handle_packet(0, &ip, buffer.get(..out.len).unwrap_or_default());
    1
}
