//! The control channel of a connection: the handshake, and messages both ways, as a state machine without a socket or a
//! clock. Every device uses it: over a Unix socket, over TCP, over datagrams that get lost.
//!
//! ```text
//! offset  bytes  what
//!      0      4  magic "VRBC"
//!      4      4  protocol version; the two fields of every version
//!      8      1  kind: 1 hello, 2 welcome, 3 ready, 4 message, 5 reject, 6 bye
//!      9      1  message: bit 0 a grant comes with it, bit 1 it is writable; reject: the reason
//!     12      4  CRC-32 of the packet, with this field zero
//!     16      8  node of the sender
//!     24      4  the sender's epoch of the connection
//!     28      4  the receiver's; hello: 0
//!     32      4  message: its number, from 1 on
//!     36      4  the number of the last message that came
//!     40      4  hello: the receiver's epoch of the connection that this one replaces; 0: none
//!     48     96  hello and welcome: what the device has to say
//!     48     24  message: grant: key 4, epoch 4, base 8, length 8
//!     80     64  message: what the engine has to say
//! ```
//! Little-endian; the rest is zero, and is checked. The epochs say which connection a packet is of: what is of another one
//! is not heard.

use heapless::Deque;

use crate::{DeviceError, MESSAGE_BYTES, Message};

/// Bytes of a packet.
pub const PACKET_BYTES: usize = 144;
/// Bytes that devices tell each other in the handshake.
pub const GREETING_BYTES: usize = 96;
/// The version of the protocol.
pub const VERSION: u32 = 2;
/// Messages that wait for the peer; one more ends the connection.
pub const OUTBOX: usize = 32;
/// How long the other side may take to answer the handshake.
pub const HANDSHAKE_NS: u64 = 5_000_000_000;

const MAGIC: &[u8; 4] = b"VRBC";

/// What a grant says of the memory that comes with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The device's name for it.
    pub key: u32,
    /// Of the registration.
    pub epoch: u32,
    /// Its address, where the device uses one.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Whether it may be written.
    pub writable: bool,
}

/// Why a connection is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// Another version of the protocol.
    Version = 1,
    /// Another user.
    User = 2,
    /// No room for another connection.
    Full = 3,
    /// There is no such connection.
    Unknown = 4,
}

impl Reason {
    /// What the side that was turned away is told.
    pub fn cause(self, theirs: u32) -> DeviceError {
        match self {
            Reason::Version => DeviceError::Version { theirs, ours: VERSION },
            Reason::User => DeviceError::Refused("it is of another user"),
            Reason::Full => DeviceError::Refused("it has no room for another connection"),
            Reason::Unknown => DeviceError::Closed,
        }
    }
}

/// What a packet says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // copied a few times a connection
pub enum Body {
    /// Somebody wants to connect.
    Hello {
        /// The receiver's epoch of the connection that this one replaces; 0: none.
        replaces: u32,
        /// What its device says.
        greeting: [u8; GREETING_BYTES],
    },
    /// The answer.
    Welcome {
        /// What its device says.
        greeting: [u8; GREETING_BYTES],
    },
    /// The welcome was heard. Also a bare acknowledgement.
    Ready,
    /// What an engine says to the other.
    Message {
        /// From 1 on.
        number: u32,
        /// What.
        message: Message,
        /// Memory that comes with it.
        grant: Option<Grant>,
    },
    /// No.
    Reject(Reason),
    /// The connection is over.
    Bye,
}

/// A packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The sender's engine.
    pub node: u64,
    /// The sender's epoch.
    pub from: u32,
    /// The receiver's epoch; 0: not known.
    pub to: u32,
    /// The last message that the sender heard.
    pub heard: u32,
    /// What it says.
    pub body: Body,
    /// The sender's version.
    pub version: u32,
}

