//! qcow2 images made by QEMU are read as QEMU reads them, and those that are not supported are refused with a remedy.

use std::path::Path;

use counting_allocator::{mark_thread, marked_calls};
use ebb_advice::{Advice, full_text};
use ebb_block::{BlockStore, ErrorKind, Tracked, conformance};
use ebb_store::{Direct, FileStore, OpenOptions, Qcow2Error, Qcow2Fault, Qcow2Store, Store};
use seeded::Random;

use crate::common::{Bench, folder, tmpfs_folder};
use crate::image::{Image, run};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn open(path: &Path, direct: Direct) -> Bench {
    Bench::new(Store::Qcow2(Qcow2Store::open(path, direct).unwrap().0))
}

/// Reads all of an image in requests of several lengths, and compares it, and its extents, with what QEMU reads.
fn agrees(image: &Image, direct: Direct) {
    let content = image.content();
    let bench = open(&image.path, direct);
    let size = content.len() as u64;
    assert_eq!(bench.store().size(), size);
    let capabilities = bench.store().capabilities();
    assert!(capabilities.read_only && !capabilities.discard && !capabilities.fast_zero);
    let compare = |offset: u64, length: u64| {
        let range = usize::try_from(offset).unwrap()..usize::try_from(offset + length).unwrap();
        let found = bench.read(offset, range.len()).unwrap();
        let same = found == content[range];
        assert!(same, "{}: {length} bytes at {offset} differ", image.path.display());
    };
    let mut at = 0;
    while at < size {
        let length = (size - at).min(4 * MIB);
        compare(at, length);
        at += length;
    }
    let mut numbers = Random::new(size);
    for _ in 0..300 {
        let offset = numbers.below(size / 512) * 512;
        let most = [512, 4 * KIB, 64 * KIB, MIB][usize::try_from(numbers.below(4)).unwrap()];
        compare(offset, (numbers.below(most) / 512 * 512 + 512).min(size - offset));
    }
    let mut at = 0;
    while at < size {
        let list = bench.extents(at, size - at, 7).unwrap();
        assert!(!list.is_empty() && list.len() <= 7);
        for (offset, length, hole) in list {
            assert!(offset == at && length > 0 && offset + length <= size);
            at += length;
            let range = usize::try_from(offset).unwrap()..usize::try_from(at).unwrap();
            assert!(!hole || content[range].iter().all(|byte| *byte == 0), "a hole with data");
        }
    }
}

/// Writes, zeroes and discards, some of whole clusters.
fn changes(numbers: &mut Random, size: u64, cluster: u64, zeroes: bool) -> Vec<String> {
    let change = |_| {
        let unit = if numbers.below(2) == 0 { cluster } else { 512 };
        let offset = numbers.below(size.div_ceil(unit)) * unit;
        let length = (numbers.below(3 * cluster) / unit * unit + unit).min(size - offset);
        match numbers.below(4) {
            0 if zeroes => format!("write -z {offset} {length}"),
            1 if zeroes => format!("write -z -u {offset} {length}"),
            2 => format!("discard {offset} {length}"),
            _ => format!("write -P {} {offset} {length}", numbers.below(256)),
        }
    };
    (0..60).map(change).collect()
}

#[test]
fn images_of_each_version_and_cluster_size_read_as_qemu_reads_them() {
    let folder = folder();
    let mut numbers = Random::new(1);
    // Each with several slices of L2 tables, and, where that is not too long, several tables.
    for (cluster, size) in [
        (512, 3 * MIB + 1536),
        (4 * KIB, 9 * MIB + 512),
        (64 * KIB, 600 * MIB + 33 * 512),
        (2 * MIB, 300 * MIB + 512),
    ] {
        for version in ["0.10", "1.1"] {
            let options = format!("compat={version},cluster_size={cluster}");
            let image = Image::empty(folder.path(), "image", &options, size);
            agrees(&image, Direct::Auto);
            image.change(&changes(&mut numbers, size, cluster, version == "1.1"));
            agrees(&image, Direct::Auto);
            image.change(&changes(&mut numbers, size, cluster, version == "1.1"));
            agrees(&image, Direct::Off);
        }
    }
}

