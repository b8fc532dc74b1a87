//! The submission queue entry. Its byte table stands in docs/ARCHITECTURE.md.

use bitflags::bitflags;

use crate::{PeerId, RemoteKey, Target};

/// What an entry asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Opcode {
    /// Nothing; completes at once.
    Nop = 0,
    /// Local bytes to the peer.
    Put = 1,
    /// Up to 16 bytes of the entry itself to the peer.
    PutInline = 2,
    /// The peer's bytes to local memory.
    Get = 3,
    /// Local bytes to the peer, then one word of the same region.
    PutSignal = 4,
    /// A message into a receive that the peer posted.
    Send = 5,
    /// Room for a message.
    Recv = 6,
    /// Add to a word, answer the old value.
    FetchAdd = 7,
    /// Replace a word if it has the expected value, answer the old value.
    CompareSwap = 8,
    /// Replace a word, answer the old value.
    Swap = 9,
    /// Completes when all earlier operations to the peer are visible.
    Flush = 10,
    /// Ends a pending operation.
    Cancel = 11,
}

impl Opcode {
    /// The opcode of a number.
    #[inline(always)]
    pub const fn from_raw(number: u8) -> Option<Opcode> {
        Some(match number {
            0 => Opcode::Nop,
            1 => Opcode::Put,
            2 => Opcode::PutInline,
            3 => Opcode::Get,
            4 => Opcode::PutSignal,
            5 => Opcode::Send,
            6 => Opcode::Recv,
            7 => Opcode::FetchAdd,
            8 => Opcode::CompareSwap,
            9 => Opcode::Swap,
            10 => Opcode::Flush,
            11 => Opcode::Cancel,
            _ => return None,
        })
    }

    /// Whether the operation reads and writes a word in one step, and so cannot be repeated safely.
    pub const fn is_atomic(self) -> bool {
        matches!(self, Opcode::FetchAdd | Opcode::CompareSwap | Opcode::Swap)
    }
}

bitflags! {
    /// How an entry relates to others.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SqeFlags: u8 {
        /// Start after all earlier operations to this peer, of all classes, are delivered.
        const FENCE = 1 << 0;
        /// The next entry starts after this one succeeded, and is cancelled if it did not.
        const LINK = 1 << 1;
        /// No cqe if it succeeds: the next successful cqe of this peer and class, or a flush, says so.
        const SILENT = 1 << 2;
        /// Repeat after a reconnect. Reserved: refused.
        const REPLAY = 1 << 3;
        /// `put_signal` adds to the word instead of storing it.
        const ADD = 1 << 4;
        /// The local bytes are a block of the slab, which comes back with the completion. Set by typed calls only.
        const BUF = 1 << 7;
    }
}

pub(crate) const FENCE: u8 = SqeFlags::FENCE.bits();
pub(crate) const LINK: u8 = SqeFlags::LINK.bits();
pub(crate) const SILENT: u8 = SqeFlags::SILENT.bits();
pub(crate) const ADD: u8 = SqeFlags::ADD.bits();
pub(crate) const BUF: u8 = SqeFlags::BUF.bits();
/// In the last byte of the first word: there is a deadline.
const TIMED: u8 = 1;

/// The most bytes of a `put_inline`.
pub const MAX_INLINE: u32 = 16;

/// Local bytes that an entry names: part of a [`Window`](crate::Window) of the same engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    pub(crate) lkey: u32,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// What `put_signal` does to its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Stores the value.
    Store(u64),
    /// Adds the value.
    Add(u64),
}

/// A submission queue entry: 64 bytes, eight little-endian words.
///
/// Build one with a constructor and, where wanted, the setters; give it to [`Port::push`](crate::Port::push).
///
/// ```
/// # use verbring::{Sqe, Target};
/// fn store(to: Target) -> Sqe {
///     Sqe::put_word(42, to).user_data(7).class(0)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Sqe {
    pub(crate) words: [u64; 8],
}

const _: () = assert!(size_of::<Sqe>() == 64);

const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

impl Sqe {
    #[inline(always)]
    const fn new(opcode: Opcode, peer: u32, key: u32) -> Sqe {
        Sqe { words: [(opcode as u64) << 32, pair(peer, key), 0, 0, 0, 0, 0, 0] }
    }

