//! Bad input of every kind gets its own error, and nothing is lost, hung, leaked or undefined.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use verbring::{
    AccessError, Clock, Config, Device, DeviceError, Engine, EngineError, Memory, Notice, Opts, PushError, Region,
    RegionError, RegionOptions, Remote, Rights, Shm, ShmOptions, SizeClass, SlabError, Sqe, SqeFlags, Status,
    WaitError,
};
use verbring_sys::channel::{Body, GREETING_BYTES, Grant, HANDSHAKE_NS, PACKET_BYTES, Packet, Reason};
use verbring_sys::{Domain, Faults, MESSAGE_BYTES};
use verbring_tests::{World, deferred, engine, local, local_device, name, shm, shm_engine, small};

fn status<D: Device>(world: &mut World<D>, sqe: Sqe) -> Status {
    world.a.push(sqe).unwrap();
    world.reap().status
}

/// Each mistake in an sqe has its own status.
fn sqes<D: Device>(mut world: World<D>) {
    let (window, key) = world.export(4096, Rights::all());
    let (_read_only, only_read) = world.export(4096, Rights::READ);
    let local = world.local_window(4096);
    let gone = {
        let window = world.local_window(4096);
        world.a.close_window(&window, 0, 0).unwrap();
        window
    };
    let put = Sqe::put(local.slice(0, 8), key.at(0));
    // SAFETY: words that name no memory of a slab.
    let raw = |change: &dyn Fn(&mut [u64; 8])| unsafe {
        let mut words = [1 << 32, 0, 0, 0, 0, 0, 0, 0];
        change(&mut words);
        Sqe::from_words(words)
    };
    let other_peer = Sqe::put(local.slice(0, 8), key.at(0));
    let cases: &[(Status, Sqe)] = &[
        (Status::BadOpcode, raw(&|w| w[0] = 12 << 32)),
        (Status::BadOpcode, raw(&|w| w[0] = 255 << 32)),
        (Status::BadFlags, put.flags(SqeFlags::REPLAY)),
        (Status::BadFlags, put.flags(SqeFlags::ADD)),
        (Status::BadFlags, raw(&|w| w[0] |= 1 << (40 + 5))),
        (Status::BadFlags, Sqe::nop().flags(SqeFlags::FENCE)),
        (Status::BadReserved, raw(&|w| w[0] |= 1 << 57)),
        (Status::BadClass, put.class(2)),
        (Status::BadLocalKey, Sqe::put(gone.slice(0, 8), key.at(0))),
        (Status::LocalOutOfBounds, Sqe::put(local.slice(4090, 8), key.at(0))),
        (Status::LocalOutOfBounds, Sqe::put(local.slice(u64::MAX - 3, 8), key.at(0))),
        (Status::LocalOutOfBounds, Sqe::send(local.slice(4096, 1), world.ab, 0)),
        (Status::RemoteOutOfBounds, Sqe::put(local.slice(0, 8), key.at(4089))),
        (Status::RemoteOutOfBounds, Sqe::put(local.slice(0, 8), key.at(u64::MAX - 7))),
        (Status::RemoteOutOfBounds, Sqe::get(local.slice(0, 8), key.at(u64::MAX))),
        (Status::RemoteOutOfBounds, Sqe::put_signal(local.slice(0, 8), key.at(0), 512, verbring::Signal::Add(1))),
        (Status::RemoteAccess, Sqe::put(local.slice(0, 8), only_read.at(0))),
        (Status::RemoteAccess, Sqe::put_word(1, only_read.at(0))),
        (Status::RemoteAccess, Sqe::fetch_add(only_read.at(0), 1)),
        (Status::BadLength, Sqe::put_inline(&[1; 17], key.at(0))),
        (Status::Misaligned, Sqe::fetch_add(key.at(4), 1)),
        (Status::Misaligned, Sqe::compare_swap(key.at(4095), 1, 1)),
        (Status::PeerUnknown, raw(&|w| w[1] = 0xfff_ffff)),
        (Status::PeerUnknown, raw(&|_| {})),
    ];
    for (i, (expected, sqe)) in cases.iter().enumerate() {
        assert_eq!(status(&mut world, *sqe), *expected, "case {i}");
        // The same where it has to wait.
        let message = world.a.alloc(1).unwrap();
        world.a.send(message, world.ab, 0, Opts { user_data: 1, ..Opts::default() }).unwrap();
        world.a.push(sqe.user_data(2)).unwrap();
        let done = world.reap();
        assert_eq!((done.user_data, done.status), (2, *expected), "case {i}, behind another");
        let room = world.b.alloc(1).unwrap();
        world.b.recv(room, world.ba, Opts::default()).unwrap();
        assert!(world.reap().is_success());
        world.until(|world| world.b.reap());
    }
    assert_eq!(status(&mut world, other_peer), Status::Success);
    let long = world.local_window(20_000);
    let too_long = Sqe::send(long.slice(0, 20_000), world.ab, 0);
    assert_eq!(status(&mut world, too_long), Status::BadLength);
    // An import that was given up, and one of another registration.
    world.a.release(key).unwrap();
    assert_eq!(status(&mut world, put), Status::BadRemoteKey);
    let again = world.import(&window);
    assert_ne!(again, key);
    assert_eq!(status(&mut world, put), Status::BadRemoteKey);
}

