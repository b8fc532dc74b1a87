//! The two rings between an application and its engine: entries go one way, completions the other.
//!
//! ```text
//! offset   bytes  written by   what
//!      0      64  creator      header: magic, version, sizes; checked on attach
//!    128       4  engine       sq watermark: entries taken
//!    132       4  engine       1 once the engine is gone
//!    256       4  application  cq watermark: completions taken
//!    260       4  application  1 once the application is gone
//!    512  64 x n  application  sqes
//!      .  16 x m  engine       cqes
//!      .   8 x m  engine       a value beside each cqe
//! ```
//! Neither side publishes an index when it writes: an entry carries its own sequence number (sqe) or lap (cqe) in its
//! first (last) word, which is stored last, with Release. The watermarks only say how much room there is, and are stored
//! once a batch. Each side keeps its own positions to itself; what the other side wrote is loaded once, and checked.

use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::cqe::{PHASE, VALUE};
use crate::sqe::Sqe;
use crate::sync::{AtomicU32, AtomicU64, Ordering, word_at};

/// Identifies a ring: "vrb-ring".
const MAGIC: u64 = u64::from_le_bytes(*b"vrb-ring");
/// The version of the layout.
pub const RING_VERSION: u32 = 1;
/// The most entries of either ring.
pub const MAX_ENTRIES: u32 = 1 << 16;

const SQ_WATERMARK: usize = 128;
const CQ_WATERMARK: usize = 256;
const SQES: usize = 512;
const SQE_WORDS: usize = 8;

type Slot = [AtomicU64; SQE_WORDS];
type CqeSlot = [AtomicU64; 2];

/// The bytes of a pair of rings with so many entries (powers of two).
pub const fn ring_bytes(sq_entries: u32, cq_entries: u32) -> usize {
    SQES + sq_entries as usize * 64 + cq_entries as usize * (16 + 8)
}

/// The memory is no ring of this version, or not of the sizes it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotARing;

/// Where the parts of a ring lie.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    sqes: NonNull<AtomicU64>,
    sq_mask: u32,
    cqes: NonNull<AtomicU64>,
    values: NonNull<AtomicU64>,
    cq_mask: u32,
    sq_watermark: NonNull<AtomicU32>,
    engine_gone: NonNull<AtomicU32>,
    cq_watermark: NonNull<AtomicU32>,
    app_gone: NonNull<AtomicU32>,
}

// SAFETY: all access is by atomics.
unsafe impl Send for Parts {}

