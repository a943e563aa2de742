//! The page and its routes with 5,000 volumes, and what the history costs: the time until the page shows volumes, its
//! scripts' time for each update, the time of its replies, and the CPU time of the idle daemon. Then the metrics again when
//! each volume has served reads, writes and flushes, and the history of a volume that serves requests every second.
//!
//! Invariants:
//! - The CPU time is that of all threads of a daemon to which nothing is connected. The peer is the same daemon without
//!   control socket and page, which samples nothing.
//! - The browser and the daemon share the machine: the times of the page include that.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::figure::{Bar, Better, Figure, median};
use super::{Error, io_context, log, process};
use crate::harness::binary::Build;
use crate::harness::browser::Browser;
use crate::harness::nbd::{Client, Failure};
use crate::harness::server::{Server, Setup};

/// Volumes of the daemon.
const VOLUMES: usize = 5000;
/// How long the idle daemon is measured.
const IDLE: Duration = Duration::from_secs(60);
/// Updates of the page that are measured.
const UPDATES: u32 = 20;
/// Requests of each kind.
const REPLIES: usize = 15;
/// For how many seconds a volume serves requests every second.
const BUSY: u32 = 60;

/// Options of the bench.
#[derive(Debug, Default)]
pub struct PageBenchOptions;

/// Takes no arguments.
///
/// # Errors
/// [`Error::Usage`] for any.
pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<PageBenchOptions, Error> {
    match arguments.into_iter().next() {
        None => Ok(PageBenchOptions),
        Some(other) => Err(Error::Usage { what: format!("unexpected {other}") }),
    }
}

/// Runs it; returns how many measurements failed to run.
///
/// # Errors
/// Nothing can be measured at all, or `print` fails.
pub fn run(
    _: &PageBenchOptions,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let failed = |error: crate::Error| Error::Failed {
        program: "bench-page".into(),
        what: error.to_string(),
    };
    let mut show = |name: &str, rounds: &[Vec<f64>], most: Option<f64>| {
        let bar = most.map_or(Bar::None, Bar::AtMost);
        let figure = Figure::from_rounds(name, rounds, Better::Lower, bar);
        figure.iter().try_for_each(&mut print).map_err(io_context("writing a figure to stdout"))
    };
    log(format_args!("{VOLUMES} volumes, idle for {IDLE:?}, without and with the page"));
    let (mut plain, _) = start(false).map_err(failed)?;
    let without = idle_percent(&plain)?;
    plain.stop().map_err(failed)?;
    let (server, page) = start(true).map_err(failed)?;
    let with = idle_percent(&server)?;
    show("page_idle_cpu_percent", &[vec![with], vec![without]], Some(0.1))?;
    for (path, name, most) in [
        ("/v1/summary", "page_summary_ms", None),
        ("/v1/history?range=5m", "page_history_ms", None),
        ("/metrics", "page_metrics_ms", Some(100.0)),
        ("/v1/stat", "page_stat_ms", None),
    ] {
        show(name, &[times_of(&page, path)?], most)?;
    }
    let summary = get(&page, "/v1/summary")?;
    let bytes = |name: &str| summary[name].as_f64().unwrap_or(f64::NAN);
    show(
        "page_history_bytes_per_idle_volume",
        &[vec![bytes("history_bytes") / VOLUMES as f64]],
        None,
    )?;
    let (interactive, scripting) = in_browser(&page).map_err(failed)?;
    show("page_interactive_ms", &[interactive], Some(1000.0))?;
    show("page_scripting_per_update_ms", &[vec![scripting]], Some(100.0))?;
    log(format_args!("requests to each volume, and to one for {BUSY} s"));
    let used = (0..VOLUMES).try_for_each(|volume| use_volume(&server, volume, 3));
    used.map_err(|error| client(&error))?;
    show("page_used_metrics_ms", &[times_of(&page, "/metrics")?], Some(100.0))?;
    show("page_used_metrics_cpu_ms", &[cpu_of_metrics(&server, &page)?], None)?;
    for _ in 0..BUSY {
        use_volume(&server, 0, 20).map_err(|error| client(&error))?;
        std::thread::sleep(Duration::from_secs(1));
    }
    let summary = get(&page, "/v1/summary")?;
    let most = summary["history_most_bytes"].as_f64().unwrap_or(f64::NAN);
    show("page_history_bytes_of_a_busy_volume", &[vec![most]], Some(65536.0))?;
    drop(server);
    Ok(0)
}

fn client(error: &Failure) -> Error {
    Error::Failed { program: "the NBD client".into(), what: error.to_string() }
}

