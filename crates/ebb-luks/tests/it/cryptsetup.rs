//! `cryptsetup` is the judge: it opens what this crate makes, and the other way round. The data is judged by OpenSSL with
//! the key that `cryptsetup` says.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ebb_advice::full_text;
use ebb_luks::{HeaderArea, LuksError, LuksHeader, Secret, SectorCipher, Unusable};
use openssl::symm::{Cipher, Crypter, Mode};

/// The directory that `testbed/install` has unpacked `cryptsetup` into.
fn unpacked() -> PathBuf {
    let cache = std::env::var_os("EBBD_TESTBED_CACHE").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/testbed"),
        PathBuf::from,
    );
    cache.join("cryptsetup")
}

fn cryptsetup(args: &[&str]) -> Output {
    let root = unpacked();
    let libraries = [root.join("lib/x86_64-linux-gnu"), root.join("usr/lib/x86_64-linux-gnu")];
    Command::new(root.join("sbin/cryptsetup"))
        .args(args)
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap())
        .output()
        .expect("these tests need cryptsetup: run testbed/install")
}

#[track_caller]
fn good(args: &[&str]) -> String {
    let output = cryptsetup(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

struct Image(std::fs::File);

impl HeaderArea for Image {
    fn size(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(bytes, at)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }
}

/// A folder with an image of 20 MiB and files with keys.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let bench = Bench { folder: tempfile::tempdir().unwrap() };
        let image = std::fs::File::create(bench.path("image")).unwrap();
        image.set_len(20 << 20).unwrap();
        for (name, key) in [("one", &b"first key"[..]), ("two", b"second\n\0key"), ("wrong", b"x")]
        {
            std::fs::write(bench.path(name), key).unwrap();
        }
        bench
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn image(&self) -> Image {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(self.path("image"));
        Image(file.unwrap())
    }

    fn key(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    /// Whether `cryptsetup` opens the image with a key, in this slot.
    fn opens(&self, key: &str, slot: u32) -> bool {
        let (key, slot) = (self.path(key), slot.to_string());
        let args = ["open", "--test-passphrase", "--key-file", &key, "--key-slot", &slot];
        cryptsetup(&[&args[..], &[&self.path("image")]].concat()).status.success()
    }

    /// The key of the volume, as `cryptsetup` says it.
    fn volume_key(&self, key: &str) -> Vec<u8> {
        let (key, into, image) = (self.path(key), self.path("volume-key"), self.path("image"));
        let _ = std::fs::remove_file(&into);
        let args = ["luksDump", "-q", "--dump-volume-key", "--volume-key-file", &into];
        good(&[&args[..], &["--key-file", &key, &image]].concat());
        std::fs::read(into).unwrap()
    }
}

/// Decrypts a sector of `plain64` in units of 512 bytes, by other functions of OpenSSL than those of the crate.
fn decrypt(key: &[u8], unit: u64, bytes: &[u8]) -> Vec<u8> {
    let tweak: Vec<u8> = unit.to_le_bytes().into_iter().chain([0; 8]).collect();
    let cipher = if key.len() == 32 { Cipher::aes_128_xts() } else { Cipher::aes_256_xts() };
    let mut crypter = Crypter::new(cipher, Mode::Decrypt, key, Some(&tweak)).unwrap();
    let mut plain = vec![0; bytes.len() + 16];
    let count = crypter.update(bytes, &mut plain).unwrap();
    plain.truncate(count);
    plain
}

#[test]
fn cryptsetup_opens_what_this_crate_makes() {
    let bench = Bench::new();
    let mut image = bench.image();
    let (mut header, key) = LuksHeader::format(&mut image, &bench.key("one")).unwrap();
    let dump = good(&["luksDump", &bench.path("image")]);
    for line in ["cipher: aes-xts-plain64", "sector: 4096", "argon2id", "Key:        512 bits"] {
        assert!(dump.contains(line), "{line} is not in:\n{dump}");
    }
    assert!(dump.contains(&header.uuid()), "{dump}");
    assert!(bench.opens("one", 0) && !bench.opens("wrong", 0));
    assert_eq!(header.add_key(&mut image, &key, &bench.key("two")).unwrap(), 1);
    assert!(bench.opens("two", 1) && bench.opens("one", 0));
    header.remove_key(&mut image, 0).unwrap();
    assert!(!bench.opens("one", 0) && bench.opens("two", 1));

    // The data.
    let volume_key = bench.volume_key("two");
    assert_eq!(volume_key, *key);
    let cipher = SectorCipher::new(key, 4096, header.segment().first).unwrap();
    let plain: Vec<u8> = (0..8192u32).map(|at| (at % 251) as u8).collect();
    let mut sectors = vec![0; 8192];
    cipher.encrypt(1 << 20, &plain, &mut sectors).unwrap();
    for number in 0..2u64 {
        let at = usize::try_from(number).unwrap() * 4096;
        let unit = (1 << 20) / 512 + number * 8;
        assert_eq!(decrypt(&volume_key, unit, &sectors[at..at + 4096]), plain[at..at + 4096]);
    }
}

#[test]
fn what_cryptsetup_makes_and_changes_opens_here() {
    let formats: [&[&str]; 5] = [
        // AES-128.
        &["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--key-size", "256"],
        &["--pbkdf-memory", "32768", "--pbkdf-force-iterations", "4"],
        &["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--sector-size", "512"],
        &[
            "--pbkdf",
            "argon2i",
            "--pbkdf-memory",
            "1024",
            "--pbkdf-force-iterations",
            "4",
            "--hash",
            "sha512",
        ],
        &[
            "--pbkdf",
            "pbkdf2",
            "--pbkdf-force-iterations",
            "1000",
            "--luks2-metadata-size",
            "64k",
            "--offset",
            "16384",
        ],
    ];
    for format in formats {
        let bench = Bench::new();
        let (image, one, two) = (bench.path("image"), bench.path("one"), bench.path("two"));
        let args = [&["luksFormat", "-q", "--type", "luks2"][..], format, &[&image, &one]].concat();
        good(&args);
        let mut area = bench.image();
        let header = LuksHeader::load(&mut area).unwrap();
        assert_eq!(header.warning(), None);
        let (slot, key) = header.unlock(&mut area, &bench.key("one")).unwrap();
        assert_eq!((slot, &*key), (0, &*bench.volume_key("one")), "{format:?}");
        let wrong = header.unlock(&mut area, &bench.key("wrong"));
        assert!(matches!(wrong, Err(LuksError::WrongKey { tried: 1, .. })));
        // A slot that cryptsetup adds, one that this crate adds, and one that cryptsetup removes.
        let add = ["luksAddKey", "-q", "--key-file", &one, "--pbkdf", "pbkdf2"];
        good(&[&add[..], &["--pbkdf-force-iterations", "1000", &image, &two]].concat());
        let mut header = LuksHeader::load(&mut area).unwrap();
        assert_eq!(header.unlock(&mut area, &bench.key("two")).unwrap().0, 1);
        assert_eq!(header.add_key(&mut area, &key, b"x").unwrap(), 2);
        assert!(bench.opens("wrong", 2), "{format:?}");
        good(&["luksKillSlot", "-q", &image, "0"]);
        let header = LuksHeader::load(&mut area).unwrap();
        assert!(header.unlock(&mut area, &bench.key("one")).is_err());
        let (slot, key) = header.unlock(&mut area, b"x").unwrap();
        assert_eq!(slot, 2);
        let cipher = SectorCipher::new(Secret::copy_of(&key).unwrap(), 512, 0).unwrap();
        let mut sector = vec![0; 512];
        cipher.encrypt(512, &[5; 512], &mut sector).unwrap();
        assert_eq!(decrypt(&key, 1, &sector), [5; 512]);
    }
}

#[test]
fn what_this_crate_does_not_support_is_refused_with_a_remedy() {
    let quick = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    for (args, words) in [
        (&["--type", "luks1"][..], "cryptsetup convert --type luks2"),
        (
            &["--type", "luks2", "--cipher", "aes-cbc-essiv:sha256", "--key-size", "256"],
            "another cipher",
        ),
    ] {
        let bench = Bench::new();
        let (image, one) = (bench.path("image"), bench.path("one"));
        good(&[&["luksFormat", "-q"][..], args, &quick, &[&image, &one]].concat());
        let refused = full_text(&LuksHeader::load(&mut bench.image()).unwrap_err());
        assert!(refused.contains(words), "{refused}");
    }
}

/// Its header is whole: restoring it from a backup would not help.
#[test]
fn detached_header_is_named_and_not_called_wrong() {
    let bench = Bench::new();
    let (data, one, header) = (bench.path("image"), bench.path("one"), bench.path("header"));
    let quick = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    let format = ["luksFormat", "-q", "--type", "luks2", "--header", &header];
    good(&[&format[..], &quick, &[&data, &one]].concat());
    let mut area = Image(std::fs::File::open(&header).unwrap());
    let error = full_text(&LuksHeader::load(&mut area).unwrap_err());
    assert!(error.contains("detached header") && error.contains("open --header"), "{error}");
    assert!(!error.contains("luksHeaderRestore"), "{error}");
    std::fs::remove_file(&header).unwrap();
    let at = ["--offset", "40960"];
    good(&[&format[..], &quick, &at, &[&data, &one]].concat());
    let mut area = Image(std::fs::File::open(&header).unwrap());
    let error = full_text(&LuksHeader::load(&mut area).unwrap_err());
    assert!(error.contains("detached header"), "{error}");
}

/// Each remedy is followed, where it leads to a slot that opens.
#[test]
fn slot_that_cannot_be_opened_has_a_remedy_that_helps() {
    let bench = Bench::new();
    let (image, one, two) = (bench.path("image"), bench.path("one"), bench.path("two"));
    let quick = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    good(&[&["luksFormat", "-q", "--type", "luks2"][..], &quick, &[&image, &one]].concat());
    // A slot with a hash that ebbd does not know, and one whose key is not the volume's.
    let convert = ["luksConvertKey", "-q", "--key-file", &one, "--key-slot", "0"];
    let foreign = ["--hash", "sha384"];
    good(&[&convert[..], &quick, &foreign, &[&image]].concat());
    let unbound = ["luksAddKey", "-q", "--unbound", "--key-size", "512", "--key-slot", "1"];
    good(&[&unbound[..], &quick, &[&image, &two]].concat());
    let mut area = bench.image();
    let header = LuksHeader::load(&mut area).unwrap();
    let why: Vec<_> = header.slots().iter().map(ebb_luks::KeySlot::unusable).collect();
    assert_eq!(why, [Some(Unusable::Unknown), Some(Unusable::Unbound)]);
    let error = full_text(&header.unlock(&mut area, &bench.key("one")).unwrap_err());
    for part in ["1 passed over, because it holds another key", Unusable::Unknown.remedy()] {
        assert!(error.contains(part), "{error}");
    }
    let remedy = Unusable::Unknown.remedy();
    let command = remedy.split('`').nth(1).unwrap().split(' ').skip(2);
    let options: Vec<_> = command.collect();
    let small = ["--pbkdf-memory", "1024", "--pbkdf-force-iterations", "4"];
    good(&[&convert[..], &options, &small, &[&image]].concat());
    let header = LuksHeader::load(&mut area).unwrap();
    assert_eq!(header.unlock(&mut area, &bench.key("one")).unwrap().0, 0);
}
