//! Two NICs back to back: every verb, every way to fail, and every single packet lost, doubled or late.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;
use verbring_sim::nic::{Delay, ModifyError, Nic, NicConfig, Pd, QpState, Transition, Weakness};
use verbring_sim::packet::{Header, Ip, MAX_PACKET, Nak, Opcode, Syndrome};
use verbring_sim::random::Random;
use verbring_slab::{Arena, Region, RegionOptions};
use verbring_sys::rnic::{
    AsyncEvent, MrAccess, MrKeys, PostError, RecvWr, RnicWc, SendFlags, SendOp, SendWr, WcOp, WcStatus,
};

const ALL: MrAccess = MrAccess::all();
const BYTES: usize = 1 << 16;
/// Where peers find the memory.
const IOVA: u64 = 7 << 40;
/// Bytes on either side of what is registered, which nobody may touch.
const GUARD: usize = 4096;

fn address(node: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, node as u8 + 1))
}

/// What becomes of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Pass,
    Lose,
    Double,
    /// It comes behind the next one.
    Late,
}

struct Side {
    nic: Nic,
    pd: Pd,
    cq: u32,
    qp: u32,
    memory: Region,
    keys: MrKeys,
}

impl Side {
    fn new(node: usize, config: NicConfig, access: MrAccess) -> Side {
        let arena = Arena::from_region(Region::private(config.bytes(), RegionOptions::default()).unwrap());
        let mut nic = Nic::new(arena, NicConfig { address: address(node), ..config }).unwrap();
        let (pd, cq) = (nic.alloc_pd(), nic.create_cq().unwrap());
        let qp = nic.create_qp(pd, cq, cq).unwrap();
        let memory = Region::private(BYTES + 2 * GUARD, RegionOptions::default()).unwrap();
        // SAFETY: the region is kept beside the NIC, which is dropped first.
        let keys = unsafe { nic.reg_mr(pd, memory.base().as_ptr().add(GUARD), BYTES, IOVA, access) }.unwrap();
        Side { nic, pd, cq, qp, memory, keys }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: tests stay inside.
        unsafe { self.memory.base().as_ptr().add(GUARD + offset) }
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        // SAFETY: inside the region, and no NIC is running.
        unsafe { std::slice::from_raw_parts(self.at(offset), len) }.to_vec()
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(offset), bytes.len()) }
    }

    fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.read(offset, 8).try_into().unwrap())
    }

    fn guards_are_whole(&self) -> bool {
        // SAFETY: as above.
        let all = unsafe { std::slice::from_raw_parts(self.memory.base().as_ptr(), BYTES + 2 * GUARD) };
        all[..GUARD].iter().chain(&all[GUARD + BYTES..]).all(|b| *b == 0)
    }

    fn post(&mut self, wr: SendWr) -> Result<(), PostError> {
        // SAFETY: local memory is the region's, or inline.
        unsafe { self.nic.post_send(self.qp, &wr) }
    }

    fn recv(&mut self, wr_id: u64, offset: usize, len: u32) {
        let wr = RecvWr { wr_id, local: self.at(offset), len, lkey: self.keys.lkey };
        // SAFETY: as above.
        unsafe { self.nic.post_recv(self.qp, &wr) }.unwrap();
    }

    fn completions(&mut self) -> Vec<RnicWc> {
        let mut wcs = [RnicWc::EMPTY; 64];
        let count = self.nic.poll_cq(self.cq, &mut wcs);
        wcs[..count].to_vec()
    }

    fn events(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.nic.async_event()).collect()
    }
}

struct Pair {
    sides: [Side; 2],
    now: u64,
    /// Packets under way to a side.
    wire: VecDeque<(usize, Vec<u8>)>,
    /// Packets ever sent, of both.
    sent: usize,
    mtu: u32,
    rnr_retry: u8,
    max_rd: u8,
}

fn config() -> NicConfig {
    NicConfig { max_qps: 4, cq_depth: 64, sq_depth: 32, rq_depth: 16, ..NicConfig::new(address(0)) }
}

impl Pair {
    fn with(config: NicConfig, mtu: u32, access: MrAccess) -> Pair {
        let sides = [0, 1].map(|node| Side::new(node, NicConfig { seed: node as u64 + 7, ..config }, access));
        Pair { sides, now: 0, wire: VecDeque::new(), sent: 0, mtu, rnr_retry: 7, max_rd: 4 }
    }

    fn new(mtu: u32) -> Pair {
        let mut pair = Pair::with(config(), mtu, ALL);
        pair.connect();
        pair
    }

    fn steps(&self, side: usize) -> [Transition; 3] {
        let dest_qp = self.sides[1 - side].qp;
        [
            Transition::Init { access: ALL },
            Transition::ReadyToReceive {
                peer: address(1 - side),
                dest_qp,
                mtu: self.mtu,
                // Near the wrap, so that every test crosses it.
                rq_psn: 0xff_fff0 + 1 - side as u32,
                max_dest_rd_atomic: self.max_rd,
                min_rnr_timer: 1,
            },
            Transition::ReadyToSend {
                sq_psn: 0xff_fff0 + side as u32,
                timeout: 4,
                retry_count: 7,
                rnr_retry: self.rnr_retry,
                max_rd_atomic: self.max_rd,
            },
        ]
    }

    fn connect(&mut self) {
        for side in 0..2 {
            for step in self.steps(side) {
                let qp = self.sides[side].qp;
                self.sides[side].nic.modify_qp(qp, step).unwrap();
            }
        }
    }

