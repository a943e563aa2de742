//! Changes that close a volume and open it again: none begins unless the files can be opened, no
//! other volume gets a file in between, and a volume that cannot be opened as asked is served as
//! before.

use std::collections::BTreeSet;

use ebb_config::{CacheMode, StateStep};
use ebb_control::Refused;
use ebb_volume::Stop;

use super::manage::{Kept, new_config, refuses};
use super::overlay::{MAIN, folder, of_base};
use super::*;

const EMPTY: &str = "control = '/c'\n";

/// Opens files, unless they are to fail or to wait.
struct Failing {
    files: HelperThreads,
    /// Nothing can be opened or looked at.
    dead: Mutex<bool>,
    /// Volumes whose files cannot be opened.
    fails: Mutex<BTreeSet<String>>,
    /// Openings of this volume wait, before they claim the file.
    waits: Mutex<Option<String>>,
    waiting: Arc<AtomicUsize>,
    go: Arc<Stop>,
}

impl Failing {
    fn kept(main: &str, folder: tempfile::TempDir) -> (Kept, Arc<Failing>) {
        let opener = Arc::new(Failing {
            files: HelperThreads { workers: 1, ..HelperThreads::default() },
            dead: Mutex::default(),
            fails: Mutex::default(),
            waits: Mutex::default(),
            waiting: Arc::default(),
            go: Arc::default(),
        });
        (Kept::over(main, folder, (Arc::default(), opener.clone())), opener)
    }

    fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }
}

impl Opener for Failing {
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
        claims: &Arc<StoreClaims>,
    ) -> Opening {
        if *lock(&self.dead) || lock(&self.fails).contains(name) {
            return Box::pin(std::future::ready(Err(failure())));
        }
        let waits = lock(&self.waits).as_deref() == Some(name);
        let (files, waiting, go) = (self.files.clone(), self.waiting.clone(), self.go.clone());
        let (name, config, claims) = (name.to_owned(), config.clone(), claims.clone());
        Box::pin(async move {
            if waits {
                waiting.fetch_add(1, Ordering::SeqCst);
                go.wait().await;
            }
            files.open(&name, &config, expected, &claims).await
        })
    }

    fn compare(
        &self,
        old: &VolumeConfig,
        open: Option<StoreTarget>,
        new: &VolumeConfig,
    ) -> Comparing {
        match *lock(&self.dead) {
            true => Box::pin(std::future::ready(Err(failure()))),
            false => self.files.compare(old, open, new),
        }
    }
}

/// Begins an operation, and returns where its outcome comes.
fn begin<Fut>(
    kept: &Kept,
    work: impl FnOnce(Arc<Engine>, Io) -> Fut + Send + 'static,
) -> std::sync::mpsc::Receiver<Result<(), Refused>>
where
    Fut: Future<Output = Result<(), Refused>> + 'static,
{
    let (sender, outcome) = std::sync::mpsc::channel();
    let engine = kept.world.engine.clone();
    kept.world.worker.handle().spawn(move |io| async move {
        let _ = sender.send(work(engine, io).await);
    });
    outcome
}

fn begin_add(
    kept: &Kept,
    name: &'static str,
    config: VolumeConfig,
) -> std::sync::mpsc::Receiver<Result<(), Refused>> {
    let operation = kept.begin("add");
    begin(kept, move |engine, io| async move {
        engine.add_volume(&io, name, (config, false), &operation).await
    })
}

#[test]
fn no_volume_gets_the_file_of_one_that_is_being_renamed() {
    let (kept, opener) = Failing::kept(EMPTY, tempfile::tempdir().unwrap());
    kept.add("a", kept.on_file("a", "disk"), true).unwrap();
    kept.world.write("a", 7).unwrap();
    *lock(&opener.waits) = Some("b".to_owned());
    let operation = kept.begin("rename");
    let renamed = begin(&kept, move |engine, io| async move {
        engine.rename_volume(&io, ("a", "b"), &operation).await
    });
    kept.world.wait_for("it is closed, and being opened", |_| opener.is_waiting());
    let thief = begin_add(&kept, "thief", new_config("thief", &kept.path("disk"), "none"));
    kept.world.wait_for("another volume asks for the file", |world| {
        world.phases().iter().any(|(name, _)| name == "thief")
    });
    // It would have had the file by then.
    let other = kept.on_file("other", "other");
    kept.add("other", other, false).unwrap();
    opener.go.stop();
    renamed.recv().unwrap().unwrap();
    refuses(thief.recv().unwrap(), "same_file", "volume b is on the same file");
    assert_eq!(kept.files(), ["b.toml"]);
    kept.world.write("b", 8).unwrap();
}

