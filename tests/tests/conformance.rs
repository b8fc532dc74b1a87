//! One suite over every device: local, deferred, shm, fabric, udp. What a device promises (`Device`, docs/SEMANTICS.md) is seen
//! through whole engines.

use verbring::{Device, Domain, Level, Notice, Opts, PeerState, Rights, Signal, Sqe, SqeFlags, Status};
use verbring_sim::device::FabricOptions;
use verbring_sim::fabric::{Fabric, FabricConfig, Fault};
use verbring_sim::nic::{Delay, Weakness};
use verbring_sim::random::Ratio;
use verbring_sim::soft::Patience;
use verbring_sim::udp::UdpOptions;
use verbring_sys::Faults;
use verbring_tests::{World, deferred, deferred_shm, local, named_shm, on_fabric, on_udp, pattern, shm, small};

const ALL: Rights = Rights::all();

/// Puts and gets of every length around the limits of the copy routines, each verified, nothing beside it touched.
fn put_and_get<D: Device>(mut world: World<D>) {
    let (window, key) = world.export(1 << 20, ALL);
    let local = world.local_window(1 << 20);
    let lengths = (0..70).chain([127, 128, 129, 511, 512, 513, 4095, 4096, 4097, 65536, 262144, 262145, 900_000]);
    for (i, len) in lengths.enumerate() {
        let offset = (i * 37 + 1) % 4096;
        let bytes = pattern(len, i as u64);
        window.fill(0, len + 8192, 0xee);
        local.write(0, &bytes);
        world.a.push(Sqe::put(local.slice(0, len as u32), key.at(offset as u64)).user_data(1)).unwrap();
        assert_eq!(world.reap().status, Status::Success);
        world.settle();
        let mut seen = vec![0; len + 8192];
        window.read(0, &mut seen);
        assert!(seen[..offset].iter().all(|b| *b == 0xee), "before, length {len}");
        assert_eq!(&seen[offset..offset + len], &bytes[..], "length {len}");
        assert!(seen[offset + len..].iter().all(|b| *b == 0xee), "behind, length {len}");
        local.fill(0, len + 64, 0x11);
        world.a.push(Sqe::get(local.slice(7, len as u32), key.at(offset as u64)).user_data(2)).unwrap();
        assert_eq!(world.reap().status, Status::Success);
        let mut back = vec![0; len + 8];
        local.read(0, &mut back);
        assert_eq!(&back[7..7 + len], &bytes[..], "length {len}");
        assert_eq!((back[6], back[7 + len]), (0x11, 0x11));
    }
}

fn put_inline<D: Device>(mut world: World<D>) {
    let (window, key) = world.export(4096, ALL);
    for len in 0..=16 {
        let bytes = pattern(len, 9);
        window.fill(0, 64, 0xee);
        world.a.push(Sqe::put_inline(&bytes, key.at(3))).unwrap();
        assert_eq!(world.reap().status, Status::Success);
        world.settle();
        let mut seen = [0; 24];
        window.read(0, &mut seen);
        assert_eq!(&seen[3..3 + len], &bytes[..]);
        assert!(seen[..3].iter().chain(&seen[3 + len..]).all(|b| *b == 0xee), "length {len}");
    }
}