    /// Moves packets until nothing is under way and nothing is waited for, for at most `limit` of virtual time.
    fn run_for(&mut self, limit: u64, mut fate: impl FnMut(usize, &Header) -> Fate) {
        let end = self.now + limit;
        let mut late: Option<(usize, Vec<u8>)> = None;
        loop {
            let mut is_idle = true;
            for side in 0..2 {
                let mut buffer = [0; MAX_PACKET];
                while let Some(out) = self.sides[side].nic.poll_transmit(self.now, &mut buffer) {
                    is_idle = false;
                    assert_eq!(out.to, address(1 - side));
                    let packet = buffer[..out.len].to_vec();
                    let (header, _) = Header::parse(&packet).expect("a NIC sends packets");
                    let fate = fate(self.sent, &header);
                    self.sent += 1;
                    match fate {
                        Fate::Pass => self.wire.push_back((1 - side, packet)),
                        Fate::Lose => {}
                        Fate::Double => {
                            self.wire.push_back((1 - side, packet.clone()));
                            self.wire.push_back((1 - side, packet));
                        }
                        Fate::Late => {
                            late = Some((1 - side, packet));
                            continue;
                        }
                    }
                    self.wire.extend(late.take());
                }
            }
            self.now += 100;
            if let Some((to, packet)) = self.wire.pop_front() {
                is_idle = false;
                self.sides[to].nic.handle_packet(self.now, &Ip::new(address(1 - to), address(to)), &packet);
            }
            for side in 0..2 {
                self.sides[side].nic.handle_timeout(self.now);
            }
            if is_idle {
                if let Some((to, packet)) = late.take() {
                    self.wire.push_back((to, packet));
                    continue;
                }
                let next = self.sides.iter().map(|s| s.nic.poll_timeout()).min().unwrap();
                if next == u64::MAX || next > end {
                    return;
                }
                self.now = self.now.max(next);
                for side in &mut self.sides {
                    side.nic.handle_timeout(next);
                }
            }
        }
    }

    fn run(&mut self) {
        self.run_for(1 << 40, |_, _| Fate::Pass);
    }

    fn ends(&mut self, side: usize) -> Vec<(u64, WcStatus)> {
        self.sides[side].completions().iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    /// A request of side 0 between its memory at `local` and side 1's at `remote`.
    fn wr(&self, wr_id: u64, op: SendOp, local: usize, remote: usize, len: u32) -> SendWr {
        SendWr {
            wr_id,
            op,
            local: self.sides[0].at(local),
            lkey: self.sides[0].keys.lkey,
            remote: IOVA + remote as u64,
            rkey: self.sides[1].keys.rkey,
            len,
            ..SendWr::EMPTY
        }
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) ^ (i >> 8) as u8).collect()
}

const OK: WcStatus = WcStatus::Success;

#[test]
fn states_and_steps_are_those_of_the_verbs() {
    let pair = Pair::with(config(), 1024, ALL);
    let [init, rtr, rts] = pair.steps(0);
    let mut side = Side::new(0, config(), ALL);
    let steps = [init, rtr, rts, Transition::SendQueueDrain, Transition::Error, Transition::Reset];
    // For each state the way there, and the steps that lead on.
    use QpState as S;
    let ways: [(&[Transition], S, &[S]); 6] = [
        (&[Transition::Reset], S::Reset, &[S::Init, S::Error, S::Reset]),
        (&[Transition::Reset, init], S::Init, &[S::Init, S::ReadyToReceive, S::Error, S::Reset]),
        (&[Transition::Reset, init, rtr], S::ReadyToReceive, &[S::ReadyToSend, S::Error, S::Reset]),
        (&[Transition::Reset, init, rtr, rts], S::ReadyToSend, &[S::SendQueueDrain, S::Error, S::Reset]),
        (
            &[Transition::Reset, init, rtr, rts, Transition::SendQueueDrain],
            S::SendQueueDrain,
            &[S::ReadyToSend, S::Error, S::Reset],
        ),
        (&[Transition::Error], S::Error, &[S::Error, S::Reset]),
    ];
    for (way, state, legal) in ways {
        for step in steps {
            for step in way {
                side.nic.modify_qp(side.qp, *step).unwrap();
            }
            assert_eq!(side.nic.query_qp(side.qp), Some(state));
            let took = side.nic.modify_qp(side.qp, step);
            let now = side.nic.query_qp(side.qp).unwrap();
            match took {
                Ok(()) => assert!(legal.contains(&now), "{state:?} to {now:?}"),
                Err(error) => assert_eq!((error, now), (ModifyError::State { from: state }, state)),
            }
            let target = match step {
                Transition::Init { .. } => S::Init,
                Transition::ReadyToReceive { .. } => S::ReadyToReceive,
                Transition::ReadyToSend { .. } => S::ReadyToSend,
                Transition::SendQueueDrain => S::SendQueueDrain,
                Transition::Error => S::Error,
                _ => S::Reset,
            };
            assert_eq!(took.is_ok(), legal.contains(&target), "{state:?} by {step:?}");
        }
    }
    assert_eq!(side.nic.modify_qp(12345, Transition::Reset), Err(ModifyError::NoSuchQp));
    // A post where it cannot be.
    side.nic.modify_qp(side.qp, Transition::Reset).unwrap();
    assert_eq!(side.post(SendWr::EMPTY), Err(PostError::State));
    side.nic.modify_qp(side.qp, init).unwrap();
    assert_eq!(side.post(SendWr::EMPTY), Err(PostError::State));
    side.recv(1, 0, 8);
    let Transition::ReadyToReceive { peer, dest_qp, rq_psn, .. } = rtr else { unreachable!() };
    for (mtu, max_dest_rd_atomic, min_rnr_timer, what) in
        [(1000, 1, 1, "mtu"), (256, 17, 1, "max_dest_rd_atomic"), (256, 1, 32, "min_rnr_timer")]
    {
        let step = Transition::ReadyToReceive { peer, dest_qp, mtu, rq_psn, max_dest_rd_atomic, min_rnr_timer };
        assert_eq!(side.nic.modify_qp(side.qp, step), Err(ModifyError::Attribute(what)));
    }
}

