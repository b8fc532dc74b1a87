//! What two engines say to each other over the control channel of a device.
//!
//! ```text
//! offset  bytes  what
//!      0      1  kind: 1 import, 2 grant, 3 deny, 4 revoke, 5 let go
//!      1      1  grant: rights; deny: 0
//!      2      2  deny: status
//!      4      4  key of the region's owner
//!      8      4  key of the importer
//!     12      4  all but deny: epoch
//!     16      8  grant: length
//!     24     16  import: token
//! ```
//! The rest is zero, and is checked.

use verbring_sys::{MESSAGE_BYTES, Message, Rights, Status};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Let me have the region `key`; I shall call it `importer`.
    Import { key: u32, importer: u32, epoch: u32, token: [u8; 16] },
    /// Here it is. The memory comes with the message.
    Grant { key: u32, importer: u32, epoch: u32, len: u64, rights: Rights },
    /// No.
    Deny { key: u32, importer: u32, status: Status },
    /// The region of this epoch is no more: let go of it.
    Revoke { key: u32, epoch: u32 },
    /// The importer does not use the region of this epoch any more.
    LetGo { key: u32, epoch: u32 },
}

impl Said {
    pub(crate) fn encode(&self) -> Message {
        let mut bytes = [0; MESSAGE_BYTES];
        let (kind, key, importer) = match *self {
            Said::Import { key, importer, epoch, token } => {
                bytes[12..16].copy_from_slice(&epoch.to_le_bytes());
                bytes[24..40].copy_from_slice(&token);
                (1, key, importer)
            }
            Said::Grant { key, importer, epoch, len, rights } => {
                bytes[12..16].copy_from_slice(&epoch.to_le_bytes());
                bytes[1] = rights.bits();
                bytes[16..24].copy_from_slice(&len.to_le_bytes());
                (2, key, importer)
            }
            Said::Deny { key, importer, status } => {
                bytes[2..4].copy_from_slice(&(status as u16).to_le_bytes());
                (3, key, importer)
            }
            Said::Revoke { key, epoch } | Said::LetGo { key, epoch } => {
                bytes[12..16].copy_from_slice(&epoch.to_le_bytes());
                (if matches!(self, Said::Revoke { .. }) { 4 } else { 5 }, key, 0)
            }
        };
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&key.to_le_bytes());
        bytes[8..12].copy_from_slice(&importer.to_le_bytes());
        bytes
    }

    /// None for anything that no engine says.
    pub(crate) fn decode(bytes: &Message) -> Option<Said> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let (key, importer) = (u32_at(4), u32_at(8));
        let said = match bytes[0] {
            1 => {
                let mut token = [0; 16];
                token.copy_from_slice(&bytes[24..40]);
                Said::Import { key, importer, epoch: u32_at(12), token }
            }
            2 => {
                let rights = Rights::from_bits(bytes[1])?;
                Said::Grant { key, importer, epoch: u32_at(12), len: u64_at(16), rights }
            }
            3 => {
                let status = Status::from_raw(u16::from_le_bytes([bytes[2], bytes[3]]))?;
                if status.is_success() {
                    return None;
                }
                Said::Deny { key, importer, status }
            }
            4 => Said::Revoke { key, epoch: u32_at(12) },
            5 => Said::LetGo { key, epoch: u32_at(12) },
            _ => return None,
        };
        (said.encode() == *bytes).then_some(said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 64), kind in 0u8..7, tail in any::<bool>()) {
            let mut bytes: Message = bytes.try_into().unwrap();
            bytes[0] = kind;
            if tail {
                bytes[12..].fill(0);
                bytes[1..4].fill(1);
            }
            if let Some(said) = Said::decode(&bytes) {
                prop_assert_eq!(said.encode(), bytes);
            }
        }
    }

    #[test]
    fn there_and_back() {
        let all = [
            Said::Import { key: 1, importer: 2, epoch: 3, token: [4; 16] },
            Said::Grant { key: 1, importer: 2, epoch: 3, len: 1 << 40, rights: Rights::READ },
            Said::Deny { key: 1, importer: 2, status: Status::StaleEpoch },
            Said::Revoke { key: 9, epoch: 2 },
            Said::LetGo { key: 9, epoch: 3 },
        ];
        for said in all {
            assert_eq!(Said::decode(&said.encode()), Some(said));
        }
    }
}
