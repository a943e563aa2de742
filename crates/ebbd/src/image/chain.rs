//! A delta with what is below it, as a disk that is read from its start to its end.
//!
//! # Invariants
//! - No path that a header names is opened: the next delta of a chain is a file in the folder of the one above it, by the
//!   last part of that path, and no symbolic link. It has to be the one that the header describes.
//! - Memory: one map page, and [`EXTENTS`] extents, for each delta.

use std::path::Path;
use std::sync::Arc;

use ebb_block::{BlockStore, Extent};
use ebb_cache::{CachedStore, Delta, plain_parent};
use ebb_config::{CHAIN_MOST, StoreUri};
use ebb_image::Parent;
use ebb_io::Io;

use super::error::ImageError;
use super::map_walk::{MapContent, MapWalk};
use super::open::{OpenImage, open_image};

/// Extents of a store that are asked for at once.
const EXTENTS: usize = 256;

/// A store and the extents of it that are known.
struct ExtentWalk {
    store: Arc<CachedStore>,
    known: Vec<Extent>,
}

impl ExtentWalk {
    fn new(store: Arc<CachedStore>) -> ExtentWalk {
        ExtentWalk { store, known: Vec::new() }
    }

    /// Whether the bytes from `at` on are a hole, and how many are alike, at most `most`.
    async fn run(&mut self, io: &Io, at: u64, most: u64) -> Result<(bool, u64), ImageError> {
        if let Some(run) = find(&self.known, at, most) {
            return Ok(run);
        }
        let known = self.store.extents(io, at, most, EXTENTS).await;
        self.known = known.map_err(ImageError::of(self.store.place()))?;
        Ok(find(&self.known, at, most).unwrap_or((false, most)))
    }
}

fn find(known: &[Extent], at: u64, most: u64) -> Option<(bool, u64)> {
    let index = known.partition_point(|extent| extent.offset + extent.length <= at);
    let extent = known.get(index).filter(|extent| extent.offset <= at)?;
    Some((extent.hole, most.min(extent.offset + extent.length - at)))
}

/// A delta of the chain.
struct DeltaLayer {
    delta: Delta,
    walk: MapWalk,
    data: ExtentWalk,
    /// See [`ebb_image::DeltaHeader`].
    shown: u64,
}

/// What a run of a disk is.
#[derive(Clone, Debug)]
pub(super) enum RunContent {
    /// Bytes of a store, from this offset on.
    Data(Arc<CachedStore>, u64),
    /// It reads as zeroes.
    Zero,
    /// It is below the delta, in what was not opened.
    Below,
    /// Not known: this page of this store's block map is damaged.
    Lost { store: Arc<CachedStore>, page: u32 },
}

/// A part of a disk that is alike.
#[derive(Clone, Debug)]
pub(super) struct DiskRun {
    pub(super) content: RunContent,
    /// Bytes, at least 1.
    pub(super) length: u64,
}

/// A disk that is read: deltas, from the top down, and what is below them.
pub(super) struct ImageChain {
    deltas: Vec<DeltaLayer>,
    base: Option<ExtentWalk>,
    size: u64,
}

impl DeltaLayer {
    fn new(store: Arc<CachedStore>, delta: Delta) -> DeltaLayer {
        let header = delta.header();
        let walk = MapWalk::new(store.clone(), header.layout, header.delta);
        DeltaLayer { delta, walk, data: ExtentWalk::new(store), shown: header.shown }
    }
}

impl ImageChain {
    /// The image alone: what a delta does not hold is [`RunContent::Below`].
    pub(super) fn alone(image: OpenImage) -> ImageChain {
        let size = image.size();
        match image.delta {
            Some(delta) => {
                ImageChain { deltas: vec![DeltaLayer::new(image.store, delta)], base: None, size }
            }
            None => {
                ImageChain { deltas: Vec::new(), base: Some(ExtentWalk::new(image.store)), size }
            }
        }
    }

    /// The image with all that is below it: `given`, and files of its folder.
    ///
    /// # Errors
    /// [`ImageError`]: something is missing, or is not what the deltas were made above, or is not needed.
    pub(super) async fn open(
        io: &Io,
        image: OpenImage,
        mut given: Vec<OpenImage>,
    ) -> Result<ImageChain, ImageError> {
        let top = image.store.place();
        let mut uri = image.uri.clone();
        let mut chain = ImageChain::alone(image);
        while let Some(last) = chain.deltas.last() {
            let parent = last.delta.header().parent;
            if parent == Parent::default() {
                break;
            }
            if parent.delta == [0; 16] {
                if given.is_empty() {
                    let (place, base) = (last.data.store.place(), parent.shown_place());
                    return Err(ImageError::NoBase { place, base });
                }
                let base = given.remove(0);
                let found = plain_parent(io, &base.store).await;
                let found = found.map_err(ImageError::of(base.store.place()))?;
                last.delta.check_parent(&last.data.store, &found)?;
                chain.base = Some(ExtentWalk::new(base.store));
                break;
            }
            if chain.deltas.len() >= CHAIN_MOST {
                return Err(ImageError::TooDeep { most: CHAIN_MOST });
            }
            let is_it = |image: &OpenImage| {
                let found = image.delta.as_ref().map(|delta| delta.as_parent(&image.store));
                found.is_some_and(|found| parent.is(&found))
            };
            let below = match given.iter().position(is_it) {
                Some(index) => given.remove(index),
                None => {
                    let found = file_below(&uri, &parent);
                    let below = found.map_err(|found| ImageError::NoLayer {
                        place: last.data.store.place(),
                        base: parent.shown_place(),
                        found,
                    })?;
                    open_image(io, &below, false).await?
                }
            };
            uri = below.uri.clone();
            let store = below.store;
            let Some(delta) = below.delta else {
                let (place, base) = (last.data.store.place(), parent.shown_place());
                let found = "the file of that name is no delta";
                return Err(ImageError::NoLayer { place, base, found });
            };
            last.delta.check_parent(&last.data.store, &delta.as_parent(&store))?;
            chain.deltas.push(DeltaLayer::new(store, delta));
        }
        match given.first() {
            Some(unused) => Err(ImageError::OtherLayer { place: unused.store.place(), top }),
            None => Ok(chain),
        }
    }