impl Packet {
    /// A packet of this version.
    pub const fn new(node: u64, from: u32, to: u32, heard: u32, body: Body) -> Packet {
        Packet { node, from, to, heard, body, version: VERSION }
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; PACKET_BYTES] {
        let mut bytes = [0; PACKET_BYTES];
        bytes[0..4].copy_from_slice(MAGIC);
        bytes[4..8].copy_from_slice(&self.version.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.node.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.from.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.to.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.heard.to_le_bytes());
        match &self.body {
            Body::Hello { replaces, greeting } => {
                bytes[8] = 1;
                bytes[40..44].copy_from_slice(&replaces.to_le_bytes());
                bytes[48..144].copy_from_slice(greeting);
            }
            Body::Welcome { greeting } => {
                bytes[8] = 2;
                bytes[48..144].copy_from_slice(greeting);
            }
            Body::Ready => bytes[8] = 3,
            Body::Message { number, message, grant } => {
                bytes[8] = 4;
                bytes[32..36].copy_from_slice(&number.to_le_bytes());
                if let Some(grant) = grant {
                    bytes[9] = 1 | u8::from(grant.writable) << 1;
                    bytes[48..52].copy_from_slice(&grant.key.to_le_bytes());
                    bytes[52..56].copy_from_slice(&grant.epoch.to_le_bytes());
                    bytes[56..64].copy_from_slice(&grant.base.to_le_bytes());
                    bytes[64..72].copy_from_slice(&grant.len.to_le_bytes());
                }
                bytes[PACKET_BYTES - MESSAGE_BYTES..].copy_from_slice(message);
            }
            Body::Reject(reason) => (bytes[8], bytes[9]) = (5, *reason as u8),
            Body::Bye => bytes[8] = 6,
        }
        let crc = crc32fast::hash(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The packet of these bytes.
    pub fn decode(bytes: &[u8]) -> Result<Packet, DeviceError> {
        let u32_at = |at: usize| bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if bytes.get(..4) != Some(MAGIC) {
            return Err(DeviceError::Protocol("the magic is not ours"));
        }
        let version = u32_at(4);
        let kind = bytes.get(8).copied().unwrap_or(0);
        // Why one is turned away is understood whatever the version.
        if version != VERSION && kind != 5 {
            return Err(DeviceError::Version { theirs: version, ours: VERSION });
        }
        if bytes.len() != PACKET_BYTES {
            return Err(DeviceError::Protocol("a packet of the wrong length"));
        }
        let mut greeting = [0; GREETING_BYTES];
        greeting.copy_from_slice(&bytes[48..144]);
        let body = match kind {
            1 => Body::Hello { replaces: u32_at(40), greeting },
            2 => Body::Welcome { greeting },
            3 => Body::Ready,
            4 => {
                let mut message = [0; MESSAGE_BYTES];
                message.copy_from_slice(&bytes[PACKET_BYTES - MESSAGE_BYTES..]);
                let (key, epoch, base, len) = (u32_at(48), u32_at(52), u64_at(56), u64_at(64));
                let writable = bytes[9] & 2 != 0;
                let grant = (bytes[9] & 1 != 0).then_some(Grant { key, epoch, base, len, writable });
                Body::Message { number: u32_at(32), message, grant }
            }
            5 => Body::Reject(match bytes[9] {
                1 => Reason::Version,
                2 => Reason::User,
                3 => Reason::Full,
                4 => Reason::Unknown,
                _ => return Err(DeviceError::Protocol("an unknown reason")),
            }),
            6 => Body::Bye,
            _ => return Err(DeviceError::Protocol("an unknown kind of packet")),
        };
        let packet = Packet { node: u64_at(16), from: u32_at(24), to: u32_at(28), heard: u32_at(36), body, version };
        // What was not understood was not said: the canonical form is the only one. The CRC is part of it.
        if version == VERSION && packet.encode() != bytes {
            return Err(DeviceError::Protocol("a packet that was damaged, or is not canonical"));
        }
        Ok(packet)
    }

    /// What to answer a packet that no connection is for: nothing to an answer, or two sides would go on for ever.
    pub fn stranger(&self, node: u64) -> Option<Packet> {
        let is_answer = matches!(self.body, Body::Reject(_) | Body::Bye);
        (!is_answer).then(|| Packet::new(node, self.to, self.from, 0, Body::Reject(Reason::Unknown)))
    }
}

/// Whether what is sent can be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A stream, or whatever keeps packets in order and loses none.
    Stream,
    /// Packets are lost, doubled, damaged, and come in any order.
    Datagrams {
        /// What is not answered in this time is sent again, then in twice the time, up to sixteen times it.
        resend_ns: u64,
        /// After so many tries the connection is given up.
        tries: u32,
    },
}

/// What the other side said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // as above
pub enum Heard {
    /// It answered our hello: the connection is up.
    Welcome {
        /// What its device says.
        greeting: [u8; GREETING_BYTES],
    },
    /// It heard our welcome: the connection is up.
    Ready,
    /// Its engine says something.
    Message {
        /// What.
        message: Message,
        /// Memory that comes with it.
        grant: Option<Grant>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// We said hello, and wait for the welcome.
    Calling,
    /// We said welcome, and wait for anything.
    Answering,
    Up,
}

/// One side of a connection.
#[derive(Debug)]
pub struct Channel {
    state: State,
    medium: Medium,
    node: u64,
    peer: u64,
    epoch: u32,
    peer_epoch: u32,
    replaces: u32,
    greeting: [u8; GREETING_BYTES],
    /// Messages that were not acknowledged (or, on a stream, not sent): the first has the number `first`.
    outbox: Deque<(Message, Option<Grant>), OUTBOX>,
    first: u32,
    /// Of those, how many were ever sent, and how many of them since what was lost is sent again.
    said: u32,
    sent: u32,
    /// The last message heard.
    heard: u32,
    must_greet: bool,
    must_answer: bool,
    since: u64,
    /// When what was sent is sent again.
    resend_at: u64,
    tries: u32,
}

impl Channel {
    /// The side that asks for a connection.
    pub fn connect(
        node: u64,
        epoch: u32,
        replaces: u32,
        greeting: [u8; GREETING_BYTES],
        medium: Medium,
        now: u64,
    ) -> Channel {
        Channel {
            state: State::Calling,
            medium,
            node,
            peer: 0,
            epoch,
            peer_epoch: 0,
            replaces,
            greeting,
            outbox: Deque::new(),
            first: 1,
            said: 0,
            sent: 0,
            heard: 0,
            must_greet: true,
            must_answer: false,
            since: now,
            resend_at: u64::MAX,
            tries: 0,
        }
    }

