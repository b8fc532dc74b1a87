//! RoCEv2 packets, byte for byte: IBTA volume 1, chapter 9 (headers, opcodes) and annex A17 (RoCEv2, its invariant CRC).
//!
//! ```text
//! IP | UDP to port 4791 | BTH 12 | extended headers by opcode | payload | 0 to 3 bytes of padding | ICRC 4
//! ```
//! A packet here is what follows the UDP header. Numbers are big-endian but for the ICRC.

use core::net::IpAddr;

use crate::psn;

/// The UDP port of RoCEv2.
pub const UDP_PORT: u16 = 4791;
/// Bytes of the base transport header.
pub const BTH_BYTES: usize = 12;
/// Bytes of the invariant CRC at the end.
pub const ICRC_BYTES: usize = 4;
/// The largest path MTU.
pub const MAX_MTU: usize = 4096;
/// Bytes of the largest packet: all headers that can come together, the largest payload, and the ICRC.
pub const MAX_PACKET: usize = BTH_BYTES + 16 + 4 + MAX_MTU + ICRC_BYTES;
/// The partition that every port is in.
pub const DEFAULT_PKEY: u16 = 0xffff;

macro_rules! opcodes {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal;)+) => {
        /// What a packet of a reliable connection is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Opcode { $($(#[doc = $doc])+ $name = $number,)+ }

        impl Opcode {
            /// Every opcode.
            pub const ALL: &'static [Opcode] = &[$(Opcode::$name,)+];

            /// The opcode of a number.
            pub const fn from_raw(number: u8) -> Option<Opcode> {
                match number {
                    $($number => Some(Opcode::$name),)+
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    /// The first of several packets of a send.
    SendFirst = 0x00;
    /// One in the middle.
    SendMiddle = 0x01;
    /// The last one.
    SendLast = 0x02;
    /// The last one, with immediate.
    SendLastImm = 0x03;
    /// A send in one packet.
    SendOnly = 0x04;
    /// The same with immediate.
    SendOnlyImm = 0x05;
    /// The first of several packets of a write.
    WriteFirst = 0x06;
    /// One in the middle.
    WriteMiddle = 0x07;
    /// The last one.
    WriteLast = 0x08;
    /// The last one, with immediate.
    WriteLastImm = 0x09;
    /// A write in one packet.
    WriteOnly = 0x0a;
    /// The same with immediate.
    WriteOnlyImm = 0x0b;
    /// Asks for memory.
    ReadRequest = 0x0c;
    /// The first of several packets of an answer.
    ReadFirst = 0x0d;
    /// One in the middle.
    ReadMiddle = 0x0e;
    /// The last one.
    ReadLast = 0x0f;
    /// An answer in one packet.
    ReadOnly = 0x10;
    /// Acknowledges, positively or not.
    Acknowledge = 0x11;
    /// Answers an atomic.
    AtomicAcknowledge = 0x12;
    /// Compare and swap.
    CompareSwap = 0x13;
    /// Fetch and add.
    FetchAdd = 0x14;
    /// The last packet of a send that ends a key of the receiver's.
    SendLastInvalidate = 0x16;
    /// The same in one packet.
    SendOnlyInvalidate = 0x17;
}

impl Opcode {
    /// Whether it answers a request.
    pub const fn is_response(self) -> bool {
        matches!(
            self,
            Opcode::ReadFirst
                | Opcode::ReadMiddle
                | Opcode::ReadLast
                | Opcode::ReadOnly
                | Opcode::Acknowledge
                | Opcode::AtomicAcknowledge
        )
    }

    const fn has_reth(self) -> bool {
        matches!(self, Opcode::WriteFirst | Opcode::WriteOnly | Opcode::WriteOnlyImm | Opcode::ReadRequest)
    }

    const fn has_aeth(self) -> bool {
        matches!(
            self,
            Opcode::ReadFirst | Opcode::ReadLast | Opcode::ReadOnly | Opcode::Acknowledge | Opcode::AtomicAcknowledge
        )
    }

    const fn has_atomic(self) -> bool {
        matches!(self, Opcode::CompareSwap | Opcode::FetchAdd)
    }

    /// Whether an immediate travels with it.
    pub const fn has_imm(self) -> bool {
        matches!(self, Opcode::SendLastImm | Opcode::SendOnlyImm | Opcode::WriteLastImm | Opcode::WriteOnlyImm)
    }

    const fn has_ieth(self) -> bool {
        matches!(self, Opcode::SendLastInvalidate | Opcode::SendOnlyInvalidate)
    }

    /// Bytes of all headers.
    pub const fn header_bytes(self) -> usize {
        let mut bytes = BTH_BYTES;
        if self.has_reth() {
            bytes += 16;
        }
        if self.has_aeth() {
            bytes += 4;
        }
        if self.has_atomic() {
            bytes += 28;
        }
        if matches!(self, Opcode::AtomicAcknowledge) {
            bytes += 8;
        }
        if self.has_imm() || self.has_ieth() {
            bytes += 4;
        }
        bytes
    }

    /// Whether a payload may follow the headers.
    pub const fn has_payload(self) -> bool {
        !matches!(
            self,
            Opcode::ReadRequest
                | Opcode::Acknowledge
                | Opcode::AtomicAcknowledge
                | Opcode::CompareSwap
                | Opcode::FetchAdd
        )
    }
}

/// The headers of a packet. What an opcode does not carry is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub opcode: Opcode,
    /// The receiver's user wants to be told (IBV_SEND_SOLICITED).
    pub solicited: bool,
    /// The sender wants an acknowledgement.
    pub ack_request: bool,
    /// The partition.
    pub pkey: u16,
    /// The receiver's queue pair.
    pub dest_qp: u32,
    /// The sequence number.
    pub psn: u32,
    /// RETH and AtomicETH: the address.
    pub address: u64,
    /// RETH and AtomicETH: the key.
    pub rkey: u32,
    /// RETH: the length of the whole transfer.
    pub length: u32,
    /// AtomicETH: what to add or to store. AtomicAckETH: what was there.
    pub value: u64,
    /// AtomicETH: what has to be there.
    pub compare: u64,
    /// AETH.
    pub syndrome: Syndrome,
    /// AETH: messages that the responder has completed.
    pub msn: u32,
    /// The immediate, or (IETH) the key to be ended.
    pub imm: u32,
}

/// The first byte of an AETH (IBTA volume 1, 9.7.5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Syndrome {
    /// All up to the PSN is done; the code of the receives that are posted (31: not told).
    Ack {
        /// See [`credits_of`].
        credits: u8,
    },
    /// No receive is posted: try again after the time of this code.
    RnrNak {
        /// See [`rnr_ns`].
        timer: u8,
    },
    /// Something is wrong with the request of the PSN.
    Nak(Nak),
}

/// What is wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Nak {
    /// Requests before it are missing.
    Sequence = 0,
    /// It makes no sense.
    InvalidRequest = 1,
    /// The key does not allow it.
    RemoteAccess = 2,
    /// The responder failed.
    RemoteOperational = 3,
}

