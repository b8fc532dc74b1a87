//! The control channel of a connection: the handshake, and the messages of two engines, in order. It does no I/O, has no
//! heap, and is the same over every medium: its owner, a device, carries the packets.
//!
//! ```text
//! connect()   hello   ->   accept()
//! Welcome   <- welcome              up: what it sends from now on counts as ready, too
//!             ready   ->   Ready    up
//! both       message <->   Message
//!            bye, reject            the end
//! ```
//! Each side numbers its connections: an epoch, never 0, and not used again soon ([`next_epoch`]). A packet names both,
//! and one with another pair than the connection's is *stale*: it is of an earlier life of one side, and never delivered.
//!
//! A packet has 144 bytes, little-endian:
//!
//! ```text
//! offset  bytes  what
//!      0      4  magic "VRBC"
//!      4      4  version; these two fields, and kind 1, are of every version
//!      8      1  kind: 1 hello, 2 welcome, 3 ready (also: a bare acknowledgement), 4 message, 5 reject, 6 bye
//!      9      1  message: bit 0 a grant comes with it, bit 1 it is writable; reject: the reason
//!     12      4  CRC-32 of the packet with this field zero
//!     16      8  node of the sender; reject: 0
//!     24      4  epoch of the sender; reject: as the sender was addressed
//!     28      4  epoch of the receiver; hello: 0
//!     32      4  message: its number, from 1
//!     36      4  ready, message: the last number that was taken
//!     40      4  hello: the receiver's epoch of the connection that this one replaces; 0: none
//!     48     96  hello, welcome: greeting of the device
//!     48     32  message: grant {registration u32, epoch u32, base u64, length u64, 8 zero}
//!     80     64  message: what the engine said
//! ```
//! The rest is zero. There is one form of each packet: what does not encode to the same bytes again is refused.
//!
//! # How an owner uses it
//! * Each packet that arrives is decoded, and given to the channel that it [`is_for`](Channel::is_for). One that is for
//!   none is a new hello, or of a stranger: see [`answer_stranger`].
//! * After each call [`Channel::poll_transmit`] is called until it has nothing, and [`Channel::poll_timeout`] says when
//!   to call [`Channel::handle_timeout`].
//! * After an error the channel is dead: it says nothing and hears nothing any more.
//! * A side that waits for no answer does not notice that the other one is gone. Whoever wants to know says something.
//!
//! ```
//! use verbring_sys::channel::{Channel, Heard, Medium};
//! let mut a = Channel::connect(10, 1, 0, [0; 96], Medium::Stream, 0);
//! let hello = a.poll_transmit(0).unwrap();
//! let mut b = Channel::accept(&hello, 20, 7, [0; 96], Medium::Stream, 0).unwrap();
//! let welcome = b.poll_transmit(0).unwrap();
//! assert_eq!(a.handle(0, &welcome), Ok(Some(Heard::Welcome { node: 20, greeting: [0; 96] })));
//! let ready = a.poll_transmit(0).unwrap();
//! assert_eq!(b.handle(0, &ready), Ok(Some(Heard::Ready)));
//! assert!(a.is_up() && b.is_up() && a.peer_epoch() == 7);
//! ```

use heapless::Deque;

use crate::{DeviceError, MESSAGE_BYTES, Message};

/// Bytes of a packet.
pub const PACKET_BYTES: usize = 144;
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 96;
/// The version of the packets.
pub const VERSION: u32 = 2;
/// Messages that wait for a peer that does not take them.
pub const QUEUE: usize = 32;
/// How long the other side of a stream may take to answer the handshake.
pub const HANDSHAKE_NS: u64 = 5_000_000_000;

/// What a device says of itself in hello and welcome; the channel does not look into it.
pub type Greeting = [u8; GREETING_BYTES];

const MAGIC: &[u8; 4] = b"VRBC";
const HELLO: u8 = 1;
const CRC: core::ops::Range<usize> = 12..16;
const HEAD: usize = PACKET_BYTES - GREETING_BYTES;
const SAID: usize = PACKET_BYTES - MESSAGE_BYTES;
/// The wait for an answer doubles this often.
const DOUBLINGS: u32 = 6;

