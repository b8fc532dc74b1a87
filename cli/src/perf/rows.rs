//! The rows of a run: tests by sizes, and where the bytes of each lie in the windows of the two ends.

use super::definitions::{HUNDRED, Kind, LARGEST, TESTS, Test};

/// Slots of one row take at most this much on each side, unless it is one slot.
const SLOT_BYTES: u64 = 64 << 20;
/// The slots at the target start here, those at the origin at 0: a place and its copy are not a multiple of 4096 bytes
/// apart, which would make a load wait for an unrelated store.
const SKEW: u64 = 2048 + 64;
/// The largest `--batch`: a ring has room for it.
pub(crate) const LARGEST_BATCH: u32 = 16384;

/// Where the bytes of a row lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes of a message.
    pub(crate) size: u32,
    /// Places.
    pub(crate) slots: u32,
}

/// Which end's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// That of the operation's own end: the outbox.
    Local,
    /// That of the other end: its inbox.
    Remote,
}

impl Layout {
    /// From slot to slot. Slots start at lines of their own, and large ones not a multiple of 4096 bytes apart.
    pub(crate) const fn stride(self) -> u64 {
        (self.size as u64).next_multiple_of(64) + if self.size >= 1024 { 64 } else { 0 }
    }

    /// The offset of a slot's message. It ends at a multiple of 8, so that its last word can be polled.
    pub(crate) const fn at(self, place: Place, slot: u32) -> u64 {
        let start = match place {
            Place::Local => 0,
            Place::Remote => SKEW,
        };
        start + slot as u64 * self.stride() + self.lead()
    }

    const fn lead(self) -> u64 {
        (self.size as u64).next_multiple_of(8) - self.size as u64
    }

    /// The end of a slot's message, which is where a signal goes.
    pub(crate) const fn end(self, place: Place, slot: u32) -> u64 {
        self.at(place, slot) + self.size as u64
    }

    /// Bytes of a window that holds all of it, signal included, at either end.
    pub(crate) const fn extent(self) -> u64 {
        SKEW + self.slots as u64 * self.stride() + 64
    }
}

/// Goes from slot to slot, round and round. All that a step needs is at hand, and small enough for registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    first: (u64, u64),
    next: (u64, u64),
    stride: u64,
    slots: u32,
    left: u32,
}

impl Walk {
    /// A walk that begins at the first slot.
    pub(crate) fn new(layout: Layout) -> Walk {
        let first = (layout.at(Place::Local, 0), layout.at(Place::Remote, 0));
        Walk { first, next: first, stride: layout.stride(), slots: layout.slots, left: layout.slots }
    }

    /// The offsets of the next slot, local and remote.
    #[inline(always)]
    pub(crate) fn step(&mut self) -> (u64, u64) {
        let here = self.next;
        self.left -= 1;
        self.next = (here.0 + self.stride, here.1 + self.stride);
        if self.left == 0 {
            (self.next, self.left) = (self.first, self.slots);
        }
        here
    }
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// What is measured.
    pub(crate) test: &'static Test,
    /// Where.
    pub(crate) layout: Layout,
    /// Operations that are timed as one.
    pub(crate) batch: u32,
}

impl Row {
    fn new(test: &'static Test, size: u32, batch: Option<u32>) -> Row {
        let most = if size <= 4096 { 64 } else { 16 };
        let slots = SLOT_BYTES.checked_div(u64::from(size)).unwrap_or(1).clamp(1, most) as u32;
        let window = batch.unwrap_or(slots);
        let (slots, batch) = match test.kind {
            Kind::PingPong
            | Kind::PingPongSignal
            | Kind::PutAlone
            | Kind::GetAlone
            | Kind::FetchAdd
            | Kind::CompareSwap => (1, 1),
            Kind::Hundred | Kind::HundredSilent => (HUNDRED, HUNDRED),
            Kind::PutWindowsHot => (1, window),
            // Every window reaches every slot, so the last one alone can be verified.
            Kind::PutWindows | Kind::GetWindows => (slots.min(window), window),
        };
        Row { test, layout: Layout { size, slots }, batch }
    }

    /// The index of the test, which is what the ends call it between them.
    pub(crate) fn index(&self) -> u64 {
        TESTS.iter().position(|test| test == self.test).unwrap_or(0) as u64
    }

    /// A row of a message: checked, for it comes from the other end.
    pub(crate) fn from_numbers(index: u64, size: u64, slots: u64) -> Option<Row> {
        let test = TESTS.get(usize::try_from(index).ok()?)?;
        let (size, slots) = (u32::try_from(size).ok()?, u32::try_from(slots).ok()?);
        let is_sane = (1..=LARGEST).contains(&size) && (1..=HUNDRED).contains(&slots);
        is_sane.then_some(Row { test, layout: Layout { size, slots }, batch: 1 })
    }
}

/// The rows of a run. No tests are all tests; no sizes are each test's own.
pub(crate) fn plan(tests: &[&'static Test], sizes: &[u32], batch: Option<u32>) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for test in TESTS {
        if !tests.is_empty() && !tests.contains(&test) {
            continue;
        }
        // Atomics are of a word, whatever the sizes of the rest.
        let own = sizes.is_empty() || test.kind.is_atomic();
        for &size in if own { test.sizes } else { sizes } {
            if size <= test.largest {
                rows.push(Row::new(test, size, batch));
            } else if !tests.is_empty() {
                return Err(format!(
                    "{} takes sizes up to {}, not {}",
                    test.name,
                    size_name(test.largest),
                    size_name(size)
                ));
            }
        }
    }
    if rows.is_empty() { Err("no test takes this size".to_string()) } else { Ok(rows) }
}