/// Lengths around everything that a packet can end at.
fn lengths(mtu: u32) -> Vec<u32> {
    vec![0, 1, 2, 3, 4, 5, 63, 64, 65, mtu - 1, mtu, mtu + 1, 2 * mtu - 1, 2 * mtu, 2 * mtu + 1, 5 * mtu + 7]
}

#[test]
fn every_operation_at_every_mtu() {
    for mtu in [256, 512, 1024, 2048, 4096] {
        let mut pair = Pair::new(mtu);
        for (i, len) in lengths(mtu).into_iter().enumerate() {
            let bytes = pattern(len as usize, i as u8);
            // Write, and beside it nothing.
            pair.sides[0].write(0, &bytes);
            pair.sides[1].write(0, &vec![0xee; 30000]);
            let write = pair.wr(1, SendOp::Write, 0, 100, len);
            pair.sides[0].post(write).unwrap();
            pair.run();
            assert_eq!(pair.ends(0), [(1, OK)]);
            let seen = pair.sides[1].read(0, 30000);
            assert_eq!(&seen[100..100 + len as usize], &bytes[..], "write of {len} at mtu {mtu}");
            assert!(seen[..100].iter().chain(&seen[100 + len as usize..]).all(|b| *b == 0xee));
            // Read.
            pair.sides[0].write(0, &vec![0x11; 30000]);
            let read = pair.wr(2, SendOp::Read, 7, 100, len);
            pair.sides[0].post(read).unwrap();
            pair.run();
            assert_eq!(pair.ends(0), [(2, OK)]);
            let seen = pair.sides[0].read(0, 30000);
            assert_eq!(&seen[7..7 + len as usize], &bytes[..], "read of {len} at mtu {mtu}");
            assert!(seen[..7].iter().chain(&seen[7 + len as usize..]).all(|b| *b == 0x11));
            // Send, send with immediate, write with immediate.
            for (op, imm) in [(SendOp::Send, false), (SendOp::Send, true), (SendOp::Write, true)] {
                pair.sides[0].write(0, &bytes);
                pair.sides[1].write(0, &vec![0xee; 60000]);
                pair.sides[1].recv(9, 30000, len);
                let imm_flag = if imm { SendFlags::IMM } else { SendFlags::empty() };
                let wr = pair.wr(3, op, 0, 100, len);
                let wr = SendWr { imm: 0x1234_5678, flags: SendFlags::SIGNALED | imm_flag, ..wr };
                pair.sides[0].post(wr).unwrap();
                pair.run();
                assert_eq!(pair.ends(0), [(3, OK)]);
                let got = pair.sides[1].completions();
                assert_eq!((got.len(), got[0].wr_id, got[0].status, got[0].byte_len), (1, 9, OK, len));
                assert_eq!(got[0].imm, imm.then_some(0x1234_5678));
                let (op, at) = if op == SendOp::Send { (WcOp::Recv, 30000) } else { (WcOp::RecvWriteImm, 100) };
                assert_eq!(got[0].op, op);
                assert_eq!(pair.sides[1].read(at, len as usize), bytes);
            }
        }
        // Atomics.
        pair.sides[1].write(64, &10u64.to_ne_bytes());
        let add = SendWr { swap_add: 5, ..pair.wr(4, SendOp::FetchAdd, 0, 64, 8) };
        let miss = SendWr { swap_add: 9, compare: 14, ..pair.wr(5, SendOp::CompareSwap, 8, 64, 8) };
        let hit = SendWr { swap_add: 9, compare: 15, ..pair.wr(6, SendOp::CompareSwap, 16, 64, 8) };
        for wr in [add, miss, hit] {
            pair.sides[0].post(wr).unwrap();
        }
        pair.run();
        assert_eq!(pair.ends(0), [(4, OK), (5, OK), (6, OK)]);
        let side = &pair.sides[0];
        assert_eq!([side.word(0), side.word(8), side.word(16), pair.sides[1].word(64)], [10, 15, 15, 9]);
        assert!(pair.sides.iter().all(Side::guards_are_whole));
    }
}

/// A bit of everything, many packets long; what memory must look like afterwards is known.
fn workload(pair: &mut Pair) -> usize {
    pair.sides[0].write(0, &pattern(2000, 1));
    pair.sides[1].write(20000, &pattern(3000, 2));
    pair.sides[1].write(64, &100u64.to_ne_bytes());
    for i in 0..3 {
        pair.sides[1].recv(100 + i, 40000 + 2000 * i as usize, 2000);
    }
    let wrs = [
        pair.wr(0, SendOp::Write, 0, 1000, 1500),
        SendWr { swap_add: 1, ..pair.wr(1, SendOp::FetchAdd, 8000, 64, 8) },
        pair.wr(2, SendOp::Read, 10000, 20000, 1100),
        pair.wr(3, SendOp::Send, 0, 0, 600),
        SendWr { swap_add: 10, ..pair.wr(4, SendOp::FetchAdd, 8008, 64, 8) },
        SendWr { flags: SendFlags::IMM | SendFlags::SIGNALED, imm: 7, ..pair.wr(5, SendOp::Write, 100, 5000, 700) },
        SendWr { compare: 111, swap_add: 500, ..pair.wr(6, SendOp::CompareSwap, 8016, 64, 8) },
        SendWr { flags: SendFlags::SIGNALED | SendFlags::FENCE, ..pair.wr(7, SendOp::Send, 10000, 0, 300) },
        pair.wr(8, SendOp::Read, 15000, 21000, 5),
    ];
    for wr in wrs {
        pair.sides[0].post(wr).unwrap();
    }
    wrs.len()
}

