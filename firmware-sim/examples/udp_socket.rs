//! Measures the socket over loopback between two pinned threads: `udp_socket [bytes of a packet]`.
//!
//! The stream has a window, as a queue pair has: packets in flight beyond it wait for the receiver.

use std::net::IpAddr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use verbring_sim::udp::{Options, Socket};

const ROUNDS: u32 = 7;
const SECONDS: f64 = 0.5;
const PINGS: usize = 20_000;

fn pin(cpu: usize) {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    // One CPU is enough for a first look.
    let _ = sched_setaffinity(None, &cpus);
}

fn pair(round: u32, offload: bool) -> [(Socket, IpAddr); 2] {
    [1, 2].map(|host| {
        let address = IpAddr::from([127, 90, round as u8, host]);
        (Socket::bind(address, Options { offload, ..Options::default() }).expect("a socket"), address)
    })
}

/// Packets a second that arrive, and those lost.
fn stream(round: u32, offload: bool, bytes: usize, window: usize) -> (f64, usize, f64) {
    let [(mut a, _), (mut b, to)] = pair(round, offload);
    let (arrived, end, start) = (AtomicUsize::new(0), AtomicBool::new(false), Barrier::new(2));
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            pin(0);
            start.wait();
            let mut sent = 0;
            let mut last = (0, Instant::now());
            let mut lost = 0;
            while !end.load(Ordering::Relaxed) {
                let seen = arrived.load(Ordering::Relaxed);
                if seen != last.0 {
                    last = (seen, Instant::now());
                } else if last.1.elapsed() > Duration::from_millis(10) {
                    lost += sent - seen - lost;
                    last.1 = Instant::now();
                }
                while sent - seen - lost < window
                    && let Some(place) = a.place()
                {
                    place[..8].copy_from_slice(&sent.to_le_bytes());
                    a.commit(bytes, to);
                    sent += 1;
                }
                a.flush();
            }
            let stats = a.stats();
            (lost, stats.sent as f64 / stats.send_calls as f64)
        });
        pin(1);
        start.wait();
        let (since, mut packets) = (Instant::now(), 0);
        while since.elapsed().as_secs_f64() < SECONDS {
            packets += b.receive();
            arrived.store(packets, Ordering::Relaxed);
        }
        let seconds = since.elapsed().as_secs_f64();
        end.store(true, Ordering::Relaxed);
        let (lost, each) = sender.join().expect("the sender");
        (packets as f64 / seconds, lost, each)
    })
}

/// Nanoseconds of half a round trip, sorted.
fn pings(round: u32, offload: bool, bytes: usize) -> Vec<u64> {
    let [(mut a, from), (mut b, to)] = pair(round, offload);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            pin(0);
            for _ in 0..PINGS {
                while b.receive() == 0 {}
                let _ = b.place();
                b.commit(bytes, from);
                b.flush();
            }
        });
        pin(1);
        let mut times: Vec<u64> = (0..PINGS)
            .map(|_| {
                let since = Instant::now();
                let _ = a.place();
                a.commit(bytes, to);
                a.flush();
                while a.receive() == 0 {}
                since.elapsed().as_nanos() as u64 / 2
            })
            .collect();
        times.sort_unstable();
        times
    })
}

fn main() {
    let bytes = std::env::args().nth(1).map_or(4096 + 60, |arg| arg.parse().expect("bytes of a packet"));
    println!("stream, best of {ROUNDS}:");
    for offload in [false, true] {
        for window in [32, 128, 1024] {
            let results = (0..ROUNDS).map(|round| stream(round, offload, bytes, window));
            let (rate, lost, each) = results.max_by(|a, b| a.0.total_cmp(&b.0)).expect("a round");
            let gigabytes = rate * bytes as f64 / 1e9;
            print!("  offload {offload:5}, {bytes} bytes, window {window:4}: {gigabytes:.2} GB/s, ");
            println!("{:.0} thousand packets/s, {each:.0} a call, {lost} lost", rate / 1e3);
        }
    }
    println!("ping-pong of 8 + 60 bytes, half a round trip, best of {ROUNDS}:");
    for offload in [false, true] {
        let results = (0..ROUNDS).map(|round| pings(round, offload, 68));
        let times = results.min_by_key(|times| times[PINGS / 2]).expect("a round");
        println!(
            "  offload {offload:5}: {} ns least, {} ns median, {} ns at 99 %",
            times[0],
            times[PINGS / 2],
            times[PINGS / 100 * 99]
        );
    }
}
