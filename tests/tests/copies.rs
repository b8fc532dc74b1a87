//! Copies that bypass the cache: the fence behind them is in the machine code, and signals come after such data.

use std::process::Command;

use verbring::{Rights, Signal, Sqe};
use verbring_tests::{World, repeats, shm, small};

/// In the code of this very program: `copy_stream` has non-temporal stores, and an sfence behind the last of them.
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
        .skip_while(|line| !(line.ends_with(">:") && line.contains("copy_stream")))
        .skip(1)
        .take_while(|line| !line.is_empty())
        .collect();
    let last_store = body.iter().rposition(|line| line.contains("movntdq")).expect("non-temporal stores");
    let fence = body.iter().rposition(|line| line.contains("sfence")).expect("an sfence");
    let returns = body.iter().rposition(|line| line.contains("ret")).expect("a return");
    assert!(last_store < fence && fence < returns, "{body:#?}");
    let jumps_past = body[fence..].iter().any(|line| line.contains("movnt"));
    assert!(!jumps_past);
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
