//! A network of NICs in one thread, under one seed and virtual time.
//!
//! Nodes hang on switches by links, which have a latency, a bandwidth and a queue; every way a network fails can be made
//! to happen, now and then or at a moment of a script, and is counted. Nothing here reads a clock or an address of this
//! process, so the same seed gives the same bytes on every machine.
//!
//! The network is moved on by whoever looks at it: a device that is polled, or [`Fabric::advance`].

use core::cmp::Reverse;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr};
use std::boxed::Box;
use std::cell::RefCell;
use std::collections::{BinaryHeap, VecDeque};
use std::io::Write;
use std::rc::Rc;

use std::vec::Vec;

use crate::packet::{Ip, MAX_PACKET, Opcode};
use crate::random::{Random, Ratio};

macro_rules! faults {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// What goes wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Fault { $($(#[doc = $doc])+ $name,)+ }

        impl Fault {
            /// Every kind.
            pub const ALL: &'static [Fault] = &[$(Fault::$name,)+];

            /// Its name, as on a command line.
            pub const fn name(self) -> &'static str {
                match self { $(Fault::$name => $text,)+ }
            }
        }
    };
}

faults! {
    /// A packet is lost.
    Loss = "loss",
    /// An answer is lost: what was asked for was done.
    AckLoss = "ack-loss",
    /// A packet comes twice.
    Duplicate = "duplicate",
    /// A packet is late, so that those behind it come first.
    Reorder = "reorder",
    /// A packet and all behind it are late.
    Delay = "delay",
    /// Up to three bits of a packet are turned.
    Corrupt = "corrupt",
    /// The end of a packet is missing.
    Truncate = "truncate",
    /// A link stands still for a while, and loses nothing.
    Pause = "pause",
    /// A link is down for a while, and loses everything.
    Flap = "flap",
    /// Some nodes cannot reach the others for a while.
    Partition = "partition",
    /// A node looks at what it received only now and then, for a while.
    SlowReceiver = "slow-receiver",
    /// A node dies, and starts again.
    Crash = "crash",
}

/// How many kinds there are.
pub const FAULTS: usize = Fault::ALL.len();

/// What a network is like.
#[derive(Clone, Copy, Debug)]
pub struct FabricConfig {
    /// Of everything random in it.
    pub seed: u64,
    /// Nodes.
    pub nodes: u32,
    /// Switches, in a row; the nodes are spread over them. Without any, every node has a link to every other.
    pub switches: u32,
    /// Nanoseconds that a link takes.
    pub latency_ns: u64,
    /// Picoseconds that a byte takes: 80 is 100 Gbit/s. 0: no time at all.
    pub ps_per_byte: u64,
    /// Bytes that wait for a link at most; what comes then is lost.
    pub queue_bytes: u64,
    /// How often each fault happens, for each packet on each link.
    pub faults: [Ratio; FAULTS],
    /// The longest time of a fault that lasts.
    pub fault_ns: u64,
}

impl FabricConfig {
    /// Two nodes, one link, no faults.
    pub const fn new(seed: u64) -> FabricConfig {
        FabricConfig {
            seed,
            nodes: 2,
            switches: 0,
            latency_ns: 1000,
            ps_per_byte: 80,
            queue_bytes: 1 << 20,
            faults: [Ratio::NEVER; FAULTS],
            fault_ns: 200_000,
        }
    }

    /// The same with a fault.
    pub const fn with(mut self, fault: Fault, ratio: Ratio) -> FabricConfig {
        self.faults[fault as usize] = ratio;
        self
    }
}

/// What can be done to a network at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// A fault is as frequent as that from now on, on every link.
    Set(Fault, Ratio),
    /// Nothing goes wrong any more, and what is down or slow is not.
    Calm,
    /// What the next packet from that node meets.
    Next(u32, Fault),
    /// The links of a node are down, or up.
    Link {
        /// Whose.
        node: u32,
        /// Whether they are up.
        is_up: bool,
    },
}

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Roce,
    Control,
}

struct Parcel {
    kind: Kind,
    from: u32,
    to: u32,
    /// The links that are before it, and the next of them.
    hop: u32,
    bytes: Vec<u8>,
}