#[test]
fn sqes_on_local() {
    sqes(local(small()));
}

#[test]
fn sqes_on_shm() {
    sqes(shm(small()));
}

#[test]
fn sqes_on_deferred() {
    sqes(deferred(small(), 11, Faults::default()));
}

/// A chain ends with its first mistake, whatever kind that is.
#[test]
fn a_mistake_fails_its_chain() {
    let mut world = local(small());
    let (window, key) = world.export(4096, Rights::all());
    for bad in [
        Sqe::put_word(1, key.at(0)).class(9),
        Sqe::put_word(1, key.at(0)).flags(SqeFlags::REPLAY),
        Sqe::put_word(1, key.at(0)).flags(SqeFlags::ADD),
        Sqe::put_word(1, key.at(5000)),
    ] {
        world.a.push(Sqe::put_word(1, key.at(8)).flags(SqeFlags::LINK).user_data(1)).unwrap();
        world.a.push(bad.flags(SqeFlags::LINK).user_data(2)).unwrap();
        world.a.push(Sqe::put_word(1, key.at(16)).flags(SqeFlags::LINK).user_data(3)).unwrap();
        world.a.push(Sqe::put_word(1, key.at(16)).user_data(4)).unwrap();
        let ends: Vec<_> = world.reap_all(4).iter().map(|c| c.status).collect();
        assert!(ends[0].is_success() && !ends[1].is_success(), "{ends:?}");
        assert_eq!(ends[2..], [Status::Cancelled, Status::Cancelled]);
    }
    assert_eq!((window.load(0), window.load(16)), (0, 0));
}

/// What is full says so, and gives the block back.
#[test]
fn full_tables() {
    let mut world = local(small());
    let (_window, key) = world.export(4096, Rights::all());
    for _ in 0..64 {
        world.a.push(Sqe::put_word(1, key.at(0))).unwrap();
    }
    assert_eq!(world.a.push(Sqe::nop()), Err(PushError::SqFull));
    let buf = world.a.alloc(100).unwrap();
    let (why, buf) = world.a.put(buf, key.at(0), Opts::default()).unwrap_err();
    assert_eq!((why, buf.len()), (PushError::SqFull, 100));
    assert_eq!(world.reap_all(64).len(), 64);
    let foreign = world.b.alloc(1).unwrap();
    assert!(matches!(world.a.put(foreign, key.at(0), Opts::default()), Err((PushError::NotMine, _))));
    // 64 operations that stay pending, and one more.
    let message = world.local_window(64);
    for i in 0..65 {
        world.a.push(Sqe::send(message.slice(0, 8), world.ab, i).user_data(u64::from(i))).unwrap();
        world.step();
    }
    world.a.push(Sqe::nop().user_data(99)).unwrap();
    let done = world.reap_all(2);
    assert_eq!((done[0].status, done[1].user_data), (Status::TooManyOutstanding, 99));
    // Windows and imports.
    let full = std::iter::repeat_with(|| world.a.window(8, Rights::READ)).find_map(Result::err).unwrap();
    assert_eq!(full, AccessError::WindowTableFull { limit: 16 });
    let window = world.b.window(64, Rights::READ).unwrap();
    let remote = world.b.remote(&window).unwrap();
    let full = std::iter::repeat_with(|| world.a.import(world.ab, &remote)).find_map(Result::err).unwrap();
    assert_eq!(full, AccessError::ImportTableFull { limit: 16 });
    // Peers.
    let mut a = shm_engine(small());
    let b = shm_engine(small());
    let target = b.device().name().to_string();
    let full = std::iter::repeat_with(|| a.connect(&target, 0)).find_map(Result::err).unwrap();
    assert!(matches!(full, EngineError::Device(DeviceError::Full { limit: 8, .. })), "{full:?}");
    // Where the device has room for more than the engine.
    let options = ShmOptions { max_links: 32, max_imports: 16 };
    let mut a = engine(small(), |node| Shm::bind(&name("wide"), node, options).unwrap());
    let full = std::iter::repeat_with(|| a.connect(&target, 0)).find_map(Result::err).unwrap();
    assert_eq!(full, EngineError::PeerTableFull { limit: 8 });
}

