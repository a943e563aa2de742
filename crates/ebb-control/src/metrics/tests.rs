//! Tests of the text: its figures, its form and its names.

use std::collections::BTreeSet;

use ebb_api::stat::{
    BdiStat, CacheStat, CertificateKind, ClusterCondition, ClusterStat, FailingGuests,
    FrontendState, OwnerStat, PoolStat, RemoteStat, VhostStat, VolumeCacheStat, VolumeCondition,
    VolumeStat, WorkerStat, XenStat,
};

use super::*;

fn cluster(times: &LatencyStat) -> ClusterStat {
    ClusterStat {
        conf: "/c".into(),
        user: "me".into(),
        state: ClusterCondition::Fenced,
        images: 4,
        slow: 2,
        silent_seconds: 6,
        errors: 5,
        times: [("write".to_owned(), times.clone())].into(),
        ..ClusterStat::default()
    }
}

fn overlay(operation: OperationStat, limits: ebb_api::LimitStat) -> VolumeStat {
    VolumeStat {
        name: "a \"b\"\\c\nd".into(),
        size_bytes: 1 << 20,
        loss: Some(ebb_api::stat::LossStat::default()),
        failing_guests: FailingGuests { vhost: 1, xen: 2 },
        operations: [("read".to_owned(), operation)].into(),
        cache: Some(VolumeCacheStat { hit_bytes: 12, ..Default::default() }),
        remote: Some(RemoteStat { silent_seconds: 8, ..Default::default() }),
        limits: Some(limits),
        layers: 3,
        own_bytes: Some(12_288),
        shared_cache_bytes: 4096,
        shared_hit_bytes: 512,
        shared_miss_bytes: 1024,
        ..VolumeStat::default()
    }
}

fn full() -> Stat {
    let service = LatencyStat {
        count: 7,
        sum_seconds: 0.02,
        buckets: vec![(1.28e-6, 4), (4.096e-6, 1), (5.12e-6, 1), (68.7, 1)],
        ..LatencyStat::default()
    };
    let operation = OperationStat {
        requests: 7,
        bytes: 4096,
        errors: 1,
        service: Some(service.clone()),
        queued: None,
    };
    let limits = ebb_api::LimitStat {
        iops: 5000,
        read_bandwidth: 4096,
        throttled_requests: 3,
        throttled_seconds: 1.5,
        ..Default::default()
    };
    let group = ebb_api::LimitGroupStat {
        name: "gold".into(),
        volumes: Vec::new(),
        limits: limits.clone(),
    };
    let pool = PoolStat { name: "disk".into(), free_pages: 2, ..PoolStat::default() };
    Stat {
        version: "1.2.3".into(),
        uptime_seconds: 1.5,
        clients: 3,
        volumes: vec![overlay(operation, limits.clone())],
        workers: vec![
            WorkerStat {
                worker: 0,
                answers: true,
                enters: 5,
                operations: 6,
                polls: 7,
                unsuccessful_polls: 8,
            },
            WorkerStat { worker: 1, ..WorkerStat::default() },
        ],
        memory: Some(MemoryStat {
            zones: vec![ZoneStat { name: "4K".into(), used: 9, ..ZoneStat::default() }],
            pools: vec![pool.clone(), pool],
            owners: vec![OwnerStat { name: "disk".into(), ..OwnerStat::default() }],
            ..MemoryStat::default()
        }),
        pressure: Some(PressureStat { level: 2, events: [0, 4, 1, 0], ..Default::default() }),
        cache: Some(CacheStat { bufspace_bytes: 8192, ..CacheStat::default() }),
        xen: vec![XenStat {
            domain: 3,
            device: 51728,
            volume: "root".into(),
            requests: [("read".to_owned(), 11)].into(),
            mapped_grants: 1056,
            ..XenStat::default()
        }],
        vhost: vec![VhostStat {
            connection: 17,
            volume: "root".into(),
            state: FrontendState::Waiting,
            requests: [("flush".to_owned(), 12)].into(),
            read_bytes: 4096,
            publications: 9,
            ..VhostStat::default()
        }],
        bdis: vec![BdiStat {
            name: "8:0".into(),
            min_ratio: 0.05,
            max_ratio: 0.25,
            max_bytes: Some(7 << 20),
            strict_limit: true,
            pauses: 3,
            pause_seconds: 0.5,
            ..BdiStat::default()
        }],
        clusters: vec![cluster(&service)],
        limit_groups: vec![group],
        ..Stat::default()
    }
}

