//! `verbring serve` and `verbring pull`, as people run them: two processes, files, and what can go wrong between them.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;
use verbring::{Clock, Config, Opts, PeerId, ShmEngine, SizeClass, Status, open_shm};

const VERBRING: &str = env!("CARGO_BIN_EXE_verbring");
const CHUNK: usize = 1 << 20;
const MIB40: usize = 40 * CHUNK;
/// What a test may take.
const GUARD: Duration = Duration::from_secs(30);

/// A test's own directory and server name, and the time by which it is over.
struct Place {
    dir: TempDir,
    name: String,
    end: Instant,
}

/// A process and its children, none of which outlives this.
struct Running {
    child: Child,
    end: Instant,
}

/// How a process ended.
#[derive(Debug)]
struct Ended {
    is_success: bool,
    out: String,
    err: String,
}

fn place() -> Place {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    Place { dir: tempfile::tempdir().unwrap(), name, end: Instant::now() + GUARD }
}

/// Bytes that tell where they come from.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let word = |i: usize| (i as u64 ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ seed;
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|i| word(i).to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

impl Place {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self, name: &str, len: usize, seed: u64) -> Vec<u8> {
        let bytes = pattern(len, seed);
        fs::write(self.path(name), &bytes).unwrap();
        bytes
    }

    fn run<S: AsRef<OsStr>>(&self, program: &str, args: &[S]) -> Running {
        let mut command = Command::new(program);
        command.args(args).current_dir(self.dir.path()).process_group(0);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Running { child: command.spawn().unwrap(), end: self.end }
    }

    /// A server of these files of the directory.
    fn serve(&self, args: &[&str]) -> Running {
        self.serve_as(&self.name, args)
    }

    fn serve_as(&self, server: &str, args: &[&str]) -> Running {
        self.run(VERBRING, &[&["serve", "--name", server][..], args].concat())
    }

    fn start_pull(&self, name: &str, out: &str, more: &[&str]) -> Running {
        self.start_pull_from(&self.name, name, out, more)
    }

    fn start_pull_from(&self, server: &str, name: &str, out: &str, more: &[&str]) -> Running {
        self.run(VERBRING, &[&["pull", name, "--out", out, "--from", server][..], more].concat())
    }

    fn pull(&self, name: &str, out: &str, more: &[&str]) -> Ended {
        self.start_pull(name, out, more).wait()
    }

    /// Waits for something that happens in another process.
    fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        while !is_so() {
            assert!(Instant::now() < self.end, "in time: {what}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until so many bytes of a pull are there.
    fn until_part(&self, out: &str, len: usize) {
        let part = self.path(&format!("{out}.part"));
        self.until("a part of the file", || fs::metadata(&part).is_ok_and(|meta| meta.len() >= len as u64));
    }

    #[track_caller]
    fn assert_pulled(&self, ended: &Ended, out: &str, bytes: &[u8]) {
        assert!(ended.is_success && ended.out.contains("verified"), "{ended:?}");
        assert!(fs::read(self.path(out)).unwrap() == bytes, "{out} is not what was served");
        for rest in ["part", "part.state"] {
            assert!(!self.path(&format!("{out}.{rest}")).exists(), "{rest} is left");
        }
    }
}

impl Running {
    fn signal(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, signal);
        }
    }

    fn wait(mut self) -> Ended {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < self.end, "the process hangs");
            thread::sleep(Duration::from_millis(2));
        };
        let (mut out, mut err) = (String::new(), String::new());
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        Ended { is_success: status.success(), out, err }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

impl Ended {
    #[track_caller]
    fn assert_error(&self, words: &[&str]) {
        assert!(!self.is_success, "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "`{word}` is not in: {}", self.err);
        }
    }

    /// Bytes that the pull had to fetch.
    fn fetched(&self) -> usize {
        let (_, rest) = self.out.split_once("fetched ").unwrap();
        rest.split(' ').next().unwrap().parse().unwrap()
    }

    /// Chunks that a resumed pull found in order.
    fn kept(&self) -> usize {
        let (_, rest) = self.err.split_once("resuming: ").unwrap();
        rest.split(' ').next().unwrap().parse().unwrap()
    }
}

