//! The control channel: one packet, with at most one descriptor, a message.
//!
//! ```text
//! offset  bytes  what
//!      0      4  magic "VRBC"
//!      4      4  protocol version; the two fields of every version
//!      8      1  kind: 1 hello, 2 reject, 3 message
//!      9      1  message: bit 0 a grant comes with it, bit 1 it is writable; reject: the reason
//!     12      4  grant: registration
//!     16      8  hello: node
//!     24      8  grant: length
//!     32      4  grant: epoch
//!     64     64  message
//! ```
//! Little-endian; the rest is zero, and is checked.

use core::mem::MaybeUninit;
use std::format;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::geteuid;

use super::system;
use crate::lane::VERSION;
use crate::{DeviceError, MESSAGE_BYTES, Message};

const BYTES: usize = 128;
const MAGIC: &[u8; 4] = b"VRBC";
const BACKLOG: i32 = 64;

/// What a grant says of the memory whose descriptor comes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) mr: u32,
    pub(super) epoch: u32,
    pub(super) len: u64,
    pub(super) writable: bool,
}

/// Why a connection is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Reason {
    Version = 1,
    User = 2,
    Full = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packet {
    Hello { node: u64 },
    Reject(Reason),
    Message { message: Message, grant: Option<Grant> },
}

impl Packet {
    pub(super) fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[0..4].copy_from_slice(MAGIC);
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        match self {
            Packet::Hello { node } => {
                bytes[8] = 1;
                bytes[16..24].copy_from_slice(&node.to_le_bytes());
            }
            Packet::Reject(reason) => (bytes[8], bytes[9]) = (2, *reason as u8),
            Packet::Message { message, grant } => {
                bytes[8] = 3;
                if let Some(grant) = grant {
                    bytes[9] = 1 | u8::from(grant.writable) << 1;
                    bytes[12..16].copy_from_slice(&grant.mr.to_le_bytes());
                    bytes[24..32].copy_from_slice(&grant.len.to_le_bytes());
                    bytes[32..36].copy_from_slice(&grant.epoch.to_le_bytes());
                }
                bytes[BYTES - MESSAGE_BYTES..].copy_from_slice(message);
            }
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Packet, DeviceError> {
        let u32_at = |at: usize| bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if bytes.get(..4) != Some(MAGIC) {
            return Err(DeviceError::Protocol("the magic is not ours"));
        }
        let theirs = u32_at(4);
        if bytes.len() < 10 || (theirs == VERSION && bytes.len() != BYTES) {
            return Err(DeviceError::Protocol("a packet of the wrong length"));
        }
        let is_known_reject = bytes[8] == 2;
        if theirs != VERSION && !is_known_reject {
            return Err(DeviceError::Version { theirs, ours: VERSION });
        }
        let packet = match bytes[8] {
            1 => Packet::Hello { node: u64_at(16) },
            2 => Packet::Reject(match bytes[9] {
                1 => Reason::Version,
                2 => Reason::User,
                3 => Reason::Full,
                _ => return Err(DeviceError::Protocol("an unknown reason")),
            }),
            3 => {
                let mut message = [0; MESSAGE_BYTES];
                message.copy_from_slice(&bytes[BYTES - MESSAGE_BYTES..]);
                let (mr, epoch, len) = (u32_at(12), u32_at(32), u64_at(24));
                let grant = (bytes[9] & 1 != 0).then_some(Grant { mr, epoch, len, writable: bytes[9] & 2 != 0 });
                Packet::Message { message, grant }
            }
            _ => return Err(DeviceError::Protocol("an unknown kind of packet")),
        };
        // What was not understood was not said: the canonical form is the only one.
        if theirs == VERSION && packet.encode() != bytes {
            return Err(DeviceError::Protocol("a reserved field is not zero"));
        }
        Ok(packet)
    }
}

/// The address of a name: abstract, so that nothing is left behind when the process dies, and of this user.
fn address(name: &str) -> Result<SocketAddrUnix, DeviceError> {
    let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if name.is_empty() || name.len() > 64 || !name.bytes().all(is_good) {
        return Err(DeviceError::BadName);
    }
    let name = format!("verbring/{}/{name}", geteuid().as_raw());
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| DeviceError::BadName)
}

fn socket() -> Result<OwnedFd, DeviceError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(system("socket"))
}

