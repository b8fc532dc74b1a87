//! Between `push` and `reap` nothing is allocated and no system call is made; each proof has one that must fail.
//! (That nothing can panic there is proven by tests/freestanding.)

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use verbring::{Clock, Device, Opts, Rights, Signal, Sqe, SqeFlags};
use verbring_sys::Faults;
use verbring_tests::{World, deferred, fork, local, shm, small};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts, for each thread apart.
struct Counting;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Every operation and flag, thousands of times, with what is pushed and what is reaped; `slip` is called once inside.
fn hot<D: Device>(world: &mut World<D>, rounds: u64, slip: fn()) -> u64 {
    let (window, key) = world.export(1 << 16, Rights::all());
    let local = world.local_window(1 << 16);
    let clock = Clock::start();
    let mut ended = 0;
    let warm_up = 200;
    let mut counted = 0;
    for round in 0..warm_up + rounds {
        if round == warm_up {
            counted = ALLOCATIONS.get();
        }
        let class = (round % 2) as u8;
        let opts = Opts { class, ..Opts::default() };
        let a = &mut world.a;
        let full = "64 entries are enough";
        a.push(Sqe::put(local.slice(0, 8), key.at(8))).expect(full);
        a.push(Sqe::put(local.slice(0, 30_000), key.at(8)).class(class).flags(SqeFlags::SILENT)).expect(full);
        a.push(Sqe::put_word(round, key.at(0)).flags(SqeFlags::LINK)).expect(full);
        a.push(Sqe::fetch_add(key.at(0), 1)).expect(full);
        a.push(Sqe::compare_swap(key.at(0), 1, 2).flags(SqeFlags::FENCE)).expect(full);
        a.push(Sqe::put_signal(local.slice(0, 64), key.at(64), 100, Signal::Add(1)).class(class)).expect(full);
        a.push(Sqe::put_word(1, key.at(1 << 20)).deadline(clock.now() + 1_000_000_000)).expect(full);
        a.push(Sqe::flush(world.ab).class(class)).expect(full);
        let buf = a.alloc(3000).expect("a block");
        a.get(buf, key.at(0), opts).expect(full);
        let room = world.b.alloc(64).expect("a block");
        world.b.recv(room, world.ba, opts).expect(full);
        let message = a.alloc(64).expect("a block");
        a.send(message, world.ab, 1, opts).expect(full);
        if round == warm_up + rounds / 2 {
            slip();
        }
        for _ in 0..1000 {
            let now = clock.now();
            for engine in [&mut world.a, &mut world.b] {
                engine.submit(now);
                engine.poll(now);
                while let Some(done) = engine.reap() {
                    ended += 1;
                    done.buf.into_iter().for_each(|buf| engine.free(buf));
                }
            }
            if world.a.outstanding() + world.b.outstanding() == 0 {
                break;
            }
        }
    }
    assert!(ended >= rounds * 10 && window.load(800) > 0);
    ALLOCATIONS.get() - counted
}

fn nothing() {}

fn allocate() {
    std::hint::black_box(Box::new(1));
}

fn ask_the_kernel() {
    // SAFETY: a call without arguments.
    unsafe { libc::syscall(libc::SYS_getppid) };
}

#[test]
fn no_allocation() {
    assert_eq!(hot(&mut local(small()), 3000, nothing), 0);
    assert_eq!(hot(&mut shm(small()), 3000, nothing), 0);
    assert_eq!(hot(&mut deferred(small(), 4, Faults::default()), 500, nothing), 0);
    assert_eq!(hot(&mut local(small()), 300, allocate), 1, "one that was put in is seen");
}

/// From now on any system call of this thread but exit kills the process.
fn no_more_system_calls() {
    let arch = TargetArch::try_from(std::env::consts::ARCH).expect("an architecture that seccomp knows");
    let rules = [(libc::SYS_exit_group, vec![])].into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch).expect("a filter");
    let program: BpfProgram = filter.try_into().expect("a program");
    seccompiler::apply_filter(&program).expect("seccomp");
}

fn under_seccomp(slip: fn()) -> i32 {
    let child = fork(|| {
        let mut world = shm(small());
        // Warm: every page was touched, and the clock's page is mapped.
        hot(&mut world, 100, nothing);
        let (window, key) = world.export(1 << 16, Rights::all());
        let local = world.local_window(1 << 16);
        let clock = Clock::start();
        no_more_system_calls();
        for round in 0..3000u64 {
            let now = clock.now();
            let a = &mut world.a;
            let _ = a.push(Sqe::put(local.slice(0, 4096), key.at(0)).deadline(now + 1_000_000));
            let _ = a.push(Sqe::fetch_add(key.at(8), round).flags(SqeFlags::FENCE));
            let _ = a.push(Sqe::put_signal(local.slice(0, 64), key.at(64), 3, Signal::Store(round)));
            if let Ok(buf) = a.alloc(200) {
                let _ = a.get(buf, key.at(0), Opts::default());
            }
            if round == 1500 {
                slip();
            }
            a.submit(now);
            a.poll(now);
            while let Some(done) = a.reap() {
                done.buf.into_iter().for_each(|buf| a.free(buf));
            }
        }
        let code = if window.load(24) == 2999 { 0 } else { 1 };
        // SAFETY: ends the process by the one call that is left.
        unsafe { libc::_exit(code) }
    });
    loop {
        if let Some(code) = child.try_wait() {
            return code;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn no_system_call() {
    assert_eq!(under_seccomp(nothing), 0);
    assert_eq!(under_seccomp(ask_the_kernel), -libc::SIGSYS, "one that was put in kills");
}
