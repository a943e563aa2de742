//! Random changes of volumes on a state directory that fails at random steps, compared with what was acknowledged.
//!
//! After each change each served volume that is kept has one file, of its name, and a file of no served volume is one that was
//! told. After a kill or a power cut what was acknowledged is there, what failed is absent or as it was, and no volume is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;

use proptest::prelude::*;

use super::manage::Kept;
use super::*;

const IMAGES: usize = 3;
const MAIN: &str = "control = '/c'\n";

#[derive(Clone, Debug)]
enum Step {
    Add(usize, usize),
    Remove(usize),
    Rename(usize, usize),
    Limit(usize, u64),
    Resize(usize, u64),
    Reload,
    Kill,
    CutPower,
}

fn steps() -> impl Strategy<Value = Step> {
    let name = 0..4_usize;
    prop_oneof![
        4 => (0..IMAGES, name.clone()).prop_map(|(image, name)| Step::Add(image, name)),
        2 => name.clone().prop_map(Step::Remove),
        3 => (name.clone(), name.clone()).prop_map(|(from, to)| Step::Rename(from, to)),
        2 => (name.clone(), 1..9_u64).prop_map(|(name, iops)| Step::Limit(name, iops)),
        2 => (name, 1..4_u64).prop_map(|(name, mib)| Step::Resize(name, mib)),
        2 => Just(Step::Reload),
        1 => Just(Step::Kill),
        1 => Just(Step::CutPower),
    ]
}

/// Steps until some fail, how many fail, and with which error.
type Failing = Option<(u32, u32, ErrorKind)>;

fn faults() -> impl Strategy<Value = Failing> {
    let kinds = [ErrorKind::Other, ErrorKind::StorageFull, ErrorKind::ReadOnlyFilesystem];
    prop::option::of((0..9_u32, 1..4_u32, prop::sample::select(kinds.to_vec())))
}

/// What may be found of an image.
#[derive(Clone, Debug, Default)]
struct Known {
    /// The name of its volume.
    name: Option<String>,
    /// The names that it may have after a power cut, if the last change failed.
    or: BTreeSet<Option<String>>,
    iops: BTreeSet<u64>,
    bytes: BTreeSet<u64>,
}

struct Model {
    kept: Kept,
    images: Vec<Known>,
}

fn name(number: usize) -> String {
    format!("v{number}")
}

impl Model {
    fn image_of(&self, name: &str) -> Option<usize> {
        self.images.iter().position(|known| known.name.as_deref() == Some(name))
    }

    /// Kept volumes that are served, and volumes whose files are told to be a problem.
    fn served(&self) -> (BTreeSet<String>, BTreeSet<String>) {
        let states = self.kept.world.engine.states();
        let (served, told): (Vec<_>, Vec<_>) =
            states.into_iter().partition(|state| state.phase == VolumePhase::Serving);
        let names = |states: Vec<VolumeState>| states.into_iter().map(|state| state.name).collect();
        (names(served), names(told))
    }

    /// The image of a volume in the state directory, by name.
    fn files(&self) -> BTreeMap<String, usize> {
        let config = self.kept.load();
        assert!(config.broken.is_empty(), "{:?}", config.broken);
        let image = |volume: &VolumeConfig| {
            (0..IMAGES).find(|image| volume.store.to_string() == self.kept.path(&image.to_string()))
        };
        let all = config.volumes.iter();
        all.map(|(name, volume)| (name.clone(), image(volume).unwrap())).collect()
    }

    fn change(&mut self, step: &Step) -> Result<(), String> {
        let told = self.served().1;
        let done =
            |outcome: Result<(), ebb_control::Refused>| outcome.map_err(|why| why.to_string());
        match step {
            Step::Add(image, new) => {
                let (config, new) = (self.kept.on_file("v", &image.to_string()), name(*new));
                // A file that was told to be there may name the image.
                if !told.is_empty() || self.images[*image].name.is_some() {
                    return Ok(());
                }
                let free = self.image_of(&new).is_none();
                done(self.kept.add(&new, config, true))?;
                assert!(free);
                // The image may exist, with the size of an earlier volume.
                let bytes = self.kept.world.volume(&new).unwrap().size();
                self.images[*image] = Known {
                    name: Some(new),
                    iops: [0].into(),
                    bytes: [bytes].into(),
                    or: BTreeSet::new(),
                };
            }
            Step::Remove(old) => {
                let image = self.image_of(&name(*old));
                let outcome = self.kept.remove(&name(*old));
                if let Some(image) = image {
                    let known = &mut self.images[image];
                    if outcome.is_err() {
                        known.or.insert(known.name.clone());
                    }
                    // It is removed in any case; its file may be told to be there.
                    known.name = None;
                }
                done(outcome)?;
                // It must not come back.
                let gone = Some(name(*old));
                for known in &mut self.images {
                    known.or.remove(&gone);
                }
            }
            Step::Rename(from, to) => {
                let (from, to) = (name(*from), name(*to));
                let image = self.image_of(&from);
                let outcome = done(self.kept.rename(&from, &to));
                if let Some(image) = image {
                    let known = &mut self.images[image];
                    let served = self.kept.world.volume(&to).is_some() && to != from;
                    let renamed = served && self.kept.world.volume(&from).is_none();
                    assert!(renamed || outcome.is_err());
                    if outcome.is_err() {
                        known.or.extend([Some(from.clone()), Some(to.clone())]);
                    }
                    known.name = Some(if renamed { to } else { from });
                }
                outcome?;
            }
            Step::Limit(of, iops) => {
                let Some(image) = self.image_of(&name(*of)) else { return Ok(()) };
                let outcome = done(self.kept.keep_limit(&name(*of), *iops));
                note(&mut self.images[image].iops, *iops, &outcome);
                outcome?;
            }
            Step::Resize(of, mib) => {
                let Some(image) = self.image_of(&name(*of)) else { return Ok(()) };
                let outcome = done(self.kept.resize(&name(*of), mib << 20));
                note(&mut self.images[image].bytes, mib << 20, &outcome);
                outcome?;
            }
            Step::Reload => match Config::load(&self.kept.args) {
                Ok(config) => self.kept.world.reload(config),
                Err(why) => return Err(why.to_string()),
            },
            Step::Kill | Step::CutPower => {}
        }
        Ok(())
    }