#[test]
fn files_of_every_length() {
    let place = place();
    let lengths = [0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, MIB40];
    let names: Vec<String> = lengths.iter().map(|len| format!("file-{len}")).collect();
    let files: Vec<Vec<u8>> = names.iter().zip(lengths).map(|(name, len)| place.file(name, len, len as u64)).collect();
    let _server = place.serve(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for (name, bytes) in names.iter().zip(&files) {
        let out = format!("{name}.out");
        let ended = place.pull(name, &out, &[]);
        place.assert_pulled(&ended, &out, bytes);
        assert_eq!(ended.fetched(), bytes.len());
        assert!(ended.out.contains("GB/s"));
    }
}

#[test]
fn two_pulls_at_once() {
    let place = place();
    let bytes = place.file("file", MIB40, 1);
    let _server = place.serve(&["file"]);
    let one = place.start_pull("file", "one", &["--pause-ms", "5"]);
    place.until_part("one", 1);
    let two = place.start_pull("file", "two", &[]);
    place.pull("file", "one", &[]).assert_error(&["another pull writes one.part"]);
    place.assert_pulled(&two.wait(), "two", &bytes);
    place.assert_pulled(&one.wait(), "one", &bytes);
}

#[test]
fn a_killed_pull_is_resumed_and_a_damaged_chunk_fetched_again() {
    let place = place();
    let bytes = place.file("file", MIB40 + 5, 2);
    let _server = place.serve(&["file"]);
    let first = place.start_pull("file", "out", &["--pause-ms", "10"]);
    place.until_part("out", 8 * CHUNK);
    first.signal(Signal::KILL);
    assert!(!first.wait().is_success);
    let part = fs::OpenOptions::new().read(true).write(true).open(place.path("out.part")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&part, &[!bytes[CHUNK + 77]], CHUNK as u64 + 77).unwrap();
    let whole = part.metadata().unwrap().len() as usize / CHUNK;
    let second = place.pull("file", "out", &[]);
    place.assert_pulled(&second, "out", &bytes);
    assert_eq!(second.kept(), whole - 1, "{}", second.err);
    assert_eq!(second.fetched(), bytes.len() - (whole - 1) * CHUNK);
}

#[test]
fn a_part_of_another_file_is_not_taken_for_this_one() {
    let place = place();
    let bytes = place.file("file", 3 * CHUNK, 3);
    let _server = place.serve(&["file"]);
    fs::write(place.path("out.part"), pattern(2 * CHUNK, 4)).unwrap();
    fs::write(place.path("out.part.state"), "verbring pull 1\nlength 99\ncrc32 00000000\n").unwrap();
    let ended = place.pull("file", "out", &[]);
    assert!(ended.err.contains("starting anew"), "{ended:?}");
    place.assert_pulled(&ended, "out", &bytes);
    // A part that was written to the last byte, and longer.
    let ended = place.start_pull("file", "late", &["--pause-ms", "200"]);
    place.until_part("late", CHUNK);
    drop(ended);
    fs::write(place.path("late.part"), [&bytes[..], b"more"].concat()).unwrap();
    let ended = place.pull("file", "late", &[]);
    place.assert_pulled(&ended, "late", &bytes);
    assert_eq!(ended.fetched(), 0);
}

#[test]
fn the_server_dies_in_the_middle() {
    let place = place();
    let bytes = place.file("file", MIB40, 5);
    for (signal, out) in [(Signal::KILL, "killed"), (Signal::TERM, "out")] {
        let server = place.serve(&["file"]);
        let pull = place.start_pull("file", out, &["--pause-ms", "20"]);
        place.until_part(out, 3 * CHUNK);
        server.signal(signal);
        server.wait();
        let killed = Instant::now();
        let ended = pull.wait();
        ended.assert_error(&[&place.name, "run the same command again", &format!("{out}.part is kept")]);
        assert!(killed.elapsed() < Duration::from_secs(5), "it hung for {:?}", killed.elapsed());
    }
    let _server = place.serve(&["file"]);
    let ended = place.pull("file", "out", &[]);
    place.assert_pulled(&ended, "out", &bytes);
    assert!(ended.kept() >= 3);
}

#[test]
fn the_server_ends_in_the_middle() {
    let place = place();
    place.file("file", MIB40, 5);
    let _server = place.serve(&["file", "--for", "2"]);
    place.pull("file", "out", &["--pause-ms", "100"]).assert_error(&["ended the connection", "same command again"]);
}

#[test]
fn names_that_nobody_has() {
    let place = place();
    place.file("one", 10, 1);
    place.file("two", 10, 2);
    place.pull("one", "out", &["--timeout", "1"]).assert_error(&["nobody serves", &place.name, "waited 1 s"]);
    let _server = place.serve(&["one", "two"]);
    place.pull("three", "out", &[]).assert_error(&["does not serve three", "one, two"]);
    place.start_pull_from("no/name", "one", "out", &[]).wait().assert_error(&["A-Z a-z 0-9"]);
    place.pull("", "out", &[]).assert_error(&["1 to 255"]);
    assert!(!place.path("out.part").exists());
}

#[test]
fn more_names_than_fit_one_answer() {
    let place = place();
    let names: Vec<String> = (0..60).map(|i| format!("{}{i:03}", "n".repeat(200))).collect();
    for name in &names {
        place.file(name, 1, 1);
    }
    let _server = place.serve(&names.iter().map(String::as_str).collect::<Vec<_>>());
    place.pull("none", "out", &[]).assert_error(&[&names.join(", ")]);
}

#[test]
fn outputs_that_cannot_be() {
    let place = place();
    let bytes = place.file("file", 1000, 6);
    let other = place.file("there", 10, 7);
    fs::create_dir(place.path("dir")).unwrap();
    let _server = place.serve(&["file"]);
    place.pull("file", "there", &[]).assert_error(&["there exists", "--force"]);
    assert_eq!(fs::read(place.path("there")).unwrap(), other);
    place.pull("file", "no/dir", &[]).assert_error(&["the directory no cannot be used"]);
    place.pull("file", "there/out", &[]).assert_error(&["there is no directory"]);
    place.pull("file", "dir", &[]).assert_error(&["dir is a directory"]);
    place.pull("file", "..", &[]).assert_error(&["no file name"]);
    place.pull("file", "/dev/null", &["--force"]).assert_error(&["device"]);
    symlink("nowhere", place.path("link")).unwrap();
    place.pull("file", "link", &[]).assert_error(&["link exists"]);
    place.assert_pulled(&place.pull("file", "there", &["--force"]), "there", &bytes);
    let absolute = place.path("absolute");
    place.assert_pulled(&place.pull("file", absolute.to_str().unwrap(), &[]), "absolute", &bytes);
    // It comes to be while the pull runs.
    let pull = place.start_pull("file", "late", &["--pause-ms", "1000"]);
    place.until_part("late", 1000);
    fs::write(place.path("late"), "mine").unwrap();
    pull.wait().assert_error(&["late exists"]);
    assert_eq!(fs::read(place.path("late")).unwrap(), b"mine");
}

#[test]
fn inputs_that_cannot_be() {
    let place = place();
    place.file("file", 10, 1);
    fs::create_dir(place.path("dir")).unwrap();
    place.file("dir/file", 10, 1);
    place.serve(&["nowhere"]).wait().assert_error(&["nowhere cannot be read", "No such file"]);
    place.serve(&["dir"]).wait().assert_error(&["dir is a directory"]);
    place.serve(&["/dev/null"]).wait().assert_error(&["/dev/null is no regular file"]);
    place.serve(&[".."]).wait().assert_error(&[".. has no file name"]);
    place.serve(&["file", "dir/file"]).wait().assert_error(&["file and dir/file would both be offered as `file`"]);
    place.serve_as("no/name", &["file"]).wait().assert_error(&["A-Z a-z 0-9"]);
    let _server = place.serve(&["file"]);
    assert!(place.pull("file", "out", &[]).is_success);
    place.serve(&["file"]).wait().assert_error(&["another process listens"]);
}

#[test]
fn permissions() {
    if rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: permissions do not bind root; run this test as another user");
        return;
    }
    let place = place();
    place.file("file", 10, 1);
    let _server = place.serve(&["file"]);
    place.file("secret", 10, 1);
    fs::set_permissions(place.path("secret"), fs::Permissions::from_mode(0o000)).unwrap();
    place.serve(&["secret"]).wait().assert_error(&["secret cannot be read", "ermission denied"]);
    fs::create_dir(place.path("dir")).unwrap();
    fs::set_permissions(place.path("dir"), fs::Permissions::from_mode(0o500)).unwrap();
    place.pull("file", "dir/out", &[]).assert_error(&["dir/out.part cannot be written", "ermission denied"]);
}

