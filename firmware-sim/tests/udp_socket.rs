//! Two sockets over loopback. Each test has addresses of its own.

use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use verbring_sim::udp::{MAX_PACKET, Options, PORT, Socket};
use verbring_sys::DeviceError;

const PATIENCE: Duration = Duration::from_secs(5);

fn host(test: u8, host: u8) -> IpAddr {
    [127, 92, test, host].into()
}

fn socket(address: IpAddr, offload: bool) -> Socket {
    Socket::bind(address, Options { offload, ..Options::default() }).expect("a socket")
}

fn pair(test: u8, offloads: [bool; 2]) -> [(Socket, IpAddr); 2] {
    [1, 2].map(|i| (socket(host(test, i), offloads[usize::from(i) - 1]), host(test, i)))
}

/// A packet that tells its number by all of its bytes.
fn content(number: usize, len: usize) -> impl Iterator<Item = u8> {
    (0..len).map(move |i| (number * 31 + i * 7 + i / 251) as u8)
}

fn write(socket: &mut Socket, number: usize, len: usize, to: IpAddr) {
    if socket.place().is_none() {
        socket.flush();
    }
    let place = socket.place().expect("room after a flush");
    assert_eq!(place.len(), MAX_PACKET);
    place.iter_mut().zip(content(number, len)).for_each(|(to, from)| *to = from);
    socket.commit(len, to);
}

/// The next `count` packets.
fn read(socket: &mut Socket, count: usize) -> Vec<(IpAddr, u16, Vec<u8>)> {
    let (mut packets, since) = (Vec::new(), Instant::now());
    while packets.len() < count {
        let arrived = socket.receive();
        packets.extend((0..arrived).map(|i| {
            let packet = socket.packet(i).expect("it was counted");
            (packet.from, packet.port, packet.bytes.to_vec())
        }));
        assert_eq!(socket.packet(arrived), None);
        assert!(since.elapsed() < PATIENCE, "{} packets of {count}; {:?}", packets.len(), socket.stats());
    }
    assert_eq!(packets.len(), count);
    packets
}

fn check(packets: &[(IpAddr, u16, Vec<u8>)], from: IpAddr, sizes: &[usize]) {
    assert_eq!(packets.len(), sizes.len());
    for (number, ((source, port, bytes), len)) in packets.iter().zip(sizes).enumerate() {
        assert_eq!((*source, *port, bytes.len()), (from, PORT, *len), "packet {number}");
        assert!(bytes.iter().copied().eq(content(number, *len)), "packet {number}");
    }
}

#[test]
fn one_packet() {
    let [(mut a, from), (mut b, to)] = pair(1, [true, true]);
    assert_eq!((a.flush(), b.receive()), (0, 0));
    write(&mut a, 0, 48, to);
    assert_eq!((a.queued(), a.flush(), a.queued()), (1, 1, 0));
    check(&read(&mut b, 1), from, &[48]);
    assert_eq!(b.receive(), 0);
    assert_eq!(b.packet(0), None);
}

/// Runs of equal packets, shorter ends, single ones.
fn mixed() -> Vec<usize> {
    let mut seed = 12345u32;
    let mut next = |below: u32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((seed >> 8) % below) as usize
    };
    let mut sizes = Vec::new();
    while sizes.len() < 200 {
        let (len, run) = ([16, 60, 1084, 4156, MAX_PACKET][next(5)], next(20) + 1);
        sizes.extend(std::iter::repeat_n(len, run));
        sizes.push(next(len as u32) + 1);
    }
    sizes.truncate(200);
    sizes
}

#[test]
fn mixed_sizes_arrive_in_order_with_and_without_offload() {
    let sizes = mixed();
    for (i, offloads) in [[true, true], [false, true], [true, false], [false, false]].into_iter().enumerate() {
        let [(mut a, from), (mut b, to)] = pair(10 + i as u8, offloads);
        for (number, len) in sizes.iter().enumerate() {
            write(&mut a, number, *len, to);
        }
        a.flush();
        check(&read(&mut b, sizes.len()), from, &sizes);
        let (sent, received) = (a.stats(), b.stats());
        assert_eq!((sent.sent, received.received), (200, 200));
        assert_eq!((sent.send_failed, received.truncated, received.overflowed), (0, 0, 0));
        let expected = if offloads[0] { 1..100 } else { 200..201 };
        assert!(expected.contains(&sent.send_messages), "{offloads:?}: {sent:?}");
        assert!(offloads != [true, true] || received.receive_messages < 100, "{received:?}");
        assert!(sent.send_calls < 10, "{sent:?}");
    }
}

