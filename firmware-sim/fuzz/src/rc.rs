//! A hostile peer against a whole device: control packets and RoCE packets, while the device's user works.
//!
//! Watched over:
//!
//! * Memory that nobody was given is as it was, and no packet carries a byte of it.
//! * Each operation ends once, and those of a queue pair in their order; all of them after a disconnect.
//! * A call sends a limited number of packets, whatever the peer asks for.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::LazyLock;

use verbring_sim::nic::{NicConfig, Weakness};
use verbring_sim::packet::{Header, Ip, MAX_PACKET, Nak, Opcode, Syndrome};
use verbring_sim::soft::{BURST, Patience, Soft, Wire};
use verbring_slab::Arena;
use verbring_sys::channel::{Body, GREETING_BYTES, Grant, Medium, PACKET_BYTES, Packet, Reason};
use verbring_sys::rc::{Arrival, Carrier, RcDevice, RcOptions};
use verbring_sys::rnic::Rnic;
use verbring_sys::{
    CLASSES, Cancel, Device, DeviceError, Event, Link, MESSAGE_BYTES, Memory, Mr, Posted, Qp, Rights, Status, Wc, Wr,
    WrOp,
};

use crate::{Bytes, block};

const PAGE: usize = 4096;
const LINKS: usize = 2;
const PSN_MASK: u32 = 0xff_ffff;
const OWN: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

/// Pages: guards (from 0xc0 on), what peers read and write (below 0x80, as is all that they write), what they do atomics
/// on, what the user sends (0x80 to 0xbf), and what it receives to.
const PAGES: usize = 9;
const OPEN: usize = 1;
const WORDS: usize = 3;
const SOURCE: usize = 5;
const ROOM: usize = 7;

static MEMORY_AT_FIRST: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let byte = |i: usize| {
        let any = ((i as u32).wrapping_mul(0x9e37_79b1) >> 24) as u8;
        match i / PAGE {
            OPEN => any & 0x7f,
            SOURCE => 0x80 | any & 0x3f,
            _ => 0xc0 | any,
        }
    };
    (0..PAGES * PAGE).map(byte).collect()
});

/// Everything between the device and the peer.
#[derive(Default)]
struct Net {
    control_in: VecDeque<Arrival<u32>>,
    control_out: VecDeque<(u32, Packet)>,
    packets_in: VecDeque<Vec<u8>>,
    packets_out: VecDeque<Vec<u8>>,
    is_jammed: bool,
    is_stream: bool,
}

struct FuzzWire {
    net: Rc<RefCell<Net>>,
    buffer: Vec<u8>,
}

impl Wire for FuzzWire {
    fn receive(&mut self, _now: u64, mut each: impl FnMut(&Ip, &[u8])) {
        loop {
            let packet = self.net.borrow_mut().packets_in.pop_front();
            let Some(packet) = packet else { break };
            each(&Ip::new(PEER, OWN), &packet);
        }
    }

    fn place(&mut self) -> Option<&mut [u8]> {
        Some(&mut self.buffer)
    }

    fn commit(&mut self, _now: u64, len: usize, _to: IpAddr) {
        self.net.borrow_mut().packets_out.push_back(self.buffer[..len].to_vec());
    }

    fn flush(&mut self, _now: u64) {}
}

struct FuzzCarrier(Rc<RefCell<Net>>);

impl Carrier for FuzzCarrier {
    type Route = u32;

    fn medium(&self) -> Medium {
        if self.0.borrow().is_stream { Medium::Stream } else { Medium::Datagrams { resend_ns: 10_000, tries: 8 } }
    }

    fn open(&mut self, address: &str, _now: u64) -> Result<u32, DeviceError> {
        address.parse().map_err(|_| DeviceError::BadName)
    }

    fn send(&mut self, route: u32, packet: &[u8; PACKET_BYTES], _now: u64) -> Result<bool, DeviceError> {
        let mut net = self.0.borrow_mut();
        if net.is_jammed {
            return Ok(false);
        }
        net.control_out.push_back((route, Packet::decode(packet).expect("a device sends packets")));
        Ok(true)
    }

    fn receive(&mut self, _now: u64) -> Option<Arrival<u32>> {
        self.0.borrow_mut().control_in.pop_front()
    }

    fn close(&mut self, _route: u32) {}

