//! `nbdinfo` with the daemon: the description of an export, the list of exports, the map, and a
//! socket passed by the service manager.

use testbed::harness::nbd::{Client, wire};
use testbed::harness::server::Setup;
use testbed::harness::{binary, pattern};
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;

#[test]
fn json_shows_size_and_features() -> Result {
    let mut server = Server::with_disk(64 * MIB)?;
    let outcome = Tool::new("nbdinfo").arg("--json").arg(server.uri("disk")).ok()?;
    let json = outcome.json()?;
    let export = &json["exports"][0];
    outcome.check(json["protocol"] == "newstyle-fixed", "protocol newstyle-fixed")?;
    outcome.check(json["structured"] == true, "structured replies")?;
    outcome.check(json["TLS"] == false, "no TLS")?;
    outcome.check(export["export-size"] == 64 * MIB, "the size of the volume")?;
    for able in [
        "can_cache",
        "can_df",
        "can_fast_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ] {
        outcome.check(export[able] == true, able)?;
    }
    outcome.check(export["is_read_only"] == false, "a writable export")?;
    outcome.check(export["is_rotational"] == false, "an export that is not rotational")?;
    let contexts = export["contexts"].as_array().cloned().unwrap_or_default();
    outcome.check(contexts.contains(&"base:allocation".into()), "context base:allocation")?;
    outcome.check(export["block_size_minimum"].as_u64() <= Some(512), "512-byte access")?;
    outcome.check(export["block_size_preferred"] == 4096, "4 KiB preferred")?;
    server.healthy()
}

#[test]
fn a_read_only_volume_is_reported_as_read_only() -> Result {
    let setup = Setup::new()?;
    let path = setup.image_path("ro");
    std::fs::write(&path, vec![7; 1 << 20]).map_err(Error::io("write an image"))?;
    let server = setup.volume(&format!("ro=file:{},read-only=true", path.display())).start()?;
    let outcome = Tool::new("nbdinfo").arg("--json").arg(server.uri("ro")).ok()?;
    let export = &outcome.json()?["exports"][0];
    outcome.check(export["is_read_only"] == true, "a read-only export")?;
    outcome.check(export["can_trim"] == false, "no trim on a read-only export")
}

#[test]
fn the_list_names_every_volume() -> Result {
    let server = Setup::new()?
        .image("one", MIB)?
        .image("two", 2 * MIB)?
        .volume("three=memory:3M")
        .volume("four=null:4M")
        .start()?;
    let uri = format!("nbd+unix://?socket={}", server.socket().display());
    let outcome = Tool::new("nbdinfo").args(["--json", "--list"]).arg(uri).ok()?;
    let json = outcome.json()?;
    let mut seen: Vec<(String, u64)> = json["exports"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|e| Some((e["export-name"].as_str()?.into(), e["export-size"].as_u64()?)))
        .collect();
    seen.sort();
    let expected: [(&str, u64); 4] =
        [("four", 4 * MIB), ("one", MIB), ("three", 3 * MIB), ("two", 2 * MIB)];
    let same = seen.iter().map(|(n, s)| (n.as_str(), *s)).eq(expected);
    outcome.check(same, &format!("{expected:?}"))
}

/// Bytes of data and of holes in `[from, to)`, by `nbdinfo --map`.
fn mapped(server: &Server, export: &str, from: u64, to: u64) -> Result<(u64, u64)> {
    let outcome = Tool::new("nbdinfo").args(["--map", "--json"]).arg(server.uri(export)).ok()?;
    let (mut data, mut holes, mut end) = (0, 0, 0);
    let json = outcome.json()?;
    for extent in json.as_array().into_iter().flatten() {
        let field = |name: &str| extent[name].as_u64();
        let all = field("offset").zip(field("length")).zip(field("type"));
        let ((offset, length), kind) = all.ok_or_else(|| outcome.unexpected("complete extents"))?;
        outcome.check(offset == end, "extents without gaps or overlaps")?;
        end = offset + length;
        let part = end.min(to).saturating_sub(offset.max(from));
        match kind {
            0 => data += part,
            3 => holes += part,
            _ => return Err(outcome.unexpected("data (0) or a hole that reads as zeroes (3)")),
        }
    }
    outcome.check(data + holes == to - from, "extents up to the end")?;
    Ok((data, holes))
}

#[test]
fn the_map_follows_writes_and_trims() -> Result {
    let server = Setup::new()?.image("disk", 64 * MIB)?.volume("ram=memory:64M").start()?;
    for export in ["disk", "ram"] {
        let whole = mapped(&server, export, 0, 64 * MIB)?;
        check(whole == (0, 64 * MIB), || {
            format!("{export}: never written, but data/holes {whole:?}")
        })?;
        let mut client = Client::open(&server.socket(), export)?;
        let data = pattern::content(1, 16 * MIB, 1 << 20);
        client.write(16 * MIB, &data, wire::FLAG_FUA)?;
        let written = mapped(&server, export, 16 * MIB, 17 * MIB)?;
        check(written == (MIB, 0), || format!("{export}: written, but data/holes {written:?}"))?;
        // A store may allocate more than was written, but not the whole disk.
        let whole = mapped(&server, export, 0, 64 * MIB)?;
        check(whole.0 <= 2 * MIB, || format!("{export}: 1 MiB written, data/holes {whole:?}"))?;

        client.command(wire::CMD_TRIM, 0, 16 * MIB, 1 << 19)?;
        let trimmed = mapped(&server, export, 16 * MIB, 16 * MIB + (1 << 19))?;
        check(trimmed == (0, 1 << 19), || format!("{export}: trimmed, data/holes {trimmed:?}"))?;
        let rest = mapped(&server, export, 16 * MIB + (1 << 19), 17 * MIB)?;
        check(rest == (1 << 19, 0), || format!("{export}: not trimmed, data/holes {rest:?}"))?;

        client.command(wire::CMD_WRITE_ZEROES, 0, 16 * MIB, 1 << 20)?;
        let zeroed = client.read(16 * MIB, 1 << 20)?;
        check(zeroed.iter().all(|b| *b == 0), || format!("{export}: zeroed, but reads data"))?;
        client.disconnect()?;
    }
    Ok(())
}

#[test]
fn a_socket_passed_by_the_service_manager_is_served() -> Result {
    // nbdinfo creates the socket and starts the daemon with LISTEN_FDS, as systemd does.
    let setup = Setup::new()?.image("disk", 64 * MIB)?;
    let outcome = Tool::new("nbdinfo")
        .args(["--json", "--", "["])
        .arg(binary::ebbd(binary::Build::AsTests)?)
        .args(["serve", "--volume"])
        .arg(format!("disk=file:{}", setup.image_path("disk").display()))
        .arg("]")
        .run()?;
    // The tool uses the default export, named "".
    let json = outcome.json();
    let size = json.ok().and_then(|j| j["exports"][0]["export-size"].as_u64());
    outcome.check(size == Some(64 * MIB), "the only volume as default export")?;
    outcome.check(outcome.status.success(), "success")
}
