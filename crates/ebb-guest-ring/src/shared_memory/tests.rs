use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Output};
use std::thread;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;

const PAGE: usize = 4096;

/// Set in a child process that runs one test alone.
const CHILD: &str = "EBB_GUEST_RING_CHILD";

fn memfd(bytes: usize) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("guest", flags).unwrap();
    ftruncate(&fd, bytes as u64).unwrap();
    fd
}

fn map(fd: &OwnedFd, offset: u64, bytes: usize) -> io::Result<SharedMemory> {
    SharedMemory::map(fd.as_fd(), offset, bytes, Arc::default())
}

fn error(result: io::Result<SharedMemory>) -> String {
    result.unwrap_err().to_string()
}

/// Runs one test of this file alone in a child process.
fn child(test: &str) -> Output {
    let path = format!("shared_memory::tests::{test}");
    Command::new(std::env::current_exe().unwrap())
        .args([&path, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

fn signal_of_child(test: &str) -> Option<i32> {
    ExitStatus::signal(&child(test).status)
}

#[test]
fn both_sides_see_what_is_written() {
    let fd = memfd(3 * PAGE);
    let memory = map(&fd, 0, 3 * PAGE).unwrap();
    let file = File::from(fd);
    assert!(memory.write(5000, b"guest"));
    let mut back = [0; 5];
    file.read_exact_at(&mut back, 5000).unwrap();
    assert_eq!(&back, b"guest");
    file.write_all_at(b"backs", 5000).unwrap();
    assert!(memory.read(5000, &mut back));
    assert_eq!((&back, memory.bytes()), (b"backs", 3 * PAGE));
    assert!(!memory.is_lost());
}

#[test]
fn offsets_need_not_be_multiples_of_a_page() {
    let fd = memfd(4 * PAGE);
    for (offset, bytes) in [(8, 8), (4088, 16), (4096, 8192), (5000, 3), (12288, 4096), (16376, 8)]
    {
        let memory = map(&fd, offset, bytes).unwrap();
        assert!(memory.write(bytes - 1, &[0xa5]) && !memory.write(bytes, &[0]));
        let mut back = [0];
        rustix::io::pread(&fd, &mut back, offset + bytes as u64 - 1).unwrap();
        assert_eq!(back, [0xa5]);
    }
    assert!(error(map(&fd, 4, 8)).contains("bad offset"));
}

#[test]
fn files_that_are_too_short_are_refused() {
    let fd = memfd(2 * PAGE + 1);
    assert!(map(&fd, 0, 2 * PAGE + 1).is_ok());
    assert!(map(&fd, PAGE as u64, PAGE + 1).is_ok());
    assert!(error(map(&fd, 0, 2 * PAGE + 2)).contains("too short"));
    assert!(error(map(&fd, 2 * PAGE as u64, 2)).contains("too short"));
    assert!(error(map(&fd, u64::MAX - 7, 8)).contains("bad offset"));
    assert!(error(map(&fd, 0, 0)).contains("bad offset"));
    assert!(map(&fd, 0, usize::MAX).is_err());
}

#[test]
fn only_files_in_memory_are_mapped() {
    let on_disk = tempfile::tempfile_in("/var/tmp").unwrap();
    on_disk.set_len(PAGE as u64).unwrap();
    assert!(error(map(&on_disk.into(), 0, PAGE)).contains("not a file in memory"));
    let device = File::options().read(true).write(true).open("/dev/zero").unwrap();
    assert!(error(map(&device.into(), 0, PAGE)).contains("not a file in memory"));
    let tmpfs = tempfile::tempfile_in("/dev/shm").unwrap();
    tmpfs.set_len(PAGE as u64).unwrap();
    let memory = map(&tmpfs.into(), 0, PAGE).unwrap();
    assert!(memory.write(0, &[1]) && !memory.is_sealed());
}

#[test]
fn a_seal_against_truncation_is_seen() {
    let fd = memfd(PAGE);
    assert!(!map(&fd, 0, PAGE).unwrap().is_sealed());
    fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
    assert!(!map(&fd, 0, PAGE).unwrap().is_sealed());
    fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    assert!(map(&fd, 0, PAGE).unwrap().is_sealed());
}

#[test]
fn memory_is_not_dumped() {
    let memory = map(&memfd(PAGE), 0, PAGE).unwrap();
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", memory.address().addr());
    let lines = text.lines().skip_while(|line| !line.starts_with(&start));
    let flags = lines.skip(1).find(|line| line.starts_with("VmFlags:")).unwrap();
    assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
}

#[test]
fn truncated_memory_is_replaced_and_reported() {
    let fd = memfd(8 * PAGE);
    let (kept_fd, lost, kept_lost) = (memfd(PAGE), Arc::<AtomicBool>::default(), Arc::default());
    let kept = SharedMemory::map(kept_fd.as_fd(), 0, PAGE, Arc::clone(&kept_lost)).unwrap();
    assert!(kept.write(0, b"kept"));
    let part = SharedMemory::map(fd.as_fd(), PAGE as u64 + 8, 6 * PAGE, Arc::clone(&lost)).unwrap();
    assert!(part.write(0, b"before"));
    ftruncate(&fd, 3 * PAGE as u64).unwrap();
    assert_eq!(part.load(0), u32::from_le_bytes(*b"befo"));
    assert!(!part.is_lost(), "nothing was accessed beyond the end");
    // One copy meets the end of the file in its middle, and completes.
    let mut all = vec![1; 6 * PAGE];
    assert!(part.read(0, &mut all));
    assert!(part.is_lost() && lost.load(Ordering::Relaxed));
    assert_eq!(all[PAGE * 2..], vec![0; PAGE * 4]);
    assert_eq!(part.load(0), 0, "the whole mapping is replaced");
    // Only this process sees what is written from now on.
    part.store_u64(5 * PAGE, 7);
    assert_eq!(part.load_u64(5 * PAGE), 7);
    assert_eq!(part.fetch_or_u8(5 * PAGE, 8), 7);
    let mut back = [0; 4];
    assert!(kept.read(0, &mut back) && !kept.is_lost());
    assert_eq!(&back, b"kept");
}

/// Whether or not the system has huge pages: none is accessed.
#[test]
fn huge_pages_are_mapped_and_replaced_in_whole() {
    let fd = memfd_create("ebb-huge-test", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB).unwrap();
    let huge = usize::try_from(fstatfs(&fd).unwrap().f_bsize).unwrap();
    let mapped = || {
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        text.lines().filter(|line| line.contains("ebb-huge-test")).count()
    };
    for (offset, bytes) in [(0, huge), (PAGE, huge), (huge + PAGE, PAGE), (huge - 8, 3 * PAGE)] {
        ftruncate(&fd, 4 * huge as u64).unwrap();
        let memory = map(&fd, offset as u64, bytes).unwrap();
        assert_eq!(mapped(), 1);
        ftruncate(&fd, 0).unwrap();
        assert!(memory.write(bytes - 1, &[1]) && memory.is_lost());
        let mut all = vec![7; bytes];
        assert!(memory.read(0, &mut all));
        assert!(all[..bytes - 1].iter().all(|byte| *byte == 0) && all[bytes - 1] == 1);
        assert_eq!(mapped(), 0);
    }
    ftruncate(&fd, 2 * huge as u64).unwrap();
    let memory = map(&fd, huge as u64 + 8, huge - 8).unwrap();
    assert_eq!(mapped(), 1);
    drop(memory);
    assert_eq!(mapped(), 0);
}

#[test]
fn each_access_survives_a_truncation() {
    let accesses: [fn(&SharedMemory); 10] = [
        |memory| assert!(memory.read(PAGE - 1, &mut [0; 3])),
        |memory| assert!(memory.write(PAGE - 1, &[1; 3])),
        |memory| assert!(memory.read_words(PAGE, &mut [0; 3])),
        |memory| assert!(memory.write_words(PAGE, &[1; 3])),
        |memory| assert_eq!(memory.load(PAGE) | u32::from(memory.load_u16(PAGE)), 0),
        |memory| memory.store(PAGE, 1),
        |memory| memory.store_u16(PAGE, 1),
        |memory| assert_eq!(memory.load_u64(PAGE), 0),
        |memory| memory.store_u64(PAGE, 1),
        |memory| assert_eq!(memory.fetch_or_u8(PAGE, 1), 0),
    ];
    for access in accesses {
        let fd = memfd(2 * PAGE);
        let memory = map(&fd, 0, 2 * PAGE).unwrap();
        ftruncate(&fd, PAGE as u64).unwrap();
        access(&memory);
        assert!(memory.is_lost());
    }
}

/// Reads `bytes` bytes of a file into memory, by a system call and by `io_uring`: what both return.
fn read_into(file: &File, memory: &SharedMemory, bytes: u32) -> [i32; 2] {
    let len = usize::try_from(bytes).unwrap();
    // SAFETY: the memory is mapped, and nothing refers to it.
    let called = unsafe { libc::pread(file.as_raw_fd(), memory.address().cast(), len, 0) };
    let error = io::Error::last_os_error().raw_os_error().unwrap();
    let called = if called < 0 { -error } else { i32::try_from(called).unwrap() };
    let mut ring = io_uring::IoUring::new(2).unwrap();
    let fd = io_uring::types::Fd(file.as_raw_fd());
    let read = io_uring::opcode::Read::new(fd, memory.address(), bytes).offset(0).build();
    // SAFETY: the memory stays mapped until the completion below.
    unsafe { ring.submission().push(&read) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    [called, ring.completion().next().unwrap().result()]
}

#[test]
fn the_kernel_reads_into_replaced_memory() {
    let source = tempfile::tempfile().unwrap();
    source.write_all_at(&[9; 3 * PAGE], 0).unwrap();
    let fd = memfd(4 * PAGE);
    let memory = map(&fd, 0, 4 * PAGE).unwrap();
    assert_eq!(read_into(&source, &memory, 12_288), [12_288; 2]);
    ftruncate(&fd, 0).unwrap();
    assert_eq!(read_into(&source, &memory, 12_288), [-libc::EFAULT; 2]);
    assert!(!memory.is_lost(), "the kernel's accesses raise no signal");
    assert_eq!(memory.load(0), 0);
    assert!(memory.is_lost());
    assert_eq!(read_into(&source, &memory, 12_288), [12_288; 2]);
    assert_eq!(memory.load(3 * PAGE - 4), 0x0909_0909);
}

#[test]
fn threads_that_copy_survive_a_truncation() {
    let kept_fd = memfd(PAGE);
    let kept = map(&kept_fd, 0, PAGE).unwrap();
    for round in 0..40 {
        let fd = memfd(64 * PAGE);
        let memory = map(&fd, 0, 64 * PAGE).unwrap();
        let truncated = AtomicBool::new(false);
        thread::scope(|scope| {
            for worker in 0..4 {
                let (memory, truncated) = (&memory, &truncated);
                scope.spawn(move || {
                    let mut copy = vec![worker; 3 * PAGE + 5];
                    let mut at = usize::from(worker) * 7919;
                    while !truncated.load(Ordering::Relaxed) {
                        at = (at + 12_345) % (60 * PAGE);
                        assert!(memory.write(at, &copy) && memory.read(at, &mut copy));
                        memory.fetch_or_u8(at, 1);
                    }
                    assert!(memory.write(63 * PAGE, &copy[..PAGE]) && memory.is_lost());
                });
            }
            ftruncate(&fd, round % 3 * 16 * PAGE as u64).unwrap();
            truncated.store(true, Ordering::Relaxed);
        });
        kept.store(0, kept.load(0) + 1);
    }
    assert!(!kept.is_lost());
    let mut count = [0; 4];
    rustix::io::pread(&kept_fd, &mut count, 0).unwrap();
    assert_eq!(u32::from_le_bytes(count), 40);
}

/// Addresses and entries are used again at once by other threads, whose mappings must stay what they are.
#[test]
fn mappings_come_and_go_while_others_are_truncated() {
    thread::scope(|scope| {
        for worker in 0..4u32 {
            scope.spawn(move || {
                for round in 0..500 {
                    let fd = memfd(4 * PAGE);
                    let memory = map(&fd, 0, 4 * PAGE).unwrap();
                    let truncates = round % 2 == worker % 2;
                    if truncates {
                        ftruncate(&fd, PAGE as u64).unwrap();
                    }
                    let mark = worker << 16 | round;
                    memory.store(3 * PAGE, mark);
                    assert_eq!((memory.load(3 * PAGE), memory.is_lost()), (mark, truncates));
                    drop(memory);
                    let mut back = [0; 4];
                    let read = rustix::io::pread(&fd, &mut back, 3 * PAGE as u64).unwrap();
                    let expected = if truncates { (0, 0) } else { (4, mark) };
                    assert_eq!((read, u32::from_le_bytes(back)), expected);
                }
            });
        }
    });
}

#[test]
fn a_fault_that_is_not_of_shared_memory_still_kills() {
    if !is_child() {
        let test = "a_fault_that_is_not_of_shared_memory_still_kills";
        return assert_eq!(signal_of_child(test), Some(libc::SIGBUS));
    }
    let memory = map(&memfd(PAGE), 0, PAGE).unwrap();
    let fd = memfd(PAGE);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let foreign =
        unsafe { mmap(std::ptr::null_mut(), PAGE, protection, MapFlags::SHARED, &fd, 0) }.unwrap();
    ftruncate(&fd, 0).unwrap();
    // SAFETY: mapped; raises SIGBUS.
    let read = unsafe { foreign.cast::<u32>().read_volatile() };
    unreachable!("{read} {memory:?}");
}

#[test]
fn a_signal_that_a_process_sends_still_kills() {
    if !is_child() {
        let test = "a_signal_that_a_process_sends_still_kills";
        return assert_eq!(signal_of_child(test), Some(libc::SIGBUS));
    }
    let memory = map(&memfd(PAGE), 0, PAGE).unwrap();
    // SAFETY: no preconditions.
    unsafe { libc::raise(libc::SIGBUS) };
    unreachable!("{memory:?}");
}

#[test]
fn memory_that_was_unmapped_is_not_guarded() {
    if !is_child() {
        let test = "memory_that_was_unmapped_is_not_guarded";
        return assert_eq!(signal_of_child(test), Some(libc::SIGBUS));
    }
    let fd = memfd(PAGE);
    let memory = map(&fd, 0, PAGE).unwrap();
    let address = memory.address().cast();
    drop(memory);
    let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED_NOREPLACE);
    // SAFETY: a new mapping where no other is.
    let foreign = unsafe { mmap(address, PAGE, protection, flags, &fd, 0) }.unwrap();
    ftruncate(&fd, 0).unwrap();
    // SAFETY: mapped; raises SIGBUS.
    let read = unsafe { foreign.cast::<u32>().read_volatile() };
    unreachable!("{read}");
}

#[test]
fn a_full_table_refuses_mappings() {
    if !is_child() {
        let output = child("a_full_table_refuses_mappings");
        return assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    let fd = memfd(PAGE);
    let most = crate::fault_guard::RANGES_MAX;
    let mut all: Vec<_> = (0..most).map(|_| map(&fd, 0, PAGE).unwrap()).collect();
    for _ in 0..3 {
        let refusal = map(&fd, 0, PAGE).unwrap_err();
        assert_eq!(refusal.kind(), io::ErrorKind::QuotaExceeded);
        assert!(refusal.to_string().contains("32768 regions of shared memory"));
    }
    all.swap_remove(most / 2);
    all.push(map(&fd, 0, PAGE).unwrap());
    ftruncate(&fd, 0).unwrap();
    assert_eq!(all[most - 1].load(0), 0);
    let lost: Vec<usize> = (0..most).filter(|index| all[*index].is_lost()).collect();
    assert_eq!(lost, [most - 1]);
}
