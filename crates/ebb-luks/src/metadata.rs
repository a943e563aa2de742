//! The metadata: JSON behind the binary header. What ebbd needs of it is checked and taken out; the rest is kept as it
//! is and written again with a change.

use std::ops::Range;

use base64ct::{Base64, Encoding};
use serde_json::{Map, Value, json};

use crate::cipher::{KEY_BYTES, SHORT_KEY_BYTES};
use crate::error::{LuksError, Unusable};
use crate::kdf::{Hash, Kdf};

/// The most iterations of the digest, which is computed for each slot that is tried: two seconds, and more than `cryptsetup`
/// makes.
const DIGEST_ITERATIONS_MAX: u32 = 1 << 22;
/// The most key slots, by the format.
pub(crate) const SLOTS_MAX: u32 = 32;
/// The cipher of data and key slots.
pub(crate) const CIPHER: &str = "aes-xts-plain64";
/// The most stripes: all programs make 4,000.
const STRIPES_MAX: u64 = 8192;
/// The longest salt and digest, bytes.
const FIELD_MAX: usize = 1024;

/// Where the data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataSegment {
    /// Its first byte in the store.
    pub offset: u64,
    /// Its bytes; `None`: up to the end of the store.
    pub length: Option<u64>,
    /// Bytes of a sector.
    pub sector: u32,
    /// The number of its first sector, in units of 512 bytes.
    pub first: u64,
}

/// A key slot that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Usable {
    pub(crate) area: Range<u64>,
    pub(crate) kdf: Kdf,
    pub(crate) hash: Hash,
    pub(crate) stripes: usize,
    /// Bytes of the key in the slot, and of the key that encrypts the slot.
    pub(crate) key_bytes: usize,
    pub(crate) area_key_bytes: usize,
}

/// A key slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySlot {
    /// Its number.
    pub number: u32,
    /// What derives its key, as the header names it.
    pub kdf: String,
    /// Not tried, unless it is asked for.
    pub ignored: bool,
    pub(crate) area: Option<Range<u64>>,
    pub(crate) usable: Result<Usable, Unusable>,
}

impl KeySlot {
    /// Whether ebbd can open it with the right key.
    pub fn is_usable(&self) -> bool {
        self.usable.is_ok()
    }

    /// Returns why ebbd cannot open it, if it cannot.
    pub fn unusable(&self) -> Option<Unusable> {
        self.usable.as_ref().err().copied()
    }
}

/// What a key is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Digest {
    pub(crate) name: String,
    pub(crate) kdf: Kdf,
    pub(crate) digest: Vec<u8>,
}

/// Checked metadata.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Metadata {
    json: Map<String, Value>,
    pub(crate) segment: DataSegment,
    pub(crate) slots: Vec<KeySlot>,
    pub(crate) digest: Digest,
    /// The area of key slots.
    pub(crate) keyslots: Range<u64>,
}

type Object = Map<String, Value>;

fn object<'a>(value: Option<&'a Value>, what: &'static str) -> Result<&'a Object, LuksError> {
    value.and_then(Value::as_object).ok_or(LuksError::Metadata(what))
}

/// A number of 64 bits, which the format writes as a string.
fn long(object: &Object, key: &str) -> Option<u64> {
    let text = object.get(key)?.as_str()?;
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

fn short(object: &Object, key: &str) -> Option<u32> {
    u32::try_from(object.get(key)?.as_u64()?).ok()
}

fn text<'a>(object: &'a Object, key: &str) -> Option<&'a str> {
    object.get(key)?.as_str()
}

fn bytes(object: &Object, key: &str) -> Option<Vec<u8>> {
    let text = text(object, key)?;
    if text.len() > 2 * FIELD_MAX {
        return None;
    }
    Base64::decode_vec(text).ok().filter(|bytes| !bytes.is_empty() && bytes.len() <= FIELD_MAX)
}

fn names(value: Option<&Value>, name: &str) -> bool {
    value.and_then(Value::as_array).is_some_and(|list| list.iter().any(|item| item == name))
}

impl Metadata {
    /// Reads the metadata of a header whose two copies take `size` bytes each.
    pub(crate) fn parse(area: &[u8], size: u64) -> Result<Metadata, LuksError> {
        let end = area.iter().position(|byte| *byte == 0);
        let text = end.and_then(|end| area.get(..end));
        let text = text.ok_or(LuksError::Metadata("its metadata do not end"))?;
        let json = match serde_json::from_slice(text) {
            Ok(Value::Object(json)) => json,
            _ => return Err(LuksError::Metadata("its metadata are no JSON object")),
        };
        let keyslots = keyslots_area(&json, size)?;
        let segment = segment(&json, keyslots.end)?;
        let digest = digest(&json)?;
        let slots = slots(&json, &keyslots, &digest.name)?;
        Ok(Metadata { json, segment, slots, digest, keyslots })
    }

