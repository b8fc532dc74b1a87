//! `verbring doctor`: what of this machine helps or hurts the engine, each line with the remedy.
//!
//! It only looks, and advises: nothing is changed, and the exit code is 0 whatever it found. [`examine`] reads sysfs
//! and procfs below a root and takes the process limits as an argument, so that the tests give it whole machines as
//! directory trees.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use verbring_sys::cpu::{Topology, format_cpu_list, parse_cpu_list};

/// Free 2 MiB pages a node should have: 128 MiB for the rings and the memory segment of two engines.
const WANTED_PAGES: u64 = 64;

/// Bytes a process should be able to lock: the same 128 MiB.
const WANTED_LOCKED: u64 = WANTED_PAGES * (2 << 20);

/// Wake-up times of idle CPUs above this many microseconds are worth a remedy: they are longer than a round trip on
/// RDMA hardware.
const LONG_WAKEUP_US: u64 = 10;

/// The arguments of `verbring doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print one JSON object a line: topic, verdict (good, fair, bad, unknown), found, remedy
    #[arg(long)]
    json: bool,
    /// Look below this directory instead of /
    #[arg(long, default_value = "/", hide = true)]
    root: PathBuf,
}

/// How far a finding is from what the engine wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing to do.
    Good,
    /// Works, with a cost that the remedy takes away.
    Fair,
    /// Costs much, or makes something fail.
    Bad,
    /// The machine does not tell.
    Unknown,
}

/// One line of advice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// What was looked at.
    pub(crate) topic: &'static str,
    /// How good it is.
    pub(crate) verdict: Verdict,
    /// What was seen.
    pub(crate) found: String,
    /// What to do, where something can be done: a command, or the setting to change.
    pub(crate) remedy: Option<String>,
}

/// The limits of this process that no file below the root tells.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Soft RLIMIT_MEMLOCK in bytes; `None` is unlimited.
    pub(crate) memlock_soft: Option<u64>,
    /// Hard RLIMIT_MEMLOCK in bytes; `None` is unlimited.
    pub(crate) memlock_hard: Option<u64>,
    /// Whether CAP_IPC_LOCK is in effect; `None` if the kernel did not tell.
    pub(crate) ipc_lock: Option<bool>,
}

impl Limits {
    /// The limits of the calling process.
    pub(crate) fn of_this_process() -> Limits {
        let memlock = getrlimit(Resource::Memlock);
        Limits {
            memlock_soft: memlock.current,
            memlock_hard: memlock.maximum,
            ipc_lock: capabilities(None).ok().map(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK)),
        }
    }
}

/// Runs `verbring doctor`. The exit code is 0 if it could look, 2 if the root is no directory.
pub(crate) fn run(args: &Args) -> ExitCode {
    if !args.root.is_dir() {
        eprintln!("error: --root {} is not a directory", args.root.display());
        return ExitCode::from(2);
    }
    let findings = examine(&args.root, Limits::of_this_process());
    let text = if args.json { json_lines(&findings) } else { table(&findings) };
    // A reader that closes the pipe early (`| head`) has seen what it wanted.
    let _ = io::stdout().lock().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// Looks at everything below `root`. A file that is missing makes a finding unknown, never an error.
pub(crate) fn examine(root: &Path, limits: Limits) -> Vec<Finding> {
    let machine = Machine::new(root);
    let mut findings = machine.huge_pages();
    findings.extend([
        machine.transparent_huge_pages(),
        machine.shared_memory_huge_pages(),
        machine.memlock(limits),
        machine.cpus(),
        machine.cpu_quota(),
        machine.isolation(),
        machine.tick(),
        machine.hardware_threads(),
        machine.governor(),
        machine.turbo(),
        machine.idle_states(),
        machine.clock_source(),
        machine.numa(),
        machine.numa_balancing(),
        machine.ptrace_scope(),
        machine.rdma_devices(),
    ]);
    findings
}

/// The findings as an aligned table, remedies below their line.
fn table(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.topic.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { topic, verdict, found, remedy } in findings {
        let word = match verdict {
            Verdict::Good => "ok",
            Verdict::Fair => "fair",
            Verdict::Bad => "BAD",
            Verdict::Unknown => "?",
        };
        text.push_str(&format!("{word:<4}  {topic:<width$}  {found}\n"));
        if let Some(remedy) = remedy {
            text.push_str(&format!("      -> {remedy}\n"));
        }
    }
    text
}

/// The findings as one JSON object a line.
fn json_lines(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { topic, verdict, found, remedy } in findings {
        let verdict = match verdict {
            Verdict::Good => "good",
            Verdict::Fair => "fair",
            Verdict::Bad => "bad",
            Verdict::Unknown => "unknown",
        };
        let object = serde_json::json!({ "topic": topic, "verdict": verdict, "found": found, "remedy": remedy });
        text.push_str(&format!("{object}\n"));
    }
    text
}

fn good(topic: &'static str, found: impl Into<String>) -> Finding {
    Finding { topic, verdict: Verdict::Good, found: found.into(), remedy: None }
}

fn fair(topic: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { topic, verdict: Verdict::Fair, found: found.into(), remedy: Some(remedy.into()) }
}

fn bad(topic: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { topic, verdict: Verdict::Bad, found: found.into(), remedy: Some(remedy.into()) }
}

fn unknown(topic: &'static str, found: impl Into<String>) -> Finding {
    Finding { topic, verdict: Verdict::Unknown, found: found.into(), remedy: None }
}

/// The tree that is looked at, and what several topics ask of it.
struct Machine<'a> {
    root: &'a Path,
    topology: Topology,
    /// CPUs in the affinity mask of this process that are online.
    allowed: Vec<usize>,
    /// The CPUs that two pollers would be pinned to.
    pair: Option<(usize, usize)>,
}

