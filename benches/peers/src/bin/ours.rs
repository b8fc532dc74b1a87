//! What verbring costs: whole engines over shared memory in two processes, each on a core of its own, and over a device
//! that answers late.

use std::hint::black_box;
use std::time::{Duration, Instant};

use verbring::{Config, Device, RemoteKey, Rights, Signal, Sqe, SqeFlags, Window};
use verbring_peers::ends::{
    ACKNOWLEDGED, CHECK, COUNTER, ECHO, End, FILL, HUNDRED, LARGEST, Message, Pair, READ, SIGNAL,
};
use verbring_peers::pattern::{Random, Slots};
use verbring_peers::process::{Board, Partner};
use verbring_peers::{Run, clocked, comment, fail, out, pattern};
use verbring_sys::Faults;
use verbring_tests::{World, deferred};

/// Of latencies.
const SIZES: [u64; 6] = [8, 64, 512, 4096, 65536, 1 << 20];
/// Of bandwidths.
const LARGE: [u64; 4] = [4096, 65536, 1 << 20, LARGEST];
/// Where staggered slots begin at the other end, as in `verbring perf`.
const SKEW: u64 = 2048 + 64;
/// Of a batch: from place to place.
const STRIDE: u64 = 64;
/// Entries of the tables of random operations: more than a branch predictor keeps.
const RANDOM: usize = 16384;
/// Random operations go to so many words, each in a line of its own.
const RANDOM_SLOTS: u64 = 64;

fn main() {
    let run = Run::from_args();
    let (board, name) = (Board::new(), Pair::name());
    let partner = Partner::start(|| Pair::meet(board, &name, false, run.cores.1).serve());
    let pair = Pair::meet(board, &name, true, run.cores.0);
    comment(format_args!("two processes over shm, pages {}, rings of 128 and 256 entries", pair.pages));
    comment("slots lie right behind each other, 64 up to 4 KiB, 16 above, both ends at the start of a page");
    let mut two = Two { run, pair, seed: 0, round: 1 };
    two.latencies();
    let Pair { end, inbox, board, .. } = two.pair;
    let mut column = Column { run, peer: "verbring", end, far: Far::Asked(board), seed: two.seed, count: 0 };
    // What needs both cores comes first: a hypervisor may move one of them.
    let mut reading = Reading { column: &mut column, inbox, board, signals: 0 };
    reading.rows();
    for size in SIZES {
        column.put_flush(size);
    }
    for size in SIZES {
        column.get_flush(size);
    }
    column.batches();
    column.atomics();
    column.bandwidths();
    column.random_kinds();
    column.random_sizes();
    drop((column, partner));

    comment("verbring-deferred: one process, a device that does nothing before it is polled");
    let faults = Faults { lateness: 1, ..Faults::default() };
    let mut world = deferred(Config::default(), 1, faults);
    let (inbox, key) = world.export(1 << 20, Rights::all());
    let outbox = world.local_window(1 << 20);
    let World { a, b: _far_end, now, .. } = world;
    let end = End::new(a, key, outbox, now);
    let mut column = Column { run, peer: "verbring-deferred", end, far: Far::Here(inbox), seed: 1000, count: 0 };
    column.put_flush(8);
    column.put_batches();
    column.get_batch();
    column.add_batch(1 << 19);
}

/// Both processes take part.
struct Two {
    run: Run,
    pair: Pair,
    seed: u64,
    round: u64,
}

impl Two {
    fn latencies(&mut self) {
        for size in SIZES {
            self.latency("put_lat", Message::Put, size);
        }
        self.latency("put_signal_lat", Message::Signal, 8);
        self.latency("put_word_lat", Message::Word, 8);
    }

    fn rounds(&mut self, message: Message, size: u64, rounds: u64) -> Duration {
        let board = self.pair.board;
        board.begin([ECHO, message as u64, size, self.round, rounds, 0]);
        let start = Instant::now();
        self.pair.ping_pong(message, size, self.round, rounds);
        let time = start.elapsed();
        board.end();
        self.round += rounds;
        time
    }

