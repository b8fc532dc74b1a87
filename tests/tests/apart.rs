//! Engines share nothing: while one works, every page that another was made of can be read-only. What it writes in all
//! cases is its own: tables, rings, device, windows, heap, and no static of the program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use verbring::{Config, Device, Opts, Rights, Sqe, SqeFlags};
use verbring_tests::{Child, World, fork, local, shm, small};

/// Heap of an engine's thread, so that no page is of two.
const POOL: usize = 1 << 30;
/// Heap of the first, then of the second.
static POOLS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
static USED: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

thread_local! {
    /// Whose heap this thread allocates from: 0 and 1 for the engines, else nobody's.
    static OWNER: Cell<usize> = const { Cell::new(2) };
}

struct Apart;

// SAFETY: blocks of a pool are handed out once, below its end; all else is the system's.
unsafe impl GlobalAlloc for Apart {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let owner = OWNER.get();
        let Some(pool) = POOLS.get(owner).map(|pool| pool.load(Ordering::Relaxed)).filter(|pool| *pool != 0) else {
            // SAFETY: the caller's promise.
            return unsafe { System.alloc(layout) };
        };
        let place = |used: usize| (used.next_multiple_of(layout.align()), layout.size());
        let taken = USED[owner].fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            let (at, size) = place(used);
            (at + size <= POOL).then_some(at + size)
        });
        taken.map_or(std::ptr::null_mut(), |used| (pool + place(used).0) as *mut u8)
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let is_in = |pool: &AtomicUsize| (block as usize).wrapping_sub(pool.load(Ordering::Relaxed)) < POOL;
        if !POOLS.iter().any(is_in) {
            // SAFETY: the caller's promise.
            unsafe { System.dealloc(block, layout) }
        }
    }
}

#[global_allocator]
static HEAP: Apart = Apart;

fn map(bytes: usize) -> usize {
    let (rights, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a fresh mapping.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, flags, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    base as usize
}

/// Beginning and end of what this process may write, without stacks.
fn writable() -> BTreeSet<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the mappings");
    let lines = maps.lines().filter(|line| line.contains(" rw-") && !line.contains("[stack"));
    let ranges = lines.filter_map(|line| line.split_once(' ')?.0.split_once('-'));
    ranges.map(|(from, to)| [from, to].map(|hex| usize::from_str_radix(hex, 16).expect("an address")).into()).collect()
}

fn protect(&(from, to): &(usize, usize), rights: i32) {
    // SAFETY: a mapping of this process; who writes to it meanwhile is what the test is about.
    assert_eq!(unsafe { libc::mprotect(from as *mut _, to - from, rights) }, 0);
}

/// Where the threads meet: a page of its own.
struct Meeting {
    /// The step that is due.
    step: AtomicU64,
    done: AtomicU64,
}

impl Meeting {
    fn wait(what: &AtomicU64, value: u64) {
        let start = Instant::now();
        while what.load(Ordering::Acquire) != value {
            assert!(start.elapsed() < Duration::from_secs(30), "the other thread does not come");
            std::thread::yield_now();
        }
    }

    fn go(&self, step: u64) {
        self.step.store(step, Ordering::Release);
        Meeting::wait(&self.done, step);
    }
}

/// Some of everything.
fn work<D: Device>(world: &mut World<D>, key: verbring::RemoteKey, source: &verbring::Window) {
    let mut count = 0;
    for i in 0..16u64 {
        let (at, range) = (key.at(i * 512), source.slice(i * 512, 300));
        let flags = if i % 3 == 0 { SqeFlags::FENCE } else { SqeFlags::empty() };
        let entries = [
            Sqe::put(range, at).flags(flags),
            Sqe::get(range, at).class(1),
            Sqe::put_word(i, at).deadline(1 << 50),
            Sqe::fetch_add(at, 1),
            Sqe::put_signal(range, at, 8000, verbring::Signal::Add(1)),
        ];
        for sqe in entries {
            world.a.push(sqe).expect("room");
            count += 1;
        }
        let mut buf = world.a.alloc(100).expect("a block");
        buf.fill(i as u8);
        world.a.put(buf, at, Opts::default()).expect("room");
        count += 1;
        world.step();
    }
    while count != 0 {
        world.step();
        while world.a.reap().is_some() {
            count -= 1;
        }
    }
}

/// Two worlds of two engines each; each works while the other's memory and the program's statics are read-only.
fn two_worlds<D: Device + 'static>(make: fn(Config) -> World<D>, is_shared: bool) -> i32 {
    // SAFETY: a page, zeroed.
    let meeting: &'static Meeting = unsafe { &*(map(4096) as *const Meeting) };
    let mut made = [BTreeSet::new(), BTreeSet::new()];
    for pool in &POOLS {
        pool.store(map(POOL), Ordering::Relaxed);
    }
    for owner in 0..2u64 {
        let before = writable();
        std::thread::Builder::new()
            .stack_size(1 << 20)
            .spawn(move || {
                OWNER.set(owner as usize);
                let mut world = make(small());
                let (_window, key) = world.export(1 << 16, Rights::all());
                let source = world.local_window(1 << 16);
                // What is made once is made now.
                work(&mut world, key, &source);
                meeting.done.store(1 + owner, Ordering::Release);
                Meeting::wait(&meeting.step, 3 + owner);
                work(&mut world, key, &source);
                if is_shared {
                    // What must be noticed: a word of the other's heap.
                    let other = POOLS[1 - owner as usize].load(Ordering::Relaxed);
                    // SAFETY: the first word of a pool.
                    unsafe { AtomicU64::from_ptr(other as *mut u64) }.fetch_add(1, Ordering::Relaxed);
                }
                meeting.done.store(3 + owner, Ordering::Release);
                loop {
                    std::thread::park();
                }
            })
            .expect("a thread");
        Meeting::wait(&meeting.done, 1 + owner);
        let stack = 1 << 20;
        let fresh = writable().difference(&before).filter(|(from, to)| to - from != stack).copied().collect();
        made[owner as usize] = fresh;
    }
    let program = std::env::current_exe().expect("this program");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the mappings");
    let is_static = |line: &&str| line.contains(" rw-") && line.ends_with(program.to_str().expect("a path"));
    let starts =
        maps.lines().filter(is_static).filter_map(|line| usize::from_str_radix(line.split_once('-')?.0, 16).ok());
    let starts: BTreeSet<usize> = starts.collect();
    let statics: Vec<_> = writable().into_iter().filter(|(from, _)| starts.contains(from)).collect();
    assert!(!statics.is_empty());
    for owner in 0..2 {
        let pool = POOLS[1 - owner].load(Ordering::Relaxed);
        let mut theirs = vec![(pool, pool + POOL)];
        theirs.extend(made[1 - owner].iter().copied());
        theirs.extend(statics.iter().copied());
        theirs.iter().for_each(|range| protect(range, libc::PROT_READ));
        meeting.go(3 + owner as u64);
        theirs.iter().for_each(|range| protect(range, libc::PROT_READ | libc::PROT_WRITE));
    }
    0
}

fn end(child: Child) -> i32 {
    let start = Instant::now();
    loop {
        if let Some(code) = child.try_wait() {
            return code;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "the child does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn no_page_is_written_by_two_engines() {
    assert_eq!(end(fork(|| two_worlds(local, false))), 0);
    assert_eq!(end(fork(|| two_worlds(shm, false))), 0);
    // A word of another's memory is noticed.
    assert_eq!(end(fork(|| two_worlds(local, true))), -libc::SIGSEGV);
}
