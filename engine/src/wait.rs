//! Conveniences where there is an operating system: a clock, engines that make their own memory, and calls that poll
//! until something happened.

use core::fmt;
use std::string::String;
use std::thread;
use std::time::{Duration, Instant};

use verbring_slab::{Arena, Region, RegionError, RegionOptions, SizeClass, Slab, SlabError};
#[cfg(feature = "shm")]
use verbring_sys::shm::{Shm, ShmOptions};
use verbring_sys::{Device, DeviceError, Status};

use crate::config::{Config, EngineError};
use crate::engine::Engine;
use crate::key::{PeerId, RemoteKey};
use crate::notice::Notice;
use crate::port::{Completion, Port};
use crate::remote::Remote;
use crate::{AccessError, ImportState, PeerState};

/// Empty turns after which a waiting thread lets others run: it may not have the core for itself.
const PATIENCE: u32 = 2000;
/// Turns between two looks at the control side, which costs a system call.
const CONTROL_EVERY: u32 = 256;

/// The monotonic clock of the system, from when it was made. Read through the vDSO: no system call.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that starts at 0.
    pub fn start() -> Clock {
        Clock(Instant::now())
    }

    /// Nanoseconds.
    #[inline]
    pub fn now(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}

/// Why waiting ended without what was waited for, or an engine could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum WaitError {
    /// It did not happen in time.
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// The connection was lost, or never made.
    Lost(DeviceError),
    /// The import was refused.
    Refused(Status),
    /// A call failed.
    Engine(EngineError),
    /// A call about memory failed.
    Access(AccessError),
    /// No memory for the engine.
    Region(RegionError),
    /// The slab's classes are wrong.
    Slab(SlabError),
    /// The engine of a port is gone.
    EngineGone,
    /// What the kernel could not do.
    System(String),
}

impl fmt::Display for WaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitError::TimedOut { what, after } => {
                write!(f, "{what} did not happen within {after:?}; does the other side poll and call control?")
            }
            WaitError::Lost(cause) => cause.fmt(f),
            WaitError::Refused(status) => status.fmt(f),
            WaitError::Engine(error) => error.fmt(f),
            WaitError::Access(error) => error.fmt(f),
            WaitError::Region(error) => error.fmt(f),
            WaitError::Slab(error) => error.fmt(f),
            WaitError::EngineGone => f.write_str("the engine of this port is gone; start another"),
            WaitError::System(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for WaitError {}

macro_rules! from {
    ($($error:ty => $variant:ident;)+) => {$(
        impl From<$error> for WaitError {
            fn from(error: $error) -> WaitError {
                WaitError::$variant(error)
            }
        }
    )+};
}
from! {
    EngineError => Engine;
    AccessError => Access;
    RegionError => Region;
    SlabError => Slab;
}

fn random<const N: usize>() -> Result<[u8; N], WaitError> {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        match rustix::rand::getrandom(&mut bytes[have..], rustix::rand::GetRandomFlags::empty()) {
            Ok(more) => have += more,
            Err(errno) => return Err(WaitError::System(std::format!("getrandom failed: {errno}"))),
        }
    }
    Ok(bytes)
}

/// A slab in memory of its own, for a port that is added to an engine.
pub(crate) fn slab(classes: &[SizeClass], pages: RegionOptions) -> Result<Option<Slab>, WaitError> {
    if classes.is_empty() {
        return Ok(None);
    }
    let region = Region::private(Slab::bytes(classes), pages)?;
    Ok(Some(Slab::new(Arena::from_region(region), classes)?))
}

/// An engine whose rings, tables and slab lie in mappings that this call makes, in the largest pages to be had. `make`
/// gets the incarnation id that the device has to tell its peers.
pub fn open_with<D: Device>(
    mut config: Config,
    classes: &[SizeClass],
    pages: RegionOptions,
    make: impl FnOnce(u64) -> Result<D, DeviceError>,
) -> Result<Engine<D>, WaitError> {
    config.node = u64::from_le_bytes(random()?).max(1);
    config.secret = random()?;
    let device = make(config.node).map_err(EngineError::Device)?;
    let arena = Arena::from_region(Region::private(config.bytes(), pages)?);
    Ok(Engine::new(device, arena, slab(classes, pages)?, config)?)
}

/// An engine over shared memory.
#[cfg(feature = "shm")]
pub type ShmEngine = Engine<Shm>;

/// An engine over shared memory that listens under `name`.
///
/// ```no_run
/// # use verbring::*;
/// let classes = [SizeClass { size: 4096, count: 64 }];
/// let engine = open_shm("trader", Config::default(), &classes)?;
/// # Ok::<(), WaitError>(())
/// ```
#[cfg(feature = "shm")]
pub fn open_shm(name: &str, config: Config, classes: &[SizeClass]) -> Result<ShmEngine, WaitError> {
    let options = ShmOptions { max_links: config.max_peers, max_imports: config.max_imports };
    open_with(config, classes, RegionOptions::default(), |node| Shm::bind(name, node, options))
}

/// Counts empty turns, and lets other threads run after many.
pub(crate) struct Turns(u32);

impl Turns {
    pub(crate) fn new() -> Turns {
        Turns(0)
    }

    /// One more empty turn: whether it is time to look at the control side.
    pub(crate) fn pass(&mut self) -> bool {
        self.0 = self.0.wrapping_add(1);
        if self.0 > PATIENCE {
            thread::yield_now()
        } else {
            core::hint::spin_loop()
        }
        self.0.is_multiple_of(CONTROL_EVERY) || self.0 > PATIENCE
    }

    pub(crate) fn reset(&mut self) {
        self.0 = 0;
    }
}