/// The epoch that follows: never 0.
pub const fn next_epoch(epoch: u32) -> u32 {
    if epoch == u32::MAX { 1 } else { epoch + 1 }
}

/// What a grant says of the memory that comes with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The registration, as its owner's device numbers it (a verbs device: its rkey).
    pub mr: u32,
    /// The epoch of the registration.
    pub epoch: u32,
    /// Where it begins in its owner's eyes.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Whether it may be written.
    pub writable: bool,
}

/// Why a connection is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Reason {
    /// It speaks another version.
    Version = 1,
    /// It belongs to another user.
    User = 2,
    /// There is no room for it.
    Full = 3,
    /// There is no such connection, or there is none any more.
    Unknown = 4,
}

impl Reason {
    fn from_raw(number: u8) -> Option<Reason> {
        [Reason::Version, Reason::User, Reason::Full, Reason::Unknown].into_iter().find(|r| *r as u8 == number)
    }

    fn cause(self) -> DeviceError {
        DeviceError::Refused(match self {
            Reason::Version => "it speaks another protocol version; use one release on both",
            Reason::User => "it belongs to another user; run both as one user",
            Reason::Full => "it has no room for a connection; configure more there",
            Reason::Unknown => "it does not know the connection any more; connect again",
        })
    }
}

/// One packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The incarnation id of the sender's engine.
    pub node: u64,
    /// The sender's epoch.
    pub epoch: u32,
    /// The receiver's epoch.
    pub to: u32,
    /// What it says.
    pub body: Body,
}

/// What a packet says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // They live for a moment, and there is no heap.
pub enum Body {
    /// The first packet of the side that connects.
    Hello {
        /// The receiver's epoch of the connection that this one replaces; 0: none.
        replaces: u32,
        /// Of the device.
        greeting: Greeting,
    },
    /// The answer to it.
    Welcome {
        /// Of the device.
        greeting: Greeting,
    },
    /// The answer to a welcome; later a bare acknowledgement.
    Ready {
        /// The last message that was taken.
        ack: u32,
    },
    /// What the engine said.
    Message {
        /// Its number: 1, 2, ..
        seq: u32,
        /// The last message that was taken.
        ack: u32,
        /// What.
        message: Message,
        /// What comes with it.
        grant: Option<Grant>,
    },
    /// There is no such connection here, and will be none.
    Reject(Reason),
    /// The sender ends the connection.
    Bye,
}

impl Body {
    fn kind(&self) -> u8 {
        match self {
            Body::Hello { .. } => HELLO,
            Body::Welcome { .. } => 2,
            Body::Ready { .. } => 3,
            Body::Message { .. } => 4,
            Body::Reject(_) => 5,
            Body::Bye => 6,
        }
    }
}