#[test]
fn sizes_and_classes() {
    let bad = |change: &dyn Fn(&mut Config)| {
        let mut config = small();
        change(&mut config);
        verbring::open_with(config, &[], RegionOptions::default(), |node| Ok(local_device(node))).err()
    };
    let is_size = |error: Option<WaitError>, which: &str| matches!(error, Some(WaitError::Engine(EngineError::Size { what, .. })) if what == which);
    assert!(is_size(bad(&|c| c.sq_entries = 0), "sq_entries"));
    assert!(is_size(bad(&|c| c.cq_entries = 1 << 20), "cq_entries"));
    for too_many in [65, 127, 128] {
        assert!(is_size(bad(&|c| c.max_outstanding = too_many), "max_outstanding"));
    }
    assert!(is_size(bad(&|c| c.max_peers = 5000), "max_peers"));
    let classes = [SizeClass { size: 8, count: 0 }];
    let engine = verbring::open_with(small(), &classes, RegionOptions::default(), |node| Ok(local_device(node)));
    assert!(matches!(engine.err(), Some(WaitError::Slab(SlabError::Classes))));
}

/// A Remote of another engine, another life, a wrong token, an old epoch; a region of another domain.
#[test]
fn imports() {
    let mut world = shm(small());
    let window = world.b.window(4096, Rights::all()).unwrap();
    let remote = world.b.remote(&window).unwrap();
    let wrong_node = Remote { node: remote.node ^ 1, ..remote };
    assert!(matches!(world.a.import(world.ab, &wrong_node), Err(AccessError::WrongNode { .. })));
    let mut refused = |remote: Remote| {
        let key = world.a.import(world.ab, &remote).unwrap();
        loop {
            for notice in world.control() {
                if let Notice::ImportFailed { key: of, status } = notice {
                    assert_eq!(of, key);
                    world.a.release(key).unwrap();
                    return status;
                }
            }
        }
    };
    let mut token = remote.token;
    token[15] ^= 1;
    assert_eq!(refused(Remote { token, ..remote }), Status::RemoteAccess);
    assert_eq!(refused(Remote { epoch: remote.epoch + 1, ..remote }), Status::StaleEpoch);
    assert_eq!(refused(Remote { key: remote.key ^ 3, ..remote }), Status::StaleEpoch);
    let private = world.local_window(64);
    assert_eq!(world.a.remote(&private), Err(AccessError::NotExported));
    assert_eq!(world.b.remote(&private), Err(AccessError::NoSuchWindow), "a window of another engine");
    let elsewhere = Remote { domain: Domain::Engine, ..remote };
    let key = world.a.import(world.ab, &elsewhere).unwrap();
    while !world.control().contains(&Notice::Imported { key }) {}
    assert_eq!(status(&mut world, Sqe::fetch_add(key.at(0), 1)), Status::WrongDomain);
    assert_eq!(status(&mut world, Sqe::put_word(1, key.at(0))), Status::Success);
    // A Remote that claims more than there is gets what there is; one that claims less rights gets less.
    let modest = Remote { rights: Rights::READ, len: 1 << 40, ..remote };
    let key = world.a.import(world.ab, &modest).unwrap();
    while !world.control().contains(&Notice::Imported { key }) {}
    assert_eq!(world.a.import_len(key), Some(4096));
    assert_eq!(status(&mut world, Sqe::put_word(1, key.at(0))), Status::RemoteAccess);
    let gone = world.ab;
    world.a.disconnect(gone, world.now);
    assert_eq!(world.a.import(gone, &remote), Err(AccessError::NoSuchPeer));
}

