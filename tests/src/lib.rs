//! Two engines in one thread, stepped in virtual time (but for what goes through the kernel): what the tests of several
//! rooms share.

pub mod litmus;
pub mod netns;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use verbring::{
    Arena, Clock, Completion, Config, Device, Engine, Level, Notice, PeerId, Region, RegionOptions, RemoteKey, Rights,
    Shm, ShmOptions, SizeClass, Slab, Sqe, Status, Window, open_with,
};
use verbring_sim::device::{FabricDevice, FabricOptions};
use verbring_sim::fabric::{Fabric, FabricConfig};
use verbring_sim::udp::{self, UdpDevice, UdpOptions};
use verbring_sys::local::{Local, WireRef};
use verbring_sys::{Deferred, Faults};

/// The slab classes of every engine here.
pub const CLASSES: [SizeClass; 3] =
    [SizeClass { size: 256, count: 64 }, SizeClass { size: 16384, count: 32 }, SizeClass { size: 2 << 20, count: 4 }];

/// Nanoseconds of virtual time that a step takes.
pub const STEP: u64 = 1000;

/// Steps after which something that must happen has failed to.
pub const PATIENCE: u32 = 2_000_000;

/// Two connected engines.
pub struct World<D: Device> {
    /// One.
    pub a: Engine<D>,
    /// The other.
    pub b: Engine<D>,
    /// `a`'s id for `b`.
    pub ab: PeerId,
    /// `b`'s id for `a`.
    pub ba: PeerId,
    /// Virtual time.
    pub now: u64,
    /// Where `a` finds `b`; empty where that has no name.
    pub address: String,
    /// Where packets take time of their own: real time, in place of the virtual.
    pub clock: Option<Clock>,
}

/// Sizes that fill up soon.
pub fn small() -> Config {
    Config {
        sq_entries: 64,
        cq_entries: 128,
        max_outstanding: 64,
        max_peers: 8,
        max_windows: 16,
        max_imports: 16,
        ..Config::default()
    }
}

/// An arena in pages of no particular size.
pub fn arena(bytes: usize) -> Arena {
    Arena::from_region(Region::private(bytes, RegionOptions::default()).expect("memory for an arena"))
}

/// A local device.
pub fn local_device(node: u64) -> Local {
    Local::new(arena(Local::bytes()), node).expect("a local device")
}

/// An engine over a device that `make` makes.
pub fn engine<D: Device>(config: Config, make: impl FnOnce(u64) -> D) -> Engine<D> {
    open_with(config, &CLASSES, RegionOptions::default(), |node| Ok(make(node))).expect("an engine")
}

/// Two engines over local devices.
pub fn local(config: Config) -> World<Local> {
    let (mut a, mut b) = (engine(config, local_device), engine(config, local_device));
    // SAFETY: a new connection, which the engines do not know of yet.
    let (of_a, of_b) = unsafe { (a.device_mut(), b.device_mut()) };
    Local::join(of_a, of_b, WireRef::new()).expect("a join");
    World::meet(a, b)
}

/// Two engines over local devices that answer late and in an order of the seed's.
pub fn deferred(config: Config, seed: u64, faults: Faults) -> World<Deferred<Local>> {
    let make = |node| Deferred::new(local_device(node), seed ^ node, faults);
    let (mut a, mut b) = (engine(config, make), engine(config, make));
    // SAFETY: a new connection, which the engines do not know of yet.
    let (of_a, of_b) = unsafe { (a.device_mut().inner(), b.device_mut().inner()) };
    Local::join(of_a, of_b, WireRef::new()).expect("a join");
    World::meet(a, b)
}

/// A name that nobody else uses.
pub fn name(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{prefix}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// An engine over shared memory under a new name.
pub fn shm_engine(config: Config) -> Engine<Shm> {
    let options = ShmOptions { max_links: config.max_peers, max_imports: config.max_imports };
    engine(config, |node| Shm::bind(&name("test"), node, options).expect("a shm device"))
}

/// Two engines over shared memory, in one process.
pub fn shm(config: Config) -> World<Shm> {
    let (mut a, b) = (shm_engine(config), shm_engine(config));
    let name = b.device().name().to_string();
    a.connect(&name, 0).expect("a connection");
    World { address: name, ..World::meet(a, b) }
}

/// Two engines at two addresses of the loopback interface that nobody else has.
pub fn on_udp(config: Config, options: UdpOptions) -> World<UdpDevice> {
    let [here, there] = loopback_pair();
    let device = |address| move |node| udp::open(address, node, options).expect("a device on the loopback interface");
    let (mut a, b) = (engine(config, device(here)), engine(config, device(there)));
    let clock = Clock::start();
    a.connect(&there.to_string(), clock.now()).expect("a connection");
    World { address: there.to_string(), clock: Some(clock), ..World::meet(a, b) }
}

/// Two addresses of this process: 127, three parts of its id and of a count, and 1 or 2.
pub fn loopback_pair() -> [IpAddr; 2] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = std::process::id().wrapping_mul(61).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    let [.., high, low] = number.to_be_bytes();
    [1, 2].map(|host| IpAddr::from([127, high | 0x80, low, host]))
}

