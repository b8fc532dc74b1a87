//! Any control packets against the control channel: two honest sides over a network that does what the fuzzer likes, or
//! one side against a peer that says anything.

use std::collections::VecDeque;

use verbring_sys::channel::{Body, Channel, GREETING_BYTES, Grant, Heard, Medium, PACKET_BYTES, Packet, QUEUE, Reason};
use verbring_sys::{DeviceError, MESSAGE_BYTES};

use crate::Bytes;

const MEDIUM: Medium = Medium::Datagrams { resend_ns: 1000, tries: 30 };
/// A greeting, the messages of a full outbox, and an acknowledgement.
const MOST_AT_ONCE: usize = QUEUE + 2;

/// The target.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    if bytes.u8() & 1 == 0 { honest(&mut bytes) } else { hostile(&mut bytes) }
}

fn greeting(of: u8) -> [u8; GREETING_BYTES] {
    [of; GREETING_BYTES]
}

/// Packets, as many as there are, which are not without end.
fn drain(channel: &mut Channel, now: u64) -> Vec<Packet> {
    let mut packets = Vec::new();
    while let Some(packet) = channel.poll_transmit(now) {
        assert_eq!(Packet::decode(&packet.encode()), Ok(packet));
        packets.push(packet);
        assert!(packets.len() <= MOST_AT_ONCE, "it talks without end");
    }
    packets
}

/// One side of two honest ones.
struct Side {
    channel: Option<Channel>,
    /// Messages said by it, and heard from the other.
    said: u32,
    heard: u32,
    ups: u32,
    lost: Option<DeviceError>,
}

const NEW: Side = Side { channel: None, said: 0, heard: 0, ups: 0, lost: None };

/// Losses, doubles, delays, damage, and packets of connections of before: every message is heard once and in its order,
/// and nothing but silence ends the connection.
fn honest(bytes: &mut Bytes<'_>) {
    let epochs = [11, 22];
    let mut now = 0;
    let mut sides = [NEW, NEW];
    sides[0].channel = Some(Channel::connect(1, epochs[0], 0, greeting(1), MEDIUM, now));
    let mut wire: VecDeque<(usize, [u8; PACKET_BYTES])> = VecDeque::new();
    while !bytes.is_empty() {
        match bytes.u8() % 8 {
            0 | 1 => {
                let side = bytes.below(2);
                // A jammed carrier takes some of them.
                for _ in 0..1 + bytes.below(4) {
                    let Some(packet) = sides[side].channel.as_mut().and_then(|c| c.poll_transmit(now)) else { break };
                    wire.push_back((1 - side, packet.encode()));
                }
                // So many are kept; of too many the oldest are lost.
                while wire.len() > 200 {
                    wire.pop_front();
                }
            }
            2 | 3 => {
                let which = usize::from(bytes.u8());
                let fate = bytes.u8();
                if wire.is_empty() {
                    continue;
                }
                let at = if fate & 1 == 0 { 0 } else { which % wire.len() };
                let Some((to, mut packet)) = wire.remove(at) else { continue };
                match fate >> 4 {
                    0 => continue,
                    1 | 2 => wire.push_back((to, packet)),
                    3 => packet[which % PACKET_BYTES] ^= 1 << (fate >> 1 & 7),
                    _ => {}
                }
                deliver(&mut sides, to, now, &packet, epochs[1]);
            }
            4 => {
                let side = bytes.below(2);
                let Side { channel: Some(channel), ups: 1, said, lost: None, .. } = &mut sides[side] else { continue };
                // More would end it, and rightly.
                if channel.send(&message(*said + 1), None).is_ok() {
                    *said += 1;
                }
            }
            5 => {
                now += u64::from(bytes.u16());
                for side in &mut sides {
                    if let (Some(channel), None) = (&mut side.channel, side.lost) {
                        side.lost = channel.handle_timeout(now).err();
                        assert!(matches!(side.lost, None | Some(DeviceError::TimedOut)));
                    }
                }
            }
            6 => {
                // Of another connection of the same two, or of nobody.
                let to = bytes.below(2);
                let [node, from, at] = bytes.array();
                let (from, right) = (u32::from(from), epochs[1 - to]);
                let packet = Packet {
                    node: u64::from(node & 3),
                    epoch: from,
                    to: epochs[to].wrapping_sub(u32::from(from == right || from == 0)),
                    body: body(bytes, u32::from(at)),
                };
                // The hello of a side is one of its own connections, and the first of them is answered.
                if !matches!(packet.body, Body::Hello { .. }) && from != right {
                    stray(&mut sides, to, now, &packet);
                }
            }
            _ => {
                let side = bytes.below(2);
                if let Some(channel) = &mut sides[side].channel {
                    for packet in drain(channel, now) {
                        wire.push_back((1 - side, packet.encode()));
                    }
                }
            }
        }
    }
}

fn message(number: u32) -> [u8; MESSAGE_BYTES] {
    let mut message = [0xab; MESSAGE_BYTES];
    message[..4].copy_from_slice(&number.to_le_bytes());
    message
}

