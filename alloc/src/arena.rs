//! Fixed-capacity tables carved from one block of memory at start.

use core::fmt;
use core::marker::PhantomData;
use core::mem::{MaybeUninit, align_of, needs_drop, size_of};
use core::ptr::NonNull;

/// A bump allocator over one private mapping. Nothing is given back one by one: the mapping goes as a whole, with the
/// arena.
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    used: usize,
    #[cfg(feature = "std")]
    region: Option<crate::Region>,
}

/// The arena has no room for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaFull {
    /// Bytes the table needs.
    pub needed: usize,
    /// Bytes that are left.
    pub left: usize,
}

impl fmt::Display for ArenaFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the arena is full: a table needs {} bytes and {} are left; give a larger block, or smaller capacities",
            self.needed, self.left
        )
    }
}

impl core::error::Error for ArenaFull {}

// SAFETY: an arena is the only owner of its memory, and hands out parts of it by unsafe calls only.
unsafe impl Send for Arena {}
// SAFETY: `&Arena` gives out numbers only.
unsafe impl Sync for Arena {}

impl Arena {
    /// An arena over memory of the caller.
    pub fn from_static(memory: &'static mut [MaybeUninit<u8>]) -> Arena {
        let len = memory.len();
        Arena {
            base: NonNull::from(memory).cast(),
            len,
            used: 0,
            #[cfg(feature = "std")]
            region: None,
        }
    }

    /// An arena over a private region, which it owns from now on.
    ///
    /// # Panics
    /// If the region is shared with other processes: tables hold what no other process may write.
    #[cfg(feature = "std")]
    pub fn from_region(region: crate::Region) -> Arena {
        assert!(!region.is_shared(), "an arena lies in private memory");
        Arena { base: region.base(), len: region.len(), used: 0, region: Some(region) }
    }

    /// The pages that the arena lies in, where it made its mapping itself.
    #[cfg(feature = "std")]
    pub fn pages(&self) -> Option<crate::Pages> {
        self.region.as_ref().map(|r| r.pages())
    }

    /// Whether its memory is the caller's, and stays when the arena goes.
    pub fn is_static(&self) -> bool {
        #[cfg(feature = "std")]
        return self.region.is_none();
        #[cfg(not(feature = "std"))]
        return true;
    }

    /// Bytes not yet handed out.
    pub fn left(&self) -> usize {
        self.len - self.used
    }

    /// A block of `len` zeroed bytes at a multiple of `align` (a power of two).
    ///
    /// # Safety
    /// The block must not be used after the arena was dropped.
    pub unsafe fn block(&mut self, len: usize, align: usize) -> Result<NonNull<u8>, ArenaFull> {
        debug_assert!(align.is_power_of_two());
        let address = self.base.as_ptr() as usize + self.used;
        let start = self.used + (address.wrapping_neg() & (align - 1));
        let full = ArenaFull { needed: len, left: self.len.saturating_sub(start) };
        let end = start.checked_add(len).filter(|end| *end <= self.len).ok_or(full)?;
        self.used = end;
        // SAFETY: start + len <= self.len, inside the block that the arena owns; nobody else was given these bytes.
        let block = unsafe { self.base.add(start) };
        // SAFETY: as above, and nothing refers to the bytes yet.
        unsafe { block.write_bytes(0, len) };
        Ok(block)
    }

    /// A table of `capacity` (rounded up to a power of two, at least 1) entries, each made by `init`.
    ///
    /// # Safety
    /// The table must not be used after the arena was dropped.
    pub unsafe fn table<T>(&mut self, capacity: u32, mut init: impl FnMut(u32) -> T) -> Result<Table<T>, ArenaFull> {
        const { assert!(!needs_drop::<T>(), "entries of a table are not dropped") };
        let capacity = Table::<T>::capacity_for(capacity);
        // A cache line is the least alignment: two tables never share one.
        let align = if align_of::<T>() > 64 { align_of::<T>() } else { 64 };
        // SAFETY: the caller's promise is the same.
        let base = unsafe { self.block(capacity as usize * size_of::<T>(), align) }?.cast::<T>();
        for i in 0..capacity {
            // SAFETY: i < capacity, and the block was carved for that many entries.
            unsafe { base.add(i as usize).write(init(i)) };
        }
        Ok(Table { base, mask: capacity - 1 })
    }
}

/// A table of a power of two of entries. An index is masked, so every index is in bounds and nothing can panic; who
/// needs to know whether an index was meant compares an identity in the entry.
pub struct Table<T> {
    base: NonNull<T>,
    mask: u32,
}

// SAFETY: a table is the only way to its entries, like a Box.
unsafe impl<T: Send> Send for Table<T> {}
// SAFETY: `&Table<T>` gives out `&T` only.
unsafe impl<T: Sync> Sync for Table<T> {}