    /// The side that was asked, by `hello`.
    pub fn accept(
        hello: &Packet,
        node: u64,
        epoch: u32,
        greeting: [u8; GREETING_BYTES],
        medium: Medium,
        now: u64,
    ) -> Channel {
        let of_it = Channel::connect(node, epoch, 0, greeting, medium, now);
        Channel { state: State::Answering, peer: hello.node, peer_epoch: hello.from, ..of_it }
    }

    /// Our epoch.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Theirs; 0 if it is not known yet.
    pub fn peer_epoch(&self) -> u32 {
        self.peer_epoch
    }

    /// The incarnation id of the peer's engine; 0 if it is not known yet.
    pub fn peer(&self) -> u64 {
        self.peer
    }

    /// Whether messages go through.
    pub fn is_up(&self) -> bool {
        self.state == State::Up
    }

    /// Whether a hello is the one that this side answered: it comes again if the welcome was lost.
    pub fn is_answer_to(&self, hello: &Packet) -> bool {
        self.peer == hello.node && self.peer_epoch == hello.from && hello.from != 0
    }

    fn is_lossy(&self) -> bool {
        matches!(self.medium, Medium::Datagrams { .. })
    }

    /// A packet came. Its end of the connection is an error.
    pub fn handle(&mut self, now: u64, packet: &Packet) -> Result<Option<Heard>, DeviceError> {
        if let (Body::Hello { .. }, true) = (&packet.body, self.is_answer_to(packet)) {
            // Our welcome was lost, or is late.
            self.must_greet |= self.is_lossy();
            return Ok(None);
        }
        let is_first_answer = self.state == State::Calling && packet.to == self.epoch;
        let is_ours = packet.to == self.epoch && packet.from == self.peer_epoch && packet.node == self.peer;
        if !is_first_answer && !is_ours {
            // Of another connection: it is not heard.
            return if self.is_lossy() {
                Ok(None)
            } else {
                Err(DeviceError::Protocol("a packet of another connection"))
            };
        }
        match packet.body {
            Body::Reject(reason) => return Err(reason.cause(packet.version)),
            Body::Bye => return Err(DeviceError::Closed),
            Body::Hello { .. } => {
                return if self.is_lossy() { Ok(None) } else { Err(DeviceError::Protocol("a second hello")) };
            }
            _ => {}
        }
        if let State::Calling = self.state {
            // Anything else overtook the welcome, and comes again.
            let Body::Welcome { greeting } = packet.body else { return Ok(None) };
            if packet.from == 0 {
                return Err(DeviceError::Protocol("a welcome without an epoch"));
            }
            (self.state, self.peer, self.peer_epoch) = (State::Up, packet.node, packet.from);
            (self.must_greet, self.must_answer) = (false, true);
            self.calm(now);
            return Ok(Some(Heard::Welcome { greeting }));
        }
        let was_answering = self.state == State::Answering;
        if was_answering {
            if let Body::Welcome { .. } = packet.body {
                return Err(DeviceError::Protocol("a welcome from who said hello"));
            }
            self.state = State::Up;
            self.must_greet = false;
            self.calm(now);
        }
        self.acknowledged(now, packet.heard)?;
        match packet.body {
            // Ours was lost.
            Body::Welcome { .. } => self.must_answer = true,
            Body::Message { number, message, grant } => {
                self.must_answer |= self.is_lossy();
                if number == self.heard.wrapping_add(1) {
                    if was_answering {
                        // One thing at a time: it comes again, now that the connection is up. A stream says ready first.
                        return if self.is_lossy() {
                            Ok(Some(Heard::Ready))
                        } else {
                            Err(DeviceError::Protocol("a message before ready"))
                        };
                    }
                    self.heard = number;
                    return Ok(Some(Heard::Message { message, grant }));
                }
                if !self.is_lossy() {
                    return Err(DeviceError::Protocol("a message out of its order"));
                }
            }
            _ => {}
        }
        Ok(was_answering.then_some(Heard::Ready))
    }

