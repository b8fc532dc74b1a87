//! Engines in two processes on two hosts, over UDP: everything arrives, whatever the cable loses, and when it is cut, what
//! is pending ends by itself.

use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use verbring::{
    Clock, Config, Engine, Notice, Opts, PeerId, REMOTE_BYTES, RegionOptions, Remote, RemoteKey, Rights, Signal, Sqe,
    Status, Window, open_with,
};
use verbring_sim::udp::{self, UdpDevice, UdpOptions};
use verbring_tests::netns::{Host, Loss, MTU, Netns};
use verbring_tests::{CLASSES, Child, fork, pattern, repeats, small};

/// No test may hang.
const GUARD: Duration = Duration::from_secs(120);
const PATIENCE: Duration = Duration::from_secs(60);

const MILLION: u32 = 1_000_000;

/// The target's window: data, then words.
const DATA: usize = 1 << 20;
const COUNTER: usize = DATA;
const SIGNAL: usize = DATA + 8;
const ECHO: usize = DATA + 16;
const END: usize = DATA + 24;
const WINDOW: usize = DATA + 4096;

/// How long the bytes behind a signal are.
const SIGNALLED: u32 = 50_000;
const MESSAGES: u32 = 40;

/// An end in a process of its own, on its host for good.
struct End {
    engine: Engine<UdpDevice>,
    clock: Clock,
}

impl End {
    fn open(host: &Host, ip: IpAddr) -> End {
        host.join().expect("a host can be joined");
        let config = Config { max_peers: 4, ..small() };
        let options = UdpOptions { max_links: 4, ..UdpOptions::default() };
        let device = |node| udp::open(ip, node, options);
        End {
            engine: open_with(config, &CLASSES, RegionOptions::default(), device).expect("an engine"),
            clock: Clock::start(),
        }
    }

    /// Does one thing, and waits for its end: the value.
    fn call(&mut self, sqe: Sqe) -> u64 {
        self.engine.push(sqe).expect("room");
        let done = self.engine.wait(&self.clock, PATIENCE).expect("a completion");
        assert_eq!(done.status, Status::Success);
        done.value
    }

    fn meet(&mut self, to: IpAddr, remote: &Remote) -> (PeerId, RemoteKey) {
        let peer = self.engine.connect_wait(&to.to_string(), &self.clock, PATIENCE).expect("a connection");
        let key = self.engine.import_wait(peer, remote, &self.clock, PATIENCE).expect("an import");
        (peer, key)
    }
}

/// Offers its window, and does what its part is until it is told the end and left. `is_loyal`: a lost connection before
/// that is an error.
fn target(mut end: End, mut to_origin: UnixStream, is_loyal: bool) -> i32 {
    let window = end.engine.window(WINDOW, Rights::all()).expect("a window");
    to_origin.write_all(&end.engine.remote(&window).expect("a Remote").to_bytes()).unwrap();
    let (mut peer, mut messages, mut round) = (None, 0, 0);
    loop {
        let now = end.clock.now();
        end.engine.submit(now);
        end.engine.poll(now);
        while let Some(notice) = end.engine.control(now) {
            match notice {
                Notice::Connected { peer: of, .. } => {
                    peer = Some(of);
                    if is_loyal {
                        (0..8).for_each(|_| receive(&mut end, of));
                    }
                }
                Notice::Lost { peer: of, .. } => {
                    end.engine.disconnect(of, now);
                    let is_over = window.load(END) == 1;
                    if is_over {
                        assert!(messages == MESSAGES || !is_loyal, "{messages} messages");
                        return check_end(&window);
                    }
                    assert!(!is_loyal, "{notice:?}");
                }
                _ => {}
            }
        }
        while let Some(done) = end.engine.reap() {
            if done.status == Status::Success {
                check_message(done.imm, done.buf.as_deref().expect("a message"), &mut messages);
                receive(&mut end, peer.expect("a peer"));
            }
        }
        let signal = window.load(SIGNAL);
        if signal != round {
            assert_eq!(signal, round + 1, "a signal came twice, or not at all");
            let mut bytes = vec![0; SIGNALLED as usize];
            window.read(0, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == signal as u8), "the signal overtook its bytes");
            round = signal;
            window.store(ECHO, round);
        }
    }
}

fn receive(end: &mut End, peer: PeerId) {
    let buf = end.engine.alloc(2000).expect("a block");
    end.engine.recv(buf, peer, Opts::default()).expect("room");
}

fn check_message(imm: u32, bytes: &[u8], messages: &mut u32) {
    assert_eq!(imm, *messages, "a message is missing, or comes twice");
    assert_eq!(bytes, pattern((imm as usize * 97) % 2000, imm.into()));
    *messages += 1;
}

