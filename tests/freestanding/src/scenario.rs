//! What is run on every freestanding target.

use core::fmt::Write;
use core::mem::MaybeUninit;

use crate::arena;

/// Runs once. `memory` is [`arena::SIZE`] bytes at a boundary of [`arena::ALIGN`]; the error says what went wrong.
pub fn run(out: &mut dyn Write, memory: &'static mut [MaybeUninit<u8>]) -> Result<(), &'static str> {
    if memory.len() != arena::SIZE || !memory.as_ptr().addr().is_multiple_of(arena::ALIGN) {
        return Err("the arena has another size or alignment than promised");
    }
    if arena::take().is_some() {
        return Err("the arena was handed out twice");
    }

    for (index, byte) in memory.iter_mut().enumerate() {
        byte.write(index as u8);
    }
    // SAFETY: the loop wrote every byte.
    let bytes = unsafe { memory.assume_init_mut() };
    let half = arena::SIZE / 2;
    // Overlaps in either direction, at an odd distance.
    bytes.copy_within(0..half, 3);
    bytes.copy_within(3..half + 3, 0);
    if !bytes[..half].iter().enumerate().all(|(index, &byte)| byte == index as u8) {
        return Err("memmove damaged the bytes");
    }
    let (low, high) = bytes.split_at_mut(half);
    high.copy_from_slice(low);
    if low != high {
        return Err("memcpy and memcmp disagree");
    }
    high[half - 1] -= 1;
    if low <= high {
        return Err("memcmp does not see the last byte");
    }

    // Floating point needs SSE to be on.
    let mebibytes = bytes.len() as f64 / f64::from(1 << 20);
    writeln!(out, "arena: {mebibytes:.1} MiB moved, copied and compared").map_err(|_| "cannot print")
}
