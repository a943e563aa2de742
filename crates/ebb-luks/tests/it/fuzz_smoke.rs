//! Fuzzed LUKS2 headers, on any toolchain, the same each time.
//!
//! `EBBD_FUZZ_SEED=<number>` sets the seed; it is printed, and a finding names the input. The
//! bugs of broken functions must be found, otherwise the harness itself is broken.
#![expect(unreachable_pub, reason = "the modules are also those of a fuzz target")]

use ebb_luks::{LuksError, LuksHeader};

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

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} must be a number")),
        Err(_) => default,
    }
}

fn seed() -> u64 {
    number("EBBD_FUZZ_SEED", 0x0ebb_d5ee_d000_0007)
}

/// `split_mix`.
fn mixed(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Runs inputs of 256 to 1,272 bytes up to the first finding.
fn hunt(load: luks::Load) -> Result<(u64, luks::Tally), String> {
    let seed = seed();
    let inputs = test_scale::scaled(1_000_000);
    let (mut state, mut sum) = (seed, luks::Tally::default());
    let mut input = Vec::new();
    for number in 0..inputs {
        let words = 32 + mixed(&mut state) % 128;
        input.clear();
        for _ in 0..words {
            input.extend_from_slice(&mixed(&mut state).to_le_bytes());
        }
        match luks::run(load, &input) {
            Ok(tally) => {
                sum.loaded += tally.loaded;
                sum.refused += tally.refused;
                sum.damaged += tally.damaged;
                sum.tried += tally.tried;
            }
            Err(Finding(text)) => {
                return Err(format!("seed {seed}, input {number}, bytes {input:02x?}:\n{text}"));
            }
        }
    }
    Ok((inputs, sum))
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
    println!("seed {}: {inputs} headers, {sum:?}", seed());
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
