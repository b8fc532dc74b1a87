//! A UDP socket in batches: packets are written back to back, leave by one `sendmmsg`, and arrive by one `recvmmsg`.
//!
//! With offload (udp(7): UDP_SEGMENT, UDP_GRO) a run of packets to one destination is one message to the kernel, which
//! walks its stack once for all of them; because they lie back to back, a run needs one iovec. Everything is polled,
//! and all memory is taken in [`Socket::bind`].
//!
//! ```
//! use verbring_sim::udp::{Options, Socket};
//! let [here, there] = ["127.91.1.1", "127.91.1.2"].map(|address| address.parse().unwrap());
//! let mut a = Socket::bind(here, Options::default()).unwrap();
//! let mut b = Socket::bind(there, Options::default()).unwrap();
//! a.place().unwrap()[..5].copy_from_slice(b"hello");
//! a.commit(5, there);
//! assert_eq!(a.flush(), 1);
//! while b.receive() == 0 {}
//! let packet = b.packet(0).unwrap();
//! assert_eq!((packet.from, packet.bytes), (here, &b"hello"[..]));
//! ```

use core::fmt;
use core::mem::size_of_val;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::ptr;
use std::os::fd::OwnedFd;
use std::vec;
use std::vec::Vec;

use rustix::io::Errno;
use rustix::net::sockopt;
use verbring_sys::DeviceError;

use super::calls::{self, headers, open, system};
use super::message::{Arrived, Name, Notes, Sent};

/// The port of RoCEv2 (InfiniBand specification, annex A17).
pub const PORT: u16 = 4791;

/// Bytes of the longest packet: a payload of 4096, and headers with what follows them.
pub const MAX_PACKET: usize = 4096 + 128;

/// Packets of a batch that is sent; each may be a message of its own (at most UIO_MAXIOV, 1024).
const QUEUE: usize = 256;
/// Bytes of a batch: four full runs of the longest packets, and one packet that is being written. Fits the L2 cache.
const QUEUE_BYTES: usize = 4 * 15 * MAX_PACKET + MAX_PACKET;
/// Packets of a run. UDP_MAX_SEGMENTS of linux/udp.h was 64 before it became 128.
const RUN: usize = 64;
/// Bytes of a run: what an IPv4 packet holds beside its header and that of UDP.
const RUN_BYTES: usize = 65_535 - 20 - 8;

/// Messages that one call receives.
const MESSAGES: usize = 32;
/// Bytes for each with offload. Not a multiple of the page: small messages would all share one set of the cache.
const MESSAGE_BYTES: usize = 65_536 + 5 * 64;
/// Packets of one message: UDP_MAX_SEGMENTS of another host.
const MESSAGE_PACKETS: usize = 128;

/// Errors read from the error queue at a time, and times that a flush goes on after one.
const NOTICES: usize = 16;

/// How a socket is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Runs of packets pass through the kernel in one piece. Over IPv4, a network that cuts them up numbers them in
    /// the identification field of IP (the first 0, then 1, ...) although it is 0 without offload.
    pub offload: bool,
    /// Bytes of the kernel's receive buffer, and of its send buffer, that are asked for; see [`Socket::buffers`].
    pub buffer: usize,
    /// The port of both sides.
    pub port: u16,
}

impl Default for Options {
    fn default() -> Options {
        Options { offload: true, buffer: 4 << 20, port: PORT }
    }
}

/// A packet that arrived: what follows its UDP header, and what the checksum of RoCEv2 has to know beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Who sent it.
    pub from: IpAddr,
    /// From which port.
    pub port: u16,
    /// Type of service, or traffic class: the low two bits are ECN.
    pub tos: u8,
    /// At most [`MAX_PACKET`].
    pub bytes: &'a [u8],
}

