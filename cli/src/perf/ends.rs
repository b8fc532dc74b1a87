//! What both ends have: an engine on a core, an inbox that the other end may reach, an outbox of one's own, and messages.
//!
//! # The protocol
//! Messages of 128 bytes go by send and recv in class 1, so that the queue pair of class 0 carries what is measured and
//! nothing else. The origin asks, the target answers each question once, but for the last:
//! ```text
//! Hello    bytes of the target's inbox and outbox, core, yields, seed; Remote of the origin's inbox
//!          -> Welcome  core, yields, pages; Remote of the target's inbox
//! Prepare  row      -> Done           the inbox is zeroed, or for gets filled with the pattern
//! Echo     row      -> Done           from now on it sends back each round that arrives, until
//! Stop              -> Done  rounds
//! Check    row, n   -> Done  1 or 0, offset of the first wrong byte
//! Bye
//! ```
//! Eight little-endian words (magic, version, kind, five arguments), then the 64 bytes of a Remote, or zeroes. A row is
//! three arguments: index of the test, size, slots.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use verbring::{
    Clock, Completion, Config, DeviceError, Engine, EngineError, Notice, Opts, Pages, PeerId, PeerState, REMOTE_BYTES,
    Region, RegionOptions, Remote, RemoteKey, Rights, SizeClass, Status, WaitError, Window, open_with,
};
use verbring_sys::cpu;

use super::PerfError;
use super::device::{Address, Measured, Tuning};
use super::rows::Row;

const MAGIC: u64 = u64::from_le_bytes(*b"vrb-perf");
/// Of this protocol, patterns and layout included.
const VERSION: u64 = 1;
const MESSAGE: usize = 64 + REMOTE_BYTES;

/// The class of messages; what is measured is of class 0.
const MAIL: u8 = 1;
/// user_data of messages; that of measured operations is below.
const MAIL_IN: u64 = 1 << 63;
const MAIL_OUT: u64 = MAIL_IN | 1;

/// How long the other end may take: for an answer, or to go on in a test. A check of 1 GiB takes about a second.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Looks at a word between two calls of `idle`, which costs a system call.
const LOOKS: u32 = 16384;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Kind {
    Hello = 1,
    Welcome = 2,
    Prepare = 3,
    Echo = 4,
    Stop = 5,
    Check = 6,
    Bye = 7,
    Done = 8,
}

/// A message, as in the head of this file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) arguments: [u64; 5],
    pub(crate) remote: [u8; REMOTE_BYTES],
}

impl Message {
    pub(crate) fn new(kind: Kind, arguments: [u64; 5]) -> Message {
        Message { kind, arguments, remote: [0; REMOTE_BYTES] }
    }

    /// A message about a row.
    pub(crate) fn of_row(kind: Kind, row: &Row, argument: u64) -> Message {
        let size = u64::from(row.layout.size);
        Message::new(kind, [row.index(), size, u64::from(row.layout.slots), argument, 0])
    }

    /// The row that it is about.
    pub(crate) fn row(&self) -> Result<Row, PerfError> {
        let [index, size, slots, ..] = self.arguments;
        Row::from_numbers(index, size, slots).ok_or(PerfError::Protocol("a row that does not exist"))
    }

    fn encode(&self) -> [u8; MESSAGE] {
        let mut bytes = [0; MESSAGE];
        let head = [MAGIC, VERSION, self.kind as u64];
        for (to, word) in bytes.chunks_mut(8).zip(head.iter().chain(&self.arguments)) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes[64..].copy_from_slice(&self.remote);
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Message, PerfError> {
        let bytes: &[u8; MESSAGE] = bytes.try_into().map_err(|_| PerfError::Protocol("a message of another length"))?;
        let mut words = [0u64; 8];
        for (word, from) in words.iter_mut().zip(bytes.chunks(8)) {
            *word = u64::from_le_bytes(from.try_into().unwrap_or_default());
        }
        let [magic, version, kind, arguments @ ..] = words;
        if magic != MAGIC {
            return Err(PerfError::Protocol("a message that is not of verbring perf"));
        }
        if version != VERSION {
            return Err(PerfError::Version { theirs: version, ours: VERSION });
        }
        let kinds =
            [Kind::Hello, Kind::Welcome, Kind::Prepare, Kind::Echo, Kind::Stop, Kind::Check, Kind::Bye, Kind::Done];
        let kind = kinds.into_iter().find(|k| *k as u64 == kind).ok_or(PerfError::Protocol("an unknown message"))?;
        let mut remote = [0; REMOTE_BYTES];
        remote.copy_from_slice(&bytes[64..]);
        Ok(Message { kind, arguments, remote })
    }
}

/// Bytes of the two windows of an end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) inbox: u64,
    pub(crate) outbox: u64,
}

