//! Memory that peers may reach.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use verbring_sys::{Memory, copy};

use crate::sqe::Local;

/// Memory registered with an engine that others may read or write at any time, so it is never a Rust reference: words
/// are reached by atomics, ranges by copies that race without harm. Threads may share it; it stays valid after the
/// engine is gone.
#[derive(Clone, Debug)]
pub struct Window {
    pub(crate) lkey: u32,
    base: NonNull<u8>,
    len: usize,
    /// Keeps the mapping.
    _memory: Memory,
}

// SAFETY: all access is by atomics and racing copies, and the mapping is kept.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    pub(crate) fn new(lkey: u32, memory: Memory) -> Window {
        let (base, len) = memory.range();
        Window { lkey, base, len, _memory: memory }
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its address in this process.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// A part of it as the local end of an operation. A part that leaves it is refused when it is submitted.
    #[inline(always)]
    pub const fn slice(&self, offset: u64, len: u32) -> Local {
        Local { lkey: self.lkey, offset, len }
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If they leave the window.
    #[inline(always)]
    #[track_caller]
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let fits = len <= self.len && offset <= self.len - len;
        assert!(fits, "{len} bytes at {offset} leave a window of {} bytes", self.len);
        // SAFETY: in bounds.
        unsafe { self.base.as_ptr().add(offset) }
    }

    #[inline(always)]
    #[track_caller]
    fn word_at(&self, offset: usize) -> u64 {
        let address = self.at(offset, 8) as u64;
        assert!(address.is_multiple_of(8), "a word lies at a multiple of 8 bytes, not at {offset}");
        address
    }

    /// The word at `offset` (a multiple of 8). What was put before it by a `put_signal` is seen afterwards.
    ///
    /// # Panics
    /// If it leaves the window or is misaligned.
    #[inline(always)]
    pub fn load(&self, offset: usize) -> u64 {
        // SAFETY: in bounds and aligned.
        unsafe { copy::load_signal(self.word_at(offset)) }
    }

    /// Stores a word, after all that this thread wrote before.
    ///
    /// # Panics
    /// As [`Window::load`].
    #[inline(always)]
    pub fn store(&self, offset: usize, value: u64) {
        // SAFETY: in bounds and aligned.
        unsafe { copy::word(self.word_at(offset)) }.store(value, Ordering::Release);
    }

    /// Adds to a word and gives the old value. Atomic against peers whose atomics are of domain `Cpu`.
    ///
    /// # Panics
    /// As [`Window::load`].
    pub fn fetch_add(&self, offset: usize, value: u64) -> u64 {
        // SAFETY: in bounds and aligned.
        unsafe { copy::word(self.word_at(offset)) }.fetch_add(value, Ordering::SeqCst)
    }

    /// Copies out of the window. Bytes that a peer writes meanwhile may be old or new, each for itself.
    ///
    /// # Panics
    /// If the range leaves the window.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        let from = self.at(offset, to.len());
        // SAFETY: in bounds; the slice is ours.
        unsafe { copy::copy(to.as_mut_ptr(), from, to.len()) };
    }

    /// Copies into the window.
    ///
    /// # Panics
    /// If the range leaves the window.
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: in bounds; the slice is ours.
        unsafe { copy::copy(to, from.as_ptr(), from.len()) };
    }

    /// Fills a range.
    ///
    /// # Panics
    /// If the range leaves the window.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        let block = [byte; 256];
        for at in (0..len).step_by(block.len()) {
            self.write(offset + at, &block[..block.len().min(len - at)]);
        }
    }
}
