//! Tests of the values in force: who wins, who follows, who is told.

use proptest::prelude::*;
use serde_json::json;

use super::super::table::{BUFFER_SQUEEZE_DURATION_MS, MAX_BUFFER_PAGES, ZONE_LIMIT_BYTES};
use super::ParameterOwner::{Daemon, Volume};
use super::*;

fn configured(daemon: &[(Key, u64)], volumes: &[(&str, &[(Key, u64)])]) -> Configured {
    Configured {
        daemon: daemon.iter().copied().collect(),
        volumes: volumes
            .iter()
            .map(|(name, own)| ((*name).to_owned(), own.iter().copied().collect()))
            .collect(),
        ..Configured::default()
    }
}

const PAGES: Key = MAX_BUFFER_PAGES.key();
const NAME: &str = "max_buffer_pages";

fn origin(parameters: &Parameters, owner: ParameterOwner) -> (u64, Origin) {
    let reading = parameters.get(NAME, owner).unwrap();
    (reading.value, reading.origin)
}

#[test]
fn a_volume_follows_the_daemon_until_it_has_its_own() {
    let parameters =
        Parameters::new(&configured(&[(PAGES, 100)], &[("a", &[]), ("b", &[(PAGES, 7)])]));
    let (a, b) = (
        parameters.handle(MAX_BUFFER_PAGES, Volume("a")),
        parameters.handle(MAX_BUFFER_PAGES, Volume("b")),
    );
    assert_eq!((a.get(), b.get()), (100, 7));
    assert_eq!(origin(&parameters, Volume("a")), (100, Origin::Daemon));
    assert_eq!(origin(&parameters, Volume("b")), (7, Origin::Configuration));

    parameters.set(NAME, Daemon, &json!(50)).unwrap();
    assert_eq!((a.get(), b.get()), (50, 7));
    assert_eq!(origin(&parameters, Daemon), (50, Origin::RunTime));

    parameters.set(NAME, Volume("a"), &json!("60")).unwrap();
    parameters.set(NAME, Daemon, &json!(40)).unwrap();
    assert_eq!((a.get(), b.get()), (60, 7));
    assert_eq!(origin(&parameters, Volume("a")), (60, Origin::RunTime));

    parameters.unset(NAME, Volume("a")).unwrap();
    assert_eq!(a.get(), 40);
    parameters.unset(NAME, Daemon).unwrap();
    assert_eq!((a.get(), b.get()), (100, 7));
    assert_eq!(origin(&parameters, Daemon), (100, Origin::Configuration));
}

#[test]
fn a_value_that_the_configuration_does_not_change_is_a_default() {
    let default = MAX_BUFFER_PAGES.definition().default;
    let parameters = Parameters::new(&configured(&[], &[("b", &[(PAGES, default)])]));
    assert_eq!(origin(&parameters, Daemon), (default, Origin::Default));
    assert_eq!(origin(&parameters, Volume("b")), (default, Origin::Configuration), "it was given");
    parameters.set(NAME, Daemon, &json!(50)).unwrap();
    assert_eq!(origin(&parameters, Daemon), (50, Origin::RunTime));
    parameters.unset(NAME, Daemon).unwrap();
    assert_eq!(origin(&parameters, Daemon), (default, Origin::Default));
}