/// The memory of an end.
pub(crate) struct Windows {
    /// The other end reaches it.
    pub(crate) inbox: Window,
    /// Source and sink of this end's operations.
    pub(crate) outbox: Window,
    /// Of the larger one.
    pub(crate) pages: Pages,
    /// The inbox, to be sent to the other end.
    pub(crate) remote: [u8; REMOTE_BYTES],
}

impl Windows {
    /// Windows whose pages were all touched.
    pub(crate) fn open<D: Measured>(end: &mut End<D>, sizes: Sizes) -> Result<Windows, PerfError> {
        let (inbox, inbox_pages) = window(&mut end.engine, sizes.inbox, Rights::all())?;
        let (outbox, outbox_pages) = window(&mut end.engine, sizes.outbox, Rights::empty())?;
        let pages = if sizes.outbox > sizes.inbox { outbox_pages } else { inbox_pages };
        let remote = end.engine.remote(&inbox).map_err(WaitError::Access)?.to_bytes();
        Ok(Windows { inbox, outbox, pages, remote })
    }
}

fn window<D: Measured>(engine: &mut Engine<D>, len: u64, rights: Rights) -> Result<(Window, Pages), PerfError> {
    let mut options = RegionOptions::default();
    // A huge page for a few bytes would be a waste.
    if len < 1 << 20 {
        options.largest = Pages::Small;
    }
    let region = Arc::new(Region::shared(len as usize, options).map_err(WaitError::Region)?);
    let pages = region.pages();
    let window = engine.register_region(region, len as usize, rights).map_err(WaitError::Access)?;
    Ok((window, pages))
}

/// How long this end has waited for the other one.
#[derive(Default)]
struct Idle {
    calls: u32,
    since: Option<Instant>,
}

/// One end.
pub(crate) struct End<D: Measured> {
    pub(crate) engine: Engine<D>,
    clock: Clock,
    peer: Option<PeerId>,
    /// The time that the engine is told in hot loops: nothing has a deadline there, so an old one will do unless the
    /// device needs it.
    now: u64,
    /// The ends share a core, so that one who waits has to let the other run.
    pub(crate) yields: bool,
    mail: Option<Message>,
    is_receiving: bool,
}

impl<D: Measured> End<D> {
    /// Pins this thread, and listens at `at`. Batches of `batch` fit into the rings.
    pub(crate) fn open(at: &Address, core: Option<usize>, batch: u32, tuning: Tuning) -> Result<End<D>, PerfError> {
        if let Some(core) = core {
            cpu::pin(core).map_err(PerfError::Cpu)?;
        }
        // Rings no larger than needed: they share the cache with what is measured.
        let entries = batch.next_power_of_two().max(128);
        let config = Config {
            sq_entries: entries,
            cq_entries: entries * 2,
            max_outstanding: entries,
            max_peers: 4,
            max_windows: 8,
            max_imports: 4,
            ..Config::default()
        };
        let classes = [SizeClass { size: MESSAGE as u32, count: 8 }];
        let engine = open_with(config, &classes, RegionOptions::default(), |node| D::open(at, node, &config, tuning));
        let engine = engine.map_err(|error| PerfError::Other(format!("cannot listen at {at}: {error}")))?;
        let clock = Clock::start();
        Ok(End { engine, clock, peer: None, now: 0, yields: false, mail: None, is_receiving: false })
    }