fn check_workload(pair: &mut Pair, count: usize, what: &str) {
    let ends: Vec<_> = (0..count as u64).map(|i| (i, OK)).collect();
    assert_eq!(pair.ends(0), ends, "{what}");
    let [a, b] = &pair.sides;
    assert_eq!(b.read(1000, 1500), a.read(0, 1500), "{what}");
    assert_eq!(a.read(10000, 1100), b.read(20000, 1100), "{what}");
    assert_eq!([a.word(8000), a.word(8008), a.word(8016), b.word(64)], [100, 101, 111, 500], "{what}");
    assert_eq!((b.read(40000, 600), b.read(5000, 700)), (a.read(0, 600), a.read(100, 700)), "{what}");
    assert_eq!((b.read(44000, 300), a.read(15000, 5)), (a.read(10000, 300), b.read(21000, 5)), "{what}");
    let got: Vec<_> = pair.sides[1].completions().iter().map(|wc| (wc.wr_id, wc.byte_len, wc.imm)).collect();
    assert_eq!(got, [(100, 600, None), (101, 700, Some(7)), (102, 300, None)], "{what}");
    assert!(pair.sides.iter().all(Side::guards_are_whole), "{what}");
}

/// Each packet of an exchange lost, doubled or late, one at a time, and then each two of them lost.
#[test]
fn any_packet_lost_doubled_or_late() {
    let mut pair = Pair::new(256);
    let count = workload(&mut pair);
    pair.run();
    check_workload(&mut pair, count, "without faults");
    let packets = pair.sent;
    assert!(packets > 20, "{packets}");
    for fate in [Fate::Lose, Fate::Double, Fate::Late] {
        for victim in 0..packets {
            let mut pair = Pair::new(256);
            let count = workload(&mut pair);
            pair.run_for(1 << 40, |at, _| if at == victim { fate } else { Fate::Pass });
            check_workload(&mut pair, count, &format!("packet {victim}"));
        }
    }
    for first in 0..packets {
        for second in first + 1..packets + 5 {
            let mut pair = Pair::new(256);
            let count = workload(&mut pair);
            pair.run_for(1 << 40, |at, _| if at == first || at == second { Fate::Lose } else { Fate::Pass });
            check_workload(&mut pair, count, &format!("packets {first} and {second}"));
        }
    }
}

#[test]
fn many_faults_of_all_kinds() {
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let mut pair = Pair::new([256, 512, 1024][seed as usize % 3]);
        let count = workload(&mut pair);
        pair.run_for(1 << 40, |_, _| match random.below(20) {
            0 | 1 => Fate::Lose,
            2 => Fate::Double,
            3 => Fate::Late,
            _ => Fate::Pass,
        });
        check_workload(&mut pair, count, &format!("seed {seed}"));
    }
}

#[test]
fn silence_ends_in_an_error_and_the_rest_is_flushed() {
    let mut pair = Pair::new(1024);
    for i in 0..3 {
        let wr = SendWr { flags: SendFlags::empty(), ..pair.wr(i, SendOp::Write, 0, 0, 8) };
        pair.sides[0].post(wr).unwrap();
    }
    pair.sides[0].recv(50, 0, 8);
    pair.run_for(1 << 40, |_, _| Fate::Lose);
    let flushed = WcStatus::WrFlushErr;
    assert_eq!(pair.ends(0), [(0, WcStatus::RetryExcErr), (1, flushed), (2, flushed), (50, flushed)]);
    assert_eq!(pair.sides[0].nic.counters.timeouts, 8, "seven more tries");
    assert_eq!(pair.sides[0].nic.query_qp(pair.sides[0].qp), Some(QpState::Error));
    // What is posted now is flushed at once, signalled or not.
    let wr = SendWr { flags: SendFlags::empty(), ..pair.wr(9, SendOp::Write, 0, 0, 8) };
    pair.sides[0].post(wr).unwrap();
    pair.sides[0].recv(51, 0, 8);
    assert_eq!(pair.ends(0), [(9, flushed), (51, flushed)]);
}

#[test]
fn a_nic_that_backs_off_waits_twice_as_long_each_time() {
    for (backs_off, waits) in [(false, 8), (true, 255)] {
        let mut pair = Pair::with(NicConfig { backs_off, ..config() }, 1024, MrAccess::all());
        pair.connect();
        let wr = pair.wr(0, SendOp::Write, 0, 0, 8);
        pair.sides[0].post(wr).unwrap();
        pair.run_for(1 << 40, |_, _| Fate::Lose);
        assert_eq!(pair.ends(0), [(0, WcStatus::RetryExcErr)]);
        // 65,536 ns, as the timeout says; and less than one of them between the ends of waits.
        let took = pair.now / (4096 << 4);
        assert!((waits..waits + 2).contains(&took), "{took} timeouts");
    }
}

#[test]
fn a_send_waits_for_a_receive() {
    let mut pair = Pair::new(1024);
    for i in 0..3 {
        let wr = pair.wr(i, SendOp::Send, 0, 0, 8);
        pair.sides[0].post(wr).unwrap();
    }
    pair.run_for(3_000_000, |_, _| Fate::Pass);
    assert_eq!(pair.ends(0), []);
    assert!(pair.sides[1].nic.counters.nak_rnr > 3);
    for i in 0..3 {
        pair.sides[1].recv(i, 0, 8);
    }
    pair.run();
    assert_eq!(pair.ends(0), [(0, OK), (1, OK), (2, OK)]);
    // Not for ever, if that was not asked for.
    let mut pair = Pair::with(config(), 1024, ALL);
    pair.rnr_retry = 2;
    pair.connect();
    let wr = pair.wr(0, SendOp::Send, 0, 0, 8);
    pair.sides[0].post(wr).unwrap();
    pair.run();
    assert_eq!(pair.ends(0), [(0, WcStatus::RnrRetryExcErr)]);
    assert_eq!(pair.sides[1].nic.counters.nak_rnr, 3);
}