/// A file system of 16 MiB, seen by one shell and its children alone, so that nothing is left behind.
fn in_small_file_system(place: &Place, script: &str) -> Option<Ended> {
    let script = format!("mkdir small && mount -t tmpfs -o size=16m none small || exit 99; {script}");
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let ended = place.run("unshare", &["-m", "sh", "-c", &script]).wait();
    (!ended.err.contains("mount") && !ended.err.contains("unshare")).then_some(ended)
}

#[test]
fn the_disk_is_too_small() {
    let place = place();
    place.file("file", MIB40, 8);
    let _server = place.serve(&["file"]);
    let script = format!("{VERBRING} pull file --from {} --out small/out", place.name);
    let Some(ended) = in_small_file_system(&place, &script) else {
        return eprintln!("SKIPPED: no file system of its own; run this test as root");
    };
    ended.assert_error(&["no space left", &format!("{MIB40} more bytes are needed and 167")]);
}

#[test]
fn the_disk_becomes_full() {
    let place = place();
    let bytes = place.file("file", 12 * CHUNK, 8);
    let _server = place.serve(&["file"]);
    // It is filled when the pull has begun, and emptied for the next one.
    let script = format!(
        "pull=\"{VERBRING} pull file --from {} --out small/out\"; $pull --pause-ms 50 & \
         while ! [ -s small/out.part ]; do sleep 0.01; done; \
         head -c 8000000 /dev/zero > small/filler; \
         wait $! && exit 98; rm small/filler; $pull && mv small/out out",
        place.name
    );
    let Some(ended) = in_small_file_system(&place, &script) else {
        return eprintln!("SKIPPED: no file system of its own; run this test as root");
    };
    for words in ["no space left", "more bytes are needed and 0 are free", "same command again", "resuming"] {
        assert!(ended.err.contains(words), "{ended:?}");
    }
    assert!(ended.kept() > 0 && ended.fetched() < bytes.len(), "{ended:?}");
    place.assert_pulled(&ended, "out", &bytes);
}