/// Two engines at the first two nodes of a network.
pub fn on_fabric(config: Config, network: FabricConfig, options: FabricOptions) -> World<FabricDevice> {
    let fabric = Fabric::new(network);
    pair_on([0, 1].map(|node| engine_on(&fabric, node, config, &CLASSES, network.seed, options)))
}

/// The engine of a node of a network. It is the same in every run of a seed.
pub fn engine_on(
    fabric: &Fabric,
    node: u32,
    config: Config,
    classes: &[SizeClass],
    seed: u64,
    options: FabricOptions,
) -> Engine<FabricDevice> {
    let config = Config { node: u64::from(node) + 1, secret: [7; 16], ..config };
    let slab = Slab::new(arena(Slab::bytes(classes)), classes).expect("a slab");
    let device = fabric.device(node, config.node, seed, options).expect("a device on the fabric");
    Engine::new(device, arena(config.bytes()), Some(slab), config).expect("an engine")
}

/// Connects the engines of the nodes 0 and 1.
pub fn pair_on([mut a, b]: [Engine<FabricDevice>; 2]) -> World<FabricDevice> {
    a.connect(&Fabric::address(1), 0).expect("a connection");
    World { address: Fabric::address(1), ..World::meet(a, b) }
}

/// Two engines over shared memory that answer late, by `faults` and a seed, and the names of `a` and `b`.
pub fn deferred_shm(config: Config, seed: u64, faults: Faults) -> (World<Deferred<Shm>>, [String; 2]) {
    let names = [name("late"), name("late")];
    let [mut a, b] = [0, 1].map(|i: usize| {
        let options = ShmOptions { max_links: config.max_peers, max_imports: config.max_imports };
        let shm = |node| Shm::bind(&names[i], node, options).expect("a shm device");
        engine(config, |node| Deferred::new(shm(node), seed ^ node, faults))
    });
    a.connect(&names[1], 0).expect("a connection");
    (World::meet(a, b), names)
}

/// A world, and the names of `a` and `b`.
pub fn named_shm(config: Config) -> (World<Shm>, [String; 2]) {
    let world = shm(config);
    let names = [&world.a, &world.b].map(|engine| engine.device().name().to_string());
    (world, names)
}

impl<D: Device> World<D> {
    /// Steps both engines until each knows the other.
    pub fn meet(mut a: Engine<D>, mut b: Engine<D>) -> World<D> {
        let (mut ab, mut ba) = (None, None);
        for now in 0..u64::from(PATIENCE) {
            for (engine, peer) in [(&mut a, &mut ab), (&mut b, &mut ba)] {
                match engine.control(now) {
                    None => {}
                    Some(Notice::Connected { peer: id, .. }) => *peer = Some(id),
                    Some(other) => panic!("{other:?} before a connection"),
                }
            }
            if let (Some(ab), Some(ba)) = (ab, ba) {
                return World { a, b, ab, ba, now, address: String::new(), clock: None };
            }
        }
        panic!("the engines do not meet");
    }

    /// One turn of both engines.
    pub fn step(&mut self) {
        self.now = self.clock.map_or(self.now + STEP, |clock| clock.now());
        for engine in [&mut self.a, &mut self.b] {
            engine.submit(self.now);
            engine.poll(self.now);
        }
    }

    /// Control work of both engines until there is none.
    pub fn control(&mut self) -> Vec<Notice> {
        let mut notices = Vec::new();
        for _ in 0..4 {
            for engine in [&mut self.a, &mut self.b] {
                while let Some(notice) = engine.control(self.now) {
                    notices.push(notice);
                }
            }
        }
        notices
    }

    /// Turns and control work until nothing more is told, for longer than a lost packet takes: what each side was told.
    pub fn told(&mut self) -> [Vec<Notice>; 2] {
        let mut told = [Vec::new(), Vec::new()];
        let mut quiet = 0;
        while quiet < 2000 {
            quiet += 1;
            self.step();
            for (engine, told) in [&mut self.a, &mut self.b].into_iter().zip(&mut told) {
                while let Some(notice) = engine.control(self.now) {
                    told.push(notice);
                    quiet = 0;
                }
            }
        }
        told
    }

    /// `b`'s key for a new window of `a`.
    pub fn export_back(&mut self, len: usize, rights: Rights) -> (Window, RemoteKey) {
        let window = self.a.window(len, rights).expect("a window");
        let remote = self.a.remote(&window).expect("a Remote");
        let key = self.b.import(self.ba, &remote).expect("an import");
        assert!(self.told()[1].contains(&Notice::Imported { key }));
        (window, key)
    }

