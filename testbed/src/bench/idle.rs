//! Memory of an idle daemon, and how soon it serves a thousand volumes.

use std::path::Path;
use std::time::Duration;

use super::figure::{Bar, Better, Figure};
use super::server::{Kind, Server, Setup};
use super::workdir::Workdir;
use super::{Error, log, process};

/// Figure: resident memory with one volume and no client, MiB.
pub const RSS: &str = "nbd_idle_rss_MiB";
/// Figures of the thousand volumes: resident memory for each further one, and seconds from exec
/// until the last is served.
pub const VOLUME_FIGURES: [&str; 2] =
    ["nbd_rss_per_idle_volume_KiB", "nbd_start_1000_volumes_seconds"];

/// Volumes of the large start.
const VOLUMES: usize = 1000;
/// Time for a server to put away its last connections before memory is read.
const SETTLE: Duration = Duration::from_millis(500);

/// Resident memory of each server with one volume, after a first client came and went.
///
/// # Errors
/// [`Error`] when a server fails to run.
pub fn resident(daemon: &Path, work: &Workdir, rounds: u32) -> Result<Vec<Figure>, Error> {
    let servers = [Kind::Ebbd, Kind::Nbdkit, Kind::Qemu];
    let mut values = vec![Vec::new(); servers.len()];
    for _ in 0..rounds {
        for (kind, values) in servers.iter().zip(&mut values) {
            let socket = work.path("disk.sock");
            let command = kind.one_disk(daemon, &work.disk(), &socket, Setup::PageCache);
            let server =
                Server::start(kind.name(), command, socket, work.path("server.log"), ["disk"])?;
            values.push(settled_kib(&server)? / 1024.0);
            server.stop()?;
        }
    }
    for (kind, values) in servers.iter().zip(&values) {
        log(format_args!("{RSS} {}: {values:.3?}", kind.name()));
    }
    Ok(Figure::from_rounds(RSS, &values, Better::Lower, Bar::AtMost(8.0)).into_iter().collect())
}

/// Memory for each further volume and time to serve a thousand, compared with qemu-storage-daemon.
/// Each volume counts as served when it replied to `NBD_OPT_GO` on a connection of its own, one
/// after the other.
///
/// # Errors
/// [`Error`] when a server fails to run.
pub fn thousand_volumes(daemon: &Path, work: &Workdir, rounds: u32) -> Result<Vec<Figure>, Error> {
    let volumes = work.sparse_files(VOLUMES)?;
    let servers = [Kind::Ebbd, Kind::Qemu];
    let mut memory = vec![Vec::new(); servers.len()];
    let mut seconds = vec![Vec::new(); servers.len()];
    for _ in 0..rounds {
        for (index, kind) in servers.into_iter().enumerate() {
            let (one, _) = serve(kind, daemon, work, &volumes[..1])?;
            let (all, took) = serve(kind, daemon, work, &volumes)?;
            memory[index].push((all - one) / (VOLUMES - 1) as f64);
            seconds[index].push(took.as_secs_f64());
        }
    }
    for (index, kind) in servers.iter().enumerate() {
        let (memory, seconds) = (&memory[index], &seconds[index]);
        log(format_args!(
            "{VOLUMES} volumes, {}: {memory:.2?} KiB each, {seconds:.3?} s",
            kind.name()
        ));
    }
    let [memory_name, seconds_name] = VOLUME_FIGURES;
    let figures = [
        Figure::from_rounds(memory_name, &memory, Better::Lower, Bar::AtMost(32.0)),
        Figure::from_rounds(seconds_name, &seconds, Better::Lower, Bar::AtMost(1.0)),
    ];
    Ok(figures.into_iter().flatten().collect())
}

/// Resident KiB and start time of one server with these volumes.
fn serve(
    kind: Kind,
    daemon: &Path,
    work: &Workdir,
    volumes: &[(String, std::path::PathBuf)],
) -> Result<(f64, Duration), Error> {
    let socket = work.path("volumes.sock");
    let Some(command) = kind.many_disks(daemon, volumes, &socket, work)? else {
        let what = "does not open many volumes at its start".into();
        return Err(Error::Failed { program: kind.name().into(), what });
    };
    let names = volumes.iter().map(|(name, _)| name.as_str());
    let server = Server::start(kind.name(), command, socket, work.path("server.log"), names)?;
    let started = server.started();
    let resident = settled_kib(&server)?;
    server.stop()?;
    Ok((resident, started))
}

fn settled_kib(server: &Server) -> Result<f64, Error> {
    std::thread::sleep(SETTLE);
    process::resident_kib(server.pid())
}
