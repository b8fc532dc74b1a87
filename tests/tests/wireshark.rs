//! What our device sends, as tshark understands it: packets are captured on a cable between two hosts, where they are what
//! a card would send, and every field that tshark finds has to be what was sent.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use verbring::{Clock, Opts, Rights, Signal, Sqe, Status};
use verbring_sim::packet::{Header, Ip, Nak, Opcode, Syndrome};
use verbring_sim::udp::{self, UdpDevice, UdpOptions};
use verbring_tests::netns::{Host, Loss, Netns};
use verbring_tests::{World, engine, pattern, small};

/// What tshark is asked for, in this order.
const FIELDS: [&str; 19] = [
    "infiniband.bth.opcode",
    "infiniband.bth.se",
    "infiniband.bth.m",
    "infiniband.bth.padcnt",
    "infiniband.bth.tver",
    "infiniband.bth.p_key",
    "infiniband.bth.destqp",
    "infiniband.bth.a",
    "infiniband.bth.psn",
    "infiniband.reth.va",
    "infiniband.reth.r_key",
    "infiniband.reth.dmalen",
    "infiniband.aeth.syndrome",
    "infiniband.aeth.msn",
    "infiniband.immdt",
    "infiniband.atomiceth.swapdt",
    "infiniband.atomiceth.cmpdt",
    "infiniband.atomicacketh.origremdt",
    "data.data",
];

/// Protocols that tshark takes any payload for.
const GUESSES: [&str; 4] = ["rpcordma", "smb_direct", "iser", "nvme-rdma"];

const PUT: usize = 5000;
const GET: u32 = 3001;
const ADD: u64 = 0x0102_0304_0506_0708;
const COMPARE: u64 = 0x1122_3344_5566_7788;
const SWAP: u64 = 0xa1a2_a3a4_a5a6_a7a8;
const IMM: u32 = 0xcafe_f00d;

