//! Snapshots whose data is not stable, on files whose content is on disks that are told what to do.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use ebb_config::{Size, StoreUri};
use ebb_control::Refused;

use super::manage::{Kept, new_config, refuses};
use super::overlay::{MAIN, folder, of_base};
use super::*;

/// The disks of the files, by inode.
#[derive(Default)]
pub(super) struct FileDisks(Mutex<BTreeMap<u64, Arc<TestStore>>>);

impl FileDisks {
    /// The disk of a file, which is made with the size `create` if it is missing.
    fn open(&self, path: &Path, create: Option<u64>) -> std::io::Result<Arc<TestStore>> {
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create(create.is_some()).open(path)?;
        let found = file.metadata()?;
        let mut disks = lock(&self.0);
        if let Some(disk) = disks.get(&found.ino()) {
            return Ok(Arc::new(disk.open_anew()));
        }
        let content = std::fs::read(path)?;
        let size = create.filter(|_| content.is_empty()).unwrap_or(found.len());
        file.set_len(size)?;
        let disk = Arc::new(TestStore::of_file(file, size, 1));
        disk.change(0, &content);
        disks.insert(found.ino(), disk.clone());
        Ok(disk)
    }

    /// The disk of a file that was opened.
    pub(super) fn at(&self, path: &Path) -> Arc<TestStore> {
        lock(&self.0)[&path.metadata().unwrap().ino()].clone()
    }
}

impl Opener for FileDisks {
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        _: Expected,
        claims: &Arc<StoreClaims>,
    ) -> Opening {
        let open = || {
            let mut claim = claims.claim(name, config)?;
            let StoreUri::File(path) = &config.store else { return Err(failure()) };
            let size = config.size.filter(|_| config.create).map(Size::bytes);
            let disk = FileDisks::open(self, path, size).map_err(|_| failure())?;
            let store = Store::Test(disk);
            if let Some(claim) = &mut claim {
                claim.opened(&store)?;
            }
            Ok(Opened::new(name, config, store, claim))
        };
        Box::pin(std::future::ready(open()))
    }

    fn compare(&self, _: &VolumeConfig, _: Option<StoreTarget>, _: &VolumeConfig) -> Comparing {
        Box::pin(std::future::ready(Ok(true)))
    }
}

pub(super) fn on_file_disks() -> (Kept, Arc<FileDisks>) {
    on_file_disks_of(MAIN)
}

fn on_file_disks_of(main: &str) -> (Kept, Arc<FileDisks>) {
    let disks = Arc::<FileDisks>::default();
    (Kept::over(main, folder(), (Arc::default(), disks.clone())), disks)
}

/// Serves the file of a snapshot of `other` as the volume `copy`.
fn serve_file(kept: &Kept, name: &str, snapshot: &str) -> Result<(), Refused> {
    let place = kept.path(&format!("other.delta@{snapshot}"));
    let config = new_config(name, &place, "writethrough");
    let config = VolumeConfig { base: Some("golden".to_owned()), read_only: true, ..config };
    kept.add(name, config, false)
}

#[test]
fn a_snapshot_is_not_opened_while_its_data_is_written() {
    let (kept, disks) = on_file_disks();
    let frozen = disks.at(&kept.file_path("other.delta"));
    kept.world.write("other", 7).unwrap();
    frozen.hang_only(&[Operation::Flush]);
    let (engine, operation) = (kept.world.engine.clone(), kept.begin("snapshot"));
    let (sender, made) = std::sync::mpsc::channel();
    kept.world.worker.handle().spawn(move |io| async move {
        let made = engine.snapshot_volume(&io, "other", ("one", false), &operation).await;
        let _ = sender.send(made);
    });
    let volume = kept.world.volume("other").unwrap();
    kept.world.wait_for("the layers are exchanged, and flushed", |_| {
        volume.layers().depth() == 3 && frozen.hanging() > 0
    });
    refuses(serve_file(&kept, "copy", "one"), "not_flushed", "not stable yet");
    refuses(serve_file(&kept, "other@one", "one"), "busy", "another operation");
    assert!(!frozen.shared.load(Ordering::SeqCst), "for other processes");
    frozen.release();
    made.recv().unwrap().unwrap();
    assert!(frozen.shared.load(Ordering::SeqCst));
    serve_file(&kept, "copy", "one").unwrap();
    for name in ["copy", "other@one", "other"] {
        assert_eq!(kept.blocks(name), [7, of_base(1)], "{name}");
    }
}

