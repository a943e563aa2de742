//! The first flush of a file also makes its name stable.

use ebb_block::BlockStore;
use ebb_store::Direct;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::{Bench, MIB, create, file, folder};

/// The folder cannot be opened as long as the process has all the descriptors that it may have.
fn without_descriptors<T>(then: impl FnOnce() -> T) -> T {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
    let result = then();
    setrlimit(Resource::Nofile, before).unwrap();
    result
}

#[test]
fn first_flush_and_fua_write_fail_until_the_folder_is_flushed() {
    // Not in memory, where a power cut leaves nothing.
    let folder = folder();
    let path = folder.path().join("new");
    drop(create(&path, MIB, Direct::Off));
    std::fs::rename(&path, folder.path().join("disk")).unwrap();
    let bench = Bench::new(create(&file(&folder, "disk"), MIB, Direct::Off));
    bench.write(0, &[7; 4096]).unwrap();
    let fua = || {
        bench.on(|io, store| async move {
            let buf = io.pool().get_for_test(4096);
            store.write(&io, buf, 0, true).await.0
        })
    };
    without_descriptors(|| {
        for error in [bench.flush().unwrap_err(), fua().unwrap_err(), bench.flush().unwrap_err()] {
            let text = error.full_text();
            assert!(text.contains("cannot flush the folder") && text.contains("disk"), "{text}");
        }
        bench.write(0, &[8; 4096]).unwrap();
    });
    assert!(!bench.store().is_lost(), "no data is lost");
    bench.flush().unwrap();
    fua().unwrap();
    // Once is enough.
    without_descriptors(|| {
        bench.flush().unwrap();
        fua().unwrap();
    });
}