/// The defined answers to registering twice, overlapping, and deregistering in flight.
#[test]
fn registrations() {
    let mut world = shm(small());
    let region = Arc::new(Region::shared(8192, RegionOptions::default()).unwrap());
    let first = world.b.register_region(region.clone(), 8192, Rights::all()).unwrap();
    let twice = world.b.register_region(region.clone(), 4096, Rights::all());
    assert_eq!(twice.unwrap_err(), AccessError::Device(DeviceError::AlreadyExported));
    let local = world.b.register_region(region.clone(), 4096, Rights::empty()).unwrap();
    first.store(0, 5);
    assert_eq!(local.load(0), 5, "for local use it may overlap");
    world.b.close_window(&first, 0, 0).unwrap();
    let again = world.b.register_region(region.clone(), 8192, Rights::READ);
    assert_eq!(again.unwrap_err(), AccessError::Device(DeviceError::RightsDiffer), "rights are for ever");
    assert!(world.b.register_region(region.clone(), 8192, Rights::WRITE).is_ok());
    let beyond = world.b.register_region(region.clone(), region.len() + 1, Rights::READ);
    assert_eq!(beyond.unwrap_err(), AccessError::BadRange);
    let mut bytes = vec![0u8; 4096];
    let base = std::ptr::NonNull::from(&mut bytes[1]);
    // SAFETY: the vector outlives the engine's use of it.
    let private = unsafe { world.b.register(Memory::Private { base, len: 1000 }, Rights::READ) };
    assert_eq!(private.unwrap_err(), AccessError::BadRange);
    let base = std::ptr::NonNull::from(&mut bytes[0]);
    // SAFETY: as above.
    let private = unsafe { world.b.register(Memory::Private { base, len: 1000 }, Rights::READ) };
    assert_eq!(private.unwrap_err(), AccessError::Device(DeviceError::NotShareable));
    // In flight.
    let (target, key) = world.export(8 << 20, Rights::all());
    let source = world.local_window(8 << 20);
    world.a.push(Sqe::put(source.slice(0, 8 << 20), key.at(0))).unwrap();
    world.step();
    assert_eq!(world.a.close_window(&source, 0, 0), Err(AccessError::Busy { in_flight: 1, importers: 0 }));
    assert_eq!(world.a.release(key), Err(AccessError::Busy { in_flight: 1, importers: 0 }));
    assert!(world.reap().is_success());
    world.a.close_window(&source, 0, 0).unwrap();
    world.a.release(key).unwrap();
    drop(target);
}

/// Nothing that is forgotten is used after it was freed.
#[test]
fn forgetting() {
    let mut world = shm(small());
    let (window, key) = world.export(4096, Rights::all());
    std::mem::forget(world.a.alloc(100).unwrap());
    let room = world.a.alloc(100).unwrap();
    world.a.recv(room, world.ab, Opts::default()).unwrap();
    world.step();
    std::mem::forget(world.a);
    drop(world.b);
    window.store(0, 1);
    let _ = key;
    let mut world = local(small());
    let (window, key) = world.export(4096, Rights::all());
    std::mem::forget(window);
    drop(world.b);
    world.a.push(Sqe::put_word(1, key.at(0))).unwrap();
    world.a.submit(1);
    assert_eq!(world.a.reap().unwrap().status, Status::ConnectionLost);
}

fn raw_socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

fn address_of(name: &str, uid: u32) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(format!("verbring/{uid}/{name}").as_bytes()).unwrap()
}

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[test]
fn names() {
    let taken = name("taken");
    let first = Shm::bind(&taken, 1, ShmOptions::default()).unwrap();
    assert_eq!(Shm::bind(&taken, 2, ShmOptions::default()).err(), Some(DeviceError::NameInUse));
    drop(first);
    let mut again = Shm::bind(&taken, 3, ShmOptions::default()).expect("the name is free at once");
    for bad in ["", "a b", "a/b", "x\0y"] {
        assert_eq!(Shm::bind(bad, 1, ShmOptions::default()).err(), Some(DeviceError::BadName));
    }
    assert_eq!(again.connect("nobody-here", 0, 0).err(), Some(DeviceError::NoSuchName));
}

