//! One fio run over its `nbd` engine (libnbd) or its `rbd` engine (librbd), and what its JSON report says.

use std::ffi::OsString;
use std::path::Path;

use serde_json::Value;

use super::{Error, io_context};

/// A load fio puts on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// fio's `--rw`: `randread`, `randrw` (70 % reads), `read` or `write`.
    pub pattern: &'static str,
    /// Bytes per request.
    pub block: u32,
    /// Requests in flight per connection.
    pub depth: u32,
    /// Connections, one fio job each.
    pub connections: u32,
}

/// Where a load goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target<'a> {
    /// The export `disk` behind a socket.
    Nbd(&'a Path),
    /// An image of the pool `rbd` of the cluster that `CEPH_CONF` names.
    Rbd(&'a str),
}

impl Target<'_> {
    fn arguments(self) -> Vec<OsString> {
        match self {
            Self::Nbd(socket) => {
                let mut uri = OsString::from("--uri=nbd+unix:///disk?socket=");
                uri.push(socket);
                vec!["--ioengine=nbd".into(), uri]
            }
            Self::Rbd(image) => vec![
                "--ioengine=rbd".into(),
                "--clientname=admin".into(),
                "--pool=rbd".into(),
                format!("--rbdname={image}").into(),
            ],
        }
    }
}

/// When a run is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// After so many seconds.
    Seconds(u32),
    /// When each block was requested once by each connection; random patterns keep a map for it.
    EachBlockOnce,
}

/// Sums over all connections of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Requests completed.
    pub requests: u64,
    /// Requests per second.
    pub iops: f64,
    /// Payload in 10^6 bytes per second.
    pub megabytes: f64,
    /// Mean time from submission to completion, in microseconds, over reads and writes.
    pub latency_us: f64,
}

/// fio's arguments for a load on the first `bytes` of a disk; the report goes to `report`.
#[must_use]
pub fn arguments(
    load: Load,
    bytes: u64,
    until: Until,
    target: Target<'_>,
    report: &Path,
) -> Vec<OsString> {
    let mut output = OsString::from("--output=");
    output.push(report);
    let mut all: Vec<OsString> =
        ["--name=bench", "--rwmixread=70", "--group_reporting", "--output-format=json"]
            .map(OsString::from)
            .into();
    all.extend(
        [
            format!("--rw={}", load.pattern),
            format!("--bs={}", load.block),
            format!("--iodepth={}", load.depth),
            format!("--numjobs={}", load.connections),
            format!("--size={bytes}"),
        ]
        .map(OsString::from),
    );
    if let Until::Seconds(seconds) = until {
        // Without a map of visited blocks, which the client would have to keep; the offsets are the
        // same for every server.
        all.extend(["--time_based".into(), "--norandommap".into()]);
        all.push(format!("--runtime={seconds}").into());
    }
    all.extend(target.arguments());
    all.push(output);
    all
}

/// Reads fio's report in a file and removes it, so that the next run cannot take it for its own.
///
/// # Errors
/// [`Error::Io`] when there is no such file; as [`parse`].
pub fn take_report(path: &Path) -> Result<Outcome, Error> {
    let text = std::fs::read_to_string(path).map_err(io_context("reading fio's report"))?;
    std::fs::remove_file(path).map_err(io_context("removing fio's report"))?;
    parse(&text)
}

/// Reads fio's JSON report.
///
/// # Errors
/// [`Error::Output`] for text that is no such report, [`Error::Failed`] when fio reports an I/O
/// error or completed nothing.
pub fn parse(text: &str) -> Result<Outcome, Error> {
    // fio writes warnings before the JSON into the same file.
    let start = text.find('{').unwrap_or(text.len());
    let report: Value = serde_json::from_str(&text[start..])
        .map_err(|error| Error::Output { from: "fio", what: error.to_string() })?;
    let failed = |what: String| Error::Failed { program: "fio".into(), what };
    let job = field(&report, "/jobs/0", Some)?;
    let error = field(job, "/error", Value::as_i64)?;
    if error != 0 {
        return Err(failed(format!("the job ended with error {error}")));
    }
    let (read, write) = (Side::parse(job, "read")?, Side::parse(job, "write")?);
    let requests = read.requests.saturating_add(write.requests);
    if requests == 0 {
        return Err(failed("no request completed".into()));
    }
    let total_ns = |side: &Side| side.mean_ns * side.requests as f64;
    Ok(Outcome {
        requests,
        iops: read.iops + write.iops,
        megabytes: (read.bytes_per_second + write.bytes_per_second) / 1e6,
        latency_us: (total_ns(&read) + total_ns(&write)) / requests as f64 / 1e3,
    })
}

