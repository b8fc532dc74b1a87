//! `verbring pull`: fetches a file that `verbring serve` offers, by pipelined gets out of the server's memory.
//!
//! Chunks are fetched into blocks of this process alone, checked against the server's checksums, and written to
//! FILE.part by a second thread while further ones are fetched. FILE.part becomes FILE when all of it is on disk. Beside
//! it FILE.part.state says of which file it is part; which chunks are there is not noted but seen: each is read and
//! checked when the pull is resumed.

mod part;

use std::fs::File;
use std::io::{self, Write, stdout};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use verbring::{
    Buf, Clock, Config, DeviceError, EngineError, Opts, PeerId, RemoteKey, ShmEngine, SizeClass, SlabError, Status,
    WaitError, open_shm,
};

use crate::files::{
    Answer, CHUNK, MAX_FILES, MESSAGE_MAX, NAME_MAX, Opened, Progress, Request, chunk_len, chunks, finish, region_len,
    table_at, whole_crc,
};
use part::{Output, Part};

/// Gets under way at one time.
const IN_FLIGHT: usize = 8;
/// Blocks for chunks: as many again wait for the writer.
const BLOCKS: u32 = 2 * IN_FLIGHT as u32;
/// Times that a chunk with a wrong checksum is fetched again.
const REFETCHES: u32 = 2;
/// How long to sleep when every block is with the writer: a fraction of the time that writing one takes.
const WRITER_NAP: Duration = Duration::from_micros(50);
/// Between two questions for a file that is being read again by the server.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Turns between two looks at the control side.
const CONTROL_EVERY: u32 = 256;

/// The arguments of `verbring pull`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The file's name, as it is served
    name: String,
    /// Where to put it; until it is complete, FILE.part
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The server's name: what `serve --name` said
    #[arg(long, default_value = "files")]
    from: String,
    /// Replace the output if it exists
    #[arg(long)]
    force: bool,
    /// Seconds that the server may take for any answer, the first included
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    timeout: u64,
    /// For tests: milliseconds of rest after each chunk
    #[arg(long, default_value_t = 0, hide = true)]
    pause_ms: u64,
}

/// Runs `verbring pull`.
pub(crate) fn run(args: &Args) -> ExitCode {
    finish(pull(args))
}

