//! The Grafana dashboard and the alert rules: each metric that they name is in the metrics of a daemon, and the rules pass
//! promtool's checks and their own tests.

use super::{directory, packaging};
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use testbed::guest::kernel;
use testbed::harness::nbd::Client;
use testbed::harness::process::{PATIENCE, until};
use testbed::harness::server::Setup;
use testbed::harness::tls::{Authority, Role};
use testbed::{Error, Result, Server, Tool, check};

/// The metrics of a daemon, as text.
fn metrics(control: &Path) -> Result<String> {
    let mut socket = UnixStream::connect(control).map_err(Error::io("connect"))?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(Error::io("set a time limit"))?;
    let request = b"GET /metrics HTTP/1.1\r\nHost: ebbd\r\nConnection: close\r\n\r\n";
    socket.write_all(request).map_err(Error::io("send a request"))?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).map_err(Error::io("read a reply"))?;
    Ok(answer)
}

/// Names of all series in a text of metrics.
fn names(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let name = |line: &str| line.split(['{', ' ']).next().map(str::to_owned);
    lines.filter_map(name).filter(|name| is_own(name)).collect()
}

/// Whether a word is the name of a metric of the daemon; labels and functions are not.
fn is_own(word: &str) -> bool {
    ["ebbd_", "process_"].iter().any(|start| word.starts_with(start))
}

/// The metrics that an expression of PromQL names.
fn named(expression: &str) -> impl Iterator<Item = &str> {
    let ends = |c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':');
    expression.split(ends).filter(|word| is_own(word))
}

/// All values of `key` anywhere in a document.
fn values<'a>(document: &'a serde_json::Value, key: &str, found: &mut Vec<&'a str>) {
    match document {
        serde_json::Value::Object(map) => {
            found.extend(map.get(key).and_then(|value| value.as_str()));
            map.values().for_each(|value| values(value, key, found));
        }
        serde_json::Value::Array(list) => list.iter().for_each(|value| values(value, key, found)),
        _ => {}
    }
}

fn rules() -> PathBuf {
    packaging().join("prometheus-rules.yml")
}

/// A daemon with volumes of each kind, whose counters have counted something.
fn daemon() -> Result<(BTreeSet<String>, [Server; 2])> {
    let remote = Server::with_disk(1 << 20)?;
    let setup = Setup::new()?;
    let keys =
        Authority::new(setup.dir().join("ca"))?.issue(Role::Server, setup.dir().join("tls"))?;
    let control = setup.dir().join("control.sock");
    let (image, written) = (setup.dir().join("file.img"), setup.dir().join("written.img"));
    let server = setup
        .volume("memory=memory:1M")
        .volume(&format!("file=file:{},size=1M,create=true", image.display()))
        .volume(&format!("written=file:{},size=1M,create=true,cache=writeback", written.display()))
        .volume(&format!("remote=nbd+unix:///disk?socket={}", remote.socket().display()))
        .args(["--tls", "on", "--tls-certificates"])
        .arg(&keys)
        .arg("--control")
        .arg(&control)
        .start()?;
    for volume in ["memory", "file", "written", "remote"] {
        let mut client = Client::open(&server.socket(), volume)?;
        client.write(0, &[7; 4096], 0)?;
        check(client.read(0, 4096)? == [7; 4096], || format!("{volume}: other data"))?;
        client.disconnect()?;
    }
    // Parts of the figures are sampled: the workers answer within a moment.
    until("the figures of the worker", PATIENCE, || {
        Ok(metrics(&control)?.contains("ebbd_worker_polls_total").then_some(()))
    })?;
    Ok((names(&metrics(&control)?), [server, remote]))
}

/// Asks that each metric which `expressions` name is among `known`, and that some are named.
fn all_known(what: &str, expressions: &[&str], known: &BTreeSet<String>) -> Result {
    let all: BTreeSet<&str> = expressions.iter().flat_map(|text| named(text)).collect();
    let missing: Vec<_> = all.iter().filter(|name| !known.contains(**name)).collect();
    check(all.len() > 10 && missing.is_empty(), || {
        format!("{what} names {} metrics; the daemon does not have {missing:?}", all.len())
    })
}

#[test]
fn every_metric_of_the_dashboard_and_the_alerts_exists() -> Result {
    let (known, mut servers) = daemon()?;
    let text = fs::read_to_string(packaging().join("grafana-dashboard.json"))
        .map_err(Error::io("read the dashboard"))?;
    let dashboard = serde_json::from_str(&text)
        .map_err(|e| Error::unexpected(format!("the dashboard is no JSON: {e}")))?;
    let mut expressions = Vec::new();
    values(&dashboard, "expr", &mut expressions);
    values(&dashboard, "query", &mut expressions);
    let first = all_known("the dashboard", &expressions, &known);

    let text = fs::read_to_string(rules()).map_err(Error::io("read the rules"))?;
    // Every line that is no text for people may name metrics.
    let said = ["summary:", "remedy:", "#"];
    let lines = text.lines().filter(|line| !said.iter().any(|s| line.trim().starts_with(s)));
    let second = all_known("the alerts", &lines.collect::<Vec<_>>(), &known);
    let errors = [first, second].into_iter().filter_map(Result::err);
    let errors: Vec<_> = errors.map(|error| error.to_string()).collect();
    check(errors.is_empty(), || errors.join("\n"))?;
    servers.iter_mut().try_for_each(Server::healthy)
}

#[test]
fn the_alerts_pass_the_checks_of_promtool_and_fire_when_they_should() -> Result {
    let promtool = kernel::cache().join("promtool");
    let checked = Tool::new(&promtool).args(["check", "rules"]).arg(rules()).run()?;
    checked.check(checked.status.success(), "valid rules")?;
    let text = fs::read_to_string(rules()).map_err(Error::io("read the rules"))?;
    let tests = include_str!("../../../guests/prometheus-rules.test.yml");
    let mut alerts = 0;
    for alert in text.split("- alert: ").skip(1) {
        let name = alert.lines().next().unwrap_or_default();
        alerts += 1;
        for annotation in ["summary: \"", "remedy: \""] {
            check(alert.contains(annotation), || format!("{name}: no {annotation}"))?;
        }
        let fires = tests.contains(&format!("alertname=\"{name}\", alertstate=\"firing\""));
        check(fires, || format!("{name}: no test in prometheus-rules.test.yml"))?;
    }
    check(alerts >= 10, || format!("{alerts} alerts"))?;
    let directory = directory()?;
    let run = |rules: &str| {
        fs::write(directory.path().join("prometheus-rules.yml"), rules)
            .and_then(|()| fs::write(directory.path().join("test.yml"), tests))
            .map_err(Error::io("write rules"))?;
        Tool::new(&promtool).args(["test", "rules", "test.yml"]).dir(directory.path()).run()
    };
    let tested = run(&text)?;
    tested.check(tested.status.success(), "the tests of the rules to pass")?;
    // The tests notice a rule that never fires.
    let broken = run(&text.replace("ebbd_remote_up == 0", "ebbd_remote_up == 2"))?;
    broken.check(!broken.status.success(), "a failure with a broken rule")
}
