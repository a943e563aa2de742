//! `ebbd image check`: verifies a delta or a qcow2 image.
//!
//! # Invariants
//! - Nothing is written.
//! - Memory: one map page; of a qcow2 image its tables (`Qcow2Map::check`). At most [`SHOWN_MOST`] findings are printed.

use ebb_advice::{Advised, full_text};
use ebb_block::{BlockStore, Buf};
use ebb_cache::plain_parent;
use ebb_config::StoreUri;
use ebb_image::{
    BLOCK, BLOCKS_PER_PAGE, DeltaHeader, HEADER_BYTES, HEADER_SLOTS, HeaderError, Layout,
    MAP_START, MapCopy, MapSlot, PAGE, Parent, header_in_slot, map_page,
};
use ebb_io::Io;
use ebb_store::{Qcow2Error, Qcow2Fault, Qcow2Store};

use super::error::ImageError;
use super::info::{UNFINISHED_COMMIT, file_of_layer};
use super::map_walk::{LoadedSlots, MapWalk};
use super::open::{OpenImage, must_be_raw, open_image};
use super::output::{ImageOutput, line};

/// Findings that are printed; the others are counted.
const SHOWN_MOST: u64 = 1000;

/// What a check has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImageVerdict {
    Sound,
    /// A part could not be looked at, and nothing else is wrong.
    Unchecked,
    Damaged,
}

/// The findings, which are printed as they are made.
pub(super) struct Findings {
    out: ImageOutput,
    store: String,
    damages: u64,
    unchecked: bool,
}

impl Findings {
    pub(super) fn new(out: ImageOutput, store: String) -> Findings {
        Findings { out, store, damages: 0, unchecked: false }
    }

    fn damage(&mut self, text: &str) -> Result<(), ImageError> {
        self.damages += 1;
        if self.damages > SHOWN_MOST {
            return Ok(());
        }
        line(&mut self.out, &format!("{}: {text}", self.store))
    }

    /// Says what was not looked at.
    fn note(&mut self, text: &str) -> Result<(), ImageError> {
        line(&mut self.out, &format!("{}: not checked: {text}", self.store))
    }

    /// Reports a finding that is not damage and that the operator must correct.
    fn warn(&mut self, text: &str) -> Result<(), ImageError> {
        line(&mut self.out, &format!("{}: warning: {text}", self.store))
    }

    fn end(mut self, looked_at: &str) -> Result<ImageVerdict, ImageError> {
        let (verdict, end) = match (self.damages, self.unchecked) {
            (0, false) => (ImageVerdict::Sound, "no damage found".to_owned()),
            (0, true) => {
                (ImageVerdict::Unchecked, "no damage found in what could be checked".to_owned())
            }
            (count, _) => (ImageVerdict::Damaged, ebb_config::plural(count, "finding")),
        };
        if self.damages > SHOWN_MOST {
            let hidden = self.damages - SHOWN_MOST;
            line(&mut self.out, &format!("{}: {hidden} more are not shown", self.store))?;
        }
        line(&mut self.out, &format!("{}: {end}: {looked_at}", self.store))?;
        self.out.flush().map_err(ImageError::Output)?;
        Ok(verdict)
    }
}

/// Verifies a qcow2 image. Blocks.
///
/// # Errors
/// It cannot be opened or read, or it is one that is not supported.
pub(super) fn check_qcow2(
    path: &std::path::Path,
    mut findings: Findings,
) -> Result<ImageVerdict, ImageError> {
    let (mut said, mut compressed) = (Ok(()), None);
    let checked = Qcow2Store::check(path, &mut |fault| match fault {
        Qcow2Fault::Compressed { .. } => drop(compressed.get_or_insert(fault)),
        fault if said.is_ok() => said = findings.damage(&Advised(fault).to_string()),
        _ => {}
    });
    said?;
    if let Some(fault) = compressed {
        findings.unchecked = true;
        findings.note(&Advised(fault).to_string())?;
    }
    match checked {
        Ok(sum) => findings.end(&format!(
            "{} of tables and {} of data; reference counts are not verified, see `qemu-img check`",
            ebb_config::plural(sum.tables, "cluster"),
            ebb_config::plural(sum.clusters, "cluster"),
        )),
        Err(Qcow2Error::Image { fault, .. }) if fault.is_damage() => {
            findings.damage(&Advised(fault).to_string())?;
            findings.end("nothing else can be verified")
        }
        Err(error) => Err(error.into()),
    }
}