impl Parts {
    /// Lays out rings over zeroed memory.
    ///
    /// # Safety
    /// `base` is a multiple of 64 and valid for `ring_bytes` of these sizes as long as the parts are used; all access
    /// meanwhile is by rings. The sizes are powers of two up to [`MAX_ENTRIES`].
    pub(crate) unsafe fn create(base: NonNull<u8>, sq_entries: u32, cq_entries: u32) -> Parts {
        let header = Self::header(sq_entries, cq_entries);
        for (i, word) in header.into_iter().enumerate() {
            // SAFETY: the first 64 bytes.
            unsafe { word_at(base.as_ptr().cast::<u64>().add(i)) }.store(word, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { Self::over(base, sq_entries, cq_entries) }
    }

    /// Finds rings in memory that somebody else laid out and may go on writing.
    ///
    /// # Safety
    /// `base` is a multiple of 64 and valid for `len` bytes as long as the parts are used; all access meanwhile is by
    /// rings.
    pub(crate) unsafe fn attach(base: NonNull<u8>, len: usize) -> Result<Parts, NotARing> {
        if len < SQES {
            return Err(NotARing);
        }
        // SAFETY: the first 64 bytes. Each word is loaded once.
        let load = |i| unsafe { word_at(base.as_ptr().cast::<u64>().add(i)) }.load(Ordering::Relaxed);
        let sizes = load(2);
        let (sq_entries, cq_entries) = (sizes as u32, (sizes >> 32) as u32);
        let are_good = |n: u32| n.is_power_of_two() && n <= MAX_ENTRIES;
        if !are_good(sq_entries) || !are_good(cq_entries) || len < ring_bytes(sq_entries, cq_entries) {
            return Err(NotARing);
        }
        let header = Self::header(sq_entries, cq_entries);
        if (0..8).any(|i| i != 2 && load(i) != header[i]) {
            return Err(NotARing);
        }
        // SAFETY: the caller's promise, and the sizes fit.
        Ok(unsafe { Self::over(base, sq_entries, cq_entries) })
    }

    fn header(sq_entries: u32, cq_entries: u32) -> [u64; 8] {
        let sizes = u64::from(sq_entries) | u64::from(cq_entries) << 32;
        [MAGIC, u64::from(RING_VERSION), sizes, ring_bytes(sq_entries, cq_entries) as u64, 0, 0, 0, 0]
    }

    unsafe fn over(base: NonNull<u8>, sq_entries: u32, cq_entries: u32) -> Parts {
        let cqes = SQES + sq_entries as usize * 64;
        let values = cqes + cq_entries as usize * 16;
        // SAFETY: all offsets lie in the memory that the caller gave.
        unsafe {
            Parts::at(
                [base.add(SQES).cast(), base.add(cqes).cast(), base.add(values).cast()],
                [SQ_WATERMARK, SQ_WATERMARK + 4, CQ_WATERMARK, CQ_WATERMARK + 4].map(|at| base.add(at).cast()),
                sq_entries,
                cq_entries,
            )
        }
    }

    /// Rings whose parts lie anywhere: sqes, cqes, values; then the two words of the engine, and the two of the
    /// application.
    ///
    /// # Safety
    /// Each is as long as the sizes say, and valid as long as the parts are used.
    pub(crate) unsafe fn at(
        [sqes, cqes, values]: [NonNull<AtomicU64>; 3],
        [sq_watermark, engine_gone, cq_watermark, app_gone]: [NonNull<AtomicU32>; 4],
        sq_entries: u32,
        cq_entries: u32,
    ) -> Parts {
        let (sq_mask, cq_mask) = (sq_entries - 1, cq_entries - 1);
        Parts { sqes, sq_mask, cqes, values, cq_mask, sq_watermark, engine_gone, cq_watermark, app_gone }
    }
}

impl Parts {
    /// The sqe at a position. Taken once an entry: where it lies would be computed anew after each store otherwise.
    #[inline(always)]
    fn sqe<'a>(&self, position: u32) -> &'a Slot {
        // SAFETY: the masked index is below the number of entries; the memory is valid as long as the ends of the ring,
        // and no reference leaves their methods.
        unsafe { self.sqes.add((position & self.sq_mask) as usize * SQE_WORDS).cast().as_ref() }
    }

    #[inline(always)]
    fn cqe<'a>(&self, position: u32) -> &'a CqeSlot {
        // SAFETY: as above.
        unsafe { self.cqes.add((position & self.cq_mask) as usize * 2).cast().as_ref() }
    }

    #[inline(always)]
    fn value(&self, position: u32) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { self.values.add((position & self.cq_mask) as usize).as_ref() }
    }

    /// The phase bit of the lap that a position is in: 1 in the first.
    #[inline(always)]
    fn phase(&self, position: u32) -> u16 {
        if position & (self.cq_mask + 1) == 0 { PHASE } else { 0 }
    }
}

/// A cqe as it came out of the ring: bytes of the other side, status not yet looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawCqe {
    pub(crate) user_data: u64,
    pub(crate) status: u16,
    pub(crate) flags: u16,
    pub(crate) imm: u32,
    pub(crate) value: u64,
}

/// Completions that the application takes before it says so, at most: and at most an eighth of the ring, so that the rest
/// of it is room enough to go on.
const TELL_AFTER: u32 = 32;

/// The application's end.
pub(crate) struct AppEnd {
    parts: Parts,
    writer: Writer,
    reader: Reader,
    /// The position at which `reader.left` is 0.
    cq_turn: u32,
    /// Entries that the engine took, as last seen.
    sq_head: u32,
}

/// The next entry's place and sequence number, and the first number for which one has to look whether it fits.
#[derive(Clone, Copy)]
struct Writer {
    slot: *const Slot,
    sequence: u32,
    limit: u32,
}

/// The next completion, its last word if it is a success without a value, and how many more come before the watermark is
/// told or the ring wraps.
#[derive(Clone, Copy)]
struct Reader {
    cqe: *const CqeSlot,
    success: u64,
    left: u32,
}

// SAFETY: all access to the ring is by atomics.
unsafe impl Send for AppEnd {}

impl Writer {
    #[inline(always)]
    fn must_look(&self) -> bool {
        self.sequence == self.limit
    }

    #[inline(always)]
    fn write(&mut self, sqe: &Sqe) {
        // SAFETY: the place of the next entry is in the ring while one need not look, and the ring's memory is valid as
        // long as its ends.
        let slot = unsafe { &*self.slot };
        self.slot = self.slot.wrapping_add(1);
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        for (i, word) in slot.iter().enumerate().skip(1) {
            if sqe.has_word(i) {
                word.store(sqe.words[i], Ordering::Relaxed);
            }
        }
        slot[0].store(sqe.words[0] & !0xffff_ffff | u64::from(sequence), Ordering::Release);
    }
}

