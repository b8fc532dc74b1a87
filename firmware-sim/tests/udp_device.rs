//! The device over loopback, without an engine: who connects, who does not, and what strangers can do.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use verbring_sim::udp::{PORT, UdpDevice, UdpOptions, open};
use verbring_sys::channel::{Body, GREETING_BYTES, PACKET_BYTES, Packet};
use verbring_sys::{Device, DeviceError, Event, Link};

const PATIENCE: Duration = Duration::from_secs(10);
const LINKS: u32 = 4;

fn host(test: u8, host: u8) -> IpAddr {
    [127, 93, test, host].into()
}

fn device(address: IpAddr) -> UdpDevice {
    open(address, 7, UdpOptions { max_links: LINKS, ..UdpOptions::default() }).expect("a device")
}

/// The next event of the first device that has one, within some time.
fn next(devices: &mut [&mut UdpDevice], since: Instant) -> (usize, Event) {
    let start = Instant::now();
    loop {
        for (index, device) in devices.iter_mut().enumerate() {
            if let Some(event) = device.control(since.elapsed().as_nanos() as u64) {
                return (index, event);
            }
        }
        assert!(start.elapsed() < PATIENCE, "nothing happens");
    }
}

/// Two devices connect, and their connection is given up again.
fn meet(a: &mut UdpDevice, b: &mut UdpDevice, to: IpAddr, since: Instant) {
    let link = a.connect(&to.to_string(), 0, since.elapsed().as_nanos() as u64).expect("a connection");
    let mut ends = [Some(link), None];
    let mut up = 0;
    while up < 2 {
        match next(&mut [a, b], since) {
            (index, Event::Up { link, .. }) => {
                ends[index] = Some(link);
                up += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    a.disconnect(ends[0].expect("a link"));
    let (index, event) = next(&mut [a, b], since);
    assert!(matches!((index, event), (1, Event::Down { cause: DeviceError::Closed, .. })), "{event:?}");
    b.disconnect(ends[1].expect("a link"));
}

#[test]
fn over_both_families_and_to_itself() {
    let since = Instant::now();
    let [here, there] = [1, 2].map(|i| host(1, i));
    let (mut a, mut b) = (device(here), device(there));
    assert_eq!(a.caps().name, "udp");
    for _ in 0..20 {
        meet(&mut a, &mut b, there, since);
        meet(&mut b, &mut a, here, since);
    }
    let mut v6 = device("::1".parse().unwrap());
    v6.connect("::1", 0, since.elapsed().as_nanos() as u64).unwrap();
    for _ in 0..2 {
        assert!(matches!(next(&mut [&mut v6], since), (0, Event::Up { .. })));
    }
}

#[test]
fn who_cannot_be_reached_is_told() {
    let since = Instant::now();
    let here = host(2, 1);
    let mut a = device(here);
    for (address, error) in [
        ("nobody", DeviceError::BadAddress),
        ("10.0.0", DeviceError::BadAddress),
        ("10.0.0.1:4791", DeviceError::BadAddress),
        ("", DeviceError::BadAddress),
    ] {
        assert_eq!(a.connect(address, 0, 0), Err(error), "{address}");
    }
    assert!(matches!(a.connect("::1", 0, 0), Err(DeviceError::NotSupported(_))));
    // Nobody listens: said at once, or a moment later.
    match a.connect(&host(2, 9).to_string(), 0, since.elapsed().as_nanos() as u64) {
        Err(cause) => assert_eq!(cause, DeviceError::NoSuchName),
        Ok(of) => {
            let (_, event) = next(&mut [&mut a], since);
            assert!(matches!(event, Event::Down { link, cause: DeviceError::NoSuchName } if link == of), "{event:?}");
        }
    }
    assert_eq!(open(here, 7, UdpOptions::default()).err(), Some(DeviceError::NameInUse));
    assert_eq!(open([192, 0, 2, 77].into(), 7, UdpOptions::default()).err(), Some(DeviceError::NoSuchAddress));
    assert!(matches!(open([0; 4].into(), 7, UdpOptions::default()).err(), Some(DeviceError::NotSupported(_))));
    let strange = UdpOptions { mtu: Some(1500), ..UdpOptions::default() };
    assert!(matches!(open(host(2, 3), 7, strange).err(), Some(DeviceError::NotSupported(_))));
    // The address is free again once the device is gone.
    drop(a);
    device(here);
}

/// Whatever strangers say or do not say, others can connect, and what is up stays up.
#[test]
fn strangers() {
    let since = Instant::now();
    let [here, there, from] = [1, 2, 3].map(|i| host(3, i));
    let (mut a, mut b) = (device(here), device(there));
    let of_a = a.connect(&there.to_string(), 0, 0).unwrap();
    let mut of_b = Link(0);
    for _ in 0..2 {
        if let (1, Event::Up { link, .. }) = next(&mut [&mut a, &mut b], since) {
            of_b = link;
        }
    }
    let stranger = || TcpStream::connect(SocketAddr::new(there, PORT)).expect("a connection");
    let hello = |epoch: u32| {
        let body = Body::Hello { replaces: 0, greeting: [9; GREETING_BYTES] };
        Packet { node: 99, epoch, to: 0, body }.encode()
    };
    let bye = Packet { node: 99, epoch: 5, to: 6, body: Body::Bye }.encode();
    let mut damaged = hello(3);
    damaged[100] ^= 1;
    let mut kept = Vec::new();
    for round in 0..200u32 {
        let mut stream = stranger();
        let _ = match round % 7 {
            0 => Ok(()),
            1 => stream.write_all(b"GET / HTTP/1.1\r\n\r\n"),
            2 => stream.write_all(&hello(round + 1)),
            3 => stream.write_all(&[hello(round + 1), hello(round + 2)].concat()),
            4 => stream.write_all(&bye),
            5 => stream.write_all(&damaged),
            _ => stream.write_all(&[0x55; 50 * PACKET_BYTES]),
        };
        if round % 3 != 0 {
            kept.push(stream);
        }
        let now = since.elapsed().as_nanos() as u64;
        assert_eq!((a.control(now), b.control(now)), (None, None), "round {round}");
    }
    for _ in 0..100 {
        let now = since.elapsed().as_nanos() as u64;
        assert_eq!((a.control(now), b.control(now)), (None, None));
    }
    // All but the silent ones were turned away.
    let mut open = 0;
    for mut stream in kept {
        stream.set_nonblocking(true).unwrap();
        open += match stream.read(&mut [0; 4 * PACKET_BYTES]) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => 1,
            _ => 0,
        };
    }
    assert!(open <= LINKS, "{open} are open");
    let mut c = device(from);
    meet(&mut c, &mut b, there, since);
    let message = [3; 64];
    a.send(of_a, &message, None).unwrap();
    let (index, event) = next(&mut [&mut a, &mut b], since);
    assert!(index == 1 && matches!(event, Event::Message { link, message: m, .. } if link == of_b && m == message));
}

/// A peer that goes away without a word is missed.
#[test]
fn a_closed_connection_is_noticed() {
    let since = Instant::now();
    let [here, there] = [1, 2].map(|i| host(4, i));
    let (mut a, mut b) = (device(here), device(there));
    a.connect(&there.to_string(), 0, 0).unwrap();
    for _ in 0..2 {
        next(&mut [&mut a, &mut b], since);
    }
    drop(b);
    let (_, event) = next(&mut [&mut a], since);
    assert!(matches!(event, Event::Down { cause: DeviceError::Closed, .. }), "{event:?}");
}
