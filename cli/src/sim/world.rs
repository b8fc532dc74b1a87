//! The nodes of a run, what they do, and what is checked of it.

use std::collections::VecDeque;
use std::fmt;

use verbring::{
    Arena, Completion, Config, Engine, Notice, Opts, PeerId, Region, RegionOptions, RemoteKey, Rights, Signal,
    SizeClass, Slab, Sqe, SqeFlags, Status, Window,
};
use verbring_sim::device::{FabricDevice, FabricOptions};
use verbring_sim::fabric::{Act, Fabric, FabricConfig, Fault};
use verbring_sim::nic::{Delay, Weakness};
use verbring_sim::random::Random;
use verbring_sim::soft::Patience;

use super::Options;
use super::area::{AREA, Area, Order, byte_of};

/// Classes of a connection.
const CLASSES: usize = 2;
/// Bytes before an area: the word of signals, and a word of the initiator's own.
const HEAD: usize = 64;
/// Words that everybody adds to, and words that everybody compares and swaps.
const SHARED: usize = 8;
/// Operations of a node under way.
const LIMIT: usize = 40;
/// Receives kept posted for each peer and class.
const RECEIVES: usize = 3;
/// Bytes of the longest message.
const MESSAGE: usize = 200;
/// Nanoseconds of a turn.
const TURN: u64 = 400;
/// The longest time that is skipped when nothing happens.
const SKIP: u64 = 50_000;
/// Virtual time after the faults stopped, in which everything has to end.
const LIVENESS: u64 = 20_000_000_000;
/// Blocks of every slab.
const BLOCKS: [SizeClass; 2] = [SizeClass { size: 256, count: 64 }, SizeClass { size: AREA as u32, count: 32 }];

type Outcome<T> = Result<T, String>;

/// What an operation is.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Put {
        number: u32,
    },
    Get {
        at: usize,
        len: usize,
        floor: u32,
    },
    Signal {
        number: u32,
    },
    Add {
        word: usize,
    },
    CompareShared {
        word: usize,
        expected: u64,
    },
    Own {
        expected: Option<u64>,
        new: u64,
    },
    Send,
    Recv,
    /// The last put of each class before it.
    Flush {
        puts: [u32; CLASSES],
    },
    Nop,
    Cancel,
    /// It is wrong, and has to be refused with this.
    Bad(Status),
}

#[derive(Clone, Copy, Debug)]
struct Op {
    kind: Kind,
    node: usize,
    to: usize,
    class: usize,
    silent: bool,
    deadline: Option<u64>,
    is_linked: bool,
    /// Somebody asked to cancel it.
    is_cancelled: bool,
    /// The lives of the target's memory, when it was pushed.
    life: u32,
    slot: usize,
}

struct Node {
    engine: Option<Engine<FabricDevice>>,
    id: u64,
    window: Option<Window>,
    local: Option<Window>,
    /// Times that it started.
    life: u32,
    revive_at: u64,
    under_way: usize,
    free_slots: Vec<usize>,
}

/// One node's end of a connection to another.
#[derive(Default)]
struct Tie {
    peer: Option<PeerId>,
    key: Option<RemoteKey>,
    is_ready: bool,
    /// Operations under way, in their order, receives apart.
    queue: [VecDeque<u64>; CLASSES],
    receives: [usize; CLASSES],
    /// Messages ever sent and heard.
    sent: [u32; CLASSES],
    heard: [u32; CLASSES],
    /// Some message of the peer was not sent after all.
    has_hole: [bool; CLASSES],
}

/// What one initiator does to one target in one class.
struct Lane {
    area: Area,
    /// The number of the last put.
    puts: u32,
    /// Signals that may be seen: value, and the range of its put.
    signals: VecDeque<(u32, usize, usize)>,
    signal_seen: u32,
    /// What the initiator's own word may be; and whether an operation on it is under way.
    own: Vec<u64>,
    is_own_busy: bool,
    /// For each shared word the last value found.
    found: [Option<u64>; SHARED],
}

impl Lane {
    fn new(order: Order) -> Lane {
        Lane {
            area: Area::new(order),
            puts: 0,
            signals: VecDeque::new(),
            signal_seen: 0,
            own: vec![0],
            is_own_busy: false,
            found: [None; SHARED],
        }
    }
}

