//! SIGKILL of either side at a random point, 1,000 times: every operation in flight ends, other peers are not disturbed,
//! nothing is left, and a new peer under the same name works at once.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use verbring::{
    Clock, Completion, DeviceError, Notice, Opts, PeerId, PeerState, REMOTE_BYTES, Remote, RemoteKey, Rights, Shm,
    Signal, Sqe, Status, WaitError,
};
use verbring_tests::{Child, fork, name, repeats, shm_engine, small};

type Engine = verbring::Engine<Shm>;

const WAIT: Duration = Duration::from_secs(30);

/// A generator that is the same on each run of a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Serves as `name`: exports a window to whoever connects, receives messages, and never ends by itself.
fn victim(name: &str) -> i32 {
    let mut engine = engine_named(name);
    let clock = Clock::start();
    let window = engine.window(1 << 20, Rights::all()).expect("a window");
    let remote = engine.remote(&window).expect("a Remote").to_bytes();
    loop {
        let now = clock.now();
        engine.submit(now);
        engine.poll(now);
        if let Some(Notice::Connected { peer, .. }) = engine.control(now) {
            let mut message = engine.alloc(REMOTE_BYTES).expect("a block");
            message.copy_from_slice(&remote);
            engine.send(message, peer, 0, Opts::default()).expect("room");
        }
        while engine.reap().is_some() {}
    }
}

fn engine_named(name: &str) -> Engine {
    verbring_tests::engine(small(), |node| Shm::bind(name, node, verbring::ShmOptions::default()).expect("a device"))
}

/// Connects to a victim and gets its window.
fn meet(engine: &mut Engine, name: &str, clock: &Clock) -> Result<(PeerId, RemoteKey), WaitError> {
    let peer = engine.connect_wait(name, clock, WAIT)?;
    let room = engine.alloc(REMOTE_BYTES).expect("a block");
    engine.recv(room, peer, Opts::default()).expect("room");
    let got = engine.wait(clock, WAIT)?;
    assert_eq!(got.status, Status::Success);
    let bytes = got.buf.as_ref().and_then(|buf| buf[..].try_into().ok()).expect("a Remote");
    let key = engine.import_wait(peer, &Remote::from_bytes(&bytes).expect("a Remote"), clock, WAIT)?;
    Ok((peer, key))
}

/// Keeps a few operations of every kind in flight; how many it pushed.
fn load(engine: &mut Engine, peer: PeerId, key: RemoteKey, random: &mut Random, now: u64) -> u32 {
    let class = random.below(2) as u8;
    let opts = Opts { user_data: 1, class, ..Opts::default() };
    let room = |engine: &mut Engine, len: u64| engine.alloc(len as usize).ok();
    let pushed = match random.below(6) {
        0 => engine.push(Sqe::put_word(now, key.at(8 * random.below(100))).user_data(1).class(class)).is_ok(),
        1 => engine.push(Sqe::fetch_add(key.at(0), 1).user_data(1).class(class)).is_ok(),
        2 => room(engine, 1 << 20).is_some_and(|buf| engine.put(buf, key.at(0), opts).is_ok()),
        3 => room(engine, 1 << 20).is_some_and(|buf| engine.get(buf, key.at(0), opts).is_ok()),
        4 => room(engine, 5000).is_some_and(|buf| engine.put_signal(buf, key.at(64), 2, Signal::Add(1), opts).is_ok()),
        // The victim has no receive for it: it stays pending until the end.
        _ => room(engine, 64).is_some_and(|buf| engine.send(buf, peer, 0, opts).is_ok()),
    };
    u32::from(pushed)
}

/// The other peer, which must not notice anything.
struct Bystander {
    peer: PeerId,
    key: RemoteKey,
    count: u64,
}

impl Bystander {
    fn use_it(&mut self, engine: &mut Engine) {
        if engine.push(Sqe::fetch_add(self.key.at(0), 1).user_data(2)).is_ok() {
            self.count += 1;
        }
    }

    fn check(done: &Completion) {
        assert_eq!(done.status, Status::Success, "the other peer was disturbed");
    }
}

/// Descriptors and mappings are of the process, so its tests run one by one.
static ALONE: Mutex<()> = Mutex::new(());

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").expect("/proc").lines().count()
}

