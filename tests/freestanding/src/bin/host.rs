//! The scenario as a Linux process without std and without libc. Exit code 0: passed; 1: not.

#![no_std]
#![no_main]

use core::arch::{asm, naked_asm};
use core::fmt::{self, Write};
use core::panic::PanicInfo;

const SYS_WRITE: usize = 1;
const SYS_EXIT_GROUP: usize = 231;
const STDOUT: usize = 1;

/// # Safety
/// The entry of the process: only the kernel may jump here.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn _start() -> ! {
    // The kernel aligns the stack to 16 bytes; the call makes it what a function expects.
    naked_asm!("xor ebp, ebp", "call {}", "ud2", sym main)
}

extern "C" fn main() -> ! {
    let passed = freestanding::run(&mut Stdout);
    exit(!passed)
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Stdout, "{info}");
    exit(true)
}

struct Stdout;

impl Write for Stdout {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let written: isize;
            // SAFETY: write(2) only reads the bytes of `rest`; the kernel keeps all registers but rax, rcx and r11.
            unsafe {
                asm!(
                    "syscall",
                    inlateout("rax") SYS_WRITE => written,
                    in("rdi") STDOUT,
                    in("rsi") rest.as_ptr(),
                    in("rdx") rest.len(),
                    lateout("rcx") _,
                    lateout("r11") _,
                    options(nostack, readonly),
                );
            }
            rest = usize::try_from(written).ok().filter(|&n| n > 0).and_then(|n| rest.get(n..)).ok_or(fmt::Error)?;
        }
        Ok(())
    }
}

fn exit(failed: bool) -> ! {
    // SAFETY: exit_group(2) takes an integer and does not return.
    unsafe { asm!("syscall", in("rax") SYS_EXIT_GROUP, in("rdi") usize::from(failed), options(noreturn, nostack)) }
}
