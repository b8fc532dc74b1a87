//! A fixed-capacity slab over one block of memory that is registered with the devices once.
//!
//! A block is free, owned (a [`Buf`] exists), or lent (it moved into an operation, and comes back by its offset). Whether
//! it is lent lies in a word of its own beside the blocks, with a generation that changes each time it is lent, so a raw
//! handle that is used twice is caught.
//!
//! The slab belongs to one thread. A `Buf` may be dropped anywhere: it goes on a stack that is linked through the words
//! beside the blocks, cannot be full, and is taken whole by the owner when a size class runs dry.

use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use crate::{Arena, ArenaFull, Table};

/// Bits of a block's global index.
const INDEX_BITS: u32 = 24;

/// Binary logarithms of a length.
const POWERS: usize = 64;

/// The largest number of size classes.
pub const MAX_CLASSES: usize = 8;

/// So many blocks of so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeClass {
    /// Bytes of a block.
    pub size: u32,
    /// Number of blocks.
    pub count: u32,
}

/// Why the slab gave no block, or could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlabError {
    /// No size class is that large.
    TooLarge {
        /// Bytes asked for.
        len: usize,
        /// Bytes of the largest class.
        largest: u32,
    },
    /// Every block that is large enough is in use.
    Exhausted {
        /// Bytes asked for.
        len: usize,
    },
    /// The size classes are none, more than [`MAX_CLASSES`], not in ascending order, or empty.
    Classes,
    /// The memory is too small for the classes.
    Memory(ArenaFull),
}

impl fmt::Display for SlabError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SlabError::TooLarge { len, largest } => {
                write!(f, "{len} bytes were asked for and the largest size class has {largest}; add a larger class")
            }
            SlabError::Exhausted { len } => {
                write!(f, "every block of {len} bytes or more is in use; free some, or give the class a larger count")
            }
            SlabError::Classes => write!(
                f,
                "the size classes must be 1 to {MAX_CLASSES}, in ascending order of size, with sizes and counts above 0"
            ),
            SlabError::Memory(full) => full.fmt(f),
        }
    }
}

impl core::error::Error for SlabError {}

/// A raw handle whose block is not out under it: it was given back before, or never existed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleBuf(pub RawBuf);

impl fmt::Display for StaleBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the handle of the block at offset {} (generation {}) is stale; it was given back already, or is from \
             another slab",
            self.0.offset, self.0.generation
        )
    }
}

impl core::error::Error for StaleBuf {}

/// In the state of a block: it is lent. The rest is its generation.
const LENT: u32 = 1;
const GENERATION: u32 = 2;

/// End of the stack of returned blocks; an index otherwise.
const NONE: u32 = u32::MAX;
/// The slab is gone: whoever returns a block counts itself out instead.
const CLOSED: u32 = u32::MAX - 1;

/// The word pair beside each block.
struct Meta {
    /// Generation, and whether it is lent. Written by whoever has the block; read by who checks a handle.
    state: AtomicU32,
    /// The next block on the stack of returned ones. Written by who returns the block.
    next: AtomicU32,
}

/// What does not change after creation, for each class.
#[derive(Clone, Copy, Default)]
struct Geometry {
    size: u32,
    /// Distance of two blocks. A multiple of 64; not one of 4096, or the blocks would share a few cache sets
    /// (docs/PERFORMANCE.md).
    stride: u32,
    count: u32,
    /// Global index of the first block.
    first: u32,
    /// Offset of the first block from `data`.
    start: usize,
}

/// Shared by the slab, its handles and its blocks; it lies in the slab's own memory.
#[repr(align(64))]
struct Header {
    /// Top of the stack of returned blocks.
    returned: AtomicU32,
    /// Blocks and handles that outlived the slab; negative while the slab lives.
    survivors: AtomicI64,
    data: NonNull<u8>,
    data_len: usize,
    classes: [Geometry; MAX_CLASSES],
    class_count: usize,
    meta: Table<Meta>,
    /// Taken out by the last user.
    arena: Arena,
}

impl Header {
    fn class_at(&self, offset: usize) -> Option<&Geometry> {
        self.classes
            .iter()
            .take(self.class_count)
            .find(|c| offset.checked_sub(c.start).is_some_and(|inside| inside < c.stride as usize * c.count as usize))
    }