impl Packet {
    /// Its bytes.
    pub fn encode(&self) -> [u8; PACKET_BYTES] {
        let mut bytes = [0; PACKET_BYTES];
        bytes[0..4].copy_from_slice(MAGIC);
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8] = self.body.kind();
        bytes[16..24].copy_from_slice(&self.node.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.to.to_le_bytes());
        match &self.body {
            Body::Hello { replaces, greeting } => {
                bytes[40..44].copy_from_slice(&replaces.to_le_bytes());
                bytes[HEAD..].copy_from_slice(greeting);
            }
            Body::Welcome { greeting } => bytes[HEAD..].copy_from_slice(greeting),
            Body::Ready { ack } => bytes[36..40].copy_from_slice(&ack.to_le_bytes()),
            Body::Message { seq, ack, message, grant } => {
                bytes[32..36].copy_from_slice(&seq.to_le_bytes());
                bytes[36..40].copy_from_slice(&ack.to_le_bytes());
                if let Some(grant) = grant {
                    bytes[9] = 1 | u8::from(grant.writable) << 1;
                    bytes[48..52].copy_from_slice(&grant.mr.to_le_bytes());
                    bytes[52..56].copy_from_slice(&grant.epoch.to_le_bytes());
                    bytes[56..64].copy_from_slice(&grant.base.to_le_bytes());
                    bytes[64..72].copy_from_slice(&grant.len.to_le_bytes());
                }
                bytes[SAID..].copy_from_slice(message);
            }
            Body::Reject(reason) => bytes[9] = *reason as u8,
            Body::Bye => {}
        }
        let crc = crc32fast::hash(&bytes);
        bytes[CRC].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The packet of these bytes, which may be anything.
    pub fn decode(bytes: &[u8]) -> Result<Packet, DeviceError> {
        if bytes.get(..4) != Some(MAGIC) {
            return Err(DeviceError::Protocol("the magic is not ours"));
        }
        if let Some(theirs) = bytes.get(4..8).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            && theirs != VERSION
        {
            return Err(DeviceError::Version { theirs, ours: VERSION });
        }
        let length = DeviceError::Protocol("a packet of the wrong length");
        let bytes: &[u8; PACKET_BYTES] = bytes.try_into().map_err(|_| length)?;
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let mut greeting = [0; GREETING_BYTES];
        greeting.copy_from_slice(&bytes[HEAD..]);
        let body = match bytes[8] {
            HELLO => Body::Hello { replaces: u32_at(40), greeting },
            2 => Body::Welcome { greeting },
            3 => Body::Ready { ack: u32_at(36) },
            4 => {
                let mut message = [0; MESSAGE_BYTES];
                message.copy_from_slice(&bytes[SAID..]);
                let writable = bytes[9] & 2 != 0;
                let grant = Grant { mr: u32_at(48), epoch: u32_at(52), base: u64_at(56), len: u64_at(64), writable };
                let grant = (bytes[9] & 1 != 0).then_some(grant);
                Body::Message { seq: u32_at(32), ack: u32_at(36), message, grant }
            }
            5 => Body::Reject(Reason::from_raw(bytes[9]).ok_or(DeviceError::Protocol("an unknown reason"))?),
            6 => Body::Bye,
            _ => return Err(DeviceError::Protocol("an unknown kind of packet")),
        };
        let packet = Packet { node: u64_at(16), epoch: u32_at(24), to: u32_at(28), body };
        let is_reject = matches!(body, Body::Reject(_));
        if (packet.epoch == 0 && !is_reject) || (packet.to != 0 && bytes[8] == HELLO) {
            return Err(DeviceError::Protocol("an epoch that cannot be"));
        }
        // What was not understood was not said: there is one form of each packet. This compares the checksum, too.
        if packet.encode() != *bytes {
            return Err(DeviceError::Protocol("a wrong checksum, or a reserved field that is not zero"));
        }
        Ok(packet)
    }

    /// What turns the sender of this packet away. None for a reject or bye: those are never answered, so that two sides
    /// do not answer each other for ever.
    pub fn reject(&self, reason: Reason) -> Option<Packet> {
        match self.body {
            Body::Reject(_) | Body::Bye => None,
            _ => Some(Packet { node: 0, epoch: self.to, to: self.epoch, body: Body::Reject(reason) }),
        }
    }

    /// A reject to somebody who has not said anything yet, which only a stream can carry.
    pub const fn reject_unheard(reason: Reason) -> Packet {
        Packet { node: 0, epoch: 0, to: 0, body: Body::Reject(reason) }
    }

    /// What to answer to bytes that are of another version: only to a hello, and never more than came.
    pub fn reject_version(bytes: &[u8]) -> Option<Packet> {
        let is_version = matches!(Packet::decode(bytes), Err(DeviceError::Version { .. }));
        let is_hello = bytes.len() >= PACKET_BYTES && bytes[8] == HELLO;
        (is_version && is_hello).then_some(Packet::reject_unheard(Reason::Version))
    }
}

/// What to answer to a packet that is for no channel of this device and no hello: the other side learns at once that its
/// connection is gone. None if nothing may be said.
pub fn answer_stranger(packet: &Packet) -> Option<Packet> {
    if matches!(packet.body, Body::Hello { .. }) { None } else { packet.reject(Reason::Unknown) }
}