#[test]
fn no_volume_gets_the_files_of_a_commit() {
    let (kept, opener) = Failing::kept(MAIN, folder());
    kept.remove_other();
    kept.put_block("disk", 0, 7);
    *lock(&opener.waits) = Some("golden".to_owned());
    let operation = kept.begin("commit");
    let committed = begin(&kept, move |engine, io| async move {
        engine.commit_volume(&io, "disk", &operation).await
    });
    kept.world.wait_for("both are closed", |_| opener.is_waiting());
    let why = "closed while disk is committed into golden (operation ";
    for state in kept.world.engine.states() {
        assert!(state.waits_for.is_some_and(|what| what.starts_with(why)), "{}", state.name);
        let refusal = kept.world.volumes.refusal(&state.name).unwrap();
        assert!(refusal.starts_with(&format!("the volume is {why}")), "{refusal}");
    }
    let mut config = new_config("reader", &kept.path("base.raw"), "none");
    config.read_only = true;
    let reader = begin_add(&kept, "reader", config);
    kept.world.wait_for("another volume asks for the file", |world| {
        world.phases().iter().any(|(name, _)| name == "reader")
    });
    let other = kept.on_file("new", "new");
    kept.add("new", other, false).unwrap();
    assert!(reader.try_recv().is_err(), "it would read a mix of old and new data");
    opener.go.stop();
    committed.recv().unwrap().unwrap();
    reader.recv().unwrap().unwrap();
    for name in ["reader", "disk", "golden"] {
        assert_eq!(kept.blocks(name), [7, of_base(1)], "{name}");
    }
}

#[test]
fn nothing_is_closed_that_could_not_be_opened_again() {
    let (kept, opener) = Failing::kept(MAIN, folder());
    kept.remove_other();
    kept.add("a", kept.on_file("a", "disk"), true).unwrap();
    kept.put_block("disk", 0, 7);
    let names = ["a", "disk", "golden"];
    let before = names.map(|name| kept.world.volume(name).unwrap());
    *lock(&opener.dead) = true;
    refuses(kept.rename("a", "b"), "not_renamed", "not today");
    refuses(kept.commit("disk"), "not_committed", "not today");
    *lock(&opener.dead) = false;
    // A file in the place of the new delta.
    std::fs::write(kept.file_path(".disk.delta.ebbd-next"), "mine").unwrap();
    refuses(kept.commit("disk"), "exists", "was not made by ebbd");
    std::fs::remove_file(kept.file_path(".disk.delta.ebbd-next")).unwrap();
    // Without the file that it would be opened from.
    std::fs::rename(kept.file_path("disk"), kept.file_path("away")).unwrap();
    refuses(kept.rename("a", "b"), "not_renamed", "there is no file");
    std::fs::rename(kept.file_path("away"), kept.file_path("disk")).unwrap();
    for (name, before) in names.iter().zip(before) {
        assert!(Arc::ptr_eq(&before, &kept.world.volume(name).unwrap()), "{name} was closed");
    }
    assert_eq!(kept.files(), ["a.toml"]);
    kept.rename("a", "b").unwrap();
    kept.commit("disk").unwrap();
    assert_eq!(kept.blocks("golden"), [7, of_base(1)]);
}