    /// The class and global index of the block that `offset` lies in.
    fn block_at(&self, offset: usize) -> Option<(&Geometry, u32)> {
        let class = self.class_at(offset)?;
        let index = (offset - class.start).checked_div(class.stride as usize)?;
        Some((class, class.first + index as u32))
    }

    fn offset_of(&self, class: &Geometry, index: u32) -> usize {
        class.start + (index - class.first) as usize * class.stride as usize
    }

    /// Puts a block on the stack of returned ones, or counts it out when the slab is gone.
    ///
    /// # Safety
    /// `this` is the header of a slab in which the caller has the block `index`; after the call it has it no more, and
    /// must not use `this` unless something else keeps it.
    #[inline(never)]
    unsafe fn give_back(this: NonNull<Header>, index: u32) {
        // SAFETY: the caller's block keeps the header alive.
        let header = unsafe { this.as_ref() };
        let mut top = header.returned.load(Ordering::Relaxed);
        while top != CLOSED {
            header.meta.at(index).next.store(top, Ordering::Relaxed);
            // Release: what was written to the block, and its `next`, are seen by the owner who takes the stack.
            match header.returned.compare_exchange_weak(top, index, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
        // SAFETY: as promised, the caller was one of the survivors, and uses the header no more.
        unsafe { Header::count_out(this) };
    }

    /// One survivor less; the last one gives the memory back.
    ///
    /// # Safety
    /// The caller is a survivor (a block or a handle) and does not use the header afterwards.
    unsafe fn count_out(this: NonNull<Header>) {
        // SAFETY: a survivor keeps the header alive until it is counted out.
        if unsafe { this.as_ref() }.survivors.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: the count fell to 0, which it does once, after the slab closed: nobody else is left. The arena is
            // moved out before its memory, in which the header lies, goes with it.
            let _arena = unsafe { core::ptr::addr_of!((*this.as_ptr()).arena).read() };
        }
    }
}

/// The owner's side of the slab; see the module's text.
pub struct Slab {
    header: NonNull<Header>,
    classes: [Class; MAX_CLASSES],
    class_count: usize,
    largest: u32,
    /// For each binary logarithm of a length less one the first class that may be large enough.
    first_class: [u8; POWERS],
    /// Handles ever made.
    handles: i64,
}

/// The owner's private part of a class.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Class {
    geometry: Geometry,
    /// Where the block with the global index 0 would lie, were it of this class.
    origin: *mut u8,
    /// Free blocks, by global index; the last one goes out first.
    free: NonNull<u32>,
    free_count: u32,
}

// SAFETY: the slab is the only user of what it owns, and the header is made for several threads.
unsafe impl Send for Slab {}

impl Slab {
    /// The bytes of an arena that a slab with these classes takes, with room for alignment.
    pub fn bytes(classes: &[SizeClass]) -> usize {
        let blocks: u32 = classes.iter().map(|c| c.count).sum();
        let data: usize = classes.iter().map(|c| stride(c.size) as usize * c.count as usize).sum();
        let stacks: usize = classes.iter().map(|c| Table::<u32>::bytes(c.count)).sum();
        size_of::<Header>() + 64 + Table::<Meta>::bytes(blocks) + stacks + data + 4096
    }