    /// The peer heard everything up to a number.
    fn acknowledged(&mut self, now: u64, heard: u32) -> Result<(), DeviceError> {
        if !self.is_lossy() {
            return Ok(());
        }
        let count = heard.wrapping_sub(self.first).wrapping_add(1);
        // An old one; or of what was never said.
        if count > self.said {
            let is_old = count > u32::MAX / 2;
            return if is_old { Ok(()) } else { Err(DeviceError::Protocol("it heard what was not said")) };
        }
        for _ in 0..count {
            self.outbox.pop_front();
        }
        self.first = self.first.wrapping_add(count);
        self.said -= count;
        // It was about to be sent again, and the answer came after all.
        self.sent = self.sent.saturating_sub(count);
        if count != 0 {
            self.calm(now);
        }
        Ok(())
    }

    /// There was progress.
    fn calm(&mut self, now: u64) {
        self.tries = 0;
        self.resend_at = u64::MAX;
        if self.sent != 0 {
            self.arm(now);
        }
    }

    fn arm(&mut self, now: u64) {
        if let Medium::Datagrams { resend_ns, .. } = self.medium {
            self.resend_at = now.saturating_add(resend_ns << self.tries.min(4));
        }
    }

    /// Queues a message.
    pub fn send(&mut self, message: &Message, grant: Option<Grant>) -> Result<(), DeviceError> {
        let full = DeviceError::Full { what: "control messages that the peer has not read", limit: OUTBOX as u32 };
        self.outbox.push_back((*message, grant)).map_err(|_| full)
    }