impl Machine<'_> {
    fn new(root: &Path) -> Machine<'_> {
        let topology = Topology::read(root);
        let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let mut allowed = mask.map(parse_cpu_list).unwrap_or_default();
        // The mask of a process that was never bound also names CPUs which are not there.
        allowed.retain(|cpu| topology.online.is_empty() || topology.online.contains(cpu));
        let pair = topology.pick_pair(&allowed);
        Machine { root, topology, allowed, pair }
    }

    /// The trimmed text of a file; `None` if it is missing or unreadable.
    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    fn read_number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// The names in a directory, sorted; empty if it is missing.
    fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(path)).into_iter().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    fn is_virtual(&self) -> bool {
        let cpuinfo = self.read("proc/cpuinfo").unwrap_or_default();
        let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
    }

    /// Where nothing can be read, a virtual machine is a better explanation than none.
    fn left_to_host(&self, topic: &'static str, what: &str) -> Finding {
        let why = if self.is_virtual() { "this is a virtual machine, the host decides" } else { "not readable" };
        unknown(topic, format!("no {what}: {why}"))
    }

    fn huge_pages(&self) -> Vec<Finding> {
        let mut pools: Vec<(String, String)> = Vec::new();
        for node in &self.topology.nodes {
            pools.push((format!("node {}", node.id), format!("sys/devices/system/node/node{}/hugepages", node.id)));
        }
        if pools.is_empty() {
            pools.push(("no NUMA node".to_owned(), "sys/kernel/mm/hugepages".to_owned()));
        }
        let small = pools.iter().map(|(node, pool)| self.pages_of_2_mib(node, pool));
        let large = pools.iter().map(|(node, pool)| self.pages_of_1_gib(node, pool));
        small.chain(large).collect()
    }

    fn pages_of_2_mib(&self, node: &str, pool: &str) -> Finding {
        let topic = "huge pages 2 MiB";
        let Some((total, free)) = self.pages(pool, 2048) else {
            return unknown(topic, format!("{node}: this kernel shows none"));
        };
        let found = format!("{node}: {total} reserved, {free} free");
        if free >= WANTED_PAGES {
            return good(topic, found);
        }
        let wanted = total.saturating_add(WANTED_PAGES - free);
        let remedy = format!(
            "echo {wanted} > /{pool}/hugepages-2048kB/nr_hugepages  (gives {WANTED_PAGES} free; early after boot, or \
             hugepages={wanted} on the kernel command line)"
        );
        if free == 0 { bad(topic, found, remedy) } else { fair(topic, found, remedy) }
    }

    fn pages_of_1_gib(&self, node: &str, pool: &str) -> Finding {
        let topic = "huge pages 1 GiB";
        match self.pages(pool, 1 << 20) {
            None => unknown(topic, format!("{node}: this kernel shows none")),
            Some((total, 0)) => fair(
                topic,
                format!("{node}: {total} reserved, 0 free"),
                "needed only for segments of many GiB: hugepagesz=1G hugepages=<count> on the kernel command line",
            ),
            Some((total, free)) => good(topic, format!("{node}: {total} reserved, {free} free")),
        }
    }

    /// Pages in total and free of one size, in KiB, in one pool.
    fn pages(&self, pool: &str, size: u64) -> Option<(u64, u64)> {
        let pool = format!("{pool}/hugepages-{size}kB");
        Some((self.read_number(&format!("{pool}/nr_hugepages"))?, self.read_number(&format!("{pool}/free_hugepages"))?))
    }

    fn transparent_huge_pages(&self) -> Finding {
        let (topic, path) = ("transparent huge pages", "sys/kernel/mm/transparent_hugepage/enabled");
        match self.read(path).as_deref().and_then(selected) {
            None => unknown(topic, "this kernel shows no setting"),
            Some("never") => {
                fair(topic, "never: private memory stays in 4 KiB pages", format!("echo madvise > /{path}"))
            }
            Some(mode) => good(topic, mode),
        }
    }

    fn shared_memory_huge_pages(&self) -> Finding {
        let (topic, path) = ("THP in shared memory", "sys/kernel/mm/transparent_hugepage/shmem_enabled");
        let remedy = || format!("echo advise > /{path}  (matters only where 2 MiB huge pages run out)");
        match self.read(path).as_deref().and_then(selected) {
            None => unknown(topic, "this kernel shows no setting"),
            Some("deny") => bad(topic, "deny: shared memory stays in 4 KiB pages", remedy()),
            Some("never") => fair(topic, "never: huge only where the engine collapses pages itself", remedy()),
            Some(mode) => good(topic, mode),
        }
    }

    fn memlock(&self, limits: Limits) -> Finding {
        let topic = "memory lock limit";
        let reaches = |limit: Option<u64>| limit.is_none_or(|bytes| bytes >= WANTED_LOCKED);
        let found = format!("soft {}, hard {}", in_kib(limits.memlock_soft), in_kib(limits.memlock_hard));
        if reaches(limits.memlock_soft) {
            return good(topic, found);
        }
        let mut why_not = "no CAP_IPC_LOCK";
        match limits.ipc_lock {
            // The kernel asks for the capability in the first user namespace, whose map is the identity (capable(), as
            // opposed to ns_capable()); root of a rootless container shows it and does not have it.
            Some(true) if self.in_user_namespace() => why_not = "CAP_IPC_LOCK counts for nothing in a user namespace",
            Some(true) => return good(topic, format!("{found}; CAP_IPC_LOCK lifts it")),
            Some(false) => {}
            None => why_not = "CAP_IPC_LOCK not readable",
        }
        let found = format!("{found}; {why_not}");
        if reaches(limits.memlock_hard) {
            let most = limits.memlock_hard.map_or("unlimited".to_owned(), |bytes| (bytes / 1024).to_string());
            return fair(topic, found, format!("ulimit -l {most}"));
        }
        let remedy = format!(
            "registering memory with an RDMA device will fail above the limit; wanted {} KiB: `* - memlock unlimited` \
             in /etc/security/limits.conf and a new login, LimitMEMLOCK=infinity in the systemd unit, or --ulimit \
             memlock=-1 for a container",
            WANTED_LOCKED / 1024
        );
        bad(topic, found, remedy)
    }

    fn in_user_namespace(&self) -> bool {
        let map = self.read("proc/self/uid_map");
        map.is_some_and(|map| !map.split_whitespace().eq(["0", "0", "4294967295"]))
    }

    fn cpus(&self) -> Finding {
        let topic = "cpus";
        let count = self.allowed.len();
        let found = format!("{count} allowed ({})", format_cpu_list(&self.allowed));
        match self.pair {
            _ if count == 0 => unknown(topic, "the affinity mask is not readable"),
            None => bad(topic, found, "two pollers on one CPU wait for each other: allow this process a second CPU"),
            Some((first, second)) if count == 2 => fair(
                topic,
                format!("{found}; a pair of pollers takes {first} and {second}"),
                "the pollers leave no CPU for the rest: keep other load away, or allow a third CPU",
            ),
            Some((first, second)) => good(topic, format!("{found}; a pair of pollers takes {first} and {second}")),
        }
    }

    /// A poller uses its CPU fully: a quota below the CPUs it runs on stops it for the rest of each period.
    fn cpu_quota(&self) -> Finding {
        let topic = "cpu quota";
        let Some(memberships) = self.read("proc/self/cgroup").filter(|text| !text.is_empty()) else {
            return unknown(topic, "the control groups are not readable");
        };
        let quotas = memberships.lines().flat_map(|line| self.quotas(line));
        let Some((tenths, file)) = quotas.min() else {
            return good(topic, "none that this process can see");
        };
        let found = format!("{}.{} CPUs, by /{file}", tenths / 10, tenths % 10);
        if tenths >= 10 * self.allowed.len() as u64 {
            return good(topic, found);
        }
        let verdict = if tenths < 20 { bad } else { fair };
        verdict(
            topic,
            format!("{found}: pollers that use it up are stopped for the rest of the period"),
            "lift the quota (CPUQuota= of systemd, --cpus of a container), or give a cpuset instead",
        )
    }

    /// The CPU quotas on the way from a control group to its root, in tenths of a CPU, each with the file that sets it.
    /// `membership` is a line of /proc/self/cgroup, `id:controllers:path` (cgroups(7)).
    fn quotas(&self, membership: &str) -> Vec<(u64, String)> {
        let mut fields = membership.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            return Vec::new();
        };
        // The unified hierarchy names no controllers.
        let (mount, name) = match controllers {
            "" => ("sys/fs/cgroup", "cpu.max"),
            _ if controllers.split(',').any(|controller| controller == "cpu") => {
                ("sys/fs/cgroup/cpu", "cpu.cfs_quota_us")
            }
            _ => return Vec::new(),
        };
        let groups = Path::new(path.trim_start_matches('/')).ancestors();
        let quota_of = |group: &Path| {
            let file = Path::new(mount).join(group).join(name).display().to_string();
            let text = self.read(&file)?;
            // No quota is "max" in version 2 and -1 in version 1: neither parses.
            let (quota, period): (u64, u64) = match text.split_once(' ') {
                Some((quota, period)) => (quota.parse().ok()?, period.parse().ok()?),
                None => (text.parse().ok()?, self.read_number(&file.replace("cfs_quota", "cfs_period"))?),
            };
            Some((quota.saturating_mul(10).checked_div(period)?, file))
        };
        groups.filter_map(quota_of).collect()
    }

    fn isolation(&self) -> Finding {
        let topic = "isolated cpus";
        let isolated = &self.topology.isolated;
        let list = format_cpu_list(isolated);
        if !self.exists("sys/devices/system/cpu/isolated") {
            unknown(topic, "this kernel does not tell")
        } else if isolated.is_empty() {
            fair(topic, "none: other tasks may interrupt a poller", self.boot_line())
        } else if !isolated.iter().any(|cpu| self.allowed.contains(cpu)) {
            // Programs inherit from init a mask without the isolated CPUs. The ordinary ones stay in it, for the
            // threads that are not pinned: nothing balances load among isolated CPUs.
            let mut mask = [self.allowed.as_slice(), isolated].concat();
            mask.sort();
            let remedy = format!("start the program with `taskset -c {} verbring ...`", format_cpu_list(&mask));
            fair(topic, format!("{list}, but this process is not allowed on any of them"), remedy)
        } else {
            good(topic, list)
        }
    }

    fn tick(&self) -> Finding {
        let topic = "tick-free cpus";
        let tick_free = &self.topology.nohz_full;
        if self.topology.online.is_empty() {
            return unknown(topic, "sysfs is not readable");
        }
        if !self.exists("sys/devices/system/cpu/nohz_full") {
            return fair(
                topic,
                "none: this kernel is built without nohz_full, the timer interrupts pollers",
                "for the lowest jitter, a kernel with CONFIG_NO_HZ_FULL",
            );
        }
        let list = format_cpu_list(tick_free);
        if self.pair.is_some_and(|(first, second)| tick_free.contains(&first) && tick_free.contains(&second)) {
            good(topic, list)
        } else {
            fair(topic, format!("{list}: the timer interrupts pollers elsewhere"), self.boot_line())
        }
    }

    /// The kernel command line that frees two CPUs for pollers.
    fn boot_line(&self) -> String {
        // CPU 0 keeps the work that every other CPU was freed of.
        let spare: Vec<usize> = self.allowed.iter().copied().filter(|&cpu| cpu != 0).collect();
        match self.topology.pick_pair(&spare) {
            Some((first, second)) => {
                let list = format_cpu_list(&[first.min(second), first.max(second)]);
                let all = format_cpu_list(&self.allowed);
                format!(
                    "boot with isolcpus=managed_irq,domain,{list} nohz_full={list} rcu_nocbs={list}, then start with \
                     `taskset -c {all} verbring ...`"
                )
            }
            None => "takes three CPUs: two for pollers, one for all other work".to_owned(),
        }
    }

    fn hardware_threads(&self) -> Finding {
        let topic = "hardware threads";
        let siblings = &self.topology.siblings;
        match self.read("sys/devices/system/cpu/smt/active").as_deref() {
            Some("0") => return good(topic, "one a core"),
            None if siblings.is_empty() => return unknown(topic, "this kernel does not tell"),
            _ => {}
        }
        let Some((first, second)) = self.pair else {
            return fair(topic, "several a core", "give each poller a core of its own");
        };
        let core_of = |cpu: usize| siblings.iter().find(|threads| threads.contains(&cpu));
        if core_of(first).is_some_and(|threads| threads.contains(&second)) {
            let found = format!("the pollers' CPUs {first} and {second} are threads of one core");
            return bad(topic, found, "allow this process CPUs of two cores (taskset, cpuset)");
        }
        let cores: Vec<String> =
            [first, second].into_iter().filter_map(core_of).map(|threads| format_cpu_list(threads)).collect();
        fair(
            topic,
            format!("several a core; on the cores of the pollers: {}", cores.join(" and ")),
            "leave the siblings of the pollers' CPUs idle, or: echo off > /sys/devices/system/cpu/smt/control",
        )
    }

    fn governor(&self) -> Finding {
        let topic = "cpufreq governor";
        let policies = self.names("sys/devices/system/cpu/cpufreq");
        let mut governors: Vec<String> = policies
            .iter()
            .filter_map(|policy| self.read(&format!("sys/devices/system/cpu/cpufreq/{policy}/scaling_governor")))
            .collect();
        governors.sort();
        governors.dedup();
        match governors.as_slice() {
            [] => self.left_to_host(topic, "governor"),
            [only] if only == "performance" => good(topic, "performance"),
            _ => fair(
                topic,
                format!("{}: the clock rate follows the load", governors.join(", ")),
                "cpupower frequency-set -g performance  (or write it to \
                 /sys/devices/system/cpu/cpufreq/policy*/scaling_governor)",
            ),
        }
    }

    fn turbo(&self) -> Finding {
        let topic = "turbo";
        let (intel, other) = ("sys/devices/system/cpu/intel_pstate/no_turbo", "sys/devices/system/cpu/cpufreq/boost");
        let (on, command) = match (self.read(intel), self.read(other)) {
            (Some(off), _) => (off == "0", format!("echo 0 > /{intel}")),
            (None, Some(on)) => (on == "1", format!("echo 1 > /{other}")),
            (None, None) => return self.left_to_host(topic, "setting"),
        };
        if on {
            good(topic, "on (benchmark numbers move with temperature and load)")
        } else {
            fair(topic, "off: steadier, and slower", format!("unless steady numbers are wanted: {command}"))
        }
    }

    /// A poller never idles; who waits for an event, or shares a package with idle cores, pays for deep sleep.
    fn idle_states(&self) -> Finding {
        let topic = "idle states";
        let Some(driver) = self.read("sys/devices/system/cpu/cpuidle/current_driver") else {
            return self.left_to_host(topic, "cpuidle driver");
        };
        let states = self.names("sys/devices/system/cpu/cpu0/cpuidle");
        let enabled = states.iter().filter_map(|state| {
            let state = format!("sys/devices/system/cpu/cpu0/cpuidle/{state}");
            let disabled = self.read_number(&format!("{state}/disable")).unwrap_or(0) != 0;
            (!disabled).then(|| self.read_number(&format!("{state}/latency")))?
        });
        match enabled.max() {
            Some(latency) if latency > LONG_WAKEUP_US => fair(
                topic,
                format!("{driver}: waking up takes up to {latency} us"),
                format!("cpupower idle-set -D {LONG_WAKEUP_US}  (or idle=poll on the kernel command line)"),
            ),
            Some(latency) => good(topic, format!("{driver}: waking up takes up to {latency} us")),
            None if self.is_virtual() => good(topic, format!("driver {driver}: this virtual machine has no deep ones")),
            None => good(topic, format!("driver {driver}, no states")),
        }
    }

    fn clock_source(&self) -> Finding {
        let topic = "clock source";
        let path = "sys/devices/system/clocksource/clocksource0";
        let available = self.read(&format!("{path}/available_clocksource")).unwrap_or_default();
        let remedy = if available.split_whitespace().any(|name| name == "tsc") {
            format!("echo tsc > /{path}/current_clocksource")
        } else {
            "the kernel offers no tsc: look in dmesg why it was marked unstable".to_owned()
        };
        match self.read(&format!("{path}/current_clocksource")).as_deref() {
            None | Some("") => unknown(topic, "this kernel does not tell"),
            Some(fast @ ("tsc" | "arch_sys_counter")) => good(topic, format!("{fast}: time without a system call")),
            Some(host @ ("kvm-clock" | "hyperv_clocksource_tsc_page")) => {
                fair(topic, format!("{host}: time through a page of the host, slower than tsc"), remedy)
            }
            Some(slow) => bad(topic, format!("{slow}: reading the time may be a system call"), remedy),
        }
    }

    fn numa(&self) -> Finding {
        let topic = "numa nodes";
        let nodes = &self.topology.nodes;
        let count = nodes.len();
        let used: Vec<_> = nodes.iter().filter(|n| n.cpus.iter().any(|cpu| self.allowed.contains(cpu))).collect();
        match (count, used.as_slice()) {
            (0, _) => unknown(topic, "this kernel shows none"),
            (1, _) => good(topic, "one"),
            (_, [only]) => good(topic, format!("{count}; this process runs on node {} only", only.id)),
            _ => {
                let parts: Vec<String> =
                    nodes.iter().map(|node| format!("node {}: {}", node.id, format_cpu_list(&node.cpus))).collect();
                let node = self.pair.and_then(|(first, _)| self.topology.node_of(first)).unwrap_or(nodes[0].id);
                let remedy = format!(
                    "keep pollers, memory and NIC on one node: numactl --cpunodebind={node} --membind={node} verbring"
                );
                fair(topic, format!("{count} ({})", parts.join("; ")), remedy)
            }
        }
    }

    fn numa_balancing(&self) -> Finding {
        let topic = "numa balancing";
        match self.read("proc/sys/kernel/numa_balancing").as_deref() {
            None if self.exists("proc/sys/kernel") => good(topic, "not in this kernel"),
            None => unknown(topic, "proc/sys is not readable"),
            Some("0") => good(topic, "off"),
            Some(_) if self.topology.nodes.len() == 1 => good(topic, "on, without effect on one node"),
            Some(_) => fair(
                topic,
                "on: the kernel unmaps pages to see who uses them, pollers take the faults",
                "sysctl -w kernel.numa_balancing=0",
            ),
        }
    }

    fn ptrace_scope(&self) -> Finding {
        let topic = "ptrace scope";
        match self.read("proc/sys/kernel/yama/ptrace_scope").as_deref() {
            None if self.exists("proc/sys/kernel") => good(topic, "no Yama: the same user may reach foreign memory"),
            None => unknown(topic, "proc/sys is not readable"),
            Some("0") => good(topic, "0"),
            Some("3") => fair(
                topic,
                "3: nobody may reach foreign memory, until the next boot",
                "matters only for foreign memory (process_vm_readv); register memory of the engine instead",
            ),
            Some(scope) => fair(
                topic,
                format!("{scope}: only a parent or CAP_SYS_PTRACE may reach foreign memory"),
                "matters only for foreign memory (process_vm_readv): sysctl -w kernel.yama.ptrace_scope=0",
            ),
        }
    }

    fn rdma_devices(&self) -> Finding {
        let topic = "rdma devices";
        if !self.exists("sys/class") {
            return unknown(topic, "sysfs is not readable");
        }
        let mut ports = Vec::new();
        for device in self.names("sys/class/infiniband") {
            for port in self.names(&format!("sys/class/infiniband/{device}/ports")) {
                let path = format!("sys/class/infiniband/{device}/ports/{port}");
                // "4: ACTIVE", as the kernel numbers port states.
                let state = self.read(&format!("{path}/state")).unwrap_or_else(|| "state unknown".to_owned());
                let link = self.read(&format!("{path}/link_layer")).unwrap_or_else(|| "link unknown".to_owned());
                ports.push(format!("{device} port {port}: {link}, {state}"));
            }
        }
        let found = ports.join("; ");
        if ports.is_empty() {
            good(topic, "none: the shared-memory device works without")
        } else if ports.iter().any(|port| port.ends_with("ACTIVE")) {
            good(topic, found)
        } else {
            fair(topic, found, "no port is active: check the cable, then `ip link set <interface> up`")
        }
    }
}