#[test]
fn a_run_ends_with_its_destination() {
    let [(mut a, from), (mut b, to)] = pair(2, [true, true]);
    let mut c = socket(host(2, 3), true);
    for number in 0..30 {
        write(&mut a, number, 100, if number < 20 { to } else { host(2, 3) });
    }
    assert_eq!(a.flush(), 30);
    assert_eq!((a.stats().send_calls, a.stats().send_messages), (1, 2));
    check(&read(&mut b, 20), from, &[100; 20]);
    let packets = read(&mut c, 10);
    assert!(packets.iter().enumerate().all(|(i, packet)| packet.2.iter().copied().eq(content(20 + i, 100))));
}

#[test]
fn a_batch_is_full_until_it_is_flushed() {
    for (test, len) in [(3, 1), (4, MAX_PACKET)] {
        let [(mut a, _), (mut b, to)] = pair(test, [true, true]);
        let room = a.room();
        assert!(room >= 60);
        let mut count = 0;
        while a.place().is_some() {
            assert!(a.room() > 0);
            a.commit(len, to);
            count += 1;
        }
        assert_eq!(a.room(), 0);
        a.commit(len, to);
        assert_eq!((a.queued(), a.flush(), a.room()), (count, count, room));
        read(&mut b, count);
    }
}

#[test]
fn lengths_that_cannot_be_are_not_sent() {
    let [(mut a, _), (_, to)] = pair(5, [true, true]);
    for len in [0, MAX_PACKET + 1, usize::MAX] {
        a.commit(len, to);
    }
    assert_eq!((a.queued(), a.flush()), (0, 0));
}

#[test]
fn long_packets_are_counted_and_dropped() {
    for (test, offload) in [(6, true), (7, false)] {
        let mut b = socket(host(test, 2), offload);
        let other = UdpSocket::bind((host(test, 1), 0)).unwrap();
        let len = other.send_to(&[1; MAX_PACKET + 1], (host(test, 2), PORT)).unwrap();
        assert_eq!(len, MAX_PACKET + 1);
        other.send_to(&[], (host(test, 2), PORT)).unwrap();
        other.send_to(&[2; MAX_PACKET], (host(test, 2), PORT)).unwrap();
        let packets = read(&mut b, 1);
        assert_eq!(packets[0].1, other.local_addr().unwrap().port());
        assert_eq!(packets[0].2, [2; MAX_PACKET]);
        assert_eq!(b.stats().truncated, 1);
    }
}

#[test]
fn a_full_receive_buffer_drops_and_goes_on() {
    let options = Options { buffer: 64 << 10, offload: false, ..Options::default() };
    let [mut a, mut b] = [1, 2].map(|i| Socket::bind(host(8, i), options).unwrap());
    let to = host(8, 2);
    for number in 0..1000 {
        write(&mut a, number, 4000, to);
    }
    a.flush();
    assert_eq!(a.stats().sent, 1000);
    let mut arrived = 0;
    let since = Instant::now();
    while b.stats().overflowed == 0 {
        // Each tells how many were dropped before it.
        write(&mut a, 0, 100, to);
        a.flush();
        arrived += b.receive();
        assert!(since.elapsed() < PATIENCE);
    }
    assert!((1..1000).contains(&arrived), "{arrived}");
    assert!(u64::from(b.stats().overflowed) + b.stats().received >= 1000);
    while b.receive() > 0 {}
    write(&mut a, 7, 77, to);
    a.flush();
    assert!(read(&mut b, 1)[0].2.iter().copied().eq(content(7, 77)));
}

