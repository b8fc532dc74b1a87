//! What a pull has on disk: FILE.part while it is incomplete, FILE.part.state beside it, then FILE.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;
use verbring::Status;

use super::{Stop, told};
use crate::files::{CHUNK, Opened, Progress, chunk_len, chunks, say};

/// Where the file is to go.
pub(super) struct Output {
    out: PathBuf,
    part: PathBuf,
    state: PathBuf,
    dir: PathBuf,
    force: bool,
}

impl Output {
    /// Says what is wrong with a path before anything is fetched.
    pub(super) fn new(out: &Path, force: bool) -> Result<Output, String> {
        let shown = out.display();
        let Some(name) = out.file_name() else { return Err(format!("{shown} is no file name; give --out one")) };
        let dir = match out.parent() {
            Some(dir) if dir != Path::new("") => dir.to_owned(),
            _ => PathBuf::from("."),
        };
        match fs::metadata(&dir) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Err(format!("{} is no directory; give --out another path", dir.display())),
            Err(error) => return Err(format!("the directory {} cannot be used: {error}", dir.display())),
        }
        let beside = |suffix: &str| {
            let mut name = name.to_owned();
            name.push(suffix);
            out.with_file_name(name)
        };
        let output = Output { part: beside(".part"), state: beside(".part.state"), out: out.to_owned(), dir, force };
        match fs::metadata(out) {
            Ok(meta) if !meta.is_file() => Err(format!(
                "{shown} is a directory or a device; pull writes plain files only: give --out another path"
            )),
            Ok(_) if !force => Err(output.exists()),
            // A link to nothing is something, too.
            Err(_) if !force && fs::symlink_metadata(out).is_ok() => Err(output.exists()),
            _ => Ok(output),
        }
    }

    fn exists(&self) -> String {
        format!("{} exists; give --force to replace it", self.out.display())
    }
}

/// FILE.part, of this process alone until it is dropped.
pub(super) struct Part {
    output: Output,
    pub(super) file: File,
}

impl Part {
    /// Opens or makes it. What is there of another file is thrown away.
    pub(super) fn open(output: Output, opened: &Opened) -> Result<Part, String> {
        let shown = output.part.display();
        let failed = |error: io::Error| format!("{shown} cannot be written: {error}");
        let file = loop {
            let mut options = OpenOptions::new();
            let file =
                options.read(true).write(true).create(true).truncate(false).open(&output.part).map_err(failed)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(format!("another pull writes {shown}; wait for it, or end it")),
                Err(errno) => return Err(failed(errno.into())),
            }
            // Another pull may have renamed it before it could be locked: then it is that one's FILE.
            let meta = file.metadata().map_err(failed)?;
            if fs::metadata(&output.part).is_ok_and(|named| (named.dev(), named.ino()) == (meta.dev(), meta.ino())) {
                break file;
            }
        };
        let is_empty = file.metadata().map_err(failed)?.len() == 0;
        let identity = format!("verbring pull 1\nlength {}\ncrc32 {:08x}\n", opened.len, opened.crc);
        if is_empty || fs::read_to_string(&output.state).is_ok_and(|found| found == identity) {
            fs::write(&output.state, identity)
        } else {
            say(format_args!("{shown} is of another file, or of another state of it: starting anew"));
            file.set_len(0).and_then(|()| fs::write(&output.state, identity))
        }
        .map_err(failed)?;
        Ok(Part { output, file })
    }

    /// The chunks that are not there, or not as they should be.
    pub(super) fn missing(&self, table: &[u32], len: u64) -> Result<Vec<u64>, String> {
        let failed = |error| format!("{} cannot be read: {error}", self.output.part.display());
        let there = self.file.metadata().map_err(failed)?.len().min(len);
        if there == 0 {
            return Ok((0..chunks(len)).collect());
        }
        let mut progress = Progress::new("checking what is there".into(), there);
        let mut buffer = vec![0; CHUNK as usize];
        let mut missing = Vec::new();
        for (chunk, crc) in (0..).zip(table) {
            let bytes = &mut buffer[..chunk_len(len, chunk) as usize];
            let is_there = chunk * CHUNK + bytes.len() as u64 <= there;
            if is_there {
                self.file.read_exact_at(bytes, chunk * CHUNK).map_err(failed)?;
                progress.at(chunk * CHUNK);
            }
            if !is_there || crc32fast::hash(bytes) != *crc {
                missing.push(chunk);
            }
        }
        drop(progress);
        let kept = table.len() - missing.len();
        say(format_args!("resuming: {kept} of {} chunks are there and as they should be", table.len()));
        Ok(missing)
    }

    /// Bytes that can still be written to the file system.
    fn free(&self) -> Option<u64> {
        let stat = rustix::fs::fstatvfs(&self.file).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn no_space(&self, needed: u64) -> String {
        format!(
            "no space left for {}: {needed} more bytes are needed and {} are free; make room and run the same command \
             again, what is there is kept",
            self.output.part.display(),
            self.free().map_or("unknown".into(), |free| free.to_string())
        )
    }

    /// Whether the rest will fit, before it is fetched.
    pub(super) fn check_space(&self, len: u64, missing: u64) -> Result<(), String> {
        // Chunks that are wrong have their blocks already.
        let allocated = self.file.metadata().map_or(0, |meta| meta.blocks() * 512);
        let needed = len.saturating_sub(allocated).min(missing);
        if self.free().is_some_and(|free| free < needed) { Err(self.no_space(needed)) } else { Ok(()) }
    }

    /// Why fetching stopped, for a person. What was written stays.
    pub(super) fn explain(&self, stop: Stop, server: &str) -> String {
        let shown = self.output.part.display();
        match stop {
            // What is there is of a file that is no more.
            Stop::Status(Status::StaleEpoch) => told(Status::StaleEpoch, server),
            Stop::Status(status) => format!("{} ({shown} is kept)", told(status, server)),
            Stop::Other(what) => what,
            Stop::Write(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOSPC | Errno::DQUOT) => {
                    let there = self.file.metadata().map_or(0, |meta| meta.blocks() * 512);
                    let total = fs::read_to_string(&self.output.state).ok();
                    let total = total.and_then(|s| s.lines().find_map(|l| l.strip_prefix("length ")?.parse().ok()));
                    self.no_space(total.unwrap_or(there).saturating_sub(there))
                }
                Some(Errno::FBIG) => {
                    format!("{shown} may not become so large: {error}; see `ulimit -f` and what the file system allows")
                }
                _ => format!("{shown} cannot be written: {error}"),
            },
        }
    }

    /// Puts it on disk, and gives it its name.
    pub(super) fn complete(&self, len: u64) -> Result<(), String> {
        let Output { out, part, state, dir, force } = &self.output;
        let failed = |error: io::Error| format!("{} cannot be completed: {error}", part.display());
        self.file.set_len(len).and_then(|()| self.file.sync_all()).map_err(failed)?;
        let flags = if *force { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        match rustix::fs::renameat_with(CWD, part, CWD, out, flags) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(self.output.exists()),
            // Not every file system knows the flag.
            Err(Errno::INVAL) => fs::rename(part, out).map_err(failed)?,
            Err(errno) => return Err(failed(errno.into())),
        }
        // The name is on disk, too, before this says so.
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)?;
        let _ = fs::remove_file(state);
        Ok(())
    }
}
