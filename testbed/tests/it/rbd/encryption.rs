//! Encrypted images: what another program reads of them, their sizes, and what is told where they cannot be opened.

use std::fs;
use std::path::{Path, PathBuf};

use testbed::harness::ceph::Ceph;
use testbed::harness::nbd::{Client, wire};
use testbed::harness::process::{self, PATIENCE};
use testbed::{Error, Result, Server, Tool, check};

use super::daemon::setup;

const MIB: u64 = 1 << 20;

/// A file with a passphrase, in the directory of the cluster.
fn passphrase(ceph: &Ceph, name: &str, text: &str) -> Result<PathBuf> {
    let path = ceph.dir().join(name);
    fs::write(&path, text).map_err(Error::io("write a passphrase"))?;
    Ok(path)
}

/// An encrypted image of 64 MiB.
fn make(ceph: &Ceph, image: &str, format: &str, passphrase: &Path) -> Result {
    ceph.create_image(image, 64)?;
    let spec = format!("rbd/{image}");
    let path = passphrase.display().to_string();
    ceph.rbd(&["encryption", "format", &spec, format, &path]).map(drop)
}

fn volume(ceph: &Ceph, image: &str, format: &str, file: &str) -> String {
    format!("disk={}&encryption-format={format}&encryption-passphrase-file={file}", ceph.uri(image))
}

fn raw_size(ceph: &Ceph, image: &str) -> Result<u64> {
    let info = ceph.rbd(&["info", "--format", "json", &format!("rbd/{image}")])?.json()?;
    info["size"].as_u64().ok_or_else(|| Error::unexpected(info.to_string()))
}

/// Waits until the log names these words.
fn logs(server: &Server, words: &[&str]) -> Result {
    process::until("the log says why", PATIENCE, || {
        let log = server.log();
        Ok(words.iter().all(|word| log.contains(word)).then_some(()))
    })
    .map_err(|error| Error::unexpected(format!("{error}: {words:?} are not in\n{}", server.log())))
}

/// A client of the volume, once that is served: the passphrase of LUKS2 takes seconds to check.
fn client(server: &Server) -> Result<Client> {
    process::until("the volume is served", PATIENCE, || {
        Ok(Client::open(&server.socket(), "disk").ok())
    })
}

/// Each format with the bytes of its header.
const FORMATS: [(&str, u64); 2] = [("luks1", 4 * MIB), ("luks2", 16 * MIB)];

#[test]
fn an_encrypted_image_is_smaller_than_its_objects_and_follows_resizes() -> Result {
    let ceph = Ceph::start()?;
    passphrase(&ceph, "secret", "a long secret\n")?;
    for (format, header) in FORMATS {
        make(&ceph, format, format, &ceph.dir().join("secret"))?;
        let text = volume(&ceph, format, format, "credential:secret");
        let setup = setup(&ceph, &[&format!("{text},cache=writeback")])?;
        let mut server = setup.env("CREDENTIALS_DIRECTORY", ceph.dir()).start()?;
        let mut client = self::client(&server)?;
        let size = 64 * MIB - header;
        check(client.size == size, || format!("{format}: the volume has {} bytes", client.size))?;
        let new = client.read(0, 4096)?;
        check(new == client.read(size - 4096, 4096)?, || "a new image has data".to_owned())?;
        // Less than a block of the cipher, across objects, and the end.
        let pieces = [(512, 512), (4 * MIB - 1024, 2048), (size - 512, 512), (MIB, 65536)];
        for (value, (at, bytes)) in (0x51_u8..).zip(&pieces) {
            client.write(*at, &vec![value; *bytes], 0)?;
        }
        client.flush()?;
        check(client.write(size, &[1; 512], 0).is_err(), || "a write beyond the end".to_owned())?;
        drop(client);
        server.kill9()?;
        server.restart()?;
        let mut client = self::client(&server)?;
        for (value, (at, bytes)) in (0x51_u8..).zip(&pieces) {
            let data = client.read(*at, u32::try_from(*bytes).unwrap_or(0))?;
            check(data == vec![value; *bytes], || format!("{format}: at {at}"))?;
        }
        let around = client.read(0, 4096)?;
        check(around[..512] == new[..512] && around[1024..] == new[1024..], || {
            format!("{format}: a write of a sector has changed others")
        })?;
        drop(client);
        let has = |size: u64| {
            process::until("the volume has the new size", PATIENCE, || {
                Ok((Client::open(&server.socket(), "disk")?.size == size).then_some(()))
            })
        };
        let spec = format!("rbd/{format}");
        ceph.rbd(&["resize", "--no-progress", "--size", "96M", &spec])?;
        has(96 * MIB - header)?;
        server.operator(&["volume", "resize", "disk", "40M", "--shrink"])?.ok()?;
        has(40 * MIB)?;
        let raw = raw_size(&ceph, format)?;
        check(raw == 40 * MIB + header, || format!("{format}: the image has {raw} bytes"))?;
        let mut client = Client::open(&server.socket(), "disk")?;
        client.write(40 * MIB - 4096, &[0x77; 4096], wire::FLAG_FUA)?;
        let data = client.read(40 * MIB - 4096, 4096)?;
        check(data == [0x77; 4096], || "the end after a resize".to_owned())?;
        client.disconnect()?;
        server.stop()?;
        let export = ceph.dir().join("export");
        ceph.rbd(&["export", "--no-progress", &spec, &export.display().to_string()])?;
        let raw = fs::read(&export).map_err(Error::io("read the export"))?;
        let shows = raw.windows(64).any(|part| part == [0x54; 64] || part == [0x77; 64]);
        check(raw.starts_with(b"LUKS") && !shows, || "the objects hold plain data".to_owned())?;
        fs::remove_file(&export).map_err(Error::io("remove the export"))?;
    }
    Ok(())
}

