//! An engine on a thread of its own, fed by the ports of others.

use std::time::Duration;

use verbring::{Clock, Notice, Opts, PushError, Region, RegionOptions, Rights, SizeClass, Slab, Sqe, Status, pinned};
use verbring_tests::{arena, shm_engine, small};

const WAIT: Duration = Duration::from_secs(30);

fn slab() -> Slab {
    let classes = [SizeClass { size: 4096, count: 32 }];
    Slab::new(arena(Slab::bytes(&classes)), &classes).unwrap()
}

/// Two threads with a port each put through one engine into another; every outcome comes to whom it belongs.
#[test]
fn two_ports() {
    let clock = Clock::start();
    let mut a = shm_engine(small());
    let mut b = shm_engine(small());
    let target = b.device().name().to_string();
    let region = std::sync::Arc::new(Region::shared(1 << 16, RegionOptions::default()).unwrap());
    let window = b.register_region(region, 1 << 16, Rights::all()).unwrap();
    let remote = b.remote(&window).unwrap();
    let ports = [a.add_port(Some(slab())).unwrap(), a.add_port(Some(slab())).unwrap()];
    let b = pinned::start(b, None, clock).unwrap();
    let a = pinned::start(a, None, clock).unwrap();
    let peer = a.call(move |engine, now| engine.connect(&target, now)).unwrap();
    let notice = std::iter::repeat_with(|| a.notice()).find_map(|notice| notice);
    assert!(matches!(notice, Some(Notice::Connected { .. })), "{notice:?}");
    let key = a.call(move |engine, _| engine.import(peer, &remote)).unwrap();
    let notice = std::iter::repeat_with(|| a.notice()).find_map(|notice| notice);
    assert_eq!(notice, Some(Notice::Imported { key }));
    std::thread::scope(|scope| {
        for (index, mut port) in ports.into_iter().enumerate() {
            let window = &window;
            scope.spawn(move || {
                let base = index as u64 * 32768;
                for round in 0..2000u64 {
                    let mut buf = port.alloc(1000).unwrap();
                    buf.fill(round as u8);
                    let opts = Opts { user_data: round, ..Opts::default() };
                    port.put(buf, key.at(base), opts).unwrap();
                    port.push(Sqe::fetch_add(key.at(base + 8000), 1).user_data(round)).unwrap();
                    let put = port.wait_reap(&clock, WAIT).unwrap();
                    assert_eq!((put.user_data, put.status), (round, Status::Success));
                    let add = port.wait_reap(&clock, WAIT).unwrap();
                    assert_eq!((add.user_data, add.value), (round, round));
                    let mut seen = [0; 1000];
                    window.read(base as usize, &mut seen);
                    assert!(seen.iter().all(|b| *b == round as u8));
                    port.free(put.buf.unwrap());
                }
                // What nobody reaps goes back by itself.
                let buf = port.alloc(10).unwrap();
                port.put(buf, key.at(base), Opts::default()).unwrap();
            });
        }
    });
    let mut a = a.stop().expect("the engine comes back");
    // What its thread had not taken yet.
    assert!(a.submit(clock.now()) <= 2);
    assert_eq!((a.submit(clock.now()), a.outstanding()), (0, 0));
    assert!(b.stop().is_some());
}

#[test]
fn a_core_that_is_not_there() {
    let engine = shm_engine(small());
    let error = pinned::start(engine, Some(1023), Clock::start()).err().expect("there are not so many");
    assert!(error.to_string().contains("1023"), "{error}");
}

/// A port outlives its engine, and says so.
#[test]
fn the_engine_goes_first() {
    let clock = Clock::start();
    let mut engine = shm_engine(small());
    let mut port = engine.add_port(Some(slab())).unwrap();
    let pinned = pinned::start(engine, None, clock).unwrap();
    port.push(Sqe::nop().user_data(1)).unwrap();
    assert_eq!(port.wait_reap(&clock, WAIT).unwrap().user_data, 1);
    drop(pinned);
    port.push(Sqe::nop().user_data(2)).unwrap();
    let done = port.wait_reap(&clock, WAIT).unwrap();
    assert_eq!((done.user_data, done.status), (2, Status::ConnectionLost));
    assert!(matches!(port.wait_reap(&clock, WAIT), Err(verbring::WaitError::EngineGone)));
    while port.push(Sqe::nop()).is_ok() {}
    assert_eq!(port.push(Sqe::nop()), Err(PushError::EngineGone));
}
