//! The devices that can be measured, and where their ends are.

use std::fmt;
use std::net::IpAddr;

use verbring::{Config, Device, DeviceError, Shm, ShmOptions};
use verbring_sim::udp::{self, UdpDevice, UdpOptions};
use verbring_sys::rnic::Rnic;

/// Where an end is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// A name of this host.
    Shm(String),
    /// An IP address of this host, or of another.
    Udp(IpAddr),
}

impl Address {
    /// `shm:NAME`, `udp:ADDR`, or an IP address.
    pub(crate) fn parse(text: &str) -> Result<Address, String> {
        let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if let Some(name) = text.strip_prefix("shm:")
            && (1..=64).contains(&name.len())
            && name.bytes().all(is_good)
        {
            return Ok(Address::Shm(name.to_string()));
        }
        let ip = text.strip_prefix("udp:").unwrap_or(text).parse().map(Address::Udp);
        ip.map_err(|_| {
            "an address is shm:NAME, with a NAME of 1 to 64 of the characters A-Z a-z 0-9 . _ -, or udp:ADDR, with an \
             IP address such as 192.0.2.1 or fd00::1"
                .to_string()
        })
    }

    /// As a device knows it.
    pub(crate) fn of_device(&self) -> String {
        match self {
            Address::Shm(name) => name.clone(),
            Address::Udp(ip) => ip.to_string(),
        }
    }

    /// Whether it is of the same device.
    pub(crate) fn is_like(&self, other: &Address) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Shm(name) => write!(f, "shm:{name}"),
            Address::Udp(ip) => write!(f, "udp:{ip}"),
        }
    }
}

/// What `--mtu` and `--no-offload` say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tuning {
    pub(crate) mtu: Option<u32>,
    pub(crate) offload: bool,
}

/// A device that is measured.
pub(crate) trait Measured: Device + Sized {
    /// Its name, as in `--device`.
    const NAME: &'static str;
    /// Bytes of the other end arrive only while this end polls, and are sent again by its clock.
    const IS_DRIVEN: bool;

    /// Opens it at an address.
    fn open(at: &Address, node: u64, config: &Config, tuning: Tuning) -> Result<Self, DeviceError>;

    /// What is to be known of its wire after a run.
    fn wire(&self) -> Option<String>;
}

impl Measured for Shm {
    const NAME: &'static str = "shm";
    const IS_DRIVEN: bool = false;

    fn open(at: &Address, node: u64, config: &Config, _tuning: Tuning) -> Result<Shm, DeviceError> {
        let options = ShmOptions { max_links: config.max_peers, max_imports: config.max_imports };
        Shm::bind(&at.of_device(), node, options)
    }

    fn wire(&self) -> Option<String> {
        None
    }
}

impl Measured for UdpDevice {
    const NAME: &'static str = "udp";
    const IS_DRIVEN: bool = true;

    fn open(at: &Address, node: u64, config: &Config, tuning: Tuning) -> Result<UdpDevice, DeviceError> {
        let Address::Udp(ip) = at else { return Err(DeviceError::BadAddress) };
        let Tuning { mtu, offload } = tuning;
        udp::open(*ip, node, UdpOptions { max_links: config.max_peers, mtu, offload, ..UdpOptions::default() })
    }

    fn wire(&self) -> Option<String> {
        let nic = self.rnic();
        let (mtu, counters, stats) = (nic.caps().mtu, &nic.nic().counters, nic.wire().socket().stats());
        let offload = if nic.wire().socket().offloads() { "with" } else { "without" };
        Some(format!(
            "MTU {mtu} {offload} offload; this end sent {} packets, {} of them again, in {} messages to the kernel",
            counters.sent, counters.resent, stats.send_messages
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for text in ["shm:a.b-c_1", "udp:10.0.0.1", "udp:fd00::1"] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Address::parse("10.0.0.1").unwrap().to_string(), "udp:10.0.0.1");
        for bad in ["", "name", "shm:", "shm:a/b", "tcp:1.2.3.4", "udp:", "udp:10.0.0", "udp:10.0.0.1:4791"] {
            assert!(Address::parse(bad).unwrap_err().contains("shm:NAME"), "{bad}");
        }
    }
}
