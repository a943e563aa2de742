//! Fuzzing of LUKS2 headers that are mostly valid.
//!
//! A header is made out of choices: two copies, their numbers, metadata with values that are wrong in places, and bytes
//! that are flipped before or after the checksum is made. What is loaded is judged by what was made: the newer copy with
//! a right checksum counts, data and key slots are inside of the store, and nothing outside of it is read.

use std::io;

use ebb_luks::{HeaderArea, LuksError, LuksHeader};

use super::Finding;
use super::choices::Choices;

/// How often what happened.
#[derive(Debug, Default)]
pub struct Tally {
    /// Headers that were loaded.
    pub loaded: u64,
    /// Headers that were refused.
    pub refused: u64,
    /// Headers of which one copy was damaged.
    pub damaged: u64,
    /// Headers of which a slot was tried.
    pub tried: u64,
}

/// Loads a header: the crate's own function, or a broken one.
pub type Load = fn(&mut Disk) -> Result<LuksHeader, LuksError>;

/// The one of the crate.
pub fn load(disk: &mut Disk) -> Result<LuksHeader, LuksError> {
    LuksHeader::load(disk)
}

/// Judges; the text is made only when the judgement is against the crate.
macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err(Finding(format!($($text)+)));
        }
    };
}

/// Bytes of a copy.
const COPY: usize = 16 << 10;
/// Where the key slots are.
const SLOTS: u64 = 2 * COPY as u64;

/// A store: its first bytes, and zeroes up to its size.
#[derive(Debug)]
pub struct Disk {
    /// Both copies.
    pub bytes: Vec<u8>,
    size: u64,
    outside: Option<(u64, usize)>,
}