/// One direction between two places.
struct Wire {
    from: u32,
    to: u32,
    /// When it has sent what waits.
    free_at: u64,
    /// Nothing behind a packet that was delayed comes before it.
    last_arrival: u64,
    stands_until: u64,
    down_until: u64,
}

struct Node {
    received: VecDeque<(u32, Vec<u8>)>,
    control: VecDeque<(u32, Vec<u8>)>,
    is_alive: bool,
    /// It looks at one packet each so many nanoseconds, up to a moment.
    slow_ns: u64,
    slow_until: u64,
    next_look: u64,
    /// What is to happen to the next packet that it sends.
    next_fault: Option<Fault>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: u64,
    order: u64,
    parcel: u32,
}

struct Net {
    config: FabricConfig,
    random: Random,
    now: u64,
    order: u64,
    nodes: Vec<Node>,
    wires: Vec<Wire>,
    /// Links from a place to a place: an index and one, or 0.
    paths: Vec<Vec<u32>>,
    due: BinaryHeap<Reverse<Due>>,
    parcels: Vec<Option<Parcel>>,
    free_parcels: Vec<u32>,
    spare: Vec<Vec<u8>>,
    script: VecDeque<(u64, Act)>,
    /// Nothing is drawn.
    is_calm: bool,
    /// Nodes on the far side of a partition.
    apart: u64,
    apart_until: u64,
    crashes: VecDeque<u32>,
    counts: [u64; FAULTS],
    packets: u64,
    overflows: u64,
    digest: u64,
    trace: Option<Box<dyn Write>>,
}

/// A network; clones are handles of the same.
#[derive(Clone)]
pub struct Fabric(Rc<RefCell<Net>>);

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("now", &self.now()).finish_non_exhaustive()
    }
}

/// The address of a node.
pub const fn address(node: u32) -> IpAddr {
    let [_, a, b, c] = (node + 1).to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(10, a, b, c))
}

/// The node of an address.
pub fn node_of(address: IpAddr) -> Option<u32> {
    match address {
        IpAddr::V4(v4) => match v4.octets() {
            [10, a, b, c] => u32::from_be_bytes([0, a, b, c]).checked_sub(1),
            _ => None,
        },
        IpAddr::V6(_) => None,
    }
}

impl Fabric {
    /// A network whose nodes are all there.
    pub fn new(config: FabricConfig) -> Fabric {
        let (wires, paths) = topology(config.nodes, config.switches);
        let node = || Node {
            received: VecDeque::new(),
            control: VecDeque::new(),
            is_alive: true,
            slow_ns: 0,
            slow_until: 0,
            next_look: 0,
            next_fault: None,
        };
        Fabric(Rc::new(RefCell::new(Net {
            random: Random::new(config.seed),
            now: 0,
            order: 0,
            nodes: (0..config.nodes).map(|_| node()).collect(),
            wires,
            paths,
            due: BinaryHeap::new(),
            parcels: Vec::new(),
            free_parcels: Vec::new(),
            spare: Vec::new(),
            script: VecDeque::new(),
            is_calm: config.faults == [Ratio::NEVER; FAULTS],
            apart: 0,
            apart_until: 0,
            crashes: VecDeque::new(),
            counts: [0; FAULTS],
            packets: 0,
            overflows: 0,
            digest: 0,
            trace: None,
            config,
        })))
    }

    /// Something is done at a moment. Moments are given in their order.
    pub fn at(&self, moment: u64, act: Act) {
        self.0.borrow_mut().script.push_back((moment, act));
    }

    /// Something is done now.
    pub fn act(&self, act: Act) {
        self.0.borrow_mut().act(act);
    }

    /// Moves everything that is due by `now`.
    pub fn advance(&self, now: u64) {
        self.0.borrow_mut().advance(now);
    }

    /// The time up to which it was moved.
    pub fn now(&self) -> u64 {
        self.0.borrow().now
    }

    /// When something arrives, or can be looked at, next.
    pub fn next_event(&self) -> Option<u64> {
        self.0.borrow().next_event()
    }

