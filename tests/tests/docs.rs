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

/// The tests that docs/SEMANTICS.md names exist.
#[test]
fn semantics_names_tests() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap_or_default();
    let semantics = read("docs/SEMANTICS.md");
    let mut count = 0;
    for quoted in semantics.split('`').skip(1).step_by(2).filter(|q| q.contains("::")) {
        let (file, test) = quoted.split_once("::").unwrap();
        if !["semantics", "conformance", "bad_input", "kills", "copies"].contains(&file) {
            continue;
        }
        count += 1;
        assert!(read(&format!("tests/tests/{file}.rs")).contains(&format!("fn {test}")), "{quoted} does not exist");
    }
    assert!(count >= 10, "{count} tests are named");
}
