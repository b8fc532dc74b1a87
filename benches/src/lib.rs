//! The loops whose instructions are counted: each is called with everything made and warm.

mod nic;

pub use nic::*;

use std::hint::black_box;

use verbring::{Buf, Config, Device, Engine, Local as Range, Opts, RemoteKey, Rights, Signal, SizeClass, Slab, Sqe};
use verbring::{SqeFlags, Status, Target};
use verbring_slab::Arena;
use verbring_sys::lane::{LANE_BYTES, Lane};
use verbring_sys::local::Local;
use verbring_sys::{CpuNic, Deferred, Faults, Posted, Qp, Wc, Wr, WrOp};
use verbring_tests::{World, arena, deferred, local};

/// An engine with a peer, a window of the peer's, and local memory.
pub struct Ready<D: Device> {
    /// Both engines.
    pub world: World<D>,
    /// The peer's window.
    pub key: RemoteKey,
    /// Local bytes.
    pub range: Range,
}

fn ready_on<D: Device>(mut world: World<D>) -> Box<Ready<D>> {
    let (window, key) = world.export(1 << 16, Rights::all());
    let source = world.local_window(4096);
    // The window and the source stay registered; their handles are not needed.
    drop(window);
    let mut ready = Box::new(Ready { world, key, range: source.slice(0, 8) });
    // The code and the tables are touched once before anything is counted.
    for count in [1, 100] {
        batch(&mut ready, count, put);
        while ready.world.a.outstanding() != 0 {
            ready.world.a.poll(1);
        }
        reap(&mut ready);
    }
    ready
}

/// Over the local device, whose data path is that of shm.
pub fn ready() -> Box<Ready<Local>> {
    ready_on(local(Config::default()))
}

/// Over a device that does nothing before it is polled.
pub fn ready_deferred() -> Box<Ready<Deferred<Local>>> {
    ready_on(deferred(Config::default(), 1, Faults { lateness: 1, ..Faults::default() }))
}

/// With 100 puts in the submission ring.
pub fn pushed() -> Box<Ready<Local>> {
    let mut ready = ready();
    push(&mut ready, 100, put);
    ready
}

/// With 100 completions in the completion ring.
pub fn completed() -> Box<Ready<Local>> {
    let mut ready = pushed();
    ready.world.a.submit(1);
    ready
}

/// A slab of blocks of 4 KiB.
pub fn slab() -> Slab {
    let classes = [SizeClass { size: 4096, count: 128 }];
    let mut slab = Slab::new(arena(Slab::bytes(&classes)), &classes).expect("room for it");
    hold(&mut slab);
    slab
}

/// An 8-byte put from local memory.
#[inline(always)]
pub fn put(range: Range, target: Target, _i: u64) -> Sqe {
    Sqe::put(range, target)
}

/// The same, silent.
#[inline(always)]
pub fn put_silent(range: Range, target: Target, _i: u64) -> Sqe {
    Sqe::put(range, target).flags(SqeFlags::SILENT)
}

/// An 8-byte put out of the sqe.
#[inline(always)]
pub fn put_word(_range: Range, target: Target, i: u64) -> Sqe {
    Sqe::put_word(i, target)
}

/// An 8-byte get.
#[inline(always)]
pub fn get(range: Range, target: Target, _i: u64) -> Sqe {
    Sqe::get(range, target)
}

/// A fetching add.
#[inline(always)]
pub fn fetch_add(_range: Range, target: Target, i: u64) -> Sqe {
    Sqe::fetch_add(target, i)
}

/// An 8-byte put and a word behind it.
#[inline(always)]
pub fn put_signal(range: Range, target: Target, i: u64) -> Sqe {
    Sqe::put_signal(range, target, 8000, Signal::Store(i))
}

/// Nothing.
#[inline(always)]
pub fn nop(_range: Range, _target: Target, _i: u64) -> Sqe {
    Sqe::nop()
}

/// Pushes `count` operations to as many places.
#[inline(always)]
pub fn push<D: Device>(ready: &mut Ready<D>, count: u64, make: impl Fn(Range, Target, u64) -> Sqe) {
    for i in 0..count {
        let _ = ready.world.a.push(make(ready.range, ready.key.at(i * 64), i).user_data(i));
    }
}

/// Reaps what there is: the sum of its user_data.
#[inline(always)]
pub fn reap<D: Device>(ready: &mut Ready<D>) -> u64 {
    let mut sum = 0;
    while let Some(done) = ready.world.a.reap() {
        sum += done.user_data;
    }
    sum
}

