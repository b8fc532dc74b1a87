//! The memory between two CPU-driven ends of a connection. Each end owns one lane, through which the other reaches it.
//!
//! ```text
//! offset      bytes  written by  what
//!      0         24  owner       magic, version, size: checked when it is mapped, not used afterwards
//!     64          8  owner       door: bit 0 closed, bit 1 dead (set by this side's own watcher in its mapping of a
//!                                dead owner's lane), from bit 8 the revision, which changes at each revocation
//!    128  2 x    64  owner       for each class: credits, and how far messages were taken
//!    256  2 x    64  the other   for each class: how far messages were written
//!    512       1024  owner       for each registration of the owner: its epoch
//!   1536  2 x 65536  the other   for each class: a byte ring of messages
//! ```
//! A message is a header of 16 bytes (length, immediate, two zero words) and its bytes, padded to 16. Whoever reads a
//! word here reads it once, and takes it for what it is: something that the other process may have made up.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{CLASSES, copy};

/// Bytes of a lane.
pub const LANE_BYTES: usize = RINGS + CLASSES * RING_BYTES as usize;
/// Registrations that a lane has an epoch for.
pub const MAX_MRS: u32 = 256;
/// The longest message. Four of them fit a ring, so that a sender with credit seldom waits for room.
pub const MAX_SEND: u32 = 16 * 1024 - HEADER;
/// The version of this layout.
pub const VERSION: u32 = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"vrb-lane");
const DOOR: usize = 64;
const OWNER_WORDS: usize = 128;
const OTHER_WORDS: usize = 256;
const EPOCHS: usize = 512;
const RINGS: usize = EPOCHS + 4 * MAX_MRS as usize;
const RING_BYTES: u32 = 65536;
const HEADER: u32 = 16;

const _: () = assert!(OWNER_WORDS + 64 * CLASSES <= OTHER_WORDS && OTHER_WORDS + 64 * CLASSES <= EPOCHS);
const _: () =
    assert!(RINGS.is_multiple_of(64) && RING_BYTES.is_power_of_two() && 4 * (MAX_SEND + HEADER) <= RING_BYTES);

/// The owner closed the connection.
pub(crate) const CLOSED: u64 = 1;
/// The owner's process is dead.
pub(crate) const DEAD: u64 = 2;
/// One step of the revision.
pub(crate) const REVISION: u64 = 1 << 8;

/// A lane, mapped here. Who makes one keeps the memory mapped as long as it is used.
#[derive(Clone, Copy, Debug)]
pub struct Lane(NonNull<u8>);

// SAFETY: all access is by atomics and racing copies.
unsafe impl Send for Lane {}

/// The other side wrote what no correct side writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

impl Lane {
    /// A lane over zeroed memory: its owner's first step.
    ///
    /// # Safety
    /// `base` is a multiple of 64, and valid for [`LANE_BYTES`] as long as this and copies of it are used; all access
    /// meanwhile is by lanes.
    pub unsafe fn create(base: NonNull<u8>) -> Lane {
        let lane = Lane(base);
        lane.word64(0).store(MAGIC, Ordering::Relaxed);
        lane.word64(8).store(u64::from(VERSION), Ordering::Relaxed);
        lane.word64(16).store(LANE_BYTES as u64, Ordering::Relaxed);
        lane
    }

    /// A lane that the other side made; none if it is not one.
    ///
    /// # Safety
    /// As [`Lane::create`].
    pub unsafe fn attach(base: NonNull<u8>) -> Option<Lane> {
        let lane = Lane(base);
        let is_lane = lane.word64(0).load(Ordering::Relaxed) == MAGIC
            && lane.word64(8).load(Ordering::Relaxed) == u64::from(VERSION)
            && lane.word64(16).load(Ordering::Relaxed) == LANE_BYTES as u64;
        is_lane.then_some(lane)
    }

    #[inline(always)]
    fn word64(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset + 8 <= LANE_BYTES);
        // SAFETY: all offsets of this file lie in the lane and are aligned.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().add(offset).cast()) }
    }

    #[inline(always)]
    fn word32(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset + 4 <= LANE_BYTES);
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.0.as_ptr().add(offset).cast()) }
    }

    /// The door: state and revision of the owner.
    #[inline(always)]
    pub(crate) fn door(&self) -> &AtomicU64 {
        self.word64(DOOR)
    }

    /// The epoch of one of the owner's registrations.
    pub(crate) fn epoch(&self, mr: u32) -> &AtomicU32 {
        self.word32(EPOCHS + 4 * (mr % MAX_MRS) as usize)
    }

    fn ring(&self, class: usize) -> Ring {
        let class = class % CLASSES;
        Ring { lane: *self, class }
    }

    /// The owner's end of a class's messages.
    pub(crate) fn inbox(&self, class: usize) -> Inbox {
        Inbox { ring: self.ring(class), taken: 0, credits: 0 }
    }

    /// The other's end.
    pub(crate) fn outbox(&self, class: usize) -> Outbox {
        Outbox { ring: self.ring(class), written: 0, sent: 0 }
    }
}