#[test]
fn every_metric_is_written() {
    let text = text(full()).unwrap();
    for line in [
        "ebbd_build_info{version=\"1.2.3\"} 1",
        "ebbd_uptime_seconds 1.5",
        "ebbd_clients 3.0",
        "ebbd_volume_size_bytes{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1048576",
        "ebbd_volume_lost{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1",
        "ebbd_request_duration_seconds_bucket{le=\"0.000004096\",volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"read\"} 5",
        "ebbd_request_duration_seconds_bucket{le=\"0.000016384\",volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"read\"} 6",
        "ebbd_request_duration_seconds_bucket{le=\"+Inf\",volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"read\"} 7",
        "ebbd_request_duration_seconds_count{volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"read\"} 7",
        "ebbd_volume_layers{volume=\"a \\\"b\\\"\\\\c\\nd\"} 3",
        "ebbd_volume_own_bytes{volume=\"a \\\"b\\\"\\\\c\\nd\"} 12288",
        "ebbd_volume_shared_cache_bytes{volume=\"a \\\"b\\\"\\\\c\\nd\"} 4096",
        "ebbd_volume_shared_hit_bytes_total{volume=\"a \\\"b\\\"\\\\c\\nd\"} 512",
        "ebbd_volume_shared_miss_bytes_total{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1024",
        "ebbd_volume_limit_requests_per_second{volume=\"a \\\"b\\\"\\\\c\\nd\",operation=\"all\"} 5000",
        "ebbd_volume_limit_throttled_requests_total{volume=\"a \\\"b\\\"\\\\c\\nd\"} 3",
        "ebbd_volume_limit_throttled_seconds_total{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1.5",
        "ebbd_limit_group_bytes_per_second{group=\"gold\",operation=\"read\"} 4096",
        "ebbd_worker_ring_enters_total{worker=\"0\"} 5",
        "ebbd_worker_polls_total{worker=\"0\"} 7",
        "ebbd_worker_unsuccessful_polls_total{worker=\"0\"} 8",
        "ebbd_worker_up{worker=\"1\"} 0",
        "ebbd_zone_used_blocks{zone=\"4K\"} 9",
        "ebbd_pool_free_bytes{owner=\"disk\"} 16384",
        "ebbd_cache_bufspace_bytes 8192.0",
        "ebbd_volume_cache_hit_bytes_total{volume=\"a \\\"b\\\"\\\\c\\nd\"} 12",
        "ebbd_pressure_level 2.0",
        "ebbd_bdi_min_ratio{bdi=\"8:0\"} 0.05",
        "ebbd_bdi_max_ratio{bdi=\"8:0\"} 0.25",
        "ebbd_bdi_max_bytes{bdi=\"8:0\"} 7340032",
        "ebbd_bdi_strict_limit{bdi=\"8:0\"} 1",
        "ebbd_bdi_pauses_total{bdi=\"8:0\"} 3",
        "ebbd_bdi_paused_seconds_total{bdi=\"8:0\"} 0.5",
        "ebbd_pressure_events_total{level=\"1\"} 4",
        "ebbd_cache_proactively_reclaimed_bytes_total 0",
        "ebbd_remote_up{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1",
        "ebbd_cluster_up{conf=\"/c\",user=\"me\"} 0",
        "ebbd_cluster_state{conf=\"/c\",user=\"me\",state=\"fenced\"} 1",
        "ebbd_cluster_images{conf=\"/c\",user=\"me\"} 4",
        "ebbd_cluster_slow{conf=\"/c\",user=\"me\"} 2",
        "ebbd_cluster_silent_seconds{conf=\"/c\",user=\"me\"} 6",
        "ebbd_cluster_errors_total{conf=\"/c\",user=\"me\"} 5",
        "ebbd_cluster_request_duration_seconds_count{conf=\"/c\",user=\"me\",operation=\"write\"} 7",
        "ebbd_remote_silent_seconds{volume=\"a \\\"b\\\"\\\\c\\nd\"} 8",
        "ebbd_xen_mapped_grants{domain=\"3\",device=\"51728\",volume=\"root\"} 1056",
        "ebbd_xen_requests_total{domain=\"3\",device=\"51728\",volume=\"root\",operation=\"read\"} 11",
        "ebbd_xen_failing{volume=\"a \\\"b\\\"\\\\c\\nd\"} 2",
        "ebbd_vhost_failing{volume=\"a \\\"b\\\"\\\\c\\nd\"} 1",
        "ebbd_vhost_waiting{volume=\"root\",connection=\"17\"} 1",
        "ebbd_vhost_requests_total{volume=\"root\",connection=\"17\",operation=\"flush\"} 12",
        "ebbd_vhost_read_bytes_total{volume=\"root\",connection=\"17\"} 4096",
        "ebbd_vhost_publications_total{volume=\"root\",connection=\"17\"} 9",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
    }
    assert!(text.contains("ebbd_volume_bytes_total{volume=\"a \\\"b\\\"\\\\c\\nd\",operation"));
    assert!(!text.contains("ring_enters_total{worker=\"1\"}"), "no figures, no counter");
    assert!(text.ends_with("# EOF\n"));
}

