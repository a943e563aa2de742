//! Fuzzed qcow2 images, on any toolchain, the same each time.
//!
//! `EBBD_FUZZ_SEED=<number>` sets the seed; it is printed, and a finding names the input. The
//! bugs of broken mappings must be found, otherwise the harness itself is broken.
#![expect(unreachable_pub, reason = "the modules are also those of a fuzz target")]

use ebb_store::qcow2_map::{Qcow2Map, Run};
use seeded::FuzzRun;

#[allow(dead_code, reason = "the fuzz targets share it, and each uses its part")]
#[path = "../../../../fuzz/src/choices.rs"]
mod choices;
#[path = "../../../../fuzz/src/qcow2.rs"]
mod qcow2;
#[path = "../../../../fuzz/src/seeds.rs"]
mod seeds;

/// What the code did that it must not.
#[derive(Debug)]
pub struct Finding(pub String);

/// The inputs: 256 to 1,272 bytes.
fn fuzz() -> FuzzRun {
    FuzzRun::new(0x0ebb_d5ee_d000_0004, 1_000_000, 32..160)
}

/// Runs the inputs up to the first finding.
fn hunt(find: qcow2::Find) -> Result<(u64, qcow2::Tally), String> {
    let (fuzz, mut sum) = (fuzz(), qcow2::Tally::default());
    fuzz.hunt(|input| {
        let tally = qcow2::run(find, input).map_err(|Finding(text)| text)?;
        sum.opened += tally.opened;
        sum.refused += tally.refused;
        sum.found += tally.found;
        sum.zero += tally.zero;
        sum.wrong += tally.wrong;
        Ok(())
    })?;
    Ok((fuzz.inputs, sum))
}

#[test]
fn seeds_lead_to_their_outcomes() {
    seeds::check("qcow2_images", |input| qcow2::run(qcow2::find, input));
}

#[test]
fn no_image_leads_outside_of_its_file() {
    let (inputs, sum) = hunt(qcow2::find).unwrap_or_else(|finding| panic!("{finding}"));
    println!("seed {}: {inputs} images, {sum:?}", fuzz().seed);
    // The inputs reach all outcomes.
    assert!(sum.opened > inputs / 4 && sum.refused > inputs / 8, "{sum:?}");
    assert!(sum.found > inputs / 2 && sum.zero > inputs / 2 && sum.wrong > inputs / 16, "{sum:?}");
}

/// Does not look where a run ends.
fn find_too_much(map: &Qcow2Map, entries: &[u64; 64], at: u64, most: u64) -> Result<Run, ()> {
    let run = qcow2::find(map, entries, at, most)?;
    Ok(Run { length: most, ..run })
}

/// Forgets the offset in the cluster.
fn find_its_cluster(map: &Qcow2Map, entries: &[u64; 64], at: u64, most: u64) -> Result<Run, ()> {
    let cluster = map.cluster_bytes();
    qcow2::find(map, entries, at / cluster * cluster, most)
}

/// Takes every entry that is wrong for zeroes.
fn find_zeroes(map: &Qcow2Map, entries: &[u64; 64], at: u64, most: u64) -> Result<Run, ()> {
    Ok(qcow2::find(map, entries, at, most).unwrap_or(Run { place: None, length: most.min(512) }))
}

#[test]
fn broken_mappings_are_found_out() {
    for (find, what) in [
        (find_too_much as qcow2::Find, "bytes"),
        (find_its_cluster, "found at"),
        (find_zeroes, "found at"),
    ] {
        let finding = hunt(find).expect_err(what);
        assert!(finding.contains(what), "{finding}");
    }
}