#[test]
fn another_program_decrypts_what_a_volume_has_written() -> Result {
    let ceph = Ceph::start()?;
    let secret = passphrase(&ceph, "secret", "open sesame")?;
    make(&ceph, "disk", "luks1", &secret)?;
    let text = volume(&ceph, "disk", "luks1", &secret.display().to_string());
    let mut server = setup(&ceph, &[&text])?.start()?;
    Tool::new("sh").args(["-c", "head -c 60M /dev/urandom >in"]).dir(ceph.dir()).ok()?;
    let path = |name: &str| ceph.dir().join(name).display().to_string();
    client(&server)?.disconnect()?;
    let uri = format!("nbd+unix:///disk?socket={}", server.socket().display());
    Tool::new("nbdcopy").args(["--flush".to_owned(), path("in"), uri]).ok()?;
    server.stop()?;
    ceph.rbd(&["export", "--no-progress", "rbd/disk", &path("export")])?;
    let key = format!("secret,id=key,file={}", secret.display());
    let image = format!("driver=luks,key-secret=key,file.filename={}", path("export"));
    let convert = ["convert", "--object", &key, "--image-opts", &image, "-O", "raw", &path("out")];
    Tool::new("qemu-img").args(convert).ok()?;
    Tool::new("cmp").args([path("in"), path("out")]).ok().map(drop)
}

#[test]
fn an_image_that_cannot_be_decrypted_is_refused_with_a_remedy() -> Result {
    let ceph = Ceph::start()?;
    let secret = passphrase(&ceph, "secret", "right")?;
    let wrong = passphrase(&ceph, "other", "wrong")?;
    make(&ceph, "disk", "luks2", &secret)?;
    ceph.create_image("plain", 64)?;
    let (secret, wrong) = (secret.display().to_string(), wrong.display().to_string());
    for (image, format, file, words) in [
        ("disk", "luks2", wrong.as_str(), ["does not open the image", "other"]),
        ("disk", "luks2", "/nonexistent/file", ["cannot be read", "/nonexistent/file"]),
        ("disk", "luks2", "credential:none", ["no credential none", "LoadCredential="]),
        ("disk", "luks1", secret.as_str(), ["is not encrypted with luks1", "encryption-format"]),
        (
            "plain",
            "luks2",
            secret.as_str(),
            ["is not encrypted with luks2", "rbd encryption format"],
        ),
    ] {
        let server = setup(&ceph, &[&volume(&ceph, image, format, file)])?.start()?;
        logs(&server, &words)?;
        let owner = ceph.lock_owner(image)?;
        check(owner.is_none(), || format!("{image} is locked after {words:?}"))?;
    }
    Ok(())
}

#[test]
fn a_librbd_without_encryption_opens_other_images_and_says_so() -> Result {
    let ceph = Ceph::start()?;
    let secret = passphrase(&ceph, "secret", "right")?;
    make(&ceph, "disk", "luks1", &secret)?;
    ceph.create_image("plain", 8)?;
    // The same library with another name of that function, as an older one has none.
    let libraries = ceph.libraries();
    let library = libraries.last().ok_or_else(|| Error::unexpected("no library"))?;
    let mut old = fs::read(library).map_err(Error::io("read librbd"))?;
    let (name, other) = (b"\0rbd_encryption_load\0", b"\0rbd_encryption_none\0");
    let at = old.windows(name.len()).position(|part| part == name);
    let at = at.ok_or_else(|| Error::unexpected("librbd has no encryption"))?;
    old[at..at + name.len()].copy_from_slice(other);
    let folder = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    fs::write(folder.path().join("librbd.so.1"), old).map_err(Error::io("write librbd"))?;
    let path = format!("{}:{}", folder.path().display(), ceph.library_path());
    let plain = format!("plain={}", ceph.uri("plain"));
    let encrypted = volume(&ceph, "disk", "luks1", &secret.display().to_string());
    let server = setup(&ceph, &[&plain, &encrypted])?.env("LD_LIBRARY_PATH", path).start()?;
    logs(&server, &["cannot open encrypted images", "librbd1"])?;
    process::until("the other volume is written", PATIENCE, || {
        let client = Client::open(&server.socket(), "plain");
        Ok(client.and_then(|mut client| client.write(0, &[1; 4096], wire::FLAG_FUA)).ok())
    })
}