    /// Carves `arena` into blocks.
    pub fn new(mut arena: Arena, classes: &[SizeClass]) -> Result<Slab, SlabError> {
        let ascending = classes.windows(2).all(|pair| pair[0].size < pair[1].size);
        let blocks = classes.iter().try_fold(0u32, |sum, c| sum.checked_add(c.count)).unwrap_or(u32::MAX);
        let empty = classes.iter().any(|c| c.size == 0 || c.size > 1 << 31 || c.count == 0);
        if classes.is_empty() || classes.len() > MAX_CLASSES || !ascending || empty || blocks > 1 << INDEX_BITS {
            return Err(SlabError::Classes);
        }
        // SAFETY: what is carved here is used by the header's users only, and the last of them drops the arena.
        let header = unsafe { arena.block(size_of::<Header>(), align_of::<Header>()) }.map_err(SlabError::Memory)?;
        let header = header.cast::<Header>();
        let fresh = |_| Meta { state: AtomicU32::new(0), next: AtomicU32::new(NONE) };
        // SAFETY: as above.
        let meta = unsafe { arena.table(blocks, fresh) }.map_err(SlabError::Memory)?;
        let (origin, free) = (core::ptr::null_mut(), NonNull::dangling());
        let none = Class { geometry: Geometry::default(), origin, free, free_count: 0 };
        let mut own = [none; MAX_CLASSES];
        let mut first = 0;
        let mut start = 0;
        for (class, asked) in own.iter_mut().zip(classes) {
            let geometry = Geometry { size: asked.size, stride: stride(asked.size), count: asked.count, first, start };
            let count = asked.count as usize;
            // SAFETY: as above.
            let free = unsafe { arena.block(count * size_of::<u32>(), 64) }.map_err(SlabError::Memory)?.cast::<u32>();
            for i in 0..asked.count {
                // SAFETY: i < count. In descending order, so that the first block goes out first.
                unsafe { free.add(i as usize).write(first + asked.count - 1 - i) };
            }
            *class = Class { geometry, origin, free, free_count: asked.count };
            first += asked.count;
            start += geometry.stride as usize * count;
        }
        // SAFETY: as above. Zeroed by the arena, so a block is initialised bytes from the start.
        let data = unsafe { arena.block(start, 64) }.map_err(SlabError::Memory)?;
        for class in own.iter_mut().take(classes.len()) {
            let Geometry { start, first, stride, .. } = class.geometry;
            class.origin = data.as_ptr().wrapping_add(start).wrapping_sub(first as usize * stride as usize);
        }
        let mut first_class = [0u8; POWERS];
        for (power, entry) in first_class.iter_mut().enumerate() {
            // Lengths from 2^power + 1 on; 1 and 2 share the first entry.
            let above = if power == 0 { 0 } else { 1u64 << power };
            let fitting = classes.iter().position(|c| u64::from(c.size) > above);
            *entry = fitting.unwrap_or(classes.len()) as u8;
        }
        // SAFETY: carved for a header, aligned, not yet used.
        unsafe {
            header.write(Header {
                returned: AtomicU32::new(NONE),
                survivors: AtomicI64::new(0),
                data,
                data_len: start,
                classes: own.map(|c| c.geometry),
                class_count: classes.len(),
                meta,
                arena,
            });
        }
        let largest = classes.last().map_or(0, |c| c.size);
        Ok(Slab { header, classes: own, class_count: classes.len(), largest, first_class, handles: 0 })
    }

    #[inline(always)]
    fn header(&self) -> &Header {
        // SAFETY: the header lives at least as long as the slab.
        unsafe { self.header.as_ref() }
    }

    /// Where the blocks lie: base and length in bytes. This is what is registered with a device.
    pub fn data(&self) -> (NonNull<u8>, usize) {
        (self.header().data, self.header().data_len)
    }

    /// A handle by which an engine on another core gives blocks back.
    pub fn handle(&mut self) -> SlabHandle {
        self.handles += 1;
        SlabHandle { header: self.header }
    }

    /// A block of at least `len` bytes. Its contents are what the last user left.
    #[inline]
    pub fn alloc(&mut self, len: usize) -> Result<Buf, SlabError> {
        let power = (len.saturating_sub(1) | 1).ilog2() as usize;
        let mut class = usize::from(self.first_class[power & (POWERS - 1)]);
        while self.classes.get(class).is_some_and(|c| (c.geometry.size as usize) < len) {
            class += 1;
        }
        if let Some(index) = self.pop_free(class) {
            return Ok(self.hand_out(class, index, len));
        }
        // Made here: an error that came through a pointer would keep the block in memory on its way out, too.
        match self.find_free(class) {
            Some(place) => Ok(self.hand_out(place.class(), place.index(), len)),
            None if class >= self.class_count => Err(SlabError::TooLarge { len, largest: self.largest }),
            None => Err(SlabError::Exhausted { len }),
        }
    }

