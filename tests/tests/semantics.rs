//! What docs/SEMANTICS.md promises, line by line. Most of it is seen over a device that answers late and in an order of
//! the seed's, where everything stays pending.

use std::collections::BTreeMap;

use proptest::prelude::*;
use verbring::{
    AccessError, DeviceError, EngineError, ImportState, Notice, Opts, PeerState, Rights, Shm, ShmOptions, Signal, Sqe,
    SqeFlags, Status, Window,
};
use verbring_sys::local::Local;
use verbring_sys::{Deferred, Device, Faults};
use verbring_tests::{World, deferred, deferred_shm, engine, local, name, named_shm, repeats, shm, small};

type Late = World<Deferred<Local>>;

fn late(seed: u64) -> Late {
    deferred(small(), seed, Faults { lateness: 4, ..Faults::default() })
}

fn statuses<D: Device>(world: &mut World<D>, count: usize) -> BTreeMap<u64, Status> {
    let all: BTreeMap<u64, Status> = world.reap_all(count).iter().map(|c| (c.user_data, c.status)).collect();
    assert_eq!(all.len(), count, "no user_data twice");
    all
}

/// 3. A fenced operation starts after all earlier ones to that peer, of all classes.
#[test]
fn fence_waits_for_both_classes() {
    let mut disorder_without = 0;
    for seed in 0..u64::from(repeats(60, 2000)) {
        for fence in [true, false] {
            let mut world = late(seed);
            let (window, key) = world.export(4096, Rights::all());
            for i in 0..8u64 {
                let put = Sqe::put_word(1, key.at(i * 8)).class((i % 2) as u8).flags(SqeFlags::SILENT);
                world.a.push(put).unwrap();
            }
            let flags = if fence { SqeFlags::FENCE } else { SqeFlags::empty() };
            world.a.push(Sqe::put_word(1, key.at(800)).class(0).flags(flags).user_data(1)).unwrap();
            world.until(|world| {
                let is_last_there = window.load(800) == 1;
                let are_all_there = (0..8).all(|i| window.load(i * 8) == 1);
                assert!(!is_last_there || are_all_there || !fence, "seed {seed}");
                disorder_without += u32::from(is_last_there && !are_all_there);
                let _ = &world.a;
                is_last_there.then_some(())
            });
            assert_eq!(world.reap().user_data, 1);
        }
    }
    assert!(disorder_without > 0, "a test of order that never sees disorder without the fence shows nothing");
}

/// 3. What follows a fenced operation in its class waits too; the other class and other peers do not.
#[test]
fn what_is_held_holds_up_its_class_only() {
    let mut world = late(5);
    // Nothing of class 1 ends while its sends have no credit.
    let (window, key) = world.export(4096, Rights::all());
    let message = world.a.alloc(8).unwrap();
    world.a.send(message, world.ab, 0, Opts { class: 1, user_data: 1, ..Opts::default() }).unwrap();
    world.a.push(Sqe::put_word(1, key.at(0)).class(0).flags(SqeFlags::FENCE).user_data(2)).unwrap();
    world.a.push(Sqe::put_word(1, key.at(8)).class(0).user_data(3)).unwrap();
    world.a.push(Sqe::put_word(1, key.at(16)).class(1).user_data(4)).unwrap();
    for _ in 0..200 {
        world.step();
    }
    assert!(world.a.reap().is_none() && (0..3).all(|i| window.load(i * 8) == 0));
    let room = world.b.alloc(8).unwrap();
    world.b.recv(room, world.ba, Opts { class: 1, ..Opts::default() }).unwrap();
    assert!(statuses(&mut world, 4).values().all(|s| s.is_success()));
}

/// 3. A chain runs one by one, and after a failure the rest ends as cancelled, one cqe each.
#[test]
fn links() {
    for seed in 0..u64::from(repeats(40, 1000)) {
        for split in [false, true] {
            let mut world = late(seed);
            let (window, key) = world.export(4096, Rights::all());
            let link = SqeFlags::LINK;
            let bad = 5000;
            let chain = [
                Sqe::put_word(1, key.at(0)).flags(link).user_data(1),
                Sqe::fetch_add(key.at(0), 1).flags(link).user_data(2),
                Sqe::put_word(7, key.at(bad)).flags(link).user_data(3),
                Sqe::put_word(7, key.at(8)).flags(link | SqeFlags::SILENT).user_data(4),
                Sqe::put_word(7, key.at(16)).user_data(5),
                Sqe::put_word(7, key.at(24)).user_data(6),
            ];
            for sqe in chain {
                world.a.push(sqe).unwrap();
                if split {
                    world.step();
                }
            }
            let ends = statuses(&mut world, 6);
            let expected = [
                Status::Success,
                Status::Success,
                Status::RemoteOutOfBounds,
                Status::Cancelled,
                Status::Cancelled,
                Status::Success,
            ];
            assert_eq!(ends.values().copied().collect::<Vec<_>>(), expected, "seed {seed}, split {split}");
            assert_eq!((window.load(0), window.load(8), window.load(16), window.load(24)), (2, 0, 0, 7));
        }
    }
}

