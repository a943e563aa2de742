//! Overlays that get other sizes, and deltas on stores that are no files.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use ebb_control::Refused;
use ebb_image::Layout;
use ebb_volume::Resize;

use super::manage::{Kept, new_config};
use super::overlay::{BYTES, MAIN, folder, of_base};

impl Kept {
    fn resize_blocks(&self, volume: &str, blocks: u64, shrink: bool) -> Result<(), Refused> {
        let (volume, operation) = (volume.to_owned(), self.begin("resize"));
        let order = Resize { to: Some(blocks * 4096), shrink };
        self.world.run(move |engine, io| async move {
            engine.resize_volume(&io, (&volume, order), &operation).await
        })
    }

    fn own_blocks(&self, volume: &str) -> u64 {
        let volume = self.world.volume(volume).unwrap();
        loop {
            if let Some(bytes) = volume.layers().own_bytes() {
                return bytes / 4096;
            }
            self.world.run(|_, io| async move { io.yield_iteration().await });
        }
    }
}

/// Snapshots keep their sizes, what a resize adds is zeroes, also above a larger base, and everything survives restarts,
/// deletions, a commit and a flatten.
#[test]
fn an_overlay_gets_another_size_and_keeps_it() {
    for volume in ["disk", "other"] {
        let kept = Kept::overlays();
        let last = BYTES as u64 / 4096;
        kept.put_block(volume, 0, 1);
        kept.put_block(volume, 9, 2);
        assert_eq!(kept.own_blocks(volume), 2);
        kept.resize_blocks(volume, last + 100, false).unwrap();
        kept.put_block(volume, last + 50, 3);
        assert_eq!(kept.own_blocks(volume), 3);
        kept.snapshot(volume, "one").unwrap();
        let refused = kept.resize_blocks(volume, 8, false).unwrap_err();
        assert!(refused.body.remedy.contains("--shrink"), "{refused}");
        kept.resize_blocks(volume, 8, true).unwrap();
        kept.put_block(volume, 1, 4);
        kept.snapshot(volume, "two").unwrap();
        kept.resize_blocks(volume, 16, false).unwrap();
        kept.put_block(volume, 10, 5);
        let two = [1, 4, of_base(2), of_base(3), of_base(4), of_base(5), of_base(6), of_base(7)];
        let mut now = [0; 16];
        now[..8].copy_from_slice(&two);
        now[10] = 5;
        let mut one: [u8; 16] = std::array::from_fn(of_base);
        (one[0], one[9]) = (1, 2);
        let all = |kept: &Kept| {
            assert_eq!(kept.blocks::<16>(volume), now);
            assert_eq!(kept.world.volume(volume).unwrap().size(), 16 * 4096);
        };
        all(&kept);
        assert_eq!(kept.blocks(&format!("{volume}@two")), two);
        assert_eq!(kept.blocks(&format!("{volume}@one")), one);
        assert_eq!(kept.own_blocks(volume), 1);
        let kept = kept.again(MAIN);
        all(&kept);
        assert_eq!(kept.own_blocks(volume), 1);
        kept.delete_snapshot(volume, "one").unwrap();
        all(&kept);
        let kept = kept.again(MAIN);
        all(&kept);
        kept.delete_snapshot(volume, "two").unwrap();
        all(&kept);
        let kept = kept.again(MAIN);
        all(&kept);
        let other = if volume == "disk" { "other" } else { "disk" };
        if volume == "disk" {
            kept.flatten(volume).unwrap();
        } else {
            kept.flatten(other).unwrap();
            kept.commit(volume).unwrap();
            let golden = kept.blocks::<18>("golden");
            assert_eq!((&golden[..16], &golden[16..]), (&now[..], &[of_base(16), of_base(17)][..]));
            assert_eq!(kept.own_blocks(volume), 0);
        }
        all(&kept);
        kept.resize_blocks(volume, 20, false).unwrap();
        let grown = kept.blocks::<20>(volume);
        assert_eq!((&grown[..16], &grown[16..]), (&now[..], &[0; 4][..]));
    }
}

