//! Access to memory that somebody else may write at the same time.
//!
//! Such memory is never a Rust reference. Words are reached by atomics; ranges by instructions that the compiler does not
//! see through (or, on other machines, byte by byte with relaxed atomics), so a race is a matter of bytes, not of
//! undefined behaviour. A range has no order inside; an aligned word of up to 8 bytes that is copied alone is not torn.

use core::hint::cold_path;
use core::sync::atomic::{AtomicU64, Ordering};

/// From this length on a put or get, or a row of them each behind the other, bypasses the cache: it is larger than what a
/// consumer would find there (docs/PERFORMANCE.md has the measurement).
pub const STREAM_FROM: u32 = 32 << 20;

/// The word at `address`.
///
/// # Safety
/// `address` is valid for 8 bytes and a multiple of 8.
#[inline(always)]
pub unsafe fn word<'a>(address: u64) -> &'a AtomicU64 {
    // SAFETY: the caller's promise; all access to words is atomic.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

/// Copies up to 16 bytes out of two words.
///
/// # Safety
/// `to` is valid for writes of `len` bytes.
#[inline(always)]
pub unsafe fn copy_words(to: *mut u8, first: u64, second: u64, len: u32) {
    if len == 8 {
        // SAFETY: the caller's promise.
        unsafe { raw::store8(to, first) };
    } else {
        let bytes = [first, second];
        // SAFETY: as above; at most 16 bytes are read.
        unsafe { copy(to, bytes.as_ptr().cast(), if len > 16 { 16 } else { len as usize }) };
    }
}

/// Copies a range.
///
/// # Safety
/// `to` is valid for writes and `from` for reads of `len` bytes, and they do not overlap unless they are the same.
#[inline(always)]
pub unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise.
    _ = unsafe { copy_up_to(to, from, len, usize::MAX) };
}

/// Copies a range, unless it is longer than `max` (64 or more): whether it did.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
pub unsafe fn copy_up_to(to: *mut u8, from: *const u8, len: usize, max: usize) -> bool {
    // SAFETY: the caller's promise; each branch stays inside `len`.
    unsafe {
        if len == 8 {
            raw::store8(to, raw::load8(from));
        } else if len > 64 {
            cold_path();
            if len > max {
                return false;
            }
            copy_long(to, from, len);
        } else if len >= 16 {
            raw::copy_16_to_64(to, from, len);
        } else {
            copy_short(to, from, len);
        }
    }
    true
}

/// Below 16 bytes: two moves that overlap.
#[inline(always)]
unsafe fn copy_short(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the promise of `copy`.
    unsafe {
        if len >= 8 {
            let (a, b) = (raw::load8(from), raw::load8(from.add(len - 8)));
            raw::store8(to, a);
            raw::store8(to.add(len - 8), b);
        } else if len >= 4 {
            let (a, b) = (raw::load4(from), raw::load4(from.add(len - 4)));
            raw::store4(to, a);
            raw::store4(to.add(len - 4), b);
        } else if len >= 2 {
            let (a, b) = (raw::load2(from), raw::load2(from.add(len - 2)));
            raw::store2(to, a);
            raw::store2(to.add(len - 2), b);
        } else if len == 1 {
            raw::store1(to, raw::load1(from));
        }
    }
}

/// Out of line: the call costs nothing beside the copy.
#[inline(never)]
unsafe fn copy_long(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the promise of `copy`.
    unsafe { raw::copy_blocks(to, from, len, false) }
}

/// Copies a range past the cache: for ranges so large that their end would push out their beginning. The stores are
/// ordered (sfence) when it returns.
///
/// # Safety
/// As [`copy`].
#[inline(never)]
pub unsafe fn copy_stream(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the promise of `copy`.
    unsafe { if len > 64 { raw::copy_blocks(to, from, len, true) } else { copy(to, from, len) } }
}

/// Reads a word as the owner of a signal does: what was put before it is seen afterwards.
///
/// # Safety
/// As [`word`].
#[inline(always)]
pub unsafe fn load_signal(address: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { word(address) }.load(Ordering::Acquire)
}

#[cfg(target_arch = "x86_64")]
mod raw {
    use core::arch::asm;
    use core::arch::x86_64::__cpuid;
    use core::sync::atomic::{AtomicU8, Ordering};

