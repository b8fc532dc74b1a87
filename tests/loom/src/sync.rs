//! What stands in the place of the engine's `sync`: loom's atomics.

pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};

#[cfg(not(feature = "counterproof-relaxed"))]
pub(crate) use loom::sync::atomic::Ordering;

/// With the feature, Release is Relaxed.
#[cfg(feature = "counterproof-relaxed")]
#[allow(non_snake_case, non_upper_case_globals)]
pub(crate) mod Ordering {
    use loom::sync::atomic::Ordering as Real;
    pub(crate) const Acquire: Real = Real::Acquire;
    pub(crate) const Relaxed: Real = Real::Relaxed;
    pub(crate) const Release: Real = Real::Relaxed;
}

/// Loom's atomics lie where they were made, not in other memory.
pub(crate) unsafe fn word_at<'a>(_: *mut u64) -> &'a AtomicU64 {
    unreachable!("the model makes its rings by Parts::at")
}
