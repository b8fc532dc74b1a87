//! Packet sequence numbers: 24 bits on the wire, wide inside.
//!
//! A queue pair counts its packets in 64 bits, so that all comparing inside is plain. What comes from the wire is taken
//! for the wide number next to a known one; that is unambiguous as long as fewer than 2^23 packets are under way (IBTA
//! volume 1, 9.7.2).

/// Bits of a PSN or MSN on the wire.
pub const BITS: u32 = 24;
/// All of them.
pub const MASK: u32 = (1 << BITS) - 1;

/// The first wide number of a connection that starts at `psn`: far enough above 0 that its neighbours are numbers too.
pub const fn start(psn: u32) -> u64 {
    (1 << BITS) | (psn & MASK) as u64
}

/// What goes on the wire.
pub const fn wire(wide: u64) -> u32 {
    wide as u32 & MASK
}

/// The wide number of `psn` that is nearest to `near`; of two that are equally near the smaller one.
pub const fn widen(near: u64, psn: u32) -> u64 {
    let ahead = psn.wrapping_sub(near as u32) & MASK;
    if ahead < 1 << (BITS - 1) {
        near.wrapping_add(ahead as u64)
    } else {
        near.wrapping_sub((1 << BITS) - ahead as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nearest(near in (1u64 << 24)..u64::MAX / 2, distance in -(1i64 << 23)..(1i64 << 23)) {
            let wide = near.wrapping_add_signed(distance);
            prop_assert_eq!(widen(near, wire(wide)), wide);
        }
    }

    #[test]
    fn around_the_wrap() {
        assert_eq!(widen(start(0xff_ffff), 0), start(0xff_ffff) + 1);
        assert_eq!(widen(start(0), 0xff_ffff), start(0) - 1);
        assert_eq!(wire(start(0xff_ffff) + 1), 0);
    }
}
