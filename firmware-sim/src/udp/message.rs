//! What stands beside the bytes of a UDP message: its address, and its control messages (cmsg(3)).
//!
//! Read and written as bytes: the layout is the kernel's, what it wrote is input, and no pointer is followed.

use core::mem::size_of;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// `struct sockaddr_in` or `struct sockaddr_in6`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Name([u8; Name::BYTES]);

impl Name {
    pub(super) const BYTES: usize = size_of::<libc::sockaddr_in6>();
    pub(super) const EMPTY: Name = Name([0; Name::BYTES]);

    /// The name, and how many of its bytes count.
    pub(super) fn new(to: IpAddr, port: u16) -> (Name, u32) {
        let mut name = Name::EMPTY;
        name.0[2..4].copy_from_slice(&port.to_be_bytes());
        match to {
            IpAddr::V4(to) => {
                name.0[0..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                name.0[4..8].copy_from_slice(&to.octets());
                (name, size_of::<libc::sockaddr_in>() as u32)
            }
            IpAddr::V6(to) => {
                name.0[0..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                name.0[8..24].copy_from_slice(&to.octets());
                (name, Name::BYTES as u32)
            }
        }
    }

    pub(super) fn get(&self) -> Option<SocketAddr> {
        let port = u16::from_be_bytes([self.0[2], self.0[3]]);
        let address: IpAddr = match i32::from(u16::from_ne_bytes([self.0[0], self.0[1]])) {
            libc::AF_INET => Ipv4Addr::from(*self.0[4..].first_chunk::<4>()?).into(),
            libc::AF_INET6 => Ipv6Addr::from(*self.0[8..].first_chunk::<16>()?).into(),
            _ => return None,
        };
        Some(SocketAddr::new(address, port))
    }
}

const WORD: usize = size_of::<usize>();
/// `struct cmsghdr`: its length as a word, level, type.
const HEADER: usize = size_of::<libc::cmsghdr>();

/// Control messages one behind the other, each aligned to a word.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Control<const BYTES: usize>(pub(super) [u8; BYTES]);

/// Room for UDP_SEGMENT.
pub(super) type Sent = Control<{ HEADER + WORD }>;
/// Room for UDP_GRO, the type of service, and SO_RXQ_OVFL.
pub(super) type Arrived = Control<{ 3 * (HEADER + WORD) }>;
/// Room for all of `Arrived`, and for one IP_RECVERR: `struct sock_extended_err` and an address.
pub(super) type Told = Control<{ 4 * HEADER + 3 * WORD + 16 + 32 }>;

impl<const BYTES: usize> Control<BYTES> {
    pub(super) const EMPTY: Self = Control([0; BYTES]);
}

impl Sent {
    /// UDP_SEGMENT (udp(7)): a message is cut into packets of so many bytes each.
    pub(super) fn segment(bytes: u16) -> Sent {
        let mut control = Sent::EMPTY;
        control.0[..WORD].copy_from_slice(&(HEADER + 2).to_ne_bytes());
        control.0[WORD..WORD + 4].copy_from_slice(&libc::SOL_UDP.to_ne_bytes());
        control.0[WORD + 4..HEADER].copy_from_slice(&libc::UDP_SEGMENT.to_ne_bytes());
        control.0[HEADER..HEADER + 2].copy_from_slice(&bytes.to_ne_bytes());
        control
    }
}

/// What the kernel says of one message or error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Notes {
    /// The message is several packets of so many bytes, the last may be shorter.
    pub(super) segment: Option<u32>,
    pub(super) tos: u8,
    /// Packets that found the receive buffer full since the socket was made; wraps.
    pub(super) overflowed: Option<u32>,
    pub(super) error: Option<Error>,
}

/// The first half of `struct sock_extended_err` (ip(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Error {
    pub(super) errno: u32,
    /// The kernel refused a packet of ours, as opposed to an ICMP message of another host.
    pub(super) is_local: bool,
    /// EMSGSIZE: the MTU of the path.
    pub(super) info: u32,
}

impl Notes {
    pub(super) fn read(mut control: &[u8]) -> Notes {
        let mut notes = Notes::default();
        let int = |bytes: &[u8]| bytes.first_chunk().map(|b| u32::from_ne_bytes(*b));
        while let Some(length) = control.first_chunk().map(|b| usize::from_ne_bytes(*b)) {
            let (Some(level), Some(kind)) = (control.get(WORD..).and_then(int), control.get(WORD + 4..).and_then(int))
            else {
                break;
            };
            let Some(data) = control.get(HEADER..length) else { break };
            match (level as i32, kind as i32) {
                (libc::SOL_UDP, libc::UDP_GRO) => notes.segment = int(data),
                (libc::SOL_IP, libc::IP_TOS) => notes.tos = data.first().copied().unwrap_or(0),
                (libc::SOL_IPV6, libc::IPV6_TCLASS) => notes.tos = int(data).unwrap_or(0) as u8,
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => notes.overflowed = int(data),
                (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR) => {
                    if let (Some(errno), Some(origin), Some(info)) =
                        (int(data), data.get(4), data.get(8..).and_then(int))
                    {
                        let is_local = *origin == libc::SO_EE_ORIGIN_LOCAL;
                        notes.error = Some(Error { errno, is_local, info });
                    }
                }
                _ => {}
            }
            control = control.get(length.next_multiple_of(WORD)..).unwrap_or_default();
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn cmsg(level: i32, kind: i32, data: &[u8]) -> Vec<u8> {
        let mut bytes = (HEADER + data.len()).to_ne_bytes().to_vec();
        bytes.extend(level.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(WORD), 0);
        bytes
    }

    #[test]
    fn names_come_back() {
        for address in ["10.1.2.3", "fd00::7:1", "::1", "255.255.255.255"] {
            let address: IpAddr = address.parse().unwrap();
            let (name, len) = Name::new(address, 4791);
            assert_eq!(name.get(), Some(SocketAddr::new(address, 4791)));
            assert_eq!(len, if address.is_ipv4() { 16 } else { 28 });
        }
        assert_eq!(Name::EMPTY.get(), None);
    }

    #[test]
    fn notes_of_every_kind() {
        let mut control = cmsg(libc::SOL_IP, libc::IP_TOS, &[3]);
        control.extend(cmsg(1, 99, b"unknown"));
        control.extend(cmsg(libc::SOL_UDP, libc::UDP_GRO, &4160u32.to_ne_bytes()));
        control.extend(cmsg(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, &9u32.to_ne_bytes()));
        let mut error = [0; 32];
        error[..4].copy_from_slice(&90u32.to_ne_bytes());
        error[4] = libc::SO_EE_ORIGIN_LOCAL;
        error[8..12].copy_from_slice(&1500u32.to_ne_bytes());
        control.extend(cmsg(libc::SOL_IPV6, libc::IPV6_RECVERR, &error));
        let error = Some(Error { errno: 90, is_local: true, info: 1500 });
        let all = Notes { segment: Some(4160), tos: 3, overflowed: Some(9), error };
        assert_eq!(Notes::read(&control), all);
        // Cut anywhere, or with any length: never a panic.
        for cut in 0..control.len() {
            Notes::read(&control[..cut]);
        }
        for length in [0, 1, HEADER - 1, HEADER, usize::MAX, usize::MAX - WORD + 1] {
            control[..WORD].copy_from_slice(&length.to_ne_bytes());
            Notes::read(&control);
        }
    }
}