/// 3. A link that fails at the device cancels what waits behind it.
#[test]
fn a_link_that_fails_late() {
    let mut world = late(9);
    let (window, key) = world.export(4096, Rights::all());
    let qp = world.a.device().qp(verbring_sys::Link(0), 0);
    // SAFETY: it only makes one operation fail.
    unsafe { world.a.device_mut() }.fail_next(qp, Status::RemoteRefused);
    for i in 1..=3 {
        let flags = if i < 3 { SqeFlags::LINK } else { SqeFlags::empty() };
        world.a.push(Sqe::put_word(1, key.at(0)).flags(flags).user_data(i)).unwrap();
    }
    let ends = statuses(&mut world, 3);
    assert_eq!(ends[&1], Status::RemoteRefused);
    assert!(ends[&2] != Status::Success && ends[&3] != Status::Success, "{ends:?}");
    assert_eq!((window.load(0), world.a.outstanding()), (0, 0));
}

#[test]
fn a_chain_stays_with_one_peer_and_class() {
    let mut world = local(small());
    let (_window, key) = world.export(4096, Rights::all());
    world.a.push(Sqe::put_word(1, key.at(0)).flags(SqeFlags::LINK).user_data(1)).unwrap();
    world.a.push(Sqe::put_word(1, key.at(0)).class(1).flags(SqeFlags::LINK).user_data(2)).unwrap();
    world.a.push(Sqe::put_word(1, key.at(0)).user_data(3)).unwrap();
    world.a.push(Sqe::put_word(1, key.at(0)).user_data(4)).unwrap();
    let ends = statuses(&mut world, 4);
    let expected = [Status::Success, Status::BadLink, Status::Cancelled, Status::Success];
    assert_eq!(ends.values().copied().collect::<Vec<_>>(), expected);
}

/// 1 and 3. A flush says of silent operations that they succeeded; one that failed speaks for itself.
#[test]
fn flush_and_silence() {
    for seed in 0..u64::from(repeats(30, 500)) {
        let mut world = late(seed);
        let (window, key) = world.export(4096, Rights::all());
        for i in 0..20 {
            let put = Sqe::put_word(i + 1, key.at(i * 8)).class((i % 2) as u8).flags(SqeFlags::SILENT).user_data(i);
            world.a.push(put).unwrap();
        }
        world.a.push(Sqe::put_word(1, key.at(4096)).flags(SqeFlags::SILENT).user_data(77)).unwrap();
        world.a.push(Sqe::flush(world.ab).user_data(99)).unwrap();
        let ends = statuses(&mut world, 2);
        assert_eq!((ends[&77], ends[&99]), (Status::RemoteOutOfBounds, Status::Success));
        assert!((0..20).all(|i| window.load(i * 8) == i as u64 + 1), "seed {seed}");
        assert!(world.a.reap().is_none() && world.a.outstanding() == 0);
    }
}

/// 4. The engine holds the signal back, whatever the order of the device.
#[test]
fn signals_come_after_their_data() {
    for seed in 0..u64::from(repeats(40, 1000)) {
        let mut world = late(seed);
        let (window, key) = world.export(1 << 16, Rights::all());
        let local = world.local_window(4096);
        let word = 1000;
        for round in 1..=5u64 {
            local.fill(0, 4096, round as u8);
            for i in 0..4 {
                let put = Sqe::put(local.slice(0, 1024), key.at(i * 1024)).flags(SqeFlags::SILENT);
                world.a.push(put).unwrap();
            }
            let put = Sqe::put_signal(local.slice(0, 1024), key.at(4096), word, Signal::Add(1)).user_data(round);
            world.a.push(put).unwrap();
            world.until(|world| {
                let mut bytes = [0; 5120];
                let signal = window.load(word as usize * 8);
                window.read(0, &mut bytes);
                assert!(signal < round || bytes.iter().all(|b| *b == round as u8), "seed {seed}, round {round}");
                let _ = &world.a;
                (signal == round).then_some(())
            });
            assert_eq!(world.reap().user_data, round);
        }
    }
}

