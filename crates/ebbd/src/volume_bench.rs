//! `ebbd bench VOLUME`: what a client of a running daemon gets from a volume.
//!
//! It connects over NBD with the client of remote stores ([`NbdStore`]), in this process: what it measures includes
//! that client.
//!
//! # Invariants
//! - Nothing is written without `--destroy-data`.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ebb_advice::Advised;
use ebb_api::{LimitStat, Version};
use ebb_block::Operation;
use ebb_config::{Listen, Size, StoreUri};
use ebb_io::{Io, Signal, Worker};
use ebb_mem::Memory;
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};
use ebb_volume::{Volume, VolumeOptions};
use serde::Serialize;

use crate::cli::{BenchArgs, LARGEST_REQUEST};
use crate::client::{self, ClientError, DaemonClient};
use crate::setup;
use crate::stores::nbd_options;

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct Load {
    name: &'static str,
    write: bool,
    random: bool,
    bytes: u64,
    depth: u64,
}

const LOADS: [Load; 6] = [
    Load {
        name: "read 4K random, 1 in flight",
        write: false,
        random: true,
        bytes: 4 << 10,
        depth: 1,
    },
    Load {
        name: "read 4K random, 32 in flight",
        write: false,
        random: true,
        bytes: 4 << 10,
        depth: 32,
    },
    Load {
        name: "read 1M in order, 8 in flight",
        write: false,
        random: false,
        bytes: LARGEST_REQUEST,
        depth: 8,
    },
    Load {
        name: "write 4K random, 1 in flight",
        write: true,
        random: true,
        bytes: 4 << 10,
        depth: 1,
    },
    Load {
        name: "write 4K random, 32 in flight",
        write: true,
        random: true,
        bytes: 4 << 10,
        depth: 32,
    },
    Load {
        name: "write 1M in order, 8 in flight",
        write: true,
        random: false,
        bytes: LARGEST_REQUEST,
        depth: 8,
    },
];

/// The result of one measurement.
#[derive(Clone, Debug, Serialize)]
struct LoadResult {
    load: &'static str,
    requests_per_second: f64,
    bytes_per_second: f64,
    p50_seconds: Option<f64>,
    p99_seconds: Option<f64>,
    p999_seconds: Option<f64>,
    errors: u64,
}

/// Measures, and passes each line of the result to `say`.
///
/// # Errors
/// If the daemon, its NBD server or the volume cannot be reached, or if requests fail.
pub fn bench(args: &BenchArgs, mut say: impl FnMut(String)) -> anyhow::Result<()> {
    let before = limits(args)?;
    let options = options(args)?;
    let memory = setup::tool_memory()?;
    let worker = Worker::start("ebbd-bench", &memory).context("cannot start a worker")?;
    for load in LOADS.iter().filter(|load| args.destroy_data || !load.write) {
        let result = measure(&worker, &memory, &options, args, *load)
            .with_context(|| format!("volume {}", args.volume))?;
        say(match args.json {
            true => serde_json::json!(result).to_string(),
            false => line(&result),
        });
    }
    let after = limits(args)?;
    if let (false, Some(before), Some(after)) = (args.json, before, after)
        && let Some(line) = limited(&args.volume, &before, &after)
    {
        say(line);
    }
    Ok(())
}

/// The limits of the volume, and what they have done until now; none if the volume is not one of the daemon.
///
/// # Errors
/// There is no such volume, or the daemon cannot be reached.
fn limits(args: &BenchArgs) -> Result<Option<LimitStat>, ClientError> {
    if args.uri.is_some() {
        return Ok(None);
    }
    client::limits_of(args.control.as_deref(), &args.volume).map(Some)
}

