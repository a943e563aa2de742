//! `qemu-img` and `qemu-io`: whole images both ways, and single requests with patterns.

use std::fs;
use std::path::Path;
use testbed::harness::pattern::content;
use testbed::{Error, Result, Server, Setup, Tool, check};

const MIB: u64 = 1 << 20;

/// A raw image of 64 MiB: data at the start, in the middle and at the end.
fn image(path: &Path) -> Result {
    let mut bytes = vec![0; 64 << 20];
    for (stamp, offset, length) in [(1, 0, 3 << 20), (2, 30 << 20, 70_144), (3, 63 << 20, 1 << 20)]
    {
        bytes[offset..offset + length].copy_from_slice(&content(stamp, offset as u64, length));
    }
    fs::write(path, bytes).map_err(Error::io(path.display().to_string()))
}

#[test]
fn images_are_converted_both_ways_and_compare_equal() -> Result {
    let mut server = Server::with_disk(64 * MIB)?;
    let dir = server.dir().to_path_buf();
    let (raw, qcow2, back) = (dir.join("a.raw"), dir.join("a.qcow2"), dir.join("b.raw"));
    image(&raw)?;
    let uri = server.uri("disk");
    let img = |args: &[&str]| Tool::new("qemu-img").args(args);
    // Into the volume, from raw, eight requests in flight and out of order.
    img(&["convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw"]).arg(&raw).arg(&uri).ok()?;
    img(&["compare", "-f", "raw", "-F", "raw"]).arg(&raw).arg(&uri).ok()?;
    // Out of the volume, to qcow2 and from there to raw.
    img(&["convert", "-f", "raw", "-O", "qcow2"]).arg(&uri).arg(&qcow2).ok()?;
    img(&["compare", "-f", "qcow2", "-F", "raw"]).arg(&qcow2).arg(&uri).ok()?;
    img(&["convert", "-f", "qcow2", "-O", "raw"]).arg(&qcow2).arg(&back).ok()?;
    Tool::new("cmp").arg(&raw).arg(&back).ok()?;
    // A difference is detected.
    let poke = img(&["compare", "-f", "raw", "-F", "raw"]).arg(&raw).arg(&uri);
    io(&uri, &["write -q -P 0x11 30M 512"])?;
    let outcome = poke.fails()?;
    outcome.check(outcome.stdout.contains("mismatch"), "a mismatch")?;
    // The volume after conversion is as sparse as the image.
    let used = server.image_usage("disk")?;
    check(used <= 6 * MIB, || format!("4.1 MiB of data take {used} bytes"))?;
    server.healthy()
}

#[test]
fn the_map_of_qemu_is_right() -> Result {
    let server = Server::with_disk(64 * MIB)?;
    let uri = server.uri("disk");
    io(&uri, &["write -q -P 0x5a 8M 1M", "write -q -z -u 8M 64k"])?;
    let outcome =
        Tool::new("qemu-img").args(["map", "--output=json", "-f", "raw"]).arg(uri).ok()?;
    let json = outcome.json()?;
    let data: Vec<(u64, u64)> = json
        .as_array()
        .into_iter()
        .flatten()
        .filter(|extent| extent["data"] == true)
        .filter_map(|extent| Some((extent["start"].as_u64()?, extent["length"].as_u64()?)))
        .collect();
    let from = 8 * MIB + 65_536;
    outcome.check(data == [(from, 9 * MIB - from)], "data from 8 MiB + 64 KiB to 9 MiB only")
}

/// Runs `qemu-io` commands on a URI in one session. `qemu-io` itself compares patterns; it reports a
/// mismatch on standard output, and with exit status 1 in later versions only.
fn io(uri: &str, commands: &[&str]) -> Result<testbed::harness::tool::Outcome> {
    io_on(&["-f", "raw", uri], commands)
}

fn io_on(image: &[&str], commands: &[&str]) -> Result<testbed::harness::tool::Outcome> {
    let all = commands.iter().flat_map(|c| ["-c", c]);
    let outcome = Tool::new("qemu-io").args(all).args(image).ok()?;
    let bad = ["failed", "error", "Error", "verification"];
    outcome.check(!bad.iter().any(|b| outcome.stdout.contains(b)), "no message of a failure")?;
    Ok(outcome)
}

