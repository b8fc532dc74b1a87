//! The loops whose instructions are counted: each is one function, called with everything made and warm.

use verbring::{Device, Engine, Local as Range, RemoteKey, Rights, Sqe, SqeFlags, Target};
use verbring_sys::local::Local;
use verbring_tests::{World, local};

/// An engine with a peer, a window of the peer's, and local memory.
pub struct Ready<D: Device> {
    /// Both engines.
    pub world: World<D>,
    /// The peer's window.
    pub key: RemoteKey,
    /// Local bytes.
    pub range: Range,
}

/// Over the local device, whose data path is that of shm.
pub fn ready() -> Box<Ready<Local>> {
    let mut world = local(verbring::Config::default());
    let (window, key) = world.export(1 << 16, Rights::all());
    let source = world.local_window(4096);
    // The window and the source stay registered; their handles are not needed.
    drop(window);
    let mut ready = Box::new(Ready { world, key, range: source.slice(0, 8) });
    // The code and the tables are touched once before anything is counted.
    for count in [1, 100] {
        batch(&mut ready, count, put);
    }
    ready
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

/// Pushes `count` operations to as many places, submits once, polls once, and reaps what there is: how many.
#[inline(always)]
pub fn batch<D: Device>(ready: &mut Ready<D>, count: u64, make: impl Fn(Range, Target, u64) -> Sqe) -> u64 {
    let engine: &mut Engine<D> = &mut ready.world.a;
    for i in 0..count {
        let _ = engine.push(make(ready.range, ready.key.at(i * 64), i).user_data(i));
    }
    engine.submit(1);
    engine.poll(1);
    let mut sum = 0;
    while let Some(done) = engine.reap() {
        sum += done.user_data;
    }
    sum
}

/// One operation past the rings.
#[inline(always)]
pub fn alone<D: Device>(ready: &mut Ready<D>, make: impl Fn(Range, Target, u64) -> Sqe) -> u64 {
    let engine: &mut Engine<D> = &mut ready.world.a;
    let done = engine.execute(&make(ready.range, ready.key.at(64), 1).user_data(1));
    done.map_or(0, |done| done.user_data)
}
