//! Any bytes as a packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use verbring_sim::packet::{Header, Ip, MAX_PACKET};

use crate::Bytes;

/// The packet's address and bytes, from any bytes.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let flags = bytes.u8();
    let v4 = |of: u8| IpAddr::V4(Ipv4Addr::new(10, 0, 0, of));
    let v6 = |of: u8| IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, of.into()));
    let (source, destination) = match flags & 3 {
        0 | 1 => (v4(1), v4(2)),
        2 => (v6(1), v6(2)),
        // No such packet comes, and it must do no harm.
        _ => (v6(1), v4(2)),
    };
    let identification = (flags & 4 == 0).then(|| if flags & 8 == 0 { 0 } else { bytes.u16() });
    let ip = Ip { identification, ..Ip::new(source, destination) };
    let any = Ip { identification: None, ..ip };
    let packet = bytes.take(usize::MAX);
    // Whoever cannot see the identification takes at least what the others take.
    assert!(!ip.is_intact(packet) || any.is_intact(packet));
    let Some((header, payload)) = Header::parse(packet) else { return };
    assert!(header.opcode.has_payload() || payload.is_empty());
    let mut again = vec![0; MAX_PACKET.max(packet.len() + 8)];
    let at = header.opcode.header_bytes();
    again[at..at + payload.len()].copy_from_slice(payload);
    let len = header.seal(&mut again, payload.len(), &ip).expect("room for as much as came");
    again.truncate(len);
    assert_eq!(len, packet.len());
    assert_eq!(Header::parse(&again), Some((header, payload)), "what was understood is what is said");
    assert!(ip.is_intact(&again) && any.is_intact(&again));
    let bit = usize::from(flags >> 4) * len / 2;
    again[bit / 8] ^= 1 << (bit % 8);
    // The marks of congestion are not covered.
    assert_eq!(ip.is_intact(&again), bit / 8 == 4 || identification.is_none() && any.is_intact(&again));
}