/// With credits known, no message is sent in vain but the one that asks.
#[test]
fn credits_hold_messages_back() {
    let mut pair = Pair::new(1024);
    pair.sides[1].recv(0, 0, 8);
    let wr = pair.wr(0, SendOp::Send, 0, 0, 8);
    pair.sides[0].post(wr).unwrap();
    pair.run();
    assert_eq!(pair.ends(0), [(0, OK)]);
    for i in 1..6 {
        let wr = pair.wr(i, SendOp::Send, 0, 0, 8);
        pair.sides[0].post(wr).unwrap();
    }
    let before = pair.sides[1].nic.counters.received;
    pair.run_for(1000, |_, _| Fate::Pass);
    assert_eq!(pair.sides[1].nic.counters.received - before, 1, "one asks, four wait");
    for i in 1..6 {
        pair.sides[1].recv(i, 0, 8);
    }
    pair.run();
    assert_eq!(pair.ends(0), [1, 2, 3, 4, 5].map(|i| (i, OK)));
}

#[test]
fn what_is_not_allowed_breaks_the_connection() {
    type Change = fn(&mut Pair, &mut SendWr);
    let access = WcStatus::RemAccessErr;
    let cases: [(&str, SendOp, Change, WcStatus); 9] = [
        ("a guessed key", SendOp::Write, |_, wr| wr.rkey ^= 1, access),
        ("one byte behind the end", SendOp::Write, |_, wr| wr.remote = IOVA + BYTES as u64 - 7, access),
        ("one byte before the start", SendOp::Read, |_, wr| wr.remote = IOVA - 1, access),
        ("around the end of the address space", SendOp::Read, |_, wr| wr.remote = u64::MAX - 3, access),
        ("a read of what is not to be read", SendOp::Read, |pair, wr| only(pair, wr, MrAccess::REMOTE_WRITE), access),
        (
            "a write to what is not to be written",
            SendOp::Write,
            |pair, wr| only(pair, wr, MrAccess::REMOTE_READ),
            access,
        ),
        ("an atomic without the right", SendOp::FetchAdd, |pair, wr| only(pair, wr, MrAccess::REMOTE_WRITE), access),
        ("memory of another domain", SendOp::Write, |pair, wr| other_domain(pair, wr), access),
        (
            "memory that was taken back",
            SendOp::Write,
            |pair, _| {
                let key = pair.sides[1].keys.lkey;
                assert!(pair.sides[1].nic.dereg_mr(key));
            },
            access,
        ),
    ];
    for (what, op, change, status) in cases {
        let mut pair = Pair::new(1024);
        pair.sides[1].recv(70, 0, 8);
        let mut wr = pair.wr(1, op, 0, 0, 8);
        change(&mut pair, &mut wr);
        let before = pair.sides[1].read(0, BYTES);
        let good = pair.wr(0, SendOp::Write, 0, 0, 0);
        let behind = pair.wr(2, SendOp::Write, 0, 0, 8);
        for wr in [good, wr, behind] {
            pair.sides[0].post(wr).unwrap();
        }
        pair.run();
        assert_eq!(pair.ends(0), [(0, OK), (1, status), (2, WcStatus::WrFlushErr)], "{what}");
        assert_eq!(pair.ends(1), [(70, WcStatus::WrFlushErr)], "{what}");
        assert_eq!(pair.sides[1].read(0, BYTES), before, "{what}");
        let qp = pair.sides[1].qp;
        assert_eq!(pair.sides[1].events(), [AsyncEvent::QpAccessError { qp }], "{what}");
        for side in &pair.sides {
            assert_eq!(side.nic.query_qp(side.qp), Some(QpState::Error), "{what}");
        }
    }
}

/// Another registration of the target's memory, with other rights.
fn only(pair: &mut Pair, wr: &mut SendWr, access: MrAccess) {
    let (pd, base) = (pair.sides[1].pd, pair.sides[1].at(0));
    // SAFETY: the region lives as long as the NIC.
    wr.rkey = unsafe { pair.sides[1].nic.reg_mr(pd, base, BYTES, IOVA, access | MrAccess::LOCAL_WRITE) }.unwrap().rkey;
}

fn other_domain(pair: &mut Pair, wr: &mut SendWr) {
    let (pd, base) = (pair.sides[1].nic.alloc_pd(), pair.sides[1].at(0));
    // SAFETY: the region lives as long as the NIC.
    wr.rkey = unsafe { pair.sides[1].nic.reg_mr(pd, base, BYTES, IOVA, ALL) }.unwrap().rkey;
}

#[test]
fn local_errors() {
    // A key of nobody; a sink that is not to be written.
    for op in [SendOp::Write, SendOp::Read] {
        let mut pair = Pair::new(1024);
        let wr = SendWr { lkey: 1, ..pair.wr(1, op, 0, 0, 8) };
        pair.sides[0].post(wr).unwrap();
        pair.run();
        assert_eq!(pair.ends(0), [(1, WcStatus::LocProtErr)]);
        let qp = pair.sides[0].qp;
        assert_eq!(pair.sides[0].events(), [AsyncEvent::QpFatal { qp }]);
    }
    // A message that is longer than its receive.
    let mut pair = Pair::new(1024);
    pair.sides[1].recv(5, 0, 4);
    let wr = pair.wr(1, SendOp::Send, 0, 0, 8);
    pair.sides[0].post(wr).unwrap();
    pair.run();
    assert_eq!((pair.ends(0), pair.ends(1)), (vec![(1, WcStatus::RemInvReqErr)], vec![(5, WcStatus::LocLenErr)]));
    // What cannot be posted.
    let mut pair = Pair::new(1024);
    let long = SendWr { flags: SendFlags::INLINE, ..pair.wr(1, SendOp::Write, 0, 0, 65) };
    assert_eq!(pair.sides[0].post(long), Err(PostError::TooMuchInline));
    let odd = pair.wr(1, SendOp::FetchAdd, 0, 4, 8);
    assert_eq!(pair.sides[0].post(odd), Err(PostError::Misaligned));
    let huge = pair.wr(1, SendOp::Write, 0, 0, u32::MAX);
    assert_eq!(pair.sides[0].post(huge), Err(PostError::TooLong));
    for i in 0..32 {
        let wr = pair.wr(i, SendOp::Write, 0, 0, 8);
        pair.sides[0].post(wr).unwrap();
    }
    let wr = pair.wr(99, SendOp::Write, 0, 0, 8);
    assert_eq!(pair.sides[0].post(wr), Err(PostError::Full));
    pair.run();
    pair.sides[0].post(wr).unwrap();
}

