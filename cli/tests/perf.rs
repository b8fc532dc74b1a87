//! `verbring perf` from outside: every row is there and verified, and whatever goes wrong ends with a sentence.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn perf(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_verbring")).arg("perf").args(args).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn every_row_is_verified() {
    let out = perf(&["--iters", "2", "--json", "--size", "8,4k,64k"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let rows: Vec<serde_json::Value> =
        String::from_utf8(out.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names = "put_lat put_signal_lat put_flush get_flush put_rate put_b100 put_bw put_bw_hot get_bw fadd cswap";
    for name in names.split(' ') {
        assert!(rows.iter().any(|row| row["test"] == name), "{name} is missing");
    }
    for row in &rows {
        assert_eq!(row["verified"], true, "{row}");
        for key in ["size", "value", "unit", "p50", "p99", "p999", "max", "device", "pages"] {
            assert!(!row[key].is_null(), "{key} is missing: {row}");
        }
    }
}

#[test]
fn bad_arguments_are_explained() {
    for (args, word) in [
        (&["--device", "ib0"][..], "shm"),
        (&["--test", "put_latency"], "put_lat"),
        (&["--size", "0"], "size"),
        (&["--cores", "0,9999"], "9999"),
        (&["--connect", "tcp:1"], "shm:"),
    ] {
        let out = perf(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains(word), "{args:?}: {said}");
    }
}

#[test]
fn a_killed_end_is_an_error() {
    let mut parent = Command::new(env!("CARGO_BIN_EXE_verbring"))
        .args(["perf", "--test", "put_lat", "--size", "8", "--iters", "10000000"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    let child: i32 = loop {
        if let Some(child) = child_of(parent.id()) {
            break child;
        }
        assert!(parent.try_wait().unwrap().is_none(), "it ended before it was killed");
        assert!(Instant::now() < until, "no child");
        std::thread::sleep(Duration::from_millis(5));
    };
    std::thread::sleep(Duration::from_millis(200));
    rustix::process::kill_process(rustix::process::Pid::from_raw(child).unwrap(), rustix::process::Signal::KILL)
        .unwrap();
    while parent.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "it hangs");
        std::thread::sleep(Duration::from_millis(5));
    }
    let out = parent.wait_with_output().unwrap();
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("signal 9"), "{}", String::from_utf8_lossy(&out.stderr));
}

/// The first child of a process, by the fourth field of proc_pid_stat(5).
fn child_of(parent: u32) -> Option<i32> {
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
        (fields.get(1)?.parse() == Ok(parent)).then_some(pid)
    })
}
