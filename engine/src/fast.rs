//! The way of an operation that is done as soon as it is submitted. What is held, pending or wrong goes the way of
//! `engine.rs`, where the same entry is looked at from the beginning.
//!
//! Entries of the same shape (opcode, flags, class) stand in rows, so the shape is looked up once a row: one compare says
//! that the next entry is there and goes on with the row.

use core::hint::cold_path;

use verbring_slab::View;
use verbring_sys::{CLASSES, Device, Mr, Qp, Wr, WrOp};

use crate::cqe::{BLOCK, VALUE, block};
use crate::key::{Access, Memory};
use crate::ring::{Entry, Progress, Run};
use crate::sqe::{ADD, BUF, MAX_INLINE, Opcode, SILENT, Sqe};

/// A shape is the upper half of an entry's first word; without its class it is one of these, and flags.
const NOP: u32 = Opcode::Nop as u32;
const PUT: u32 = Opcode::Put as u32;
const PUT_INLINE: u32 = Opcode::PutInline as u32;
const GET: u32 = Opcode::Get as u32;
const PUT_SIGNAL: u32 = Opcode::PutSignal as u32;
const FETCH_ADD: u32 = Opcode::FetchAdd as u32;
const COMPARE_SWAP: u32 = Opcode::CompareSwap as u32;
const SWAP: u32 = Opcode::Swap as u32;

const PUT_SIGNAL_ADD: u32 = PUT_SIGNAL | (ADD as u32) << 8;

#[inline(always)]
const fn shape_of(first: u64) -> u32 {
    (first >> 32) as u32 & !((CLASSES as u32 - 1) << 16)
}

#[inline(always)]
const fn class_of(first: u64) -> usize {
    (first >> 48) as usize & (CLASSES - 1)
}

const fn has(shape: u32, flag: u8) -> bool {
    shape & (flag as u32) << 8 != 0
}

/// What entries name, and what does them.
pub(crate) struct Fast<'a, D: Device> {
    pub(crate) device: &'a mut D,
    pub(crate) imports: View<'a, Memory>,
    pub(crate) locals: View<'a, Memory>,
}

/// For each opcode and each of the flags behind it the row of that shape.
macro_rules! rows {
    ($fast:ident, $run:ident, $class:ident, $shape:ident; $($opcode:ident: $($flags:expr),+;)+) => {{
        $($(
            if $shape == $opcode | ($flags as u32) << 8 {
                $fast.row::<{ $opcode | ($flags as u32) << 8 }>($run, $class)
            } else
        )+)+ {
            false
        }
    }};
}

/// The words of an entry, in the ring or not. Each is asked for once.
pub(crate) trait Words {
    fn word<const I: usize>(&self) -> u64;
}

impl Words for Entry<'_> {
    #[inline(always)]
    fn word<const I: usize>(&self) -> u64 {
        self.load_word::<I>()
    }
}

impl Words for Sqe {
    #[inline(always)]
    fn word<const I: usize>(&self) -> u64 {
        const { assert!(I < 8) };
        self.words[I]
    }
}