impl HeaderArea for Disk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        if at.checked_add(bytes.len() as u64).is_none_or(|end| end > self.size) {
            self.outside = Some((at, bytes.len()));
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.fill(0);
        let start = usize::try_from(at).unwrap_or(usize::MAX).min(self.bytes.len());
        let count = bytes.len().min(self.bytes.len() - start);
        bytes[..count].copy_from_slice(&self.bytes[start..start + count]);
        Ok(())
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.outside = Some((at, bytes.len()));
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A number as the format writes it, rarely another.
fn number(choices: &mut Choices<'_>, usual: u64) -> String {
    match choices.below(64) {
        0 => format!("\"{}\"", choices.number()),
        1 => usual.to_string(),
        2 => format!("\"{}\"", usual.wrapping_add(choices.number() % 8192).wrapping_sub(4096)),
        3 => choices.pick(&["\"\"", "null", "[]", "-1", "1e300", "\"+4\"", "{}"]).to_owned(),
        4 => format!("\"{}\"", u64::MAX - u64::from(choices.byte())),
        _ => format!("\"{usual}\""),
    }
}

fn word(choices: &mut Choices<'_>, usual: &str) -> String {
    match choices.below(96) {
        0 => String::from("null"),
        1 => String::from("[[[[[[\"\"]]]]]]"),
        2 => format!("\"{usual}x\""),
        _ => format!("\"{usual}\""),
    }
}

fn count(choices: &mut Choices<'_>, usual: u64) -> String {
    match choices.below(96) {
        0 => choices.number().to_string(),
        1 => format!("-{usual}"),
        2 => format!("{usual}.5"),
        3 => format!("\"{usual}\""),
        4 => u32::MAX.to_string(),
        _ => usual.to_string(),
    }
}

/// Metadata, and whether all of their costs are small.
fn metadata(choices: &mut Choices<'_>, data: u64) -> String {
    let salt = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    let many = choices.pick(&[1, 1, 1, 2, 3, 0, 33]);
    let (mut slots, mut names) = (Vec::new(), Vec::new());
    for slot in 0..many {
        let name = if choices.rarely() { choices.number() % 64 } else { slot };
        let area = SLOTS + if choices.rarely() { choices.number() % 8192 } else { slot * 4096 };
        let (kind, key, stripes) =
            (word(choices, "luks2"), count(choices, 64), count(choices, 1 + slot % 8));
        let (split, hash) = (word(choices, "luks1"), word(choices, "sha256"));
        let (raw, offset, size) =
            (word(choices, "raw"), number(choices, area), number(choices, 4096));
        let (cipher, area_key) = (word(choices, "aes-xts-plain64"), count(choices, 64));
        let kdf = match choices.below(4) {
            0 => format!(
                "\"type\":\"argon2id\",\"time\":{},\"memory\":{},\"cpus\":{}",
                count(choices, 1 << 20),
                count(choices, 1 << 20),
                count(choices, 4)
            ),
            _ => {
                format!("\"type\":\"pbkdf2\",\"hash\":{},\"iterations\":1", word(choices, "sha256"))
            }
        };
        slots.push(format!(
            "\"{name}\":{{\"type\":{kind},\"key_size\":{key},\"af\":{{\"type\":{split},\"stripes\":{stripes},\"hash\":\
             {hash}}},\"area\":{{\"type\":{raw},\"offset\":{offset},\"size\":{size},\"encryption\":{cipher},\"key_size\":\
             {area_key}}},\"kdf\":{{{kdf},\"salt\":\"{salt}\"}}}}"
        ));
        names.push(format!("\"{name}\""));
    }
    let (offset, tweak) = (number(choices, data), number(choices, 0));
    let size = if choices.rarely() { number(choices, 4096) } else { word(choices, "dynamic") };
    let sector = if choices.rarely() { count(choices, 512) } else { String::from("4096") };
    let (kind, cipher) = (word(choices, "crypt"), word(choices, "aes-xts-plain64"));
    let extra = if choices.below(64) == 0 { ",\"integrity\":{}" } else { "" };
    let requirements = match choices.below(64) {
        0 => ",\"requirements\":{\"mandatory\":[\"online-reencrypt\"]}",
        1 => ",\"requirements\":{\"mandatory\":[]}",
        _ => "",
    };
    let (json_size, keyslots) =
        (number(choices, COPY as u64 - 4096), number(choices, data.saturating_sub(SLOTS)));
    let (hash, digest) = (word(choices, "sha256"), word(choices, salt));
    format!(
        "{{\"keyslots\":{{{}}},\"tokens\":{{}},\"segments\":{{\"0\":{{\"type\":{kind},\"offset\":{offset},\"size\":{size},\
         \"iv_tweak\":{tweak},\"encryption\":{cipher},\"sector_size\":{sector}{extra}}}}},\"digests\":{{\"0\":{{\"type\":\
         \"pbkdf2\",\"keyslots\":[{}],\"segments\":[\"0\"],\"hash\":{hash},\"iterations\":1,\"salt\":\"{salt}\",\"digest\":\
         {digest}}}}},\"config\":{{\"json_size\":{json_size},\"keyslots_size\":{keyslots}{requirements}}}}}",
        slots.join(","),
        names.join(",")
    )
}

/// Writes one copy, and returns whether it is valid by its checksum.
fn copy(
    choices: &mut Choices<'_>,
    into: &mut [u8],
    second: bool,
    sequence: u64,
    text: &str,
) -> bool {
    let magic = if second { b"SKUL\xba\xbe\0\x02" } else { b"LUKS\xba\xbe\0\x02" };
    into[..8].copy_from_slice(magic);
    into[8..16].copy_from_slice(&(COPY as u64).to_be_bytes());
    into[16..24].copy_from_slice(&sequence.to_be_bytes());
    into[72..78].copy_from_slice(b"sha256");
    // Which copy it was is seen by the UUID.
    into[168] = if second { b's' } else { b'p' };
    let offset = if second { COPY as u64 } else { 0 };
    into[256..264].copy_from_slice(&offset.to_be_bytes());
    let length = text.len().min(into.len() - 4096);
    into[4096..4096 + length].copy_from_slice(&text.as_bytes()[..length]);
    let mut whole = true;
    if choices.rarely() {
        // Any byte of the metadata, under a right checksum.
        for _ in 0..=choices.below(4) {
            let at = 4096 + usize::try_from(choices.number() % 1500).unwrap_or(0);
            into[at] ^= 1 << choices.below(8);
        }
    }
    let sum = openssl::sha::sha256(into);
    into[448..480].copy_from_slice(&sum);
    if choices.rarely() {
        let places =
            [0, 5, 7, 8, 14, 15, 16, 23, 72, 77, 100, 262, 263, 448, 479, 600, 4096, 5000, 9000];
        let at = choices.pick(&places);
        into[at] ^= 1 << choices.below(8);
        whole = false;
    }
    whole
}

/// Loads a header made of these choices, and judges it.
pub fn run(load: Load, data: &[u8]) -> Result<Tally, Finding> {
    let mut choices = Choices::new(data);
    let data_offset = SLOTS + 4096 * (1 + u64::from(choices.byte()));
    let mut disk = Disk { bytes: vec![0; 2 * COPY], size: data_offset + (1 << 20), outside: None };
    let text = metadata(&mut choices, data_offset);
    let first_number = u64::from(choices.byte());
    let (first, second) = disk.bytes.split_at_mut(COPY);
    let mut whole = [copy(&mut choices, first, false, first_number, &text), false];
    let second_number = first_number + choices.below(3) as u64;
    if choices.often() {
        whole[1] = copy(&mut choices, second, true, second_number, &text);
    }
    let cut = choices.rarely();
    if cut {
        disk.size = choices.number() % (data_offset + 4096);
    }
    let mut tally = Tally::default();
    let loaded = load(&mut disk);
    ensure!(disk.outside.is_none(), "{:?} was accessed of {}", disk.outside, disk.size);
    let header = match loaded {
        Ok(header) => header,
        Err(error) => {
            tally.refused += 1;
            ensure!(!matches!(error, LuksError::Io(_)), "reading failed: {error:?}");
            return Ok(tally);
        }
    };
    tally.loaded += 1;
    tally.damaged += u64::from(header.warning().is_some());
    if !cut {
        let expected = match whole {
            [true, true] if second_number > first_number => "s",
            [true, _] => "p",
            [false, true] => "s",
            // A flip that changes nothing that counts, of which there is none.
            [false, false] => return Err(Finding("a wrong checksum was accepted".to_owned())),
        };
        ensure!(header.uuid() == expected, "{:?} is used, not {expected}", header.uuid());
    }
    let segment = header.segment();
    let end = segment.offset.checked_add(segment.length.unwrap_or(0));
    ensure!(end.is_some_and(|end| end <= disk.size), "{segment:?} of {} bytes", disk.size);
    ensure!(segment.offset >= SLOTS, "{segment:?} is in the header");
    ensure!(segment.offset.is_multiple_of(u64::from(segment.sector)), "{segment:?} is not aligned");
    ensure!(header.slots().len() <= 32, "{} slots", header.slots().len());
    // Now and then, since it takes a while.
    if choices.below(32) == 0 {
        let outcome = header.unlock(&mut disk, b"wrong");
        ensure!(disk.outside.is_none(), "{:?} was accessed of {}", disk.outside, disk.size);
        let refused = matches!(outcome, Err(LuksError::WrongKey { .. } | LuksError::NoSlot(_)));
        ensure!(refused, "unlocking: {outcome:?}");
        tally.tried += u64::from(matches!(outcome, Err(LuksError::WrongKey { .. })));
    }
    Ok(tally)
}
