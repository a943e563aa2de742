//! Tests of the values in force: who wins, who follows, who is told.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::params::SizeClass;

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

const PAGES: Key = Key::MaxBufferPages;
const NAME: &str = "max_buffer_pages";

fn origin(parameters: &Parameters, volume: Option<&str>) -> (u64, Origin) {
    let reading = parameters.get(NAME, volume).unwrap();
    (reading.value, reading.origin)
}

#[test]
fn a_volume_follows_the_daemon_until_it_has_its_own() {
    let parameters =
        Parameters::new(&configured(&[(PAGES, 100)], &[("a", &[]), ("b", &[(PAGES, 7)])]));
    let (a, b) = (parameters.volume_live("a", PAGES), parameters.volume_live("b", PAGES));
    assert_eq!((a.get(), b.get()), (100, 7));
    assert_eq!(origin(&parameters, Some("a")), (100, Origin::Daemon));
    assert_eq!(origin(&parameters, Some("b")), (7, Origin::Configuration));

    parameters.set(NAME, None, &json!(50)).unwrap();
    assert_eq!((a.get(), b.get()), (50, 7));
    assert_eq!(origin(&parameters, None), (50, Origin::RunTime));

    parameters.set(NAME, Some("a"), &json!("60")).unwrap();
    parameters.set(NAME, None, &json!(40)).unwrap();
    assert_eq!((a.get(), b.get()), (60, 7));
    assert_eq!(origin(&parameters, Some("a")), (60, Origin::RunTime));

    parameters.unset(NAME, Some("a")).unwrap();
    assert_eq!(a.get(), 40);
    parameters.unset(NAME, None).unwrap();
    assert_eq!((a.get(), b.get()), (100, 7));
    assert_eq!(origin(&parameters, None), (100, Origin::Configuration));
}

#[test]
fn a_reload_keeps_what_was_set_unless_the_file_changed_it() {
    let file = |pages, squeeze| {
        configured(
            &[(PAGES, pages), (Key::BufferSqueezeDurationMs, squeeze)],
            &[("a", &[(PAGES, 5)])],
        )
    };
    let parameters = Parameters::new(&file(100, 10));
    let squeeze = parameters.live(Key::BufferSqueezeDurationMs);
    let (pages, a) = (parameters.live(PAGES), parameters.volume_live("a", PAGES));
    parameters.set(NAME, None, &json!(1)).unwrap();
    parameters.set(NAME, Some("a"), &json!(2)).unwrap();

    assert_eq!(parameters.reload(&file(100, 20)).len(), 1, "only what the file changed");
    assert_eq!((pages.get(), squeeze.get(), a.get()), (1, 20, 2));

    parameters.reload(&file(101, 20));
    assert_eq!((pages.get(), squeeze.get(), a.get()), (101, 20, 2));

    // The key leaves the file for the volume: it follows the daemon again.
    parameters.reload(&configured(&[(PAGES, 101)], &[("a", &[])]));
    assert_eq!((a.get(), squeeze.get()), (101, 10));

    // Without the volume, what was set for it is gone; a new one of the name starts afresh.
    parameters.set(NAME, Some("a"), &json!(3)).unwrap();
    parameters.reload(&configured(&[(PAGES, 101)], &[]));
    assert_eq!(parameters.get(NAME, Some("a")).unwrap_err().kind, ErrorKind::UnknownVolume);
    parameters.reload(&configured(&[(PAGES, 101)], &[("a", &[])]));
    assert_eq!(parameters.volume_live("a", PAGES).get(), 101);
}

#[test]
fn a_request_fits_into_the_memory_of_its_connection() {
    let parameters = Parameters::new(&Configured::default());
    let request = parameters.live(Key::MaxRequest);
    let memory = parameters.live(Key::ConnectionMemory);
    parameters.set("connection_memory", None, &json!("32M")).unwrap();
    let error = parameters.set("max_request", None, &json!("33M")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    assert!(error.remedy.contains("32M or less"), "{error}");
    let error = parameters.set("connection_memory", None, &json!("31M")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    assert_eq!((request.get(), memory.get()), (32 << 20, 32 << 20), "nothing changed");

    // The file asks for more than the memory that was set: its two values fit, and come together.
    parameters.reload(&configured(&[(Key::MaxRequest, 48 << 20)], &[]));
    assert_eq!((request.get(), memory.get()), (48 << 20, 64 << 20));

    // Going back to the configuration may conflict, too.
    parameters.set("max_request", None, &json!("4K")).unwrap();
    parameters.set("connection_memory", None, &json!("4K")).unwrap();
    assert_eq!(parameters.unset("max_request", None).unwrap_err().kind, ErrorKind::Conflict);
}

#[test]
fn unknown_names_are_refused_with_a_suggestion() {
    let parameters = Parameters::new(&configured(&[], &[("disk", &[]), ("install cd", &[])]));
    let error = parameters.set(NAME, Some("dsik"), &json!(1)).unwrap_err();
    assert_eq!(
        (error.kind, error.remedy.as_str()),
        (ErrorKind::UnknownVolume, "did you mean `disk`?")
    );
    let error = parameters.get("log", Some("disk")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotPerVolume);
    assert!(error.remedy.contains("max_buffer_pages, buffer_squeeze_duration_ms"), "{error}");
    assert_eq!(parameters.get("logs", None).unwrap_err().remedy, "did you mean `log`?");
    assert_eq!(parameters.list(None).unwrap().len(), Key::of_daemon().count());
    assert_eq!(parameters.list(Some("disk")).unwrap().len(), 2);
}

#[test]
fn watchers_see_changes_in_order_and_read_the_new_value() {
    let parameters = Parameters::new(&Configured::default());
    let (seen, live) = (Arc::new(Mutex::new(Vec::new())), parameters.live(PAGES));
    let seen_too = seen.clone();
    parameters.watch(move |change| {
        if change.key == PAGES {
            assert_eq!(live.get(), change.to);
            seen_too.lock().unwrap().push((change.from, change.to));
        }
    });
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let parameters = &parameters;
            scope.spawn(move || {
                for n in 0..200 {
                    parameters.set(NAME, None, &json!(thread * 1000 + n)).unwrap();
                }
            });
        }
    });
    let seen = seen.lock().unwrap();
    assert_eq!(seen.first().unwrap().0, 1024);
    assert!(seen.windows(2).all(|pair| pair[0].1 == pair[1].0), "each begins where one ended");
    assert_eq!(seen.last().unwrap().1, parameters.live(PAGES).get());
}