/// The code for "no flow control".
pub const NO_CREDITS: u8 = 31;

impl Syndrome {
    const fn to_raw(self) -> u8 {
        match self {
            Syndrome::Ack { credits } => credits & 31,
            Syndrome::RnrNak { timer } => 0x20 | timer & 31,
            Syndrome::Nak(nak) => 0x60 | nak as u8,
        }
    }

    const fn from_raw(raw: u8) -> Option<Syndrome> {
        Some(match raw >> 5 {
            0 => Syndrome::Ack { credits: raw & 31 },
            1 => Syndrome::RnrNak { timer: raw & 31 },
            3 => Syndrome::Nak(match raw & 31 {
                0 => Nak::Sequence,
                1 => Nak::InvalidRequest,
                2 => Nak::RemoteAccess,
                3 => Nak::RemoteOperational,
                _ => return None,
            }),
            _ => return None,
        })
    }
}

/// Receives by credit code (IBTA volume 1, table 45).
const CREDITS: [u32; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768,
];

/// How many receives a credit code stands for; none if they are not told.
pub fn credits_of(code: u8) -> Option<u32> {
    CREDITS.get(usize::from(code)).copied()
}

/// The largest code that promises no more than `receives`.
pub fn credit_code(receives: u32) -> u8 {
    (CREDITS.partition_point(|c| *c <= receives) - 1) as u8
}