/// 6. Nothing outlives its deadline, started or not, and nobody else pays where the device can cancel.
#[test]
fn deadlines() {
    let mut world = late(3);
    let (window, key) = world.export(4096, Rights::all());
    let deadline = world.now + 50_000;
    // Without credit these wait for ever: one that the device has, one that is held behind it.
    let opts = |user_data| Opts { user_data, deadline: Some(deadline), ..Opts::default() };
    let (one, two) = (world.a.alloc(8).unwrap(), world.a.alloc(8).unwrap());
    world.a.send(one, world.ab, 0, opts(1)).unwrap();
    world.a.send(two, world.ab, 0, Opts { fence: true, ..opts(2) }).unwrap();
    world.a.push(Sqe::put_word(5, key.at(0)).user_data(3)).unwrap();
    let room = world.a.alloc(8).unwrap();
    world.a.recv(room, world.ab, opts(4)).unwrap();
    let mut ends = BTreeMap::new();
    while ends.len() < 4 {
        world.step();
        while let Some(done) = world.a.reap() {
            if done.user_data != 3 {
                assert!(world.now >= deadline && world.now < deadline + 10_000, "at {}", world.now);
                assert!(done.buf.is_some());
            }
            ends.insert(done.user_data, done.status);
        }
        assert!(world.now < deadline + 5_000_000);
    }
    let late = Status::DeadlineExceeded;
    assert_eq!(ends.into_values().collect::<Vec<_>>(), [late, late, Status::Success, late]);
    assert_eq!((window.load(0), world.a.outstanding()), (5, 0));
    // One that is over when it comes.
    world.a.push(Sqe::put_word(6, key.at(0)).deadline(world.now - 5000)).unwrap();
    assert_eq!(world.reap().status, late);
    assert_eq!(window.load(0), 5);
    // A cancelled receive's credit is not lost, and no message goes astray.
    let room = world.b.alloc(8).unwrap();
    world.b.recv(room, world.ba, Opts { user_data: 1, ..Opts::default() }).unwrap();
    world.step();
    world.b.push(Sqe::cancel(1).user_data(2)).unwrap();
    let ends: Vec<_> = (0..2).map(|_| world.until(|world| world.b.reap())).map(|c| (c.user_data, c.status)).collect();
    assert_eq!(ends, [(1, Status::Cancelled), (2, Status::Success)]);
    let message = world.a.alloc(3).unwrap();
    world.a.send(message, world.ab, 0, Opts::default()).unwrap();
    world.reap();
    let room = world.b.alloc(8).unwrap();
    world.b.recv(room, world.ba, Opts::default()).unwrap();
    assert_eq!(world.until(|world| world.b.reap()).value, 3);
}

/// 6. Where the device cannot cancel, the connection is broken, and every other operation ends with its fate named.
#[test]
fn a_deadline_that_breaks_the_connection() {
    let faults = Faults { lateness: 1_000_000, can_cancel: false, ..Faults::default() };
    let mut world = deferred(small(), 3, faults);
    let (window, key) = world.export(4096, Rights::all());
    let deadline = world.now + 50_000;
    world.a.push(Sqe::put_word(1, key.at(0)).deadline(deadline).user_data(1)).unwrap();
    world.a.push(Sqe::put_word(1, key.at(8)).user_data(2)).unwrap();
    world.a.push(Sqe::fetch_add(key.at(16), 1).class(1).user_data(3)).unwrap();
    world.a.push(Sqe::fetch_add(key.at(16), 1).class(1).flags(SqeFlags::FENCE).user_data(4)).unwrap();
    let ends = statuses(&mut world, 4);
    let expected = [Status::DeadlineExceeded, Status::ConnectionLost, Status::OutcomeUnknown, Status::ConnectionLost];
    assert_eq!(ends.into_values().collect::<Vec<_>>(), expected);
    assert!(world.now < deadline + 10_000);
    assert_eq!(world.a.peer_state(world.ab), Some(PeerState::Failed(Status::ConnectionLost)));
    assert_eq!((0..3).map(|i| window.load(i * 8)).sum::<u64>(), 0, "nothing happens afterwards");
}

/// 1. Cancelling: both sqes end once; what was cancelled before it started changes nothing.
#[test]
fn cancel() {
    for seed in 0..u64::from(repeats(60, 2000)) {
        let mut world = late(seed);
        let (window, key) = world.export(4096, Rights::all());
        world.a.push(Sqe::put_word(1, key.at(0)).user_data(1)).unwrap();
        world.a.push(Sqe::put_word(1, key.at(8)).flags(SqeFlags::FENCE).user_data(2)).unwrap();
        world.a.push(Sqe::cancel(2).user_data(3)).unwrap();
        world.a.push(Sqe::cancel(44).user_data(4)).unwrap();
        world.a.push(Sqe::cancel(1).user_data(5)).unwrap();
        let ends = statuses(&mut world, 5);
        assert_eq!((ends[&2], ends[&3], ends[&4]), (Status::Cancelled, Status::Success, Status::NotFound));
        assert_eq!(window.load(8), 0);
        match (ends[&1], ends[&5]) {
            (Status::Cancelled, Status::Success) => assert_eq!(window.load(0), 0),
            (Status::Success, Status::NotFound) => assert_eq!(window.load(0), 1),
            other => panic!("seed {seed}: {other:?}"),
        }
    }
}

/// 7. A failure at the device ends everything of the connection, and poison is never taken for a value.
#[test]
fn a_queue_pair_that_breaks() {
    for seed in 0..u64::from(repeats(60, 2000)) {
        let mut world = deferred(small(), seed, Faults { failures: 6, lateness: 2, ..Faults::default() });
        let (_window, key) = world.export(4096, Rights::all());
        for i in 0..30 {
            let sqe = if i % 3 == 0 { Sqe::fetch_add(key.at(0), 1) } else { Sqe::put_word(i, key.at(8)) };
            world.a.push(sqe.user_data(i).class((i % 2) as u8)).unwrap();
        }
        let ends = world.reap_all(30);
        let mut seen: Vec<_> = ends.iter().map(|c| c.user_data).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..30).collect::<Vec<_>>(), "seed {seed}");
        for end in &ends {
            assert!(end.is_success() || end.value == 0, "seed {seed}: {end:?}");
        }
        assert_eq!(world.a.outstanding(), 0);
    }
}

