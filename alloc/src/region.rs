//! Mappings: private ones for tables and the slab, shared ones (a memfd) for what a peer may reach.

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};
use std::alloc::Layout;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::string::{String, ToString};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap, mmap_anonymous, munmap};
use rustix::process::{Resource, getrlimit};

const MIB2: usize = 2 << 20;
const GIB1: usize = 1 << 30;
/// statfs(2).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The pages that a mapping lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pages {
    /// The base pages of the system (4 KiB).
    Small,
    /// Base pages that the kernel gathered into huge ones (madvise(2), MADV_COLLAPSE); it may split them again.
    Transparent,
    /// Reserved huge pages of 2 MiB (or the system's default huge page size).
    Huge2M,
    /// Reserved huge pages of 1 GiB.
    Huge1G,
}

impl Pages {
    /// A short name, as in the tables of `verbring perf`.
    pub const fn name(self) -> &'static str {
        match self {
            Pages::Small => "4k",
            Pages::Transparent => "thp",
            Pages::Huge2M => "2m",
            Pages::Huge1G => "1g",
        }
    }
}

/// What is asked of a mapping.
#[derive(Clone, Copy, Debug)]
pub struct RegionOptions {
    /// The largest pages to try; from there it goes down the ladder 1 GiB, 2 MiB, transparent, 4 KiB.
    pub largest: Pages,
    /// The smallest pages to accept; an error when only smaller ones are to be had.
    pub smallest: Pages,
    /// Lock the pages in memory (mlock(2)). Counted against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK.
    pub lock: bool,
}

impl Default for RegionOptions {
    fn default() -> Self {
        RegionOptions { largest: Pages::Huge2M, smallest: Pages::Small, lock: false }
    }
}

/// Why there is no mapping.
#[derive(Debug)]
#[non_exhaustive]
pub enum RegionError {
    /// A length of zero, or one that does not fit the address space.
    Length(usize),
    /// No pages as large as demanded.
    NoHugePages {
        /// What was demanded at least.
        smallest: Pages,
        /// Pages of that size that are needed.
        needed: usize,
        /// Pages of that size that are free.
        free: usize,
    },
    /// RLIMIT_MEMLOCK does not allow it. Nothing was mapped.
    MemLock {
        /// Bytes to be locked.
        needed: usize,
        /// The soft limit in bytes.
        soft: u64,
        /// The hard limit in bytes.
        hard: u64,
    },
    /// What a peer sent is not a region: it is not sealed, or has another size than it said.
    NotARegion(&'static str),
    /// A system call failed.
    System {
        /// Which one.
        call: &'static str,
        /// The bytes it was asked for.
        len: usize,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegionError::Length(len) => write!(f, "a region of {len} bytes cannot be mapped; ask for 1 byte or more"),
            RegionError::NoHugePages { smallest, needed, free } => {
                let (name, kib) = if *smallest == Pages::Huge1G { ("1 GiB", 1048576) } else { ("2 MiB", 2048) };
                write!(
                    f,
                    "{needed} huge pages of {name} are needed and {free} are free; reserve them with `echo N > \
                     /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages`, or accept smaller pages"
                )
            }
            RegionError::MemLock { needed, soft, hard } => write!(
                f,
                "locking {needed} bytes exceeds RLIMIT_MEMLOCK (soft {soft}, hard {hard} bytes); raise it with `ulimit \
                 -l`, in /etc/security/limits.conf or by LimitMEMLOCK= of the service, or give the process CAP_IPC_LOCK"
            ),
            RegionError::NotARegion(why) => write!(f, "the peer sent a descriptor that is not a region: {why}"),
            RegionError::System { call, len, source } => write!(f, "{call} of {len} bytes failed: {source}"),
        }
    }
}

impl std::error::Error for RegionError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RegionError::System { source, .. } => Some(source),
            _ => None,
        }
    }
}

fn system(call: &'static str, len: usize) -> impl FnOnce(rustix::io::Errno) -> RegionError {
    move |errno| RegionError::System { call, len, source: errno.into() }
}