#[test]
fn an_address_has_one_socket() {
    let _first = socket(host(9, 1), true);
    assert_eq!(Socket::bind(host(9, 1), Options::default()).err(), Some(DeviceError::NameInUse));
    let elsewhere = Socket::bind([192, 0, 2, 250].into(), Options::default());
    assert_eq!(elsewhere.err(), Some(DeviceError::NoSuchAddress));
    for all in ["0.0.0.0", "::"] {
        let everywhere = Socket::bind(all.parse().unwrap(), Options::default());
        assert!(matches!(everywhere.err(), Some(DeviceError::NotSupported(_))));
    }
}

#[test]
fn what_cannot_be_sent_is_counted_and_the_rest_goes() {
    for (test, offload) in [(20, true), (21, false)] {
        let [(mut a, from), (mut b, to)] = pair(test, [offload, true]);
        for number in 0..40 {
            // No permission to broadcast; another family; out of loopback.
            let bad: IpAddr =
                [[255, 255, 255, 255].into(), Ipv6Addr::LOCALHOST.into(), [192, 0, 2, 1].into()][number % 3];
            write(&mut a, 99, 50, bad);
            write(&mut a, number, 50, to);
        }
        assert_eq!(a.flush(), 40);
        assert_eq!((a.stats().send_failed, a.queued()), (40, 0));
        let failure = a.errors().expect("a failure");
        assert_eq!(failure.to, IpAddr::from([255, 255, 255, 255]), "{failure}");
        check(&read(&mut b, 40), from, &[50; 40]);
    }
}

#[test]
fn a_closed_port_is_told_and_costs_no_packet() {
    let [(mut a, from), (mut b, to)] = pair(22, [true, true]);
    let nobody = host(22, 3);
    for number in 0..50 {
        write(&mut a, 0, 64, nobody);
        a.flush();
        write(&mut a, number, 64, to);
        assert_eq!(a.flush(), 1);
    }
    check(&read(&mut b, 50), from, &[64; 50]);
    assert_eq!(a.receive(), 0);
    let failure = a.errors().expect("a failure");
    assert_eq!((failure.to, failure.errno), (nobody, rustix::io::Errno::CONNREFUSED.raw_os_error()));
    assert!(failure.to_string().contains("nothing listens at 127.92.22.3"), "{failure}");
    assert!(a.stats().icmp >= 1);
    assert_eq!(a.stats().send_failed, 0);
}

#[test]
fn ipv6() {
    let here = IpAddr::from(Ipv6Addr::LOCALHOST);
    let Ok(mut a) = Socket::bind(here, Options::default()) else {
        println!("SKIPPED: no ::1 here");
        return;
    };
    let sizes = mixed();
    for (number, len) in sizes.iter().enumerate() {
        write(&mut a, number, *len, here);
    }
    a.flush();
    check(&read(&mut a, sizes.len()), here, &sizes);
    // An IPv4 socket of the same port is another one.
    write(&mut a, 0, 9, host(23, 1));
    assert_eq!(a.flush(), 0);
    assert_eq!(a.stats().send_failed, 1);
}

#[test]
fn ecn_is_read() {
    let mut b = socket(host(24, 2), true);
    let other = UdpSocket::bind((host(24, 1), 0)).unwrap();
    rustix::net::sockopt::set_ip_tos(&other, 3).unwrap();
    other.send_to(&[1; 20], (host(24, 2), PORT)).unwrap();
    while b.receive() == 0 {}
    assert_eq!(b.packet(0).unwrap().tos, 3);
}

#[test]
fn buffers_are_as_told() {
    let (receive, send) = socket(host(25, 1), true).buffers().unwrap();
    assert!(receive >= 64 << 10 && send >= 64 << 10, "{receive} {send}");
}

#[test]
fn a_socket_moves_between_threads() {
    let [(mut a, from), (mut b, to)] = pair(26, [true, true]);
    write(&mut a, 0, 33, to);
    std::thread::spawn(move || a.flush()).join().unwrap();
    std::thread::spawn(move || check(&read(&mut b, 1), from, &[33])).join().unwrap();
}