/// A word that everybody adds to: what surely happened, and what may have.
#[derive(Clone, Copy, Default)]
struct Count {
    done: u64,
    unknown: u64,
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Operations that ended.
    pub ops: u64,
    /// Of those, the ones that did not succeed, by status.
    pub errors: Vec<(Status, u64)>,
    /// Packets.
    pub packets: u64,
    /// Faults that happened.
    pub faults: Vec<(&'static str, u64)>,
    /// Connections made.
    pub connections: u64,
    /// Nanoseconds of virtual time.
    pub time: u64,
    /// Of every packet, its time and its fate.
    pub digest: u64,
}

impl Report {
    /// Adds another run's.
    pub fn add(&mut self, other: &Report) {
        fn sum<K: PartialEq + Copy>(to: &mut Vec<(K, u64)>, from: &[(K, u64)]) {
            for (key, count) in from {
                match to.iter_mut().find(|(k, _)| k == key) {
                    Some((_, total)) => *total += count,
                    None => to.push((*key, *count)),
                }
            }
        }
        self.ops += other.ops;
        self.packets += other.packets;
        self.connections += other.connections;
        self.time += other.time;
        self.digest = self.digest.rotate_left(7) ^ other.digest;
        sum(&mut self.errors, &other.errors);
        sum(&mut self.faults, &other.faults);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errors: u64 = self.errors.iter().map(|(_, count)| count).sum();
        write!(f, "{} operations, {} of them with an error", self.ops, errors)?;
        for (i, (status, count)) in self.errors.iter().enumerate() {
            write!(f, "{} {count} {}", if i == 0 { ":" } else { "," }, status.name())?;
        }
        writeln!(f)?;
        write!(
            f,
            "{} packets, {} connections, {:.3} s of virtual time",
            self.packets,
            self.connections,
            self.time as f64 / 1e9
        )?;
        writeln!(f, ", digest {:016x}", self.digest)?;
        write!(f, "faults:")?;
        for (name, count) in self.faults.iter().filter(|(_, count)| *count != 0) {
            write!(f, " {name} {count}")?;
        }
        if self.faults.iter().all(|(_, count)| *count == 0) {
            write!(f, " none")?;
        }
        Ok(())
    }
}

/// A run.
pub struct World {
    options: Options,
    random: Random,
    fabric: Fabric,
    fabric_options: FabricOptions,
    nodes: Vec<Node>,
    ties: Vec<Tie>,
    lanes: Vec<Lane>,
    /// By target and word: the first are added to, the others compared and swapped.
    shared: Vec<[Count; SHARED]>,
    /// When a pair may connect again.
    retry_at: Vec<u64>,
    ops: Vec<Option<Op>>,
    generations: Vec<u32>,
    free_ops: Vec<usize>,
    now: u64,
    turn: u64,
    last_step: u64,
    pushed: u64,
    is_over: bool,
    errors: Vec<(Status, u64)>,
    report: Report,
}

impl World {
    /// A run that has not begun.
    pub fn new(options: &Options) -> World {
        let mut random = Random::new(options.seed);
        let count = options.nodes.unwrap_or_else(|| 2 + random.below(3));
        let mut config = FabricConfig::new(options.seed);
        config.nodes = count;
        config.switches = random.below(3);
        config.latency_ns = random.between(100, 3000);
        config.faults = options.ratios(&mut random);
        config.fault_ns = [20_000, 300_000, 3_000_000][random.below(3) as usize];
        let mut weakness = Weakness { poison: true, ..Weakness::NONE };
        weakness.max_mtu = [256, 512, 1024, 4096][random.below(4) as usize];
        if random.below(3) == 0 {
            weakness.max_inline = 0;
        }
        if random.below(3) == 0 {
            weakness.max_rd_atomic = 1 + random.below(2) as u8;
        }
        if random.below(3) == 0 {
            weakness.delay = Some(Delay { max_ns: random.between(100, 20_000), relaxed: random.below(2) == 0 });
        }
        let order = order_of(&weakness);
        let fabric_options = FabricOptions {
            max_links: count,
            weakness,
            // 16 to 131 us.
            patience: Patience { timeout: 2 + random.below(4) as u8, retry_count: 7 },
            window: 16 << random.below(4),
        };
        let nodes = count as usize;
        World {
            fabric: Fabric::new(config),
            fabric_options,
            nodes: (0..nodes)
                .map(|_| Node {
                    engine: None,
                    id: 0,
                    window: None,
                    local: None,
                    life: 0,
                    revive_at: 0,
                    under_way: 0,
                    free_slots: Vec::new(),
                })
                .collect(),
            ties: (0..nodes * nodes).map(|_| Tie::default()).collect(),
            lanes: (0..nodes * nodes * CLASSES).map(|_| Lane::new(order)).collect(),
            shared: vec![[Count::default(); SHARED]; nodes],
            retry_at: vec![0; nodes * nodes],
            ops: Vec::new(),
            generations: Vec::new(),
            free_ops: Vec::new(),
            now: 1000,
            turn: 0,
            last_step: 0,
            pushed: 0,
            is_over: false,
            errors: Vec::new(),
            report: Report::default(),
            options: options.clone(),
            random,
        }
    }

    /// Writes a line for each packet.
    pub fn trace(&mut self, to: Box<dyn std::io::Write>) {
        self.fabric.trace(to);
    }

    fn count(&self) -> usize {
        self.nodes.len()
    }

    fn tie(&mut self, from: usize, to: usize) -> &mut Tie {
        let nodes = self.count();
        &mut self.ties[from * nodes + to]
    }

    /// To whom a node has the tie that `is_it` names.
    fn tie_where(&self, node: usize, is_it: impl Fn(&Tie) -> bool) -> Option<usize> {
        self.ties.iter().skip(node * self.count()).take(self.count()).position(is_it)
    }

    fn lane(&mut self, from: usize, to: usize, class: usize) -> &mut Lane {
        let nodes = self.count();
        &mut self.lanes[(to * nodes + from) * CLASSES + class]
    }

    /// Where an initiator's part of a window begins.
    fn part(&self, from: usize, class: usize) -> usize {
        (from * CLASSES + class) * (HEAD + AREA)
    }

    fn shared_at(&self, word: usize) -> usize {
        self.part(self.count(), 0) + 8 * word
    }

    fn window_len(&self) -> usize {
        self.shared_at(SHARED)
    }

    /// Runs it.
    pub fn run(mut self) -> Outcome<Report> {
        for node in 0..self.count() {
            self.start(node)?;
        }
        while self.pushed < self.options.ops {
            self.step(true)?;
        }
        // From here on nothing goes wrong, and everything has to end.
        self.fabric.act(Act::Calm);
        let end = self.now + LIVENESS;
        let all = self.count();
        // Connections that are dying of what happened before may still do so; one more round of operations shows that the
        // rest works.
        for round in 0..2 {
            while !self.is_quiet() {
                if self.now > end {
                    return Err(self.what_hangs());
                }
                self.step(false)?;
            }
            if round == 0 {
                for from in 0..all {
                    for to in (0..all).filter(|to| *to != from) {
                        for class in 0..CLASSES {
                            self.push_flush(from, to, class)?;
                        }
                    }
                }
            }
        }
        self.check_all()?;
        let (packets, _) = self.fabric.packets();
        self.report.packets = packets;
        self.report.time = self.now;
        self.report.digest = self.fabric.digest();
        self.report.faults = Fault::ALL.iter().map(|f| (f.name(), self.fabric.count(*f))).collect();
        self.errors.sort();
        self.report.errors = std::mem::take(&mut self.errors);
        Ok(self.report.clone())
    }

    /// Every node is there and connected to every other, and nothing is under way but receives.
    fn is_quiet(&self) -> bool {
        let nodes = self.count();
        let is_tied = |(i, tie): (usize, &Tie)| {
            i / nodes == i % nodes || (tie.is_ready && tie.queue.iter().all(VecDeque::is_empty))
        };
        self.nodes.iter().all(|n| n.engine.is_some()) && self.ties.iter().enumerate().all(is_tied)
    }

