//! The system calls of the socket.

use core::mem::{MaybeUninit, size_of_val};
use core::net::{IpAddr, SocketAddr};
use core::ptr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::vec;
use std::vec::Vec;

use rustix::io::Errno;
use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use verbring_sys::DeviceError;

use super::message::{Name, Notes, Told};
use super::socket::Options;

pub(super) fn system(call: &'static str) -> impl Fn(Errno) -> DeviceError {
    move |errno| DeviceError::System { call, errno: errno.raw_os_error() }
}

pub(super) fn open(address: IpAddr, options: Options) -> Result<OwnedFd, DeviceError> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, flags, None).map_err(system("socket"))?;
    // Without connect(2) and with DF set the kernel leaves the identification of IPv4 at 0 (RFC 6864).
    if address.is_ipv4() {
        sockopt::set_ip_mtu_discover(&fd, Ipv4PathMtuDiscovery::DO).map_err(system("setsockopt(IP_MTU_DISCOVER)"))?;
        sockopt::set_ip_recvtos(&fd, true).map_err(system("setsockopt(IP_RECVTOS)"))?;
        set(&fd, libc::SOL_IP, libc::IP_RECVERR).map_err(system("setsockopt(IP_RECVERR)"))?;
    } else {
        sockopt::set_ipv6_v6only(&fd, true).map_err(system("setsockopt(IPV6_V6ONLY)"))?;
        sockopt::set_ipv6_mtu_discover(&fd, Ipv6PathMtuDiscovery::DO)
            .map_err(system("setsockopt(IPV6_MTU_DISCOVER)"))?;
        sockopt::set_ipv6_recvtclass(&fd, true).map_err(system("setsockopt(IPV6_RECVTCLASS)"))?;
        set(&fd, libc::SOL_IPV6, libc::IPV6_RECVERR).map_err(system("setsockopt(IPV6_RECVERR)"))?;
    }
    set(&fd, libc::SOL_SOCKET, libc::SO_RXQ_OVFL).map_err(system("setsockopt(SO_RXQ_OVFL)"))?;
    if options.offload {
        set(&fd, libc::SOL_UDP, libc::UDP_GRO).map_err(system("setsockopt(UDP_GRO)"))?;
    }
    // Past the limits of the system if this process may, else up to them.
    let buffer = options.buffer.min(i32::MAX as usize / 2);
    sockopt::set_socket_recv_buffer_size_force(&fd, buffer)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(&fd, buffer))
        .map_err(system("setsockopt(SO_RCVBUF)"))?;
    sockopt::set_socket_send_buffer_size_force(&fd, buffer)
        .or_else(|_| sockopt::set_socket_send_buffer_size(&fd, buffer))
        .map_err(system("setsockopt(SO_SNDBUF)"))?;
    rustix::net::bind(&fd, &SocketAddr::new(address, options.port)).map_err(|errno| match errno {
        Errno::ADDRINUSE => DeviceError::NameInUse,
        Errno::ADDRNOTAVAIL => DeviceError::NoSuchAddress,
        errno => system("bind")(errno),
    })?;
    Ok(fd)
}

/// The MTU of the interface with an address (getifaddrs(3), netdevice(7)). Of 127.0.0.1 all of 127.0.0.0 is good.
pub(super) fn link_mtu(fd: &OwnedFd, address: IpAddr) -> Option<u32> {
    let mut list = ptr::null_mut();
    // SAFETY: it makes a list, which is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return None;
    }
    let (mut at, mut found) = (list, None);
    while !at.is_null() && found.is_none() {
        // SAFETY: an entry of the list, which is of this function alone.
        let entry = unsafe { &*at };
        let is_loopback = entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0;
        // SAFETY: null, or an address of the list.
        let own = unsafe { ip_of(entry.ifa_addr) };
        if own.is_some_and(|own| own == address || (is_loopback && own.is_loopback() && address.is_loopback())) {
            // SAFETY: numbers.
            let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
            // SAFETY: a name with a zero at its end.
            let name = unsafe { core::ffi::CStr::from_ptr(entry.ifa_name) }.to_bytes();
            for (to, from) in request.ifr_name.iter_mut().zip(name) {
                *to = *from as libc::c_char;
            }
            // SAFETY: SIOCGIFMTU reads the name, and writes one number.
            if unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCGIFMTU, &mut request) } == 0 {
                // SAFETY: that number.
                found = u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok();
            }
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list of getifaddrs.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// The address of a `struct sockaddr` of an interface, if it is one of IP.
///
/// # Safety
/// It is null, or one of the kernel's.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: every one begins with its family, which says what it is.
    unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => Some(IpAddr::from((*address.cast::<libc::sockaddr_in>()).sin_addr.s_addr.to_ne_bytes())),
            libc::AF_INET6 => Some(IpAddr::from((*address.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr)),
            _ => None,
        }
    }
}

pub(super) fn headers(count: usize) -> Vec<libc::mmsghdr> {
    // SAFETY: numbers, and pointers that are null.
    vec![unsafe { MaybeUninit::zeroed().assume_init() }; count]
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Switches an option on that rustix does not have.
fn set(fd: &OwnedFd, level: i32, option: i32) -> Result<(), Errno> {
    let on = 1i32;
    let len = size_of_val(&on) as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `on`.
    let result = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, ptr::from_ref(&on).cast(), len) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// How many messages were taken; an error is that of the first.
///
/// # Safety
/// The headers point to what may be read during the call.
pub(super) unsafe fn send(fd: &OwnedFd, headers: &mut [libc::mmsghdr]) -> Result<usize, Errno> {
    // SAFETY: of the headers by the caller; the kernel writes only their lengths.
    let taken =
        unsafe { libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), headers.len() as u32, libc::MSG_DONTWAIT as _) };
    usize::try_from(taken).map_err(|_| last_errno())
}

/// How many messages arrived.
///
/// # Safety
/// The headers point to what may be written during the call.
pub(super) unsafe fn receive(fd: &OwnedFd, headers: &mut [libc::mmsghdr]) -> Result<usize, Errno> {
    let (headers, count) = (headers.as_mut_ptr(), headers.len() as u32);
    // SAFETY: of the headers by the caller.
    let arrived = unsafe { libc::recvmmsg(fd.as_raw_fd(), headers, count, libc::MSG_DONTWAIT as _, ptr::null_mut()) };
    usize::try_from(arrived).map_err(|_| last_errno())
}

/// One entry of the error queue: to whom the packet went, and what became of it.
pub(super) fn hear(fd: &OwnedFd) -> Result<(Name, Notes), Errno> {
    let (mut name, mut control) = (Name::EMPTY, Told::EMPTY);
    // SAFETY: numbers, and pointers that are null.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_name = ptr::from_mut(&mut name).cast();
    header.msg_namelen = Name::BYTES as u32;
    header.msg_control = ptr::from_mut(&mut control).cast();
    header.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the header points to two values of this function, with their lengths; it has no bytes for the packet.
    if unsafe { libc::recvmsg(fd.as_raw_fd(), &mut header, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) } < 0 {
        return Err(last_errno());
    }
    let notes = Notes::read(control.0.get(..header.msg_controllen).unwrap_or_default());
    Ok((name, notes))
}