#[test]
fn a_reload_keeps_what_was_set_unless_the_file_changed_it() {
    let file = |pages, squeeze| {
        configured(
            &[(PAGES, pages), (BUFFER_SQUEEZE_DURATION_MS.key(), squeeze)],
            &[("a", &[(PAGES, 5)])],
        )
    };
    let parameters = Parameters::new(&file(100, 10));
    let squeeze = parameters.daemon(BUFFER_SQUEEZE_DURATION_MS);
    let (pages, a) =
        (parameters.daemon(MAX_BUFFER_PAGES), parameters.handle(MAX_BUFFER_PAGES, Volume("a")));
    parameters.set(NAME, Daemon, &json!(1)).unwrap();
    parameters.set(NAME, Volume("a"), &json!(2)).unwrap();

    assert_eq!(parameters.reload(&file(100, 20)).len(), 1, "only what the file changed");
    assert_eq!((pages.get(), squeeze.get(), a.get()), (1, 20, 2));

    parameters.reload(&file(101, 20));
    assert_eq!((pages.get(), squeeze.get(), a.get()), (101, 20, 2));

    // The key leaves the file for the volume: it follows the daemon again.
    parameters.reload(&configured(&[(PAGES, 101)], &[("a", &[])]));
    assert_eq!((a.get(), squeeze.get()), (101, 10));

    // Without the volume, what was set for it is gone; a new one of the name starts afresh.
    parameters.set(NAME, Volume("a"), &json!(3)).unwrap();
    parameters.reload(&configured(&[(PAGES, 101)], &[]));
    assert_eq!(parameters.get(NAME, Volume("a")).unwrap_err().kind, ErrorKind::UnknownVolume);
    parameters.reload(&configured(&[(PAGES, 101)], &[("a", &[])]));
    assert_eq!(parameters.handle(MAX_BUFFER_PAGES, Volume("a")).get(), 101);
}

#[test]
fn a_request_fits_into_the_memory_of_its_connection() {
    let parameters = Parameters::new(&Configured::default());
    let request = parameters.daemon(MAX_REQUEST);
    let memory = parameters.daemon(CONNECTION_MEMORY);
    parameters.set("connection_memory", Daemon, &json!("32M")).unwrap();
    let error = parameters.set("max_request", Daemon, &json!("33M")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    assert!(error.remedy.contains("32M or less"), "{error}");
    let error = parameters.set("connection_memory", Daemon, &json!("31M")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    assert_eq!((request.get(), memory.get()), (32 << 20, 32 << 20), "nothing changed");

    // The file asks for more than the memory that was set: its two values fit, and come together.
    parameters.reload(&configured(&[(MAX_REQUEST.key(), 48 << 20)], &[]));
    assert_eq!((request.get(), memory.get()), (48 << 20, 64 << 20));

    // Going back to the configuration may conflict, too.
    parameters.set("max_request", Daemon, &json!("4K")).unwrap();
    parameters.set("connection_memory", Daemon, &json!("4K")).unwrap();
    assert_eq!(parameters.unset("max_request", Daemon).unwrap_err().kind, ErrorKind::Conflict);
}

#[test]
fn unknown_names_are_refused_with_a_suggestion() {
    let parameters = Parameters::new(&configured(&[], &[("disk", &[]), ("install cd", &[])]));
    let error = parameters.set(NAME, Volume("dsik"), &json!(1)).unwrap_err();
    assert_eq!(
        (error.kind, error.remedy.as_str()),
        (ErrorKind::UnknownVolume, "did you mean `disk`?")
    );
    let error = parameters.get("log", Volume("disk")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotPerVolume);
    assert!(error.remedy.contains("max_buffer_pages, buffer_squeeze_duration_ms"), "{error}");
    assert_eq!(parameters.get("logs", Daemon).unwrap_err().remedy, "did you mean `log`?");
    assert_eq!(
        parameters.list(Daemon).unwrap().len(),
        TABLE.keys_of(ParameterScope::Daemon).count()
    );
    assert_eq!(parameters.list(Volume("disk")).unwrap().len(), 10);
}

#[test]
fn watchers_see_changes_in_order_and_read_the_new_value() {
    let parameters = Parameters::new(&Configured::default());
    let (seen, pages) = (Arc::new(Mutex::new(vec![1024])), parameters.daemon(MAX_BUFFER_PAGES));
    let (log, reader) = (seen.clone(), pages.clone());
    pages.watch(move |value| {
        assert_eq!(reader.get(), value);
        log.lock().unwrap().push(value);
    });
    let changes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (parameters, changes) = (&parameters, &changes);
            scope.spawn(move || {
                for n in 0..200 {
                    let value = json!(10_000 + thread * 1000 + n);
                    let change = parameters.set(NAME, Daemon, &value).unwrap();
                    changes.lock().unwrap().push((change.from, change.to));
                }
            });
        }
    });
    let seen: Vec<u64> = seen.lock().unwrap().iter().map(|value| u64::from(*value)).collect();
    assert_eq!(seen.last(), Some(&u64::from(pages.get())));
    let mut steps: Vec<(u64, u64)> = seen.windows(2).map(|pair| (pair[0], pair[1])).collect();
    let mut changes = changes.into_inner().unwrap();
    steps.sort_unstable();
    changes.sort_unstable();
    assert_eq!(steps, changes, "each change begins where the one before ended");
}

