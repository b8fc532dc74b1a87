//! Puts and gets between two engines. Here both are in one process; in two, one of them runs on the other side.

use std::time::Duration;
use verbring::{Clock, Config, Opts, Rights, SizeClass, Sqe, open_shm};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let classes = [SizeClass { size: 4096, count: 16 }];
    let (clock, second) = (Clock::start(), Duration::from_secs(1));
    let mut server = open_shm("example-server", Config::default(), &classes)?;
    let mut client = open_shm("example-client", Config::default(), &classes)?;

    // The server offers memory; its Remote, 64 bytes, reaches the client by any means.
    let window = server.window(1 << 20, Rights::all())?;
    let remote = server.remote(&window)?;

    // Connecting and importing take both sides, so the server runs on a thread of its own.
    let server = verbring::pinned::start(server, None, clock)?;
    let peer = client.connect_wait("example-server", &clock, second)?;
    let key = client.import_wait(peer, &remote, &clock, second)?;

    // From here on the server does nothing.
    let mut buf = client.alloc(11)?;
    buf.copy_from_slice(b"hello rings");
    client.put(buf, key.at(64), Opts::default()).map_err(|(why, _)| why)?;
    client.push(Sqe::fetch_add(key.at(0), 5).user_data(7))?;
    let put = client.wait(&clock, second)?;
    let add = client.wait(&clock, second)?;
    println!("put: {:?}, add: {:?}, was {}", put.status, add.status, add.value);

    client.get(put.buf.ok_or("the block comes back")?, key.at(64), Opts::default()).map_err(|(why, _)| why)?;
    let got = client.wait(&clock, second)?;
    println!("got: {}", String::from_utf8_lossy(got.buf.as_deref().unwrap_or_default()));
    assert_eq!(window.load(0), 5);
    drop(server);
    Ok(())
}
