//! `verbring perf`: what one-sided communication costs on this machine, between two processes on two cores, with every
//! byte verified.
//!
//! The origin measures, the target is measured against. By default the target is a child process; with `--listen` and
//! `--connect` the two are started by hand, over UDP on two hosts. See `definitions.rs` for what is measured, `ends.rs` for what the ends say to
//! each other, `measure.rs` for how it is timed.

mod child;
mod courier;
mod definitions;
mod device;
mod ends;
mod measure;
mod origin;
mod pattern;
mod report;
mod rows;
mod target;

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use verbring::{DeviceError, PushError, Shm, Status, WaitError};
use verbring_sim::udp::UdpDevice;
use verbring_sys::cpu::{self, CpuError, Topology};

use child::Counterpart;
use definitions::{HUNDRED, Test, parse_test};
use device::{Address, Measured, Tuning};
use ends::End;
use origin::Origin;
use report::{Report, Setting};
use rows::{LARGEST_BATCH, Row, parse_size};

/// The most `--iters`.
const LARGEST_ITERS: u64 = 10_000_000;
/// How long `--listen` waits for the other end.
const LISTEN: Duration = Duration::from_secs(600);
/// How long `--connect` tries: the other terminal may be a moment behind.
const CONNECT: Duration = Duration::from_secs(3);
/// How long a child may take to start.
const START: Duration = Duration::from_secs(20);

/// The arguments of `verbring perf`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What to measure, repeatable or with commas; all if not given (see --explain)
    #[arg(long, value_name = "TEST", value_delimiter = ',', value_parser = parse_test)]
    test: Vec<&'static Test>,
    /// Bytes of a message, repeatable or with commas: 8, 4k, 1m, 100m; each test's own sizes if not given
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = parse_size)]
    size: Vec<u32>,
    /// Operations, windows or batches of each row, in blocks and again one by one; about 0.6 s a row if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=LARGEST_ITERS))]
    iters: Option<u64>,
    /// Operations of a window in put_rate, put_bw, put_bw_hot, get_bw; one walk over the slots if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(LARGEST_BATCH)))]
    batch: Option<u32>,
    /// The CPUs of origin and target, such as 0,1, or none to leave the threads where they are
    #[arg(long, value_name = "A,B", value_parser = Cores::parse)]
    cores: Option<Cores>,
    /// What moves the bytes: shm, or udp:ADDR, with the address of this host that this end is to have
    #[arg(long, value_name = "DEVICE", default_value = "shm", value_parser = parse_device)]
    device: DeviceName,
    /// Be the target of one run, under this address (shm:NAME), or at that of --device udp:ADDR
    #[arg(long, value_name = "ADDR", value_parser = Address::parse, num_args = 0..=1,
        conflicts_with_all = ["connect", "test", "size", "iters", "batch", "json"])]
    listen: Option<Option<Address>>,
    /// Measure against a target that listens under this address (shm:NAME, udp:ADDR)
    #[arg(long, value_name = "ADDR", value_parser = Address::parse)]
    connect: Option<Address>,
    /// Over udp: bytes of a payload, 256, 512, 1024, 2048 or 4096; what the interface takes if not given
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u32>,
    /// Over udp: hand the kernel each packet by itself
    #[arg(long)]
    no_offload: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    /// Print what every test is, and measure nothing
    #[arg(long)]
    explain: bool,
    /// The process that this one is the target of
    #[arg(long, value_name = "PID", hide = true, requires = "listen")]
    child_of: Option<u32>,
}

/// Where the two ends run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cores {
    /// Wherever the kernel likes.
    Free,
    /// Origin and target.
    Pinned(usize, usize),
}

impl Cores {
    fn parse(text: &str) -> Result<Cores, String> {
        if text == "none" {
            return Ok(Cores::Free);
        }
        let parts = text.split_once(',').map(|(a, b)| (a.trim().parse(), b.trim().parse()));
        match parts {
            Some((Ok(a), Ok(b))) => Ok(Cores::Pinned(a, b)),
            _ => Err("two CPU numbers with a comma between, such as 0,1, or none".to_string()),
        }
    }

