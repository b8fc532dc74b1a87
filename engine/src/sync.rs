//! The atomics of the rings. `tests/loom` compiles the rings with a module of its own in this one's place, in which they
//! are loom's.

pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The word at an address.
///
/// # Safety
/// `address` is aligned and valid for 8 bytes, and all access to them is atomic, as long as the reference is used.
pub(crate) unsafe fn word_at<'a>(address: *mut u64) -> &'a AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(address) }
}
