//! What the programs of this package share: arguments, output, the clock around blocks, a second process, and engines
//! in two processes.
//!
//! Every result is one line, `peer test size value unit`; what begins with `#` is for people.

pub mod ends;
pub mod pattern;
pub mod process;
pub mod ticks;

use std::fmt::Display;
use std::hint::black_box;
use std::io::{Write, stdout};
use std::process::exit;
use std::str::FromStr;
use std::time::{Duration, Instant};

use verbring_sys::cpu;

/// Seconds without a result after which a program ends.
pub const PATIENCE: u32 = 60;
/// A block takes at least that long: reading the clock is 0.01 % of it, and few blocks are hit by an interrupt or by
/// another process.
const BLOCK: Duration = Duration::from_micros(500);
/// All blocks of a row.
const TIME: Duration = Duration::from_millis(250);
const QUICK: Duration = Duration::from_millis(50);
/// Blocks of a row at least.
const LEAST: usize = 25;
const LEAST_QUICK: usize = 7;
/// The search for the size of a block ends here.
const MOST_REPEATS: u64 = 1 << 40;

/// What was asked of a program.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Where the two ends run.
    pub cores: (usize, usize),
    /// About a fifth of the work.
    pub quick: bool,
}

impl Run {
    /// The arguments, `--cores A,B` and `--quick`; ends the program if there are others. Starts the guard.
    pub fn from_args() -> Run {
        let mut run = Run { cores: (0, 1), quick: false };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--quick" => run.quick = true,
                "--cores" => {
                    let cores = args.next().and_then(|value| {
                        let (a, b) = value.split_once(',')?;
                        Some((usize::from_str(a).ok()?, usize::from_str(b).ok()?))
                    });
                    run.cores = cores.unwrap_or_else(|| fail("--cores takes two numbers, such as 0,1"));
                }
                _ => fail(format!("{arg} is no argument; there are --cores A,B and --quick")),
            }
        }
        // Asked for by an unpinned thread: a pinned one sees its own core only.
        cpu::available();
        process::guard();
        run
    }

    /// A count of operations, or a fifth of it.
    pub fn count(&self, full: u64) -> u64 {
        if self.quick { full / 5 } else { full }
    }

    /// Nanoseconds of one operation: the median of blocks. `repeat` does as many as it is told, and says how long they
    /// took.
    pub fn ns(&self, mut repeat: impl FnMut(u64) -> Duration) -> f64 {
        // The shortest of three: a block that was interrupted must not pass for a long one.
        let mut repeats = 1;
        let length = loop {
            let shortest = (0..3).map(|_| repeat(repeats)).min().unwrap_or_default();
            if shortest >= BLOCK || repeats >= MOST_REPEATS {
                break shortest;
            }
            let wanted = repeats as f64 * BLOCK.as_secs_f64() / shortest.as_secs_f64().max(1e-9);
            repeats = ((wanted * 1.1) as u64).clamp(repeats + 1, repeats * 64);
        };
        let (time, least) = if self.quick { (QUICK, LEAST_QUICK) } else { (TIME, LEAST) };
        let blocks = (time.as_nanos() / length.as_nanos().max(1)) as usize;
        let blocks = (0..blocks.max(least)).map(|_| repeat(repeats).as_secs_f64() * 1e9 / repeats as f64);
        median(blocks.collect())
    }
}

/// The middle one.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The time of `count` calls.
#[inline(always)]
pub fn clocked(count: u64, mut call: impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..black_box(count) {
        call();
    }
    start.elapsed()
}

/// Prints a result, and gives the next one its time.
pub fn out(peer: &str, test: &str, size: usize, value: f64, unit: &str) {
    print(format_args!("{peer} {test} {size} {value:.4} {unit}"));
    process::be_patient();
}

/// Prints what is for people.
pub fn comment(text: impl Display) {
    print(format_args!("# {text}"));
}

fn print(line: impl Display) {
    if writeln!(stdout(), "{line}").is_err() {
        exit(1);
    }
}

/// Ends the program in error.
pub fn fail(why: impl Display) -> ! {
    eprintln!("error: {why}");
    exit(1)
}

/// Pins this thread, or ends the program.
pub fn pin(core: usize) {
    cpu::pin(core).unwrap_or_else(|error| fail(error));
}
