//! `verbring sim`: random operations through whole engines over a network that fails, against a model of what may happen.

mod area;
mod world;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use verbring_sim::fabric::{FAULTS, Fault};
use verbring_sim::nic::Defect;
use verbring_sim::random::{Random, Ratio};

pub use world::{Report, World};

/// Run random operations of all kinds over a simulated network that fails, and check every promise.
#[derive(Parser, Clone, Debug)]
pub struct Args {
    /// The seed of the first run; without it a fresh one.
    #[arg(long)]
    seed: Option<u64>,
    /// Runs, each with the seed after that of the one before.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Seconds after which no further run begins.
    #[arg(long)]
    seconds: Option<u64>,
    /// Nodes of the network; without it, 2 to 4 by the seed.
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=16))]
    nodes: Option<u32>,
    /// Operations of a run.
    #[arg(long, default_value_t = 20_000)]
    ops: u64,
    /// What goes wrong: none, all, or kinds with commas between: loss, ack-loss, duplicate, reorder, delay, corrupt,
    /// truncate, pause, flap, partition, slow-receiver, crash.
    #[arg(long, default_value = "all")]
    faults: String,
    /// Writes a line for each packet.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Runs again what a trace is of, and compares packet by packet.
    #[arg(long, conflicts_with_all = ["seed", "seeds", "trace", "nodes"])]
    replay: Option<PathBuf>,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Of everything random in it.
    pub seed: u64,
    /// Nodes; none: 2 to 4, by the seed.
    pub nodes: Option<u32>,
    /// Operations.
    pub ops: u64,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// What is wrong with every NIC.
    pub defect: Option<Defect>,
}

impl Options {
    /// A run of a seed, with all faults.
    pub fn new(seed: u64) -> Options {
        Options { seed, nodes: None, ops: 20_000, faults: Fault::ALL.to_vec(), defect: None }
    }

    /// How often each fault happens: by the seed, some often, some seldom, some not at all.
    fn ratios(&self, random: &mut Random) -> [Ratio; FAULTS] {
        let mut ratios = [Ratio::NEVER; FAULTS];
        for fault in &self.faults {
            let is_rare = matches!(
                fault,
                Fault::Pause | Fault::Flap | Fault::Partition | Fault::SlowReceiver | Fault::Crash | Fault::Delay
            );
            let of = match (random.below(3), is_rare) {
                // With one fault alone it does happen.
                (0, _) if self.faults.len() > 1 => continue,
                (1, false) => 20,
                (_, false) => 300,
                (1, true) => 3_000,
                (_, true) => 20_000,
            };
            let of = if *fault == Fault::Crash { of * 5 } else { of };
            ratios[*fault as usize] = Ratio::new(1, of);
        }
        ratios
    }

    /// The command that does it again.
    pub fn command(&self) -> String {
        let nodes = self.nodes.map_or(String::new(), |nodes| format!(" --nodes {nodes}"));
        format!("verbring sim --seed {} --ops {}{nodes} --faults {}", self.seed, self.ops, names(&self.faults))
    }
}

fn names(faults: &[Fault]) -> String {
    match faults.len() {
        0 => "none".into(),
        FAULTS => "all".into(),
        _ => faults.iter().map(|f| f.name()).collect::<Vec<_>>().join(","),
    }
}

fn parse_faults(names: &str) -> Result<Vec<Fault>, String> {
    match names {
        "none" => Ok(Vec::new()),
        "all" => Ok(Fault::ALL.to_vec()),
        names => names
            .split(',')
            .map(|name| {
                Fault::ALL.iter().copied().find(|f| f.name() == name).ok_or_else(|| {
                    let all: Vec<_> = Fault::ALL.iter().map(|f| f.name()).collect();
                    format!("there is no fault {name:?}; choose of none, all, {}", all.join(", "))
                })
            })
            .collect(),
    }
}

/// The first line of a trace.
fn header(options: &Options) -> String {
    format!("# {}", options.command())
}

/// Reads the first line of a trace.
fn options_of(line: &str) -> Option<Options> {
    let words: Vec<&str> = line.strip_prefix("# verbring sim ")?.split(' ').collect();
    let value = |name: &str| words.iter().position(|w| *w == name).and_then(|at| words.get(at + 1)).copied();
    Some(Options {
        seed: value("--seed")?.parse().ok()?,
        nodes: match value("--nodes") {
            None => None,
            Some(nodes) => Some(nodes.parse().ok().filter(|n| (2..=16).contains(n))?),
        },
        ops: value("--ops")?.parse().ok()?,
        faults: parse_faults(value("--faults")?).ok()?,
        defect: None,
    })
}

