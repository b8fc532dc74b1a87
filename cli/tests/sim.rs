//! `verbring sim`, as it is typed.

use std::process::{Command, Output};

fn sim(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_verbring")).arg("sim").args(args).output().expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_run_says_its_seed_first_and_what_came_of_it() {
    let out = sim(&["--seed", "5", "--ops", "2000", "--nodes", "3"]);
    let said = text(&out.stdout);
    assert!(out.status.success() && said.starts_with("seed 5\n"), "{said}");
    assert!(said.contains("every promise kept") && said.contains("faults: "), "{said}");
    let calm = text(&sim(&["--seed", "5", "--ops", "2000", "--faults", "none"]).stdout);
    assert!(calm.contains("faults: none"), "{calm}");
}

#[test]
fn a_trace_replays_and_a_changed_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let file = path.to_str().unwrap();
    assert!(sim(&["--seed", "9", "--ops", "1000", "--faults", "loss,crash", "--trace", file]).status.success());
    let trace = std::fs::read_to_string(&path).unwrap();
    assert!(trace.starts_with("# verbring sim --seed 9 --ops 1000 --faults loss,crash\n"), "{}", &trace[..100]);
    assert!(trace.contains(" loss ") && trace.lines().count() > 1000);
    let same = sim(&["--replay", file]);
    assert!(same.status.success() && text(&same.stdout).contains("the same packets"), "{same:?}");
    std::fs::write(&path, format!("{trace}one more\n")).unwrap();
    let longer = sim(&["--replay", file]);
    assert!(!longer.status.success() && text(&longer.stderr).contains("it ends after packet"), "{longer:?}");
    let line = trace.lines().nth(500).unwrap();
    std::fs::write(&path, trace.replace(line, &line.replace("bytes", "bits"))).unwrap();
    let other = sim(&["--replay", file]);
    assert!(!other.status.success() && text(&other.stderr).contains("packet 500: expected"), "{other:?}");
}

#[test]
fn what_cannot_be_says_what_can() {
    for (args, expected) in [
        (&["--faults", "los"][..], "choose of none, all, loss"),
        (&["--nodes", "1"], "1 is not in 2..=16"),
        (&["--trace", "/no/such/place"], "/no/such/place"),
        (&["--replay", "/proc/self/cmdline"], "is no trace of verbring sim"),
    ] {
        let out = sim(args);
        assert!(!out.status.success() && text(&out.stderr).contains(expected), "{args:?}: {out:?}");
    }
}