/// Two classes: an urgent put gets through while a long one of the other class is under way.
#[test]
fn an_urgent_put_overtakes_a_long_one() {
    let mut world = shm(small());
    let (window, key) = world.export(16 << 20, Rights::all());
    let local = world.local_window(16 << 20);
    world.a.push(Sqe::put(local.slice(0, 16 << 20), key.at(0)).class(1).user_data(1)).unwrap();
    world.step();
    world.a.push(Sqe::put_word(7, key.at(0)).class(0).user_data(2)).unwrap();
    world.step();
    assert_eq!(world.a.reap().map(|c| c.user_data), Some(2));
    assert_eq!(window.load(0), 7);
    assert_eq!(world.reap().user_data, 1);
}

/// A put that is revoked on its way ends as stale, and touches nothing afterwards.
#[test]
fn revoked_on_its_way() {
    let mut world = shm(small());
    let (window, key) = world.export(8 << 20, Rights::all());
    let local = world.local_window(8 << 20);
    local.fill(0, 8 << 20, 9);
    world.a.push(Sqe::put(local.slice(0, 8 << 20), key.at(0)).user_data(1)).unwrap();
    world.step();
    world.b.bump_epoch(&window).unwrap();
    let before = snapshot(&window);
    assert_eq!(world.reap().status, Status::StaleEpoch);
    assert!(world.control().contains(&Notice::Revoked { key }));
    assert_eq!(snapshot(&window), before);
    assert_eq!(world.a.outstanding(), 0);
}

fn snapshot(window: &Window) -> Vec<u8> {
    let mut bytes = vec![0; window.len()];
    window.read(0, &mut bytes);
    bytes
}

#[derive(Clone, Debug)]
struct Random {
    kind: u8,
    place: u8,
    class: u8,
    flags: u8,
    deadline: u8,
    steps: u8,
}

fn random() -> impl Strategy<Value = Random> {
    (0u8..9, any::<u8>(), 0u8..2, 0u8..8, any::<u8>(), 0u8..4)
        .prop_map(|(kind, place, class, flags, deadline, steps)| Random { kind, place, class, flags, deadline, steps })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(repeats(150, 20_000)))]

    /// Any mix of operations, flags, deadlines and failures: one outcome each, no block lost, nothing left in flight.
    #[test]
    fn one_outcome_each(ops in prop::collection::vec(random(), 1..120), seed in any::<u64>(), failing in any::<bool>()) {
        let faults = Faults { lateness: 3, failures: if failing { 50 } else { 0 }, can_cancel: seed % 3 != 0, ..Faults::default() };
        let mut world = deferred(small(), seed, faults);
        let (_window, key) = world.export(4096, Rights::all());
        let mut expected: BTreeMap<u64, bool> = BTreeMap::new();
        let mut seen: BTreeMap<u64, Status> = BTreeMap::new();
        let mut take = |world: &mut Late, expected: &BTreeMap<u64, bool>| {
            while let Some(done) = world.a.reap() {
                let silent = expected[&done.user_data];
                assert!(!silent || !done.is_success(), "a silent success spoke");
                assert!(seen.insert(done.user_data, done.status).is_none(), "two outcomes");
            }
            seen.len()
        };
        for (i, op) in ops.iter().enumerate() {
            let user_data = i as u64;
            let at = key.at(u64::from(op.place) * 8);
            let opts = Opts {
                user_data,
                class: op.class,
                deadline: (op.deadline < 60).then(|| world.now + u64::from(op.deadline) * 2000),
                fence: op.flags & 1 != 0,
                link: op.flags & 2 != 0,
                silent: op.flags & 4 != 0,
            };
            let sqe = |sqe: Sqe| {
                let mut flags = SqeFlags::empty();
                flags.set(SqeFlags::FENCE, opts.fence);
                flags.set(SqeFlags::LINK, opts.link);
                flags.set(SqeFlags::SILENT, opts.silent);
                let sqe = sqe.user_data(user_data).class(opts.class).flags(flags);
                opts.deadline.map_or(sqe, |d| sqe.deadline(d))
            };
            let pushed = match op.kind {
                0 => world.a.push(sqe(Sqe::put_word(1, at))).is_ok(),
                1 => world.a.push(sqe(Sqe::fetch_add(at, 1))).is_ok(),
                2 => world.a.push(Sqe::flush(world.ab).user_data(user_data).class(opts.class)).is_ok(),
                3 => world.a.push(Sqe::cancel(u64::from(op.place) % (user_data + 1)).user_data(user_data)).is_ok(),
                4..=7 => match world.a.alloc(64) {
                    Err(_) => false,
                    Ok(buf) => {
                        let ab = world.ab;
                        let pushed = match op.kind {
                            4 => world.a.put(buf, at, opts),
                            5 => world.a.get(buf, at, opts),
                            6 => world.a.put_signal(buf, at, u32::from(op.place), Signal::Add(1), opts),
                            _ => world.a.send(buf, ab, 1, opts),
                        };
                        pushed.is_ok()
                    }
                },
                _ => match world.b.alloc(64) {
                    Ok(room) => {
                        let ba = world.ba;
                        let _ = world.b.recv(room, ba, Opts { class: op.class, ..Opts::default() });
                        false
                    }
                    Err(_) => false,
                },
            };
            if pushed {
                let silent = opts.silent && !matches!(op.kind, 2 | 3);
                expected.insert(user_data, silent);
            }
            for _ in 0..op.steps {
                world.step();
                take(&mut world, &expected);
                while world.b.reap().is_some() {}
            }
        }
        // Sends without a receive would wait for ever: the peer goes, and everything ends.
        for _ in 0..2000 {
            world.step();
            take(&mut world, &expected);
        }
        world.b.disconnect(world.ba, world.now);
        for _ in 0..200_000 {
            if world.a.outstanding() == 0 {
                break;
            }
            world.control();
            world.step();
            take(&mut world, &expected);
        }
        world.step();
        take(&mut world, &expected);
        prop_assert_eq!(world.a.outstanding(), 0);
        for (user_data, silent) in &expected {
            prop_assert!(*silent || seen.contains_key(user_data), "{} has no outcome", user_data);
        }
        let blocks = std::iter::from_fn(|| world.a.alloc(1).ok()).collect::<Vec<_>>().len();
        prop_assert_eq!(blocks, 64 + 32 + 4, "every block is there");
    }
}