/// A raw disk of random bytes with holes.
fn random_raw(path: &Path, size: u64) {
    let mut numbers = Random::new(size);
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < size {
        let hole = numbers.below(4) == 0;
        let words = 512 * (1 + numbers.below(64));
        (0..words).for_each(|_| bytes.extend(if hole { 0 } else { numbers.next() }.to_le_bytes()));
    }
    bytes.truncate(usize::try_from(size).unwrap());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn converted_resized_and_preallocated_images_read_as_qemu_reads_them() {
    let folder = folder();
    let raw = folder.path().join("random.raw");
    random_raw(&raw, 20 * MIB + 5 * 512);
    let mut numbers = Random::new(2);
    for options in [
        "cluster_size=512",
        "cluster_size=1024,compat=0.10",
        "cluster_size=64k,lazy_refcounts=on",
        "cluster_size=2M,preallocation=falloc",
        "cluster_size=64k,preallocation=metadata",
        "cluster_size=128k,compression_type=zstd,refcount_bits=64",
    ] {
        let image = Image::of_raw(folder.path(), "image", options, &raw);
        agrees(&image, Direct::Auto);
        // The L1 table moves and grows.
        let grown = 40 * MIB + 512;
        let path = image.path.to_str().unwrap();
        run("qemu-img", &["resize", "-q", "-f", "qcow2", path, &grown.to_string()]);
        // What an internal snapshot refers to is not overwritten in place.
        run("qemu-img", &["snapshot", "-c", "before", path]);
        image.change(&changes(&mut numbers, grown, 64 * KIB, !options.contains("0.10")));
        agrees(&image, Direct::Auto);
        agrees(&image, Direct::Off);
    }
}

fn refusal(path: &Path) -> Qcow2Fault {
    let error = Qcow2Store::open(path, Direct::Auto).unwrap_err();
    let inspected = Qcow2Store::inspect(path, Direct::Auto).unwrap_err();
    assert_eq!(error.to_string(), inspected.to_string());
    match error {
        Qcow2Error::Image { path: named, fault } => {
            assert_eq!(named, path);
            fault
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn images_that_are_not_supported_are_refused_with_a_remedy() {
    let folder = folder();
    let place = folder.path();
    let refused = |options: &str, fault: Qcow2Fault| {
        let image = Image::empty(place, "image", options, 4 * MIB);
        assert_eq!(refusal(&image.path), fault);
        assert!(fault.remedy().unwrap().contains("qemu-img"), "{fault}");
    };
    let raw = place.join("base.raw");
    random_raw(&raw, 4 * MIB);
    refused("backing_file=base.raw,backing_fmt=raw", Qcow2Fault::BackingFile);
    refused("extended_l2=on", Qcow2Fault::ExtendedL2);
    refused(&format!("data_file={}", place.join("data").display()), Qcow2Fault::ExternalData);
    let packed = place.join("packed");
    let path = packed.to_str().unwrap();
    run("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", raw.to_str().unwrap(), path]);
    let fault = refusal(&packed);
    assert!(matches!(fault, Qcow2Fault::Compressed { .. }), "{fault}");

    let patched = |at: u64, bytes: &[u8]| {
        let image = Image::empty(place, "image", "compat=1.1", 4 * MIB);
        image.patch(at, bytes);
        refusal(&image.path)
    };
    assert_eq!(patched(0, b"raw"), Qcow2Fault::Magic);
    assert_eq!(patched(7, &[4]), Qcow2Fault::Version(4));
    assert_eq!(patched(23, &[8]), Qcow2Fault::ClusterBits(8));
    // AES and LUKS.
    assert_eq!(patched(35, &[1]), Qcow2Fault::Encrypted);
    assert_eq!(patched(35, &[2]), Qcow2Fault::Encrypted);
    assert_eq!(patched(79, &[1]), Qcow2Fault::Dirty);
    assert_eq!(patched(79, &[2]), Qcow2Fault::Corrupt);
    assert_eq!(patched(79, &[0x20]), Qcow2Fault::Features(0x20));
    assert_eq!(patched(72, &[0x80]), Qcow2Fault::Features(1 << 63));
    assert_eq!(patched(103, &[96]), Qcow2Fault::HeaderLength);
    assert_eq!(patched(31, &[1]), Qcow2Fault::Size((4 << 20) + 1));
    assert_eq!(patched(24, &[0; 8]), Qcow2Fault::Size(0));
    let size = (64 << 40) + 512;
    let fault = Qcow2Fault::TooLarge { size, most: 64 << 40 };
    assert_eq!(patched(24, &size.to_be_bytes()), fault);
    // As large as supported, which needs more entries than the table has.
    assert_eq!(patched(24, &(64u64 << 40).to_be_bytes()), Qcow2Fault::L1Table);
    assert_eq!(patched(36, &[0; 4]), Qcow2Fault::L1Table);
    assert_eq!(patched(46, &[1]), Qcow2Fault::L1Table);
    assert_eq!(patched(40, &[0; 8]), Qcow2Fault::L1Table);
    assert_eq!(patched(40, &(1u64 << 62).to_be_bytes()), Qcow2Fault::L1Table);
}

#[test]
fn files_that_are_no_images_are_refused_with_a_remedy() {
    let folder = folder();
    let path = folder.path().join("image");
    let said = |path: &Path| full_text(&Qcow2Store::open(path, Direct::Auto).unwrap_err());
    assert!(said(&path).contains("no such file"), "{}", said(&path));
    for bytes in [0, 3, 4, 71, 511] {
        std::fs::write(&path, &b"QFI\xfb\0\0\0\x02".repeat(64)[..bytes]).unwrap();
        let text = said(&path);
        assert!(text.contains("image: ") && text.contains(':'), "{text}");
    }
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    assert!(said(&path).contains("file:"), "{}", said(&path));
    assert!(said(folder.path()).contains("a directory"), "{}", said(folder.path()));
}

/// Table 1 of 100 is none of those that opening looks at.
#[test]
fn a_compressed_or_damaged_cluster_fails_the_reads_of_its_bytes_only() {
    let folder = folder();
    let table = 32 * KIB;
    let image = Image::empty(folder.path(), "image", "cluster_size=512", 100 * table);
    image.change(&[format!("write -P 1 0 {}", 100 * table)]);
    image.change(&[format!("discard {table} 512"), format!("write -c -P 2 {table} 512")]);
    let content = image.content();
    let bench = open(&image.path, Direct::Auto);
    let error = bench.read(table - 4096, 8192).unwrap_err();
    assert_eq!((error.kind, error.offset, error.length), (ErrorKind::Io, table - 4096, 8192));
    let text = error.full_text();
    for part in ["image: ", "compressed", "at 32768", "qemu-img convert"] {
        assert!(text.contains(part), "{text}");
    }
    let end = usize::try_from(table).unwrap();
    assert_eq!(bench.read(0, end).unwrap(), content[..end]);
    assert_eq!(bench.read(table + 512, 4096).unwrap(), content[end + 512..end + 4608]);
    assert!(bench.extents(table, 512, 1).is_err());
    drop(bench);

    // A file that is cut off: the last cluster of the disk was written last.
    let whole = Image::empty(folder.path(), "other", "cluster_size=64k", MIB);
    whole.change(&["write -P 1 0 1M".to_owned()]);
    let file = std::fs::File::options().write(true).open(&whole.path).unwrap();
    let bytes = file.metadata().unwrap().len();
    file.set_len(bytes - 64 * KIB).unwrap();
    let bench = open(&whole.path, Direct::Auto);
    assert_eq!(bench.read(0, 15 << 16).unwrap(), vec![1; 15 << 16]);
    let text = bench.read(0, 1 << 20).unwrap_err().full_text();
    assert!(text.contains("beyond the end of the file"), "{text}");
}

/// QEMU writes no more of the last cluster than the disk has of it, and reads zeroes behind the end
/// of any file.
#[test]
fn last_cluster_may_be_cut_short() {
    let folder = folder();
    for cut in [512, 700, 4096, 12 * KIB + 100, 64 * KIB - 1] {
        let image = Image::empty(folder.path(), "image", "cluster_size=64k", MIB + 20 * 512);
        image.change(&["write -P 1 0 1M".to_owned(), "write -P 2 1M 10k".to_owned()]);
        image.change(&["write -P 3 512k 64k".to_owned()]);
        let file = std::fs::File::options().write(true).open(&image.path).unwrap();
        let end = file.metadata().unwrap().len().next_multiple_of(64 * KIB);
        file.set_len(end - cut).unwrap();
        for direct in [Direct::Auto, Direct::Off] {
            agrees(&image, direct);
        }
        let mut faults = Vec::new();
        Qcow2Store::check(&image.path, &mut |fault| faults.push(fault)).unwrap();
        assert_eq!(faults, [], "{cut}");
    }
}

#[test]
fn an_image_conforms_and_has_an_identity_of_its_own() {
    let folder = folder();
    let raw = folder.path().join("random.raw");
    random_raw(&raw, 4 * MIB);
    let content = std::fs::read(&raw).unwrap();
    for direct in [Direct::Off, Direct::Auto] {
        let image = Image::of_raw(folder.path(), "image", "cluster_size=4k", &raw);
        let open = || Qcow2Store::open(&image.path, direct).unwrap().0;
        let area = content[..usize::try_from(conformance::AREA).unwrap()].to_vec();
        let worker = ebb_io::Worker::start_alone("conformance").unwrap();
        let (store, whole) = (Tracked(open()), Store::Qcow2(open()));
        // Boxed: the worker's stack is small for the unoptimized suite.
        let checked = worker.handle().block_on(|io| async move {
            Box::pin(conformance::check_read_only(&io, &store, &area)).await?;
            Box::pin(conformance::check_read_only(&io, &whole, &area)).await
        });
        assert_eq!(checked, Some(Ok(())), "{direct:?}");
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let file = FileStore::open(&image.path, &options).unwrap().0;
        assert_eq!(open().identity(), open().identity());
        assert_ne!(open().identity().key, file.identity().key);
        assert!(open().identity().key.starts_with("qcow2 "));
        assert_eq!(open().number().unwrap(), file.number().unwrap());
    }
}

#[test]
fn a_read_whose_tables_are_in_memory_allocates_nothing() {
    // Reads of a file in memory complete at once, without other tasks of the worker in between.
    let folder = tmpfs_folder();
    let raw = folder.path().join("random.raw");
    random_raw(&raw, 8 * MIB);
    let image = Image::of_raw(folder.path(), "image", "cluster_size=4k", &raw);
    let bench = open(&image.path, Direct::Auto);
    let counts: Vec<u64> = (0..5)
        .map(|_| {
            let before = marked_calls();
            bench.on(|io, store| async move {
                let mut buf = io.pool().take(64 << 10).await;
                for round in 0..600u64 {
                    mark_thread(round >= 300);
                    let (result, back) = store.read(&io, buf, round % 120 * (64 << 10)).await;
                    result.unwrap();
                    buf = back;
                }
                mark_thread(false);
            });
            marked_calls() - before
        })
        .collect();
    assert!(counts.contains(&0), "allocations of 300 reads: {counts:?}");
}