/// A client that reads and writes `times` times and flushes.
fn use_volume(server: &Server, volume: usize, times: u32) -> Result<(), Failure> {
    let mut client = Client::open(&server.socket(), &volume_name(volume))?;
    for _ in 0..times {
        client.read(0, 4096)?;
        client.write(4096, &[0; 4096], 0)?;
    }
    client.flush()?;
    client.disconnect()
}

/// Milliseconds until a reply is there, several times.
fn times_of(page: &str, path: &str) -> Result<Vec<f64>, Error> {
    let time = |_| {
        let begun = Instant::now();
        get(page, path)?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    };
    (0..REPLIES).map(time).collect()
}

/// The daemon's CPU time for the metrics, milliseconds, several times. Unlike the time of the reply it hardly depends on
/// what else the machine does.
fn cpu_of_metrics(server: &Server, page: &str) -> Result<Vec<f64>, Error> {
    let failed =
        |error: crate::Error| Error::Failed { program: "ebbd".into(), what: error.to_string() };
    let pid = server.pid().map_err(failed)?;
    let time = |_| {
        let before = process::threads_cpu_us(pid)?;
        get(page, "/metrics")?;
        Ok((process::threads_cpu_us(pid)? - before) / 1e3)
    };
    (0..REPLIES).map(time).collect()
}

fn volume_name(volume: usize) -> String {
    format!("v{volume:05}")
}

/// A daemon with all volumes; its page, if it has one.
fn start(with_page: bool) -> crate::Result<(Server, String)> {
    let setup = Setup::new()?.log_level("warn").build(Build::Release);
    let mut config = String::new();
    for volume in 0..VOLUMES {
        // Writing to a string does not fail.
        let _ = writeln!(config, "[volume.{}]\nstore = \"null:1G\"", volume_name(volume));
    }
    let file = setup.dir().join("ebbd.toml");
    std::fs::write(&file, config).map_err(crate::Error::io("write a configuration"))?;
    let mut setup = setup.arg("--config").arg(file);
    let mut page = String::new();
    if with_page {
        let socket = std::net::TcpListener::bind("127.0.0.1:0");
        let address = socket.and_then(|socket| socket.local_addr());
        page = address.map_err(crate::Error::io("find a port"))?.to_string();
        setup = setup.arg("--web").arg(&page);
    }
    Ok((setup.start()?, page))
}

/// CPU time of the idle daemon, percent of a core.
fn idle_percent(server: &Server) -> Result<f64, Error> {
    let pid = server
        .pid()
        .map_err(|error| Error::Failed { program: "ebbd".into(), what: error.to_string() })?;
    // What follows a start ends first.
    std::thread::sleep(Duration::from_secs(5));
    let before = process::threads_cpu_us(pid)?;
    std::thread::sleep(IDLE);
    Ok((process::threads_cpu_us(pid)? - before) / IDLE.as_secs_f64() / 1e4)
}

/// The JSON of a reply, or null if it is none.
fn get(page: &str, path: &str) -> Result<serde_json::Value, Error> {
    let asking = || io_context(format!("asking for {path}"));
    let mut stream = TcpStream::connect(page).map_err(asking())?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(asking())?;
    // At once: the second of two small segments may wait for an acknowledgement.
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(asking())?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).map_err(asking())?;
    let (head, body) = reply.split_once("\r\n\r\n").unwrap_or((&reply, ""));
    if !head.starts_with("HTTP/1.0 200") {
        let what = format!("{path}: {}", head.lines().next().unwrap_or_default());
        return Err(Error::Failed { program: "ebbd".into(), what });
    }
    Ok(serde_json::from_str(body).unwrap_or_default())
}

/// Milliseconds until the page shows volumes and can be used, of several loads, and of scripts for each update.
fn in_browser(page: &str) -> crate::Result<(Vec<f64>, f64)> {
    let mut browser = Browser::start()?;
    let updates = "performance.getEntriesByName('ebbd-updated')";
    let mut interactive = Vec::new();
    for load in 0..5 {
        browser.open(&format!("http://{page}/?{load}"))?;
        browser.wait_for(&format!("{updates}.length > 0"))?;
        browser.wait_for("document.querySelectorAll('.space .row').length > 10")?;
        let time = browser.eval(&format!("{updates}[0].startTime"))?;
        interactive.push(time.as_f64().unwrap_or(f64::NAN));
    }
    log(format_args!("interactive after {interactive:.0?} ms, median {:?}", median(&interactive)));
    browser.eval("document.querySelector('.head .c-iops button').click()")?;
    let (begun, first) = (browser.script_seconds()?, browser.eval(&format!("{updates}.length"))?);
    let end = first.as_u64().unwrap_or(0) + u64::from(UPDATES);
    browser.wait_for(&format!("{updates}.length >= {end}"))?;
    let scripting = (browser.script_seconds()? - begun) * 1e3 / f64::from(UPDATES);
    Ok((interactive, scripting))
}