    #[inline(always)]
    fn pop_free(&mut self, class: usize) -> Option<u32> {
        let class = self.classes.get_mut(class)?;
        class.free_count = class.free_count.checked_sub(1)?;
        // SAFETY: free_count is below the number of entries.
        Some(unsafe { class.free.add(class.free_count as usize).read() })
    }

    #[inline(always)]
    fn hand_out(&self, class: usize, index: u32, len: usize) -> Buf {
        let class = class & (MAX_CLASSES - 1);
        let Class { geometry, origin, .. } = &self.classes[class];
        let data = origin.wrapping_add(index as usize * geometry.stride as usize);
        // SAFETY: a block of this class, inside the slab's data, which is not at 0.
        let data = unsafe { NonNull::new_unchecked(data) };
        Buf { data, header: self.header, len_and_place: len as u64 | u64::from(Place::new(class, index).0) << 32 }
    }

    /// The class ran dry, or there is none: first what was dropped elsewhere, then larger blocks.
    #[cold]
    #[inline(never)]
    fn find_free(&mut self, class: usize) -> Option<Place> {
        self.collect();
        (class..self.class_count).find_map(|class| Some(Place::new(class, self.pop_free(class)?)))
    }

    /// Takes back what was dropped elsewhere, and says how many blocks that were. `alloc` does it by itself when it runs
    /// dry.
    pub fn collect(&mut self) -> u32 {
        // Acquire: pairs with the Release of who returned a block.
        let mut index = self.header().returned.swap(NONE, Ordering::Acquire);
        let mut count = 0;
        while index != NONE {
            let next = self.header().meta.at(index).next.load(Ordering::Relaxed);
            self.put_free(self.place_of(index));
            index = next;
            count += 1;
        }
        count
    }

    /// Gives a block back. The same as dropping it, and faster, as it needs no atomic exchange.
    #[inline]
    pub fn free(&mut self, buf: Buf) {
        if buf.header != self.header {
            return; // another slab's: its drop knows the way
        }
        let place = buf.place();
        core::mem::forget(buf);
        self.put_free(place);
    }

    /// The place of a block: in the class whose indices contain it; one of them does.
    fn place_of(&self, index: u32) -> Place {
        let contains = |c: &Class| index.wrapping_sub(c.geometry.first) < c.geometry.count;
        Place::new(self.classes.iter().position(contains).unwrap_or(0), index)
    }

    #[inline(always)]
    fn put_free(&mut self, place: Place) {
        let class = &mut self.classes[place.class()];
        // SAFETY: the block was out, so fewer than `count` are on the stack.
        unsafe { class.free.add(class.free_count as usize).write(place.index()) };
        class.free_count += 1;
    }

    /// Takes a lent block back into a [`Buf`] of `len` bytes. `offset` may be any in the block, as it is known to the
    /// operation that had it. None if it is not lent: somebody else gave it back.
    ///
    /// # Safety
    /// No operation has the block any more.
    #[inline]
    pub unsafe fn take_back(&mut self, offset: usize, len: u32) -> Option<Buf> {
        let place = self.retake(offset)?;
        let len = len.min(self.classes[place.class()].geometry.size);
        Some(self.hand_out(place.class(), place.index(), len as usize))
    }

    /// The lent block that `offset` lies in, lent no more.
    #[inline(never)]
    fn retake(&self, offset: usize) -> Option<Place> {
        let header = self.header();
        let (_, index) = header.block_at(offset)?;
        let state = &header.meta.at(index).state;
        let now = state.load(Ordering::Relaxed);
        if now & LENT == 0 {
            return None;
        }
        // A handle on another thread may return it at the same moment: one of the two wins.
        state.compare_exchange(now, now & !LENT, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(self.place_of(index))
    }

    /// The `Buf` of a raw handle that [`Buf::into_raw`] made, unless it was given back before.
    ///
    /// # Safety
    /// No operation has the block any more.
    pub unsafe fn from_raw(&mut self, raw: RawBuf) -> Result<Buf, StaleBuf> {
        let header = self.header();
        let (geometry, index) = header.block_at(raw.offset).ok_or(StaleBuf(raw))?;
        let lent = raw.generation | LENT;
        let state = &header.meta.at(index).state;
        let is_start = header.offset_of(geometry, index) == raw.offset;
        if !is_start || state.compare_exchange(lent, lent & !LENT, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Err(StaleBuf(raw));
        }
        let (class, len) = (self.place_of(index).class(), raw.len.min(geometry.size));
        Ok(self.hand_out(class, index, len as usize))
    }

    /// Number of free blocks in each class, in the order of the classes.
    pub fn free_blocks(&self) -> impl Iterator<Item = (SizeClass, u32)> + '_ {
        let classes = self.classes[..self.class_count].iter();
        classes.map(|c| (SizeClass { size: c.geometry.size, count: c.geometry.count }, c.free_count))
    }
}