impl Reader {
    /// Takes the oldest completion, if it is a success without a value: its user_data. After it `left` may be 0: then it
    /// is the end's turn.
    #[inline(always)]
    fn success(&mut self) -> Option<u64> {
        // SAFETY: it lies in the ring, whose memory is valid as long as its ends.
        let slot = unsafe { &*self.cqe };
        if slot[1].load(Ordering::Acquire) != self.success {
            return None;
        }
        let user_data = slot[0].load(Ordering::Relaxed);
        (self.cqe, self.left) = (self.cqe.wrapping_add(1), self.left - 1);
        Some(user_data)
    }

    /// Takes the oldest completion, whatever it is; likewise.
    #[inline(always)]
    fn any(&mut self, parts: &Parts, turn: u32) -> Option<RawCqe> {
        // SAFETY: as above.
        let slot = unsafe { &*self.cqe };
        let last = slot[1].load(Ordering::Acquire);
        if (last ^ self.success) & u64::from(PHASE) << 16 != 0 {
            return None;
        }
        let flags = (last >> 16) as u16;
        let user_data = slot[0].load(Ordering::Relaxed);
        let position = turn.wrapping_sub(self.left);
        let value = if flags & VALUE != 0 { parts.value(position).load(Ordering::Relaxed) } else { 0 };
        (self.cqe, self.left) = (self.cqe.wrapping_add(1), self.left - 1);
        Some(RawCqe { user_data, status: last as u16, flags, imm: (last >> 32) as u32, value })
    }
}

impl AppEnd {
    pub(crate) fn new(parts: Parts) -> AppEnd {
        AppEnd::at(parts, 0, 0)
    }

    /// An end at these positions.
    fn at(parts: Parts, sq: u32, cq: u32) -> AppEnd {
        let sequence = sq.wrapping_add(1);
        let writer = Writer { slot: parts.sqe(sq), sequence, limit: sequence };
        let reader = Reader { cqe: parts.cqe(cq), success: 0, left: 0 };
        let mut end = AppEnd { parts, writer, reader, cq_turn: cq, sq_head: sq };
        end.turn();
        end
    }

    /// Puts an entry into the ring; false if it is full.
    #[inline(always)]
    pub(crate) fn push(&mut self, sqe: &Sqe) -> bool {
        if self.writer.must_look() && !self.look_for_room() {
            return false;
        }
        self.writer.write(sqe);
        true
    }

    /// Several entries: the writer by value meanwhile.
    #[inline(always)]
    pub(crate) fn pushing(&mut self) -> Pushing<'_> {
        Pushing { writer: self.writer, end: self }
    }

    /// Finds out how many entries fit before the ring wraps.
    #[cold]
    #[inline(never)]
    fn look_for_room(&mut self) -> bool {
        // SAFETY: the ring's memory is valid as long as its ends.
        let head = unsafe { self.parts.sq_watermark.as_ref() }.load(Ordering::Acquire);
        let (capacity, tail) = (self.parts.sq_mask + 1, self.pushed());
        // A watermark that is not between what was taken and what was pushed is made up: no room.
        if tail.wrapping_sub(head) <= capacity {
            self.sq_head = head;
        }
        let room = capacity - tail.wrapping_sub(self.sq_head);
        self.writer.slot = self.parts.sqe(tail);
        let left = room.min(capacity - (tail & self.parts.sq_mask));
        self.writer.limit = self.writer.sequence.wrapping_add(left);
        left != 0
    }

    /// Takes the oldest completion, if it is a success without a value: its user_data.
    #[inline(always)]
    pub(crate) fn reap_success(&mut self) -> Option<u64> {
        let user_data = self.reader.success()?;
        if self.reader.left == 0 {
            self.turn();
        }
        Some(user_data)
    }

    /// Takes the oldest completion.
    #[inline(always)]
    pub(crate) fn reap(&mut self) -> Option<RawCqe> {
        let raw = self.reader.any(&self.parts, self.cq_turn)?;
        if self.reader.left == 0 {
            self.turn();
        }
        Some(raw)
    }

    /// Several completions: the reader by value meanwhile.
    #[inline(always)]
    pub(crate) fn reaping(&mut self) -> Reaping<'_> {
        Reaping { reader: self.reader, end: self }
    }

    /// Completions of a ring.
    pub(crate) fn cq_capacity(&self) -> u32 {
        self.parts.cq_mask + 1
    }

    /// Tells the engine what was taken.
    fn tell(&self) {
        let taken = self.cq_turn.wrapping_sub(self.reader.left);
        // SAFETY: the ring's memory is valid as long as its ends.
        unsafe { self.parts.cq_watermark.as_ref() }.store(taken, Ordering::Release);
    }

    /// Tells, and goes on at the beginning of the ring if this was its end.
    #[cold]
    #[inline(never)]
    fn turn(&mut self) {
        self.tell();
        let (at, capacity) = (self.cq_turn, self.parts.cq_mask + 1);
        let left = (capacity - (at & self.parts.cq_mask)).min(TELL_AFTER).min(capacity.div_ceil(8));
        let success = u64::from(self.parts.phase(at)) << 16;
        self.reader = Reader { cqe: self.parts.cqe(at), success, left };
        self.cq_turn = at.wrapping_add(left);
    }

    /// The oldest entry that an engine which is gone did not take.
    pub(crate) fn untaken(&mut self) -> Option<Sqe> {
        self.look_for_room();
        if self.sq_head == self.pushed() {
            return None;
        }
        let at = self.sq_head;
        self.sq_head = at.wrapping_add(1);
        // SAFETY: the ring's memory is valid as long as its ends; the engine reads it no more.
        unsafe { self.parts.sq_watermark.as_ref() }.store(self.sq_head, Ordering::Relaxed);
        Some(Sqe { words: self.parts.sqe(at).each_ref().map(|word| word.load(Ordering::Relaxed)) })
    }

    /// Entries ever pushed.
    #[inline(always)]
    pub(crate) fn pushed(&self) -> u32 {
        self.writer.sequence.wrapping_sub(1)
    }

    /// Whether the engine is gone.
    pub(crate) fn is_engine_gone(&self) -> bool {
        // SAFETY: the ring's memory is valid as long as its ends.
        unsafe { self.parts.engine_gone.as_ref() }.load(Ordering::Acquire) != 0
    }

    /// Says that the application is gone.
    pub(crate) fn leave(&self) {
        self.tell();
        // SAFETY: the ring's memory is valid as long as its ends.
        unsafe { self.parts.app_gone.as_ref() }.store(1, Ordering::Release);
    }
}

