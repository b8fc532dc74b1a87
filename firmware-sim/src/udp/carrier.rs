//! Control packets over TCP, to the port that has the number of RoCEv2's.
//!
//! Packets follow each other, each of [`PACKET_BYTES`]. Whoever connects and says nothing is put out after a while, or
//! when there are too many like it.

use core::mem;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::vec::Vec;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use verbring_sys::DeviceError;
use verbring_sys::channel::{HANDSHAKE_NS, Medium, PACKET_BYTES};
use verbring_sys::rc::{Arrival, Carrier};

use super::calls::system;
use super::socket::PORT;

/// Connections taken, and packets of one connection read, before others have their turn.
const TURN: usize = 16;
/// How long a host may take to answer at all: less than the handshake may take, so that this is what is told.
const CONNECT_NS: u64 = HANDSHAKE_NS / 5 * 3;
/// A peer that was not heard of for so long is asked whether it is there, and again after a time, so many times.
const KEEP_IDLE: Duration = Duration::from_secs(3);
const KEEP_AGAIN: Duration = Duration::from_secs(1);
const KEEP_TRIES: u32 = 4;
/// What was sent and is not acknowledged for so long ends the connection.
const UNACKNOWLEDGED_MS: u32 = 7000;

/// Control packets over TCP connections of one address.
#[derive(Debug)]
pub struct TcpCarrier {
    listener: TcpListener,
    address: IpAddr,
    ways: Vec<Way>,
    next: u64,
    /// How many may have connected and said nothing.
    max_silent: usize,
    arrivals: VecDeque<Arrival<u64>>,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// We wait for it to be made.
    Connecting,
    /// It was made by the other side, which said nothing yet.
    Silent,
    Up,
}

#[derive(Debug)]
struct Way {
    route: u64,
    stream: TcpStream,
    peer: IpAddr,
    state: State,
    since: u64,
    /// A packet of which so many bytes came.
    input: [u8; PACKET_BYTES],
    came: usize,
    /// A packet of which so many bytes are written; all: there is none.
    output: [u8; PACKET_BYTES],
    written: usize,
}

impl Way {
    fn new(route: u64, stream: TcpStream, peer: IpAddr, state: State, since: u64) -> Way {
        let (input, output) = ([0; PACKET_BYTES], [0; PACKET_BYTES]);
        Way { route, stream, peer, state, since, input, came: 0, output, written: PACKET_BYTES }
    }

    /// Writes what is left of a packet: whether nothing is.
    fn write(&mut self) -> bool {
        while self.state != State::Connecting && self.written < PACKET_BYTES {
            match self.stream.write(&self.output[self.written..]) {
                Ok(bytes) => self.written += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Whoever reads finds out why.
                Err(_) => self.written = PACKET_BYTES,
            }
        }
        self.written == PACKET_BYTES
    }

    /// Reads up to a whole packet.
    fn read(&mut self) -> Result<Option<[u8; PACKET_BYTES]>, DeviceError> {
        while self.came < PACKET_BYTES {
            match self.stream.read(&mut self.input[self.came..]) {
                Ok(0) => return Err(DeviceError::Closed),
                Ok(bytes) => self.came += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(cause("recv", &error)),
            }
        }
        self.came = 0;
        Ok(Some(self.input))
    }

    /// Whether it is made by now.
    fn connected(&mut self) -> Result<(), DeviceError> {
        match self.stream.take_error() {
            Ok(Some(error)) | Err(error) => return Err(cause("connect", &error)),
            Ok(None) => {}
        }
        // Without an error, and without a peer, it is still being made.
        if self.stream.peer_addr().is_ok() {
            self.state = State::Up;
        }
        Ok(())
    }

    /// It waited too long for something.
    fn is_late(&self, now: u64) -> Result<(), DeviceError> {
        let waited = now.saturating_sub(self.since);
        match self.state {
            State::Connecting if waited >= CONNECT_NS => Err(DeviceError::NoAnswer),
            State::Silent if waited >= HANDSHAKE_NS => Err(DeviceError::TimedOut),
            _ => Ok(()),
        }
    }
}

/// What an error of a connection means.
fn cause(call: &'static str, error: &io::Error) -> DeviceError {
    match Errno::from_io_error(error).unwrap_or(Errno::IO) {
        Errno::CONNREFUSED => DeviceError::NoSuchName,
        Errno::CONNRESET | Errno::PIPE => DeviceError::Closed,
        Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH => DeviceError::NoAnswer,
        errno => system(call)(errno),
    }
}