    /// Whether there is nothing for anybody.
    pub fn is_empty(&self) -> bool {
        let net = self.0.borrow();
        net.due.is_empty() && net.nodes.iter().all(|n| n.received.is_empty() && n.control.is_empty())
    }

    /// A node is gone, with everything that was on its way to it.
    pub fn kill(&self, node: u32) {
        self.0.borrow_mut().kill(node);
    }

    /// A node is there again.
    pub fn revive(&self, node: u32) {
        if let Some(node) = self.0.borrow_mut().nodes.get_mut(node as usize) {
            node.is_alive = true;
        }
    }

    /// The next node that is to crash, as the faults would have it: the caller drops its engine, and revives it.
    pub fn take_crash(&self) -> Option<u32> {
        self.0.borrow_mut().crashes.pop_front()
    }

    /// How often each fault happened.
    pub fn count(&self, fault: Fault) -> u64 {
        self.0.borrow().counts[fault as usize]
    }

    /// Packets sent, and those that found a queue full.
    pub fn packets(&self) -> (u64, u64) {
        let net = self.0.borrow();
        (net.packets, net.overflows)
    }

    /// A number made of every packet, its time and its fate so far.
    pub fn digest(&self) -> u64 {
        self.0.borrow().digest
    }

    /// Writes a line for each packet: time, from, to, length, ICRC, and what became of it.
    pub fn trace(&self, to: Box<dyn Write>) {
        self.0.borrow_mut().trace = Some(to);
    }

    /// What a node's NIC and its control channel hang on.
    pub fn port(&self, node: u32) -> FabricPort {
        FabricPort { fabric: self.clone(), node, buffer: Box::new([0; MAX_PACKET]) }
    }
}

/// All links, and for each pair of nodes the row of links between them. Places are nodes, then switches.
fn topology(nodes: u32, switches: u32) -> (Vec<Wire>, Vec<Vec<u32>>) {
    let mut wires: Vec<Wire> = Vec::new();
    let mut wire = |from: u32, to: u32| {
        let found = wires.iter().position(|w| w.from == from && w.to == to);
        found.unwrap_or_else(|| {
            wires.push(Wire { from, to, free_at: 0, last_arrival: 0, stands_until: 0, down_until: 0 });
            wires.len() - 1
        }) as u32
    };
    let mut paths = Vec::new();
    for from in 0..nodes {
        for to in 0..nodes {
            let mut path = Vec::new();
            if from == to {
                // Through the NIC itself.
                path.push(wire(from, to));
            } else if switches == 0 {
                path.push(wire(from, to));
            } else {
                let (mut at, end) = (from % switches, to % switches);
                path.push(wire(from, nodes + at));
                while at != end {
                    let next = if at < end { at + 1 } else { at - 1 };
                    path.push(wire(nodes + at, nodes + next));
                    at = next;
                }
                path.push(wire(nodes + at, to));
            }
            paths.push(path);
        }
    }
    (wires, paths)
}

impl Net {
    fn act(&mut self, act: Act) {
        match act {
            Act::Set(fault, ratio) => {
                self.config.faults[fault as usize] = ratio;
                self.is_calm = self.config.faults == [Ratio::NEVER; FAULTS];
            }
            Act::Calm => {
                self.config.faults = [Ratio::NEVER; FAULTS];
                self.is_calm = true;
                (self.apart, self.apart_until) = (0, 0);
                for wire in &mut self.wires {
                    (wire.stands_until, wire.down_until) = (0, 0);
                }
                for node in &mut self.nodes {
                    (node.slow_until, node.next_look, node.next_fault) = (0, 0, None);
                }
                self.crashes.clear();
            }
            Act::Next(node, fault) => {
                if let Some(node) = self.nodes.get_mut(node as usize) {
                    node.next_fault = Some(fault);
                }
            }
            Act::Link { node, is_up } => {
                for wire in self.wires.iter_mut().filter(|w| w.from == node || w.to == node) {
                    wire.down_until = if is_up { 0 } else { u64::MAX };
                }
                self.counts[Fault::Flap as usize] += u64::from(!is_up);
            }
        }
    }

