//! What `serve` and `pull` have in common: how a file lies in memory, their few messages, and how they speak to people.
//!
//! A served file is one region that peers may only read: its bytes and, from the next multiple of 8 on, the CRC-32 of
//! each chunk (4 bytes each, little-endian). A client asks for it by a message, imports the region, and gets from it;
//! the server has no part in that.
//!
//! ```text
//! offset  bytes  request
//!      0      4  magic "vrbf"
//!      4      1  version 1
//!      5      1  kind: 1 open, 2 list
//!      6      2  zero
//!      8      4  list: how many files to skip; open: zero
//!     12         open: the file's name, 1 to 255 bytes of UTF-8; list: nothing
//!
//! offset  bytes  answer
//!      0      4  magic "vrbf"
//!      4      1  version 1
//!      5      1  kind: 1 opened, 2 listing, 3 no such file, 4 not now (it is being read), 5 bad request
//!      6      2  zero
//!      8      8  opened: length of the file in bytes
//!     16      4  opened: CRC-32 of the whole file
//!     20      4  opened: zero
//!     24     64  opened: the Remote of its region
//!      8      4  listing: how many files there are
//!     12         listing: for each file a byte, the length of its name, and the name, as many as there is room for
//! ```
//! All numbers are little-endian. One request of a client is under way at a time; it has room for an answer of
//! [`MESSAGE_MAX`] bytes. Either side takes what the other says for input: anything not listed here is refused.

use std::fmt::Display;
use std::io::{IsTerminal, Write, stderr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crc32fast::Hasher;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use verbring::{REMOTE_BYTES, Remote};

/// Bytes that have one checksum and come by one get: large beside the cost of an operation, small beside a cache.
pub(crate) const CHUNK: u64 = 1 << 20;
/// The longest message of either side.
pub(crate) const MESSAGE_MAX: usize = 4096;
/// The longest name of a file (NAME_MAX of Linux).
pub(crate) const NAME_MAX: usize = 255;
/// Files that one server offers. Each may have two registrations for a moment, when it is read again; a device has 256.
pub(crate) const MAX_FILES: usize = 120;

const MAGIC: [u8; 4] = *b"vrbf";
const VERSION: u8 = 1;
const HEAD: usize = 8;
const OPENED_BYTES: usize = HEAD + 16 + REMOTE_BYTES;

/// Chunks of a file of `len` bytes.
pub(crate) fn chunks(len: u64) -> u64 {
    len.div_ceil(CHUNK)
}

/// The length of a chunk: the last one is shorter.
pub(crate) fn chunk_len(len: u64, chunk: u64) -> u64 {
    len.saturating_sub(chunk * CHUNK).min(CHUNK)
}

/// Where the checksums begin in the region of a file.
pub(crate) fn table_at(len: u64) -> Option<u64> {
    len.checked_next_multiple_of(8)
}

/// The bytes of a file's region; never 0. None if they do not fit the address space.
pub(crate) fn region_len(len: u64) -> Option<u64> {
    let all = table_at(len)?.checked_add(4 * chunks(len))?;
    (all < isize::MAX as u64).then_some(all.max(8))
}

/// The CRC-32 of a file, out of those of its chunks.
pub(crate) fn whole_crc(len: u64, table: &[u32]) -> u32 {
    let mut whole = Hasher::new();
    for (chunk, crc) in (0..).zip(table) {
        whole.combine(&Hasher::new_with_initial_len(*crc, chunk_len(len, chunk)));
    }
    whole.finalize()
}

/// What a client asks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Let me have this file.
    Open(String),
    /// What do you have? Leave out the first so many.
    List(u32),
}

/// What the server says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Here it is.
    Opened(Opened),
    /// What there is.
    Listing { total: u32, names: Vec<String> },
    /// There is no file of this name.
    NoSuchFile,
    /// The file changed and is being read again.
    NotNow,
    /// That was no request of this version.
    BadRequest,
}

/// A file that may be pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    /// Bytes of the file.
    pub(crate) len: u64,
    /// The CRC-32 of all of them.
    pub(crate) crc: u32,
    /// Its region.
    pub(crate) remote: Remote,
}