/// That limits have delayed requests, if they have.
fn limited(volume: &str, before: &LimitStat, after: &LimitStat) -> Option<String> {
    let delayed = after.throttled_requests.saturating_sub(before.throttled_requests);
    let group = after.group.as_ref().map_or_else(String::new, |group| format!(", group {group}"));
    let [requests, bytes] = client::limit_values(after);
    (delayed > 0).then(|| {
        format!(
            "limited: {} waited for a limit ({requests} requests/s, {bytes} bytes/s{group}; \
             see `ebbd limit {volume}`)",
            ebb_config::plural(delayed, "request")
        )
    })
}

/// How to connect to the volume.
fn options(args: &BenchArgs) -> anyhow::Result<NbdOptions> {
    let mut options = match &args.uri {
        Some(uri) => nbd_options(uri),
        None => NbdOptions::new(address(args)?, &args.volume),
    };
    options.read_only = !args.destroy_data;
    Ok(options)
}

/// The first unix socket of the daemon, or else its first address.
fn address(args: &BenchArgs) -> anyhow::Result<NbdAddress> {
    let version: Version =
        DaemonClient::new(args.control.as_deref())?.json("GET", "/v1/version", None)?;
    let all: Vec<Listen> = version.listen.iter().filter_map(|text| text.parse().ok()).collect();
    let unix = all.iter().find(|address| matches!(address, Listen::Unix(_)));
    match unix.or(all.first()) {
        Some(Listen::Unix(path)) => Ok(NbdAddress::Unix(path.clone())),
        Some(Listen::Tcp(text)) => match format!("nbd://{text}/").parse()? {
            StoreUri::Nbd(uri) => Ok(nbd_options(&uri).address),
            _ => bail!(
                "the daemon has no address of a known kind; give the volume's NBD URI with --uri"
            ),
        },
        None => bail!("the daemon listens at no address; give the volume's NBD URI with --uri"),
    }
}

fn measure(
    worker: &Worker,
    memory: &Arc<Memory>,
    options: &NbdOptions,
    args: &BenchArgs,
    load: Load,
) -> anyhow::Result<LoadResult> {
    let (store, _notes) = NbdStore::open(options.clone()).map_err(Advised)?;
    let volume_options = VolumeOptions { read_only: options.read_only, ..VolumeOptions::default() };
    let volume = Volume::new(&args.volume, Store::Nbd(store), volume_options);
    volume.join(memory.shares(), "bench");
    let size = volume.size().min(args.within.map_or(u64::MAX, Size::bytes));
    ensure!(size >= load.bytes, "{size} bytes are too few: at least {} are needed", load.bytes);
    let (measured, seconds) = (volume.clone(), args.seconds);
    let run = move |io: Io| async move {
        let start = Instant::now();
        all_requests(&io, &measured, load, size / load.bytes, start + Duration::from_secs(seconds))
            .await;
        let elapsed = start.elapsed().as_secs_f64();
        let closed = measured.close(&io).await;
        (elapsed, closed)
    };
    let (elapsed, closed) = worker.handle().block_on(run).context("the worker has ended")?;
    closed.context("closing the connection")?;
    Ok(result(&volume, load, elapsed))
}

/// Keeps `depth` requests in flight until the end.
async fn all_requests(io: &Io, volume: &Arc<Volume>, load: Load, blocks: u64, end: Instant) {
    let state = Rc::new(Progress {
        next: std::cell::Cell::new(0x9e37_79b9_7f4a_7c15 ^ u64::from(std::process::id())),
        running: std::cell::Cell::new(load.depth),
        ended: Signal::default(),
    });
    for _ in 0..load.depth {
        let (on, volume, state) = (io.clone(), volume.clone(), state.clone());
        let task = async move {
            let length = usize::try_from(load.bytes).unwrap_or(0);
            let mut buf = on.pool().take(length).await;
            buf.fill(0x5a);
            while Instant::now() < end {
                let offset = state.block(load, blocks) * load.bytes;
                let result;
                (result, buf) = match load.write {
                    true => volume.write(&on, buf, offset, false).await,
                    false => volume.read(&on, buf, offset).await,
                };
                if result.is_err() {
                    break;
                }
            }
            drop(buf);
            state.running.set(state.running.get() - 1);
            state.ended.set();
        };
        io.spawn(task).detach();
    }
    while state.running.get() > 0 {
        state.ended.wait().await;
    }
}