    /// Those of a new volume without key slots.
    pub(crate) fn new(
        size: u64,
        segment: &DataSegment,
        digest: &Digest,
    ) -> Result<Metadata, LuksError> {
        let Kdf::Pbkdf2 { iterations, salt, .. } = &digest.kdf else {
            return Err(LuksError::Metadata("a digest of another kind"));
        };
        let keyslots = segment.offset.saturating_sub(2 * size);
        let json = json!({
            "keyslots": {},
            "tokens": {},
            "segments": { "0": {
                "type": "crypt", "offset": segment.offset.to_string(), "size": "dynamic",
                "iv_tweak": segment.first.to_string(), "encryption": CIPHER, "sector_size": segment.sector,
            } },
            "digests": { "0": {
                "type": "pbkdf2", "keyslots": [], "segments": ["0"], "hash": "sha256", "iterations": iterations,
                "salt": Base64::encode_string(salt), "digest": Base64::encode_string(&digest.digest),
            } },
            "config": {
                "json_size": (size - crate::binary::BINARY_BYTES as u64).to_string(),
                "keyslots_size": keyslots.to_string(),
            },
        });
        Metadata::again(&json, size)
    }

    /// Checks what was made.
    fn again(json: &Value, size: u64) -> Result<Metadata, LuksError> {
        Metadata::parse(&to_area(json, size)?, size)
    }

    /// Their bytes, filled up with zeroes.
    pub(crate) fn to_area(&self, size: u64) -> Result<Vec<u8>, LuksError> {
        to_area(&Value::Object(self.json.clone()), size)
    }

    /// With another key slot.
    pub(crate) fn with_slot(
        &self,
        number: u32,
        slot: &Usable,
        size: u64,
    ) -> Result<Metadata, LuksError> {
        let Kdf::Argon2 { time, memory, cpus, salt, .. } = &slot.kdf else {
            return Err(LuksError::Metadata("a new slot of another kind"));
        };
        let made = json!({
            "type": "luks2", "key_size": slot.key_bytes,
            "af": { "type": "luks1", "stripes": slot.stripes, "hash": "sha256" },
            "area": {
                "type": "raw", "offset": slot.area.start.to_string(),
                "size": (slot.area.end - slot.area.start).to_string(), "encryption": CIPHER,
                "key_size": slot.area_key_bytes,
            },
            "kdf": {
                "type": "argon2id", "time": time, "memory": memory, "cpus": cpus,
                "salt": Base64::encode_string(salt),
            },
        });
        let mut json = self.json.clone();
        let name = number.to_string();
        if let Some(slots) = json.get_mut("keyslots").and_then(Value::as_object_mut) {
            slots.insert(name.clone(), made);
        }
        let list = digest_slots(&mut json, &self.digest.name);
        if let Some(list) = list.filter(|list| !list.iter().any(|item| item == name.as_str())) {
            list.push(Value::String(name));
        }
        Metadata::again(&Value::Object(json), size)
    }

    /// With a key slot that no passphrase is tried with, unless it is named (priority 0).
    pub(crate) fn with_ignored_slot(&self, number: u32, size: u64) -> Result<Metadata, LuksError> {
        let mut json = self.json.clone();
        let slots = json.get_mut("keyslots").and_then(Value::as_object_mut);
        let slot = slots.and_then(|slots| slots.get_mut(&number.to_string()));
        if let Some(slot) = slot.and_then(Value::as_object_mut) {
            slot.insert("priority".to_owned(), Value::from(0));
        }
        Metadata::again(&Value::Object(json), size)
    }

    /// Without a key slot, in all lists.
    pub(crate) fn without_slot(&self, number: u32, size: u64) -> Result<Metadata, LuksError> {
        let (mut json, name) = (self.json.clone(), number.to_string());
        if let Some(slots) = json.get_mut("keyslots").and_then(Value::as_object_mut) {
            slots.remove(&name);
        }
        for section in ["digests", "tokens"] {
            let entries = json.get_mut(section).and_then(Value::as_object_mut);
            for (_, entry) in entries.into_iter().flatten() {
                if let Some(list) = entry.get_mut("keyslots").and_then(Value::as_array_mut) {
                    list.retain(|item| item != name.as_str());
                }
            }
        }
        Metadata::again(&Value::Object(json), size)
    }
}

fn digest_slots<'a>(json: &'a mut Object, digest: &str) -> Option<&'a mut Vec<Value>> {
    json.get_mut("digests")?.get_mut(digest)?.get_mut("keyslots")?.as_array_mut()
}