    fn what_hangs(&self) -> String {
        let nodes = self.count();
        let mut what = format!("{} s after the last fault it is not over:", LIVENESS / 1_000_000_000);
        for (i, tie) in self.ties.iter().enumerate().filter(|(i, _)| i / nodes != i % nodes) {
            if !tie.is_ready || tie.queue.iter().any(|q| !q.is_empty()) {
                let ops: Vec<_> = tie.queue.iter().flatten().filter_map(|id| self.op(*id)).map(|op| op.kind).collect();
                what += &format!(" {} to {}: ready {}, {ops:?};", i / nodes, i % nodes, tie.is_ready);
            }
        }
        what
    }

    /// A node starts, with another identity each time.
    fn start(&mut self, node: usize) -> Outcome<()> {
        let len = self.window_len();
        let state = &mut self.nodes[node];
        state.life += 1;
        state.id = (node as u64 + 1) << 32 | u64::from(state.life);
        let no_memory = |e: &dyn fmt::Display| format!("no memory for a node: {e}");
        let config = Config {
            sq_entries: 128,
            cq_entries: 512,
            max_outstanding: 256,
            max_peers: 16,
            max_windows: 8,
            max_imports: 32,
            node: state.id,
            secret: [7; 16],
        };
        let pages = RegionOptions::default();
        let region = |bytes| Region::private(bytes, pages).map(Arena::from_region).map_err(|e| no_memory(&e));
        let seed = self.options.seed;
        let mut device =
            self.fabric.device(node as u32, state.id, seed, self.fabric_options).map_err(|e| no_memory(&e))?;
        // SAFETY: no queue pair is ended.
        unsafe { device.rnic_mut() }.nic_mut().set_defect(self.options.defect);
        let slab = Slab::new(region(Slab::bytes(&BLOCKS))?, &BLOCKS).map_err(|e| no_memory(&e))?;
        let engine = Engine::new(device, region(config.bytes())?, Some(slab), config);
        let mut engine = engine.map_err(|e| no_memory(&e))?;
        state.window = Some(engine.window(len, Rights::all()).map_err(|e| no_memory(&e))?);
        state.local = Some(engine.window(LIMIT * 2 * AREA, Rights::empty()).map_err(|e| no_memory(&e))?);
        state.engine = Some(engine);
        state.free_slots = (0..LIMIT * 2).collect();
        state.under_way = 0;
        self.fabric.revive(node as u32);
        Ok(())
    }

    /// A node dies, with all it had.
    fn crash(&mut self, node: usize) -> Outcome<()> {
        if self.nodes[node].engine.is_none() {
            return Ok(());
        }
        self.fabric.kill(node as u32);
        let state = &mut self.nodes[node];
        (state.engine, state.window, state.local) = (None, None, None);
        state.revive_at = self.now + self.random.between(1, 500_000);
        for to in 0..self.count() {
            // What it had under way may have been done.
            let tie = std::mem::take(self.tie(node, to));
            for id in tie.queue.into_iter().flatten() {
                if let Some(op) = self.take(id) {
                    self.may_have_happened(&op);
                }
            }
        }
        // Receives, and what else belongs to no queue.
        for index in 0..self.ops.len() {
            if self.ops[index].is_some_and(|op| op.node == node) {
                self.free(index);
            }
        }
        // Its memory is new when it comes back.
        let order = order_of(&self.fabric_options.weakness);
        for from in 0..self.count() {
            for class in 0..CLASSES {
                let lane = self.lane(from, node, class);
                let puts = lane.puts;
                *lane = Lane { puts, ..Lane::new(order) };
            }
        }
        self.shared[node] = [Count::default(); SHARED];
        Ok(())
    }

    /// Some time passes.
    fn step(&mut self, may_push: bool) -> Outcome<()> {
        self.turn += 1;
        for node in 0..self.count() {
            if self.nodes[node].engine.is_none() {
                if self.now >= self.nodes[node].revive_at {
                    self.start(node)?;
                }
                continue;
            }
            if may_push {
                self.push_some(node)?;
            } else {
                self.push_needed(node)?;
            }
            self.turn_of(node)?;
        }
        while let Some(node) = self.fabric.take_crash() {
            self.crash(node as usize)?;
        }
        if self.turn.is_multiple_of(8) {
            self.connect_all()?;
        }
        if self.turn.is_multiple_of(4) {
            self.observe()?;
        }
        // Nothing to do before the next event: go there.
        let next = self.fabric.next_event().unwrap_or(u64::MAX);
        let timers = self.nodes.iter().filter_map(|n| n.engine.as_ref()).map(|e| e.device().rnic().poll_timeout());
        let next = timers.fold(next, u64::min);
        let last = self.now;
        self.now = (self.now + TURN).max(next.min(self.now + SKIP));
        self.last_step = self.now - last;
        Ok(())
    }

    /// One node does its work.
    fn turn_of(&mut self, node: usize) -> Outcome<()> {
        let now = self.now;
        let Some(engine) = self.nodes[node].engine.as_mut() else { return Ok(()) };
        engine.submit(now);
        engine.poll(now);
        self.reap(node)?;
        let must_look = self.turn.is_multiple_of(16);
        while must_look && let Some(notice) = self.nodes[node].engine.as_mut().and_then(|e| e.control(now)) {
            self.notice(node, notice)?;
        }
        Ok(())
    }

    fn reap(&mut self, node: usize) -> Outcome<()> {
        while let Some(done) = self.nodes[node].engine.as_mut().and_then(|e| e.reap()) {
            self.completed(node, done)?;
        }
        Ok(())
    }

    fn connect_all(&mut self) -> Outcome<()> {
        let nodes = self.count();
        for a in 0..nodes {
            for b in a + 1..nodes {
                let is_down = |tie: &Tie| tie.peer.is_none();
                let (ab, ba) = (is_down(self.tie(a, b)), is_down(self.tie(b, a)));
                let are_there = self.nodes[a].engine.is_some() && self.nodes[b].engine.is_some();
                if !(ab || ba) || !are_there || self.now < self.retry_at[a * nodes + b] {
                    continue;
                }
                // Whoever has not noticed gives up now, too; and it takes longer than any handshake to try again.
                self.drop_tie(a, b)?;
                self.drop_tie(b, a)?;
                self.retry_at[a * nodes + b] = self.now + 30_000_000;
                let address = Fabric::address(b as u32);
                let now = self.now;
                if let Some(engine) = self.nodes[a].engine.as_mut() {
                    let peer = engine.connect(&address, now).map_err(|e| format!("node {a} cannot connect: {e}"))?;
                    self.tie(a, b).peer = Some(peer);
                }
            }
        }
        Ok(())
    }