/// Where the device cannot take work back, a revoked import stays mapped until that work ended, and no longer.
#[test]
fn revoked_under_work_that_cannot_be_cancelled() {
    for seed in 0..20 {
        let mut world = deferred(small(), seed, Faults { lateness: 6, can_cancel: false, ..Faults::default() });
        for _ in 0..40 {
            let (window, key) = world.export(4096, Rights::all());
            for i in 0..10 {
                world.a.push(Sqe::put_word(1, key.at(i * 8)).class((i % 2) as u8)).unwrap();
            }
            world.a.submit(world.now);
            world.b.bump_epoch(&window).unwrap();
            world.control();
            for done in world.reap_all(10) {
                assert!(matches!(done.status, Status::Success | Status::StaleEpoch), "seed {seed}: {done:?}");
            }
            world.a.release(key).unwrap();
            world.control();
            world.b.close_window(&window, world.now, u64::MAX).unwrap();
        }
    }
}

/// An import whose grant was under way when its epoch was bumped is stale from its first operation on.
#[test]
fn stale_when_it_arrives() {
    for is_shm in [false, true] {
        if is_shm { stale_grant(shm(small())) } else { stale_grant(local(small())) }
    }
}

fn stale_grant<D: Device>(mut world: World<D>) {
    let (_first, first_key) = world.export(4096, Rights::all());
    let window = world.b.window(4096, Rights::all()).unwrap();
    let remote = world.b.remote(&window).unwrap();
    let key = world.a.import(world.ab, &remote).unwrap();
    // The owner answers, bumps, and the importer uses another import before it hears either.
    while world.b.control(world.now).is_some() {}
    world.b.bump_epoch(&window).unwrap();
    world.a.push(Sqe::put_word(1, first_key.at(0))).unwrap();
    assert!(world.reap().is_success());
    assert_eq!(world.a.control(world.now), Some(Notice::Imported { key }));
    world.a.push(Sqe::put_word(77, key.at(0))).unwrap();
    assert_eq!(world.reap().status, Status::StaleEpoch);
    assert_eq!(window.load(0), 0);
}

/// `execute`: what is done at once is done, and visible when it returns; the rest is refused and nothing is done.
#[test]
fn past_the_rings() {
    let mut world = local(small());
    let (window, key) = world.export(4096, Rights::all());
    let source = world.local_window(4096);
    source.store(8, 77);
    let a = &mut world.a;
    let put = a.execute(&Sqe::put(source.slice(8, 8), key.at(16)).user_data(1)).unwrap();
    assert_eq!((put.user_data, put.status, window.load(16)), (1, Status::Success, 77));
    assert_eq!(a.execute(&Sqe::put_word(5, key.at(24)).class(1)).unwrap().value, 0);
    assert_eq!(a.execute(&Sqe::fetch_add(key.at(24), 2)).unwrap().value, 5);
    assert_eq!(a.execute(&Sqe::compare_swap(key.at(24), 7, 9)).unwrap().value, 7);
    assert_eq!(a.execute(&Sqe::swap(key.at(24), 10).flags(SqeFlags::SILENT)).unwrap().value, 9);
    assert!(a.execute(&Sqe::get(source.slice(0, 8), key.at(24))).is_some());
    let signalled = Sqe::put_signal(source.slice(8, 8), key.at(32), 5, Signal::Add(3));
    assert!(a.execute(&signalled).is_some());
    assert_eq!((source.load(0), window.load(32), window.load(40)), (10, 77, 3));

    // Not at once, or not right: none of it happens.
    let word = |at| Sqe::put_word(1, key.at(at));
    let refused = [
        word(4096),
        word(48).class(2),
        word(48).flags(SqeFlags::FENCE),
        word(48).flags(SqeFlags::LINK),
        word(48).deadline(1 << 40),
        Sqe::fetch_add(key.at(4), 1),
        Sqe::put(source.slice(4092, 8), key.at(48)),
        Sqe::flush(world.ab),
        Sqe::nop(),
    ];
    for (i, sqe) in refused.iter().enumerate() {
        assert_eq!(a.execute(sqe), None, "case {i}");
    }
    assert_eq!((window.load(48), window.load(0), window.load(8)), (0, 0, 0));

    // Behind what was pushed, behind a chain that is not over, and while the class is held.
    a.push(word(56)).unwrap();
    assert_eq!(a.execute(&word(48)), None);
    a.submit(0);
    assert!(a.execute(&word(64)).is_some());
    a.push(word(56).flags(SqeFlags::LINK)).unwrap();
    a.submit(0);
    assert_eq!(a.execute(&word(48)), None);
    a.push(word(56)).unwrap();
    a.submit(0);
    assert!(a.execute(&word(72)).is_some());
    assert_eq!(window.load(48), 0);

    let mut late = late(1);
    let (window, key) = late.export(4096, Rights::all());
    assert_eq!(late.a.execute(&Sqe::put_word(1, key.at(0))), None);
    assert_eq!(window.load(0), 0);
}