/// In units of 10 us, the times of the RNR timer codes (IBTA volume 1, table 46); code 0 is 655.36 ms.
const RNR_UNITS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// Nanoseconds of an RNR timer code.
pub fn rnr_ns(code: u8) -> u64 {
    u64::from(RNR_UNITS[usize::from(code & 31)]) * 10_000
}

impl Header {
    /// A header with nothing but what every packet has.
    pub const fn new(opcode: Opcode, dest_qp: u32, psn: u32) -> Header {
        Header {
            opcode,
            solicited: false,
            ack_request: false,
            pkey: DEFAULT_PKEY,
            dest_qp,
            psn,
            address: 0,
            rkey: 0,
            length: 0,
            value: 0,
            compare: 0,
            syndrome: Syndrome::Ack { credits: 0 },
            msn: 0,
            imm: 0,
        }
    }

    /// Writes the headers to the front of `packet`, whose payload of `payload` bytes stands behind their place already,
    /// and the padding and the ICRC behind it: the length of the packet. None if it does not fit.
    pub fn seal(&self, packet: &mut [u8], payload: usize, ip: &Ip) -> Option<usize> {
        let pad = payload.wrapping_neg() & 3;
        let headers = self.opcode.header_bytes();
        let len = headers + payload + pad;
        let packet = packet.get_mut(..len + ICRC_BYTES)?;
        let mut put = Put { bytes: packet, at: 0 };
        put.u8(self.opcode as u8);
        put.u8(u8::from(self.solicited) << 7 | (pad as u8) << 4);
        put.u16(self.pkey);
        put.u32(self.dest_qp & psn::MASK);
        put.u32(u32::from(self.ack_request) << 31 | self.psn & psn::MASK);
        if self.opcode.has_reth() {
            put.u64(self.address);
            put.u32(self.rkey);
            put.u32(self.length);
        }
        if self.opcode.has_atomic() {
            put.u64(self.address);
            put.u32(self.rkey);
            put.u64(self.value);
            put.u64(self.compare);
        }
        if self.opcode.has_aeth() {
            put.u32(u32::from(self.syndrome.to_raw()) << 24 | self.msn & psn::MASK);
        }
        if self.opcode == Opcode::AtomicAcknowledge {
            put.u64(self.value);
        }
        if self.opcode.has_imm() || self.opcode.has_ieth() {
            put.u32(self.imm);
        }
        packet.get_mut(headers + payload..len)?.fill(0);
        let crc = ip.icrc(packet.get(..len)?);
        packet.get_mut(len..)?.copy_from_slice(&crc.to_le_bytes());
        Some(len + ICRC_BYTES)
    }

    /// The headers and the payload of a packet. None if it is none of a reliable connection. The ICRC is not looked at.
    pub fn parse(packet: &[u8]) -> Option<(Header, &[u8])> {
        let body = packet.get(..packet.len().checked_sub(ICRC_BYTES)?)?;
        let mut get = Get { bytes: body };
        let opcode = Opcode::from_raw(get.u8()?)?;
        let flags = get.u8()?;
        // The version of the transport header is 0.
        if flags & 0x0f != 0 {
            return None;
        }
        let mut header = Header::new(opcode, 0, 0);
        header.solicited = flags & 0x80 != 0;
        header.pkey = get.u16()?;
        header.dest_qp = get.u32()? & psn::MASK;
        let last = get.u32()?;
        (header.ack_request, header.psn) = (last >> 31 != 0, last & psn::MASK);
        if opcode.has_reth() {
            (header.address, header.rkey, header.length) = (get.u64()?, get.u32()?, get.u32()?);
        }
        if opcode.has_atomic() {
            (header.address, header.rkey) = (get.u64()?, get.u32()?);
            (header.value, header.compare) = (get.u64()?, get.u64()?);
        }
        if opcode.has_aeth() {
            let aeth = get.u32()?;
            (header.syndrome, header.msn) = (Syndrome::from_raw((aeth >> 24) as u8)?, aeth & psn::MASK);
        }
        if opcode == Opcode::AtomicAcknowledge {
            header.value = get.u64()?;
        }
        if opcode.has_imm() || opcode.has_ieth() {
            header.imm = get.u32()?;
        }
        let pad = usize::from(flags >> 4 & 3);
        let payload = get.bytes.get(..get.bytes.len().checked_sub(pad)?)?;
        if (payload.len() + pad) % 4 != 0 || (!opcode.has_payload() && !payload.is_empty()) {
            return None;
        }
        Some((header, payload))
    }
}

