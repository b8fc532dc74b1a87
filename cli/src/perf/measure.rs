//! Times one thing again and again.
//!
//! What is measured takes 10 ns to 100 ms, and reading the clock takes some 20 ns. So the median is that of blocks, with
//! the clock read around a whole block only; the tail is that of single ones, less the cost of reading the clock, which
//! at that end of the distribution matters little.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::PerfError;

/// Time for the blocks of a row, and again for the singles.
const PHASE: Duration = Duration::from_millis(300);
/// Time to warm up, and to find out how long one takes.
const WARM_UP: Duration = Duration::from_millis(20);
/// A block takes about that long: the clock's cost is 0.1 % of it, and few blocks are hit by an interrupt.
const BLOCK: Duration = Duration::from_micros(20);
/// The most in a block.
const LONGEST_BLOCK: u64 = 64;
/// The most samples of a phase: 4 MiB of them.
const SAMPLES: u64 = 500_000;

/// What was measured: times in picoseconds.
pub(crate) struct Times {
    /// Of one, by blocks.
    pub(crate) blocks: Histogram<u64>,
    /// Of one, each for itself.
    pub(crate) singles: Histogram<u64>,
    /// How many were timed.
    pub(crate) count: u64,
}

fn histogram() -> Result<Histogram<u64>, PerfError> {
    // Up to 1000 s, to three digits.
    Histogram::new_with_bounds(1, 1_000_000_000_000_000, 3).map_err(|error| PerfError::Other(error.to_string()))
}

/// Does `unit` as often as was asked for, or for some time, and `between` once before the last part of it.
pub(crate) fn measure<S>(
    state: &mut S,
    iters: Option<u64>,
    mut unit: impl FnMut(&mut S) -> Result<(), PerfError>,
    between: impl FnOnce(&mut S) -> Result<(), PerfError>,
) -> Result<Times, PerfError> {
    let each = warm_up(state, iters, &mut unit)?;
    let by_time = |phase: Duration| (phase.as_nanos() as u64 * 1000).div_ceil(each);
    let block = by_time(BLOCK).clamp(1, LONGEST_BLOCK).min(iters.unwrap_or(u64::MAX));
    let wanted = iters.unwrap_or_else(|| by_time(PHASE));
    let block_count = wanted.div_ceil(block).clamp(1, SAMPLES);
    let mut samples = Vec::with_capacity(block_count as usize);
    for _ in 0..block_count {
        let start = Instant::now();
        for _ in 0..block {
            unit(state)?;
        }
        samples.push(start.elapsed());
    }
    let mut blocks = histogram()?;
    for sample in &samples {
        blocks.saturating_record(sample.as_nanos() as u64 * 1000 / block);
    }

    between(state)?;
    let single_count = wanted.clamp(1, SAMPLES);
    let clock = clock_cost();
    samples.clear();
    samples.reserve(single_count as usize);
    for _ in 0..single_count {
        let start = Instant::now();
        unit(state)?;
        samples.push(start.elapsed());
    }
    let mut singles = histogram()?;
    for sample in &samples {
        singles.saturating_record(sample.saturating_sub(clock).as_nanos() as u64 * 1000);
    }
    Ok(Times { blocks, singles, count: block_count * block + single_count })
}

/// Picoseconds that one takes once all is warm; never 0.
fn warm_up<S>(
    state: &mut S,
    iters: Option<u64>,
    unit: &mut impl FnMut(&mut S) -> Result<(), PerfError>,
) -> Result<u64, PerfError> {
    let begin = Instant::now();
    let mut count = 1;
    loop {
        let start = Instant::now();
        for _ in 0..count {
            unit(state)?;
        }
        let each = (start.elapsed().as_nanos() as u64 * 1000 / count).max(1);
        if begin.elapsed() >= WARM_UP || count >= iters.unwrap_or(u64::MAX) {
            return Ok(each);
        }
        count *= 2;
    }
}

/// What a sample of nothing takes.
fn clock_cost() -> Duration {
    let mut samples: Vec<_> = (0..1001).map(|_| Instant::now().elapsed()).collect();
    samples.sort();
    samples[samples.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_as_asked() {
        let mut calls;
        let unit = |calls: &mut u64| {
            *calls += 1;
            Ok(())
        };
        for iters in [1, 2, 63, 64, 65, 1000] {
            let mut before_last = 0;
            calls = 0;
            let times = measure(&mut calls, Some(iters), unit, |calls| {
                before_last = *calls;
                Ok(())
            })
            .unwrap();
            assert_eq!(calls - before_last, iters, "the last part is what is verified");
            assert_eq!(times.singles.len(), iters);
            assert!(times.count >= 2 * iters && times.count < 2 * iters + 64);
        }
    }

    #[test]
    fn times_are_times() {
        let sleep = |_: &mut ()| {
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        };
        let times = measure(&mut (), Some(5), sleep, |_| Ok(())).unwrap();
        for histogram in [times.blocks, times.singles] {
            let median = histogram.value_at_quantile(0.5);
            assert!((900_000_000..500_000_000_000).contains(&median), "{median} ps");
        }
    }

    #[test]
    fn an_error_ends_it() {
        let fails = |left: &mut u32| {
            *left -= 1;
            if *left == 0 { Err(PerfError::Other("enough".into())) } else { Ok(()) }
        };
        assert!(measure(&mut 10, None, fails, |_| Ok(())).is_err());
    }
}