/// One mapping, unmapped when it is dropped.
///
/// The memory of a shared region can be written by other processes at any time, so it is reached by
/// `verbring_sys::copy` only and never by a reference.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    why_smaller: Option<String>,
    /// A device lets peers in; one registration at a time.
    is_exported: AtomicBool,
    /// A descriptor went out since the memory was last replaced.
    is_handed_out: AtomicBool,
    /// Changed by `replace` alone.
    backing: Mutex<(Backing, Pages)>,
}

#[derive(Debug)]
enum Backing {
    /// Nothing: the mapping moved away.
    Gone,
    /// Ours alone, from hugepage-rs.
    Huge(Layout),
    /// Ours alone, from mmap.
    Anonymous,
    /// A memfd that we made and may hand out.
    Shared(OwnedFd),
    /// A memfd that a peer made.
    Adopted { writable: bool },
}

// SAFETY: the region is the owner of its mapping; access to the bytes is by unsafe code with its own reasons.
unsafe impl Send for Region {}
// SAFETY: the methods that take `&self` only read fields, or make system calls that the kernel serialises.
unsafe impl Sync for Region {}

impl Region {
    /// A private mapping of at least `len` zeroed bytes, which no other process can reach.
    pub fn private(len: usize, options: RegionOptions) -> Result<Region, RegionError> {
        Self::down_the_ladder(len, options, |len, pages| match pages {
            // hugepage-rs gives the default huge page size only, and stops the process where /proc/meminfo has none.
            Pages::Huge1G => Err(no_pages(Pages::Huge1G, len)),
            Pages::Huge2M => {
                let none = || no_pages(Pages::Huge2M, len);
                let len = round_up(len, default_huge_page().ok_or_else(none)?)?;
                let layout = Layout::from_size_align(len, 4096).map_err(|_| RegionError::Length(len))?;
                // SAFETY: the size is not zero.
                let base = NonNull::new(unsafe { hugepage_rs::alloc(layout) }).ok_or_else(none)?;
                Ok((base, len, Backing::Huge(layout)))
            }
            Pages::Transparent | Pages::Small => {
                let len = round_up(len, if pages == Pages::Transparent { MIB2 } else { page_size() })?;
                let base = map_aligned(len, None)?;
                let guard = Unmap { base, len };
                settle(base, len, pages)?;
                core::mem::forget(guard);
                Ok((base, len, Backing::Anonymous))
            }
        })
    }

    /// A mapping of at least `len` zeroed bytes that can be handed to other processes: a memfd that can neither shrink
    /// nor grow.
    pub fn shared(len: usize, options: RegionOptions) -> Result<Region, RegionError> {
        Self::down_the_ladder(len, options, |len, pages| {
            let fd = make_memfd(len, pages)?;
            let len = round_up(len, unit(pages))?;
            let base = map_aligned(len, Some(fd.as_fd())).map_err(|e| match pages {
                Pages::Huge2M | Pages::Huge1G => no_pages(pages, len),
                _ => e,
            })?;
            let guard = Unmap { base, len };
            settle(base, len, pages)?;
            core::mem::forget(guard);
            Ok((base, len, Backing::Shared(fd)))
        })
    }

