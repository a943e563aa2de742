//! Configurations that cannot be served are refused at the start, with an exit status and a message
//! that names the place and the remedy.

use std::fs;
use std::path::Path;
use testbed::harness::binary::{self, Build};
use testbed::harness::server::Setup;
use testbed::harness::tls::{Authority, Role};
use testbed::harness::tool::Outcome;
use testbed::{Error, Result, Server, Tool, check};

/// Runs `ebbd serve` with these arguments until it exits. If they have no address, a valid one is
/// added, so that the missing address is not the mistake that is reported.
fn serve(args: &[&str]) -> Result<Outcome> {
    let mut ebbd = Tool::new(binary::ebbd(Build::AsTests)?).arg("serve").args(args);
    if !args.contains(&"--listen") {
        ebbd = ebbd.args(["--listen", "unix:/tmp/ebbd-never-made.sock"]);
    }
    ebbd.run()
}

/// Requires an exit status, and every word in the standard error output.
fn refused(args: &[&str], status: i32, words: &[&str]) -> Result {
    let outcome = serve(args)?;
    outcome.check(outcome.status.code() == Some(status), &format!("exit status {status}"))?;
    for word in words {
        outcome.check(outcome.stderr.contains(word), &format!("the word `{word}`"))?;
    }
    outcome.check(!outcome.stderr.contains("panicked"), "no panic")
}

fn write(path: &Path, text: impl AsRef<[u8]>) -> Result {
    fs::write(path, text).map_err(Error::io(path.display().to_string()))
}

#[test]
fn stores_that_cannot_be_served_are_named() -> Result {
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    let volume = |text: &str| vec!["--check".to_owned(), "--volume".to_owned(), text.to_owned()];
    let refuse = |text: String, words: &[&str]| {
        let args = volume(&text);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        refused(&args, 2, words)
    };
    refuse(format!("v=file:{}", path("absent")), &[&path("absent")])?;
    refuse(format!("v=file:{}", path("no/such/dir/image")), &[&path("no/such/dir/image")])?;
    refuse(format!("v=file:{}", dir.path().display()), &[&path("")[..path("").len() - 1]])?;
    write(&dir.path().join("odd"), vec![0; 1000])?;
    refuse(format!("v=file:{}", path("odd")), &[&path("odd"), "512"])?;
    write(&dir.path().join("empty"), "")?;
    refuse(format!("v=file:{}", path("empty")), &[&path("empty")])?;
    write(&dir.path().join("small"), vec![0; 512])?;
    refuse(format!("v=file:{},size=1M,create=true", path("small")), &[&path("small")])?;
    refuse("v=memory:1000".into(), &["512"])?;
    refuse("v=memory:much".into(), &["much"])?;
    refuse("v=memory:99999999999T".into(), &["99999999999T"])?;
    refuse("v=tape:/dev/st0".into(), &["tape"])?;
    refuse("v".into(), &["NAME=STORE"])?;
    refuse("v=memory:1M,color=red".into(), &["color"])?;
    refuse("v=memory:1M,read-only=perhaps".into(), &["perhaps"])
}

#[test]
fn a_check_makes_nothing_and_finds_what_would_fail_later() -> Result {
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let path = dir.path().join("image").display().to_string();
    let volume = |name: &str, more: &str| format!("{name}=file:{path},{more}");
    let made = volume("d", "size=1M,create=true");
    let outcome = serve(&["--check", "--volume", &made])?;
    outcome.check(outcome.status.success(), "an image that can be created to pass")?;
    outcome.check(outcome.stdout.contains("to be created"), "a note that it is to be created")?;
    check(!Path::new(&path).exists(), || "the check has created the image".into())?;

    let two =
        |more: &str| ["--check".into(), "--volume".into(), volume("one", more), "--volume".into()];
    let same = [&two("size=1M,create=true")[..], &[volume("two", "size=1M,create=true")]].concat();
    let same: Vec<&str> = same.iter().map(String::as_str).collect();
    refused(&same, 2, &["one", "two", "same file"])?;
    write(Path::new(&path), vec![0; 4096])?;
    // By another path, too.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).map_err(Error::io("make a link"))?;
    let other = format!("two=file:{}", link.display());
    let same = [&two("read-only=true")[..], std::slice::from_ref(&other)].concat();
    let same: Vec<&str> = same.iter().map(String::as_str).collect();
    refused(&same, 2, &["one", "two", "same file"])?;
    let readers = [&two("read-only=true")[..], &[format!("{other},read-only=true")]].concat();
    let readers: Vec<&str> = readers.iter().map(String::as_str).collect();
    let outcome = serve(&readers)?;
    outcome.check(outcome.status.success(), "two read-only volumes to pass")
}

#[test]
fn an_expired_certificate_is_refused_by_a_check() -> Result {
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let authority = Authority::new(dir.path().join("ca"))?;
    let good = authority.issue(Role::Server, dir.path().join("good"))?.display().to_string();
    let old = authority.issue_expired(Role::Server, dir.path().join("old"))?.display().to_string();
    let arguments = ["--check", "--volume", "d=memory:1M", "--tls", "on", "--tls-certificates"];
    let outcome = serve(&[&arguments[..], &[&good]].concat())?;
    outcome.check(outcome.status.success(), "a good certificate to pass")?;
    refused(&[&arguments[..], &[&old]].concat(), 2, &["server-cert.pem", "expired", "2002"])
}

