//! The rounds of a ping-pong, as both ends send and await them.
//!
//! A put carries the number of its round in its last 8 bytes, or in its last byte if it is shorter; `put_signal` carries
//! it in the signal. Whoever sees the number may not yet see the rest of a put: a copy has no order inside. That is how
//! everybody measures it; who wants order uses `put_signal`.

use verbring::{RemoteKey, Signal, Sqe, Window};

use super::definitions::Kind;
use super::device::Measured;
use super::ends::{End, Windows};
use super::pattern::{self, Key, Part};
use super::rows::{Place, Row};
use super::{PerfError, Verdict};

/// One end's view of a ping-pong.
#[derive(Clone, Copy)]
pub(crate) struct Courier<'a> {
    row: &'a Row,
    theirs: RemoteKey,
    is_signal: bool,
    /// Bytes of the number at the end of a message: 8, 1 or none.
    stamp: usize,
    /// The end of a message, here and there: offsets.
    local_end: usize,
    remote_end: usize,
}

impl<'a> Courier<'a> {
    pub(crate) fn new(row: &'a Row, theirs: RemoteKey) -> Courier<'a> {
        let is_signal = row.test.kind == Kind::PingPongSignal;
        let stamp = match row.layout.size {
            _ if is_signal => 0,
            0..8 => 1,
            _ => 8,
        };
        let (local_end, remote_end) = (row.layout.end(Place::Local, 0), row.layout.end(Place::Remote, 0));
        Courier { row, theirs, is_signal, stamp, local_end: local_end as usize, remote_end: remote_end as usize }
    }

    /// Puts a round into the other end's inbox.
    #[inline(always)]
    pub(crate) fn send_round<D: Measured>(
        &self,
        end: &mut End<D>,
        windows: &Windows,
        round: u64,
    ) -> Result<(), PerfError> {
        match self.stamp {
            8 => windows.outbox.store(self.local_end - 8, round),
            1 => windows.outbox.write(self.local_end - 1, &[round as u8]),
            _ => {}
        }
        let layout = self.row.layout;
        let from = windows.outbox.slice(layout.at(Place::Local, 0), layout.size);
        let to = self.theirs.at(layout.at(Place::Remote, 0));
        let sqe = if self.is_signal {
            Sqe::put_signal(from, to, (self.remote_end / 8) as u32, Signal::Store(round))
        } else {
            Sqe::put(from, to)
        };
        end.engine.push(sqe).map_err(PerfError::Push)?;
        end.finish(1)?;
        Ok(())
    }

    /// Polls until a round is in the inbox; false if a message came instead.
    #[inline(always)]
    pub(crate) fn await_round<D: Measured>(
        &self,
        end: &mut End<D>,
        windows: &Windows,
        round: u64,
    ) -> Result<bool, PerfError> {
        match self.stamp {
            8 => end.watch(&windows.inbox, self.remote_end - 8, |word| word == round),
            // The last byte of the little-endian word that the message ends with.
            1 => end.watch(&windows.inbox, self.remote_end - 8, |word| (word >> 56) as u8 == round as u8),
            _ => end.watch(&windows.inbox, self.remote_end, |word| word == round),
        }
    }

    /// Compares what arrived last, which was round `count`.
    pub(crate) fn check(&self, inbox: &Window, seed: u64, part: Part, count: u64) -> Verdict {
        let layout = self.row.layout;
        let at = layout.at(Place::Remote, 0) as usize;
        let body = layout.size as usize - self.stamp;
        let key = Key::new(seed, self.row, 0, part);
        let mut stamp = [0; 8];
        inbox.read(at + body, &mut stamp[..self.stamp]);
        let is_count = match self.stamp {
            0 => inbox.load(self.remote_end) == count,
            stamped => stamp[..stamped] == count.to_le_bytes()[..stamped],
        };
        let behind = self.remote_end + if self.is_signal { 8 } else { 0 };
        pattern::first_wrong(inbox, 0, at, None)
            .or_else(|| pattern::first_wrong(inbox, at, body, Some(key)))
            .or((!is_count).then_some(at + body))
            .or_else(|| pattern::first_wrong(inbox, behind, layout.extent() as usize - behind, None))
            .into()
    }
}