/// A size such as 8, 4k, 1m or 1g.
pub(crate) fn parse_size(text: &str) -> Result<u32, String> {
    let form = || format!("a size is a number from 1 to {LARGEST}, with k, m or g for 2^10, 2^20, 2^30: 8, 4k, 100m");
    let lower = text.to_ascii_lowercase();
    let (digits, shift) = match lower.strip_suffix(['k', 'm', 'g']) {
        Some(digits) if lower.ends_with('k') => (digits, 10),
        Some(digits) if lower.ends_with('m') => (digits, 20),
        Some(digits) => (digits, 30),
        None => (lower.as_str(), 0),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(form());
    }
    let number: u64 = digits.parse().map_err(|_| form())?;
    let size = number.checked_mul(1 << shift).filter(|size| (1..=u64::from(LARGEST)).contains(size));
    size.map(|size| size as u32).ok_or_else(form)
}

/// The shortest name of a size: 8, 4k, 100m.
pub(crate) fn size_name(size: u32) -> String {
    let names = [(30, "g"), (20, "m"), (10, "k")];
    match names.iter().find(|(shift, _)| size != 0 && size.is_multiple_of(1 << shift)) {
        Some((shift, name)) => format!("{}{name}", size >> shift),
        None => size.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::definitions::parse_test;
    use super::*;

    #[test]
    fn sizes_are_parsed_and_named() {
        for (text, size) in
            [("8", 8), ("4k", 4096), ("4K", 4096), ("1m", 1 << 20), ("100m", 100 << 20), ("1g", 1 << 30)]
        {
            assert_eq!(parse_size(text), Ok(size));
            assert_eq!(size_name(size), text.to_lowercase());
        }
        assert_eq!(size_name(100), "100");
        for bad in ["", "0", "0k", "k", "-1", "+1", "8b", "1.5k", "2g", "4096m", "99999999999999999999", "4kk", " 8"] {
            assert!(parse_size(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_plan() {
        let all = plan(&[], &[], None).unwrap();
        assert_eq!(all.len(), TESTS.iter().map(|test| test.sizes.len()).sum::<usize>());
        let lat = parse_test("put_lat").unwrap();
        let sizes: Vec<_> = plan(&[lat], &[8, 100], None).unwrap().iter().map(|row| row.layout.size).collect();
        assert_eq!(sizes, [8, 100]);
        // What was not named is left out where it does not go; what was named is refused.
        assert!(plan(&[], &[LARGEST], None).unwrap().iter().all(|row| row.test.name != "put_rate"));
        assert!(plan(&[parse_test("put_rate").unwrap()], &[8192], None).unwrap_err().contains("up to 4k, not 8k"));
        assert_eq!(plan(&[parse_test("fadd").unwrap()], &[4096], None).unwrap()[0].layout.size, 8);
    }

    #[test]
    fn windows_reach_every_slot() {
        let bw = parse_test("put_bw").unwrap();
        let of = |size, batch| {
            let row = plan(&[bw], &[size], batch).unwrap()[0];
            (row.layout.slots, row.batch)
        };
        assert_eq!(of(4096, None), (64, 64));
        assert_eq!(of(4097, None), (16, 16));
        assert_eq!(of(16 << 20, None), (4, 4));
        assert_eq!(of(100 << 20, None), (1, 1));
        assert_eq!(of(4096, Some(10)), (10, 10));
        assert_eq!(of(4096, Some(100)), (64, 100));
    }

    #[test]
    fn slots_do_not_touch_and_end_at_words() {
        for size in (1..300).chain([1000, 1024, 4096, 65536, 1 << 20]) {
            let layout = Layout { size, slots: 5 };
            for place in [Place::Local, Place::Remote] {
                for slot in 0..5 {
                    assert!(layout.end(place, slot).is_multiple_of(8));
                    assert!(slot == 0 || layout.at(place, slot) >= layout.end(place, slot - 1));
                    assert!(size % 8 != 0 || layout.at(place, slot).is_multiple_of(64));
                }
                assert!(layout.end(place, 4) + 8 <= layout.extent(), "room for the signal");
            }
            assert!(size < 4096 || !layout.stride().is_multiple_of(4096));
        }
    }

    #[test]
    fn a_walk_goes_round() {
        let layout = Layout { size: 100, slots: 3 };
        let mut walk = Walk::new(layout);
        for i in 0..10 {
            assert_eq!(walk.step(), (layout.at(Place::Local, i % 3), layout.at(Place::Remote, i % 3)));
        }
    }

    #[test]
    fn numbers_of_the_other_end_are_checked() {
        let row = plan(&[parse_test("get_bw").unwrap()], &[4096], None).unwrap()[0];
        let back = Row::from_numbers(row.index(), 4096, 64).unwrap();
        assert_eq!((back.test, back.layout), (row.test, row.layout));
        for (index, size, slots) in [(99, 8, 1), (0, 0, 1), (0, u64::MAX, 1), (0, 8, 0), (0, 8, 101)] {
            assert!(Row::from_numbers(index, size, slots).is_none());
        }
    }
}
