//! Two hosts on one: network namespaces, joined by a cable or by a relay that loses packets.
//!
//! A namespace here has no name and no process, only a descriptor, so that nothing is left behind however the test
//! ends. Abstract sockets are of a namespace too: processes in two of them cannot meet in shared memory.
//!
//! The relay stands between two TUN devices (Linux: Documentation/networking/tuntap.rst). The kernel gives it IP packets
//! as they would leave a card, one by one and with their checksums, whatever was offloaded.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// Bytes of an IP packet between the hosts, if nothing else is said: jumbo frames.
pub const MTU: u32 = 9000;

/// Packets that wait in a TUN device for the relay.
const QUEUE: u32 = 10_000;
/// Packets from one side before the relay looks at the other.
const TURN: u32 = 64;
/// How long the relay holds a packet back for a later one to overtake it, and how soon it sees that it shall end.
const HOLD: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// How often, and how far apart, a new network is tried: five seconds at the least.
const PROBES: u32 = 500;
const PROBE: Duration = Duration::from_millis(10);

/// What the relay does to packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// So many of a million are dropped.
    pub drops: u32,
    /// So many of a million arrive twice.
    pub duplicates: u32,
    /// So many of a million arrive after the next one of their direction.
    pub reorders: u32,
    /// TCP passes as it is.
    pub spares_tcp: bool,
}

/// What the relay did.
#[derive(Debug, Default)]
pub struct Counts {
    /// Packets that the relay took, also those before the loss began.
    pub seen: AtomicU64,
    /// Of those: dropped on purpose.
    pub dropped: AtomicU64,
    /// Sent twice.
    pub duplicated: AtomicU64,
    /// Held back behind another.
    pub reordered: AtomicU64,
}

/// One of the two hosts: a network namespace.
pub struct Host {
    namespace: File,
    /// Its address of IPv4.
    pub ipv4: IpAddr,
    /// Its address of IPv6.
    pub ipv6: IpAddr,
}

impl Host {
    /// A new namespace, with a loopback that is down.
    fn new(number: u8) -> Result<Host, String> {
        let unshared = || -> io::Result<File> {
            // SAFETY: only the network of this thread, which shares no descriptor table with a namespace.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open("/proc/thread-self/ns/net")
        };
        let namespace = aside(unshared).map_err(|error| format!("no network namespace: {error}"))?;
        Ok(Host {
            namespace,
            ipv4: Ipv4Addr::new(10, 77, 0, number).into(),
            ipv6: Ipv6Addr::new(0xfd00, 0x77, 0, 0, 0, 0, 0, number.into()).into(),
        })
    }

    /// Moves the calling thread into the host for good: for a forked child.
    pub fn join(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Runs `body` in a thread in the host. Sockets that it makes, and programs that it starts, stay there.
    pub fn enter<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        aside(|| {
            self.join().expect("a namespace of ours can be joined");
            body()
        })
    }

    fn ip(&self, arguments: &str) -> Result<(), String> {
        let output = self.enter(|| Command::new("ip").args(arguments.split(' ')).output());
        let output = output.map_err(|error| format!("cannot run ip (package iproute2): {error}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {}", said.trim())) }
    }

    /// A path that `ip` can open.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd())
    }

    fn up(&self, mtu: u32) -> Result<(), String> {
        self.ip("link set lo up")?;
        self.ip(&format!("address add {}/24 dev cable", self.ipv4))?;
        self.ip(&format!("link set cable mtu {mtu} txqueuelen {QUEUE} up"))?;
        // No duplicate address detection: the address is good at once.
        self.ip(&format!("address add {}/64 dev cable nodad", self.ipv6))
    }

    /// A TUN device, which is there for as long as the file is open.
    fn tun(&self) -> Result<File, String> {
        let open = || -> io::Result<File> {
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = File::from(rustix::fs::open("/dev/net/tun", flags, Mode::empty())?);
            // SAFETY: numbers.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            for (to, from) in request.ifr_name.iter_mut().zip(b"cable") {
                *to = *from as libc::c_char;
            }
            request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
            // SAFETY: TUNSETIFF reads and writes one ifreq.
            match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) } {
                0 => Ok(file),
                _ => Err(io::Error::last_os_error()),
            }
        };
        self.enter(open).map_err(|error| format!("no TUN device: {error}"))
    }
}

/// The network of two hosts. It is gone when this is dropped, but for processes and sockets that are still in it.
pub struct Netns {
    /// One, 10.77.0.1.
    pub a: Host,
    /// The other, 10.77.0.2.
    pub b: Host,
    relay: Option<Relay>,
}

impl Netns {
    /// Two hosts and a cable that loses nothing (veth(4)).
    ///
    /// # Errors
    /// Why it cannot be here: no root, no namespaces, no program `ip`. A reason to skip the test.
    pub fn try_new() -> Result<Netns, String> {
        Netns::try_with(MTU, None)
    }