#[test]
fn the_file_may_not_become_so_large() {
    let place = place();
    let bytes = place.file("file", MIB40, 9);
    let _server = place.serve(&["file"]);
    // In blocks of 512 or 1024 bytes, as the shell likes.
    let script = format!("trap '' XFSZ; ulimit -f 8192; exec {VERBRING} pull file --from {} --out out", place.name);
    place.run("sh", &["-c", &script]).wait().assert_error(&["out.part may not become so large", "ulimit -f"]);
    let ended = place.pull("file", "out", &[]);
    assert!(ended.kept() >= 4);
    place.assert_pulled(&ended, "out", &bytes);
}

#[test]
fn a_file_that_changes_while_it_is_served() {
    let place = place();
    place.file("file", MIB40, 10);
    place.file("other", MIB40, 11);
    let server = place.serve(&["file", "other"]);
    let pull = place.start_pull("file", "out", &["--pause-ms", "100"]);
    let undisturbed = place.start_pull("other", "other.out", &["--pause-ms", "50"]);
    place.until_part("out", CHUNK);
    place.until_part("other.out", CHUNK);
    // Replaced, as careful programs do.
    let bytes = place.file("new", MIB40 / 2 + 3, 12);
    fs::rename(place.path("new"), place.path("file")).unwrap();
    pull.wait().assert_error(&["the file changed while it was served; run pull again"]);
    // It asks until the server has read it again.
    let ended = place.pull("file", "out", &[]);
    assert!(ended.err.contains("starting anew"), "{ended:?}");
    place.assert_pulled(&ended, "out", &bytes);
    place.assert_pulled(&undisturbed.wait(), "other.out", &pattern(MIB40, 11));
    // Written in place.
    let before = fs::metadata(place.path("file")).unwrap().ino();
    let bytes = place.file("file", MIB40 / 2 + 3, 13);
    assert_eq!(fs::metadata(place.path("file")).unwrap().ino(), before);
    place.until("the new contents", || {
        place.pull("file", "again", &["--force"]).is_success && fs::read(place.path("again")).unwrap() == bytes
    });
    // Deleted: what was read is served on.
    fs::remove_file(place.path("file")).unwrap();
    thread::sleep(Duration::from_millis(700));
    place.assert_pulled(&place.pull("file", "last", &[]), "last", &bytes);
    server.signal(Signal::TERM);
    let said = server.wait().err;
    assert_eq!(said.matches("file changed").count(), 2, "{said}");
    assert_eq!(said.matches("is served on").count(), 1, "{said}");
}

