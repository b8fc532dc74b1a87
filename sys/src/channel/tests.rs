use std::collections::{BTreeMap, VecDeque};
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

const STREAM: Medium = Medium::Stream;
const DATAGRAMS: Medium = Medium::Datagrams { resend_ns: 1000, tries: 60 };

fn grant() -> Grant {
    Grant { mr: 3, epoch: 9, base: 1 << 40, len: 4096, writable: true }
}

fn every_body() -> [Body; 8] {
    [
        Body::Hello { replaces: 6, greeting: [1; GREETING_BYTES] },
        Body::Welcome { greeting: [2; GREETING_BYTES] },
        Body::Ready { ack: 77 },
        Body::Message { seq: 5, ack: 4, message: [5; MESSAGE_BYTES], grant: None },
        Body::Message { seq: 5, ack: 4, message: [5; MESSAGE_BYTES], grant: Some(grant()) },
        Body::Message {
            seq: 5,
            ack: 4,
            message: [0; MESSAGE_BYTES],
            grant: Some(Grant { writable: false, ..grant() }),
        },
        Body::Reject(Reason::Full),
        Body::Bye,
    ]
}

fn packet(body: Body) -> Packet {
    let to = if matches!(body, Body::Hello { .. }) { 0 } else { 8 };
    Packet { node: 0x0102_0304_0506_0708, epoch: 7, to, body }
}

fn with_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() >= CRC.end {
        bytes[CRC].fill(0);
        let crc = crc32fast::hash(&bytes);
        bytes[CRC].copy_from_slice(&crc.to_le_bytes());
    }
    bytes
}

#[test]
fn bytes_are_as_documented() {
    let bytes = packet(Body::Message { seq: 5, ack: 4, message: [9; MESSAGE_BYTES], grant: Some(grant()) }).encode();
    assert_eq!(bytes[..12], *b"VRBC\x02\0\0\0\x04\x03\0\0");
    assert_eq!(bytes[12..16], crc32fast::hash(&[&bytes[..12], &[0; 4], &bytes[16..]].concat()).to_le_bytes());
    assert_eq!(bytes[16..40], [8, 7, 6, 5, 4, 3, 2, 1, 7, 0, 0, 0, 8, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 0]);
    assert_eq!(bytes[48..60], [3, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!((bytes[61], bytes[65], &bytes[72..80], &bytes[80..]), (1, 0x10, &[0; 8][..], &[9; 64][..]));
    assert_eq!((next_epoch(1), next_epoch(u32::MAX)), (2, 1));
}

#[test]
fn what_each_field_cannot_be() {
    for body in every_body() {
        assert_eq!(Packet::decode(&packet(body).encode()), Ok(packet(body)));
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = packet(body).encode().to_vec();
            change(&mut bytes);
            Packet::decode(&with_checksum(bytes)).unwrap_err()
        };
        let is_protocol = |error| matches!(error, DeviceError::Protocol(_));
        assert!(is_protocol(refused(&|b| b[0] = b'v')));
        assert!(is_protocol(refused(&|b| b.truncate(143))) && is_protocol(refused(&|b| b.push(0))));
        assert!(is_protocol(refused(&|b| b[8] = 7)) && is_protocol(refused(&|b| b[8] = 0)));
        assert!(is_protocol(refused(&|b| b[9] |= 0x80)) && is_protocol(refused(&|b| b[44] = 1)));
        assert_eq!(refused(&|b| b[4] = 3), DeviceError::Version { theirs: 3, ours: 2 });
        match body {
            Body::Hello { .. } => assert!(is_protocol(refused(&|b| b[28] = 1))),
            Body::Reject(_) => assert!(is_protocol(refused(&|b| b[9] = 5))),
            _ => assert!(is_protocol(refused(&|b| b[24] = 0))),
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_decode_or_are_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..150),
        kind in 0u8..8,
        zero_from in 9usize..150,
        is_close in any::<bool>(),
    ) {
        let mut bytes = bytes;
        if is_close {
            bytes.resize(PACKET_BYTES, 0);
            bytes[..8].copy_from_slice(b"VRBC\x02\0\0\0");
            bytes[8] = kind;
            bytes[9] &= 3;
            bytes[40.min(zero_from)..48].fill(0);
            bytes[zero_from.min(PACKET_BYTES)..].fill(0);
            bytes = with_checksum(bytes);
        }
        if let Ok(packet) = Packet::decode(&bytes) {
            prop_assert_eq!(&packet.encode()[..], &bytes[..]);
        }
        // Nobody who is no hello is told of versions.
        prop_assert!(Packet::reject_version(&bytes).is_none() || bytes[8] == HELLO);
    }

    #[test]
    fn a_flipped_bit_is_no_packet(bit in 0..8 * PACKET_BYTES, which in 0usize..8) {
        let mut bytes = packet(every_body()[which]).encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Packet::decode(&bytes).is_err());
    }
}