struct Put<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Put<'_> {
    #[inline(always)]
    fn put<const N: usize>(&mut self, value: [u8; N]) {
        if let Some(place) = self.bytes.get_mut(self.at..self.at + N) {
            place.copy_from_slice(&value);
        }
        self.at += N;
    }

    fn u8(&mut self, value: u8) {
        self.put([value]);
    }

    fn u16(&mut self, value: u16) {
        self.put(value.to_be_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.put(value.to_be_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(value.to_be_bytes());
    }
}

struct Get<'a> {
    bytes: &'a [u8],
}

impl Get<'_> {
    #[inline(always)]
    fn get<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (value, rest) = self.bytes.split_first_chunk::<N>()?;
        self.bytes = rest;
        Some(*value)
    }

    fn u8(&mut self) -> Option<u8> {
        self.get::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.get().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.get().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.get().map(u64::from_be_bytes)
    }
}

/// What the ICRC covers of the headers below: addresses, the sender's UDP port, and of IPv4 the identification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ip {
    /// Who sends it.
    pub source: IpAddr,
    /// Who is to get it.
    pub destination: IpAddr,
    /// The UDP port that it is sent from.
    pub source_port: u16,
    /// The identification of an IPv4 packet; 0 as Linux sends it from an unconnected socket with IP_PMTUDISC_DO. None: a
    /// receiver that cannot see it.
    pub identification: Option<u16>,
}

/// "Do not fragment", as it stands in the flags of an IPv4 header.
const DONT_FRAGMENT: u16 = 0x4000;
/// Eight bytes of ones stand for the header below (annex A17), then IP, UDP and BTH. An IPv4 header is 20 bytes shorter,
/// and begins later: so everything has its place at compile time.
const PSEUDO_BYTES: usize = 8 + 40 + 8 + BTH_BYTES;
const PSEUDO_V4: usize = 20;
const PSEUDO_UDP: usize = 8 + 40;

impl Ip {
    /// Packets between two addresses, as a socket on the RoCEv2 port sends them.
    pub const fn new(source: IpAddr, destination: IpAddr) -> Ip {
        Ip { source, destination, source_port: UDP_PORT, identification: Some(0) }
    }

    /// What is said below and the packet itself of a whole IP packet to the RoCEv2 port, as captures and raw sockets have
    /// it. None if it is none, or has IP options or extension headers.
    pub fn parse(bytes: &[u8]) -> Option<(Ip, &[u8])> {
        let u16_at = |at: usize| bytes.get(at..at + 2).map(|two| u16::from_be_bytes([two[0], two[1]]));
        let (source, destination, identification, protocol, headers, len): (IpAddr, IpAddr, _, _, _, _) =
            match bytes.first()? {
                0x45 => (
                    bytes.get(12..16)?.first_chunk::<4>().copied()?.into(),
                    bytes.get(16..20)?.first_chunk::<4>().copied()?.into(),
                    u16_at(4)?,
                    *bytes.get(9)?,
                    20,
                    usize::from(u16_at(2)?),
                ),
                first if first >> 4 == 6 => (
                    bytes.get(8..24)?.first_chunk::<16>().copied()?.into(),
                    bytes.get(24..40)?.first_chunk::<16>().copied()?.into(),
                    0,
                    *bytes.get(6)?,
                    40,
                    40 + usize::from(u16_at(4)?),
                ),
                _ => return None,
            };
        let udp = bytes.get(headers..len)?;
        let is_ours = protocol == 17 && u16_at(headers + 2)? == UDP_PORT;
        let ip = Ip { source, destination, source_port: u16_at(headers)?, identification: Some(identification) };
        Some((ip, udp.get(8..usize::from(u16_at(headers + 4)?))?)).filter(|_| is_ours)
    }