    fn advance(&mut self, now: u64) {
        loop {
            let next_act = self.script.front().map_or(u64::MAX, |(at, _)| *at);
            let next_due = self.due.peek().map_or(u64::MAX, |due| due.0.at);
            if next_act.min(next_due) > now {
                break;
            }
            if next_act <= next_due {
                self.now = self.now.max(next_act);
                if let Some((_, act)) = self.script.pop_front() {
                    self.act(act);
                }
            } else if let Some(Reverse(due)) = self.due.pop() {
                self.now = self.now.max(due.at);
                self.arrive(due.parcel);
            }
        }
        self.now = self.now.max(now);
    }

    fn next_event(&self) -> Option<u64> {
        let due = self.due.peek().map(|due| due.0.at);
        let act = self.script.front().map(|(at, _)| *at);
        let waits = self.nodes.iter().filter(|n| !n.received.is_empty()).map(|n| n.next_look.max(self.now)).min();
        let control = self.nodes.iter().any(|n| !n.control.is_empty()).then_some(self.now);
        [due, act, waits, control].into_iter().flatten().min()
    }

    fn kill(&mut self, node: u32) {
        for parcel in self.parcels.iter_mut() {
            if parcel.as_ref().is_some_and(|p| p.to == node || p.from == node)
                && let Some(parcel) = parcel
            {
                // It is still due, and then goes nowhere.
                parcel.bytes.clear();
            }
        }
        if let Some(node) = self.nodes.get_mut(node as usize) {
            node.is_alive = false;
            node.received.clear();
            node.control.clear();
        }
    }

    /// A node sends.
    fn send(&mut self, now: u64, kind: Kind, from: u32, to: u32, bytes: &[u8]) {
        self.now = self.now.max(now);
        self.packets += 1;
        let known = (to as usize) < self.nodes.len() && (from as usize) < self.nodes.len();
        if !known || !self.nodes[from as usize].is_alive {
            return;
        }
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(bytes);
        let parcel = Parcel { kind, from, to, hop: 0, bytes: copy };
        let place = match self.free_parcels.pop() {
            Some(place) => {
                self.parcels[place as usize] = Some(parcel);
                place
            }
            None => {
                self.parcels.push(Some(parcel));
                self.parcels.len() as u32 - 1
            }
        };
        self.forward(place);
    }

    /// Which faults happen to a packet on a link.
    fn draw(&mut self, parcel: &Parcel) -> [bool; FAULTS] {
        let mut drawn = [false; FAULTS];
        if self.is_calm && self.nodes[parcel.from as usize].next_fault.is_none() {
            return drawn;
        }
        for fault in Fault::ALL {
            let ratio = self.config.faults[*fault as usize];
            drawn[*fault as usize] = self.random.happens(ratio);
        }
        if let Some(fault) = self.nodes[parcel.from as usize].next_fault.take() {
            drawn[fault as usize] = true;
        }
        if drawn[Fault::AckLoss as usize] {
            let opcode = parcel.bytes.first().and_then(|raw| Opcode::from_raw(*raw));
            drawn[Fault::AckLoss as usize] = parcel.kind == Kind::Roce && opcode.is_some_and(Opcode::is_response);
        }
        drawn
    }

