//! Queue pairs: their states, what takes one to the next, and what is remembered of each.

use core::net::{IpAddr, Ipv4Addr};

use verbring_sys::rnic::{MrAccess, SendWr};

use super::memory::Pd;
use super::requester::Requester;
use super::responder::Responder;

/// Where a queue pair stands (ibv_modify_qp(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QpState {
    /// It does nothing.
    Reset,
    /// Receives can be posted.
    Init,
    /// It answers the peer.
    ReadyToReceive,
    /// It sends too.
    ReadyToSend,
    /// It finishes what it has begun to send, and begins nothing.
    SendQueueDrain,
    /// Everything posted is flushed.
    Error,
}

/// A step from one state to another, with what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transition {
    /// From reset, or again.
    Init {
        /// What peers may do over this queue pair, if the memory allows it too.
        access: MrAccess,
    },
    /// From init.
    ReadyToReceive {
        /// The peer's port.
        peer: IpAddr,
        /// The peer's queue pair.
        dest_qp: u32,
        /// Bytes of a payload: 256, 512, 1024, 2048 or 4096.
        mtu: u32,
        /// The first sequence number that the peer sends.
        rq_psn: u32,
        /// Reads and atomics that are answered at one time; at most the NIC's.
        max_dest_rd_atomic: u8,
        /// Code of the time that a sender waits when no receive is posted.
        min_rnr_timer: u8,
    },
    /// From ready to receive, or from drain.
    ReadyToSend {
        /// The first sequence number to send. Not looked at when it comes from drain.
        sq_psn: u32,
        /// What is not answered within 4.096 us times 2 to this power is sent again; 0: it is waited for without end.
        timeout: u8,
        /// Times that it is sent again.
        retry_count: u8,
        /// Times that it is sent again for want of a receive; 7: without end.
        rnr_retry: u8,
        /// Reads and atomics under way at one time; at most the peer's `max_dest_rd_atomic`.
        max_rd_atomic: u8,
    },
    /// From ready to send.
    SendQueueDrain,
    /// From any state.
    Error,
    /// From any state: everything is forgotten.
    Reset,
}

/// Why a step was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModifyError {
    /// There is no such queue pair.
    NoSuchQp,
    /// The step does not go from the state that it is in.
    State {
        /// That state.
        from: QpState,
    },
    /// A value is none that it can have.
    Attribute(&'static str),
}

/// Numbers of a queue pair: those that a user sets, and those of the two sides of it.
pub(super) struct Qp {
    /// 0: the place is free.
    pub(super) number: u32,
    /// Of the users of this place.
    pub(super) generation: u32,
    pub(super) state: QpState,
    pub(super) pd: Pd,
    pub(super) send_cq: u32,
    pub(super) recv_cq: u32,
    pub(super) access: MrAccess,
    pub(super) peer: IpAddr,
    pub(super) dest_qp: u32,
    pub(super) mtu: u32,
    pub(super) max_dest_rd: u8,
    pub(super) rnr_timer: u8,
    pub(super) timeout_ns: u64,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
    pub(super) max_rd: u8,
    pub(super) req: Requester,
    pub(super) resp: Responder,
}

impl Qp {
    pub(super) const fn new() -> Qp {
        Qp {
            number: 0,
            generation: 0,
            state: QpState::Reset,
            pd: Pd(0),
            send_cq: 0,
            recv_cq: 0,
            access: MrAccess::empty(),
            peer: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            dest_qp: 0,
            mtu: 256,
            max_dest_rd: 1,
            rnr_timer: 0,
            timeout_ns: 0,
            retry_count: 0,
            rnr_retry: 0,
            max_rd: 1,
            req: Requester::new(),
            resp: Responder::new(),
        }
    }

    /// Forgets everything but who it is.
    pub(super) fn reset(&mut self) {
        let Qp { number, generation, pd, send_cq, recv_cq, .. } = *self;
        *self = Qp { number, generation, pd, send_cq, recv_cq, ..Qp::new() };
    }

    pub(super) fn can_receive(&self) -> bool {
        matches!(self.state, QpState::ReadyToReceive | QpState::ReadyToSend | QpState::SendQueueDrain)
    }

    pub(super) fn can_send(&self) -> bool {
        matches!(self.state, QpState::ReadyToSend | QpState::SendQueueDrain)
    }
}

/// Bytes of the longest inline send.
pub const MAX_INLINE: usize = 64;

/// A send work request in its queue.
#[derive(Clone, Copy)]
pub(super) struct Wqe {
    pub(super) wr: SendWr,
    pub(super) inline: [u8; MAX_INLINE],
    /// The first sequence number, and how many it takes; what never leaves the NIC takes none.
    pub(super) first: u64,
    pub(super) packets: u32,
    /// The number of the message, for credits.
    pub(super) message: u64,
}

impl Wqe {
    pub(super) const EMPTY: Wqe = Wqe { wr: SendWr::EMPTY, inline: [0; MAX_INLINE], first: 0, packets: 0, message: 0 };

    /// The sequence number behind it.
    pub(super) fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }
}