pub(super) fn listen(name: &str) -> Result<OwnedFd, DeviceError> {
    let socket = socket()?;
    rustix::net::bind(&socket, &address(name)?).map_err(|errno| match errno {
        Errno::ADDRINUSE => DeviceError::NameInUse,
        errno => system("bind")(errno),
    })?;
    rustix::net::listen(&socket, BACKLOG).map_err(system("listen"))?;
    Ok(socket)
}

pub(super) fn connect(name: &str) -> Result<OwnedFd, DeviceError> {
    let socket = socket()?;
    rustix::net::connect(&socket, &address(name)?).map_err(|errno| match errno {
        Errno::CONNREFUSED => DeviceError::NoSuchName,
        Errno::AGAIN => DeviceError::Refused("too many connections wait there; try again"),
        errno => system("connect")(errno),
    })?;
    Ok(socket)
}

pub(super) fn accept(listener: &OwnedFd) -> Result<Option<OwnedFd>, DeviceError> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Ok(Some(socket)),
        Err(Errno::AGAIN) => Ok(None),
        Err(errno) => Err(system("accept")(errno)),
    }
}

/// Both sides check who is at the other end (SO_PEERCRED, unix(7)): abstract names have no permissions.
pub(super) fn check_user(socket: &OwnedFd) -> Result<(), DeviceError> {
    let theirs = sockopt::socket_peercred(socket).map_err(system("getsockopt(SO_PEERCRED)"))?.uid.as_raw();
    let ours = geteuid().as_raw();
    if theirs == ours { Ok(()) } else { Err(DeviceError::WrongUser { theirs, ours }) }
}

/// False when the socket takes no more for now.
pub(super) fn send(socket: &OwnedFd, packet: &Packet, fd: Option<BorrowedFd<'_>>) -> Result<bool, DeviceError> {
    let bytes = packet.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: &[BorrowedFd<'_>] = fd.as_slice();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(DeviceError::Protocol("no room for a descriptor"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::TOOMANYREFS) => Ok(false),
        Err(Errno::PIPE | Errno::CONNRESET) => Ok(true), // the reader finds out why
        Err(errno) => Err(system("sendmsg")(errno)),
    }
}

pub(super) enum Received {
    Nothing,
    Closed,
    Packet(Packet, Option<OwnedFd>),
}

pub(super) fn receive(socket: &OwnedFd) -> Result<Received, DeviceError> {
    let mut bytes = [0; BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut receive = || rustix::net::recvmsg(socket.as_fd(), &mut [IoSliceMut::new(&mut bytes)], &mut control, flags);
    // The other side closed with our packets unread: said once, and what it sent before can still be read (unix(7)).
    let received = receive().or_else(|errno| if errno == Errno::CONNRESET { receive() } else { Err(errno) });
    let message = match received {
        Ok(message) => message,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::Closed),
        Err(errno) => return Err(system("recvmsg")(errno)),
    };
    // Descriptors are closed with whatever drops them here.
    let mut fds = control
        .drain()
        .filter_map(|m| if let RecvAncillaryMessage::ScmRights(fds) = m { Some(fds) } else { None })
        .flatten();
    let (fd, second) = (fds.next(), fds.next());
    if second.is_some() || message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(DeviceError::Protocol("a packet with too many bytes or descriptors"));
    }
    if message.bytes == 0 && fd.is_none() {
        return Ok(Received::Closed);
    }
    let bytes = bytes.get(..message.bytes).unwrap_or_default();
    Ok(Received::Packet(Packet::decode(bytes)?, fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..140)) {
            if let Ok(packet) = Packet::decode(&bytes) {
                prop_assert!(matches!(packet, Packet::Reject(_)) || packet.encode()[..] == bytes[..]);
            }
        }

        #[test]
        fn one_flipped_bit_is_another_packet_or_none(bit in 0usize..8 * BYTES, kind in 0usize..3) {
            let grant = Grant { mr: 3, epoch: 9, len: 4096, writable: true };
            let packet = match kind {
                0 => Packet::Hello { node: 77 },
                1 => Packet::Message { message: [5; 64], grant: None },
                _ => Packet::Message { message: [5; 64], grant: Some(grant) },
            };
            let mut bytes = packet.encode();
            prop_assert_eq!(Packet::decode(&bytes), Ok(packet));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(Packet::decode(&bytes), Ok(packet));
        }
    }

    #[test]
    fn names() {
        for bad in ["", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert_eq!(address(bad).err(), Some(DeviceError::BadName), "{bad}");
        }
        assert!(address(&"x".repeat(64)).is_ok());
    }
}
