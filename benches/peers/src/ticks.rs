//! The processor's own clock, for what is too short or too many for the system's.

use std::time::{Duration, Instant};

/// Reads the clock, after all that was begun before.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn now() -> u64 {
    use std::arch::x86_64::{_mm_lfence, _rdtsc};
    // SAFETY: every x86-64 has both.
    unsafe {
        _mm_lfence();
        _rdtsc()
    }
}

/// Nanoseconds of the system's clock, where the processor's is not known.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub fn now() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Nanoseconds of a tick, by the system's clock.
pub fn ns_per_tick() -> f64 {
    let (start, from) = (Instant::now(), now());
    while start.elapsed() < Duration::from_millis(50) {}
    start.elapsed().as_nanos() as f64 / (now() - from) as f64
}

/// Ticks between two readings, with nothing between them: the usual ones.
pub fn cost() -> u64 {
    let mut samples: Vec<u64> = (0..10_001)
        .map(|_| {
            let from = now();
            now() - from
        })
        .collect();
    samples.sort_unstable();
    samples[samples.len() / 2]
}

/// Times `count` calls one by one: ticks of each, less what the clock costs, ascending.
pub fn times(count: u64, mut call: impl FnMut()) -> Vec<u64> {
    // Written once, so that no page is new when it matters.
    let mut samples = vec![u64::MAX; count as usize];
    for sample in &mut samples {
        let from = now();
        call();
        *sample = now() - from;
    }
    let cost = cost();
    samples.iter_mut().for_each(|sample| *sample = sample.saturating_sub(cost));
    samples.sort_unstable();
    samples
}