fn to_area(json: &Value, size: u64) -> Result<Vec<u8>, LuksError> {
    let length = usize::try_from(size).unwrap_or(0).saturating_sub(crate::binary::BINARY_BYTES);
    let mut area = serde_json::to_vec(json).map_err(|_| LuksError::Library("serde_json"))?;
    // The text ends with a zero.
    if area.len() >= length {
        return Err(LuksError::Full);
    }
    area.resize(length, 0);
    Ok(area)
}

fn keyslots_area(json: &Object, size: u64) -> Result<Range<u64>, LuksError> {
    let config = object(json.get("config"), "it has no `config`")?;
    if let Some(requirements) = config.get("requirements") {
        let mandatory = requirements.get("mandatory");
        let none = mandatory.is_none_or(|list| list.as_array().is_some_and(Vec::is_empty));
        if !none {
            return Err(LuksError::Unsupported {
                what: "requirements that ebbd does not know, such as a reencryption that is not complete",
                remedy: "complete it with `cryptsetup reencrypt`",
            });
        }
    }
    if long(config, "json_size") != Some(size - crate::binary::BINARY_BYTES as u64) {
        return Err(LuksError::Metadata("its metadata have a wrong size"));
    }
    let length = long(config, "keyslots_size");
    let length = length.ok_or(LuksError::Metadata("its key slots have no size"))?;
    // By the format at most 128 MiB.
    if length > 128 << 20 {
        return Err(LuksError::Metadata("the area of its key slots is too large"));
    }
    Ok(2 * size..2 * size + length)
}

fn segment(json: &Object, keyslots_end: u64) -> Result<DataSegment, LuksError> {
    let unsupported = |what, remedy| Err(LuksError::Unsupported { what, remedy });
    let wrong = LuksError::Metadata;
    let segments = object(json.get("segments"), "it has no `segments`")?;
    let (Some(found), 1) = (segments.get("0"), segments.len()) else {
        return unsupported(
            "several segments, or none",
            "complete a reencryption with `cryptsetup reencrypt`",
        );
    };
    let found = object(Some(found), "its segment is no object")?;
    let recreate = "make a new volume with `create`, and copy the data";
    if text(found, "type") != Some("crypt") {
        return unsupported("a segment that is not encrypted", recreate);
    }
    if found.contains_key("integrity") {
        return unsupported("integrity protection, which needs dm-integrity", recreate);
    }
    if text(found, "encryption") != Some(CIPHER) {
        return unsupported("another cipher than aes-xts-plain64", recreate);
    }
    let flags = found.get("flags").and_then(Value::as_array);
    if flags.is_some_and(|flags| !flags.is_empty()) {
        return unsupported("a segment with flags", recreate);
    }
    let sector = short(found, "sector_size").unwrap_or(0);
    if ![512, 1024, 2048, 4096].contains(&sector) {
        return Err(wrong("its sectors have a wrong size"));
    }
    let offset = long(found, "offset").ok_or(wrong("its segment has no offset"))?;
    let aligned = |bytes: u64| bytes.is_multiple_of(u64::from(sector));
    if offset == 0 {
        return Err(LuksError::DETACHED);
    }
    if !aligned(offset) || offset < keyslots_end || offset > i64::MAX.unsigned_abs() / 2 {
        return Err(wrong("its segment is in a wrong place"));
    }
    let length = match text(found, "size") {
        Some("dynamic") => None,
        _ => Some(long(found, "size").ok_or(wrong("its segment has no size"))?),
    };
    if length.is_some_and(|length| !aligned(length) || length > i64::MAX.unsigned_abs() / 2) {
        return Err(wrong("its segment has a wrong size"));
    }
    let first = long(found, "iv_tweak").ok_or(wrong("its segment has no `iv_tweak`"))?;
    Ok(DataSegment { offset, length, sector, first })
}

fn digest(json: &Object) -> Result<Digest, LuksError> {
    let digests = object(json.get("digests"), "it has no `digests`")?;
    let found = digests.iter().find(|(_, digest)| names(digest.get("segments"), "0"));
    let (name, found) = found.ok_or(LuksError::Metadata("no digest is that of its segment"))?;
    let found = object(Some(found), "its digest is no object")?;
    let unknown = LuksError::Unsupported {
        what: "an unknown digest",
        remedy: "make a new volume with `create`, and copy the data",
    };
    let (Some("pbkdf2"), Some(hash)) =
        (text(found, "type"), text(found, "hash").and_then(Hash::of_name))
    else {
        return Err(unknown);
    };
    let (Some(iterations), Some(salt), Some(digest)) =
        (short(found, "iterations"), bytes(found, "salt"), bytes(found, "digest"))
    else {
        return Err(LuksError::Metadata("its digest is not complete"));
    };
    let kdf = Kdf::Pbkdf2 { hash, iterations, salt };
    if iterations > DIGEST_ITERATIONS_MAX || !kdf.is_bearable() {
        return Err(LuksError::Metadata("its digest has an impossible cost"));
    }
    if !found.get("keyslots").is_some_and(Value::is_array) {
        return Err(LuksError::Metadata("its digest names no key slots"));
    }
    Ok(Digest { name: name.clone(), kdf, digest })
}