impl Drop for Slab {
    /// Blocks and handles that are still out keep the memory; the last of them gives it back.
    fn drop(&mut self) {
        self.collect();
        // From here on a block that is dropped elsewhere counts itself out.
        let mut index = self.header().returned.swap(CLOSED, Ordering::AcqRel);
        while index != NONE && index != CLOSED {
            let next = self.header().meta.at(index).next.load(Ordering::Relaxed);
            self.put_free(self.place_of(index));
            index = next;
        }
        let out: i64 = self.classes.iter().map(|c| i64::from(c.geometry.count - c.free_count)).sum();
        // One more than is out, for this call itself: the last one out drops the arena, be it here or elsewhere.
        self.header().survivors.fetch_add(out + self.handles + 1, Ordering::AcqRel);
        // SAFETY: this call counted itself in, and uses the header no more.
        unsafe { Header::count_out(self.header) };
    }
}

/// Returns lent blocks to a slab from any thread. It keeps the slab's memory, not the slab.
pub struct SlabHandle {
    header: NonNull<Header>,
}

// SAFETY: it only uses the header's atomics.
unsafe impl Send for SlabHandle {}
// SAFETY: as above.
unsafe impl Sync for SlabHandle {}

impl SlabHandle {
    /// Returns the lent block that `offset` lies in. False, and nothing happens, if there is no such block or it is not
    /// lent.
    ///
    /// # Safety
    /// No operation has the block any more.
    pub unsafe fn give_back(&self, offset: usize) -> bool {
        // SAFETY: the handle keeps the header.
        let header = unsafe { self.header.as_ref() };
        let Some((_, index)) = header.block_at(offset) else { return false };
        let state = &header.meta.at(index).state;
        let now = state.load(Ordering::Relaxed);
        if now & LENT == 0 {
            return false;
        }
        // One of two who return the same block wins.
        if state.compare_exchange(now, now & !LENT, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        // SAFETY: the block was lent and this call won it; the handle keeps the header.
        unsafe { Header::give_back(self.header, index) };
        true
    }
}

impl Drop for SlabHandle {
    fn drop(&mut self) {
        // SAFETY: handles are counted among the survivors.
        unsafe { Header::count_out(self.header) };
    }
}

/// A block of the slab: memory of this process alone, which may be viewed as bytes. It moves into an operation and comes
/// back with the completion. Forgetting it leaks the block and nothing else.
pub struct Buf {
    data: NonNull<u8>,
    header: NonNull<Header>,
    /// One word: two halves that are written one by one and read as one would be waited for.
    len_and_place: u64,
}

/// Class and global index of a block.
#[derive(Clone, Copy)]
struct Place(u32);

impl Place {
    #[inline(always)]
    fn new(class: usize, index: u32) -> Place {
        const { assert!(MAX_CLASSES <= 1 << (32 - INDEX_BITS)) };
        Place((class as u32) << INDEX_BITS | index)
    }

    #[inline(always)]
    fn class(self) -> usize {
        (self.0 >> INDEX_BITS) as usize & (MAX_CLASSES - 1)
    }

    #[inline(always)]
    fn index(self) -> u32 {
        self.0 & ((1 << INDEX_BITS) - 1)
    }
}

// SAFETY: the block belongs to the Buf alone.
unsafe impl Send for Buf {}
// SAFETY: `&Buf` gives out `&[u8]` only.
unsafe impl Sync for Buf {}

/// The name of a lent block, for callers that cannot hold a [`Buf`] (the C ABI, an operation in flight).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawBuf {
    /// Offset of the block in the slab's data.
    pub offset: usize,
    /// Bytes in use.
    pub len: u32,
    /// Which lending of the block this is.
    pub generation: u32,
}

