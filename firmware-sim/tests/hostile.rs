//! A hostile peer on a fabric, against a whole device. What the fuzz targets found stays found.

use verbring_sim::device::{FabricDevice, FabricOptions};
use verbring_sim::fabric::{Fabric, FabricConfig, FabricPort, address};
use verbring_sim::packet::{Header, Ip, Opcode};
use verbring_sim::soft::{BURST, Wire};
use verbring_slab::{Region, RegionOptions};
use verbring_sys::channel::{Body, GREETING_BYTES, Grant, PACKET_BYTES, Packet};
use verbring_sys::{Device, Event, MESSAGE_BYTES, Memory, Rights, Status, Wc};

const LINKS: u32 = 4;
/// Our queue pairs are of these numbers, and so we say at first.
const QPS: [u32; 2] = [77, 78];
const PSN: u32 = 100;

struct Hostile {
    fabric: Fabric,
    port: FabricPort,
    device: FabricDevice,
    now: u64,
}

impl Hostile {
    fn new() -> Hostile {
        let fabric = Fabric::new(FabricConfig::new(1));
        let port = fabric.port(1);
        let device = fabric.device(0, 9, 1, FabricOptions { max_links: LINKS, ..FabricOptions::default() });
        Hostile { port, device: device.unwrap(), now: 0, fabric }
    }

    /// Time for everything to arrive; what the device tells.
    fn wait(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for _ in 0..20 {
            self.now += 10_000;
            self.fabric.advance(self.now);
            events.extend(std::iter::from_fn(|| self.device.control(self.now)));
            self.poll();
        }
        events
    }

    fn poll(&mut self) {
        let mut wcs = [Wc::new(0, verbring_sys::Qp(0), Status::Success); 16];
        self.device.poll(self.now, &mut wcs);
    }

    fn say(&mut self, packet: Packet) {
        self.port.send_control(self.now, 0, &packet.encode());
    }

    fn hear(&mut self) -> Option<Packet> {
        let mut bytes = [0; PACKET_BYTES];
        self.port.receive_control(self.now, &mut bytes)?;
        Packet::decode(&bytes).ok()
    }

    /// Says hello as connection `epoch`: the device's epoch and greeting.
    fn hello(&mut self, epoch: u32, line: u64) -> Option<(u32, [u8; GREETING_BYTES])> {
        let mut greeting = [0; GREETING_BYTES];
        for (class, qp) in QPS.iter().enumerate() {
            greeting[8 * class..][..4].copy_from_slice(&qp.to_le_bytes());
            greeting[8 * class + 4..][..4].copy_from_slice(&PSN.to_le_bytes());
        }
        greeting[16..24].copy_from_slice(&line.to_le_bytes());
        greeting[28..32].copy_from_slice(&256u32.to_le_bytes());
        (greeting[32], greeting[33]) = (16, 1);
        let std::net::IpAddr::V4(v4) = address(1) else { panic!("a fabric is of IPv4") };
        greeting[36..52].copy_from_slice(&v4.to_ipv6_mapped().octets());
        self.say(Packet { node: 2, epoch, to: 0, body: Body::Hello { replaces: 0, greeting } });
        assert_eq!(self.wait(), []);
        while let Some(packet) = self.hear() {
            if let (Body::Welcome { greeting }, true) = (packet.body, packet.to == epoch) {
                return Some((packet.epoch, greeting));
            }
        }
        None
    }

    fn request(&mut self, qp: u32, header: &Header) {
        let header = Header { dest_qp: qp, ..*header };
        let len = header.seal(self.port.place().unwrap(), 0, &Ip::new(address(1), address(0))).unwrap();
        self.port.commit(self.now, len, address(0));
    }
}

fn qp_of(greeting: &[u8; GREETING_BYTES]) -> u32 {
    u32::from_le_bytes(greeting[..4].try_into().unwrap())
}

/// The line of receives lies where the peer says, but not around the end of all addresses.
#[test]
fn a_line_that_wraps_is_refused() {
    let mut hostile = Hostile::new();
    assert_eq!(hostile.hello(1, u64::MAX - 8), None);
    assert!(hostile.hello(2, u64::MAX - 64).is_some());
}

#[test]
fn a_grant_that_wraps_ends_the_connection() {
    let mut hostile = Hostile::new();
    let (epoch, _) = hostile.hello(1, 0).unwrap();
    hostile.say(Packet { node: 2, epoch: 1, to: epoch, body: Body::Ready { ack: 0 } });
    assert!(matches!(hostile.wait()[..], [Event::Up { .. }]));
    let grant = Some(Grant { mr: 1, epoch: 0, base: u64::MAX - 7, len: 16, writable: true });
    let body = Body::Message { seq: 1, ack: 0, message: [0; MESSAGE_BYTES], grant };
    hostile.say(Packet { node: 2, epoch: 1, to: epoch, body });
    assert!(matches!(hostile.wait()[..], [Event::Down { .. }]));
}

/// Who says hello, and then something that ends the connection before it is up, is told of to nobody, and takes no place.
#[test]
fn what_fails_before_it_is_up_takes_no_place() {
    let mut hostile = Hostile::new();
    for epoch in 1..4 * LINKS {
        let (_, greeting) = hostile.hello(epoch, 0).expect("a place");
        let forbidden = Header { rkey: 1, length: 8, ..Header::new(Opcode::ReadRequest, 0, PSN) };
        hostile.request(qp_of(&greeting), &forbidden);
        assert_eq!(hostile.wait(), []);
    }
}

/// Reads of much, again and again: a call sends a burst, and the rest comes with the next ones.
#[test]
fn reads_do_not_keep_the_device() {
    const BYTES: usize = 1 << 20;
    let mut hostile = Hostile::new();
    let region = Region::private(BYTES, RegionOptions::default()).unwrap();
    let memory = Memory::Private { base: region.base(), len: BYTES };
    // SAFETY: the region is dropped after the device.
    let mr = unsafe { hostile.device.register(memory, Rights::READ) }.unwrap();
    let (epoch, greeting) = hostile.hello(1, 0).unwrap();
    hostile.say(Packet { node: 2, epoch: 1, to: epoch, body: Body::Ready { ack: 0 } });
    let events = hostile.wait();
    let [Event::Up { link, .. }] = events[..] else { panic!("{events:?}") };
    hostile.device.send(link, &[0; MESSAGE_BYTES], Some(mr)).unwrap();
    hostile.wait();
    let grant = std::iter::from_fn(|| hostile.hear()).find_map(|packet| match packet.body {
        Body::Message { grant, .. } => grant,
        _ => None,
    });
    let grant = grant.expect("it was sent");
    let packets = BYTES as u32 / 256;
    for i in 0..16 {
        let read = Header {
            address: grant.base,
            rkey: grant.mr,
            length: BYTES as u32,
            ..Header::new(Opcode::ReadRequest, 0, PSN + i * packets)
        };
        hostile.request(qp_of(&greeting), &read);
    }
    hostile.now += 1_000_000;
    hostile.fabric.advance(hostile.now);
    let sent = |hostile: &Hostile| hostile.device.rnic().nic().counters.sent;
    let mut before = sent(&hostile);
    let first = before;
    while sent(&hostile) - first < u64::from(16 * packets) {
        assert!(hostile.now < 1 << 40, "all of it is sent in the end");
        hostile.now += 1000;
        hostile.poll();
        let after = sent(&hostile);
        // A poll looks at the NIC once, and rings once.
        assert!(after - before <= 2 * BURST as u64);
        before = after;
    }
    drop(hostile);
    drop(region);
}