    macro_rules! moves {
        ($($load:ident $store:ident $type:ty, $class:ident, $modifier:literal;)+) => {$(
            #[inline(always)]
            pub(super) unsafe fn $load(from: *const u8) -> $type {
                let value: $type;
                // SAFETY: `from` is valid for the width.
                unsafe {
                    asm!(concat!("mov {v", $modifier, "}, [{p}]"), v = out($class) value, p = in(reg) from,
                        options(nostack, preserves_flags, readonly));
                }
                value
            }
            #[inline(always)]
            pub(super) unsafe fn $store(to: *mut u8, value: $type) {
                // SAFETY: `to` is valid for the width.
                unsafe {
                    asm!(concat!("mov [{p}], {v", $modifier, "}"), v = in($class) value, p = in(reg) to,
                        options(nostack, preserves_flags));
                }
            }
        )+};
    }
    moves! {
        load8 store8 u64, reg, ":r";
        load4 store4 u32, reg, ":e";
        load2 store2 u16, reg, ":x";
        load1 store1 u8, reg_byte, "";
    }

    /// Four moves that overlap, whatever the length: no branch to guess. All loads come before all stores.
    #[inline(always)]
    pub(super) unsafe fn copy_16_to_64(to: *mut u8, from: *const u8, len: usize) {
        let last = len - 16;
        let (second, third) = (if last < 16 { last } else { 16 }, last.saturating_sub(16));
        // SAFETY: 16 <= len <= 64: each move of 16 bytes begins at `last` at the latest.
        unsafe {
            asm!("movdqu {a}, [{f}]", "movdqu {b}, [{f} + {i}]", "movdqu {c}, [{f} + {j}]", "movdqu {d}, [{f} + {n}]",
                "movdqu [{t}], {a}", "movdqu [{t} + {i}], {b}", "movdqu [{t} + {j}], {c}", "movdqu [{t} + {n}], {d}",
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _, f = in(reg) from,
                t = in(reg) to, i = in(reg) second, j = in(reg) third, n = in(reg) last,
                options(nostack, preserves_flags));
        }
    }

    /// More than 64 bytes, through the cache or past it.
    #[inline(never)]
    pub(super) unsafe fn copy_blocks(to: *mut u8, from: *const u8, len: usize, past_cache: bool) {
        // SAFETY: the promise of `copy`.
        unsafe { copy_blocks_by(has_avx(), to, from, len, past_cache) }
    }

    /// Blocks of 128, stored where the target is a multiple of 64.
    #[inline(always)]
    pub(super) unsafe fn copy_blocks_by(
        avx: bool,
        mut to: *mut u8,
        mut from: *const u8,
        mut len: usize,
        past_cache: bool,
    ) {
        // SAFETY: every step stays inside `len`; what overlaps is the same bytes.
        unsafe {
            let (end, end_from) = (to.add(len), from.add(len));
            copy_64(to, from);
            let head = 64 - (to as usize & 63);
            (to, from, len) = (to.add(head), from.add(head), len - head);
            let blocks = len / 128;
            if blocks != 0 {
                match (avx, past_cache) {
                    (true, false) => avx_blocks(to, from, blocks),
                    (true, true) => avx_blocks_past_cache(to, from, blocks),
                    (false, false) => sse_blocks(to, from, blocks),
                    (false, true) => sse_blocks_past_cache(to, from, blocks),
                }
            }
            let rest = len - blocks * 128;
            if rest > 64 {
                copy_64(to.add(blocks * 128), from.add(blocks * 128));
            }
            copy_64(end.sub(64), end_from.sub(64));
        }
    }

    #[inline(always)]
    unsafe fn copy_64(to: *mut u8, from: *const u8) {
        // SAFETY: the caller has 64 bytes.
        unsafe { copy_16_to_64(to, from, 64) }
    }