    /// The best two for a pair of pollers; one for both if there is one only.
    fn pick() -> Cores {
        let available = cpu::available();
        match Topology::read(Path::new("/")).pick_pair(available) {
            Some((a, b)) => Cores::Pinned(a, b),
            None => available.first().map_or(Cores::Free, |only| Cores::Pinned(*only, *only)),
        }
    }

    /// Whether the ends cannot run at the same time.
    fn is_one(self) -> bool {
        match self {
            Cores::Free => cpu::available().len() == 1,
            Cores::Pinned(a, b) => a == b,
        }
    }

    fn origin(self) -> Option<usize> {
        if let Cores::Pinned(a, _) = self { Some(a) } else { None }
    }

    fn target(self) -> Option<usize> {
        if let Cores::Pinned(_, b) = self { Some(b) } else { None }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cores::Free => f.write_str("none"),
            Cores::Pinned(a, b) => write!(f, "{a},{b}"),
        }
    }
}

/// What `--device` says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DeviceName {
    Shm,
    Udp(IpAddr),
}

fn parse_device(name: &str) -> Result<DeviceName, String> {
    let ip = || name.strip_prefix("udp:")?.parse().ok().map(DeviceName::Udp);
    if name == "shm" { Some(DeviceName::Shm) } else { ip() }.ok_or_else(|| {
        "there is no such device; there are shm, and udp:ADDR with an IP address of this host, such as udp:192.0.2.1"
            .to_string()
    })
}

/// Where the two ends are.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Ends {
    /// This is the target, and is here.
    Target(Address),
    /// This is the origin; then where the target is.
    Origin(Address, Address),
    /// The target is a child.
    Both(Address, Address),
}

impl Ends {
    fn plan(args: &Args) -> Result<Ends, PerfError> {
        let plan = |what: &str| Err(PerfError::Plan(what.to_string()));
        let own = match args.device {
            DeviceName::Udp(ip) => Some(Address::Udp(ip)),
            DeviceName::Shm => None,
        };
        let name = || format!("perf-{}-{:016x}", std::process::id(), random());
        match (&args.listen, &args.connect, own) {
            (Some(None), _, None) => {
                plan("--listen needs an address: --listen shm:NAME, or --device udp:ADDR --listen")
            }
            (Some(None), _, Some(own)) => Ok(Ends::Target(own)),
            (Some(Some(at)), _, Some(own)) if *at != own => {
                plan("--listen and --device name two addresses of this end")
            }
            (Some(Some(at)), ..) => Ok(Ends::Target(at.clone())),
            (None, Some(Address::Udp(_)), None) => {
                plan("over udp this end needs an address, too: --device udp:ADDR, one that the other end can reach")
            }
            (None, Some(to), own) => {
                let own = own.unwrap_or_else(|| Address::Shm(name()));
                if own.is_like(to) { Ok(Ends::Origin(own, to.clone())) } else { plan("the two ends need one device") }
            }
            (None, None, None) => Ok(Ends::Both(Address::Shm(name()), Address::Shm(name()))),
            // The loopback interface has many addresses.
            (None, None, Some(Address::Udp(IpAddr::V4(ip)))) if ip.is_loopback() => {
                let [a, b, c, d] = ip.octets();
                Ok(Ends::Both(Address::Udp(ip.into()), Address::Udp([a, b, c, d ^ 3].into())))
            }
            (None, None, Some(own)) => Err(PerfError::Plan(format!(
                "over udp the two ends are started by hand, the target first: verbring perf --device udp:ADDR --listen; \
                 then here: verbring perf --device {own} --connect ADDR"
            ))),
        }
    }
}

