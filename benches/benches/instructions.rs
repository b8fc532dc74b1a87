//! Instructions of the hot path by callgrind, the caller's loop included. The limits are what was measured and 2 %: a
//! change that costs more fails, and one that saves more lowers them.

#![allow(missing_docs)] // the macros of iai-callgrind make public items

use std::hint::black_box;

use iai_callgrind::{Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main};
use verbring_benches::{Ready, batch, fetch_add, get, put, put_silent, put_word, ready};
use verbring_sys::local::Local;

fn limit(instructions: u64) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, instructions)]);
    let mut config = LibraryBenchmarkConfig::default();
    config.tool(callgrind);
    config
}

macro_rules! benches {
    ($($name:ident, $count:literal, $make:ident, $limit:literal;)+) => {
        $(
            #[library_benchmark(config = limit($limit))]
            #[bench::run(args = (), setup = ready)]
            fn $name(mut ready: Box<Ready<Local>>) -> (u64, Box<Ready<Local>>) {
                (black_box(batch(&mut ready, black_box($count), $make)), ready)
            }
        )+
        library_benchmark_group!(name = hot_path; benchmarks = $($name),+);
    };
}

benches! {
    put_alone, 1, put, 470;
    put_in_32, 32, put, 7743;
    put_in_100, 100, put, 23696;
    put_silent_in_100, 100, put_silent, 16349;
    put_word_in_100, 100, put_word, 33591;
    get_in_100, 100, get, 36344;
    fetch_add_in_100, 100, fetch_add, 34100;
}

main!(library_benchmark_groups = hot_path);
