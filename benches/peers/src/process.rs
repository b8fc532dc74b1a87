//! A second process that does what the first one asks, over shared memory; neither outlives the other or hangs.

use std::hint::spin_loop;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use verbring_slab::{Pages, Region, RegionOptions};
use verbring_tests::{Child, fork};

use crate::{PATIENCE, fail};

/// A request: what, and five numbers.
pub type Request = [u64; 6];

extern "C" fn on_alarm(_: libc::c_int) {
    end_in_error(b"error: no result for 60 s; is another process busy on these cores?\n");
}

extern "C" fn on_child(_: libc::c_int) {
    end_in_error(b"error: the other process ended early\n");
}

/// What a signal handler may do.
fn end_in_error(why: &[u8]) -> ! {
    // SAFETY: both calls are safe in a signal handler; the bytes are static.
    unsafe {
        libc::write(2, why.as_ptr().cast(), why.len());
        libc::_exit(1)
    }
}

fn on_signal(signal: libc::c_int, handler: libc::sighandler_t) {
    // SAFETY: an all-zero sigaction is one; the handlers do what a handler may.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_NOCLDSTOP;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
}

/// From now on this process ends when nothing comes of it, or when a process that it started ends.
pub fn guard() {
    on_signal(libc::SIGALRM, on_alarm as *const () as libc::sighandler_t);
    on_signal(libc::SIGCHLD, on_child as *const () as libc::sighandler_t);
    be_patient();
}

/// Another 60 s.
pub fn be_patient() {
    // SAFETY: a system call on a number.
    unsafe { libc::alarm(PATIENCE) };
}

/// A process that this one started. It ends with this one, or when it is dropped.
pub struct Partner {
    _child: Child,
}

impl Partner {
    /// Runs `body` in a process of its own. Called before there are threads.
    pub fn start(body: impl FnOnce()) -> Partner {
        // SAFETY: a system call.
        let parent = unsafe { libc::getpid() };
        let child = fork(|| {
            on_signal(libc::SIGCHLD, libc::SIG_DFL);
            // SAFETY: system calls on numbers. The parent may be gone before the first one.
            let is_alone =
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 || libc::getppid() != parent };
            if is_alone {
                return 1;
            }
            body();
            0
        });
        Partner { _child: child }
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        on_signal(libc::SIGCHLD, libc::SIG_DFL);
    }
}

/// A pipe that one process waits at without taking any time of a core.
pub struct Gate {
    read: OwnedFd,
    write: OwnedFd,
}

impl Gate {
    /// A closed one, for both processes.
    pub fn new() -> Gate {
        let mut fds = [0; 2];
        // SAFETY: room for two descriptors, which are nobody else's.
        unsafe {
            if libc::pipe(fds.as_mut_ptr()) != 0 {
                fail(std::io::Error::last_os_error());
            }
            Gate { read: OwnedFd::from_raw_fd(fds[0]), write: OwnedFd::from_raw_fd(fds[1]) }
        }
    }

    /// Lets the other process go on.
    pub fn open(&self) {
        // SAFETY: an open descriptor and one byte.
        unsafe { libc::write(self.write.as_raw_fd(), [0u8].as_ptr().cast(), 1) };
    }

    /// Waits until it is open.
    pub fn wait(&self) {
        // SAFETY: an open descriptor and room for one byte.
        unsafe { libc::read(self.read.as_raw_fd(), [0u8].as_mut_ptr().cast(), 1) };
    }
}

impl Default for Gate {
    fn default() -> Gate {
        Gate::new()
    }
}

/// A word in lines of its own: two, since they are fetched in pairs.
#[repr(C, align(128))]
pub struct Line(pub AtomicU64);

/// Two words of one line.
#[repr(C, align(128))]
pub struct Both(pub AtomicU64, pub AtomicU64);

/// What two processes share beside what is measured.
#[repr(C)]
pub struct Board {
    asked: Line,
    started: Line,
    finished: Line,
    request: [AtomicU64; 6],
    answer: AtomicU64,
    /// Ends a request that has no end of its own.
    pub stop: Line,
    /// How far the two ends have come in meeting each other.
    pub steps: [Line; 2],
    /// What lets the other one in.
    pub remotes: [[AtomicU64; 8]; 2],
    /// To be passed to and fro in one line.
    pub both: Both,
    /// To be passed to and fro.
    pub flags: [Line; 4],
}

impl Board {
    /// For this process and those that it starts.
    pub fn new() -> &'static Board {
        let options = RegionOptions { largest: Pages::Small, ..RegionOptions::default() };
        let region = Region::shared(size_of::<Board>(), options).unwrap_or_else(|error| fail(error));
        let base = region.base().cast::<Board>();
        // It is there until the process ends.
        mem::forget(region);
        // SAFETY: the mapping is large enough, aligned to a page, zeroed, stays, and is reached by atomics only.
        unsafe { base.as_ref() }
    }

    /// Asks, and waits until the other process is about to do it.
    pub fn begin(&self, request: Request) {
        for (to, word) in self.request.iter().zip(request) {
            to.store(word, Ordering::Relaxed);
        }
        let number = self.asked.0.load(Ordering::Relaxed) + 1;
        self.asked.0.store(number, Ordering::Release);
        wait_for(&self.started.0, number);
    }

    /// Waits until it is done: the answer.
    pub fn end(&self) -> u64 {
        wait_for(&self.finished.0, self.asked.0.load(Ordering::Relaxed));
        self.answer.load(Ordering::Relaxed)
    }

    /// Asks, and waits until it is done.
    pub fn ask(&self, request: Request) -> u64 {
        self.begin(request);
        self.end()
    }

    /// Does what is asked until the process is ended from outside.
    pub fn serve(&self, mut answer: impl FnMut(Request) -> u64) {
        for number in 1.. {
            wait_for(&self.asked.0, number);
            let request = self.request.each_ref().map(|word| word.load(Ordering::Relaxed));
            self.started.0.store(number, Ordering::Release);
            self.answer.store(answer(request), Ordering::Relaxed);
            self.finished.0.store(number, Ordering::Release);
        }
    }
}

/// Polls until a counter has reached `number`.
pub fn wait_for(counter: &AtomicU64, number: u64) {
    while counter.load(Ordering::Acquire) < number {
        spin_loop();
    }
}