/// Counts since the socket was made. They wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Packets that the kernel took.
    pub sent: u64,
    /// Calls of sendmmsg.
    pub send_calls: u64,
    /// Messages that the kernel took, each of one packet or a run.
    pub send_messages: u64,
    /// Calls after which packets were left for the next flush, as the kernel had no room.
    pub send_full: u64,
    /// Packets that the kernel refused to send; [`Socket::errors`] tells why.
    pub send_failed: u64,
    /// Packets that were handed out to be read.
    pub received: u64,
    /// Calls of recvmmsg, also those that found nothing.
    pub receive_calls: u64,
    /// Messages that arrived, each of one packet or a run.
    pub receive_messages: u64,
    /// Messages or packets that were dropped because they are longer than [`MAX_PACKET`].
    pub truncated: u64,
    /// Messages that the kernel dropped because its receive buffer was full. Known when the next one arrives.
    pub overflowed: u32,
    /// ICMP messages of other hosts: the port is closed, no route, or the packet was too long for a link.
    pub icmp: u64,
}

/// Why packets were not sent, or did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// errno(3).
    pub errno: i32,
    /// To whom.
    pub to: IpAddr,
    /// Of EMSGSIZE, where it is known: bytes that a packet may have, with its IP and UDP headers. Or 0.
    pub mtu: u32,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { errno, to, mtu } = self;
        match Errno::from_raw_os_error(*errno) {
            Errno::MSGSIZE if *mtu != 0 => {
                write!(f, "a packet to {to} is too long: its path takes {mtu} bytes; use a smaller path MTU")
            }
            Errno::CONNREFUSED => write!(f, "nothing listens at {to}; start the other side"),
            Errno::NETUNREACH | Errno::HOSTUNREACH => write!(f, "there is no route to {to}"),
            _ => write!(f, "packets to {to} failed with errno {errno}"),
        }
    }
}

/// A UDP socket on port 4791 of one address. Packets are what follows the UDP header.
pub struct Socket {
    fd: OwnedFd,
    port: u16,
    /// Whether runs are sent. Not, once the kernel refused one.
    segments: bool,
    stats: Stats,
    failure: Option<Failure>,

    /// Packets to send, back to back, those of `queue[head..]` in `start..end`.
    outgoing: Vec<u8>,
    start: usize,
    end: usize,
    /// At most QUEUE.
    queue: Vec<Outgoing>,
    head: usize,
    /// So many packets at the head are sent each by itself.
    singles: usize,
    /// QUEUE of each.
    send_headers: Vec<libc::mmsghdr>,
    sends: Vec<Send>,

    /// MESSAGES buffers of `stride` bytes.
    incoming: Vec<u8>,
    stride: usize,
    /// MESSAGES of each.
    receive_headers: Vec<libc::mmsghdr>,
    receives: Vec<Receive>,
    /// At most MESSAGES * MESSAGE_PACKETS.
    packets: Vec<Incoming>,
}

// SAFETY: only the headers are not Send, for their pointers; they point into the other tables, and are set anew
// before each use.
unsafe impl core::marker::Send for Socket {}

#[derive(Clone, Copy)]
struct Outgoing {
    to: IpAddr,
    len: u16,
}

/// A message to the kernel.
#[derive(Clone, Copy)]
struct Send {
    name: Name,
    iovec: libc::iovec,
    control: Sent,
    packets: usize,
    bytes: usize,
}

/// A message of the kernel.
#[derive(Clone, Copy)]
struct Receive {
    name: Name,
    iovec: libc::iovec,
    control: Arrived,
    from: SocketAddr,
    tos: u8,
}

/// Where a packet lies in `incoming`, and of which message it is.
#[derive(Clone, Copy)]
struct Incoming {
    at: u32,
    len: u16,
    message: u16,
}

const NO_IOVEC: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };

