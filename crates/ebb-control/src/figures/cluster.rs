//! The figures of Ceph clusters.

use ebb_api::stat::{ClusterCondition, ClusterStat};
use ebb_store::RbdClusterState;

use super::latency_stat;

/// Those of the clusters that volumes of this process use.
pub(crate) fn cluster_stats() -> Vec<ClusterStat> {
    ebb_store::rbd_clusters().into_iter().map(cluster_stat).collect()
}

fn state(cluster: &RbdClusterState) -> ClusterCondition {
    match cluster {
        RbdClusterState { fenced: true, .. } => ClusterCondition::Fenced,
        RbdClusterState { images: 0, unreachable: true, .. } => ClusterCondition::Down,
        RbdClusterState { images: 0, .. } => ClusterCondition::Idle,
        RbdClusterState { silent_seconds: 0, .. } => ClusterCondition::Up,
        _ => ClusterCondition::Silent,
    }
}

fn cluster_stat(cluster: RbdClusterState) -> ClusterStat {
    let times = cluster.times.iter();
    let times =
        times.filter_map(|(kind, times)| Some((kind.name().to_owned(), latency_stat(times)?)));
    ClusterStat {
        state: state(&cluster),
        times: times.collect(),
        conf: cluster.conf.map_or_else(|| "default".to_owned(), |conf| conf.display().to_string()),
        user: cluster.id.unwrap_or_else(|| "admin".to_owned()),
        fsid: cluster.fsid,
        connections: cluster.connections,
        images: cluster.images,
        offline: cluster.offline,
        in_flight: cluster.in_flight,
        slow: cluster.slow,
        silent_seconds: cluster.silent_seconds,
        slow_requests: cluster.slow_requests,
        errors: cluster.errors,
        last_error: cluster.last_error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_fenced_before_it_is_silent_and_down_only_without_images() {
        let idle = RbdClusterState::default();
        let failed = RbdClusterState { unreachable: true, ..idle.clone() };
        let up = RbdClusterState { images: 1, ..idle.clone() };
        let other_handle_failed = RbdClusterState { images: 1, ..failed.clone() };
        let silent = RbdClusterState { silent_seconds: 1, ..up.clone() };
        let fenced = RbdClusterState { fenced: true, ..silent.clone() };
        for (cluster, word, is_up) in [
            (idle, "idle", true),
            (failed, "down", false),
            (up, "up", true),
            (other_handle_failed, "up", true),
            (silent, "silent", true),
            (fenced, "fenced", false),
        ] {
            let stat = cluster_stat(cluster);
            assert_eq!((stat.state.as_str(), stat.is_up()), (word, is_up));
        }
        let stat = cluster_stat(RbdClusterState::default());
        assert_eq!((stat.conf.as_str(), stat.user.as_str()), ("default", "admin"));
    }
}
