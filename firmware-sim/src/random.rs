//! Random numbers of a seed: the same on every machine.

use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

/// A ratio of integers: `times` in `of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio {
    /// How often it happens ...
    pub times: u32,
    /// ... in so many cases.
    pub of: u32,
}

impl Ratio {
    /// It never happens.
    pub const NEVER: Ratio = Ratio { times: 0, of: 1 };
    /// It always happens.
    pub const ALWAYS: Ratio = Ratio { times: 1, of: 1 };

    /// `times` in `of`.
    pub const fn new(times: u32, of: u32) -> Ratio {
        Ratio { times, of }
    }
}

/// A source of random numbers.
#[derive(Clone, Debug)]
pub struct Random(Pcg64Mcg);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Random {
        Random(Pcg64Mcg::seed_from_u64(seed))
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Any number of 32 bits.
    pub fn any_u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// A number below `limit`; 0 if that is 0.
    pub fn below(&mut self, limit: u32) -> u32 {
        ((u64::from(self.0.next_u32()) * u64::from(limit)) >> 32) as u32
    }

    /// A number from `low` up to and with `high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        let span = high.saturating_sub(low);
        match span.checked_add(1) {
            None => self.any(),
            Some(count) => low + ((u128::from(self.any()) * u128::from(count)) >> 64) as u64,
        }
    }

    /// Whether something of this ratio happens now. What never happens draws nothing.
    pub fn happens(&mut self, ratio: Ratio) -> bool {
        ratio.times != 0 && (ratio.times >= ratio.of || self.below(ratio.of) < ratio.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_the_same_numbers() {
        let mut random = Random::new(7);
        let numbers: [u64; 3] = core::array::from_fn(|_| random.any());
        assert_eq!(
            numbers,
            [0; 3].map({
                let mut again = Random::new(7);
                move |_: u64| again.any()
            })
        );
        assert_ne!(Random::new(8).any(), numbers[0]);
    }

    #[test]
    fn ratios() {
        let mut random = Random::new(1);
        assert!((0..1000).all(|_| random.happens(Ratio::ALWAYS) && !random.happens(Ratio::NEVER)));
        let hits = (0..100_000).filter(|_| random.happens(Ratio::new(1, 4))).count();
        assert!((24_000..26_000).contains(&hits), "{hits}");
        assert!((0..1000).all(|_| random.below(3) < 3 && (5..=9).contains(&random.between(5, 9))));
    }
}