    fn peer_ip(&self, route: u32) -> Option<IpAddr> {
        (route != 3).then_some(PEER)
    }
}

/// What the peer knows of a connection.
#[derive(Clone, Copy, Default)]
struct Known {
    route: u32,
    ours: u32,
    theirs: u32,
    qps: [u32; CLASSES],
    /// The next sequence number of the peer's, and the last one of the device's.
    next: [u32; CLASSES],
    heard: [u32; CLASSES],
    line: (u32, u64),
}

#[derive(Default)]
struct Pending {
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
}

struct Hostile {
    device: RcDevice<Soft<FuzzWire>, FuzzCarrier>,
    net: Rc<RefCell<Net>>,
    memory: *mut u8,
    mrs: [Mr; 4],
    known: Vec<Known>,
    /// Keys and addresses of grants.
    grants: Vec<(u32, u64)>,
    /// Where the peer says that its memory is.
    granted: (u32, u64),
    links: [bool; LINKS],
    pending: Vec<Pending>,
    next_wr_id: u64,
    epoch: u32,
    now: u64,
}

/// The target.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let mut hostile = Hostile::new(&mut bytes);
    while !bytes.is_empty() {
        hostile.step(&mut bytes);
        hostile.listen();
    }
    hostile.finish();
}

/// # Safety
/// As [`block`].
unsafe fn arena(number: usize, bytes: usize) -> Arena {
    // SAFETY: the caller's promise.
    Arena::from_static(unsafe { block(number, bytes) })
}

impl Hostile {
    fn new(bytes: &mut Bytes<'_>) -> Hostile {
        let flags = bytes.u8();
        let weakness = Weakness {
            no_atomics: flags & 1 != 0,
            no_imm: flags & 2 != 0,
            poison: flags & 4 != 0,
            max_inline: if flags & 8 != 0 { 0 } else { Weakness::NONE.max_inline },
            ..Weakness::NONE
        };
        let config = NicConfig {
            max_qps: (LINKS * CLASSES) as u32,
            max_cqs: 1,
            cq_depth: 1024,
            sq_depth: 16,
            rq_depth: 64,
            max_keys: 16,
            window: 32,
            weakness,
            seed: 7,
            ..NicConfig::new(OWN)
        };
        let net = Rc::new(RefCell::new(Net { is_stream: flags & 16 != 0, ..Net::default() }));
        let wire = FuzzWire { net: net.clone(), buffer: vec![0; MAX_PACKET] };
        let patience = Patience { timeout: 4, retry_count: 3 };
        // SAFETY: the device of the run before was dropped; so it is below.
        let nic = Soft::new("fuzz", unsafe { arena(0, config.bytes()) }, config, patience, wire).expect("room for it");
        let options = RcOptions { max_links: LINKS as u32 };
        let bytes = RcDevice::<Soft<FuzzWire>, FuzzCarrier>::bytes(nic.caps(), options);
        // SAFETY: as above.
        let (tables, memory) = unsafe { (arena(2, bytes), block(1, PAGES * PAGE).as_mut_ptr().cast::<u8>()) };
        let device = RcDevice::new(nic, FuzzCarrier(net.clone()), tables, options, 1, 100);
        let mut device = device.expect("room for it");
        // SAFETY: the block is as long as that, and nothing else refers to it.
        unsafe { memory.copy_from_nonoverlapping(MEMORY_AT_FIRST.as_ptr(), PAGES * PAGE) };
        let pages = [
            (OPEN, Rights::READ | Rights::WRITE),
            (WORDS, Rights::ATOMIC),
            (SOURCE, Rights::empty()),
            (ROOM, Rights::empty()),
        ];
        let mrs = pages.map(|(page, rights)| {
            // SAFETY: inside the block, which is not used again before the device was dropped.
            unsafe {
                let base = NonNull::new_unchecked(memory.add(page * PAGE));
                device.register(Memory::Private { base, len: PAGE }, rights).expect("a registration")
            }
        });
        Hostile {
            device,
            net,
            memory,
            mrs,
            known: Vec::new(),
            grants: Vec::new(),
            granted: (5, 1 << 40),
            links: [false; LINKS],
            pending: (0..LINKS * CLASSES).map(|_| Pending::default()).collect(),
            next_wr_id: 1,
            epoch: 1000,
            now: 1000,
        }
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.u8() % 20 {
            0 => {
                let packet = bytes.array::<PACKET_BYTES>();
                self.say(bytes.u8().into(), packet);
            }
            1 | 2 => self.control_packet(bytes),
            3 => self.come_up(bytes),
            4 => {
                let len = usize::from(bytes.u16()) % 600;
                let mut packet = bytes.take(len).to_vec();
                let Some(known) = self.known.last() else { return };
                if let Some(qp) = packet.get_mut(5..8) {
                    qp.copy_from_slice(&known.qps[len & 1].to_be_bytes()[1..]);
                }
                let at = packet.first().and_then(|first| Opcode::from_raw(*first)).map_or(0, Opcode::header_bytes);
                packet.iter_mut().skip(at).for_each(|byte| *byte &= 0x7f);
                packet.extend(Ip::new(PEER, OWN).icrc(&packet).to_le_bytes());
                self.net.borrow_mut().packets_in.push_back(packet);
            }
            5..=8 => self.request(bytes),
            9 | 10 => self.response(bytes),
            11 => self.now += u64::from(bytes.u16()) << (bytes.u8() % 20),
            12 | 13 => self.poll(1 + bytes.below(20)),
            14 => self.control(),
            15 | 16 => self.post(bytes),
            17 => self.user(bytes),
            18 => {
                let link = Link(bytes.below(LINKS) as u32);
                let grant = match bytes.below(4) {
                    0 => None,
                    which => Some(self.mrs[which - 1]),
                };
                let _ = self.device.send(link, &[7; MESSAGE_BYTES], grant);
            }
            _ => match bytes.u8() {
                0..32 => {
                    let mut net = self.net.borrow_mut();
                    net.is_jammed = !net.is_jammed;
                }
                32..64 => {
                    let route = bytes.u8().into();
                    self.net.borrow_mut().control_in.push_back(Arrival::Closed { route, cause: DeviceError::Closed });
                }
                other => {
                    for _ in 0..other % 8 {
                        self.poll(16);
                        self.control();
                        self.listen();
                    }
                }
            },
        }
    }