#[test]
fn who_is_answered_what() {
    for body in every_body() {
        let packet = packet(body);
        let is_last_word = matches!(body, Body::Reject(_) | Body::Bye);
        let is_hello = matches!(body, Body::Hello { .. });
        assert_eq!(packet.reject(Reason::Full).is_none(), is_last_word);
        let answer = answer_stranger(&packet);
        assert_eq!(answer.is_none(), is_last_word || is_hello);
        if let Some(answer) = answer {
            assert_eq!((answer.epoch, answer.to, answer.body), (8, 7, Body::Reject(Reason::Unknown)));
            assert_eq!((Packet::decode(&answer.encode()), answer_stranger(&answer)), (Ok(answer), None));
        }
        let mut newer = packet.encode().to_vec();
        newer[4] = 3;
        assert_eq!(Packet::reject_version(&newer).is_some(), is_hello);
        assert_eq!(Packet::reject_version(&newer[..100]), None);
        assert_eq!(Packet::reject_version(&packet.encode()), None);
    }
}

/// Two channels that are up, with no packet under way.
fn pair(medium: Medium) -> (Channel, Channel) {
    let mut a = Channel::connect(10, 1, 0, [1; GREETING_BYTES], medium, 0);
    let hello = a.poll_transmit(0).unwrap();
    let mut b = Channel::accept(&hello, 20, 2, [2; GREETING_BYTES], medium, 0).unwrap();
    let welcome = b.poll_transmit(0).unwrap();
    a.handle(0, &welcome).unwrap();
    let ready = a.poll_transmit(0).unwrap();
    assert_eq!(b.handle(0, &ready), Ok(Some(Heard::Ready)));
    assert!(a.poll_timeout().is_none() && b.poll_timeout().is_none());
    (a, b)
}

fn message(number: u32) -> Message {
    let mut message = [0; MESSAGE_BYTES];
    message[..4].copy_from_slice(&number.to_le_bytes());
    message
}

#[test]
fn a_handshake_that_nobody_answers() {
    let mut a = Channel::connect(10, 1, 0, [0; GREETING_BYTES], STREAM, 5);
    assert!(a.poll_transmit(5).is_some() && a.poll_transmit(5).is_none());
    assert_eq!((a.poll_timeout(), a.handle_timeout(5)), (Some(5 + HANDSHAKE_NS), Ok(())));
    assert_eq!(a.handle_timeout(5 + HANDSHAKE_NS), Err(DeviceError::TimedOut));
    // Datagrams are sent again, with growing pauses, as often as was said.
    for error in [DeviceError::TimedOut, DeviceError::Version { theirs: 9, ours: VERSION }] {
        let medium = Medium::Datagrams { resend_ns: 1000, tries: 10 };
        let mut a = Channel::connect(10, 1, 0, [0; GREETING_BYTES], medium, 0);
        let (mut now, mut pauses) = (0, Vec::new());
        let end = loop {
            assert!(a.poll_transmit(now).is_some() && a.poll_transmit(now).is_none());
            assert_eq!(a.handle_undecodable(error), Ok(()));
            let next = a.poll_timeout().unwrap();
            pauses.push((next - now) / 1000);
            now = next;
            if let Err(end) = a.handle_timeout(now) {
                break end;
            }
        };
        assert_eq!((end, pauses), (error, vec![1, 2, 4, 8, 16, 32, 64, 64, 64, 64]));
        assert!(a.poll_transmit(now).is_none() && a.poll_timeout().is_none());
    }
}

