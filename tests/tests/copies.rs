//! Copies that bypass the cache: the fence behind them is in the machine code, and signals come after such data.

use std::process::Command;

use verbring::{Rights, Signal, Sqe};
use verbring_tests::{World, repeats, shm, small};

/// In the code of this very program: what `copy_stream` calls has non-temporal stores, and an sfence behind each loop of
/// them.
#[test]
fn the_fence_is_there() {
    if !cfg!(target_arch = "x86_64") {
        println!("SKIPPED the_fence_is_there: other machines have no non-temporal copy here");
        return;
    }
    // Named, so that it is linked.
    let copy: unsafe fn(*mut u8, *const u8, usize) = verbring_sys::copy::copy_stream;
    assert_ne!(copy as usize, 0);
    let exe = std::env::current_exe().expect("this program");
    let code = Command::new("objdump").args(["-d", "--no-show-raw-insn", "-C"]).arg(exe).output();
    let code = code.expect("objdump (Debian: binutils)").stdout;
    let code = String::from_utf8_lossy(&code);
    let body: Vec<&str> = code
        .lines()
        .skip_while(|line| !(line.ends_with(">:") && line.contains("copy_blocks")))
        .skip(1)
        .take_while(|line| !line.is_empty())
        .collect();
    // Each loop of such stores (AVX and SSE) goes straight into its fence: nothing leaves in between but the way back.
    let (mut is_open, mut fences) = (false, 0);
    for line in &body {
        if line.contains("movntdq") {
            is_open = true;
        } else if line.contains("sfence") {
            assert!(is_open, "a fence without stores: {body:#?}");
            (is_open, fences) = (false, fences + 1);
        } else {
            assert!(
                !is_open || !["ret", "jmp", "call"].iter().any(|leaves| line.contains(leaves)),
                "{line}: {body:#?}"
            );
        }
    }
    assert!(!is_open && fences == 2, "{fences} fences: {body:#?}");
}

/// A put of 40 MiB, which is streamed, with a signal behind it, watched by a thread on another core.
#[test]
fn the_signal_comes_after_streamed_data() {
    const LEN: usize = 40 << 20;
    assert!(LEN as u32 >= verbring_sys::copy::STREAM_FROM);
    let mut world: World<_> = shm(small());
    let (window, key) = world.export(LEN + 64, Rights::all());
    let local = world.local_window(LEN);
    for round in 1..=u64::from(repeats(5, 50)) {
        local.fill(0, LEN, round as u8);
        let put = Sqe::put_signal(local.slice(0, LEN as u32), key.at(0), (LEN / 8) as u32, Signal::Store(round));
        world.a.push(put).unwrap();
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                while window.load(LEN) != round {
                    std::thread::yield_now();
                }
                // The last bytes are the likeliest to be late.
                let mut tail = vec![0; 1 << 20];
                window.read(LEN - (1 << 20), &mut tail);
                tail.iter().filter(|b| **b != round as u8).count()
            });
            assert!(world.reap().is_success());
            assert_eq!(watch.join().unwrap(), 0, "round {round}: the signal overtook its data");
        });
    }
}