fn pull(args: &Args) -> Result<(), String> {
    let started = Instant::now();
    if !(1..=NAME_MAX).contains(&args.name.len()) {
        return Err(format!("a file's name has 1 to {NAME_MAX} bytes"));
    }
    let output = Output::new(&args.out, args.force)?;
    let mut session = Session::connect(&args.from, Duration::from_secs(args.timeout))?;
    let (opened, key) = session.open(&args.name)?;
    let table = match key {
        Some(key) => session.table(key, &opened)?,
        None => Vec::new(),
    };
    let part = Part::open(output, &opened)?;
    let missing = part.missing(&table, opened.len)?;
    let fetched = missing.iter().map(|chunk| chunk_len(opened.len, *chunk)).sum::<u64>();
    part.check_space(opened.len, fetched)?;
    let before = Instant::now();
    if let Some(key) = key {
        let what = Fetch { key, opened: &opened, table: &table, missing: &missing, file: &part.file };
        let pause = Duration::from_millis(args.pause_ms);
        session.fetch(&what, &args.name, pause).map_err(|stop| part.explain(stop, &session.from))?;
    }
    let took = before.elapsed().as_secs_f64();
    part.complete(opened.len)?;
    // A reader that closed the pipe has the exit code.
    let _ = writeln!(
        stdout(),
        "{}: {} bytes, crc32 {:08x} verified\nfetched {fetched} bytes in {took:.3} s ({:.2} GB/s), synced to disk after {:.3} s in all",
        args.out.display(),
        opened.len,
        opened.crc,
        fetched as f64 / 1e9 / took.max(1e-9),
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Why fetching ended before its time.
enum Stop {
    /// An operation ended so, or the connection.
    Status(Status),
    /// The file could not be written.
    Write(io::Error),
    /// Something else, in words.
    Other(String),
}

/// What the end of an operation means to a person.
fn told(status: Status, server: &str) -> String {
    match status {
        Status::StaleEpoch => "the file changed while it was served; run pull again".into(),
        Status::PeerDead => format!("the server `{server}` died; run the same command again once it is back"),
        Status::ConnectionLost => {
            format!("the server `{server}` ended the connection; run the same command again once it is back")
        }
        Status::DeadlineExceeded => {
            format!("the server `{server}` did not answer in time; see whether it runs, or give --timeout more seconds")
        }
        other => format!("the server `{server}`: {other}"),
    }
}

/// What is to be fetched, and where to.
struct Fetch<'a> {
    key: RemoteKey,
    opened: &'a Opened,
    table: &'a [u32],
    missing: &'a [u64],
    file: &'a File,
}

/// A connection to a server.
struct Session {
    engine: ShmEngine,
    peer: PeerId,
    clock: Clock,
    timeout: Duration,
    from: String,
}

impl Session {
    fn connect(from: &str, timeout: Duration) -> Result<Session, String> {
        let config = Config {
            sq_entries: 64,
            cq_entries: 128,
            max_outstanding: 64,
            max_peers: 2,
            max_windows: 2,
            max_imports: 2,
            ..Config::default()
        };
        // A request and room for its answer; chunks.
        let classes =
            [SizeClass { size: MESSAGE_MAX as u32, count: 2 }, SizeClass { size: CHUNK as u32, count: BLOCKS }];
        let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.subsec_nanos());
        let own_name = format!("pull-{}-{nanos}", std::process::id());
        let mut engine = open_shm(&own_name, config, &classes).map_err(|error| format!("cannot start: {error}"))?;
        let clock = Clock::start();
        let peer = engine.connect_wait(from, &clock, timeout).map_err(|error| match error {
            WaitError::Engine(EngineError::Device(DeviceError::NoSuchName)) => format!(
                "nobody serves under the name `{from}` (waited {} s); start `verbring serve FILE...`, or give the name \
                 of a server by --from",
                timeout.as_secs()
            ),
            error => format!("cannot connect to `{from}`: {error}"),
        })?;
        Ok(Session { engine, peer, clock, timeout, from: from.to_owned() })
    }

    fn deadline(&self) -> Option<u64> {
        Some(self.clock.now().saturating_add(self.timeout.as_nanos() as u64))
    }

    /// Waits for the end of an operation, and gives its block.
    fn wait(&mut self, wanted: u64) -> Result<Buf, String> {
        loop {
            let done = self.engine.wait(&self.clock, self.timeout).map_err(|error| match error {
                WaitError::TimedOut { .. } => told(Status::DeadlineExceeded, &self.from),
                error => error.to_string(),
            })?;
            match (done.is_success(), done.user_data == wanted, done.buf) {
                (true, true, Some(buf)) => return Ok(buf),
                (true, ..) => {}
                _ => return Err(told(done.cqe.status, &self.from)),
            }
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, String> {
        const ASKED: u64 = 1;
        const ANSWERED: u64 = 2;
        let mut room = self.engine.alloc(MESSAGE_MAX).map_err(|error| error.to_string())?;
        room.set_len(MESSAGE_MAX);
        let opts = Opts { user_data: ANSWERED, deadline: self.deadline(), ..Opts::default() };
        self.engine.recv(room, self.peer, opts).map_err(|(error, _)| error.to_string())?;
        let bytes = request.encode();
        let mut buf = self.engine.alloc(bytes.len()).map_err(|error| error.to_string())?;
        buf.set_len(bytes.len());
        buf.copy_from_slice(&bytes);
        let opts = Opts { user_data: ASKED, ..opts };
        self.engine.send(buf, self.peer, 0, opts).map_err(|(error, _)| error.to_string())?;
        let answer = Answer::decode(&self.wait(ANSWERED)?);
        match answer {
            Some(Answer::BadRequest) | None => Err(format!(
                "`{}` is no file server of this version; see that --from names one, and use one release on both sides",
                self.from
            )),
            Some(answer) => Ok(answer),
        }
    }

    /// Finds the file, and imports its region unless there is nothing to fetch.
    fn open(&mut self, name: &str) -> Result<(Opened, Option<RemoteKey>), String> {
        let until = Instant::now() + self.timeout;
        let opened = loop {
            match self.ask(&Request::Open(name.to_owned()))? {
                Answer::Opened(opened) => break opened,
                Answer::NotNow if Instant::now() < until => thread::sleep(ASK_AGAIN),
                Answer::NotNow => {
                    return Err(format!("`{}` reads {name} again, because it changed; try later", self.from));
                }
                Answer::NoSuchFile => return Err(self.no_such_file(name)),
                _ => return Err(format!("`{}` answered something else than was asked", self.from)),
            }
        };
        if opened.len == 0 {
            return Ok((opened, None));
        }
        let key = self.engine.import_wait(self.peer, &opened.remote, &self.clock, self.timeout);
        let key = key.map_err(|error| match error {
            WaitError::Refused(status) => told(status, &self.from),
            error => format!("`{}`: {error}", self.from),
        })?;
        // What it said is one thing, what there is to get another.
        match (self.engine.import_len(key), region_len(opened.len)) {
            (Some(there), Some(needed)) if there >= needed => Ok((opened, Some(key))),
            _ => Err(format!("`{}` offers less memory than the file takes; do not trust it", self.from)),
        }
    }

    fn no_such_file(&mut self, name: &str) -> String {
        let mut names = Vec::new();
        while names.len() < MAX_FILES {
            match self.ask(&Request::List(names.len() as u32)) {
                Ok(Answer::Listing { names: more, .. }) if !more.is_empty() => names.extend(more),
                _ => break,
            }
        }
        // They go to a terminal: control characters stay behind.
        let names: Vec<String> = names.iter().map(|name| name.escape_debug().to_string()).collect();
        format!("`{}` does not serve {name}; it serves: {}", self.from, names.join(", "))
    }

    /// The checksums of all chunks.
    fn table(&mut self, key: RemoteKey, opened: &Opened) -> Result<Vec<u32>, String> {
        const TABLE: u64 = 3;
        let (mut at, mut rest) = (table_at(opened.len).unwrap_or(0), 4 * chunks(opened.len));
        let mut table = Vec::new();
        while rest > 0 {
            let len = rest.min(CHUNK);
            let mut buf = self.engine.alloc(len as usize).map_err(|error| error.to_string())?;
            buf.set_len(len as usize);
            let opts = Opts { user_data: TABLE, class: 1, deadline: self.deadline(), ..Opts::default() };
            self.engine.get(buf, key.at(at), opts).map_err(|(error, _)| error.to_string())?;
            let buf = self.wait(TABLE)?;
            table.extend(buf.chunks_exact(4).map(|crc| u32::from_le_bytes([crc[0], crc[1], crc[2], crc[3]])));
            (at, rest) = (at + len, rest - len);
        }
        if whole_crc(opened.len, &table) != opened.crc {
            return Err("the server's checksums contradict each other; start it anew".into());
        }
        Ok(table)
    }

    /// Fetches what is missing, and writes it. When this returns without an error all of it is written.
    fn fetch(&mut self, what: &Fetch<'_>, name: &str, pause: Duration) -> Result<(), Stop> {
        let written = AtomicU64::new(0);
        let total = what.missing.iter().map(|chunk| chunk_len(what.opened.len, *chunk)).sum();
        let mut progress = Progress::new(format!("pulling {}", name.escape_debug()), total);
        thread::scope(|scope| {
            let (checked, todo) = channel();
            let writer = scope.spawn(|| write_chunks(what.file, todo, &written));
            let fetched = self.fetch_all(what, checked, pause, || progress.at(written.load(Ordering::Relaxed)));
            // The channel is closed: the writer ends.
            let wrote = writer.join().map_err(|_| Stop::Other("the writer failed".into()))?;
            wrote.map_err(Stop::Write)?;
            fetched
        })
    }

    /// Keeps gets under way, and hands over what came and was found right.
    fn fetch_all(
        &mut self,
        what: &Fetch<'_>,
        checked: Sender<(u64, Buf)>,
        pause: Duration,
        mut each_turn: impl FnMut(),
    ) -> Result<(), Stop> {
        let len = what.opened.len;
        let mut todo = what.missing.iter().copied();
        let mut again: Vec<u64> = Vec::new();
        let (mut left, mut in_flight, mut refetches, mut turns) = (what.missing.len(), 0, 0, 0u32);
        while left > 0 {
            while in_flight < IN_FLIGHT {
                let mut buf = match self.engine.alloc(CHUNK as usize) {
                    Ok(buf) => buf,
                    Err(SlabError::Exhausted { .. }) => break,
                    Err(error) => return Err(Stop::Other(error.to_string())),
                };
                let Some(chunk) = again.pop().or_else(|| todo.next()) else { break };
                buf.set_len(chunk_len(len, chunk) as usize);
                let opts = Opts { user_data: chunk, class: 1, deadline: self.deadline(), ..Opts::default() };
                let pushed = self.engine.get(buf, what.key.at(chunk * CHUNK), opts);
                pushed.map_err(|(error, _)| Stop::Other(error.to_string()))?;
                in_flight += 1;
            }
            let now = self.clock.now();
            self.engine.submit(now);
            self.engine.poll(now);
            while let Some(done) = self.engine.reap() {
                in_flight -= 1;
                let (chunk, status) = (done.user_data, done.status);
                let Some(buf) = done.buf.filter(|_| status.is_success()) else { return Err(Stop::Status(status)) };
                let expected = what.table.get(chunk as usize).copied();
                if expected != Some(crc32fast::hash(&buf)) {
                    refetches += 1;
                    if refetches > REFETCHES {
                        return Err(Stop::Other(format!(
                            "chunk {chunk} does not have the checksum that the server read; the memory of the server \
                             or of this machine is damaged: start the server anew"
                        )));
                    }
                    again.push(chunk);
                    continue;
                }
                left -= 1;
                // The writer stopped: it says why.
                if checked.send((chunk * CHUNK, buf)).is_err() {
                    return Ok(());
                }
                thread::sleep(pause);
            }
            if in_flight == 0 && left > 0 {
                thread::sleep(WRITER_NAP);
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(CONTROL_EVERY) {
                // What it has to tell is seen in the gets, too.
                let _ = self.engine.control(now);
            }
            each_turn();
        }
        Ok(())
    }
}

/// Writes what is handed over. Blocks go back to the slab as they are dropped.
fn write_chunks(file: &File, todo: Receiver<(u64, Buf)>, written: &AtomicU64) -> io::Result<()> {
    for (offset, buf) in todo {
        file.write_all_at(&buf, offset)?;
        written.fetch_add(buf.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}