/// What carries the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Nothing is lost, and the order is kept: a Unix socket, TCP. One stream carries one connection.
    Stream,
    /// Packets may be lost, doubled, damaged, and overtake each other: UDP.
    Datagrams {
        /// How long to wait for an answer before it is sent again. It doubles from time to time.
        resend_ns: u64,
        /// How often a packet is sent before the connection is given up: 1 is once.
        tries: u32,
    },
}

/// What the other side said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // As `Body`.
pub enum Heard {
    /// The connection is up, on the side that connected.
    Welcome {
        /// The incarnation id of the other side's engine.
        node: u64,
        /// Of its device.
        greeting: Greeting,
    },
    /// The connection is up, on the side that accepted.
    Ready,
    /// Its engine said something.
    Message {
        /// What.
        message: Message,
        /// What comes with it.
        grant: Option<Grant>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for the welcome.
    Connecting,
    /// Waits for the other side to be ready.
    Accepting,
    Up,
    Dead,
}

/// One connection's control channel.
#[derive(Debug)]
pub struct Channel {
    state: State,
    medium: Medium,
    /// Whether this side connected.
    is_connector: bool,
    node: u64,
    epoch: u32,
    /// Of the other side; 0 until it is known.
    peer_node: u64,
    peer_epoch: u32,
    /// Of the hello.
    replaces: u32,
    greeting: Greeting,
    /// Hello or welcome is to be sent.
    owes_greeting: bool,
    /// Ready is to be sent: the other side does not know yet what was taken.
    owes_ready: bool,
    /// What was sent and not acknowledged, then what was not sent.
    queue: Deque<(Message, Option<Grant>), QUEUE>,
    /// Messages of the queue that were sent, and not given up for lost.
    sent: usize,
    /// The number of the first message of the queue.
    first: u32,
    /// The number of the last message that was taken.
    taken: u32,
    /// When `handle_timeout` has something to do; `u64::MAX`: never.
    timer: u64,
    /// How often it had, without an answer in between.
    tries: u32,
    /// What a handshake that is not answered ends with.
    unanswered: DeviceError,
}

impl Channel {
    /// The side that connects. `replaces` is the *other* side's epoch of the connection that this one replaces, else 0.
    pub fn connect(node: u64, epoch: u32, replaces: u32, greeting: Greeting, medium: Medium, now: u64) -> Channel {
        Channel::new(State::Connecting, node, epoch, replaces, greeting, medium, now)
    }

    /// The side that was connected to. An error if the packet is no hello.
    pub fn accept(
        hello: &Packet,
        node: u64,
        epoch: u32,
        greeting: Greeting,
        medium: Medium,
        now: u64,
    ) -> Result<Channel, DeviceError> {
        let Body::Hello { replaces, .. } = hello.body else {
            return Err(DeviceError::Protocol("its first packet is no hello"));
        };
        let channel = Channel::new(State::Accepting, node, epoch, replaces, greeting, medium, now);
        Ok(Channel { peer_node: hello.node, peer_epoch: hello.epoch, ..channel })
    }

    fn new(
        state: State,
        node: u64,
        epoch: u32,
        replaces: u32,
        greeting: Greeting,
        medium: Medium,
        now: u64,
    ) -> Channel {
        let timer = if medium == Medium::Stream { now.saturating_add(HANDSHAKE_NS) } else { u64::MAX };
        Channel {
            state,
            medium,
            is_connector: state == State::Connecting,
            node,
            epoch,
            peer_node: 0,
            peer_epoch: 0,
            replaces,
            greeting,
            owes_greeting: true,
            owes_ready: false,
            queue: Deque::new(),
            sent: 0,
            first: 1,
            taken: 0,
            timer,
            tries: 0,
            unanswered: DeviceError::TimedOut,
        }
    }

    /// Own epoch.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The other side's epoch; 0 until the welcome.
    pub fn peer_epoch(&self) -> u32 {
        self.peer_epoch
    }

    /// The incarnation id of the other side's engine; 0 until the welcome.
    pub fn peer_node(&self) -> u64 {
        self.peer_node
    }