/// The bracketed word of a sysfs choice such as `always [madvise] never`.
fn selected(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

fn in_kib(limit: Option<u64>) -> String {
    limit.map_or("unlimited".to_owned(), |bytes| format!("{} KiB", bytes / 1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNLIMITED: Limits = Limits { memlock_soft: None, memlock_hard: None, ipc_lock: Some(false) };
    const LIMITED: Limits = Limits { memlock_soft: Some(64 << 10), memlock_hard: Some(8 << 20), ipc_lock: Some(false) };

    const GOOD_MACHINE: &[(&str, &str)] = &[
        ("proc/self/status", "Name:\tverbring\nCpus_allowed_list:\t0-63\n"),
        ("proc/self/cgroup", "0::/user.slice/shell\n"),
        ("proc/sys/kernel/numa_balancing", "0\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n"),
        ("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet \n"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state0/latency", "0\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "2\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state2/latency", "133\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state2/disable", "1\n"),
        ("sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "performance\n"),
        ("sys/devices/system/cpu/cpuidle/current_driver", "intel_idle\n"),
        ("sys/devices/system/cpu/intel_pstate/no_turbo", "0\n"),
        ("sys/devices/system/cpu/isolated", "2-3\n"),
        ("sys/devices/system/cpu/nohz_full", "2-3\n"),
        ("sys/devices/system/cpu/online", "0-3\n"),
        ("sys/devices/system/cpu/smt/active", "0\n"),
        ("sys/devices/system/node/node0/cpulist", "0-3\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-1048576kB/free_hugepages", "1\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages", "1\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "512\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
        ("sys/fs/cgroup/user.slice/cpu.max", "max 100000\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n"),
    ];

    const BAD_MACHINE: &[(&str, &str)] = &[
        ("proc/self/status", "Cpus_allowed_list:\t0,4\n"),
        ("proc/self/cgroup", "0::/pod/container\n"),
        ("proc/sys/kernel/numa_balancing", "1\n"),
        ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
        ("sys/devices/system/clocksource/clocksource0/available_clocksource", "hpet acpi_pm\n"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state2/latency", "133\n"),
        ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,4\n"),
        ("sys/devices/system/cpu/cpu4/topology/thread_siblings_list", "0,4\n"),
        ("sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "powersave\n"),
        ("sys/devices/system/cpu/cpufreq/policy1/scaling_governor", "performance\n"),
        ("sys/devices/system/cpu/cpuidle/current_driver", "intel_idle\n"),
        ("sys/devices/system/cpu/cpufreq/boost", "0\n"),
        ("sys/devices/system/cpu/isolated", "\n"),
        ("sys/devices/system/cpu/nohz_full", "(null)\n"),
        ("sys/devices/system/cpu/online", "0-7\n"),
        ("sys/devices/system/node/node0/cpulist", "0-3\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-1048576kB/free_hugepages", "0\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "0\n"),
        ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "10\n"),
        ("sys/devices/system/node/node1/cpulist", "4-7\n"),
        ("sys/devices/system/node/node1/hugepages/hugepages-1048576kB/free_hugepages", "0\n"),
        ("sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
        ("sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "4\n"),
        ("sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", "10\n"),
        ("sys/fs/cgroup/pod/cpu.max", "150000 100000\n"),
        ("sys/fs/cgroup/pod/container/cpu.max", "max 100000\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise never [deny] force\n"),
    ];

    /// Examines a tree of these files; later ones replace earlier ones of the same path.
    fn examine_files(files: &[(&str, &str)], limits: Limits) -> Vec<Finding> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        examine(root.path(), limits)
    }

    fn about<'a>(findings: &'a [Finding], topic: &str) -> &'a Finding {
        findings.iter().find(|finding| finding.topic == topic).expect(topic)
    }

    /// The finding about a topic on the good machine with one file changed.
    fn changed(topic: &str, path: &str, text: &str) -> Finding {
        about(&examine_files(&[GOOD_MACHINE, &[(path, text)]].concat(), UNLIMITED), topic).clone()
    }

    #[test]
    fn a_good_machine_needs_nothing() {
        for finding in examine_files(GOOD_MACHINE, UNLIMITED) {
            assert_eq!((finding.verdict, &finding.remedy), (Verdict::Good, &None), "{finding:?}");
        }
    }

    #[test]
    fn a_bad_machine_gets_a_remedy_for_everything() {
        let findings = examine_files(BAD_MACHINE, LIMITED);
        for finding in &findings {
            assert!(matches!(finding.verdict, Verdict::Fair | Verdict::Bad), "{finding:?}");
            assert!(finding.remedy.is_some(), "{finding:?}");
        }
        let bad: Vec<_> = findings.iter().filter(|f| f.verdict == Verdict::Bad).map(|f| f.topic).collect();
        let expected = [
            "huge pages 2 MiB",
            "THP in shared memory",
            "memory lock limit",
            "cpu quota",
            "hardware threads",
            "clock source",
        ];
        assert_eq!(bad, expected);
    }

    #[test]
    fn an_empty_root_tells_nothing_but_the_limits() {
        let mut findings = examine_files(&[], UNLIMITED);
        findings.retain(|finding| finding.topic != "memory lock limit");
        assert!(findings.len() > 10);
        for finding in findings {
            assert_eq!((finding.verdict, &finding.remedy), (Verdict::Unknown, &None), "{finding:?}");
        }
    }

    #[test]
    fn a_root_of_garbage_does_not_panic() {
        for garbage in
            ["", "\n", "(null)", "-1", "18446744073709551615", "18446744073709551615 0", "a:b", "::::", "0::/../.."]
        {
            let files: Vec<_> = BAD_MACHINE.iter().map(|&(path, _)| (path, garbage)).collect();
            assert!(!table(&examine_files(&files, LIMITED)).is_empty());
        }
    }

    #[test]
    fn short_huge_pages_name_the_node_and_the_number() {
        let findings = examine_files(BAD_MACHINE, LIMITED);
        let pools: Vec<_> = findings.iter().filter(|finding| finding.topic == "huge pages 2 MiB").collect();
        assert_eq!((pools[0].verdict, pools[1].verdict), (Verdict::Bad, Verdict::Fair));
        assert_eq!(pools[1].found, "node 1: 10 reserved, 4 free");
        // 10 are there, 6 of them taken: 64 are free when there are 70.
        let command = "echo 70 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";
        assert!(pools[1].remedy.as_ref().unwrap().starts_with(command), "{:?}", pools[1]);
    }

    #[test]
    fn a_kernel_without_numa_has_one_pool() {
        let findings = examine_files(
            &[
                ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "64\n"),
                ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "64\n"),
            ],
            UNLIMITED,
        );
        assert_eq!(about(&findings, "huge pages 2 MiB").verdict, Verdict::Good);
    }

    #[test]
    fn memlock_is_judged_by_soft_hard_and_capability() {
        let verdict = |soft, hard, ipc_lock, uid_map: &str| {
            let limits = Limits { memlock_soft: soft, memlock_hard: hard, ipc_lock };
            about(&examine_files(&[("proc/self/uid_map", uid_map)], limits), "memory lock limit").clone()
        };
        let first = "         0          0 4294967295\n";
        assert_eq!(verdict(Some(1 << 30), Some(1 << 30), Some(false), first).verdict, Verdict::Good);
        assert_eq!(verdict(Some(1 << 16), Some(1 << 16), Some(true), first).verdict, Verdict::Good);
        assert_eq!(verdict(Some(1 << 16), Some(1 << 16), Some(true), "0 100000 65536\n").verdict, Verdict::Bad);
        assert_eq!(verdict(Some(1 << 16), Some(1 << 16), None, first).verdict, Verdict::Bad);
        assert_eq!(verdict(Some(1 << 16), None, Some(false), first).remedy.unwrap(), "ulimit -l unlimited");
        assert_eq!(verdict(Some(1 << 16), Some(1 << 30), Some(false), first).remedy.unwrap(), "ulimit -l 1048576");
    }

    #[test]
    fn isolated_cpus_outside_the_mask_are_of_no_use() {
        let finding = changed("isolated cpus", "proc/self/status", "Cpus_allowed_list:\t0-1\n");
        assert_eq!(finding.verdict, Verdict::Fair);
        assert!(finding.remedy.unwrap().contains("taskset -c 0-3 "));
    }

    #[test]
    fn a_virtual_machine_is_named_as_the_reason() {
        let files = [("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu tsc hypervisor\n")];
        let findings = examine_files(&files, UNLIMITED);
        for topic in ["cpufreq governor", "turbo", "idle states"] {
            assert!(about(&findings, topic).found.contains("virtual machine"), "{topic}");
        }
    }

    #[test]
    fn the_lowest_quota_of_version_1_counts() {
        let files = [
            ("proc/self/cgroup", "2:cpuacct:/\n1:cpu:/docker/inner\n"),
            ("proc/self/status", "Cpus_allowed_list:\t0-3\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/docker/inner/cpu.cfs_quota_us", "350000\n"),
            ("sys/fs/cgroup/cpu/docker/inner/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us", "250000\n"),
            ("sys/fs/cgroup/cpu/docker/cpu.cfs_period_us", "100000\n"),
        ];
        let findings = examine_files(&files, UNLIMITED);
        let quota = about(&findings, "cpu quota");
        assert_eq!(quota.verdict, Verdict::Fair);
        assert!(quota.found.starts_with("2.5 CPUs, by /sys/fs/cgroup/cpu/docker/"), "{quota:?}");
    }

    #[test]
    fn single_settings_change_their_verdict() {
        let clock = "sys/devices/system/clocksource/clocksource0/current_clocksource";
        assert_eq!(changed("clock source", clock, "kvm-clock\n").verdict, Verdict::Fair);
        assert_eq!(changed("clock source", clock, "acpi_pm\n").verdict, Verdict::Bad);
        assert_eq!(changed("ptrace scope", "proc/sys/kernel/yama/ptrace_scope", "0\n").verdict, Verdict::Good);
        assert_eq!(changed("ptrace scope", "proc/sys/kernel/yama/ptrace_scope", "3\n").verdict, Verdict::Fair);
        assert_eq!(changed("cpus", "proc/self/status", "Cpus_allowed_list:\t1\n").verdict, Verdict::Bad);
        assert_eq!(changed("tick-free cpus", "sys/devices/system/cpu/nohz_full", "1\n").verdict, Verdict::Fair);
        assert_eq!(changed("hardware threads", "sys/devices/system/cpu/smt/active", "1\n").verdict, Verdict::Fair);
        let numa_balancing = changed("numa balancing", "proc/sys/kernel/numa_balancing", "1\n");
        assert_eq!(numa_balancing.verdict, Verdict::Good, "one node");
    }

    #[test]
    fn the_table_is_aligned_and_the_json_parses() {
        let findings = [good("short", "found"), bad("a longer topic", "lost", "search \"it\"")];
        let expected = "ok    short           found\n\
                        BAD   a longer topic  lost\n      -> search \"it\"\n";
        assert_eq!(table(&findings), expected);

        let json = json_lines(&findings);
        let objects: Vec<serde_json::Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(objects[0]["verdict"], "good");
        assert!(objects[0]["remedy"].is_null());
        assert_eq!(objects[1]["topic"], "a longer topic");
        assert_eq!(objects[1]["found"], "lost");
        assert_eq!(objects[1]["remedy"], "search \"it\"");
    }
}