    /// Maps what a peer sent: a memfd of exactly `len` bytes, sealed against shrinking and growing (or its pages could
    /// be taken from under this process: SIGBUS).
    pub fn adopt(fd: OwnedFd, len: usize, writable: bool) -> Result<Region, RegionError> {
        let seals = fcntl_get_seals(&fd).map_err(|_| RegionError::NotARegion("it is not a memfd"))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL) {
            return Err(RegionError::NotARegion("it is not sealed against shrinking, growing and unsealing"));
        }
        let stat = fstat(&fd).map_err(system("fstat", len))?;
        if len == 0 || stat.st_size as u64 != len as u64 {
            return Err(RegionError::NotARegion("its size is not the one announced"));
        }
        // The block size tells nothing: tmpfs with huge pages says 2 MiB too.
        let fs = fstatfs(&fd).map_err(system("fstatfs", len))?;
        let pages = match (fs.f_type as u64, fs.f_bsize as usize) {
            (HUGETLBFS_MAGIC, GIB1) => Pages::Huge1G,
            (HUGETLBFS_MAGIC, _) => Pages::Huge2M,
            _ => Pages::Small,
        };
        // Whoever maps a hole fills it, with memory that the peer never paid for. (hugetlbfs counts no blocks before 6.x,
        // and its holes fail instead of growing.)
        if pages == Pages::Small && (stat.st_blocks as u64).saturating_mul(512) < len as u64 {
            return Err(RegionError::NotARegion("parts of it have no memory yet"));
        }
        if !len.is_multiple_of(unit(pages)) {
            return Err(RegionError::NotARegion("its size is not a multiple of its page size"));
        }
        if writable && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(RegionError::NotARegion("it was announced as writable and is sealed against writing"));
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let base = map_aligned_as(len, Some(fd.as_fd()), protection)?;
        Ok(Region::new(base, len, None, Backing::Adopted { writable }, pages))
    }

    fn new(base: NonNull<u8>, len: usize, why_smaller: Option<String>, backing: Backing, pages: Pages) -> Region {
        let backing = Mutex::new((backing, pages));
        let (is_exported, is_handed_out) = (AtomicBool::new(false), AtomicBool::new(false));
        Region { base, len, why_smaller, is_exported, is_handed_out, backing }
    }

    /// Marks the region as exported by a registration: false if it is already. `end_export` takes it back.
    pub fn begin_export(&self) -> bool {
        !self.is_exported.swap(true, Ordering::AcqRel)
    }

    /// The registration that exported the region is over.
    pub fn end_export(&self) {
        self.is_exported.store(false, Ordering::Release);
    }

    /// A descriptor for a peer: from now on until `replace` succeeded somebody else may have the memory.
    pub fn hand_out(&self) -> Result<OwnedFd, RegionError> {
        let fd = self.export()?;
        self.is_handed_out.store(true, Ordering::Release);
        Ok(fd)
    }

    /// Whether somebody else may have the memory mapped.
    pub fn is_handed_out(&self) -> bool {
        self.is_handed_out.load(Ordering::Acquire)
    }

    /// Fills this process's page table, so that no first access is slow. A failure only costs time.
    pub fn touch(&self) {
        let advice = if self.is_read_only_mapping() { Advice::LinuxPopulateRead } else { Advice::LinuxPopulateWrite };
        // SAFETY: the region's own mapping; the advice changes no contents.
        let _ = unsafe { madvise(self.base.as_ptr().cast(), self.len, advice) };
    }

    fn is_read_only_mapping(&self) -> bool {
        matches!(self.backing().0, Backing::Adopted { writable: false })
    }

    fn down_the_ladder(
        len: usize,
        options: RegionOptions,
        map: impl Fn(usize, Pages) -> Result<(NonNull<u8>, usize, Backing), RegionError>,
    ) -> Result<Region, RegionError> {
        if len == 0 || len > isize::MAX as usize - GIB1 {
            return Err(RegionError::Length(len));
        }
        if options.lock {
            check_memlock(round_up(len, page_size())?)?;
        }
        let mut why_smaller = None;
        for pages in [Pages::Huge1G, Pages::Huge2M, Pages::Transparent, Pages::Small] {
            if pages > options.largest {
                continue;
            }
            match map(len, pages) {
                Ok((base, len, backing)) => {
                    let region = Region::new(base, len, why_smaller, backing, pages);
                    if options.lock {
                        // SAFETY: the region's own mapping.
                        unsafe { mlock(base.as_ptr().cast(), len) }.map_err(system("mlock", len))?;
                    }
                    return Ok(region);
                }
                Err(why) if pages <= options.smallest => return Err(why),
                Err(why) => why_smaller = why_smaller.or(Some(why.to_string())),
            }
        }
        Err(no_pages(options.smallest, len))
    }

    /// Where it is mapped.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Its length in bytes: what was asked for, rounded up to whole pages.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// The pages it lies in.
    pub fn pages(&self) -> Pages {
        self.backing().1
    }

    fn backing(&self) -> MutexGuard<'_, (Backing, Pages)> {
        self.backing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the pages are smaller than the largest asked for; none if they are not.
    pub fn why_smaller(&self) -> Option<&str> {
        self.why_smaller.as_deref()
    }

    /// Whether another process can have it mapped.
    pub fn is_shared(&self) -> bool {
        matches!(self.backing().0, Backing::Shared(_) | Backing::Adopted { .. })
    }

    /// A descriptor of it; an error for a private or an adopted region.
    fn export(&self) -> Result<OwnedFd, RegionError> {
        match &self.backing().0 {
            Backing::Shared(fd) => fd.try_clone().map_err(|source| RegionError::System {
                call: "fcntl(F_DUPFD_CLOEXEC)",
                len: self.len,
                source,
            }),
            _ => Err(RegionError::NotARegion("only a shared region of one's own can be handed out or sealed")),
        }
    }

    /// From now on nobody can map it writable any more (F_SEAL_FUTURE_WRITE, fcntl(2)); mappings that exist, ours
    /// above all, stay writable.
    pub fn seal_read_only(&self) -> Result<(), RegionError> {
        fcntl_add_seals(self.export()?, SealFlags::FUTURE_WRITE).map_err(system("fcntl(F_ADD_SEALS)", self.len))
    }

    /// Whether nobody can map it writable any more.
    pub fn is_read_only(&self) -> bool {
        self.export()
            .and_then(|fd| fcntl_get_seals(fd).map_err(system("fcntl(F_GET_SEALS)", self.len)))
            .is_ok_and(|seals| seals.intersects(SealFlags::FUTURE_WRITE | SealFlags::WRITE))
    }

    /// No further seal can be added, so that a peer who holds the descriptor cannot seal it against its owner. Call it
    /// before the descriptor is handed out.
    pub fn seal_seals(&self) -> Result<(), RegionError> {
        let fd = self.export()?;
        if fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SEAL)) {
            return Ok(());
        }
        fcntl_add_seals(fd, SealFlags::SEAL).map_err(system("fcntl(F_ADD_SEALS)", self.len))
    }

    /// Moves the contents to a fresh memfd, mapped at the same address: whoever had the old one mapped reaches an
    /// orphan from now on. The new one has the same pages where they are to be had, else smaller ones.
    ///
    /// What another thread or process writes between the copy and the switch is lost with the orphan.
    /// The seals are those of the old one.
    pub fn replace(&self) -> Result<(), RegionError> {
        let mut backing = self.backing();
        let (Backing::Shared(old), pages) = &*backing else {
            return Err(RegionError::NotARegion("only a shared region of one's own can be replaced"));
        };
        let options = RegionOptions { largest: *pages, smallest: Pages::Small, lock: false };
        let fresh = Region::shared(self.len, options)?;
        if fresh.len != self.len {
            return Err(RegionError::NotARegion("a fresh memfd has another size"));
        }
        let seals = fcntl_get_seals(old).map_err(system("fcntl(F_GET_SEALS)", self.len))?;
        fcntl_add_seals(fresh.export()?, seals).map_err(system("fcntl(F_ADD_SEALS)", self.len))?;
        // SAFETY: both mappings are `len` bytes and do not overlap. The source may be written by a peer meanwhile, so
        // it is copied by the one instruction that the compiler knows nothing about.
        unsafe { copy_racing(fresh.base, self.base, self.len) };
        // SAFETY: mremap moves the pages of `fresh` over our own range, which `self` owns, in one step.
        unsafe {
            rustix::mm::mremap_fixed(
                fresh.base.as_ptr().cast(),
                self.len,
                self.len,
                rustix::mm::MremapFlags::MAYMOVE,
                self.base.as_ptr().cast(),
            )
        }
        .map_err(system("mremap", self.len))?;
        // The mapping of `fresh` moved here: its destructor must not unmap what may be somebody else's by now.
        *backing = core::mem::replace(&mut *fresh.backing(), (Backing::Gone, Pages::Small));
        self.is_handed_out.store(false, Ordering::Release);
        Ok(())
    }
}