    /// The epoch, of the side that accepted, that the hello said is replaced; 0: none.
    pub fn replaces(&self) -> u32 {
        self.replaces
    }

    /// Whether messages go through.
    pub fn is_up(&self) -> bool {
        self.state == State::Up
    }

    /// Whether a packet is of this connection. Everything else is stale, or of somebody else.
    pub fn is_for(&self, packet: &Packet) -> bool {
        let is_pair = packet.to == self.epoch && packet.epoch == self.peer_epoch;
        let is_node = packet.node == self.peer_node;
        match packet.body {
            Body::Hello { .. } => !self.is_connector && packet.epoch == self.peer_epoch && is_node,
            Body::Welcome { .. } if self.state == State::Connecting => packet.to == self.epoch,
            Body::Reject(_) => is_pair || (self.is_stream() && self.state == State::Connecting && packet.to == 0),
            _ => is_pair && is_node,
        }
    }

    fn is_stream(&self) -> bool {
        self.medium == Medium::Stream
    }

    /// A packet arrived. A stale one says nothing; over a stream, where there can be none, it is an error.
    ///
    /// A bye, a reject, and what breaks the protocol are errors, and the channel is dead.
    pub fn handle(&mut self, now: u64, packet: &Packet) -> Result<Option<Heard>, DeviceError> {
        if self.state == State::Dead {
            return Ok(None);
        }
        let heard = if self.is_for(packet) {
            self.hear(now, packet)
        } else if self.is_stream() {
            Err(DeviceError::Protocol("a packet of another connection"))
        } else {
            Ok(None)
        };
        self.dead_if(heard)
    }

    /// Bytes arrived that are no packet. Datagrams are damaged at times, so that ends nothing; but if no handshake follows,
    /// the other version is told as the cause.
    pub fn handle_undecodable(&mut self, error: DeviceError) -> Result<(), DeviceError> {
        if self.is_stream() {
            return self.dead_if(Err(error));
        }
        if let DeviceError::Version { .. } = error {
            self.unanswered = error;
        }
        Ok(())
    }

    fn dead_if<T>(&mut self, outcome: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if outcome.is_err() {
            (self.state, self.timer) = (State::Dead, u64::MAX);
        }
        outcome
    }

    fn hear(&mut self, now: u64, packet: &Packet) -> Result<Option<Heard>, DeviceError> {
        match (packet.body, self.state) {
            (Body::Reject(reason), _) => Err(reason.cause()),
            (Body::Bye, _) => Err(DeviceError::Closed),
            (Body::Welcome { greeting }, State::Connecting) => {
                (self.peer_node, self.peer_epoch) = (packet.node, packet.epoch);
                self.came_up();
                self.owes_ready = true;
                Ok(Some(Heard::Welcome { node: packet.node, greeting }))
            }
            // The welcome, or the ready, was lost.
            (Body::Hello { .. }, _) if !self.is_stream() => {
                self.owes_greeting = true;
                Ok(None)
            }
            (Body::Welcome { .. }, State::Up) if self.is_connector && !self.is_stream() => {
                self.owes_ready = true;
                Ok(None)
            }
            (Body::Ready { .. }, State::Accepting) => {
                self.came_up();
                Ok(Some(Heard::Ready))
            }
            // It overtook the ready. One thing at a time: it will come again.
            (Body::Message { .. }, State::Accepting) if !self.is_stream() => {
                self.came_up();
                Ok(Some(Heard::Ready))
            }
            (Body::Ready { ack }, State::Up) if !self.is_stream() => {
                self.acknowledged(now, ack);
                Ok(None)
            }
            (Body::Message { seq, ack, message, grant }, State::Up) => {
                self.acknowledged(now, ack);
                self.owes_ready = !self.is_stream();
                if seq == self.taken.wrapping_add(1) {
                    self.taken = seq;
                    Ok(Some(Heard::Message { message, grant }))
                } else if self.is_stream() {
                    Err(DeviceError::Protocol("a message out of order"))
                } else {
                    // Taken before, or ahead of one that was lost.
                    Ok(None)
                }
            }
            _ => Err(DeviceError::Protocol("a packet that does not fit the state of the connection")),
        }
    }

