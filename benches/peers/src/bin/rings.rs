//! Entries of 64 bytes from one thread to another: through other people's rings, to an engine and back, to the kernel
//! and back; and blocks of the slab.

use std::hint::{black_box, spin_loop};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use io_uring::{IoUring, opcode};
use verbring::{
    Arena, Clock, Config, Port, Region, RegionOptions, ShmEngine, SizeClass, Slab, Sqe, SqeFlags, open_shm, pinned,
};
use verbring_peers::process::wait_for;
use verbring_peers::{Run, clocked, comment, fail, out, pin};

/// What goes through a ring: a number, and nothing else of interest.
type Entry = [u64; 8];
const BYTES: usize = size_of::<Entry>();
/// Of every ring.
const CAPACITY: usize = 1024;
/// Of chunks.
const CHUNK: usize = 32;
/// Entries that are timed as one.
const HUNDRED: u64 = 100;

fn main() {
    let run = Run::from_args();
    comment("spsc: one thread writes, another reads entries of 64 bytes; rings of 1024");
    rtrb_single(&run);
    rtrb_chunks(&run);
    heapless_single(&run);
    comment(
        "port_nop: a thread pushes nops and reaps a completion for each (b32: for each 32nd) from an engine on the",
    );
    comment("other core: the ring, the engine's look at each entry, and the completion ring");
    comment(
        "xcore: nops one by one, or 100 at a time, from push to the last completion; verbring-pinned: pinned::start,",
    );
    comment("which reads the clock each turn");
    ports(&run);
    uring(&run, "io_uring", Some(run.cores.1), ["xcore_1", "xcore_100"]);
    uring(&run, "io_uring-enter", None, ["nop_b1", "nop_b100"]);
    pin(run.cores.0);
    for size in [4096, 65536] {
        slab(&run, size);
    }
}

/// How many entries the other thread is to take, and has taken.
struct Order {
    wanted: AtomicU64,
    taken: AtomicU64,
    stop: AtomicBool,
}

/// Times `send`, which sends the entries of the numbers that it is told, until `receive` on the other core has taken
/// them: each call takes some, and says how many and what their numbers add up to.
fn stream(
    run: &Run,
    peer: &str,
    test: &str,
    mut send: impl FnMut(Range<u64>),
    mut receive: impl FnMut() -> (u64, u64) + Send,
) {
    let order = Order { wanted: AtomicU64::new(0), taken: AtomicU64::new(0), stop: AtomicBool::new(false) };
    let order = &order;
    thread::scope(|scope| {
        let other = scope.spawn(move || {
            pin(run.cores.1);
            let (mut taken, mut sum) = (0u64, 0u64);
            while !order.stop.load(Ordering::Relaxed) {
                let (more, numbers) = receive();
                if more == 0 {
                    continue;
                }
                taken += more;
                sum = sum.wrapping_add(numbers);
                // Told once: the writer polls that line.
                if taken == order.wanted.load(Ordering::Relaxed) {
                    order.taken.store(taken, Ordering::Release);
                }
            }
            sum
        });
        pin(run.cores.0);
        let mut sent = 0;
        let ns = run.ns(|chunks| {
            let from = sent;
            sent += chunks * CHUNK as u64;
            order.wanted.store(sent, Ordering::Release);
            clocked(1, || {
                send(from..sent);
                wait_for(&order.taken, sent);
            })
        });
        order.stop.store(true, Ordering::Relaxed);
        let sum = other.join().unwrap_or_else(|_| fail("the reading thread ended early"));
        let expected = u128::from(sent) * u128::from(sent - 1) / 2;
        if sum != expected as u64 {
            fail(format!("{peer} {test}: other entries arrived"));
        }
        out(peer, test, BYTES, CHUNK as f64 * 1000.0 / ns, "Mops/s");
    });
}

fn entry(number: u64) -> Entry {
    [number, 1, 2, 3, 4, 5, 6, 7]
}

fn rtrb_single(run: &Run) {
    let (mut to, mut from) = rtrb::RingBuffer::<Entry>::new(CAPACITY);
    let send = |numbers: Range<u64>| {
        for number in numbers {
            while to.push(entry(number)).is_err() {
                spin_loop();
            }
        }
    };
    let receive = || match from.pop() {
        Ok(entry) => (1, black_box(entry)[0]),
        Err(_) => (0, 0),
    };
    stream(run, "rtrb", "spsc", send, receive);
}

fn rtrb_chunks(run: &Run) {
    let (mut to, mut from) = rtrb::RingBuffer::<Entry>::new(CAPACITY);
    let send = |numbers: Range<u64>| {
        for first in numbers.step_by(CHUNK) {
            let chunk = loop {
                match to.write_chunk_uninit(CHUNK) {
                    Ok(chunk) => break chunk,
                    Err(_) => spin_loop(),
                }
            };
            chunk.fill_from_iter((first..first + CHUNK as u64).map(entry));
        }
    };
    let receive = || match from.read_chunk(CHUNK) {
        Ok(chunk) => (CHUNK as u64, chunk.into_iter().fold(0, |sum, entry| sum + black_box(entry)[0])),
        Err(_) => (0, 0),
    };
    stream(run, "rtrb", "spsc_b32", send, receive);
}

fn heapless_single(run: &Run) {
    // One place of a heapless queue stays empty.
    let mut queue = Box::new(heapless::spsc::Queue::<Entry, { CAPACITY + 1 }>::new());
    let (mut to, mut from) = queue.split();
    let send = |numbers: Range<u64>| {
        for number in numbers {
            while to.enqueue(entry(number)).is_err() {
                spin_loop();
            }
        }
    };
    let receive = || match from.dequeue() {
        Some(entry) => (1, black_box(entry)[0]),
        None => (0, 0),
    };
    stream(run, "heapless", "spsc", send, receive);
}

