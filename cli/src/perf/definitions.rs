//! What is measured: one table of names, units and definitions, used by the parser, by `--explain` and by the docs.
//! The definitions follow those of the programs that the figures are compared with (UCX, MPI, OpenSHMEM, libfabric).

/// The largest size of a message: what a test of 1 GiB needs (2 GiB for both ends) is to be had on most machines.
pub(crate) const LARGEST: u32 = 1 << 30;
/// The operations of a batch.
pub(crate) const HUNDRED: u32 = 100;

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Puts to and fro.
    PingPong,
    /// The same by `put_signal`.
    PingPongSignal,
    /// One put at a time.
    PutAlone,
    /// One get at a time.
    GetAlone,
    /// Windows of silent puts with one cqe, from slot to slot.
    PutWindows,
    /// The same from one place to one place.
    PutWindowsHot,
    /// Windows of silent gets with one cqe.
    GetWindows,
    /// A hundred puts with a cqe each.
    Hundred,
    /// A hundred puts with one cqe.
    HundredSilent,
    /// One fetch-add at a time.
    FetchAdd,
    /// One compare-swap at a time.
    CompareSwap,
}

impl Kind {
    /// The other end takes part while it is measured.
    pub(crate) fn is_ping_pong(self) -> bool {
        matches!(self, Kind::PingPong | Kind::PingPongSignal)
    }

    /// The bytes go from the other end to this one.
    pub(crate) fn is_get(self) -> bool {
        matches!(self, Kind::GetAlone | Kind::GetWindows)
    }

    /// A word instead of bytes.
    pub(crate) fn is_atomic(self) -> bool {
        matches!(self, Kind::FetchAdd | Kind::CompareSwap)
    }
}

/// The unit of a test's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Microseconds.
    Us,
    /// Million messages a second.
    MmsgPerS,
    /// 10^9 bytes a second.
    GbPerS,
}

impl Unit {
    /// As it stands in the tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Unit::Us => "us",
            Unit::MmsgPerS => "Mmsg/s",
            Unit::GbPerS => "GB/s",
        }
    }
}

/// A test.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Test {
    /// As in `--test`.
    pub(crate) name: &'static str,
    /// What is done.
    pub(crate) kind: Kind,
    /// Of the value.
    pub(crate) unit: Unit,
    /// In one line.
    pub(crate) definition: &'static str,
    /// Sizes of the default run.
    pub(crate) sizes: &'static [u32],
    /// The largest size that makes sense, or fits.
    pub(crate) largest: u32,
}

const KIB: u32 = 1 << 10;
const MIB: u32 = 1 << 20;

/// Every test, in the order of the table.
pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "put_lat",
        kind: Kind::PingPong,
        unit: Unit::Us,
        definition: "half a round trip of puts: each end polls the last word of what the other puts into its memory",
        sizes: &[8, 64, 4 * KIB, 64 * KIB, MIB],
        largest: LARGEST,
    },
    Test {
        name: "put_signal_lat",
        kind: Kind::PingPongSignal,
        unit: Unit::Us,
        definition: "half a round trip of put_signal: each end polls the signal word, which lies right behind the bytes",
        sizes: &[8, 64, 4 * KIB, 64 * KIB, MIB],
        largest: LARGEST,
    },
    Test {
        name: "put_flush",
        kind: Kind::PutAlone,
        unit: Unit::Us,
        definition: "one put alone: push, submit, poll and reap until its cqe (the bytes are visible at the target)",
        sizes: &[8, 64, 4 * KIB, 64 * KIB, MIB],
        largest: LARGEST,
    },
    Test {
        name: "get_flush",
        kind: Kind::GetAlone,
        unit: Unit::Us,
        definition: "one get alone: push, submit, poll and reap until its cqe",
        sizes: &[8, 64, 4 * KIB, 64 * KIB, MIB],
        largest: LARGEST,
    },
    Test {
        name: "put_rate",
        kind: Kind::PutWindows,
        unit: Unit::MmsgPerS,
        definition: "messages a second: windows of silent puts with one cqe, each put to the next slot",
        sizes: &[8, 64],
        largest: 4 * KIB,
    },
    Test {
        name: "put_b100",
        kind: Kind::Hundred,
        unit: Unit::Us,
        definition: "a batch of 100 puts to 100 places with a cqe each, from the first push to the last cqe",
        sizes: &[8, 64, 4 * KIB],
        largest: MIB,
    },
    Test {
        name: "put_b100_silent",
        kind: Kind::HundredSilent,
        unit: Unit::Us,
        definition: "a batch of 100 puts to 100 places with one cqe, from the first push to the cqe",
        sizes: &[8, 64, 4 * KIB],
        largest: MIB,
    },
    Test {
        name: "put_bw",
        kind: Kind::PutWindows,
        unit: Unit::GbPerS,
        definition: "bytes a second: windows of silent puts with one cqe, each from its slot to its slot",
        sizes: &[4 * KIB, 64 * KIB, MIB, 100 * MIB],
        largest: LARGEST,
    },
    Test {
        name: "put_bw_hot",
        kind: Kind::PutWindowsHot,
        unit: Unit::GbPerS,
        definition: "the same, all from one place to one place, which stay in the cache if it holds them",
        sizes: &[4 * KIB, 64 * KIB, MIB],
        largest: LARGEST,
    },
    Test {
        name: "get_bw",
        kind: Kind::GetWindows,
        unit: Unit::GbPerS,
        definition: "bytes a second: windows of silent gets with one cqe, each from its slot to its slot",
        sizes: &[4 * KIB, 64 * KIB, MIB, 100 * MIB],
        largest: LARGEST,
    },
    Test {
        name: "fadd",
        kind: Kind::FetchAdd,
        unit: Unit::Us,
        definition: "one fetch-add alone, with the old value; the other end leaves the word alone",
        sizes: &[8],
        largest: 8,
    },
    Test {
        name: "cswap",
        kind: Kind::CompareSwap,
        unit: Unit::Us,
        definition: "one compare-swap alone that succeeds, with the old value; the other end leaves the word alone",
        sizes: &[8],
        largest: 8,
    },
];

