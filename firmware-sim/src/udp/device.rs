//! A device whose packets go over the UDP of the kernel.

use core::net::IpAddr;

use rustix::rand::{GetRandomFlags, getrandom};
use verbring_sys::DeviceError;
use verbring_sys::rc::RcDevice;

use super::calls::system;
use super::carrier::TcpCarrier;
use super::socket::{Options, PORT, Socket};
use super::wire::UdpWire;
use crate::device::{assemble, nic_config};
use crate::nic::Weakness;
use crate::packet::{BTH_BYTES, ICRC_BYTES, MAX_MTU};
use crate::soft::{Patience, Soft};

/// A device on an address of this host: RoCEv2 over UDP, control packets over TCP, both on port 4791. Its `ring` and
/// `poll` make system calls.
///
/// It reaches other devices of its kind. Its address, for `connect`, is that IP address.
pub type UdpDevice = RcDevice<Soft<UdpWire>, TcpCarrier>;

/// How a device is.
#[derive(Clone, Copy, Debug)]
pub struct UdpOptions {
    /// Connections; rounded up to a power of two.
    pub max_links: u32,
    /// Bytes of a payload: 256, 512, 1024, 2048 or 4096. None: as many as the interface of the address takes. Packets are
    /// never cut up, so a path with a narrower link needs fewer.
    pub mtu: Option<u32>,
    /// See [`Options::offload`].
    pub offload: bool,
    /// See [`Options::buffer`].
    pub buffer: usize,
    /// Packets of a queue pair under way. None: as many as a receive buffer like ours holds of four queue pairs.
    pub window: Option<u32>,
    /// How long a lost packet is waited for; each time it is sent again, twice as long.
    pub patience: Patience,
}

impl Default for UdpOptions {
    /// 17 ms until a packet is taken for lost, since a peer may have to wait for a core; after 4.3 s in all it is the
    /// connection that is.
    fn default() -> UdpOptions {
        let Options { offload, buffer, .. } = Options::default();
        let patience = Patience { timeout: 12, retry_count: 7 };
        UdpOptions { max_links: 16, mtu: None, offload, buffer, window: None, patience }
    }
}

/// Packets under way, whatever the buffers are.
const WINDOWS: (u32, u32) = (8, 256);
/// Queue pairs that may send at full speed at one time without more than the receive buffer holds.
const SENDERS: usize = 4;

/// A device on `address`, which must be one of this host. `node` is the incarnation id of its engine.
///
/// # Errors
/// * [`DeviceError::NameInUse`]: the address has such a device already, or the rdma_rxe driver has the port.
/// * [`DeviceError::NoSuchAddress`]: it is not an address of this host.
/// * [`DeviceError::NotSupported`]: it is 0.0.0.0 or `::`, or there is no such MTU.
/// * [`DeviceError::System`]: a call failed.
pub fn open(address: IpAddr, node: u64, options: UdpOptions) -> Result<UdpDevice, DeviceError> {
    let socket = Socket::bind(address, Options { offload: options.offload, buffer: options.buffer, port: PORT })?;
    let mtu = options.mtu.unwrap_or_else(|| mtu_within(socket.link_mtu(address), address));
    if !mtu.is_power_of_two() || !(256..=MAX_MTU as u32).contains(&mtu) {
        return Err(DeviceError::NotSupported("have such an MTU; there are 256, 512, 1024, 2048 and 4096"));
    }
    let window = match options.window {
        Some(window) => window.max(1),
        None => window_for(socket.buffers()?.0, mtu),
    };
    let carrier = TcpCarrier::listen(address, options.max_links as usize)?;
    let config = crate::nic::NicConfig {
        window,
        backs_off: true,
        weakness: Weakness { max_mtu: mtu, ..Weakness::NONE },
        seed: random()?,
        ..nic_config(address, options.max_links)
    };
    let wire = UdpWire::new(socket, address);
    assemble("udp", config, options.patience, wire, carrier, node, random()?)
}

/// The largest MTU whose packets an interface takes.
fn mtu_within(link_mtu: u32, address: IpAddr) -> u32 {
    // IP, UDP, BTH, what can follow that before a payload, and the ICRC.
    let headers = if address.is_ipv4() { 20 } else { 40 } + 8 + (BTH_BYTES + 16 + 4 + ICRC_BYTES) as u32;
    let mut mtu = MAX_MTU as u32;
    while mtu > 256 && mtu + headers > link_mtu {
        mtu /= 2;
    }
    mtu
}

/// How many packets of a queue pair a receive buffer allows. The kernel counts what a packet takes of its memory: its
/// bytes rounded up to a power of two, and some 700 for the descriptor.
fn window_for(buffer: usize, mtu: u32) -> u32 {
    let packet = 2 * mtu as usize + 768;
    ((buffer / packet / SENDERS) as u32).clamp(WINDOWS.0, WINDOWS.1)
}

fn random() -> Result<u64, DeviceError> {
    let mut bytes = [0; 8];
    // Up to 256 bytes come in one piece (getrandom(2)).
    getrandom(&mut bytes, GetRandomFlags::empty()).map_err(system("getrandom"))?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine over it may run on a core of its own.
    #[test]
    fn it_goes_to_another_thread() {
        fn goes<T: Send>() {}
        goes::<UdpDevice>();
    }

    #[test]
    fn payloads_fit_into_what_the_interface_takes() {
        let [v4, v6] = ["10.0.0.1", "fd00::1"].map(|address| address.parse::<IpAddr>().unwrap());
        let of = |mtu| [mtu_within(mtu, v4), mtu_within(mtu, v6)];
        assert_eq!([of(1500), of(9000), of(65536)], [[1024; 2], [4096; 2], [4096; 2]]);
        assert_eq!([of(4159), of(4160), of(4179), of(4180)], [[2048; 2], [4096, 2048], [4096, 2048], [4096; 2]]);
        assert_eq!([of(576), of(300)], [[512, 256], [256; 2]]);
    }

    #[test]
    fn windows_fit_into_the_buffer() {
        // 4 MiB twice, and what a user gets who may not ask for more: 212,992 twice.
        assert_eq!([window_for(8 << 20, 4096), window_for(8 << 20, 1024)], [234, 256]);
        assert_eq!([window_for(425_984, 4096), window_for(425_984, 1024), window_for(0, 256)], [11, 37, 8]);
    }
}