#[test]
fn inline_and_silence() {
    let mut pair = Pair::new(1024);
    let mut bytes = pattern(64, 3);
    let wr =
        SendWr { local: bytes.as_mut_ptr(), lkey: 0, flags: SendFlags::INLINE, ..pair.wr(1, SendOp::Write, 0, 8, 64) };
    pair.sides[0].post(wr).unwrap();
    bytes.fill(0);
    let last = pair.wr(2, SendOp::Write, 0, 0, 0);
    pair.sides[0].post(last).unwrap();
    pair.run();
    assert_eq!(pair.ends(0), [(2, OK)], "the first was not signalled");
    assert_eq!(pair.sides[1].read(8, 64), pattern(64, 3));
}

/// A read and then a write to what it reads into the local memory's source: only a fence keeps them apart.
#[test]
fn fence() {
    for fenced in [false, true] {
        let mut pair = Pair::new(1024);
        pair.sides[1].write(0, &7u64.to_ne_bytes());
        let read = pair.wr(1, SendOp::Read, 0, 0, 8);
        let flags = if fenced { SendFlags::FENCE | SendFlags::SIGNALED } else { SendFlags::SIGNALED };
        let write = SendWr { flags, ..pair.wr(2, SendOp::Write, 0, 64, 8) };
        pair.sides[0].post(read).unwrap();
        pair.sides[0].post(write).unwrap();
        pair.run();
        assert_eq!(pair.ends(0), [(1, OK), (2, OK)]);
        assert_eq!(pair.sides[1].word(64), if fenced { 7 } else { 0 }, "what was read goes on");
    }
}

#[test]
fn reads_keep_to_the_number_that_was_agreed_on() {
    for max_rd in [1, 3] {
        let mut pair = Pair::with(config(), 256, ALL);
        pair.max_rd = max_rd;
        pair.connect();
        let (mut under_way, mut most) = (0i32, 0);
        for i in 0..8 {
            let wr = pair.wr(i, SendOp::Read, 1000 * i as usize, 0, 900);
            pair.sides[0].post(wr).unwrap();
        }
        pair.run_for(1 << 40, |_, header| {
            under_way += i32::from(header.opcode == Opcode::ReadRequest);
            most = most.max(under_way);
            under_way -= i32::from(matches!(header.opcode, Opcode::ReadLast | Opcode::ReadOnly));
            Fate::Pass
        });
        assert_eq!((pair.ends(0).len(), most), (8, i32::from(max_rd)));
    }
}

#[test]
fn memory_windows() {
    let mut pair = Pair::new(1024);
    let mr = pair.sides[1].keys;
    let pd = pair.sides[1].pd;
    let window = pair.sides[1].nic.alloc_mw(pd).unwrap();
    let key = window & !0xff | window.wrapping_add(1) & 0xff;
    let bind = SendWr {
        wr_id: 1,
        op: SendOp::BindWindow,
        local: pair.sides[1].at(512),
        lkey: mr.lkey,
        rkey: key,
        len: 64,
        access: MrAccess::REMOTE_WRITE,
        ..SendWr::EMPTY
    };
    pair.sides[1].post(bind).unwrap();
    pair.run();
    assert_eq!(pair.ends(1), [(1, OK)]);
    let write = SendWr { rkey: key, ..pair.wr(2, SendOp::Write, 0, 512, 64) };
    pair.sides[0].write(0, &pattern(64, 9));
    pair.sides[0].post(write).unwrap();
    // The peer ends it with a message.
    pair.sides[1].recv(3, 0, 8);
    let end = SendWr { imm: key, ..pair.wr(4, SendOp::SendInvalidate, 0, 0, 8) };
    pair.sides[0].post(end).unwrap();
    pair.run();
    assert_eq!((pair.ends(0), pair.ends(1)), (vec![(2, OK), (4, OK)], vec![(3, OK)]));
    assert_eq!(pair.sides[1].read(512, 64), pattern(64, 9));
    // Bound again, and ended by its owner: then it opens nothing.
    let again = SendWr { wr_id: 5, rkey: window & !0xff | window.wrapping_add(2) & 0xff, ..bind };
    let invalidate = SendWr { wr_id: 6, op: SendOp::LocalInvalidate, rkey: again.rkey, ..SendWr::EMPTY };
    pair.sides[1].post(again).unwrap();
    pair.sides[1].post(invalidate).unwrap();
    pair.run();
    assert_eq!(pair.ends(1), [(5, OK), (6, OK)]);
    let write = SendWr { rkey: again.rkey, ..pair.wr(7, SendOp::Write, 0, 512, 8) };
    pair.sides[0].post(write).unwrap();
    pair.run();
    assert_eq!(pair.ends(0), [(7, WcStatus::RemAccessErr)]);
    // A bind that cannot be.
    let mut pair = Pair::new(1024);
    let bind = SendWr { op: SendOp::BindWindow, len: 8, ..pair.wr(1, SendOp::Write, 0, 0, 0) };
    pair.sides[0].post(bind).unwrap();
    pair.run();
    assert_eq!(pair.ends(0), [(1, WcStatus::MwBindErr)]);
}

