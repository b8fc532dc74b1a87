//! What the fuzz targets do with their bytes. It is a library, so that tests can run it without a fuzzer.
//!
//! Each target takes any bytes and panics if an oracle says that something is wrong.

use std::alloc::Layout;
use std::cell::RefCell;
use std::mem::MaybeUninit;

pub mod channel;
pub mod nic;
pub mod packet;
pub mod rc;

/// The fuzzer's bytes, taken from the front. Where there are none left they are 0.
pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    /// All of them.
    pub fn new(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes(bytes)
    }

    /// Whether there are none left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Up to so many of them.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// As many as an array has.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.take(N);
        let mut array = [0; N];
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    /// A number of 8 bits.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// A number of 16 bits.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// A number of 32 bits.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// A number of 64 bits.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `limit`, which is at most 256.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::from(self.u8()) % limit
    }

    /// Mostly 0, sometimes a small number of either sign, seldom any.
    pub fn near(&mut self) -> u32 {
        match self.u8() {
            0..192 => 0,
            small @ 192..250 => u32::from(small).wrapping_sub(220),
            _ => self.u32(),
        }
    }
}

/// Pages that every run of this thread uses again: mapping them anew takes longer than a run.
///
/// # Safety
/// Nothing that an earlier run put into the block of this number is used any more.
pub(crate) unsafe fn block(number: usize, bytes: usize) -> &'static mut [MaybeUninit<u8>] {
    thread_local!(static BLOCKS: RefCell<[(usize, usize); 3]> = const { RefCell::new([(0, 0); 3]) });
    BLOCKS.with_borrow_mut(|blocks| {
        let (address, len) = &mut blocks[number];
        if *len < bytes {
            let layout = Layout::from_size_align(bytes, 4096).expect("a size");
            if *len != 0 {
                let before = Layout::from_size_align(*len, 4096).expect("a size");
                // SAFETY: it was allocated so, and by the caller's promise nothing uses it.
                unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(*address), before) };
            }
            // SAFETY: the size is not 0.
            (*address, *len) = (unsafe { std::alloc::alloc_zeroed(layout) }.expose_provenance(), bytes);
        }
        // SAFETY: so long is the block, and the caller answers for there being no other reference.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(*address), bytes) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use verbring_sim::nic::Defect;
    use verbring_sim::random::Random;

    fn any_bytes(random: &mut Random) -> Vec<u8> {
        let len = random.below(2000);
        (0..len).map(|_| random.any() as u8).collect()
    }

    #[test]
    fn random_bytes() {
        for seed in 0..300 {
            let bytes = any_bytes(&mut Random::new(seed));
            packet::run(&bytes);
            nic::run(&bytes, None);
            channel::run(&bytes);
            rc::run(&bytes);
        }
    }

    /// The oracles of the NIC find what is wrong with it.
    #[test]
    fn defects_are_found() {
        for defect in [Defect::BoundsOffByOne, Defect::GapsIgnored] {
            let found = (0..20_000).find(|seed| {
                let bytes = any_bytes(&mut Random::new(*seed));
                catch_unwind(AssertUnwindSafe(|| nic::run(&bytes, Some(defect)))).is_err()
            });
            assert!(found.is_some(), "{defect:?}");
        }
    }
}
