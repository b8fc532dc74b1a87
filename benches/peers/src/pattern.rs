//! Bytes that tell where they belong.

use verbring::Window;

/// Bytes that are made and compared at a time.
const CHUNK: usize = 4096;

/// The word at `offset`, a multiple of 8.
pub fn word(seed: u64, offset: u64) -> u64 {
    let x = (seed << 40 ^ offset).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// The bytes at `offset`, a multiple of 8.
pub fn bytes(seed: u64, offset: u64, to: &mut [u8]) {
    for (i, part) in to.chunks_mut(8).enumerate() {
        part.copy_from_slice(&word(seed, offset + i as u64 * 8).to_le_bytes()[..part.len()]);
    }
}

/// Writes the first `len` bytes of a window.
pub fn fill(window: &Window, len: u64, seed: u64) {
    let mut made = [0; CHUNK];
    for at in (0..len).step_by(CHUNK) {
        let part = &mut made[..CHUNK.min((len - at) as usize)];
        bytes(seed, at, part);
        window.write(at as usize, part);
    }
}

/// Where the bytes of several operations lie.
#[derive(Clone, Copy, Debug)]
pub struct Slots {
    /// Of the first.
    pub at: u64,
    /// Bytes of each.
    pub len: u64,
    /// From one to the next.
    pub stride: u64,
    /// How many.
    pub count: u64,
}

/// Whether the slots hold the bytes of a pattern, of which the first slot has those from `base` on.
pub fn is_right(window: &Window, slots: Slots, base: u64, seed: u64) -> bool {
    (0..slots.count).all(|slot| {
        let from = slot * slots.stride;
        is_range_right(window, slots.at + from, slots.len, base + from, seed)
    })
}

fn is_range_right(window: &Window, at: u64, len: u64, base: u64, seed: u64) -> bool {
    let (mut made, mut seen) = ([0; CHUNK], [0; CHUNK]);
    (0..len).step_by(CHUNK).all(|from| {
        let part = CHUNK.min((len - from) as usize);
        bytes(seed, base + from, &mut made[..part]);
        window.read((at + from) as usize, &mut seen[..part]);
        made[..part] == seen[..part]
    })
}

/// Numbers without a pattern (xorshift64*).
pub struct Random(u64);

impl Random {
    /// From a seed that is not 0.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A number below `below`.
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below
    }
}