    /// Ends a connection at one side; everything under way has to end with it.
    fn drop_tie(&mut self, node: usize, to: usize) -> Outcome<()> {
        let now = self.now;
        let Some(peer) = self.tie(node, to).peer else { return Ok(()) };
        if let Some(engine) = self.nodes[node].engine.as_mut() {
            engine.submit(now);
            engine.disconnect(peer, now);
        }
        self.reap(node)?;
        // A silent one that was not heard of succeeded.
        for class in 0..CLASSES {
            while let Some(id) = self.tie(node, to).queue[class].pop_front() {
                let op = self.take(id).ok_or("an operation ended twice")?;
                if !op.silent {
                    return Err(format!(
                        "node {node}: {:?} to {to} has no outcome after its connection ended",
                        op.kind
                    ));
                }
                self.succeeded(&op, None)?;
            }
        }
        if self.tie(node, to).receives != [0; CLASSES] {
            return Err(format!("node {node}: receives from {to} have no outcome after their connection ended"));
        }
        *self.tie(node, to) = Tie::default();
        Ok(())
    }

    fn notice(&mut self, node: usize, notice: Notice) -> Outcome<()> {
        let now = self.now;
        let nodes = self.count();
        match notice {
            Notice::Connected { peer, node: id, .. } => {
                let to = (0..nodes).find(|to| self.nodes[*to].id == id && self.nodes[*to].engine.is_some());
                let Some(to) = to else {
                    // Of an earlier life.
                    if let Some(to) = self.tie_where(node, |tie| tie.peer == Some(peer)) {
                        self.drop_tie(node, to)?;
                    } else if let Some(engine) = self.nodes[node].engine.as_mut() {
                        engine.disconnect(peer, now);
                    }
                    return Ok(());
                };
                if self.tie(node, to).peer != Some(peer) {
                    self.drop_tie(node, to)?;
                    self.tie(node, to).peer = Some(peer);
                }
                self.report.connections += 1;
                let (Some(window), Some(owner)) = (&self.nodes[to].window, &self.nodes[to].engine) else {
                    return Ok(());
                };
                let remote = owner.remote(window).map_err(|e| format!("node {to} has no Remote: {e}"))?;
                // A connection that broke meanwhile says so in the next notice.
                let key = self.nodes[node].engine.as_mut().and_then(|e| e.import(peer, &remote).ok());
                self.tie(node, to).key = key;
            }
            Notice::Imported { key } => {
                if let Some(to) = self.tie_where(node, |tie| tie.key == Some(key)) {
                    self.tie(node, to).is_ready = true;
                }
            }
            Notice::Lost { peer, cause } => {
                if self.options.faults.is_empty() {
                    let counters =
                        self.nodes.iter().filter_map(|n| n.engine.as_ref()).map(|e| e.device().rnic().nic().counters);
                    let counters: Vec<_> = counters.collect();
                    return Err(format!(
                        "node {node} lost a connection in a network without faults: {cause}\n{counters:#?}"
                    ));
                }
                if let Some(to) = self.tie_where(node, |tie| tie.peer == Some(peer)) {
                    self.lost(node, to)?;
                }
            }
            Notice::ImportFailed { key, status } => {
                if self.options.faults.is_empty() {
                    return Err(format!("node {node}: an import failed with {status}"));
                }
                if let Some(to) = self.tie_where(node, |tie| tie.key == Some(key)) {
                    self.lost(node, to)?;
                }
            }
            other => return Err(format!("node {node} did not expect {other:?}")),
        }
        Ok(())
    }

    fn lost(&mut self, node: usize, to: usize) -> Outcome<()> {
        self.drop_tie(node, to)?;
        let (a, b) = (node.min(to), node.max(to));
        let pair = a * self.count() + b;
        self.retry_at[pair] = self.now + self.random.between(1, 200_000);
        Ok(())
    }

    fn op(&self, id: u64) -> Option<&Op> {
        let index = (id as u32) as usize;
        (self.generations.get(index) == Some(&((id >> 32) as u32))).then(|| self.ops[index].as_ref()).flatten()
    }

    fn take(&mut self, id: u64) -> Option<Op> {
        let op = *self.op(id)?;
        self.free((id as u32) as usize);
        Some(op)
    }

    fn free(&mut self, index: usize) {
        if let Some(op) = self.ops[index].take() {
            let state = &mut self.nodes[op.node];
            if state.engine.is_some() {
                state.under_way -= 1;
                state.free_slots.push(op.slot);
            }
            self.free_ops.push(index);
            self.report.ops += 1;
        }
    }

    /// An operation that asks for nothing special.
    fn plain(&self, kind: Kind, node: usize, to: usize, class: usize, slot: usize) -> Op {
        let life = self.nodes[to].life;
        Op { kind, node, to, class, silent: false, deadline: None, is_linked: false, is_cancelled: false, life, slot }
    }

    /// A name for an operation.
    fn enter(&mut self, op: Op) -> u64 {
        let index = self.free_ops.pop().unwrap_or_else(|| {
            self.ops.push(None);
            self.generations.push(0);
            self.ops.len() - 1
        });
        self.generations[index] = self.generations[index].wrapping_add(1);
        self.ops[index] = Some(op);
        self.nodes[op.node].under_way += 1;
        u64::from(self.generations[index]) << 32 | index as u64
    }

    /// Keeps receives posted, and asks after silent operations.
    fn push_needed(&mut self, node: usize) -> Outcome<()> {
        for to in (0..self.count()).filter(|to| *to != node) {
            if !self.tie(node, to).is_ready {
                continue;
            }
            for class in 0..CLASSES {
                while self.tie(node, to).receives[class] < RECEIVES && self.push_receive(node, to, class)? {}
                let are_silent = {
                    let queue = self.tie(node, to).queue[class].clone();
                    !queue.is_empty() && queue.iter().all(|id| self.op(*id).is_some_and(|op| op.silent))
                };
                if are_silent {
                    self.push_flush(node, to, class)?;
                }
            }
        }
        Ok(())
    }