/// What is true of all of them.
pub(crate) const COMMON: &str = "\
value: for us the p50; for Mmsg/s and GB/s messages or bytes of a window by the p50 of its time
p50: of blocks of up to 64 operations, windows or batches with the clock read around the block only
p99, p99.9, max: of single ones with the clock read around each, less what reading it costs
all four are times in us: of one operation, of one window (put_rate, *_bw), or of one batch (put_b100*)
slots: 64 up to 4 KiB, 16 above, fewer where they would take more than 64 MiB; a window is one walk over them, or --batch
nobody reads the bytes at the target while puts are measured: their lines stay in the origin's cache
verified: a last part of the run is done with other bytes, which are compared whole, with the gaps between them";

/// The names of all tests.
pub(crate) fn names() -> String {
    TESTS.iter().map(|test| test.name).collect::<Vec<_>>().join(", ")
}

/// A test by its name.
pub(crate) fn parse_test(name: &str) -> Result<&'static Test, String> {
    TESTS.iter().find(|test| test.name == name).ok_or_else(|| format!("there is no such test; there are {}", names()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_found_by_name() {
        for test in TESTS {
            assert_eq!(parse_test(test.name), Ok(test));
            assert!(test.sizes.iter().all(|size| (1..=test.largest).contains(size)) && test.largest <= LARGEST);
        }
        let error = parse_test("put_latency").unwrap_err();
        assert!(error.contains("put_lat,") && error.contains("cswap"), "{error}");
    }

    /// docs/PERFORMANCE.md holds these definitions, to the letter. `VERBRING_BLESS=1` writes them.
    #[test]
    fn the_document_says_the_same() {
        const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/PERFORMANCE.md");
        const BEGIN: &str = "<!-- definitions: generated from cli/src/perf/definitions.rs -->\n";
        const END: &str = "<!-- end of definitions -->";
        let mut table = String::from("| test | unit | what |\n|---|---|---|\n");
        for test in TESTS {
            table += &format!("| {} | {} | {} |\n", test.name, test.unit.name(), test.definition);
        }
        table += "\n";
        for line in COMMON.lines() {
            table += &format!("* {line}\n");
        }
        let text = std::fs::read_to_string(PATH).unwrap();
        let (before, rest) = text.split_once(BEGIN).expect("the mark where the definitions begin");
        let (is, after) = rest.split_once(END).expect("the mark where they end");
        if std::env::var_os("VERBRING_BLESS").is_some() {
            std::fs::write(PATH, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
        } else {
            assert_eq!(is, table, "VERBRING_BLESS=1 cargo test -p verbring-cli writes it");
        }
    }
}
