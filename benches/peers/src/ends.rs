//! Engines over shared memory in two processes, and what one of them does when the other asks.

use std::process::id;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use verbring::{
    Clock, Config, Device, Engine, PeerId, Region, RegionOptions, Remote, RemoteKey, Rights, Shm, Signal, Sqe,
    SqeFlags, WaitError, Window, open_shm,
};

use crate::pattern::Slots;
use crate::process::{Board, Request};
use crate::{fail, pattern, pin};

/// Bytes of the largest message.
pub const LARGEST: u64 = 104_857_600;
/// The data ends here, wherever it begins in its first page.
const DATA: u64 = LARGEST + 4096;
/// The word of signals, in lines of its own.
pub const SIGNAL: u64 = DATA;
/// The word of acknowledgements.
pub const ACKNOWLEDGED: u64 = DATA + 128;
/// The word of atomics.
pub const COUNTER: u64 = DATA + 256;
/// Bytes of a window that holds all of it.
pub const WINDOW: u64 = DATA + 4096;
/// Bytes of an outbox: behind what is sent is room for what is looked at.
pub const OUTBOX: u64 = DATA + (1 << 20);

/// The largest batch.
pub const HUNDRED: u64 = 100;

/// Plays ping-pong: message, size, first round, rounds.
pub const ECHO: u64 = 1;
/// Fills inbox (0) or outbox (1): which, bytes, seed.
pub const FILL: u64 = 2;
/// Compares slots of the inbox: where, bytes of each, stride, count, seed. The answer is 1 if it is right.
pub const CHECK: u64 = 3;
/// Reads chunks as they are signalled: size, chunks, walks, signals so far. The answer is the sum of all words.
pub const READ: u64 = 4;
/// Streams through memory until it is told to stop.
pub const STREAM: u64 = 5;

/// What a ping-pong is played with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A put whose last word is the round.
    Put,
    /// A put of bytes, then the round as a signal right behind them.
    Signal,
    /// A word that is the round.
    Word,
}

const SECONDS: Duration = Duration::from_secs(20);

/// An engine, its memory, and what it may reach.
pub struct End<D: Device> {
    /// The engine.
    pub engine: Engine<D>,
    /// The other end's inbox.
    pub key: RemoteKey,
    /// Where the bytes come from, and where those of a get go.
    pub outbox: Window,
    /// Nothing has a deadline, so an old time will do.
    now: u64,
}

impl<D: Device> End<D> {
    /// What the rows need of an engine that is connected.
    pub fn new(engine: Engine<D>, key: RemoteKey, outbox: Window, now: u64) -> End<D> {
        End { engine, key, outbox, now }
    }

    /// Puts an entry into the ring.
    #[inline(always)]
    pub fn push(&mut self, sqe: Sqe) {
        self.engine.push(sqe).expect("room in the submission ring");
    }

    /// Submits what was pushed, and reaps `count` completions; `seen` gets the value of each.
    #[inline(always)]
    pub fn finish(&mut self, count: u64, mut seen: impl FnMut(u64)) {
        let mut left = count;
        self.engine.submit(self.now);
        loop {
            left -= u64::from(self.engine.reap_each(|done| {
                assert!(done.is_success(), "an operation failed: {}", done.status);
                seen(done.value);
            }));
            if left == 0 {
                return;
            }
            self.engine.poll(self.now);
            self.engine.submit(self.now);
        }
    }

    /// Submits silent operations, and polls until they are done.
    #[inline(always)]
    pub fn settle(&mut self) {
        self.engine.submit(self.now);
        while self.engine.outstanding() != 0 {
            self.engine.poll(self.now);
        }
    }

    /// One operation past the rings where that can be, until it is done: the value of its completion.
    #[inline(always)]
    pub fn now(&mut self, sqe: Sqe) -> u64 {
        match self.engine.execute(&sqe) {
            Some(done) => done.value,
            None => {
                self.push(sqe);
                self.settle();
                0
            }
        }
    }

    /// One operation, until its completion.
    #[inline(always)]
    pub fn alone(&mut self, sqe: Sqe) -> u64 {
        let mut old = 0;
        self.push(sqe);
        self.finish(1, |value| old = value);
        old
    }