impl Socket {
    /// A socket of `address`, which must be one of this host, and not of all of them.
    ///
    /// # Errors
    /// * [`DeviceError::NameInUse`]: another socket has the port of this address, perhaps that of the rdma_rxe driver.
    /// * [`DeviceError::NotSupported`]: the address is 0.0.0.0 or `::`. Each packet is checked against its addresses.
    /// * [`DeviceError::NoSuchAddress`]: the host has no such address.
    /// * [`DeviceError::System`]: a call failed.
    pub fn bind(address: IpAddr, options: Options) -> Result<Socket, DeviceError> {
        if address.is_unspecified() {
            return Err(DeviceError::NotSupported("listen on every address of the host: name one"));
        }
        let fd = open(address, options)?;
        let stride = if options.offload { MESSAGE_BYTES } else { MAX_PACKET };
        let send = Send { name: Name::EMPTY, iovec: NO_IOVEC, control: Sent::EMPTY, packets: 0, bytes: 0 };
        let nobody = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
        let receive = Receive { name: Name::EMPTY, iovec: NO_IOVEC, control: Arrived::EMPTY, from: nobody, tos: 0 };
        Ok(Socket {
            fd,
            port: options.port,
            segments: options.offload,
            stats: Stats::default(),
            failure: None,
            // Not zero, which would come from the system untouched, and fault when it is used first.
            outgoing: vec![0xff; QUEUE_BYTES],
            start: 0,
            end: 0,
            queue: Vec::with_capacity(QUEUE),
            head: 0,
            singles: 0,
            send_headers: headers(QUEUE),
            sends: vec![send; QUEUE],
            incoming: vec![0xff; MESSAGES * stride],
            stride,
            receive_headers: headers(MESSAGES),
            receives: vec![receive; MESSAGES],
            packets: Vec::with_capacity(MESSAGES * MESSAGE_PACKETS),
        })
    }

    /// How many packets of [`MAX_PACKET`] bytes can be written before the next flush.
    pub fn room(&self) -> usize {
        (QUEUE - self.queue.len()).min((QUEUE_BYTES - self.end) / MAX_PACKET)
    }

    /// Where the next packet is to be written: [`MAX_PACKET`] bytes. None: flush first.
    pub fn place(&mut self) -> Option<&mut [u8]> {
        if self.queue.len() == QUEUE {
            return None;
        }
        self.outgoing.get_mut(self.end..self.end + MAX_PACKET)
    }

    /// The packet in [`place`](Self::place) is written, has `len` bytes, and goes to `to`.
    ///
    /// Nothing happens if `len` is 0 or more than [`MAX_PACKET`], or if there was no place.
    pub fn commit(&mut self, len: usize, to: IpAddr) {
        if len != 0 && len <= MAX_PACKET && self.room() > 0 {
            self.queue.push(Outgoing { to, len: len as u16 });
            self.end += len;
        }
    }

    /// Packets that are written and not sent.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Sends what is queued, and returns how many packets the kernel took.
    ///
    /// What it has no room for stays for the next flush. What it refuses is dropped and counted.
    pub fn flush(&mut self) -> usize {
        let before = self.stats.sent;
        let mut patience = NOTICES;
        while self.head < self.queue.len() && patience > 0 {
            let messages = self.arm_sends();
            self.stats.send_calls += 1;
            // SAFETY: they were just made to point to tables and bytes of this socket, which nobody else can change.
            match unsafe { calls::send(&self.fd, &mut self.send_headers[..messages]) } {
                Ok(taken) => {
                    for message in 0..taken.min(messages) {
                        let packets = self.sends[message].packets;
                        self.leave(message);
                        self.stats.sent += packets as u64;
                        self.stats.send_messages += 1;
                    }
                    if taken < messages {
                        // sendmmsg(2) keeps the reason to itself; if it was ICMP, this message is as good as any.
                        self.hear();
                    }
                }
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => {
                    self.stats.send_full += 1;
                    break;
                }
                Err(errno) => {
                    let (icmp, mtu) = self.hear();
                    let Send { packets, .. } = self.sends[0];
                    if icmp {
                        // The error of an earlier packet; this one was not looked at.
                        patience -= 1;
                    } else if packets > 1 && matches!(errno, Errno::IO | Errno::INVAL | Errno::MSGSIZE) {
                        // No checksums by the device (EIO), no UDP_SEGMENT at all, or longer than the path takes.
                        self.segments &= errno == Errno::MSGSIZE;
                        self.singles = packets;
                    } else {
                        self.failure = Some(Failure { errno: errno.raw_os_error(), to: self.queue[self.head].to, mtu });
                        self.stats.send_failed += packets as u64;
                        self.leave(0);
                    }
                }
            }
        }
        self.close_up();
        self.stats.sent.wrapping_sub(before) as usize
    }