/// A number that nobody else has.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Why a run ended early.
#[derive(Debug)]
#[non_exhaustive]
pub(crate) enum PerfError {
    /// What was asked for cannot be done.
    Plan(String),
    /// A core cannot be had.
    Cpu(CpuError),
    /// A call of the engine failed.
    Engine(WaitError),
    /// An entry was not taken.
    Push(PushError),
    /// An operation failed.
    Operation(Status),
    /// The connection is gone.
    Lost(DeviceError),
    /// The other end does not go on.
    Silent {
        /// What it did not do.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// The other end is of another version.
    Version {
        /// Theirs.
        theirs: u64,
        /// Ours.
        ours: u64,
    },
    /// The other end says what makes no sense.
    Protocol(&'static str),
    /// The output cannot be written.
    Output(io::Error),
    /// What has a sentence of its own.
    Other(String),
}

impl fmt::Display for PerfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PerfError::Plan(what) | PerfError::Other(what) => f.write_str(what),
            PerfError::Cpu(error) => error.fmt(f),
            PerfError::Engine(error) => error.fmt(f),
            PerfError::Push(error) => error.fmt(f),
            PerfError::Operation(status) => write!(f, "an operation failed: {status}"),
            PerfError::Lost(cause) => write!(f, "the connection is lost: {cause}"),
            PerfError::Silent { what, after } => {
                write!(
                    f,
                    "the other end did not {what} within {} s; is it stopped, starved, or busy with another run?",
                    after.as_secs()
                )
            }
            PerfError::Version { theirs, ours } => {
                write!(
                    f,
                    "the other end's perf is of version {theirs}, this one of {ours}; use one release on both ends"
                )
            }
            PerfError::Protocol(what) => {
                write!(f, "the other end broke the protocol ({what}); is it `verbring perf` of the same release?")
            }
            PerfError::Output(error) => write!(f, "the output cannot be written: {error}"),
        }
    }
}

impl From<WaitError> for PerfError {
    fn from(error: WaitError) -> PerfError {
        PerfError::Engine(error)
    }
}

/// Whether the bytes were right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    /// At this offset of the window they were not.
    WrongAt(usize),
}

impl From<Option<usize>> for Verdict {
    fn from(wrong: Option<usize>) -> Verdict {
        wrong.map_or(Verdict::Right, Verdict::WrongAt)
    }
}

/// Runs `verbring perf`. The exit code is 0 if all was measured and verified, 2 for what cannot be asked, else 1.
pub(crate) fn run(args: &Args) -> ExitCode {
    let outcome = if args.explain {
        report::explain().map(|()| true).map_err(PerfError::Output)
    } else {
        Ends::plan(args).and_then(|ends| match &ends {
            Ends::Target(Address::Shm(_)) => listen::<Shm>(args, &ends),
            Ends::Target(Address::Udp(_)) => listen::<UdpDevice>(args, &ends),
            Ends::Origin(Address::Shm(_), _) | Ends::Both(Address::Shm(_), _) => measure_all::<Shm>(args, &ends),
            Ends::Origin(Address::Udp(_), _) | Ends::Both(Address::Udp(_), _) => measure_all::<UdpDevice>(args, &ends),
        })
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(PerfError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        // A child that is left says nothing: its parent knows why.
        Err(PerfError::Lost(_) | PerfError::Operation(_)) if args.child_of.is_some() => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(if matches!(error, PerfError::Plan(_)) { 2 } else { 1 })
        }
    }
}

impl Args {
    fn tuning(&self) -> Tuning {
        Tuning { mtu: self.mtu, offload: !self.no_offload }
    }
}

/// The target's whole life.
fn listen<D: Measured>(args: &Args, ends: &Ends) -> Result<bool, PerfError> {
    let (Ends::Target(at) | Ends::Origin(_, at) | Ends::Both(_, at)) = ends;
    if let Some(parent) = args.child_of {
        child::die_with_parent(parent)?;
    }
    // Before the pin: a pinned thread sees its own core only.
    let cores = args.cores.unwrap_or_else(Cores::pick);
    let mut end = End::<D>::open(at, cores.target(), HUNDRED, args.tuning())?;
    end.yields = cores.is_one();
    if args.child_of.is_some() {
        return target::serve(end, cores.target(), START).map(|()| true);
    }
    let own = if let Address::Udp(_) = at { "--device udp:ADDR " } else { "" };
    eprintln!("listening for {} min; start the other end: verbring perf {own}--connect {at}", LISTEN.as_secs() / 60);
    target::serve(end, cores.target(), LISTEN).map(|()| true)
}

