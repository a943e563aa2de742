//! `GET /v1/config` and `GET /v1/config/diff`: the configuration in force, and what a reload would change.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use ebb_api::{ConfigChange, ConfigView};
use tokio::sync::oneshot;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, On};
use crate::access::{Arrival, Role};
use crate::answer::{Answer, ApiRefusal, json};

/// How long reading the file may take: its file system may hang.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(config)).routes(routes!(changes))
}

/// The configuration in force, with all defaults. Parameters that were set at run time are not in it.
#[utoipa::path(get, path = "/v1/config", tag = "daemon", responses((status = 200, body = ConfigView)))]
async fn config(State(app): On, arrival: Option<Extension<Arrival>>) -> Answer {
    let config = &app.shared.config;
    let text = match operates(arrival) {
        true => config.text(),
        false => config.text().lines().map(|line| without_arguments(line) + "\n").collect(),
    };
    json(&ConfigView { text, kept_keys: config.kept_keys() })
}

fn operates(arrival: Option<Extension<Arrival>>) -> bool {
    arrival.is_some_and(|Extension(arrival)| arrival.caller.role >= Role::Operate)
}

/// A setting without the arguments of a program for a key, which may be secrets, for who may not
/// change it.
fn without_arguments(setting: &str) -> String {
    let arguments = setting.find("command:").and_then(|at| Some(at + setting[at..].find(' ')?));
    let Some(at) = arguments else { return setting.to_owned() };
    let quote = setting.chars().last().filter(|end| matches!(end, '"' | '\''));
    format!("{} ...{}", &setting[..at], quote.map(String::from).unwrap_or_default())
}

/// What a reload would change: the daemon reads its file.
#[utoipa::path(get, path = "/v1/config/diff", tag = "daemon", responses((status = 200, body = Vec<ConfigChange>)))]
async fn changes(State(app): On, arrival: Option<Extension<Arrival>>) -> Answer {
    let operates = operates(arrival);
    let busy = |message: &str| {
        let remedy = "see whether its file system responds, and try again";
        ApiRefusal::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message, remedy)
    };
    // One thread at a time: those that hang do not add up. The permit ends with the thread.
    let permit = app.config_reader.clone().try_acquire_owned();
    let permit = permit.map_err(|_| busy("the configuration file is being read"))?;
    let (sender, outcome) = oneshot::channel();
    let source = app.shared.config.clone();
    let read = move || {
        // The client may not wait any more.
        let _ = sender.send(source.changes());
        drop(permit);
    };
    let thread = std::thread::Builder::new().name("ebbd-config".into()).spawn(read);
    thread.map_err(|_| busy("cannot start a thread to read the configuration file"))?;
    match tokio::time::timeout(READ_TIMEOUT, outcome).await {
        Ok(Ok(Ok(mut changes))) => {
            for change in changes.iter_mut().filter(|_| !operates) {
                for value in [&mut change.from, &mut change.to].into_iter().flatten() {
                    *value = without_arguments(value);
                }
            }
            json(&changes)
        }
        Ok(Ok(Err(refused))) => Err(refused.into()),
        _ => Err(busy("the configuration file could not be read in time")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_programs_are_not_shown_to_viewers() {
        for (setting, shown) in [
            ("encryption = \"command:/bin/key --pin 1\"", "encryption = \"command:/bin/key ...\""),
            ("command:/bin/key secret", "command:/bin/key ..."),
            ("encryption = \"command:/bin/key\"", "encryption = \"command:/bin/key\""),
            ("store = \"file:/a b\"", "store = \"file:/a b\""),
        ] {
            assert_eq!(without_arguments(setting), shown);
        }
    }
}
