//! Files into memory: read, summed, and found unchanged.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, SystemTime};

use indicatif::HumanBytes;
use verbring::{Pages, Region, RegionOptions};

use crate::files::{CHUNK, Progress, region_len, table_at, whole_crc};

/// Two changes of a file that are closer together may have the same time: the kernel's clock for files ticks with
/// CONFIG_HZ (10 ms at the slowest).
const FILE_TICK: Duration = Duration::from_millis(20);

/// What tells one state of a file from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    pub(super) len: u64,
    modified: (i64, i64),
}

impl Stamp {
    pub(super) fn new(meta: &Metadata) -> Stamp {
        Stamp { device: meta.dev(), inode: meta.ino(), len: meta.len(), modified: (meta.mtime(), meta.mtime_nsec()) }
    }
}

/// A file in memory, with the checksums behind it.
pub(super) struct Loaded {
    pub(super) region: Arc<Region>,
    pub(super) stamp: Stamp,
    pub(super) crc: u32,
}

/// Reads a file into a region that nobody else has yet.
pub(super) fn load(path: &Path) -> Result<Loaded, String> {
    let shown = path.display();
    let failed = |error: io::Error| format!("{shown} cannot be read: {error}");
    let changed = || format!("{shown} changed while it was read; try again when nobody writes it");
    // Before it is opened: opening a pipe would wait for its writer.
    let meta = fs::metadata(path).map_err(failed)?;
    if !meta.is_file() {
        let what = if meta.is_dir() { "a directory" } else { "no regular file" };
        return Err(format!("{shown} is {what}; name the files to be served"));
    }
    if let Some(rest) = age(&meta).and_then(|age| FILE_TICK.checked_sub(age)) {
        thread::sleep(rest);
    }
    let mut file = File::open(path).map_err(failed)?;
    let stamp = Stamp::new(&file.metadata().map_err(failed)?);
    let too_large = || format!("{shown} is too large for the address space");
    let (table, bytes) = table_at(stamp.len).zip(region_len(stamp.len)).ok_or_else(too_large)?;
    check_memory(bytes).map_err(|why| format!("{shown}: {why}"))?;
    // A huge page for a few bytes would be a waste.
    let mut pages = RegionOptions::default();
    if bytes < 1 << 20 {
        pages.largest = Pages::Small;
    }
    let region = Region::shared(bytes as usize, pages).map_err(|error| format!("no memory for {shown}: {error}"))?;
    // SAFETY: this call made the region, and no other thread or process has it before it is registered. It is zeroed,
    // and the slice is not used after this function.
    let memory = unsafe { std::slice::from_raw_parts_mut(region.base().as_ptr(), region.len()) };
    let (contents, sums) = memory.split_at_mut(table as usize);
    let mut progress = Progress::new(format!("reading {shown}"), stamp.len);
    let mut crcs = Vec::new();
    for chunk in contents[..stamp.len as usize].chunks_mut(CHUNK as usize) {
        file.read_exact(chunk).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => changed(),
            _ => failed(error),
        })?;
        crcs.push(crc32fast::hash(chunk));
        progress.at(crcs.len() as u64 * CHUNK);
    }
    for (place, crc) in sums.chunks_exact_mut(4).zip(&crcs) {
        place.copy_from_slice(&crc.to_le_bytes());
    }
    let has_more = file.read(&mut [0]).map_err(failed)? != 0;
    // By its path: it may have been replaced, too.
    if has_more || Stamp::new(&fs::metadata(path).map_err(failed)?) != stamp {
        return Err(changed());
    }
    Ok(Loaded { region: Arc::new(region), stamp, crc: whole_crc(stamp.len, &crcs) })
}

/// How long ago a file was changed; none if its time is to come.
fn age(meta: &Metadata) -> Option<Duration> {
    SystemTime::now().duration_since(meta.modified().ok()?).ok()
}

/// Whether there is room for so many bytes: without it the kernel would not refuse, it would end some process.
fn check_memory(needed: u64) -> Result<(), String> {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        info.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.split_whitespace().next()?.parse().ok())
    };
    let Some(available) = field("MemAvailable") else { return Ok(()) };
    let huge = field("HugePages_Free").zip(field("Hugepagesize")).map_or(0, |(pages, kib)| pages * kib);
    let free = available.max(huge) * 1024;
    if needed <= free {
        return Ok(());
    }
    Err(format!(
        "{needed} bytes of memory are needed and {free} are free; serve fewer or smaller files, or make room ({} too \
         little)",
        HumanBytes(needed - free)
    ))
}

/// Reads files on a thread of its own, so that nobody waits for one who did not ask for it.
pub(super) struct Loader {
    pub(super) jobs: Sender<(usize, PathBuf)>,
    pub(super) results: Receiver<(usize, Result<Loaded, String>)>,
}

impl Loader {
    pub(super) fn start() -> Result<Loader, String> {
        let (jobs, todo) = channel::<(usize, PathBuf)>();
        let (done, results) = channel();
        let thread = thread::Builder::new().name("verbring-load".into());
        let work = move || {
            for (file, path) in todo {
                if done.send((file, load(&path))).is_err() {
                    return;
                }
            }
        };
        thread.spawn(work).map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Loader { jobs, results })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_lies_before_its_checksums() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..CHUNK + 5).map(|i| (i >> 3) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let loaded = load(&path).unwrap();
        assert_eq!((loaded.stamp.len, loaded.crc), (CHUNK + 5, crc32fast::hash(&bytes)));
        // SAFETY: nobody else has the region, and it is not written any more.
        let memory = unsafe { std::slice::from_raw_parts(loaded.region.base().as_ptr(), loaded.region.len()) };
        assert_eq!(memory[..bytes.len()], bytes);
        let sums: Vec<u8> = bytes.chunks(CHUNK as usize).flat_map(|c| crc32fast::hash(c).to_le_bytes()).collect();
        assert_eq!(memory[bytes.len().next_multiple_of(8)..][..8], sums);
    }

    #[test]
    fn what_cannot_be_served_is_told() {
        let error = |path: &str| load(Path::new(path)).err().unwrap();
        assert!(error("/nowhere/file").contains("No such file"), "{}", error("/nowhere/file"));
        assert!(error("/tmp").contains("is a directory"));
        assert!(error("/dev/null").contains("no regular file"));
        // Its length is said to be 0, and there is something in it: as if somebody had written to it meanwhile.
        assert!(error("/proc/self/status").contains("changed while it was read"));
    }

    #[test]
    fn more_than_there_is_of_memory_is_refused() {
        assert!(check_memory(1).is_ok());
        assert!(check_memory(1 << 50).unwrap_err().contains("bytes of memory are needed"));
    }
}
