//! Maps, imports and exports agree with QEMU's programs; a copy that fails leaves nothing.

use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::common::{Folder, Running, image, nbd, qemu, qemu_nbd, until};

/// Runs as offset, length, and whether there is data, merged where they are alike.
fn merged(runs: impl Iterator<Item = (u64, u64, bool)>) -> Vec<(u64, u64, bool)> {
    let mut list: Vec<(u64, u64, bool)> = Vec::new();
    for (offset, length, data) in runs {
        match list.last_mut() {
            Some((_, all, is_data)) if *is_data == data => *all += length,
            _ => list.push((offset, length, data)),
        }
    }
    list
}

#[test]
fn maps_and_imports_agree_with_qemu() {
    for (options, size) in [
        ("compat=0.10,cluster_size=512", "1M"),
        ("cluster_size=4k", "9M"),
        ("cluster_size=64k", "300M"),
        ("cluster_size=2M", "65M"),
        ("preallocation=metadata", "2M"),
    ] {
        let folder = Folder::new();
        let (path, raw) = (folder.text("a.qcow2"), folder.text("qemu.raw"));
        qemu("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, &path, size]);
        let commands = [
            "write -q -P 1 0 4k",
            "write -q -P 2 100k 300k",
            "write -q -P 3 1000k 24k",
            "write -q -z 128k 64k",
        ];
        let commands: Vec<&str> = commands.iter().flat_map(|command| ["-c", command]).collect();
        qemu("qemu-io", &[&["-f", "qcow2"], &commands[..], &[&path]].concat());
        let store = format!("qcow2:{path}");
        let number = |run: &serde_json::Value, name: &str| run[name].as_u64().unwrap();
        let ours = image(&["map", &store, "--json"]).json();
        let ours = ours.as_array().unwrap().iter();
        let ours = ours
            .map(|run| (number(run, "offset"), number(run, "length"), run["content"] == "data"));
        let theirs = qemu("qemu-img", &["map", "--output=json", "-f", "qcow2", &path]).json();
        let theirs = theirs.as_array().unwrap().iter();
        let theirs =
            theirs.map(|run| (number(run, "start"), number(run, "length"), run["data"] == true));
        if !options.contains("preallocation") {
            assert_eq!(merged(ours), merged(theirs), "{options}");
        }
        image(&["import", &store, &folder.file("ours.raw")]).check(0, "of data");
        qemu("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", &path, &raw]);
        let ours = std::fs::read(folder.path("ours.raw")).unwrap();
        assert!(ours == std::fs::read(&raw).unwrap(), "{options}");
        // What is zero takes no space.
        let used = std::fs::metadata(folder.path("ours.raw")).unwrap().blocks() * 512;
        assert!(used <= 400 << 10, "{options}: {used}");
    }
}

#[test]
fn an_export_to_a_server_writes_data_and_zeroes() {
    let folder = Folder::new();
    std::fs::write(folder.path("old.raw"), vec![9; 8 << 20]).unwrap();
    let mut new = vec![0; 6 << 20];
    new[5000..2 << 20].fill(3);
    new[4 << 20..(4 << 20) + 512].fill(4);
    std::fs::write(folder.path("new.raw"), &new).unwrap();
    let socket = folder.path("socket");
    let _server = qemu_nbd(&socket, &["-f", "raw", &folder.text("old.raw")]);
    let (from, to) = (folder.file("new.raw"), nbd("", &socket));
    image(&["export", &from, &to]).check(1, "is not known to be empty");
    image(&["export", &from, &to, "--force"]).check(0, "6M");
    let old = std::fs::read(folder.path("old.raw")).unwrap();
    assert!(old[..6 << 20] == new);
    assert!(old[6 << 20..].iter().all(|byte| *byte == 9), "beyond the source");
    // And back.
    image(&["import", &to, &folder.file("back.raw")]).check(0, "8M");
    assert!(std::fs::read(folder.path("back.raw")).unwrap() == old);
    std::fs::write(folder.path("large.raw"), vec![1; 9 << 20]).unwrap();
    image(&["export", &folder.file("large.raw"), &to, "--force"]).check(1, "enlarge it first");
}

#[test]
fn read_only_export_is_no_destination() {
    let folder = Folder::new();
    std::fs::write(folder.path("old.raw"), vec![9; 1 << 20]).unwrap();
    std::fs::write(folder.path("new.raw"), vec![1; 1 << 20]).unwrap();
    let socket = folder.path("socket");
    let _server = qemu_nbd(&socket, &["-r", "-f", "raw", &folder.text("old.raw")]);
    let refused = image(&["export", &folder.file("new.raw"), &nbd("", &socket), "--force"]);
    refused.check(1, "is read-only: allow writes there, or name another destination");
    assert!(!refused.err.contains("read_only"), "no volume is configured: {refused:#?}");
}