/// Runs the command.
pub fn run(args: &Args) -> ExitCode {
    match try_run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn try_run(args: &Args) -> Result<(), String> {
    if let Some(path) = &args.replay {
        return replay(path);
    }
    let faults = parse_faults(&args.faults)?;
    let first = args.seed.unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        since.as_nanos() as u64 % 1_000_000_000_000
    });
    let begun = Instant::now();
    let end = args.seconds.map(|seconds| begun + Duration::from_secs(seconds));
    let mut all = Report::default();
    let (mut runs, mut told) = (0, begun);
    for seed in (0..args.seeds).map(|i| first.wrapping_add(i)) {
        let options = Options { seed, nodes: args.nodes, ops: args.ops, faults: faults.clone(), defect: None };
        if args.seeds == 1 || runs == 0 {
            println!("seed {seed}");
        }
        let report = one(&options, args.trace.as_ref())?;
        all.add(&report);
        runs += 1;
        if told.elapsed() > Duration::from_secs(10) {
            told = Instant::now();
            println!("{} runs, {} operations, {} s: seed {seed} done", runs, all.ops, begun.elapsed().as_secs());
            let _ = std::io::stdout().flush();
        }
        if end.is_some_and(|end| Instant::now() >= end) {
            break;
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("{runs} runs, seeds {first} to {}: every promise kept", first.wrapping_add(runs - 1));
    println!("{all}");
    println!("{seconds:.1} s, {:.0} operations a second", all.ops as f64 / seconds);
    Ok(())
}

/// One run, with what it was if it fails.
fn one(options: &Options, trace: Option<&PathBuf>) -> Result<Report, String> {
    let mut world = World::new(options);
    if let Some(path) = trace {
        let file = std::fs::File::create(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut file = std::io::BufWriter::new(file);
        writeln!(file, "{}", header(options)).map_err(|e| format!("{}: {e}", path.display()))?;
        world.trace(Box::new(file));
    }
    world.run().map_err(|what| {
        let command = options.command();
        format!("seed {}: {what}\nto see it again: {command}", options.seed)
    })
}

/// Compares what is written to it with what was written before.
struct Compare {
    expected: std::io::Lines<std::io::BufReader<std::fs::File>>,
    line: Vec<u8>,
    number: u64,
    difference: std::rc::Rc<std::cell::RefCell<Option<String>>>,
}

impl std::io::Write for Compare {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            self.number += 1;
            let line = String::from_utf8_lossy(&self.line).into_owned();
            self.line.clear();
            let expected = self.expected.next().transpose()?.unwrap_or_default();
            let mut difference = self.difference.borrow_mut();
            if expected != line && difference.is_none() {
                *difference = Some(format!("packet {}: expected {expected:?}, and it is {line:?}", self.number));
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn replay(path: &PathBuf) -> Result<(), String> {
    use std::io::BufRead;
    let failed = |what: &str| format!("{}: {what}", path.display());
    let file = std::fs::File::open(path).map_err(|e| failed(&e.to_string()))?;
    let mut expected = std::io::BufReader::new(file).lines();
    let first = expected.next().transpose().map_err(|e| failed(&e.to_string()))?.unwrap_or_default();
    let options = options_of(&first).ok_or_else(|| failed("is no trace of verbring sim"))?;
    let difference = std::rc::Rc::default();
    let mut world = World::new(&options);
    world.trace(Box::new(Compare {
        expected,
        line: Vec::new(),
        number: 0,
        difference: std::rc::Rc::clone(&difference),
    }));
    let outcome = world.run();
    if let Some(difference) = difference.borrow().as_ref() {
        return Err(failed(difference));
    }
    println!("the same packets as in {}", path.display());
    outcome.map(|report| println!("{report}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_its_options() {
        for faults in ["none", "all", "loss,crash"] {
            for nodes in [None, Some(3)] {
                let options = Options { seed: 5, nodes, ops: 77, faults: parse_faults(faults).unwrap(), defect: None };
                assert_eq!(options_of(&header(&options)), Some(options));
            }
        }
        assert!(parse_faults("loss,los").unwrap_err().contains("choose of none"));
    }
}
