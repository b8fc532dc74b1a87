//! The network that other tests stand on: two hosts, and a relay that loses what it is told to.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use verbring_sim::udp::{Options, Socket};
use verbring_tests::fork;
use verbring_tests::netns::{Loss, Netns};

const PACKETS: u32 = 2000;
const ALL: u32 = 1_000_000;
const QUIET: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(5);

/// None, and says why, where there can be no namespaces.
fn netns(mtu: u32, loss: Option<Loss>) -> Option<Netns> {
    let seed = 4711;
    println!("seed {seed}");
    Netns::try_with(mtu, loss.map(|loss| (loss, seed))).map_err(|why| println!("SKIPPED: {why}")).ok()
}

fn udp(netns: &Netns) -> [UdpSocket; 2] {
    [&netns.a, &netns.b].map(|host| {
        // Any port: a child that another test forks has this socket too, for a while after it is closed here.
        let socket = host.enter(|| UdpSocket::bind((host.ipv4, 0))).expect("a socket");
        socket.set_read_timeout(Some(QUIET)).unwrap();
        socket
    })
}

/// Sends numbered packets, never more at a time than every queue on the way holds, and returns what arrives.
fn stream(netns: &Netns) -> Vec<u32> {
    let seen = || netns.counts().expect("a relay").seen.load(Ordering::Relaxed);
    let [a, b] = udp(netns);
    let mut arrived = Vec::new();
    let mut read = || {
        let mut bytes = [0; 4];
        let is_ours = b.recv(&mut bytes).is_ok();
        arrived.extend(is_ours.then_some(u32::from_le_bytes(bytes)));
        is_ours
    };
    let to = b.local_addr().unwrap();
    let before = seen();
    b.set_nonblocking(true).unwrap();
    for number in 0..PACKETS {
        a.send_to(&number.to_le_bytes(), to).unwrap();
        let since = Instant::now();
        while seen() - before + 32 < number.into() {
            assert!(since.elapsed() < PATIENCE, "the relay stands");
            std::thread::yield_now();
        }
        while read() {}
    }
    b.set_nonblocking(false).unwrap();
    while read() {}
    arrived
}

fn ping(netns: &Netns, from: fn(&Netns) -> [IpAddr; 2]) {
    let [here, there] = from(netns);
    let a = netns.a.enter(|| UdpSocket::bind((here, 0))).unwrap();
    let b = netns.b.enter(|| UdpSocket::bind((there, 701))).unwrap();
    for socket in [&a, &b] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let mut bytes = [0; 16];
    a.send_to(b"ping", (there, 701)).unwrap();
    let (len, back) = b.recv_from(&mut bytes).unwrap();
    assert_eq!((&bytes[..len], back.ip()), (&b"ping"[..], here));
    b.send_to(b"pong", back).unwrap();
    assert_eq!(a.recv_from(&mut bytes).unwrap().1.ip(), there);
    assert_eq!(&bytes[..4], b"pong");
}

#[test]
fn the_hosts_hear_each_other_and_nobody_else() {
    for loss in [None, Some(Loss::default())] {
        let Some(netns) = netns(9000, loss) else { return };
        ping(&netns, |netns| [netns.a.ipv4, netns.b.ipv4]);
        ping(&netns, |netns| [netns.a.ipv6, netns.b.ipv6]);
        assert_eq!(netns.counts().is_some(), loss.is_some());
        assert!(UdpSocket::bind((netns.a.ipv4, 0)).is_err(), "this process itself is elsewhere");
        assert!(netns.b.enter(|| UdpSocket::bind((netns.a.ipv4, 0)).is_err()));
    }
}

#[test]
fn a_child_joins_a_host() {
    let Some(netns) = netns(9000, None) else { return };
    let listener = netns.a.enter(|| TcpListener::bind((netns.a.ipv4, 702))).unwrap();
    let child = fork(|| {
        netns.b.join().unwrap();
        let mut stream = TcpStream::connect((netns.a.ipv4, 702)).unwrap();
        stream.write_all(b"hello").unwrap();
        0
    });
    let mut said = String::new();
    listener.accept().unwrap().0.read_to_string(&mut said).unwrap();
    assert_eq!(said, "hello");
    let code = loop {
        if let Some(code) = child.try_wait() {
            break code;
        }
    };
    assert_eq!(code, 0);
}