#[test]
fn watchers_of_a_volume_see_that_it_follows_the_daemon() {
    let parameters = Parameters::new(&configured(&[], &[("a", &[]), ("b", &[(PAGES, 7)])]));
    let seen = Arc::new(Mutex::new(Vec::new()));
    for name in ["a", "b"] {
        let log = seen.clone();
        let pages = parameters.handle(MAX_BUFFER_PAGES, Volume(name));
        pages.watch(move |value| log.lock().unwrap().push((name, value)));
    }
    parameters.set(NAME, Daemon, &json!(5)).unwrap();
    parameters.set(NAME, Daemon, &json!(5)).unwrap();
    parameters.set(NAME, Volume("b"), &json!(6)).unwrap();
    parameters.reload(&configured(&[(PAGES, 8)], &[("a", &[]), ("b", &[])]));
    assert_eq!(*seen.lock().unwrap(), [("a", 5), ("b", 6), ("b", 8), ("a", 8)]);
}

#[derive(Clone, Debug)]
enum Step {
    Set(Key, Option<u8>, u64),
    Unset(Key, Option<u8>),
    Reload(Vec<(Key, u64)>, Vec<(u8, Option<u64>)>),
}

fn any_key() -> impl Strategy<Value = Key> {
    prop::sample::select(TABLE.keys_of(ParameterScope::Daemon).collect::<Vec<_>>())
}

fn any_value(key: Key) -> impl Strategy<Value = (Key, u64)> {
    let definition = key.definition();
    let near = definition.minimum..=definition.maximum.min(1 << 27);
    prop_oneof![near, Just(definition.default)].prop_map(move |value| (key, value))
}

fn any_step() -> impl Strategy<Value = Step> {
    let volume = prop::option::of(0u8..3);
    // A configuration that was checked holds max_request within connection_memory.
    let daemon =
        prop::collection::vec(any_key().prop_flat_map(any_value), 0..4).prop_map(|daemon| {
            let memory = |(key, _): &(Key, u64)| *key != CONNECTION_MEMORY.key();
            daemon.into_iter().filter(memory).collect::<Vec<_>>()
        });
    let volumes = prop::collection::vec((0u8..3, prop::option::of(0u64..5000)), 0..3);
    prop_oneof![
        (any_key().prop_flat_map(any_value), volume.clone())
            .prop_map(|((key, value), volume)| Step::Set(key, volume, value)),
        (any_key(), volume).prop_map(|(key, volume)| Step::Unset(key, volume)),
        (daemon, volumes).prop_map(|(daemon, volumes)| Step::Reload(daemon, volumes)),
    ]
}