/// fio's figures for one direction.
struct Side {
    requests: u64,
    iops: f64,
    bytes_per_second: f64,
    mean_ns: f64,
}

impl Side {
    fn parse(job: &Value, direction: &str) -> Result<Self, Error> {
        let number = |name: &str| field(job, &format!("/{direction}/{name}"), Value::as_f64);
        Ok(Self {
            requests: field(job, &format!("/{direction}/total_ios"), Value::as_u64)?,
            iops: number("iops")?,
            bytes_per_second: number("bw_bytes")?,
            mean_ns: number("lat_ns/mean")?,
        })
    }
}

fn field<'a, T>(
    value: &'a Value,
    pointer: &str,
    convert: impl FnOnce(&'a Value) -> Option<T>,
) -> Result<T, Error> {
    value
        .pointer(pointer)
        .and_then(convert)
        .ok_or_else(|| Error::Output { from: "fio", what: format!("no {pointer} in the report") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(error: i64, reads: u64, writes: u64) -> String {
        let side = |ios: u64, mean: f64| {
            format!(
                r#"{{"total_ios":{ios},"iops":{ios}.5,"bw_bytes":{},"lat_ns":{{"mean":{mean}}}}}"#,
                ios * 4096
            )
        };
        format!(
            r#"{{"fio version":"fio-3.33","jobs":[{{"error":{error},"read":{},"write":{}}}]}}"#,
            side(reads, 20_000.0),
            side(writes, 40_000.0)
        )
    }

    #[test]
    fn sums_reads_and_writes() {
        let text = format!("fio: a warning\n{}", report(0, 3000, 1000));
        let outcome = parse(&text).unwrap();
        assert_eq!(outcome.requests, 4000);
        assert!((outcome.iops - 4001.0).abs() < 1e-9);
        assert!((outcome.megabytes - 16.384).abs() < 1e-9);
        assert!((outcome.latency_us - 25.0).abs() < 1e-9, "weighted by count: {outcome:?}");
    }

    #[test]
    fn errors_and_empty_runs_are_failures() {
        assert!(matches!(parse(&report(5, 10, 0)), Err(Error::Failed { .. })));
        assert!(matches!(parse(&report(0, 0, 0)), Err(Error::Failed { .. })));
        for text in ["", "fio: no such engine\n", "{", "{}", r#"{"jobs":[]}"#] {
            assert!(matches!(parse(text), Err(Error::Output { .. })), "{text:?}");
        }
    }

    #[test]
    fn arguments_carry_the_load() {
        let load = Load { pattern: "randrw", block: 4096, depth: 64, connections: 4 };
        let (socket, report) = (Path::new("/d/s"), Path::new("/d/r.json"));
        let target = Target::Nbd(socket);
        let once = arguments(load, 1 << 20, Until::EachBlockOnce, target, report);
        assert!(!once.iter().any(|argument| argument == "--time_based"), "{once:?}");
        let all = arguments(load, 1 << 20, Until::Seconds(3), target, report);
        for needed in [
            "--size=1048576",
            "--rw=randrw",
            "--bs=4096",
            "--iodepth=64",
            "--numjobs=4",
            "--runtime=3",
            "--uri=nbd+unix:///disk?socket=/d/s",
            "--output=/d/r.json",
        ] {
            assert!(all.iter().any(|argument| argument == needed), "{needed} in {all:?}");
        }
        let rbd = arguments(load, 1 << 20, Until::EachBlockOnce, Target::Rbd("peer"), report);
        assert!(rbd.iter().any(|argument| argument == "--rbdname=peer"), "{rbd:?}");
        assert!(!rbd.iter().any(|argument| argument == "--ioengine=nbd"), "{rbd:?}");
    }
}