#[test]
fn no_fault_at_0_percent_and_each_at_100() {
    let Some(netns) = netns(9000, Some(Loss::default())) else { return };
    let all: Vec<u32> = (0..PACKETS).collect();
    assert!(stream(&netns) == all);
    let counts = netns.counts().unwrap();
    assert_eq!(counts.dropped.load(Ordering::Relaxed), 0);
    assert!(counts.seen.load(Ordering::Relaxed) >= PACKETS.into());

    netns.set_loss(Loss { duplicates: ALL, ..Loss::default() });
    let twice: Vec<u32> = all.iter().flat_map(|number| [*number; 2]).collect();
    assert!(stream(&netns) == twice);

    netns.set_loss(Loss { reorders: ALL, ..Loss::default() });
    let reordered = stream(&netns);
    assert!(reordered != all);
    let mut sorted = reordered;
    sorted.sort_unstable();
    assert!(sorted == all);

    netns.set_loss(Loss { drops: ALL, ..Loss::default() });
    assert_eq!(stream(&netns), [0; 0]);

    // And back again.
    netns.set_loss(Loss::default());
    assert!(stream(&netns) == all);
}

#[test]
fn a_tenth_is_lost_but_no_tcp() {
    let loss = Loss { drops: ALL / 10, spares_tcp: true, ..Loss::default() };
    let Some(netns) = netns(9000, Some(loss)) else { return };
    let arrived = stream(&netns).len() as u32;
    assert!((PACKETS * 8 / 10..PACKETS * 97 / 100).contains(&arrived), "{arrived} of {PACKETS}");

    netns.set_loss(Loss { drops: ALL, spares_tcp: true, ..Loss::default() });
    let listener = netns.a.enter(|| TcpListener::bind((netns.a.ipv6, 703))).unwrap();
    let mut client = netns.b.enter(|| TcpStream::connect((netns.a.ipv6, 703))).unwrap();
    client.write_all(&[5; 100_000]).unwrap();
    drop(client);
    let mut bytes = Vec::new();
    listener.accept().unwrap().0.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len(), 100_000);
}

/// The socket of RoCEv2 where the path is too narrow, and where runs of packets are cut up on their way.
#[test]
fn rocev2_packets_between_hosts() {
    for loss in [None, Some(Loss::default())] {
        for offload in [true, false] {
            let Some(netns) = netns(1500, loss) else { return };
            for [from, to] in [[netns.a.ipv4, netns.b.ipv4], [netns.a.ipv6, netns.b.ipv6]] {
                let options = Options { offload, ..Options::default() };
                let mut a = netns.a.enter(|| Socket::bind(from, options)).unwrap();
                let mut b = netns.b.enter(|| Socket::bind(to, options)).unwrap();
                let mut write = |len: usize, first: u8| {
                    for number in 0..40 {
                        a.place().unwrap()[0] = first + number;
                        a.commit(len, to);
                    }
                    let sent = a.flush();
                    (sent, a.errors())
                };
                let (sent, failure) = write(2000, 0);
                let failure = failure.expect("a failure");
                assert_eq!((sent, failure.errno), (0, Errno::MSGSIZE.raw_os_error()));
                assert_eq!((failure.to, failure.mtu), (to, 1500), "{failure}");
                assert_eq!(write(1084, 100).0, 40);
                let (mut numbers, since) = (Vec::new(), Instant::now());
                while numbers.len() < 40 {
                    let count = b.receive();
                    numbers.extend((0..count).map(|i| b.packet(i).unwrap().bytes[0]));
                    assert!(since.elapsed() < PATIENCE, "{numbers:?}");
                }
                assert_eq!(numbers, (100..140).collect::<Vec<u8>>());
                assert_eq!(a.offloads(), offload);
            }
        }
    }
}
