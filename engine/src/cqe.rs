//! The completion queue entry. Its byte table stands in docs/ARCHITECTURE.md.

use verbring_sys::Status;

/// A completion as it lies in the ring: 16 bytes, and a word beside the ring where it has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// Of the sqe.
    pub user_data: u64,
    /// How it ended.
    pub status: Status,
    /// The immediate of a received message, else 0.
    pub imm: u32,
    /// The old value of an atomic; the length of a received message; else 0. Means nothing if `status` is an error.
    pub value: u64,
}

/// In the flags of a cqe: which lap of the ring it is of. Written last.
pub(crate) const PHASE: u16 = 1 << 15;
/// A value stands beside it.
pub(crate) const VALUE: u16 = 1 << 0;
/// The value is a block that comes back: offset / 64 below, length above.
pub(crate) const BLOCK: u16 = 1 << 1;

impl Cqe {
    /// Whether the operation was done.
    #[inline(always)]
    pub fn is_success(&self) -> bool {
        self.status.is_success()
    }
}

/// What `BLOCK` says of the value.
pub(crate) const fn block(offset: u64, len: u32) -> u64 {
    (offset >> 6) & 0xffff_ffff | (len as u64) << 32
}

/// The offset and length of a block.
pub(crate) const fn unblock(value: u64) -> (u64, u32) {
    ((value & 0xffff_ffff) << 6, (value >> 32) as u32)
}