    fn packet(&self, body: Body) -> Packet {
        Packet::new(self.node, self.epoch, self.peer_epoch, self.heard, body)
    }

    /// The next packet to be sent. On a stream it counts as sent for good.
    pub fn poll_transmit(&mut self, now: u64) -> Option<Packet> {
        if core::mem::take(&mut self.must_greet) {
            self.arm(now);
            let greeting = self.greeting;
            return Some(match self.state {
                State::Calling => self.packet(Body::Hello { replaces: self.replaces, greeting }),
                _ => self.packet(Body::Welcome { greeting }),
            });
        }
        if self.state != State::Up {
            return None;
        }
        if (self.sent as usize) < self.outbox.len() {
            let (message, grant) = *self.outbox.iter().nth(self.sent as usize)?;
            let number = self.first.wrapping_add(self.sent);
            if self.is_lossy() {
                if self.sent == 0 {
                    self.arm(now);
                }
                self.sent += 1;
                self.said = self.said.max(self.sent);
                self.must_answer = false;
            } else {
                if core::mem::take(&mut self.must_answer) {
                    return Some(self.packet(Body::Ready));
                }
                self.outbox.pop_front();
                self.first = self.first.wrapping_add(1);
            }
            return Some(self.packet(Body::Message { number, message, grant }));
        }
        core::mem::take(&mut self.must_answer).then(|| self.packet(Body::Ready))
    }

    /// When `handle_timeout` has something to do; `u64::MAX` if nothing is waited for.
    pub fn poll_timeout(&self) -> u64 {
        let handshake = if self.is_up() { u64::MAX } else { self.since.saturating_add(HANDSHAKE_NS) };
        self.resend_at.min(handshake)
    }

    /// Does what is due. An error is the end of the connection.
    pub fn handle_timeout(&mut self, now: u64) -> Result<(), DeviceError> {
        if !self.is_up() && now.saturating_sub(self.since) >= HANDSHAKE_NS {
            return Err(DeviceError::TimedOut);
        }
        let Medium::Datagrams { tries, .. } = self.medium else { return Ok(()) };
        if now < self.resend_at {
            return Ok(());
        }
        self.tries += 1;
        if self.tries > tries {
            return Err(DeviceError::TimedOut);
        }
        self.resend_at = u64::MAX;
        if self.is_up() {
            self.sent = 0;
        } else {
            self.must_greet = true;
        }
        Ok(())
    }