/// The snapshot above has grown again before it was made, and the one below shows all of the base.
#[test]
fn merged_snapshots_hide_what_a_shrink_has_cut_off() {
    let kept = Kept::overlays();
    kept.snapshot("disk", "one").unwrap();
    kept.resize_blocks("disk", 8, true).unwrap();
    kept.resize_blocks("disk", 16, false).unwrap();
    kept.put_block("disk", 9, 7);
    kept.snapshot("disk", "two").unwrap();
    let mut expected: [u8; 16] = std::array::from_fn(of_base);
    expected[8..].fill(0);
    expected[9] = 7;
    let all = |kept: &Kept| {
        for volume in ["disk@two", "disk"] {
            assert_eq!(kept.blocks::<16>(volume), expected, "{volume}");
        }
    };
    all(&kept);
    kept.delete_snapshot("disk", "one").unwrap();
    all(&kept);
    assert_eq!(kept.again(MAIN).blocks::<16>("disk"), expected);
}

/// Whatever its size is: to shrink it for the commit would lose data for nothing.
#[test]
fn commit_of_a_flattened_volume_names_the_flatten() {
    let kept = Kept::overlays();
    kept.flatten("disk").unwrap();
    kept.resize_blocks("disk", BYTES as u64 / 4096 + 100, false).unwrap();
    let refused = kept.commit("disk").unwrap_err();
    assert!(refused.body.message.contains("was flattened"), "{refused}");
    assert!(!refused.body.remedy.contains("--shrink"), "{refused}");
}

/// The overlays would not be opened again. Without overlays above it, it follows its file.
#[test]
fn base_of_overlays_is_not_resized() {
    let kept = Kept::overlays();
    let (blocks, size) = (BYTES as u64 / 4096, BYTES as u64);
    let grown = |kept: &Kept| kept.resize_blocks("golden", blocks + 1, false);
    let refused = grown(&kept).unwrap_err();
    assert!(refused.body.message.contains("the base of `disk`, `other`"), "{refused}");
    assert!(refused.body.remedy.contains("flatten"), "{refused}");
    let file = std::fs::OpenOptions::new().write(true).open(kept.file_path("base.raw")).unwrap();
    file.set_len(size + 4096).unwrap();
    let refused = grown(&kept).unwrap_err();
    assert!(refused.body.remedy.contains(&format!("give it {size} bytes again")), "{refused}");
    assert_eq!(kept.world.volume("golden").unwrap().size(), size);
    for overlay in ["disk", "other"] {
        kept.flatten(overlay).unwrap();
    }
    grown(&kept).unwrap();
}

/// A size in the configuration is that of a new delta: after a resize the delta's own one counts.
#[test]
fn the_size_of_a_delta_counts_and_not_the_one_in_the_configuration() {
    let main = MAIN.replace("create=true\n[", "create=true\nsize='32K'\n[");
    let kept = Kept::within(&main, true, folder());
    assert_eq!(kept.world.volume("disk").unwrap().size(), 8 * 4096);
    kept.resize_blocks("disk", 40, false).unwrap();
    kept.put_block("disk", 39, 7);
    // As if the daemon had ended before it noted the size.
    std::fs::remove_dir_all(kept.file_path("state")).unwrap();
    let kept = kept.again(&main);
    assert_eq!(kept.world.volume("disk").unwrap().size(), 40 * 4096);
    let kept = kept.again(&main.replace("32K", "1G"));
    assert_eq!(kept.world.volume("disk").unwrap().size(), 40 * 4096);
    assert_eq!(kept.blocks::<40>("disk")[39], 7);
}

/// Its clients stay connected.
#[test]
fn another_size_in_the_configuration_leaves_an_overlay_as_it_is() {
    let main =
        |size: &str| MAIN.replace("create=true\n[", &format!("create=true\nsize='{size}'\n["));
    let kept = Kept::within(&main("32K"), true, folder());
    let served = kept.world.volume("disk").unwrap();
    let path = kept.folder.path().join("main.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    for size in ["size='64K'", "size='16K'", ""] {
        std::fs::write(&path, text.replace("size='32K'", size)).unwrap();
        kept.world.reload(kept.load());
        assert!(Arc::ptr_eq(&served, &kept.world.volume("disk").unwrap()), "{size}");
        assert_eq!(served.size(), 8 * 4096);
        assert!(kept.world.engine.unchanged().is_empty());
    }
    let refused = kept.resize_blocks("disk", (64 << 40) / 4096 + 1, false).unwrap_err();
    assert!(refused.body.message.contains("at most 64 TiB"), "{refused}");
}

/// An NBD server on a file, killed when dropped.
struct Server(Child);