    fn say(&mut self, route: u32, bytes: [u8; PACKET_BYTES]) {
        self.net.borrow_mut().control_in.push_back(Arrival::Packet { route: route % 4, bytes });
    }

    /// What the peer says of its device: mostly something that can be.
    fn greeting(&mut self, bytes: &mut Bytes<'_>) -> [u8; GREETING_BYTES] {
        let flags = bytes.u8();
        let mut greeting = [0; GREETING_BYTES];
        for class in 0..CLASSES {
            greeting[8 * class..][..4].copy_from_slice(&(77 + class as u32).to_le_bytes());
            greeting[8 * class + 4..][..4].copy_from_slice(&0xff_fff0u32.to_le_bytes());
        }
        let line = if flags & 1 == 0 { 9 << 40 } else { bytes.u64() };
        greeting[16..24].copy_from_slice(&line.to_le_bytes());
        greeting[24..28].copy_from_slice(&4u32.to_le_bytes());
        greeting[28..32].copy_from_slice(&(256u32 << (flags >> 1 & 3)).to_le_bytes());
        greeting[32] = if flags & 8 == 0 { 4 } else { bytes.u8() };
        greeting[33] = 1;
        greeting[36..52]
            .copy_from_slice(&Ipv4Addr::new(10, 0, 0, 2 + (flags >> 4 == 15) as u8).to_ipv6_mapped().octets());
        if flags >> 4 == 14 {
            let at = usize::from(bytes.u8()) % GREETING_BYTES;
            greeting[at] = bytes.u8();
        }
        greeting
    }

    fn control_packet(&mut self, bytes: &mut Bytes<'_>) {
        let known = self.known.last().copied().unwrap_or_default();
        let ack = bytes.u8().into();
        let body = match bytes.below(8) {
            0 => Body::Hello { replaces: bytes.u8().into(), greeting: self.greeting(bytes) },
            1 => Body::Welcome { greeting: self.greeting(bytes) },
            2 => Body::Ready { ack },
            3..=5 => {
                let (key, base) = (bytes.u32(), if bytes.u8() & 3 == 0 { bytes.u64() } else { 1 << 40 });
                let grant = Some(Grant { mr: key, epoch: 0, base, len: 1 << 20, writable: true });
                Body::Message { seq: bytes.u8().into(), ack, message: [9; MESSAGE_BYTES], grant }
            }
            6 => Body::Reject([Reason::Version, Reason::User, Reason::Full, Reason::Unknown][bytes.below(4)]),
            _ => Body::Bye,
        };
        let from = known.ours.wrapping_add(bytes.near());
        let packet = Packet { node: 2, epoch: from, to: known.theirs.wrapping_add(bytes.near()), body };
        self.say(known.route.wrapping_add(bytes.near()), packet.encode());
    }