    /// A packet stands before its next link.
    fn forward(&mut self, place: u32) {
        let Some(mut parcel) = self.parcels[place as usize].take() else { return };
        let pair = (parcel.from * self.config.nodes + parcel.to) as usize;
        let wire = self.paths[pair][parcel.hop as usize] as usize;
        let drawn = self.draw(&parcel);
        let happens = |fault: Fault| drawn[fault as usize];
        let mut fate = Fate::default();
        for fault in Fault::ALL {
            if happens(*fault) {
                self.counts[*fault as usize] += 1;
                fate.note(*fault);
            }
        }
        let lasts = |random: &mut Random, most: u64| 1 + random.between(0, most.max(1));
        if happens(Fault::Pause) {
            self.wires[wire].stands_until = self.now + lasts(&mut self.random, self.config.fault_ns);
        }
        if happens(Fault::Flap) {
            self.wires[wire].down_until = self.now + lasts(&mut self.random, self.config.fault_ns);
        }
        if happens(Fault::Partition) {
            self.apart = self.random.any();
            // Whoever sent this is on one side, whoever is to get it on the other.
            self.apart |= 1 << (parcel.from % 64);
            self.apart &= !(1 << (parcel.to % 64));
            self.apart_until = self.now + lasts(&mut self.random, self.config.fault_ns);
        }
        if happens(Fault::SlowReceiver) {
            let (until, each) = (lasts(&mut self.random, self.config.fault_ns), lasts(&mut self.random, 20_000));
            let node = &mut self.nodes[parcel.to as usize];
            (node.slow_until, node.slow_ns) = (self.now + until, each);
        }
        if happens(Fault::Crash) {
            self.crashes.push_back(parcel.to);
        }
        if happens(Fault::Corrupt) && !parcel.bytes.is_empty() {
            for _ in 0..=self.random.below(3) {
                let bit = self.random.below(parcel.bytes.len() as u32 * 8) as usize;
                parcel.bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        if happens(Fault::Truncate) {
            let len = self.random.below(parcel.bytes.len() as u32) as usize;
            parcel.bytes.truncate(len);
        }
        let is_apart =
            self.now < self.apart_until && (self.apart >> (parcel.from % 64) ^ self.apart >> (parcel.to % 64)) & 1 != 0;
        let link = &mut self.wires[wire];
        let starts = self.now.max(link.free_at).max(link.stands_until);
        let takes = parcel.bytes.len() as u64 * self.config.ps_per_byte / 1000;
        // How many bytes the link would need to send before this.
        let waiting = (starts - self.now).saturating_mul(1000).checked_div(self.config.ps_per_byte).unwrap_or(0);
        let is_lost = happens(Fault::Loss) || happens(Fault::AckLoss) || is_apart || self.now < link.down_until;
        let is_full = self.now >= link.stands_until && waiting > self.config.queue_bytes;
        self.overflows += u64::from(is_full && !is_lost);
        if is_lost || is_full {
            fate.lost = true;
            self.log(&parcel, fate, 0);
            self.recycle(place, parcel);
            return;
        }
        link.free_at = starts + takes;
        let mut arrives = link.free_at + self.config.latency_ns;
        if happens(Fault::Delay) {
            arrives += lasts(&mut self.random, self.config.fault_ns);
        }
        arrives = arrives.max(self.wires[wire].last_arrival);
        self.wires[wire].last_arrival = arrives;
        if happens(Fault::Reorder) {
            // Not counted as the last arrival: the ones behind go past it.
            arrives += lasts(&mut self.random, self.config.latency_ns * 4);
        }
        self.log(&parcel, fate, arrives);
        if happens(Fault::Duplicate) {
            let copy = Parcel { bytes: parcel.bytes.clone(), ..parcel };
            self.parcels.push(Some(copy));
            let twin = self.parcels.len() as u32 - 1;
            let later = arrives + self.random.between(0, self.config.latency_ns * 2);
            self.schedule(twin, later);
        }
        self.parcels[place as usize] = Some(parcel);
        self.schedule(place, arrives);
    }

    fn schedule(&mut self, parcel: u32, at: u64) {
        self.order += 1;
        self.due.push(Reverse(Due { at, order: self.order, parcel }));
    }

    fn recycle(&mut self, place: u32, parcel: Parcel) {
        self.free_parcels.push(place);
        self.spare.push(parcel.bytes);
    }

    /// A packet is at the end of a link.
    fn arrive(&mut self, place: u32) {
        let Some(parcel) = self.parcels[place as usize].as_mut() else { return };
        let pair = (parcel.from * self.config.nodes + parcel.to) as usize;
        parcel.hop += 1;
        if (parcel.hop as usize) < self.paths[pair].len() {
            return self.forward(place);
        }
        let Some(parcel) = self.parcels[place as usize].take() else { return };
        self.free_parcels.push(place);
        let node = &mut self.nodes[parcel.to as usize];
        if !node.is_alive || parcel.bytes.is_empty() {
            self.spare.push(parcel.bytes);
            return;
        }
        match parcel.kind {
            Kind::Roce => node.received.push_back((parcel.from, parcel.bytes)),
            Kind::Control => node.control.push_back((parcel.from, parcel.bytes)),
        }
    }

    /// Takes a packet into the digest and the trace.
    fn log(&mut self, parcel: &Parcel, fate: Fate, arrives: u64) {
        // Every packet ends with a checksum of itself, and control packets carry one.
        let at = if parcel.kind == Kind::Roce { parcel.bytes.len().saturating_sub(4) } else { 12 };
        let crc = parcel.bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let words = [
            self.now,
            u64::from(parcel.from) << 32 | u64::from(parcel.to),
            u64::from(parcel.hop) << 32 | u64::from(crc),
            u64::from(fate.faults) << 1 | u64::from(fate.lost),
            arrives,
        ];
        for word in words {
            // FNV-1a by words: a digest, not a defence.
            self.digest = (self.digest ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        }
        if let Some(trace) = &mut self.trace {
            let what = match parcel.kind {
                Kind::Roce => "roce",
                Kind::Control => "control",
            };
            let _ = write!(
                trace,
                "{} {}>{} hop {} {what} {} bytes {crc:08x}",
                self.now,
                parcel.from,
                parcel.to,
                parcel.hop,
                parcel.bytes.len()
            );
            for fault in Fault::ALL.iter().filter(|f| fate.has(**f)) {
                let _ = write!(trace, " {}", fault.name());
            }
            let _ = if fate.lost { writeln!(trace, " lost") } else { writeln!(trace, " arrives {arrives}") };
        }
    }
}

/// What happened to a packet.
#[derive(Clone, Copy, Default)]
struct Fate {
    faults: u16,
    lost: bool,
}

impl Fate {
    fn note(&mut self, fault: Fault) {
        self.faults |= 1 << fault as u8;
    }

    fn has(self, fault: Fault) -> bool {
        self.faults >> fault as u8 & 1 != 0
    }
}

const _: () = assert!(FAULTS <= 16);

/// Where a node hangs on the network.
pub struct FabricPort {
    fabric: Fabric,
    node: u32,
    buffer: Box<[u8; MAX_PACKET]>,
}

impl fmt::Debug for FabricPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FabricPort").field("node", &self.node).finish_non_exhaustive()
    }
}

impl FabricPort {
    /// The node.
    pub fn node(&self) -> u32 {
        self.node
    }