/// A strict reading of the text, by the OpenMetrics specification and Prometheus' rules for names.
fn read_strictly(text: &str) -> BTreeSet<String> {
    let mut series = BTreeSet::new();
    let mut families = BTreeSet::new();
    let mut buckets: Option<(String, f64)> = None;
    let mut count = 0.0;
    let (mut family, mut kind, mut unit, mut help) = ("", "", "", "");
    let body = text.strip_suffix("# EOF\n").expect("an end");
    for line in body.lines() {
        let mut words = line.splitn(4, ' ');
        if let (Some("#"), Some(word), Some(name)) = (words.next(), words.next(), words.next()) {
            let rest = words.next().unwrap_or_default();
            if name != family {
                assert!(families.insert(name), "{line}: its lines are not together");
                (family, kind, unit, help) = (name, "", "", "");
            }
            match word {
                "HELP" => help = rest,
                "TYPE" => kind = rest,
                "UNIT" => unit = rest,
                _ => panic!("{line}"),
            }
            continue;
        }
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(series.insert(name.to_owned()), "{line} is there twice");
        let value: f64 = value.parse().unwrap();
        assert!(
            help.ends_with(|last: char| last == '.' || last == ')' || last.is_alphanumeric()),
            "{family}: {help}"
        );
        let base = name.split('{').next().unwrap();
        let end = base.strip_prefix(family).unwrap_or_else(|| panic!("{line} is not of {family}"));
        let ends: &[&str] = match kind {
            "counter" => &["_total"],
            "gauge" => &[""],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => panic!("{family} is a {kind}"),
        };
        assert!(ends.contains(&end), "{line} is a {kind}");
        assert!(kind != "counter" || value >= 0.0, "{line}");
        assert!(unit.is_empty() || family.ends_with(&format!("_{unit}")), "{family}: {unit}");
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(family.chars().all(fits), "{family}");
        assert!(["ebbd_", "process_"].iter().any(|start| family.starts_with(start)), "{family}");
        for bad in [
            "_total",
            "_count",
            "_sum",
            "_bucket",
            "_info_",
            "_ms",
            "_kib",
            "_percent",
            "bandwidth",
        ] {
            assert!(!family.ends_with(bad), "{family} ends like something else");
        }
        if family.ends_with("_seconds") || family.ends_with("_bytes") {
            assert!(!unit.is_empty() || family.ends_with("_per_second"), "{family} has no unit");
        }
        if end == "_bucket" {
            let of = name.split("le=\"").nth(1).unwrap().split_once("\",").unwrap().1.to_owned();
            if let Some((before, smaller)) = &buckets
                && *before == of
            {
                assert!(value >= *smaller, "{line}: buckets are cumulative");
            }
            buckets = Some((of, value));
        }
        if end == "_count" {
            count = value;
        }
        if end == "_bucket" && name.contains("le=\"+Inf\"") {
            assert_eq!(value.to_bits(), count.to_bits(), "{line}: all are in the last bucket");
        }
    }
    series
}

#[test]
fn the_text_and_its_names_keep_the_rules_of_prometheus() {
    let mut stat = full();
    stat.sandbox = vec![ebb_api::stat::SandboxStat {
        mechanism: "ring".into(),
        in_force: true,
        ..Default::default()
    }];
    stat.certificates = vec![ebb_api::stat::CertificateStat {
        purpose: "web".into(),
        kind: CertificateKind::Certificate,
        path: "/c".into(),
        expires: 1_800_000_000,
    }];
    stat.process.cpu_seconds = 1.25;
    stat.process.max_fds = Some(1024);
    stat.volumes[0].state = VolumeCondition::Serving;
    let text = text(stat).unwrap();
    let series = read_strictly(&text);
    assert!(series.len() > 100, "{}", series.len());
    for line in [
        "process_cpu_seconds_total 1.25",
        "process_max_fds 1024.0",
        "ebbd_config_last_reload_successful 1.0",
        "ebbd_sandbox_in_force{mechanism=\"ring\"} 1.0",
        "ebbd_certificate_expiry_timestamp_seconds{purpose=\"web\",path=\"/c\"} 1800000000.0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
    }
}

#[test]
fn operations_that_were_never_requested_have_no_series() {
    let operations = [("read", 0), ("write", 3)].map(|(name, requests)| {
        (name.to_owned(), OperationStat { requests, ..OperationStat::default() })
    });
    let volume = VolumeStat { operations: operations.into(), ..VolumeStat::default() };
    let text = text(Stat { volumes: vec![volume], ..Stat::default() }).unwrap();
    assert!(text.contains("operation=\"write\"") && !text.contains("operation=\"read\""));
}

#[test]
fn a_remote_store_is_up_until_its_connection_is_missed() {
    let mut stat = full();
    let last_error = Some("refused".to_owned());
    stat.volumes[0].remote = Some(RemoteStat { last_error, ..RemoteStat::default() });
    let text = text(stat).unwrap();
    assert!(text.lines().any(|line| line.starts_with("ebbd_remote_up{") && line.ends_with(" 0")));
}
