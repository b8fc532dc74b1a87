//! Writes a small corpus for each target: `cargo run --example seeds` in firmware-sim/fuzz.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};

use verbring_sim::packet::{Header, Ip, MAX_PACKET, Opcode};

fn main() -> std::io::Result<()> {
    let all = [("packet", packets()), ("nic", nics()), ("channel", channels()), ("rc", devices())];
    for (target, seeds) in all {
        fs::create_dir_all(format!("corpus/{target}"))?;
        for (i, seed) in seeds.iter().enumerate() {
            fs::write(format!("corpus/{target}/seed-{i:02}"), seed)?;
        }
    }
    Ok(())
}

/// A good packet of every opcode.
fn packets() -> Vec<Vec<u8>> {
    let v4 = |of| IpAddr::V4(Ipv4Addr::new(10, 0, 0, of));
    let seed = |opcode: &Opcode| {
        let mut packet = vec![7; MAX_PACKET];
        let payload = if opcode.has_payload() { 13 } else { 0 };
        let len = Header::new(*opcode, 5, 9).seal(&mut packet, payload, &Ip::new(v4(1), v4(2))).expect("room for it");
        [&[0], &packet[..len]].concat()
    };
    Opcode::ALL.iter().map(seed).collect()
}

/// For every request of the peer and every one of the owner's: two of it, answers, and time.
fn nics() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for opcode in 0..17 {
        let mut seed = vec![0, 0, 0, 0];
        for round in 0..2 {
            seed.extend([13, 3, 0]);
            // At the beginning of an area that allows it, 8 bytes.
            let area = if matches!(opcode, 2 | 9) { 3 } else { 0 };
            seed.extend([2, opcode, 0, 1, 32, 0, area, 16 * round, 0]);
            seed.extend([10, 8, 14, 15]);
        }
        seeds.push(seed);
    }
    for op in 0..8 {
        let mut seed = vec![0, 0, 0, 0];
        seed.extend([12, op, 0, 8, 0, 12, op, 0, 0, 4, 10, 8]);
        // An acknowledgement, the answer to a read, that to an atomic; then nothing.
        for which in [0, 1, 5] {
            seed.extend([7, which, 31, 1, 0, 0, 5, 0]);
        }
        seed.extend([9, 255, 255, 8, 10, 31, 14, 15]);
        seeds.push(seed);
    }
    seeds
}

/// A handshake, and messages both ways; then what a hostile peer could say.
fn channels() -> Vec<Vec<u8>> {
    let mut honest = vec![0];
    for from in [0, 1, 0] {
        honest.extend([7, from, 2, 0, 0xf0]);
    }
    for from in [0, 1, 1, 0] {
        honest.extend([4, from, 7, from, 2, 0, 0xf0, 7, 1 - from, 2, 0, 0xf0]);
    }
    honest.extend([5, 255, 8, 6, 0, 2, 9, 1, 3, 1, 1]);
    let mut seeds = vec![honest];
    for flags in 0..4 {
        for body in 0..7 {
            seeds.push(vec![1, flags, 5, 0, 0, 0, 0, 1, 9, 4, 5, 0, 0, 0, 1, body, 1, 0, 3, 2, 0, 16, 4]);
        }
    }
    seeds
}

/// A connection that comes up, and one request of each kind from either side.
fn devices() -> Vec<Vec<u8>> {
    let up = [0, 3, 0, 0, 14, 18, 0, 1, 14];
    let request = |which: u8| [&up[..], &[5, which, 1, 1, 0, 33, 0, 12, 8, 9, 0, 1, 31, 0, 0, 0, 8, 0, 12, 8]].concat();
    let post = |which: u8| [&up[..], &[15, which, 0, 1, 4, 12, 8, 9, 0, 1, 31, 0, 0, 0, 8, 0, 12, 8, 14]].concat();
    (0..11).map(request).chain((0..11).map(post)).collect()
}