/// Blocks move into operations and come back, whichever way they end.
fn bufs<D: Device>(mut world: World<D>) {
    let (window, key) = world.export(8192, ALL);
    let mut buf = world.a.alloc(5000).unwrap();
    buf.copy_from_slice(&pattern(5000, 3));
    world.a.put(buf, key.at(100), Opts { user_data: 5, ..Opts::default() }).unwrap();
    let done = world.reap();
    assert_eq!((done.user_data, done.status), (5, Status::Success));
    let mut buf = done.buf.unwrap();
    assert_eq!(buf.len(), 5000);
    buf.fill(0);
    world.a.get(buf, key.at(100), Opts::default()).unwrap();
    let done = world.reap();
    let buf = done.buf.unwrap();
    assert_eq!(&buf[..], &pattern(5000, 3)[..]);
    world.settle();
    let mut seen = vec![0; 5000];
    window.read(100, &mut seen);
    assert_eq!(&seen[..], &buf[..]);
    // An error gives it back too.
    world.a.put(buf, key.at(8000), Opts::default()).unwrap();
    let done = world.reap();
    assert_eq!((done.status, done.buf.as_ref().map(|b| b.len())), (Status::RemoteOutOfBounds, Some(5000)));
    // A silent success returns it to the slab by itself.
    drop(done);
    let buf = world.a.alloc(4000).unwrap();
    world.a.put(buf, key.at(0), Opts { silent: true, ..Opts::default() }).unwrap();
    world.a.push(Sqe::flush(world.ab).user_data(9)).unwrap();
    assert_eq!(world.reap().user_data, 9, "the put itself says nothing");
    let all: Vec<_> = std::iter::from_fn(|| world.a.alloc(1).ok()).collect();
    assert_eq!(all.len(), 64 + 32 + 4, "every block is there");
}

fn atomics<D: Device>(mut world: World<D>) {
    let (window, key) = world.export(4096, ALL);
    window.store(64, 10);
    let max = u64::MAX;
    let steps = [
        (Sqe::fetch_add(key.at(64), 5), 10, 15),
        (Sqe::compare_swap(key.at(64), 14, 99), 15, 15),
        (Sqe::compare_swap(key.at(64), 15, 99), 15, 99),
        (Sqe::swap(key.at(64), max), 99, max),
        (Sqe::fetch_add(key.at(64), 2), max, 1),
    ];
    for (i, (sqe, old, new)) in steps.into_iter().enumerate() {
        world.a.push(sqe.user_data(i as u64)).unwrap();
        let done = world.reap();
        world.settle();
        let seen = (done.user_data, done.status, done.value, window.load(64));
        assert_eq!(seen, (i as u64, Status::Success, old, new));
    }
    assert_eq!((window.load(56), window.load(72)), (0, 0));
    // The owner's own atomics and the peer's go together, where they are of one domain.
    let owner_adds = world.a.caps().domain == Domain::Cpu;
    for _ in 0..20 {
        if owner_adds {
            window.fetch_add(64, 1);
        }
        world.a.push(Sqe::fetch_add(key.at(64), 1).flags(SqeFlags::SILENT)).unwrap();
    }
    world.a.push(Sqe::flush(world.ab)).unwrap();
    world.reap();
    assert_eq!(window.load(64), if owner_adds { 41 } else { 21 });
}

/// The signal is never seen before the bytes of its put, nor of those before it.
fn put_signal<D: Device>(mut world: World<D>) {
    const LEN: usize = 300_000;
    let (window, key) = world.export(LEN * 2 + 64, ALL);
    let local = world.local_window(LEN);
    let word = (LEN * 2 / 8) as u32;
    for round in 1..=20u64 {
        local.fill(0, LEN, round as u8);
        world.a.push(Sqe::put(local.slice(0, LEN as u32), key.at(0)).flags(SqeFlags::SILENT).class(1)).unwrap();
        let signal = if round % 2 == 0 { Signal::Store(round) } else { Signal::Add(1) };
        let put = Sqe::put_signal(local.slice(0, LEN as u32), key.at(LEN as u64), word, signal);
        world.a.push(put.user_data(round).class(1)).unwrap();
        world.until(|world| {
            let seen = window.load(word as usize * 8);
            assert!(seen == round || seen == round - 1);
            if seen == round {
                let mut bytes = vec![0; LEN * 2];
                window.read(0, &mut bytes);
                assert!(bytes.iter().all(|b| *b == round as u8), "round {round}: the signal overtook its data");
            }
            let _ = &world.a;
            (seen == round).then_some(())
        });
        assert_eq!(world.reap().user_data, round);
    }
}

