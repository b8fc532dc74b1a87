//! What a NIC may touch, and who may ask it to: registrations and memory windows by key.

use verbring_slab::{Arena, ArenaFull, Table};
use verbring_sys::rnic::{MrAccess, MrKeys};

use crate::random::Random;

/// The low byte of a key is its variant: the owner of a memory window chooses it at each bind (ibv_inc_rkey(3)).
const VARIANT_BITS: u32 = 8;

/// A protection domain: a queue pair reaches memory of its own domain only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pd(pub u32);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Free,
    Mr,
    /// A memory window of type 2: of this queue pair's peers, over that registration. Unbound without one.
    Window {
        bound: Option<(u32, u32)>,
    },
}

#[derive(Clone, Copy)]
struct Entry {
    kind: Kind,
    key: u32,
    pd: Pd,
    /// The address in this process, and as peers name it.
    base: u64,
    iova: u64,
    len: u64,
    access: MrAccess,
}

const FREE: Entry = Entry { kind: Kind::Free, key: 0, pd: Pd(0), base: 0, iova: 0, len: 0, access: MrAccess::empty() };

/// Why a range was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Denied;

/// Registrations and windows. The key of one is random, but for the bits that find its place, which a secret hides.
pub(super) struct Keys {
    table: Table<Entry>,
    secret: u32,
}

impl Keys {
    pub(super) const fn bytes(capacity: u32) -> usize {
        Table::<Entry>::bytes(capacity)
    }

    /// # Safety
    /// The arena outlives it.
    pub(super) unsafe fn new(arena: &mut Arena, capacity: u32, random: &mut Random) -> Result<Keys, ArenaFull> {
        // SAFETY: the caller keeps the arena.
        Ok(Keys { table: unsafe { arena.table(capacity, |_| FREE) }?, secret: random.any_u32() })
    }

    fn place(&self, key: u32) -> u32 {
        ((key ^ self.secret) >> VARIANT_BITS) & (self.table.capacity() - 1)
    }

    fn add(&mut self, entry: Entry, random: &mut Random) -> Option<u32> {
        let place = self.table.iter().position(|e| e.kind == Kind::Free)? as u32;
        let mask = (self.table.capacity() - 1) << VARIANT_BITS;
        let hidden = (place << VARIANT_BITS ^ self.secret) & mask;
        // Never 0, which stands for no key.
        let key = loop {
            let key = random.any_u32() & !mask | hidden;
            if key != 0 && key != self.table.at(place).key {
                break key;
            }
        };
        *self.table.at_mut(place) = Entry { key, ..entry };
        Some(key)
    }

    pub(super) fn register(
        &mut self,
        pd: Pd,
        base: *mut u8,
        len: usize,
        iova: u64,
        access: MrAccess,
        random: &mut Random,
    ) -> Option<MrKeys> {
        let entry = Entry { kind: Kind::Mr, key: 0, pd, base: base as u64, iova, len: len as u64, access };
        self.add(entry, random).map(|key| MrKeys { lkey: key, rkey: key, iova })
    }

    /// A registration ends, and with it the windows bound to it. False if there is none.
    pub(super) fn deregister(&mut self, key: u32) -> bool {
        let place = self.place(key);
        let entry = self.table.at_mut(place);
        if entry.kind != Kind::Mr || entry.key != key {
            return false;
        }
        // The key stays: it is not given out again at once.
        *entry = Entry { key, ..FREE };
        for window in self.table.iter_mut() {
            if matches!(window.kind, Kind::Window { bound: Some((_, mr)) } if mr == key) {
                window.kind = Kind::Window { bound: None };
            }
        }
        true
    }

    pub(super) fn add_window(&mut self, pd: Pd, random: &mut Random) -> Option<u32> {
        self.add(Entry { kind: Kind::Window { bound: None }, pd, ..FREE }, random)
    }

    pub(super) fn remove_window(&mut self, key: u32) -> bool {
        let place = self.place(key);
        let entry = self.table.at_mut(place);
        // Its owner may know it by an older variant.
        let is_it = matches!(entry.kind, Kind::Window { .. }) && (entry.key ^ key) >> VARIANT_BITS == 0;
        if is_it {
            *entry = Entry { key: entry.key, ..FREE };
        }
        is_it
    }

