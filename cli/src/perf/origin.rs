//! The end that measures.

use verbring::{Local, RemoteKey, Sqe, SqeFlags, Target};

use super::courier::Courier;
use super::definitions::{Kind, Unit};
use super::device::Measured;
use super::ends::{self, End, Message, Sizes, Windows};
use super::measure::{Times, measure};
use super::pattern::{self, Part};
use super::report::Figures;
use super::rows::{Place, Row, Walk};
use super::{PerfError, Verdict};

/// A core in a message: 0 is none.
pub(crate) fn saying_core(core: Option<usize>) -> u64 {
    core.map_or(0, |core| core as u64 + 1)
}

/// The core of a message.
pub(crate) fn said_core(word: u64) -> Option<usize> {
    word.checked_sub(1).map(|core| core as usize)
}

/// Bytes that the windows of (origin, target) need. Big are those that the bytes go from and to, the other two are used
/// by ping-pongs only.
pub(crate) fn sizes(rows: &[Row]) -> (Sizes, Sizes) {
    let longest = |only_ping_pong: bool| {
        let rows = rows.iter().filter(|row| !only_ping_pong || row.test.kind.is_ping_pong());
        rows.map(|row| row.layout.extent()).max().unwrap_or(0).max(4096)
    };
    let (all, back) = (longest(false), longest(true));
    (Sizes { inbox: back, outbox: all }, Sizes { inbox: all, outbox: back })
}

/// The end that measures, connected.
pub(crate) struct Origin<D: Measured> {
    end: End<D>,
    windows: Windows,
    theirs: RemoteKey,
    seed: u64,
    /// Of the large window at either end.
    pub(crate) pages: String,
    /// The target's.
    pub(crate) their_core: Option<usize>,
}

/// `Sqe::put` or `Sqe::get`.
type Make = fn(Local, Target) -> Sqe;

/// What a test goes on with from one operation to the next.
struct Run<'a, D: Measured> {
    origin: &'a mut Origin<D>,
    row: &'a Row,
    walk: Walk,
    /// Rounds, or atomics.
    count: u64,
}

impl<D: Measured> Origin<D> {
    /// Agrees with the target on memory. The connection is there.
    pub(crate) fn meet(mut end: End<D>, core: Option<usize>, rows: &[Row], seed: u64) -> Result<Origin<D>, PerfError> {
        let (own, target) = sizes(rows);
        let windows = Windows::open(&mut end, own)?;
        let words = [target.inbox, target.outbox, saying_core(core), u64::from(end.yields), seed];
        let mut hello = Message::new(ends::Kind::Hello, words);
        hello.remote = windows.remote;
        let welcome = end.ask(&hello, ends::Kind::Welcome)?;
        let [their_core, yields, their_pages, ..] = welcome.arguments;
        end.yields |= yields != 0;
        let theirs = end.import(&welcome.remote)?;
        let their_pages = pages_name(their_pages);
        let own_pages = windows.pages.name();
        let pages = if own_pages == their_pages { own_pages.to_string() } else { format!("{own_pages}/{their_pages}") };
        Ok(Origin { end, windows, theirs, seed, pages, their_core: said_core(their_core) })
    }

    /// Whether the ends share a core.
    pub(crate) fn yields(&self) -> bool {
        self.end.yields
    }

    /// What is to be known of the wire.
    pub(crate) fn wire(&self) -> Option<String> {
        self.end.engine.device().wire()
    }

    /// Says that it is over, and waits until the target has heard it: it closes the connection.
    pub(crate) fn part(mut self) -> Result<(), PerfError> {
        self.end.tell(&Message::new(ends::Kind::Bye, [0; 5]))?;
        match self.end.listen(Some(ends::PATIENCE)) {
            Err(PerfError::Lost(_) | PerfError::Operation(_)) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(PerfError::Protocol("it answers a goodbye")),
        }
    }