fn send_and_recv<D: Device>(mut world: World<D>) {
    // Without a receive the message waits; it is not lost, and nothing else is.
    for i in 0..3u32 {
        let mut buf = world.a.alloc(100).unwrap();
        buf.fill(i as u8);
        world.a.send(buf, world.ab, 70 + i, Opts { user_data: u64::from(i), ..Opts::default() }).unwrap();
    }
    for _ in 0..50 {
        world.step();
    }
    assert!(world.a.reap().is_none());
    for i in 0..3 {
        let buf = world.b.alloc(200).unwrap();
        world.b.recv(buf, world.ba, Opts { user_data: 10 + i, ..Opts::default() }).unwrap();
    }
    let sent = world.reap_all(3);
    assert_eq!(sent.iter().map(|c| c.user_data).collect::<Vec<_>>(), [0, 1, 2]);
    for i in 0..3u32 {
        let got = world.until(|world| world.b.reap());
        let buf = got.buf.as_ref().unwrap();
        assert_eq!((got.user_data, got.imm, got.value), (10 + u64::from(i), 70 + i, 100));
        assert!(buf.len() == 100 && buf.iter().all(|b| *b == i as u8));
    }
    // A message that is too long for its receive is cut, and both sides go on.
    let buf = world.b.alloc(10).unwrap();
    world.b.recv(buf, world.ba, Opts::default()).unwrap();
    let buf = world.a.alloc(100).unwrap();
    world.a.send(buf, world.ab, 1, Opts::default()).unwrap();
    assert_eq!(world.reap().status, Status::Success);
    assert_eq!(world.until(|world| world.b.reap()).status, Status::Truncated);
    // Many, both ways, both classes.
    for class in [0, 1] {
        for i in 0..40u64 {
            let local = world.a.alloc(256).unwrap();
            world.a.recv(local, world.ab, Opts { user_data: i, class, ..Opts::default() }).unwrap();
            let mut message = world.b.alloc((i as usize * 13) % 256).unwrap();
            message.fill(i as u8);
            world.b.send(message, world.ba, i as u32, Opts { class, ..Opts::default() }).unwrap();
            let got = world.reap();
            assert_eq!((got.status, got.user_data, got.imm), (Status::Success, i, i as u32));
            assert_eq!(got.buf.as_ref().map(|b| b.len()), Some((i as usize * 13) % 256));
            world.until(|world| world.b.reap());
        }
    }
}

/// Operations of one class end in the order they were pushed.
fn order<D: Device>(mut world: World<D>) {
    let (_window, key) = world.export(1 << 20, ALL);
    let local = world.local_window(1 << 20);
    let mut next = 0u64;
    let mut seen = 0u64;
    while seen < 500 {
        for _ in 0..20 {
            let len = [8, 100_000, 3, 400_000][next as usize % 4];
            let sqe = if next.is_multiple_of(3) { Sqe::get } else { Sqe::put }(local.slice(0, len), key.at(0));
            if next - seen < 60 {
                world.a.push(sqe.user_data(next).class(1)).unwrap();
                next += 1;
            }
        }
        world.step();
        while let Some(done) = world.a.reap() {
            assert_eq!((done.user_data, done.status), (seen, Status::Success));
            seen += 1;
        }
    }
}

/// Revoking cuts off at once; the new Remote works at once; contents stay. Whoever has not heard of it finds the door
/// closed where the CPU moves the bytes; where a NIC does, the connection breaks.
fn revoke<D: Device>(mut world: World<D>) {
    let (window, key) = world.export(4096, ALL);
    window.store(0, 7);
    let fresh = world.b.bump_epoch(&window).unwrap();
    // Before the importer heard of it.
    world.a.push(Sqe::put_word(9, key.at(0)).user_data(1)).unwrap();
    world.a.push(Sqe::fetch_add(key.at(0), 1).user_data(2)).unwrap();
    let local = world.local_window(64);
    world.a.push(Sqe::get(local.slice(0, 8), key.at(0)).user_data(3)).unwrap();
    let ends: Vec<_> = world.reap_all(3).iter().map(|done| done.status).collect();
    assert_eq!(window.load(0), 7, "no byte changed");
    if world.a.caps().completion == Level::Visible {
        assert_eq!(ends, [Status::StaleEpoch; 3]);
        assert!(world.control().contains(&Notice::Revoked { key }));
        world.a.push(Sqe::put_word(9, key.at(0))).unwrap();
        assert_eq!(world.reap().status, Status::StaleEpoch);
    } else {
        assert_eq!(ends, [Status::RemoteRefused, Status::OutcomeUnknown, Status::ConnectionLost]);
        world.meet_again();
    }
    let again = world.a.import(world.ab, &fresh).unwrap();
    world.until(|world| world.control().contains(&Notice::Imported { key: again }).then_some(()));
    world.a.push(Sqe::fetch_add(again.at(0), 1)).unwrap();
    let old = world.reap().value;
    world.settle();
    assert_eq!((old, window.load(0)), (7, 8));
    // The old one may be given up, and the place is used again.
    let _ = world.a.release(key);
    assert!(world.a.import_state(key).is_none());
}

