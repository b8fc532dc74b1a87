//! `verbring serve`: offers files from memory to `verbring pull`.
//!
//! Each file is read into a region of its own, which peers may map read-only; from then on the server only answers
//! "where is it", and a pull costs it nothing. A file that changes on disk is taken back: pulls of it end in an error
//! that says so, and it is read again once it is left alone. Everything that a client sends is input.

mod load;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use verbring::{
    AccessError, Buf, Clock, Completion, Config, Notice, Opts, PeerId, Remote, Rights, ShmEngine, SizeClass, Status,
    Window, open_shm,
};

use crate::files::{Answer, MAX_FILES, MESSAGE_MAX, NAME_MAX, Opened, Request, finish, region_len, say};
use load::{Loaded, Loader, Stamp, load};

/// Clients at one time.
const MAX_CLIENTS: u32 = 64;
/// How often files are looked at for changes. One that stays the same for so long is read again.
const WATCH_NS: u64 = 500_000_000;
/// How long a client may take for an answer, or to open its first file.
const CLIENT_NS: u64 = 30_000_000_000;
/// How long importers have to let go of a file that changed, before they are cut off.
const LET_GO_NS: u64 = 2_000_000_000;
/// The longest nap of a server that nobody asks anything: what a request waits for at most, once or twice a pull. A
/// turn and its sleep take 20 to 50 us, so an idle server has about one percent of a core.
const NAP: Duration = Duration::from_millis(4);

/// The arguments of `verbring serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Files to offer, each under the last part of its path
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The name to listen under: what `pull --from` has to say
    #[arg(long, default_value = "files")]
    name: String,
    /// End when the first client that opened a file has gone
    #[arg(long)]
    once: bool,
    /// End after so many seconds
    #[arg(long = "for", value_name = "SECONDS")]
    seconds: Option<u64>,
}

/// Runs `verbring serve`.
pub(crate) fn run(args: &Args) -> ExitCode {
    finish(serve(args))
}

fn serve(args: &Args) -> Result<(), String> {
    let names = names_of(&args.files)?;
    let clients = MAX_CLIENTS;
    let config = Config {
        sq_entries: 2 * clients,
        cq_entries: 4 * clients,
        max_outstanding: 2 * clients,
        max_peers: clients,
        // Twice each file, for a moment, and the slab.
        max_windows: 2 * MAX_FILES as u32 + 1,
        max_imports: 1,
        ..Config::default()
    };
    // One block a client: it is the request, then the answer, then room for the next request. As many again are on
    // their way back from clients that have just gone.
    let classes = [SizeClass { size: MESSAGE_MAX as u32, count: 2 * clients }];
    let loaded: Vec<Loaded> = args.files.iter().map(|path| load(path)).collect::<Result<_, _>>()?;
    // Last: whoever finds the name finds the files.
    let engine = open_shm(&args.name, config, &classes).map_err(|error| format!("cannot listen: {error}"))?;
    let mut server = Server {
        engine,
        files: Vec::new(),
        clients: HashMap::new(),
        closing: Vec::new(),
        loader: Loader::start()?,
        is_done: false,
    };
    for ((path, name), loaded) in args.files.iter().zip(names).zip(loaded) {
        let state = server.offer(&name, loaded)?;
        server.files.push(Served { path: path.clone(), name, state, told: String::new() });
    }
    say(format_args!("listening as `{}`", args.name));
    server.run(args.once, args.seconds.map(Duration::from_secs));
    Ok(())
}