    /// Binds the window that `key` is a variant of to a part of a registration, for the peer of a queue pair.
    pub(super) fn bind(
        &mut self,
        key: u32,
        qp: u32,
        pd: Pd,
        mr: u32,
        range: (u64, u64),
        access: MrAccess,
    ) -> Result<(), Denied> {
        let (base, len) = range;
        let of = *self.table.at(self.place(mr));
        let is_mr = of.kind == Kind::Mr && of.key == mr && of.pd == pd && of.access.contains(MrAccess::MW_BIND);
        let needs = access & (MrAccess::REMOTE_WRITE | MrAccess::REMOTE_ATOMIC);
        let is_allowed = needs.is_empty() || of.access.contains(MrAccess::LOCAL_WRITE);
        let place = self.place(key);
        let window = self.table.at_mut(place);
        let is_window = window.kind == Kind::Window { bound: None } && (window.key ^ key) >> VARIANT_BITS == 0;
        if !is_mr || !is_allowed || !is_window || window.pd != pd || !is_within(of.base, of.len, base, len) {
            return Err(Denied);
        }
        let iova = of.iova.wrapping_add(base - of.base);
        *window = Entry { kind: Kind::Window { bound: Some((qp, mr)) }, key, pd, base, iova, len, access };
        Ok(())
    }

    /// Ends the binding of a window, at the wish of its queue pair or of the peer.
    pub(super) fn invalidate(&mut self, key: u32, qp: u32) -> Result<(), Denied> {
        let place = self.place(key);
        let window = self.table.at_mut(place);
        match window.kind {
            Kind::Window { bound: Some((of, _)) } if of == qp && window.key == key => {
                window.kind = Kind::Window { bound: None };
                Ok(())
            }
            _ => Err(Denied),
        }
    }

    /// The windows of a queue pair that is gone.
    pub(super) fn unbind_all(&mut self, qp: u32) {
        for window in self.table.iter_mut() {
            if matches!(window.kind, Kind::Window { bound: Some((of, _)) } if of == qp) {
                window.kind = Kind::Window { bound: None };
            }
        }
    }

    /// Where a range is that a peer may do `need` to; `qp` is the queue pair that it asks over.
    pub(super) fn check_remote(
        &self,
        key: u32,
        qp: u32,
        pd: Pd,
        address: u64,
        len: u64,
        need: MrAccess,
    ) -> Result<u64, Denied> {
        let entry = self.table.at(self.place(key));
        let is_its = match entry.kind {
            Kind::Mr => true,
            Kind::Window { bound: Some((of, _)) } => of == qp,
            _ => false,
        };
        let is_granted = is_its && entry.key == key && entry.pd == pd && entry.access.contains(need);
        if is_granted && is_within(entry.iova, entry.len, address, len) {
            Ok(entry.base.wrapping_add(address - entry.iova))
        } else {
            Err(Denied)
        }
    }

    /// Whether a work request may use local memory.
    pub(super) fn check_local(&self, key: u32, pd: Pd, address: u64, len: u64, need: MrAccess) -> Result<(), Denied> {
        let entry = self.table.at(self.place(key));
        let is_mr = entry.kind == Kind::Mr && entry.key == key && entry.pd == pd && entry.access.contains(need);
        let is_granted = is_mr && is_within(entry.base, entry.len, address, len);
        if is_granted || len == 0 { Ok(()) } else { Err(Denied) }
    }
}

