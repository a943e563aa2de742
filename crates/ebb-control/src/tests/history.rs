//! The routes of the history and of the list of volumes.

use super::*;

#[test]
fn the_history_and_the_list_are_served() {
    let failed = VolumeStat { name: "lost".to_owned(), ..VolumeStat::default() };
    let daemon = start_with(None, vec![failed]);
    let summary = daemon.json("GET", "/v1/summary", "");
    let names: Vec<&Value> =
        summary["volumes"].as_array().unwrap().iter().map(|v| &v["name"]).collect();
    assert_eq!(names, ["a/b %\"ü", "disk", "lost"]);
    assert_eq!(
        summary["volumes"][1],
        json!({"name": "disk", "state": "serving"}),
        "what is 0 is absent"
    );
    for (range, step) in [("5m", 1.0), ("1h", 12.0), ("24h", 288.0)] {
        let daemon_wide = daemon.json("GET", &format!("/v1/history?range={range}"), "");
        assert_eq!(daemon_wide["step_seconds"], step);
        assert_eq!(daemon_wide["series"]["pressure"].as_array().unwrap().len(), 300);
        let of_one = daemon.json("GET", &format!("/v1/history?range={range}&volume=lost"), "");
        assert_eq!(of_one["series"]["read_iops"][299], Value::Null);
    }
    // The first sample is due after a second.
    let heat = loop {
        let heat = daemon.json("GET", "/v1/volumes/a%2Fb%20%25%22%C3%BC/heatmap?range=5m", "");
        if heat["columns"].as_array().is_some_and(|columns| columns.iter().any(Value::is_array)) {
            break heat;
        }
        std::thread::yield_now();
    };
    assert_eq!(heat["columns"].as_array().unwrap().len(), 300);
    daemon.refuses(("GET", "/v1/history?range=2h", ""), 422, "invalid_value", "5m, 1h and 24h");
    daemon.refuses(("GET", "/v1/history?volume=dsk", ""), 404, "unknown_volume", "`disk`");
    daemon.refuses(("GET", "/v1/volumes/dsk/heatmap", ""), 404, "unknown_volume", "`disk`");
}
