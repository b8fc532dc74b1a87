//! The other end as a child process: this program once more.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::device::{Address, Tuning};
use super::{Cores, PerfError};

/// How long a child may take to end by itself.
const FAREWELL: Duration = Duration::from_secs(2);

/// The other end. It does not outlive this.
pub(crate) struct Counterpart(Child);

impl Counterpart {
    /// Starts it, to listen at an address. It inherits the affinity mask, so this goes before pinning.
    pub(crate) fn start(at: &Address, cores: Cores, tuning: Tuning) -> Result<Counterpart, PerfError> {
        // Not current_exe(): that is a path, where another build may lie by now.
        let child = Command::new("/proc/self/exe")
            .args(["perf", "--listen", &at.to_string(), "--cores", &cores.to_string()])
            .args(["--child-of", &std::process::id().to_string()])
            .args(tuning.mtu.map(|mtu| format!("--mtu={mtu}")))
            .args((!tuning.offload).then_some("--no-offload"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        child.map(Counterpart).map_err(|error| PerfError::Other(format!("the other end could not be started: {error}")))
    }

    /// How it ended, if it did.
    pub(crate) fn end(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    /// Waits until it ended by itself.
    pub(crate) fn join(&mut self) -> Option<ExitStatus> {
        let until = Instant::now() + FAREWELL;
        loop {
            match self.end() {
                None if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                end => return end,
            }
        }
    }
}

impl Drop for Counterpart {
    fn drop(&mut self) {
        // Both fail only if it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What became of a child, for people.
pub(crate) fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("the other end ended with exit code {code}"),
        (_, Some(signal)) => format!("the other end was ended by signal {signal}"),
        _ => "the other end ended".to_string(),
    }
}

/// In the child: the kernel ends this process with its parent.
pub(crate) fn die_with_parent(parent: u32) -> Result<(), PerfError> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|errno| PerfError::Other(format!("prctl(PR_SET_PDEATHSIG) failed: {errno}")))?;
    // It may have died before the kernel was asked.
    let is_there = getppid().is_some_and(|now| now.as_raw_nonzero().get() as u32 == parent);
    if is_there { Ok(()) } else { Err(PerfError::Other("the parent process is gone".to_string())) }
}