fn is_within(base: u64, limit: u64, address: u64, len: u64) -> bool {
    match (limit.checked_sub(len), address.checked_sub(base)) {
        (Some(last), Some(offset)) => offset <= last,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;
    use verbring_slab::{Region, RegionOptions};

    const READ: MrAccess = MrAccess::REMOTE_READ;

    fn keys(random: &mut Random) -> (Arena, Keys) {
        let mut arena = Arena::from_region(Region::private(1 << 16, RegionOptions::default()).unwrap());
        // SAFETY: the arena is returned beside it.
        let keys = unsafe { Keys::new(&mut arena, 32, random) }.unwrap();
        (arena, keys)
    }

    #[test]
    fn windows() {
        let mut random = Random::new(1);
        let (_arena, mut keys) = keys(&mut random);
        let at = 0x1000 as *mut u8;
        let mr = keys.register(Pd(1), at, 100, 0x5000, MrAccess::MW_BIND | READ, &mut random).unwrap();
        let window = keys.add_window(Pd(1), &mut random).unwrap();
        assert_eq!(keys.check_remote(window, 7, Pd(1), 0x5000, 1, READ), Err(Denied), "not bound");
        let bound = window & !0xff | (window + 1) & 0xff;
        // Out of the registration; of another domain; a right that needs the owner's.
        assert!(keys.bind(bound, 7, Pd(1), mr.lkey, (0x1000, 101), READ).is_err());
        assert!(keys.bind(bound, 7, Pd(2), mr.lkey, (0x1000, 10), READ).is_err());
        assert!(keys.bind(bound, 7, Pd(1), mr.lkey, (0x1000, 10), MrAccess::REMOTE_WRITE).is_err());
        keys.bind(bound, 7, Pd(1), mr.lkey, (0x1008, 10), READ).unwrap();
        assert!(keys.bind(bound, 7, Pd(1), mr.lkey, (0x1008, 10), READ).is_err(), "bound already");
        assert_eq!(keys.check_remote(bound, 7, Pd(1), 0x5008, 10, READ), Ok(0x1008));
        assert!(keys.check_remote(bound, 7, Pd(1), 0x5007, 1, READ).is_err());
        assert!(keys.check_remote(bound, 8, Pd(1), 0x5008, 1, READ).is_err(), "another queue pair");
        assert!(keys.check_remote(window, 7, Pd(1), 0x5008, 1, READ).is_err(), "an older variant");
        assert!(keys.check_local(bound, Pd(1), 0x1008, 1, MrAccess::empty()).is_err(), "a window is no local key");
        assert!(keys.invalidate(bound, 8).is_err());
        keys.invalidate(bound, 7).unwrap();
        assert!(keys.check_remote(bound, 7, Pd(1), 0x5008, 1, READ).is_err());
        keys.bind(bound, 7, Pd(1), mr.lkey, (0x1008, 10), READ).unwrap();
        assert!(keys.deregister(mr.lkey));
        assert!(keys.check_remote(bound, 7, Pd(1), 0x5008, 1, READ).is_err(), "its memory is gone");
        assert!(keys.remove_window(window) && !keys.remove_window(window));
    }

    proptest! {
        /// Against a list: a key opens what it was given for, and nothing once it ended.
        #[test]
        fn model(seed in any::<u64>(), steps in prop::collection::vec((0u32..4, 0u64..300, 0u64..300), 1..150)) {
            let mut random = Random::new(seed);
            let (_arena, mut keys) = keys(&mut random);
            let mut live: Vec<(u32, u64, u64)> = Vec::new();
            let mut gone: Vec<u32> = Vec::new();
            for (what, a, b) in steps {
                match what {
                    0 | 1 => match keys.register(Pd(1), a as *mut u8, b as usize, a, READ, &mut random) {
                        Some(key) => {
                            prop_assert!(key.rkey != 0 && live.iter().all(|l| l.0 != key.rkey));
                            live.push((key.rkey, a, b));
                        }
                        None => prop_assert_eq!(live.len(), 32),
                    },
                    2 if !live.is_empty() => {
                        let (key, ..) = live.remove(a as usize % live.len());
                        prop_assert!(keys.deregister(key) && !keys.deregister(key));
                        gone.push(key);
                    }
                    _ => {}
                }
                for (key, base, len) in &live {
                    let fits = a >= *base && a + b <= base + len;
                    prop_assert_eq!(keys.check_remote(*key, 0, Pd(1), a, b, READ).is_ok(), fits);
                    prop_assert!(keys.check_remote(*key, 0, Pd(2), *base, 0, READ).is_err());
                    prop_assert!(keys.check_remote(*key, 0, Pd(1), *base, 0, MrAccess::REMOTE_WRITE).is_err());
                    prop_assert!(keys.check_remote(*key ^ 1 << (a % 32), 0, Pd(1), *base, 0, READ).is_err()
                        || live.iter().any(|l| l.0 == *key ^ 1 << (a % 32)));
                }
                prop_assert!(gone.iter().all(|key| live.iter().any(|l| l.0 == *key)
                    || keys.check_remote(*key, 0, Pd(1), a, 0, READ).is_err()));
            }
        }
    }
}
