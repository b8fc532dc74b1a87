//! The memory model of docs/SEMANTICS.md as small programs. Each runs in every setting, under many seeds, and has a table
//! of what may be seen: what is promised is never violated, and what is not promised is really seen where the setting is
//! weak. The observer is the target's CPU, after every step of virtual time. Numbers are those of docs/SEMANTICS.md.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use verbring::{Device, Opts, Rights, Signal, Sqe, SqeFlags, Status, Window};
use verbring_sim::fabric::{Act, Fabric, FabricConfig, Fault};
use verbring_sim::random::Ratio;
use verbring_tests::litmus::{Expect, Setting, Three, engine_at, judge, on_fabric, three_shm};
use verbring_tests::{World, litmus, pair_on, repeats, shm, small};

/// Where the flag lies in a window: behind the data.
const FLAG: usize = 1 << 20;
const WINDOW: usize = FLAG + 4096;
/// Longer than a slice of a copy, and than many packets.
const LONG: u32 = 300_000;
/// Longer than what local and shm copy in a few turns.
const MANY_SLICES: u32 = 1 << 20;

/// Runs a program on every NIC of the fabric: `program` has the network too.
fn on_nics(name: &str, expect: Expect, mut program: impl FnMut(Setting, u64) -> bool) {
    for setting in [Setting::Strong, Setting::Late, Setting::Weakest] {
        judge(name, &format!("{setting:?}"), expect, |seed| program(setting, seed));
    }
}

fn are_all(window: &Window, from: usize, len: usize, byte: u8) -> bool {
    let mut bytes = vec![0; len];
    window.read(from, &mut bytes);
    bytes.iter().all(|b| *b == byte)
}

fn flush<D: Device>(world: &mut World<D>) {
    world.a.push(Sqe::flush(world.ab).user_data(u64::MAX)).unwrap();
    let done = world.reap();
    assert_eq!((done.user_data, done.status), (u64::MAX, Status::Success));
}

fn steps<D: Device>(world: &mut World<D>, count: u64) {
    for _ in 0..count {
        world.step();
    }
}

/// How the flag follows the data.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flag {
    /// A put of a word.
    Put,
    /// The same, fenced.
    Fenced,
    /// The same, fenced behind a flush.
    Flushed,
    /// The signal of the last put.
    Signal,
    /// An add, as the signal of the last put.
    SignalAdd,
    /// A message: its receive is the flag.
    Message,
}

/// Message passing: puts of data in class 0, then a flag.
#[derive(Clone, Copy)]
struct Passing {
    puts: u32,
    len: u32,
    flag: Flag,
    class: u8,
}

impl Passing {
    const fn new(flag: Flag) -> Passing {
        Passing { puts: 1, len: 256, flag, class: 0 }
    }

    /// Whether the flag was seen before the data.
    fn run<D: Device>(self, mut world: World<D>) -> bool {
        let (window, key) = world.export(WINDOW, Rights::all());
        let len = (self.puts * self.len) as usize;
        let local = world.local_window(len);
        let mut is_early = false;
        for round in 1..=4u64 {
            local.fill(0, len, round as u8);
            for put in 0..self.puts {
                let at = u64::from(put * self.len);
                let from = local.slice(at, self.len);
                let signal = match self.flag {
                    Flag::Signal => Some(Signal::Store(round)),
                    Flag::SignalAdd => Some(Signal::Add(1)),
                    _ => None,
                };
                let sqe = match signal.filter(|_| put + 1 == self.puts) {
                    Some(signal) => Sqe::put_signal(from, key.at(at), (FLAG / 8) as u32, signal),
                    None => Sqe::put(from, key.at(at)),
                };
                world.a.push(sqe.flags(SqeFlags::SILENT)).unwrap();
            }
            let word = Sqe::put_word(round, key.at(FLAG as u64)).class(self.class);
            match self.flag {
                Flag::Signal | Flag::SignalAdd => {}
                Flag::Put => world.a.push(word.flags(SqeFlags::SILENT)).unwrap(),
                Flag::Fenced => world.a.push(word.flags(SqeFlags::SILENT | SqeFlags::FENCE)).unwrap(),
                Flag::Flushed => {
                    world.a.push(Sqe::flush(world.ab).flags(SqeFlags::SILENT)).unwrap();
                    world.a.push(word.flags(SqeFlags::SILENT | SqeFlags::FENCE)).unwrap();
                }
                Flag::Message => {
                    let (ab, ba, class) = (world.ab, world.ba, self.class);
                    let (message, room) = (world.a.alloc(8).unwrap(), world.b.alloc(8).unwrap());
                    world.b.recv(room, ba, Opts { class, ..Opts::default() }).unwrap();
                    world.a.send(message, ab, 0, Opts { class, silent: true, ..Opts::default() }).unwrap();
                }
            }
            world.until(|world| {
                let is_told = match self.flag {
                    Flag::Message => world.b.reap().is_some(),
                    _ => window.load(FLAG) == round,
                };
                is_told.then_some(())
            });
            is_early |= !are_all(&window, 0, len, round as u8);
            flush(&mut world);
            assert!(are_all(&window, 0, len, round as u8), "8: a flush makes it visible");
        }
        is_early
    }
}

