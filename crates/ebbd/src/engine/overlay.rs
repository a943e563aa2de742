//! Opening an overlay: the stores below it, from the lowest one up, then its own.
//!
//! # Invariants
//! - A base is opened read-only, whatever uses it, and is cached: all overlays above it share that copy ([`BaseLayers`]).
//! - Each delta is checked against the layer below it before anything is written to it.
//! - A delta is made only on a store that is known to hold nothing ([`blankness`]). The delta of a
//!   volume that existed is made again only in a file that is one hole of the size of a new one:
//!   its making was cut short.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebb_api::Refusal;
use ebb_block::{BlockStore, nonce};
use ebb_cache::{BaseLayer, BaseLayers, CachedStore, Delta, DeltaError, Layers, Mode};
use ebb_config::{CHAIN_MOST, NO_BASE, Size, StoreUri, VolumeConfig, VolumeOrigin};
use ebb_control::Refused;
use ebb_image::{DeltaHeader, HeaderError, Layout, Parent};
use ebb_io::Io;
use ebb_volume::Volume;

use super::claims::StoreClaim;
use super::flatten::is_flattened;
use super::open::{Opened, on_a_thread};
use super::slot::{Claimed, VolumeSlot};
use super::{Engine, lock};
use crate::blank::{Blankness, blankness};
use crate::stores::{Expected, StoreError, StoreTarget, make_volume, with_cache};

/// The layers below an overlay.
#[derive(Default)]
struct OpenBases {
    /// From the top down.
    layers: Vec<BaseLayer>,
    deltas: Vec<Arc<Delta>>,
    claims: Vec<StoreClaim>,
    /// The topmost as the parent of a delta.
    parent: Parent,
}

/// Volumes that a message names.
const NAMED: usize = 5;

/// Refuses a symbolic link in the place of a snapshot, which may lead to another folder. Blocks.
fn must_be_regular(path: &Path) -> Result<(), StoreError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => Err(StoreError::Chain {
            message: format!("{} is a snapshot by its delta, and no regular file", path.display()),
            remedy: "put the file itself there".to_owned(),
        }),
        // What is missing is told when it is opened.
        _ => Ok(()),
    }
}

/// Refuses so many deltas above each other.
fn must_be_deltas(count: usize) -> Result<(), StoreError> {
    if count <= CHAIN_MOST {
        return Ok(());
    }
    Err(StoreError::Chain {
        message: format!(
            "more than {CHAIN_MOST} deltas, snapshots included, would be above each other"
        ),
        remedy: "delete snapshots, flatten a volume below, or name another base".to_owned(),
    })
}

/// The block map of an overlay is saved at each multiple of this time, so that an idle volume loses at most the blocks of the
/// last seconds when the daemon is killed. All overlays of a worker have theirs at the same moments, in one wake-up.
const SAVE_EACH: Duration = Duration::from_secs(15);

/// Saves the block map of an overlay in the background. Ends when the volume is closed.
pub(super) fn save_map(io: &Io, volume: &Arc<Volume>) {
    let (volume, on) = (Arc::downgrade(volume), io.clone());
    let began = ebb_mem::clock::now();
    let save = async move {
        loop {
            let passed = ebb_mem::clock::now().saturating_duration_since(began).as_nanos();
            let rest = SAVE_EACH.as_nanos() - passed % SAVE_EACH.as_nanos();
            on.sleep(Duration::from_nanos(u64::try_from(rest).unwrap_or(0))).await;
            let Some(volume) = volume.upgrade().filter(|volume| !volume.is_closing()) else {
                break;
            };
            let saving = Box::pin(volume.layers().save_map(&on));
            // It fails if the volume is being closed, which flushes it.
            let _ = volume.with_layers(&on, saving).await;
        }
    };
    io.spawn(save).detach();
}

