//! Fuzzed LUKS2 headers, on any toolchain, the same each time.
//!
//! `EBBD_FUZZ_SEED=<number>` sets the seed; it is printed, and a finding names the input. The
//! bugs of broken functions must be found, otherwise the harness itself is broken.
#![expect(unreachable_pub, reason = "the modules are also those of a fuzz target")]

use ebb_luks::{LuksError, LuksHeader};
use seeded::FuzzRun;

#[allow(dead_code, reason = "the fuzz targets share it, and each uses its part")]
#[path = "../../../../fuzz/src/choices.rs"]
mod choices;
#[path = "../../../../fuzz/src/luks.rs"]
mod luks;
#[path = "../../../../fuzz/src/seeds.rs"]
mod seeds;

/// What the code did that it must not.
#[derive(Debug)]
pub struct Finding(pub String);

/// The inputs: 256 to 1,272 bytes.
fn fuzz() -> FuzzRun {
    FuzzRun::new(0x0ebb_d5ee_d000_0007, 1_000_000, 32..160)
}

/// Runs the inputs up to the first finding.
fn hunt(load: luks::Load) -> Result<(u64, luks::Tally), String> {
    let (fuzz, mut sum) = (fuzz(), luks::Tally::default());
    fuzz.hunt(|input| {
        let tally = luks::run(load, input).map_err(|Finding(text)| text)?;
        sum.loaded += tally.loaded;
        sum.refused += tally.refused;
        sum.damaged += tally.damaged;
        sum.tried += tally.tried;
        Ok(())
    })?;
    Ok((fuzz.inputs, sum))
}

#[test]
fn seeds_lead_to_their_outcomes() {
    ebb_luks::prepare().expect("nothing has used OpenSSL");
    seeds::check("luks_headers", |input| luks::run(luks::load, input));
}

#[test]
fn no_header_leads_outside_of_its_store() {
    ebb_luks::prepare().expect("nothing has used OpenSSL");
    let (inputs, sum) = hunt(luks::load).unwrap_or_else(|finding| panic!("{finding}"));
    println!("seed {}: {inputs} headers, {sum:?}", fuzz().seed);
    // The inputs reach all outcomes.
    assert!(sum.loaded > inputs / 8 && sum.refused > inputs / 8, "{sum:?}");
    assert!(sum.damaged > inputs / 64 && sum.tried > inputs / 1024, "{sum:?}");
}

/// Never looks at the second copy.
fn load_first(disk: &mut luks::Disk) -> Result<LuksHeader, LuksError> {
    let second = disk.bytes[16384..].to_vec();
    disk.bytes[16384..].fill(0);
    let loaded = LuksHeader::load(disk);
    disk.bytes[16384..].copy_from_slice(&second);
    loaded
}

/// Makes the checksum right before it is checked.
fn load_unchecked(disk: &mut luks::Disk) -> Result<LuksHeader, LuksError> {
    let first = &mut disk.bytes[..16384];
    first[448..512].fill(0);
    let sum = openssl::sha::sha256(first);
    first[448..480].copy_from_slice(&sum);
    LuksHeader::load(disk)
}

#[test]
fn broken_functions_are_found_out() {
    ebb_luks::prepare().expect("nothing has used OpenSSL");
    for (load, what) in
        [(load_first as luks::Load, "is used, not"), (load_unchecked, "checksum was accepted")]
    {
        let finding = hunt(load).expect_err(what);
        assert!(finding.contains(what) || finding.contains("is used, not"), "{finding}");
    }
}
