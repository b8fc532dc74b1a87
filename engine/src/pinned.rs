//! An engine on a core of its own, fed by the ports of other threads.
//!
//! ```no_run
//! # use verbring::*;
//! # use std::time::Duration;
//! let mut engine = open_shm("server", Config::default(), &[])?;
//! let mut port = engine.add_port(None)?;
//! let pinned = pinned::start(engine, Some(1), Clock::start())?;
//! port.push(Sqe::nop().user_data(7)).unwrap();
//! let done = port.wait_reap(&Clock::start(), Duration::from_secs(1))?;
//! assert_eq!(done.user_data, 7);
//! let _engine = pinned.stop();
//! # Ok::<(), WaitError>(())
//! ```

use std::boxed::Box;
use std::format;
use std::string::ToString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use verbring_sys::{Device, cpu};

use crate::engine::Engine;
use crate::notice::Notice;
use crate::wait::{Clock, Turns, WaitError};

type Call<D> = Box<dyn FnOnce(&mut Engine<D>, u64) + Send>;

/// Turns between two looks at the control side while there is work: a system call.
const CONTROL_EVERY: u32 = 4096;

/// A running engine.
pub struct Pinned<D: Device> {
    thread: Option<JoinHandle<Engine<D>>>,
    calls: Sender<Call<D>>,
    shared: Arc<Shared>,
    notices: Receiver<Notice>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Calls that wait: a plain load tells the loop that there are none.
    waiting: AtomicU32,
}

/// Runs an engine on a thread, pinned to `cpu` if one is given. Without a core of its own it lets others run when it has
/// nothing to do.
pub fn start<D>(engine: Engine<D>, cpu: Option<usize>, clock: Clock) -> Result<Pinned<D>, WaitError>
where
    D: Device + Send + 'static,
{
    let (calls, incoming) = channel();
    let (tell, notices) = channel();
    let (ready, is_ready) = sync_channel(1);
    let shared = Arc::new(Shared::default());
    let of_thread = shared.clone();
    // Asked for here, by an unpinned thread: a pinned one sees only its own core.
    cpu::available();
    let thread = Builder::new().name("verbring-engine".to_string()).spawn(move || {
        let pinned = cpu.map_or(Ok(()), cpu::pin);
        let is_pinned = pinned.is_ok();
        let _ = ready.send(pinned);
        if is_pinned { run(engine, cpu.is_some(), clock, &of_thread, &incoming, &tell) } else { engine }
    });
    let thread = thread.map_err(|e| WaitError::System(format!("the engine's thread could not be started: {e}")))?;
    match is_ready.recv() {
        Ok(Ok(())) => Ok(Pinned { thread: Some(thread), calls, shared, notices }),
        Ok(Err(error)) => Err(WaitError::System(error.to_string())),
        Err(_) => Err(WaitError::System("the engine's thread ended before it began".to_string())),
    }
}

fn run<D: Device>(
    mut engine: Engine<D>,
    owns_core: bool,
    clock: Clock,
    shared: &Shared,
    calls: &Receiver<Call<D>>,
    notices: &Sender<Notice>,
) -> Engine<D> {
    let mut turns = Turns::new();
    let mut count = 0u32;
    while !shared.stop.load(Ordering::Relaxed) {
        let now = clock.now();
        let work = engine.submit(now) + engine.poll(now);
        count = count.wrapping_add(1);
        let mut look = count.is_multiple_of(CONTROL_EVERY);
        if work != 0 {
            turns.reset();
        } else if !owns_core {
            look |= turns.pass();
        }
        if look || shared.waiting.load(Ordering::Relaxed) != 0 {
            while let Some(notice) = engine.control(now) {
                let _ = notices.send(notice);
            }
            while let Ok(call) = calls.try_recv() {
                shared.waiting.fetch_sub(1, Ordering::Relaxed);
                call(&mut engine, now);
            }
        }
    }
    engine
}

impl<D: Device + Send + 'static> Pinned<D> {
    /// Runs `call` on the engine's thread, between two turns, and waits for its answer: for connecting, registering and
    /// importing. It gets the engine's time.
    ///
    /// # Panics
    /// If an earlier call panicked on the engine's thread.
    pub fn call<T: Send + 'static>(&self, call: impl FnOnce(&mut Engine<D>, u64) -> T + Send + 'static) -> T {
        let (answer, wait) = sync_channel(1);
        let call: Call<D> = Box::new(move |engine, now| {
            let _ = answer.send(call(engine, now));
        });
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        let sent = self.calls.send(call).is_ok();
        match wait.recv() {
            Ok(answer) if sent => answer,
            _ => panic!("the engine's thread is gone: a call panicked on it"),
        }
    }

    /// The next notice that the engine's control work found.
    pub fn notice(&self) -> Option<Notice> {
        self.notices.try_recv().ok()
    }

    /// Stops the thread and gives the engine back; none if a call panicked on it.
    pub fn stop(mut self) -> Option<Engine<D>> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()
    }
}

impl<D: Device> Drop for Pinned<D> {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
