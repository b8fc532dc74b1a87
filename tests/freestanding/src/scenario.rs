//! What is run on every freestanding target: two engines over local devices, joined, that put, get, add and signal; then
//! two NICs (`nics.rs`).

use core::fmt::Write;
use core::mem::MaybeUninit;
use core::ptr::NonNull;

use verbring::{
    Arena, Config, Engine, Memory, Notice, Opts, PeerId, RemoteKey, Rights, Signal, SizeClass, Slab, Sqe, Status,
    Window,
};
use verbring_sys::local::{Local, Wire, WireRef};

/// What joins the two devices.
static WIRE: Wire = Wire::new();

const CLASSES: [SizeClass; 2] = [SizeClass { size: 256, count: 8 }, SizeClass { size: 4096, count: 4 }];

/// Deals out the static memory, so that each engine, device and slab has its own.
pub(crate) struct Dealer(&'static mut [MaybeUninit<u8>]);

impl Dealer {
    pub(crate) fn deal(&mut self, bytes: usize) -> Result<&'static mut [MaybeUninit<u8>], &'static str> {
        let all = core::mem::take(&mut self.0);
        if bytes > all.len() {
            return Err("the static memory is too small");
        }
        let (dealt, rest) = all.split_at_mut(bytes);
        self.0 = rest;
        Ok(dealt)
    }

    pub(crate) fn arena(&mut self, bytes: usize) -> Result<Arena, &'static str> {
        self.deal(bytes).map(Arena::from_static)
    }

    fn engine(&mut self, node: u64) -> Result<Engine<Local>, &'static str> {
        let device = Local::new(self.arena(Local::bytes())?, node).map_err(|_| "no room for a device")?;
        let slab = Slab::new(self.arena(Slab::bytes(&CLASSES))?, &CLASSES).map_err(|_| "no room for a slab")?;
        let config = Config {
            sq_entries: 16,
            cq_entries: 32,
            max_outstanding: 16,
            max_peers: 4,
            max_windows: 8,
            max_imports: 8,
            node,
            secret: [node as u8; 16],
        };
        Engine::new(device, self.arena(config.bytes())?, Some(slab), config).map_err(|_| "no engine")
    }

    fn window(&mut self, engine: &mut Engine<Local>, bytes: usize) -> Result<Window, &'static str> {
        let base = NonNull::from(self.deal(bytes + 64)?).cast::<u8>();
        // SAFETY: 64 bytes more than needed were dealt, for the alignment.
        let base = unsafe { base.add(base.align_offset(64)) };
        // SAFETY: as above; nobody else was dealt these bytes.
        unsafe { base.write_bytes(0, bytes) };
        // SAFETY: static memory, which nothing else refers to.
        unsafe { engine.register(Memory::Private { base, len: bytes }, Rights::all()) }.map_err(|_| "no window")
    }
}

/// Runs once. `memory` is [`arena::SIZE`](crate::arena::SIZE) bytes; the error says what went wrong.
pub fn run(out: &mut dyn Write, memory: &'static mut [MaybeUninit<u8>]) -> Result<(), &'static str> {
    let mut dealer = Dealer(memory);
    let (mut a, mut b) = (dealer.engine(1)?, dealer.engine(2)?);
    // SAFETY: a new connection, which the engines do not know of yet.
    let (of_a, of_b) = unsafe { (a.device_mut(), b.device_mut()) };
    Local::join(of_a, of_b, WireRef::Static(&WIRE)).map_err(|_| "the devices do not join")?;
    let (Some(ab), Some(ba)) = (connected(&mut a), connected(&mut b)) else { return Err("the engines do not meet") };
    let window = dealer.window(&mut b, 8192)?;
    let key = import(&mut a, &mut b, ab, &window)?;
    put_and_get(&mut a, &window, key)?;
    words(&mut a, &window, key)?;
    message(&mut a, &mut b, ab, ba)?;
    crate::nics::run(&mut dealer)?;
    writeln!(out, "puts, gets, atomics, signals and a message between two engines").map_err(|_| "cannot print")?;
    writeln!(out, "a write, a read and an atomic between two NICs").map_err(|_| "cannot print")
}

fn connected(engine: &mut Engine<Local>) -> Option<PeerId> {
    match engine.control(0) {
        Some(Notice::Connected { peer, .. }) => Some(peer),
        _ => None,
    }
}

fn import(
    a: &mut Engine<Local>,
    b: &mut Engine<Local>,
    peer: PeerId,
    window: &Window,
) -> Result<RemoteKey, &'static str> {
    let remote = b.remote(window).map_err(|_| "no Remote")?;
    let key = a.import(peer, &remote).map_err(|_| "no import")?;
    if b.control(1).is_some() || a.control(1) != Some(Notice::Imported { key }) {
        return Err("the import was not granted");
    }
    Ok(key)
}

