//! The end that is measured against: it does what the origin asks, and leaves its memory alone meanwhile.

use std::time::Duration;

use verbring::RemoteKey;

use super::courier::Courier;
use super::definitions;
use super::device::Measured;
use super::ends::{End, Kind, Message, PATIENCE, Sizes, Windows};
use super::origin::{said_core, saying_core};
use super::pattern::{self, Part};
use super::rows::{Place, Row};
use super::{PerfError, Verdict};

/// Serves one run: waits for the origin, and does what it asks until it says goodbye.
pub(crate) fn serve<D: Measured>(mut end: End<D>, core: Option<usize>, wait: Duration) -> Result<(), PerfError> {
    end.accept(wait)?;
    let hello = end.listen(Some(PATIENCE))?;
    let [inbox, outbox, their_core, their_yields, seed] = hello.arguments;
    if hello.kind != Kind::Hello {
        return Err(PerfError::Protocol("it does not say hello"));
    }
    end.yields |= their_yields != 0 || (core.is_some() && said_core(their_core) == core);
    let windows = Windows::open(&mut end, Sizes { inbox, outbox })?;
    let theirs = end.import(&hello.remote)?;
    let answer = [saying_core(core), u64::from(end.yields), windows.pages as u64, 0, 0];
    let mut welcome = Message::new(Kind::Welcome, answer);
    welcome.remote = windows.remote;
    end.tell(&welcome)?;
    Target { end, windows, theirs, seed }.run()
}

struct Target<D: Measured> {
    end: End<D>,
    windows: Windows,
    theirs: RemoteKey,
    seed: u64,
}

impl<D: Measured> Target<D> {
    fn run(&mut self) -> Result<(), PerfError> {
        loop {
            let message = self.end.listen(None)?;
            let answer = match message.kind {
                Kind::Prepare => {
                    self.prepare(&self.row(&message)?);
                    [0; 5]
                }
                Kind::Echo => self.echo(&self.row(&message)?)?,
                Kind::Check => match self.check(&self.row(&message)?, message.arguments[3]) {
                    Verdict::Right => [1, 0, 0, 0, 0],
                    Verdict::WrongAt(offset) => [0, offset as u64, 0, 0, 0],
                },
                Kind::Bye => return Ok(()),
                _ => return Err(PerfError::Protocol("it asks what cannot be asked")),
            };
            self.end.tell(&Message::new(Kind::Done, answer))?;
        }
    }

    /// The row of a message, if it fits into the windows.
    fn row(&self, message: &Message) -> Result<Row, PerfError> {
        let row = message.row()?;
        let is_echo = row.test.kind.is_ping_pong();
        let room =
            if is_echo { self.windows.inbox.len().min(self.windows.outbox.len()) } else { self.windows.inbox.len() };
        let fits = row.layout.extent() <= room as u64;
        if fits { Ok(row) } else { Err(PerfError::Protocol("it asks for more than it announced")) }
    }

    fn prepare(&self, row: &Row) {
        self.windows.inbox.fill(0, row.layout.extent() as usize, 0);
        if row.test.kind.is_get() {
            pattern::fill_slots(&self.windows.inbox, self.seed, row, Place::Remote, Part::Last);
        }
        if row.test.kind.is_ping_pong() {
            pattern::fill_slots(&self.windows.outbox, self.seed, row, Place::Local, Part::Echo);
        }
    }

    /// Sends rounds back until the origin says stop.
    fn echo(&mut self, row: &Row) -> Result<[u64; 5], PerfError> {
        let courier = Courier::new(row, self.theirs);
        // The message that ends it needs a receive.
        self.end.receive()?;
        self.end.tell(&Message::new(Kind::Done, [0; 5]))?;
        let mut round = 1;
        while courier.await_round(&mut self.end, &self.windows, round)? {
            courier.send_round(&mut self.end, &self.windows, round)?;
            round += 1;
        }
        match self.end.listen(Some(PATIENCE))?.kind {
            Kind::Stop => Ok([round - 1, 0, 0, 0, 0]),
            _ => Err(PerfError::Protocol("it ends a test in another way")),
        }
    }

    /// Compares what arrived. `count`: of rounds, or of atomics.
    fn check(&self, row: &Row, count: u64) -> Verdict {
        match row.test.kind {
            kind if kind.is_ping_pong() => {
                Courier::new(row, self.theirs).check(&self.windows.inbox, self.seed, Part::Last, count)
            }
            definitions::Kind::FetchAdd | definitions::Kind::CompareSwap => {
                let at = row.layout.at(Place::Remote, 0) as usize;
                if self.windows.inbox.load(at) == count { Verdict::Right } else { Verdict::WrongAt(at) }
            }
            _ => pattern::first_wrong_of_slots(&self.windows.inbox, self.seed, row, Place::Remote, Part::Last).into(),
        }
    }
}