#[test]
fn a_volume_that_cannot_be_renamed_is_served_as_before() {
    for cache in [CacheMode::None, CacheMode::Writeback] {
        let (kept, opener) = Failing::kept(EMPTY, tempfile::tempdir().unwrap());
        let config = VolumeConfig { cache, ..kept.on_file("a", "disk") };
        kept.add("a", config, true).unwrap();
        kept.world.write("a", 7).unwrap();
        lock(&opener.fails).insert("b".to_owned());
        let refused = kept.rename("a", "b");
        refuses(refused, "not_renamed", "volume `a` was not renamed: ");
        assert_eq!((kept.files(), kept.world.phases()), (vec!["a.toml".into()], serving("a")));
        lock(&opener.fails).clear();
        // The file of its definition comes last, and the volume under its new name is closed.
        let faults = kept.faults();
        faults.fail(StateStep::Rename, std::io::ErrorKind::StorageFull);
        refuses(kept.rename("a", "b"), "state", "cannot rename");
        faults.end();
        assert_eq!((kept.files(), kept.world.phases()), (vec!["a.toml".into()], serving("a")));
        kept.world.write("a", 8).unwrap();
        kept.rename("a", "b").unwrap();
        assert_eq!((kept.files(), kept.world.phases()), (vec!["b.toml".into()], serving("b")));
        assert!(kept.world.stop().is_clean());
        assert_eq!(std::fs::read(kept.file_path("disk")).unwrap()[0], 8);
    }
}

/// A list of their own would not change with the volume's list.
#[test]
fn snapshots_follow_their_volume_after_a_rename_that_failed() {
    let (kept, opener) = Failing::kept(EMPTY, tempfile::tempdir().unwrap());
    for name in ["a", "a@s"] {
        kept.add(name, kept.on_file(name, name), true).unwrap();
    }
    kept.allow("a", Some(&["uid:1"])).unwrap();
    assert_eq!(kept.allowed("a@s"), [1]);
    lock(&opener.fails).insert("b".to_owned());
    refuses(kept.rename("a", "b"), "not_renamed", "volume `a` was not renamed: ");
    kept.allow("a", Some(&["uid:2"])).unwrap();
    assert_eq!(kept.allowed("a@s"), [2]);
}

#[test]
fn snapshot_whose_state_file_stays_is_served_as_before() {
    for (newer, errors) in [(false, 1000), (true, 1000), (false, 1), (true, 1)] {
        let kept = Kept::overlays();
        kept.put_block("disk", 0, 7);
        kept.keep_snapshot("one").unwrap();
        kept.put_block("disk", 0, 8);
        if newer {
            kept.keep_snapshot("two").unwrap();
            kept.put_block("disk", 0, 9);
        }
        let before = (kept.files(), kept.world.phases());
        let faults = kept.faults();
        match errors {
            1 => faults.fail_after(0, 1, std::io::ErrorKind::Other),
            _ => faults.fail(StateStep::Remove, std::io::ErrorKind::ReadOnlyFilesystem),
        }
        refuses(kept.delete_snapshot("disk", "one"), "state", "cannot remove");
        faults.end();
        assert_eq!((kept.files(), kept.world.phases()), before);
        assert_eq!(kept.blocks("disk@one"), [7, of_base(1)]);
        kept.world.reload(kept.load());
        assert_eq!((kept.files(), kept.world.phases()), before);
        kept.delete_snapshot("disk", "one").unwrap();
        assert!(!kept.files().iter().any(|file| file.contains("one")), "{:?}", kept.files());
        assert!(!kept.file_path("disk.delta@one").exists());
        assert_eq!(kept.blocks("disk"), [if newer { 9 } else { 8 }, of_base(1)]);
    }
}

#[test]
fn stable_volume_is_closed_without_loss_when_its_flush_fails() {
    for cache in ["none", "writethrough", "writeback"] {
        for writes in [false, true] {
            let kept = Kept::new("control = '/c'\n", false);
            let stores = ["removed", "stopped"].map(|name| {
                let store = kept.world.store(name);
                kept.add(name, new_config(name, &format!("file:/{name}"), cache), true).unwrap();
                if writes {
                    kept.put_block(name, 0, 7);
                }
                store.faults(&ebb_store::Faults { flushes: 1000, ..ebb_store::Faults::default() });
                store
            });
            match (kept.remove("removed"), writes) {
                (removed, true) => removed.unwrap(),
                (removed, false) => refuses(removed, "not_flushed", "the volume was removed"),
            }
            assert_eq!(kept.files(), ["stopped.toml"]);
            let report = kept.world.stop();
            assert!(report.is_clean(), "{cache}, {writes}: {report:?}");
            let [left] = &report.failing[..] else { panic!("{cache}, {writes}: {report:?}") };
            assert_eq!((&*left.volume, left.knows_earlier), ("stopped", writes), "{cache}");
            assert!(stores.iter().all(|store| store.stable_bytes()[0] == u8::from(writes) * 7));
        }
    }
}

