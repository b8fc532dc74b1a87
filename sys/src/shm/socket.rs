//! The socket of a connection: one packet of the control channel, with at most one descriptor, a message.

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
use crate::DeviceError;
use crate::channel::{PACKET_BYTES, Packet};

const BACKLOG: i32 = 64;

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
    /// What is no packet, and what may be answered.
    Garbage(DeviceError, Option<Packet>),
}

pub(super) fn receive(socket: &OwnedFd) -> Result<Received, DeviceError> {
    let mut bytes = [0; PACKET_BYTES + 1];
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
        let answer = Packet::reject_version(bytes.get(..PACKET_BYTES).unwrap_or_default());
        return Ok(Received::Garbage(DeviceError::Protocol("a packet with too many bytes or descriptors"), answer));
    }
    if message.bytes == 0 && fd.is_none() {
        return Ok(Received::Closed);
    }
    let bytes = bytes.get(..message.bytes).unwrap_or_default();
    Ok(match Packet::decode(bytes) {
        Ok(packet) => Received::Packet(packet, fd),
        Err(error) => Received::Garbage(error, Packet::reject_version(bytes)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for bad in ["", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert_eq!(address(bad).err(), Some(DeviceError::BadName), "{bad}");
        }
        assert!(address(&"x".repeat(64)).is_ok());
    }
}