/// An engine without peers, and a port of it.
fn engine() -> (ShmEngine, Port) {
    let name = format!("rings-{}", std::process::id());
    let mut engine = open_shm(&name, Config::default(), &[]).unwrap_or_else(|error| fail(error));
    let port = engine.add_port(None).unwrap_or_else(|error| fail(error));
    (engine, port)
}

fn ports(run: &Run) {
    let (mut engine, mut port) = engine();
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(move || {
            pin(run.cores.1);
            while !stop.load(Ordering::Relaxed) {
                // Nothing has a deadline, so the time does not matter.
                engine.submit(1);
                engine.poll(1);
            }
        });
        pin(run.cores.0);
        for (test, every) in [("port_nop", 1), ("port_nop_b32", CHUNK as u64)] {
            let ns = run.ns(|chunks| clocked(1, || nops(&mut port, chunks * CHUNK as u64, every)));
            out("verbring", test, BYTES, CHUNK as f64 * 1000.0 / ns, "Mops/s");
        }
        there_and_back(run, "verbring", &mut port);
        stop.store(true, Ordering::Relaxed);
    });

    let (engine, mut port) = self::engine();
    let pinned = pinned::start(engine, Some(run.cores.1), Clock::start()).unwrap_or_else(|error| fail(error));
    there_and_back(run, "verbring-pinned", &mut port);
    drop(pinned);
}

/// Streams nops through an engine. One of `every` has a completion.
fn nops(port: &mut Port, count: u64, every: u64) {
    let (mut pushed, mut reaped) = (0, 0);
    while reaped < count / every {
        for _ in 0..CHUNK {
            let is_told = (pushed + 1) % every == 0;
            let flags = if is_told { SqeFlags::empty() } else { SqeFlags::SILENT };
            if pushed == count || port.push(Sqe::nop().user_data(pushed).flags(flags)).is_err() {
                break;
            }
            pushed += 1;
        }
        while let Some(done) = port.reap() {
            reaped += 1;
            assert_eq!(done.user_data + 1, reaped * every, "a completion of another entry");
        }
    }
}

fn there_and_back(run: &Run, peer: &str, port: &mut Port) {
    for (test, batch) in [("xcore_1", 1), ("xcore_100", HUNDRED)] {
        let ns = run.ns(|count| {
            clocked(count, || {
                for i in 0..batch {
                    port.push(Sqe::nop().user_data(i)).expect("room in the submission ring");
                }
                let mut reaped = 0;
                while reaped < batch {
                    let Some(done) = port.reap() else { continue };
                    assert_eq!(done.user_data, reaped, "a completion of another entry");
                    reaped += 1;
                }
            })
        });
        out(peer, test, BYTES, ns / batch as f64, "ns");
    }
}

/// Nops to the kernel and back: by a system call, or through a kernel thread on `polled_by`.
fn uring(run: &Run, peer: &str, polled_by: Option<usize>, tests: [&str; 2]) {
    let mut builder = IoUring::builder();
    if let Some(core) = polled_by {
        // It goes to sleep after so many milliseconds.
        builder.setup_sqpoll(2000).setup_sqpoll_cpu(core as u32);
    }
    let mut ring: IoUring = match builder.build(256) {
        Ok(ring) => ring,
        Err(error) => return comment(format_args!("{peer}: {error}")),
    };
    for (test, batch) in tests.into_iter().zip([1, HUNDRED]) {
        let mut error = None;
        let ns = run.ns(|count| {
            clocked(count, || {
                let mut queue = ring.submission();
                for i in 0..batch {
                    // SAFETY: a nop names no memory.
                    let pushed = unsafe { queue.push(&opcode::Nop::new().build().user_data(i)) };
                    pushed.expect("room in the submission ring");
                }
                drop(queue);
                // No system call while the kernel's thread is awake.
                let submitted = if polled_by.is_some() { ring.submit() } else { ring.submit_and_wait(batch as usize) };
                if let Err(why) = submitted {
                    error = Some(why);
                    return;
                }
                let mut reaped = 0;
                while reaped < batch {
                    for done in ring.completion() {
                        assert_eq!((done.user_data(), done.result()), (reaped, 0), "a completion of another entry");
                        reaped += 1;
                    }
                }
            })
        });
        match error {
            Some(error) => return comment(format_args!("{peer}: {error}")),
            None => out(peer, test, BYTES, ns / batch as f64, "ns"),
        }
    }
}

/// A block and back at once; 64 blocks, and back in the same order.
fn slab(run: &Run, size: usize) {
    let classes = [SizeClass { size: size as u32, count: 128 }];
    let region = Region::private(Slab::bytes(&classes), RegionOptions::default()).unwrap_or_else(|error| fail(error));
    let mut slab = Slab::new(Arena::from_region(region), &classes).unwrap_or_else(|error| fail(error));
    let take = |slab: &mut Slab| {
        let mut buf = slab.alloc(black_box(size)).expect("a free block");
        buf[0] = 1;
        // The pointer alone, as with the other allocators: a block that had to be in memory would be waited for.
        black_box(buf.as_ptr());
        buf
    };
    let ns = run.ns(|count| {
        clocked(count, || {
            let buf = take(&mut slab);
            slab.free(buf);
        })
    });
    out("verbring", "pair", size, ns, "ns");
    let mut held = Vec::with_capacity(64);
    let ns = run.ns(|count| {
        clocked(count, || {
            for _ in 0..64 {
                held.push(take(&mut slab));
            }
            for buf in held.drain(..) {
                slab.free(buf);
            }
        })
    });
    out("verbring", "hold64", size, ns / 64.0, "ns");
}
