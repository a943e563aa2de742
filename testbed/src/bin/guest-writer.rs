//! Runs in a guest whose power is cut: writes durably and prints each acknowledgement, or checks
//! afterwards that every acknowledged write is there. See `tests/powercut.rs`.
//!
//! `guest-writer write SOCKET` prints `done N` after the N-th write is durable, until killed.
//! `guest-writer verify SOCKET LAST` fails unless the writes up to LAST are there.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use testbed::harness::nbd::{Client, wire};
use testbed::harness::pattern::{Random, SECTOR, content, stamp_of};
use testbed::{Error, Result, check};

/// One volume over the page cache, one past it.
const EXPORTS: [&str; 2] = ["cached", "direct"];
const BLOCK: u32 = 4096;
const BLOCKS: u64 = 1024;

/// Where the N-th write goes: index of the export and byte offset.
fn place(n: u64) -> (usize, u64) {
    let offset = Random::new(n).below(BLOCKS) * u64::from(BLOCK);
    (usize::from(n % 2 == 1), offset)
}

fn write(clients: &mut [Client]) -> Result {
    for n in 1.. {
        let (export, offset) = place(n);
        let client = &mut clients[export];
        let data = content(n, offset, 4096);
        if n / 2 % 2 == 0 {
            client.write(offset, &data, wire::FLAG_FUA)?;
        } else {
            client.write(offset, &data, 0)?;
            client.flush()?;
        }
        writeln!(io::stdout().lock(), "done {n}").map_err(Error::io("tell"))?;
    }
    Ok(())
}

fn verify(clients: &mut [Client], last: u64) -> Result {
    let mut promised = HashMap::new();
    for n in 1..=last {
        promised.insert(place(n), n);
    }
    for ((export, offset), promise) in promised {
        let data = clients[export].read(offset, BLOCK)?;
        let name = EXPORTS[export];
        for (sector, at) in data.chunks(SECTOR).zip((offset..).step_by(SECTOR)) {
            // Writes after the last one printed may be there, too, even in part.
            let stamp = stamp_of(sector, at);
            let kept = stamp.is_some_and(|n| n >= promise && place(n) == (export, offset));
            check(kept, || format!("{name}, byte {at}: promised {promise}, found {stamp:?}"))?;
        }
    }
    Ok(())
}

fn run(args: &[String]) -> Result {
    let open = |socket: &str| -> Result<Vec<Client>> {
        let clients = EXPORTS.iter().map(|export| Client::open(Path::new(socket), export));
        Ok(clients.collect::<std::result::Result<_, _>>()?)
    };
    match args {
        [mode, socket] if mode == "write" => write(&mut open(socket)?),
        [mode, socket, last] if mode == "verify" => {
            let last = last.parse().map_err(|_| Error::unexpected("LAST is a number"))?;
            verify(&mut open(socket)?, last)
        }
        _ => Err(Error::unexpected("usage: guest-writer write SOCKET | verify SOCKET LAST")),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, too, the exit status still shows it.
            let _ = writeln!(io::stderr().lock(), "guest-writer: {error}");
            ExitCode::FAILURE
        }
    }
}