#[test]
fn page_pools_and_zones_follow() {
    let parameters = Parameters::new(&configured(&[], &[("a", &[]), ("b", &[(PAGES, 7)])]));
    let (none, a, b) =
        (parameters.pool(None), parameters.pool(Some("a")), parameters.pool(Some("b")));
    let pages = || [&none, &a, &b].map(|pool| pool.max_buffer_pages());
    assert_eq!(pages(), [1024, 1024, 7]);
    parameters.set(NAME, None, &json!(5)).unwrap();
    assert_eq!(pages(), [5, 5, 7]);
    parameters.set(NAME, Some("a"), &json!(6)).unwrap();
    assert_eq!(pages(), [5, 6, 7]);
    parameters.set("buffer_squeeze_duration_ms", Some("b"), &json!(60_000)).unwrap();
    assert_eq!([&a, &b].map(|pool| pool.buffer_squeeze_duration_ms()), [10, 60_000]);

    let options = ebb_mem::MemoryOptions::new(64 << 20, std::time::Instant::now());
    let memory = ebb_mem::Memory::new(options).unwrap();
    parameters.set("zone_limit_bytes.8K", None, &json!("2M")).unwrap();
    parameters.govern(&memory);
    parameters.set("zone_limit_bytes.64K", None, &json!("4M")).unwrap();
    let limit =
        |bytes| memory.stats().zones.iter().find(|zone| zone.item_bytes == bytes).unwrap().limit;
    assert_eq!([limit(4096), limit(8192), limit(65_536)], [None, Some(256), Some(64)]);
    parameters.unset("zone_limit_bytes.8K", None).unwrap();
    assert_eq!(limit(8192), None);
}

#[derive(Clone, Debug)]
enum Step {
    Set(Key, Option<u8>, u64),
    Unset(Key, Option<u8>),
    Reload(Vec<(Key, u64)>, Vec<(u8, Option<u64>)>),
}

fn any_key() -> impl Strategy<Value = Key> {
    prop::sample::select(Key::of_daemon().collect::<Vec<_>>())
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
            let memory = |(key, _): &(Key, u64)| !matches!(key, Key::ConnectionMemory);
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
                    let done = parameters.set(&key.name(), name.as_deref(), &key.definition().json(value));
                    if let (Ok(_), Some(name)) = (done, name) {
                        own.get_mut(&(name, key)).unwrap().1 = Some(value);
                    }
                }
                Step::Unset(key, volume) => {
                    let name = volume.map(|volume| volume.to_string());
                    let done = parameters.unset(&key.name(), name.as_deref());
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
                        for key in Key::per_volume() {
                            let now = values.get(&key).copied();
                            let cell = own.entry((name.clone(), key)).or_insert((now, now));
                            if cell.0 != now {
                                *cell = (now, now);
                            }
                        }
                    }
                }
            }
            for reading in parameters.list(None).unwrap() {
                prop_assert!(reading.key.definition().allows(reading.value));
                prop_assert_eq!(parameters.live(reading.key).get(), reading.value);
            }
            let value = |key| parameters.live(key).get();
            prop_assert!(value(Key::MaxRequest) <= value(Key::ConnectionMemory));
            for ((name, key), (_, own)) in &own {
                let expected = own.unwrap_or_else(|| value(*key));
                prop_assert_eq!(parameters.volume_live(name, *key).get(), expected);
                prop_assert_eq!(parameters.get(&key.name(), Some(name)).unwrap().value, expected);
            }
        }
        let zone = Key::ZoneLimitBytes(SizeClass::all().next().unwrap());
        prop_assert_eq!(parameters.volume_live("0", zone).get(), parameters.live(zone).get());
    }
}
