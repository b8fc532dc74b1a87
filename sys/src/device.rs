//! The boundary between the engine and whatever moves bytes.

use core::fmt;
use core::ptr::NonNull;

use bitflags::bitflags;

use crate::{Posted, Qp, Status, Wc, Wr};

/// Classes of a connection: 0 is urgent, 1 is the rest. Each is a queue pair of its own.
pub const CLASSES: usize = 2;

/// Bytes of a control message.
pub const MESSAGE_BYTES: usize = 64;

/// What two engines say to each other over a connection; the device does not look into it.
pub type Message = [u8; MESSAGE_BYTES];

/// A connection to one peer: a control channel and [`CLASSES`] queue pairs. The number is the device's own, and is used
/// again after `disconnect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link(pub u32);

/// A registration of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mr(pub u32);

bitflags! {
    /// What peers may do with a registration. None: it is local memory only.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Rights: u8 {
        /// Get.
        const READ = 1;
        /// Put and signal.
        const WRITE = 2;
        /// Fetch-add, compare-swap, swap.
        const ATOMIC = 4;
    }
}

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// The engine has taken it.
    Accepted = 0,
    /// The local buffer may be used again.
    Reusable = 1,
    /// The bytes are in the target's memory system.
    Delivered = 2,
    /// The target's CPU sees them.
    Visible = 3,
}

/// Against what the atomics of a region are atomic. Mixing two of them on one word is atomic against nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Domain {
    /// Every CPU of the host.
    Cpu = 0,
    /// The same NIC, and nothing else (IBV_ATOMIC_HCA).
    Nic = 1,
    /// The target's engine, which executes them, and its CPU.
    Engine = 2,
}

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Its name, as in `verbring perf --device`.
    pub name: &'static str,
    /// The level that a completion of a put means.
    pub completion: Level,
    /// Atomics are executed by the device (else the engine has to emulate them).
    pub atomics: bool,
    /// Where they are executed.
    pub domain: Domain,
    /// A signal posted behind puts to the same queue pair is seen after them.
    pub ordered_signal: bool,
    /// [`Device::cancel`] can stop work that has started.
    pub can_cancel: bool,
    /// The longest message.
    pub max_send: u32,
    /// After [`Device::cancel`] or [`Device::disconnect`], nothing touches the memory of a work request any more once
    /// this many nanoseconds passed.
    pub drain_bound_ns: u64,
}

/// Memory to register.
#[derive(Clone, Debug)]
pub enum Memory {
    /// Memory of this process.
    Private {
        /// Its first byte.
        base: NonNull<u8>,
        /// Its length in bytes.
        len: usize,
    },
    /// A mapping that can be handed to other processes. The device keeps it as long as it is registered.
    #[cfg(feature = "std")]
    Shared {
        /// The mapping.
        region: std::sync::Arc<verbring_slab::Region>,
        /// Bytes of it that may be used.
        len: usize,
    },
}

impl Memory {
    /// First byte and length.
    pub fn range(&self) -> (NonNull<u8>, usize) {
        match self {
            Memory::Private { base, len } => (*base, *len),
            #[cfg(feature = "std")]
            Memory::Shared { region, len } => (region.base(), (*len).min(region.len())),
        }
    }
}

// SAFETY: it names memory; whoever registers it answers for the access.
unsafe impl Send for Memory {}

/// Memory of a peer that came with a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// What `Wr::rkey` has to say. Given up by [`Device::release`].
    pub rkey: u32,
    /// What `Wr::remote` starts from.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Whether the mapping allows writing.
    pub writable: bool,
    /// Whether both sides can do atomics on it.
    pub atomics: bool,
}

/// What happened on the control side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A connection is established. `incoming`: the other side asked for it.
    Up {
        /// Which.
        link: Link,
        /// The incarnation id of the peer's engine.
        node: u64,
        /// Whether the peer connected to us.
        incoming: bool,
        /// This side's name of the connection: never 0, and hard to guess for others. 0 where the device cannot say which
        /// connection one replaces.
        epoch: u32,
        /// The peer's name of it.
        peer_epoch: u32,
        /// This side's epoch of the connection that the peer says this one replaces. 0: none, or this side connected.
        replaces: u32,
    },
    /// The peer's engine said something.
    Message {
        /// Over which connection.
        link: Link,
        /// What.
        message: Message,
        /// The memory that came with it.
        granted: Option<Granted>,
    },
    /// A connection is lost, or was never made. Its pending work requests have ended or will end by `poll`, and its
    /// number stays taken until `disconnect`.
    Down {
        /// Which.
        link: Link,
        /// Why.
        cause: DeviceError,
    },
}