#[test]
fn what_holds_something_is_kept_without_force() {
    let folder = Folder::new();
    std::fs::write(folder.path("a.raw"), vec![1; 1 << 20]).unwrap();
    std::fs::write(folder.path("b.raw"), "text").unwrap();
    std::fs::write(folder.path("empty.raw"), "").unwrap();
    let (a, b) = (folder.file("a.raw"), folder.file("b.raw"));
    image(&["import", &a, &b]).check(1, "exists and has 4 bytes").check(1, "--force");
    assert_eq!(std::fs::read(folder.path("b.raw")).unwrap(), b"text");
    image(&["import", &a, &b, "--force"]).check(0, "1M");
    image(&["import", &a, &folder.file("empty.raw")]).check(0, "1M");
    for name in ["b.raw", "empty.raw"] {
        assert!(std::fs::read(folder.path(name)).unwrap() == vec![1; 1 << 20], "{name}");
    }
    image(&["import", &a, &a, "--force"]).check(1, "name another destination");
    std::fs::hard_link(folder.path("a.raw"), folder.path("same.raw")).unwrap();
    image(&["import", &a, &folder.file("same.raw"), "--force"])
        .check(1, "name another destination");
    assert!(std::fs::read(folder.path("a.raw")).unwrap() == vec![1; 1 << 20]);
    for store in ["memory:1M", "null:1M", "qcow2:/none"] {
        image(&["import", &a, store]).check(1, "is no destination");
    }
    image(&["import", &a, "file:/none/b.raw"]).check(1, "its folder does not exist");
    assert_eq!(folder.names(), ["a.raw", "b.raw", "empty.raw", "same.raw"]);
}

#[test]
fn longer_destination_keeps_its_end() {
    let folder = Folder::new();
    let new: Vec<u8> = [vec![1; 8192], vec![0; 1 << 20], vec![2; 512]].concat();
    std::fs::write(folder.path("a.raw"), &new).unwrap();
    std::fs::write(folder.path("b.raw"), vec![9; 4 << 20]).unwrap();
    let (a, b) = (folder.file("a.raw"), folder.file("b.raw"));
    image(&["import", &a, &b]).check(1, "--force");
    image(&["import", &a, &b, "--force"]).check(0, "");
    let found = std::fs::read(folder.path("b.raw")).unwrap();
    assert_eq!(found.len(), 4 << 20);
    assert!(found[..new.len()] == new && found[new.len()..].iter().all(|byte| *byte == 9));
}

/// The bytes of an image of another format are no disk.
#[test]
fn images_of_other_formats_are_named_and_not_copied() {
    let folder = Folder::new();
    std::fs::write(folder.path("raw"), vec![7; 1 << 20]).unwrap();
    for (format, options, name) in [
        ("vpc", "subformat=dynamic", "VHD"),
        ("vpc", "subformat=fixed,force_size=on", "VHD"),
        ("vhdx", "subformat=dynamic", "VHDX"),
        ("vmdk", "subformat=monolithicSparse", "VMDK"),
        ("vdi", "static=off", "VDI"),
        ("qed", "cluster_size=65536", "QED"),
    ] {
        let path = folder.text("other");
        let raw = folder.text("raw");
        qemu("qemu-img", &["convert", "-f", "raw", "-O", format, "-o", options, &raw, &path]);
        let store = folder.file("other");
        let info = image(&["info", &store, "--json"]).json();
        assert_eq!(info["format"], name, "{format} {options}");
        image(&["info", &store]).check(0, "qemu-img convert -O raw");
        assert_eq!(info["virtual_size"], std::fs::metadata(&path).unwrap().len());
        let copy = folder.file("copy");
        image(&["import", &store, &copy]).check(1, &format!("looks like a {name} image"));
        assert_eq!(folder.names(), ["other", "raw"]);
        image(&["import", &store, &copy, "--raw"]).check(0, "");
        let (copied, bytes) = (folder.path("copy"), std::fs::read(&path).unwrap());
        assert!(std::fs::read(&copied).unwrap()[..bytes.len()] == bytes, "{format}");
        std::fs::remove_file(copied).unwrap();
    }
}

#[test]
fn length_of_a_file_of_another_format_is_not_rounded() {
    let folder = Folder::new();
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", &folder.text("disk.qcow2"), "1M"]);
    let file = std::fs::File::options().write(true).open(folder.path("disk.qcow2")).unwrap();
    file.set_len(196_616).unwrap();
    let store = folder.file("disk.qcow2");
    image(&["info", &store]).check(0, "file size      196616 bytes");
    assert_eq!(image(&["info", &store, "--json"]).json()["virtual_size"], 196_616);
}

#[test]
fn a_file_that_another_program_has_locked_is_not_touched() {
    let folder = Folder::new();
    std::fs::write(folder.path("a.raw"), vec![1; 1 << 20]).unwrap();
    std::fs::write(folder.path("b.raw"), vec![2; 1 << 20]).unwrap();
    let locked = std::fs::File::open(folder.path("b.raw")).unwrap();
    locked.lock().unwrap();
    let (a, b) = (folder.file("a.raw"), folder.file("b.raw"));
    image(&["import", &a, &b, "--force"]).check(1, "ebbd volume remove");
    // A plain volume that the configuration defines has no snapshot, and no command removes it.
    let used = image(&["import", &b, &folder.file("c.raw")]);
    used.check(1, "from the configuration, and reload");
    assert!(!used.err.contains("snapshot"), "{used:#?}");
    assert!(std::fs::read(folder.path("b.raw")).unwrap() == vec![2; 1 << 20]);
    assert_eq!(folder.names(), ["a.raw", "b.raw"]);
}