    fn push_some(&mut self, node: usize) -> Outcome<()> {
        if self.turn % 8 == node as u64 % 8 {
            self.push_needed(node)?;
        }
        let burst = self.random.below(16);
        for _ in 0..burst {
            let to = self.random.below(self.count() as u32) as usize;
            if self.nodes[node].under_way >= LIMIT || self.nodes[node].free_slots.len() < 4 {
                break;
            }
            if to != node && self.tie(node, to).is_ready {
                let class = self.random.below(CLASSES as u32) as usize;
                let chain = if self.random.below(24) == 0 { 2 + self.random.below(3) } else { 1 };
                for left in (0..chain).rev() {
                    self.push_any(node, to, class, chain > 1, left > 0)?;
                }
            }
        }
        Ok(())
    }

    fn len(&mut self) -> usize {
        let most = match self.random.below(10) {
            0..=4 => 16,
            5..=7 => 128,
            8 => 700,
            _ => AREA as u64,
        };
        self.random.between(1, most) as usize
    }

    /// Pushes one operation of some kind.
    fn push_any(&mut self, node: usize, to: usize, class: usize, in_chain: bool, is_linked: bool) -> Outcome<()> {
        let Some(key) = self.tie(node, to).key else { return Ok(()) };
        let Some(slot) = self.nodes[node].free_slots.pop() else { return Ok(()) };
        let is_fenced = self.random.below(24) == 0;
        let silent = self.random.below(5) == 0;
        let deadline = (self.random.below(32) == 0).then(|| {
            // Without faults everything ends in time.
            let most = if self.options.faults.is_empty() { 1 << 40 } else { 2_000_000 };
            let least = if self.options.faults.is_empty() { 1 << 39 } else { 0 };
            self.now + self.random.between(least, most)
        });
        let base = self.part(node, class);
        let len = self.len();
        let at = self.random.below((AREA - len + 1) as u32) as usize;
        let target = key.at((base + HEAD + at) as u64);
        let local_at = slot * AREA;
        let with_buf = self.random.below(2) == 0;
        let plain = self.plain(Kind::Nop, node, to, class, slot);
        let mut op = Op { silent, deadline, is_linked: in_chain, ..plain };
        let mut opts = Opts { class: class as u8, deadline, fence: is_fenced, link: is_linked, silent, user_data: 0 };
        let mut flags = SqeFlags::empty();
        flags.set(SqeFlags::FENCE, is_fenced);
        flags.set(SqeFlags::LINK, is_linked);
        flags.set(SqeFlags::SILENT, silent);
        let mut in_queue = true;
        // A chain has to end: what is not always pushed is not part of one.
        let draw = self.random.below(if in_chain { 70 } else { 100 });
        let sqe = match draw {
            0..=31 => {
                let number = self.new_put(node, to, class, at, len);
                op.kind = Kind::Put { number };
                let bytes: Vec<u8> = (at..at + len).map(|k| byte_of(number, k)).collect();
                if len <= 16 && self.random.below(2) == 0 {
                    Sqe::put_inline(&bytes, target)
                } else {
                    opts.user_data = self.enter(op);
                    if with_buf && let Some(mut buf) = self.alloc(node, len) {
                        buf.copy_from_slice(&bytes);
                        return self.pushed(node, to, class, opts.user_data, |e| {
                            e.put(buf, target, opts).map_err(|(error, _)| error)
                        });
                    }
                    self.unenter(opts.user_data);
                    let local = self.local(node);
                    local.write(local_at, &bytes);
                    Sqe::put(local.slice(local_at as u64, len as u32), target)
                }
            }
            32..=51 => {
                let floor = self.lane(node, to, class).puts;
                op.kind = Kind::Get { at, len, floor };
                // What was read is looked at: it has to be told.
                (op.silent, opts.silent) = (false, false);
                flags.remove(SqeFlags::SILENT);
                if with_buf && let Some(buf) = self.alloc(node, len) {
                    opts.user_data = self.enter(op);
                    return self.pushed(node, to, class, opts.user_data, |e| {
                        e.get(buf, target, opts).map_err(|(error, _)| error)
                    });
                }
                let local = self.local(node);
                local.fill(local_at, len, 0xa5);
                Sqe::get(local.slice(local_at as u64, len as u32), target)
            }
            52..=59 => {
                let number = self.new_put(node, to, class, at, len);
                op.kind = Kind::Signal { number };
                self.lane(node, to, class).signals.push_back((number, at, len));
                let bytes: Vec<u8> = (at..at + len).map(|k| byte_of(number, k)).collect();
                let local = self.local(node);
                local.write(local_at, &bytes);
                let local = local.slice(local_at as u64, len as u32);
                Sqe::put_signal(local, target, (base / 8) as u32, Signal::Store(u64::from(number)))
            }
            60..=69 => {
                let word = self.random.below(SHARED as u32 / 2) as usize;
                op.kind = Kind::Add { word };
                Sqe::fetch_add(key.at(self.shared_at(word) as u64), 1)
            }
            70..=74 => {
                let word = SHARED / 2 + self.random.below(SHARED as u32 / 2) as usize;
                let expected = self.lane(node, to, class).found[word].unwrap_or(0);
                op.kind = Kind::CompareShared { word, expected };
                op.silent = false;
                flags.remove(SqeFlags::SILENT);
                Sqe::compare_swap(key.at(self.shared_at(word) as u64), expected, expected + 1)
            }
            75..=80 => {
                let lane = self.lane(node, to, class);
                if lane.is_own_busy {
                    self.nodes[node].free_slots.push(slot);
                    return Ok(());
                }
                lane.is_own_busy = true;
                let possible = lane.own.clone();
                let new = self.random.any();
                let is_swap = self.random.below(2) == 0;
                let expected = possible[self.random.below(possible.len() as u32) as usize];
                let expected = if self.random.below(4) == 0 { expected ^ 1 } else { expected };
                op.kind = Kind::Own { expected: (!is_swap).then_some(expected), new };
                op.silent = false;
                flags.remove(SqeFlags::SILENT);
                let at = key.at((base + 8) as u64);
                if is_swap { Sqe::swap(at, new) } else { Sqe::compare_swap(at, expected, new) }
            }
            81..=87 => {
                op.kind = Kind::Send;
                let len = len.clamp(8, MESSAGE);
                let number = self.tie(node, to).sent[class] + 1;
                self.tie(node, to).sent[class] = number;
                let Some(peer) = self.tie(node, to).peer else { return Ok(()) };
                let local = self.local(node);
                for k in 0..len {
                    local.fill(local_at + k, 1, byte_of(number, k));
                }
                Sqe::send(local.slice(local_at as u64, len as u32), peer, number)
            }
            88..=92 => {
                self.nodes[node].free_slots.push(slot);
                return self.push_flush(node, to, class);
            }
            93..=94 => {
                op.kind = Kind::Nop;
                (in_queue, op.deadline) = (false, None);
                flags = SqeFlags::empty();
                op.silent = false;
                Sqe::nop()
            }
            95..=96 => {
                // Some operation that is under way, to whomever.
                let ids: Vec<u64> = self.tie(node, to).queue[class].iter().copied().collect();
                if ids.is_empty() {
                    self.nodes[node].free_slots.push(slot);
                    return Ok(());
                }
                let victim = ids[self.random.below(ids.len() as u32) as usize];
                if let Some(Some(op)) = self.ops.get_mut((victim as u32) as usize) {
                    op.is_cancelled = true;
                }
                op.kind = Kind::Cancel;
                (in_queue, op.deadline, op.silent) = (false, None, false);
                flags = SqeFlags::empty();
                Sqe::cancel(victim)
            }
            _ => {
                let size = self.window_len() as u64;
                let local = self.local(node);
                let slice = local.slice(local_at as u64, len as u32);
                let (sqe, status) = match draw {
                    97 => (Sqe::put(slice, key.at(size - len as u64 + 1)), Status::RemoteOutOfBounds),
                    98 => (Sqe::fetch_add(key.at(4), 1), Status::Misaligned),
                    _ => (Sqe::get(local.slice(1 << 30, len as u32), target), Status::LocalOutOfBounds),
                };
                op.kind = Kind::Bad(status);
                op.silent = false;
                flags.remove(SqeFlags::SILENT);
                in_queue = false;
                sqe
            }
        };
        let id = self.enter(op);
        let mut sqe = sqe.user_data(id).class(class as u8).flags(flags);
        if let Some(deadline) = op.deadline {
            sqe = sqe.deadline(deadline);
        }
        if in_queue {
            return self.pushed(node, to, class, id, |e| e.push(sqe));
        }
        self.push_apart(node, id, |e| e.push(sqe))
    }

