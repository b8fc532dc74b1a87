//! The application's end: push entries, reap completions, and the slab that the safe calls take their blocks from.

use core::fmt;
use core::sync::atomic::{Ordering, fence};

use verbring_slab::{Buf, Slab, SlabError};
use verbring_sys::Status;

use crate::cqe::{BLOCK, Cqe, unblock};
use crate::key::{PeerId, Target};
use crate::ring::{AppEnd, Pushing, RawCqe};
use crate::sqe::{BUF, Local, Signal, Sqe, SqeFlags};

/// Keeps the memory of the rings. Without `std` that is static memory, which needs no keeper.
#[cfg(feature = "std")]
pub(crate) type Keep = std::sync::Arc<verbring_slab::Arena>;
#[cfg(not(feature = "std"))]
pub(crate) type Keep = ();

/// The application's end of a pair of rings. One thread uses it; it can be moved to another.
#[repr(align(64))]
pub struct Port {
    end: AppEnd,
    slab: Option<Slab>,
    slab_key: u32,
    _keep: Keep,
}

/// How an operation is to be done: what the setters of [`Sqe`] say, for the calls that take a [`Buf`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opts {
    /// Comes back in the completion.
    pub user_data: u64,
    /// 0 is urgent, 1 is the rest.
    pub class: u8,
    /// In nanoseconds of the engine's clock.
    pub deadline: Option<u64>,
    /// Start after all earlier operations to this peer.
    pub fence: bool,
    /// The next entry starts after this one.
    pub link: bool,
    /// No completion if it succeeds; the block goes back to the slab by itself.
    pub silent: bool,
}

impl Opts {
    #[inline(always)]
    fn apply(self, sqe: Sqe) -> Sqe {
        let mut flags = SqeFlags::empty();
        flags.set(SqeFlags::FENCE, self.fence);
        flags.set(SqeFlags::LINK, self.link);
        flags.set(SqeFlags::SILENT, self.silent);
        let sqe = sqe.user_data(self.user_data).class(self.class).flags(flags);
        match self.deadline {
            Some(deadline) => sqe.deadline(deadline),
            None => sqe,
        }
    }
}

/// Why an entry was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PushError {
    /// The submission ring is full. Let the engine submit, and reap completions, then push again.
    SqFull,
    /// The engine is gone.
    EngineGone,
    /// The block is of another slab than this port's.
    NotMine,
}

impl fmt::Display for PushError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PushError::SqFull => {
                "the submission ring is full; submit, poll and reap, then push again, or give Config::sq_entries a \
                 larger value"
            }
            PushError::EngineGone => "the engine of this port is gone; reap what is left and drop the port",
            PushError::NotMine => "the block is of another slab; allocate it from the port it is given to",
        })
    }
}

impl core::error::Error for PushError {}

/// A completion, and the block that comes back with it.
#[derive(Debug)]
pub struct Completion {
    /// The completion.
    pub cqe: Cqe,
    /// The block that the operation had. What it holds after an error is unspecified.
    pub buf: Option<Buf>,
}

impl core::ops::Deref for Completion {
    type Target = Cqe;
    fn deref(&self) -> &Cqe {
        &self.cqe
    }
}

impl Port {
    pub(crate) fn new(end: AppEnd, keep: Keep) -> Port {
        Port { end, slab: None, slab_key: 0, _keep: keep }
    }

    /// From now on blocks come from `slab`, which is registered under `key`.
    pub(crate) fn set_slab(&mut self, slab: Slab, key: u32) {
        (self.slab, self.slab_key) = (Some(slab), key);
    }

    /// Puts an entry into the submission ring. Nothing happens before the engine submits; what an engine never took
    /// before it went comes back by `reap_untaken`.
    ///
    /// The safe constructors of [`Sqe`] name Windows only; an entry that names slab memory was made by an `unsafe` one.
    #[inline(always)]
    pub fn push(&mut self, sqe: Sqe) -> Result<(), PushError> {
        if self.end.push(&sqe) { Ok(()) } else { Err(self.full()) }
    }