/// Verifies a delta.
///
/// # Errors
/// It cannot be opened or read, or the store holds no delta.
pub(super) async fn check_delta(
    io: &Io,
    uri: &StoreUri,
    base: Option<StoreUri>,
    mut findings: Findings,
) -> Result<ImageVerdict, ImageError> {
    must_be_raw(io, uri, "").await?;
    let image = open_image(io, uri, true).await?;
    let Some(header) = check_header(io, &image, &mut findings).await? else {
        return findings.end("nothing else can be verified without a header");
    };
    let layout = header.layout;
    let (size, expected) = (image.store.size(), layout.store_size());
    if size < expected {
        findings.damage(&format!(
            "at {size}: the file ends, and its header needs {expected} bytes: it was truncated; restore it from a backup"
        ))?;
    }
    let pages = Box::pin(check_map(io, &image, &header, &mut findings)).await?;
    Box::pin(check_base(io, &image, &header.parent, base, &mut findings)).await?;
    if header.parent.is_mixed() {
        findings.warn(UNFINISHED_COMMIT)?;
    }
    findings.end(&format!(
        "the header and {} of the block map, in two slots each",
        ebb_config::plural(u64::from(pages), "page")
    ))
}

async fn read(io: &Io, image: &OpenImage, at: u64, bytes: usize) -> Result<Buf, ImageError> {
    let buf = io.pool().take(bytes).await;
    let (result, buf) = image.store.read(io, buf, at).await;
    result.map(|()| buf).map_err(ImageError::of(image.store.place()))
}

/// Verifies both slots of the header, and returns the one that counts.
async fn check_header(
    io: &Io,
    image: &OpenImage,
    findings: &mut Findings,
) -> Result<Option<DeltaHeader>, ImageError> {
    let nothing = || ImageError::NothingToCheck { place: image.uri.to_string() };
    if image.store.size() < 2 * PAGE {
        return Err(nothing());
    }
    let bytes = read(io, image, HEADER_SLOTS[0], 2 * HEADER_BYTES).await?;
    let halves = [&bytes[..HEADER_BYTES], &bytes[HEADER_BYTES..]];
    let slots = halves.map(header_in_slot);
    for slot in &slots {
        if let Err(source @ HeaderError::Version(_)) = slot {
            let (place, source) = (image.uri.to_string(), source.clone());
            return Err(ebb_cache::DeltaError::Header { place, source }.into());
        }
    }
    let is_delta =
        |slot: &Result<Option<_>, _>| !matches!(slot, Ok(None) | Err(HeaderError::NotADelta));
    if !slots.iter().any(is_delta) && !has_map(io, image).await? {
        return Err(nothing());
    }
    let header = DeltaHeader::decode(halves);
    let remedy = if header.is_ok() { TORN } else { "restore the file from a backup" };
    for (number, slot) in slots.iter().enumerate() {
        let at = HEADER_SLOTS[number];
        match slot {
            Ok(Some(header)) if header.slot() != number => findings.damage(&format!(
                "at {at}: slot {number} of the header has the number {} of the other slot: restore it from a backup",
                header.number
            ))?,
            Ok(_) => {}
            Err(error) => findings.damage(&format!("at {at}: slot {number} of the header: {error}: {remedy}"))?,
        }
    }
    if let [Ok(Some(one)), Ok(Some(other))] = &slots
        && (one.delta, one.layout.room()) != (other.delta, other.layout.room())
    {
        findings.damage(
            "at 0: the slots of the header are of two deltas: restore the file from a backup",
        )?;
    }
    if header.is_err() {
        findings.damage("at 0: no slot of the header is valid: restore the file from a backup")?;
    }
    Ok(header.ok())
}

/// What to do about a slot that is not valid while the other one is.
const TORN: &str = "the other slot counts; after a power failure this is a torn write, and the next opening for writing \
                    replaces it; else check the disk, and restore the file from a backup";

/// Whether the block map begins where that of a delta does: its header is gone.
async fn has_map(io: &Io, image: &OpenImage) -> Result<bool, ImageError> {
    if image.store.size() < MAP_START + 2 * PAGE {
        return Ok(false);
    }
    Ok(map_page::has_map(&read(io, image, MAP_START, 2 * map_page::BYTES).await?))
}