    /// Sends a control packet.
    pub fn send_control(&self, now: u64, to: u32, bytes: &[u8]) {
        self.fabric.0.borrow_mut().send(now, Kind::Control, self.node, to, bytes);
    }

    /// The oldest control packet that came: from whom.
    pub fn receive_control(&self, now: u64, bytes: &mut [u8]) -> Option<(u32, usize)> {
        let mut net = self.fabric.0.borrow_mut();
        net.advance(now);
        let node = net.nodes.get_mut(self.node as usize)?;
        let (from, packet) = node.control.pop_front()?;
        let len = packet.len().min(bytes.len());
        bytes[..len].copy_from_slice(&packet[..len]);
        net.spare.push(packet);
        Some((from, len))
    }
}

impl crate::soft::Wire for FabricPort {
    fn receive(&mut self, now: u64, mut each: impl FnMut(&Ip, &[u8])) {
        let mut net = self.fabric.0.borrow_mut();
        net.advance(now);
        let net = &mut *net;
        let Some(node) = net.nodes.get_mut(self.node as usize) else { return };
        while now >= node.next_look {
            let Some((from, packet)) = node.received.pop_front() else { break };
            each(&Ip::new(address(from), address(self.node)), &packet);
            net.spare.push(packet);
            if now < node.slow_until {
                node.next_look = now + node.slow_ns;
            }
        }
    }

    fn place(&mut self) -> Option<&mut [u8]> {
        Some(&mut self.buffer[..])
    }

    fn commit(&mut self, now: u64, len: usize, to: IpAddr) {
        if let Some(to) = node_of(to) {
            let bytes = self.buffer.get(..len).unwrap_or(&[]);
            self.fabric.0.borrow_mut().send(now, Kind::Roce, self.node, to, bytes);
        }
    }

    fn flush(&mut self, _now: u64) {}
}
