//! Devices on a [`Fabric`].

use core::net::IpAddr;
use std::string::ToString;

use verbring_slab::{Arena, Region, RegionOptions};
use verbring_sys::DeviceError;
use verbring_sys::channel::{Medium, PACKET_BYTES};
use verbring_sys::rc::{Arrival, Carrier, RcDevice, RcOptions};
use verbring_sys::rnic::Rnic;

use crate::fabric::{Fabric, FabricPort, address};
use crate::nic::{NicConfig, Weakness};
use crate::soft::{Patience, Soft, Wire};

/// A device whose packets and control packets go over a fabric. Its address is the number of its node.
pub type FabricDevice = RcDevice<Soft<FabricPort>, FabricCarrier>;

/// Control packets as datagrams on a fabric.
#[derive(Debug)]
pub struct FabricCarrier(FabricPort);

/// When a control packet that was not answered is sent again, and how often.
const MEDIUM: Medium = Medium::Datagrams { resend_ns: 50_000, tries: 16 };

impl Carrier for FabricCarrier {
    type Route = u32;

    fn medium(&self) -> Medium {
        MEDIUM
    }

    fn open(&mut self, address: &str, _now: u64) -> Result<u32, DeviceError> {
        address.parse().map_err(|_| DeviceError::BadAddress)
    }

    fn send(&mut self, route: u32, packet: &[u8; PACKET_BYTES], now: u64) -> Result<bool, DeviceError> {
        self.0.send_control(now, route, packet);
        Ok(true)
    }

    fn receive(&mut self, now: u64) -> Option<Arrival<u32>> {
        let mut bytes = [0; PACKET_BYTES];
        let (route, len) = self.0.receive_control(now, &mut bytes)?;
        // What is missing makes it a damaged one.
        bytes.get_mut(len..)?.fill(0);
        Some(Arrival::Packet { route, bytes })
    }

    fn close(&mut self, _route: u32) {}

    fn peer_ip(&self, route: u32) -> Option<IpAddr> {
        Some(address(route))
    }
}

/// How a device on a fabric is.
#[derive(Clone, Copy, Debug)]
pub struct FabricOptions {
    /// Connections.
    pub max_links: u32,
    /// What its NIC does not do well.
    pub weakness: Weakness,
    /// How long it waits for answers.
    pub patience: Patience,
    /// Packets of a queue pair under way.
    pub window: u32,
}

impl Default for FabricOptions {
    fn default() -> FabricOptions {
        FabricOptions {
            max_links: 4,
            weakness: Weakness::NONE,
            patience: Patience { timeout: 4, retry_count: 7 },
            window: 128,
        }
    }
}

impl Fabric {
    /// A device at a node. `node_id` is the incarnation id of its engine; together with `seed` it makes everything random
    /// in it.
    pub fn device(
        &self,
        node: u32,
        node_id: u64,
        seed: u64,
        options: FabricOptions,
    ) -> Result<FabricDevice, DeviceError> {
        let config = NicConfig {
            window: options.window,
            weakness: options.weakness,
            seed: seed ^ node_id.rotate_left(17),
            ..nic_config(address(node), options.max_links)
        };
        let carrier = FabricCarrier(self.port(node));
        assemble("fabric", config, options.patience, self.port(node), carrier, node_id, seed)
    }

    /// The address of a node, to be connected to.
    pub fn address(node: u32) -> std::string::String {
        node.to_string()
    }
}

/// The NIC that a device of so many connections needs.
pub(crate) fn nic_config(address: IpAddr, max_links: u32) -> NicConfig {
    let links = max_links.next_power_of_two();
    NicConfig {
        max_qps: links * verbring_sys::CLASSES as u32,
        max_cqs: 1,
        sq_depth: 64,
        rq_depth: 64,
        cq_depth: (links * 4 * 128).next_power_of_two(),
        max_keys: 512,
        ..NicConfig::new(address)
    }
}

/// A device over a software NIC, with memory of its own.
pub(crate) fn assemble<W: Wire, C: Carrier>(
    name: &'static str,
    config: NicConfig,
    patience: Patience,
    wire: W,
    carrier: C,
    node: u64,
    secret: u64,
) -> Result<RcDevice<Soft<W>, C>, DeviceError> {
    let arena = |bytes| {
        let region = Region::private(bytes, RegionOptions::default());
        region.map(Arena::from_region).map_err(|_| DeviceError::System { call: "mmap", errno: 12 })
    };
    let options = RcOptions { max_links: config.max_qps / verbring_sys::CLASSES as u32 };
    let nic = Soft::new(name, arena(config.bytes())?, config, patience, wire)?;
    let bytes = RcDevice::<Soft<W>, C>::bytes(nic.caps(), options);
    RcDevice::new(nic, carrier, arena(bytes)?, options, node, secret)
}