    /// A whole handshake.
    fn come_up(&mut self, bytes: &mut Bytes<'_>) {
        self.epoch += 1;
        let greeting = self.greeting(bytes);
        let route = u32::from(bytes.u8()) % 4;
        let hello = Packet { node: 2, epoch: self.epoch, to: 0, body: Body::Hello { replaces: 0, greeting } };
        self.say(route, hello.encode());
        self.control();
        self.listen();
        if let Some(known) = self.known.last().filter(|k| k.ours == self.epoch) {
            let ready = Packet { node: 2, epoch: known.ours, to: known.theirs, body: Body::Ready { ack: 0 } };
            self.say(route, ready.encode());
            self.control();
        }
    }

    /// What the device said and sent.
    fn listen(&mut self) {
        loop {
            let said = self.net.borrow_mut().control_out.pop_front();
            let Some((route, packet)) = said else { break };
            let u32_at = |greeting: &[u8; GREETING_BYTES], at: usize| {
                u32::from_le_bytes(greeting[at..at + 4].try_into().expect("four bytes"))
            };
            match packet.body {
                Body::Hello { greeting, .. } | Body::Welcome { greeting } => {
                    let is_known = self.known.iter().any(|k| k.theirs == packet.epoch);
                    if is_known {
                        continue;
                    }
                    let line = u64::from(u32_at(&greeting, 16)) | u64::from(u32_at(&greeting, 20)) << 32;
                    let ours = if packet.to == 0 { 7 } else { packet.to };
                    self.known.push(Known {
                        route,
                        ours,
                        theirs: packet.epoch,
                        qps: [u32_at(&greeting, 0), u32_at(&greeting, 8)],
                        next: [0xff_fff0; CLASSES],
                        heard: [u32_at(&greeting, 4), u32_at(&greeting, 12)],
                        line: (u32_at(&greeting, 24), line),
                    });
                }
                Body::Message { grant: Some(grant), .. } => self.grants.push((grant.mr, grant.base)),
                _ => {}
            }
        }
        loop {
            let sent = self.net.borrow_mut().packets_out.pop_front();
            let Some(packet) = sent else { break };
            let (header, payload) = Header::parse(&packet).expect("a NIC sends packets");
            // What the peer said to be its queue pairs' numbers, of whatever connection; the newest is meant.
            let class = (header.dest_qp & 1 ^ 1) as usize;
            if header.opcode.is_response() {
                assert!(payload.iter().all(|byte| *byte < 0x80), "a byte that was not granted: {header:?}");
            } else {
                assert!(payload.iter().all(|byte| *byte < 0xc0), "a byte that was not sent: {header:?}");
                if let Some(known) = self.known.last_mut() {
                    known.heard[class] = header.psn;
                }
            }
        }
    }

    fn request(&mut self, bytes: &mut Bytes<'_>) {
        const REQUESTS: [Opcode; 11] = [
            Opcode::WriteOnly,
            Opcode::ReadRequest,
            Opcode::SendOnly,
            Opcode::SendOnlyImm,
            Opcode::FetchAdd,
            Opcode::CompareSwap,
            Opcode::WriteFirst,
            Opcode::WriteLast,
            Opcode::SendFirst,
            Opcode::SendLast,
            Opcode::WriteOnlyImm,
        ];
        let [which, class, target, ..] = bytes.array::<3>();
        let class = usize::from(class) % CLASSES;
        let (near, wish) = (bytes.near(), bytes.u16());
        let (key, base) = match target & 3 {
            0 => self.known.last().map_or((1, 1), |k| k.line),
            _ => self.grants.last().copied().unwrap_or((1, 1)),
        };
        let Some(known) = self.known.last_mut() else { return };
        let opcode = REQUESTS[usize::from(which) % REQUESTS.len()];
        let psn = known.next[class].wrapping_add(near) & PSN_MASK;
        let mut header = Header::new(opcode, known.qps[class], psn);
        (header.rkey, header.ack_request, header.imm) = (key, wish & 1 == 0, wish.into());
        header.address = match target >> 6 {
            0..=2 => base.wrapping_add(u64::from(target >> 2 & 7) * 8),
            _ => bytes.u64(),
        };
        header.length = u32::from(wish >> 2) % if target & 3 == 0 { 65 } else { 5000 };
        header.value = 1;
        let payload = if opcode.has_payload() { header.length as usize % 300 } else { 0 };
        if near == 0 {
            let packets = if opcode == Opcode::ReadRequest { header.length.div_ceil(256).max(1) } else { 1 };
            known.next[class] = psn.wrapping_add(packets) & PSN_MASK;
        }
        self.send(&header, payload);
    }

