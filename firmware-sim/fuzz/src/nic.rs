//! A hostile peer against a NIC, whose owner goes on with work of its own.
//!
//! The fuzzer's bytes become packets, valid and not, between them time, work requests and polling. Watched over:
//!
//! * Memory that nobody was given is as it was, and no answer carries a byte of it.
//! * A request that its key does not allow ends the connection with that packet.
//! * Work requests end once, in their order, and all of them when the peer falls silent.
//! * The connection to another peer does not notice.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use verbring_sim::nic::{Counters, Defect, Delay, Nic, NicConfig, Pd, QpState, Transition, Weakness};
use verbring_sim::packet::{Header, Ip, MAX_PACKET, Nak, Opcode, Syndrome};
use verbring_slab::Arena;
use verbring_sys::rnic::{MrAccess, MrKeys, RecvWr, RnicWc, SendFlags, SendOp, SendWr};

use crate::{Bytes, block};

const PAGE: usize = 4096;
const PSN_MASK: u32 = 0xff_ffff;

/// What memory is for, and with it the bytes that are in it at first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nobody's. From 0xc0 on.
    Guard,
    /// Peers may read it. Below 0x80, as is all that the hostile peer writes: an answer with another byte is a leak.
    Readable,
    /// The owner sends from it. From 0x80 on.
    Source,
}

struct Area {
    first: usize,
    pages: usize,
    access: MrAccess,
    kind: Kind,
}

const fn area(first: usize, pages: usize, access: MrAccess, kind: Kind) -> Area {
    Area { first, pages, access, kind }
}

const LOCAL: MrAccess = MrAccess::LOCAL_WRITE;
const WRITE: MrAccess = MrAccess::REMOTE_WRITE;
const READ: MrAccess = MrAccess::REMOTE_READ;

/// What is registered; the pages between are guards.
const AREAS: [Area; 6] = [
    area(1, 2, LOCAL.union(WRITE).union(READ).union(MrAccess::MW_BIND), Kind::Readable),
    area(4, 1, READ, Kind::Readable),
    area(6, 1, LOCAL.union(WRITE), Kind::Guard),
    area(8, 1, LOCAL.union(MrAccess::REMOTE_ATOMIC), Kind::Guard),
    area(10, 1, MrAccess::empty(), Kind::Source),
    area(12, 2, LOCAL, Kind::Guard),
];
const OPEN: usize = 0;
const SOURCE: usize = 4;
const ROOM: usize = 5;
const PAGES: usize = 15;

static MEMORY_AT_FIRST: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let byte = |i: usize| {
        let kind =
            AREAS.iter().find(|a| (a.first..a.first + a.pages).contains(&(i / PAGE))).map_or(Kind::Guard, |a| a.kind);
        let any = (i as u32).wrapping_mul(0x9e37_79b1) >> 24;
        match kind {
            Kind::Guard => 0xc0 | any as u8,
            Kind::Readable => any as u8 & 0x7f,
            Kind::Source => 0x80 | any as u8 & 0x3f,
        }
    };
    (0..PAGES * PAGE).map(byte).collect()
});

struct Registered {
    keys: MrKeys,
    /// It ended, and this is what was in it.
    gone: Option<Vec<u8>>,
}

struct Hostile {
    nic: Nic,
    memory: *mut u8,
    areas: Vec<Registered>,
    /// Of OPEN.
    windows: Vec<u32>,
    pd: Pd,
    cq: u32,
    qp: u32,
    /// The connection to another peer.
    other_qp: u32,
    own: IpAddr,
    peer: IpAddr,
    now: u64,
    /// The peer's next request, and the last one that it heard.
    expected: u32,
    heard: u32,
    is_port_up: bool,
    mtu: u32,
    next_wr_id: u64,
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
    buffer: Vec<u8>,
}

/// The target.
pub fn run(data: &[u8], defect: Option<Defect>) {
    let mut bytes = Bytes::new(data);
    let mut hostile = Hostile::new(&mut bytes);
    hostile.nic.set_defect(defect);
    while !bytes.is_empty() {
        hostile.step(&mut bytes);
    }
    hostile.finish();
}