#[test]
fn the_end_of_a_channel() {
    for medium in [STREAM, DATAGRAMS] {
        let (mut a, mut b) = pair(medium);
        b.send(&message(1), None).unwrap();
        let bye = a.bye();
        assert_eq!((b.handle(1, &bye), b.is_up()), (Err(DeviceError::Closed), false));
        assert!(b.poll_transmit(1).is_none() && b.send(&message(1), None).is_err());
        assert_eq!(b.handle(1, &bye), Ok(None), "once");
        // A side that forgot the connection answers to the first thing it hears.
        a.send(&message(1), None).unwrap();
        let said = a.poll_transmit(1).unwrap();
        let answer = answer_stranger(&said).unwrap();
        assert!(matches!(a.handle(1, &answer), Err(DeviceError::Refused(_))));
        // Turned away, before and after the hello was read.
        let mut c = Channel::connect(10, 5, 0, [0; GREETING_BYTES], medium, 0);
        let hello = c.poll_transmit(0).unwrap();
        let refused = c.handle(0, &hello.reject(Reason::Full).unwrap());
        assert!(matches!(refused, Err(DeviceError::Refused(_))));
        let mut c = Channel::connect(10, 5, 0, [0; GREETING_BYTES], medium, 0);
        assert_eq!(c.handle(0, &Packet::reject_unheard(Reason::User)).is_err(), medium == STREAM);
        assert_eq!(c.handle_undecodable(DeviceError::Protocol("x")).is_err(), medium == STREAM);
    }
}

#[test]
fn what_does_not_fit_the_state() {
    let (a, _) = pair(STREAM);
    let said = a.packet(Body::Message { seq: 1, ack: 0, message: message(1), grant: None });
    assert!(Channel::accept(&said, 20, 2, [0; GREETING_BYTES], STREAM, 0).is_err());
    let again = a.packet(Body::Ready { ack: 0 });
    let ahead = a.packet(Body::Message { seq: 2, ack: 0, message: message(1), grant: None });
    let hello = Packet { to: 0, ..a.packet(Body::Hello { replaces: 0, greeting: [0; GREETING_BYTES] }) };
    let welcome = a.packet(Body::Welcome { greeting: [0; GREETING_BYTES] });
    for odd in [again, ahead, hello, welcome] {
        let (_, mut b) = pair(STREAM);
        assert!(matches!(b.handle(0, &odd), Err(DeviceError::Protocol(_))), "{odd:?}");
    }
    // A message is no ready where nothing can have overtaken it.
    let mut a = Channel::connect(10, 1, 0, [0; GREETING_BYTES], STREAM, 0);
    let mut b = Channel::accept(&a.poll_transmit(0).unwrap(), 20, 2, [0; GREETING_BYTES], STREAM, 0).unwrap();
    assert!(matches!(b.handle(0, &said), Err(DeviceError::Protocol(_))));
}

#[test]
fn a_full_queue() {
    for medium in [STREAM, DATAGRAMS] {
        let (mut a, mut b) = pair(medium);
        for number in 0..QUEUE as u32 {
            a.send(&message(number), Some(grant())).unwrap();
        }
        assert!(matches!(a.send(&message(99), None), Err(DeviceError::Full { limit: 32, .. })));
        let mut count = 0;
        while let Some(said) = a.poll_transmit(0) {
            let heard = b.handle(0, &said).unwrap();
            assert_eq!(heard, Some(Heard::Message { message: message(count), grant: Some(grant()) }));
            count += 1;
        }
        assert_eq!(count, QUEUE as u32);
        // Over a stream what was given out is gone; datagrams are kept until they are acknowledged, by one packet.
        assert_eq!(a.send(&message(99), None).is_ok(), medium == STREAM);
        if medium == DATAGRAMS {
            a.handle(0, &b.poll_transmit(0).unwrap()).unwrap();
            assert!(b.poll_transmit(0).is_none() && a.queue.is_empty() && a.poll_timeout().is_none());
        }
    }
}