/// The last put is still there.
fn check_end(window: &Window) -> i32 {
    let mut bytes = vec![0; 100];
    window.read(1000, &mut bytes);
    assert_eq!(bytes, pattern(100, 99));
    0
}

/// The last put, and that it was that.
fn say_end(end: &mut End, key: RemoteKey) {
    let local = end.engine.window(4096, Rights::empty()).expect("a window");
    local.write(0, &pattern(100, 99));
    end.call(Sqe::put(local.slice(0, 100), key.at(1000)));
    end.call(Sqe::put_word(1, key.at(END as u64)));
}

fn read_remote(from_target: &mut UnixStream) -> Remote {
    let mut bytes = [0; REMOTE_BYTES];
    from_target.read_exact(&mut bytes).expect("the target's Remote");
    Remote::from_bytes(&bytes).expect("a Remote")
}

/// Everything, each verified.
fn origin(mut end: End, to: IpAddr, mut from_target: UnixStream) -> i32 {
    let remote = read_remote(&mut from_target);
    let (peer, key) = end.meet(to, &remote);
    let local = end.engine.window(DATA, Rights::empty()).expect("a window");
    for round in 0..u64::from(repeats(2, 20)) {
        for (i, len) in [0, 1, 7, 4096, 4097, 65_536, 300_001, 1_000_000].into_iter().enumerate() {
            let bytes = pattern(len, round * 100 + i as u64);
            local.write(0, &bytes);
            end.call(Sqe::put(local.slice(0, len as u32), key.at(i as u64)));
            local.fill(0, len, 0);
            end.call(Sqe::get(local.slice(0, len as u32), key.at(i as u64)));
            let mut back = vec![0; len];
            local.read(0, &mut back);
            assert!(back == bytes, "{len} bytes in round {round}");
        }
    }
    for i in 0..100 {
        assert_eq!(end.call(Sqe::fetch_add(key.at(COUNTER as u64), 1)), i, "it was added twice, or not at all");
    }
    assert_eq!(end.call(Sqe::compare_swap(key.at(COUNTER as u64), 100, 7)), 100);
    assert_eq!(end.call(Sqe::swap(key.at(COUNTER as u64), 8)), 7);
    for round in 1..=20 {
        local.fill(0, SIGNALLED as usize, round as u8);
        let (bytes, word) = (local.slice(0, SIGNALLED), (SIGNAL / 8) as u32);
        let signal = if round % 2 == 0 { Signal::Store(round) } else { Signal::Add(1) };
        end.call(Sqe::put_signal(bytes, key.at(0), word, signal));
        while {
            end.call(Sqe::get(local.slice(0, 8), key.at(ECHO as u64)));
            local.load(0) != round
        } {}
    }
    for imm in 0..MESSAGES {
        let bytes = pattern((imm as usize * 97) % 2000, imm.into());
        let mut buf = end.engine.alloc(bytes.len()).expect("a block");
        buf.copy_from_slice(&bytes);
        end.engine.send(buf, peer, imm, Opts::default()).expect("room");
        let done = end.engine.wait(&end.clock, PATIENCE).expect("a completion");
        assert_eq!(done.status, Status::Success);
    }
    say_end(&mut end, key);
    let nic = end.engine.device().rnic();
    let counters = nic.nic().counters;
    println!(
        "sent {}, again {}, timeouts {}; {:?}",
        counters.sent,
        counters.resent,
        counters.timeouts,
        nic.wire().socket().stats()
    );
    0
}