impl TcpCarrier {
    /// Listens at an address of this host. `max_silent` others at most may have connected without saying anything.
    ///
    /// # Errors
    /// As [`Socket::bind`](super::Socket::bind).
    pub fn listen(address: IpAddr, max_silent: usize) -> Result<TcpCarrier, DeviceError> {
        let listen = || {
            let listener = TcpListener::bind((address, PORT))?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let listener =
            listen().map_err(|error: io::Error| match Errno::from_io_error(&error).unwrap_or(Errno::IO) {
                Errno::ADDRINUSE => DeviceError::NameInUse,
                Errno::ADDRNOTAVAIL => DeviceError::NoSuchAddress,
                errno => system("listen")(errno),
            })?;
        let (ways, arrivals) = (Vec::new(), VecDeque::new());
        Ok(TcpCarrier { listener, address, ways, next: 0, max_silent: max_silent.max(1), arrivals })
    }

    fn new_route(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn way(&mut self, route: u64) -> Option<&mut Way> {
        self.ways.iter_mut().find(|way| way.route == route)
    }

    /// Begins a connection from our address.
    fn connect(&self, peer: IpAddr) -> Result<TcpStream, DeviceError> {
        let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(system("socket"))?;
        rustix::net::bind(&socket, &SocketAddr::new(self.address, 0)).map_err(system("bind"))?;
        match rustix::net::connect(&socket, &SocketAddr::new(peer, PORT)) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
            Err(errno) => return Err(cause("connect", &errno.into())),
        }
        let stream = TcpStream::from(socket);
        set_up(&stream).map_err(system("setsockopt"))?;
        Ok(stream)
    }

    /// Takes a connection that somebody made.
    fn accept(&mut self, now: u64) {
        for _ in 0..TURN {
            // Whatever else fails, fails for this one alone, or passes.
            let Ok((stream, peer)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_err() || set_up(&stream).is_err() {
                continue;
            }
            let is_silent = |way: &Way| way.state == State::Silent;
            if self.ways.iter().filter(|way| is_silent(way)).count() >= self.max_silent
                && let Some(oldest) = self.ways.iter().position(is_silent)
            {
                // The order of the ways is that of their age.
                self.ways.remove(oldest);
            }
            let route = self.new_route();
            self.ways.push(Way::new(route, stream, peer.ip(), State::Silent, now));
        }
    }

    /// Looks at everything once.
    fn look(&mut self, now: u64) {
        let waiting = |way: &Way| match way.state {
            State::Connecting => PollFlags::OUT,
            _ => PollFlags::IN,
        };
        let mut polled: Vec<PollFd<'_>> = Vec::with_capacity(1 + self.ways.len());
        polled.extend(self.ways.iter().map(|way| PollFd::new(&way.stream, waiting(way))));
        polled.push(PollFd::new(&self.listener, PollFlags::IN));
        let ready = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap_or(0);
        let ready: Vec<bool> =
            if ready == 0 { Vec::new() } else { polled.iter().map(|polled| !polled.revents().is_empty()).collect() };
        let mut ways = mem::take(&mut self.ways);
        let mut index = 0;
        ways.retain_mut(|way| {
            let is_ready = ready.get(index) == Some(&true);
            index += 1;
            let outcome = if is_ready { self.attend(way) } else { Ok(()) };
            way.write();
            match outcome.and_then(|()| way.is_late(now)) {
                Ok(()) => true,
                Err(cause) => {
                    self.arrivals.push_back(Arrival::Closed { route: way.route, cause });
                    false
                }
            }
        });
        self.ways = ways;
        if ready.last() == Some(&true) {
            self.accept(now);
        }
    }

    /// Something happened to a connection.
    fn attend(&mut self, way: &mut Way) -> Result<(), DeviceError> {
        if way.state == State::Connecting {
            return way.connected();
        }
        for _ in 0..TURN {
            let Some(bytes) = way.read()? else { break };
            way.state = State::Up;
            self.arrivals.push_back(Arrival::Packet { route: way.route, bytes });
        }
        Ok(())
    }
}

/// What every connection has: packets leave at once, and a peer that is gone is missed.
fn set_up(stream: &TcpStream) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_AGAIN)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_TRIES)?;
    sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MS)
}

impl Carrier for TcpCarrier {
    type Route = u64;

    fn medium(&self) -> Medium {
        Medium::Stream
    }

    fn open(&mut self, address: &str, now: u64) -> Result<u64, DeviceError> {
        let peer: IpAddr = address.parse().map_err(|_| DeviceError::BadAddress)?;
        if peer.is_ipv4() != self.address.is_ipv4() {
            return Err(DeviceError::NotSupported("reach IPv6 from an address of IPv4, or the other way round"));
        }
        let stream = self.connect(peer)?;
        let route = self.new_route();
        self.ways.push(Way::new(route, stream, peer, State::Connecting, now));
        Ok(route)
    }

    fn send(&mut self, route: u64, packet: &[u8; PACKET_BYTES], _now: u64) -> Result<bool, DeviceError> {
        let way = self.way(route).ok_or(DeviceError::Closed)?;
        if !way.write() {
            return Ok(false);
        }
        (way.output, way.written) = (*packet, 0);
        way.write();
        Ok(true)
    }

    fn receive(&mut self, now: u64) -> Option<Arrival<u64>> {
        if self.arrivals.is_empty() {
            self.look(now);
        }
        self.arrivals.pop_front()
    }

    fn close(&mut self, route: u64) {
        self.ways.retain(|way| way.route != route);
        self.arrivals.retain(|arrival| match arrival {
            Arrival::Packet { route: of, .. } | Arrival::Closed { route: of, .. } => *of != route,
        });
    }

    fn peer_ip(&self, route: u64) -> Option<IpAddr> {
        self.ways.iter().find(|way| way.route == route).map(|way| way.peer)
    }
}