/// A writer by value: what would be loaded and stored for each entry stays in registers.
pub(crate) struct Pushing<'a> {
    writer: Writer,
    end: &'a mut AppEnd,
}

impl Pushing<'_> {
    /// Puts an entry into the ring; false if it is full.
    #[inline(always)]
    pub(crate) fn push(&mut self, sqe: &Sqe) -> bool {
        if self.writer.must_look() {
            self.end.writer = self.writer;
            let has_room = self.end.look_for_room();
            self.writer = self.end.writer;
            if !has_room {
                return false;
            }
        }
        self.writer.write(sqe);
        true
    }

    /// Whether the engine is gone.
    pub(crate) fn is_engine_gone(&self) -> bool {
        self.end.is_engine_gone()
    }
}

impl Drop for Pushing<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.end.writer = self.writer;
    }
}

/// A reader by value, likewise.
pub(crate) struct Reaping<'a> {
    reader: Reader,
    end: &'a mut AppEnd,
}

impl Reaping<'_> {
    /// Takes the oldest completion, if it is a success without a value: its user_data.
    #[inline(always)]
    pub(crate) fn success(&mut self) -> Option<u64> {
        let user_data = self.reader.success()?;
        self.turn();
        Some(user_data)
    }

    /// Takes the oldest completion.
    #[inline(always)]
    pub(crate) fn any(&mut self) -> Option<RawCqe> {
        let raw = self.reader.any(&self.end.parts, self.end.cq_turn)?;
        self.turn();
        Some(raw)
    }

    #[inline(always)]
    fn turn(&mut self) {
        if self.reader.left == 0 {
            self.end.reader = self.reader;
            self.end.turn();
            self.reader = self.end.reader;
        }
    }
}

impl Drop for Reaping<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.end.reader = self.reader;
    }
}

/// The engine's end by value, for its loop: entries in a row, as far as there is room and neither ring wraps.
pub(crate) struct Run<'a> {
    slot: *const Slot,
    stop: *const Slot,
    /// The first word of the next entry of the row: shape above, sequence number below.
    next: u64,
    cqe: *const CqeSlot,
    /// The last word of a success without a value.
    success: u64,
    cqes: *const CqeSlot,
    values: *const AtomicU64,
    ring: PhantomData<&'a EngineEnd>,
}

impl<'a> Run<'a> {
    /// The first word of the next entry; none if there is none in the run.
    #[inline(always)]
    pub(crate) fn first(&self) -> Option<u64> {
        if self.slot == self.stop {
            return None;
        }
        // SAFETY: before the stop, which lies in the ring or right behind it.
        let first = unsafe { &*self.slot }[0].load(Ordering::Acquire);
        (first as u32 == self.next as u32).then_some(first)
    }

    /// A row begins of entries that have the shape (the upper half of the first word) of this one.
    #[inline(always)]
    pub(crate) fn row(&mut self, first: u64) {
        self.next = first;
    }