/// Submits, polls, and takes the one completion that is there.
fn one(engine: &mut Engine<Local>) -> Result<verbring::Completion, &'static str> {
    engine.submit(2);
    engine.poll(2);
    let done = engine.reap().ok_or("no completion")?;
    if done.status != Status::Success { Err("an operation failed") } else { Ok(done) }
}

fn put_and_get(a: &mut Engine<Local>, window: &Window, key: RemoteKey) -> Result<(), &'static str> {
    let mut buf = a.alloc(3000).map_err(|_| "no block")?;
    for (i, byte) in buf.iter_mut().enumerate() {
        *byte = (i * 7) as u8;
    }
    a.put(buf, key.at(100), Opts::default()).map_err(|_| "no room")?;
    let mut buf = one(a)?.buf.ok_or("the block did not come back")?;
    if window.load(104) != u64::from_le_bytes([28, 35, 42, 49, 56, 63, 70, 77]) {
        return Err("the put did not arrive");
    }
    buf.fill(0);
    a.get(buf, key.at(100), Opts::default()).map_err(|_| "no room")?;
    let buf = one(a)?.buf.ok_or("the block did not come back")?;
    if !buf.iter().enumerate().all(|(i, byte)| *byte == (i * 7) as u8) {
        return Err("the get brought other bytes");
    }
    let signal = Signal::Add(5);
    a.put_signal(buf, key.at(4096), 1, signal, Opts::default()).map_err(|_| "no room")?;
    one(a)?;
    if window.load(8) != 5 { Err("the signal did not arrive") } else { Ok(()) }
}

fn words(a: &mut Engine<Local>, window: &Window, key: RemoteKey) -> Result<(), &'static str> {
    for (sqe, old, new) in [
        (Sqe::put_word(40, key.at(0)), 0, 40),
        (Sqe::fetch_add(key.at(0), 2), 40, 42),
        (Sqe::compare_swap(key.at(0), 42, 7), 42, 7),
        (Sqe::compare_swap(key.at(0), 42, 8), 7, 7),
        (Sqe::swap(key.at(0), 9), 7, 9),
    ] {
        a.push(sqe).map_err(|_| "no room")?;
        if one(a)?.value != old || window.load(0) != new {
            return Err("an atomic is wrong");
        }
    }
    Ok(())
}

fn message(a: &mut Engine<Local>, b: &mut Engine<Local>, ab: PeerId, ba: PeerId) -> Result<(), &'static str> {
    let room = b.alloc(64).map_err(|_| "no block")?;
    b.recv(room, ba, Opts::default()).map_err(|_| "no room")?;
    b.submit(3);
    let mut text = a.alloc(5).map_err(|_| "no block")?;
    text.copy_from_slice(b"hello");
    a.send(text, ab, 77, Opts::default()).map_err(|_| "no room")?;
    one(a)?;
    let got = one(b)?;
    let is_it = got.imm == 77 && got.buf.as_ref().is_some_and(|buf| buf[..] == *b"hello");
    if is_it { Ok(()) } else { Err("the message is another") }
}
