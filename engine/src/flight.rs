//! Operations that did not end when they were submitted: what is known of each, and their order.

use verbring_slab::{Arena, ArenaFull, Table};
use verbring_sys::Status;

use crate::sqe::Sqe;

/// No flight.
pub(crate) const NONE: u32 = u32::MAX;
/// The most flights of an engine; the index has to fit a wr_id.
pub(crate) const MAX_FLIGHTS: u32 = 1 << 16;

/// Where an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    /// Waits in its channel: for a fence, a link, a signal, or room in the device.
    Held,
    /// The device has it.
    Posted,
    /// Its connection was broken; its memory is not given back before the device's drain bound.
    Draining,
}

/// An operation in flight.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Flight {
    /// A private copy, checked again when it starts.
    pub(crate) sqe: Sqe,
    /// In nanoseconds; `u64::MAX` is none.
    pub(crate) deadline: u64,
    /// Position among all operations in flight.
    pub(crate) order: u64,
    /// The next in its channel; the next free one.
    pub(crate) next: u32,
    pub(crate) generation: u32,
    /// The chain it is part of; 0 is none.
    pub(crate) chain: u32,
    pub(crate) state: State,
    pub(crate) port: u8,
    /// Work requests that the device still has of it.
    pub(crate) parts: u8,
    /// A signal is still to be posted.
    pub(crate) needs_second: bool,
    /// What it ends with, whatever the device says: an error decided before.
    pub(crate) fate: Option<Status>,
}

const _: () = assert!(size_of::<Flight>() == 128);

/// The flights of an engine: a fixed number.
pub(crate) struct Flights {
    table: Table<Flight>,
    /// The flight that is taken next, and what its wr_id will be.
    free: u32,
    free_wr_id: u64,
    pub(crate) live: u32,
}

impl Flights {
    pub(crate) const fn bytes(capacity: u32) -> usize {
        Table::<Flight>::bytes(capacity)
    }

    /// # Safety
    /// `arena` outlives it.
    pub(crate) unsafe fn new(arena: &mut Arena, capacity: u32) -> Result<Flights, ArenaFull> {
        let capacity = Table::<Flight>::capacity_for(capacity);
        let flight = |i: u32| Flight {
            sqe: Sqe::nop(),
            deadline: u64::MAX,
            order: 0,
            next: if i + 1 == capacity { NONE } else { i + 1 },
            generation: 1,
            chain: 0,
            state: State::Free,
            port: 0,
            parts: 0,
            needs_second: false,
            fate: None,
        };
        // SAFETY: the caller keeps the arena.
        let table = unsafe { arena.table(capacity, flight) }?;
        let mut flights = Flights { table, free: 0, free_wr_id: 0, live: 0 };
        flights.free_wr_id = flights.wr_id(0, 0);
        Ok(flights)
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.table.capacity()
    }

    /// Whether all are in use.
    #[inline(always)]
    pub(crate) fn is_full(&self) -> bool {
        self.free == NONE
    }

    /// The wr_id (part 0) of the flight that `take` will give.
    #[inline(always)]
    pub(crate) fn next_wr_id(&self) -> u64 {
        self.free_wr_id
    }

    /// The wr_id of a part (0, or 1 for a signal) of a flight.
    #[inline(always)]
    pub(crate) fn wr_id(&self, flight: u32, part: u64) -> u64 {
        u64::from(self.table.at(flight).generation) << 32 | u64::from(flight) << 1 | part
    }

    /// The flight and part of a wr_id, if it is in flight.
    pub(crate) fn of_wr_id(&self, wr_id: u64) -> Option<(u32, u64)> {
        let flight = (wr_id as u32) >> 1;
        let entry = self.table.at(flight);
        let is_it = flight < self.table.capacity()
            && u64::from(entry.generation) == wr_id >> 32
            && matches!(entry.state, State::Posted | State::Draining);
        is_it.then_some((flight, wr_id & 1))
    }

    /// Takes the next free flight.
    pub(crate) fn take(&mut self, sqe: Sqe, port: u8, state: State) -> Option<u32> {
        let flight = self.free;
        if flight == NONE {
            return None;
        }
        let entry = self.table.at_mut(flight);
        let next = entry.next;
        self.live += 1;
        *entry = Flight {
            sqe,
            port,
            state,
            deadline: u64::MAX,
            order: 0,
            next: NONE,
            generation: entry.generation,
            chain: 0,
            parts: u8::from(state == State::Posted),
            needs_second: false,
            fate: None,
        };
        self.free = next;
        self.free_wr_id = self.wr_id(next, 0);
        Some(flight)
    }

    /// Gives a flight back; its wr_ids mean nothing any more.
    pub(crate) fn put(&mut self, flight: u32) {
        let free = self.free;
        let entry = self.table.at_mut(flight);
        if entry.state != State::Free {
            entry.state = State::Free;
            entry.generation = entry.generation.wrapping_add(1).max(1);
            entry.next = free;
            self.free = flight;
            self.free_wr_id = self.wr_id(flight, 0);
            self.live -= 1;
        }
    }