/// Waits for both. A panic of either is an error here.
fn join(ends: [Child; 2]) {
    let since = Instant::now();
    let mut codes = [None; 2];
    while codes.contains(&None) {
        for (code, end) in codes.iter_mut().zip(&ends) {
            *code = code.or_else(|| end.try_wait());
        }
        assert!(codes.iter().all(|code| matches!(code, None | Some(0))), "origin and target ended with {codes:?}");
        assert!(since.elapsed() < GUARD, "origin and target hang: {codes:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn netns(loss: Option<Loss>) -> Option<Netns> {
    let seed = 20_240_601;
    println!("seed {seed}");
    Netns::try_with(MTU, loss.map(|loss| (loss, seed))).map_err(|why| println!("SKIPPED: {why}")).ok()
}

fn between_hosts(loss: Option<Loss>, ip: fn(&Host) -> IpAddr) {
    let Some(netns) = netns(loss) else { return };
    let (a, b) = (&netns.a, &netns.b);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let target = fork(|| target(End::open(b, ip(b)), theirs, true));
    let origin = fork(|| origin(End::open(a, ip(a)), ip(b), ours));
    join([origin, target]);
    if let (Some(counts), Some(loss)) = (netns.counts(), loss) {
        let [seen, dropped] = [&counts.seen, &counts.dropped].map(|count| count.load(Ordering::Relaxed));
        println!("the relay saw {seen} packets and dropped {dropped}");
        assert!(loss.drops == 0 || dropped > 0);
    }
}

#[test]
fn over_a_cable() {
    between_hosts(None, |host| host.ipv4);
    between_hosts(None, |host| host.ipv6);
}

#[test]
fn over_a_relay() {
    between_hosts(Some(Loss::default()), |host| host.ipv4);
}

fn five_percent(spares_tcp: bool) -> Option<Loss> {
    let some = MILLION / 20;
    Some(Loss { drops: some, duplicates: some, reorders: some, spares_tcp })
}

#[test]
fn with_loss_and_disorder() {
    between_hosts(five_percent(true), |host| host.ipv4);
}

#[test]
fn with_loss_and_disorder_of_everything() {
    between_hosts(five_percent(false), |host| host.ipv6);
}

/// Asks the parent to cut the cable, or to join it again.
fn ask(parent: &mut UnixStream) {
    parent.write_all(&[1]).unwrap();
    parent.read_exact(&mut [0]).unwrap();
}

/// What is pending when the cable is cut, and what comes after, ends in error, each once. Then it is joined again.
fn cut_off(mut end: End, to: IpAddr, mut from_target: UnixStream, mut parent: UnixStream) -> i32 {
    let remote = read_remote(&mut from_target);
    let (peer, key) = end.meet(to, &remote);
    // Alone, nothing but silence tells of it.
    receive(&mut end, peer);
    ask(&mut parent);
    let done = end.engine.wait(&end.clock, PATIENCE).expect("it ends by itself");
    assert_eq!(done.status, Status::ConnectionLost);
    end.engine.disconnect(peer, end.clock.now());
    ask(&mut parent);

    let (peer, key) = {
        let _ = end.engine.release(key);
        end.meet(to, &remote)
    };
    let local = end.engine.window(DATA, Rights::empty()).expect("a window");
    receive(&mut end, peer);
    let buf = end.engine.alloc(100).expect("a block");
    end.engine.send(buf, peer, 0, Opts::default()).expect("room");
    for _ in 0..5 {
        end.engine.push(Sqe::put(local.slice(0, 500_000), key.at(0)).class(1)).unwrap();
        end.engine.push(Sqe::get(local.slice(500_000, 500_000), key.at(0)).class(1)).unwrap();
    }
    end.engine.submit(end.clock.now());
    end.engine.poll(end.clock.now());
    ask(&mut parent);
    let after = [
        Sqe::fetch_add(key.at(COUNTER as u64), 1),
        Sqe::put_word(1, key.at(COUNTER as u64)),
        Sqe::swap(key.at(COUNTER as u64), 5),
        Sqe::flush(peer),
    ];
    let later = after.len();
    for sqe in after {
        end.engine.push(sqe.user_data(1)).unwrap();
    }
    let mut ends = Vec::new();
    for _ in 0..2 + 10 + later {
        let done = end.engine.wait(&end.clock, PATIENCE).expect("it ends by itself");
        ends.push((done.user_data, done.status));
    }
    println!("{ends:?}");
    let failed = |status| matches!(status, Status::ConnectionLost | Status::OutcomeUnknown);
    assert!(ends.iter().all(|(user_data, status)| failed(*status) || (*user_data == 0 && *status == Status::Success)));
    assert!(ends.iter().filter(|(_, status)| failed(*status)).count() >= 2 + later, "{ends:?}");
    assert_eq!(end.engine.outstanding(), 0);
    end.engine.disconnect(peer, end.clock.now());
    ask(&mut parent);
    let _ = end.engine.release(key);
    let (_, key) = end.meet(to, &remote);
    say_end(&mut end, key);
    0
}

#[test]
fn a_dead_link_ends_what_is_pending() {
    let Some(netns) = netns(Some(Loss::default())) else { return };
    let (a, b) = (&netns.a, &netns.b);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut asked, parent) = UnixStream::pair().unwrap();
    let target = fork(|| target(End::open(b, b.ipv4), theirs, false));
    let origin = fork(|| cut_off(End::open(a, a.ipv4), b.ipv4, ours, parent));
    for drops in [MILLION, 0, MILLION, 0] {
        asked.read_exact(&mut [0]).expect("the origin asks");
        netns.set_loss(Loss { drops, ..Loss::default() });
        asked.write_all(&[1]).unwrap();
    }
    join([origin, target]);
}
