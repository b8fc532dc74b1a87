//! The shape of a low-latency server: one engine on a core of its own, application threads that only push and reap.

use std::time::Duration;

use verbring::{Arena, Clock, Config, Opts, Region, RegionOptions, Rights, SizeClass, Slab, Sqe, open_shm, pinned};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (clock, second) = (Clock::start(), Duration::from_secs(1));
    let mut store = open_shm("example-store", Config::default(), &[])?;
    let table = store.window(1 << 20, Rights::all())?;
    let remote = store.remote(&table)?;
    let store = pinned::start(store, None, clock)?;

    // The engine connects and imports, then moves to its thread; pin it to a core where there is one to spare.
    let mut engine = open_shm("example-app", Config::default(), &[])?;
    let peer = engine.connect_wait("example-store", &clock, second)?;
    let key = engine.import_wait(peer, &remote, &clock, second)?;
    let classes = [SizeClass { size: 256, count: 64 }];
    let mut ports = Vec::new();
    for _ in 0..2 {
        let region = Region::private(Slab::bytes(&classes), RegionOptions::default())?;
        ports.push(engine.add_port(Some(Slab::new(Arena::from_region(region), &classes)?))?);
    }
    let engine = pinned::start(engine, None, clock)?;

    std::thread::scope(|scope| {
        for (id, mut port) in ports.into_iter().enumerate() {
            scope.spawn(move || {
                for round in 0..1000u64 {
                    let mut buf = port.alloc(256).expect("a block");
                    buf.fill(round as u8);
                    let opts = Opts { user_data: round, silent: true, ..Opts::default() };
                    port.put(buf, key.at(id as u64 * 4096), opts).expect("room in the ring");
                    port.push(Sqe::fetch_add(key.at(8192), 1).user_data(round)).expect("room in the ring");
                    assert!(port.wait_reap(&clock, second).expect("a completion").is_success());
                }
            });
        }
    });
    println!("{} operations were counted", table.load(8192));
    assert_eq!(table.load(8192), 2000);
    drop((engine, store));
    Ok(())
}