fn close<D: Device>(mut world: World<D>) {
    let (window, key) = world.export(4096, ALL);
    let late = world.now + 1_000_000_000;
    let busy = world.b.close_window(&window, world.now, late);
    assert_eq!(busy, Err(verbring::AccessError::Busy { in_flight: 0, importers: 1 }));
    world.until(|world| {
        world.control();
        world.b.close_window(&window, world.now, late).ok()
    });
    assert_eq!(world.b.close_window(&window, world.now, late), Err(verbring::AccessError::NoSuchWindow));
    world.a.push(Sqe::put_word(1, key.at(0))).unwrap();
    assert_eq!(world.reap().status, Status::StaleEpoch);
    // Against an importer that does not answer it ends by the deadline.
    let (window, key) = world.export(4096, ALL);
    assert!(world.b.close_window(&window, world.now, world.now + 10).is_err());
    world.b.close_window(&window, world.now + 10, world.now + 10).unwrap();
    world.a.push(Sqe::put_word(1, key.at(0))).unwrap();
    let cut_off = if world.a.caps().completion == Level::Visible { Status::StaleEpoch } else { Status::RemoteRefused };
    assert_eq!(world.reap().status, cut_off);
    assert_eq!(window.load(0), 0);
}

/// A side that goes away takes nothing with it but its own operations.
fn goodbye<D: Device>(mut world: World<D>) {
    let (_window, key) = world.export(4096, ALL);
    let buf = world.a.alloc(10).unwrap();
    world.a.recv(buf, world.ab, Opts { user_data: 1, ..Opts::default() }).unwrap();
    world.step();
    world.b.disconnect(world.ba, world.now);
    world.a.push(Sqe::put_word(1, key.at(0)).user_data(2)).unwrap();
    let mut ends: Vec<_> = world.reap_all(2).iter().map(|c| (c.user_data, c.status)).collect();
    ends.sort();
    assert_eq!(ends, [(1, Status::ConnectionLost), (2, Status::ConnectionLost)]);
    let lost = world.control();
    assert!(matches!(lost[..], [Notice::Lost { peer, .. }] if peer == world.ab), "{lost:?}");
    assert_eq!(world.a.peer_state(world.ab), Some(PeerState::Failed(Status::ConnectionLost)));
    world.a.disconnect(world.ab, world.now);
    world.a.push(Sqe::put_word(1, key.at(0))).unwrap();
    assert_eq!(world.reap().status, Status::PeerUnknown);
    assert_eq!(world.a.outstanding(), 0);
}

