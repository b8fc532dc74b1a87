//! The helper that notices the end of a peer: one sleeping thread a process, whatever the number of devices.
//!
//! It waits on the peer's pidfd (pidfd_open(2)), which answers when the process is dead even if a forked child still
//! holds the socket, and on the socket, which answers when the peer gave up its end.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::boxed::Box;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::epoll;
use rustix::net::sockopt;
use rustix::process::{PidfdFlags, pidfd_open};

use super::{mark, system};
use crate::DeviceError;
use crate::lane::Lane;

struct Watched {
    lane: Lane,
    deaths: Arc<AtomicU32>,
    _pidfd: Option<OwnedFd>,
    _socket: OwnedFd,
}

struct Watcher {
    /// The process whose thread it is: a forked child has none.
    pid: u32,
    epoll: OwnedFd,
    peers: Mutex<HashMap<u64, Watched>>,
}

/// Numbers for watches; a forked child goes on counting, so it never takes its parent's for its own.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// The watcher of this process, made when it is first needed. Leaked: its thread never ends.
static WATCHER: Mutex<Option<&'static Watcher>> = Mutex::new(None);

impl Watcher {
    fn get() -> Result<&'static Watcher, DeviceError> {
        let mut current = WATCHER.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = std::process::id();
        if let Some(watcher) = current.filter(|w| w.pid == pid) {
            return Ok(watcher);
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        let watcher: &'static Watcher = Box::leak(Box::new(Watcher { pid, epoll, peers: Mutex::default() }));
        let thread = std::thread::Builder::new().name("verbring-watch".into()).stack_size(64 * 1024);
        thread.spawn(|| watcher.run()).map_err(|_| DeviceError::System { call: "pthread_create", errno: 11 })?;
        *current = Some(watcher);
        Ok(watcher)
    }

    /// The watcher, if this process has one.
    fn existing() -> Option<&'static Watcher> {
        let current = WATCHER.lock().unwrap_or_else(PoisonError::into_inner);
        current.filter(|w| w.pid == std::process::id())
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<u64, Watched>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut ready = [const { core::mem::MaybeUninit::uninit() }; 16];
        loop {
            let Ok((ready, _)) = epoll::wait(&self.epoll, &mut ready, None) else {
                // A signal, as a rule. Whatever it is, it must not keep a core busy.
                std::thread::sleep(std::time::Duration::from_millis(1));
                continue;
            };
            let peers = self.peers();
            for event in ready {
                if let Some(peer) = peers.get(&event.data.u64()) {
                    mark(peer.lane, &peer.deaths);
                }
            }
        }
    }
}

/// A peer under watch; dropping it ends that, and the lane is not touched afterwards.
pub(super) struct Watch(u64);

impl Watch {
    /// Watches the process at the other end of `socket`.
    ///
    /// # Safety
    /// `lane` stays mapped until the watch was dropped.
    pub(super) unsafe fn new(socket: &OwnedFd, lane: Lane, deaths: Arc<AtomicU32>) -> Result<Watch, DeviceError> {
        let watcher = Watcher::get()?;
        let duplicate = socket.try_clone().map_err(|_| DeviceError::System { call: "dup", errno: 24 })?;
        let pid = sockopt::socket_peercred(socket).map_err(system("getsockopt(SO_PEERCRED)"))?.pid;
        // No such process: it is dead already, and its end of the socket says so.
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok();
        let mut peers = watcher.peers();
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let data = epoll::EventData::new_u64(id);
        let once = epoll::EventFlags::ONESHOT;
        if let Some(pidfd) = &pidfd {
            epoll::add(&watcher.epoll, pidfd, data, epoll::EventFlags::IN | once).map_err(system("epoll_ctl"))?;
        }
        epoll::add(&watcher.epoll, &duplicate, data, epoll::EventFlags::RDHUP | once).map_err(system("epoll_ctl"))?;
        peers.insert(id, Watched { lane, deaths, _pidfd: pidfd, _socket: duplicate });
        Ok(Watch(id))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(watcher) = Watcher::existing() {
            // Closing the descriptors takes them out of the epoll set, if nobody else has them; a late event finds no
            // entry.
            let mut peers = watcher.peers();
            if let Some(watched) = peers.remove(&self.0) {
                let _ = epoll::delete(&watcher.epoll, &watched._socket);
                if let Some(pidfd) = &watched._pidfd {
                    let _ = epoll::delete(&watcher.epoll, pidfd);
                }
            }
        }
    }
}