/// Garbage on the bootstrap socket, another version, silence, floods: others connect all the same.
#[test]
fn hostile_clients() {
    let mut server = shm_engine(small());
    let address = address_of(server.device().name(), uid());
    let target = server.device().name().to_string();
    let mut garbage: Vec<Vec<u8>> =
        vec![vec![0; PACKET_BYTES], vec![0xff; PACKET_BYTES], b"GET / HTTP/1.1".to_vec(), vec![1], vec![7; 4096]];
    // Whole packets that are none to begin with: a hello without its lane, answers to nothing.
    let greeting = [0; GREETING_BYTES];
    let bodies = [
        Body::Hello { replaces: 0, greeting },
        Body::Hello { replaces: 9, greeting: [1; GREETING_BYTES] },
        Body::Welcome { greeting },
        Body::Ready { ack: 0 },
        Body::Message { seq: 1, ack: 0, message: [0; MESSAGE_BYTES], grant: None },
        Body::Reject(Reason::Full),
        Body::Bye,
    ];
    for body in bodies {
        let mut bytes = Packet { node: 5, epoch: 1, to: 0, body }.encode().to_vec();
        garbage.push(bytes.clone());
        bytes[20] ^= 1;
        garbage.push(bytes);
    }
    let count = garbage.len() as u64;
    for bytes in garbage {
        let socket = raw_socket();
        rustix::net::connect(&socket, &address).unwrap();
        server.control(1);
        rustix::net::send(&socket, &bytes, SendFlags::empty()).unwrap();
        server.control(2);
        server.control(3);
        let mut answer = [0u8; 200];
        let _ = rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::DONTWAIT);
    }
    assert_eq!(server.device().rejected(), count);
    // A version of the future is told which one this is.
    for longer in [0, 56] {
        let socket = raw_socket();
        rustix::net::connect(&socket, &address).unwrap();
        let mut hello = vec![0; PACKET_BYTES + longer];
        hello[..9].copy_from_slice(b"VRBC\x63\0\0\0\x01");
        rustix::net::send(&socket, &hello, SendFlags::empty()).unwrap();
        server.control(4);
        server.control(5);
        let mut answer = [0u8; 200];
        let (len, _) = rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::DONTWAIT).unwrap();
        assert_eq!(Packet::decode(&answer[..len]), Ok(Packet::reject_unheard(Reason::Version)));
    }
    // Silent ones do not take every place, and are dropped after a while.
    let silent: Vec<OwnedFd> = (0..20)
        .map(|_| {
            let socket = raw_socket();
            rustix::net::connect(&socket, &address).unwrap();
            socket
        })
        .collect();
    server.control(6);
    let mut client = shm_engine(small());
    client.connect(&target, 0).unwrap();
    let world = World::meet(client, server);
    drop((silent, world));
}

/// A client that speaks the protocol and lies in its grants and messages loses its connection, and takes nothing along.
#[test]
fn lying_grants() {
    let mut server = shm_engine(small());
    let lane = Region::shared(verbring_sys::lane::LANE_BYTES, small_pages()).unwrap();
    // SAFETY: the region outlives the lane.
    unsafe { verbring_sys::lane::Lane::create(lane.base()) };
    lane.seal_seals().unwrap();
    let sparse = rustix::fs::memfd_create(c"x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sparse, 64 << 30).unwrap();
    let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&sparse, seals).unwrap();
    let grant = |len| Grant { mr: 0, epoch: 0, base: 0, len, writable: true };
    let good = Region::shared(4096, small_pages()).unwrap();
    good.seal_seals().unwrap();
    // What it says of the memory, the engine's kind of message, the descriptor; and which epoch it is off by.
    let cases: Vec<(Grant, u8, Option<OwnedFd>, u32)> = vec![
        (grant(64 << 30), 2, Some(sparse), 0),
        (grant(4096), 2, None, 0),
        (grant(8192), 2, Some(good.hand_out().unwrap()), 0),
        (grant(4096), 99, Some(good.hand_out().unwrap()), 0),
        (grant(0), 2, Some(good.hand_out().unwrap()), 0),
        (Grant { base: 8, ..grant(4096) }, 2, Some(good.hand_out().unwrap()), 0),
        // Of an earlier life.
        (grant(4096), 2, Some(good.hand_out().unwrap()), 1),
    ];
    for (i, (grant, kind, fd, off)) in cases.into_iter().enumerate() {
        let (client, peer) = RawClient::meet(&mut server, &lane);
        client.say(Packet { to: client.to - off, ..client.message(1, kind, grant) }, fd);
        let lost = (0..10).find_map(|now| server.control(now));
        assert!(matches!(lost, Some(Notice::Lost { cause: DeviceError::Protocol(_), .. })), "case {i}: {lost:?}");
        server.disconnect(peer, 1);
    }
    // A grant that nobody asked for is let go at once, and costs nothing.
    let (client, _) = RawClient::meet(&mut server, &lane);
    let inode = rustix::fs::fstat(good.hand_out().unwrap()).unwrap().st_ino;
    let before = mappings_of(inode);
    for seq in 1..=1000 {
        client.say(client.message(seq, 2, grant(4096)), Some(good.hand_out().unwrap()));
        assert_eq!(server.control(9), None);
        assert!(matches!(client.hear().body, Body::Message { .. }), "it is let go of");
    }
    assert_eq!(mappings_of(inode), before, "mappings pile up");
}

/// A client that speaks the protocol by hand.
struct RawClient {
    socket: OwnedFd,
    /// The server's epoch.
    to: u32,
}

impl RawClient {
    /// Connects to a server over a lane.
    fn meet(server: &mut Engine<Shm>, lane: &Region) -> (RawClient, verbring::PeerId) {
        let client = RawClient::dial(server, lane, 0);
        match (0..10).find_map(|now| server.control(now)) {
            Some(Notice::Connected { peer, node: 5, .. }) => (client, peer),
            other => panic!("{other:?}"),
        }
    }