#[test]
fn a_read_that_fails_is_told_with_its_offset_and_nothing_is_left() {
    let folder = Folder::new();
    let path = folder.text("a.qcow2");
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", &path, "16M"]);
    qemu("qemu-io", &["-f", "qcow2", "-c", "write -q -P 1 0 12M", &path]);
    // The entry of the cluster at 10 MiB leads beyond the end of the file.
    let bytes = std::fs::read(&path).unwrap();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l2 = word(usize::try_from(word(40)).unwrap()) & 0x00ff_ffff_ffff_fe00;
    folder.patch("a.qcow2", l2 + 160 * 8, &(1u64 << 50).to_be_bytes());
    let (from, to) = (format!("qcow2:{path}"), folder.file("b.raw"));
    let text = "the bytes at 10485760 are beyond the end of the file";
    image(&["import", &from, &to]).check(1, text);
    assert_eq!(folder.names(), ["a.qcow2"]);
    // A file that was there is empty, and does not look like a copy.
    std::fs::write(folder.path("b.raw"), "old").unwrap();
    image(&["import", &from, &to, "--force"]).check(1, text);
    assert_eq!(std::fs::read(folder.path("b.raw")).unwrap(), b"");
}

#[test]
fn a_write_that_fails_is_told_with_its_offset() {
    let folder = Folder::new();
    std::fs::write(folder.path("a.raw"), vec![1; 16 << 20]).unwrap();
    std::fs::write(folder.path("b.raw"), vec![0; 16 << 20]).unwrap();
    let (socket, name) = (folder.path("socket"), folder.text("b.raw"));
    let options = format!(
        "driver=raw,file.driver=blkdebug,file.image.driver=file,file.image.filename={name},\
         file.inject-error.0.event=none,file.inject-error.0.iotype=write,file.inject-error.0.sector=20480,\
         file.inject-error.0.once=off,file.inject-error.0.errno=28"
    );
    let _server = qemu_nbd(&socket, &["--image-opts", &options]);
    let to = nbd("", &socket);
    let said = image(&["export", &folder.file("a.raw"), &to, "--force"]);
    said.check(1, "write of 1048576 bytes at 10485760: the store is full");
    said.check(1, &socket.display().to_string());
}

#[test]
fn an_interrupted_copy_leaves_nothing() {
    let folder = Folder::new();
    let socket = folder.path("socket");
    // Each read takes long, so that the copy never ends by itself.
    let options =
        "driver=raw,file.driver=null-co,file.size=1T,file.read-zeroes=off,file.latency-ns=50000000";
    let mut server = qemu_nbd(&socket, &["--image-opts", options]);
    for signal in [Signal::INT, Signal::HUP, Signal::TERM] {
        let mut copy = Command::new(env!("CARGO_BIN_EXE_ebbd"));
        copy.args(["image", "import", &nbd("", &socket), &folder.file("b.raw")]);
        let mut copy = Running(copy.stderr(Stdio::piped()).spawn().unwrap());
        let begins = || folder.names().iter().any(|name| name.ends_with(".part"));
        until("the copy begins", begins);
        if signal == Signal::TERM {
            // The server does not reply any more.
            kill_process(Pid::from_child(&server.0), Signal::STOP).unwrap();
        }
        kill_process(Pid::from_child(&copy.0), signal).unwrap();
        let mut ended = None;
        until("the copy ends", || {
            ended = copy.0.try_wait().unwrap();
            ended.is_some()
        });
        assert_eq!(ended.unwrap().code(), Some(1));
        let mut said = String::new();
        std::io::Read::read_to_string(&mut copy.0.stderr.take().unwrap(), &mut said).unwrap();
        assert!(
            said.contains("interrupted: the copy is not complete, and the new file was removed"),
            "{said}"
        );
        assert_eq!(folder.names(), ["socket"]);
    }
    server.0.kill().unwrap();
}

#[test]
fn a_clone_shares_blocks_or_says_what_to_do() {
    let folder = Folder::new();
    std::fs::write(folder.path("a.raw"), vec![1; 1 << 20]).unwrap();
    let (a, b) = (folder.file("a.raw"), folder.file("b.raw"));
    let said = image(&["clone", &a, &b]);
    // It depends on the file system of temporary files.
    if said.code == Some(0) {
        assert!(std::fs::read(folder.path("b.raw")).unwrap() == vec![1; 1 << 20]);
        image(&["clone", &a, &b]).check(1, "a clone is a new file");
    } else {
        said.check(1, "copy with `ebbd image import`");
        assert_eq!(folder.names(), ["a.raw"]);
        std::fs::write(folder.path("b.raw"), "").unwrap();
        image(&["clone", &a, &b]).check(1, "a clone is a new file");
    }
    image(&["clone", "memory:1M", &b]).check(1, "is no raw file");
    image(&["clone", &folder.file("none"), &folder.file("c.raw")])
        .check(1, "no such file: correct the path");
}