    /// The invariant CRC of a packet, which is given without it; 0 if it is too short for one. Fields that change on the
    /// way count as ones.
    pub fn icrc(&self, packet: &[u8]) -> u32 {
        let Some((bth, rest)) = packet.split_first_chunk::<BTH_BYTES>() else { return 0 };
        let udp_len = (8 + packet.len() + ICRC_BYTES) as u16;
        let mut pseudo = [0xff; PSEUDO_BYTES];
        let first = match (self.source, self.destination) {
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut put = Put { bytes: &mut pseudo, at: 8 };
                // Traffic class and flow label are ones, the hop limit too.
                put.u32(0x6fff_ffff);
                put.u16(udp_len);
                put.u16(17 << 8 | 0xff);
                put.put(source.octets());
                put.put(destination.octets());
                0
            }
            (source, destination) => {
                let v4 = |address: IpAddr| match address {
                    IpAddr::V4(v4) => v4.octets(),
                    IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or([0; 4], |v4| v4.octets()),
                };
                let mut put = Put { bytes: &mut pseudo, at: PSEUDO_V4 + 8 };
                put.u16(0x45ff);
                // Longer than any packet is what nobody can send.
                put.u16(udp_len.wrapping_add(20));
                put.u16(self.identification.unwrap_or(0));
                put.u16(DONT_FRAGMENT);
                put.u16(0xff00 | 17);
                put.u16(0xffff);
                put.put(v4(source));
                put.put(v4(destination));
                PSEUDO_V4
            }
        };
        let mut put = Put { bytes: &mut pseudo, at: PSEUDO_UDP };
        put.u16(self.source_port);
        put.u16(UDP_PORT);
        put.u16(udp_len);
        put.u16(0xffff);
        // Congestion marks change on the way.
        let mut bth = *bth;
        bth[4] = 0xff;
        put.put(bth);
        let mut crc = crc32fast::Hasher::new();
        crc.update(pseudo.get(first..).unwrap_or(&pseudo));
        crc.update(rest);
        crc.finalize()
    }

    /// Whether the ICRC at the end of a packet is right. If the identification is not known, any one will do: 16 of the 32
    /// bits of the check are left then.
    pub fn is_intact(&self, packet: &[u8]) -> bool {
        let Some((body, icrc)) = packet.split_last_chunk::<ICRC_BYTES>() else { return false };
        if body.len() < BTH_BYTES {
            return false;
        }
        let difference = self.icrc(body) ^ u32::from_le_bytes(*icrc);
        if difference == 0 {
            return true;
        }
        let is_v4 = !matches!((self.source, self.destination), (IpAddr::V6(_), IpAddr::V6(_)));
        self.identification.is_none() && is_v4 && is_of_identification(difference, body.len())
    }
}