/// What became of a work request that was to be cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    /// It had no effect and never will; no [`Wc`] comes.
    NotStarted,
    /// It was stopped on its way; no [`Wc`] comes, and its memory is not touched any more.
    Cut,
    /// The device cannot; a [`Wc`] comes as if nothing had been said.
    Unable,
}

/// Why a control call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// A name must be `[A-Za-z0-9._-]{1,64}`.
    BadName,
    /// What is to be an address is none of this device's.
    BadAddress,
    /// Somebody listens under this name, or at this address, already.
    NameInUse,
    /// Nobody listens under this name, or at this address.
    NoSuchName,
    /// The address is none of this host's.
    NoSuchAddress,
    /// The other side belongs to another user.
    WrongUser {
        /// Their uid.
        theirs: u32,
        /// Our uid.
        ours: u32,
    },
    /// The other side speaks another version.
    Version {
        /// Theirs.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// What the other side sent makes no sense.
    Protocol(&'static str),
    /// The other side refused the connection.
    Refused(&'static str),
    /// The handshake was not answered in time.
    TimedOut,
    /// The other side closed the connection.
    Closed,
    /// The other side's process died.
    Died,
    /// The other side's NIC does not answer.
    NoAnswer,
    /// This side broke the connection: an operation had to end by its deadline, and the device cannot take it back.
    Deadline,
    /// A table is full.
    Full {
        /// Which one.
        what: &'static str,
        /// Its capacity.
        limit: u32,
    },
    /// This memory cannot be reached by peers over this device.
    NotShareable,
    /// The rights of a region are set once: it was registered with others before.
    RightsDiffer,
    /// The region is exported by another registration.
    AlreadyExported,
    /// The registration does not exist.
    NoSuchMr,
    /// The connection does not exist, or is down.
    NoSuchLink,
    /// The device does not do this.
    NotSupported(&'static str),
    /// A system call failed.
    System {
        /// Which one.
        call: &'static str,
        /// errno(3).
        errno: i32,
    },
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use DeviceError::*;
        match self {
            BadName => f.write_str("a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -; choose another"),
            BadAddress => f.write_str(
                "this is no address of such a device; it is an IP address such as 192.0.2.1 or fd00::1 (on the simulated \
                 network: the number of a node)",
            ),
            NameInUse => {
                f.write_str("another process listens under this name or address; end it, or choose another one")
            }
            NoSuchName => {
                f.write_str("nobody of this user listens under this name or address; start the other side first")
            }
            NoSuchAddress => f.write_str("this host has no such address; choose one of those that `ip address` shows"),
            WrongUser { theirs, ours } => {
                write!(f, "the other side runs as uid {theirs}, this one as {ours}; run both as one user")
            }
            Version { theirs, ours } => {
                write!(f, "the other side speaks protocol version {theirs}, this one {ours}; use one release on both")
            }
            Protocol(what) => write!(f, "the other side broke the protocol ({what}); is it verbring at all?"),
            Refused(why) => write!(f, "the other side refused the connection: {why}"),
            TimedOut => f.write_str("the handshake was not answered in time; does the other side call control()?"),
            Closed => f.write_str("the other side closed the connection; connect again when it is back"),
            Died => f.write_str("the other side's process died; connect again when it is back"),
            Deadline => f.write_str(
                "an operation had to end by its deadline, and this device can only break the connection for it; connect \
                 again, or give operations more time",
            ),
            NoAnswer => f.write_str(
                "the other side's NIC does not answer: its host, its process or the network is down; connect again when \
                 it is back",
            ),
            Full { what, limit } => write!(f, "all {limit} {what} are in use; give one up, or configure more"),
            NotShareable => {
                f.write_str("this memory cannot be reached by peers over this device; register a shared Region instead")
            }
            RightsDiffer => f.write_str(
                "the region was registered with other rights before; rights belong to the region: make another region",
            ),
            AlreadyExported => {
                f.write_str("the region is exported already; use that window, close it first, or make another region")
            }
            NoSuchMr => f.write_str("the registration does not exist any more; register the memory again"),
            NoSuchLink => f.write_str("the connection does not exist any more; connect again"),
            NotSupported(what) => write!(f, "this device does not {what}"),
            System { call, errno } => write!(f, "{call} failed with errno {errno}"),
        }
    }
}

impl core::error::Error for DeviceError {}

/// One opened NIC, shared-memory host or software NIC. It has one user, is polled, calls nobody back, and allocates
/// nothing after creation except in control calls.
///
/// # The contract
/// * `post` answers [`Posted::Done`] only while no earlier work request of that queue pair is pending.
/// * Each wr_id ends exactly once: by `Done` or `Refused`, by one [`Wc`], or by [`Cancel::NotStarted`] or
///   [`Cancel::Cut`]. `Full` leaves it with the caller.
/// * The Wcs of a queue pair come in the order of posting, receives apart from the rest.
/// * The memory of a work request is not touched after it ended, nor, `drain_bound_ns` later, after `disconnect`.
/// * After a failure only `wr_id`, `qp`, `status` and `vendor_err` of a Wc mean anything.
/// * Only `control` and the calls that take or return a [`DeviceError`] make system calls, and `ring` and `poll` of a
///   device whose wire is a socket of the kernel. `post`, `ring` and `poll` neither allocate, lock, nor panic.
/// * After a connection went down its pending work requests end by `poll` in error, the first one first.
///
/// # Safety
/// The engine relies on the second and fourth point for memory safety.
pub unsafe trait Device {
    /// What it can do.
    fn caps(&self) -> &Caps;

    /// Registers memory. With no rights it is local memory only.
    ///
    /// # Safety
    /// The memory is valid until `deregister` returned or the device is dropped. If `rights` are given, it is not
    /// reached by Rust references meanwhile.
    unsafe fn register(&mut self, memory: Memory, rights: Rights) -> Result<Mr, DeviceError>;

    /// Ends a registration. Peers that were not cut off by `revoke` before keep what they have mapped.
    fn deregister(&mut self, mr: Mr) -> Result<(), DeviceError>;

    /// Cuts off every peer that was granted this registration: an access that starts after this call returned changes no
    /// byte of it, and what it read is not reported as success.
    fn revoke(&mut self, mr: Mr) -> Result<(), DeviceError>;

    /// Starts a connection; [`Event::Up`] or [`Event::Down`] follows. `replaces` is the peer's epoch of the connection that
    /// this one replaces, which is told to the peer; 0: none.
    fn connect(&mut self, address: &str, replaces: u32, now: u64) -> Result<Link, DeviceError>;

    /// Ends a connection, at once and without asking the peer. What is pending on it ends without a [`Wc`].
    fn disconnect(&mut self, link: Link);

    /// The queue pair of a class (below [`CLASSES`]) of a connection.
    fn qp(&self, link: Link, class: usize) -> Qp;

    /// Sends a control message, and with it a grant of a registration. If that fails the connection is lost, and
    /// [`Event::Down`] follows.
    fn send(&mut self, link: Link, message: &Message, grant: Option<Mr>) -> Result<(), DeviceError>;

    /// The engine keeps an import that came with a message: the device may prepare it for use.
    fn keep(&mut self, rkey: u32);

    /// Gives up an import.
    fn release(&mut self, rkey: u32);

    /// Does the control work: accepts, handshakes, reads messages, notices losses. Answers one event at a time; call it
    /// until it has none.
    fn control(&mut self, now: u64) -> Option<Event>;

    /// Does a work request here and now, and answers the old value of an atomic, else 0. None if it cannot: then it has to
    /// be posted, and nothing was done yet, but for local bytes that a get may have written.
    ///
    /// # Safety
    /// As [`Device::post`].
    #[inline(always)]
    unsafe fn post_now(&mut self, qp: Qp, wr: &Wr) -> Option<u64> {
        _ = (qp, wr);
        None
    }

    /// While a queue pair is held, `post_now` does nothing there: its user has work that comes first.
    fn hold(&mut self, qp: Qp, is_held: bool) {
        _ = (qp, is_held);
    }

    /// Posts a work request.
    ///
    /// # Safety
    /// `qp` is of a connection of this device. `local` (where the operation has one) is valid for `len` bytes until the work request ended; `remote .. remote +
    /// len` lies in the live import `rkey` of the queue pair's connection, which allows the access; atomics and signals
    /// are 8-byte aligned.
    unsafe fn post(&mut self, qp: Qp, wr: &Wr) -> Posted;

    /// Rings the doorbell for what was posted; once a batch.
    fn ring(&mut self, now: u64);

    /// Makes progress, and writes completions to the front of `wcs`: how many.
    fn poll(&mut self, now: u64, wcs: &mut [Wc]) -> usize;

    /// Tries to end a pending work request.
    fn cancel(&mut self, qp: Qp, wr_id: u64) -> Cancel;

    /// Why the connection of a queue pair is down; none while it is up.
    fn down(&self, qp: Qp) -> Option<Status>;
}