    /// Connects. While nobody listens at `to` it tries again, for `time` and as long as `go_on` has no objection.
    pub(crate) fn connect(
        &mut self,
        to: &Address,
        time: Duration,
        mut go_on: impl FnMut() -> Result<(), PerfError>,
    ) -> Result<(), PerfError> {
        let until = Instant::now() + time;
        let cause = loop {
            match self.connect_once(&to.of_device()) {
                Err(PerfError::Lost(DeviceError::NoSuchName)) if Instant::now() < until => go_on()?,
                Err(PerfError::Lost(cause)) => break cause,
                outcome => return outcome,
            }
            thread::sleep(Duration::from_millis(1));
        };
        Err(PerfError::Other(format!("cannot connect to {to}: {cause}")))
    }

    fn connect_once(&mut self, address: &str) -> Result<(), PerfError> {
        let peer = self.engine.connect(address, self.clock.now()).map_err(|error| match error {
            EngineError::Device(cause) => PerfError::Lost(cause),
            error => WaitError::Engine(error).into(),
        })?;
        self.peer = Some(peer);
        let mut idle = Idle::default();
        while self.engine.peer_state(peer) == Some(PeerState::Connecting) {
            if let Err(error) = self.idle(&mut idle, Some(PATIENCE)) {
                self.engine.disconnect(peer, self.clock.now());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Waits for a connection. It sleeps: whoever waits for a person should not take a core.
    pub(crate) fn accept(&mut self, time: Duration) -> Result<(), PerfError> {
        let until = Instant::now() + time;
        loop {
            match self.engine.control(self.clock.now()) {
                Some(Notice::Connected { peer, incoming: true, .. }) => {
                    self.peer = Some(peer);
                    return Ok(());
                }
                Some(_) => {}
                None if Instant::now() > until => {
                    return Err(PerfError::Silent { what: "connect", after: time });
                }
                None => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn peer(&self) -> Result<PeerId, PerfError> {
        self.peer.ok_or(PerfError::Protocol("there is no connection"))
    }

    /// Imports the other end's inbox.
    pub(crate) fn import(&mut self, remote: &[u8; REMOTE_BYTES]) -> Result<RemoteKey, PerfError> {
        let remote = Remote::from_bytes(remote).map_err(|error| PerfError::Other(error.to_string()))?;
        Ok(self.engine.import_wait(self.peer()?, &remote, &self.clock, PATIENCE)?)
    }

    /// Sends a message, and waits for the answer.
    pub(crate) fn ask(&mut self, message: &Message, answer: Kind) -> Result<Message, PerfError> {
        self.tell(message)?;
        let message = self.listen(Some(PATIENCE))?;
        if message.kind == answer { Ok(message) } else { Err(PerfError::Protocol("another answer")) }
    }

    /// Sends a message.
    pub(crate) fn tell(&mut self, message: &Message) -> Result<(), PerfError> {
        self.receive()?;
        let mut buf = self.engine.alloc(MESSAGE).map_err(WaitError::Slab)?;
        buf.copy_from_slice(&message.encode());
        let opts = Opts { user_data: MAIL_OUT, class: MAIL, silent: true, ..Opts::default() };
        let peer = self.peer()?;
        self.engine.send(buf, peer, 0, opts).map_err(|(error, _)| PerfError::Push(error))?;
        self.engine.submit(self.now);
        Ok(())
    }

    /// Posts a receive unless there is one.
    pub(crate) fn receive(&mut self) -> Result<(), PerfError> {
        if !self.is_receiving {
            let buf = self.engine.alloc(MESSAGE).map_err(WaitError::Slab)?;
            let opts = Opts { user_data: MAIL_IN, class: MAIL, ..Opts::default() };
            let peer = self.peer()?;
            self.engine.recv(buf, peer, opts).map_err(|(error, _)| PerfError::Push(error))?;
            self.is_receiving = true;
        }
        Ok(())
    }

    /// The next message. Without a time it waits as long as the connection lasts.
    pub(crate) fn listen(&mut self, time: Option<Duration>) -> Result<Message, PerfError> {
        self.receive()?;
        let mut idle = Idle::default();
        loop {
            if let Some(message) = self.mail.take() {
                return Ok(message);
            }
            self.idle(&mut idle, time)?;
        }
    }

    /// Submits what was pushed, and reaps `count` completions: the value of the last one.
    #[inline(always)]
    pub(crate) fn finish(&mut self, count: u32) -> Result<u64, PerfError> {
        let mut left = count;
        let mut turns = 0u32;
        let mut idle = Idle::default();
        self.engine.submit(self.now);
        loop {
            while let Some(done) = self.engine.reap() {
                let value = done.value;
                if done.status != Status::Success || done.buf.is_some() {
                    self.take(done)?;
                    continue;
                }
                left -= 1;
                if left == 0 {
                    return Ok(value);
                }
            }
            if D::IS_DRIVEN {
                self.now = self.clock.now();
                if self.yields {
                    thread::yield_now();
                }
            }
            self.engine.poll(self.now);
            self.engine.submit(self.now);
            turns += 1;
            // A long copy moves in every poll, and is no reason to be impatient: only as many turns as no copy takes.
            if turns.is_multiple_of(LOOKS * 16) {
                self.idle(&mut idle, Some(PATIENCE))?;
            }
        }
    }

    /// Polls a word of `window` until `is_there` likes it; false if a message came instead.
    #[inline(always)]
    pub(crate) fn watch(
        &mut self,
        window: &Window,
        offset: usize,
        is_there: impl Fn(u64) -> bool,
    ) -> Result<bool, PerfError> {
        let mut idle = Idle::default();
        loop {
            for _ in 0..if self.yields || D::IS_DRIVEN { 1 } else { LOOKS } {
                if is_there(window.load(offset)) {
                    return Ok(true);
                }
            }
            self.idle(&mut idle, Some(PATIENCE))?;
            if self.mail.is_some() {
                return Ok(false);
            }
        }
    }

    /// What one does who waits: everything but the hot path. `time` is how long that may go on.
    #[cold]
    #[inline(never)]
    fn idle(&mut self, idle: &mut Idle, time: Option<Duration>) -> Result<(), PerfError> {
        idle.calls += 1;
        if D::IS_DRIVEN {
            self.now = self.clock.now();
        }
        self.engine.submit(self.now);
        self.engine.poll(self.now);
        while let Some(done) = self.engine.reap() {
            self.take(done)?;
        }
        // Whoever yields, or drives a device, is here all the time.
        let is_rare = !self.yields && !D::IS_DRIVEN || idle.calls.is_multiple_of(64);
        if self.yields || is_rare {
            // After so many looks the other end may well be waiting for this very core, pinned or not.
            thread::yield_now();
        }
        // The control side costs system calls.
        if !is_rare {
            return Ok(());
        }
        self.now = self.clock.now();
        while let Some(notice) = self.engine.control(self.now) {
            if let Notice::Lost { peer, cause } = notice
                && Some(peer) == self.peer
            {
                return Err(PerfError::Lost(cause));
            }
        }
        let since = *idle.since.get_or_insert_with(Instant::now);
        match time {
            Some(time) if since.elapsed() > time => Err(PerfError::Silent { what: "answer", after: time }),
            _ => Ok(()),
        }
    }

    /// A completion that is no good end of a measured operation.
    #[cold]
    #[inline(never)]
    fn take(&mut self, done: Completion) -> Result<(), PerfError> {
        if done.status != Status::Success {
            return Err(PerfError::Operation(done.status));
        }
        if done.user_data == MAIL_IN {
            self.is_receiving = false;
            self.mail = Some(Message::decode(done.buf.as_deref().unwrap_or_default())?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_as_they_were() {
        let mut message = Message::new(Kind::Check, [1, 2, 3, u64::MAX, 5]);
        message.remote = [7; REMOTE_BYTES];
        assert_eq!(Message::decode(&message.encode()).unwrap(), message);
    }

    #[test]
    fn what_is_not_of_perf_is_refused() {
        let bytes = Message::new(Kind::Bye, [0; 5]).encode();
        let with = |at: usize, value: u8| {
            let mut bytes = bytes;
            bytes[at] = value;
            Message::decode(&bytes)
        };
        assert!(matches!(with(0, 0), Err(PerfError::Protocol(_))));
        assert!(matches!(with(8, 9), Err(PerfError::Version { theirs: 9, ours: VERSION })));
        assert!(matches!(with(16, 99), Err(PerfError::Protocol(_))));
        assert!(matches!(Message::decode(&bytes[1..]), Err(PerfError::Protocol(_))));
        assert!(Message::new(Kind::Echo, [99, 8, 1, 0, 0]).row().is_err());
    }
}