    #[cold]
    #[inline(never)]
    fn full(&self) -> PushError {
        why_full(self.end.is_engine_gone())
    }

    /// A block of at least `len` bytes.
    #[inline]
    pub fn alloc(&mut self, len: usize) -> Result<Buf, SlabError> {
        match &mut self.slab {
            Some(slab) => slab.alloc(len),
            None => Err(SlabError::TooLarge { len, largest: 0 }),
        }
    }

    /// Gives a block back. The same as dropping it, and faster.
    #[inline]
    pub fn free(&mut self, buf: Buf) {
        match &mut self.slab {
            Some(slab) => slab.free(buf),
            None => drop(buf),
        }
    }

    /// The port's slab, to be looked at.
    pub fn slab(&self) -> Option<&Slab> {
        self.slab.as_ref()
    }

    #[inline]
    fn push_buf(&mut self, buf: Buf, opts: Opts, make: impl FnOnce(Local) -> Sqe) -> Result<(), (PushError, Buf)> {
        let Some(slab) = self.slab.as_mut().filter(|slab| buf.is_from(slab)) else {
            return Err((PushError::NotMine, buf));
        };
        let raw = buf.into_raw();
        let mut sqe = opts.apply(make(Local { lkey: self.slab_key, offset: raw.offset as u64, len: raw.len }));
        sqe.words[0] |= (BUF as u64) << 40;
        if self.end.push(&sqe) {
            return Ok(());
        }
        // The ring did not take it, so it is still ours: the handle was made just now.
        // SAFETY: no operation began.
        match unsafe { slab.from_raw(raw) } {
            Ok(buf) => Err((self.full(), buf)),
            Err(_) => Ok(()),
        }
    }

    /// The bytes of `buf` to `target`. The block comes back with the completion, or with the error.
    #[inline]
    pub fn put(&mut self, buf: Buf, target: Target, opts: Opts) -> Result<(), (PushError, Buf)> {
        self.push_buf(buf, opts, |local| Sqe::put(local, target))
    }

    /// As many bytes as `buf` has in use, from `target`.
    #[inline]
    pub fn get(&mut self, buf: Buf, target: Target, opts: Opts) -> Result<(), (PushError, Buf)> {
        self.push_buf(buf, opts, |local| Sqe::get(local, target))
    }

    /// The bytes of `buf` to `target`, then `signal` to the word number `signal_word` of the same region.
    #[inline]
    pub fn put_signal(
        &mut self,
        buf: Buf,
        target: Target,
        signal_word: u32,
        signal: Signal,
        opts: Opts,
    ) -> Result<(), (PushError, Buf)> {
        self.push_buf(buf, opts, |local| Sqe::put_signal(local, target, signal_word, signal))
    }

    /// The bytes of `buf`, with an immediate, into the oldest receive that the peer posted in the class.
    #[inline]
    pub fn send(&mut self, buf: Buf, peer: PeerId, imm: u32, opts: Opts) -> Result<(), (PushError, Buf)> {
        self.push_buf(buf, opts, |local| Sqe::send(local, peer, imm))
    }

    /// Room for one message of the peer: as many bytes as `buf` has in use. The block comes back with the message, its
    /// length set to the message's.
    #[inline]
    pub fn recv(&mut self, buf: Buf, peer: PeerId, opts: Opts) -> Result<(), (PushError, Buf)> {
        self.push_buf(buf, opts, |local| Sqe::recv(local, peer))
    }