fn head(kind: u8) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend([VERSION, kind, 0, 0]);
    bytes
}

/// The kind of a message and what follows its head.
fn split(message: &[u8]) -> Option<(u8, &[u8])> {
    let (head, rest) = message.split_first_chunk::<HEAD>()?;
    let [magic @ .., version, kind, 0, 0] = head else { return None };
    (*magic == MAGIC && *version == VERSION && message.len() <= MESSAGE_MAX).then_some((*kind, rest))
}

fn name_of(bytes: &[u8]) -> Option<String> {
    if !(1..=NAME_MAX).contains(&bytes.len()) {
        return None;
    }
    std::str::from_utf8(bytes).ok().map(str::to_owned)
}

fn take_u32(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u32::from_le_bytes(*number), rest))
}

impl Request {
    /// Its bytes. A name is not longer than [`NAME_MAX`].
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, skip, name) = match self {
            Request::Open(name) => (1, 0, name.as_str()),
            Request::List(skip) => (2, *skip, ""),
        };
        [&head(kind), &u32::to_le_bytes(skip)[..], name.as_bytes()].concat()
    }

    /// None for anything that no client of this version asks.
    pub(crate) fn decode(message: &[u8]) -> Option<Request> {
        let (kind, rest) = split(message)?;
        match (kind, take_u32(rest)?) {
            (1, (0, name)) => Some(Request::Open(name_of(name)?)),
            (2, (skip, [])) => Some(Request::List(skip)),
            _ => None,
        }
    }
}

impl Answer {
    /// Its bytes: at most [`MESSAGE_MAX`]. Names that find no room in a listing are left out.
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Answer::Opened(Opened { len, crc, remote }) => {
                let zero = [0; 4];
                [&head(1), &len.to_le_bytes()[..], &crc.to_le_bytes(), &zero, &remote.to_bytes()].concat()
            }
            Answer::Listing { total, names } => {
                let mut bytes = [head(2), total.to_le_bytes().to_vec()].concat();
                for name in names.iter().filter(|name| name.len() <= NAME_MAX) {
                    if bytes.len() + 1 + name.len() > MESSAGE_MAX {
                        break;
                    }
                    bytes.push(name.len() as u8);
                    bytes.extend(name.as_bytes());
                }
                bytes
            }
            Answer::NoSuchFile => head(3),
            Answer::NotNow => head(4),
            Answer::BadRequest => head(5),
        }
    }

    /// None for anything that no server of this version says.
    pub(crate) fn decode(message: &[u8]) -> Option<Answer> {
        let (kind, rest) = split(message)?;
        match (kind, rest) {
            (1, _) if message.len() == OPENED_BYTES => {
                let (len, rest) = rest.split_first_chunk()?;
                let (crc, rest) = take_u32(rest)?;
                let (0, rest) = take_u32(rest)? else { return None };
                let remote = Remote::from_bytes(rest.try_into().ok()?).ok()?;
                let len = u64::from_le_bytes(*len);
                let is_all_there = region_len(len).is_some_and(|needed| needed <= remote.len);
                is_all_there.then_some(Answer::Opened(Opened { len, crc, remote }))
            }
            (2, _) => {
                let (total, mut rest) = take_u32(rest)?;
                let mut names = Vec::new();
                while let Some((len, after)) = rest.split_first() {
                    let (name, after) = after.split_at_checked(usize::from(*len))?;
                    names.push(name_of(name)?);
                    rest = after;
                }
                Some(Answer::Listing { total, names })
            }
            (3, []) => Some(Answer::NoSuchFile),
            (4, []) => Some(Answer::NotNow),
            (5, []) => Some(Answer::BadRequest),
            _ => None,
        }
    }
}

/// Tells a person. Nobody may be there to read it any more; the work goes on.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(stderr().lock(), "{line}");
}

