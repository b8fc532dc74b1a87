//! Small programs run in every setting there is, and a table of what may be seen in each: what tests/litmus.rs is made of.

use verbring::{Device, Engine, PeerId, Shm, SizeClass};
use verbring_sim::device::{FabricDevice, FabricOptions};
use verbring_sim::fabric::{Fabric, FabricConfig, Fault};
use verbring_sim::nic::{Delay, Weakness};
use verbring_sim::random::Ratio;
use verbring_sys::local::{Local, WireRef};
use verbring_sys::{Deferred, Faults};

use crate::{PATIENCE, World, engine, engine_on, local_device, pair_on, repeats, shm_engine, small};

/// Nanoseconds that a weak NIC takes at most until a line is in memory.
const LATE: u64 = 20_000;

/// Where a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// One address space; done at once.
    Local,
    /// The same, answering late and class by class in any order.
    Deferred,
    /// Shared memory, from one thread.
    Shm,
    /// NICs that place writes at once, and in order.
    Strong,
    /// NICs that acknowledge before memory is written; writes of a queue pair stay in order.
    Late,
    /// The same without order; and nothing inline, one read at a time, small packets, rubbish in failed completions.
    Weakest,
}

/// What the table says of an outcome in a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// It is promised never to be.
    Never,
    /// It may be, and is really seen.
    Seen,
    /// It may be. Whether it is seen is a matter of luck.
    May,
}

/// What a network does to a seed's packets: nothing to the first, and each fault to one of the others.
fn network(seed: u64) -> FabricConfig {
    let calm = FabricConfig { nodes: 3, fault_ns: 30_000, ..FabricConfig::new(seed) };
    match seed % 5 {
        0 => calm,
        1 => calm.with(Fault::Reorder, Ratio::new(1, 4)),
        2 => calm.with(Fault::Loss, Ratio::new(1, 10)),
        3 => calm.with(Fault::Duplicate, Ratio::new(1, 4)),
        _ => calm.with(Fault::Delay, Ratio::new(1, 8)),
    }
}

/// The NICs of a setting.
fn options(setting: Setting) -> FabricOptions {
    let late = |relaxed| Some(Delay { max_ns: LATE, relaxed });
    let weakness = match setting {
        Setting::Late => Weakness { delay: late(false), ..Weakness::NONE },
        Setting::Weakest => Weakness {
            delay: late(true),
            max_rd_atomic: 1,
            max_inline: 0,
            max_mtu: 1024,
            poison: true,
            ..Weakness::NONE
        },
        _ => Weakness::NONE,
    };
    FabricOptions { weakness, ..FabricOptions::default() }
}

/// An engine of a setting at a node of a network.
pub fn engine_at(fabric: &Fabric, node: u32, setting: Setting, seed: u64) -> Engine<FabricDevice> {
    // Room for a few messages: there is an engine for each seed.
    let classes = [SizeClass { size: 64, count: 64 }];
    engine_on(fabric, node, small(), &classes, seed, options(setting))
}

/// Two engines over deferred devices.
pub fn deferred(seed: u64) -> World<Deferred<Local>> {
    crate::deferred(small(), seed, Faults { lateness: 4, ..Faults::default() })
}

/// Two engines on a network, which the caller may disturb.
pub fn on_fabric(setting: Setting, seed: u64) -> (Fabric, World<FabricDevice>) {
    let fabric = Fabric::new(network(seed));
    let world = pair_on([0, 1].map(|node| engine_at(&fabric, node, setting, seed)));
    (fabric, world)
}

/// Three engines, each connected to the others.
pub struct Three<D: Device> {
    /// `a` and `b`.
    pub world: World<D>,
    /// The third.
    pub c: Engine<D>,
    /// `c`'s id for `a`.
    pub ca: PeerId,
    /// `c`'s id for `b`.
    pub cb: PeerId,
    /// `a`'s id for `c`.
    pub ac: PeerId,
}

impl<D: Device> Three<D> {
    /// Connects `c` to `b`, then to `a`: `join` starts a connection to the engine that it is given.
    fn meet(
        mut world: World<D>,
        mut c: Engine<D>,
        mut join: impl FnMut(&mut Engine<D>, &mut Engine<D>, u32),
    ) -> Three<D> {
        let mut meet = |world: &mut World<D>, node: u32| {
            join(&mut c, if node == 0 { &mut world.a } else { &mut world.b }, node);
            let (mut ours, mut theirs) = (None, None);
            for _ in 0..PATIENCE {
                if let (Some(ours), Some(theirs)) = (ours, theirs) {
                    return (ours, theirs);
                }
                world.step();
                let other = if node == 0 { &mut world.a } else { &mut world.b };
                for (engine, id) in [(&mut c, &mut ours), (other, &mut theirs)] {
                    engine.poll(world.now);
                    if let Some(verbring::Notice::Connected { peer, .. }) = engine.control(world.now) {
                        *id = Some(peer);
                    }
                }
            }
            panic!("the third does not meet node {node}");
        };
        let (cb, _) = meet(&mut world, 1);
        let (ca, ac) = meet(&mut world, 0);
        Three { world, c, ca, cb, ac }
    }

