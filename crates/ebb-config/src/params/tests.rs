//! Follows `docs/guides/adding-a-parameter.md`: the code of the guide, in a table of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ebb_param::Parameter;
use serde_json::json;

use super::definition::{Definition, Kind, ParameterScope, ParameterTable, TypedKey};
use super::table::{COMMON, MAX_BUFFER_PAGES};
use super::{Configured, Origin, ParameterErrorKind, ParameterOwner, Parameters};

const TABLE: ParameterTable =
    ParameterTable(&[MAX_BUFFER_PAGES.definition(), REQUESTS_PER_SLICE.definition()]);

#[expect(unreachable_pub, reason = "the constants of the table are public")]
/// Requests of a ring that are started in one time slice.
pub const REQUESTS_PER_SLICE: TypedKey<u32> = TypedKey::new(&Definition {
    name: "requests_per_slice",
    scope: ParameterScope::Volume,
    kind: Kind::Number,
    unit: "requests",
    default: 32,
    minimum: 1,
    maximum: 1024,
    since: "0.2.0",
    effect: "At the next time slice.",
    doc: "How many requests of a ring are started before other rings of the same worker have their \
          time slice.",
    ..COMMON
});

struct SliceParameters {
    requests_per_slice: Parameter<u32>,
}

impl SliceParameters {
    /// How many of `ready` requests are started now.
    fn started(&self, ready: u32) -> u32 {
        ready.min(self.requests_per_slice.get())
    }
}

fn slices(parameters: &Parameters, volume: &str) -> SliceParameters {
    let owner = ParameterOwner::Volume(volume);
    SliceParameters { requests_per_slice: parameters.handle(REQUESTS_PER_SLICE, owner) }
}

/// Has to be told of a change.
#[derive(Default)]
struct Scheduler(AtomicU32);

impl Scheduler {
    fn resize(&self, limit: u32) {
        self.0.store(limit, Ordering::Relaxed);
    }
}

fn follow(parameters: &Parameters, scheduler: &Arc<Scheduler>) {
    let limit = parameters.daemon(REQUESTS_PER_SLICE);
    limit.watch_for(scheduler, |scheduler, limit| scheduler.resize(limit));
}

#[test]
fn a_parameter_that_was_added_as_the_guide_says_is_listed_set_read_and_watched() {
    let mut configured = Configured::default();
    configured.volumes.insert("disk".to_owned(), [(REQUESTS_PER_SLICE.key(), 16)].into());
    let parameters = Parameters::of_table(TABLE, &configured);
    let names: Vec<_> = parameters.list(ParameterOwner::Daemon).unwrap();
    let names: Vec<_> = names.iter().map(|reading| reading.key.name()).collect();
    assert_eq!(names, ["max_buffer_pages", "requests_per_slice"]);

    let (slices, scheduler) = (slices(&parameters, "disk"), Arc::<Scheduler>::default());
    follow(&parameters, &scheduler);
    assert_eq!((slices.started(100), slices.started(7)), (16, 7));
    parameters.set("requests_per_slice", ParameterOwner::Daemon, &json!(64)).unwrap();
    assert_eq!((slices.started(100), scheduler.0.load(Ordering::Relaxed)), (16, 64));
    let own = ParameterOwner::Volume("disk");
    parameters.set("requests_per_slice", own, &json!("128")).unwrap();
    assert_eq!(slices.started(1000), 128);
    assert_eq!(parameters.get("requests_per_slice", own).unwrap().origin, Origin::RunTime);
    let refused = parameters.set("requests_per_slice", own, &json!(0)).unwrap_err();
    assert_eq!(refused.kind, ParameterErrorKind::OutOfRange);
    assert_eq!(refused.remedy, "choose 1 to 1024");
    assert!(Parameters::new(&configured).get("requests_per_slice", own).is_err());
}

#[test]
fn the_code_of_the_guide_is_the_code_of_this_file() {
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../", "docs/guides/adding-a-parameter.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let blocks = guide.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let blocks: Vec<&str> = blocks.collect();
    assert_eq!(blocks.len(), 4);
    for block in blocks {
        assert!(include_str!("tests.rs").contains(block), "not in this file:\n{block}");
    }
}