#[derive(Clone, Copy)]
struct Ring {
    lane: Lane,
    class: usize,
}

impl Ring {
    fn credits(&self) -> &AtomicU32 {
        self.lane.word32(OWNER_WORDS + 64 * self.class)
    }

    fn taken(&self) -> &AtomicU32 {
        self.lane.word32(OWNER_WORDS + 64 * self.class + 4)
    }

    fn written(&self) -> &AtomicU32 {
        self.lane.word32(OTHER_WORDS + 64 * self.class)
    }

    fn at(&self, position: u32) -> *mut u8 {
        let offset = RINGS + self.class * RING_BYTES as usize + (position % RING_BYTES) as usize;
        // SAFETY: inside the lane.
        unsafe { self.lane.0.as_ptr().add(offset) }
    }

    /// Calls `step` for the one or two pieces that `len` bytes from `position` lie in.
    fn pieces(&self, position: u32, len: u32, mut step: impl FnMut(*mut u8, usize, usize)) {
        let first = (RING_BYTES - position % RING_BYTES).min(len);
        step(self.at(position), 0, first as usize);
        if first < len {
            step(self.at(position.wrapping_add(first)), first as usize, (len - first) as usize);
        }
    }
}

/// The owner's end: private indices beside what the other side may scribble on.
pub(crate) struct Inbox {
    ring: Ring,
    taken: u32,
    /// Receives ever posted.
    credits: u32,
}

impl Inbox {
    /// Tells the other side that one more receive is posted.
    pub(crate) fn grant(&mut self) {
        self.credits = self.credits.wrapping_add(1);
        self.ring.credits().store(self.credits, Ordering::Release);
    }

    /// Takes the oldest message into `local`, which has room for `room` bytes: its length and immediate.
    ///
    /// # Safety
    /// `local` is valid for writes of `room` bytes.
    pub(crate) unsafe fn take(&mut self, local: *mut u8, room: u32) -> Result<Option<(u32, u32)>, Corrupt> {
        let available = self.ring.written().load(Ordering::Acquire).wrapping_sub(self.taken);
        if available == 0 {
            return Ok(None);
        }
        if !(HEADER..=RING_BYTES).contains(&available) || !available.is_multiple_of(HEADER) {
            return Err(Corrupt);
        }
        // A header never straddles the end: positions are multiples of 16. Each word is read once.
        let header = self.ring.at(self.taken) as u64;
        // SAFETY: 16 bytes in the lane, aligned.
        let (first, second) =
            unsafe { (copy::word(header).load(Ordering::Relaxed), copy::word(header + 8).load(Ordering::Relaxed)) };
        let (len, imm) = (first as u32, (first >> 32) as u32);
        if second != 0 || len > MAX_SEND || len.next_multiple_of(HEADER) > available - HEADER {
            return Err(Corrupt);
        }
        self.ring.pieces(self.taken.wrapping_add(HEADER), len.min(room), |from, at, bytes| {
            // SAFETY: the piece lies in the ring; at + bytes <= room.
            unsafe { copy::copy(local.add(at), from, bytes) };
        });
        self.taken = self.taken.wrapping_add(HEADER + len.next_multiple_of(HEADER));
        self.ring.taken().store(self.taken, Ordering::Release);
        Ok(Some((len, imm)))
    }
}

/// The sender's end.
pub(crate) struct Outbox {
    ring: Ring,
    written: u32,
    /// Messages ever sent.
    sent: u32,
}