    fn latency(&mut self, test: &str, message: Message, size: u64) {
        let board = self.pair.board;
        self.seed += 2;
        let (there, back) = (self.seed, self.seed + 1);
        pattern::fill(&self.pair.end.outbox, size, there);
        board.ask([FILL, 1, size, back, 0, 0]);
        self.rounds(message, size, 3);
        // What is watched are the last bytes, or those behind.
        let body = match message {
            Message::Put => size - 8,
            Message::Signal => size,
            Message::Word => 0,
        };
        let slot = Slots { at: 0, len: body, stride: 0, count: 1 };
        let is_right = board.ask([CHECK, 0, body, 0, 1, there]) == 1;
        must(is_right && pattern::is_right(&self.pair.inbox, slot, 0, back), test, size);
        let run = self.run;
        let ns = run.ns(|rounds| self.rounds(message, size, rounds));
        out("verbring", test, size as usize, ns / 2000.0, "us");
    }
}

fn must(is_right: bool, test: &str, size: u64) {
    if !is_right {
        fail(format!("{test} of {size} bytes: other bytes arrived"));
    }
}

/// The other end's inbox.
enum Far {
    /// Another process has it, and is asked.
    Asked(&'static Board),
    /// This one has it.
    Here(Window),
}

/// One end measures, the other leaves its memory alone.
struct Column<D: Device> {
    run: Run,
    peer: &'static str,
    end: End<D>,
    far: Far,
    seed: u64,
    /// What the word of atomics holds.
    count: u64,
}

impl<D: Device> Column<D> {
    fn fill(&mut self, len: u64) {
        self.seed += 1;
        pattern::fill(&self.end.outbox, len, self.seed);
    }

    fn fill_far(&mut self, len: u64) {
        self.seed += 1;
        match &self.far {
            Far::Asked(board) => drop(board.ask([FILL, 0, len, self.seed, 0, 0])),
            Far::Here(inbox) => pattern::fill(inbox, len, self.seed),
        }
    }

    /// Whether the other end has the bytes of `fill`.
    fn is_far_right(&self, slots: Slots) -> bool {
        match &self.far {
            Far::Asked(board) => board.ask([CHECK, slots.at, slots.len, slots.stride, slots.count, self.seed]) == 1,
            Far::Here(inbox) => pattern::is_right(inbox, slots, 0, self.seed),
        }
    }

    /// Whether this end has the bytes of `fill_far`, from `base` on.
    fn is_right(&self, slots: Slots, base: u64) -> bool {
        pattern::is_right(&self.end.outbox, slots, base, self.seed)
    }

    fn row(&self, test: &str, size: u64, value: f64, unit: &str) {
        out(self.peer, test, size as usize, value, unit);
    }

    /// Nanoseconds of `call`.
    #[inline(always)]
    fn ns(&mut self, mut call: impl FnMut(&mut End<D>)) -> f64 {
        let end = &mut self.end;
        self.run.ns(|count| clocked(count, || call(end)))
    }

    fn put_flush(&mut self, size: u64) {
        self.fill(size);
        let put = |end: &mut End<D>| {
            end.alone(Sqe::put(end.outbox.slice(0, size as u32), end.key.at(0)));
        };
        put(&mut self.end);
        must(self.is_far_right(one(size)), "put_flush", size);
        let ns = self.ns(put);
        self.row("put_flush", size, ns / 1000.0, "us");
        let put = |end: &mut End<D>| {
            black_box(end.now(Sqe::put(end.outbox.slice(0, size as u32), end.key.at(0)).flags(SqeFlags::SILENT)));
        };
        let ns = self.ns(put);
        self.row("put_executed", size, ns / 1000.0, "us");
    }

    fn get_flush(&mut self, size: u64) {
        self.fill_far(size);
        let get = |end: &mut End<D>| {
            end.alone(Sqe::get(end.outbox.slice(0, size as u32), end.key.at(0)));
        };
        get(&mut self.end);
        must(self.is_right(one(size), 0), "get_flush", size);
        let ns = self.ns(get);
        self.row("get_flush", size, ns / 1000.0, "us");
    }