/// The exit code of a command, its error told.
pub(crate) fn finish(outcome: Result<(), String>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// How long something takes: a bar on a terminal, else a line now and then.
pub(crate) struct Progress {
    what: String,
    total: u64,
    bar: Option<ProgressBar>,
    next_line: Instant,
}

impl Progress {
    /// Between two lines.
    const LINE_EVERY: Duration = Duration::from_secs(5);

    pub(crate) fn new(what: String, total: u64) -> Progress {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total).with_message(what.clone());
            let style = "{msg} [{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
            bar.with_style(ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar()))
        });
        Progress { what, total, bar, next_line: Instant::now() + Self::LINE_EVERY }
    }

    /// So many bytes are done.
    pub(crate) fn at(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if Instant::now() >= self.next_line {
            self.next_line = Instant::now() + Self::LINE_EVERY;
            let percent = done * 100 / self.total.max(1);
            say(format_args!("{}: {percent} % ({} of {})", self.what, HumanBytes(done), HumanBytes(self.total)));
        }
    }
}

impl Drop for Progress {
    /// What comes after the bar has the line for itself.
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use verbring::{Domain, Rights};

    use super::*;

    fn opened(len: u64) -> Answer {
        let remote = Remote {
            node: 7,
            key: 0x1001,
            epoch: 3,
            address: 0x7f00_0000_0000,
            len: region_len(len).unwrap_or(0),
            rights: Rights::READ,
            domain: Domain::Cpu,
            token: [9; 16],
        };
        Answer::Opened(Opened { len, crc: 0x1234_5678, remote })
    }

    fn answers() -> Vec<Answer> {
        let names = vec!["a".to_string(), "n".repeat(255), "Gewichte – v2.bin".to_string()];
        let listing = Answer::Listing { total: 9, names };
        vec![opened(0), opened(CHUNK + 1), listing, Answer::NoSuchFile, Answer::NotNow, Answer::BadRequest]
    }

    #[test]
    fn messages_there_and_back() {
        for request in [Request::Open("weights.bin".into()), Request::Open("x".repeat(255)), Request::List(3)] {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        for answer in answers() {
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        }
    }

    /// Whatever is cut off or changed, the answer is another one or none, and nothing panics.
    #[test]
    fn damaged_messages_are_refused_or_canonical() {
        let requests = [Request::Open("weights.bin".into()), Request::List(3)].map(|r| r.encode());
        for message in requests.into_iter().chain(answers().iter().map(Answer::encode)) {
            for len in 0..message.len() {
                let cut = &message[..len];
                assert!(Request::decode(cut).is_none_or(|r| r.encode() == cut));
                assert!(Answer::decode(cut).is_none_or(|a| a.encode() == cut));
            }
            for bit in 0..message.len() * 8 {
                let mut other = message.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                assert!(Request::decode(&other).is_none_or(|r| r.encode() == other));
                assert!(Answer::decode(&other).is_none_or(|a| a.encode() == other), "bit {bit}");
            }
        }
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        assert_eq!(Request::decode(&Request::Open(String::new()).encode()), None);
        assert_eq!(Request::decode(&Request::Open("x".repeat(256)).encode()), None);
        assert_eq!(Request::decode(&[&head(1), &[0; 4][..], &[0xff, 0xfe]].concat()), None, "no UTF-8");
        let Answer::Opened(honest) = opened(100) else { unreachable!() };
        for len in [honest.len + 32, u64::MAX, u64::MAX - 7, 1 << 62] {
            assert_eq!(Answer::decode(&Answer::Opened(Opened { len, ..honest }).encode()), None, "{len}");
        }
        let long = Answer::Listing { total: 100, names: vec!["n".repeat(200); 100] }.encode();
        assert!(long.len() <= MESSAGE_MAX);
        assert!(matches!(Answer::decode(&long), Some(Answer::Listing { total: 100, names }) if names.len() == 20));
    }

    #[test]
    fn checksums_of_chunks_make_that_of_the_file() {
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5] {
            let bytes: Vec<u8> = (0..len).map(|i| ((i * 31) >> 3) as u8).collect();
            let table: Vec<u32> = bytes.chunks(CHUNK as usize).map(crc32fast::hash).collect();
            assert_eq!(table.len() as u64, chunks(len));
            assert_eq!(whole_crc(len, &table), crc32fast::hash(&bytes), "{len}");
            assert_eq!((0..chunks(len)).map(|chunk| chunk_len(len, chunk)).sum::<u64>(), len);
        }
    }
}