/// 3. Puts of one class are promised no order; they are seen in it wherever a queue pair's writes are.
#[test]
fn a_flag_behind_data() {
    litmus!(world "data, flag", (|w| Passing::new(Flag::Put).run(w));
        Never on Local, Deferred, Shm, Strong, Late;
        Seen on Weakest;
    );
}

/// 3. Classes are not ordered, on any device.
#[test]
fn a_flag_in_the_other_class() {
    litmus!(world "data, flag in the other class", (|w| Passing { len: LONG, class: 1, ..Passing::new(Flag::Put) }.run(w));
        Seen on Local, Deferred, Shm, Strong, Late, Weakest;
    );
}

/// 3. A fence waits until what is before it is delivered, which is visible on some devices only.
#[test]
fn a_fenced_flag() {
    litmus!(world "data, fenced flag", (|w| Passing { len: 20_000, ..Passing::new(Flag::Fenced) }.run(w));
        Never on Local, Deferred, Shm, Strong, Late;
        Seen on Weakest;
    );
    litmus!(world "data, fenced flag in the other class", (|w| Passing { len: 20_000, class: 1, ..Passing::new(Flag::Fenced) }.run(w));
        Never on Local, Deferred, Shm, Strong;
        Seen on Late, Weakest;
    );
}

/// 3. A flush before the fence makes it an order of what is seen, everywhere.
#[test]
fn a_fenced_flag_behind_a_flush() {
    litmus!(world "data, flush, fenced flag", (|w| Passing { len: 20_000, class: 1, ..Passing::new(Flag::Flushed) }.run(w));
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
}

/// 4. The signal comes after its put, and after all before it in its class.
#[test]
fn signals() {
    litmus!(world "put_signal", (|w| Passing::new(Flag::Signal).run(w));
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
    litmus!(world "put_signal that adds", (|w| Passing::new(Flag::SignalAdd).run(w));
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
    litmus!(world "puts, put_signal", (|w| Passing { puts: 12, len: 3000, ..Passing::new(Flag::Signal) }.run(w));
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
}

/// 9. A message comes after the puts before it in its class.
#[test]
fn messages() {
    litmus!(world "data, message", (|w| Passing { puts: 3, len: 3000, ..Passing::new(Flag::Message) }.run(w));
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
    let other = |len| Passing { len, class: 1, ..Passing::new(Flag::Message) };
    litmus!(world "data, message in the other class", (|w| other(MANY_SLICES).run(w));
        Seen on Local, Shm;
    );
    litmus!(world "data, message in the other class", (|w| other(LONG).run(w));
        Seen on Deferred, Strong, Late, Weakest;
    );
}

/// What `a` waits for before it tells `c`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Nothing,
    Completion,
    Flush,
}

/// `a` puts data to `b` and tells `c`, which puts the flag to `b`: whether the flag was seen before the data.
fn through_a_third<D: Device>(mut three: Three<D>, wait: Wait) -> bool {
    let (window, key) = three.world.export(WINDOW, Rights::all());
    let key_of_c = three.import(&window);
    let local = three.world.local_window(4096);
    let mut is_early = false;
    for round in 1..=3u64 {
        local.fill(0, 4096, round as u8);
        let world = &mut three.world;
        world.a.push(Sqe::put(local.slice(0, 4096), key.at(0)).user_data(1)).unwrap();
        if wait == Wait::Flush {
            world.a.push(Sqe::flush(world.ab).user_data(2)).unwrap();
        }
        let ends = match wait {
            Wait::Nothing => 0,
            Wait::Completion => 1,
            Wait::Flush => 2,
        };
        for _ in 0..ends {
            assert!(three.until(|three| three.world.a.reap()).is_success());
        }
        let (message, room) = (three.world.a.alloc(8).unwrap(), three.c.alloc(8).unwrap());
        three.c.recv(room, three.ca, Opts::default()).unwrap();
        three.world.a.send(message, three.ac, 0, Opts { silent: true, ..Opts::default() }).unwrap();
        assert!(three.until(|three| three.c.reap()).is_success());
        three.c.push(Sqe::put_word(round, key_of_c.at(FLAG as u64)).flags(SqeFlags::SILENT)).unwrap();
        three.until(|_| (window.load(FLAG) == round).then_some(()));
        is_early |= !are_all(&window, 0, 4096, round as u8);
        three.until(|_| are_all(&window, 0, 4096, round as u8).then_some(()));
        for _ in ends..1 {
            assert!(three.until(|three| three.world.a.reap()).is_success());
        }
    }
    is_early
}

/// 3. Peers are not ordered against each other; only a flush says that what was put may be told of.
#[test]
fn told_by_a_third() {
    litmus!(three "data, told by a third", (|t| through_a_third(t, Wait::Nothing));
        May on Local, Shm;
        Seen on Deferred, Strong, Late, Weakest;
    );
    litmus!(three "data, completion, told by a third", (|t| through_a_third(t, Wait::Completion));
        Never on Local, Deferred, Shm, Strong;
        Seen on Late, Weakest;
    );
    litmus!(three "data, flush, told by a third", (|t| through_a_third(t, Wait::Flush));
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
}

/// A get, and behind it a put to the same place: whether the get read what the put wrote.
fn get_then_put<D: Device>(mut world: World<D>, fence: SqeFlags) -> bool {
    let (window, key) = world.export(4096, Rights::all());
    let local = world.local_window(4096);
    let mut is_newer = false;
    for round in 1..=8u64 {
        let at = key.at(round * 8);
        world.a.push(Sqe::get(local.slice(0, 8), at).user_data(1)).unwrap();
        world.a.push(Sqe::put_word(round, at).user_data(2).flags(fence)).unwrap();
        for done in world.reap_all(2) {
            assert!(done.is_success());
        }
        let got = local.load(0);
        assert!(got == 0 || got == round);
        is_newer |= got == round;
        local.store(0, 99);
        flush(&mut world);
        assert_eq!(window.load(round as usize * 8), round);
    }
    is_newer
}

/// 3. A get may see a put behind it, for the answer is made when it is sent; with a fence it does not.
#[test]
fn a_put_behind_a_get() {
    litmus!(world "get, put", (|w| get_then_put(w, SqeFlags::empty()));
        Never on Local, Deferred, Shm;
        Seen on Strong, Late, Weakest;
    );
    litmus!(world "get, fenced put", (|w| get_then_put(w, SqeFlags::FENCE));
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
}

/// Puts in both classes, then a flush: whether a put completed and was not visible.
fn completed_and_not_visible<D: Device>(mut world: World<D>) -> bool {
    let (window, key) = world.export(4096, Rights::all());
    let mut is_invisible = false;
    for round in 1..=4u64 {
        for i in 0..16u64 {
            world.a.push(Sqe::put_word(round, key.at(i * 64)).class((i % 2) as u8).user_data(i)).unwrap();
        }
        world.a.push(Sqe::flush(world.ab).user_data(99)).unwrap();
        for _ in 0..17 {
            let done = world.reap();
            assert!(done.is_success());
            if done.user_data == 99 {
                let is_there = |i: usize| window.load(i * 64) == round;
                assert!((0..16).all(is_there), "3: a flush makes both classes visible");
            } else {
                is_invisible |= window.load(done.user_data as usize * 64) != round;
            }
        }
    }
    is_invisible
}

/// 2 and 3. What completed is delivered, which is visible on local and shm; what was flushed is visible everywhere.
#[test]
fn levels() {
    litmus!(world "completed, not visible", completed_and_not_visible;
        Never on Local, Deferred, Shm, Strong;
        Seen on Late, Weakest;
    );
}

/// A put that completed, and a get of the other class behind it: whether the get read older bytes.
fn delivered_then_get<D: Device>(mut world: World<D>, class: u8) -> bool {
    let (_window, key) = world.export(4096, Rights::all());
    let local = world.local_window(4096);
    let mut is_older = false;
    for round in 1..=8u64 {
        world.a.push(Sqe::put_word(round, key.at(0))).unwrap();
        assert!(world.reap().is_success());
        world.a.push(Sqe::get(local.slice(0, 8), key.at(0)).class(class)).unwrap();
        assert!(world.reap().is_success());
        is_older |= local.load(0) != round;
        flush(&mut world);
    }
    is_older
}

/// 2 and 3. Delivered in one class is not visible to a get of another.
#[test]
fn a_get_behind_a_put() {
    litmus!(world "put, completion, get", (|w| delivered_then_get(w, 0));
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
    litmus!(world "put, completion, get of the other class", (|w| delivered_then_get(w, 1));
        Never on Local, Deferred, Shm, Strong;
        Seen on Late, Weakest;
    );
}

/// Two puts to one word, and a flush: whether the first one is what remains.
fn two_puts<D: Device>(mut world: World<D>) -> bool {
    let (window, key) = world.export(4096, Rights::all());
    let mut is_first = false;
    for round in 0..8u64 {
        for value in [1, 2] {
            world.a.push(Sqe::put_word(value, key.at(round * 8)).flags(SqeFlags::SILENT)).unwrap();
        }
        flush(&mut world);
        is_first |= window.load(round as usize * 8) == 1;
    }
    is_first
}

/// 3. On a NIC without order the earlier of two puts to one word may be the one that stays.
#[test]
fn two_puts_to_one_word() {
    litmus!(world "put, put to the same word", two_puts;
        Never on Local, Deferred, Shm, Strong, Late;
        Seen on Weakest;
    );
}

/// How a long put was seen on its way.
#[derive(Clone, Copy, Default)]
struct Torn {
    /// Some of it.
    partly: bool,
    /// A word before one that is before it.
    disorder: bool,
    /// A part of a word.
    word: bool,
}

impl Torn {
    fn look(&mut self, words: impl Iterator<Item = u64>, old: u64, new: u64) {
        let (mut has_old, mut has_new) = (false, false);
        for word in words {
            self.word |= word != old && word != new;
            self.disorder |= word == new && has_old;
            has_old |= word == old;
            has_new |= word == new;
        }
        self.partly |= has_old && has_new;
    }
}

const OLD: u64 = 0x1111_1111_1111_1111;
const NEW: u64 = 0x2222_2222_2222_2222;

fn long_put<D: Device>(mut world: World<D>) -> Torn {
    const LEN: usize = LONG as usize;
    let (window, key) = world.export(LEN, Rights::all());
    let local = world.local_window(LEN);
    let mut torn = Torn::default();
    window.fill(0, LEN, OLD as u8);
    local.fill(0, LEN, NEW as u8);
    world.a.push(Sqe::put(local.slice(0, LONG), key.at(0)).class(1)).unwrap();
    world.until(|world| {
        torn.look((0..LEN / 8).map(|i| window.load(i * 8)), OLD, NEW);
        world.a.reap()
    });
    torn
}

/// 3. The bytes of one put are seen in any order; a word whose two sides are aligned is never torn.
#[test]
fn inside_a_put() {
    litmus!(world "long put: a torn word", (|w| long_put(w).word);
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
    litmus!(world "long put: a part of it", (|w| long_put(w).partly);
        Seen on Local, Deferred, Shm, Strong, Late, Weakest;
    );
    litmus!(world "long put: its end before its beginning", (|w| long_put(w).disorder);
        May on Local, Deferred, Shm, Strong;
        Seen on Late, Weakest;
    );
}

/// Two initiators compare-and-swap one word: whether both won, or none.
fn two_swaps<D: Device>(mut three: Three<D>) -> bool {
    let (window, key) = three.world.export(4096, Rights::all());
    let key_of_c = three.import(&window);
    let mut is_wrong = false;
    for round in 0..10 {
        let at = round * 8;
        for i in 0..2 {
            // Either may be first.
            let (mine, theirs) = (Sqe::compare_swap(key.at(at), 0, 1), Sqe::compare_swap(key_of_c.at(at), 0, 2));
            if (i + round) % 2 == 0 {
                three.world.a.push(mine).unwrap()
            } else {
                three.c.push(theirs).unwrap()
            }
            if round % 3 == 0 {
                three.step();
            }
        }
        let ours = three.until(|three| three.world.a.reap());
        let theirs = three.until(|three| three.c.reap());
        let olds = [ours, theirs].map(|done| (done.status, done.value));
        let winner = match olds {
            [(Status::Success, 0), (Status::Success, 1)] => 1,
            [(Status::Success, 2), (Status::Success, 0)] => 2,
            _ => {
                is_wrong = true;
                continue;
            }
        };
        three.world.a.push(Sqe::flush(three.world.ab)).unwrap();
        three.c.push(Sqe::flush(three.cb)).unwrap();
        three.until(|three| three.world.a.reap());
        three.until(|three| three.c.reap());
        is_wrong |= window.load(at as usize) != winner;
    }
    is_wrong
}

/// 5. Of two peers that swap the same word exactly one wins, in either domain.
#[test]
fn one_of_two_swaps_wins() {
    litmus!(three "two compare-and-swaps", two_swaps;
        Never on Local, Deferred, Shm, Strong, Late, Weakest;
    );
}

/// The peer's atomics and the CPU's on one word: whether one of them was lost.
fn peer_and_cpu<D: Device>(mut world: World<D>) -> bool {
    let (window, key) = world.export(4096, Rights::all());
    let mut done_by_all = 0;
    for _ in 0..20 {
        let seen = window.load(0);
        world.a.push(Sqe::fetch_add(key.at(0), 1).user_data(u64::MAX)).unwrap();
        world.a.push(Sqe::compare_swap(key.at(0), seen + 1, seen + 2).user_data(seen + 1)).unwrap();
        for _ in 0..3 {
            world.step();
            window.fetch_add(0, 1);
            done_by_all += 1;
        }
        for done in world.reap_all(2) {
            assert!(done.is_success());
            done_by_all += u64::from(done.user_data == u64::MAX || done.user_data == done.value);
        }
    }
    flush(&mut world);
    window.load(0) != done_by_all
}

/// 5. Atomics of domain `Cpu` go together with the CPU's; of domain `Nic`, one of the two is lost.
#[test]
fn a_peer_against_the_cpu() {
    litmus!(world "a peer's atomics, the CPU's", peer_and_cpu;
        Never on Local, Deferred, Shm;
        May on Strong;
        Seen on Late, Weakest;
    );
}

/// 5. An atomic whose answer is lost is executed once, and its answer is the first one.
#[test]
fn an_answer_that_is_lost() {
    let mut lost = 0;
    on_nics("fetch_add, its answer lost: executed twice", Expect::Never, |setting, seed| {
        let (fabric, mut world) = on_fabric(setting, seed);
        let (window, key) = world.export(4096, Rights::all());
        fabric.act(Act::Set(Fault::AckLoss, Ratio::new(1, 3)));
        let (mut succeeded, mut unknown) = (0, 0);
        for i in 0..20 {
            world.a.push(Sqe::fetch_add(key.at(0), 1).user_data(i)).unwrap();
        }
        for done in world.reap_all(20) {
            if done.is_success() {
                assert_eq!(done.value, succeeded, "seed {seed}: the old value");
                succeeded += 1;
            } else {
                assert_eq!(done.status, Status::OutcomeUnknown, "seed {seed}");
                unknown += 1;
            }
        }
        lost += fabric.count(Fault::AckLoss);
        steps(&mut world, 100);
        !(succeeded..=succeeded + unknown).contains(&window.load(0))
    });
    assert!(lost > 0);
}

/// A fetch_add, and the link goes down at a moment of the seed's: its status, and how often it was executed.
fn cut_off(setting: Setting, seed: u64) -> (Status, u64) {
    let (fabric, mut world) = on_fabric(setting, seed);
    let (window, key) = world.export(4096, Rights::all());
    if seed.is_multiple_of(2) {
        fabric.act(Act::Set(Fault::AckLoss, Ratio::ALWAYS));
    }
    let down = Act::Link { node: 1, is_up: false };
    if seed.is_multiple_of(3) {
        fabric.act(down)
    } else {
        fabric.at(world.now + seed * 397 % 5000, down)
    }
    world.a.push(Sqe::fetch_add(key.at(0), 1)).unwrap();
    let done = world.reap();
    steps(&mut world, 100);
    let times = window.load(0);
    assert!(if done.is_success() { times == 1 } else { times <= 1 }, "seed {seed}: {done:?}, executed {times} times");
    (done.status, times)
}

/// 7. An atomic whose connection is lost ends as `OutcomeUnknown`; it was executed, or not.
#[test]
fn an_unknown_outcome() {
    on_nics("fetch_add, connection lost: executed", Expect::Seen, |setting, seed| {
        cut_off(setting, seed) == (Status::OutcomeUnknown, 1)
    });
    on_nics("fetch_add, connection lost: not executed", Expect::Seen, |setting, seed| {
        cut_off(setting, seed) == (Status::OutcomeUnknown, 0)
    });
}

/// A long put, revoked on its way after some steps: whether a part of it was there, and whether a byte changed afterwards.
fn revoke_a_put<D: Device>(mut world: World<D>, len: u32, after: u64) -> (bool, bool) {
    let (window, key) = world.export(len as usize, Rights::all());
    let local = world.local_window(len as usize);
    window.fill(0, len as usize, OLD as u8);
    local.fill(0, len as usize, NEW as u8);
    world.a.push(Sqe::put(local.slice(0, len), key.at(0)).class(1)).unwrap();
    steps(&mut world, after);
    world.b.bump_epoch(&window).unwrap();
    let mut before = vec![0; len as usize];
    window.read(0, &mut before);
    let (mut done, mut has_changed) = (None, false);
    let mut now = vec![0; len as usize];
    for _ in 0..20 {
        steps(&mut world, 20);
        world.control();
        done = done.or_else(|| world.a.reap());
        window.read(0, &mut now);
        has_changed |= now != before;
    }
    let status = done.or_else(|| Some(world.reap())).unwrap().status;
    let is_whole = before.iter().all(|b| *b == NEW as u8);
    assert!(!status.is_success() || is_whole, "7: a success of which bytes are missing");
    (!is_whole && before.contains(&(NEW as u8)), has_changed)
}

/// 7. What is under way when an epoch ends changes nothing afterwards.
#[test]
fn a_stale_epoch() {
    let mut step = 0u64;
    let mut after = |most| {
        step += 1;
        step % most
    };
    litmus!(world "put, revoked: a byte changes afterwards", (|w| revoke_a_put(w, MANY_SLICES, after(4)).1);
        Never on Local, Deferred, Shm;
    );
    litmus!(world "put, revoked: a byte changes afterwards", (|w| revoke_a_put(w, LONG, after(24)).1);
        Never on Strong, Late, Weakest;
    );
    litmus!(world "put, revoked: a part is there", (|w| revoke_a_put(w, MANY_SLICES, after(4)).0);
        Seen on Local, Deferred, Shm;
    );
    litmus!(world "put, revoked: a part is there", (|w| revoke_a_put(w, LONG, after(24)).0);
        Seen on Strong, Late, Weakest;
    );
}

/// Puts and a get, a new connection, and then their packets: whether a byte changed, and how many packets were late.
fn an_earlier_connection(setting: Setting, seed: u64) -> (bool, u64) {
    // Slow enough for packets to come after the next connection.
    let config = FabricConfig { latency_ns: 100_000, ..FabricConfig::new(seed) };
    let fabric = Fabric::new(config);
    let mut world = pair_on([0, 1].map(|node| engine_at(&fabric, node, setting, seed)));
    let (window, key) = world.export(4096, Rights::all());
    let local = world.local_window(4096);
    window.fill(0, 4096, OLD as u8);
    local.fill(0, 4096, OLD as u8);
    fabric.act(Act::Set(Fault::Reorder, Ratio::ALWAYS));
    for i in 0..20 {
        world.a.push(Sqe::put_word(NEW, key.at(i * 8)).class((i % 2) as u8)).unwrap();
    }
    world.a.push(Sqe::get(local.slice(0, 64), key.at(512))).unwrap();
    world.a.push(Sqe::fetch_add(key.at(1024), 1)).unwrap();
    world.step();
    fabric.act(Act::Calm);
    world.meet_again();
    let strangers = |world: &World<_>| {
        let of =
            |engine: &verbring::Engine<verbring_sim::device::FabricDevice>| engine.device().rnic().nic().counters.no_qp;
        of(&world.a) + of(&world.b)
    };
    let before = strangers(&world);
    // The new one works.
    let key = world.import(&window);
    world.a.push(Sqe::put_word(NEW, key.at(2048)).user_data(77)).unwrap();
    world.until(|world| world.a.reap().filter(|done| done.user_data == 77 && done.is_success()));
    window.fill(2048, 8, OLD as u8);
    steps(&mut world, 1000);
    window.fill(2048, 8, OLD as u8);
    let is_same = are_all(&window, 0, 4096, OLD as u8) && are_all(&local, 0, 4096, OLD as u8);
    (!is_same, strangers(&world) - before)
}

/// 7. A packet of an earlier connection changes nothing.
#[test]
fn a_late_packet() {
    on_nics("a packet of an earlier connection: a byte changes", Expect::Never, |setting, seed| {
        an_earlier_connection(setting, seed).0
    });
    on_nics("a packet of an earlier connection: it comes", Expect::Seen, |setting, seed| {
        an_earlier_connection(setting, seed).1 > 0
    });
}

/// Receives posted one by one, and later as many messages: whether one of them never comes.
fn receives_then_messages<D: Device>(mut world: World<D>, apart: u64) -> bool {
    const COUNT: u64 = 8;
    let (ab, ba) = (world.ab, world.ba);
    for _ in 0..COUNT {
        let room = world.b.alloc(8).unwrap();
        world.b.recv(room, ba, Opts::default()).unwrap();
        steps(&mut world, apart);
    }
    steps(&mut world, 100);
    for _ in 0..COUNT {
        let message = world.a.alloc(8).unwrap();
        world.a.send(message, ab, 0, Opts { silent: true, ..Opts::default() }).unwrap();
    }
    let mut came = 0;
    for _ in 0..2000 {
        world.step();
        came += u64::from(world.b.reap().is_some_and(|done| done.is_success()));
    }
    came != COUNT
}

/// 9. A receive that was posted is for a message, however late the peer hears of it.
#[test]
fn receives_are_not_forgotten() {
    for apart in [1, 4] {
        litmus!(world "receives, messages: one does not come", (|w| receives_then_messages(w, apart));
            Never on Local, Deferred, Shm, Strong, Late, Weakest;
        );
    }
}

// On shm the race is real: a thread of its own looks, or writes, while the other one puts.

/// Pins this thread to one of two CPUs, if there are two.
fn pin(which: usize) {
    let cpus = verbring_sys::cpu::available();
    if cpus.len() > 1 {
        verbring_sys::cpu::pin(cpus[which]).unwrap();
    }
}

/// Message passing, by a signal or a flush, with an observer on another CPU: how often the flag was seen before the data.
fn watched(flag: Flag, rounds: u64) -> u64 {
    const LEN: usize = 4096;
    let mut world = shm(small());
    let (window, key) = world.export(WINDOW, Rights::all());
    let local = world.local_window(LEN);
    let seen = AtomicU64::new(0);
    let early = std::thread::scope(|scope| {
        let observer = scope.spawn(|| {
            pin(1);
            let mut early = 0;
            for round in 1..=rounds {
                while window.load(FLAG) != round {
                    std::hint::spin_loop();
                }
                early += u64::from(!are_all(&window, 0, LEN, round as u8));
                seen.store(round, Ordering::Release);
            }
            early
        });
        pin(0);
        for round in 1..=rounds {
            local.fill(0, LEN, round as u8);
            let from = local.slice(0, LEN as u32);
            match flag {
                Flag::Signal => {
                    let put = Sqe::put_signal(from, key.at(0), (FLAG / 8) as u32, Signal::Store(round));
                    world.a.push(put.flags(SqeFlags::SILENT)).unwrap();
                }
                _ => {
                    world.a.push(Sqe::put(from, key.at(0)).flags(SqeFlags::SILENT)).unwrap();
                    world.a.push(Sqe::flush(world.ab).flags(SqeFlags::SILENT)).unwrap();
                    let word = Sqe::put_word(round, key.at(FLAG as u64)).class(1);
                    world.a.push(word.flags(SqeFlags::SILENT | SqeFlags::FENCE)).unwrap();
                }
            }
            while seen.load(Ordering::Acquire) != round {
                world.step();
            }
        }
        observer.join().unwrap()
    });
    println!("shm, observed from another CPU: the flag before the data {early} of {rounds} times");
    early
}

/// 3 and 4. Signals and flushes order what another CPU sees.
#[test]
fn watched_from_another_cpu() {
    let rounds = u64::from(repeats(3000, 200_000));
    assert_eq!(watched(Flag::Signal, rounds), 0);
    assert_eq!(watched(Flag::Flushed, rounds), 0);
}

/// 3. Another CPU sees a put in part, and never a part of a word.
#[test]
fn watched_inside_a_put() {
    const LEN: usize = 16384;
    let mut world = shm(small());
    let (window, key) = world.export(LEN, Rights::all());
    let local = world.local_window(2 * LEN);
    local.fill(0, LEN, OLD as u8);
    local.fill(LEN, LEN, NEW as u8);
    window.fill(0, LEN, OLD as u8);
    let is_over = AtomicBool::new(false);
    let partly = AtomicU64::new(0);
    let torn = std::thread::scope(|scope| {
        let observer = scope.spawn(|| {
            pin(1);
            let mut torn = 0;
            while !is_over.load(Ordering::Relaxed) {
                let mut look = Torn::default();
                look.look((0..LEN / 8).map(|i| window.load(i * 8)), OLD, NEW);
                torn += u64::from(look.word);
                partly.fetch_add(u64::from(look.partly), Ordering::Relaxed);
            }
            torn
        });
        pin(0);
        let rounds = u64::from(repeats(10_000, 1_000_000));
        // The two need not run at the same time at once.
        for round in 0..rounds * 100 {
            if round >= rounds && partly.load(Ordering::Relaxed) > 0 {
                break;
            }
            let from = local.slice((round + 1) % 2 * LEN as u64, LEN as u32);
            world.a.push(Sqe::put(from, key.at(0)).flags(SqeFlags::SILENT)).unwrap();
            world.step();
        }
        is_over.store(true, Ordering::Relaxed);
        observer.join().unwrap()
    });
    println!("shm, observed from another CPU: a part of a put {partly:?} times");
    assert_eq!(torn, 0, "a torn word");
    assert!(partly.into_inner() > 0 || verbring_sys::cpu::available().len() == 1);
}

/// 5. Two peers and the target's CPU on one word, from three threads: nothing is lost.
#[test]
fn atomics_of_three_threads() {
    let rounds = u64::from(repeats(5000, 500_000));
    let mut three = three_shm();
    let (window, key) = three.world.export(4096, Rights::all());
    let key_of_c = three.import(&window);
    let (a, c) = (&mut three.world.a, &mut three.c);
    /// Adds by fetch_add and by compare-and-swap, in turn.
    fn add(engine: &mut verbring::Engine<verbring::Shm>, key: verbring::RemoteKey, rounds: u64) {
        let mut once = |sqe: Sqe| loop {
            engine.push(sqe).unwrap();
            engine.submit(0);
            engine.poll(0);
            if let Some(done) = engine.reap() {
                assert!(done.is_success());
                return done.value;
            }
        };
        for _ in 0..rounds / 2 {
            let mut seen = once(Sqe::fetch_add(key.at(0), 1)) + 1;
            loop {
                let old = once(Sqe::compare_swap(key.at(0), seen, seen + 1));
                if old == seen {
                    break;
                }
                seen = old;
            }
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(0);
            add(a, key, rounds);
        });
        scope.spawn(|| {
            pin(1);
            add(c, key_of_c, rounds);
        });
        for _ in 0..rounds {
            window.fetch_add(0, 1);
        }
    });
    assert_eq!(window.load(0), 3 * rounds);
}

/// 7. An owner on another CPU revokes what is being put: when `bump_epoch` returned no byte changes any more.
#[test]
fn revoked_from_another_cpu() {
    const LEN: usize = 1 << 20;
    let (mut cut, rounds) = (0, repeats(30, 1000));
    for round in 0..rounds * 20 {
        if round >= rounds && cut > 0 {
            break;
        }
        let mut world = shm(small());
        let (window, key) = world.export(LEN, Rights::all());
        let local = world.local_window(LEN);
        window.fill(0, LEN, OLD as u8);
        local.fill(0, LEN, NEW as u8);
        let World { a, b, .. } = &mut world;
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin(1);
                while window.load(0) == OLD {
                    std::hint::spin_loop();
                }
                for _ in 0..round % 10 * 300 {
                    std::hint::spin_loop();
                }
                b.bump_epoch(&window).unwrap();
                let mut before = vec![0; LEN];
                window.read(0, &mut before);
                cut += u32::from(before.contains(&(OLD as u8)) && before.contains(&(NEW as u8)));
                for _ in 0..3 {
                    let mut now = vec![0; LEN];
                    window.read(0, &mut now);
                    assert!(now == before, "round {round}: a byte changed after bump_epoch");
                }
                is_over.store(true, Ordering::Release);
            });
            pin(0);
            a.push(Sqe::put(local.slice(0, LEN as u32), key.at(0)).class(1)).unwrap();
            let mut status = None;
            while status.is_none() || !is_over.load(Ordering::Acquire) {
                a.submit(0);
                a.poll(0);
                status = status.or_else(|| a.reap().map(|done| done.status));
            }
            assert!(matches!(status, Some(Status::Success | Status::StaleEpoch)), "{status:?}");
        });
    }
    println!("shm, revoked from another CPU: in the middle {cut} times");
    assert!(cut > 0 || verbring_sys::cpu::available().len() == 1);
}