    fn put_batches(&mut self) {
        let put = |outbox: &Window, key: RemoteKey, i: u64| Sqe::put(outbox.slice(i * STRIDE, 8), key.at(i * STRIDE));
        self.fill(HUNDRED * STRIDE);
        self.end.batch(HUNDRED, |_| {}, put);
        must(self.is_far_right(words(HUNDRED)), "put_b100", 8);
        let ns = self.ns(|end| end.batch(HUNDRED, |_| {}, put));
        self.row("put_b100", 8, ns / 1000.0, "us");

        self.fill(HUNDRED * STRIDE);
        self.end.window(HUNDRED, put);
        must(self.is_far_right(words(HUNDRED)), "put_b100_silent", 8);
        let ns = self.ns(|end| end.window(HUNDRED, put));
        self.row("put_b100_silent", 8, ns / 1000.0, "us");
    }

    fn get_batch(&mut self) {
        let get = |outbox: &Window, key: RemoteKey, i: u64| Sqe::get(outbox.slice(i * STRIDE, 8), key.at(i * STRIDE));
        self.fill_far(HUNDRED * STRIDE);
        self.end.batch(HUNDRED, |_| {}, get);
        must(self.is_right(words(HUNDRED), 0), "get_b100", 8);
        let ns = self.ns(|end| end.batch(HUNDRED, |_| {}, get));
        self.row("get_b100", 8, ns / 1000.0, "us");
    }

    fn batches(&mut self) {
        self.put_batches();
        self.get_batch();

        self.seed += 1;
        let seed = self.seed;
        self.end.batch(HUNDRED, |_| {}, |_, key, i| Sqe::put_word(pattern::word(seed, i * STRIDE), key.at(i * STRIDE)));
        must(self.is_far_right(words(HUNDRED)), "put_word_b100", 8);
        let ns = self.ns(|end| end.batch(HUNDRED, |_| {}, |_, key, i| Sqe::put_word(i, key.at(i * STRIDE))));
        self.row("put_word_b100", 8, ns / 1000.0, "us");

        let put = |outbox: &Window, key: RemoteKey, i: u64| Sqe::put(outbox.slice(i * STRIDE, 8), key.at(i * STRIDE));
        self.fill(64 * STRIDE);
        self.end.window(64, put);
        must(self.is_far_right(words(64)), "put_rate", 8);
        let ns = self.ns(|end| end.window(64, put));
        self.row("put_rate", 8, 64.0 * 1000.0 / ns, "Mmsg/s");
    }

    /// Adds in one batch: each old value is known, as nobody else adds.
    fn add_batch(&mut self, word: u64) {
        let mut count = self.count;
        let ns = self.ns(|end| {
            let mut seen = count;
            end.batch(
                HUNDRED,
                |old| {
                    assert_eq!(old, seen, "an old value");
                    seen += 1;
                },
                |_, key, _| Sqe::fetch_add(key.at(word), 1),
            );
            count += HUNDRED;
        });
        self.count = count;
        self.row("fadd_b100", 8, ns / 1000.0, "us");
    }

    fn atomics(&mut self) {
        comment("atomics: all to one word, each compare-swap succeeds, every old value is compared");
        let mut count = self.count;
        let ns = self.ns(|end| {
            assert_eq!(end.alone(Sqe::fetch_add(end.key.at(COUNTER), 1)), count, "an old value");
            count += 1;
        });
        self.row("fadd", 8, ns / 1000.0, "us");
        let ns = self.ns(|end| {
            let swap = Sqe::compare_swap(end.key.at(COUNTER), count, count + 1);
            assert_eq!(end.alone(swap), count, "an old value");
            count += 1;
        });
        self.count = count;
        self.row("cswap", 8, ns / 1000.0, "us");
        self.add_batch(COUNTER);
        let mut count = self.count;
        let ns = self.ns(|end| {
            let mut seen = count;
            end.batch(
                HUNDRED,
                |old| {
                    assert_eq!(old, seen, "an old value");
                    seen += 1;
                },
                |_, key, i| Sqe::compare_swap(key.at(COUNTER), count + i, count + i + 1),
            );
            count += HUNDRED;
        });
        self.count = count;
        self.row("cswap_b100", 8, ns / 1000.0, "us");
    }