/// What the tasks of a measurement share.
struct Progress {
    next: std::cell::Cell<u64>,
    running: std::cell::Cell<u64>,
    ended: Signal,
}

impl Progress {
    /// The next block: in order, or at random (Knuth's linear congruential generator).
    fn block(&self, load: Load, blocks: u64) -> u64 {
        let now = self.next.get();
        if load.random {
            let next =
                now.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            self.next.set(next);
            return (next >> 20) % blocks;
        }
        self.next.set(now.wrapping_add(1));
        now % blocks
    }
}

#[allow(clippy::cast_precision_loss, reason = "rates for people")]
fn result(volume: &Volume, load: Load, seconds: f64) -> LoadResult {
    let operation = if load.write { Operation::Write } else { Operation::Read };
    let (stats, times) = (volume.stats().of(operation), volume.stats().service_times(operation));
    let quantile = |fraction| times.quantile(fraction).map(|time| time.as_secs_f64());
    LoadResult {
        load: load.name,
        requests_per_second: stats.requests as f64 / seconds,
        bytes_per_second: stats.bytes as f64 / seconds,
        p50_seconds: quantile(0.5),
        p99_seconds: quantile(0.99),
        p999_seconds: quantile(0.999),
        errors: stats.errors,
    }
}

fn line(result: &LoadResult) -> String {
    let time = |seconds: Option<f64>| seconds.map_or("-".to_owned(), client::time);
    let errors = match result.errors {
        0 => String::new(),
        1 => ", 1 error".to_owned(),
        errors => format!(", {errors} errors"),
    };
    format!(
        "{:31} {:>9.0} requests/s {:>9.1} MiB/s, p50 {}, p99 {}, p99.9 {}{errors}",
        result.load,
        result.requests_per_second,
        result.bytes_per_second / f64::from(1 << 20),
        time(result.p50_seconds),
        time(result.p99_seconds),
        time(result.p999_seconds),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_in_order_begin_again_at_the_end_and_random_ones_are_within() {
        let progress = |next| Progress {
            next: std::cell::Cell::new(next),
            running: std::cell::Cell::new(0),
            ended: Signal::default(),
        };
        let order = progress(2);
        let blocks: Vec<u64> = (0..4).map(|_| order.block(LOADS[2], 3)).collect();
        assert_eq!(blocks, [2, 0, 1, 2]);
        let random = progress(7);
        let mut seen = [false; 5];
        (0..100).for_each(|_| seen[usize::try_from(random.block(LOADS[0], 5)).unwrap()] = true);
        assert_eq!(seen, [true; 5]);
        assert_eq!(random.block(LOADS[0], 1), 0);
    }

    #[test]
    fn a_result_has_the_units_of_the_other_commands() {
        let result = LoadResult {
            load: LOADS[0].name,
            requests_per_second: 5.0,
            bytes_per_second: f64::from(2 << 20),
            p50_seconds: Some(3.85),
            p99_seconds: Some(0.0031),
            p999_seconds: None,
            errors: 0,
        };
        let text = line(&result);
        assert!(text.contains("2.0 MiB/s, p50 3.9s, p99 3.1ms, p99.9 -"), "{text}");
    }

    #[test]
    fn limits_are_told_if_they_have_delayed_requests() {
        let before = LimitStat { iops: 5, throttled_requests: 7, ..LimitStat::default() };
        let after = LimitStat { throttled_requests: 9, ..before.clone() };
        assert_eq!(limited("disk", &before, &before), None);
        let text = limited("disk", &before, &after).unwrap();
        let expected = "limited: 2 requests waited for a limit (5 requests/s, - bytes/s; see `ebbd limit disk`)";
        assert_eq!(text, expected);
    }
}
