//! What an engine gives to a device (`Wr`), and what it gets back (`Posted` at once, `Wc` later).

use crate::{Mr, Status};

/// A queue pair: one class of one connection. The number is the device's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Qp(pub u32);

/// What a work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum WrOp {
    /// `len` bytes from `local` to `remote`.
    Put,
    /// `len` (at most 16) bytes of `operand` and `second`, little-endian, to `remote`.
    PutInline,
    /// `len` bytes from `remote` to `local`.
    Get,
    /// Adds `operand` to the 64-bit word at `remote` and answers the old value.
    FetchAdd,
    /// If the word at `remote` is `second`, stores `operand`; answers the old value.
    CompareSwap,
    /// Stores `operand` in the word at `remote` and answers the old value.
    Swap,
    /// Stores `operand` in the word at `remote`, after all earlier work of the queue pair is visible.
    SignalStore,
    /// Adds `operand` to the word at `remote`, after all earlier work of the queue pair is visible.
    SignalAdd,
    /// `len` bytes from `local`, with `imm`, into the oldest receive that the peer posted for this queue pair.
    Send,
    /// Waits for a send into `local`, which has room for `len` bytes.
    Recv,
    /// Done when all earlier work of the queue pair is visible to the target's CPU.
    Flush,
}

/// A work request. Addresses are of this process (`local`), and of the device's making (`remote`: what
/// [`Granted`](crate::Granted) said, plus an offset).
#[derive(Clone, Copy, Debug)]
pub struct Wr {
    /// Named again in the [`Wc`].
    pub wr_id: u64,
    /// What to do.
    pub op: WrOp,
    /// Bytes.
    pub len: u32,
    /// The import that `remote` lies in.
    pub rkey: u32,
    /// Travels with a send.
    pub imm: u32,
    /// The local bytes. Valid, and registered as `local_mr`, until the work request ended.
    pub local: *mut u8,
    /// The registration that `local` lies in, for devices that need it.
    pub local_mr: Mr,
    /// The remote bytes, in bounds of the import.
    pub remote: u64,
    /// See [`WrOp`].
    pub operand: u64,
    /// See [`WrOp`].
    pub second: u64,
}

impl Wr {
    /// A put of nothing: what an operation does not set in its work request.
    pub const EMPTY: Wr = Wr {
        wr_id: 0,
        op: WrOp::Put,
        len: 0,
        rkey: 0,
        imm: 0,
        local: core::ptr::null_mut(),
        local_mr: Mr(0),
        remote: 0,
        operand: 0,
        second: 0,
    };
}

/// A receive that waits: what is remembered of its work request.
#[derive(Clone, Copy)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) local: *mut u8,
    pub(crate) room: u32,
}

impl Receive {
    pub(crate) const EMPTY: Receive = Receive { wr_id: 0, local: core::ptr::null_mut(), room: 0 };

    pub(crate) fn of(wr: &Wr) -> Receive {
        Receive { wr_id: wr.wr_id, local: wr.local, room: wr.len }
    }
}

/// The answer to a work request that was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Posted {
    /// It is done; the old value of an atomic, else 0. Only while no earlier one of its queue pair is pending.
    Done(u64),
    /// A [`Wc`] will come.
    Pending,
    /// No room in the queue pair; nothing was done. Poll, and post it again.
    Full,
    /// It ended in this error.
    Refused(Status),
}

/// The completion of a pending work request. If `status` is not success, only `wr_id`, `qp`, `status` and `vendor_err`
/// mean anything (ibv_poll_cq(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wc {
    /// Of the work request.
    pub wr_id: u64,
    /// Its queue pair.
    pub qp: Qp,
    /// How it ended.
    pub status: Status,
    /// The device's own code.
    pub vendor_err: u32,
    /// The immediate of a received message.
    pub imm: u32,
    /// The old value of an atomic; the length of a received message.
    pub value: u64,
}

impl Wc {
    /// A completion without value.
    pub const fn new(wr_id: u64, qp: Qp, status: Status) -> Wc {
        Wc { wr_id, qp, status, vendor_err: 0, imm: 0, value: 0 }
    }
}