#[test]
fn once_and_for() {
    let place = place();
    let bytes = place.file("file", 10 * CHUNK, 14);
    let server = place.serve(&["file", "--once"]);
    place.pull("no such file", "out", &[]).assert_error(&["does not serve"]);
    place.assert_pulled(&place.pull("file", "out", &[]), "out", &bytes);
    assert!(server.wait().is_success);
    let started = Instant::now();
    assert!(place.serve(&["file", "--for", "1"]).wait().is_success);
    assert!(started.elapsed() >= Duration::from_secs(1));
}

/// An engine in this process, which says what no `pull` and no `serve` says.
fn raw_engine() -> ShmEngine {
    let classes = [SizeClass { size: 4096, count: 64 }, SizeClass { size: 16384, count: 16 }];
    open_shm(&place().name, Config { max_peers: 64, ..Config::default() }, &classes).unwrap()
}

fn send(engine: &mut ShmEngine, peer: PeerId, bytes: &[u8], user_data: u64) {
    let mut buf = engine.alloc(bytes.len()).unwrap();
    buf.set_len(bytes.len());
    buf.copy_from_slice(bytes);
    engine.send(buf, peer, 7, Opts { user_data, ..Opts::default() }).unwrap();
}

fn receive(engine: &mut ShmEngine, peer: PeerId) {
    let mut buf = engine.alloc(4096).unwrap();
    buf.set_len(4096);
    engine.recv(buf, peer, Opts { user_data: 99, ..Opts::default() }).unwrap();
}

#[test]
fn hostile_clients_disturb_nobody() {
    let place = place();
    let bytes = place.file("file", MIB40, 15);
    let _server = place.serve(&["file"]);
    let pull = place.start_pull("file", "out", &["--pause-ms", "20"]);
    place.until_part("out", 1);
    let (mut engine, clock) = (raw_engine(), Clock::start());
    let connect = |engine: &mut ShmEngine| engine.connect_wait(&place.name, &clock, GUARD).unwrap();
    // Each garbage gets its "bad request", and the connection is as good as before.
    let peer = connect(&mut engine);
    let head = b"vrbf\x01\x01\0\0\0\0\0\0".to_vec();
    let mut garbage: Vec<Vec<u8>> = [0, 1, 7, 12, 64, 4096, 4097, 16000].map(|len| pattern(len, 16)).into();
    garbage.extend([head.clone(), [&head[..], &[0xff; 9]].concat(), [&head[..], &[b'n'; 256]].concat()]);
    garbage.extend([b"vrbf\x02\x01\0\0\0\0\0\0x".to_vec(), b"vrbf\x01\x07\0\0\0\0\0\0".to_vec()]);
    for bytes in &garbage {
        receive(&mut engine, peer);
        send(&mut engine, peer, bytes, 1);
        let answer = loop {
            let done = engine.wait(&clock, GUARD).unwrap();
            assert_eq!(done.status, Status::Success);
            if done.user_data == 99 {
                break done.buf.unwrap();
            }
        };
        assert_eq!(&answer[..], b"vrbf\x01\x05\0\0", "to {} bytes", bytes.len());
    }
    // Asks and asks, and takes no answer.
    let deaf = connect(&mut engine);
    for i in 0..20 {
        send(&mut engine, deaf, b"vrbf\x01\x02\0\0\0\0\0\0", i);
    }
    // Come, say half a word, and go.
    for _ in 0..30 {
        let peer = connect(&mut engine);
        send(&mut engine, peer, b"vrbf", 1);
        engine.submit(clock.now());
        engine.disconnect(peer, clock.now());
    }
    // Stays, and does nothing at all.
    let silent = connect(&mut engine);
    place.assert_pulled(&pull.wait(), "out", &bytes);
    place.assert_pulled(&place.pull("file", "after", &[]), "after", &bytes);
    assert!(engine.peer_state(deaf).is_some() && engine.peer_state(silent).is_some());
}