    #[inline(always)]
    pub(crate) fn at(&self, flight: u32) -> &Flight {
        self.table.at(flight)
    }

    #[inline(always)]
    pub(crate) fn at_mut(&mut self, flight: u32) -> &mut Flight {
        self.table.at_mut(flight)
    }
}

/// The operations of one class of one peer, oldest first: those that the device has, then those that wait. Receives
/// stand apart: nothing waits for them.
#[derive(Clone, Copy)]
pub(crate) struct Channel {
    pub(crate) first: u32,
    last: u32,
    /// The oldest that waits.
    pub(crate) first_held: u32,
}

impl Channel {
    pub(crate) const EMPTY: Channel = Channel { first: NONE, last: NONE, first_held: NONE };

    /// Appends a flight.
    pub(crate) fn push(&mut self, flights: &mut Flights, flight: u32) {
        flights.at_mut(flight).next = NONE;
        if self.last == NONE {
            self.first = flight;
        } else {
            flights.at_mut(self.last).next = flight;
        }
        self.last = flight;
        if self.first_held == NONE && flights.at(flight).state == State::Held {
            self.first_held = flight;
        }
    }

    /// Takes a flight out, wherever it stands. It is the first one as a rule.
    pub(crate) fn remove(&mut self, flights: &mut Flights, flight: u32) {
        if flight == NONE {
            return;
        }
        let next = flights.at(flight).next;
        let mut before = NONE;
        let mut at = self.first;
        while at != flight {
            if at == NONE {
                return; // not of this channel
            }
            (before, at) = (at, flights.at(at).next);
        }
        if before == NONE {
            self.first = next;
        } else {
            flights.at_mut(before).next = next;
        }
        if self.last == flight {
            self.last = before;
        }
        if self.first_held == flight {
            self.first_held = next;
        }
    }

    /// The oldest that waits was given to the device.
    pub(crate) fn held_was_posted(&mut self, flights: &Flights) {
        if self.first_held != NONE {
            self.first_held = flights.at(self.first_held).next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;
    use verbring_slab::{Region, RegionOptions};

    fn flights(capacity: u32) -> (Arena, Flights) {
        let region = Region::private(Flights::bytes(capacity), RegionOptions::default()).unwrap();
        let mut arena = Arena::from_region(region);
        // SAFETY: returned beside the flights.
        let flights = unsafe { Flights::new(&mut arena, capacity) }.unwrap();
        (arena, flights)
    }

    #[test]
    fn an_old_wr_id_is_not_taken_for_its_successor() {
        let (_arena, mut flights) = flights(2);
        let flight = flights.take(Sqe::nop(), 0, State::Posted).unwrap();
        let wr_id = flights.wr_id(flight, 1);
        assert_eq!(flights.of_wr_id(wr_id), Some((flight, 1)));
        flights.put(flight);
        assert_eq!(flights.of_wr_id(wr_id), None);
        assert_eq!(flights.take(Sqe::nop(), 0, State::Posted), Some(flight));
        assert_eq!(flights.of_wr_id(wr_id), None);
        for wr_id in [0, u64::MAX, wr_id | 0xffff_fffe] {
            assert_eq!(flights.of_wr_id(wr_id), None);
        }
    }

    proptest! {
        /// Against a vector: order, the first that waits, and no flight twice.
        #[test]
        fn channel_model(steps in prop::collection::vec((0u8..4, any::<usize>()), 1..300)) {
            let (_arena, mut flights) = flights(16);
            let mut channel = Channel::EMPTY;
            let mut model: Vec<u32> = Vec::new();
            for (step, choice) in steps {
                match step {
                    0 => {
                        let waits = model.iter().any(|f| flights.at(*f).state == State::Held);
                        let state = if waits || choice % 2 == 0 { State::Held } else { State::Posted };
                        match flights.take(Sqe::nop(), 0, state) {
                            Some(flight) => {
                                prop_assert!(!model.contains(&flight));
                                channel.push(&mut flights, flight);
                                model.push(flight);
                            }
                            None => prop_assert_eq!(model.len(), 16),
                        }
                    }
                    1 if channel.first_held != NONE => {
                        flights.at_mut(channel.first_held).state = State::Posted;
                        channel.held_was_posted(&flights);
                    }
                    2 if !model.is_empty() => {
                        let flight = model.remove(choice % model.len());
                        channel.remove(&mut flights, flight);
                        flights.put(flight);
                    }
                    3 => channel.remove(&mut flights, NONE),
                    _ => {}
                }
                prop_assert_eq!(channel.first, model.first().copied().unwrap_or(NONE));
                let held = model.iter().find(|f| flights.at(**f).state == State::Held);
                prop_assert_eq!(channel.first_held, held.copied().unwrap_or(NONE));
                let mut listed = Vec::new();
                let mut at = channel.first;
                while at != NONE {
                    listed.push(at);
                    at = flights.at(at).next;
                }
                prop_assert_eq!(&listed, &model);
                prop_assert_eq!(flights.live as usize, model.len());
            }
        }
    }
}