/// A packet of an earlier life of either side, in everything else the one that comes next, is not delivered.
#[test]
fn stale_packets() {
    for medium in [STREAM, DATAGRAMS] {
        let (mut a, _) = pair(medium);
        a.send(&message(1), None).unwrap();
        let good = a.poll_transmit(0).unwrap();
        let stale = [
            Packet { epoch: 9, ..good },
            Packet { to: 9, ..good },
            Packet { node: 11, ..good },
            Packet { epoch: good.to, to: good.epoch, ..good },
            Packet { to: 9, ..a.bye() },
            Packet { epoch: 9, ..a.bye() },
            Packet { epoch: 9, to: 2, node: 0, body: Body::Reject(Reason::Unknown) },
            Packet { node: 0, epoch: 0, to: 0, body: Body::Reject(Reason::Full) },
        ];
        for packet in stale {
            let (_, mut b) = pair(medium);
            let outcome = b.handle(0, &packet);
            assert!(!b.is_for(&packet), "{packet:?}");
            if medium == STREAM {
                assert!(matches!(outcome, Err(DeviceError::Protocol(_))), "{packet:?}");
            } else {
                assert_eq!((outcome, b.taken, b.owes_ready), (Ok(None), 0, false), "{packet:?}");
                assert!(matches!(b.handle(0, &good), Ok(Some(Heard::Message { .. }))));
            }
        }
    }
}

/// A device as small as can be: one connection, an address, and what its engine said and heard.
struct Host {
    node: u64,
    epoch: u32,
    channel: Option<Channel>,
    /// Messages to say, and how many were.
    to_say: u32,
    said: u32,
    heard: Vec<u32>,
    was_up: bool,
    end: Option<DeviceError>,
}

const NOBODY: Host =
    Host { node: 0, epoch: 0, channel: None, to_say: 0, said: 0, heard: Vec::new(), was_up: false, end: None };

/// A network of two that loses, doubles, damages and reorders packets, one in so many of each; 0: none.
#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    loss: u32,
    double: u32,
    damage: u32,
    /// The longest delay in nanoseconds: what is sent later may come earlier.
    delay: u32,
    /// One in so many packets is followed by what an earlier life of the sender would have said.
    stale: u32,
}

struct World {
    hosts: [Host; 2],
    random: u64,
    now: u64,
    /// By time and number.
    wire: BTreeMap<(u64, u64), (usize, Vec<u8>)>,
    count: u64,
    faults: Faults,
    damaged: u32,
}

const POISON: u32 = 0xdead;

impl World {
    fn new(seed: u64, faults: Faults, to_say: [u32; 2], medium: Medium) -> World {
        let host = |node, to_say| Host { node, epoch: 100, to_say, ..NOBODY };
        let mut hosts = [host(10, to_say[0]), host(20, to_say[1])];
        hosts[0].channel = Some(Channel::connect(10, 100, 0, [0; GREETING_BYTES], medium, 0));
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        World { hosts, random, now: 0, wire: BTreeMap::new(), count: 0, faults, damaged: 0 }
    }

    fn draw(&mut self, below: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((self.random >> 33) % u64::from(below.max(1))) as u32
    }

    fn one_in(&mut self, count: u32) -> bool {
        count != 0 && self.draw(count) == 0
    }