/// The origin's whole life: whether all was verified.
fn measure_all<D: Measured>(args: &Args, ends: &Ends) -> Result<bool, PerfError> {
    let rows = rows::plan(&args.test, &args.size, args.batch).map_err(PerfError::Plan)?;
    check_memory(&rows)?;
    let cores = args.cores.unwrap_or_else(Cores::pick);
    let (Ends::Origin(own, to) | Ends::Both(own, to)) = ends else {
        return Err(PerfError::Plan("a target measures nothing".to_string()));
    };
    // The child goes first: a pin would be inherited.
    let mut child = match ends {
        Ends::Both(..) => Some(Counterpart::start(to, cores, args.tuning())?),
        _ => None,
    };
    let outcome = origin::<D>(args, &rows, cores, [own, to], child.as_mut());
    let Some(child) = &mut child else { return outcome };
    match outcome {
        Ok(is_verified) => match child.join() {
            Some(status) if status.success() => Ok(is_verified),
            Some(status) => Err(PerfError::Other(child::describe(status))),
            None => Err(PerfError::Other("the other end did not end when it was told to, and was killed".to_string())),
        },
        // What this end saw of the other one's end is not the cause of it.
        Err(error @ (PerfError::Lost(_) | PerfError::Operation(_) | PerfError::Engine(WaitError::Lost(_)))) => {
            match child.join() {
                Some(status) => Err(PerfError::Other(format!("{}; here: {error}", child::describe(status)))),
                None => Err(error),
            }
        }
        Err(error) => Err(error),
    }
}

fn origin<D: Measured>(
    args: &Args,
    rows: &[Row],
    cores: Cores,
    [own, to]: [&Address; 2],
    child: Option<&mut Counterpart>,
) -> Result<bool, PerfError> {
    let batch = rows.iter().map(|row| row.batch).max().unwrap_or(1);
    let mut end = End::<D>::open(own, cores.origin(), batch, args.tuning())?;
    end.yields = cores.is_one();
    match child {
        Some(child) => end.connect(to, START, || match child.end() {
            Some(status) => Err(PerfError::Other(child::describe(status))),
            None => Ok(()),
        })?,
        None => end.connect(to, CONNECT, || Ok(()))?,
    }
    let seed = random();
    let mut origin = Origin::meet(end, cores.origin(), rows, seed)?;
    let core = |core: Option<usize>| core.map_or("none".to_string(), |core| core.to_string());
    let setting = Setting {
        device: D::NAME,
        cores: format!("{},{}", core(cores.origin()), core(origin.their_core)),
        pages: origin.pages.clone(),
        yields: origin.yields(),
    };
    if setting.yields {
        eprintln!("both ends share one core and yield to each other: latencies are those of the scheduler");
    }
    let report = Report { is_json: args.json, setting };
    report.begin().map_err(PerfError::Output)?;
    let mut is_verified = true;
    for row in rows {
        let figures = origin.measure(row, args.iters)?;
        report.row(&figures).map_err(PerfError::Output)?;
        if let Verdict::WrongAt(offset) = figures.verdict {
            is_verified = false;
            let Row { test, layout, .. } = row;
            eprintln!("{} of {} bytes: the byte at {offset} is wrong (seed {seed:#x})", test.name, layout.size);
        }
    }
    report.end(origin.wire()).map_err(PerfError::Output)?;
    origin.part()?;
    Ok(is_verified)
}