/// Whether two CRCs that differ by `difference` can be of packets that differ in the IPv4 identification alone. A CRC is
/// linear: going back by the bits that follow the identification, the difference must lie in its 16 bits.
#[cold]
fn is_of_identification(difference: u32, packet_bytes: usize) -> bool {
    // Behind the identification stand 14 bytes of the IP header, 8 of UDP, and the packet.
    let mut state = difference;
    for _ in 0..(14 + 8 + packet_bytes) * 8 {
        // One step of the reflected CRC-32, backwards.
        state = if state >> 31 != 0 { (state ^ 0xedb8_8320) << 1 | 1 } else { state << 1 };
    }
    // The two bytes went in low byte first: had they been zero, 16 steps later nothing but their effect is left.
    for _ in 0..16 {
        state = if state >> 31 != 0 { (state ^ 0xedb8_8320) << 1 | 1 } else { state << 1 };
    }
    state >> 16 == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{Ipv4Addr, Ipv6Addr};
    use proptest::prelude::*;
    use std::vec;
    use std::vec::Vec;

    fn ip() -> Ip {
        Ip::new(Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::new(10, 0, 0, 2).into())
    }

    fn any_header() -> impl Strategy<Value = Header> {
        let flags = (any::<bool>(), any::<bool>(), any::<u16>(), any::<u32>(), any::<u32>());
        let rest = (any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>());
        (0..Opcode::ALL.len(), flags, rest, any::<u8>()).prop_map(|(opcode, flags, rest, syndrome)| {
            let opcode = Opcode::ALL[opcode];
            let mut header = Header::new(opcode, flags.3 & psn::MASK, flags.4 & psn::MASK);
            (header.solicited, header.ack_request, header.pkey) = (flags.0, flags.1, flags.2);
            if opcode.has_reth() || opcode.has_atomic() {
                (header.address, header.rkey) = (rest.0, rest.1);
            }
            if opcode.has_reth() {
                header.length = rest.2;
            }
            if opcode.has_atomic() {
                header.compare = rest.4;
            }
            if opcode.has_atomic() || opcode == Opcode::AtomicAcknowledge {
                header.value = rest.3;
            }
            if opcode.has_aeth() {
                header.msn = rest.5 & psn::MASK;
                header.syndrome = Syndrome::from_raw(syndrome).unwrap_or(Syndrome::Nak(Nak::RemoteAccess));
            }
            if opcode.has_imm() || opcode.has_ieth() {
                header.imm = rest.6;
            }
            header
        })
    }

    proptest! {
        #[test]
        fn there_and_back(header in any_header(), payload in prop::collection::vec(any::<u8>(), 0..200), bit in any::<usize>()) {
            let payload = if header.opcode.has_payload() { payload } else { Vec::new() };
            let mut packet = vec![0xaa; MAX_PACKET];
            let at = header.opcode.header_bytes();
            packet[at..at + payload.len()].copy_from_slice(&payload);
            let len = header.seal(&mut packet, payload.len(), &ip()).unwrap();
            packet.truncate(len);
            prop_assert!(ip().is_intact(&packet));
            prop_assert_eq!(Header::parse(&packet), Some((header, &payload[..])));
            let bit = bit % (len * 8);
            packet[bit / 8] ^= 1 << (bit % 8);
            // The marks of congestion are not covered.
            prop_assert_eq!(ip().is_intact(&packet), bit / 8 == 4);
        }

        #[test]
        fn any_bytes_parse_or_are_refused(packet in prop::collection::vec(any::<u8>(), 0..100), opcode in 0u8..0x18) {
            let mut packet = packet;
            if let Some(first) = packet.first_mut() {
                *first = opcode;
            }
            let _ = (Header::parse(&packet), ip().is_intact(&packet));
        }

        /// Whoever cannot see the identification takes any, and nothing else.
        #[test]
        fn unknown_identification(identification in any::<u16>(), payload in 0usize..300, bit in any::<usize>()) {
            let sent = Ip { identification: Some(identification), ..ip() };
            let seen = Ip { identification: None, ..ip() };
            let mut packet = vec![7; MAX_PACKET];
            let len = Header::new(Opcode::SendOnly, 5, 9).seal(&mut packet, payload, &sent).unwrap();
            packet.truncate(len);
            prop_assert!(seen.is_intact(&packet));
            prop_assert_eq!(ip().is_intact(&packet), identification == 0);
            let bit = bit % (len * 8);
            packet[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!seen.is_intact(&packet) || bit / 8 == 4);
        }

        #[test]
        fn credit_codes_promise_no_more_than_there_is(receives in 0u32..100_000) {
            let promised = credits_of(credit_code(receives)).unwrap();
            prop_assert!(promised <= receives && promised >= receives.min(32768) * 2 / 3);
        }
    }

    #[test]
    fn v6_is_covered_too() {
        let ip = Ip::new(Ipv6Addr::LOCALHOST.into(), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).into());
        let mut packet = [0; 100];
        let len = Header::new(Opcode::Acknowledge, 5, 9).seal(&mut packet, 0, &ip).unwrap();
        assert!(ip.is_intact(&packet[..len]));
        let other = Ip { source: Ipv6Addr::UNSPECIFIED.into(), ..ip };
        assert!(!other.is_intact(&packet[..len]));
    }

    /// Shorter than its headers, or longer than any datagram.
    #[test]
    fn no_packet_is_intact_that_cannot_be() {
        for len in [0, 3, 4, 15, 65_510] {
            assert!(!ip().is_intact(&vec![0; len]), "{len}");
            assert!(!Ip { identification: None, ..ip() }.is_intact(&vec![0; len.min(15)]), "{len}");
        }
    }

    #[test]
    fn rnr_times() {
        assert_eq!([rnr_ns(0), rnr_ns(1), rnr_ns(12), rnr_ns(31)], [655_360_000, 10_000, 640_000, 491_520_000]);
    }
}