/// Counts in the background what the delta of a volume holds, for statistics: it reads the parts of the block map that were
/// written once, 8 KiB for each 126 MiB of the volume. Ends when the volume is closed.
pub(super) fn count_own(io: &Io, volume: &Arc<Volume>) {
    let (volume, on) = (Arc::downgrade(volume), io.clone());
    let count = async move {
        while let Some(volume) = volume.upgrade() {
            let counting = Box::pin(volume.layers().count_own(&on));
            match volume.with_layers(&on, counting).await.flatten() {
                Ok(false) => {}
                Ok(true) => break,
                Err(error) => {
                    let why = error.full_text();
                    tracing::debug!(
                        volume = &**volume.name(),
                        "its own bytes are not counted: {why}"
                    );
                    break;
                }
            }
            drop(volume);
            on.yield_iteration().await;
        }
    };
    io.spawn(count).detach();
}

/// Returns true if a store is a file with the size of a new delta for a volume of `size` bytes.
fn has_size_of_new(store: &CachedStore, size: u64) -> bool {
    let is_exact = |layout: Layout| layout.store_size() == store.size();
    store.store().is_regular_file() && Layout::new(size).is_ok_and(is_exact)
}

/// Checks, after the `error` of reading its header, whether the delta of a volume of `size` bytes
/// may be made on a store.
async fn place_for_new(
    io: &Io,
    store: &CachedStore,
    (config, size): (&VolumeConfig, u64),
    error: DeltaError,
) -> Result<Blankness, StoreError> {
    let has_none = matches!(error, DeltaError::Header { source: HeaderError::NotADelta, .. });
    let may_be_made = config.create || has_size_of_new(store, size) && !config.read_only;
    if !has_none || !may_be_made {
        return Err(error.into());
    }
    match Box::pin(blankness(io, store)).await.map_err(DeltaError::from)? {
        // Without `create` its making was cut short before the header was written.
        Blankness::Zeroes => Ok(Blankness::Zeroes),
        _ if !config.create => Err(error.into()),
        Blankness::Blank => Ok(Blankness::Blank),
        Blankness::Used => Err(StoreError::NotEmpty { place: store.place() }),
    }
}

/// The snapshot that `parent` names, in the folder of the volume's file at `path`.
pub(crate) fn snapshot_beside(path: &Path, parent: &Parent) -> Option<PathBuf> {
    // Only a delta has an identity; only the file's name counts, so that no header leads elsewhere.
    let file = Path::new(&parent.place).file_name().filter(|_| parent.delta != [0; 16])?;
    (parent.shown_place() == parent.place).then(|| path.with_file_name(file))
}

/// The volumes below an overlay, from the top down, among those that `volume` knows.
///
/// # Errors
/// [`StoreError::Chain`]: one is not known, or cannot be a base.
pub(crate) fn chain_of<'a>(
    name: &str,
    volume: impl Fn(&str) -> Option<&'a VolumeConfig>,
    origin: impl Fn(&str) -> Option<VolumeOrigin>,
) -> Result<Vec<(String, &'a VolumeConfig)>, StoreError> {
    let names = ebb_config::base_chain(name, &volume, origin);
    let names = names.map_err(|bad| {
        let (message, remedy) = (bad.message, bad.remedy);
        StoreError::Chain { message, remedy }
    })?;
    let of = |base: String| match volume(&base) {
        Some(config) => Ok((base, config)),
        None => Err(StoreError::Chain {
            message: format!("its base `{base}` is not configured"),
            remedy: "add that volume, with `read_only = true`".to_owned(),
        }),
    };
    names.into_iter().map(of).collect()
}