/// A reload gives the name of the volume to another store before the snapshot is served.
#[test]
fn snapshot_of_a_volume_that_is_being_replaced_keeps_its_list() {
    let main = MAIN.replace("[volume.other]", "[volume.other]\nallow=['uid:1']");
    let (kept, disks) = on_file_disks_of(&main);
    let frozen = disks.at(&kept.file_path("other.delta"));
    kept.world.write("other", 7).unwrap();
    frozen.hang_only(&[Operation::Flush]);
    let (engine, operation) = (kept.world.engine.clone(), kept.begin("snapshot"));
    let (sender, made) = std::sync::mpsc::channel();
    kept.world.worker.handle().spawn(move |io| async move {
        let made = engine.snapshot_volume(&io, "other", ("one", false), &operation).await;
        let _ = sender.send(made);
    });
    kept.world.wait_for("it is being flushed", |_| frozen.hanging() > 0);
    let path = kept.file_path("main.toml");
    let text = std::fs::read_to_string(&path).unwrap().replace("allow=['uid:1']\n", "");
    std::fs::write(&path, text.replace("other.delta", "new.delta")).unwrap();
    kept.world.engine.begin_reading();
    let (engine, config) = (kept.world.engine.clone(), kept.load());
    let (sender, reloaded) = std::sync::mpsc::channel();
    kept.world.worker.handle().spawn(move |io| async move {
        drop(engine.reload(&io, config).await);
        let _ = sender.send(());
    });
    kept.world.wait_for("the reload has begun", |world| {
        let (config, _) = world.engine.definition("other").unwrap();
        config.store.to_string().ends_with("new.delta")
    });
    frozen.release();
    made.recv().unwrap().unwrap();
    reloaded.recv().unwrap();
    assert_eq!((kept.allowed("other"), kept.allowed("other@one")), (vec![1, 2], vec![1]));
}

#[test]
fn a_snapshot_that_could_not_be_flushed_is_opened_when_it_is_stable() {
    let (kept, disks) = on_file_disks();
    let frozen = disks.at(&kept.file_path("other.delta"));
    kept.world.write("other", 7).unwrap();
    frozen.flush_faults.store(1000, Ordering::SeqCst);
    refuses(kept.snapshot("other", "one"), "not_flushed", "the snapshot was made");
    let above = "[volume.snap]\nstore='file:DIR/other.delta@one'\nbase='golden'\nread_only=true\n\
                 [volume.clone]\nstore='file:DIR/clone.delta'\nbase='snap'\ncreate=true\n";
    let text = format!("listen = ['unix:/never']\n{MAIN}{above}");
    let text = text.replace("DIR", kept.folder.path().to_str().unwrap());
    std::fs::write(kept.file_path("main.toml"), text).unwrap();
    kept.world.reload(kept.load());
    for name in ["copy", "other@one"] {
        refuses(serve_file(&kept, name, "one"), "not_flushed", "ebbd flush other");
    }
    for name in ["snap", "clone"] {
        let why = kept.why_not(name).expect("it is not served");
        assert!(why.contains("a snapshot of volume other that is not stable yet"), "{why}");
    }
    assert!(!kept.file_path("clone.delta").exists());
    assert!(!frozen.shared.load(Ordering::SeqCst), "for other processes");
    assert_eq!(kept.blocks("other"), [7, of_base(1)]);
    frozen.flush_faults.store(0, Ordering::SeqCst);
    kept.put_block("other", 1, 8);
    assert!(frozen.shared.load(Ordering::SeqCst));
    kept.world.reload(kept.load());
    kept.world.wait_for("both are served", |world| world.volume("clone").is_some());
    serve_file(&kept, "other@one", "one").unwrap();
    for name in ["snap", "clone", "other@one"] {
        assert_eq!(kept.blocks(name), [7, of_base(1)], "{name}");
    }
    assert_eq!(kept.blocks("other"), [7, 8]);
}