/// The name that each file is offered under.
fn names_of(paths: &[PathBuf]) -> Result<Vec<String>, String> {
    if paths.len() > MAX_FILES {
        return Err(format!(
            "{} files were given and one server offers at most {MAX_FILES}; start another with --name",
            paths.len()
        ));
    }
    let mut seen: HashMap<&str, &Path> = HashMap::new();
    let mut names = Vec::new();
    for path in paths {
        let shown = path.display();
        let name = path.file_name().ok_or(format!("{shown} has no file name; name the files themselves"))?;
        let name = name.to_str().filter(|name| name.len() <= NAME_MAX);
        let name = name.ok_or(format!("the name of {shown} is no UTF-8 of at most {NAME_MAX} bytes; rename it"))?;
        if let Some(other) = seen.insert(name, path) {
            return Err(format!(
                "{} and {shown} would both be offered as `{name}`; rename one, or serve it under another --name",
                other.display()
            ));
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

/// A file that is offered.
struct Served {
    path: PathBuf,
    name: String,
    state: State,
    /// The last complaint about it, which is not repeated.
    told: String,
}

enum State {
    /// It may be opened.
    Ready { window: Window, remote: Remote, stamp: Stamp, crc: u32 },
    /// It changed; it is read again when it looks the same twice.
    Changing(Option<Stamp>),
    /// The loader has it.
    Loading,
}

impl Served {
    fn complain(&mut self, what: String) {
        if self.told != what {
            say(&what);
            self.told = what;
        }
    }
}

struct Client {
    /// When it connected; none once it opened a file. From then on it may be silent: its gets are not seen here.
    idle_since: Option<u64>,
}

struct Server {
    engine: ShmEngine,
    files: Vec<Served>,
    clients: HashMap<PeerId, Client>,
    /// Windows of files that changed, and until when importers may take to let go.
    closing: Vec<(Window, u64)>,
    loader: Loader,
    /// A client that had opened a file has gone.
    is_done: bool,
}

/// In the user_data of a send; a receive has the peer alone.
const SENT: u64 = 1 << 32;

impl Server {
    /// Registers a file for all who ask.
    fn offer(&mut self, name: &str, loaded: Loaded) -> Result<State, String> {
        let Loaded { region, stamp, crc } = loaded;
        let (pages, len) = (region.pages().name(), region_len(stamp.len).unwrap_or(0));
        let window = self.engine.register_region(region, len as usize, Rights::READ);
        let window = window.map_err(|error| format!("{name} cannot be offered: {error}"))?;
        let remote = self.engine.remote(&window).map_err(|error| format!("{name} cannot be offered: {error}"))?;
        say(format_args!("serving {name}: {} bytes, crc32 {crc:08x}, pages {pages}", stamp.len));
        Ok(State::Ready { window, remote, stamp, crc })
    }

    fn run(&mut self, once: bool, limit: Option<Duration>) {
        let clock = Clock::start();
        let end = limit.map_or(u64::MAX, |limit| limit.as_nanos() as u64);
        let (mut nap, mut next_look) = (Duration::ZERO, WATCH_NS);
        loop {
            let now = clock.now();
            if now >= end || (once && self.is_done) {
                return;
            }
            let is_busy = self.turn(now);
            if now >= next_look {
                next_look = now + WATCH_NS;
                self.look_at_files(now);
                self.drop_idle_clients(now);
            }
            self.close_windows(now);
            self.take_loaded();
            // Gets need nothing of this thread, so it sleeps, the longer the less it is asked.
            nap = if is_busy { Duration::ZERO } else { (nap * 2 + Duration::from_micros(10)).min(NAP) };
            thread::sleep(nap);
        }
    }

    /// Takes what clients said, and who came and went: whether there was anything.
    fn turn(&mut self, now: u64) -> bool {
        let mut work = self.engine.submit(now) + self.engine.poll(now);
        while let Some(completion) = self.engine.reap() {
            work += 1;
            self.completed(completion, now);
        }
        while let Some(notice) = self.engine.control(now) {
            work += 1;
            match notice {
                Notice::Connected { peer, .. } => {
                    self.clients.insert(peer, Client { idle_since: Some(now) });
                    match self.engine.alloc(MESSAGE_MAX) {
                        Ok(buf) => self.listen_to(peer, buf, now),
                        Err(_) => self.drop_client(peer, now),
                    }
                }
                Notice::Lost { peer, .. } => self.drop_client(peer, now),
                // Nothing is imported here.
                _ => {}
            }
        }
        work != 0
    }

    /// Ends a connection. Its block comes back with the completion of what it was in.
    fn drop_client(&mut self, peer: PeerId, now: u64) {
        let client = self.clients.remove(&peer);
        self.is_done |= client.is_some_and(|client| client.idle_since.is_none());
        self.engine.disconnect(peer, now);
    }

    fn drop_idle_clients(&mut self, now: u64) {
        let is_late = |client: &Client| client.idle_since.is_some_and(|since| now.saturating_sub(since) > CLIENT_NS);
        let late: Vec<PeerId> = self.clients.iter().filter(|(_, c)| is_late(c)).map(|(peer, _)| *peer).collect();
        for peer in late {
            self.drop_client(peer, now);
        }
    }

    fn listen_to(&mut self, peer: PeerId, mut buf: Buf, now: u64) {
        buf.set_len(MESSAGE_MAX);
        let opts = Opts { user_data: u64::from(peer.raw()), ..Opts::default() };
        if self.engine.recv(buf, peer, opts).is_err() {
            self.drop_client(peer, now);
        }
    }

    fn completed(&mut self, completion: Completion, now: u64) {
        let (number, status) = (completion.user_data as u32, completion.status);
        let is_sent = completion.user_data & SENT != 0;
        let peer = self.clients.keys().find(|peer| peer.raw() == number).copied();
        // Of a client that has gone: the block goes back to the slab.
        let Some((peer, buf)) = peer.zip(completion.buf) else { return };
        match (is_sent, status) {
            (true, Status::Success) => self.listen_to(peer, buf, now),
            (false, Status::Success) => self.answer(peer, Request::decode(&buf), buf, now),
            (false, Status::Truncated) => self.answer(peer, None, buf, now),
            // It did not take the answer in time, or it is lost.
            _ => self.drop_client(peer, now),
        }
    }

    fn answer(&mut self, peer: PeerId, request: Option<Request>, mut buf: Buf, now: u64) {
        let answer = match request {
            None => Answer::BadRequest,
            Some(Request::List(skip)) => {
                let names = self.files.iter().skip(skip as usize).map(|file| file.name.clone()).collect();
                Answer::Listing { total: self.files.len() as u32, names }
            }
            Some(Request::Open(name)) => match self.files.iter().find(|file| file.name == name).map(|f| &f.state) {
                None => Answer::NoSuchFile,
                Some(State::Changing(_) | State::Loading) => Answer::NotNow,
                Some(State::Ready { remote, stamp, crc, .. }) => {
                    if let Some(client) = self.clients.get_mut(&peer) {
                        client.idle_since = None;
                    }
                    Answer::Opened(Opened { len: stamp.len, crc: *crc, remote: *remote })
                }
            },
        };
        let bytes = answer.encode();
        buf.set_len(bytes.len());
        buf.copy_from_slice(&bytes);
        let user_data = u64::from(peer.raw()) | SENT;
        let opts = Opts { user_data, deadline: Some(now + CLIENT_NS), ..Opts::default() };
        if self.engine.send(buf, peer, 0, opts).is_err() {
            self.drop_client(peer, now);
        }
    }

    /// Takes back what changed on disk, and has it read again once it is left alone.
    fn look_at_files(&mut self, now: u64) {
        for (index, file) in self.files.iter_mut().enumerate() {
            let seen = fs::metadata(&file.path).map(|meta| Stamp::new(&meta));
            match (&mut file.state, seen) {
                (State::Loading, _) => {}
                (State::Ready { stamp, .. }, Ok(seen)) if *stamp == seen => {}
                (State::Ready { window, .. }, Ok(seen)) => {
                    self.closing.push((window.clone(), now + LET_GO_NS));
                    file.state = State::Changing(Some(seen));
                    file.complain(format!("{} changed: pulls of it end, and it is read again", file.path.display()));
                }
                (State::Ready { .. }, Err(error)) => {
                    let path = file.path.display().to_string();
                    file.complain(format!("{path}: {error}; what was read is served on"));
                }
                (State::Changing(before), seen) => {
                    let seen = seen.ok();
                    let is_settled = seen.is_some() && *before == seen;
                    *before = seen;
                    // One copy at a time: the old one goes first.
                    if is_settled
                        && self.closing.is_empty()
                        && self.loader.jobs.send((index, file.path.clone())).is_ok()
                    {
                        file.state = State::Loading;
                    }
                }
            }
        }
    }

    fn close_windows(&mut self, now: u64) {
        let engine = &mut self.engine;
        self.closing.retain(|(window, deadline)| match engine.close_window(window, now, *deadline) {
            Err(AccessError::Busy { .. }) => true,
            Err(error) => {
                // Nobody can import it any more; its memory stays taken.
                say(format_args!("a file that changed could not be unmapped: {error}"));
                false
            }
            Ok(()) => false,
        });
    }

    fn take_loaded(&mut self) {
        while let Ok((index, loaded)) = self.loader.results.try_recv() {
            let name = self.files[index].name.clone();
            let state = loaded.and_then(|loaded| self.offer(&name, loaded));
            let file = &mut self.files[index];
            match state {
                Ok(state) => {
                    file.state = state;
                    file.told.clear();
                }
                Err(error) => {
                    file.state = State::Changing(None);
                    file.complain(error);
                }
            }
        }
    }
}
