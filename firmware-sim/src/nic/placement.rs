//! Memory that was written and is not there yet: what lies between a NIC that has accepted a packet and the memory of its
//! host.
//!
//! A real NIC acknowledges a write when it is on its way through the bus. Here that way can be made long: lines of at most
//! 64 bytes arrive after a time of the seed's, in any order within a write, and if writes are not ordered, in any order
//! across them too. A read, an atomic, or the completion of a receive on the same queue pair pushes everything of it
//! through (PCI Express: a read does not overtake writes).

use verbring_slab::{Arena, ArenaFull, Table};
use verbring_sys::copy;

use crate::random::Random;

/// Bytes of a line.
const LINE: usize = 64;
/// Lines under way. When there is no room, the oldest is there at once.
const LINES: u32 = 1024;

/// How late and how ordered writes reach the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// The longest time that a line takes.
    pub max_ns: u64,
    /// A write may be there before an earlier one of its queue pair.
    pub relaxed: bool,
}

#[derive(Clone, Copy)]
struct Line {
    /// 0: the place is free.
    qp: u32,
    /// Of the lines of a write, the number of the write.
    write: u64,
    /// What has not arrived by then arrives then.
    due: u64,
    order: u64,
    address: u64,
    len: u8,
    bytes: [u8; LINE],
}

const FREE: Line = Line { qp: 0, write: 0, due: 0, order: 0, address: 0, len: 0, bytes: [0; LINE] };

pub(super) struct Placement {
    lines: Table<Line>,
    delay: Option<Delay>,
    under_way: u32,
    order: u64,
    next_due: u64,
}

impl Placement {
    pub(super) const fn bytes(delay: Option<Delay>) -> usize {
        Table::<Line>::bytes(if delay.is_some() { LINES } else { 1 })
    }

    /// # Safety
    /// The arena outlives it.
    pub(super) unsafe fn new(arena: &mut Arena, delay: Option<Delay>) -> Result<Placement, ArenaFull> {
        let capacity = if delay.is_some() { LINES } else { 1 };
        // SAFETY: the caller keeps the arena.
        let lines = unsafe { arena.table(capacity, |_| FREE) }?;
        Ok(Placement { lines, delay, under_way: 0, order: 0, next_due: u64::MAX })
    }

    /// Writes bytes to memory, now or later. `write` numbers the writes of a queue pair.
    ///
    /// # Safety
    /// The memory is valid for writes, and stays so until `finish_range` of it was called.
    pub(super) unsafe fn write(
        &mut self,
        now: u64,
        random: &mut Random,
        qp: u32,
        write: u64,
        address: u64,
        bytes: &[u8],
    ) {
        let Some(delay) = self.delay else {
            // SAFETY: the caller's promise.
            unsafe { copy::copy(address as *mut u8, bytes.as_ptr(), bytes.len()) };
            return;
        };
        let mut at = address;
        let mut rest = bytes;
        while !rest.is_empty() {
            // Lines end where the memory's do, so a word is never torn.
            let len = (LINE - (at as usize % LINE)).min(rest.len());
            let (line, behind) = rest.split_at(len);
            let due = now.saturating_add(random.between(0, delay.max_ns));
            let place = self.room();
            let mut held = [0; LINE];
            if let Some(place) = held.get_mut(..len) {
                place.copy_from_slice(line);
            }
            *self.lines.at_mut(place) =
                Line { qp, write, due, order: self.order, address: at, len: len as u8, bytes: held };
            self.order += 1;
            self.under_way += 1;
            self.next_due = self.next_due.min(due);
            (at, rest) = (at + len as u64, behind);
        }
    }

    /// A free place; if there is none, that of the oldest line, which arrives.
    fn room(&mut self) -> u32 {
        if self.under_way == self.lines.capacity()
            && let Some(oldest) = self.lines.iter().map(|l| l.order).min()
        {
            self.finish(|line| line.order == oldest);
        }
        self.lines.iter().position(|l| l.qp == 0).unwrap_or(0) as u32
    }

    /// When the next line arrives; `u64::MAX` if none is under way.
    pub(super) fn next_due(&self) -> u64 {
        self.next_due
    }

    /// What is due arrives.
    pub(super) fn advance(&mut self, now: u64) {
        if now < self.next_due {
            return;
        }
        self.finish(|line| line.due <= now);
        self.next_due = self.lines.iter().filter(|l| l.qp != 0).map(|l| l.due).min().unwrap_or(u64::MAX);
    }

    /// Everything of a queue pair arrives.
    pub(super) fn finish_qp(&mut self, qp: u32) {
        if self.under_way != 0 {
            self.finish(|line| line.qp == qp);
        }
    }

    /// Everything that goes to a range arrives, and what has to be there before it.
    pub(super) fn finish_range(&mut self, address: u64, len: u64) {
        if self.under_way != 0 {
            self.finish(|line| line.address < address + len && address < line.address + u64::from(line.len));
        }
    }

    /// Everything arrives.
    pub(super) fn finish_all(&mut self) {
        if self.under_way != 0 {
            self.finish(|_| true);
        }
    }

    /// The lines that `which` names arrive; where writes are ordered, those of earlier writes of their queue pairs first.
    fn finish(&mut self, which: impl Fn(&Line) -> bool) {
        let is_relaxed = self.delay.is_some_and(|d| d.relaxed);
        while let Some(chosen) = self.oldest(|line| which(line)) {
            let Line { qp, write, .. } = *self.lines.at(chosen);
            if !is_relaxed {
                while let Some(earlier) = self.oldest(|line| line.qp == qp && line.write < write) {
                    self.arrive(earlier);
                }
            }
            self.arrive(chosen);
        }
    }

    fn oldest(&self, which: impl Fn(&Line) -> bool) -> Option<u32> {
        let lines = self.lines.iter().enumerate().filter(|(_, line)| line.qp != 0 && which(line));
        lines.min_by_key(|(_, line)| line.order).map(|(place, _)| place as u32)
    }

    fn arrive(&mut self, place: u32) {
        let line = core::mem::replace(self.lines.at_mut(place), FREE);
        if line.qp == 0 {
            return;
        }
        self.under_way -= 1;
        // SAFETY: `write` was promised that it is valid until `finish_range`.
        unsafe { copy::copy(line.address as *mut u8, line.bytes.as_ptr(), usize::from(line.len).min(LINE)) };
    }
}