#[test]
fn the_target_is_killed() {
    let _alone = ALONE.lock();
    let kills = repeats(1000, 1000);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let clock = Clock::start();
    let mut engine = shm_engine(small());
    let (victim_name, other_name) = (name("victim"), name("other"));
    let other: Child = fork(|| victim(&other_name));
    let (peer, key) = meet(&mut engine, &other_name, &clock).expect("the other peer");
    let mut bystander = Bystander { peer, key, count: 0 };
    let (mut longest, mut before) = (Duration::ZERO, None);
    for round in 0..kills {
        let child = fork(|| victim(&victim_name));
        let (peer, key) = meet(&mut engine, &victim_name, &clock).expect("a new peer under the same name");
        let (mut pushed, mut ended) = (0u32, 0u32);
        let turns = random.below(300);
        let mut killed_at = None;
        let deadline = Instant::now() + WAIT;
        for turn in 0u64.. {
            let now = clock.now();
            if turn == turns {
                child.kill();
                killed_at = Some(Instant::now());
            }
            if engine.peer_state(peer) == Some(PeerState::Up) && pushed - ended < 20 {
                pushed += load(&mut engine, peer, key, &mut random, now);
            }
            bystander.use_it(&mut engine);
            engine.submit(now);
            engine.poll(now);
            while let Some(done) = engine.reap() {
                match done.user_data {
                    1 => ended += 1,
                    _ => Bystander::check(&done),
                }
            }
            if turn % 16 == 0
                && let Some(notice) = engine.control(now)
            {
                assert_eq!(notice, Notice::Lost { peer, cause: DeviceError::Died }, "round {round}");
            }
            if killed_at.is_some() && ended == pushed && engine.peer_state(peer) != Some(PeerState::Up) {
                break;
            }
            assert!(Instant::now() < deadline, "round {round}: {ended} of {pushed} ended");
        }
        longest = longest.max(killed_at.expect("a kill").elapsed());
        assert_eq!(engine.peer_state(peer), Some(PeerState::Failed(Status::PeerDead)));
        engine.push(Sqe::put_word(1, key.at(0)).user_data(1)).unwrap();
        assert_eq!(first_of(&mut engine, &clock).status, Status::PeerDead);
        engine.disconnect(peer, clock.now());
        while engine.control(clock.now()).is_some() {}
        drop(child);
        let now = (descriptors(), mappings(), engine.outstanding());
        if round == 10 {
            before = Some(now);
        }
    }
    let after = (descriptors(), mappings(), engine.outstanding());
    let before = before.expect("ten rounds");
    assert_eq!((after.0, after.2), (before.0, 0), "descriptors and operations before and after");
    assert!(after.1 <= before.1 + 8, "mappings: {} before, {} after", before.1, after.1);
    while engine.outstanding() > 0 {
        engine.poll(clock.now());
    }
    engine.push(Sqe::fetch_add(bystander.key.at(0), 0).user_data(2)).unwrap();
    assert_eq!(first_of(&mut engine, &clock).value, bystander.count, "each of its operations was done once");
    assert_eq!(engine.peer_state(bystander.peer), Some(PeerState::Up));
    println!("{kills} kills of the target; all had ended {} us after the kill at the latest", longest.as_micros());
    drop(other);
}

fn first_of(engine: &mut Engine, clock: &Clock) -> Completion {
    engine.wait(clock, WAIT).expect("a completion")
}

/// Puts for ever into the window of whoever is called `name`, and takes its messages.
fn initiator(name: &str, seed: u64) -> i32 {
    let mut engine = shm_engine(small());
    let clock = Clock::start();
    let mut random = Random(seed);
    let Ok((peer, key)) = meet(&mut engine, name, &clock) else { return 1 };
    loop {
        let now = clock.now();
        load(&mut engine, peer, key, &mut random, now);
        engine.submit(now);
        engine.poll(now);
        while engine.reap().is_some() {}
    }
}

#[test]
fn the_initiator_is_killed() {
    let _alone = ALONE.lock();
    let kills = repeats(1000, 1000);
    let mut random = Random(0x1234_5678_9abc_def1);
    let clock = Clock::start();
    let own = name("server");
    let mut engine = engine_named(&own);
    let window = engine.window(1 << 20, Rights::all()).expect("a window");
    let remote = engine.remote(&window).expect("a Remote").to_bytes();
    let mut before = None;
    for round in 0..kills {
        let child = fork(|| initiator(&own, u64::from(round) * 7 + 3));
        let peer = engine.accept_wait(&clock, WAIT).expect("a connection");
        let mut message = engine.alloc(REMOTE_BYTES).expect("a block");
        message.copy_from_slice(&remote);
        engine.send(message, peer, 0, Opts::default()).expect("room");
        // A receive that the initiator may or may not live to answer.
        let room = engine.alloc(64).expect("a block");
        engine.recv(room, peer, Opts { user_data: 1, ..Opts::default() }).expect("room");
        let turns = random.below(3000);
        let deadline = Instant::now() + WAIT;
        let mut ended = 0;
        for turn in 0u64.. {
            let now = clock.now();
            if turn == turns {
                child.kill();
            }
            engine.submit(now);
            engine.poll(now);
            while engine.reap().is_some() {
                ended += 1;
            }
            if turn % 16 == 0
                && let Some(notice) = engine.control(now)
            {
                assert_eq!(notice, Notice::Lost { peer, cause: DeviceError::Died }, "round {round}");
                break;
            }
            assert!(Instant::now() < deadline, "round {round}: the death was not noticed");
        }
        while ended < 2 {
            engine.poll(clock.now());
            ended += u32::from(engine.reap().is_some());
            assert!(Instant::now() < deadline, "round {round}: {ended} of 2 ended");
        }
        engine.disconnect(peer, clock.now());
        drop(child);
        if round == 10 {
            before = Some((descriptors(), mappings()));
        }
    }
    let before = before.expect("ten rounds");
    assert_eq!(descriptors(), before.0, "descriptors before and after");
    assert!(mappings() <= before.1 + 8, "mappings");
    assert_eq!(engine.outstanding(), 0);
    // The window was granted to a thousand that are dead: it closes at once.
    engine.close_window(&window, clock.now(), u64::MAX).expect("nobody is left to ask");
}
