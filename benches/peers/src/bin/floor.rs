//! What the machine itself costs: a line handed from core to core, an atomic, the clock, and copies of memory.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use verbring_peers::process::{Board, Partner};
use verbring_peers::{Run, clocked, comment, fail, out, pin, ticks};
use verbring_slab::{Region, RegionError, RegionOptions};

/// What a round is passed over: the number of the request, a line for each direction or one for both.
const TWO_LINES: u64 = 1;

const SIZES: [usize; 4] = [4096, 65536, 1 << 20, 104_857_600];

fn main() {
    let run = Run::from_args();
    let board = Board::new();
    let partner = Partner::start(|| {
        pin(run.cores.1);
        board.serve(|[lines, first, rounds, ..]| {
            let (there, back) = flags(board, lines);
            for round in first..first + rounds {
                while there.load(Ordering::Acquire) != round {}
                back.store(round, Ordering::Release);
            }
            0
        });
    });
    pin(run.cores.0);
    handover(&run, board);
    drop(partner);
    clock_and_atomics(&run, board);
    copies(&run).unwrap_or_else(|error| fail(error));
}

/// The words of the two directions.
fn flags(board: &Board, lines: u64) -> (&AtomicU64, &AtomicU64) {
    if lines == TWO_LINES { (&board.flags[0].0, &board.flags[1].0) } else { (&board.both.0, &board.both.1) }
}

fn handover(run: &Run, board: &Board) {
    comment("handover: one way between two processes, half the round trip");
    for (lines, test) in [(0, "handover_one_line"), (TWO_LINES, "handover_two_lines")] {
        let (there, back) = flags(board, lines);
        let mut next = 1;
        let ns = run.ns(|rounds| {
            board.begin([lines, next, rounds, 0, 0, 0]);
            let mut round = next;
            let time = clocked(rounds, || {
                there.store(round, Ordering::Release);
                while back.load(Ordering::Acquire) != round {}
                round += 1;
            });
            board.end();
            next = round;
            time
        });
        out("floor", test, 8, ns / 2.0, "ns");
    }
}

fn clock_and_atomics(run: &Run, board: &Board) {
    let word = &board.flags[2].0;
    let ns = run.ns(|count| {
        clocked(count, || {
            black_box(word.fetch_add(1, Ordering::SeqCst));
        })
    });
    out("floor", "locked_add", 8, ns, "ns");
    let ns = run.ns(|count| {
        let mut expected = word.load(Ordering::Relaxed);
        clocked(count, || {
            let swapped = word.compare_exchange(expected, expected + 1, Ordering::SeqCst, Ordering::SeqCst);
            assert!(swapped.is_ok(), "nobody else changes the word");
            expected += 1;
        })
    });
    out("floor", "locked_cas", 8, ns, "ns");
    #[cfg(target_arch = "x86_64")]
    {
        let ns = run.ns(|count| {
            clocked(count, || {
                // SAFETY: every x86-64 has it.
                black_box(unsafe { std::arch::x86_64::_rdtsc() });
            })
        });
        out("floor", "rdtsc", 0, ns, "ns");
    }
    let ns = run.ns(|count| {
        clocked(count, || {
            black_box(ticks::now());
        })
    });
    out("floor", "rdtsc_fenced", 0, ns, "ns");
}

/// Copies from a mapping of our own to one of somebody else's memory, as a put does.
fn copies(run: &Run) -> Result<(), RegionError> {
    let len = SIZES[SIZES.len() - 1];
    let from = Region::shared(len, RegionOptions::default())?;
    let theirs = Arc::new(Region::shared(len, RegionOptions::default())?);
    theirs.seal_seals()?;
    theirs.touch();
    let to = Region::adopt(theirs.hand_out()?, theirs.len(), true)?;
    from.touch();
    to.touch();
    let pages = from.pages().name();
    comment(format_args!("memcpy: pages {pages}; slots lie right behind each other, 64 up to 4 KiB, 16 above"));
    let (from, to) = (from.base().as_ptr(), to.base().as_ptr());
    for (name, copy) in methods() {
        for size in SIZES {
            let most = if size <= 4096 { 64 } else { 16 };
            let slots = (len / size).clamp(1, most);
            check(name, copy, from, to, slots * size);
            let ns = run.ns(|count| {
                clocked(count, || {
                    for slot in 0..slots {
                        // SAFETY: both mappings hold all slots, and do not overlap.
                        unsafe { copy(to.add(slot * size), from.add(slot * size), size) };
                    }
                })
            });
            out("floor", name, size, (slots * size) as f64 / ns, "GB/s");
            if slots == 1 {
                continue;
            }
            let ns = run.ns(|count| {
                clocked(count, || {
                    // SAFETY: as above.
                    unsafe { copy(to, black_box(from), size) };
                })
            });
            out("floor", &format!("{name}_hot"), size, size as f64 / ns, "GB/s");
        }
    }
    Ok(())
}