fn slots(json: &Object, area: &Range<u64>, digest: &str) -> Result<Vec<KeySlot>, LuksError> {
    let found = object(json.get("keyslots"), "it has no `keyslots`")?;
    let of_digest = json.get("digests").and_then(|all| all.get(digest)?.get("keyslots"));
    let mut slots = Vec::new();
    for (name, slot) in found {
        let number = name.parse::<u32>().ok().filter(|number| *number < SLOTS_MAX);
        let number = number.filter(|number| number.to_string() == *name);
        let number = number.ok_or(LuksError::Metadata("a key slot has an impossible number"))?;
        let slot = object(Some(slot), "a key slot is no object")?;
        let place = place(slot, area)?;
        let kdf = slot.get("kdf").and_then(Value::as_object);
        let name_of_kdf = kdf.and_then(|kdf| text(kdf, "type")).unwrap_or("none");
        let bearable = |slot: Usable| match slot.kdf.is_bearable() {
            true => Ok(slot),
            false => Err(Unusable::Costly),
        };
        let usable = match (names(of_digest, name), key_size(slot)) {
            (false, _) => Err(Unusable::Unbound),
            (true, None) => Err(Unusable::KeySize),
            (true, Some(_)) => {
                usable(slot, place.clone()).ok_or(Unusable::Unknown).and_then(bearable)
            }
        };
        slots.push(KeySlot {
            number,
            // It is shown to operators.
            kdf: name_of_kdf.chars().filter(char::is_ascii_alphanumeric).take(16).collect(),
            ignored: short(slot, "priority") == Some(0),
            area: place,
            usable,
        });
    }
    slots.sort_by_key(|slot| slot.number);
    let mut areas: Vec<_> = slots.iter().filter_map(|slot| slot.area.clone()).collect();
    areas.sort_by_key(|area| area.start);
    if areas.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return Err(LuksError::Metadata("two key slots overlap"));
    }
    Ok(slots)
}

/// The area of a key slot, if it has one.
fn place(slot: &Object, within: &Range<u64>) -> Result<Option<Range<u64>>, LuksError> {
    let Some(area) = slot.get("area") else { return Ok(None) };
    let area = object(Some(area), "the area of a key slot is no object")?;
    let (Some(offset), Some(size)) = (long(area, "offset"), long(area, "size")) else {
        return Err(LuksError::Metadata("the area of a key slot has no offset or size"));
    };
    let inside = offset >= within.start
        && offset.checked_add(size).is_some_and(|end| end <= within.end)
        && size > 0
        && offset.is_multiple_of(512);
    match inside {
        true => Ok(Some(offset..offset + size)),
        false => {
            Err(LuksError::Metadata("the area of a key slot is outside of that for key slots"))
        }
    }
}

/// Bytes of a key that AES-XTS uses.
fn key_size(of: &Object) -> Option<usize> {
    let size = usize::try_from(of.get("key_size")?.as_u64()?).ok()?;
    [KEY_BYTES, SHORT_KEY_BYTES].contains(&size).then_some(size)
}

/// The parts of a key slot, if all are known.
fn usable(slot: &Object, place: Option<Range<u64>>) -> Option<Usable> {
    let object = |key: &str| slot.get(key).and_then(Value::as_object);
    let (area, split, kdf) = (object("area")?, object("af")?, object("kdf")?);
    let stripes = split.get("stripes")?.as_u64().filter(|many| (1..=STRIPES_MAX).contains(many))?;
    let (key_bytes, area_key_bytes) = (key_size(slot)?, key_size(area)?);
    let range = place?;
    let known = text(slot, "type") == Some("luks2")
        && text(area, "type") == Some("raw")
        && text(area, "encryption") == Some(CIPHER)
        && text(split, "type") == Some("luks1")
        && range.end - range.start >= (stripes * key_bytes as u64).next_multiple_of(512);
    let hash = Hash::of_name(text(split, "hash")?)?;
    let salt = bytes(kdf, "salt")?;
    let kdf = match text(kdf, "type")? {
        "pbkdf2" => {
            let hash = Hash::of_name(text(kdf, "hash")?)?;
            Kdf::Pbkdf2 { hash, iterations: short(kdf, "iterations")?, salt }
        }
        name @ ("argon2i" | "argon2id") => Kdf::Argon2 {
            id: name == "argon2id",
            time: short(kdf, "time")?,
            memory: short(kdf, "memory")?,
            cpus: short(kdf, "cpus")?,
            salt,
        },
        _ => return None,
    };
    let stripes = usize::try_from(stripes).ok()?;
    known.then_some(Usable { area: range, kdf, hash, stripes, key_bytes, area_key_bytes })
}