impl<T> Table<T> {
    /// The number of entries that a table asked for `capacity` gets.
    pub const fn capacity_for(capacity: u32) -> u32 {
        let capacity = if capacity == 0 { 1 } else { capacity };
        assert!(capacity <= 1 << 24, "a table has at most 2^24 entries");
        capacity.next_power_of_two()
    }

    /// The bytes of an arena that a table asked for `capacity` takes, alignment included.
    pub const fn bytes(capacity: u32) -> usize {
        Self::capacity_for(capacity) as usize * size_of::<T>() + if align_of::<T>() > 64 { align_of::<T>() } else { 64 }
    }

    /// The number of entries.
    #[inline(always)]
    pub fn capacity(&self) -> u32 {
        self.mask + 1
    }

    /// The entry at `index` modulo the capacity.
    #[inline(always)]
    pub fn at(&self, index: u32) -> &T {
        // SAFETY: the masked index is below the capacity, and every entry was initialised.
        unsafe { self.base.add((index & self.mask) as usize).as_ref() }
    }

    /// The entry at `index`.
    ///
    /// # Safety
    /// `index` is below the capacity.
    #[inline(always)]
    pub unsafe fn at_unchecked(&self, index: u32) -> &T {
        debug_assert!(index <= self.mask);
        // SAFETY: the caller's promise, and every entry was initialised.
        unsafe { self.base.add(index as usize).as_ref() }
    }

    /// The entry at `index` modulo the capacity.
    #[inline(always)]
    pub fn at_mut(&mut self, index: u32) -> &mut T {
        // SAFETY: as in `at`; `&mut self` makes it the only reference.
        unsafe { self.base.add((index & self.mask) as usize).as_mut() }
    }

    /// The table by value.
    #[inline(always)]
    pub fn view(&self) -> View<'_, T> {
        const { assert!(size_of::<T>().is_power_of_two()) };
        View { base: self.base, mask: self.mask as usize * size_of::<T>(), table: PhantomData }
    }

    /// All entries, in order.
    pub fn iter(&self) -> core::slice::Iter<'_, T> {
        // SAFETY: capacity entries were initialised in a row.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr(), self.capacity() as usize) }.iter()
    }

    /// All entries, in order.
    pub fn iter_mut(&mut self) -> core::slice::IterMut<'_, T> {
        // SAFETY: as in `iter`; `&mut self` makes it the only reference.
        unsafe { core::slice::from_raw_parts_mut(self.base.as_ptr(), self.capacity() as usize) }.iter_mut()
    }
}

/// A table by value, for a loop that stores through raw pointers: the fields of a borrowed table would be loaded again
/// after each such store.
pub struct View<'a, T> {
    base: NonNull<T>,
    mask: usize,
    table: PhantomData<&'a T>,
}

impl<T> View<'_, T> {
    /// The entry at `offset` bytes, modulo the size of the table and of an entry.
    #[inline(always)]
    pub fn at_offset(&self, offset: u32) -> &T {
        // SAFETY: the masked offset is that of an entry, and every entry was initialised.
        unsafe { self.base.byte_add(offset as usize & self.mask).as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;
    use std::vec;

    fn arena(len: usize) -> Arena {
        Arena::from_static(Box::leak(vec![MaybeUninit::new(0xaau8); len].into_boxed_slice()))
    }

    #[test]
    fn every_index_is_in_bounds() {
        let mut arena = arena(4096);
        // SAFETY: the arena outlives the table.
        let mut table = unsafe { arena.table(3, |i| i * 10) }.unwrap();
        assert_eq!(table.capacity(), 4);
        *table.at_mut(7) += 1;
        assert_eq!(*table.at(u32::MAX), 31);
        assert_eq!(table.iter().copied().collect::<vec::Vec<_>>(), [0, 10, 20, 31]);
        assert_eq!([0, 4, 12, 15, 16 + 8, u32::MAX].map(|o| *table.view().at_offset(o)), [0, 10, 31, 31, 20, 31]);
    }

    #[test]
    fn full_names_both_figures() {
        let mut arena = arena(1000);
        // SAFETY: the arena outlives the tables.
        let first = unsafe { arena.table(8, |_| [0u64; 8]) };
        assert!(first.is_ok());
        // SAFETY: as above.
        let second = unsafe { arena.table(8, |_| [0u64; 8]) };
        let Err(full) = second else { panic!("there is no room for it") };
        assert_eq!(full.needed, 512);
        assert!(full.left < 512);
    }

    #[test]
    fn blocks_are_zeroed_and_aligned() {
        let mut arena = arena(1 << 14);
        // SAFETY: the arena outlives the block.
        let block = unsafe { arena.block(100, 4096) }.unwrap();
        assert_eq!(block.as_ptr() as usize % 4096, 0);
        // SAFETY: 100 bytes of the arena.
        assert!(unsafe { core::slice::from_raw_parts(block.as_ptr(), 100) }.iter().all(|b| *b == 0));
    }
}