    /// A loop over blocks of 128 bytes: all loads of a block come before its stores, which would else seem to hit the
    /// loads of the next when both ends lie at the same offset in their pages.
    macro_rules! block_loop {
        ($name:ident, [$($load:expr),+], [$($store:expr),+], [$($end:literal),*]) => {
            #[inline(always)]
            unsafe fn $name(to: *mut u8, from: *const u8, blocks: usize) {
                // SAFETY: the caller has `blocks` times 128 bytes, and `to` is a multiple of 64. All vector registers are
                // named as changed: vzeroupper clears the upper half of each.
                unsafe {
                    asm!("2:", $($load,)+ $($store,)+ "add {f}, 128", "add {t}, 128", "dec {n}", "jnz 2b", $($end,)*
                        f = inout(reg) from => _, t = inout(reg) to => _, n = inout(reg) blocks => _,
                        out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                        out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                        out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                        out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _, options(nostack));
                }
            }
        };
        ($name:ident, avx, $store:literal, [$($end:literal),*]) => {
            block_loop!(
                $name,
                ["vmovdqu ymm0, [{f}]", "vmovdqu ymm1, [{f} + 32]", "vmovdqu ymm2, [{f} + 64]", "vmovdqu ymm3, [{f} + 96]"],
                [
                    concat!($store, " [{t}], ymm0"), concat!($store, " [{t} + 32], ymm1"),
                    concat!($store, " [{t} + 64], ymm2"), concat!($store, " [{t} + 96], ymm3")
                ],
                [$($end),*]
            );
        };
        ($name:ident, sse, $store:literal, [$($end:literal),*]) => {
            block_loop!(
                $name,
                [
                    "movdqu xmm0, [{f}]", "movdqu xmm1, [{f} + 16]", "movdqu xmm2, [{f} + 32]", "movdqu xmm3, [{f} + 48]",
                    "movdqu xmm4, [{f} + 64]", "movdqu xmm5, [{f} + 80]", "movdqu xmm6, [{f} + 96]",
                    "movdqu xmm7, [{f} + 112]"
                ],
                [
                    concat!($store, " [{t}], xmm0"), concat!($store, " [{t} + 16], xmm1"),
                    concat!($store, " [{t} + 32], xmm2"), concat!($store, " [{t} + 48], xmm3"),
                    concat!($store, " [{t} + 64], xmm4"), concat!($store, " [{t} + 80], xmm5"),
                    concat!($store, " [{t} + 96], xmm6"), concat!($store, " [{t} + 112], xmm7")
                ],
                [$($end),*]
            );
        };
    }

    block_loop!(avx_blocks, avx, "vmovdqa", ["vzeroupper"]);
    block_loop!(sse_blocks, sse, "movdqa", []);
    // A later plain or Release store is not ordered behind non-temporal ones (Intel SDM vol. 1, 10.4.6.2).
    block_loop!(avx_blocks_past_cache, avx, "vmovntdq", ["vzeroupper", "sfence"]);
    block_loop!(sse_blocks_past_cache, sse, "movntdq", ["sfence"]);

    /// Whether CPU and operating system have AVX (Intel SDM vol. 1, 14.3): asked once.
    fn has_avx() -> bool {
        const ASK: u8 = 0;
        const NO: u8 = 1;
        const YES: u8 = 2;
        static ANSWER: AtomicU8 = AtomicU8::new(ASK);
        match ANSWER.load(Ordering::Relaxed) {
            ASK => {
                let answer = ask_for_avx();
                ANSWER.store(if answer { YES } else { NO }, Ordering::Relaxed);
                answer
            }
            answer => answer == YES,
        }
    }

