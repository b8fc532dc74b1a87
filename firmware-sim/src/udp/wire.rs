//! The wire of a NIC whose packets go over a socket.

use core::fmt;
use core::net::IpAddr;

use super::socket::{PORT, Socket};
use crate::packet::Ip;
use crate::soft::Wire;

/// A socket as the wire of a NIC.
pub struct UdpWire {
    socket: Socket,
    address: IpAddr,
}

impl UdpWire {
    /// The wire of a socket that is bound to `address`.
    pub fn new(socket: Socket, address: IpAddr) -> UdpWire {
        UdpWire { socket, address }
    }

    /// Its address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The socket.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }
}

impl fmt::Debug for UdpWire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdpWire").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Wire for UdpWire {
    fn receive(&mut self, _now: u64, mut each: impl FnMut(&Ip, &[u8])) {
        for index in 0..self.socket.receive() {
            let Some(packet) = self.socket.packet(index) else { break };
            // Our own kind reckons with 0, whatever the kernels on the way make of it. Of another NIC's packets over IPv4
            // it cannot be known here.
            let identification = (packet.port == PORT).then_some(0);
            let ip = Ip { source: packet.from, destination: self.address, source_port: packet.port, identification };
            each(&ip, packet.bytes);
        }
    }

    fn place(&mut self) -> Option<&mut [u8]> {
        self.socket.place()
    }

    fn commit(&mut self, _now: u64, len: usize, to: IpAddr) {
        self.socket.commit(len, to);
    }

    fn flush(&mut self, _now: u64) {
        self.socket.flush();
    }
}