/// Copies `len` bytes of one pattern, and compares.
fn check(name: &str, copy: Copy, from: *mut u8, to: *mut u8, len: usize) {
    // SAFETY: both mappings are so long, and nobody else knows of them.
    unsafe {
        let source = std::slice::from_raw_parts_mut(from, len);
        for (i, byte) in source.iter_mut().enumerate() {
            *byte = (i ^ i >> 8 ^ i >> 16) as u8;
        }
        to.write_bytes(0xff, len);
        copy(to, from, len);
        if source != std::slice::from_raw_parts(to, len) {
            fail(format!("{name} copied other bytes"));
        }
    }
}

/// To, from, bytes.
type Copy = unsafe fn(*mut u8, *const u8, usize);

unsafe fn libc_copy(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::memcpy(to.cast(), from.cast(), len) };
}

#[cfg(not(target_arch = "x86_64"))]
fn methods() -> Vec<(&'static str, Copy)> {
    vec![("memcpy_libc", libc_copy)]
}

#[cfg(target_arch = "x86_64")]
fn methods() -> Vec<(&'static str, Copy)> {
    use std::arch::is_x86_feature_detected;
    let mut methods: Vec<(&str, Copy)> = vec![("memcpy_libc", libc_copy), ("memcpy_movsb", x86::movsb)];
    if is_x86_feature_detected!("avx2") {
        methods.extend([("memcpy_avx2", x86::avx2 as Copy), ("memcpy_nt", x86::avx2_past_the_cache)]);
    }
    if is_x86_feature_detected!("avx512f") {
        methods.extend([("memcpy_avx512", x86::avx512 as Copy), ("memcpy_nt512", x86::avx512_past_the_cache)]);
    }
    methods
}

/// Each takes multiples of 256 bytes at multiples of 64.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256i, __m512i, _mm_sfence, _mm256_load_si256, _mm256_store_si256, _mm256_stream_si256, _mm512_load_si512,
        _mm512_store_si512, _mm512_stream_si512,
    };

    pub(super) unsafe fn movsb(to: *mut u8, from: *const u8, len: usize) {
        // SAFETY: the caller's promise; the direction flag is clear.
        unsafe {
            asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") len => _,
                options(nostack, preserves_flags));
        }
    }

    macro_rules! copies {
        ($($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident, $after:block;)+) => {$(
            #[target_feature(enable = $feature)]
            unsafe fn $name(to: *mut u8, from: *const u8, len: usize) {
                const EACH: usize = size_of::<$vector>();
                // SAFETY: the caller's promise.
                unsafe {
                    for at in (0..len).step_by(4 * EACH) {
                        let (to, from) = (to.add(at).cast::<$vector>(), from.add(at).cast::<$vector>());
                        let four = [$load(from), $load(from.add(1)), $load(from.add(2)), $load(from.add(3))];
                        $store(to, four[0]);
                        $store(to.add(1), four[1]);
                        $store(to.add(2), four[2]);
                        $store(to.add(3), four[3]);
                    }
                    $after
                }
            }
        )+};
    }
    copies! {
        cached_256, "avx2", __m256i, _mm256_load_si256, _mm256_store_si256, {};
        stream_256, "avx2", __m256i, _mm256_load_si256, _mm256_stream_si256, { _mm_sfence() };
        cached_512, "avx512f", __m512i, load_512, store_512, {};
        stream_512, "avx512f", __m512i, load_512, stream_512_one, { _mm_sfence() };
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn load_512(from: *const __m512i) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_load_si512(from) }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn store_512(to: *mut __m512i, value: __m512i) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_store_si512(to, value) }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn stream_512_one(to: *mut __m512i, value: __m512i) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_stream_si512(to, value) }
    }

    macro_rules! plain {
        ($($name:ident $inner:ident;)+) => {$(
            /// The processor has what it takes: see `methods`.
            pub(super) unsafe fn $name(to: *mut u8, from: *const u8, len: usize) {
                // SAFETY: the caller's promise.
                unsafe { $inner(to, from, len) }
            }
        )+};
    }
    plain! {
        avx2 cached_256;
        avx2_past_the_cache stream_256;
        avx512 cached_512;
        avx512_past_the_cache stream_512;
    }
}