    /// The handshake, up to where the server has something to tell.
    fn dial(server: &mut Engine<Shm>, lane: &Region, replaces: u32) -> RawClient {
        let mut client = RawClient { socket: raw_socket(), to: 0 };
        rustix::net::connect(&client.socket, &address_of(server.device().name(), uid())).unwrap();
        let hello = Body::Hello { replaces, greeting: [0; GREETING_BYTES] };
        client.say(client.packet(hello), Some(lane.hand_out().unwrap()));
        assert_eq!((0..10).find_map(|now| server.control(now)), None, "not before this side is ready");
        let welcome = client.hear();
        assert!(matches!(welcome.body, Body::Welcome { .. }) && welcome.to == 7 && welcome.epoch != 0);
        client.to = welcome.epoch;
        client.say(client.packet(Body::Ready { ack: 0 }), None);
        client
    }

    fn packet(&self, body: Body) -> Packet {
        Packet { node: 5, epoch: 7, to: self.to, body }
    }

    fn message(&self, seq: u32, kind: u8, grant: Grant) -> Packet {
        let mut message = [0; MESSAGE_BYTES];
        message[0] = kind;
        self.packet(Body::Message { seq, ack: 0, message, grant: Some(grant) })
    }

    fn say(&self, packet: Packet, fd: Option<OwnedFd>) {
        send_with(&self.socket, &packet.encode(), fd);
    }

    fn hear(&self) -> Packet {
        let mut bytes = [0u8; PACKET_BYTES];
        let heard = rustix::net::recv(&self.socket, &mut bytes, rustix::net::RecvFlags::DONTWAIT);
        assert!(matches!(heard, Ok((PACKET_BYTES, _))), "{heard:?}");
        Packet::decode(&bytes).unwrap()
    }
}

/// Only who knows the epoch of a connection replaces it; everybody else is a new peer.
#[test]
fn impostors() {
    let mut server = shm_engine(small());
    let lane = Region::shared(verbring_sys::lane::LANE_BYTES, small_pages()).unwrap();
    // SAFETY: the region outlives the lane.
    unsafe { verbring_sys::lane::Lane::create(lane.base()) };
    lane.seal_seals().unwrap();
    let (first, peer) = RawClient::meet(&mut server, &lane);
    for guess in [first.to.wrapping_add(1), first.to.wrapping_sub(1), 7, u32::MAX] {
        let _impostor = RawClient::dial(&mut server, &lane, guess);
        let told = (0..10).find_map(|now| server.control(now));
        let Some(Notice::Connected { peer: other, .. }) = told else { panic!("{told:?}") };
        assert!(other != peer && server.peer_state(peer) == Some(verbring::PeerState::Up));
        server.disconnect(other, 1);
    }
    let _second = RawClient::dial(&mut server, &lane, first.to);
    let told: Vec<_> = (0..10).filter_map(|now| server.control(now)).collect();
    let [Notice::Lost { peer: lost, .. }, Notice::Connected { peer: again, .. }] = told[..] else { panic!("{told:?}") };
    assert_eq!((lost, again), (peer, peer));
}

/// How often a file is mapped in this process.
fn mappings_of(inode: u64) -> usize {
    let inode = inode.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
}

fn small_pages() -> RegionOptions {
    RegionOptions { largest: verbring::Pages::Small, ..RegionOptions::default() }
}