#[test]
fn an_unreadable_image_is_named() -> Result {
    // Permissions do not apply to the superuser; a file in place of a directory stops every user.
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let file = dir.path().join("file");
    write(&file, vec![0; 512])?;
    let below = file.join("image").display().to_string();
    refused(&["--check", "--volume", &format!("v=file:{below}")], 2, &[&below])
}

#[test]
fn mistakes_in_a_configuration_file_are_reported_with_line_and_remedy() -> Result {
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let file = dir.path().join("ebbd.toml");
    let name = file.display().to_string();
    let good = "[volume.disk]\nstore = \"memory:1M\"\n";
    for (text, words) in [
        ("[volume.disk\n", &["ebbd.toml", "1"][..]),
        ("[volume.disk]\nstroe = \"memory:1M\"\n", &["stroe", "store", "2"]),
        ("[volume.disk]\n", &["store"]),
        ("[volume.disk]\nstore = 3\n", &["store", "2"]),
        ("log = \"loud\"\n", &["loud", "1"]),
        ("[nbd]\nmax_clients = -1\n", &["max_clients", "2"]),
        ("[nbd]\nmax_request = \"0\"\n", &["max_request"]),
        ("listen = [\"carrier-pigeon:coop\"]\n", &["carrier-pigeon"]),
        ("listen = [\"tcp:localhost:99999\"]\n", &["99999"]),
    ] {
        write(&file, format!("{text}{}", if text.contains("volume") { "" } else { good }))?;
        refused(&["--check", "--config", &name], 2, words)
            .map_err(|e| Error::unexpected(format!("configuration:\n{text}{e}")))?;
    }
    refused(&["--check", "--config", "/no/such/ebbd.toml"], 2, &["/no/such/ebbd.toml"])?;
    write(&file, b"\xff\xfe\x00")?;
    refused(&["--check", "--config", &name], 2, &["ebbd.toml"])?;
    write(&file, good)?;
    let outcome = serve(&["--check", "--config", &name])?;
    outcome.check(outcome.status.success(), "a good configuration to pass")?;
    outcome.check(outcome.stdout.contains("ok"), "a line with ok")
}

#[test]
fn mistakes_in_flags_are_reported() -> Result {
    let disk = ["--check", "--volume", "d=memory:1M"];
    let refuse = |args: &[&str], words: &[&str]| refused(&[&disk, args].concat(), 2, words);
    refuse(&["--no-such-flag"], &["--no-such-flag"])?;
    refuse(&["--listen", "nonsense"], &["nonsense"])?;
    refuse(&["--volume", "d=memory:2M"], &["d"])?;
    refuse(&["--tls", "perhaps"], &["perhaps"])?;
    refuse(&["--tls", "require"], &["--tls"])?;
    refuse(&["--tls", "on", "--tls-certificates", "/no/such/dir"], &["/no/such/dir"])?;
    refuse(&["--tls", "on", "--tls-psk", "/no/such/keys"], &["/no/such/keys"])?;
    refuse(&["--max-request", "lots"], &["lots"])?;
    refuse(&["--workers", "0"], &["workers"])
}

#[test]
fn a_socket_in_use_is_not_replaced() -> Result {
    let mut server = Server::with_disk(1 << 20)?;
    let listen = format!("unix:{}", server.socket().display());
    let outcome = serve(&["--volume", "d=memory:1M", "--listen", &listen])?;
    outcome.check(matches!(outcome.status.code(), Some(1 | 2)), "exit status 1 or 2")?;
    let socket = server.socket().display().to_string();
    outcome.check(outcome.stderr.contains(&socket), "the path of the socket")?;
    outcome.check(outcome.stderr.contains("in use"), "the words `in use`")?;
    testbed::harness::nbd::Client::open(&server.socket(), "disk")?.disconnect()?;
    server.stop()
}

#[test]
fn a_path_that_is_no_socket_is_left_alone() -> Result {
    let setup = Setup::new()?;
    let path = setup.dir().join("precious");
    write(&path, "data")?;
    let listen = format!("unix:{}", path.display());
    let outcome = serve(&["--volume", "d=memory:1M", "--listen", &listen])?;
    outcome.check(matches!(outcome.status.code(), Some(1 | 2)), "exit status 1 or 2")?;
    outcome.check(outcome.stderr.contains("precious"), "the path")?;
    let kept = fs::read_to_string(&path).unwrap_or_default();
    check(kept == "data", || format!("the file now holds {kept:?}"))
}

#[test]
fn two_daemons_do_not_write_to_one_image() -> Result {
    let mut server = Server::with_disk(1 << 20)?;
    let image = server.image_path("disk").display().to_string();
    let volume = format!("d=file:{image}");
    let outcome = serve(&["--check", "--volume", &volume])?;
    outcome.check(outcome.status.success(), "a check beside the daemon to pass")?;
    outcome.check(outcome.stdout.contains("in use"), "a note that it is in use")?;
    let outcome = serve(&["--strict", "--volume", &volume])?;
    outcome.check(matches!(outcome.status.code(), Some(1 | 2)), "exit status 1 or 2")?;
    outcome.check(outcome.stderr.contains(&image), "the path of the image")?;
    outcome.check(outcome.stderr.contains("in use"), "the words `in use`")?;
    server.stop()
}
