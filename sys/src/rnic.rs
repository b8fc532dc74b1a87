//! What an RNIC is: the verbs that a device of reliable connections is built on. The software RNIC and libibverbs are
//! both behind [`Rnic`]; [`RcDevice`](crate::rc::RcDevice) makes a [`Device`](crate::Device) of either.
//!
//! Names are those of the verbs (ibv_post_send(3), ibv_poll_cq(3), ibv_modify_qp(3), ibv_reg_mr(3)).

use core::net::IpAddr;

use bitflags::bitflags;

use crate::DeviceError;

bitflags! {
    /// What a registration or a queue pair allows (ibv_reg_mr(3)).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct MrAccess: u32 {
        /// The NIC may write to it for its owner: receives, results of reads and atomics.
        const LOCAL_WRITE = 1;
        /// Peers may write. Needs `LOCAL_WRITE`.
        const REMOTE_WRITE = 2;
        /// Peers may read.
        const REMOTE_READ = 4;
        /// Peers may do atomics. Needs `LOCAL_WRITE`.
        const REMOTE_ATOMIC = 8;
        /// Memory windows may be bound to it.
        const MW_BIND = 16;
    }
}

bitflags! {
    /// How a send is done (ibv_post_send(3)).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// It starts after earlier reads and atomics of its queue pair were answered.
        const FENCE = 1;
        /// Its success is told. An error always is.
        const SIGNALED = 2;
        /// The other side asked to be woken.
        const SOLICITED = 4;
        /// `local` is read before the post returns, and is not registered.
        const INLINE = 8;
        /// `imm` travels with a send or write.
        const IMM = 16;
    }
}

/// What a send does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SendOp {
    /// `len` bytes into the other side's oldest receive.
    Send,
    /// The same, and the key `invalidate` of the other side ends.
    SendInvalidate,
    /// `len` bytes to `remote`.
    Write,
    /// `len` bytes from `remote`.
    Read,
    /// If the word at `remote` is `compare`, it becomes `swap_add`; the old one goes to `local`.
    CompareSwap,
    /// `swap_add` is added to the word at `remote`; the old one goes to `local`.
    FetchAdd,
    /// Gives `len` bytes at `local` of the registration `lkey` to peers of this queue pair, with the rights `access`,
    /// under the new key `rkey` of a memory window (type 2, ibv_bind_mw(3)).
    BindWindow,
    /// Ends the key `rkey` of a memory window of this queue pair.
    LocalInvalidate,
}

/// A send work request. Addresses are of this process (`local`) and of the peer's (`remote`).
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    /// Named again in the [`RnicWc`].
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// How.
    pub flags: SendFlags,
    /// Bytes.
    pub len: u32,
    /// The local bytes.
    pub local: *mut u8,
    /// Their key.
    pub lkey: u32,
    /// The key of the remote bytes.
    pub rkey: u32,
    /// The remote bytes.
    pub remote: u64,
    /// Immediate, or the key to invalidate.
    pub imm: u32,
    /// Rights of a memory window.
    pub access: MrAccess,
    /// See [`SendOp`].
    pub compare: u64,
    /// See [`SendOp`].
    pub swap_add: u64,
}

impl SendWr {
    /// A signalled write of nothing.
    pub const EMPTY: SendWr = SendWr {
        wr_id: 0,
        op: SendOp::Write,
        flags: SendFlags::SIGNALED,
        len: 0,
        local: core::ptr::null_mut(),
        lkey: 0,
        rkey: 0,
        remote: 0,
        imm: 0,
        access: MrAccess::empty(),
        compare: 0,
        swap_add: 0,
    };
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    /// Named again in the [`RnicWc`].
    pub wr_id: u64,
    /// Where the message goes.
    pub local: *mut u8,
    /// Its room.
    pub len: u32,
    /// Its key.
    pub lkey: u32,
}

/// How a work request ended: the codes of ibv_wc_status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum WcStatus {
    /// It was done.
    Success = 0,
    /// The message is longer than the receive.
    LocLenErr = 1,
    /// The queue pair cannot do this.
    LocQpOpErr = 2,
    /// The local key does not allow it.
    LocProtErr = 4,
    /// It was flushed: an earlier one failed.
    WrFlushErr = 5,
    /// A memory window could not be bound.
    MwBindErr = 6,
    /// The answer made no sense.
    BadRespErr = 7,
    /// The peer took the request for nonsense.
    RemInvReqErr = 9,
    /// The remote key does not allow it.
    RemAccessErr = 10,
    /// The peer's NIC failed.
    RemOpErr = 11,
    /// The peer did not answer.
    RetryExcErr = 12,
    /// The peer had no receive posted for too long.
    RnrRetryExcErr = 13,
}

/// What a completion is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum WcOp {
    /// A send work request.
    Send,
    /// A receive that a send filled.
    Recv,
    /// A receive that the immediate of a write used up.
    RecvWriteImm,
}

/// A work completion. If `status` is not success, only `wr_id`, `status`, `qp` and `vendor_err` mean anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RnicWc {
    /// Of the work request.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// What it is of.
    pub op: WcOp,
    /// The queue pair.
    pub qp: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// The immediate, if one came.
    pub imm: Option<u32>,
    /// The vendor's code.
    pub vendor_err: u32,
}