    /// The next entry, if there is one and it is of the row.
    #[inline(always)]
    pub(crate) fn next(&self) -> Option<Entry<'a>> {
        if self.slot == self.stop {
            return None;
        }
        // SAFETY: before the stop, which lies in the ring or right behind it.
        let words = unsafe { &*self.slot };
        let first = words[0].load(Ordering::Acquire);
        (first == self.next).then_some(Entry { first, words })
    }

    /// The next entry is done with.
    #[inline(always)]
    pub(crate) fn pass(&mut self) {
        self.slot = self.slot.wrapping_add(1);
        // A run ends before the sequence number wraps.
        self.next = self.next.wrapping_add(1);
    }

    /// How far it went.
    #[inline(always)]
    pub(crate) fn progress(self) -> Progress {
        Progress { slot: self.slot, sequence: self.next as u32, cqe: self.cqe }
    }

    /// Writes the completion of an entry, once an entry: success, without a value.
    #[inline(always)]
    pub(crate) fn complete(&mut self, user_data: u64) {
        self.write(user_data, self.success);
    }

    /// The same with flags and a value.
    #[inline(always)]
    pub(crate) fn complete_value(&mut self, user_data: u64, flags: u16, value: u64) {
        let offset = (self.cqe as usize).wrapping_sub(self.cqes as usize) / 2;
        // SAFETY: a value for each cqe, of half its size.
        unsafe { &*self.values.byte_add(offset) }.store(value, Ordering::Relaxed);
        self.write(user_data, self.success | u64::from(flags) << 16);
    }

    #[inline(always)]
    fn write(&mut self, user_data: u64, last: u64) {
        // SAFETY: a run has a cqe for each of its entries.
        let cqe = unsafe { &*self.cqe };
        self.cqe = self.cqe.wrapping_add(1);
        cqe[0].store(user_data, Ordering::Relaxed);
        cqe[1].store(last, Ordering::Release);
    }
}

/// Where a run ended.
pub(crate) struct Progress {
    slot: *const Slot,
    sequence: u32,
    cqe: *const CqeSlot,
}

/// An entry in the ring, where its writer may still change it: each word is to be loaded once.
pub(crate) struct Entry<'a> {
    /// The first word, loaded.
    pub(crate) first: u64,
    words: &'a Slot,
}

impl Entry<'_> {
    /// Word `I`.
    #[inline(always)]
    pub(crate) fn load_word<const I: usize>(&self) -> u64 {
        const { assert!(I < SQE_WORDS) };
        self.words[I].load(Ordering::Relaxed)
    }

    /// All of it.
    #[inline(always)]
    pub(crate) fn load(&self) -> Sqe {
        let mut sqe = Sqe { words: [self.first, 0, 0, 0, 0, 0, 0, 0] };
        for i in 1..SQE_WORDS {
            if sqe.has_word(i) {
                sqe.words[i] = self.words[i].load(Ordering::Relaxed);
            }
        }
        sqe
    }
}

/// The engine's end.
pub(crate) struct EngineEnd {
    parts: Parts,
    /// The next entry's place and sequence number, and the place where one has to look for room and where the rings wrap.
    slot: *const Slot,
    stop: *const Slot,
    sequence: u32,
    /// The next completion, and its last word if it is a success without a value.
    cqe: *const CqeSlot,
    success: u64,
    /// The position of the first completion of the lap.
    cq_lap: u32,
    /// What the application was last told.
    sq_told: u32,
    /// The application's watermark, as last seen.
    cq_head: u32,
}

// SAFETY: all access to the ring is by atomics.
unsafe impl Send for EngineEnd {}

impl EngineEnd {
    pub(crate) fn new(parts: Parts) -> EngineEnd {
        EngineEnd::at(parts, 0, 0)
    }

    /// An end at these positions.
    fn at(parts: Parts, sq: u32, cq: u32) -> EngineEnd {
        let slot: *const Slot = parts.sqe(sq);
        let mut end = EngineEnd {
            parts,
            slot,
            stop: slot,
            sequence: sq.wrapping_add(1),
            cqe: parts.cqe(cq),
            success: 0,
            cq_lap: 0,
            sq_told: sq,
            cq_head: cq,
        };
        end.set_cq(cq);
        end
    }

    /// Entries ever taken.
    #[inline(always)]
    pub(crate) fn taken(&self) -> u32 {
        self.sequence.wrapping_sub(1)
    }

    /// Completions ever written.
    #[inline(always)]
    fn cq_tail(&self) -> u32 {
        let at = (self.cqe as usize).wrapping_sub(self.parts.cqes.as_ptr() as usize) / size_of::<CqeSlot>();
        self.cq_lap.wrapping_add(at as u32)
    }

    fn set_cq(&mut self, tail: u32) {
        self.cq_lap = tail & !self.parts.cq_mask;
        self.cqe = self.parts.cqe(tail);
        self.success = u64::from(self.parts.phase(tail)) << 16;
    }