    fn response(&mut self, bytes: &mut Bytes<'_>) {
        const RESPONSES: [Opcode; 6] = [
            Opcode::Acknowledge,
            Opcode::AtomicAcknowledge,
            Opcode::ReadOnly,
            Opcode::ReadFirst,
            Opcode::ReadLast,
            Opcode::ReadMiddle,
        ];
        let [which, class, syndrome, kind] = bytes.array();
        let Some(known) = self.known.last() else { return };
        let class = usize::from(class) % CLASSES;
        let opcode = RESPONSES[usize::from(which) % RESPONSES.len()];
        let psn = known.heard[class].wrapping_add(bytes.near()) & PSN_MASK;
        let mut header = Header::new(opcode, known.qps[class], psn);
        header.syndrome = match kind & 7 {
            0..=4 => Syndrome::Ack { credits: syndrome & 31 },
            5 => Syndrome::RnrNak { timer: syndrome & 31 },
            _ => Syndrome::Nak(
                [Nak::Sequence, Nak::InvalidRequest, Nak::RemoteAccess, Nak::RemoteOperational]
                    [usize::from(syndrome & 3)],
            ),
        };
        header.msn = u32::from(syndrome) << (kind >> 4);
        header.msn &= PSN_MASK;
        header.value = bytes.u8().into();
        let payload = if opcode.has_payload() { usize::from(bytes.u16()) % 1025 } else { 0 };
        self.send(&header, if kind & 8 == 0 && opcode.has_payload() { 8 } else { payload });
    }

    fn send(&mut self, header: &Header, payload: usize) {
        let mut packet = vec![0; MAX_PACKET];
        let at = header.opcode.header_bytes();
        packet[at..at + payload].fill(header.psn as u8 & 0x7f);
        let len = header.seal(&mut packet, payload, &Ip::new(PEER, OWN)).expect("room for it");
        packet.truncate(len);
        self.net.borrow_mut().packets_in.push_back(packet);
    }

    fn at(&self, page: usize, offset: usize) -> *mut u8 {
        self.memory.wrapping_add(page * PAGE + offset)
    }

    fn post(&mut self, bytes: &mut Bytes<'_>) {
        const OPS: [WrOp; 11] = [
            WrOp::Put,
            WrOp::Get,
            WrOp::Send,
            WrOp::Recv,
            WrOp::PutInline,
            WrOp::FetchAdd,
            WrOp::CompareSwap,
            WrOp::Swap,
            WrOp::SignalStore,
            WrOp::SignalAdd,
            WrOp::Flush,
        ];
        let [which, link, class, len] = bytes.array();
        let link = usize::from(link) % LINKS;
        if !self.links[link] {
            return;
        }
        let qp = self.device.qp(Link(link as u32), usize::from(class) % CLASSES);
        let op = OPS[usize::from(which) % OPS.len()];
        let (page, mr) = match op {
            WrOp::Put | WrOp::Send => (SOURCE, self.mrs[2]),
            _ => (ROOM, self.mrs[3]),
        };
        // Where the engine would let it: in the range that the peer granted, whatever that is.
        let wr = Wr {
            wr_id: self.next_wr_id,
            op,
            len: if matches!(op, WrOp::PutInline) { u32::from(len) % 17 } else { u32::from(len) * 16 },
            rkey: self.granted.0,
            imm: 3,
            local: self.at(page, 8),
            local_mr: mr,
            remote: self.granted.1.wrapping_add(u64::from(class >> 1) * 8),
            operand: 0x8181_8181_8181_8181,
            second: 0x8282_8282_8282_8282,
        };
        self.next_wr_id += 1;
        // SAFETY: local memory is the block's; what is remote is the peer's, which is nobody.
        match unsafe { self.device.post(qp, &wr) } {
            Posted::Pending if op == WrOp::Recv => self.pending[qp.0 as usize].receives.push_back(wr.wr_id),
            Posted::Pending => self.pending[qp.0 as usize].sends.push_back(wr.wr_id),
            _ => {}
        }
        self.device.ring(self.now);
        self.count_packets();
    }