fn serving(name: &str) -> Vec<(String, VolumePhase)> {
    vec![phase(name, VolumePhase::Serving)]
}

impl Kept {
    /// A snapshot that the next start serves.
    fn keep_snapshot(&self, name: &'static str) -> Result<(), Refused> {
        let operation = self.begin("snapshot");
        self.world.run(move |engine, io| async move {
            engine.snapshot_volume(&io, "disk", (name, true), &operation).await
        })
    }

    /// Leaves one overlay above the base.
    fn remove_other(&self) {
        let main = self.file_path("main.toml");
        let text = std::fs::read_to_string(&main).unwrap();
        let (rest, _) = text.split_once("[volume.other]").unwrap();
        std::fs::write(&main, rest).unwrap();
        std::fs::remove_file(self.file_path("other.delta")).unwrap();
        self.world.reload(self.load());
    }
}

/// It was set while the snapshot had the list of its volume as one of its own.
#[test]
fn a_list_that_a_snapshot_gets_during_a_rename_that_fails_stays() {
    let (kept, opener) = Failing::kept(EMPTY, tempfile::tempdir().unwrap());
    for name in ["a", "a@s"] {
        kept.add(name, kept.on_file(name, name), true).unwrap();
    }
    kept.allow("a", Some(&["uid:1"])).unwrap();
    *lock(&opener.waits) = Some("b".to_owned());
    let operation = kept.begin("rename");
    let renamed = begin(&kept, move |engine, io| async move {
        engine.rename_volume(&io, ("a", "b"), &operation).await
    });
    kept.world.wait_for("it is closed, and being opened", |_| opener.is_waiting());
    kept.allow("a@s", Some(&["uid:2"])).unwrap();
    assert_eq!(kept.allowed("a@s"), [2]);
    // The volume cannot be opened for its new name.
    std::fs::remove_file(kept.file_path("a")).unwrap();
    std::fs::create_dir(kept.file_path("a")).unwrap();
    opener.go.stop();
    renamed.recv().unwrap().unwrap_err();
    assert_eq!(kept.allowed("a@s"), [2]);
}

/// As the snapshots of a volume that was not renamed do.
#[test]
fn a_snapshot_that_was_not_renamed_follows_its_volume() {
    let (kept, opener) = Failing::kept(EMPTY, tempfile::tempdir().unwrap());
    for name in ["a", "a@s"] {
        kept.add(name, kept.on_file(name, name), true).unwrap();
    }
    kept.allow("a", Some(&["uid:1"])).unwrap();
    lock(&opener.fails).insert("b".to_owned());
    refuses(kept.rename("a@s", "b"), "not_renamed", "volume `a@s` was not renamed: ");
    kept.allow("a", Some(&["uid:2"])).unwrap();
    assert_eq!(kept.allowed("a@s"), [2]);
}

#[test]
fn a_disk_in_memory_keeps_its_content_when_its_cache_changes() {
    let kept = Kept::new("[volume.m]\nstore = 'memory:1M'\ncache = 'writethrough'\n", true);
    kept.world.write("m", 7).unwrap();
    let first = kept.world.volume("m").unwrap();
    let main = "listen = ['unix:/never']\n[volume.m]\nstore = 'memory:1M'\ncache = 'none'\n";
    std::fs::write(kept.folder.path().join("main.toml"), main).unwrap();
    kept.world.reload(kept.load());
    let second = kept.world.volume("m").unwrap();
    assert!(!Arc::ptr_eq(&first, &second) && second.cache_mode() == ebb_volume::Mode::None);
    let content = kept.world.run(move |_, io| async move {
        let buf = io.pool().take(4096).await;
        let (outcome, buf) = second.read(&io, buf, 0).await;
        outcome.unwrap();
        buf.to_vec()
    });
    assert_eq!(content, [7; 4096]);
}