    /// The disk's size in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// All stores.
    pub(super) fn stores(&self) -> Vec<Arc<CachedStore>> {
        let deltas = self.deltas.iter().map(|layer| layer.data.store.clone());
        deltas.chain(self.base.iter().map(|base| base.store.clone())).collect()
    }

    /// What the bytes from `at` on are; `at` is below the size.
    ///
    /// # Errors
    /// Those of the stores.
    pub(super) async fn run(&mut self, io: &Io, at: u64) -> Result<DiskRun, ImageError> {
        let mut most = self.size.saturating_sub(at);
        for layer in &mut self.deltas {
            let layout = layer.walk.layout();
            // A layer that is shorter reads as zeroes beyond its end.
            let Some(rest) = layout.size().checked_sub(at).filter(|rest| *rest > 0) else {
                return Ok(DiskRun { content: RunContent::Zero, length: most });
            };
            most = most.min(rest);
            let (content, length) = layer.walk.run(io, at, most).await?;
            most = most.min(length);
            match content {
                MapContent::Held => {
                    let place = layout.data_start() + at;
                    return layer.data.disk_run(io, place, most).await;
                }
                MapContent::Lost { page } => {
                    let content = RunContent::Lost { store: layer.data.store.clone(), page };
                    return Ok(DiskRun { content, length: most });
                }
                MapContent::Absent => {}
            }
            // Beyond this it reads as zeroes, whatever is below.
            let Some(shown) = layer.shown.checked_sub(at).filter(|shown| *shown > 0) else {
                return Ok(DiskRun { content: RunContent::Zero, length: most });
            };
            most = most.min(shown);
        }
        let Some(base) = &mut self.base else {
            return Ok(DiskRun { content: RunContent::Below, length: most });
        };
        match base.store.size().checked_sub(at).filter(|rest| *rest > 0) {
            Some(rest) => base.disk_run(io, at, most.min(rest)).await,
            None => Ok(DiskRun { content: RunContent::Zero, length: most }),
        }
    }

    /// Counts what the topmost delta holds; nothing if it is no delta.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) async fn own_content(&mut self, io: &Io) -> Result<OwnContent, ImageError> {
        let mut sum = OwnContent::default();
        let Some(layer) = self.deltas.first_mut() else { return Ok(sum) };
        let mut at = 0;
        while at < self.size {
            let (content, length) = layer.walk.run(io, at, self.size - at).await?;
            match content {
                MapContent::Held => sum.held_blocks += length.div_ceil(ebb_image::BLOCK),
                MapContent::Lost { .. } => sum.lost_bytes += length,
                MapContent::Absent => {}
            }
            at += length.max(1);
        }
        Ok(sum)
    }
}

/// What a delta holds itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OwnContent {
    pub(super) held_blocks: u64,
    /// Bytes of the disk whose part of the block map is damaged.
    pub(super) lost_bytes: u64,
}

impl ExtentWalk {
    async fn disk_run(&mut self, io: &Io, at: u64, most: u64) -> Result<DiskRun, ImageError> {
        let (hole, length) = self.run(io, at, most).await?;
        let content = match hole {
            true => RunContent::Zero,
            false => RunContent::Data(self.store.clone(), at),
        };
        Ok(DiskRun { content, length: length.max(1) })
    }
}

/// The file of the layer below, in the folder of the store above it; or why there is none. May block.
pub(super) fn file_below(above: &StoreUri, parent: &Parent) -> Result<StoreUri, &'static str> {
    let (StoreUri::File(path) | StoreUri::Qcow2(path)) = above else {
        return Err("the delta is in no file");
    };
    let name = Path::new(&parent.place).file_name();
    let name = name.filter(|_| parent.shown_place() == parent.place);
    let path = path.with_file_name(name.ok_or("its name is no file name")?);
    match std::fs::symlink_metadata(&path) {
        Ok(found) if found.is_symlink() => Err("it is a symbolic link, which may lead elsewhere"),
        Ok(_) => Ok(StoreUri::File(path)),
        Err(_) => {
            Err("the delta's folder has no file of that name, and no other folder is searched")
        }
    }
}