    /// As `try_new`, with the `mtu` of both ends, and with a relay for a cable if there is some loss.
    ///
    /// The relay draws from the seed that comes with the loss, once the hosts hear each other. Packets of the kernel's
    /// own are drawn for too.
    pub fn try_with(mtu: u32, loss: Option<(Loss, u64)>) -> Result<Netns, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("only root may make network namespaces".into());
        }
        let (a, b) = (Host::new(1)?, Host::new(2)?);
        let relay = match loss {
            Some((_, seed)) => Some(Relay::start([a.tun()?, b.tun()?], seed)),
            None => {
                a.ip(&format!("link add cable type veth peer name cable netns {}", b.path()))?;
                None
            }
        };
        a.up(mtu)?;
        b.up(mtu)?;
        for [from, to] in [[&a, &b], [&b, &a]] {
            hears(from, to).map_err(|error| format!("the hosts do not hear each other: {error}"))?;
        }
        let netns = Netns { a, b, relay };
        netns.set_loss(loss.unwrap_or_default().0);
        Ok(netns)
    }

    /// Changes what the relay does to packets from now on: for a phase without loss, or a cut cable.
    pub fn set_loss(&self, loss: Loss) {
        if let Some(relay) = &self.relay {
            *relay.shared.loss.lock().unwrap_or_else(PoisonError::into_inner) = loss;
        }
    }

    /// From now on the relay keeps every packet that it takes.
    pub fn capture(&self) {
        if let Some(relay) = &self.relay {
            *relay.shared.captured.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
        }
    }

    /// The packets kept since `capture`, each from its IP header on. No more are kept.
    pub fn captured(&self) -> Vec<Vec<u8>> {
        let relay = self.relay.as_ref();
        let take = |relay: &Relay| relay.shared.captured.lock().unwrap_or_else(PoisonError::into_inner).take();
        relay.and_then(take).unwrap_or_default()
    }

    /// What the relay did; None without one.
    pub fn counts(&self) -> Option<&Counts> {
        self.relay.as_ref().map(|relay| &relay.shared.counts)
    }
}

/// Returns once packets arrive: a device that is up drops them until the kernel has seen its carrier, some time later.
fn hears(from: &Host, to: &Host) -> io::Result<()> {
    let bind = |address: IpAddr| UdpSocket::bind((address, 0));
    for [from_address, to_address] in [[from.ipv4, to.ipv4], [from.ipv6, to.ipv6]] {
        let (sender, receiver) = (from.enter(|| bind(from_address))?, to.enter(|| bind(to_address))?);
        receiver.set_read_timeout(Some(PROBE))?;
        let mut left = PROBES;
        loop {
            // No route is a matter of time too.
            let sent = sender.send_to(&[0], receiver.local_addr()?);
            match sent.and_then(|_| receiver.recv(&mut [0])) {
                Ok(_) => break,
                Err(error) if left == 0 => return Err(error),
                Err(_) => left -= 1,
            }
        }
    }
    Ok(())
}

/// Runs `body` in a thread of its own, and panics if it does.
fn aside<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(body).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[derive(Default)]
struct Shared {
    loss: Mutex<Loss>,
    captured: Mutex<Option<Vec<Vec<u8>>>>,
    counts: Counts,
    end: AtomicBool,
}

struct Relay {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    fn start(ends: [File; 2], seed: u64) -> Relay {
        let shared = Arc::new(Shared::default());
        let relay = shared.clone();
        let thread = std::thread::spawn(move || run(&relay, ends, seed));
        Relay { shared, thread: Some(thread) }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::Relaxed);
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            println!("the relay between the hosts panicked");
        }
    }
}

fn run(shared: &Shared, mut ends: [File; 2], seed: u64) {
    let mut random = seed | 1;
    // xorshift64*: whether something that happens to `of` in a million packets happens now.
    let mut draw = move |of: u32| {
        random ^= random >> 12;
        random ^= random << 25;
        random ^= random >> 27;
        ((random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) * 1_000_000) >> 32 < u64::from(of)
    };
    let mut held: [Option<Vec<u8>>; 2] = [None, None];
    let mut packet = vec![0; 1 << 16];
    while !shared.end.load(Ordering::Relaxed) {
        let [a, b] = &ends;
        let mut ready = [PollFd::new(a, PollFlags::IN), PollFd::new(b, PollFlags::IN)];
        if matches!(poll(&mut ready, Some(&HOLD)), Ok(0)) {
            // Nothing came to overtake what is held.
            for (side, held) in held.iter_mut().enumerate() {
                held.take().inspect(|held| send(&mut ends[1 - side], held));
            }
        }
        let loss = *shared.loss.lock().unwrap_or_else(PoisonError::into_inner);
        for side in [0, 1] {
            for _ in 0..TURN {
                let Ok(len) = ends[side].read(&mut packet) else { break };
                let packet = &packet[..len];
                let to = &mut ends[1 - side];
                let is_spared = loss.spares_tcp && is_tcp(packet);
                let mut happens = |of, count: &AtomicU64| {
                    let happens = draw(of) && !is_spared;
                    count.fetch_add(happens.into(), Ordering::Relaxed);
                    happens
                };
                shared.counts.seen.fetch_add(1, Ordering::Relaxed);
                if let Some(captured) = &mut *shared.captured.lock().unwrap_or_else(PoisonError::into_inner) {
                    captured.push(packet.to_vec());
                }
                if happens(loss.drops, &shared.counts.dropped) {
                    continue;
                }
                let copies = 1 + u32::from(happens(loss.duplicates, &shared.counts.duplicated));
                if held[side].is_none() && happens(loss.reorders, &shared.counts.reordered) {
                    held[side] = Some(packet.to_vec());
                    // The second of two copies is held, or the only one.
                    (1..copies).for_each(|_| send(to, packet));
                    continue;
                }
                (0..copies).for_each(|_| send(to, packet));
                held[side].take().inspect(|held| send(to, held));
            }
        }
    }
}

/// A device that is down drops it.
fn send(to: &mut File, packet: &[u8]) {
    let _ = to.write(packet);
}

/// Behind no IPv6 extension header.
fn is_tcp(packet: &[u8]) -> bool {
    let protocol = match packet.first().map(|first| first >> 4) {
        Some(4) => packet.get(9),
        Some(6) => packet.get(6),
        _ => None,
    };
    protocol.is_some_and(|protocol| i32::from(*protocol) == libc::IPPROTO_TCP)
}
