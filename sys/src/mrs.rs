//! The registrations of a device whose NIC is the CPU.

use crate::lane::MAX_MRS;
use crate::{DeviceError, Memory, Mr, Rights};

/// Registrations by number. An epoch is never used twice for one number, so a grant of an old registration is not taken
/// for one of its successor.
pub(crate) struct Mrs {
    slots: heapless::Vec<Slot, { MAX_MRS as usize }>,
}

struct Slot {
    epoch: u32,
    live: Option<Registration>,
}

/// One registration.
pub(crate) struct Registration {
    pub(crate) memory: Memory,
    pub(crate) rights: Rights,
}

/// What a peer is told of a registration.
pub(crate) struct Grant<'a> {
    pub(crate) epoch: u32,
    pub(crate) registration: &'a Registration,
}

impl Mrs {
    pub(crate) const fn new() -> Mrs {
        Mrs { slots: heapless::Vec::new() }
    }

    pub(crate) fn add(&mut self, memory: Memory, rights: Rights) -> Result<Mr, DeviceError> {
        let registration = Registration { memory, rights };
        if let Some(free) = self.slots.iter().position(|s| s.live.is_none()) {
            self.slots[free].live = Some(registration);
            return Ok(Mr(free as u32));
        }
        let full = DeviceError::Full { what: "memory registrations", limit: MAX_MRS };
        self.slots.push(Slot { epoch: 1, live: Some(registration) }).map_err(|_| full)?;
        Ok(Mr(self.slots.len() as u32 - 1))
    }

    pub(crate) fn get(&self, mr: Mr) -> Result<Grant<'_>, DeviceError> {
        let slot = self.slots.get(mr.0 as usize).ok_or(DeviceError::NoSuchMr)?;
        let registration = slot.live.as_ref().ok_or(DeviceError::NoSuchMr)?;
        Ok(Grant { epoch: slot.epoch, registration })
    }

    /// The epoch that follows: grants of the one before are worth nothing.
    pub(crate) fn next_epoch(&mut self, mr: Mr) -> Result<u32, DeviceError> {
        let slot = self.slots.get_mut(mr.0 as usize).filter(|s| s.live.is_some()).ok_or(DeviceError::NoSuchMr)?;
        slot.epoch = slot.epoch.wrapping_add(1);
        Ok(slot.epoch)
    }

    pub(crate) fn remove(&mut self, mr: Mr) -> Result<Registration, DeviceError> {
        self.next_epoch(mr)?;
        self.slots.get_mut(mr.0 as usize).and_then(|s| s.live.take()).ok_or(DeviceError::NoSuchMr)
    }

    /// The device goes: its regions can be exported by another.
    #[cfg(feature = "shm")]
    pub(crate) fn end_exports(&self) {
        for registration in self.slots.iter().filter_map(|s| s.live.as_ref()) {
            if let (Memory::Shared { region, .. }, false) = (&registration.memory, registration.rights.is_empty()) {
                region.end_export();
            }
        }
    }
}