    /// Measures a row, and has it verified.
    pub(crate) fn measure(&mut self, row: &Row, iters: Option<u64>) -> Result<Figures, PerfError> {
        self.end.ask(&Message::of_row(ends::Kind::Prepare, row, 0), ends::Kind::Done)?;
        self.windows.inbox.fill(0, row.layout.extent().min(self.windows.inbox.len() as u64) as usize, 0);
        self.fill(row, Part::Early);
        if row.test.kind.is_ping_pong() {
            self.end.ask(&Message::of_row(ends::Kind::Echo, row, 0), ends::Kind::Done)?;
        }
        let mut run = Run { origin: self, row, walk: Walk::new(row.layout), count: 0 };
        let times = run.times(iters)?;
        let count = run.count;
        let verdict = self.verify(row, count)?;
        Ok(figures(row, &times, verdict))
    }

    /// Fills the outbox with a part's bytes, or empties it for a get.
    fn fill(&mut self, row: &Row, part: Part) {
        if row.test.kind.is_get() {
            self.windows.outbox.fill(0, row.layout.extent() as usize, 0);
        } else {
            pattern::fill_slots(&self.windows.outbox, self.seed, row, Place::Local, part);
        }
    }

    fn verify(&mut self, row: &Row, count: u64) -> Result<Verdict, PerfError> {
        let kind = row.test.kind;
        if kind.is_ping_pong() {
            let rounds = self.end.ask(&Message::new(ends::Kind::Stop, [0; 5]), ends::Kind::Done)?.arguments[0];
            if rounds != count {
                return Err(PerfError::Protocol("it counted other rounds"));
            }
        }
        if kind.is_get() {
            return Ok(
                pattern::first_wrong_of_slots(&self.windows.outbox, self.seed, row, Place::Local, Part::Last).into()
            );
        }
        let answer = self.end.ask(&Message::of_row(ends::Kind::Check, row, count), ends::Kind::Done)?;
        let verdict = match answer.arguments {
            [1, ..] => Verdict::Right,
            [_, offset, ..] => Verdict::WrongAt(offset as usize),
        };
        if verdict == Verdict::Right && kind.is_ping_pong() {
            return Ok(Courier::new(row, self.theirs).check(&self.windows.inbox, self.seed, Part::Echo, count));
        }
        Ok(verdict)
    }
}

fn pages_name(number: u64) -> &'static str {
    use verbring::Pages;
    let all = [Pages::Small, Pages::Transparent, Pages::Huge2M, Pages::Huge1G];
    all.into_iter().find(|pages| *pages as u64 == number).map_or("?", Pages::name)
}