    fn bandwidths(&mut self) {
        comment("_hot: from one place to one; _staggered: as in `verbring perf`, 64 bytes between slots,");
        comment("and the two ends of a copy not a multiple of 4096 bytes apart");
        for (test, is_get) in [("put_bw", false), ("get_bw", true)] {
            for (suffix, sizes, more, at) in
                [("", &LARGE[..], 0, 0), ("_hot", &LARGE[..3], 0, 0), ("_staggered", &LARGE[..], 64, SKEW)]
            {
                let test = format!("{test}{suffix}");
                for &size in sizes {
                    let stride = if suffix == "_hot" { 0 } else { size + more };
                    let slots = Slots { at, len: size, stride, count: slots(size) };
                    self.bandwidth(&test, slots, is_get);
                }
            }
        }
    }

    /// Windows of one operation a slot. The local slots begin at 0.
    fn bandwidth(&mut self, test: &str, remote: Slots, is_get: bool) {
        let make = if is_get { Sqe::get } else { Sqe::put };
        let Slots { at, len, stride, count } = remote;
        let window = |end: &mut End<D>| {
            end.window(count, |outbox, key, i| make(outbox.slice(i * stride, len as u32), key.at(at + i * stride)));
        };
        let reach = stride * (count - 1) + len;
        let is_right = if is_get {
            self.fill_far(at + reach);
            window(&mut self.end);
            self.is_right(Slots { at: 0, ..remote }, at)
        } else {
            self.fill(reach);
            window(&mut self.end);
            self.is_far_right(remote)
        };
        must(is_right, test, len);
        let ns = self.ns(window);
        self.row(test, len, (count * len) as f64 / ns, "GB/s");
    }

    /// Each operation with a completion, in batches of 100 drawn from a table.
    fn random_kinds(&mut self) {
        comment("random_kinds: put, put_word, get, fetch_add, compare_swap; a compare-swap may fail");
        let mut random = Random::new(1);
        let table: Vec<(u8, u8)> =
            (0..RANDOM).map(|_| (random.below(5) as u8, random.below(RANDOM_SLOTS) as u8)).collect();
        // Small values, so that some of the compare-swaps succeed.
        for slot in 0..RANDOM_SLOTS {
            self.end.outbox.store((slot * STRIDE) as usize, slot % 4);
            self.end.alone(Sqe::put_word(0, self.end.key.at(slot * STRIDE)));
        }
        let make = |outbox: &Window, key: RemoteKey, (kind, slot): (u8, u8)| {
            let (slot, here) = (u64::from(slot), u64::from(slot) * STRIDE);
            let target = key.at(here);
            match kind {
                0 => Sqe::put(outbox.slice(here, 8), target),
                1 => Sqe::put_word(slot % 3, target),
                2 => Sqe::get(outbox.slice(RANDOM_SLOTS * STRIDE + here, 8), target),
                3 => Sqe::fetch_add(target, 1),
                _ => Sqe::compare_swap(target, 1, slot),
            }
        };
        let mut words = [0; RANDOM_SLOTS as usize];
        for &(kind, slot) in &table {
            let word = &mut words[usize::from(slot)];
            let (old, slot_value) = (*word, u64::from(slot));
            let seen = self.end.alone(make(&self.end.outbox, self.end.key, (kind, slot)));
            match kind {
                0 => *word = slot_value % 4,
                1 => *word = slot_value % 3,
                2 => {
                    let at = (RANDOM_SLOTS + slot_value) * STRIDE;
                    must(self.end.outbox.load(at as usize) == old, "random_kinds", 8);
                }
                3 => *word += 1,
                _ if old == 1 => *word = slot_value,
                _ => {}
            }
            must(kind < 3 || seen == old, "random_kinds", 8);
        }
        let lines = self.end.get_back((RANDOM_SLOTS * STRIDE) as usize);
        let is_right = lines.chunks(STRIDE as usize).zip(words).all(|(line, word)| line[..8] == word.to_le_bytes());
        must(is_right, "random_kinds", 8);
        let mut at = 0;
        let ns = self.ns(|end| {
            let from = at;
            for i in 0..HUNDRED as usize {
                let (kind, slot) = table[(from + i) % RANDOM];
                let (slot, here) = (u64::from(slot), u64::from(slot) * STRIDE);
                let target = end.key.at(here);
                // Each kind pushed where it is known, as programs do.
                match kind {
                    0 => end.push(Sqe::put(end.outbox.slice(here, 8), target)),
                    1 => end.push(Sqe::put_word(slot % 3, target)),
                    2 => end.push(Sqe::get(end.outbox.slice(RANDOM_SLOTS * STRIDE + here, 8), target)),
                    3 => end.push(Sqe::fetch_add(target, 1)),
                    _ => end.push(Sqe::compare_swap(target, 1, slot)),
                }
            }
            end.finish(HUNDRED, |_| {});
            at = (at + HUNDRED as usize) % RANDOM;
        });
        self.row("random_kinds", 8, ns / HUNDRED as f64, "ns");
    }