    /// Several entries: as `push`, one by one, and less work for each.
    ///
    /// ```
    /// # use verbring::{Port, PushError, Sqe, Target};
    /// fn store_all(port: &mut Port, values: &[u64], to: impl Fn(u64) -> Target) -> Result<(), PushError> {
    ///     port.batch(|batch| {
    ///         for (i, value) in (0..).zip(values) {
    ///             batch.push(Sqe::put_word(*value, to(i * 8)).user_data(i))?;
    ///         }
    ///         Ok(())
    ///     })
    /// }
    /// ```
    #[inline(always)]
    pub fn batch<R>(&mut self, push: impl FnOnce(&mut Batch<'_>) -> R) -> R {
        push(&mut Batch { pushing: self.end.pushing() })
    }

    /// Takes the oldest completion.
    #[inline(always)]
    pub fn reap(&mut self) -> Option<Completion> {
        match self.end.reap_success() {
            Some(user_data) => Some(Completion::success(user_data)),
            None => self.end.reap().map(|raw| Completion::new(raw, &mut self.slab)),
        }
    }

    /// Takes the completions that are there, a ring full at most: how many. As `reap`, and less work for each.
    #[inline(always)]
    pub fn reap_each(&mut self, mut each: impl FnMut(Completion)) -> u32 {
        let most = self.end.cq_capacity();
        let mut reaping = self.end.reaping();
        let mut count = 0;
        while count < most {
            // Mostly they are successes: a loop of their own.
            if let Some(user_data) = reaping.success() {
                each(Completion::success(user_data));
            } else if let Some(raw) = reaping.any() {
                each(Completion::new(raw, &mut self.slab));
            } else {
                break;
            }
            count += 1;
        }
        count
    }

    /// Once the engine is gone and every completion was reaped: the oldest entry that it never took, as a completion
    /// that says so.
    pub fn reap_untaken(&mut self) -> Option<Completion> {
        if !self.end.is_engine_gone() {
            return None;
        }
        let sqe = self.end.untaken()?;
        let mut buf = None;
        if sqe.flag_bits() & BUF != 0 {
            // SAFETY: no operation began.
            buf = self.slab.as_mut().and_then(|slab| unsafe { slab.take_back(sqe.local() as usize, sqe.len()) });
        }
        let cqe = Cqe { user_data: sqe.cookie(), status: Status::ConnectionLost, imm: 0, value: 0 };
        Some(Completion { cqe, buf })
    }

    /// Entries ever pushed.
    #[inline(always)]
    pub(crate) fn pushed(&self) -> u32 {
        self.end.pushed()
    }

    /// Whether the engine is gone: what was reaped then is all there will be.
    pub fn is_engine_gone(&self) -> bool {
        self.end.is_engine_gone()
    }
}

/// The entries of a [`Port::batch`].
pub struct Batch<'a> {
    pushing: Pushing<'a>,
}

impl Batch<'_> {
    /// Puts an entry into the submission ring.
    #[inline(always)]
    pub fn push(&mut self, sqe: Sqe) -> Result<(), PushError> {
        if self.pushing.push(&sqe) { Ok(()) } else { Err(why_full(self.pushing.is_engine_gone())) }
    }
}

#[cold]
fn why_full(is_engine_gone: bool) -> PushError {
    if is_engine_gone { PushError::EngineGone } else { PushError::SqFull }
}

impl Completion {
    #[inline(always)]
    fn success(user_data: u64) -> Completion {
        Completion { cqe: Cqe { user_data, status: Status::Success, imm: 0, value: 0 }, buf: None }
    }

    #[inline(always)]
    fn new(raw: RawCqe, slab: &mut Option<Slab>) -> Completion {
        // A number that is no status was written by no engine of this version.
        let status = Status::from_raw(raw.status).unwrap_or(Status::DeviceFault);
        let mut cqe = Cqe { user_data: raw.user_data, status, imm: raw.imm, value: raw.value };
        if raw.flags & BLOCK == 0 {
            return Completion { cqe, buf: None };
        }
        let (offset, len) = unblock(raw.value);
        cqe.value = u64::from(len);
        // SAFETY: a completion says that the operation ended.
        let buf = slab.as_mut().and_then(|slab| unsafe { slab.take_back(offset as usize, len) });
        Completion { cqe, buf }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        while self.reap().is_some() {}
        // What completes from here on is given back by the engine's end, when that goes.
        self.end.leave();
        fence(Ordering::SeqCst);
        if self.end.is_engine_gone() {
            while self.reap().is_some() {}
            while self.reap_untaken().is_some() {}
        }
    }
}