    /// One turn of all.
    pub fn step(&mut self) {
        self.world.step();
        self.c.submit(self.world.now);
        self.c.poll(self.world.now);
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

    /// `c`'s key for a window of `b`.
    pub fn import(&mut self, window: &verbring::Window) -> verbring::RemoteKey {
        let remote = self.world.b.remote(window).expect("a Remote");
        let key = self.c.import(self.cb, &remote).expect("an import");
        self.until(|three| {
            let now = three.world.now;
            three.world.control();
            (three.c.control(now) == Some(verbring::Notice::Imported { key })).then_some(key)
        })
    }
}

fn join_local<D>(c: &mut Engine<D>, other: &mut Engine<D>, of: impl Fn(&mut D) -> &mut Local)
where
    D: Device,
{
    // SAFETY: a new connection, which the engines do not know of yet.
    let (of_c, of_other) = unsafe { (c.device_mut(), other.device_mut()) };
    Local::join(of(of_c), of(of_other), WireRef::new()).expect("a join");
}

/// Three engines over local devices.
pub fn three_local() -> Three<Local> {
    Three::meet(crate::local(small()), engine(small(), local_device), |c, other, _| join_local(c, other, |d| d))
}

/// Three engines over deferred devices.
pub fn three_deferred(seed: u64) -> Three<Deferred<Local>> {
    let faults = Faults { lateness: 4, ..Faults::default() };
    let c = engine(small(), |node| Deferred::new(local_device(node), seed ^ 0xc, faults));
    Three::meet(deferred(seed), c, |c, other, _| join_local(c, other, Deferred::inner))
}

/// Three engines over shared memory.
pub fn three_shm() -> Three<Shm> {
    Three::meet(crate::shm(small()), shm_engine(small()), |c, other, _| {
        c.connect(other.device().name(), 0).expect("a connection");
    })
}

/// Three engines on a network.
pub fn three_on_fabric(setting: Setting, seed: u64) -> (Fabric, Three<FabricDevice>) {
    let (fabric, world) = on_fabric(setting, seed);
    let c = engine_at(&fabric, 2, setting, seed);
    let three = Three::meet(world, c, |c, _, node| {
        c.connect(&Fabric::address(node), 0).expect("a connection");
    });
    (fabric, three)
}

/// Runs one program under seeds, and holds how often its outcome was seen against the table.
///
/// # Panics
/// If what is never to be was seen, or what is to be seen was not.
pub fn judge(program: &str, setting: &str, expect: Expect, mut seen: impl FnMut(u64) -> bool) {
    // From one thread these do the same under every seed.
    let seeds = if matches!(setting, "Local" | "Shm") { 4 } else { u64::from(repeats(20, 400)) };
    let mut times = 0;
    for seed in 1..=seeds {
        let is_seen = seen(seed);
        assert!(!(is_seen && expect == Expect::Never), "{program} on {setting}: seen under seed {seed}");
        times += u32::from(is_seen);
    }
    println!("{program}: {setting} {expect:?}: seen {times} of {seeds}");
    assert!(
        times != 0 || expect != Expect::Seen,
        "{program} on {setting}: a litmus test that sees nothing shows nothing"
    );
}

/// Runs a program, a function over any device that says whether its weak outcome was seen, in every setting.
#[macro_export]
macro_rules! litmus {
    (@world Local $seed:ident) => { $crate::local($crate::small()) };
    (@world Shm $seed:ident) => { $crate::shm($crate::small()) };
    (@world Deferred $seed:ident) => { $crate::litmus::deferred($seed) };
    (@world $setting:ident $seed:ident) => { $crate::litmus::on_fabric($crate::litmus::Setting::$setting, $seed).1 };
    (@three Local $seed:ident) => { $crate::litmus::three_local() };
    (@three Shm $seed:ident) => { $crate::litmus::three_shm() };
    (@three Deferred $seed:ident) => { $crate::litmus::three_deferred($seed) };
    (@three $setting:ident $seed:ident) => { $crate::litmus::three_on_fabric($crate::litmus::Setting::$setting, $seed).1 };
    ($kind:ident $name:literal, $program:expr; $($expect:ident on $($setting:ident),+;)+) => {$($(
        $crate::litmus::judge($name, stringify!($setting), $crate::litmus::Expect::$expect, |seed| {
            let _ = seed;
            $program($crate::litmus!(@$kind $setting seed))
        });
    )+)+};
}