#[test]
fn drain() {
    let mut pair = Pair::new(256);
    for i in 0..2 {
        let wr = pair.wr(i, SendOp::Write, 0, 0, 5000);
        pair.sides[0].post(wr).unwrap();
    }
    let mut buffer = [0; MAX_PACKET];
    pair.sides[0].nic.poll_transmit(0, &mut buffer).unwrap();
    let qp = pair.sides[0].qp;
    pair.sides[0].nic.modify_qp(qp, Transition::SendQueueDrain).unwrap();
    pair.run();
    assert_eq!(pair.ends(0), [(0, OK)], "what was begun ends, nothing else begins");
    assert_eq!(pair.sides[0].events(), [AsyncEvent::SqDrained { qp }]);
    let rts = pair.steps(0)[2];
    pair.sides[0].nic.modify_qp(qp, rts).unwrap();
    pair.run();
    assert_eq!(pair.ends(0), [(1, OK)]);
}

#[test]
fn a_full_completion_queue_is_told_once() {
    let mut pair = Pair::with(NicConfig { cq_depth: 4, ..config() }, 1024, ALL);
    pair.connect();
    for i in 0..8 {
        let wr = pair.wr(i, SendOp::Write, 0, 0, 8);
        pair.sides[0].post(wr).unwrap();
    }
    pair.run();
    assert_eq!(pair.ends(0).len(), 4);
    let cq = pair.sides[0].cq;
    assert_eq!(pair.sides[0].events(), [AsyncEvent::CqError { cq }]);
}

/// Completed, and not there yet: what a slow way to memory shows, and what it never does.
#[test]
fn late_placement() {
    for relaxed in [false, true] {
        let delay = Some(Delay { max_ns: 100_000, relaxed });
        let (mut late, mut torn, mut overtaken) = (0, 0, 0);
        for seed in 0..60 {
            let weakness = Weakness { delay, ..Weakness::NONE };
            let mut pair = Pair::with(NicConfig { weakness, ..config() }, 1024, ALL);
            pair.connect();
            // Another seed for each round.
            for _ in 0..seed {
                let pd = pair.sides[1].nic.alloc_pd();
                let _ = pair.sides[1].nic.alloc_mw(pd);
            }
            pair.sides[0].write(0, &[1; 512]);
            let first = pair.wr(1, SendOp::Write, 0, 0, 512);
            let second = pair.wr(2, SendOp::Write, 0, 1024, 8);
            pair.sides[0].post(first).unwrap();
            pair.sides[0].post(second).unwrap();
            pair.run_for(1, |_, _| Fate::Pass);
            if pair.ends(0) == [(1, OK), (2, OK)] {
                late += u32::from(pair.sides[1].read(0, 512) != [1; 512]);
            }
            let mut steps = 0;
            while pair.sides[1].nic.poll_timeout() < u64::MAX && steps < 1000 {
                let first = pair.sides[1].read(0, 512);
                let (sum, flag) = (first.iter().map(|b| u32::from(*b)).sum::<u32>(), pair.sides[1].read(1024, 1)[0]);
                torn += u32::from(first[0] == 0 && first[511] == 1);
                overtaken += u32::from(flag == 1 && sum != 512);
                pair.now += 1000;
                let now = pair.now;
                pair.sides[1].nic.handle_timeout(now);
                steps += 1;
            }
            assert_eq!(pair.sides[1].read(0, 512), [1; 512]);
        }
        assert!(late > 0 && torn > 0, "relaxed {relaxed}: {late} late, {torn} torn");
        assert_eq!(overtaken > 0, relaxed, "{overtaken} overtaken");
    }
}

/// A read behind a write brings it to memory; so does the receive of a message.
#[test]
fn reads_and_messages_push_writes_through() {
    let weakness = Weakness { delay: Some(Delay { max_ns: 1 << 30, relaxed: true }), ..Weakness::NONE };
    for by_message in [false, true] {
        let mut pair = Pair::with(NicConfig { weakness, ..config() }, 1024, ALL);
        pair.connect();
        pair.sides[0].write(0, &[1; 512]);
        pair.sides[1].recv(9, 4096, 8);
        let write = pair.wr(1, SendOp::Write, 0, 0, 512);
        let push = pair.wr(2, if by_message { SendOp::Send } else { SendOp::Read }, 2000, 3000, 8);
        pair.sides[0].post(write).unwrap();
        pair.sides[0].post(push).unwrap();
        pair.run_for(1 << 20, |_, _| Fate::Pass);
        assert_eq!(pair.ends(0), [(1, OK), (2, OK)]);
        assert_eq!(pair.sides[1].read(0, 512), [1; 512]);
    }
}

#[test]
fn weak_nics_say_what_they_cannot() {
    let weakness = Weakness { no_atomics: true, no_imm: true, max_inline: 0, max_rd_atomic: 1, ..Weakness::NONE };
    let mut pair = Pair::with(NicConfig { weakness, ..config() }, 1024, ALL);
    pair.max_rd = 1;
    pair.connect();
    let atomic = pair.wr(1, SendOp::FetchAdd, 0, 0, 8);
    assert_eq!(pair.sides[0].post(atomic), Err(PostError::NotSupported));
    let imm = SendWr { flags: SendFlags::IMM, ..pair.wr(1, SendOp::Write, 0, 0, 8) };
    assert_eq!(pair.sides[0].post(imm), Err(PostError::NotSupported));
    let inline = SendWr { flags: SendFlags::INLINE, ..pair.wr(1, SendOp::Write, 0, 0, 1) };
    assert_eq!(pair.sides[0].post(inline), Err(PostError::TooMuchInline));
}

#[test]
fn poison() {
    let weakness = Weakness { poison: true, ..Weakness::NONE };
    let mut pair = Pair::with(NicConfig { weakness, ..config() }, 1024, ALL);
    pair.connect();
    let wr = SendWr { rkey: 0, ..pair.wr(1, SendOp::Write, 0, 0, 8) };
    pair.sides[0].post(wr).unwrap();
    pair.run();
    let ends = pair.sides[0].completions();
    assert_eq!((ends[0].wr_id, ends[0].status, ends[0].qp), (1, WcStatus::RemAccessErr, pair.sides[0].qp));
    assert_eq!((ends[0].byte_len, ends[0].op), (0xdead_dead, WcOp::RecvWriteImm));
}