    /// Compares the files with what is served.
    fn check(&self) {
        let (served, told) = self.served();
        let files = self.files();
        let known = self.images.iter().enumerate();
        let expected: BTreeMap<_, _> =
            known.filter_map(|(image, known)| Some((known.name.clone()?, image))).collect();
        assert_eq!(served, expected.keys().cloned().collect(), "served");
        for (name, image) in &expected {
            assert_eq!(files.get(name), Some(image), "{name} of {files:?}");
        }
        let others = files.keys().filter(|name| !expected.contains_key(*name));
        assert!(others.clone().all(|name| told.contains(name)), "{files:?}, served {served:?}");
    }

    /// Compares what is served after a start with what is known, and adopts it.
    fn restarted(&mut self, told: &BTreeSet<String>, after_power_cut: bool) {
        let files = self.files();
        let config = self.kept.load();
        assert_eq!(self.served(), (files.keys().cloned().collect(), BTreeSet::new()));
        for (image, known) in self.images.iter_mut().enumerate() {
            let found: Vec<_> = files.iter().filter(|(_, of)| **of == image).collect();
            assert!(found.len() <= 1, "two files of one image: {files:?}");
            let found = found.first().map(|(name, _)| (*name).clone());
            let may_be = known.or.contains(&found) && after_power_cut;
            let was_told = found.as_ref().is_some_and(|name| told.contains(name));
            assert!(found == known.name || may_be || was_told, "{found:?}, known {known:?}");
            if let Some(name) = &found {
                let volume = &config.volumes[name];
                // The state file has no size: the size of the image is in force.
                let bytes = self.kept.world.volume(name).unwrap().size();
                if known.name.is_some() {
                    let iops = volume.limits.iops.unwrap_or(0);
                    assert!(known.iops.contains(&iops), "{iops}, known {known:?}");
                    assert!(known.bytes.contains(&bytes), "{bytes}, known {known:?}");
                }
                known.iops = [volume.limits.iops.unwrap_or(0)].into();
                known.bytes = [bytes].into();
            }
            (known.name, known.or) = (found, BTreeSet::new());
        }
    }
}

/// Notes that a value was set, or may have been.
fn note(known: &mut BTreeSet<u64>, value: u64, outcome: &Result<(), String>) {
    if outcome.is_ok() {
        known.clear();
    }
    known.insert(value);
}

fn run(all: &[(Step, Failing)]) {
    let kept = Kept::new(MAIN, true);
    let mut faults = kept.faults();
    let mut model = Model { kept, images: vec![Known::default(); IMAGES] };
    for (step, failing) in all {
        if let Some((steps, count, error)) = failing {
            faults.fail_after(*steps, *count, *error);
        }
        let outcome = model.change(step);
        faults.end();
        // What was made stable includes what failed before.
        if outcome.is_ok() && faults.is_stable() {
            model.images.iter_mut().for_each(|known| known.or.clear());
        }
        if let Step::Kill | Step::CutPower = step {
            let told = model.served().1;
            let cut = matches!(step, Step::CutPower);
            if cut {
                faults.cut_power().unwrap();
            }
            let Model { kept, images } = model;
            model = Model { kept: kept.again(MAIN), images };
            drop(faults);
            faults = model.kept.faults();
            model.restarted(&told, cut);
        }
        model.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn what_was_acknowledged_is_there_and_what_failed_is_told(
        all in prop::collection::vec((steps(), faults()), 1..24)
    ) {
        run(&all);
    }
}