#[test]
fn patterns_survive_every_kind_of_request() -> Result {
    let mut server = Server::with_disk(64 * MIB)?;
    let uri = server.uri("disk");
    io(
        &uri,
        &[
            "write -P 0xa1 0 64k",
            "write -f -P 0xa2 64k 64k", // FUA
            "read -P 0xa1 0 64k",
            "read -P 0xa2 64k 64k",
            // Aligned to 512, not to 4 KiB.
            "write -P 0xa3 512 512",
            "write -P 0xa4 66048 3584",
            "read -P 0xa1 0 512",
            "read -P 0xa3 512 512",
            "read -P 0xa1 1024 3072",
            "read -P 0xa2 65536 512",
            "read -P 0xa4 66048 3584",
            "read -P 0xa2 69632 512",
            "flush",
            // Zeroes: plain, with unmap, with FUA; aligned and not.
            "write -P 0xb1 1M 1M",
            "write -z 1M 4k",
            "write -z -u 1052672 64k",
            "write -z -f 1245696 512",
            "read -P 0 1M 4k",
            "read -P 0 1052672 64k",
            "read -P 0 1245696 512",
            "read -P 0xb1 1118208 127488",
            "read -P 0xb1 1246208 850944",
            // Discard: the content of the range is undefined, and the data around it must be intact.
            "write -P 0xc1 4M 1M",
            "discard 4259840 64k",
            "discard 4456960 512",
            "read -P 0xc1 4M 64k",
            "read -P 0xc1 4325376 131584",
            "read -P 0xc1 4457472 785408",
            // One request of 32 MiB, the end of the disk, and zeroes never written.
            "write -P 0xd1 16M 32M",
            "read -P 0xd1 16M 32M",
            "write -P 0xe1 67108352 512",
            "read -P 0xe1 67108352 512",
            "read -P 0 8M 1M",
            "flush",
        ],
    )?;
    server.healthy()?;
    server.stop()?;
    server.restart()?;
    io(
        &uri,
        &[
            "read -P 0xa3 512 512",
            "read -P 0xa4 66048 3584",
            "read -P 0 1052672 64k",
            "read -P 0xd1 16M 32M",
            "read -P 0xe1 67108352 512",
        ],
    )?;
    Ok(())
}

#[test]
fn many_requests_in_flight_keep_their_data() -> Result {
    let server = Server::with_disk(64 * MIB)?;
    let mut commands: Vec<String> = Vec::new();
    for block in 0..128_u64 {
        // Adjacent requests of 12.5 KiB: they do not overlap, but share blocks of 4 KiB.
        commands.push(format!("aio_write -q -P {} {} 12800", block + 1, block * 12_800));
    }
    commands.push("aio_flush".into());
    for block in 0..128_u64 {
        commands.push(format!("aio_read -q -P {} {} 12800", block + 1, block * 12_800));
    }
    commands.push("aio_flush".into());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    io(&server.uri("disk"), &commands)?;
    Ok(())
}

#[test]
fn a_wrong_pattern_is_detected() -> Result {
    // The tests above rely on qemu-io to report mismatches.
    let server = Server::with_disk(MIB)?;
    let uri = server.uri("disk");
    match io(&uri, &["write -q -P 1 0 4k", "read -P 2 0 4k"]) {
        Err(_) => Ok(()),
        Ok(outcome) => Err(outcome.unexpected("a reported mismatch")),
    }
}

#[test]
fn past_the_end_and_read_only_are_refused() -> Result {
    let setup = Setup::new()?.image("disk", MIB)?;
    let path = setup.image_path("ro");
    fs::write(&path, vec![0; 1 << 20]).map_err(Error::io("write an image"))?;
    let server = setup.volume(&format!("ro=file:{},read-only=true", path.display())).start()?;
    let past = Tool::new("qemu-io").args(["-f", "raw", "-c", "read 1M 512"]);
    let outcome = past.arg(server.uri("disk")).run()?;
    outcome.check(
        outcome.stdout.contains("failed") || outcome.stderr.contains("failed"),
        "a refused read",
    )?;
    let write = Tool::new("qemu-io").args(["-f", "raw", "-c", "write 0 512"]);
    let outcome = write.arg(server.uri("ro")).run()?;
    let all = outcome.stdout.clone() + &outcome.stderr;
    outcome.check(
        all.contains("read-only") || all.contains("read only") || all.contains("Permission"),
        "a refusal to write",
    )
}