    /// Finds out how many entries may be taken before one has to look again, if `owed` completions are still to come of
    /// earlier ones: false if none.
    #[cold]
    #[inline(never)]
    pub(crate) fn look(&mut self, owed: u32) -> bool {
        let Parts { sq_mask, cq_mask, .. } = self.parts;
        let (sq_head, cq_tail, capacity) = (self.taken(), self.cq_tail(), cq_mask + 1);
        // SAFETY: the ring's memory is valid as long as its ends.
        let head = unsafe { self.parts.cq_watermark.as_ref() }.load(Ordering::Acquire);
        // A watermark ahead of what was written, or behind what was read, is made up.
        if cq_tail.wrapping_sub(head) <= capacity {
            self.cq_head = head;
        }
        let room = capacity.saturating_sub(cq_tail.wrapping_sub(self.cq_head).saturating_add(owed));
        self.set_cq(cq_tail);
        // As far as neither ring wraps, nor the sequence number.
        let in_a_row = (sq_mask + 1 - (sq_head & sq_mask)).min(capacity - (cq_tail & cq_mask)).min(sq_head ^ u32::MAX);
        // Where the number wraps the next entry goes alone.
        let len = room.min(in_a_row.max(1));
        self.slot = self.parts.sqe(sq_head);
        self.stop = self.slot.wrapping_add(len as usize);
        len != 0
    }

    /// Whether one has to look before an entry is taken.
    #[inline(always)]
    pub(crate) fn must_look(&self) -> bool {
        self.slot == self.stop
    }

    /// Whether there is more to do: an entry, or a look.
    #[inline(always)]
    pub(crate) fn has_more(&self) -> bool {
        // SAFETY: before the stop, which lies in the ring or right behind it.
        self.must_look() || unsafe { &*self.slot }[0].load(Ordering::Acquire) as u32 == self.sequence
    }

