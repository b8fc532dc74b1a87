//! Instructions by callgrind, the caller's loop included. `benches/budgets.txt` says what was measured; the limit is that
//! and 2 %: a change that costs more fails. `benches/bless` measures anew.

#![allow(missing_docs)] // the macros of iai-callgrind make public items

use std::hint::black_box;

use iai_callgrind::{Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main};
use verbring::Slab;
use verbring_benches::*;
use verbring_sys::Deferred;
use verbring_sys::local::Local;

type OnLocal = Box<Ready<Local>>;
type OnDeferred = Box<Ready<Deferred<Local>>>;
type TwoNics = Box<Nics>;

/// The budget of a benchmark, from the file of budgets.
fn budget(name: &str) -> LibraryBenchmarkConfig {
    let mut config = LibraryBenchmarkConfig::default();
    if std::env::var_os("VERBRING_BLESS").is_some() {
        return config;
    }
    let line = include_str!("../budgets.txt").lines().find(|line| line.split(' ').next() == Some(name));
    let measured = line.and_then(|line| line.split(' ').nth(1)?.parse::<u64>().ok());
    let measured = measured.unwrap_or_else(|| panic!("{name} has no budget; benches/bless gives it one"));
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, measured + measured.div_ceil(50))]);
    config.tool(callgrind);
    config
}

fn peers_1() -> Peers {
    peers(1)
}

fn peers_16() -> Peers {
    peers(16)
}

fn peers_256() -> Peers {
    peers(256)
}

fn peers_1000() -> Peers {
    peers(1000)
}

macro_rules! benches {
    ($($name:ident, $setup:ident -> $ready:ty, |$var:ident| $body:expr;)+) => {
        $(
            #[library_benchmark(config = budget(stringify!($name)))]
            #[bench::run(args = (), setup = $setup)]
            fn $name(mut $var: $ready) -> (u64, $ready) {
                (black_box($body), $var)
            }
        )+
        library_benchmark_group!(name = hot_path; benchmarks = $($name),+);
    };
}

benches! {
    push_100, ready -> OnLocal, |r| { push(&mut r, black_box(100), put); 0 };
    submit_100, pushed -> OnLocal, |r| r.world.a.submit(1).into();
    poll_idle, ready -> OnLocal, |r| r.world.a.poll(1).into();
    poll_peers_1, peers_1 -> Peers, |r| poll_peers(&mut r);
    poll_peers_16, peers_16 -> Peers, |r| poll_peers(&mut r);
    poll_peers_256, peers_256 -> Peers, |r| poll_peers(&mut r);
    poll_peers_1000, peers_1000 -> Peers, |r| poll_peers(&mut r);
    submit_idle, ready -> OnLocal, |r| r.world.a.submit(1).into();
    reap_100, completed -> OnLocal, |r| reap(&mut r);
    put_alone, ready -> OnLocal, |r| batch(&mut r, black_box(1), put);
    put_executed, ready -> OnLocal, |r| execute(&mut r, put);
    put_in_32, ready -> OnLocal, |r| batch(&mut r, black_box(32), put);
    put_in_100, ready -> OnLocal, |r| batch(&mut r, black_box(100), put);
    put_batch_of_100, ready -> OnLocal, |r| whole_batch(&mut r, black_box(100), put);
    fetch_add_batch_of_100, ready -> OnLocal, |r| whole_batch(&mut r, black_box(100), fetch_add);
    put_silent_in_100, ready -> OnLocal, |r| batch(&mut r, black_box(100), put_silent);
    put_word_in_100, ready -> OnLocal, |r| batch(&mut r, black_box(100), put_word);
    put_block_in_32, ready -> OnLocal, |r| put_blocks(&mut r, black_box(32));
    put_signal_in_100, ready -> OnLocal, |r| batch(&mut r, black_box(100), put_signal);
    get_in_100, ready -> OnLocal, |r| batch(&mut r, black_box(100), get);
    fetch_add_in_100, ready -> OnLocal, |r| batch(&mut r, black_box(100), fetch_add);
    nop_in_100, ready -> OnLocal, |r| batch(&mut r, black_box(100), nop);
    put_deferred_in_32, ready_deferred -> OnDeferred, |r| batch(&mut r, black_box(32), put);
    slab_pairs_64, slab -> Slab, |r| { pairs(&mut r); 0 };
    slab_hold_64, slab -> Slab, |r| { hold(&mut r); 0 };
    nic_in_8, nic_write_sent -> TwoNics, |r| { nic_in(&mut r); nic_answer(&mut r) as u64 };
    nic_out_8, nic_writes -> TwoNics, |r| nic_out(&mut r) as u64;
    nic_write_8, nic_writes -> TwoNics, |r| nic_round(&mut r) as u64;
    nic_write_4k, nic_writes_4k -> TwoNics, |r| { nic_out(&mut r); nic_in(&mut r); 0 };
    nic_read_4k, nic_read_asked -> TwoNics, |r| { nic_answer(&mut r); nic_answered(&mut r); 0 };
    nic_fetch_add, nic_adds -> TwoNics, |r| nic_round(&mut r) as u64;
}

main!(library_benchmark_groups = hot_path);