    /// Takes packets from the kernel, returns how many, and forgets those of the call before.
    pub fn receive(&mut self) -> usize {
        self.packets.clear();
        let mut patience = NOTICES;
        let messages = loop {
            self.arm_receives();
            self.stats.receive_calls += 1;
            // SAFETY: they were just made to point to tables and bytes of this socket, which nobody else can see.
            match unsafe { calls::receive(&self.fd, &mut self.receive_headers) } {
                Ok(messages) => break messages.min(MESSAGES),
                Err(Errno::AGAIN | Errno::INTR) => return 0,
                Err(_) => {
                    // An ICMP message, told once instead of a packet.
                    self.hear();
                    patience -= 1;
                    if patience == 0 {
                        return 0;
                    }
                }
            }
        };
        for message in 0..messages {
            self.unpack(message);
        }
        self.stats.receive_messages += messages as u64;
        self.stats.received += self.packets.len() as u64;
        self.packets.len()
    }

    /// One of the packets that [`receive`](Self::receive) counted, in the order of their arrival.
    pub fn packet(&self, index: usize) -> Option<Packet<'_>> {
        let &Incoming { at, len, message } = self.packets.get(index)?;
        let &Receive { from, tos, .. } = self.receives.get(usize::from(message))?;
        let bytes = self.incoming.get(at as usize..at as usize + usize::from(len))?;
        Some(Packet { from: from.ip(), port: from.port(), tos, bytes })
    }

    /// Counts.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The last packet that was refused, here or by another host.
    pub fn errors(&self) -> Option<Failure> {
        self.failure
    }

    /// Whether runs are sent in one piece: asked for, and not refused by the kernel.
    pub fn offloads(&self) -> bool {
        self.segments
    }

    /// Bytes of the kernel's receive and send buffer. It doubles what it is given, for its own tables (socket(7)).
    ///
    /// # Errors
    /// [`DeviceError::System`].
    pub fn buffers(&self) -> Result<(usize, usize), DeviceError> {
        let receive = sockopt::socket_recv_buffer_size(&self.fd).map_err(system("getsockopt(SO_RCVBUF)"))?;
        let send = sockopt::socket_send_buffer_size(&self.fd).map_err(system("getsockopt(SO_SNDBUF)"))?;
        Ok((receive, send))
    }

    /// Bytes of the longest packet, IP header and all, that the interface with `address` takes; 1500 if that is not known.
    pub fn link_mtu(&self, address: IpAddr) -> u32 {
        calls::link_mtu(&self.fd, address).unwrap_or(1500)
    }

    /// Describes what is queued in messages, as few as can be, and returns how many.
    fn arm_sends(&mut self) -> usize {
        let (mut packet, mut at, mut messages) = (self.head, self.start, 0);
        for (header, message) in self.send_headers.iter_mut().zip(&mut self.sends) {
            let is_single = !self.segments || packet < self.head + self.singles;
            let Some(run) = Run::first(self.queue.get(packet..).unwrap_or_default(), if is_single { 1 } else { RUN })
            else {
                break;
            };
            let Some(bytes) = self.outgoing.get_mut(at..at + run.bytes) else { break };
            let (name, name_len) = Name::new(run.to, self.port);
            let iovec = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: run.bytes };
            let control = if run.packets > 1 { Sent::segment(run.segment) } else { Sent::EMPTY };
            *message = Send { name, iovec, control, packets: run.packets, bytes: run.bytes };
            header.msg_hdr.msg_name = ptr::from_mut(&mut message.name).cast();
            header.msg_hdr.msg_namelen = name_len;
            header.msg_hdr.msg_iov = &mut message.iovec;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = ptr::from_mut(&mut message.control).cast();
            header.msg_hdr.msg_controllen = if run.packets > 1 { size_of_val(&message.control) as _ } else { 0 };
            (packet, at, messages) = (packet + run.packets, at + run.bytes, messages + 1);
        }
        messages
    }

    /// The packets of a message are no longer queued.
    fn leave(&mut self, message: usize) {
        let Send { packets, bytes, .. } = self.sends[message];
        self.head += packets;
        self.start += bytes;
        self.singles = self.singles.saturating_sub(packets);
    }

    /// What is left queued moves to the front.
    fn close_up(&mut self) {
        if self.head > 0 {
            self.outgoing.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.queue.drain(..self.head);
            (self.start, self.head) = (0, 0);
        }
    }

    fn arm_receives(&mut self) {
        let buffers = self.incoming.chunks_exact_mut(self.stride);
        for ((header, message), bytes) in self.receive_headers.iter_mut().zip(&mut self.receives).zip(buffers) {
            message.iovec = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            header.msg_hdr.msg_name = ptr::from_mut(&mut message.name).cast();
            header.msg_hdr.msg_namelen = Name::BYTES as u32;
            header.msg_hdr.msg_iov = &mut message.iovec;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = ptr::from_mut(&mut message.control).cast();
            header.msg_hdr.msg_controllen = size_of_val(&message.control) as _;
        }
    }

    /// Finds the packets of a message. All that the kernel says of it is checked: it is used as an index.
    fn unpack(&mut self, index: usize) {
        let (header, message) = (&self.receive_headers[index], &mut self.receives[index]);
        let control = message.control.0.get(..header.msg_hdr.msg_controllen).unwrap_or_default();
        let notes = Notes::read(control);
        if let Some(overflowed) = notes.overflowed {
            self.stats.overflowed = overflowed;
        }
        let len = (header.msg_len as usize).min(self.stride);
        let Some(from) = message.name.get() else { return };
        if header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
            self.stats.truncated += 1;
            return;
        }
        (message.from, message.tos) = (from, notes.tos);
        let segment = notes.segment.map_or(len, |segment| segment as usize).max(1);
        let (mut at, end) = (index * self.stride, index * self.stride + len);
        while at < end && self.packets.len() < MESSAGES * MESSAGE_PACKETS {
            let len = segment.min(end - at);
            if len <= MAX_PACKET {
                self.packets.push(Incoming { at: at as u32, len: len as u16, message: index as u16 });
            } else {
                self.stats.truncated += 1;
            }
            at += len;
        }
    }

    /// Reads the error queue (ip(7): IP_RECVERR). Returns whether another host complained, and the MTU of the path if
    /// the kernel just refused a packet for its length.
    fn hear(&mut self) -> (bool, u32) {
        let (mut icmp, mut mtu) = (false, 0);
        for _ in 0..NOTICES {
            let Ok((name, notes)) = calls::hear(&self.fd) else { break };
            match notes.error {
                Some(error) if error.is_local => mtu = error.info,
                Some(error) => {
                    icmp = true;
                    self.stats.icmp += 1;
                    let mtu = if error.errno == libc::EMSGSIZE as u32 { error.info } else { 0 };
                    if let Some(to) = name.get() {
                        self.failure = Some(Failure { errno: error.errno as i32, to: to.ip(), mtu });
                    }
                }
                None => {}
            }
        }
        (icmp, mtu)
    }
}

/// Packets that one message holds: to one destination, of one length, but that the last may be shorter.
struct Run {
    to: IpAddr,
    packets: usize,
    bytes: usize,
    segment: u16,
}

impl Run {
    /// The run that `queue` begins with, of at most `limit` packets.
    fn first(queue: &[Outgoing], limit: usize) -> Option<Run> {
        let &Outgoing { to, len: segment } = queue.first()?;
        let mut run = Run { to, packets: 1, bytes: usize::from(segment), segment };
        for next in queue.iter().take(limit).skip(1) {
            let bytes = run.bytes + usize::from(next.len);
            if next.to != to || next.len > segment || bytes > RUN_BYTES {
                break;
            }
            (run.packets, run.bytes) = (run.packets + 1, bytes);
            if next.len < segment {
                break;
            }
        }
        Some(run)
    }
}
