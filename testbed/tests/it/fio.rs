//! `fio` writes and reads back with checksums: several connections, deep queues.

use serde_json::Value;
use testbed::harness::process::PATIENCE;
use testbed::{Result, Server, Setup, Tool, check};

const MIB: u64 = 1 << 20;

/// A job that writes and then reads back what it wrote, comparing checksums.
fn verifying(server: &Server, export: &str, options: &[&str]) -> Tool {
    Tool::new("fio")
        .args(["--name=verify", "--ioengine=nbd", "--output-format=json"])
        .arg(format!("--uri={}", server.uri(export)))
        .args(["--verify=crc32c", "--verify_fatal=1", "--verify_dump=0", "--do_verify=1"])
        .args(["--randrepeat=1", "--thread", "--group_reporting"])
        .args(options)
        .dir(server.dir())
        .limit(PATIENCE * 4)
}

/// Runs such a job and requires that it wrote, read back, and found every checksum correct.
fn verified(server: &mut Server, export: &str, options: &[&str]) -> Result {
    let outcome = verifying(server, export, options).run()?;
    // The engine's messages precede the JSON.
    let start = outcome.stdout.find('{').unwrap_or(0);
    let json: Value = serde_json::from_str(&outcome.stdout[start..]).unwrap_or_default();
    let job = &json["jobs"][0];
    let ios = |kind: &str| job[kind]["total_ios"].as_u64().unwrap_or(0);
    check(outcome.status.success() && job["error"] == 0, || {
        let (said, errors) = (&outcome.stdout[..start], &outcome.stderr);
        format!("$ {}\n{}\n{said}{errors}\nerror {}", outcome.command, outcome.status, job["error"])
    })?;
    check(ios("write") > 0 && ios("read") > 0, || {
        format!("$ {}\n{} writes, {} reads", outcome.command, ios("write"), ios("read"))
    })?;
    server.healthy()
}

#[test]
fn four_jobs_mixed_at_depth_64_find_their_data() -> Result {
    let mut server = Server::with_disk(64 * MIB)?;
    verified(
        &mut server,
        "disk",
        &[
            "--rw=randrw",
            "--bs=4k",
            "--iodepth=64",
            "--numjobs=4",
            "--size=16M",
            "--offset_increment=16M",
        ],
    )
}

#[test]
fn requests_that_are_not_aligned_to_blocks_find_their_data() -> Result {
    // From 512 bytes to 256 KiB, aligned to 512 only.
    let mut server = Server::with_disk(64 * MIB)?;
    verified(
        &mut server,
        "disk",
        &[
            "--rw=randwrite",
            "--bsrange=512-256k",
            "--bs_unaligned=0",
            "--blockalign=512",
            "--iodepth=32",
            "--numjobs=2",
            "--size=32M",
            "--offset_increment=32M",
            "--norandommap=0",
            "--serialize_overlap=1",
        ],
    )
}

#[test]
fn a_memory_volume_finds_its_data() -> Result {
    let mut server = Setup::new()?.volume("ram=memory:64M").start()?;
    let options = ["--rw=randrw", "--bs=16k", "--iodepth=64", "--numjobs=2", "--size=32M"];
    verified(&mut server, "ram", &[&options[..], &["--offset_increment=32M"]].concat())
}

#[test]
fn flushes_between_writes_do_not_affect_data() -> Result {
    let mut server = Server::with_disk(64 * MIB)?;
    verified(
        &mut server,
        "disk",
        &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=64M", "--io_size=16M", "--fsync=64"],
    )
}

#[test]
fn wrong_data_is_detected() -> Result {
    // The tests above rely on fio to report wrong data: here the volume discards what is written.
    let server = Setup::new()?.volume("null=null:16M").start()?;
    let options = ["--rw=randwrite", "--bs=4k", "--iodepth=8", "--size=1M"];
    let outcome = verifying(&server, "null", &options).fails()?;
    check(outcome.stderr.contains("verify"), || {
        format!("no failed verification is reported: {}", outcome.stderr)
    })
}