    /// Steps until `done` has an answer.
    pub fn until<T>(&mut self, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        for _ in 0..PATIENCE {
            if let Some(answer) = done(self) {
                return answer;
            }
            self.step();
        }
        panic!("it does not happen");
    }

    /// Connects both again after the connection broke.
    pub fn meet_again(&mut self) {
        self.a.disconnect(self.ab, self.now);
        self.b.disconnect(self.ba, self.now);
        self.ab = self.a.connect(&self.address, self.now).expect("a connection");
        let (mut is_a_up, mut ba) = (false, None);
        while !is_a_up || ba.is_none() {
            self.step();
            while let Some(notice) = self.a.control(self.now) {
                is_a_up |= matches!(notice, Notice::Connected { .. });
            }
            while let Some(notice) = self.b.control(self.now) {
                if let Notice::Connected { peer, .. } = notice {
                    ba = Some(peer);
                }
            }
        }
        self.ba = ba.expect("just set");
    }

    /// Waits until everything that `a` did is visible to `b`'s CPU, where a completion does not say so.
    pub fn settle(&mut self) {
        if self.a.caps().completion < Level::Visible {
            self.a.push(Sqe::flush(self.ab).user_data(u64::MAX)).expect("room for a flush");
            let done = self.until(|world| world.a.reap());
            assert_eq!((done.user_data, done.status), (u64::MAX, Status::Success));
        }
    }

    /// The next completion of `a`.
    pub fn reap(&mut self) -> Completion {
        self.until(|world| world.a.reap())
    }

    /// The next completions of `a`, by user_data.
    pub fn reap_all(&mut self, count: usize) -> Vec<Completion> {
        (0..count).map(|_| self.reap()).collect()
    }

    /// A window of `b`, and `a`'s key for it.
    pub fn export(&mut self, len: usize, rights: Rights) -> (Window, RemoteKey) {
        let window = self.b.window(len, rights).expect("a window");
        let key = self.import(&window);
        (window, key)
    }

    /// `a`'s key for a window of `b`.
    pub fn import(&mut self, window: &Window) -> RemoteKey {
        let remote = self.b.remote(window).expect("a Remote");
        let key = self.a.import(self.ab, &remote).expect("an import");
        for _ in 0..PATIENCE {
            if self.control().contains(&Notice::Imported { key }) {
                return key;
            }
            self.step();
        }
        panic!("the import does not come");
    }

    /// A window of `a` for local use.
    pub fn local_window(&mut self, len: usize) -> Window {
        self.a.window(len, Rights::empty()).expect("a window")
    }
}

/// How many times a test repeats: few as a rule, `many` with VERBRING_LONG=1.
pub fn repeats(few: u32, many: u32) -> u32 {
    if std::env::var_os("VERBRING_LONG").is_some_and(|v| v == "1") { many } else { few }
}

/// Bytes that tell where they come from.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len).map(|i| ((i as u64).wrapping_mul(31).wrapping_add(seed) ^ (i as u64 >> 8)) as u8).collect()
}

/// A forked child that runs as the user nobody; killed when it is dropped.
pub struct Child(libc::pid_t);

/// Runs `body` in a forked child as nobody (uid and gid 65534): its answer is the exit code.
pub fn as_nobody(body: impl FnOnce() -> i32) -> Child {
    fork(|| {
        // SAFETY: plain system calls on numbers.
        let dropped = unsafe {
            libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresgid(65534, 65534, 65534) == 0
                && libc::setresuid(65534, 65534, 65534) == 0
        };
        if dropped { body() } else { 99 }
    })
}

/// Runs `body` in a forked child: its answer is the exit code. A panic is 101.
pub fn fork(body: impl FnOnce() -> i32) -> Child {
    // SAFETY: the child is single-threaded; it uses the allocator, which glibc keeps usable across fork.
    match unsafe { libc::fork() } {
        0 => {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
            // SAFETY: ends the child without running what belongs to the parent.
            unsafe { libc::_exit(code) }
        }
        pid => {
            assert!(pid > 0, "fork failed");
            Child(pid)
        }
    }
}

impl Child {
    /// Its exit code once it ended; minus the signal that killed it.
    pub fn try_wait(&self) -> Option<i32> {
        let mut status = 0;
        // SAFETY: our own child, and a place for its status.
        match unsafe { libc::waitpid(self.0, &mut status, libc::WNOHANG) } {
            0 => None,
            _ if libc::WIFEXITED(status) => Some(libc::WEXITSTATUS(status)),
            _ => Some(-libc::WTERMSIG(status)),
        }
    }

    /// Kills it, at once.
    pub fn kill(&self) {
        // SAFETY: our own child, which was not waited for.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.try_wait().is_none() {
            self.kill();
            // SAFETY: our own child.
            unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
        }
    }
}

/// The README's program, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