/// While an operation waits in the engine, what comes behind it in its class waits too, and the other class does not,
/// on a device that does everything at once.
#[test]
fn a_held_class_is_not_overtaken() {
    let mut world = local(small());
    let (window, key) = world.export(1 << 20, Rights::all());
    let source = world.local_window(1 << 20);
    // Larger than a slice: class 1 stays pending until it was polled often enough.
    world.a.push(Sqe::put(source.slice(0, 1 << 20), key.at(0)).class(1).user_data(1)).unwrap();
    // Waits for it.
    world.a.push(Sqe::put_word(1, key.at(0)).class(0).flags(SqeFlags::FENCE).user_data(2)).unwrap();
    world.a.push(Sqe::put_word(2, key.at(8)).class(0).user_data(3)).unwrap();
    world.a.submit(0);
    assert_eq!(world.a.execute(&Sqe::put_word(3, key.at(8))), None, "class 0 is held");
    assert_eq!(world.a.execute(&Sqe::put_word(3, key.at(8)).class(1)), None, "class 1 is pending");
    assert_eq!((window.load(0), window.load(8)), (0, 0));
    let order: Vec<u64> = world.reap_all(3).iter().map(|c| c.user_data).collect();
    assert_eq!(order, [1, 2, 3]);
    assert_eq!((window.load(0), window.load(8)), (1, 2));
    assert!(world.a.execute(&Sqe::put_word(4, key.at(8))).is_some(), "nothing is held any more");
}

/// `batch` and `reap_each` are `push` and `reap`, over laps of both rings, whatever ends them.
#[test]
fn batches() {
    let mut world = local(small());
    let (window, key) = world.export(4096, Rights::all());
    let mut next = 0u64;
    let mut seen = Vec::new();
    for round in 0..200u64 {
        let before = next;
        let full = world.a.batch(|batch| {
            for _ in 0..round % 70 {
                if let Err(error) = batch.push(Sqe::put_word(next, key.at(next % 512 * 8)).user_data(next)) {
                    return Some(error);
                }
                next += 1;
            }
            None
        });
        assert_eq!(full, (round % 70 > 64).then_some(verbring::PushError::SqFull), "64 fit");
        if round % 3 == 0 && next < before + 64 {
            // One pushed the other way lies behind them.
            world.a.push(Sqe::put_word(next, key.at(next % 512 * 8)).user_data(next)).unwrap();
            next += 1;
        }
        assert_eq!(u64::from(world.a.submit(0)), next - before);
        if round % 5 == 0 {
            seen.extend(world.a.reap().map(|done| done.user_data));
        }
        let already = seen.len() as u64;
        let count = world.a.reap_each(|done| {
            assert!(done.is_success() && done.buf.is_none());
            seen.push(done.user_data);
        });
        assert_eq!(already + u64::from(count), next);
    }
    assert!(seen.iter().copied().eq(0..next));

    // A panic on the way loses nothing that was pushed or not yet reaped.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        world.a.batch(|batch| {
            batch.push(Sqe::put_word(1, key.at(0)).user_data(1)).unwrap();
            batch.push(Sqe::fetch_add(key.at(0), 1).user_data(2)).unwrap();
            panic!("on the way");
        })
    }));
    assert!(panicked.is_err());
    world.a.push(Sqe::nop().user_data(3)).unwrap();
    assert_eq!(world.a.submit(0), 3);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        world.a.reap_each(|done| assert_ne!(done.user_data, 2));
    }));
    assert!(panicked.is_err());
    assert_eq!((world.a.reap().unwrap().user_data, window.load(0)), (3, 2));

    // Blocks come back, too.
    for i in 0..5 {
        let buf = world.a.alloc(8).unwrap();
        world.a.put(buf, key.at(0), Opts { user_data: i, ..Opts::default() }).unwrap();
    }
    world.a.submit(0);
    let mut blocks = Vec::new();
    assert_eq!(world.a.reap_each(|done| blocks.extend(done.buf)), 5);
    assert_eq!(blocks.len(), 5);
}