/// Names for a message, the first few of many.
fn some_of(names: &[String]) -> String {
    let shown = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Whether two definitions of an overlay differ at most in what is made if it has no delta yet.
pub(super) fn is_same_delta(old: &VolumeConfig, new: &VolumeConfig) -> bool {
    let same = VolumeConfig { size: old.size, create: old.create, ..new.clone() };
    old.base.is_some() && same == *old
}

/// Says that the size in the definition of a served overlay is not its delta's, which counts.
pub(super) fn size_of_delta_note(volume: &Volume, config: &VolumeConfig) -> Option<String> {
    let (name, has) = (volume.name(), volume.size());
    let size = config.size.filter(|size| config.base.is_some() && size.bytes() != has)?;
    Some(format!(
        "volume {name} has {has} bytes, which counts, and `size` says {size}: to resize it, use \
         `ebbd volume resize {name} {size}`"
    ))
}

impl Engine {
    /// The volumes below an overlay, from the top down.
    pub(super) fn bases_of(
        &self,
        name: &str,
        config: &VolumeConfig,
    ) -> Result<Vec<(String, VolumeConfig)>, StoreError> {
        if config.base.as_deref() == Some(NO_BASE) {
            return Ok(Vec::new());
        }
        // Those of the chain alone: there may be thousands of other volumes.
        let mut wanted = BTreeMap::from([(name.to_owned(), config.clone())]);
        let mut next = config.base.clone();
        while let Some(base) = next.filter(|base| !wanted.contains_key(base)) {
            let slot = lock(&self.slots).get(&base).cloned();
            let Some(config) = slot.and_then(|slot| slot.wanted()) else { break };
            next = config.base.clone();
            wanted.insert(base, config);
        }
        let origin = |name: &str| lock(&self.definitions).origin(name).cloned();
        let chain = chain_of(name, |name| wanted.get(name), origin)?;
        Ok(chain.into_iter().map(|(base, config)| (base, config.clone())).collect())
    }

    /// Opens what is below an overlay called `name`.
    async fn open_bases(
        &self,
        io: &Io,
        name: &str,
        config: &VolumeConfig,
    ) -> Result<OpenBases, StoreError> {
        let mut bases = OpenBases::default();
        for (base, config) in self.bases_of(name, config)?.into_iter().rev() {
            let opened = Box::pin(self.open_base(io, name, (&base, &config), &mut bases)).await;
            opened.map_err(|error| match error {
                StoreError::SameFile { .. } => error,
                error => StoreError::Base { base, source: Box::new(error) },
            })?;
        }
        Ok(bases)
    }

    async fn open_base(
        &self,
        io: &Io,
        name: &str,
        (base, config): (&str, &VolumeConfig),
        bases: &mut OpenBases,
    ) -> Result<(), StoreError> {
        let config = VolumeConfig { create: false, size: None, ..config.clone() };
        // Boxed, as elsewhere here: these futures are large, and the stacks of workers small.
        let (layer, claim) = Box::pin(self.open_layer(io, name, (base, &config))).await?;
        bases.claims.extend(claim);
        if config.base.is_none() {
            bases.parent = layer.as_parent(io).await.map_err(DeltaError::from)?;
            bases.layers.insert(0, layer);
            return Ok(());
        }
        let delta = layer.delta(io).await?;
        if delta.is_detached() {
            // It was flattened: nothing is below it, whatever the configuration says.
            bases.layers.clear();
            bases.deltas.clear();
            bases.parent = Parent::default();
        } else {
            Box::pin(self.open_snapshots(io, name, &config, &delta, bases)).await?;
        }
        bases.parent = layer.check_parent(&delta, &bases.parent)?;
        bases.deltas.insert(0, delta);
        bases.layers.insert(0, layer);
        Ok(())
    }

    async fn open_layer(
        &self,
        io: &Io,
        name: &str,
        (base, config): (&str, &VolumeConfig),
    ) -> Result<(BaseLayer, Option<StoreClaim>), StoreError> {
        // A store that is kept under this name is the overlay's own.
        let opened = self.open_unkept(io, name, config, Expected::Any).await?;
        let Opened { store, claim, .. } = opened;
        claim.iter().for_each(StoreClaim::note_layer);
        let (list, title) = (self.bases.clone(), format!("base {base}"));
        let add = move || Ok(BaseLayers::add(&list, &title, store, Mode::Writethrough)?);
        Ok((on_a_thread(add).await?, claim))
    }

    /// Opens the snapshots between a delta and the base of its volume, if there are any: files in the delta's folder.
    async fn open_snapshots(
        &self,
        io: &Io,
        name: &str,
        config: &VolumeConfig,
        delta: &Delta,
        bases: &mut OpenBases,
    ) -> Result<(), StoreError> {
        let mut found: Vec<(BaseLayer, Arc<Delta>)> = Vec::new();
        loop {
            let parent = match found.last() {
                Some((_, delta)) => &delta.header().parent,
                None => &delta.header().parent,
            };
            let StoreUri::File(path) = &config.store else { break };
            // The base is none, also if it was opened for writing since.
            let is_base = parent.is(&bases.parent) || parent.delta == bases.parent.delta;
            let own = snapshot_beside(path, parent).filter(|_| !is_base);
            let Some(path) = own else { break };
            // With the delta above.
            must_be_deltas(found.len() + 2)?;
            let look = path.clone();
            on_a_thread(move || must_be_regular(&look)).await?;
            let store = StoreUri::File(path);
            let own = VolumeConfig {
                store,
                read_only: true,
                create: false,
                size: None,
                ..config.clone()
            };
            let title = own.store.to_string();
            let (layer, claim) = Box::pin(self.open_layer(io, name, (&title, &own))).await?;
            bases.claims.extend(claim);
            let delta = layer.delta(io).await?;
            found.push((layer, delta));
        }
        if found.last().is_some_and(|(_, delta)| delta.is_detached()) {
            // Nothing is below it, whatever the configuration says.
            bases.layers.clear();
            bases.deltas.clear();
            bases.parent = Parent::default();
        }
        must_be_deltas(1 + found.len() + bases.deltas.len())?;
        for (layer, delta) in found.into_iter().rev() {
            bases.parent = layer.check_parent(&delta, &bases.parent)?;
            bases.deltas.insert(0, delta);
            bases.layers.insert(0, layer);
        }
        Ok(())
    }

    /// Opens an overlay, and makes its delta if it is new.
    pub(super) async fn open_overlay(
        &self,
        io: &Io,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
    ) -> Result<Claimed, StoreError> {
        self.must_not_be_mixed(name, config)?;
        let mut bases = Box::pin(self.open_bases(io, name, config)).await?;
        let size = config.size.map_or(bases.parent.size, Size::bytes);
        let own_size = if config.create {
            let layout = Layout::new(size).map_err(DeltaError::from)?;
            Some(Size::new(layout.store_size()))
        } else {
            None
        };
        let is_new = expected != Expected::Existing;
        let own = VolumeConfig { size: own_size, ..config.clone() };
        let Opened { store, claim, device, .. } =
            Box::pin(self.open_store(io, name, &own, expected)).await?;
        let top = with_cache(name, config, store, &self.cache)?;
        // The delta that a volume had is not made again.
        let config = &match is_new {
            true => config.clone(),
            false => VolumeConfig { create: false, ..config.clone() },
        };
        let delta = self.open_delta(io, &top, (name, config, size), &mut bases);
        let delta = Box::pin(delta).await?;
        let OpenBases { layers, deltas, claims, .. } = bases;
        let deltas = std::iter::once(Arc::new(delta)).chain(deltas).collect();
        let layers = Layers::overlay(name, top, layers, deltas, config.read_only)?;
        let volume = make_volume(name, config, layers, &device.text(), &self.cache);
        self.start_writeback(config, device, &volume).await?;
        count_own(io, &volume);
        if !config.read_only {
            save_map(io, &volume);
        }
        Ok(Claimed { volume, claim, base_claims: claims, format: None, memory: None })
    }

    async fn open_delta(
        &self,
        io: &Io,
        store: &CachedStore,
        (name, config, size): (&str, &VolumeConfig, u64),
        bases: &mut OpenBases,
    ) -> Result<Delta, StoreError> {
        let place = || store.place();
        let delta = match Delta::open(io, store).await {
            Err(error) => {
                let found = place_for_new(io, store, (config, size), error).await?;
                must_be_deltas(1 + bases.deltas.len())?;
                if found == Blankness::Blank {
                    // A crash after this leaves a blank store.
                    Delta::clear(io, store, size).await?;
                }
                let id = (u128::from(nonce()) << 64 | u128::from(nonce())).to_le_bytes();
                let parent = bases.parent.clone();
                let created = Delta::create(io, store, size, parent.clone(), id).await?;
                tracing::info!(
                    volume = name,
                    bytes = size,
                    "made a new delta above {}: {}",
                    parent.place,
                    place()
                );
                created
            }
            Ok(delta) => delta,
        };
        if delta.is_detached() {
            // It was flattened: it needs no base, whatever the configuration says.
            *bases = OpenBases::default();
        } else {
            Box::pin(self.open_snapshots(io, name, config, &delta, bases)).await?;
            delta.check_parent(store, &bases.parent)?;
            if delta.header().parent.is_mixed() {
                tracing::warn!(
                    volume = name,
                    "a commit into its base {} has not ended: the volume reads as before, and its base alone is a mix of old \
                     and new data; repeat `ebbd volume commit {name}`",
                    bases.parent.place
                );
            }
        }
        let found = delta.header().layout.size();
        if config.size.is_some() && found != size {
            // It was resized, and the daemon ended before it noted the size, or without a state directory to note it in.
            tracing::warn!(
                volume = name,
                "its delta {} has a volume of {found} bytes, which counts, and `size` says {size}: correct or remove `size`",
                place()
            );
        }
        if !config.read_only {
            delta.begin_writing(io, store).await.map_err(DeltaError::from)?;
        }
        Ok(delta)
    }

    /// Looks whether a served volume can be opened above the base of `new`, which leads to the same
    /// store, before its clients lose it.
    ///
    /// # Errors
    /// As opening it, as far as its base is concerned.
    pub(super) async fn must_fit_base(
        &self,
        io: &Io,
        volume: &Arc<Volume>,
        (old, new): (&VolumeConfig, &VolumeConfig),
    ) -> Result<(), StoreError> {
        if new.base.is_none() || new.base == old.base {
            return Ok(());
        }
        let bases = match Box::pin(self.open_bases(io, volume.name(), new)).await {
            // Opening it waits for that.
            Err(StoreError::SameFile { other, file, .. })
                if self.will_be_released(&other, &file) =>
            {
                return Ok(());
            }
            opened => opened?,
        };
        let (top, size) = (volume.layers().top(), new.size.map_or(bases.parent.size, Size::bytes));
        let mut headers: Vec<_> =
            volume.layers().deltas().into_iter().map(|delta| delta.header).collect();
        if headers.is_empty() {
            match Delta::open(io, &top).await {
                Ok(delta) => headers.push(delta.header()),
                Err(error) => {
                    return place_for_new(io, &top, (new, size), error).await.map(drop);
                }
            }
        }
        for DeltaHeader { parent, .. } in headers {
            if parent == Parent::default() || parent.is(&bases.parent) {
                break;
            }
            let is_base = parent.delta == bases.parent.delta;
            let below = match &new.store {
                StoreUri::File(path) if !is_base => snapshot_beside(path, &parent),
                _ => None,
            };
            // A snapshot, whose errors are reported when it is opened.
            if let Some(path) = below
                && on_a_thread(move || Ok(path.exists())).await?
            {
                continue;
            }
            return Err(DeltaError::other_base(top.place(), &parent, &bases.parent).into());
        }
        Ok(())
    }

    /// Refuses an overlay above a base into which another one is being committed: it would read a mix of old and new data.
    fn must_not_be_mixed(&self, name: &str, config: &VolumeConfig) -> Result<(), StoreError> {
        let below = self.bases_of(name, config)?;
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let is_mixing = |slot: &&Arc<VolumeSlot>| {
            let Some((volume, config)) = slot.served().filter(|_| slot.name() != name) else {
                return false;
            };
            let shares = below.iter().any(|(base, _)| config.base.as_deref() == Some(base));
            shares && volume.layers().deltas().iter().any(|delta| delta.header.parent.is_mixed())
        };
        let Some(other) = slots.iter().find(is_mixing) else { return Ok(()) };
        let other = other.name();
        Err(StoreError::Chain {
            message: format!(
                "a commit of volume `{other}` into the same base has not ended, so that the base is a \
                 mix of old and new data"
            ),
            remedy: format!("repeat `ebbd volume commit {other}`"),
        })
    }

    /// A volume that is on a store, or on the file that this leads to, and has none of these names.
    pub(super) fn other_volume_on(
        &self,
        names: &[&str],
        store: &StoreUri,
        file: Option<&StoreTarget>,
    ) -> Option<String> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let is_on_it = |slot: &&Arc<VolumeSlot>| {
            let open = slot.open_file();
            (open.is_some() && open.as_ref() == file)
                || slot.wanted().is_some_and(|wanted| wanted.store == *store)
        };
        let mut others = slots.iter().filter(|slot| !names.contains(&slot.name()));
        others.find(is_on_it).map(|slot| slot.name().to_owned())
    }

    /// Refuses another size for the base of overlays, which are only opened above a base of the
    /// same size.
    pub(super) fn must_keep_size(&self, name: &str, size: u64) -> Result<(), Refused> {
        let slots = lock(&self.slots);
        let above = slots.iter().filter(|(_, slot)| {
            slot.wanted().is_some_and(|config| config.base.as_deref() == Some(name))
                && !slot.served().is_some_and(|(volume, _)| is_flattened(&volume))
        });
        let above: Vec<_> = above.map(|(name, _)| format!("`{name}`")).collect();
        if above.is_empty() {
            return Ok(());
        }
        let message = format!(
            "volume `{name}` is the base of {}, and must keep its size of {size} bytes",
            some_of(&above)
        );
        let remedy = format!(
            "if its store has another size, give it {size} bytes again; to resize it, first remove the overlays \
             (`ebbd volume remove`), or flatten them (`ebbd volume flatten`)"
        );
        Err(Refused::new(Refusal::Conflict, "in_use", message, remedy))
    }

    /// Refuses to take a volume away from the overlays above it.
    pub(super) fn must_be_no_base(&self, name: &str, what: &str) -> Result<(), Refused> {
        let slots = lock(&self.slots);
        let above = slots.iter().filter(|(_, slot)| {
            slot.wanted().is_some_and(|config| config.base.as_deref() == Some(name))
        });
        let is_writable = |slot: &VolumeSlot| slot.wanted().is_some_and(|config| !config.read_only);
        let above: Vec<_> =
            above.map(|(name, slot)| (format!("`{name}`"), is_writable(slot))).collect();
        let can_flatten = above.iter().any(|(_, is_writable)| *is_writable);
        let above: Vec<_> = above.into_iter().map(|(name, _)| name).collect();
        if above.is_empty() {
            return Ok(());
        }
        let message =
            format!("volume `{name}` is the base of {}, and cannot be {what}", some_of(&above));
        let remedy = match can_flatten {
            true => {
                "remove them first (`ebbd volume remove`), or flatten those that are written to (`ebbd volume flatten`) and \
                 set `base = \"none\"` where the configuration file defines them"
            }
            false => "remove them first (`ebbd volume remove`)",
        };
        Err(Refused::new(Refusal::Conflict, "in_use", message, remedy))
    }
}