    fn count_packets(&self) {
        assert!(self.net.borrow().packets_out.len() <= 4 * BURST, "one call sends without end");
    }

    fn poll(&mut self, room: usize) {
        let mut wcs = [Wc::new(0, Qp(0), Status::Success); 20];
        let count = self.device.poll(self.now, &mut wcs[..room]);
        self.count_packets();
        self.listen();
        for wc in &wcs[..count] {
            let Pending { sends, receives } = &mut self.pending[wc.qp.0 as usize];
            if sends.front() == Some(&wc.wr_id) {
                sends.pop_front();
            } else if receives.front() == Some(&wc.wr_id) {
                receives.pop_front();
            } else {
                panic!("it was not the next to end: {wc:?}, {sends:?}, {receives:?}");
            }
        }
    }

    fn control(&mut self) {
        for round in 0.. {
            let Some(event) = self.device.control(self.now) else { break };
            assert!(round < 2000, "events without end");
            match event {
                Event::Up { link, incoming, .. } => {
                    assert!(incoming != self.links[link.0 as usize], "up twice");
                    self.links[link.0 as usize] = true;
                }
                Event::Down { link, .. } => {
                    assert!(self.links[link.0 as usize]);
                    self.drain(link);
                    self.disconnect(link);
                }
                // What the engine would let through: at most 16 KiB from there on are used.
                Event::Message { granted: Some(granted), .. } => self.granted = (granted.rkey, granted.base),
                _ => {}
            }
            self.listen();
        }
    }

    /// A connection is lost: everything on it ends.
    fn drain(&mut self, link: Link) {
        for round in 0.. {
            let queues = [0, 1].map(|class| self.device.qp(link, class).0 as usize);
            if queues.iter().all(|q| self.pending[*q].sends.is_empty() && self.pending[*q].receives.is_empty()) {
                break;
            }
            assert!(round < 200, "a lost connection keeps what is pending");
            self.poll(20);
        }
    }

    fn disconnect(&mut self, link: Link) {
        for class in 0..CLASSES {
            self.pending[self.device.qp(link, class).0 as usize] = Pending::default();
        }
        self.links[link.0 as usize] = false;
        self.device.disconnect(link);
    }

    fn user(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.below(8) {
            0 | 1 => {
                if let Ok(link) = self.device.connect("2", 0, self.now) {
                    self.links[link.0 as usize] = true;
                }
            }
            2 => {
                let link = bytes.below(LINKS);
                if self.links[link] {
                    self.disconnect(Link(link as u32));
                }
            }
            3 => self.device.revoke(self.mrs[bytes.below(2)]).expect("a registration"),
            _ => {
                let queue = bytes.below(LINKS * CLASSES);
                let Pending { sends, receives } = &self.pending[queue];
                let all: Vec<u64> = sends.iter().chain(receives).copied().collect();
                if all.is_empty() {
                    return;
                }
                let wr_id = all[usize::from(bytes.u8()) % all.len()];
                if self.device.cancel(Qp(queue as u32), wr_id) != Cancel::Unable {
                    self.pending[queue].sends.retain(|id| *id != wr_id);
                    self.pending[queue].receives.retain(|id| *id != wr_id);
                }
            }
        }
    }

    fn finish(mut self) {
        self.poll(20);
        self.control();
        for link in 0..LINKS as u32 {
            self.disconnect(Link(link));
        }
        self.poll(20);
        // SAFETY: the whole block, and the device is not running.
        let all = unsafe { std::slice::from_raw_parts(self.memory, PAGES * PAGE) };
        for page in (0..PAGES).filter(|page| ![OPEN, WORDS, ROOM].contains(page)) {
            let range = page * PAGE..(page + 1) * PAGE;
            assert!(all[range.clone()] == MEMORY_AT_FIRST[range], "page {page} was written");
        }
    }
}