/// 7. What is in flight when a connection is made anew ends once, with its fate named; what follows goes through.
#[test]
fn reconnect_with_operations_in_flight() {
    for can_cancel in [true, false] {
        let faults = Faults { lateness: 1_000_000, can_cancel, ..Faults::default() };
        let (mut world, names) = deferred_shm(small(), 3, faults);
        let (window, key) = world.export(4096, Rights::all());
        let room = world.b.alloc(8).unwrap();
        world.b.recv(room, world.ba, Opts { user_data: 9, ..Opts::default() }).unwrap();
        world.a.push(Sqe::put_word(1, key.at(0)).user_data(1)).unwrap();
        world.a.push(Sqe::fetch_add(key.at(8), 1).user_data(2)).unwrap();
        world.a.push(Sqe::put_word(1, key.at(16)).flags(SqeFlags::FENCE).user_data(3)).unwrap();
        world.a.push(Sqe::put_word(1, key.at(24)).class(1).flags(SqeFlags::SILENT).user_data(4)).unwrap();
        world.step();
        assert_eq!(world.a.outstanding(), 4);
        world.a.reconnect(world.ab, &names[1], world.now).unwrap();
        let lost = Status::ConnectionLost;
        let ends = statuses(&mut world, 4);
        assert_eq!(ends.into_values().collect::<Vec<_>>(), [lost, Status::OutcomeUnknown, lost, lost]);
        world.told();
        let done = world.until(|world| world.b.reap());
        assert_eq!((done.user_data, done.status), (9, lost));
        // SAFETY: it only makes the device faster.
        unsafe { world.a.device_mut() }.faults.lateness = 1;
        world.a.push(Sqe::put_word(5, key.at(32)).user_data(5)).unwrap();
        assert_eq!(statuses(&mut world, 1)[&5], Status::Success);
        assert!(world.a.reap().is_none() && world.b.reap().is_none() && world.a.outstanding() == 0);
        assert_eq!([0, 8, 16, 24, 32].map(|at| window.load(at)), [0, 0, 0, 0, 5], "nothing happens afterwards");
    }
}

/// 7. A connection that a deadline broke is made anew by either side, under the same ids and keys.
#[test]
fn reconnect_after_a_break() {
    for side in [0, 1] {
        let faults = Faults { lateness: 1_000_000, can_cancel: false, ..Faults::default() };
        let (mut world, names) = deferred_shm(small(), 3, faults);
        let (window, key) = world.export(4096, Rights::all());
        world.a.push(Sqe::put_word(1, key.at(0)).deadline(world.now + 50_000)).unwrap();
        assert_eq!(world.reap().status, Status::DeadlineExceeded);
        assert_eq!(world.a.import_state(key), Some(ImportState::Failed(Status::ConnectionLost)));
        world.told();
        if side == 0 {
            world.a.reconnect(world.ab, &names[1], world.now).unwrap();
        } else {
            world.b.reconnect(world.ba, &names[0], world.now).unwrap();
        }
        let told = world.told();
        assert!(matches!(told[0][0], Notice::Connected { peer, .. } if peer == world.ab), "{told:?}");
        assert_eq!(told[0][1..], [Notice::Imported { key }]);
        assert!(matches!(told[1][..], [Notice::Connected { peer, .. }] if peer == world.ba), "{told:?}");
        // SAFETY: it only makes the device faster.
        unsafe { world.a.device_mut() }.faults.lateness = 1;
        world.a.push(Sqe::put_word(2, key.at(0))).unwrap();
        assert!(world.reap().is_success() && window.load(0) == 2);
    }
}

/// 7. An epoch that was bumped while there was no connection is stale after it, and no byte changes.
#[test]
fn stale_after_a_reconnect() {
    let (mut world, names) = named_shm(small());
    let (window, key) = world.export(4096, Rights::all());
    let (_other, good) = world.export(4096, Rights::all());
    let (closed, gone) = world.export(4096, Rights::all());
    world.a.reconnect(world.ab, &names[1], world.now).unwrap();
    world.b.bump_epoch(&window).unwrap();
    assert!(matches!(world.b.close_window(&closed, world.now, u64::MAX), Err(AccessError::Busy { .. })));
    let [told, _] = world.told();
    for key in [key, gone] {
        assert!(told.contains(&Notice::ImportFailed { key, status: Status::StaleEpoch }), "{told:?}");
        world.a.push(Sqe::put_word(1, key.at(0))).unwrap();
        assert_eq!(world.reap().status, Status::StaleEpoch);
    }
    assert!(told.contains(&Notice::Imported { key: good }));
    assert_eq!((window.load(0), closed.load(0)), (0, 0));
    world.b.close_window(&closed, world.now, u64::MAX).unwrap();
    // What was known to be stale before is not asked for again.
    world.a.reconnect(world.ab, &names[1], world.now).unwrap();
    let [told, _] = world.told();
    assert_eq!(told[1..], [Notice::Imported { key: good }]);
}