/// Either side connects anew, and both go on under the ids and keys that they had.
fn reconnect<D: Device>((mut world, names): (World<D>, [String; 2])) {
    let (window, key) = world.export(4096, ALL);
    let (back_window, back) = world.export_back(4096, ALL);
    for round in 1..=6u64 {
        let other = if round % 2 == 0 {
            world.a.reconnect(world.ab, &names[1], world.now).unwrap();
            assert_eq!(world.a.peer_state(world.ab), Some(PeerState::Connecting));
            world.a.push(Sqe::put_word(9, key.at(0))).unwrap();
            assert_eq!(world.reap().status, Status::NotReady);
            1
        } else {
            world.b.reconnect(world.ba, &names[0], world.now).unwrap();
            0
        };
        let told = world.told();
        for (i, (peer, key)) in [(world.ab, key), (world.ba, back)].into_iter().enumerate() {
            let told = if i == other {
                assert!(matches!(told[i][0], Notice::Lost { peer: p, .. } if p == peer), "{told:?}");
                &told[i][1..]
            } else {
                &told[i][..]
            };
            let incoming = i == other;
            assert!(matches!(told[0], Notice::Connected { peer: p, incoming: is, .. } if (p, is) == (peer, incoming)));
            assert_eq!(told[1..], [Notice::Imported { key }]);
        }
        world.a.push(Sqe::put_word(round, key.at(8))).unwrap();
        assert!(world.reap().is_success());
        world.b.push(Sqe::fetch_add(back.at(8), 1)).unwrap();
        assert!(world.until(|world| world.b.reap()).is_success());
        world.settle();
        assert_eq!((window.load(0), window.load(8), back_window.load(8)), (0, round, round));
        let room = world.b.alloc(100).unwrap();
        world.b.recv(room, world.ba, Opts::default()).unwrap();
        let message = world.a.alloc(5).unwrap();
        world.a.send(message, world.ab, 0, Opts::default()).unwrap();
        assert!(world.reap().is_success());
        assert_eq!(world.until(|world| world.b.reap()).value, 5);
    }
    // Whoever was let in over the old connection is let go of, too.
    world.a.release(key).unwrap();
    world.told();
    world.b.close_window(&window, world.now, u64::MAX).unwrap();
}

/// NICs that do everything as badly as they may.
fn weak() -> FabricOptions {
    let delay = Some(Delay { max_ns: 20_000, relaxed: true });
    let weakness = Weakness { max_inline: 0, max_rd_atomic: 1, max_mtu: 1024, delay, poison: true, ..Weakness::NONE };
    FabricOptions { weakness, ..FabricOptions::default() }
}

/// One that gives a dead connection up soon: the tests wait for that.
fn udp() -> UdpOptions {
    UdpOptions { patience: Patience { timeout: 10, retry_count: 5 }, ..UdpOptions::default() }
}

macro_rules! suite {
    ($($device:ident: $world:expr;)+) => {$(
        mod $device {
            use super::*;
            suite!(@ $world; put_and_get put_inline bufs atomics put_signal send_and_recv order revoke close goodbye);
        }
    )+};
    (@ $world:expr; $($test:ident)+) => {$(
        #[test]
        fn $test() {
            super::$test($world);
        }
    )+};
}

suite! {
    on_local: local(small());
    on_shm: shm(small());
    on_deferred: deferred(small(), 1, Faults::default());
    on_deferred_late: deferred(small(), 2, Faults { lateness: 20, ..Faults::default() });
    on_fabric: on_fabric(small(), FabricConfig::new(1), FabricOptions::default());
    on_fabric_with_loss: on_fabric(small(), FabricConfig::new(2).with(Fault::Loss, Ratio::new(1, 20)), FabricOptions::default());
    on_fabric_of_weak_nics: on_fabric(small(), FabricConfig::new(3), weak());
    on_udp: on_udp(small(), udp());
    on_udp_without_offload: on_udp(small(), UdpOptions { offload: false, mtu: Some(1024), ..udp() });
    on_deferred_that_cannot_cancel: deferred(small(), 3, Faults { can_cancel: false, ..Faults::default() });
}

/// Where there are names to connect to.
mod by_name {
    use super::*;
    #[test]
    fn reconnect_on_shm() {
        reconnect(named_shm(small()));
    }

    #[test]
    fn reconnect_on_fabric() {
        let lossy = FabricConfig::new(2).with(Fault::Loss, Ratio::new(1, 20));
        for network in [FabricConfig::new(1), lossy] {
            let world = on_fabric(small(), network, FabricOptions::default());
            reconnect((world, [0, 1].map(Fabric::address)));
        }
    }

    #[test]
    fn reconnect_on_udp() {
        let world = on_udp(small(), udp());
        let names = [&world.a, &world.b].map(|engine| engine.device().rnic().wire().address().to_string());
        reconnect((world, names));
    }

    #[test]
    fn reconnect_on_deferred() {
        reconnect(deferred_shm(small(), 4, Faults::default()));
    }
}
