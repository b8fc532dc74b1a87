//! What the freestanding programs share: the scenario, its memory, and the memory functions that a compiler expects.
//!
//! `host` runs the scenario as a Linux process without libc, `bare` on a machine without an operating system;
//! `hotloop` is only linked. `./check` builds and runs all of them.

#![no_std]

#[cfg(feature = "counterproof-std")]
extern crate std;

pub mod arena;
pub mod mem_functions;
mod nics;
pub mod scenario;

use core::fmt::Write;

/// Named by unwind tables of the precompiled core library wherever LTO keeps some; nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// Runs the scenario, prints its verdict, and returns whether it passed.
pub fn run(out: &mut dyn Write) -> bool {
    let verdict = match arena::take() {
        Some(memory) => scenario::run(out, memory),
        None => Err("the arena was taken before the scenario ran"),
    };
    // A verdict that nobody can read is not a success.
    match verdict {
        Ok(()) => writeln!(out, "scenario: passed").is_ok(),
        Err(why) => {
            let _ = writeln!(out, "scenario: FAILED: {why}");
            false
        }
    }
}