fn send_with(socket: &OwnedFd, bytes: &[u8], fd: Option<OwnedFd>) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_ref().map(AsFd::as_fd);
    let fds = fds.as_slice();
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(socket, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

/// A peer that never reads its control messages is lost, and said to be; what is pending with it ends.
#[test]
fn a_peer_that_does_not_listen() {
    let mut world = shm(small());
    let (window, key) = world.export(4096, Rights::READ);
    world.a.release(key).unwrap();
    let room = world.b.alloc(8).unwrap();
    world.b.recv(room, world.ba, Opts::default()).unwrap();
    world.step();
    let remote = world.b.remote(&window).unwrap();
    // `a` asks and never looks at the answers; each is a packet with a descriptor.
    let lost = (0..100_000).find_map(|_| {
        if let Ok(key) = world.a.import(world.ab, &remote) {
            world.a.release(key).unwrap();
        }
        let notice = world.b.control(world.now)?;
        matches!(notice, Notice::Lost { .. }).then_some(notice)
    });
    assert!(lost.is_some());
    assert_eq!(world.until(|world| world.b.reap()).status, Status::ConnectionLost);
}

/// Where this runs as root: an ordinary user can do all of it, and cannot reach another user's.
#[test]
fn another_user() {
    if uid() != 0 {
        println!("SKIPPED another_user: it needs root to become another user");
        return;
    }
    let mut server = shm_engine(small());
    let target = server.device().name().to_string();
    let child = verbring_tests::as_nobody(|| {
        // The name of another user is not even looked up; found by hand, it refuses.
        let mut own = shm_engine(small());
        if own.connect(&target, 0) != Err(EngineError::Device(DeviceError::NoSuchName)) {
            return 10;
        }
        let socket = raw_socket();
        if rustix::net::connect(&socket, &address_of(&target, 0)).is_err() {
            return 11;
        }
        let mut answer = [0u8; PACKET_BYTES];
        match rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()) {
            Ok(_) if Packet::decode(&answer) == Ok(Packet::reject_unheard(Reason::User)) => {}
            _ => return 12,
        }
        // And an ordinary user's own engines work.
        let mut world = shm(small());
        let (window, key) = world.export(3 << 20, Rights::all());
        world.a.push(Sqe::put_word(77, key.at(8))).unwrap();
        if !world.reap().is_success() || window.load(8) != 77 {
            return 13;
        }
        // Too little memory may be locked: said in advance, with the figures.
        let lock = RegionOptions { lock: true, ..RegionOptions::default() };
        match Region::private(1 << 30, lock) {
            Err(RegionError::MemLock { needed, soft, .. }) if needed == 1 << 30 && soft < 1 << 30 => 0,
            _ => 14,
        }
    });
    let code = loop {
        server.control(1);
        if let Some(code) = child.try_wait() {
            break code;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(code, 0);
    assert!(server.device().rejected() >= 1);
}

/// The other way round: a name of another user that looks like ours is not trusted.
#[test]
fn a_squatter() {
    if uid() != 0 {
        println!("SKIPPED a_squatter: it needs root to become another user");
        return;
    }
    let taken = name("squatted");
    let child = verbring_tests::as_nobody(|| {
        let socket = raw_socket();
        if rustix::net::bind(&socket, &address_of(&taken, 0)).is_err() || rustix::net::listen(&socket, 4).is_err() {
            return 1;
        }
        std::thread::sleep(Duration::from_secs(20));
        0
    });
    let mut engine = shm_engine(small());
    let refused = loop {
        match engine.connect(&taken, 0) {
            Err(EngineError::Device(DeviceError::NoSuchName)) => std::thread::sleep(Duration::from_millis(1)),
            other => break other,
        }
    };
    assert_eq!(refused, Err(EngineError::Device(DeviceError::WrongUser { theirs: 65534, ours: 0 })));
    drop(child);
}

/// A read-only region cannot be written by a peer of the same user, not even by reopening its descriptor.
#[test]
fn read_only_is_read_only() {
    let region = Region::shared(8192, RegionOptions::default()).unwrap();
    let region = Arc::new(region);
    let mut world = shm(small());
    let window = world.b.register_region(region.clone(), 8192, Rights::READ).unwrap();
    window.store(0, 42);
    let key = world.import(&window);
    assert_eq!(status(&mut world, Sqe::put_word(1, key.at(0))), Status::RemoteAccess);
    // What a peer holds is this descriptor.
    let fd = region.hand_out().unwrap();
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let map = |fd: &OwnedFd| {
        // SAFETY: a new mapping of one page, which is not used.
        unsafe { mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0) }
    };
    assert!(map(&fd).is_err());
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let reopened: OwnedFd = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into();
    assert!(map(&reopened).is_err());
    assert!(rustix::io::pwrite(&reopened, &[1; 8], 0).is_err());
    use rustix::fs::{FallocateFlags, fallocate};
    assert!(fallocate(&reopened, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096).is_err());
    assert!(rustix::fs::ftruncate(&reopened, 0).is_err());
    // SAFETY: a new mapping, to be made writable in vain.
    let readable =
        unsafe { mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &reopened, 0) }.unwrap();
    // SAFETY: it is refused.
    let writable = unsafe {
        rustix::mm::mprotect(readable, 4096, rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE)
    };
    assert!(writable.is_err());
    assert_eq!(window.load(0), 42);
}

