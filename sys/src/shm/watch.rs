//! The helper that notices the end of a peer: one sleeping thread a process, whatever the number of devices.
//!
//! It waits on the peer's pidfd (pidfd_open(2)), which answers when the process is dead even if a forked child still
//! holds the socket, and on the socket, which answers when the peer gave up its end.

use core::sync::atomic::AtomicU32;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

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
    epoll: OwnedFd,
    peers: Mutex<(u64, HashMap<u64, Watched>)>,
}

static WATCHER: OnceLock<Result<Watcher, DeviceError>> = OnceLock::new();

impl Watcher {
    fn get() -> Result<&'static Watcher, DeviceError> {
        let watcher = WATCHER.get_or_init(|| {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
            Ok(Watcher { epoll, peers: Mutex::new((0, HashMap::new())) })
        });
        let watcher = watcher.as_ref().map_err(|e| *e)?;
        static THREAD: OnceLock<bool> = OnceLock::new();
        let is_running = THREAD.get_or_init(|| {
            let thread = std::thread::Builder::new().name("verbring-watch".into()).stack_size(64 * 1024);
            thread.spawn(|| watcher.run()).is_ok()
        });
        if *is_running { Ok(watcher) } else { Err(DeviceError::System { call: "pthread_create", errno: 11 }) }
    }

    fn peers(&self) -> MutexGuard<'_, (u64, HashMap<u64, Watched>)> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut ready = [const { core::mem::MaybeUninit::uninit() }; 16];
        loop {
            let Ok((ready, _)) = epoll::wait(&self.epoll, &mut ready, None) else { continue };
            let peers = self.peers();
            for event in ready {
                if let Some(peer) = peers.1.get(&event.data.u64()) {
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
        peers.0 += 1;
        let id = peers.0;
        let data = epoll::EventData::new_u64(id);
        let once = epoll::EventFlags::ONESHOT;
        if let Some(pidfd) = &pidfd {
            epoll::add(&watcher.epoll, pidfd, data, epoll::EventFlags::IN | once).map_err(system("epoll_ctl"))?;
        }
        epoll::add(&watcher.epoll, &duplicate, data, epoll::EventFlags::RDHUP | once).map_err(system("epoll_ctl"))?;
        peers.1.insert(id, Watched { lane, deaths, _pidfd: pidfd, _socket: duplicate });
        Ok(Watch(id))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Ok(watcher) = Watcher::get() {
            // Closing the descriptors takes them out of the epoll set, if nobody else has them; a late event finds no
            // entry.
            let mut peers = watcher.peers();
            if let Some(watched) = peers.1.remove(&self.0) {
                let _ = epoll::delete(&watcher.epoll, &watched._socket);
                if let Some(pidfd) = &watched._pidfd {
                    let _ = epoll::delete(&watcher.epoll, pidfd);
                }
            }
        }
    }
}
