//! How long single events take: the first write after a kill, the refusal of a second writer, and until a resize by `rbd`
//! is seen. Each figure is the longest of its rounds, in milliseconds.

use std::fs;
use std::time::{Duration, Instant};

use super::rig::Rig;
use super::{Error, log};
use crate::bench::figure::{Bar, Figure};
use crate::bench::io_context;
use crate::harness::nbd::Client;

/// Figure: from the start of the daemon after a kill until its first write is acknowledged by the cluster.
pub const AFTER_KILL: &str = "rbd_first_write_after_kill_ms_longest";
/// Figure: from the start of a second daemon until it has refused the image that the first one has.
pub const SECOND_WRITER: &str = "rbd_second_writer_refused_ms_longest";
/// Figure: from the end of `rbd resize` until a client is told the new size.
pub const RESIZE: &str = "rbd_resize_seen_ms_longest";

/// What each may take, in milliseconds.
const BAR: Bar = Bar::AtMost(1000.0);
/// How long is waited for an event.
const PATIENCE: Duration = Duration::from_secs(60);
/// Events in one round.
const EACH: u32 = 4;

/// Repeats `event` and makes a figure of the longest.
fn longest(
    rig: &Rig<'_>,
    name: &str,
    mut event: impl FnMut(u32) -> Result<Duration, Error>,
) -> Result<Vec<Figure>, Error> {
    let mut longest = Duration::ZERO;
    for number in 0..rig.options().rounds.saturating_mul(EACH) {
        let took = event(number)?;
        log(format_args!("{name}: {took:.2?}"));
        longest = longest.max(took);
    }
    let ours = longest.as_secs_f64() * 1e3;
    Ok(vec![Figure { name: name.into(), ours, peer: None, bar: BAR }])
}

/// Waits until `done`; returns how long that took since `begun`.
fn until(
    what: &str,
    begun: Instant,
    mut done: impl FnMut() -> Result<bool, Error>,
) -> Result<Duration, Error> {
    while !done()? {
        if begun.elapsed() > PATIENCE {
            let what = format!("{what}: not within {PATIENCE:?}");
            return Err(Error::Failed { program: "ebbd".into(), what });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(begun.elapsed())
}

/// A kill with writes in flight, and a start with the same state directory.
///
/// # Errors
/// [`Error`] when a daemon does not serve, or what was flushed is lost.
pub fn after_kill(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    rig.ceph().create_image("killed", 64)?;
    let volume = [rig.volume("disk", "killed", "writeback")];
    let start = || rig.ebbd("killed", &volume, &["disk"]);
    let mut running = None;
    let figures = longest(rig, AFTER_KILL, |number| {
        let mark = vec![u8::try_from(number % 250).unwrap_or(0) + 1; 65536];
        let daemon = running.take().map_or_else(start, Ok)?;
        let mut client = daemon.client("disk")?;
        client.write(0, &mark, 0)?;
        client.flush()?;
        client.write(1 << 20, &mark, 0)?;
        // By SIGKILL.
        drop(daemon);
        let begun = Instant::now();
        let daemon = start()?;
        let mut client = daemon.client("disk")?;
        client.write(2 << 20, &mark[..4096], 0)?;
        client.flush()?;
        let took = begun.elapsed();
        if client.read(0, 65536)? != mark {
            let what = "what was flushed before a kill is lost".into();
            return Err(Error::Failed { program: "ebbd".into(), what });
        }
        running = Some(daemon);
        Ok(took)
    })?;
    // The image stays: the cluster keeps the watches of killed clients for half a minute.
    running.map_or(Ok(()), |daemon| daemon.server.stop())?;
    Ok(figures)
}

/// A second daemon with a state directory of its own, as on another host.
///
/// # Errors
/// [`Error`] when a daemon does not serve, or the second one gets the image.
pub fn second_writer(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    rig.ceph().create_image("one", 16)?;
    let volume = [rig.volume("disk", "one", "none")];
    let first = rig.ebbd("first", &volume, &["disk"])?;
    let figures = longest(rig, SECOND_WRITER, |_| {
        let begun = Instant::now();
        let second = rig.ebbd("second", &volume, &[])?;
        let took = until("the second daemon refuses the image", begun, || {
            let log = fs::read_to_string(rig.log_of("second"));
            Ok(log.map_err(io_context("reading a log"))?.contains("has its lock"))
        })?;
        if Client::open(second.server.socket(), "disk").is_ok() {
            let what = "a second daemon serves an image that the first one writes".into();
            return Err(Error::Failed { program: "ebbd".into(), what });
        }
        second.server.stop()?;
        Ok(took)
    })?;
    first.server.stop()?;
    rig.remove_images(&["one"])?;
    Ok(figures)
}

/// `rbd resize` beside the daemon, larger and smaller.
///
/// # Errors
/// [`Error`] when the new size is not seen.
pub fn resize(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    rig.ceph().create_image("resized", 16)?;
    let daemon = rig.ebbd("resized", &[rig.volume("disk", "resized", "none")], &["disk"])?;
    let figures = longest(rig, RESIZE, |number| {
        let mib = 32 + u64::from(number % 2) * 32;
        let size = format!("{mib}M");
        let arguments =
            ["resize", "--no-progress", "--allow-shrink", "--size", &size, "rbd/resized"];
        rig.ceph().rbd(&arguments)?;
        until("the volume has the new size", Instant::now(), || {
            Ok(daemon.client("disk")?.size == mib << 20)
        })
    })?;
    daemon.server.stop()?;
    rig.remove_images(&["resized"])?;
    Ok(figures)
}
