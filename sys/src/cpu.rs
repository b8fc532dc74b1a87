//! Which CPUs this process may use, which two suit a pair of pollers, and pinning a thread to one of them.
//!
//! A poller spins: it needs a CPU that nobody else runs on. [`Topology`] reads from sysfs what the kernel knows about
//! the CPUs, [`Topology::pick_pair`] chooses, [`pin`] binds the calling thread.
//!
//! ```no_run
//! use std::path::Path;
//! use verbring_sys::cpu;
//!
//! let topology = cpu::Topology::read(Path::new("/"));
//! if let Some((first, _second)) = topology.pick_pair(cpu::available()) {
//!     cpu::pin(first)?;
//! }
//! # Ok::<(), cpu::CpuError>(())
//! ```
//!
//! CPUs named in `isolcpus=` are not in the affinity mask that programs inherit from init. To use them, start the
//! program with a mask that holds them beside an ordinary one for the threads that are not pinned: `taskset -c 0,2,3`.

use std::collections::BTreeSet;
use std::fmt;
use std::format;
use std::fs;
use std::io;
use std::path::Path;
use std::string::{String, ToString};
use std::sync::OnceLock;
use std::vec::Vec;

use core_affinity::CoreId;

/// CPUs from this number on cannot be pinned to: `cpu_set_t` has 1024 bits (CPU_SET(3)), and `core_affinity` 0.8.3
/// indexes it with no error path, so that a larger number would abort the process.
pub const PINNABLE_CPUS: usize = 1024;

/// CPU numbers from this one on are dropped when a CPU list is parsed. It is the largest NR_CPUS of Linux (x86,
/// MAXSMP), and it bounds the memory that a list such as `0-4000000000` can ask for.
pub const LISTED_CPUS: usize = 8192;

/// NUMA nodes from this number on are not looked at: the largest MAX_NUMNODES of Linux.
const LISTED_NODES: usize = 1024;

/// Why a thread could not be pinned.
#[derive(Debug)]
#[non_exhaustive]
pub enum CpuError {
    /// The CPU is not in the affinity mask that this process was started with.
    NotAllowed {
        /// The CPU asked for.
        cpu: usize,
        /// The CPUs that would have been accepted.
        allowed: &'static [usize],
    },
    /// The number does not fit the kernel's fixed-size CPU set.
    TooLarge {
        /// The CPU asked for.
        cpu: usize,
    },
    /// The affinity mask of this process could not be read, so that no CPU is known to be allowed.
    MaskUnreadable {
        /// The CPU asked for.
        cpu: usize,
    },
    /// The kernel refused a CPU that was allowed when the process started.
    Refused {
        /// The CPU asked for.
        cpu: usize,
        /// What sched_setaffinity(2) answered.
        cause: io::Error,
    },
}

impl fmt::Display for CpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CpuError::NotAllowed { cpu, allowed } => write!(
                f,
                "CPU {cpu} is not in the affinity mask of this process, which allows {mask}: name one of these, or \
                 start the program with `taskset -c {mask},{cpu} ...` (in a container: widen its cpuset)",
                mask = format_cpu_list(allowed)
            ),
            CpuError::TooLarge { cpu } => {
                write!(f, "CPU {cpu} cannot be pinned to: name a CPU below {PINNABLE_CPUS}")
            }
            CpuError::MaskUnreadable { cpu } => write!(
                f,
                "cannot pin to CPU {cpu}: the affinity mask of this process cannot be read (a kernel with more than \
                 {PINNABLE_CPUS} possible CPUs, or a seccomp filter on sched_getaffinity); run without pinning, or \
                 pin from outside with `taskset -c {cpu} ...`"
            ),
            CpuError::Refused { cpu, cause } => write!(
                f,
                "the kernel refused to pin this thread to CPU {cpu} ({cause}): check that the CPU is online \
                 (/sys/devices/system/cpu/online) and still in the cpuset of this process"
            ),
        }
    }
}

impl std::error::Error for CpuError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            CpuError::Refused { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

/// The CPUs that this process may be pinned to, ascending; empty if the kernel does not tell.
///
/// The mask is that of the thread which asks first, and is kept: a pinned thread sees only its own CPU. Call this once
/// at start, before any thread is pinned ([`pin`] calls it as well).
pub fn available() -> &'static [usize] {
    static AVAILABLE: OnceLock<Vec<usize>> = OnceLock::new();
    AVAILABLE.get_or_init(|| {
        let ids = core_affinity::get_core_ids().unwrap_or_default();
        ids.into_iter().map(|core| core.id).collect()
    })
}