impl Hostile {
    fn new(bytes: &mut Bytes<'_>) -> Hostile {
        let [flags, weak, ..] = bytes.array::<4>();
        let (own, peer, other): (IpAddr, IpAddr, IpAddr) = if flags & 1 == 0 {
            let v4 = |of| Ipv4Addr::new(10, 0, 0, of).into();
            (v4(1), v4(2), v4(3))
        } else {
            let v6 = |of| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, of).into();
            (v6(1), v6(2), v6(3))
        };
        let weakness = Weakness {
            no_atomics: weak & 1 != 0,
            no_imm: weak & 2 != 0,
            poison: weak & 4 != 0,
            delay: (weak & 0x30 == 0x30).then_some(Delay { max_ns: 5000, relaxed: weak & 8 != 0 }),
            ..Weakness::NONE
        };
        let config = NicConfig {
            max_qps: 2,
            max_cqs: 2,
            cq_depth: 64,
            sq_depth: 16,
            rq_depth: 16,
            max_keys: 16,
            window: 32,
            weakness,
            seed: 7,
            ..NicConfig::new(own)
        };
        let mtu = 256 << (flags >> 1 & 3);
        // SAFETY: the NIC of the run before was dropped.
        let (tables, memory) = unsafe { (block(0, config.bytes()), block(1, PAGES * PAGE)) };
        let mut nic = Nic::new(Arena::from_static(tables), config).expect("room for it");
        let memory = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: the block is as long as that, and nothing else refers to it.
        unsafe { memory.copy_from_nonoverlapping(MEMORY_AT_FIRST.as_ptr(), PAGES * PAGE) };
        let (pd, cq, other_cq) = (nic.alloc_pd(), nic.create_cq().expect("a queue"), nic.create_cq().expect("a queue"));
        let mut areas = Vec::new();
        for (i, area) in AREAS.iter().enumerate() {
            // SAFETY: inside the block, which is not used again before the NIC was dropped.
            let keys = unsafe {
                let base = memory.add(area.first * PAGE);
                nic.reg_mr(pd, base, area.pages * PAGE, (i as u64 + 1) << 40, area.access)
            };
            areas.push(Registered { keys: keys.expect("a key"), gone: None });
        }
        let rq_psn = if flags & 8 == 0 { 0xff_fff0 } else { 5 };
        let max_rd = if flags & 16 == 0 { 4 } else { 16 };
        let connect = |nic: &mut Nic, cq, peer| {
            let qp = nic.create_qp(pd, cq, cq).expect("a queue pair");
            let receive = Transition::ReadyToReceive {
                peer,
                dest_qp: 77,
                mtu,
                rq_psn,
                max_dest_rd_atomic: max_rd,
                min_rnr_timer: 1,
            };
            let send = Transition::ReadyToSend {
                sq_psn: rq_psn,
                timeout: 4,
                retry_count: 3,
                rnr_retry: if flags & 32 == 0 { 7 } else { 2 },
                max_rd_atomic: max_rd,
            };
            for step in [Transition::Init { access: MrAccess::all() }, receive, send] {
                nic.modify_qp(qp, step).expect("a step");
            }
            qp
        };
        let qp = connect(&mut nic, cq, peer);
        let other_qp = connect(&mut nic, other_cq, other);
        Hostile {
            nic,
            memory,
            areas,
            windows: Vec::new(),
            pd,
            cq,
            qp,
            other_qp,
            own,
            peer,
            now: 1000,
            expected: rq_psn,
            heard: rq_psn,
            is_port_up: true,
            mtu,
            next_wr_id: 1,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            buffer: vec![0; MAX_PACKET],
        }
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.u8() % 16 {
            0 => {
                let len = usize::from(bytes.u8());
                let packet = bytes.take(len);
                let source = if len & 1 == 0 { self.peer } else { self.own };
                self.nic.handle_packet(self.now, &Ip::new(source, self.own), packet);
            }
            1 => self.raw_body(bytes),
            2..=6 => self.request(bytes),
            7 | 8 => self.response(bytes),
            9 => {
                self.now += u64::from(bytes.u16()) << (bytes.u8() % 12);
                self.nic.handle_timeout(self.now);
            }
            10 | 11 => {
                for _ in 0..bytes.u8() % 32 {
                    if !self.transmit() {
                        break;
                    }
                }
            }
            12 => self.post_send(bytes),
            13 => self.post_recv(bytes),
            14 => {
                let room = 1 + bytes.below(16);
                self.poll(room);
            }
            _ => self.owner(bytes),
        }
    }

    /// Any bytes behind a valid check, to the right queue pair.
    fn raw_body(&mut self, bytes: &mut Bytes<'_>) {
        let len = usize::from(bytes.u16()) % (MAX_PACKET + 8);
        let mut packet = bytes.take(len).to_vec();
        if let Some(qp) = packet.get_mut(5..8) {
            qp.copy_from_slice(&self.qp.to_be_bytes()[1..]);
        }
        let at = packet.first().and_then(|first| Opcode::from_raw(*first)).map_or(0, Opcode::header_bytes);
        packet.iter_mut().skip(at).for_each(|byte| *byte &= 0x7f);
        let ip = Ip::new(self.peer, self.own);
        packet.extend(ip.icrc(&packet).to_le_bytes());
        self.deliver(&ip, &packet);
    }

    /// A key, and a range of `len` bytes that it may be for.
    fn target(&mut self, bytes: &mut Bytes<'_>, len: u32) -> (u32, u64) {
        let which = bytes.u8();
        let area = usize::from(which) % AREAS.len();
        let MrKeys { rkey, iova, .. } = self.areas[area].keys;
        let offset = u64::from(bytes.u16()) % (AREAS[area].pages * PAGE + 16) as u64;
        // Often near the ends.
        let address = match which >> 6 {
            0 | 1 => iova + offset,
            2 => (iova + (AREAS[area].pages * PAGE) as u64 + 1 - offset % 3).wrapping_sub(len.into()),
            _ if offset & 1 == 0 => iova.wrapping_sub(offset % 16),
            _ => bytes.u64(),
        };
        let key = match which >> 3 & 7 {
            0..=4 => rkey,
            5 => rkey ^ 1 << (bytes.u8() & 31),
            6 => self.windows.last().copied().unwrap_or(rkey),
            _ => bytes.u32(),
        };
        (key, address)
    }

    fn request(&mut self, bytes: &mut Bytes<'_>) {
        const REQUESTS: [Opcode; 17] = [
            Opcode::WriteOnly,
            Opcode::ReadRequest,
            Opcode::FetchAdd,
            Opcode::SendOnly,
            Opcode::WriteFirst,
            Opcode::WriteMiddle,
            Opcode::WriteLast,
            Opcode::WriteOnlyImm,
            Opcode::WriteLastImm,
            Opcode::CompareSwap,
            Opcode::SendFirst,
            Opcode::SendMiddle,
            Opcode::SendLast,
            Opcode::SendLastImm,
            Opcode::SendOnlyImm,
            Opcode::SendLastInvalidate,
            Opcode::SendOnlyInvalidate,
        ];
        let opcode = REQUESTS[bytes.below(REQUESTS.len())];
        let psn = self.expected.wrapping_add(bytes.near()) & PSN_MASK;
        let mut header = Header::new(opcode, self.qp, psn);
        header.ack_request = bytes.u8() & 1 != 0;
        let wish = bytes.u16();
        header.length = match wish & 3 {
            0 => u32::from(wish >> 2) % 64,
            1 => u32::from(wish >> 2),
            2 => self.mtu * u32::from(wish >> 2 & 15),
            _ => bytes.u32(),
        };
        (header.rkey, header.address) = self.target(bytes, header.length);
        header.imm = header.rkey;
        (header.value, header.compare) = (u64::from(wish), 0);
        let mut payload = match opcode {
            Opcode::WriteFirst | Opcode::WriteMiddle | Opcode::SendFirst | Opcode::SendMiddle => self.mtu as usize,
            Opcode::WriteOnly | Opcode::WriteOnlyImm => header.length.min(self.mtu) as usize,
            _ if opcode.has_payload() => usize::from(wish >> 2) % (self.mtu as usize + 1),
            _ => 0,
        };
        // Sometimes it is another.
        if wish >> 13 == 7 && opcode.has_payload() {
            payload = usize::from(bytes.u16()) % (MAX_PACKET - 64);
        }
        self.send(&header, payload);
    }

    fn response(&mut self, bytes: &mut Bytes<'_>) {
        const RESPONSES: [Opcode; 6] = [
            Opcode::Acknowledge,
            Opcode::ReadOnly,
            Opcode::ReadFirst,
            Opcode::ReadMiddle,
            Opcode::ReadLast,
            Opcode::AtomicAcknowledge,
        ];
        let [which, syndrome, msn, kind] = bytes.array();
        let opcode = RESPONSES[usize::from(which) % RESPONSES.len()];
        let psn = self.heard.wrapping_add(bytes.near()) & PSN_MASK;
        let mut header = Header::new(opcode, self.qp, psn);
        header.syndrome = match kind & 7 {
            0..=3 => Syndrome::Ack { credits: syndrome & 31 },
            4 | 5 => Syndrome::RnrNak { timer: syndrome & 31 },
            _ => Syndrome::Nak(
                [Nak::Sequence, Nak::InvalidRequest, Nak::RemoteAccess, Nak::RemoteOperational]
                    [usize::from(syndrome & 3)],
            ),
        };
        header.msn = if kind & 8 == 0 { msn.into() } else { bytes.u32() & PSN_MASK };
        header.value = bytes.u16().into();
        let payload = match (opcode.has_payload(), kind >> 4) {
            (false, _) => 0,
            (true, 0..=9) => self.mtu as usize,
            (true, _) => usize::from(bytes.u16()) % (self.mtu as usize + 8),
        };
        self.send(&header, payload);
    }

    fn send(&mut self, header: &Header, payload: usize) {
        let mut packet = vec![0; MAX_PACKET];
        let at = header.opcode.header_bytes();
        for (i, byte) in packet[at..at + payload].iter_mut().enumerate() {
            *byte = (i as u8).wrapping_add(header.psn as u8) & 0x7f;
        }
        let ip = Ip::new(self.peer, self.own);
        let len = header.seal(&mut packet, payload, &ip).expect("room for it");
        packet.truncate(len);
        self.deliver(&ip, &packet);
    }

    /// Hands a packet to the NIC, and looks at what it made of it.
    fn deliver(&mut self, ip: &Ip, packet: &[u8]) {
        let (before, state) = (self.nic.counters, self.nic.query_qp(self.qp));
        let has_receive = !self.receives.is_empty();
        self.nic.handle_packet(self.now, ip, packet);
        let after = self.nic.counters;
        let Some((header, payload)) = Header::parse(packet) else { return };
        if header.opcode.is_response() || state != Some(QpState::ReadyToSend) || !self.is_port_up {
            return;
        }
        let dropped = |c: &Counters| c.malformed + c.bad_icrc + c.no_qp;
        let out_of_order = |c: &Counters| c.duplicates + c.out_of_sequence;
        let refused = |c: &Counters| c.nak_invalid + c.nak_access + c.nak_operational;
        if dropped(&before) != dropped(&after) {
            return;
        }
        let is_new = header.psn == self.expected;
        assert_eq!(is_new, out_of_order(&before) == out_of_order(&after), "{header:?}");
        if !is_new {
            return;
        }
        if refused(&before) != refused(&after) {
            assert_eq!(self.nic.query_qp(self.qp), Some(QpState::Error), "{header:?}");
            return;
        }
        if before.nak_rnr != after.nak_rnr {
            return;
        }
        assert!(self.is_granted(&header), "taken, and not granted: {header:?}");
        let needs_receive = matches!(header.opcode as u8, 0..=5 | 0x16 | 0x17) || header.opcode.has_imm();
        assert!(has_receive || !needs_receive, "{header:?}");
        assert!(payload.len() <= self.mtu as usize);
        let packets = if header.opcode == Opcode::ReadRequest { header.length.div_ceil(self.mtu).max(1) } else { 1 };
        self.expected = self.expected.wrapping_add(packets) & PSN_MASK;
    }

    /// Whether a request with a key is allowed what it asks for.
    fn is_granted(&self, header: &Header) -> bool {
        let (need, len) = match header.opcode {
            Opcode::WriteFirst | Opcode::WriteOnly | Opcode::WriteOnlyImm => (WRITE, header.length),
            Opcode::ReadRequest => (READ, header.length),
            Opcode::CompareSwap | Opcode::FetchAdd => (MrAccess::REMOTE_ATOMIC, 8),
            _ => return true,
        };
        let is_in = |area: usize| {
            let Some(offset) = header.address.checked_sub(self.areas[area].keys.iova) else { return false };
            offset.checked_add(len.into()).is_some_and(|end| end <= (AREAS[area].pages * PAGE) as u64)
        };
        let by_key = |area: usize| {
            let of = &self.areas[area];
            of.gone.is_none() && of.keys.rkey == header.rkey && AREAS[area].access.contains(need)
        };
        let by_window = self.windows.contains(&header.rkey) && is_in(OPEN);
        len == 0 || by_window || (0..AREAS.len()).any(|area| by_key(area) && is_in(area))
    }

    /// Takes a packet of the NIC's: false if there is none.
    fn transmit(&mut self) -> bool {
        let Some(out) = self.nic.poll_transmit(self.now, &mut self.buffer) else { return false };
        assert_eq!(out.to, self.peer);
        let packet = &self.buffer[..out.len];
        assert!(Ip::new(self.own, out.to).is_intact(packet));
        let (header, payload) = Header::parse(packet).expect("a NIC sends packets");
        if header.opcode.is_response() {
            assert!(payload.iter().all(|byte| *byte < 0x80), "a byte that was not granted: {header:?}");
        } else {
            assert!(payload.iter().all(|byte| (0x80..0xc0).contains(byte)), "a byte that was not sent: {header:?}");
            self.heard = header.psn;
        }
        true
    }

    fn at(&self, area: usize, offset: usize) -> *mut u8 {
        self.memory.wrapping_add(AREAS[area].first * PAGE + offset)
    }

    /// All that was posted and not polled has a place in the completion queue.
    fn has_room(&self) -> bool {
        self.sends.len() + self.receives.len() < 60
    }

    fn post_send(&mut self, bytes: &mut Bytes<'_>) {
        let [which, flags] = bytes.array();
        if !self.has_room() {
            return;
        }
        let op = [
            SendOp::Write,
            SendOp::Read,
            SendOp::FetchAdd,
            SendOp::Send,
            SendOp::CompareSwap,
            SendOp::BindWindow,
            SendOp::LocalInvalidate,
            SendOp::SendInvalidate,
        ][usize::from(which & 7)];
        let len = u32::from(bytes.u16()) % PAGE as u32;
        let (from, is_atomic) = match op {
            SendOp::Read => (ROOM, false),
            SendOp::FetchAdd | SendOp::CompareSwap => (ROOM, true),
            SendOp::BindWindow => (OPEN, false),
            _ => (SOURCE, false),
        };
        let mut wr = SendWr {
            wr_id: self.next_wr_id,
            op,
            len: if is_atomic { 8 } else { len },
            local: self.at(from, usize::from(which >> 3) * 8),
            lkey: self.areas[from].keys.lkey,
            remote: u64::from(len) * 8,
            imm: 9,
            access: READ | WRITE,
            ..SendWr::EMPTY
        };
        for (bit, flag) in [(0, SendFlags::FENCE), (1, SendFlags::IMM), (2, SendFlags::SOLICITED)] {
            if flags >> bit & 1 != 0 {
                wr.flags |= flag;
            }
        }
        if flags & 8 != 0 && matches!(op, SendOp::Write | SendOp::Send) {
            wr.flags |= SendFlags::INLINE;
            wr.len %= 65;
        }
        if flags >> 4 == 15 {
            wr.lkey ^= 1 << (which & 31);
        }
        // Near its end it may go beyond, and fail.
        wr.len = wr.len.min((AREAS[from].pages * PAGE) as u32);
        if wr.flags.contains(SendFlags::INLINE) {
            wr.local = self.at(from, 0);
        }
        if op == SendOp::BindWindow {
            let Some(window) = self.nic.alloc_mw(self.pd) else { return };
            wr.rkey = window & !0xff | u32::from(flags);
            self.windows.push(wr.rkey);
        }
        if op == SendOp::LocalInvalidate {
            wr.rkey = self.windows.last().copied().unwrap_or(5);
        }
        // SAFETY: local memory is the block's; what a wrong key names is not touched.
        if unsafe { self.nic.post_send(self.qp, &wr) }.is_ok() {
            self.sends.push_back(wr.wr_id);
            self.next_wr_id += 1;
        }
    }

    fn post_recv(&mut self, bytes: &mut Bytes<'_>) {
        let [at, flags] = bytes.array();
        if !self.has_room() {
            return;
        }
        let len = (u32::from(at) * 37) % 3000;
        let lkey = self.areas[ROOM].keys.lkey ^ u32::from(flags == 0xff) << 9;
        let wr = RecvWr { wr_id: self.next_wr_id, local: self.at(ROOM, usize::from(at) * 16), len, lkey };
        // SAFETY: as above.
        if unsafe { self.nic.post_recv(self.qp, &wr) }.is_ok() {
            self.receives.push_back(wr.wr_id);
            self.next_wr_id += 1;
        }
    }

    fn poll(&mut self, room: usize) -> usize {
        let mut wcs = [RnicWc::EMPTY; 16];
        let count = self.nic.poll_cq(self.cq, &mut wcs[..room.min(16)]);
        for wc in &wcs[..count] {
            assert_eq!(wc.qp, self.qp);
            let (sends, receives) = (self.sends.front(), self.receives.front());
            // The kind of a failed one means nothing.
            if sends == Some(&wc.wr_id) {
                self.sends.pop_front();
            } else if receives == Some(&wc.wr_id) {
                self.receives.pop_front();
            } else {
                panic!("it was not the next to end: {wc:?}");
            }
        }
        count
    }

    /// What the owner of the NIC does.
    fn owner(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.u8() {
            0..32 => {
                let area = bytes.below(AREAS.len());
                if self.areas[area].gone.is_some() {
                    return;
                }
                assert!(self.nic.dereg_mr(self.areas[area].keys.lkey));
                self.areas[area].gone = Some(self.contents(area));
                if area == OPEN {
                    self.windows.clear();
                }
            }
            32..64 => {
                if let Some(window) = self.windows.pop() {
                    self.nic.dealloc_mw(window);
                }
            }
            64..96 => {
                self.is_port_up = !self.is_port_up;
                self.nic.set_port(self.is_port_up);
            }
            96..128 => {
                let step = if bytes.u8() & 1 == 0 { Transition::SendQueueDrain } else { Transition::Error };
                let _ = self.nic.modify_qp(self.qp, step);
            }
            _ => {
                while self.nic.async_event().is_some() {}
                // A queue pair of somebody else, at somebody else's address, is none of the peer's.
                let mut packet = vec![0; MAX_PACKET];
                let ip = Ip::new(self.peer, self.own);
                let header = Header::new(Opcode::SendOnly, self.other_qp, bytes.u32() & PSN_MASK);
                let len = header.seal(&mut packet, 0, &ip).expect("room for it");
                self.nic.handle_packet(self.now, &ip, &packet[..len]);
            }
        }
    }

    fn contents(&self, area: usize) -> Vec<u8> {
        // SAFETY: inside the block, and the NIC is not running.
        unsafe { std::slice::from_raw_parts(self.at(area, 0), AREAS[area].pages * PAGE) }.to_vec()
    }

    /// The peer falls silent: everything ends.
    fn finish(mut self) {
        self.is_port_up = true;
        self.nic.set_port(true);
        if self.nic.query_qp(self.qp) == Some(QpState::SendQueueDrain) {
            let again =
                Transition::ReadyToSend { sq_psn: 0, timeout: 4, retry_count: 3, rnr_retry: 7, max_rd_atomic: 4 };
            self.nic.modify_qp(self.qp, again).expect("a step");
        }
        let mut packets = 0;
        for round in 0.. {
            while self.transmit() {
                packets += 1;
                assert!(packets < 20_000, "it talks without end");
            }
            while self.poll(16) != 0 {}
            if self.sends.is_empty() {
                break;
            }
            assert!(round < 1000, "nothing ends");
            let next = self.nic.poll_timeout();
            assert_ne!(next, u64::MAX, "nothing is waited for, and nothing ends");
            self.now = self.now.max(next);
            self.nic.handle_timeout(self.now);
        }
        self.nic.modify_qp(self.qp, Transition::Error).expect("a step");
        while self.poll(16) != 0 {}
        assert!(self.sends.is_empty() && self.receives.is_empty(), "flushed");
        self.nic.finish_placement();
        assert_eq!(self.nic.query_qp(self.other_qp), Some(QpState::ReadyToSend));
        for (area, Registered { gone, .. }) in self.areas.iter().enumerate() {
            assert!(
                gone.as_ref().is_none_or(|gone| *gone == self.contents(area)),
                "area {area} was written after its end"
            );
        }
        // SAFETY: the whole block, and the NIC is not running.
        let all = unsafe { std::slice::from_raw_parts(self.memory, PAGES * PAGE) };
        for page in 0..PAGES {
            let area = AREAS.iter().find(|a| (a.first..a.first + a.pages).contains(&page));
            let is_written = area.is_some_and(|a| a.access.contains(LOCAL));
            let range = page * PAGE..(page + 1) * PAGE;
            assert!(is_written || all[range.clone()] == MEMORY_AT_FIRST[range], "page {page} was written");
        }
    }
}