fn has_tshark() -> bool {
    Command::new("tshark").arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Two engines on the two hosts. Their sockets are made there.
fn world(netns: &Netns, ip: fn(&Host) -> std::net::IpAddr, offload: bool) -> World<UdpDevice> {
    let options = UdpOptions { mtu: Some(1024), offload, ..UdpOptions::default() };
    let device = |host: &Host| {
        let ip = ip(host);
        host.enter(|| engine(small(), |node| udp::open(ip, node, options).expect("a device")))
    };
    let (mut a, b) = (device(&netns.a), device(&netns.b));
    let clock = Clock::start();
    let to = ip(&netns.b).to_string();
    netns.a.enter(|| a.connect(&to, clock.now())).expect("a connection");
    World { clock: Some(clock), ..World::meet(a, b) }
}

/// One of each.
fn operate(world: &mut World<UdpDevice>) {
    let (window, key) = world.export(1 << 16, Rights::all());
    let local = world.local_window(1 << 16);
    local.write(0, &pattern(PUT, 1));
    window.store(8192, COMPARE);
    let steps = [
        Sqe::put(local.slice(0, PUT as u32), key.at(64)),
        Sqe::put_inline(b"abc", key.at(3)),
        Sqe::get(local.slice(8192, GET), key.at(65)),
        Sqe::compare_swap(key.at(8192), COMPARE, SWAP),
        Sqe::fetch_add(key.at(8192), ADD),
        Sqe::put_signal(local.slice(0, 100), key.at(16384), 2050, Signal::Store(7)),
        Sqe::flush(world.ab),
    ];
    for (number, sqe) in steps.into_iter().enumerate() {
        world.a.push(sqe.user_data(number as u64)).unwrap();
        let done = world.reap();
        assert_eq!((done.user_data, done.status), (number as u64, Status::Success));
    }
    let buf = world.b.alloc(200).unwrap();
    world.b.recv(buf, world.ba, Opts::default()).unwrap();
    let mut buf = world.a.alloc(77).unwrap();
    buf.copy_from_slice(&pattern(77, 2));
    world.a.send(buf, world.ab, IMM, Opts::default()).unwrap();
    assert_eq!(world.reap().status, Status::Success);
    let got = world.until(|world| world.b.reap());
    assert_eq!((got.imm, &got.buf.as_ref().unwrap()[..]), (IMM, &pattern(77, 2)[..]));
    // And a refusal.
    world.b.bump_epoch(&window).unwrap();
    world.a.push(Sqe::put_word(9, key.at(0))).unwrap();
    assert_eq!(world.reap().status, Status::RemoteRefused);
}

/// A file as pcap(5) has it, of packets that begin with their IP header.
fn write_pcap(path: &Path, packets: &[&[u8]]) {
    let mut file = Vec::new();
    for word in [0xa1b2_c3d4u32, 2 | 4 << 16, 0, 0, 65535, 101] {
        file.extend(word.to_ne_bytes());
    }
    for packet in packets {
        for word in [0, 0, packet.len() as u32, packet.len() as u32] {
            file.extend(word.to_ne_bytes());
        }
        file.extend(*packet);
    }
    std::fs::write(path, file).unwrap();
}

/// What tshark finds in a packet, a line each; the first word says if it is malformed.
fn tshark(path: &Path) -> Vec<Vec<String>> {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(path).args(["-T", "fields", "-E", "occurrence=f", "-e", "_ws.malformed"]);
    for field in FIELDS {
        command.args(["-e", field]);
    }
    for guess in GUESSES {
        command.args(["--disable-protocol", guess]);
    }
    let output = command.output().expect("tshark runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.split('\t').map(str::to_string).collect()).collect()
}

/// A number as tshark prints it; 0 for what is not there.
fn number(text: &str) -> u64 {
    match (text, text.strip_prefix("0x")) {
        ("" | "False", _) => 0,
        ("True", _) => 1,
        (_, Some(digits)) => u64::from_str_radix(digits, 16).unwrap(),
        _ => text.parse().unwrap_or_else(|_| panic!("{text}")),
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|two| u8::from_str_radix(str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

/// Holds what tshark found against the headers and the payload.
fn compare(found: &[String], header: &Header, payload: &[u8], packet: &[u8]) {
    let numbers: Vec<u64> = found[1..15].iter().chain(&found[16..19]).map(|text| number(text)).collect();
    let has_aeth = !found[13].is_empty();
    let is_atomic_ack = header.opcode == Opcode::AtomicAcknowledge;
    let value = if is_atomic_ack { [0, 0, header.value] } else { [header.value, header.compare, 0] };
    let expected: [u64; 14] = [
        header.opcode as u64,
        header.solicited.into(),
        0,
        (payload.len().wrapping_neg() % 4) as u64,
        0,
        header.pkey.into(),
        header.dest_qp.into(),
        header.ack_request.into(),
        header.psn.into(),
        header.address,
        header.rkey.into(),
        header.length.into(),
        if has_aeth { packet[12].into() } else { 0 },
        header.msn.into(),
    ];
    assert_eq!(numbers, [&expected[..], &value].concat(), "{header:?}");
    let imm = if header.opcode.has_imm() { header.imm.to_be_bytes().to_vec() } else { Vec::new() };
    assert_eq!(hex(&found[15]), imm);
    let data = hex(&found[19]);
    assert_eq!(data.get(..payload.len()), Some(payload), "{header:?}");
    assert!(data.len() < payload.len() + 4 && data[payload.len()..].iter().all(|pad| *pad == 0));
}

/// What was asked for is in the packets.
fn check_operations(packets: &[(Header, Vec<u8>)]) {
    let mut counts = BTreeMap::new();
    for (header, _) in packets {
        *counts.entry(header.opcode as u8).or_insert(0) += 1;
    }
    println!("packets by opcode: {counts:?}");
    let is_first = |opcode| packets.iter().position(|(header, _)| header.opcode == opcode);
    let find = |opcode| &packets[is_first(opcode).unwrap_or_else(|| panic!("no {opcode:?}"))].0;
    let first = is_first(Opcode::WriteFirst).expect("a long put");
    assert_eq!((packets[first].0.length, packets[first].0.address & 0xffff), (PUT as u32, 64));
    let qp = packets[first].0.dest_qp;
    let of_put = |opcode| matches!(opcode, Opcode::WriteFirst | Opcode::WriteMiddle | Opcode::WriteLast);
    let put: Vec<u8> = packets[first..]
        .iter()
        .filter(|(header, _)| header.dest_qp == qp && of_put(header.opcode))
        .flat_map(|(_, payload)| payload.clone())
        .collect();
    assert_eq!(put[..PUT], pattern(PUT, 1));
    assert!(packets.iter().any(|(header, payload)| header.opcode == Opcode::WriteOnly && payload == b"abc"));
    assert!(packets.iter().any(|(header, _)| header.opcode == Opcode::ReadRequest && header.length == GET));
    let swap = find(Opcode::CompareSwap);
    assert_eq!((swap.compare, swap.value, swap.rkey), (COMPARE, SWAP, packets[first].0.rkey));
    assert_eq!((find(Opcode::FetchAdd).value, find(Opcode::SendOnlyImm).imm), (ADD, IMM));
    let old: Vec<u64> =
        packets.iter().filter(|(h, _)| h.opcode == Opcode::AtomicAcknowledge).map(|(h, _)| h.value).collect();
    assert_eq!(old, [COMPARE, SWAP]);
    assert!(packets.iter().any(|(header, _)| header.syndrome == Syndrome::Nak(Nak::RemoteAccess)), "no refusal");
    for opcode in [Opcode::WriteMiddle, Opcode::WriteLast, Opcode::ReadFirst, Opcode::ReadLast, Opcode::Acknowledge] {
        find(opcode);
    }
}

fn seen_by_tshark(ip: fn(&Host) -> std::net::IpAddr, offload: bool) {
    if !has_tshark() {
        println!("SKIPPED: there is no tshark; install the package tshark");
        return;
    }
    let netns = match Netns::try_with(9000, Some((Loss::default(), 4711))) {
        Ok(netns) => netns,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    netns.capture();
    operate(&mut world(&netns, ip, offload));
    let captured = netns.captured();
    let ours: Vec<(&[u8], Ip, &[u8])> =
        captured.iter().filter_map(|bytes| Ip::parse(bytes).map(|(ip, packet)| (&bytes[..], ip, packet))).collect();
    assert!(ours.len() > 20, "{} packets", ours.len());
    let file = tempfile::NamedTempFile::new().unwrap();
    write_pcap(file.path(), &ours.iter().map(|(bytes, ..)| *bytes).collect::<Vec<_>>());
    let found = tshark(file.path());
    assert_eq!(found.len(), ours.len());
    let (mut packets, mut numbered) = (Vec::new(), 0);
    for ((_, ip, packet), found) in ours.iter().zip(&found) {
        assert_eq!((found.len(), &found[0][..]), (FIELDS.len() + 1, ""), "malformed: {found:?}");
        let (header, payload) = Header::parse(packet).expect("a packet of ours");
        compare(found, &header, payload, packet);
        // The checksum is that of a packet with the identification 0.
        assert!(Ip { identification: Some(0), ..*ip }.is_intact(packet) && ip.source_port == udp::PORT);
        numbered += u32::from(ip.identification != Some(0));
        packets.push((header, payload.to_vec()));
    }
    println!("{} packets, {numbered} of them numbered by the kernel", ours.len());
    // Without offload that is what stands in them, so any other NIC finds them right.
    assert!(offload || numbered == 0);
    check_operations(&packets);
}

#[test]
fn over_ipv4() {
    seen_by_tshark(|host| host.ipv4, false);
}

#[test]
fn over_ipv4_with_offload() {
    seen_by_tshark(|host| host.ipv4, true);
}

#[test]
fn over_ipv6() {
    seen_by_tshark(|host| host.ipv6, false);
}

#[test]
fn over_ipv6_with_offload() {
    seen_by_tshark(|host| host.ipv6, true);
}