    /// The local window of a node.
    fn local(&self, node: usize) -> Window {
        self.nodes[node].local.clone().expect("a node that pushes is there")
    }

    fn alloc(&mut self, node: usize, len: usize) -> Option<verbring::Buf> {
        self.nodes[node].engine.as_mut()?.alloc(len).ok()
    }

    fn new_put(&mut self, node: usize, to: usize, class: usize, at: usize, len: usize) -> u32 {
        let lane = self.lane(node, to, class);
        lane.puts += 1;
        let number = lane.puts;
        lane.area.push(number, at, len);
        number
    }

    /// An operation that was named and then not pushed.
    fn unenter(&mut self, id: u64) {
        let index = (id as u32) as usize;
        if let Some(op) = self.ops[index].take() {
            self.nodes[op.node].under_way -= 1;
            self.free_ops.push(index);
        }
    }

    /// Pushes an operation of a queue.
    fn pushed(
        &mut self,
        node: usize,
        to: usize,
        class: usize,
        id: u64,
        push: impl FnOnce(&mut Engine<FabricDevice>) -> Result<(), verbring::PushError>,
    ) -> Outcome<()> {
        self.tie(node, to).queue[class].push_back(id);
        self.push_apart(node, id, push)
    }

    fn push_apart(
        &mut self,
        node: usize,
        id: u64,
        push: impl FnOnce(&mut Engine<FabricDevice>) -> Result<(), verbring::PushError>,
    ) -> Outcome<()> {
        self.pushed += 1;
        let Some(engine) = self.nodes[node].engine.as_mut() else { return Ok(()) };
        push(engine).map_err(|error| format!("node {node}: an operation ({id:#x}) was not taken: {error}"))
    }

    fn push_flush(&mut self, node: usize, to: usize, class: usize) -> Outcome<()> {
        let Some(peer) = self.tie(node, to).peer else { return Ok(()) };
        let Some(slot) = self.nodes[node].free_slots.pop() else { return Ok(()) };
        let puts = std::array::from_fn(|class| self.lane(node, to, class).puts);
        let id = self.enter(self.plain(Kind::Flush { puts }, node, to, class, slot));
        self.pushed(node, to, class, id, |e| e.push(Sqe::flush(peer).class(class as u8).user_data(id)))
    }

    /// Posts a receive: false if there is no room for one.
    fn push_receive(&mut self, node: usize, to: usize, class: usize) -> Outcome<bool> {
        // Now and then it is too short for what comes.
        let len = if self.random.below(12) == 0 { 16 } else { MESSAGE };
        let Some(peer) = self.tie(node, to).peer else { return Ok(false) };
        if self.nodes[node].free_slots.is_empty() {
            return Ok(false);
        }
        let Some(buf) = self.alloc(node, len) else { return Ok(false) };
        let slot = self.nodes[node].free_slots.pop().unwrap_or(0);
        let id = self.enter(self.plain(Kind::Recv, node, to, class, slot));
        // Receives are not what counts against the limit.
        self.nodes[node].under_way -= 1;
        self.tie(node, to).receives[class] += 1;
        let opts = Opts { user_data: id, class: class as u8, ..Opts::default() };
        self.push_apart(node, id, |e| e.recv(buf, peer, opts).map_err(|(error, _)| error))?;
        Ok(true)
    }