impl<D: Measured> Run<'_, D> {
    /// Each test has a loop of its own, so that nothing is decided inside of it.
    fn times(&mut self, iters: Option<u64>) -> Result<Times, PerfError> {
        let between = |run: &mut Self| {
            run.origin.fill(run.row, Part::Last);
            Ok(())
        };
        match self.row.test.kind {
            Kind::PingPong | Kind::PingPongSignal => {
                let courier = Courier::new(self.row, self.origin.theirs);
                measure(self, iters, |run| run.round(&courier), between)
            }
            Kind::PutAlone => measure(self, iters, |run| run.alone(Sqe::put), between),
            Kind::GetAlone => measure(self, iters, |run| run.alone(Sqe::get), between),
            Kind::PutWindows | Kind::PutWindowsHot | Kind::HundredSilent => {
                measure(self, iters, |run| run.window(Sqe::put), between)
            }
            Kind::GetWindows => measure(self, iters, |run| run.window(Sqe::get), between),
            Kind::Hundred => measure(self, iters, Self::batch, between),
            Kind::FetchAdd => measure(self, iters, Self::fetch_add, between),
            Kind::CompareSwap => measure(self, iters, Self::compare_swap, between),
        }
    }

    #[inline(always)]
    fn push(&mut self, sqe: Sqe) -> Result<(), PerfError> {
        self.origin.end.engine.push(sqe).map_err(PerfError::Push)
    }

    #[inline(always)]
    fn round(&mut self, courier: &Courier<'_>) -> Result<(), PerfError> {
        self.count += 1;
        let Origin { end, windows, .. } = &mut *self.origin;
        courier.send_round(end, windows, self.count)?;
        let came = courier.await_round(end, windows, self.count)?;
        if came { Ok(()) } else { Err(PerfError::Protocol("it says something in the middle of a test")) }
    }

    /// Pushes an entry for each of the next slots.
    #[inline(always)]
    fn push_next(&mut self, count: u32, flags: SqeFlags, make: Make) -> Result<(), PerfError> {
        let Origin { end, windows, theirs, .. } = &mut *self.origin;
        // In locals, for the compiler cannot know that a ring does not lie on top of `self`.
        let (mut walk, size, theirs) = (self.walk, self.row.layout.size, *theirs);
        for _ in 0..count {
            let (local, remote) = walk.step();
            let sqe = make(windows.outbox.slice(local, size), theirs.at(remote));
            end.engine.push(sqe.flags(flags)).map_err(PerfError::Push)?;
        }
        self.walk = walk;
        Ok(())
    }

    #[inline(always)]
    fn alone(&mut self, make: Make) -> Result<(), PerfError> {
        self.push_next(1, SqeFlags::empty(), make)?;
        self.origin.end.finish(1)?;
        Ok(())
    }

    /// The last one's completion says that all are done: they are of one class.
    #[inline(always)]
    fn window(&mut self, make: Make) -> Result<(), PerfError> {
        self.push_next(self.row.batch - 1, SqeFlags::SILENT, make)?;
        self.alone(make)
    }

    #[inline(always)]
    fn batch(&mut self) -> Result<(), PerfError> {
        self.push_next(self.row.batch, SqeFlags::empty(), Sqe::put)?;
        self.origin.end.finish(self.row.batch)?;
        Ok(())
    }

    /// Atomics go to the first word.
    #[inline(always)]
    fn word(&self) -> Target {
        self.origin.theirs.at(self.row.layout.at(Place::Remote, 0))
    }

    #[inline(always)]
    fn fetch_add(&mut self) -> Result<(), PerfError> {
        self.push(Sqe::fetch_add(self.word(), 1))?;
        self.old_value()
    }

    #[inline(always)]
    fn compare_swap(&mut self) -> Result<(), PerfError> {
        self.push(Sqe::compare_swap(self.word(), self.count, self.count + 1))?;
        self.old_value()
    }

    /// Nobody else changes the word, so each old value is known.
    #[inline(always)]
    fn old_value(&mut self) -> Result<(), PerfError> {
        let old = self.origin.end.finish(1)?;
        if old != self.count {
            return Err(PerfError::Other(format!("an atomic found {old} in place of {}", self.count)));
        }
        self.count += 1;
        Ok(())
    }
}

/// What the table says of a row.
fn figures(row: &Row, times: &Times, verdict: Verdict) -> Figures {
    // Of a round trip half is told.
    let share = if row.test.kind.is_ping_pong() { 2.0 } else { 1.0 };
    let us = |picoseconds: u64| picoseconds as f64 / share / 1e6;
    let p50 = us(times.blocks.value_at_quantile(0.5));
    let value = match row.test.unit {
        Unit::Us => p50,
        Unit::MmsgPerS => f64::from(row.batch) / p50,
        Unit::GbPerS => f64::from(row.batch) * f64::from(row.layout.size) / p50 / 1e3,
    };
    Figures {
        row: *row,
        value,
        p50,
        p99: us(times.singles.value_at_quantile(0.99)),
        p999: us(times.singles.value_at_quantile(0.999)),
        max: us(times.singles.max()),
        iters: times.count,
        verdict,
    }
}