/// A packet of an earlier queue pair of the same place finds nobody.
#[test]
fn a_stale_packet_changes_nothing() {
    let mut pair = Pair::new(1024);
    pair.sides[0].write(0, &[1; 8]);
    let wr = pair.wr(1, SendOp::Write, 0, 0, 8);
    pair.sides[0].post(wr).unwrap();
    let mut buffer = [0; MAX_PACKET];
    let out = pair.sides[0].nic.poll_transmit(0, &mut buffer).unwrap();
    let old = pair.sides[1].qp;
    assert!(pair.sides[1].nic.destroy_qp(old) && !pair.sides[1].nic.destroy_qp(old));
    let (pd, cq) = (pair.sides[1].pd, pair.sides[1].cq);
    pair.sides[1].qp = pair.sides[1].nic.create_qp(pd, cq, cq).unwrap();
    for step in pair.steps(1) {
        let qp = pair.sides[1].qp;
        pair.sides[1].nic.modify_qp(qp, step).unwrap();
    }
    pair.sides[1].nic.handle_packet(0, &Ip::new(address(0), address(1)), &buffer[..out.len]);
    assert_eq!((pair.sides[1].word(0), pair.sides[1].nic.counters.no_qp), (0, 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The peer that lies: any headers with a right ICRC, to the right queue pair, with keys it has or guesses.
    #[test]
    fn hostile_peer(packets in prop::collection::vec(
        (0usize..Opcode::ALL.len(), any::<[u32; 4]>(), -3i32..4, 0usize..300, 0usize..8), 1..60)) {
        let mut pair = Pair::new(256);
        // Reading only: what is written shows.
        let (pd, base) = (pair.sides[1].pd, pair.sides[1].at(0));
        // SAFETY: the region lives as long as the NIC.
        let read_only = unsafe { pair.sides[1].nic.reg_mr(pd, base, 4096, IOVA, MrAccess::REMOTE_READ) }.unwrap();
        let granted = pair.sides[1].nic.alloc_mw(pd).unwrap();
        let before = pair.sides[1].read(0, BYTES);
        let key = pair.sides[1].keys.lkey;
        let owner = pair.sides[1].keys;
        // Its own work is under way.
        for (i, op) in [SendOp::Read, SendOp::Write, SendOp::FetchAdd].into_iter().enumerate() {
            let wr = SendWr {
                wr_id: i as u64,
                op,
                len: 8,
                local: pair.sides[1].at(32768),
                lkey: key,
                remote: IOVA,
                rkey: pair.sides[0].keys.rkey,
                ..SendWr::EMPTY
            };
            pair.sides[1].post(wr).unwrap();
        }
        let mut buffer = [0; MAX_PACKET];
        while pair.sides[1].nic.poll_transmit(0, &mut buffer).is_some() {}
        let mut now = 0;
        for (opcode, numbers, near, len, choice) in packets {
            let opcode = Opcode::ALL[opcode];
            let psn = (0xff_fff0u32 + u32::from(!opcode.is_response())).wrapping_sub(u32::from(!opcode.is_response()))
                .wrapping_add(u32::from(opcode.is_response()))
                .wrapping_add_signed(near);
            let mut header = Header::new(opcode, pair.sides[1].qp, psn);
            header.rkey = [read_only.rkey, granted, numbers[0], owner.rkey ^ 1][choice % 4];
            header.address = IOVA + u64::from(numbers[1] % 5000);
            header.length = if choice % 2 == 0 { len as u32 } else { numbers[2] };
            header.imm = numbers[3];
            header.msn = numbers[2] & 0xff_ffff;
            header.syndrome = [Syndrome::Ack { credits: 31 }, Syndrome::Ack { credits: 3 },
                Syndrome::RnrNak { timer: 0 }, Syndrome::Nak(Nak::Sequence), Syndrome::Nak(Nak::RemoteAccess)][choice % 5];
            let len = if opcode.has_payload() { len } else { 0 };
            let mut packet = [0xab; MAX_PACKET];
            let ip = Ip::new(address(0), address(1));
            let total = header.seal(&mut packet, len, &ip).unwrap();
            now += 1000;
            pair.sides[1].nic.handle_packet(now, &ip, &packet[..total]);
            pair.sides[1].nic.handle_timeout(now);
            while pair.sides[1].nic.poll_transmit(now, &mut buffer).is_some() {}
        }
        // Its own read may be answered with anything; nothing else changes.
        let after = pair.sides[1].read(0, BYTES);
        prop_assert!(before[..32768] == after[..32768] && before[32776..] == after[32776..]);
        prop_assert!(pair.sides[1].guards_are_whole());
    }
}

/// What fails inside the NIC takes with it what is posted behind it, and nothing else.
#[test]
fn a_failed_invalidate_flushes_what_follows() {
    let mut pair = Pair::new(1024);
    let unbound = SendWr { rkey: 5, ..pair.wr(1, SendOp::LocalInvalidate, 0, 0, 0) };
    pair.sides[0].post(unbound).unwrap();
    for wr_id in [2, 3] {
        let write = pair.wr(wr_id, SendOp::Write, 0, 0, 8);
        pair.sides[0].post(write).unwrap();
    }
    pair.run();
    use WcStatus::{MwBindErr, WrFlushErr};
    assert_eq!(pair.ends(0), [(1, MwBindErr), (2, WrFlushErr), (3, WrFlushErr)]);
    let write = pair.wr(4, SendOp::Write, 0, 0, 8);
    pair.sides[0].post(write).unwrap();
    assert_eq!(pair.ends(0), [(4, WrFlushErr)]);
}