impl<D: Device> Engine<D> {
    /// Control work whose notices are kept for the next `control`; of more than 64 the oldest go.
    fn keep_notices(&mut self, now: u64) {
        while let Some(notice) = self.control_device(now) {
            self.keep_notice(notice);
        }
    }

    /// Submits, polls and does the control work until `done` has an answer.
    pub fn wait_for<T>(
        &mut self,
        clock: &Clock,
        timeout: Duration,
        what: &'static str,
        mut done: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, WaitError> {
        let until = clock.now().saturating_add(timeout.as_nanos() as u64);
        let mut turns = Turns::new();
        loop {
            let now = clock.now();
            let work = self.submit(now) + self.poll(now);
            if let Some(answer) = done(self) {
                return Ok(answer);
            }
            if work != 0 {
                turns.reset();
            } else if turns.pass() {
                self.keep_notices(now);
            }
            if now >= until {
                return Err(WaitError::TimedOut { what, after: timeout });
            }
        }
    }

    /// The next completion.
    pub fn wait(&mut self, clock: &Clock, timeout: Duration) -> Result<Completion, WaitError> {
        self.wait_for(clock, timeout, "a completion", |engine| engine.reap())
    }

    /// Takes the first kept notice that `is_it` says yes to.
    fn take_notice(&mut self, mut is_it: impl FnMut(&Notice) -> bool) -> Option<Notice> {
        for _ in 0..self.notices.len() {
            let notice = self.notices.pop_front()?;
            if is_it(&notice) {
                return Some(notice);
            }
            let _ = self.notices.push_back(notice);
        }
        None
    }

    /// Connects, and waits until that is done. Where nobody listens it is tried again until the time is over.
    pub fn connect_wait(&mut self, address: &str, clock: &Clock, timeout: Duration) -> Result<PeerId, WaitError> {
        let until = clock.now().saturating_add(timeout.as_nanos() as u64);
        loop {
            match self.connect_once(address, clock, timeout) {
                Err(
                    WaitError::Engine(EngineError::Device(DeviceError::NoSuchName))
                    | WaitError::Lost(DeviceError::NoSuchName),
                ) if clock.now() < until => thread::sleep(Duration::from_millis(1)),
                outcome => return outcome,
            }
        }
    }

    fn connect_once(&mut self, address: &str, clock: &Clock, timeout: Duration) -> Result<PeerId, WaitError> {
        let peer = self.connect(address, clock.now())?;
        let outcome = self.wait_for(clock, timeout, "the connection", |engine| match engine.peer_state(peer) {
            Some(PeerState::Connecting) => None,
            Some(PeerState::Up) => {
                engine.take_notice(|n| matches!(n, Notice::Connected { peer: p, .. } if *p == peer)).map(|_| Ok(peer))
            }
            _ => engine.take_notice(|n| matches!(n, Notice::Lost { peer: p, .. } if *p == peer)).map(Err),
        });
        match outcome {
            Ok(Ok(peer)) => Ok(peer),
            Ok(Err(notice)) => {
                self.disconnect(peer, clock.now());
                let Notice::Lost { cause, .. } = notice else { return Err(WaitError::Lost(DeviceError::Closed)) };
                Err(WaitError::Lost(cause))
            }
            Err(error) => {
                self.disconnect(peer, clock.now());
                Err(error)
            }
        }
    }

    /// Waits until a peer connected.
    pub fn accept_wait(&mut self, clock: &Clock, timeout: Duration) -> Result<PeerId, WaitError> {
        let what = "a connection from a peer";
        let notice = self.wait_for(clock, timeout, what, |engine| {
            engine.take_notice(|n| matches!(n, Notice::Connected { incoming: true, .. }))
        })?;
        match notice {
            Notice::Connected { peer, .. } => Ok(peer),
            _ => Err(WaitError::TimedOut { what, after: timeout }),
        }
    }

    /// Imports a region, and waits until its owner answered.
    pub fn import_wait(
        &mut self,
        peer: PeerId,
        remote: &Remote,
        clock: &Clock,
        timeout: Duration,
    ) -> Result<RemoteKey, WaitError> {
        let wanted = self.import(peer, remote)?;
        let what = "the answer to an import";
        let outcome = self.wait_for(clock, timeout, what, |engine| match engine.import_state(wanted) {
            Some(ImportState::Requested) => match engine.peer_state(peer) {
                Some(PeerState::Failed(status)) => Some(Err(status)),
                _ => None,
            },
            Some(ImportState::Ready) => Some(Ok(())),
            Some(ImportState::Failed(status)) => Some(Err(status)),
            None => Some(Err(Status::ConnectionLost)),
        });
        // Told here: not to be told again.
        let _ = self.take_notice(|n| match n {
            Notice::Imported { key } | Notice::ImportFailed { key, .. } => *key == wanted,
            _ => false,
        });
        let failed = match outcome {
            Ok(Ok(())) => return Ok(wanted),
            Ok(Err(status)) => WaitError::Refused(status),
            Err(error) => error,
        };
        let _ = self.release(wanted);
        Err(failed)
    }
}

impl Port {
    /// The next completion, from an engine that another thread polls.
    pub fn wait_reap(&mut self, clock: &Clock, timeout: Duration) -> Result<Completion, WaitError> {
        let mut turns = Turns::new();
        let mut until = None;
        loop {
            if let Some(completion) = self.reap() {
                return Ok(completion);
            }
            if turns.pass() {
                if self.is_engine_gone() {
                    return self.reap().or_else(|| self.reap_untaken()).ok_or(WaitError::EngineGone);
                }
                let now = clock.now();
                if now >= *until.get_or_insert(now.saturating_add(timeout.as_nanos() as u64)) {
                    return Err(WaitError::TimedOut { what: "a completion", after: timeout });
                }
            }
        }
    }
}
