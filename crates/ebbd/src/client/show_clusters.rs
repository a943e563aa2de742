//! The table of `ebbd stat` about Ceph clusters.

use ebb_api::stat::{ClusterStat, LatencyStat};

use super::show::time;
use super::table::TextTable;

/// A row for each cluster, and below the table the last error of each.
pub(super) fn clusters(clusters: &[ClusterStat]) -> String {
    if clusters.is_empty() {
        return String::new();
    }
    let titles = [
        "CEPH CLUSTER",
        "STATE",
        "IMAGES",
        "OFFLINE",
        "HANDLES",
        "IN FLIGHT",
        "SLOW",
        "SLOW SO FAR",
        "ERRORS",
        "READ P50",
        "P99",
        "WRITE P50",
        "P99",
    ];
    let mut table = TextTable::new(&titles, 0b11);
    let (mut errors, none) = (String::new(), || "-".to_owned());
    for cluster in clusters {
        let name = format!("client.{} at {}", cluster.user, cluster.conf);
        let quantile = |operation: &str, of: fn(&LatencyStat) -> f64| {
            cluster.times.get(operation).map_or_else(none, |times| time(of(times)))
        };
        let state = match cluster.silent_seconds {
            0 => cluster.state.to_string(),
            seconds => format!("{} {seconds} s", cluster.state),
        };
        table.row([
            name.clone(),
            state,
            cluster.images.to_string(),
            cluster.offline.to_string(),
            cluster.connections.to_string(),
            cluster.in_flight.to_string(),
            cluster.slow.to_string(),
            cluster.slow_requests.to_string(),
            cluster.errors.to_string(),
            quantile("read", |times| times.p50_seconds),
            quantile("read", |times| times.p99_seconds),
            quantile("write", |times| times.p50_seconds),
            quantile("write", |times| times.p99_seconds),
        ]);
        if let Some(error) = &cluster.last_error {
            errors.push_str(&format!("{name}: last error: {error}\n"));
        }
    }
    format!("\n{}{errors}", table.text())
}

#[cfg(test)]
mod tests {
    use ebb_api::stat::ClusterCondition;

    use super::*;

    #[test]
    fn a_cluster_is_a_row_and_its_last_error_a_line() {
        let times = LatencyStat { p50_seconds: 0.0021, p99_seconds: 1.5, ..LatencyStat::default() };
        let cluster = ClusterStat {
            conf: "/etc/ceph/ceph.conf".into(),
            user: "ebbd".into(),
            state: ClusterCondition::Silent,
            silent_seconds: 7,
            images: 50,
            times: [("write".to_owned(), times)].into(),
            last_error: Some("No space left on device".into()),
            ..ClusterStat::default()
        };
        let text = clusters(&[cluster]);
        for part in ["client.ebbd at /etc/ceph/ceph.conf", "silent 7 s", "50", "2.1ms", "1.5s"] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
        assert!(text.ends_with("ceph.conf: last error: No space left on device\n"), "{text}");
        assert_eq!(clusters(&[]), "");
    }
}