proptest! {
    /// Whatever happens: ranges hold, the two sizes fit, and a volume has its own value or the
    /// daemon's. A model without atomics says which.
    #[test]
    fn the_values_in_force_are_those_of_the_model(steps in prop::collection::vec(any_step(), 1..40)) {
        let parameters = Parameters::new(&Configured::default());
        let mut own: BTreeMap<(String, Key), (Option<u64>, Option<u64>)> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Set(key, volume, value) => {
                    let name = volume.map(|volume| volume.to_string());
                    let owner = name.as_deref().map_or(Daemon, Volume);
                    let done = parameters.set(&key.name(), owner, &key.definition().json(value));
                    if let (Ok(_), Some(name)) = (done, name) {
                        own.get_mut(&(name, key)).unwrap().1 = Some(value);
                    }
                }
                Step::Unset(key, volume) => {
                    let name = volume.map(|volume| volume.to_string());
                    let owner = name.as_deref().map_or(Daemon, Volume);
                    let done = parameters.unset(&key.name(), owner);
                    if let (Ok(_), Some(name)) = (done, name) {
                        let cell = own.get_mut(&(name, key)).unwrap();
                        cell.1 = cell.0;
                    }
                }
                Step::Reload(daemon, volumes) => {
                    let volumes: BTreeMap<_, _> = volumes.into_iter().collect();
                    let file = Configured {
                        daemon: daemon.into_iter().collect(),
                        volumes: volumes.iter().map(|(name, pages)| {
                            (name.to_string(), pages.iter().map(|pages| (PAGES, *pages)).collect())
                        }).collect(),
                        ..Configured::default()
                    };
                    parameters.reload(&file);
                    own.retain(|(name, _), _| file.volumes.contains_key(name));
                    for (name, values) in &file.volumes {
                        for key in TABLE.keys_of(ParameterScope::Volume) {
                            let now = values.get(&key).copied();
                            let cell = own.entry((name.clone(), key)).or_insert((now, now));
                            if cell.0 != now {
                                *cell = (now, now);
                            }
                        }
                    }
                }
            }
            for reading in parameters.list(Daemon).unwrap() {
                prop_assert!(reading.key.definition().allows(reading.value));
            }
            let value = |key: Key| parameters.get(&key.name(), Daemon).unwrap().value;
            prop_assert!(parameters.daemon(MAX_REQUEST).get() as usize <= parameters.daemon(CONNECTION_MEMORY).get());
            for ((name, key), (_, own)) in &own {
                let expected = own.unwrap_or_else(|| value(*key));
                prop_assert_eq!(parameters.get(&key.name(), Volume(name)).unwrap().value, expected);
                let live = parameters.lock().cell(*key, Volume(name)).unwrap().live.get();
                prop_assert_eq!(live, expected);
            }
        }
        let zone = ZONE_LIMIT_BYTES.members().next().unwrap();
        prop_assert_eq!(parameters.handle(zone, Volume("0")).get(), parameters.daemon(zone).get());
    }
}

#[test]
fn a_volume_that_is_added_renamed_and_removed_has_its_values_meanwhile() {
    let parameters = Parameters::new(&configured(&[(PAGES, 100)], &[("a", &[])]));
    let text = "listen = ['unix:/a']\n[volume.b]\nstore = 'null:1G'\nmax_buffer_pages = 7\n";
    let name = std::path::Path::new("f");
    let config = crate::Config::parse(text, name, &crate::ServeArgs::default()).unwrap();
    let volume = &config.volumes["b"];
    parameters.add_volume("b", volume);
    assert_eq!(origin(&parameters, Volume("b")), (7, Origin::Configuration));
    parameters.set(NAME, Volume("b"), &json!(8)).unwrap();
    parameters.add_volume("b", volume);
    let live = parameters.handle(MAX_BUFFER_PAGES, Volume("b"));
    parameters.rename_volume("b", "c");
    assert_eq!(origin(&parameters, Volume("c")), (8, Origin::RunTime));
    assert!(parameters.list(Volume("b")).is_err());
    parameters.set(NAME, Volume("c"), &json!(9)).unwrap();
    assert_eq!(live.get(), 9);
    parameters.remove_volume("c");
    assert!(parameters.list(Volume("c")).is_err() && parameters.list(Volume("a")).is_ok());
}