    /// A completion came.
    fn completed(&mut self, node: usize, done: Completion) -> Outcome<()> {
        let Some(op) = self.op(done.user_data).copied() else {
            return Err(format!("node {node}: a completion of nothing that is under way: {done:?}"));
        };
        if op.node != node {
            return Err(format!("node {node}: a completion of node {}'s", op.node));
        }
        if let Kind::Recv = op.kind {
            self.nodes[node].under_way += 1;
            self.take(done.user_data);
            return self.message_came(&op, &done);
        }
        if !matches!(op.kind, Kind::Nop | Kind::Cancel | Kind::Bad(_)) {
            if done.status.is_success() {
                // Everything before it has succeeded, and those that were not silent have said so.
                loop {
                    let Some(id) = self.tie(node, op.to).queue[op.class].pop_front() else {
                        return Err(format!("node {node}: {:?} ended, and is not under way", op.kind));
                    };
                    if id == done.user_data {
                        break;
                    }
                    let earlier = self.take(id).ok_or("an operation ended twice")?;
                    if !earlier.silent {
                        return Err(format!(
                            "node {node}: {:?} succeeded before {:?}, which was pushed earlier in its class",
                            op.kind, earlier.kind
                        ));
                    }
                    self.succeeded(&earlier, None)?;
                }
            } else {
                self.tie(node, op.to).queue[op.class].retain(|id| *id != done.user_data);
            }
        }
        self.take(done.user_data);
        if let Some(deadline) = op.deadline {
            // Kept to 1024 ns, and looked at once a turn.
            let late = self.now.saturating_sub(deadline + 2048);
            if late > self.last_step + TURN {
                return Err(format!("node {node}: {:?} ended {late} ns after its deadline", op.kind));
            }
        }
        if done.status.is_success() {
            self.succeeded(&op, Some(&done))
        } else {
            if let Some((_, count)) = self.errors.iter_mut().find(|(status, _)| *status == done.status) {
                *count += 1;
            } else {
                self.errors.push((done.status, 1));
            }
            self.failed(&op, done.status)
        }
    }

    /// An operation succeeded; of a silent one there is nothing to see.
    fn succeeded(&mut self, op: &Op, done: Option<&Completion>) -> Outcome<()> {
        let (node, to, class) = (op.node, op.to, op.class);
        let is_current = op.life == self.nodes[to].life && self.nodes[to].engine.is_some();
        let value = done.map_or(0, |d| d.value);
        match op.kind {
            Kind::Nop | Kind::Cancel | Kind::Send | Kind::Recv => {}
            Kind::Bad(status) => return Err(format!("node {node}: what had to end as {status:?} succeeded")),
            _ if !is_current => {}
            Kind::Put { number } | Kind::Signal { number } => self.lane(node, to, class).area.succeeded(number),
            Kind::Get { at, len, floor } => {
                let mut seen = vec![0; len];
                match done.and_then(|d| d.buf.as_ref()) {
                    Some(buf) => seen.copy_from_slice(buf),
                    None => self.local(node).read(op.slot * AREA, &mut seen),
                }
                if let Err(k) = self.lane(node, to, class).area.check(at, &seen, floor) {
                    let why = self.lane(node, to, class).area.explain(k, seen[k - at]);
                    return Err(format!(
                        "node {node}: a get of {len} bytes at {at} of node {to}, class {class}, read a wrong byte at {k} \
                         (puts up to {floor} go before it): {why}"
                    ));
                }
            }
            Kind::Add { word } => {
                self.shared[to][word].done += 1;
                if done.is_some() {
                    self.found(op, word, value, true)?;
                }
            }
            Kind::CompareShared { word, expected } => {
                let swapped = value == expected;
                self.shared[to][word].done += u64::from(swapped);
                self.found(op, word, value, false)?;
                self.lane(node, to, class).found[word] = Some(value + u64::from(swapped));
            }
            Kind::Own { expected, new } => {
                let lane = self.lane(node, to, class);
                lane.is_own_busy = false;
                if !lane.own.contains(&value) {
                    return Err(format!(
                        "node {node}: a word of its own at node {to} was {value:#x}, and can only be one of {:x?}",
                        lane.own
                    ));
                }
                lane.own = vec![if expected.is_none_or(|e| e == value) { new } else { value }];
            }
            // Every second is enough.
            Kind::Flush { puts } if self.random.below(2) == 0 => {
                for (class, last) in puts.into_iter().enumerate() {
                    if self.lane(node, to, class).puts == last {
                        self.settle(node, to, class)?;
                    }
                }
            }
            Kind::Flush { .. } => {}
        }
        Ok(())
    }

    /// A shared word was found to have a value.
    fn found(&mut self, op: &Op, word: usize, value: u64, is_add: bool) -> Outcome<()> {
        let known = self.lane(op.node, op.to, op.class).found[word];
        // Values rise; after an add the next one is higher.
        if known.is_some_and(|known| value < known) {
            return Err(format!(
                "node {}: word {word} of node {} was {value} after it had been {}",
                op.node,
                op.to,
                known.unwrap_or(0)
            ));
        }
        self.lane(op.node, op.to, op.class).found[word] = Some(value + u64::from(is_add));
        Ok(())
    }

    /// Everything of a class is visible: the whole area is compared.
    fn settle(&mut self, node: usize, to: usize, class: usize) -> Outcome<()> {
        let at = self.part(node, class) + HEAD;
        let Some(window) = self.nodes[to].window.as_ref() else { return Ok(()) };
        let mut seen = vec![0; AREA];
        window.read(at, &mut seen);
        let lane = self.lane(node, to, class);
        lane.area.settle(&seen).map_err(|k| {
            let why = lane.area.explain(k, seen[k]);
            format!("node {to}: byte {k} of what node {node} wrote in class {class} is wrong after a flush: {why}")
        })
    }

    /// An operation ended in error.
    fn failed(&mut self, op: &Op, status: Status) -> Outcome<()> {
        let wrong =
            |what: &str| Err(format!("node {}: {:?} to {} ended as {status:?}: {what}", op.node, op.kind, op.to));
        match (op.kind, status) {
            (Kind::Bad(expected), status) if status == expected => return Ok(()),
            // To a peer that is gone, or in time.
            (
                Kind::Bad(_),
                Status::PeerUnknown
                | Status::ConnectionLost
                | Status::PeerDead
                | Status::NotReady
                | Status::BadRemoteKey,
            ) if !self.options.faults.is_empty() => {
                return Ok(());
            }
            (Kind::Bad(_), Status::DeadlineExceeded) if op.deadline.is_some() => return Ok(()),
            (Kind::Cancel, Status::NotFound | Status::NotSupported) => return Ok(()),
            (Kind::Nop | Kind::Cancel | Kind::Bad(_), _) => return wrong("it cannot"),
            _ => {}
        }
        if let Kind::Send = op.kind {
            // Noted where it is missed: what was sent before may come after the sender has given the connection up.
            self.tie(op.to, op.node).has_hole[op.class] = true;
        }
        let is_atomic = matches!(op.kind, Kind::Add { .. } | Kind::CompareShared { .. } | Kind::Own { .. });
        match status {
            Status::Cancelled if op.is_cancelled || op.is_linked => {}
            Status::DeadlineExceeded if op.deadline.is_some() => {}
            Status::OutcomeUnknown if is_atomic && !self.options.faults.is_empty() => {
                self.may_have_happened(op);
                return Ok(());
            }
            Status::ConnectionLost | Status::PeerDead | Status::PeerUnknown | Status::NotReady
                if !self.options.faults.is_empty() => {}
            _ => return wrong("nothing that happened explains that"),
        }
        if is_atomic {
            // Any other error says that it was not executed.
            if let Kind::Own { .. } = op.kind {
                self.lane(op.node, op.to, op.class).is_own_busy = false;
            }
            return Ok(());
        }
        self.may_have_happened(op);
        Ok(())
    }

