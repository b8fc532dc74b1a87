//! Documents that are generated are as generated, and say what the code says.

use std::fmt::Write;
use std::path::Path;

use verbring::Status;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// docs/ERRORS.md from the list of statuses. `VERBRING_BLESS=1` writes it.
#[test]
fn errors() {
    let mut text = String::from(
        "# Errors\n\nGenerated from `sys/src/status.rs`. A number is given once and never reused. 1 to 31: refused when it was\n\
         submitted, nothing was done; 32 to 63: outcomes.\n\n| number | name | what happened | what to do |\n|---|---|---|---|\n",
    );
    for status in Status::ALL {
        let number = *status as u16;
        writeln!(text, "| {number} | {} | {} | {} |", status.name(), status.text(), status.remedy()).unwrap();
    }
    let path = root().join("docs/ERRORS.md");
    if std::env::var_os("VERBRING_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let is = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(is, text, "docs/ERRORS.md is old: VERBRING_BLESS=1 cargo test -p verbring-tests --test docs");
}

/// A block of a document between its markers. `VERBRING_BLESS=1` writes it.
fn block(path: &str, name: &str, generated: &str) {
    let path = root().join(path);
    let text = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = (format!("<!-- {name}: generated -->\n"), format!("<!-- end of {name} -->\n"));
    let from = text.find(&begin).map(|at| at + begin.len()).expect("the marker of the beginning");
    let to = text.find(&end).expect("the marker of the end");
    if std::env::var_os("VERBRING_BLESS").is_some() {
        std::fs::write(&path, format!("{}{generated}{}", &text[..from], &text[to..])).unwrap();
    } else {
        let hint = "VERBRING_BLESS=1 cargo test -p verbring-tests --test docs";
        assert_eq!(&text[from..to], generated, "{} is old: {hint}", path.display());
    }
}

/// The instruction counts of docs/PERFORMANCE.md are those that `cargo bench` holds the code to.
#[test]
fn instructions() {
    let budgets = std::fs::read_to_string(root().join("benches/budgets.txt")).unwrap();
    let mut text = String::from("| what | instructions each | all of a run | limit |\n|---|---|---|---|\n");
    for line in budgets.lines().filter(|line| !line.starts_with('#')) {
        let mut fields = line.splitn(4, ' ');
        let mut next = || fields.next().unwrap();
        let (name, counted, operations, what) = (next(), next(), next(), next());
        let (counted, operations): (u64, u64) = (counted.parse().unwrap(), operations.parse().unwrap());
        assert!(counted > 0, "{name} was never measured: benches/bless");
        let each = counted as f64 / operations as f64;
        writeln!(text, "| {what} | {each:.0} | {counted} | {} |", counted + counted.div_ceil(50)).unwrap();
    }
    block("docs/PERFORMANCE.md", "instructions", &text);
}

/// What a peer, a queue pair and the like take.
#[test]
fn memory() {
    use verbring::Config;
    use verbring_sys::{CLASSES, CpuNic, lane::LANE_BYTES};
    let small = Config { max_peers: 64, max_windows: 64, max_imports: 64, max_outstanding: 64, ..Config::default() };
    let each = |larger: Config| (larger.bytes() - small.bytes()) / 64;
    let link = (CpuNic::bytes(128, 64) - CpuNic::bytes(64, 64)) / 64;
    let rows = [
        ("a peer, in the engine", each(Config { max_peers: 128, ..small })),
        ("a Window", each(Config { max_windows: 128, ..small })),
        ("an import, in the engine", each(Config { max_imports: 128, ..small })),
        ("an import, in local or shm", (CpuNic::bytes(64, 128) - CpuNic::bytes(64, 64)) / 64),
        ("an operation that may be pending", each(Config { max_outstanding: 128, ..small })),
        ("a queue pair of local or shm, tables for 64 pending and 64 receives", link / CLASSES),
        ("a lane of local or shm: two a peer, shared with it; its rings are touched by messages only", LANE_BYTES),
        ("an engine of the default sizes, without its device", Config::default().bytes()),
    ];
    let mut text = String::from("| what | bytes |\n|---|---|\n");
    for (what, bytes) in rows {
        writeln!(text, "| {what} | {bytes} |").unwrap();
    }
    block("docs/PERFORMANCE.md", "memory", &text);
}

/// The tests that docs/SEMANTICS.md names exist.
#[test]
fn semantics_names_tests() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap_or_default();
    let semantics = read("docs/SEMANTICS.md");
    let mut count = 0;
    for quoted in semantics.split('`').skip(1).step_by(2).filter(|q| q.contains("::")) {
        let (file, test) = quoted.split_once("::").unwrap();
        if !["semantics", "conformance", "bad_input", "kills", "copies", "litmus"].contains(&file) {
            continue;
        }
        count += 1;
        assert!(read(&format!("tests/tests/{file}.rs")).contains(&format!("fn {test}")), "{quoted} does not exist");
    }
    assert!(count >= 10, "{count} tests are named");
}