    #[cold]
    fn ask_for_avx() -> bool {
        const OSXSAVE_AND_AVX: u32 = 1 << 27 | 1 << 28;
        const SSE_AND_AVX_STATE: u32 = 0b110;
        if __cpuid(1).ecx & OSXSAVE_AND_AVX != OSXSAVE_AND_AVX {
            return false;
        }
        let state: u32;
        // SAFETY: OSXSAVE says that the instruction is there.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") state, out("edx") _, options(nomem, nostack, preserves_flags));
        }
        state & SSE_AND_AVX_STATE == SSE_AND_AVX_STATE
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod raw {
    //! Relaxed atomics: a word where both sides are aligned, bytes elsewhere.

    use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    macro_rules! moves {
        ($($load:ident $store:ident $type:ty;)+) => {$(
            pub(super) unsafe fn $load(from: *const u8) -> $type {
                let mut bytes = [0u8; size_of::<$type>()];
                // SAFETY: `from` is valid for the width; `bytes` is ours.
                unsafe { copy_string(bytes.as_mut_ptr(), from, bytes.len()) };
                <$type>::from_ne_bytes(bytes)
            }
            pub(super) unsafe fn $store(to: *mut u8, value: $type) {
                let bytes = value.to_ne_bytes();
                // SAFETY: `to` is valid for the width.
                unsafe { copy_string(to, bytes.as_ptr(), bytes.len()) };
            }
        )+};
    }
    moves! {
        load4 store4 u32;
        load2 store2 u16;
        load1 store1 u8;
    }

    pub(super) unsafe fn load8(from: *const u8) -> u64 {
        if from.align_offset(8) == 0 {
            // SAFETY: aligned and valid.
            return unsafe { AtomicU64::from_ptr(from.cast_mut().cast()) }.load(Relaxed);
        }
        let mut bytes = [0u8; 8];
        // SAFETY: valid for 8 bytes.
        unsafe { copy_bytes(bytes.as_mut_ptr(), from, 8) };
        u64::from_ne_bytes(bytes)
    }

    pub(super) unsafe fn store8(to: *mut u8, value: u64) {
        if to.align_offset(8) == 0 {
            // SAFETY: aligned and valid.
            unsafe { AtomicU64::from_ptr(to.cast()) }.store(value, Relaxed);
        } else {
            // SAFETY: valid for 8 bytes.
            unsafe { copy_bytes(to, value.to_ne_bytes().as_ptr(), 8) };
        }
    }

    unsafe fn copy_bytes(to: *mut u8, from: *const u8, len: usize) {
        for i in 0..len {
            // SAFETY: the promise of `copy`; bytes are always aligned.
            unsafe {
                let byte = AtomicU8::from_ptr(from.add(i).cast_mut()).load(Relaxed);
                AtomicU8::from_ptr(to.add(i)).store(byte, Relaxed);
            }
        }
    }

    pub(super) unsafe fn copy_16_to_64(to: *mut u8, from: *const u8, len: usize) {
        // SAFETY: the promise of `copy`.
        unsafe { copy_string(to, from, len) }
    }

    pub(super) unsafe fn copy_blocks(to: *mut u8, from: *const u8, len: usize, _past_cache: bool) {
        // SAFETY: the promise of `copy`.
        unsafe { copy_string(to, from, len) }
    }

    unsafe fn copy_string(to: *mut u8, from: *const u8, len: usize) {
        let mut at = 0;
        // SAFETY: the promise of `copy`; each step stays inside `len`.
        unsafe {
            if (to as usize ^ from as usize) & 7 == 0 {
                let head = to.align_offset(8).min(len);
                copy_bytes(to, from, head);
                at = head;
                while at + 8 <= len {
                    store8(to.add(at), load8(from.add(at)));
                    at += 8;
                }
            }
            copy_bytes(to.add(at), from.add(at), len - at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;
    use std::vec::Vec;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    fn check(copy: unsafe fn(*mut u8, *const u8, usize), len: usize, to_shift: usize, from_shift: usize) {
        let source = pattern(len + 128);
        let mut target = vec![0xeeu8; len + 256];
        // SAFETY: both vectors have room for the shifts and `len`.
        unsafe { copy(target.as_mut_ptr().add(64 + to_shift), source.as_ptr().add(from_shift), len) };
        let (before, rest) = target.split_at(64 + to_shift);
        assert!(before.iter().all(|b| *b == 0xee), "before, len {len}");
        assert_eq!(&rest[..len], &source[from_shift..from_shift + len], "len {len}");
        assert!(rest[len..].iter().all(|b| *b == 0xee), "behind, len {len}");
    }

    fn plain(to: *mut u8, from: *const u8, len: usize) {
        // SAFETY: `check` keeps the promise.
        unsafe { copy(to, from, len) }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn without_avx<const PAST_CACHE: bool>(to: *mut u8, from: *const u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { raw::copy_blocks_by(false, to, from, len, PAST_CACHE) }
    }

    #[test]
    fn every_small_length_and_shift() {
        for len in 0..300 {
            for shift in 0..9 {
                check(plain, len, shift, (shift * 5) % 9);
            }
        }
    }

    #[test]
    fn words() {
        for len in 0..=16u32 {
            let mut target = [0xeeu8; 18];
            // SAFETY: 16 bytes behind the first.
            unsafe { copy_words(target.as_mut_ptr().add(1), 0x0807060504030201, 0x100f0e0d0c0b0a09, len) };
            let expected: Vec<u8> = (0..18u8).map(|i| if (1..=len as u8).contains(&i) { i } else { 0xee }).collect();
            assert_eq!(target[..], expected[..]);
        }
    }

    proptest! {
        #[test]
        fn long_and_streamed(len in 0usize..200_000, to_shift in 0usize..64, from_shift in 0usize..64) {
            check(plain, len, to_shift, from_shift);
            check(copy_stream, len, to_shift, from_shift);
            #[cfg(target_arch = "x86_64")]
            if len > 64 {
                check(without_avx::<false>, len, to_shift, from_shift);
                check(without_avx::<true>, len, to_shift, from_shift);
            }
        }
    }
}