/// Says that memory is short before the kernel kills somebody for it.
fn check_memory(rows: &[Row]) -> Result<(), PerfError> {
    let (own, target) = origin::sizes(rows);
    let needed = own.inbox + own.outbox + target.inbox + target.outbox;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    match kib {
        Some(kib) if needed > kib << 10 => Err(PerfError::Plan(format!(
            "the two ends need {} MiB of memory for these sizes, and {} MiB are available; choose a smaller --size",
            needed >> 20,
            kib >> 10
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(arguments: &str) -> Result<Args, String> {
        let words = std::iter::once("perf").chain(arguments.split_whitespace());
        <Cli as clap::Parser>::try_parse_from(words).map(|cli| cli.args).map_err(|error| error.to_string())
    }

    #[test]
    fn arguments() {
        let args = parse("--test put_lat,fadd --test put_bw --size 8,4k --size 1m --cores 2,3 --iters 5").unwrap();
        assert_eq!(args.test.iter().map(|test| test.name).collect::<Vec<_>>(), ["put_lat", "fadd", "put_bw"]);
        assert_eq!((args.size, args.cores, args.iters), (vec![8, 4096, 1 << 20], Some(Cores::Pinned(2, 3)), Some(5)));
        assert_eq!((args.device, args.json, args.listen), (DeviceName::Shm, false, None));
        let connect = parse("--connect shm:a.b-c_1").unwrap().connect;
        assert_eq!(connect, Some(Address::Shm("a.b-c_1".into())));
    }

    #[test]
    fn where_the_ends_are() {
        let plan = |arguments: &str| Ends::plan(&parse(arguments).unwrap()).map_err(|error| error.to_string());
        let at = |address: &str| Address::parse(address).unwrap();
        assert_eq!(plan("--listen shm:a"), Ok(Ends::Target(at("shm:a"))));
        assert_eq!(plan("--device udp:::1 --listen"), Ok(Ends::Target(at("::1"))));
        assert_eq!(plan("--listen udp:10.0.0.1"), Ok(Ends::Target(at("10.0.0.1"))));
        let ends = Ok(Ends::Origin(at("10.0.0.2"), at("10.0.0.1")));
        assert_eq!(plan("--device udp:10.0.0.2 --connect 10.0.0.1"), ends);
        assert_eq!(plan("--device udp:127.0.0.1"), Ok(Ends::Both(at("127.0.0.1"), at("127.0.0.2"))));
        assert!(matches!(plan(""), Ok(Ends::Both(Address::Shm(a), Address::Shm(b))) if a != b));
        for (arguments, expected) in [
            ("--listen", "--listen shm:NAME"),
            ("--connect 10.0.0.1", "--device udp:ADDR"),
            ("--device udp:10.0.0.1", "--device udp:ADDR --listen"),
            ("--device udp:10.0.0.1 --connect shm:a", "one device"),
            ("--device udp:10.0.0.1 --listen 10.0.0.2", "two addresses"),
        ] {
            let error = plan(arguments).unwrap_err();
            assert!(error.contains(expected), "{arguments}: {error}");
        }
    }

    #[test]
    fn refusals_say_what_is_right() {
        for (arguments, expected) in [
            ("--test put_latency", "there are put_lat,"),
            ("--size 0", "a number from 1 to"),
            ("--size 2g", "a number from 1 to"),
            ("--iters 0", "1..="),
            ("--batch 16385", "1..=16384"),
            ("--cores 1", "such as 0,1"),
            ("--device verbs", "there are shm"),
            ("--device udp:here", "udp:ADDR"),
            ("--listen name", "an address is shm:NAME"),
            ("--connect tcp:1.2.3.4", "an address is shm:NAME"),
            ("--connect shm:", "an address is shm:NAME"),
            ("--connect shm:a/b", "an address is shm:NAME"),
            ("--listen shm:a --connect shm:b", "cannot be used with"),
            ("--listen shm:a --test fadd", "cannot be used with"),
        ] {
            let error = parse(arguments).unwrap_err();
            assert!(error.contains(expected), "{arguments}: {error}");
        }
    }

    #[test]
    fn cores() {
        for text in ["none", "0,1", "7,7"] {
            assert_eq!(Cores::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Cores::parse("1, 2"), Ok(Cores::Pinned(1, 2)));
        for bad in ["", "0", "0,1,2", "a,b", "-1,0", "None"] {
            assert!(Cores::parse(bad).is_err(), "{bad}");
        }
        assert!(Cores::Pinned(4, 4).is_one() && !Cores::Pinned(4, 5).is_one());
    }
}