impl<D: Device> Fast<'_, D> {
    /// Does the puts that a run begins with. The run is a value: what nobody has the address of stays in registers.
    #[inline(always)]
    pub(crate) fn puts(mut self, mut run: Run<'_>) -> Progress {
        while let Some(first) = run.first() {
            run.row(first);
            if shape_of(first) != PUT || !self.row::<PUT>(&mut run, class_of(first)) {
                break;
            }
        }
        run.progress()
    }

    /// Does the entries of a run, as far as each can be done at once; it ends before the first that cannot.
    #[inline(always)]
    pub(crate) fn any(mut self, mut run: Run<'_>) -> Progress {
        while let Some(first) = run.first() {
            run.row(first);
            let (shape, class, fast, run) = (shape_of(first), class_of(first), &mut self, &mut run);
            let went_on = rows! { fast, run, class, shape;
                PUT: 0, SILENT, BUF;
                GET: 0, SILENT, BUF;
                PUT_INLINE: 0, SILENT;
                FETCH_ADD: 0, SILENT;
                COMPARE_SWAP: 0, SILENT;
                SWAP: 0, SILENT;
                PUT_SIGNAL: 0, SILENT, BUF, ADD, ADD | SILENT, ADD | BUF;
                NOP: 0, SILENT;
            };
            if !went_on {
                break;
            }
        }
        run.progress()
    }

    /// Does one entry: the old value of an atomic, else 0. None if it cannot be done at once.
    #[inline(always)]
    pub(crate) fn one(mut self, sqe: &Sqe) -> Option<u64> {
        let (shape, class) = (shape_of(sqe.words[0]), class_of(sqe.words[0]));
        match shape & !(u32::from(SILENT) << 8) {
            PUT => self.act::<PUT>(sqe, class),
            GET => self.act::<GET>(sqe, class),
            PUT_INLINE => self.act::<PUT_INLINE>(sqe, class),
            FETCH_ADD => self.act::<FETCH_ADD>(sqe, class),
            COMPARE_SWAP => self.act::<COMPARE_SWAP>(sqe, class),
            SWAP => self.act::<SWAP>(sqe, class),
            PUT_SIGNAL => self.act::<PUT_SIGNAL>(sqe, class),
            PUT_SIGNAL_ADD => self.act::<PUT_SIGNAL_ADD>(sqe, class),
            _ => None,
        }
    }

    #[inline(always)]
    fn act<const SHAPE: u32>(&mut self, entry: &impl Words, class: usize) -> Option<u64> {
        match SHAPE & 0xff {
            NOP => Some(0),
            PUT => self.transfer(entry, class, WrOp::Put),
            GET => self.transfer(entry, class, WrOp::Get),
            PUT_INLINE => self.put_inline(entry, class),
            PUT_SIGNAL if has(SHAPE, ADD) => self.put_signal(entry, class, WrOp::SignalAdd),
            PUT_SIGNAL => self.put_signal(entry, class, WrOp::SignalStore),
            FETCH_ADD => self.atomic(entry, class, WrOp::FetchAdd),
            COMPARE_SWAP => self.atomic(entry, class, WrOp::CompareSwap),
            _ => self.atomic(entry, class, WrOp::Swap),
        }
    }

    /// Entries of one shape as long as they go on and can be done; false if one cannot.
    #[inline(always)]
    fn row<const SHAPE: u32>(&mut self, run: &mut Run<'_>, class: usize) -> bool {
        while let Some(entry) = run.next() {
            let Some(value) = self.act::<SHAPE>(&entry, class) else { return false };
            if has(SHAPE, BUF) {
                let len = (entry.word::<2>() >> 32) as u32;
                run.complete_value(entry.word::<4>(), VALUE | BLOCK, block(entry.word::<6>(), len));
            } else if !has(SHAPE, SILENT) {
                match SHAPE & 0xff {
                    FETCH_ADD | COMPARE_SWAP | SWAP => run.complete_value(entry.word::<4>(), VALUE, value),
                    _ => run.complete(entry.word::<4>()),
                }
            }
            run.pass();
        }
        true
    }

    /// The queue pair and address of the bytes that an entry names at its target.
    #[inline(always)]
    fn remote(
        &self,
        entry: &impl Words,
        class: usize,
        access: Access,
        offset: u64,
        len: u32,
    ) -> Option<(Qp, u64, u32)> {
        let target = entry.word::<1>();
        let memory = self.imports.at_offset((target >> 32) as u32);
        let address = memory.resolve(target, access, offset, len)?;
        Some((memory.qps[class], address, memory.device_key))
    }

    /// A put or a get between an import and local memory.
    #[inline(always)]
    fn transfer(&mut self, entry: &impl Words, class: usize, op: WrOp) -> Option<u64> {
        let source = entry.word::<2>();
        let (lkey, len) = (source as u32, (source >> 32) as u32);
        if len == 0 {
            // Looked at closer: what grants nothing, such as a line that nobody has, grants no bytes.
            cold_path();
            return None;
        }
        let access = if op == WrOp::Get { Access::Read } else { Access::Write };
        let (qp, remote, rkey) = self.remote(entry, class, access, entry.word::<5>(), len)?;
        let memory = self.locals.at_offset(lkey);
        let local = memory.resolve_local(lkey, entry.word::<6>(), len)? as *mut u8;
        let wr = Wr { op, len, remote, rkey, local, local_mr: Mr(memory.device_key), ..Wr::EMPTY };
        // SAFETY: both ranges were checked against live registrations. The local bytes are a Window's, or a block that
        // was lent to this operation.
        unsafe { self.device.post_now(qp, &wr) }
    }

    #[inline(always)]
    fn put_inline(&mut self, entry: &impl Words, class: usize) -> Option<u64> {
        let len = (entry.word::<2>() >> 32) as u32;
        let (qp, remote, rkey) = self.remote(entry, class, Access::Write, entry.word::<5>(), len)?;
        if len == 0 || len > MAX_INLINE {
            cold_path();
            return None;
        }
        let (operand, second) = (entry.word::<6>(), entry.word::<7>());
        let wr = Wr { op: WrOp::PutInline, len, remote, rkey, operand, second, ..Wr::EMPTY };
        // SAFETY: the range was checked against a live import.
        unsafe { self.device.post_now(qp, &wr) }
    }

    #[inline(always)]
    fn atomic(&mut self, entry: &impl Words, class: usize, op: WrOp) -> Option<u64> {
        let offset = entry.word::<5>();
        let (qp, remote, rkey) = self.remote(entry, class, Access::Atomic, offset, 8)?;
        if !offset.is_multiple_of(8) {
            return None;
        }
        let (operand, second) = (entry.word::<7>(), entry.word::<6>());
        let wr = Wr { op, len: 8, remote, rkey, operand, second, ..Wr::EMPTY };
        // SAFETY: the word was checked against a live import, and is aligned, as regions are.
        unsafe { self.device.post_now(qp, &wr) }
    }

    /// If the signal cannot be done at once, both are begun again: the bytes are the same.
    #[inline(always)]
    fn put_signal(&mut self, entry: &impl Words, class: usize, op: WrOp) -> Option<u64> {
        let word = (entry.word::<3>() >> 32) * 8;
        let access = if op == WrOp::SignalAdd { Access::Atomic } else { Access::Write };
        let (qp, remote, rkey) = self.remote(entry, class, access, word, 8)?;
        let wr = Wr { op, len: 8, remote, rkey, operand: entry.word::<7>(), ..Wr::EMPTY };
        self.transfer(entry, class, WrOp::Put)?;
        // SAFETY: the word was checked against a live import, and is aligned, as regions are.
        unsafe { self.device.post_now(qp, &wr) }
    }
}