impl Buf {
    #[inline(always)]
    fn place(&self) -> Place {
        Place((self.len_and_place >> 32) as u32)
    }

    /// Bytes the block has room for.
    pub fn capacity(&self) -> usize {
        // SAFETY: the block keeps the header.
        let header = unsafe { self.header.as_ref() };
        header.classes[self.place().class()].size as usize
    }

    /// Sets how many bytes of the block are in use: what a put sends and a get fetches.
    ///
    /// # Panics
    /// If `len` is above the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "a block of {} bytes cannot hold {len}", self.capacity());
        self.len_and_place = self.len_and_place & !0xffff_ffff | len as u64;
    }

    /// Whether the block is one of `slab`'s.
    pub fn is_from(&self, slab: &Slab) -> bool {
        self.header == slab.header
    }

    /// Turns it into a raw handle. The block is lent until it comes back by [`Slab::take_back`], [`Slab::from_raw`] or
    /// [`SlabHandle::give_back`].
    pub fn into_raw(self) -> RawBuf {
        // SAFETY: the block keeps the header.
        let header = unsafe { self.header.as_ref() };
        let state = &header.meta.at(self.place().index()).state;
        let generation = (state.load(Ordering::Relaxed) & !LENT).wrapping_add(GENERATION);
        state.store(generation | LENT, Ordering::Relaxed);
        let offset = self.data.as_ptr() as usize - header.data.as_ptr() as usize;
        let raw = RawBuf { offset, len: self.len_and_place as u32, generation };
        core::mem::forget(self);
        raw
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the block is initialised and belongs to this Buf alone; len <= capacity.
        unsafe { core::slice::from_raw_parts(self.data.as_ptr(), self.len_and_place as u32 as usize) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes it the only reference.
        unsafe { core::slice::from_raw_parts_mut(self.data.as_ptr(), self.len_and_place as u32 as usize) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf {{ block: {}, len: {}, capacity: {} }}", self.place().index(), self.len(), self.capacity())
    }
}

impl Drop for Buf {
    // Inlined, and what it calls takes it by value: a block whose address nobody has stays in registers.
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the Buf has the block, and uses the header no more.
        unsafe { Header::give_back(self.header, self.place().index()) };
    }
}