    /// One operation a slot, of which only the last has a completion, which stands for all.
    #[inline(always)]
    pub fn window(&mut self, slots: u64, mut make: impl FnMut(&Window, RemoteKey, u64) -> Sqe) {
        let (outbox, key) = (&self.outbox, self.key);
        self.engine.batch(|batch| {
            for slot in 0..slots - 1 {
                batch.push(make(outbox, key, slot).flags(SqeFlags::SILENT)).expect("room in the submission ring");
            }
        });
        let last = make(&self.outbox, self.key, slots - 1);
        self.alone(last);
    }

    /// One operation a slot, each with a completion.
    #[inline(always)]
    pub fn batch(&mut self, slots: u64, seen: impl FnMut(u64), mut make: impl FnMut(&Window, RemoteKey, u64) -> Sqe) {
        let (outbox, key) = (&self.outbox, self.key);
        self.engine.batch(|batch| {
            for slot in 0..slots {
                batch.push(make(outbox, key, slot)).expect("room in the submission ring");
            }
        });
        self.finish(slots, seen);
    }

    /// What lies at the beginning of the other end's inbox.
    pub fn get_back(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let scratch = self.outbox.len() - len;
        let sqe = Sqe::get(self.outbox.slice(scratch as u64, len as u32), self.key.at(0));
        self.alone(sqe);
        self.outbox.read(scratch, &mut bytes);
        bytes
    }
}

/// One of two processes.
pub struct Pair {
    /// Its engine.
    pub end: End<Shm>,
    /// What the other one writes into.
    pub inbox: Window,
    /// What the two share.
    pub board: &'static Board,
    is_first: bool,
    /// The pages of the inbox.
    pub pages: &'static str,
}

impl Pair {
    /// Pins this process, and meets the other one. The name is that of the process that started the other.
    pub fn meet(board: &'static Board, name: &str, is_first: bool, core: usize) -> Pair {
        pin(core);
        Pair::try_meet(board, name, is_first).unwrap_or_else(|error| fail(error))
    }

    /// A name for [`Pair::meet`] that nobody else uses.
    pub fn name() -> String {
        format!("peers-{}", id())
    }

    fn try_meet(board: &'static Board, name: &str, is_first: bool) -> Result<Pair, WaitError> {
        // Rings no larger than needed: they share the cache with what is measured.
        let config = Config {
            sq_entries: 128,
            cq_entries: 256,
            max_outstanding: 128,
            max_peers: 4,
            max_windows: 8,
            max_imports: 4,
            ..Config::default()
        };
        let clock = Clock::start();
        let (own, theirs) = (usize::from(!is_first), usize::from(is_first));
        let mut engine = open_shm(&if is_first { format!("{name}-first") } else { name.to_string() }, config, &[])?;
        let peer: PeerId =
            if is_first { engine.connect_wait(name, &clock, SECONDS)? } else { engine.accept_wait(&clock, SECONDS)? };
        let (inbox, pages) = window(&mut engine, WINDOW, Rights::all())?;
        let (outbox, _) = window(&mut engine, OUTBOX, Rights::empty())?;
        let remote = engine.remote(&inbox)?.to_bytes();
        for (to, from) in board.remotes[own].iter().zip(remote.chunks_exact(8)) {
            to.store(u64::from_le_bytes(from.try_into().unwrap_or_default()), Ordering::Relaxed);
        }
        let step = |engine: &mut Engine<Shm>, number: u64| {
            board.steps[own].0.store(number, Ordering::Release);
            engine.wait_for(&clock, SECONDS, "a step of the other process", |_| {
                (board.steps[theirs].0.load(Ordering::Acquire) >= number).then_some(())
            })
        };
        step(&mut engine, 1)?;
        let remote: Vec<u8> =
            board.remotes[theirs].iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        let remote = remote.as_slice().try_into().ok().and_then(|bytes| Remote::from_bytes(bytes).ok());
        let remote = remote.unwrap_or_else(|| fail("the other process sent no Remote"));
        let key = engine.import_wait(peer, &remote, &clock, SECONDS)?;
        step(&mut engine, 2)?;
        let end = End::new(engine, key, outbox, clock.now());
        Ok(Pair { end, inbox, board, is_first, pages })
    }