/// A server that is none, or has gone bad.
#[test]
fn hostile_servers_are_found_out() {
    let place = place();
    let (mut engine, clock) = (raw_engine(), Clock::start());
    let name = engine.device().name().to_string();
    let start_pull = || place.start_pull_from(&name, "file", "out", &["--timeout", "1"]);
    // It says nothing.
    let pull = start_pull();
    engine.accept_wait(&clock, GUARD).unwrap();
    pull.wait().assert_error(&["did not answer in time"]);
    // It says what makes no sense: other lengths than it has memory for, names that are none, garbage.
    let window = engine.window(4096, verbring::Rights::READ).unwrap();
    let remote = engine.remote(&window).unwrap();
    let opened_as = |len: u64, crc: u32, remote: verbring::Remote| {
        let start = [&b"vrbf\x01\x01\0\0"[..], &len.to_le_bytes(), &crc.to_le_bytes(), &[0; 4]].concat();
        [&start[..], &remote.to_bytes()].concat()
    };
    let opened = |len: u64, remote: verbring::Remote| opened_as(len, 1, remote);
    let lie = verbring::Remote { len: 1 << 40, ..remote };
    let answers = [
        (opened(100, remote), "contradict each other"),
        (opened_as(100, 0, remote), "chunk 0 does not have the checksum"),
        (opened(1 << 30, remote), "no file server"),
        (opened(1 << 30, lie), "less memory than the file takes"),
        (opened(u64::MAX, lie), "no file server"),
        (opened(100, verbring::Remote { token: [1; 16], ..remote }), "does not grant this access"),
        (opened(100, verbring::Remote { node: 1, ..remote }), "of node"),
        (b"vrbf\x01\x02\0\0\xff\xff\xff\xff\x09ab".to_vec(), "no file server"),
        (b"vrbf\x01\x02\0\0\x01\0\0\0\x01a".to_vec(), "something else than was asked"),
        (b"vrbf\x01\x04\0\0".to_vec(), "reads file again"),
        (b"vrbf\x01\x03\0\0".to_vec(), "does not serve file"),
        (pattern(900, 3), "no file server"),
        (pattern(9000, 3), "buffer of the receive"),
    ];
    for (answer, words) in answers {
        let mut pull = start_pull();
        let peer = engine.accept_wait(&clock, GUARD).unwrap();
        // Whatever it asks, that is the answer.
        receive(&mut engine, peer);
        while pull.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < place.end);
            engine.submit(clock.now());
            engine.poll(clock.now());
            while let Some(done) = engine.reap() {
                if done.user_data == 99 && done.is_success() {
                    receive(&mut engine, peer);
                    send(&mut engine, peer, &answer, 1);
                }
            }
            while engine.control(clock.now()).is_some() {}
            thread::sleep(Duration::from_micros(200));
        }
        pull.wait().assert_error(&[words]);
        engine.disconnect(peer, clock.now());
    }
    assert!(!place.path("out").exists());
}

#[test]
fn control_characters_in_names_stay_behind() {
    let place = place();
    place.file("bell\x07", 10, 1);
    let _server = place.serve(&["bell\x07"]);
    let ended = place.pull("none", "out", &[]);
    ended.assert_error(&["bell\\u{7}"]);
    assert!(!ended.err.contains('\x07'));
    place.assert_pulled(&place.pull("bell\x07", "out", &[]), "out", &pattern(10, 1));
    // A reader that closed the pipe changes nothing.
    let mut pull = place.start_pull("bell\x07", "out2", &[]);
    drop((pull.child.stdout.take(), pull.child.stderr.take()));
    assert!(pull.child.wait().unwrap().success());
    assert!(place.path("out2").exists());
}