    /// An operation may have been done, or half done.
    fn may_have_happened(&mut self, op: &Op) {
        let is_current = op.life == self.nodes[op.to].life;
        let lane = self.lane(op.node, op.to, op.class);
        match op.kind {
            Kind::Put { number } | Kind::Signal { number } => lane.area.lost(number),
            Kind::Own { expected, new } => {
                lane.is_own_busy = false;
                if is_current && expected.is_none_or(|e| lane.own.contains(&e)) {
                    lane.own.push(new);
                }
            }
            Kind::Add { word } | Kind::CompareShared { word, .. } if is_current => {
                self.shared[op.to][word].unknown += 1;
            }
            _ => {}
        }
    }

    fn message_came(&mut self, op: &Op, done: &Completion) -> Outcome<()> {
        let (node, to, class) = (op.node, op.to, op.class);
        let tie = self.tie(node, to);
        tie.receives[class] = tie.receives[class].saturating_sub(1);
        let Some(buf) = done.buf.as_ref() else { return Err(format!("node {node}: a receive lost its block")) };
        match done.status {
            // It was cut, and its number with it.
            Status::Truncated if buf.len() < MESSAGE => {
                self.tie(node, to).heard[class] += 1;
                Ok(())
            }
            Status::Success => {
                let number = done.imm;
                let expected = self.tie(node, to).heard[class] + 1;
                // None is missing, but for those whose sending did not succeed.
                if number != expected && (number < expected || !self.tie(node, to).has_hole[class]) {
                    return Err(format!("node {node}: message {number} of node {to} came instead of {expected}"));
                }
                self.tie(node, to).heard[class] = number;
                let len = buf.len().min(16);
                if !buf.iter().take(len).enumerate().all(|(k, byte)| *byte == byte_of(number, k)) {
                    return Err(format!("node {node}: message {number} of node {to} came damaged: {done:?}"));
                }
                Ok(())
            }
            Status::ConnectionLost | Status::PeerDead | Status::PeerUnknown | Status::NotReady
                if !self.options.faults.is_empty() || self.is_over =>
            {
                Ok(())
            }
            status => Err(format!("node {node}: a receive ended as {status:?}")),
        }
    }

    /// The targets look at their signals: where one is seen, its data is there.
    fn observe(&mut self) -> Outcome<()> {
        for to in 0..self.count() {
            let Some(window) = self.nodes[to].window.clone() else { continue };
            for from in (0..self.count()).filter(|from| *from != to) {
                for class in 0..CLASSES {
                    let base = self.part(from, class);
                    let seen = window.load(base) as u32;
                    let lane = self.lane(from, to, class);
                    if seen == lane.signal_seen {
                        continue;
                    }
                    if seen < lane.signal_seen {
                        return Err(format!("node {to}: signal {seen} of node {from} came after {}", lane.signal_seen));
                    }
                    lane.signal_seen = seen;
                    while lane.signals.front().is_some_and(|s| s.0 < seen) {
                        lane.signals.pop_front();
                    }
                    let Some(&(number, at, len)) = lane.signals.front().filter(|s| s.0 == seen) else {
                        return Err(format!("node {to}: nobody sent signal {seen} of node {from}, class {class}"));
                    };
                    let mut bytes = vec![0; len];
                    window.read(base + HEAD + at, &mut bytes);
                    if let Err(k) = self.lane(from, to, class).area.check(at, &bytes, number) {
                        let why = self.lane(from, to, class).area.explain(k, bytes[k - at]);
                        return Err(format!(
                            "node {to}: signal {number} of node {from}, class {class}, is there, and byte {k} of its data is \
                             not: {why}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// At the end everything is as the model has it.
    fn check_all(&mut self) -> Outcome<()> {
        let nodes = self.count();
        for to in 0..nodes {
            for from in (0..nodes).filter(|from| *from != to) {
                for class in 0..CLASSES {
                    self.settle(from, to, class)?;
                    let at = self.part(from, class) + 8;
                    let word = self.nodes[to].window.as_ref().map_or(0, |w| w.load(at));
                    let own = &self.lane(from, to, class).own;
                    if !own.contains(&word) {
                        return Err(format!("node {to}: node {from}'s own word is {word:#x}, not one of {own:x?}"));
                    }
                }
            }
            for word in 0..SHARED {
                let at = self.shared_at(word);
                let value = self.nodes[to].window.as_ref().map_or(0, |w| w.load(at));
                let Count { done, unknown } = self.shared[to][word];
                if !(done..=done + unknown).contains(&value) {
                    return Err(format!(
                        "node {to}: word {word} is {value} after {done} that succeeded and {unknown} in doubt"
                    ));
                }
            }
        }
        // Every block comes back.
        self.is_over = true;
        for node in 0..nodes {
            for to in 0..nodes {
                self.drop_tie(node, to)?;
            }
            let Some(engine) = self.nodes[node].engine.as_mut() else { continue };
            for SizeClass { size, count } in BLOCKS.iter().rev() {
                let blocks: Vec<_> = std::iter::from_fn(|| engine.alloc(*size as usize).ok()).collect();
                if blocks.len() != *count as usize {
                    return Err(format!("node {node}: {} of {count} blocks of {size} bytes are left", blocks.len()));
                }
                std::mem::forget(blocks);
            }
            if engine.outstanding() != 0 {
                return Err(format!("node {node}: {} operations never ended", engine.outstanding()));
            }
        }
        Ok(())
    }
}

fn order_of(weakness: &Weakness) -> Order {
    match weakness.delay {
        None => Order::Prompt,
        Some(Delay { relaxed: false, .. }) => Order::Late,
        Some(Delay { relaxed: true, .. }) => Order::Relaxed,
    }
}
