//! What one side hands to the other to let it in.

use core::fmt;

use verbring_sys::{Domain, Rights};

/// The bytes of a [`Remote`].
pub const REMOTE_BYTES: usize = 64;

const MAGIC: u16 = 0x7276;
const VERSION: u8 = 1;

/// A region of another process: who has it, where, how long it is, and the token that lets one in. 64 bytes,
/// little-endian; send them by any means (they open the region to whoever has them), and `import` them.
///
/// ```text
/// offset  bytes  what
///      0      2  magic 0x7276
///      2      1  version 1
///      3      1  atomicity domain: 0 CPU, 1 NIC, 2 engine
///      4      1  rights: bit 0 read, 1 write, 2 atomic
///      5      3  zero
///      8      4  key
///     12      4  epoch
///     16      8  node
///     24      8  address
///     32      8  length
///     40     16  token
///     56      8  zero
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// The incarnation id of the owner's engine.
    pub node: u64,
    /// The owner's key.
    pub key: u32,
    /// Bumped by the owner to make older ones worthless.
    pub epoch: u32,
    /// The region's address in the owner's process: for people and for absolute remote pointers.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// What may be done.
    pub rights: Rights,
    /// Where atomics are executed.
    pub domain: Domain,
    /// Proves that the owner let one in.
    pub token: [u8; 16],
}

/// Why bytes are no [`Remote`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemoteError {
    /// The magic is not ours.
    Magic,
    /// Another version.
    Version(u8),
    /// A field has a value that it cannot have.
    Field(&'static str),
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoteError::Magic => f.write_str("these 64 bytes are no Remote; was it cut or overwritten on its way?"),
            RemoteError::Version(theirs) => {
                write!(f, "the Remote is of version {theirs}, this is version {VERSION}; use one release on both sides")
            }
            RemoteError::Field(which) => write!(f, "the Remote's {which} has an impossible value; it was damaged"),
        }
    }
}

impl core::error::Error for RemoteError {}

impl Remote {
    /// Its bytes.
    pub fn to_bytes(&self) -> [u8; REMOTE_BYTES] {
        let mut bytes = [0; REMOTE_BYTES];
        bytes[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[2] = VERSION;
        bytes[3] = self.domain as u8;
        bytes[4] = self.rights.bits();
        bytes[8..12].copy_from_slice(&self.key.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.node.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.address.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.len.to_le_bytes());
        bytes[40..56].copy_from_slice(&self.token);
        bytes
    }

    /// The Remote of these bytes.
    pub fn from_bytes(bytes: &[u8; REMOTE_BYTES]) -> Result<Remote, RemoteError> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if u16::from_le_bytes([bytes[0], bytes[1]]) != MAGIC {
            return Err(RemoteError::Magic);
        }
        if bytes[2] != VERSION {
            return Err(RemoteError::Version(bytes[2]));
        }
        let domain = match bytes[3] {
            0 => Domain::Cpu,
            1 => Domain::Nic,
            2 => Domain::Engine,
            _ => return Err(RemoteError::Field("atomicity domain")),
        };
        let rights = Rights::from_bits(bytes[4]).ok_or(RemoteError::Field("rights"))?;
        if bytes[5..8] != [0; 3] || u64_at(56) != 0 {
            return Err(RemoteError::Field("reserved part"));
        }
        let mut token = [0; 16];
        token.copy_from_slice(&bytes[40..56]);
        let (address, len) = (u64_at(24), u64_at(32));
        address.checked_add(len).ok_or(RemoteError::Field("length"))?;
        Ok(Remote { node: u64_at(16), key: u32_at(8), epoch: u32_at(12), address, len, rights, domain, token })
    }
}

impl fmt::Debug for Remote {
    /// Without the token: logs are read by many.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote")
            .field("node", &format_args!("{:#x}", self.node))
            .field("key", &self.key)
            .field("epoch", &self.epoch)
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("rights", &self.rights)
            .field("domain", &self.domain)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn remote() -> Remote {
        Remote {
            node: 0x0102030405060708,
            key: 0x11121314,
            epoch: 3,
            address: 0x7f0000000000,
            len: 1 << 20,
            rights: Rights::READ | Rights::ATOMIC,
            domain: Domain::Cpu,
            token: *b"0123456789abcdef",
        }
    }

    #[test]
    fn bytes_are_as_documented() {
        let bytes = remote().to_bytes();
        assert_eq!(bytes[..12], [0x76, 0x72, 1, 0, 5, 0, 0, 0, 0x14, 0x13, 0x12, 0x11]);
        assert_eq!(bytes[12..24], [3, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[40..], *b"0123456789abcdef\0\0\0\0\0\0\0\0");
        assert!(!std::format!("{:?}", remote()).contains("token"));
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 64), fixed in any::<bool>()) {
            let mut bytes: [u8; 64] = bytes.try_into().unwrap();
            if fixed {
                bytes[..8].copy_from_slice(&[0x76, 0x72, 1, 0, 5, 0, 0, 0]);
                bytes[56..].fill(0);
            }
            if let Ok(remote) = Remote::from_bytes(&bytes) {
                prop_assert_eq!(remote.to_bytes(), bytes);
            }
        }

        #[test]
        fn a_flipped_bit_is_another_remote_or_none(bit in 0usize..512) {
            let mut bytes = remote().to_bytes();
            prop_assert_eq!(Remote::from_bytes(&bytes), Ok(remote()));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(Remote::from_bytes(&bytes), Ok(remote()));
        }
    }
}