const fn stride(size: u32) -> u32 {
    let stride = size.next_multiple_of(64);
    if stride.is_multiple_of(4096) { stride + 64 } else { stride }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Region, RegionOptions};
    use proptest::prelude::*;
    use static_assertions::{assert_impl_all, assert_not_impl_any};
    use std::collections::BTreeMap;
    use std::vec;
    use std::vec::Vec;

    assert_impl_all!(Buf: Send, Sync);
    assert_impl_all!(SlabHandle: Send, Sync);
    assert_impl_all!(Slab: Send);
    assert_not_impl_any!(Slab: Sync);
    assert_not_impl_any!(Buf: Clone, Copy);

    const CLASSES: [SizeClass; 3] =
        [SizeClass { size: 64, count: 4 }, SizeClass { size: 4096, count: 3 }, SizeClass { size: 10000, count: 2 }];

    fn slab(classes: &[SizeClass]) -> Slab {
        let region = Region::private(Slab::bytes(classes), RegionOptions::default()).unwrap();
        Slab::new(Arena::from_region(region), classes).unwrap()
    }

    fn from_raw(slab: &mut Slab, raw: RawBuf) -> Result<Buf, StaleBuf> {
        // SAFETY: there are no operations here.
        unsafe { slab.from_raw(raw) }
    }

    fn take_back(slab: &mut Slab, offset: usize, len: u32) -> Option<Buf> {
        // SAFETY: as above.
        unsafe { slab.take_back(offset, len) }
    }

    fn give_back(handle: &SlabHandle, offset: usize) -> bool {
        // SAFETY: as above.
        unsafe { handle.give_back(offset) }
    }

    fn offset(slab: &Slab, buf: &Buf) -> usize {
        buf.as_ptr() as usize - slab.data().0.as_ptr() as usize
    }

    #[test]
    fn the_smallest_class_that_fits_then_the_next() {
        let mut slab = slab(&CLASSES);
        assert_eq!(slab.alloc(0).unwrap().capacity(), 64);
        assert_eq!(slab.alloc(64).unwrap().capacity(), 64);
        assert_eq!(slab.alloc(65).unwrap().capacity(), 4096);
        assert_eq!(slab.alloc(4097).unwrap().capacity(), 10000);
        let small: Vec<Buf> = (0..5).map(|_| slab.alloc(1).unwrap()).collect();
        assert_eq!(small[4].capacity(), 4096, "the small ones are out");
        assert!(matches!(slab.alloc(10001), Err(SlabError::TooLarge { len: 10001, largest: 10000 })));
        assert!(matches!(slab.alloc(1 << 40), Err(SlabError::TooLarge { .. })));
    }

    #[test]
    fn bad_classes_are_refused() {
        let bad: [&[SizeClass]; 4] = [
            &[],
            &[SizeClass { size: 8, count: 1 }; 2],
            &[SizeClass { size: 0, count: 1 }],
            &[SizeClass { size: 8, count: 0 }],
        ];
        for classes in bad {
            let region = Region::private(1 << 20, RegionOptions::default()).unwrap();
            assert_eq!(Slab::new(Arena::from_region(region), classes).err(), Some(SlabError::Classes));
        }
        let region = Region::private(1 << 20, RegionOptions::default()).unwrap();
        let classes = [SizeClass { size: 1 << 20, count: 100 }];
        assert!(matches!(Slab::new(Arena::from_region(region), &classes), Err(SlabError::Memory(_))));
    }

    #[test]
    fn a_raw_handle_works_once() {
        let mut slab = slab(&CLASSES);
        let mut buf = slab.alloc(10).unwrap();
        buf[3] = 7;
        let raw = buf.into_raw();
        let back = from_raw(&mut slab, raw).unwrap();
        assert_eq!((back.len(), back[3]), (10, 7));
        assert_eq!(from_raw(&mut slab, raw).unwrap_err(), StaleBuf(raw), "it is owned");
        slab.free(back);
        assert!(from_raw(&mut slab, raw).is_err(), "it is free");
        let again = slab.alloc(10).unwrap().into_raw();
        assert_eq!(again.offset, raw.offset, "the same block");
        assert!(from_raw(&mut slab, raw).is_err(), "it is out again, under another generation");
        assert!(from_raw(&mut slab, again).is_ok());
        assert!(from_raw(&mut slab, RawBuf { offset: 1 << 50, ..raw }).is_err());
        assert!(take_back(&mut slab, again.offset, 1).is_none(), "it is not lent any more");
    }

    #[test]
    fn a_lent_block_comes_back_once_by_either_way() {
        let mut slab = slab(&CLASSES);
        let handle = slab.handle();
        let raw = slab.alloc(4096).unwrap().into_raw();
        assert!(give_back(&handle, raw.offset + 100));
        assert!(!give_back(&handle, raw.offset));
        assert!(take_back(&mut slab, raw.offset, 1).is_none());
        assert_eq!(slab.collect(), 1);
        assert!(!give_back(&handle, usize::MAX));
    }

    #[test]
    fn blocks_outlive_the_slab_and_the_last_one_unmaps() {
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        let classes = [SizeClass { size: 1 << 20, count: 40 }];
        let mut slab = slab(&classes);
        let handle = slab.handle();
        let mut first = slab.alloc(100).unwrap();
        let second = slab.alloc(100).unwrap();
        let lent = slab.alloc(100).unwrap().into_raw();
        let inside = slab.data().0.as_ptr() as usize;
        let mapped = |maps: &str| {
            maps.lines().any(|line| {
                let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
                let parse = |hex| usize::from_str_radix(hex, 16).unwrap();
                (parse(from)..parse(to)).contains(&inside)
            })
        };
        drop(slab);
        first[0] = 1;
        drop(second);
        std::thread::spawn(move || drop(first)).join().unwrap();
        assert!(mapped(&maps()));
        assert!(give_back(&handle, lent.offset));
        assert!(mapped(&maps()));
        drop(handle);
        assert!(!mapped(&maps()));
    }

    #[test]
    fn frees_from_another_thread_come_back_whole() {
        let mut slab = slab(&[SizeClass { size: 128, count: 64 }]);
        for _ in 0..50 {
            let bufs: Vec<Buf> = (0..64).map(|_| slab.alloc(128).unwrap()).collect();
            assert!(slab.alloc(1).is_err());
            let (a, b): (Vec<_>, Vec<_>) = bufs.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
            std::thread::scope(|s| {
                s.spawn(move || drop(a));
                s.spawn(move || drop(b));
            });
        }
        assert_eq!(slab.collect(), 64);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(usize),
        Free(usize),
        Drop(usize),
        Lend(usize),
        TakeBack(usize),
        GiveBack(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0usize..12000).prop_map(Step::Alloc),
            any::<usize>().prop_map(Step::Free),
            any::<usize>().prop_map(Step::Drop),
            any::<usize>().prop_map(Step::Lend),
            any::<usize>().prop_map(Step::TakeBack),
            any::<usize>().prop_map(Step::GiveBack),
        ]
    }

    proptest! {
        /// Against an oracle: no block is out twice, contents stay, and capacity is conserved.
        #[test]
        fn model(steps in prop::collection::vec(step(), 1..200)) {
            let mut slab = slab(&CLASSES);
            let handle = slab.handle();
            let mut owned: Vec<(Buf, u8)> = vec![];
            let mut lent: BTreeMap<usize, (u32, u8)> = BTreeMap::new();
            let mut stamp = 0u8;
            for step in steps {
                match step {
                    Step::Alloc(len) => {
                        let largest_fitting = CLASSES.iter().filter(|c| c.size as usize >= len);
                        let room: u32 = largest_fitting.clone().map(|c| c.count).sum();
                        let out = owned.iter().filter(|(b, _)| b.capacity() >= len).count()
                            + lent.keys().filter(|o| slab.header().class_at(**o).unwrap().size as usize >= len).count();
                        match slab.alloc(len) {
                            Ok(mut buf) => {
                                stamp = stamp.wrapping_add(1);
                                buf.fill(stamp);
                                let at = offset(&slab, &buf);
                                prop_assert!(!lent.contains_key(&at));
                                prop_assert!(owned.iter().all(|(b, _)| offset(&slab, b) != at));
                                owned.push((buf, stamp));
                            }
                            Err(SlabError::TooLarge { .. }) => prop_assert!(len > 10000),
                            Err(error) => {
                                prop_assert_eq!(error, SlabError::Exhausted { len });
                                prop_assert_eq!(out as u32, room);
                            }
                        }
                    }
                    Step::Free(i) if !owned.is_empty() => {
                        let (buf, stamp) = owned.swap_remove(i % owned.len());
                        prop_assert!(buf.iter().all(|b| *b == stamp));
                        slab.free(buf);
                    }
                    Step::Drop(i) if !owned.is_empty() => drop(owned.swap_remove(i % owned.len())),
                    Step::Lend(i) if !owned.is_empty() => {
                        let (buf, stamp) = owned.swap_remove(i % owned.len());
                        let raw = buf.into_raw();
                        lent.insert(raw.offset, (raw.len, stamp));
                    }
                    Step::TakeBack(i) if !lent.is_empty() => {
                        let (at, (len, stamp)) = lent.iter().nth(i % lent.len()).map(|(a, s)| (*a, *s)).unwrap();
                        lent.remove(&at);
                        let buf = take_back(&mut slab, at, len).unwrap();
                        prop_assert!(buf.iter().all(|b| *b == stamp));
                        owned.push((buf, stamp));
                    }
                    Step::GiveBack(i) if !lent.is_empty() => {
                        let at = *lent.keys().nth(i % lent.len()).unwrap();
                        lent.remove(&at);
                        prop_assert!(give_back(&handle, at));
                    }
                    _ => {}
                }
            }
            for (at, _) in lent {
                prop_assert!(give_back(&handle, at));
            }
            drop(owned);
            slab.collect();
            for (class, free) in slab.free_blocks() {
                prop_assert_eq!(class.count, free);
            }
        }
    }
}