    /// What to say when it is over.
    pub fn bye(&self) -> Packet {
        self.packet(Body::Bye)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    const LOSSY: Medium = Medium::Datagrams { resend_ns: 1000, tries: 20 };

    fn greeting(of: u8) -> [u8; GREETING_BYTES] {
        [of; GREETING_BYTES]
    }

    fn any_body() -> impl Strategy<Value = Body> {
        let grant = (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>(), any::<bool>())
            .prop_map(|(key, epoch, base, len, writable)| Grant { key, epoch, base, len, writable });
        prop_oneof![
            (any::<u32>(), any::<u8>()).prop_map(|(replaces, of)| Body::Hello { replaces, greeting: greeting(of) }),
            any::<u8>().prop_map(|of| Body::Welcome { greeting: greeting(of) }),
            Just(Body::Ready),
            (any::<u32>(), any::<u8>(), prop::option::of(grant)).prop_map(|(number, of, grant)| Body::Message {
                number,
                message: [of; MESSAGE_BYTES],
                grant
            }),
            Just(Body::Reject(Reason::Full)),
            Just(Body::Bye),
        ]
    }

    proptest! {
        #[test]
        fn there_and_back(body in any_body(), node in any::<u64>(), epochs in any::<[u32; 3]>(), bit in 0..PACKET_BYTES * 8) {
            let packet = Packet::new(node, epochs[0], epochs[1], epochs[2], body);
            let mut bytes = packet.encode();
            prop_assert_eq!(Packet::decode(&bytes), Ok(packet));
            bytes[bit / 8] ^= 1 << (bit % 8);
            // A damaged version may be another's reject.
            prop_assert_ne!(Packet::decode(&bytes), Ok(packet));
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..160), ours in any::<bool>()) {
            let mut bytes = bytes;
            if ours && bytes.len() >= 8 {
                bytes[..4].copy_from_slice(MAGIC);
                bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
            }
            let _ = Packet::decode(&bytes);
        }

        /// Over a network that loses, doubles, damages and reorders: both come up, and every message is heard once, in
        /// its order.
        #[test]
        fn lossy(draws in prop::collection::vec(0u8..16, 400..500), count in 1u32..30) {
            let mut draws = draws.into_iter();
            let mut a = Channel::connect(1, 11, 0, greeting(1), LOSSY, 0);
            let mut b: Option<Channel> = None;
            let mut wire: Vec<(bool, [u8; PACKET_BYTES])> = Vec::new();
            let (mut heard_a, mut heard_b) = (Vec::new(), Vec::new());
            let (mut up_a, mut up_b, mut pushed) = (0, 0, 0);
            for now in (0..200_000u64).step_by(100) {
                if pushed < count && up_a == 1 && up_b == 1 {
                    pushed += 1;
                    a.send(&[pushed as u8; MESSAGE_BYTES], None).unwrap();
                    b.as_mut().unwrap().send(&[pushed as u8 + 100; MESSAGE_BYTES], None).unwrap();
                }
                a.handle_timeout(now).unwrap();
                let mut out: Vec<_> = std::iter::from_fn(|| a.poll_transmit(now)).map(|p| (true, p.encode())).collect();
                if let Some(b) = &mut b {
                    b.handle_timeout(now).unwrap();
                    out.extend(std::iter::from_fn(|| b.poll_transmit(now)).map(|p| (false, p.encode())));
                }
                for (to_b, mut bytes) in out {
                    match draws.next().unwrap_or(15) {
                        0..=2 => continue,
                        3 => wire.push((to_b, bytes)),
                        4 => bytes[now as usize % PACKET_BYTES] ^= 4,
                        5 => {
                            wire.insert(0, (to_b, bytes));
                            continue;
                        }
                        _ => {}
                    }
                    wire.push((to_b, bytes));
                }
                for (to_b, bytes) in std::mem::take(&mut wire) {
                    let Ok(packet) = Packet::decode(&bytes) else { continue };
                    let heard = if to_b {
                        if b.is_none() && matches!(packet.body, Body::Hello { .. }) {
                            b = Some(Channel::accept(&packet, 2, 22, greeting(2), LOSSY, now));
                            continue;
                        }
                        match &mut b {
                            Some(b) => b.handle(now, &packet),
                            None => continue,
                        }
                    } else {
                        a.handle(now, &packet)
                    };
                    match heard.unwrap() {
                        Some(Heard::Welcome { greeting: theirs }) => {
                            prop_assert_eq!(theirs, greeting(2));
                            up_a += 1;
                        }
                        Some(Heard::Ready) => up_b += 1,
                        Some(Heard::Message { message, .. }) => if to_b { &mut heard_b } else { &mut heard_a }.push(message[0]),
                        None => {}
                    }
                }
            }
            prop_assert_eq!((up_a, up_b), (1, 1));
            prop_assert_eq!(heard_b, (1..=count as u8).collect::<Vec<_>>());
            prop_assert_eq!(heard_a, (101..=count as u8 + 100).collect::<Vec<_>>());
        }
    }

    fn pair(medium: Medium) -> (Channel, Channel) {
        let mut a = Channel::connect(1, 11, 0, greeting(1), medium, 0);
        let hello = a.poll_transmit(0).unwrap();
        let mut b = Channel::accept(&hello, 2, 22, greeting(2), medium, 0);
        let welcome = b.poll_transmit(0).unwrap();
        assert_eq!(a.handle(0, &welcome), Ok(Some(Heard::Welcome { greeting: greeting(2) })));
        let ready = a.poll_transmit(0).unwrap();
        assert_eq!(b.handle(0, &ready), Ok(Some(Heard::Ready)));
        (a, b)
    }

