//! A short write: the part within the limit is written, and the remainder fails.
//! The limit applies to the whole process.

use ebb_block::ErrorKind;
use ebb_store::Direct;

use crate::common::{Bench, MIB, create, file, folder};

#[test]
fn a_write_across_the_largest_file_size_is_never_success() {
    let folder = folder();
    let benches: Vec<_> = [Direct::Off, Direct::Auto]
        .map(|direct| {
            let path = file(&folder, &format!("{direct:?}"));
            (Bench::new(create(&path, 4 * MIB, direct)), path)
        })
        .into_iter()
        .collect();
    // SAFETY: no handler is installed, so none can run concurrently.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = libc::rlimit { rlim_cur: MIB, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the pointer is to a whole structure that outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    for (bench, path) in benches {
        bench.write(0, &[1; 1 << 20]).unwrap();
        let across = bench.write(MIB - 8192, &[2; 64 << 10]).unwrap_err();
        assert_eq!(across.kind, ErrorKind::NoSpace, "{across:?}");
        let beyond = bench.write(2 * MIB, &[3; 4096]).unwrap_err();
        assert_eq!(beyond.kind, ErrorKind::NoSpace, "{beyond:?}");
        let content = std::fs::read(&path).unwrap();
        assert!(content[..(1 << 20) - 8192].iter().all(|b| *b == 1));
        // The first part was written up to the limit: a short write, which is continued.
        assert!(content[(1 << 20) - 8192..1 << 20].iter().all(|b| *b == 2));
        assert!(content[1 << 20..].iter().all(|b| *b == 0));
        bench.flush().unwrap();
    }
}
