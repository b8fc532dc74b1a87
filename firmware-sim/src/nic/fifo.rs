//! A short queue that lies in a table: without a destructor, which heapless' has.

/// At most `N` entries, first in, first out. `N` is a power of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fifo<T, const N: usize> {
    entries: [Option<T>; N],
    first: usize,
    len: usize,
}

impl<T: Copy, const N: usize> Fifo<T, N> {
    pub(super) const fn new() -> Fifo<T, N> {
        const { assert!(N.is_power_of_two()) };
        Fifo { entries: [None; N], first: 0, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    pub(super) fn front(&self) -> Option<T> {
        if self.len == 0 { None } else { self.entries[self.first % N] }
    }

    pub(super) fn front_mut(&mut self) -> Option<&mut T> {
        if self.len == 0 { None } else { self.entries[self.first % N].as_mut() }
    }

    /// False if it is full.
    pub(super) fn push_back(&mut self, entry: T) -> bool {
        let has_room = self.len < N;
        if has_room {
            self.entries[(self.first + self.len) % N] = Some(entry);
            self.len += 1;
        }
        has_room
    }

    pub(super) fn pop_front(&mut self) -> Option<T> {
        let front = self.front()?;
        self.first = (self.first + 1) % N;
        self.len -= 1;
        Some(front)
    }

    /// Keeps the entries that `keep` names, in their order.
    pub(super) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        for _ in 0..self.len {
            if let Some(entry) = self.pop_front()
                && keep(&entry)
            {
                self.push_back(entry);
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        (0..self.len).filter_map(|i| self.entries[(self.first + i) % N].as_ref())
    }
}
