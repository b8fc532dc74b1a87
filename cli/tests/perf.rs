//! `verbring perf` from outside: every row is there and verified, and whatever goes wrong ends with a sentence.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn perf(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_verbring")).arg("perf").args(args).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn every_row_is_verified() {
    let out = perf(&["--iters", "2", "--json", "--size", "8,4k,64k"]);
    check_rows(&out, "shm");
}

fn check_rows(out: &Output, device: &str) {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8_lossy(&out.stdout);
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names = "put_lat put_signal_lat put_flush get_flush put_rate put_b100 put_bw put_bw_hot get_bw fadd cswap";
    for name in names.split(' ') {
        assert!(rows.iter().any(|row| row["test"] == name), "{name} is missing");
    }
    for row in &rows {
        assert_eq!((&row["verified"], &row["device"]), (&true.into(), &device.into()), "{row}");
        for key in ["size", "value", "unit", "p50", "p99", "p999", "max", "pages"] {
            assert!(!row[key].is_null(), "{key} is missing: {row}");
        }
    }
}

/// An address of the loopback interface that only this test of this process has.
fn loopback(host: u8) -> String {
    let [.., high, low] = std::process::id().to_be_bytes();
    format!("127.{}.{low}.{host}", high & 0x3f | 0x40)
}

#[test]
fn over_udp_with_a_child() {
    let own = format!("udp:{}", loopback(1));
    let out = perf(&["--device", &own, "--iters", "2", "--json", "--size", "8,4k", "--mtu", "1024", "--no-offload"]);
    check_rows(&out, "udp");
}

#[test]
fn over_udp_between_two_that_were_started_by_hand() {
    let [target, origin] = [5, 6].map(loopback);
    let target_device = format!("udp:{target}");
    let mut listener = Command::new(env!("CARGO_BIN_EXE_verbring"))
        .args(["perf", "--device", &target_device, "--listen"])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The one that connects waits for the other.
    let own = format!("udp:{origin}");
    let out = perf(&["--device", &own, "--connect", &target, "--iters", "2", "--json", "--size", "8,64k"]);
    if !out.status.success() {
        let _ = listener.kill();
    }
    check_rows(&out, "udp");
    let listener = listener.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&listener.stderr).into_owned();
    assert!(listener.status.success() && said.contains(&format!("--connect udp:{target}")), "{said}");
}

#[test]
fn addresses_that_do_not_work_are_explained() {
    let [here, nobody] = [9, 10].map(loopback);
    let _taken = std::net::UdpSocket::bind((here.as_str(), 4791)).unwrap();
    let (taken, free) = (format!("udp:{here}"), format!("udp:{}", loopback(12)));
    for (args, word) in [
        (&["--device", &taken, "--listen"][..], "choose another"),
        (&["--device", "udp:192.0.2.77", "--listen"], "no such address"),
        (&["--device", "udp:0.0.0.0", "--listen"], "name one"),
        (&["--device", &free, "--connect", &nobody], "start the other side first"),
        (&["--device", &free, "--connect", "fd00::1"], "the other way round"),
        (&["--connect", &nobody], "--device udp:ADDR"),
        (&["--device", &free, "--listen", "--mtu", "1500"], "1024"),
    ] {
        let out = perf(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains(word), "{args:?}: {said}");
    }
}

#[test]
fn bad_arguments_are_explained() {
    for (args, word) in [
        (&["--device", "ib0"][..], "shm"),
        (&["--test", "put_latency"], "put_lat"),
        (&["--size", "0"], "size"),
        (&["--cores", "0,9999"], "9999"),
        (&["--connect", "tcp:1"], "udp:ADDR"),
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