    #[inline(always)]
    const fn transfer(opcode: Opcode, local: Local, target: Target) -> Sqe {
        let mut sqe = Sqe::new(opcode, target.key.peer.0, target.key.key);
        sqe.words[2] = pair(local.lkey, local.len);
        sqe.words[5] = target.offset;
        sqe.words[6] = local.offset;
        sqe
    }

    /// Completes at once and does nothing.
    #[inline(always)]
    pub const fn nop() -> Sqe {
        Sqe::new(Opcode::Nop, 0, 0)
    }

    /// `local` to `target`.
    #[inline(always)]
    pub const fn put(local: Local, target: Target) -> Sqe {
        Sqe::transfer(Opcode::Put, local, target)
    }

    /// Up to 16 bytes to `target`. More are refused when it is submitted.
    #[inline(always)]
    pub fn put_inline(bytes: &[u8], target: Target) -> Sqe {
        let mut both = [0u8; MAX_INLINE as usize];
        for (to, from) in both.iter_mut().zip(bytes) {
            *to = *from;
        }
        let value = u128::from_le_bytes(both);
        let mut sqe = Sqe::put_word(value as u64, target);
        sqe.words[2] = pair(0, u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        sqe.words[7] = (value >> 64) as u64;
        sqe
    }

    /// A word of 8 bytes, little-endian, to `target`.
    #[inline(always)]
    pub const fn put_word(value: u64, target: Target) -> Sqe {
        let mut sqe = Sqe::new(Opcode::PutInline, target.key.peer.0, target.key.key);
        sqe.words[2] = pair(0, 8);
        sqe.words[5] = target.offset;
        sqe.words[6] = value;
        sqe
    }

    /// `target` to `local`.
    #[inline(always)]
    pub const fn get(local: Local, target: Target) -> Sqe {
        Sqe::transfer(Opcode::Get, local, target)
    }

    /// `local` to `target`, then `signal` to the word number `signal_word` (offset / 8) of the same region.
    #[inline(always)]
    pub const fn put_signal(local: Local, target: Target, signal_word: u32, signal: Signal) -> Sqe {
        let mut sqe = Sqe::transfer(Opcode::PutSignal, local, target);
        sqe.words[3] = pair(0, signal_word);
        match signal {
            Signal::Store(value) => sqe.words[7] = value,
            Signal::Add(value) => {
                sqe.words[0] |= (ADD as u64) << 40;
                sqe.words[7] = value;
            }
        }
        sqe
    }

    /// `local`, with an immediate, into the peer's oldest receive of the class.
    #[inline(always)]
    pub const fn send(local: Local, peer: PeerId, imm: u32) -> Sqe {
        let mut sqe = Sqe::transfer(Opcode::Send, local, RemoteKey { peer, key: 0 }.at(0));
        sqe.words[3] = pair(0, imm);
        sqe
    }

    /// Room for one message of the peer in the class.
    #[inline(always)]
    pub const fn recv(local: Local, peer: PeerId) -> Sqe {
        Sqe::transfer(Opcode::Recv, local, RemoteKey { peer, key: 0 }.at(0))
    }

    #[inline(always)]
    const fn word(opcode: Opcode, target: Target, operand: u64, compare: u64) -> Sqe {
        let mut sqe = Sqe::new(opcode, target.key.peer.0, target.key.key);
        sqe.words[5] = target.offset;
        sqe.words[6] = compare;
        sqe.words[7] = operand;
        sqe
    }

    /// Adds to the word at `target` (wrapping); the completion carries the old value.
    #[inline(always)]
    pub const fn fetch_add(target: Target, add: u64) -> Sqe {
        Sqe::word(Opcode::FetchAdd, target, add, 0)
    }

    /// Stores `new` in the word at `target` if it is `expected`; the completion carries the old value.
    #[inline(always)]
    pub const fn compare_swap(target: Target, expected: u64, new: u64) -> Sqe {
        Sqe::word(Opcode::CompareSwap, target, new, expected)
    }

    /// Stores `new` in the word at `target`; the completion carries the old value.
    #[inline(always)]
    pub const fn swap(target: Target, new: u64) -> Sqe {
        Sqe::word(Opcode::Swap, target, new, 0)
    }

    /// Completes when all earlier operations to `peer`, of all classes, are visible to its CPU.
    #[inline(always)]
    pub const fn flush(peer: PeerId) -> Sqe {
        Sqe::new(Opcode::Flush, peer.0, 0)
    }

    /// Ends the oldest pending operation of this ring with that user_data. Both have a cqe: this one `Success` or
    /// `NotFound`, the other `Cancelled`, or what became of it before.
    #[inline(always)]
    pub const fn cancel(user_data: u64) -> Sqe {
        let mut sqe = Sqe::new(Opcode::Cancel, 0, 0);
        sqe.words[7] = user_data;
        sqe
    }

    /// Comes back in the cqe.
    #[inline(always)]
    pub const fn user_data(mut self, user_data: u64) -> Sqe {
        self.words[4] = user_data;
        self
    }

    /// 0 is urgent, 1 (where nothing is said: 0) is the rest.
    #[inline(always)]
    pub const fn class(mut self, class: u8) -> Sqe {
        self.words[0] = self.words[0] & !(0xff << 48) | (class as u64) << 48;
        self
    }

    /// Adds flags. `BUF` is not for hands to set, and is left out.
    #[inline(always)]
    pub const fn flags(mut self, flags: SqeFlags) -> Sqe {
        self.words[0] |= ((flags.bits() & !BUF) as u64) << 40;
        self
    }

    /// The operation ends by this time of the engine's clock (nanoseconds); `u64::MAX` is none. Kept in units of 1024 ns,
    /// rounded up, and good for 36 minutes ahead: what is further ahead cannot be told from what is over.
    #[inline(always)]
    pub const fn deadline(mut self, deadline_ns: u64) -> Sqe {
        if deadline_ns == u64::MAX {
            return self;
        }
        let units = (deadline_ns.saturating_add(1023) >> 10) as u32;
        // 0 stands for none: one unit later.
        let units = if units == 0 { 1 } else { units };
        self.words[0] |= (TIMED as u64) << 56;
        self.words[3] = self.words[3] & !0xffff_ffff | units as u64;
        self
    }

    /// Names slab memory instead of a Window.
    ///
    /// # Safety
    /// No Rust reference to those bytes is used until the operation completed, as if they had been lent out `&mut`.
    #[inline(always)]
    pub const unsafe fn local_raw(mut self, lkey: u32, offset: u64, len: u32) -> Sqe {
        self.words[2] = pair(lkey, len);
        self.words[6] = offset;
        self
    }

    #[inline(always)]
    pub(crate) const fn opcode(&self) -> u8 {
        (self.words[0] >> 32) as u8
    }

    #[inline(always)]
    pub(crate) const fn flag_bits(&self) -> u8 {
        (self.words[0] >> 40) as u8
    }

    #[inline(always)]
    pub(crate) const fn class_bits(&self) -> u8 {
        (self.words[0] >> 48) as u8
    }

    #[inline(always)]
    pub(crate) const fn reserved(&self) -> u8 {
        (self.words[0] >> 56) as u8 & !TIMED
    }

    #[inline(always)]
    pub(crate) const fn peer(&self) -> u32 {
        self.words[1] as u32
    }

    #[inline(always)]
    pub(crate) const fn key(&self) -> u32 {
        (self.words[1] >> 32) as u32
    }

    #[inline(always)]
    pub(crate) const fn lkey(&self) -> u32 {
        self.words[2] as u32
    }

    #[inline(always)]
    pub(crate) const fn len(&self) -> u32 {
        (self.words[2] >> 32) as u32
    }

    /// 0: none.
    #[inline(always)]
    pub(crate) const fn deadline_units(&self) -> u32 {
        if self.is_timed() { self.words[3] as u32 } else { 0 }
    }

    #[inline(always)]
    const fn is_timed(&self) -> bool {
        (self.words[0] >> 56) as u8 & TIMED != 0
    }

    /// Whether word `i` means something, by the first one. What stands in the others is not written, and not looked at.
    #[inline(always)]
    pub(crate) const fn has_word(&self, i: usize) -> bool {
        const PUT: u8 = Opcode::Put as u8;
        const GET: u8 = Opcode::Get as u8;
        const PUT_SIGNAL: u8 = Opcode::PutSignal as u8;
        const SEND: u8 = Opcode::Send as u8;
        match i {
            3 => self.is_timed() || matches!(self.opcode(), PUT_SIGNAL | SEND),
            7 => !matches!(self.opcode(), PUT | GET),
            _ => true,
        }
    }

    #[inline(always)]
    pub(crate) const fn aux(&self) -> u32 {
        (self.words[3] >> 32) as u32
    }

    #[inline(always)]
    pub(crate) const fn cookie(&self) -> u64 {
        self.words[4]
    }

    #[inline(always)]
    pub(crate) const fn offset(&self) -> u64 {
        self.words[5]
    }

    #[inline(always)]
    pub(crate) const fn local(&self) -> u64 {
        self.words[6]
    }

    #[inline(always)]
    pub(crate) const fn operand(&self) -> u64 {
        self.words[7]
    }

    /// An entry of any bytes.
    ///
    /// # Safety
    /// As [`Sqe::local_raw`], whatever memory of this engine the bytes may name.
    pub const unsafe fn from_words(words: [u64; 8]) -> Sqe {
        Sqe { words }
    }
}

/// The deadline in nanoseconds of an entry's 32-bit units: the moment within 36 minutes of `now` that they stand for.
pub(crate) fn deadline_ns(units: u32, now: u64) -> u64 {
    let now_units = now >> 10;
    let ahead = i64::from(units.wrapping_sub(now_units as u32) as i32);
    now_units.saturating_add_signed(ahead) << 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TARGET: Target = Target { key: RemoteKey { peer: PeerId(0x11223344), key: 0x55667788 }, offset: 0x99 };
    const LOCAL: Local = Local { lkey: 0xaabbccdd, offset: 0x77, len: 0x01020304 };

    /// The byte table of docs/ARCHITECTURE.md.
    #[test]
    fn bytes_are_as_documented() {
        let sqe = Sqe::put_signal(LOCAL, TARGET, 0x0a0b0c0d, Signal::Add(0x1234))
            .user_data(0xdeadbeef)
            .class(1)
            .flags(SqeFlags::FENCE | SqeFlags::SILENT)
            .deadline(5 << 10);
        let bytes: std::vec::Vec<u8> = sqe.words.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(bytes[..4], [0; 4], "sequence, set by the ring");
        assert_eq!(bytes[4..8], [4, 0b10101, 1, 1], "opcode, flags, class, whether there is a deadline");
        assert_eq!(bytes[8..16], [0x44, 0x33, 0x22, 0x11, 0x88, 0x77, 0x66, 0x55], "peer, key");
        assert_eq!(bytes[16..24], [0xdd, 0xcc, 0xbb, 0xaa, 4, 3, 2, 1], "lkey, len");
        assert_eq!(bytes[24..32], [5, 0, 0, 0, 0xd, 0xc, 0xb, 0xa], "deadline, aux");
        assert_eq!(bytes[32..40], 0xdeadbeefu64.to_le_bytes());
        assert_eq!(bytes[40..48], 0x99u64.to_le_bytes());
        assert_eq!(bytes[48..56], 0x77u64.to_le_bytes());
        assert_eq!(bytes[56..64], 0x1234u64.to_le_bytes());
    }

    #[test]
    fn inline_bytes_lie_in_the_last_two_words() {
        let sqe = Sqe::put_inline(b"0123456789abcdef", TARGET);
        assert_eq!((sqe.words[6].to_le_bytes(), sqe.words[7].to_le_bytes()), (*b"01234567", *b"89abcdef"));
        assert_eq!((sqe.len(), Sqe::put_inline(&[0; 17], TARGET).len()), (16, 17));
    }

    proptest! {
        /// Never early, and late by less than two units, whatever the clock stands at.
        #[test]
        fn deadlines(now in 0u64..u64::MAX / 2, ahead in 0u64..2_000_000_000_000) {
            let units = Sqe::nop().deadline(now + ahead).deadline_units();
            let back = deadline_ns(units, now);
            prop_assert!(back >= now + ahead && back < now + ahead + 2048, "{} {}", back, now + ahead);
        }
    }
}