/// Binds the calling thread to one CPU. Threads that it starts afterwards inherit the binding.
///
/// # Errors
/// The CPU is too large, not one of [`available`], or the kernel refuses it; the thread then runs where it ran before.
pub fn pin(cpu: usize) -> Result<(), CpuError> {
    if cpu >= PINNABLE_CPUS {
        return Err(CpuError::TooLarge { cpu });
    }
    let allowed = available();
    if allowed.is_empty() {
        return Err(CpuError::MaskUnreadable { cpu });
    }
    if !allowed.contains(&cpu) {
        return Err(CpuError::NotAllowed { cpu, allowed });
    }
    if core_affinity::set_for_current(CoreId { id: cpu }) {
        Ok(())
    } else {
        Err(CpuError::Refused { cpu, cause: io::Error::last_os_error() })
    }
}

/// A NUMA node and its CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The N of `node<N>`.
    pub id: usize,
    /// Its CPUs, ascending; empty for a node of memory only.
    pub cpus: Vec<usize>,
}

/// What sysfs says about the CPUs of a machine. A file that is missing or unreadable leaves its list empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Topology {
    /// CPUs that are running, ascending.
    pub online: Vec<usize>,
    /// CPUs taken out of the scheduler's load balancing (`isolcpus=`), ascending.
    pub isolated: Vec<usize>,
    /// CPUs without a periodic tick while one thread runs (`nohz_full=`), ascending.
    pub nohz_full: Vec<usize>,
    /// NUMA nodes, by ascending id.
    pub nodes: Vec<Node>,
    /// Groups of CPUs that are hardware threads of one core; only groups of two or more.
    pub siblings: Vec<Vec<usize>>,
}

impl Topology {
    /// Reads the topology under `root`, which is `/` except in tests.
    pub fn read(root: &Path) -> Topology {
        let cpus = root.join("sys/devices/system/cpu");
        let online = read_cpu_list(&cpus.join("online"));
        let siblings: BTreeSet<Vec<usize>> = online
            .iter()
            .map(|cpu| read_cpu_list(&cpus.join(format!("cpu{cpu}/topology/thread_siblings_list"))))
            .filter(|group| group.len() > 1)
            .collect();
        Topology {
            isolated: read_cpu_list(&cpus.join("isolated")),
            nohz_full: read_cpu_list(&cpus.join("nohz_full")),
            nodes: read_nodes(&root.join("sys/devices/system/node")),
            siblings: siblings.into_iter().collect(),
            online,
        }
    }

    /// The two CPUs of `allowed` to pin two pollers to that talk to each other; `None` if there are not two.
    ///
    /// Offline CPUs do not count. Of all pairs the best is taken, by these wishes in descending weight:
    /// 1. as many isolated CPUs as possible: a poller that is descheduled stands still for a whole time slice;
    /// 2. both on one NUMA node: the rings between them stay in one socket's caches. CPUs of no known node are taken to
    ///    share one;
    /// 3. not two hardware threads of one core: spinning takes execution units from the other thread.
    ///
    /// Among equals the pair that comes first in `allowed` wins, so that a machine about which nothing is known gives
    /// the first two.
    pub fn pick_pair(&self, allowed: &[usize]) -> Option<(usize, usize)> {
        let traits: Vec<_> = allowed
            .iter()
            .filter(|cpu| self.online.is_empty() || self.online.contains(cpu))
            .map(|&cpu| (cpu, self.isolated.contains(&cpu), self.node_of(cpu), self.core_of(cpu)))
            .collect();
        let mut best = None;
        for (i, &(first, first_isolated, first_node, first_core)) in traits.iter().enumerate() {
            for &(second, second_isolated, second_node, second_core) in &traits[i + 1..] {
                if first == second {
                    continue;
                }
                let same_core = first_core.is_some() && first_core == second_core;
                let isolated = u8::from(first_isolated) + u8::from(second_isolated);
                let score = (isolated, first_node == second_node, !same_core);
                if best.is_none_or(|(best_score, _)| score > best_score) {
                    best = Some((score, (first, second)));
                }
            }
        }
        best.map(|(_, pair)| pair)
    }

    /// The id of the NUMA node that holds `cpu`, if one is known to.
    pub fn node_of(&self, cpu: usize) -> Option<usize> {
        self.nodes.iter().find(|node| node.cpus.contains(&cpu)).map(|node| node.id)
    }

    /// The index in `siblings` of the group that holds `cpu`, if it shares its core.
    fn core_of(&self, cpu: usize) -> Option<usize> {
        self.siblings.iter().position(|group| group.contains(&cpu))
    }
}