impl RnicWc {
    /// What a place for completions holds before one was written to it.
    pub const EMPTY: RnicWc =
        RnicWc { wr_id: 0, status: WcStatus::Success, op: WcOp::Send, qp: 0, byte_len: 0, imm: None, vendor_err: 0 };
}

/// Something that happened to a queue pair or the port (ibv_get_async_event(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// The queue pair failed and is in error.
    QpFatal {
        /// Which.
        qp: u32,
    },
    /// The peer sent a request that makes no sense; the queue pair is in error.
    QpRequestError {
        /// Which.
        qp: u32,
    },
    /// The peer wanted what it may not have; the queue pair is in error.
    QpAccessError {
        /// Which.
        qp: u32,
    },
    /// The first packet came over a queue pair that is only ready to receive.
    CommunicationEstablished {
        /// Which.
        qp: u32,
    },
    /// A queue pair that was told to drain has nothing under way any more.
    SqDrained {
        /// Which.
        qp: u32,
    },
    /// A completion queue was full when a completion came, which is lost.
    CqError {
        /// Which.
        cq: u32,
    },
    /// The port came up, or went down.
    Port {
        /// Whether it is up.
        is_up: bool,
    },
}

/// Why a work request was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// The queue is full.
    Full,
    /// There is no such queue pair.
    NoSuchQp,
    /// The queue pair is not in a state in which that can be posted.
    State,
    /// More inline bytes than the queue pair takes.
    TooMuchInline,
    /// The NIC does not do this.
    NotSupported,
    /// The message is longer than the NIC sends.
    TooLong,
    /// A word is not at a multiple of 8.
    Misaligned,
}

/// The two keys of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrKeys {
    /// For own work requests.
    pub lkey: u32,
    /// For the peer's.
    pub rkey: u32,
    /// The address of the first byte, as peers name it.
    pub iova: u64,
}

/// What an RNIC can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RnicCaps {
    /// Its name.
    pub name: &'static str,
    /// It does compare-and-swap and fetch-and-add.
    pub atomics: bool,
    /// Immediates travel with writes.
    pub imm: bool,
    /// A queue pair's writes are placed in their order.
    pub ordered_writes: bool,
    /// Bytes of an inline send.
    pub max_inline: u32,
    /// Reads and atomics under way, as initiator and as target.
    pub max_rd_atomic: u8,
    /// Bytes of a payload: 256, 512, 1024, 2048 or 4096.
    pub mtu: u32,
    /// Sends that a queue pair holds.
    pub sq_depth: u32,
    /// Receives that a queue pair holds.
    pub rq_depth: u32,
    /// Bytes of the longest message.
    pub max_message: u32,
}

/// Where a queue pair is, and how it wants to be talked to: what the two sides of a connection tell each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAddress {
    /// Its port.
    pub ip: IpAddr,
    /// Its number.
    pub qp: u32,
    /// The first sequence number that it sends.
    pub psn: u32,
    /// Bytes of a payload at most.
    pub mtu: u32,
    /// Reads and atomics that it answers at one time.
    pub max_rd_atomic: u8,
}

/// An RNIC: queue pairs of reliable connections over one completion queue. It has one user and is polled.
///
/// # Safety
/// It touches the memory of a work request only until the [`RnicWc`] of it, or of a later one of the same queue, was
/// returned, or the queue pair was destroyed; and of peers' requests only what is registered with the right they need.
pub unsafe trait Rnic {
    /// What it can do.
    fn caps(&self) -> &RnicCaps;

    /// Registers memory (ibv_reg_mr(3)).
    ///
    /// # Safety
    /// The memory is valid until `dereg_mr` returned, or the NIC is dropped; if peers get rights it is not reached by
    /// Rust references meanwhile.
    unsafe fn reg_mr(&mut self, base: *mut u8, len: usize, access: MrAccess) -> Result<MrKeys, DeviceError>;

    /// Ends a registration: nothing touches the memory any more when it returns.
    fn dereg_mr(&mut self, keys: MrKeys) -> Result<(), DeviceError>;

    /// A queue pair, ready to receive work requests for receives: its address.
    fn create_qp(&mut self) -> Result<QpAddress, DeviceError>;

    /// Connects the queue pair at `own` to the one at `peer`, and lets it send.
    fn connect_qp(&mut self, own: &QpAddress, peer: &QpAddress) -> Result<(), DeviceError>;

    /// Puts a queue pair into error: what is pending is flushed.
    fn fail_qp(&mut self, qp: u32);

    /// Ends a queue pair. Nothing of it completes any more.
    fn destroy_qp(&mut self, qp: u32);

    /// Posts a send.
    ///
    /// # Safety
    /// `local` is valid for `len` bytes as long as the NIC may touch it.
    unsafe fn post_send(&mut self, qp: u32, wr: &SendWr) -> Result<(), PostError>;

    /// Posts a receive.
    ///
    /// # Safety
    /// As `post_send`.
    unsafe fn post_recv(&mut self, qp: u32, wr: &RecvWr) -> Result<(), PostError>;

    /// Rings the doorbell for what was posted.
    fn ring(&mut self, now: u64);

    /// Makes progress, and writes completions to the front of `wcs`: how many.
    fn poll(&mut self, now: u64, wcs: &mut [RnicWc]) -> usize;

    /// The oldest event that was not asked for yet.
    fn async_event(&mut self) -> Option<AsyncEvent>;
}
