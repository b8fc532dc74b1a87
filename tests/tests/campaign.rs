//! The simulation: that it keeps what it promises, that it is the same in every run, and that it would find what is wrong.

use std::time::Instant;

use verbring_cli::sim::{Options, World};
use verbring_sim::fabric::{Act, Fabric, FabricConfig, Fault, address};
use verbring_sim::nic::Defect;
use verbring_sim::packet::{Header, Ip, MAX_PACKET, Opcode};
use verbring_sim::random::Ratio;
use verbring_sim::soft::Wire;
use verbring_tests::repeats;

/// Seeds that are always run, and for each kind of fault alone.
#[test]
fn fixed_seeds() {
    for seed in 1..=u64::from(repeats(10, 300)) {
        let options = Options { ops: 5_000, ..Options::new(seed) };
        World::new(&options).run().unwrap_or_else(|what| panic!("{what}\n{}", options.command()));
    }
    for fault in Fault::ALL {
        for seed in 1..=u64::from(repeats(2, 100)) {
            let options = Options { ops: 5_000, faults: vec![*fault], ..Options::new(seed) };
            let report = World::new(&options).run().unwrap_or_else(|what| panic!("{what}\n{}", options.command()));
            for (name, count) in report.faults {
                assert!(name == fault.name() || count == 0, "{name} happened, and was not asked for");
            }
        }
    }
}

/// The same seed gives the same packets, in every run and on every machine.
#[test]
fn a_seed_is_a_run() {
    let options = Options { ops: 3_000, ..Options::new(7) };
    let reports = [0; 2].map(|_| World::new(&options).run().unwrap());
    assert_eq!(reports[0], reports[1]);
    let other = World::new(&Options { seed: 8, ..options }).run().unwrap();
    assert_ne!(reports[0].digest, other.digest);
}

/// Whatever is wrong with the NIC is found within a few seconds.
#[test]
fn every_defect_is_found() {
    for defect in Defect::ALL.iter().filter(|d| **d != Defect::BoundsOffByOne) {
        let begun = Instant::now();
        let found = (1..=400u64).find_map(|seed| {
            let faults = match defect {
                // Some are seen where nothing else is wrong, some only where packets are damaged.
                _ if seed.is_multiple_of(4) => Vec::new(),
                Defect::IcrcIgnored => vec![Fault::Corrupt],
                _ => vec![Fault::Loss, Fault::AckLoss, Fault::Duplicate, Fault::Reorder],
            };
            let options = Options { ops: 3_000, faults, defect: Some(*defect), ..Options::new(seed) };
            World::new(&options).run().err().map(|what| (seed, what))
        });
        let (seed, what) = found.unwrap_or_else(|| panic!("{defect:?} is not found"));
        let what = what.chars().take(140).collect::<String>();
        println!("{defect:?}: seed {seed}, {:.1} s: {what}", begun.elapsed().as_secs_f64());
    }
}

/// Two ports, and what came at the second of 200 packets that the first sent, each with the number of its packet.
fn exchange(config: FabricConfig, opcode: Opcode) -> (Fabric, Vec<(u64, u32, bool)>) {
    let fabric = Fabric::new(config);
    let (mut from, mut to) = (fabric.port(0), fabric.port(1));
    let ip = Ip::new(address(0), address(1));
    let mut came = Vec::new();
    for step in 0..2_000u64 {
        let now = step * 1_000;
        if step < 200 {
            let place = from.place().unwrap();
            let payload = if opcode.has_payload() { 64 } else { 0 };
            let len = Header::new(opcode, 5, step as u32).seal(place, payload, &ip).unwrap();
            assert!(len <= MAX_PACKET);
            from.commit(now, len, address(1));
        }
        to.receive(now, |ip, bytes| {
            let psn = bytes.get(8..12).map_or(0, |b| u32::from_be_bytes([0, b[1], b[2], b[3]]));
            came.push((now, psn, ip.is_intact(bytes)));
        });
    }
    (fabric, came)
}

/// Each fault does at full strength what it says, and at none nothing.
#[test]
fn every_fault_is_seen_at_full_strength_and_never_at_none() {
    let calm = FabricConfig { fault_ns: 50_000, ..FabricConfig::new(3) };
    let (fabric, without) = exchange(calm, Opcode::SendOnly);
    let expected: Vec<u32> = (0..200).collect();
    let numbers = |came: &[(u64, u32, bool)]| came.iter().map(|c| c.1).collect::<Vec<_>>();
    assert_eq!(numbers(&without), expected);
    assert!(without.iter().all(|c| c.2) && Fault::ALL.iter().all(|f| fabric.count(*f) == 0));
    for fault in Fault::ALL {
        let opcode = if *fault == Fault::AckLoss { Opcode::Acknowledge } else { Opcode::SendOnly };
        let (fabric, came) = exchange(calm.with(*fault, Ratio::ALWAYS), opcode);
        assert!(fabric.count(*fault) >= 200, "{fault:?}");
        assert!(Fault::ALL.iter().all(|f| f == fault || fabric.count(*f) == 0), "{fault:?} alone");
        let late = |came: &[(u64, u32, bool)]| came.last().map_or(0, |c| c.0) > without.last().unwrap().0 + 10_000;
        let is_seen = match fault {
            Fault::Loss | Fault::AckLoss | Fault::Flap | Fault::Partition => came.is_empty(),
            Fault::Duplicate => came.len() == 400,
            Fault::Reorder => came.len() == 200 && numbers(&came) != expected,
            Fault::Delay | Fault::Pause => numbers(&came) == expected && late(&came),
            Fault::Corrupt => came.len() == 200 && came.iter().filter(|c| c.2).count() < 10,
            Fault::Truncate => came.iter().filter(|c| c.2).count() < 10,
            Fault::SlowReceiver => numbers(&came) == expected && late(&came),
            Fault::Crash => fabric.take_crash() == Some(1),
        };
        assert!(is_seen, "{fault:?}: {} came", came.len());
    }
    // An answer is not lost where only answers are; and a request is none.
    let (fabric, came) = exchange(calm.with(Fault::AckLoss, Ratio::ALWAYS), Opcode::SendOnly);
    assert_eq!((came.len(), fabric.count(Fault::AckLoss)), (200, 0));
}

/// What is to happen at a moment happens then, to whom it is meant for.
#[test]
fn scripts() {
    let fabric = Fabric::new(FabricConfig::new(1));
    let (mut from, mut to) = (fabric.port(0), fabric.port(1));
    let ip = Ip::new(address(0), address(1));
    fabric.at(10_000, Act::Next(0, Fault::Loss));
    fabric.at(20_000, Act::Link { node: 1, is_up: false });
    fabric.at(30_000, Act::Link { node: 1, is_up: true });
    fabric.at(40_000, Act::Set(Fault::Duplicate, Ratio::ALWAYS));
    fabric.at(50_000, Act::Calm);
    let mut came = Vec::new();
    for now in (0..60_000).step_by(1_000) {
        if now % 5_000 == 0 {
            fabric.advance(now);
            let len =
                Header::new(Opcode::SendOnly, 5, (now / 1_000) as u32).seal(from.place().unwrap(), 0, &ip).unwrap();
            from.commit(now, len, address(1));
        }
        to.receive(now, |_, bytes| came.push(bytes[11]));
    }
    assert_eq!(came, [0, 5, 15, 30, 35, 40, 40, 45, 45, 50, 55]);
}
