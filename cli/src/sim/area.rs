//! What memory may hold: the model of a range that one initiator writes in one class.

/// Bytes of an area.
pub(super) const AREA: usize = 2048;

/// The byte that put number `number` writes at `at`.
#[inline]
pub(super) fn byte_of(number: u32, at: usize) -> u8 {
    (number.wrapping_mul(0x9e37_79b1) >> 13).wrapping_add(at as u32 * 31) as u8
}

/// What is known of a put.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It has not ended.
    Pending,
    /// It succeeded, where that says nothing of the order in which bytes are seen.
    Done,
    /// It ended in error: any of its bytes may be there.
    Lost,
}

struct Write {
    number: u32,
    at: usize,
    len: usize,
    fate: Fate,
}

impl Write {
    fn covers(&self, at: usize) -> bool {
        (self.at..self.at + self.len).contains(&at)
    }
}

/// What a success says of the memory of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// It is there.
    Prompt,
    /// It will be there, after what was before it.
    Late,
    /// It will be there.
    Relaxed,
}

/// The model of an area: for each byte what it was last known to be, and the puts that may have changed it since.
pub(super) struct Area {
    order: Order,
    known: Vec<u8>,
    /// The put that the known byte is of.
    stamp: Vec<u32>,
    open: Vec<Write>,
}

impl Area {
    pub(super) fn new(order: Order) -> Area {
        Area { order, known: vec![0; AREA], stamp: vec![0; AREA], open: Vec::new() }
    }

    /// A put was pushed. Numbers rise.
    pub(super) fn push(&mut self, number: u32, at: usize, len: usize) {
        self.open.push(Write { number, at, len, fate: Fate::Pending });
    }

    /// It succeeded. What was pushed before it has ended.
    pub(super) fn succeeded(&mut self, number: u32) {
        let Some(index) = self.open.iter().position(|w| w.number == number) else { return };
        if self.order != Order::Prompt {
            self.open[index].fate = Fate::Done;
            return;
        }
        let Write { at, len, .. } = self.open.remove(index);
        for k in at..at + len {
            (self.known[k], self.stamp[k]) = (byte_of(number, k), number);
        }
    }

    /// It ended in error after it had started, or may have.
    pub(super) fn lost(&mut self, number: u32) {
        if let Some(write) = self.open.iter_mut().find(|w| w.number == number) {
            write.fate = Fate::Lost;
        }
    }

    /// Whether `seen`, from `at` on, is something that the area may hold. `floor`: every put up to this number is known to
    /// be there. The first byte that may not be what it is.
    pub(super) fn check(&self, at: usize, seen: &[u8], floor: u32) -> Result<(), usize> {
        let touches = |w: &Write| w.at < at + seen.len() && at < w.at + w.len;
        if !self.open.iter().any(touches) {
            let same = seen == &self.known[at..at + seen.len()];
            let first = || seen.iter().zip(&self.known[at..]).position(|(a, b)| a != b).unwrap_or(0);
            return if same { Ok(()) } else { Err(at + first()) };
        }
        let near: Vec<&Write> = self.open.iter().filter(|w| touches(w)).collect();
        for (i, byte) in seen.iter().enumerate() {
            let k = at + i;
            let covering = near.iter().filter(|w| w.covers(k) && w.number > self.stamp[k]);
            // What is surely there hides what was before it: all of that if writes are ordered, the known byte in any case.
            let sure = covering.clone().filter(|w| w.number <= floor && w.fate != Fate::Lost);
            let newest = sure.map(|w| w.number).max();
            let is_known = newest.is_none() && *byte == self.known[k];
            let hidden_below = if self.order == Order::Relaxed { 0 } else { newest.unwrap_or(0) };
            let is_open = covering.clone().any(|w| w.number >= hidden_below && *byte == byte_of(w.number, k));
            if !is_known && !is_open {
                return Err(k);
            }
        }
        Ok(())
    }

    /// What may be at a byte, in words.
    pub(super) fn explain(&self, k: usize, seen: u8) -> String {
        let mut text = format!("it is {seen:#04x}, known was {:#04x} of put {}", self.known[k], self.stamp[k]);
        for write in self.open.iter().filter(|w| w.covers(k)) {
            let fate = match write.fate {
                Fate::Pending => "under way",
                Fate::Done => "done",
                Fate::Lost => "lost",
            };
            text += &format!(", put {} ({fate}) writes {:#04x}", write.number, byte_of(write.number, k));
        }
        text
    }

    /// Nothing is under way, and everything is visible: `seen` is what the area holds now.
    pub(super) fn settle(&mut self, seen: &[u8]) -> Result<(), usize> {
        self.check(0, seen, u32::MAX)?;
        let newest = self.open.iter().map(|w| w.number).max();
        if let Some(newest) = newest {
            for (k, byte) in seen.iter().enumerate() {
                if self.open.iter().any(|w| w.covers(k)) {
                    (self.known[k], self.stamp[k]) = (*byte, newest);
                }
            }
            self.open.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(puts: &[(u32, usize, usize)]) -> Vec<u8> {
        let mut bytes = vec![0; AREA];
        for (number, at, len) in puts {
            for k in *at..at + len {
                bytes[k] = byte_of(*number, k);
            }
        }
        bytes
    }

    #[test]
    fn ordered() {
        let mut area = Area::new(Order::Prompt);
        area.push(1, 0, 8);
        area.push(2, 4, 8);
        for seen in [image(&[]), image(&[(1, 0, 8)]), image(&[(1, 0, 8), (2, 4, 8)]), image(&[(1, 0, 3)])] {
            assert_eq!(area.check(0, &seen, 0), Ok(()));
        }
        assert_eq!(area.check(0, &image(&[(1, 0, 4)]), 1), Err(4), "one is there as a whole");
        area.succeeded(1);
        assert_eq!(area.check(0, &image(&[]), 0), Err(0));
        area.lost(2);
        assert_eq!(area.check(0, &image(&[(1, 0, 8), (2, 6, 2)]), 0), Ok(()));
        assert_eq!(area.settle(&image(&[(1, 0, 8), (2, 6, 2)])), Ok(()));
        assert_eq!(area.check(0, &image(&[(1, 0, 8)]), 0), Err(6), "it was seen, and stays");
        assert_eq!(area.check(100, &[1], 0), Err(100), "what nobody wrote");
    }

    #[test]
    fn unordered() {
        let mut area = Area::new(Order::Relaxed);
        area.push(1, 0, 8);
        area.push(2, 0, 8);
        area.succeeded(1);
        area.succeeded(2);
        assert_eq!(area.check(0, &image(&[(2, 0, 8), (1, 0, 8)]), 2), Ok(()), "in either order");
        assert_eq!(area.check(0, &image(&[]), 0), Ok(()), "not visible yet");
        assert_eq!(area.check(0, &image(&[]), 2), Err(0));
        assert!(area.settle(&image(&[(2, 0, 8), (1, 0, 8)])).is_ok() && area.open.is_empty());
    }
}