/// Pushes `count` operations, submits once, polls once, and reaps what there is.
#[inline(always)]
pub fn batch<D: Device>(ready: &mut Ready<D>, count: u64, make: impl Fn(Range, Target, u64) -> Sqe) -> u64 {
    push(ready, count, make);
    let engine: &mut Engine<D> = &mut ready.world.a;
    engine.submit(1);
    engine.poll(1);
    reap(ready)
}

/// The same by `Port::batch` and `Port::reap_each`.
#[inline(always)]
pub fn whole_batch<D: Device>(ready: &mut Ready<D>, count: u64, make: impl Fn(Range, Target, u64) -> Sqe) -> u64 {
    let engine: &mut Engine<D> = &mut ready.world.a;
    let (range, key) = (ready.range, ready.key);
    engine.batch(|batch| {
        for i in 0..count {
            let _ = batch.push(make(range, key.at(i * 64), i).user_data(i));
        }
    });
    engine.submit(1);
    engine.poll(1);
    let mut sum = 0;
    engine.reap_each(|done| sum += done.user_data);
    sum
}

/// One operation past the rings.
#[inline(always)]
pub fn execute<D: Device>(ready: &mut Ready<D>, make: impl Fn(Range, Target, u64) -> Sqe) -> u64 {
    let done = ready.world.a.execute(&make(ready.range, ready.key.at(64), 1).user_data(1));
    done.map_or(0, |done| done.user_data)
}

/// A block from the slab, put, completed, and given back, `count` times.
#[inline(always)]
pub fn put_blocks(ready: &mut Ready<Local>, count: u64) -> u64 {
    let engine = &mut ready.world.a;
    let mut sum = 0;
    for i in 0..count {
        let Ok(buf) = engine.alloc(8) else { break };
        let _ = engine.put(buf, ready.key.at(i * 64), Opts { user_data: i, ..Opts::default() });
    }
    engine.submit(1);
    engine.poll(1);
    while let Some(done) = engine.reap() {
        sum += done.user_data;
        if let Some(buf) = done.buf {
            engine.free(buf);
        }
    }
    sum
}

/// A block and back at once, 64 times.
#[inline(always)]
pub fn pairs(slab: &mut Slab) {
    for _ in 0..64 {
        let Ok(buf) = slab.alloc(black_box(4096)) else { break };
        black_box(buf.as_ptr());
        slab.free(buf);
    }
}

/// 64 blocks, then back in the same order.
#[inline(always)]
pub fn hold(slab: &mut Slab) {
    let mut held = [const { None::<Buf> }; 64];
    for place in &mut held {
        *place = slab.alloc(black_box(4096)).ok();
    }
    for buf in held.into_iter().flatten() {
        slab.free(buf);
    }
}

/// The queue pairs of as many connections, each with a receive that waits: what a server polls.
pub struct Peers {
    nic: CpuNic,
    /// What the lanes and tables lie in, and where messages would go.
    _memory: (Arena, Arena, Box<[u8; 64]>),
}

/// So many connections.
pub fn peers(count: u32) -> Peers {
    let mut tables = arena(CpuNic::bytes(count, 1) + 4096);
    let mut lanes = arena(LANE_BYTES * 2 * count as usize + 4096);
    let mut room = Box::new([0; 64]);
    // SAFETY: the tables are kept beside it.
    let mut nic = unsafe { CpuNic::new(&mut tables, count, 1) }.expect("room for the tables");
    for link in 0..count {
        // SAFETY: the lanes are kept as long as the queue pairs, and nobody else has them; the room, too.
        unsafe {
            let [ours, theirs] = [(); 2].map(|()| Lane::create(lanes.block(LANE_BYTES, 64).expect("room for a lane")));
            nic.open(link, ours, theirs);
            let receive = Wr { op: WrOp::Recv, len: 64, local: room.as_mut_ptr(), ..Wr::EMPTY };
            assert_eq!(nic.post(nic.qp(link, 0), &receive), Posted::Pending);
        }
    }
    let mut peers = Peers { nic, _memory: (tables, lanes, room) };
    poll_peers(&mut peers);
    peers
}

/// One look at each of them.
#[inline(always)]
pub fn poll_peers(peers: &mut Peers) -> u64 {
    let mut wcs = [Wc::new(0, Qp(0), Status::Success); 16];
    peers.nic.poll(&mut wcs) as u64
}
