//! How an operation ended: one list of numbers for Rust, C and Python.

use core::fmt;

macro_rules! statuses {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal, $text:literal, $remedy:literal;)+) => {
        /// How an operation ended. 16 bits in a cqe; a number is given once and never reused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        #[non_exhaustive]
        pub enum Status {
            $($(#[doc = $doc])+ $name = $number,)+
        }

        impl Status {
            /// Every status, by number.
            pub const ALL: &'static [Status] = &[$(Status::$name,)+];

            /// The status of a number, as it stands in a cqe.
            pub const fn from_raw(number: u16) -> Option<Status> {
                match number {
                    $($number => Some(Status::$name),)+
                    _ => None,
                }
            }

            /// Its name, as in the source.
            pub const fn name(self) -> &'static str {
                match self { $(Status::$name => stringify!($name),)+ }
            }

            /// What happened.
            pub const fn text(self) -> &'static str {
                match self { $(Status::$name => $text,)+ }
            }

            /// What to do about it.
            pub const fn remedy(self) -> &'static str {
                match self { $(Status::$name => $remedy,)+ }
            }
        }
    };
}

statuses! {
    /// It was done.
    Success = 0, "the operation was done", "nothing to do";

    // 1 to 31: refused when it was submitted; nothing was done.
    /// The opcode is none of ours.
    BadOpcode = 1, "the opcode is unknown", "build sqes with the constructors of Sqe, for this version of the ring";
    /// A flag is unknown, or does not go with the opcode.
    BadFlags = 2, "a flag is unknown or does not go with this opcode", "see the table of flags in docs/ARCHITECTURE.md";
    /// A reserved field is not zero.
    BadReserved = 3, "a reserved field is not zero", "zero the whole sqe before filling it in";
    /// There is no such class.
    BadClass = 4, "the class does not exist", "use class 0 (urgent) or 1";
    /// The local key names no memory registered with this engine.
    BadLocalKey = 5, "the local memory is not registered with this engine", "register it, or name the Window that holds the data";
    /// The local range leaves its registration.
    LocalOutOfBounds = 6, "the local range leaves its registered memory", "check offset and length against the Window or Buf";
    /// The remote key names no import of this peer, or one that was given up.
    BadRemoteKey = 7, "the remote key names no import of this peer", "import the peer's Remote and use the key that import() returns";
    /// The remote range leaves the region.
    RemoteOutOfBounds = 8, "the remote range leaves the region", "check offset and length against the length in the Remote";
    /// The region does not grant this access.
    RemoteAccess = 9, "the region does not grant this access", "ask its owner to register it with the right (read, write, atomic)";
    /// The length is more than the operation carries.
    BadLength = 10, "the length is more than this operation carries", "put_inline: 16 bytes; send: Caps::max_send";
    /// The word is not at a multiple of 8.
    Misaligned = 11, "the word is not at a multiple of 8 bytes", "atomics and signals need an offset that is a multiple of 8";
    /// The region's atomics are executed elsewhere than this connection could.
    WrongDomain = 12, "the region's atomicity domain cannot be reached over this device", "use one path for all atomics of a region, or register it with domain Engine";
    /// The peer id is unknown, or of a connection that is gone.
    PeerUnknown = 13, "the peer id is unknown or of a connection that is gone", "use the id that connect() or accept returned last";
    /// A chain left its peer or class.
    BadLink = 14, "a linked chain left its peer or class", "end the chain (an sqe without LINK) before going to another peer or class";
    /// No slot was free for an operation that stays pending.
    TooManyOutstanding = 15, "too many operations are pending", "reap completions, or give Config::max_outstanding a larger value";
    /// The device cannot do it.
    NotSupported = 16, "the device of this peer cannot do this operation", "see the table of devices in docs/SEMANTICS.md";
    /// The connection or the import is not established yet.
    NotReady = 17, "the connection or the import is not established yet", "call control() until it is ready";
    /// There is no operation with that user_data to cancel.
    NotFound = 18, "no pending operation has this user_data", "it completed already: its cqe is, or was, in the CQ";

    // 32 to 63: outcomes.
    /// It was cancelled before it had an effect, or, for a put or get, was cut short.
    Cancelled = 32, "the operation was cancelled; a put or get that had started may be partly done", "nothing to do";
    /// Its deadline passed.
    DeadlineExceeded = 33, "the deadline passed; a put or get that had started may be partly done", "give it more time, or find out why the peer is slow";
    /// The region's owner bumped its epoch or closed it.
    StaleEpoch = 34, "the region was closed or its epoch was bumped by its owner", "get a new Remote from the owner and import it";
    /// The peer's process died, or its host is not reachable.
    PeerDead = 35, "the peer is dead", "connect again once it is back";
    /// The connection was lost while an atomic was under way: it was executed once or not at all.
    OutcomeUnknown = 36, "the connection was lost while the atomic was under way; it may have been executed", "read the word after reconnecting";
    /// The connection was closed or broke; a put or get may be partly done.
    ConnectionLost = 37, "the connection was closed or broke; a put or get may be partly done", "connect again and repeat it";
    /// The target's device refused the access.
    RemoteRefused = 38, "the target's device refused the access", "check that the region is still registered with these rights";
    /// The message was longer than the receive's buffer; the rest is lost.
    Truncated = 39, "the message was longer than the buffer of the receive", "post receives as large as the largest message";
    /// The device failed.
    DeviceFault = 40, "the device failed", "see the vendor's code and the kernel's log";
}

impl Status {
    /// Whether the operation was done.
    #[inline(always)]
    pub const fn is_success(self) -> bool {
        matches!(self, Status::Success)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}; {}", self.name(), *self as u16, self.text(), self.remedy())
    }
}

impl core::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_map_back() {
        assert!(Status::ALL.windows(2).all(|pair| (pair[0] as u16) < pair[1] as u16));
        for number in 0..=u16::MAX {
            let known = Status::ALL.iter().find(|s| **s as u16 == number).copied();
            assert_eq!(Status::from_raw(number), known);
        }
    }
}