/// Parses a CPU list as the kernel prints it, such as `0-3,8,10-11` and a newline; ascending, no duplicates.
///
/// Each part between commas that is not a number or an ascending range (`(null)`, `7-3`, `x`) is ignored, and the
/// others still count. Numbers from [`LISTED_CPUS`] on are dropped, of a range that crosses it only those.
pub fn parse_cpu_list(text: &str) -> Vec<usize> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<usize>(), last.trim().parse::<usize>()) {
            cpus.extend(first..=last.min(LISTED_CPUS - 1));
        }
    }
    cpus.into_iter().collect()
}

/// Prints CPUs the way the kernel does: `0-3,8`; `none` if there are none. `cpus` is ascending.
pub fn format_cpu_list(cpus: &[usize]) -> String {
    if cpus.is_empty() {
        return "none".to_string();
    }
    let runs = cpus.chunk_by(|before, after| before + 1 == *after);
    let parts = runs.map(|run| match run {
        [only] => only.to_string(),
        _ => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    parts.collect::<Vec<_>>().join(",")
}

fn read_cpu_list(path: &Path) -> Vec<usize> {
    fs::read_to_string(path).map(|text| parse_cpu_list(&text)).unwrap_or_default()
}

/// The directories `node<N>` below `path`, in ascending order.
fn read_nodes(path: &Path) -> Vec<Node> {
    let Ok(entries) = fs::read_dir(path) else {
        return Vec::new();
    };
    let mut nodes: Vec<Node> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let id = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            (id < LISTED_NODES).then(|| Node { id, cpus: read_cpu_list(&entry.path().join("cpulist")) })
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    /// Writes the files, given by their path below sys/devices/system, and reads the topology of that tree.
    fn topology(files: &[(&str, &str)]) -> Topology {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join("sys/devices/system").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Topology::read(root.path())
    }

    const TWO_NODES: [(&str, &str); 5] = [
        ("cpu/online", "0-7\n"),
        ("cpu/isolated", "\n"),
        ("cpu/nohz_full", "(null)\n"),
        ("node/node1/cpulist", "1,3,5,7\n"),
        ("node/node0/cpulist", "0,2,4,6\n"),
    ];

    /// Four cores of two threads: 0 and 4, 1 and 5, 2 and 6, 3 and 7.
    const SMT: [(&str, &str); 8] = [
        ("cpu/cpu0/topology/thread_siblings_list", "0,4\n"),
        ("cpu/cpu1/topology/thread_siblings_list", "1,5\n"),
        ("cpu/cpu2/topology/thread_siblings_list", "2,6\n"),
        ("cpu/cpu3/topology/thread_siblings_list", "3,7\n"),
        ("cpu/cpu4/topology/thread_siblings_list", "0,4\n"),
        ("cpu/cpu5/topology/thread_siblings_list", "1,5\n"),
        ("cpu/cpu6/topology/thread_siblings_list", "2,6\n"),
        ("cpu/cpu7/topology/thread_siblings_list", "3,7\n"),
    ];

    #[test]
    fn cpu_lists_are_parsed() {
        assert_eq!(parse_cpu_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_cpu_list("5"), [5]);
        assert_eq!(parse_cpu_list("3,1,2-3\n"), [1, 2, 3]);
        assert!(parse_cpu_list("").is_empty());
        assert!(parse_cpu_list("\n").is_empty());
    }

    #[test]
    fn garbage_in_a_cpu_list_is_ignored_part_by_part() {
        for garbage in ["(null)\n", "x", "-", "3-", "-3", "7-3", "0-31:2/4", "99999999999999999999999", ",,", "\0"] {
            assert!(parse_cpu_list(garbage).is_empty(), "{garbage:?}");
        }
        assert_eq!(parse_cpu_list("1,x,3-4,9-8"), [1, 3, 4]);
    }

    #[test]
    fn huge_ranges_are_cut() {
        assert_eq!(parse_cpu_list("0-4000000000").len(), LISTED_CPUS);
        assert_eq!(parse_cpu_list("8190-4000000000,0-4000000000,8192").len(), LISTED_CPUS);
        assert_eq!(parse_cpu_list("8191-8192"), [8191]);
        assert!(parse_cpu_list("8192").is_empty());
    }

    #[test]
    fn cpu_lists_are_printed_as_they_were_read() {
        for text in ["0", "0-3,8,10-11", "0,2,4"] {
            assert_eq!(format_cpu_list(&parse_cpu_list(text)), text);
        }
        assert_eq!(format_cpu_list(&[]), "none");
    }

    #[test]
    fn one_node_gives_the_first_two() {
        let topology = topology(&[("cpu/online", "0-3\n"), ("node/node0/cpulist", "0-3\n")]);
        assert_eq!(topology.online, [0, 1, 2, 3]);
        assert_eq!(topology.nodes, [Node { id: 0, cpus: vec![0, 1, 2, 3] }]);
        assert_eq!(topology.pick_pair(&[0, 1, 2, 3]), Some((0, 1)));
        assert_eq!(topology.pick_pair(&[2, 3]), Some((2, 3)));
    }

    #[test]
    fn two_nodes_give_a_pair_of_one_node() {
        let topology = topology(&TWO_NODES);
        assert_eq!(topology.nodes[1], Node { id: 1, cpus: vec![1, 3, 5, 7] });
        assert!(topology.isolated.is_empty() && topology.nohz_full.is_empty());
        assert_eq!(topology.pick_pair(&[0, 1, 2, 3]), Some((0, 2)));
        assert_eq!(topology.pick_pair(&[0, 3, 5]), Some((3, 5)));
        assert_eq!(topology.pick_pair(&[0, 1]), Some((0, 1)), "better across nodes than not at all");
    }

    #[test]
    fn isolated_cpus_come_first() {
        let mut files = TWO_NODES;
        files[1].1 = "4-6\n";
        files[2].1 = "4-6\n";
        let topology = topology(&files);
        assert_eq!(topology.isolated, [4, 5, 6]);
        assert_eq!(topology.nohz_full, [4, 5, 6]);
        assert_eq!(topology.pick_pair(&[0, 1, 2, 3, 4, 5, 6, 7]), Some((4, 6)));
        assert_eq!(topology.pick_pair(&[0, 2, 4, 5]), Some((4, 5)), "two isolated before one node");
        assert_eq!(topology.pick_pair(&[0, 1, 5]), Some((1, 5)), "one isolated before none");
    }

    #[test]
    fn hardware_threads_of_one_core_come_last() {
        let topology = topology(&[&SMT[..], &[("cpu/online", "0-7\n")]].concat());
        assert_eq!(topology.siblings, [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(topology.pick_pair(&[0, 4, 1, 5]), Some((0, 1)));
        assert_eq!(topology.pick_pair(&[0, 4]), Some((0, 4)), "better one core than not at all");

        let nodes = [("cpu/online", "0-7\n"), ("node/node0/cpulist", "0,4\n"), ("node/node1/cpulist", "1-3,5-7\n")];
        let topology = self::topology(&[&SMT[..], &nodes].concat());
        assert_eq!(topology.pick_pair(&[0, 1, 4]), Some((0, 4)), "one node before two cores");
    }

    #[test]
    fn missing_files_and_too_few_cpus() {
        let topology = topology(&[]);
        assert_eq!(topology, Topology::default());
        assert_eq!(topology.pick_pair(&[6, 7, 8]), Some((6, 7)));
        assert_eq!(topology.pick_pair(&[6, 6]), None);
        assert_eq!(topology.pick_pair(&[6]), None);
        assert_eq!(topology.pick_pair(&[]), None);
    }

    #[test]
    fn offline_cpus_are_not_picked() {
        let topology = topology(&[("cpu/online", "1-2\n")]);
        assert_eq!(topology.pick_pair(&[0, 1, 2, 3]), Some((1, 2)));
        assert_eq!(topology.pick_pair(&[0, 1]), None);
    }

    #[test]
    fn pinning_takes_one_cpu_and_the_list_stays() {
        let allowed = available().to_vec();
        let last = *allowed.last().expect("the kernel tells the affinity mask");
        // A thread of its own: the pin ends with it.
        std::thread::spawn(move || {
            pin(last).unwrap();
            assert_eq!(core_affinity::get_core_ids().unwrap(), [CoreId { id: last }]);
            assert_eq!(available(), allowed);
            for cpu in allowed {
                pin(cpu).unwrap();
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn refusals_say_what_to_do() {
        for cpu in [PINNABLE_CPUS, usize::MAX] {
            assert!(matches!(pin(cpu), Err(CpuError::TooLarge { .. })));
        }
        let absent = (0..PINNABLE_CPUS).find(|cpu| !available().contains(cpu)).expect("fewer than 1024 CPUs");
        let error = pin(absent).unwrap_err();
        assert!(matches!(error, CpuError::NotAllowed { .. }));
        let mask = format_cpu_list(available());
        assert!(error.to_string().contains(&format!("allows {mask}:")), "{error}");
        assert!(error.to_string().contains(&format!("taskset -c {mask},{absent}")), "{error}");
    }
}