impl Server {
    fn start(folder: &std::path::Path) -> Server {
        let (socket, file) = (folder.join("nbd.sock"), folder.join("export"));
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--unix"]).arg(&socket).arg("file").arg(&file);
        command.stdin(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("nbdkit is installed");
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            std::thread::yield_now();
        }
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const REMOTE: &str = "[volume.golden]\nstore='file:DIR/base.raw'\nread_only=true\n\
    [volume.disk]\nstore='nbd+unix:///?socket=DIR/nbd.sock'\nbase='golden'\ncreate=true\ncache='writeback'\n";

/// A delta on the export of an NBD server: it has to be large enough and to hold nothing that anything recognises. What needs
/// a new file is refused, and everything else works.
#[test]
fn a_delta_on_a_server_is_made_where_there_is_room_and_nothing_else() {
    let folder = folder();
    let layout = Layout::new(BYTES as u64).unwrap();
    let export = folder.path().join("export");
    let size = usize::try_from(layout.store_size()).unwrap();
    std::fs::write(&export, vec![0; size - 4096]).unwrap();
    let server = Server::start(folder.path());
    let kept = Kept::within(REMOTE, true, folder);
    let why = kept.why_not("disk").unwrap();
    assert!(why.contains(&format!("need {size}")), "{why}");
    drop(server);

    // A file system, which begins with zeroes.
    let mut content = vec![0; size];
    content[1080] = 0x53;
    std::fs::write(&export, &content).unwrap();
    let server = Server::start(kept.folder.path());
    let kept = kept.again(REMOTE);
    let why = kept.why_not("disk").unwrap();
    assert!(why.contains("ebbd image clear"), "{why}");
    assert!(std::fs::read(&export).unwrap() == content, "it was changed");
    drop(server);

    // Data between what is looked at.
    content[1080] = 0;
    let start = usize::try_from(layout.data_start()).unwrap();
    content[start + 40_960..start + 61_440].fill(0xdd);
    std::fs::write(&export, &content).unwrap();
    let server = Server::start(kept.folder.path());
    let kept = kept.again(REMOTE);
    assert_eq!(kept.blocks::<12>("disk"), std::array::from_fn(of_base));
    kept.put_block("disk", 6, 1);
    let kept = kept.again(REMOTE);
    let mut expected: [u8; 12] = std::array::from_fn(of_base);
    expected[6] = 1;
    assert_eq!(kept.blocks("disk"), expected);
    assert_eq!(kept.own_blocks("disk"), 1);
    for refused in [kept.snapshot("disk", "one").unwrap_err(), kept.commit("disk").unwrap_err()] {
        assert_eq!(refused.body.error, "unsupported");
        assert!(refused.body.message.contains("is no file"), "{refused}");
    }
    let more = BYTES as u64 / 4096 + 10;
    let needed = layout.resized(more * 4096).unwrap().store_size();
    let refused = kept.resize_blocks("disk", more, false).unwrap_err();
    assert!(refused.body.message.contains(&format!("needs {needed}")), "{refused}");
    kept.resize_blocks("disk", 12, true).unwrap();
    kept.resize_blocks("disk", 700, false).unwrap();
    assert_eq!(kept.blocks("disk"), expected);
    kept.flatten("disk").unwrap();
    let kept = kept.again(&REMOTE.replace("base='golden'\ncreate=true", "base='none'"));
    assert_eq!(kept.blocks("disk"), expected);
    drop(kept);
    drop(server);
}

/// A clone above a delta on a server.
#[test]
fn a_delta_on_a_server_can_be_a_base() {
    let folder = folder();
    let size = Layout::new(BYTES as u64).unwrap().store_size();
    let file = std::fs::File::create(folder.path().join("export")).unwrap();
    file.set_len(size).unwrap();
    let _server = Server::start(folder.path());
    let kept = Kept::within(REMOTE, true, folder);
    kept.put_block("disk", 1, 7);
    let main = REMOTE.replace("create=true\ncache='writeback'", "read_only=true");
    let kept = kept.again(&main);
    let mut config = new_config("clone", &kept.path("clone.delta"), "writethrough");
    (config.base, config.create) = (Some("disk".to_owned()), true);
    kept.add("clone", config, false).unwrap();
    kept.put_block("clone", 2, 8);
    assert_eq!(kept.blocks("clone"), [of_base(0), 7, 8, of_base(3)]);
}
