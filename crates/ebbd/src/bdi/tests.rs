//! Devices, and the volumes on them.

use super::*;

#[test]
fn a_partition_and_a_mapped_device_belong_to_their_disk() {
    let dir = tempfile::tempdir().unwrap();
    let sys = dir.path().join("dev/block");
    std::fs::create_dir_all(&sys).unwrap();
    let device = |name: &str, number: &str| {
        let folder = dir.path().join("devices").join(name);
        std::fs::create_dir_all(folder.join("slaves")).unwrap();
        std::fs::write(folder.join("dev"), format!("{number}\n")).unwrap();
        std::os::unix::fs::symlink(&folder, sys.join(number)).unwrap();
        folder
    };
    let disk = device("sda", "8:0");
    let part = device("sda/sda1", "8:1");
    std::fs::write(part.join("partition"), "1").unwrap();
    let map = device("dm-0", "253:0");
    std::os::unix::fs::symlink(&part, map.join("slaves/sda1")).unwrap();
    let two = device("dm-1", "253:1");
    std::os::unix::fs::symlink(&part, two.join("slaves/sda1")).unwrap();
    std::os::unix::fs::symlink(&disk, two.join("slaves/sda")).unwrap();
    let number = |major, minor| rustix::fs::makedev(major, minor);
    let of = |major, minor| whole_disk(&sys, number(major, minor));
    assert_eq!(of(8, 1), number(8, 0));
    assert_eq!(of(253, 0), number(8, 0));
    assert_eq!(of(253, 1), number(253, 1), "a map of two disks is a device of its own");
    assert_eq!(of(7, 7), number(7, 7), "unknown");
}

fn cached(cache: &Arc<Cache>, name: &str) -> Arc<VolumeCache> {
    let store = Arc::new(ebb_store::Store::Null(ebb_store::NullStore::new(1 << 20)));
    cache.volume(name, &store, ebb_cache::Mode::Writeback).unwrap().pages().clone()
}

#[test]
fn adding_a_volume_costs_the_same_for_any_number_of_volumes() {
    let start = Instant::now();
    let memory = ebb_mem::Memory::new(ebb_mem::MemoryOptions::new(64 << 20, start)).unwrap();
    let cache = Cache::without_reclaimer(&memory, ebb_cache::CacheOptions::new(start));
    let parameters = Parameters::new(&ebb_config::params::Configured::default());
    let bdis = Bdis::new(&cache, &parameters, 1 << 30, start).unwrap();
    let mut all = Vec::new();
    for number in 0..200 {
        let volume = cached(&cache, &format!("disk {number}"));
        // Four on each device.
        let key = BdiKey::Named(format!("device {}", number / 4));
        all.push((bdis.control(key, &volume).unwrap(), volume));
    }
    let work = |at: usize| bdis.work[at].load(Ordering::Relaxed);
    assert!(work(0) <= 2, "the host's memory was read {} times", work(0));
    assert_eq!(work(1), 50, "settings of each device once");
    assert_eq!(bdis.stats().len(), 50);
    // The limit is read without visiting the shards of volumes.
    assert_eq!(cache.limit_bytes(), cache.stats().limit);
}

#[test]
fn overlay_is_listed_once_on_its_device() {
    let start = Instant::now();
    let memory = ebb_mem::Memory::new(ebb_mem::MemoryOptions::new(64 << 20, start)).unwrap();
    let cache = Cache::without_reclaimer(&memory, ebb_cache::CacheOptions::new(start));
    let parameters = Parameters::new(&ebb_config::params::Configured::default());
    let bdis = Bdis::new(&cache, &parameters, 1 << 30, start).unwrap();
    let _caches = ["overlay", "disk", "overlay"].map(|name| {
        let volume = cached(&cache, name);
        (bdis.control(BdiKey::Named("device".to_owned()), &volume).unwrap(), volume)
    });
    assert_eq!(bdis.stats()[0].volumes, ["overlay", "disk"]);
}

#[test]
fn a_full_device_is_full_for_all_its_volumes_until_one_writes() {
    let start = Instant::now();
    let memory = ebb_mem::Memory::new(ebb_mem::MemoryOptions::new(64 << 20, start)).unwrap();
    let cache = Cache::without_reclaimer(&memory, ebb_cache::CacheOptions::new(start));
    let parameters = Parameters::new(&ebb_config::params::Configured::default());
    let bdis = Bdis::new(&cache, &parameters, 1 << 30, start).unwrap();
    let [one, two, other] =
        [("one", "disk"), ("two", "disk"), ("other", "another disk")].map(|(name, device)| {
            let volume = cached(&cache, name);
            (bdis.control(BdiKey::Named(device.to_owned()), &volume).unwrap(), volume)
        });
    let full = || [&one.0, &two.0, &other.0].map(|control| control.is_full());
    two.0.note_full(true);
    two.0.note_full(true);
    assert_eq!(full(), [true, true, false]);
    one.0.note_full(false);
    assert_eq!(full(), [true, true, false], "the other one has found no room yet");
    two.0.note_full(false);
    assert_eq!(full(), [false; 3]);
    // A volume that is closed waits for no room.
    two.0.note_full(true);
    drop(two);
    assert!(!one.0.is_full());
}

#[test]
fn device_beyond_the_limit_is_rejected_and_leaves_no_state() {
    let start = Instant::now();
    let memory = ebb_mem::Memory::new(ebb_mem::MemoryOptions::new(64 << 20, start)).unwrap();
    let cache = Cache::without_reclaimer(&memory, ebb_cache::CacheOptions::new(start));
    let parameters = Parameters::new(&ebb_config::params::Configured::default());
    let bdis = Bdis::new(&cache, &parameters, 1 << 30, start).unwrap();
    let mut all = Vec::new();
    for number in 0..300 {
        let volume = cached(&cache, &format!("disk {number}"));
        let key = BdiKey::Named(format!("device {number}"));
        match bdis.control(key, &volume) {
            Ok(control) => all.push((control, volume)),
            Err(error) => assert!(error.to_string().contains("`bdi = NAME`"), "{error}"),
        }
    }
    assert_eq!(all.len(), 256);
    assert_eq!(parameters.bdis_with_volumes().len(), 256);
    // When some are removed, all at once, there is room again.
    all.truncate(100);
    bdis.settle();
    assert_eq!(parameters.bdis_with_volumes().len(), 100);
    let volume = cached(&cache, "new");
    assert!(bdis.control(BdiKey::Named("new".to_owned()), &volume).is_ok());
}