/// 7. An engine that was started again under the same name is another: its predecessor's Remotes are stale.
#[test]
fn reconnect_to_an_engine_that_was_started_again() {
    let (mut world, names) = named_shm(small());
    let (_window, key) = world.export(4096, Rights::all());
    world.b = verbring_tests::shm_engine(small());
    let lost = world.a.control(world.now);
    assert_eq!(lost, Some(Notice::Lost { peer: world.ab, cause: DeviceError::Closed }));
    // Nobody is there yet: it can be tried again.
    let nobody = world.a.reconnect(world.ab, &names[1], world.now);
    assert_eq!(nobody, Err(EngineError::Device(DeviceError::NoSuchName)));
    assert_eq!(world.a.peer_state(world.ab), Some(PeerState::Failed(Status::ConnectionLost)));
    world.b = engine(small(), |node| Shm::bind(&names[1], node, ShmOptions::default()).unwrap());
    // Under the same number as the one that was imported.
    let window = world.b.window(4096, Rights::all()).unwrap();
    world.a.reconnect(world.ab, &names[1], world.now).unwrap();
    let [told, at_b] = world.told();
    assert!(matches!(told[0], Notice::Connected { peer, .. } if peer == world.ab), "{told:?}");
    assert_eq!(told[1..], [Notice::ImportFailed { key, status: Status::StaleEpoch }]);
    world.a.push(Sqe::put_word(1, key.at(0))).unwrap();
    assert_eq!(world.reap().status, Status::StaleEpoch);
    let [Notice::Connected { peer, .. }] = at_b[..] else { panic!("{at_b:?}") };
    world.ba = peer;
    let key = world.import(&window);
    assert_eq!(window.load(0), 0);
    world.a.push(Sqe::put_word(1, key.at(0))).unwrap();
    assert!(world.reap().is_success() && window.load(0) == 1);
}

/// 7. Both sides at once, in every order of what they notice first: one connection stays, under the same ids and keys.
#[test]
fn both_sides_reconnect() {
    for round in 0..32u32 {
        let (mut world, names) = named_shm(small());
        let (window, key) = world.export(4096, Rights::all());
        let (_back_window, back) = world.export_back(4096, Rights::all());
        for turn in 0..4 {
            let turns = |world: &mut World<Shm>, bit: u32| {
                if (round >> bit) & 1 == 0 {
                    world.a.control(world.now);
                } else {
                    world.b.control(world.now);
                }
            };
            world.a.reconnect(world.ab, &names[1], world.now).unwrap();
            turns(&mut world, turn);
            world.b.reconnect(world.ba, &names[0], world.now).unwrap();
            (0..4).for_each(|bit| turns(&mut world, bit + turn % 2));
            world.told();
            let up = Some(PeerState::Up);
            assert_eq!((world.a.peer_state(world.ab), world.b.peer_state(world.ba)), (up, up), "round {round}");
            let ready = Some(ImportState::Ready);
            assert_eq!((world.a.import_state(key), world.b.import_state(back)), (ready, ready), "round {round}");
            world.a.push(Sqe::fetch_add(key.at(0), 1)).unwrap();
            assert!(world.reap().is_success());
            world.b.push(Sqe::fetch_add(back.at(0), 1)).unwrap();
            assert!(world.until(|world| world.b.reap()).is_success());
        }
        assert_eq!(window.load(0), 4);
        // Nothing else is left: there is one connection, and when it goes no side has a peer that is up.
        world.a.disconnect(world.ab, world.now);
        let [_, told] = world.told();
        assert!(matches!(told[..], [Notice::Lost { peer, .. }] if peer == world.ba), "round {round}: {told:?}");
    }
}

/// 7. As many imports as there is room for; and peers that nobody has.
#[test]
fn reconnect_with_a_full_table_and_without_a_peer() {
    let (mut world, names) = named_shm(small());
    let window = world.b.window(4096, Rights::all()).unwrap();
    let keys: Vec<_> = (0..16).map(|_| world.import(&window)).collect();
    world.a.reconnect(world.ab, &names[1], world.now).unwrap();
    world.a.release(keys[15]).unwrap();
    let [told, _] = world.told();
    assert_eq!(told.len(), 16, "one connection, and each import once: {told:?}");
    for key in &keys[..15] {
        world.a.push(Sqe::fetch_add(key.at(0), 1)).unwrap();
        assert!(world.reap().is_success());
    }
    assert_eq!(window.load(0), 15);
    assert!(matches!(world.a.reconnect(world.ab, &name("nobody"), world.now), Err(EngineError::Device(_))));
    world.a.disconnect(world.ab, world.now);
    assert_eq!(world.a.import_state(keys[0]), None);
    let unknown = world.a.reconnect(world.ab, &names[1], world.now).unwrap_err();
    assert!(unknown == EngineError::NoSuchPeer && unknown.to_string().contains("use connect"));
    assert!(matches!(
        local(small()).a.reconnect(world.ab, "x", 0),
        Err(EngineError::Device(_) | EngineError::NoSuchPeer)
    ));
}
