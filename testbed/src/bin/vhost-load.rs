//! The client of `bench-vhost`, a frontend of vhost-user-blk. See [`testbed::bench::vhost`].
//!
//! ```text
//! vhost-load run SOCKET [write] depth=N queues=N blocks=N warm=N (seconds=S | requests=N) [pid=N]
//! vhost-load hold FOLDER COUNT
//! vhost-load fill FILE BLOCKS
//! ```
//!
//! `run` prints `requests=N seconds=S p50_us=T p99_us=T cpu_us=T errors=N wrong=N`. Blocks are of 4 KiB; 0: all of a backend
//! that stores nothing, so that what was read is not verified. `warm` requests of each queue, of one block after the other, come before those that are
//! measured. The processor time is that of the process `pid`, the backend.
//!
//! `hold` connects to COUNT devices, FOLDER/diskN.sock, says `ready`, waits for a line, sends a request to each queue of
//! each, and prints `answered N`, the devices that answered. `fill` makes a file whose blocks begin with their numbers.
//!
//! Exit status 1 if a request failed or bytes were wrong.

use std::fs::File;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use testbed::bench::vhost::client::{self, End, Load};
use testbed::bench::vhost::ring::BLOCK;

const USAGE: &str =
    "vhost-load run SOCKET [write] KEY=VALUE... | hold FOLDER COUNT | fill FILE BLOCKS";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["run", socket, options @ ..] => run(socket, options),
        ["hold", folder, count] => hold(folder, count),
        ["fill", file, blocks] => fill(file, blocks),
        _ => Err(io::Error::other(USAGE)),
    };
    match result {
        Ok(good) => ExitCode::from(u8::from(!good)),
        Err(error) => {
            // There is nowhere to report an error of stderr.
            let _ = writeln!(io::stderr().lock(), "vhost-load: {error}");
            ExitCode::from(2)
        }
    }
}

fn say(line: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

fn number<N: FromStr>(text: &str) -> io::Result<N> {
    text.parse().map_err(|_| io::Error::other(format!("{text} is no such number; {USAGE}")))
}

fn load_of(options: &[&str]) -> io::Result<Load> {
    let mut load = Load {
        write: false,
        depth: 1,
        queues: 1,
        blocks: 0,
        warm: 0,
        end: End::Requests(1),
        backend: None,
    };
    for option in options {
        match option.split_once('=').unwrap_or((option, "")) {
            ("write", "") => load.write = true,
            ("depth", value) => load.depth = number(value)?,
            ("queues", value) => load.queues = number(value)?,
            ("blocks", value) => load.blocks = number(value)?,
            ("warm", value) => load.warm = number(value)?,
            ("seconds", value) => load.end = End::Time(Duration::from_secs_f64(number(value)?)),
            ("requests", value) => load.end = End::Requests(number(value)?),
            ("pid", value) => load.backend = Some(number(value)?),
            _ => return Err(io::Error::other(USAGE)),
        }
    }
    Ok(load)
}

fn run(socket: &str, options: &[&str]) -> io::Result<bool> {
    let outcome = client::run(Path::new(socket), &load_of(options)?)?;
    say(&outcome.to_string())?;
    Ok(outcome.errors + outcome.wrong == 0)
}

fn hold(folder: &str, count: &str) -> io::Result<bool> {
    let count = number(count)?;
    let mut devices = client::connect_all(Path::new(folder), count)?;
    say("ready")?;
    io::stdin().lock().read_line(&mut String::new())?;
    let answered = devices.iter_mut().map(client::answers).filter(|good| *good).count();
    say(&format!("answered {answered}"))?;
    Ok(answered == count)
}

fn fill(path: &str, blocks: &str) -> io::Result<bool> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut block = vec![0x5a; BLOCK];
    for index in 0..number::<u64>(blocks)? {
        block[..8].copy_from_slice(&index.to_ne_bytes());
        file.write_all(&block)?;
    }
    file.flush()?;
    Ok(true)
}