impl Outbox {
    /// Sends a message of at most [`MAX_SEND`] bytes; false if there is no credit or no room yet.
    ///
    /// # Safety
    /// `local` is valid for reads of `len` bytes.
    pub(crate) unsafe fn send(&mut self, local: *const u8, len: u32, imm: u32) -> Result<bool, Corrupt> {
        let credit = self.ring.credits().load(Ordering::Acquire).wrapping_sub(self.sent);
        // A side that posts 2^31 receives ahead of what was sent does not exist: the difference is negative.
        if credit > u32::MAX / 2 {
            return Err(Corrupt);
        }
        let used = self.written.wrapping_sub(self.ring.taken().load(Ordering::Acquire));
        if used > RING_BYTES || !used.is_multiple_of(HEADER) {
            return Err(Corrupt);
        }
        let needed = HEADER + len.min(MAX_SEND).next_multiple_of(HEADER);
        if credit == 0 || RING_BYTES - used < needed {
            return Ok(false);
        }
        let header = self.ring.at(self.written) as u64;
        // SAFETY: 16 bytes in the lane, aligned.
        unsafe {
            copy::word(header).store(u64::from(len.min(MAX_SEND)) | u64::from(imm) << 32, Ordering::Relaxed);
            copy::word(header + 8).store(0, Ordering::Relaxed);
        }
        self.ring.pieces(self.written.wrapping_add(HEADER), len.min(MAX_SEND), |to, at, bytes| {
            // SAFETY: the piece lies in the ring; at + bytes <= len.
            unsafe { copy::copy(to, local.add(at), bytes) };
        });
        self.written = self.written.wrapping_add(needed);
        self.sent = self.sent.wrapping_add(1);
        self.ring.written().store(self.written, Ordering::Release);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::vec;
    use std::vec::Vec;
    use verbring_slab::{Region, RegionOptions};

    fn lane() -> (Region, Lane) {
        let region = Region::private(LANE_BYTES, RegionOptions::default()).unwrap();
        // SAFETY: the region is returned beside the lane and dropped after it.
        let lane = unsafe { Lane::create(region.base()) };
        (region, lane)
    }

    fn send(outbox: &mut Outbox, bytes: &[u8], imm: u32) -> Result<bool, Corrupt> {
        // SAFETY: a slice.
        unsafe { outbox.send(bytes.as_ptr(), bytes.len() as u32, imm) }
    }

    fn take(inbox: &mut Inbox, room: usize) -> Result<Option<(Vec<u8>, u32, u32)>, Corrupt> {
        let mut buffer = vec![0; room];
        // SAFETY: a slice of `room` bytes.
        let taken = unsafe { inbox.take(buffer.as_mut_ptr(), room as u32) }?;
        Ok(taken.map(|(len, imm)| {
            buffer.truncate(len as usize);
            (buffer, len, imm)
        }))
    }

    proptest! {
        /// Against a queue: what is sent arrives, in order, whole, and not without credit.
        #[test]
        fn model(steps in prop::collection::vec((0usize..=MAX_SEND as usize, any::<bool>(), any::<bool>()), 1..400)) {
            let (_region, lane) = lane();
            let (mut inbox, mut outbox) = (lane.inbox(1), lane.outbox(1));
            let mut expected = VecDeque::new();
            let (mut credit, mut stamp) = (0u32, 0u32);
            for (len, grant, is_send) in steps {
                if grant {
                    inbox.grant();
                    credit += 1;
                }
                if is_send {
                    stamp += 1;
                    let bytes: Vec<u8> = (0..len).map(|i| (i as u32 * 3 + stamp) as u8).collect();
                    let sent = send(&mut outbox, &bytes, stamp).unwrap();
                    prop_assert!(credit > 0 || !sent);
                    if sent {
                        credit -= 1;
                        expected.push_back((bytes, stamp));
                    } else if credit > 0 {
                        prop_assert!(expected.len() >= 3, "room is short only when messages wait");
                    }
                } else {
                    let taken = take(&mut inbox, MAX_SEND as usize).unwrap();
                    prop_assert_eq!(taken.map(|(b, _, imm)| (b, imm)), expected.pop_front());
                }
            }
        }

        /// A hostile other side: any words, any bytes. Nothing outside the lane and the buffer is touched, nothing panics.
        #[test]
        fn hostile(
            words in prop::collection::vec((0usize..LANE_BYTES / 8, any::<u64>()), 0..40),
            small in prop::collection::vec((0usize..32, 0u64..70000), 0..20),
        ) {
            let (_region, lane) = lane();
            let (mut inbox, mut outbox) = (lane.inbox(0), lane.outbox(0));
            inbox.grant();
            for (at, value) in words.into_iter().chain(small.into_iter().map(|(at, v)| (at + 16, v))) {
                lane.word64(at * 8).store(value, Ordering::Relaxed);
                let mut buffer = vec![0xeeu8; 200];
                // SAFETY: 100 bytes of the buffer.
                let _ = unsafe { inbox.take(buffer.as_mut_ptr().add(50), 100) };
                prop_assert!(buffer[..50].iter().chain(&buffer[150..]).all(|b| *b == 0xee));
                let _ = send(&mut outbox, &[1; 100], 3);
            }
        }
    }

    #[test]
    fn a_longer_message_is_cut_and_said() {
        let (_region, lane) = lane();
        let (mut inbox, mut outbox) = (lane.inbox(0), lane.outbox(0));
        inbox.grant();
        assert_eq!(send(&mut outbox, b"0123456789", 9), Ok(true));
        let mut buffer = [0u8; 16];
        // SAFETY: 4 bytes of the buffer.
        let taken = unsafe { inbox.take(buffer.as_mut_ptr(), 4) };
        assert_eq!((taken, &buffer[..6]), (Ok(Some((10, 9))), &b"0123\0\0"[..]));
        assert_eq!(take(&mut inbox, 10), Ok(None));
    }

    #[test]
    fn only_a_lane_is_attached() {
        let (_region, lane) = lane();
        // SAFETY: the region lives.
        assert!(unsafe { Lane::attach(lane.0) }.is_some());
        lane.word64(8).store(99, Ordering::Relaxed);
        // SAFETY: as above.
        assert!(unsafe { Lane::attach(lane.0) }.is_none());
    }
}