/// Copies bytes that another process may write meanwhile.
///
/// # Safety
/// `to` is valid for writes and `from` for reads of `len` bytes; they do not overlap.
unsafe fn copy_racing(to: NonNull<u8>, from: NonNull<u8>, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; the direction flag is clear by the ABI.
    unsafe {
        core::arch::asm!("rep movsb", inout("rcx") len => _, inout("rdi") to.as_ptr() => _,
            inout("rsi") from.as_ptr() => _, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for i in 0..len {
        use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
        // SAFETY: the caller's promise; bytes are always aligned.
        unsafe { AtomicU8::from_ptr(to.as_ptr().add(i)) }
            .store(unsafe { AtomicU8::from_ptr(from.as_ptr().add(i)) }.load(Relaxed), Relaxed);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match &self.backing().0 {
            Backing::Gone => {}
            // SAFETY: allocated with this layout, not freed before.
            Backing::Huge(layout) => unsafe { hugepage_rs::dealloc(self.base.as_ptr(), *layout) },
            _ => drop(Unmap { base: self.base, len: self.len }),
        }
    }
}

/// Unmaps when dropped.
struct Unmap {
    base: NonNull<u8>,
    len: usize,
}

impl Drop for Unmap {
    fn drop(&mut self) {
        // SAFETY: whoever made the guard owns the range. An error would mean a wrong range; there is nobody to tell.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn page_size() -> usize {
    rustix::param::page_size()
}

fn unit(pages: Pages) -> usize {
    match pages {
        Pages::Small => page_size(),
        Pages::Transparent | Pages::Huge2M => MIB2,
        Pages::Huge1G => GIB1,
    }
}

fn round_up(len: usize, unit: usize) -> Result<usize, RegionError> {
    len.checked_next_multiple_of(unit).filter(|l| *l <= isize::MAX as usize).ok_or(RegionError::Length(len))
}

/// The default huge page size in bytes, from /proc/meminfo; none where the kernel has no hugetlbfs.
fn default_huge_page() -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("Hugepagesize:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

fn no_pages(pages: Pages, len: usize) -> RegionError {
    let (size, kib) = if pages == Pages::Huge1G { (GIB1, 1048576) } else { (MIB2, 2048) };
    let path = std::format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages");
    let free = fs::read_to_string(path).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0);
    RegionError::NoHugePages { smallest: pages, needed: len.div_ceil(size), free }
}

/// Says in advance that mlock would be refused.
fn check_memlock(needed: usize) -> Result<(), RegionError> {
    let limit = getrlimit(Resource::Memlock);
    let (soft, hard) = (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX));
    if needed as u64 > soft && !has_ipc_lock() {
        return Err(RegionError::MemLock { needed, soft, hard });
    }
    Ok(())
}

/// CAP_IPC_LOCK (bit 14, capabilities(7)) in the effective set.
fn has_ipc_lock() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    effective.and_then(|v| u64::from_str_radix(v.trim(), 16).ok()).is_some_and(|v| v & (1 << 14) != 0)
}

fn make_memfd(len: usize, pages: Pages) -> Result<OwnedFd, RegionError> {
    const NAME: &CStr = c"verbring";
    let huge = match pages {
        Pages::Huge1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        Pages::Huge2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        Pages::Transparent | Pages::Small => MemfdFlags::empty(),
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
    let fd = memfd_create(NAME, flags).map_err(|e| match pages {
        Pages::Huge1G | Pages::Huge2M => no_pages(pages, len),
        _ => system("memfd_create", len)(e),
    })?;
    let len = round_up(len, unit(pages))?;
    ftruncate(&fd, len as u64).map_err(system("ftruncate", len))?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(system("fcntl(F_ADD_SEALS)", len))?;
    Ok(fd)
}

/// Maps readable and writable at a multiple of 2 MiB.
fn map_aligned(len: usize, fd: Option<BorrowedFd<'_>>) -> Result<NonNull<u8>, RegionError> {
    map_aligned_as(len, fd, ProtFlags::READ | ProtFlags::WRITE)
}

/// Maps at a multiple of 2 MiB: the address space is reserved with room to spare, the mapping put into it, the rest
/// given back.
fn map_aligned_as(len: usize, fd: Option<BorrowedFd<'_>>, prot: ProtFlags) -> Result<NonNull<u8>, RegionError> {
    let align = if len.is_multiple_of(GIB1) { GIB1 } else { MIB2 };
    let spare = len.checked_add(align).ok_or(RegionError::Length(len))?;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let room = unsafe { mmap_anonymous(core::ptr::null_mut(), spare, ProtFlags::empty(), MapFlags::PRIVATE) }
        .map_err(system("mmap", spare))?
        .cast::<u8>();
    let offset = room.align_offset(align);
    let base = room.wrapping_add(offset);
    let head = NonNull::new(room).map(|base| Unmap { base, len: offset }).filter(|u| u.len > 0);
    let tail = NonNull::new(base.wrapping_add(len)).map(|base| Unmap { base, len: align - offset });
    drop((head, tail.filter(|u| u.len > 0)));
    let target = base.cast();
    // SAFETY: MAP_FIXED replaces just the reserved range, which nobody else knows of.
    let mapped = unsafe {
        match fd {
            Some(fd) => mmap(target, len, prot, MapFlags::SHARED | MapFlags::FIXED, fd, 0),
            None => mmap_anonymous(target, len, prot, MapFlags::PRIVATE | MapFlags::FIXED),
        }
    };
    match (mapped, NonNull::new(base)) {
        (Ok(_), Some(base)) => Ok(base),
        // What failed has given the range back already (mmap of hugetlbfs without pages: seen with mincore(2)), and another
        // thread may have it by now: it is not ours to unmap. Should it be reserved still, that costs addresses.
        (Err(errno), Some(_)) => Err(system("mmap", len)(errno)),
        (_, None) => Err(RegionError::Length(len)),
    }
}

/// Touches every page, so that none is missing later, and gathers them into huge ones if that was asked for.
fn settle(base: NonNull<u8>, len: usize, pages: Pages) -> Result<(), RegionError> {
    let at = base.as_ptr().cast();
    if pages == Pages::Transparent {
        // SAFETY: the caller's own mapping; the advice changes no contents. It only helps; the collapse below decides.
        let _ = unsafe { madvise(at, len, Advice::LinuxHugepage) };
    }
    // SAFETY: as above.
    unsafe { madvise(at, len, Advice::LinuxPopulateWrite) }.map_err(system("madvise(MADV_POPULATE_WRITE)", len))?;
    if pages == Pages::Transparent {
        /// linux/mman.h, since Linux 6.1; rustix has no name for it.
        const MADV_COLLAPSE: i32 = 25;
        // SAFETY: as above.
        if unsafe { libc::madvise(at, len, MADV_COLLAPSE) } != 0 {
            let source = io::Error::last_os_error();
            return Err(RegionError::System { call: "madvise(MADV_COLLAPSE)", len, source });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(region: &Region, byte: u8) {
        // SAFETY: the region's own bytes, and no other process has it.
        unsafe { region.base().as_ptr().write_bytes(byte, region.len()) };
    }

    fn first(region: &Region) -> u8 {
        // SAFETY: as above.
        unsafe { region.base().as_ptr().read_volatile() }
    }

    #[test]
    fn the_ladder_says_what_it_gave() {
        for region in [Region::private(5000, RegionOptions::default()), Region::shared(5000, RegionOptions::default())]
        {
            let region = region.unwrap();
            assert!(region.len() >= 5000 && region.len().is_multiple_of(unit(region.pages())));
            assert_eq!(region.why_smaller().is_some(), region.pages() < Pages::Huge2M);
            fill(&region, 7);
            assert_eq!(first(&region), 7);
        }
    }

    #[test]
    fn small_pages_when_asked() {
        let options = RegionOptions { largest: Pages::Small, ..RegionOptions::default() };
        let region = Region::shared(1, options).unwrap();
        assert_eq!((region.pages(), region.len(), region.why_smaller()), (Pages::Small, page_size(), None));
    }

    #[test]
    fn demanding_what_is_not_there_names_the_figures() {
        let options = RegionOptions { largest: Pages::Huge1G, smallest: Pages::Huge1G, lock: false };
        for error in [Region::private(3 << 40, options), Region::shared(3 << 40, options)] {
            let Err(RegionError::NoHugePages { needed, .. }) = error else { panic!("3 TiB of huge pages") };
            assert_eq!(needed, 3 << 10);
        }
        assert!(matches!(Region::private(0, RegionOptions::default()), Err(RegionError::Length(0))));
        assert!(matches!(Region::shared(usize::MAX, RegionOptions::default()), Err(RegionError::Length(_))));
    }

    #[test]
    fn an_unsealed_or_wrong_descriptor_is_refused() {
        let fd = memfd_create(c"x", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 8192).unwrap();
        assert!(matches!(Region::adopt(fd, 8192, true), Err(RegionError::NotARegion(_))));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(matches!(Region::adopt(file.into(), 4096, false), Err(RegionError::NotARegion(_))));
        let sparse = memfd_create(c"x", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&sparse, 1 << 30).unwrap();
        fcntl_add_seals(&sparse, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        assert!(matches!(Region::adopt(sparse, 1 << 30, true), Err(RegionError::NotARegion(_))));
        let region = Region::shared(8192, RegionOptions::default()).unwrap();
        region.seal_seals().unwrap();
        let fd = region.hand_out().unwrap();
        assert!(matches!(Region::adopt(fd, region.len() * 2, true), Err(RegionError::NotARegion(_))));
    }

    #[test]
    fn adopted_memory_is_the_same_memory_until_it_is_replaced() {
        let region = Region::shared(4096, RegionOptions::default()).unwrap();
        region.seal_seals().unwrap();
        let fd = region.hand_out().unwrap();
        let peer = Region::adopt(fd, region.len(), true).unwrap();
        fill(&region, 1);
        assert_eq!(first(&peer), 1);
        let before = region.base();
        region.replace().unwrap();
        assert_eq!((region.base(), first(&region)), (before, 1));
        fill(&peer, 9);
        assert_eq!(first(&region), 1, "the peer writes to an orphan");
        fill(&region, 2);
        assert_eq!(first(&peer), 9);
    }

    #[test]
    fn a_read_only_region_cannot_be_mapped_writable() {
        let region = Region::shared(4096, RegionOptions::default()).unwrap();
        region.seal_read_only().unwrap();
        region.seal_seals().unwrap();
        fill(&region, 3);
        let clone = || region.hand_out().unwrap();
        assert!(matches!(Region::adopt(clone(), region.len(), true), Err(RegionError::NotARegion(_))));
        let peer = Region::adopt(clone(), region.len(), false).unwrap();
        assert_eq!(first(&peer), 3);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        assert!(map_aligned_as(region.len(), Some(clone().as_fd()), prot).is_err());
    }

    #[test]
    fn nothing_is_left_mapped() {
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        let region = Region::shared(64 << 20, RegionOptions::default()).unwrap();
        let address = std::format!("{:x}-", region.base().as_ptr() as usize);
        assert!(maps().contains(&address));
        drop(region);
        assert!(!maps().contains(&address));
    }
}
