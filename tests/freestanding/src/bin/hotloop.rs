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
use verbring::{Engine, Opts, Sqe, Target};
use verbring_sim::nic::Nic;
use verbring_sim::packet::Ip;
use verbring_sys::local::Local;
use verbring_sys::rnic::{PostError, RnicWc, SendWr};

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

/// `push`: any entry.
#[unsafe(no_mangle)]
pub extern "C" fn hot_push(engine: &mut Engine<Local>, sqe: &Sqe) -> bool {
    engine.push(*sqe).is_ok()
}

/// `submit`, with the whole data path of `local`, which is that of shm (`CpuNic`).
#[unsafe(no_mangle)]
pub extern "C" fn hot_submit(engine: &mut Engine<Local>, now: u64) -> u32 {
    engine.submit(now)
}

/// `poll`, likewise.
#[unsafe(no_mangle)]
pub extern "C" fn hot_poll(engine: &mut Engine<Local>, now: u64) -> u32 {
    engine.poll(now)
}

/// `reap`: the completion, and whether a block came with it, which stays with the engine.
#[unsafe(no_mangle)]
pub extern "C" fn hot_reap(engine: &mut Engine<Local>, user_data: &mut u64) -> bool {
    match engine.reap() {
        None => false,
        Some(done) => {
            *user_data = done.user_data;
            done.buf.into_iter().for_each(|buf| engine.free(buf));
            true
        }
    }
}

/// Blocks: allocation, and the puts that take them.
#[unsafe(no_mangle)]
pub extern "C" fn hot_put(engine: &mut Engine<Local>, len: usize, target: &Target) -> bool {
    match engine.alloc(len) {
        Ok(buf) => engine.put(buf, *target, Opts::default()).is_ok(),
        Err(_) => false,
    }
}

/// The NIC: any bytes from the wire.
#[unsafe(no_mangle)]
pub extern "C" fn hot_handle_packet(nic: &mut Nic, now: u64, ip: &Ip, packet: &&[u8]) {
    nic.handle_packet(now, ip, packet);
}

/// The NIC: the next packet, into a buffer of any length.
#[unsafe(no_mangle)]
pub extern "C" fn hot_poll_transmit(nic: &mut Nic, now: u64, buffer: &mut &mut [u8]) -> usize {
    nic.poll_transmit(now, buffer).map_or(0, |out| out.len)
}

/// The NIC: what is due by time.
#[unsafe(no_mangle)]
pub extern "C" fn hot_handle_timeout(nic: &mut Nic, now: u64) -> u64 {
    nic.handle_timeout(now);
    nic.poll_timeout()
}

/// The NIC: any work request, and what has ended.
///
/// # Safety
/// As `Nic::post_send`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hot_post_and_poll(nic: &mut Nic, qp: u32, wr: &SendWr, wcs: &mut &mut [RnicWc]) -> usize {
    // SAFETY: the caller's promise.
    match unsafe { nic.post_send(qp, wr) } {
        Err(PostError::NoSuchQp) => 0,
        _ => nic.poll_cq(qp, wcs),
    }
}

/// What the proof must refuse.
#[cfg(feature = "counterproof-index")]
#[unsafe(no_mangle)]
pub extern "C" fn hot_unmasked(table: &[u64; 64], index: usize) -> u64 {
    table[index]
}