/// Waiting for what does not come ends in time, with a sentence.
#[test]
fn waiting_in_vain() {
    let clock = Clock::start();
    let mut engine: Engine<Shm> = shm_engine(small());
    let short = Duration::from_millis(20);
    let missing = engine.connect_wait("nobody-here", &clock, short).unwrap_err();
    assert!(missing.to_string().contains("nobody"), "{missing}");
    // Somebody who listens and never answers.
    let mute = name("mute");
    let socket = raw_socket();
    rustix::net::bind(&socket, &address_of(&mute, uid())).unwrap();
    rustix::net::listen(&socket, 4).unwrap();
    let error = engine.connect_wait(&mute, &clock, short).unwrap_err();
    assert!(matches!(error, WaitError::TimedOut { what: "the connection", .. }), "{error}");
    assert!(matches!(engine.wait(&clock, short), Err(WaitError::TimedOut { .. })));
    assert!(matches!(engine.accept_wait(&clock, short), Err(WaitError::TimedOut { .. })));
    let peer = engine.connect(&mute, 0).unwrap();
    assert_eq!(engine.control(HANDSHAKE_NS + 1), Some(Notice::Lost { peer, cause: DeviceError::TimedOut }));
}

/// An id of a peer that is gone.
fn nobody() -> verbring::PeerId {
    local(small()).ab
}

#[test]
fn an_engine_that_goes() {
    let mut engine = engine(small(), local_device);
    let classes = [SizeClass { size: 64, count: 4 }];
    let make_slab = || {
        let region = Region::private(verbring::Slab::bytes(&classes), RegionOptions::default()).unwrap();
        verbring::Slab::new(verbring::Arena::from_region(region), &classes).unwrap()
    };
    let mut port = engine.add_port(Some(make_slab())).unwrap();
    port.push(Sqe::nop().user_data(1)).unwrap();
    engine.submit(0);
    let buf = port.alloc(10).unwrap();
    let far = verbring::Opts { user_data: 2, ..Opts::default() };
    port.send(buf, nobody(), 0, far).unwrap();
    drop(engine);
    assert_eq!(port.reap().unwrap().user_data, 1);
    assert!(port.reap().is_none() && port.is_engine_gone());
    let untaken = port.reap_untaken().unwrap();
    assert_eq!((untaken.user_data, untaken.status, untaken.buf.is_some()), (2, Status::ConnectionLost, true));
    assert!(port.reap_untaken().is_none());
    // Places of ports that were dropped are used again.
    let mut engine = self::engine(small(), local_device);
    for _ in 0..40 {
        let port = engine.add_port(Some(make_slab())).unwrap();
        drop(port);
    }
    let ports: Vec<_> = std::iter::from_fn(|| engine.add_port(None).ok()).collect();
    assert_eq!(ports.len(), verbring::MAX_PORTS - 1);
}

/// A forked child that drops an engine it inherited disturbs nobody.
#[test]
fn a_forked_child() {
    let mut world = shm(small());
    let (window, key) = world.export(4096, Rights::all());
    let World { a, b, ab, ba, now, address, clock } = world;
    let mut ends = Some((a, b));
    let child = verbring_tests::fork(|| {
        drop(ends.take());
        0
    });
    while child.try_wait().is_none() {}
    let (a, b) = ends.expect("the parent's");
    let mut world = World { a, b, ab, ba, now, address, clock };
    assert_eq!(world.control(), []);
    world.a.push(Sqe::put_word(5, key.at(0))).unwrap();
    assert!(world.reap().is_success());
    assert_eq!(window.load(0), 5);
}

/// Entries of nothing but zeros name nobody, also where no peer, import or Window ever was.
#[test]
fn names_of_nobody() {
    let mut engine = engine(small(), local_device);
    for opcode in [1u64, 2, 3, 4, 7, 8, 9] {
        // SAFETY: words that name no memory.
        let sqe = unsafe { Sqe::from_words([opcode << 32, 0, 0, 0, opcode, 0, 0, 0]) };
        assert_eq!(engine.execute(&sqe), None);
        engine.push(sqe).unwrap();
        engine.submit(0);
        let done = engine.reap().unwrap();
        assert_eq!((done.user_data, done.status), (opcode, Status::PeerUnknown), "opcode {opcode}");
    }
}

/// A port that takes the place of an engine's own leaves the engine whole.
#[test]
fn ports_that_are_exchanged() {
    let mut engine = engine(small(), local_device);
    let extra = engine.add_port(None).unwrap();
    drop(std::mem::replace(&mut *engine, extra));
    let mut other = engine.add_port(None).unwrap();
    for port in [&mut *engine as &mut verbring::Port, &mut other] {
        port.push(Sqe::nop().user_data(5)).unwrap();
    }
    assert_eq!(engine.submit(0), 2);
    assert_eq!((engine.reap().unwrap().user_data, other.reap().unwrap().user_data), (5, 5));
}
