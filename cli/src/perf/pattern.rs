//! Bytes that tell where they belong: every word follows from seed, test, size, slot and part of the run, so a message
//! that went to the wrong place, or is of an earlier part, is not taken for the right one.

use verbring::Window;

use super::rows::{Layout, Place, Row};

/// Bytes that are made and compared at a time.
const CHUNK: usize = 4096;

/// Which bytes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Before the last part of the run.
    Early = 1,
    /// In the last part: what is verified.
    Last = 2,
    /// What the other end sends back.
    Echo = 3,
}

/// Where a pattern starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

/// The finaliser of splitmix64: every bit of the input moves every bit of the output.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Key {
    /// The key of a slot's bytes.
    pub(crate) fn new(seed: u64, row: &Row, slot: u32, part: Part) -> Key {
        let mut key = seed;
        for number in [row.index(), u64::from(row.layout.size), u64::from(slot), part as u64] {
            key = mix(key.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ number);
        }
        Key(key)
    }

    /// Word `i`.
    fn word(self, i: u64) -> u64 {
        let x = self.0.wrapping_add(i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x ^ x >> 32
    }

    /// The bytes from `at`, a multiple of 8, on.
    fn write_to(self, at: usize, bytes: &mut [u8]) {
        let first = at as u64 / 8;
        for (i, word) in bytes.chunks_mut(8).enumerate() {
            word.copy_from_slice(&self.word(first + i as u64).to_le_bytes()[..word.len()]);
        }
    }
}

/// Writes a pattern.
fn fill(window: &Window, offset: usize, len: usize, key: Key) {
    let mut bytes = [0; CHUNK];
    for at in (0..len).step_by(CHUNK) {
        let bytes = &mut bytes[..CHUNK.min(len - at)];
        key.write_to(at, bytes);
        window.write(offset + at, bytes);
    }
}

/// The offset of the first byte that is not of the pattern (none: of zeroes).
pub(crate) fn first_wrong(window: &Window, offset: usize, len: usize, key: Option<Key>) -> Option<usize> {
    let (mut expected, mut seen) = ([0; CHUNK], [0; CHUNK]);
    for at in (0..len).step_by(CHUNK) {
        let len = CHUNK.min(len - at);
        if let Some(key) = key {
            key.write_to(at, &mut expected[..len]);
        }
        window.read(offset + at, &mut seen[..len]);
        if let Some(wrong) = expected[..len].iter().zip(&seen[..len]).position(|(a, b)| a != b) {
            return Some(offset + at + wrong);
        }
    }
    None
}

/// Writes every slot's bytes.
pub(crate) fn fill_slots(window: &Window, seed: u64, row: &Row, place: Place, part: Part) {
    let Layout { size, slots } = row.layout;
    for slot in 0..slots {
        fill(window, row.layout.at(place, slot) as usize, size as usize, Key::new(seed, row, slot, part));
    }
}

/// The offset of the first byte that is not as it has to be: slots of the pattern, zeroes before, between and behind.
pub(crate) fn first_wrong_of_slots(window: &Window, seed: u64, row: &Row, place: Place, part: Part) -> Option<usize> {
    let Layout { size, slots } = row.layout;
    let mut end = 0;
    for slot in 0..slots {
        let at = row.layout.at(place, slot) as usize;
        let wrong = first_wrong(window, end, at - end, None)
            .or_else(|| first_wrong(window, at, size as usize, Some(Key::new(seed, row, slot, part))));
        if wrong.is_some() {
            return wrong;
        }
        end = at + size as usize;
    }
    first_wrong(window, end, row.layout.extent() as usize - end, None)
}

#[cfg(test)]
mod tests {
    use super::super::{definitions, rows};
    use super::*;
    use verbring::{Config, Rights};

    fn window(len: u64) -> (verbring::ShmEngine, Window) {
        let name = format!("perf-test-{:x}", super::super::random());
        let mut engine = verbring::open_shm(&name, Config::default(), &[]).unwrap();
        let window = engine.window(len as usize, Rights::empty()).unwrap();
        (engine, window)
    }

    #[test]
    fn a_flipped_bit_anywhere_is_seen() {
        for size in [1, 7, 8, 100, 5000] {
            let tests = [definitions::parse_test("put_bw").unwrap()];
            let row = rows::plan(&tests, &[size], Some(3)).unwrap()[0];
            let (_engine, window) = window(row.layout.extent());
            fill_slots(&window, 42, &row, Place::Remote, Part::Last);
            let check = |seed, part| first_wrong_of_slots(&window, seed, &row, Place::Remote, part);
            assert_eq!(check(42, Part::Last), None);
            if size > 1 {
                let first = Some(row.layout.at(Place::Remote, 0) as usize);
                assert_eq!((check(43, Part::Last), check(42, Part::Early)), (first, first), "size {size}");
            }
            let mut byte = [0];
            for at in 0..row.layout.extent() as usize {
                window.read(at, &mut byte);
                window.write(at, &[byte[0] ^ 4]);
                assert_eq!(check(42, Part::Last), Some(at));
                window.write(at, &byte);
            }
        }
    }

    #[test]
    fn slots_tests_and_sizes_differ() {
        let rows = rows::plan(&[], &[], None).unwrap();
        let mut keys = std::collections::HashSet::new();
        for row in &rows {
            for slot in 0..row.layout.slots {
                for part in [Part::Early, Part::Last, Part::Echo] {
                    assert!(keys.insert(Key::new(7, row, slot, part).0));
                }
            }
        }
    }

    #[test]
    fn a_pattern_is_the_same_in_pieces() {
        let (mut whole, mut part) = ([0; 64], [0; 13]);
        Key(9).write_to(0, &mut whole);
        Key(9).write_to(24, &mut part);
        assert_eq!(whole[24..37], part);
    }
}
