//! The slowest of a million operations, each timed for itself, and how much of that is not ours: an empty loop on the
//! same core.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use verbring::Sqe;
use verbring_peers::ends::{ECHO, Message, Pair, STREAM, stream};
use verbring_peers::process::{Board, Gate, Partner};
use verbring_peers::{Run, comment, out, pin, ticks};
use verbring_sys::cpu;

/// Operations of a row.
const COUNT: u64 = 1_000_000;
/// Operations before the first that is timed.
const WARM_UP: u64 = 10_000;
/// The empty loop is looked at for so many nanoseconds at a time: as long as a put with its completion takes.
const STRETCH: f64 = 60.0;
/// Until a process that loads the memory has touched all of it.
const RAMP: Duration = Duration::from_millis(300);

fn main() {
    let run = Run::from_args();
    let spare = cpu::available().iter().copied().find(|core| *core != run.cores.0 && *core != run.cores.1);
    let (board, name, gate) = (Board::new(), Pair::name(), Gate::new());
    let partner = Partner::start(|| Pair::meet(board, &name, false, run.cores.1).serve());
    let loader = Partner::start(|| {
        pin(spare.unwrap_or(run.cores.1));
        gate.wait();
        stream(|| false);
    });
    let mut tails =
        Tails { run, pair: Pair::meet(board, &name, true, run.cores.0), ns: ticks::ns_per_tick(), round: 1 };
    comment(format_args!(
        "{} operations a row, less {} ticks that reading the clock takes",
        run.count(COUNT),
        ticks::cost()
    ));
    comment("the figures move in the steps of the processor's clock, some 10 ns on Zen 3");
    comment("tail_clock: the longest gap in each stretch of 60 ns of reading the clock");
    tails.clock("tail_clock");
    tails.put_flush("tail_put_flush");
    tails.put_lat("tail_put_lat");
    comment("loaded: the other process streams through 256 MiB of memory on its core");
    board.begin([STREAM, 0, 0, 0, 0, 0]);
    thread::sleep(RAMP);
    tails.clock("tail_clock_loaded");
    tails.put_flush("tail_put_flush_loaded");
    board.stop.0.store(1, Ordering::Relaxed);
    board.end();
    match spare {
        Some(core) => {
            comment(format_args!("tail_put_lat_loaded: the process that loads the memory runs on core {core}"))
        }
        None => comment(
            "tail_put_lat_loaded: no third core, so the process that loads the memory shares that of the far end",
        ),
    }
    gate.open();
    thread::sleep(RAMP);
    tails.put_lat("tail_put_lat_loaded");
    drop((partner, loader));
}

struct Tails {
    run: Run,
    pair: Pair,
    /// Of a tick.
    ns: f64,
    round: u64,
}

impl Tails {
    /// Prints where the quantiles of ascending times lie. `share`: what is told of each.
    fn rows(&self, peer: &str, test: &str, times: &[u64], share: f64) {
        for (name, quantile) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("p99.99", 0.9999), ("max", 1.0)] {
            let at = ((times.len() as f64 * quantile) as usize).min(times.len() - 1);
            out(peer, &format!("{test}_{name}"), 8, times[at] as f64 * self.ns * share, "ns");
        }
    }

    /// The longest time between two readings, in each of many stretches.
    fn clock(&self, test: &str) {
        let stretch = (STRETCH / self.ns) as u64;
        let mut gaps = vec![u64::MAX; self.run.count(COUNT) as usize];
        for gap in &mut gaps {
            let (from, mut longest) = (ticks::now(), 0);
            let mut last = from;
            while last - from < stretch {
                let now = ticks::now();
                longest = longest.max(now - last);
                last = now;
            }
            *gap = longest;
        }
        gaps.sort_unstable();
        self.rows("floor", test, &gaps, 1.0);
    }

    fn put_flush(&mut self, test: &str) {
        let end = &mut self.pair.end;
        let mut put = || {
            end.alone(Sqe::put(end.outbox.slice(0, 8), end.key.at(0)));
        };
        (0..WARM_UP).for_each(|_| put());
        let times = ticks::times(self.run.count(COUNT), put);
        self.rows("verbring", test, &times, 1.0);
    }

    fn put_lat(&mut self, test: &str) {
        let rounds = self.run.count(COUNT);
        self.pair.board.begin([ECHO, Message::Put as u64, 8, self.round, WARM_UP + rounds, 0]);
        self.pair.ping_pong(Message::Put, 8, self.round, WARM_UP);
        self.round += WARM_UP;
        let (pair, round) = (&mut self.pair, &mut self.round);
        let times = ticks::times(rounds, || {
            pair.ping_pong(Message::Put, 8, *round, 1);
            *round += 1;
        });
        self.pair.board.end();
        self.rows("verbring", test, &times, 0.5);
    }
}