    /// Round trips of numbered rounds.
    pub fn ping_pong(&mut self, message: Message, size: u64, first: u64, rounds: u64) {
        let key = self.end.key;
        let local = self.end.outbox.slice(0, size as u32);
        match message {
            Message::Put => self.play(size - 8, first, rounds, |outbox, round| {
                outbox.store(size as usize - 8, round);
                Sqe::put(local, key.at(0))
            }),
            Message::Signal => self.play(size, first, rounds, |_, round| {
                Sqe::put_signal(local, key.at(0), (size / 8) as u32, Signal::Store(round))
            }),
            Message::Word => self.play(0, first, rounds, |_, round| Sqe::put_word(round, key.at(0))),
        }
    }

    /// What is sent is silent: the answer says enough.
    #[inline(always)]
    fn play(&mut self, watched: u64, first: u64, rounds: u64, make: impl Fn(&Window, u64) -> Sqe) {
        let watched = watched as usize;
        for round in first..first + rounds {
            if !self.is_first {
                while self.inbox.load(watched) != round {}
            }
            let sqe = make(&self.end.outbox, round).flags(SqeFlags::SILENT);
            self.end.now(sqe);
            if self.is_first {
                while self.inbox.load(watched) != round {}
            }
        }
    }

    /// Sums chunks of the inbox as they are signalled, and acknowledges each walk over them with a word.
    fn read(&mut self, size: u64, chunks: u64, walks: u64, mut signals: u64) -> u64 {
        let mut total = 0u64;
        for _ in 0..walks {
            for chunk in 0..chunks {
                signals += 1;
                while self.inbox.load(SIGNAL as usize) < signals {}
                let at = (self.inbox.address() + chunk * size) as *const u64;
                // SAFETY: in the window. The signal says that the bytes are there, and the other end writes them again
                // only after the acknowledgement.
                total = total.wrapping_add(unsafe { sum(at, (size / 8) as usize) });
            }
            let acknowledge = Sqe::put_word(signals, self.end.key.at(ACKNOWLEDGED)).flags(SqeFlags::SILENT);
            self.end.push(acknowledge);
            self.end.settle();
        }
        total
    }

    /// Does what the other process asks.
    pub fn serve(mut self) {
        let board = self.board;
        board.serve(|request| self.answer(request));
    }

    fn answer(&mut self, request: Request) -> u64 {
        let [what, a, b, c, d, e] = request;
        match what {
            ECHO => {
                let messages = [Message::Put, Message::Signal, Message::Word];
                self.ping_pong(messages[a as usize], b, c, d);
            }
            FILL => pattern::fill(if a == 0 { &self.inbox } else { &self.end.outbox }, b, c),
            CHECK => {
                let slots = Slots { at: a, len: b, stride: c, count: d };
                return u64::from(pattern::is_right(&self.inbox, slots, 0, e));
            }
            READ => return self.read(a, b, c, d),
            STREAM => stream(|| self.board.stop.0.swap(0, Ordering::Relaxed) != 0),
            _ => fail("a request that nobody knows"),
        }
        0
    }
}

fn window(engine: &mut Engine<Shm>, len: u64, rights: Rights) -> Result<(Window, &'static str), WaitError> {
    let region = Arc::new(Region::shared(len as usize, RegionOptions::default())?);
    region.touch();
    let pages = region.pages().name();
    Ok((engine.register_region(region, len as usize, rights)?, pages))
}

/// The sum of words.
///
/// # Safety
/// They can be read, are aligned, and nobody writes them meanwhile.
unsafe fn sum(at: *const u64, count: usize) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the caller's promise; the processor has it.
        return unsafe { sum_avx2(at, count) };
    }
    // SAFETY: the caller's promise.
    unsafe { sum_plain(at, count) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_avx2(at: *const u64, count: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { sum_plain(at, count) }
}

/// Compiled for vectors where its caller is.
#[inline(always)]
unsafe fn sum_plain(at: *const u64, count: usize) -> u64 {
    // SAFETY: the caller's promise.
    (0..count).fold(0u64, |sum, i| sum.wrapping_add(unsafe { at.add(i).read() }))
}

/// Reads and writes 256 MiB of memory, again and again, until `is_over`.
pub fn stream(mut is_over: impl FnMut() -> bool) {
    let mut words = vec![1u64; (256 << 20) / 8];
    while !is_over() {
        for part in words.chunks_mut(1 << 16) {
            part.iter_mut().for_each(|word| *word = word.wrapping_add(1));
            if is_over() {
                return;
            }
        }
    }
}
