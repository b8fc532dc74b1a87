//! The rings' own source, compiled over loom's atomics: an application and an engine at the two ends, in every
//! interleaving, with rings of two entries that wrap. Each entry and each completion arrives once, whole, and in order.

// The rings do not need all of what they are compiled with, and export nothing here.
#![allow(dead_code, unreachable_pub)]

#[path = "../../../engine/src/cqe.rs"]
mod cqe;
#[path = "../../../engine/src/key.rs"]
mod key;
#[path = "../../../engine/src/ring.rs"]
mod ring;
#[path = "../../../engine/src/sqe.rs"]
mod sqe;
mod sync;

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

pub(crate) use key::{PeerId, RemoteKey, Target};

use cqe::VALUE;
use ring::{AppEnd, EngineEnd, Parts};
use sqe::Sqe;
use sync::{AtomicU32, AtomicU64};

const ENTRIES: u32 = 2;

/// The memory of a pair of rings.
struct Memory {
    words: [Vec<AtomicU64>; 3],
    watermarks: [AtomicU32; 4],
}

impl Memory {
    fn new() -> Arc<Memory> {
        let words = |n: u32| (0..n).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Memory {
            words: [words(ENTRIES * 8), words(ENTRIES * 2), words(ENTRIES)],
            watermarks: std::array::from_fn(|_| AtomicU32::new(0)),
        })
    }

    fn parts(&self) -> Parts {
        let words = self.words.each_ref().map(|part| NonNull::from(&part[..]).cast());
        let watermarks = self.watermarks.each_ref().map(NonNull::from);
        // SAFETY: of these lengths; both threads keep the memory.
        unsafe { Parts::at(words, watermarks, ENTRIES, ENTRIES) }
    }
}

fn entry(i: u64) -> Sqe {
    Sqe { words: [7 << 32 | 1 << 56, i, i * 2, i * 3, i, i * 5, i * 6, i * 7] }
}

/// Submissions alone: the application pushes, the engine takes.
const SUBMISSIONS: [fn(&Memory, u64); 2] = {
    fn application(memory: &Memory, items: u64) {
        let mut end = AppEnd::new(memory.parts());
        for i in 0..items {
            while !end.push(&entry(i)) {
                loom::thread::yield_now();
            }
        }
    }
    fn engine(memory: &Memory, items: u64) {
        let mut end = EngineEnd::new(memory.parts());
        // Of two entries one is done in its place, in a run, the other taken.
        for i in 0..items {
            let sqe = loop {
                if i % 2 == 0 {
                    end.look(0);
                    let mut run = end.run();
                    if let Some(first) = run.first() {
                        run.row(first);
                        let sqe = run.next().map(|entry| entry.load());
                        run.pass();
                        let progress = run.progress();
                        end.go_on(progress);
                        break sqe.expect("it was there");
                    }
                } else if let Some(sqe) = end.take() {
                    break sqe;
                }
                loom::thread::yield_now();
            };
            assert_eq!(sqe.words[1..], entry(i).words[1..]);
            end.tell();
        }
    }
    [application, engine]
};

/// Completions alone: the engine completes, the application reaps.
const COMPLETIONS: [fn(&Memory, u64); 2] = {
    fn engine(memory: &Memory, items: u64) {
        let mut end = EngineEnd::new(memory.parts());
        for i in 0..items {
            while !end.look(0) {
                loom::thread::yield_now();
            }
            if i % 2 == 0 {
                end.complete(i, 3, VALUE, i as u32, i + 9);
            } else {
                let mut run = end.run();
                run.complete(i);
                let progress = run.progress();
                end.go_on(progress);
            }
        }
    }
    fn application(memory: &Memory, items: u64) {
        let mut end = AppEnd::new(memory.parts());
        for i in 0..items {
            let expected = if i % 2 == 0 { (i, 3, i as u32, i + 9) } else { (i, 0, 0, 0) };
            // One look an attempt: more would be more interleavings of the same.
            let cqe = loop {
                let found = if i % 2 == 0 {
                    end.reap().map(|cqe| (cqe.user_data, cqe.status, cqe.imm, cqe.value))
                } else {
                    end.reap_success().map(|user_data| (user_data, 0, 0, 0))
                };
                match found {
                    Some(cqe) => break cqe,
                    None => loom::thread::yield_now(),
                }
            };
            assert_eq!(cqe, expected);
        }
    }
    [engine, application]
};

fn model(name: &str, [one, other]: [fn(&Memory, u64); 2], items: u64, preemptions: Option<usize>) {
    let start = Instant::now();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        let memory = Memory::new();
        let of_thread = memory.clone();
        let thread = loom::thread::spawn(move || one(&of_thread, items));
        other(&memory, items);
        thread.join().expect("the other end");
    });
    let bound = preemptions.map_or("every interleaving".to_string(), |n| format!("up to {n} preemptions"));
    println!("loom: {name}, capacity {ENTRIES}, {items} items, {bound}: ok in {:.1} s", start.elapsed().as_secs_f64());
}

fn main() {
    model("submissions", SUBMISSIONS, 3, None);
    model("completions", COMPLETIONS, 3, None);
    model("submissions", SUBMISSIONS, 6, Some(3));
    model("completions", COMPLETIONS, 6, Some(3));
}
