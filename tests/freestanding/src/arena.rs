//! One static block of memory for the scenario.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, Ordering};

/// Bytes of the arena.
pub const SIZE: usize = 4 << 20;
/// Alignment of the arena in bytes: that of a huge page.
pub const ALIGN: usize = 2 << 20;

#[repr(align(0x20_0000))]
struct Block(UnsafeCell<[MaybeUninit<u8>; SIZE]>);

const _: () = assert!(align_of::<Block>() == ALIGN);

// SAFETY: `take` is the only one to touch the cell, and hands it out once.
unsafe impl Sync for Block {}

static BLOCK: Block = Block(UnsafeCell::new([MaybeUninit::uninit(); SIZE]));
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The whole arena, the first time; `None` ever after.
pub fn take() -> Option<&'static mut [MaybeUninit<u8>]> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return None;
    }
    // SAFETY: the swap lets one caller through in the life of the program, so this is the only reference.
    Some(unsafe { &mut *BLOCK.0.get() })
}