    /// The entries up to the stop.
    #[inline(always)]
    pub(crate) fn run(&self) -> Run<'_> {
        Run {
            slot: self.slot,
            stop: self.stop,
            next: u64::from(self.sequence),
            cqe: self.cqe,
            success: self.success,
            cqes: self.parts.cqes.as_ptr().cast(),
            values: self.parts.values.as_ptr(),
            ring: PhantomData,
        }
    }

    /// Goes on where a run ended, and tells the application: how many entries were done.
    #[inline(always)]
    pub(crate) fn go_on(&mut self, Progress { slot, sequence, cqe }: Progress) -> u32 {
        let done = sequence.wrapping_sub(self.sequence);
        (self.slot, self.sequence, self.cqe) = (slot, sequence, cqe);
        self.tell();
        done
    }

    /// Takes the oldest entry whole, room or not.
    pub(crate) fn take(&mut self) -> Option<Sqe> {
        if self.must_look() {
            self.slot = self.parts.sqe(self.taken());
            self.stop = self.slot;
        }
        // SAFETY: in the ring, before the stop or just found.
        let words = unsafe { &*self.slot };
        let first = words[0].load(Ordering::Acquire);
        if first as u32 != self.sequence {
            return None;
        }
        self.sequence = self.sequence.wrapping_add(1);
        let next = self.slot.wrapping_add(1);
        if self.must_look() || next == self.stop {
            self.slot = self.parts.sqe(self.taken());
            self.stop = self.slot;
        } else {
            self.slot = next;
        }
        Some(Entry { first, words }.load())
    }

    /// Tells the application how far entries were taken; nothing is written if that is old.
    #[inline(always)]
    pub(crate) fn tell(&mut self) {
        let taken = self.taken();
        if self.sq_told != taken {
            self.sq_told = taken;
            // SAFETY: the ring's memory is valid as long as its ends.
            unsafe { self.parts.sq_watermark.as_ref() }.store(taken, Ordering::Release);
        }
    }

    /// Writes a completion. There is room: it was reserved when the entry was taken.
    pub(crate) fn complete(&mut self, user_data: u64, status: u16, flags: u16, imm: u32, value: u64) {
        let at = self.cq_tail();
        let slot = self.parts.cqe(at);
        slot[0].store(user_data, Ordering::Relaxed);
        if flags & VALUE != 0 {
            self.parts.value(at).store(value, Ordering::Relaxed);
        }
        let flags = flags & !PHASE | self.parts.phase(at);
        let last = u64::from(status) | u64::from(flags) << 16 | u64::from(imm) << 32;
        slot[1].store(last, Ordering::Release);
        self.set_cq(at.wrapping_add(1));
        // Fewer completions may fit in a row than was thought.
        self.stop = self.slot;
    }

    /// Whether the application is gone.
    pub(crate) fn is_app_gone(&self) -> bool {
        // SAFETY: the ring's memory is valid as long as its ends.
        unsafe { self.parts.app_gone.as_ref() }.load(Ordering::Acquire) != 0
    }

    /// Says that the engine is gone.
    pub(crate) fn leave(&self) {
        // SAFETY: the ring's memory is valid as long as its ends.
        unsafe { self.parts.engine_gone.as_ref() }.store(1, Ordering::Release);
    }

    /// The completions that were written and not yet taken; for when the application is gone.
    pub(crate) fn unread(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        // SAFETY: the ring's memory is valid as long as its ends.
        let head = unsafe { self.parts.cq_watermark.as_ref() }.load(Ordering::Acquire);
        let unread = self.cq_tail().wrapping_sub(head).min(self.parts.cq_mask + 1);
        (0..unread).map(move |i| {
            let at = self.cq_tail().wrapping_sub(i + 1);
            let flags = (self.parts.cqe(at)[1].load(Ordering::Acquire) >> 16) as u16;
            (flags, self.parts.value(at).load(Ordering::Relaxed))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;
    use std::vec::Vec;

    /// Rings over separate allocations. Leaked: a test ends with its process.
    fn parts(sq_entries: u32, cq_entries: u32) -> Parts {
        fn words(n: usize) -> NonNull<AtomicU64> {
            let words: Vec<AtomicU64> = (0..n).map(|_| AtomicU64::new(0)).collect();
            NonNull::from(Box::leak(words.into_boxed_slice())).cast()
        }
        fn word() -> NonNull<AtomicU32> {
            NonNull::from(Box::leak(Box::new(AtomicU32::new(0))))
        }
        let (sq, cq) = (sq_entries as usize, cq_entries as usize);
        // SAFETY: of these lengths, and leaked.
        unsafe {
            Parts::at(
                [words(sq * 8), words(cq * 2), words(cq)],
                [word(), word(), word(), word()],
                sq_entries,
                cq_entries,
            )
        }
    }

    fn entry(i: u64) -> Sqe {
        Sqe { words: [7 << 32 | 1 << 56, i, i * 2, i * 3, i, i * 5, i * 6, i * 7] }
    }

    fn check_entry(sqe: &Sqe, i: u64) {
        let mut expected = entry(i);
        expected.words[0] = sqe.words[0];
        assert_eq!(*sqe, expected);
    }

    use proptest::prelude::*;
    use std::collections::VecDeque;
    use verbring_slab::{Region, RegionOptions};

    proptest! {
        /// Against two queues, with positions that start just before they wrap at 2^32.
        #[test]
        fn model(steps in prop::collection::vec(0u8..5, 1..500), start in prop::sample::select(&[0u32, u32::MAX - 20])) {
            let parts = parts(8, 4);
            // The cq starts in the lap whose cqes are not there yet: a multiple of two laps.
            let cq_start = start & !7;
            let (mut app, mut engine) = (AppEnd::at(parts, start, cq_start), EngineEnd::at(parts, start, cq_start));
            start_at(&parts, cq_start, start);
            let (mut sq, mut cq) = (VecDeque::new(), VecDeque::new());
            let (mut next, mut done) = (1u64, 0u64);
            for step in steps {
                match step {
                    0 => {
                        let pushed = if next % 2 == 0 { app.push(&entry(next)) } else { app.pushing().push(&entry(next)) };
                        prop_assert_eq!(pushed, sq.len() < 8, "{} in the ring", sq.len());
                        if pushed {
                            sq.push_back(next);
                            next += 1;
                        }
                    }
                    1 => {
                        let taken = engine.take();
                        engine.tell();
                        match sq.pop_front() {
                            None => prop_assert_eq!(taken, None),
                            Some(i) => check_entry(&taken.unwrap(), i),
                        }
                    }
                    2 => {
                        prop_assert_eq!(engine.look(0), cq.len() < 4);
                        if cq.len() < 4 {
                            done += 1;
                            engine.complete(done, 5, VALUE, 1, done);
                            cq.push_back((done, done));
                        }
                    }
                    3 => {
                        if engine.must_look() {
                            prop_assert_eq!(engine.look(0), cq.len() < 4);
                        }
                        let mut run = engine.run();
                        while let Some(first) = run.first() {
                            run.row(first);
                            while let Some(entry) = run.next() {
                                prop_assert_eq!(Some(entry.load_word::<1>()), sq.pop_front());
                                done += 1;
                                // Not each has a completion.
                                if done % 3 != 0 {
                                    run.complete(done);
                                    cq.push_back((done, 0));
                                }
                                run.pass();
                            }
                        }
                        let progress = run.progress();
                        engine.go_on(progress);
                        prop_assert_eq!(engine.has_more() && !engine.must_look(), false);
                    }
                    _ => {
                        let mut reaping = app.reaping();
                        let reaped = match done % 4 {
                            0 => reaping.success().map(|user_data| (user_data, 0)),
                            1 => reaping.any().map(|cqe| (cqe.user_data, cqe.value)),
                            2 => {
                                drop(reaping);
                                app.reap_success().map(|user_data| (user_data, 0))
                            }
                            _ => {
                                drop(reaping);
                                app.reap().map(|cqe| (cqe.user_data, cqe.value))
                            }
                        };
                        match cq.front() {
                            // It is no success without a value.
                            Some((_, value)) if done % 2 == 0 && *value != 0 => prop_assert_eq!(reaped, None),
                            _ => prop_assert_eq!(reaped, cq.pop_front()),
                        }
                        done += 1;
                    }
                }
            }
        }

        /// A hostile application: any bytes anywhere. The engine takes at most what fits and keeps to its ring.
        #[test]
        fn hostile_application(bytes in prop::collection::vec((0usize..1000, any::<u64>(), any::<bool>()), 1..60)) {
            let region = Region::private(ring_bytes(4, 4), RegionOptions::default()).unwrap();
            // SAFETY: the region outlives the ends.
            let parts = unsafe { Parts::create(region.base(), 4, 4) };
            let mut engine = EngineEnd::new(parts);
            let words = ring_bytes(4, 4) / 8;
            for (at, value, small) in bytes {
                let value = if small { (value % 8) | ((value & 0xff) << 32) } else { value };
                // SAFETY: a word of the ring.
                let word = unsafe { AtomicU64::from_ptr(region.base().as_ptr().cast::<u64>().add(at % words)) };
                word.store(value, Ordering::Relaxed);
                let mut taken = 0;
                while engine.take().is_some() {
                    taken += 1;
                    prop_assert!(taken <= 4);
                }
                engine.tell();
                if engine.look(1) {
                    engine.complete(1, 2, VALUE, 3, 4);
                }
                let mut run = engine.run();
                let mut done = 0;
                while let Some(first) = run.first() {
                    run.row(first);
                    while run.next().is_some() {
                        run.complete_value(1, VALUE, 2);
                        run.pass();
                        done += 1;
                    }
                }
                prop_assert!(done <= 3);
                let progress = run.progress();
                engine.go_on(progress);
            }
            prop_assert!(engine.unread().count() <= 4);
        }

        /// A hostile engine: the application gets made-up completions, and no room it has not.
        #[test]
        fn hostile_engine(bytes in prop::collection::vec((0usize..1000, any::<u64>()), 1..60)) {
            let region = Region::private(ring_bytes(4, 4), RegionOptions::default()).unwrap();
            // SAFETY: the region outlives the ends.
            let parts = unsafe { Parts::create(region.base(), 4, 4) };
            let mut app = AppEnd::new(parts);
            for (at, value) in bytes {
                let at = at % (ring_bytes(4, 4) / 8);
                // SAFETY: a word of the ring.
                let word = unsafe { AtomicU64::from_ptr(region.base().as_ptr().cast::<u64>().add(at)) };
                word.store(value, Ordering::Relaxed);
                let reaped = (0..8).filter(|_| app.reap().is_some()).count();
                prop_assert!(reaped <= 4, "one lap at most");
                app.push(&entry(1));
                prop_assert!(app.pushed().wrapping_sub(app.sq_head) <= 4);
            }
        }

        /// Whatever the header says, attaching takes it only if it fits.
        #[test]
        fn hostile_header(at in 0usize..8, value in any::<u64>()) {
            let region = Region::private(ring_bytes(4, 8), RegionOptions::default()).unwrap();
            // SAFETY: the region outlives the parts.
            unsafe { Parts::create(region.base(), 4, 8) };
            // SAFETY: as above.
            let attached = unsafe { Parts::attach(region.base(), ring_bytes(4, 8)) };
            prop_assert!(attached.is_ok());
            // SAFETY: as above.
            let attached = unsafe { Parts::attach(region.base(), ring_bytes(4, 8) - 1) };
            prop_assert!(attached.is_err());
            // SAFETY: a word of the header.
            let word = unsafe { AtomicU64::from_ptr(region.base().as_ptr().cast::<u64>().add(at)) };
            let before = word.swap(value, Ordering::Relaxed);
            // SAFETY: as above.
            let attached = unsafe { Parts::attach(region.base(), ring_bytes(4, 8)) };
            prop_assert_eq!(attached.is_ok(), before == value);
        }
    }

    fn start_at(parts: &Parts, cq: u32, sq: u32) {
        // SAFETY: leaked words.
        unsafe {
            parts.cq_watermark.as_ref().store(cq, Ordering::Relaxed);
            parts.sq_watermark.as_ref().store(sq, Ordering::Relaxed);
        }
    }
}