    fn put(&mut self, to: usize, packet: &Packet) {
        let copies = 1 + u32::from(self.one_in(self.faults.double));
        for _ in 0..copies {
            if self.one_in(self.faults.loss) {
                continue;
            }
            let mut bytes = packet.encode().to_vec();
            if self.one_in(self.faults.damage) {
                self.damaged += 1;
                for _ in 0..=self.draw(3) {
                    let bit = self.draw(8 * PACKET_BYTES as u32) as usize;
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            }
            let at = self.now + 100 + u64::from(self.draw(self.faults.delay));
            self.count += 1;
            self.wire.insert((at, self.count), (to, bytes));
        }
    }

    fn arrive(&mut self, at: usize, bytes: &[u8], medium: Medium) {
        let now = self.now;
        let host = &mut self.hosts[at];
        let Ok(packet) = Packet::decode(bytes) else { return };
        if let Some(channel) = host.channel.as_mut().filter(|c| c.is_for(&packet)) {
            match channel.handle(now, &packet) {
                Ok(Some(Heard::Message { message, .. })) => {
                    host.heard.push(u32::from_le_bytes([message[0], message[1], message[2], message[3]]));
                }
                Ok(_) => {}
                Err(end) => (host.end, host.channel) = (Some(end), None),
            }
            return;
        }
        // Beside what an owner does: a channel that is given what is not for it says so.
        if let Some(channel) = &mut host.channel {
            assert_eq!(channel.handle(now, &packet), Ok(None));
        }
        let is_hello = matches!(packet.body, Body::Hello { .. });
        if is_hello && at == 1 && host.channel.is_none() && !host.was_up && host.end.is_none() {
            let accepted = Channel::accept(&packet, host.node, host.epoch, [0; GREETING_BYTES], medium, now);
            host.channel = Some(accepted.unwrap());
        } else if let Some(answer) = answer_stranger(&packet) {
            self.put(1 - at, &answer);
        }
    }

    /// What one side has to do now.
    fn turn(&mut self, at: usize) {
        let now = self.now;
        let host = &mut self.hosts[at];
        let Some(channel) = &mut host.channel else { return };
        if let Err(end) = channel.handle_timeout(now) {
            (host.end, host.channel) = (Some(end), None);
            return;
        }
        host.was_up |= channel.is_up();
        while channel.is_up() && host.said < host.to_say && channel.send(&message(host.said), None).is_ok() {
            host.said += 1;
        }
        let mut out = VecDeque::new();
        while let Some(packet) = channel.poll_transmit(now) {
            out.push_back(packet);
        }
        for packet in out {
            self.put(1 - at, &packet);
            if self.one_in(self.faults.stale) {
                let epoch = packet.epoch - 1 - self.draw(2);
                let (seq, ack) = (1 + self.draw(40), self.draw(40));
                let said = Body::Message { seq, ack, message: message(POISON), grant: None };
                self.put(1 - at, &Packet { epoch, body: said, ..packet });
            }
        }
    }

    /// Runs until nothing is under way or awaited any more.
    fn run(&mut self, medium: Medium) {
        for _ in 0..1_000_000 {
            (0..2).for_each(|at| self.turn(at));
            let timers = self.hosts.iter().filter_map(|h| h.channel.as_ref()?.poll_timeout());
            let arrival = self.wire.first_key_value().map(|((at, _), _)| *at);
            let Some(next) = timers.chain(arrival).min() else { return };
            self.now = self.now.max(next);
            while let Some(entry) = self.wire.first_entry().filter(|e| e.key().0 <= self.now) {
                let (to, bytes) = entry.remove();
                self.arrive(to, &bytes, medium);
            }
        }
        panic!("it does not end");
    }

    /// In order, each once, and no other.
    fn is_sound(&self) -> bool {
        self.hosts.iter().all(|h| h.heard.iter().enumerate().all(|(i, number)| i as u32 == *number))
    }

    fn is_complete(&self) -> bool {
        let [a, b] = &self.hosts;
        a.end.is_none() && b.end.is_none() && a.heard.len() == b.to_say as usize && b.heard.len() == a.to_say as usize
    }
}

fn faults() -> impl Strategy<Value = Faults> {
    let one_in = |from: u32| prop_oneof![Just(0), from..9];
    (one_in(2), one_in(1), one_in(2), prop_oneof![Just(0u32), 0u32..10_000], one_in(1))
        .prop_map(|(loss, double, damage, delay, stale)| Faults { loss, double, damage, delay, stale })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Over any such network both come up, and every message is delivered once and in order.
    #[test]
    fn two_channels(seed in any::<u64>(), faults in faults(), a in 1u32..100, b in 1u32..100) {
        let mut world = World::new(seed, faults, [a, b], DATAGRAMS);
        world.run(DATAGRAMS);
        prop_assert!(world.is_sound() && world.is_complete(), "{:?} {:?}", world.hosts[0].end, world.hosts[1].end);
        prop_assert_eq!(world.damaged == 0, faults.damage == 0);
    }

    /// With little patience they may fail: then both end in error, and what was delivered was delivered right.
    #[test]
    fn two_impatient_channels(seed in any::<u64>(), faults in faults(), a in 1u32..100, b in 1u32..100, tries in 1u32..4) {
        let medium = Medium::Datagrams { resend_ns: 1000, tries };
        let mut world = World::new(seed, faults, [a, b], medium);
        world.run(medium);
        prop_assert!(world.is_sound());
        let ends = world.hosts.iter().filter(|h| h.end.is_some()).count();
        let was_never_heard = world.hosts[1].channel.is_none() && !world.hosts[1].was_up;
        prop_assert!(world.is_complete() || ends == 2 || (ends == 1 && was_never_heard) || has_only_lost_the_last_word(&world));
    }
}

/// One side gave up, and the other has nothing to say that would tell it so: its messages were all acknowledged.
fn has_only_lost_the_last_word(world: &World) -> bool {
    let mut alive = world.hosts.iter().filter(|h| h.end.is_none());
    alive.all(|h| h.said == h.to_say && h.channel.as_ref().is_some_and(|c| c.is_up() && c.queue.is_empty()))
}

/// Each fault does what it says, always and never.
#[test]
fn every_fault_at_full_strength() {
    for (faults, goes_through) in [
        (Faults::default(), true),
        (Faults { loss: 1, ..Faults::default() }, false),
        (Faults { damage: 1, ..Faults::default() }, false),
        (Faults { double: 1, ..Faults::default() }, true),
        (Faults { delay: 100_000, ..Faults::default() }, true),
        (Faults { stale: 1, ..Faults::default() }, true),
    ] {
        let mut world = World::new(7, faults, [50, 50], DATAGRAMS);
        world.run(DATAGRAMS);
        assert!(world.is_sound());
        assert_eq!(world.is_complete(), goes_through, "{faults:?}");
        assert_eq!(world.hosts[0].end, (!goes_through).then_some(DeviceError::TimedOut), "{faults:?}");
    }
}

/// A side that was started again turns the other one's old connection away, and accepts a new one at once.
#[test]
fn a_side_that_forgot() {
    let mut world = World::new(3, Faults { loss: 3, double: 3, delay: 3000, ..Faults::default() }, [10, 10], DATAGRAMS);
    world.run(DATAGRAMS);
    assert!(world.is_complete());
    world.hosts[1].channel = None;
    world.hosts[0].to_say += 1;
    world.run(DATAGRAMS);
    assert!(matches!(world.hosts[0].end, Some(DeviceError::Refused(_))), "{:?}", world.hosts[0].end);
    for host in &mut world.hosts {
        *host = Host { node: host.node, epoch: 101, to_say: 10, ..NOBODY };
    }
    world.hosts[0].channel = Some(Channel::connect(10, 101, 100, [0; GREETING_BYTES], DATAGRAMS, world.now));
    world.run(DATAGRAMS);
    assert!(world.is_sound() && world.is_complete());
    assert_eq!(world.hosts[1].channel.as_ref().map(|c| (c.replaces(), c.peer_epoch())), Some((100, 101)));
}