    fn came_up(&mut self) {
        (self.state, self.timer, self.tries) = (State::Up, u64::MAX, 0);
        self.owes_greeting = false;
    }

    /// The other side took all messages up to this number.
    fn acknowledged(&mut self, now: u64, ack: u32) {
        let count = ack.wrapping_sub(self.first).wrapping_add(1) as usize;
        if count == 0 || count > self.queue.len() {
            return;
        }
        for _ in 0..count {
            self.queue.pop_front();
        }
        self.first = ack.wrapping_add(1);
        self.sent = self.sent.saturating_sub(count);
        self.tries = 0;
        self.timer = if self.sent == 0 { u64::MAX } else { self.next_timer(now) };
    }

    fn next_timer(&self, now: u64) -> u64 {
        match self.medium {
            Medium::Stream => self.timer,
            Medium::Datagrams { resend_ns, .. } => {
                now.saturating_add(resend_ns.saturating_mul(1 << self.tries.min(DOUBLINGS)))
            }
        }
    }

    /// Says something to the other engine. `Full` if [`QUEUE`] messages wait.
    pub fn send(&mut self, message: &Message, grant: Option<Grant>) -> Result<(), DeviceError> {
        if self.state != State::Up {
            return Err(DeviceError::NoSuchLink);
        }
        let full = DeviceError::Full { what: "control messages that the peer has not read", limit: QUEUE as u32 };
        self.queue.push_back((*message, grant)).map_err(|_| full)
    }

    /// The next packet to send, if there is one. Over a stream it has to arrive: its owner keeps it until it is sent.
    pub fn poll_transmit(&mut self, now: u64) -> Option<Packet> {
        if self.state == State::Dead {
            return None;
        }
        if core::mem::take(&mut self.owes_greeting) {
            if self.state != State::Up {
                self.timer = self.next_timer(now);
            }
            let greeting = self.greeting;
            return Some(self.packet(if self.is_connector {
                Body::Hello { replaces: self.replaces, greeting }
            } else {
                Body::Welcome { greeting }
            }));
        }
        if core::mem::take(&mut self.owes_ready) {
            return Some(self.packet(Body::Ready { ack: self.taken }));
        }
        let (message, grant) = *self.queue.iter().nth(self.sent)?;
        let seq = self.first.wrapping_add(self.sent as u32);
        if self.is_stream() {
            self.queue.pop_front();
            self.first = self.first.wrapping_add(1);
        } else {
            self.sent += 1;
            if self.timer == u64::MAX {
                self.timer = self.next_timer(now);
            }
        }
        Some(self.packet(Body::Message { seq, ack: self.taken, message, grant }))
    }

    fn packet(&self, body: Body) -> Packet {
        Packet { node: self.node, epoch: self.epoch, to: self.peer_epoch, body }
    }

    /// When `handle_timeout` is to be called; none if nothing is waited for.
    pub fn poll_timeout(&self) -> Option<u64> {
        (self.timer != u64::MAX).then_some(self.timer)
    }

    /// Sends again what was not answered in time, or gives up. Before its time it does nothing.
    pub fn handle_timeout(&mut self, now: u64) -> Result<(), DeviceError> {
        if now < self.timer || self.timer == u64::MAX {
            return Ok(());
        }
        self.timer = u64::MAX;
        self.tries += 1;
        let is_over = match self.medium {
            Medium::Stream => true,
            Medium::Datagrams { tries, .. } => self.tries >= tries,
        };
        let is_up = self.state == State::Up;
        if is_over {
            return self.dead_if(Err(if is_up { DeviceError::TimedOut } else { self.unanswered }));
        }
        if is_up {
            self.sent = 0;
        } else {
            self.owes_greeting = true;
        }
        Ok(())
    }

    /// What tells the other side that the connection ends here. It is not answered and may be lost.
    pub fn bye(&self) -> Packet {
        self.packet(Body::Bye)
    }
}

#[cfg(test)]
mod tests;