    #[test]
    fn a_stream_needs_three_packets_and_no_clock() {
        let (mut a, mut b) = pair(Medium::Stream);
        assert!(a.is_up() && b.is_up() && a.poll_timeout() == u64::MAX && a.poll_transmit(0).is_none());
        b.send(&[7; MESSAGE_BYTES], None).unwrap();
        let message = b.poll_transmit(0).unwrap();
        assert!(matches!(a.handle(0, &message), Ok(Some(Heard::Message { .. }))));
        assert!(a.handle(0, &message).is_err(), "a stream does not repeat itself");
        assert_eq!(b.handle(0, &a.bye()), Err(DeviceError::Closed));
    }

    /// What is of another connection is not heard, whatever it says.
    #[test]
    fn a_stale_epoch_is_not_heard() {
        let (mut a, mut b) = pair(LOSSY);
        b.send(&[7; MESSAGE_BYTES], None).unwrap();
        let good = b.poll_transmit(0).unwrap();
        let strays = [
            Packet { from: 21, ..good },
            Packet { to: 10, ..good },
            Packet { to: 0, ..good },
            Packet { node: 3, ..good },
            Packet { to: 10, ..b.bye() },
        ];
        for stale in strays {
            assert_eq!(a.handle(0, &stale), Ok(None));
        }
        assert!(matches!(a.handle(0, &good), Ok(Some(Heard::Message { .. }))));
        assert_eq!(a.handle(0, &good), Ok(None), "nor is it heard twice");
    }

    /// What is to be sent again, and is not yet because the carrier is jammed, may be acknowledged meanwhile.
    #[test]
    fn a_late_acknowledgement() {
        let (mut a, mut b) = pair(LOSSY);
        for number in 1..=3 {
            a.send(&[number; MESSAGE_BYTES], None).unwrap();
            let message = a.poll_transmit(0).unwrap();
            assert!(matches!(b.handle(0, &message), Ok(Some(Heard::Message { .. }))));
        }
        let heard = b.poll_transmit(0).unwrap();
        a.handle_timeout(a.poll_timeout()).unwrap();
        a.poll_transmit(2000).unwrap();
        assert_eq!(a.handle(2000, &heard), Ok(None));
        assert_eq!((a.poll_transmit(3000), a.poll_timeout()), (None, u64::MAX));
        let unsaid = Packet { heard: 4, ..heard };
        assert!(a.handle(3000, &unsaid).is_err(), "that was never said");
    }

    #[test]
    fn silence_is_an_end() {
        let mut a = Channel::connect(1, 11, 0, greeting(1), Medium::Stream, 5);
        assert_eq!(a.handle_timeout(HANDSHAKE_NS), Ok(()));
        assert_eq!(a.handle_timeout(HANDSHAKE_NS + 5), Err(DeviceError::TimedOut));
        let (mut a, _b) = pair(LOSSY);
        a.send(&[0; MESSAGE_BYTES], None).unwrap();
        let mut sent = 0;
        let mut now = 0;
        let end = loop {
            sent += std::iter::from_fn(|| a.poll_transmit(now)).count();
            now = a.poll_timeout();
            if let Err(end) = a.handle_timeout(now) {
                break end;
            }
        };
        assert_eq!((end, sent), (DeviceError::TimedOut, 21));
    }

    #[test]
    fn strangers_are_told_once() {
        let bye = Packet::new(1, 2, 3, 0, Body::Bye);
        assert_eq!(bye.stranger(9), None);
        let ready = Packet::new(1, 2, 3, 0, Body::Ready);
        let answer = ready.stranger(9).unwrap();
        assert_eq!(
            (answer.body, answer.from, answer.to, answer.stranger(1)),
            (Body::Reject(Reason::Unknown), 3, 2, None)
        );
    }
}