    /// Each put with a completion, in batches of 100.
    fn random_sizes(&mut self) {
        comment("random_sizes: 1 to 64 bytes; the size in the line is the mean");
        let mut random = Random::new(2);
        let table: Vec<(u8, u8)> =
            (0..RANDOM).map(|_| (random.below(64) as u8 + 1, random.below(RANDOM_SLOTS) as u8)).collect();
        let make = |outbox: &Window, key: RemoteKey, (size, slot): (u8, u8)| {
            let here = u64::from(slot) * STRIDE;
            Sqe::put(outbox.slice(here, u32::from(size)), key.at(here))
        };
        let len = (RANDOM_SLOTS * STRIDE) as usize;
        let mut expected = self.end.get_back(len);
        self.fill(len as u64);
        let mut source = vec![0; len];
        self.end.outbox.read(0, &mut source);
        for &(size, slot) in &table {
            let range = usize::from(slot) * STRIDE as usize..usize::from(slot) * STRIDE as usize + usize::from(size);
            expected[range.clone()].copy_from_slice(&source[range]);
            self.end.alone(make(&self.end.outbox, self.end.key, (size, slot)));
        }
        must(self.end.get_back(len) == expected, "random_sizes", 32);
        let mut at = 0;
        let ns = self.ns(|end| {
            let from = at;
            end.batch(HUNDRED, |_| {}, |outbox, key, i| make(outbox, key, table[(from + i as usize) % RANDOM]));
            at = (at + HUNDRED as usize) % RANDOM;
        });
        self.row("random_sizes", 32, ns / HUNDRED as f64, "ns");
    }
}

fn one(len: u64) -> Slots {
    Slots { at: 0, len, stride: 0, count: 1 }
}

fn words(count: u64) -> Slots {
    Slots { at: 0, len: 8, stride: STRIDE, count }
}

fn slots(size: u64) -> u64 {
    match size {
        0..=4096 => 64,
        LARGEST => 1,
        _ => 16,
    }
}

/// The other end reads what it is sent.
struct Reading<'a, D: Device> {
    column: &'a mut Column<D>,
    inbox: Window,
    board: &'static Board,
    signals: u64,
}

impl<D: Device> Reading<'_, D> {
    fn rows(&mut self) {
        comment("put_read_bw: chunks by put_signal, summed at the target, then acknowledged; 100 MiB by 1 MiB");
        self.row(65536, 65536, 16);
        self.row(1 << 20, 1 << 20, 16);
        self.row(LARGEST, 1 << 20, 100);
    }

    fn row(&mut self, size: u64, chunk: u64, chunks: u64) {
        let column = &mut *self.column;
        column.fill(chunk * chunks);
        let seed = column.seed;
        let sum = (0..chunk * chunks / 8).fold(0u64, |sum, i| sum.wrapping_add(pattern::word(seed, i * 8)));
        let run = column.run;
        let ns = run.ns(|walks| self.walks(chunk, chunks, walks, sum));
        self.column.row("put_read_bw", size, (chunk * chunks) as f64 / ns, "GB/s");
    }

    fn walks(&mut self, chunk: u64, chunks: u64, walks: u64, sum: u64) -> Duration {
        self.board.begin([READ, chunk, chunks, walks, self.signals, 0]);
        let end = &mut self.column.end;
        let time = clocked(walks, || {
            for i in 0..chunks {
                self.signals += 1;
                let (from, to) = (end.outbox.slice(i * chunk, chunk as u32), end.key.at(i * chunk));
                let put = Sqe::put_signal(from, to, (SIGNAL / 8) as u32, Signal::Store(self.signals));
                end.push(put.flags(SqeFlags::SILENT));
            }
            end.settle();
            while self.inbox.load(ACKNOWLEDGED as usize) != self.signals {}
        });
        must(self.board.end() == sum.wrapping_mul(walks), "put_read_bw", chunk);
        time
    }
}