fn deliver(sides: &mut [Side; 2], to: usize, now: u64, bytes: &[u8; PACKET_BYTES], epoch: u32) {
    let Ok(packet) = Packet::decode(bytes) else { return };
    let said_by_other = sides[1 - to].said;
    let side = &mut sides[to];
    if side.lost.is_some() {
        return;
    }
    let Some(channel) = &mut side.channel else {
        if matches!(packet.body, Body::Hello { .. }) {
            side.channel = Channel::accept(&packet, 2, epoch, greeting(2), MEDIUM, now).ok();
        }
        return;
    };
    match channel.handle(now, &packet) {
        Ok(None) => {}
        Ok(Some(Heard::Welcome { greeting: theirs, .. })) => {
            assert_eq!((to, theirs), (0, greeting(2)));
            side.ups += 1;
        }
        Ok(Some(Heard::Ready)) => side.ups += 1,
        Ok(Some(Heard::Message { message: heard, grant })) => {
            side.heard += 1;
            assert_eq!((heard, grant), (message(side.heard), None));
            assert!(side.heard <= said_by_other);
        }
        Err(end) => panic!("an honest peer ended the connection: {end:?} by {packet:?}"),
    }
    assert!(side.ups <= 1);
}

fn stray(sides: &mut [Side; 2], to: usize, now: u64, packet: &Packet) {
    if let Side { channel: Some(channel), lost: None, .. } = &mut sides[to] {
        // Who calls does not know the other's epoch yet: the first answer is it.
        if channel.peer_epoch() != 0 {
            assert_eq!(channel.handle(now, packet), Ok(None), "a packet of another connection: {packet:?}");
        }
    }
}

fn body(bytes: &mut Bytes<'_>, ack: u32) -> Body {
    match bytes.below(7) {
        0 => Body::Hello { replaces: bytes.u32(), greeting: greeting(bytes.u8()) },
        1 => Body::Welcome { greeting: greeting(bytes.u8()) },
        2 => Body::Ready { ack },
        3 | 4 => {
            let number = bytes.u8().into();
            let grant = (bytes.u8() & 1 != 0).then(|| Grant {
                mr: bytes.u32(),
                epoch: bytes.u32(),
                base: bytes.u64(),
                len: bytes.u64(),
                writable: bytes.u8() & 1 != 0,
            });
            Body::Message { seq: number, ack, message: message(number), grant }
        }
        5 => Body::Reject([Reason::Version, Reason::User, Reason::Full, Reason::Unknown][bytes.below(4)]),
        _ => Body::Bye,
    }
}

/// A peer that says anything. What it says of another connection is not heard, messages come in their order, and however
/// much it says, there is a limit to what is answered.
fn hostile(bytes: &mut Bytes<'_>) {
    let flags = bytes.u8();
    let medium = if flags & 1 == 0 { MEDIUM } else { Medium::Stream };
    let mut now = 0;
    let mut channel = if flags & 2 == 0 {
        Channel::connect(1, 11, 0, greeting(1), medium, now)
    } else {
        let hello = Packet { node: 2, epoch: 22, to: 0, body: Body::Hello { replaces: 0, greeting: greeting(2) } };
        Channel::accept(&hello, 1, 11, greeting(1), medium, now).expect("a good hello")
    };
    let (mut heard, mut ups) = (0u32, 0);
    while !bytes.is_empty() {
        let packet = match bytes.u8() % 8 {
            0 => {
                let any = bytes.array::<PACKET_BYTES>();
                let Ok(packet) = Packet::decode(&any) else { continue };
                packet
            }
            1 => {
                let len = usize::from(bytes.u8());
                let any = bytes.take(len);
                let Ok(packet) = Packet::decode(any) else { continue };
                packet
            }
            2 => {
                now += u64::from(bytes.u16()) << (bytes.u8() & 15);
                if channel.handle_timeout(now).is_err() {
                    return;
                }
                continue;
            }
            3 => {
                drain(&mut channel, now);
                continue;
            }
            4 => {
                // More would end it.
                if channel.send(&message(1), None).is_err() {
                    return;
                }
                continue;
            }
            _ => {
                let (from, to, node) =
                    (22u32.wrapping_add(bytes.near()), 11u32.wrapping_add(bytes.near()), 2 + u64::from(bytes.near()));
                let count = u32::from(bytes.u8());
                let ack = if count < 128 { count } else { bytes.u32() };
                Packet { node, epoch: from, to, body: body(bytes, ack) }
            }
        };
        let known = (channel.peer_node(), channel.peer_epoch());
        let is_ours = packet.to == channel.epoch() && (known.1 == 0 || known == (packet.node, packet.epoch));
        match channel.handle(now, &packet) {
            // The connection is over.
            Err(_) => return,
            Ok(None) => {}
            Ok(Some(Heard::Message { message: said, .. })) => {
                heard += 1;
                let Body::Message { seq: number, message, .. } = packet.body else {
                    panic!("a message out of nothing")
                };
                assert!(is_ours && number == heard && message == said && ups == 1, "{packet:?}");
            }
            Ok(Some(_)) => {
                ups += 1;
                assert!(is_ours && ups == 1 && channel.is_up(), "{packet:?}");
            }
        }
        drain(&mut channel, now);
    }
}
