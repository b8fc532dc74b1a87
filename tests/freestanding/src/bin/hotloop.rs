//! The hot loop cannot panic: the panic handler calls a function that does not exist, so this program links only when
//! the optimiser proved every panic unreachable: never in the dev profile. It is not run.
//!
//! Each exported function is a root, called with arguments nobody knows. `./check` looks for the prefix `hot_`.

#![no_std]
#![no_main]

use core::arch::naked_asm;
use core::panic::PanicInfo;

// For the memory functions, which nothing here names.
use freestanding as _;

unsafe extern "C" {
    safe fn verbring_panic_is_reachable() -> !;
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    verbring_panic_is_reachable()
}

/// # Safety
/// Not to be called: an entry for the linker.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn _start() -> ! {
    naked_asm!("ud2")
}

/// A placeholder: a table access whose index is masked.
#[unsafe(no_mangle)]
pub extern "C" fn hot_masked(table: &[u64; 64], index: usize) -> u64 {
    table[index % table.len()]
}

/// What the proof must refuse.
#[cfg(feature = "counterproof-index")]
#[unsafe(no_mangle)]
pub extern "C" fn hot_unmasked(table: &[u64; 64], index: usize) -> u64 {
    table[index]
}