/// Verifies both slots of each map page; returns how many pages were looked at.
async fn check_map(
    io: &Io,
    image: &OpenImage,
    header: &DeltaHeader,
    findings: &mut Findings,
) -> Result<u32, ImageError> {
    let layout = header.layout;
    let mut walk = MapWalk::new(image.store.clone(), layout, header.delta);
    let (mut page, mut count) = (0, 0);
    while page < layout.map_pages() {
        // The rest is cut off, which was found.
        if layout.map_slot(page, 1) + PAGE > image.store.size() {
            break;
        }
        match walk.load(io, page).await? {
            LoadedSlots::Empty(end) => {
                let end = end.min(layout.map_pages()).max(page + 1);
                count += end - page;
                page = end;
            }
            LoadedSlots::Page(_, slots) => {
                check_page(page, slots, layout, findings)?;
                count += 1;
                page += 1;
            }
        }
    }
    Ok(count)
}

fn check_page(
    page: u32,
    slots: [MapSlot; 2],
    layout: Layout,
    findings: &mut Findings,
) -> Result<(), ImageError> {
    let newest = MapSlot::newest(slots);
    let bytes = BLOCKS_PER_PAGE * BLOCK;
    let first = u64::from(page) * bytes;
    let range = format!("{first} to {}", (first + bytes).min(layout.size()));
    for (number, slot) in slots.iter().enumerate() {
        let at = layout.map_slot(page, number);
        match slot {
            MapSlot::Damaged if newest.is_some() => findings.damage(&format!(
                "at {at}: slot {number} of page {page} of the block map (the bytes {range} of the disk) is damaged: {TORN}"
            ))?,
            MapSlot::Damaged if MapCopy::of(slots) == MapCopy::Never => findings.damage(&format!(
                "at {at}: slot {number} of page {page} of the block map is damaged, and no copy is valid: the bytes \
                 {range} of the disk read as the base; after a power failure this is a torn first write, which no \
                 flush has completed; else restore the file from a backup"
            ))?,
            MapSlot::Damaged => findings.damage(&format!(
                "at {at}: slot {number} of page {page} of the block map is damaged, and no copy is valid: the bytes \
                 {range} of the disk cannot be read; restore the file from a backup"
            ))?,
            MapSlot::Empty | MapSlot::Valid(_) => {}
        }
    }
    let at = layout.map_slot(page, newest.unwrap_or(0));
    if let [MapSlot::Valid(one), MapSlot::Valid(other)] = slots
        && one == other
    {
        findings.damage(&format!(
            "at {at}: both slots of page {page} of the block map are its copy {one}: restore the file from a backup"
        ))?;
    }
    Ok(())
}

/// Verifies that the base is the one that the delta was made above.
async fn check_base(
    io: &Io,
    image: &OpenImage,
    parent: &Parent,
    given: Option<StoreUri>,
    findings: &mut Findings,
) -> Result<(), ImageError> {
    if *parent == Parent::default() {
        return match given {
            Some(base) => findings.note(&format!("{base}: nothing is below this delta")),
            None => Ok(()),
        };
    }
    let is_given = given.is_some();
    let base = match given {
        Some(base) => base,
        None => match file_of_layer(&image.uri, parent) {
            Ok(base) => base,
            Err(reason) => {
                let place = parent.shown_place();
                let text = format!("the base {place} ({reason}): give it with `--base STORE`");
                return findings.note(&text);
            }
        },
    };
    let opened = open_image(io, &base, parent.delta == [0; 16]).await;
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) if is_given => return Err(error),
        Err(error) => {
            let error = full_text(&error);
            return findings.note(&format!("the base {base}: {error}"));
        }
    };
    let found = match &opened.delta {
        Some(delta) => delta.as_parent(&opened.store),
        None => {
            let found = plain_parent(io, &opened.store).await;
            found.map_err(ImageError::of(opened.store.place()))?
        }
    };
    if parent.is(&found) {
        return Ok(());
    }
    if is_given && parent.delta != found.delta {
        let (place, base) = (image.uri.to_string(), base.to_string());
        let expected = parent.shown_place();
        return Err(ImageError::NotDirectlyBelow { place, base, expected });
    }
    let what = match () {
        () if parent.size != found.size => {
            format!("it has {} bytes, and the base had {}", found.size, parent.size)
        }
        () if parent.delta != found.delta => "it is another store than the base".to_owned(),
        () if parent.number != found.number => {
            "it was opened for writing since the delta was made".to_owned()
        }
        () => "its content is not that of the base".to_owned(),
    };
    findings.damage(&format!(
        "at 0: the delta was made above {}, and {base} is not that: {what}: restore that base, or give it with \
         `--base STORE`",
        parent.shown_place()
    ))
}
