//! The limits of volumes and groups in force. They are set as parameters.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use ebb_api::{ErrorBody, LimitGroupStat, LimitStat};
use ebb_config::params::ParameterOwner;
use ebb_config::{shorten, suggest};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, Named, On, path};
use crate::answer::{Answer, ApiRefusal, json};
use crate::figures::limit_stat;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(volume_limits))
        .routes(routes!(limit_groups))
        .routes(routes!(group_limits))
}

/// The limits of a volume, and what they have done.
#[utoipa::path(
    get,
    path = "/v1/volumes/{volume}/limits",
    tag = "limits",
    params(("volume" = String, Path, description = "The volume")),
    responses((status = 200, body = LimitStat), (status = 404, body = ErrorBody))
)]
async fn volume_limits(State(app): On, name: Named<String>) -> Answer {
    let name = path(name)?;
    crate::resize::check_served(&app.shared, &name)?;
    let served = app.shared.server.volumes().get(&name);
    let figures = served.and_then(|served| served.volume.limit_figures());
    let figures = figures.map(|figures| limit_stat(&figures));
    json(&figures.unwrap_or_else(|| {
        let owner = ParameterOwner::Volume(&name);
        let burst = app.shared.parameters.get("limit_burst_ms", owner);
        LimitStat { burst_ms: burst.map_or(0, |burst| burst.value), ..LimitStat::default() }
    }))
}

/// The groups of limits.
#[utoipa::path(get, path = "/v1/limit-groups", tag = "limits", responses((status = 200, body = [LimitGroupStat])))]
async fn limit_groups(State(app): On) -> Answer {
    json(&(app.shared.limit_groups)())
}

/// The limits of a group, and what they have done.
#[utoipa::path(
    get,
    path = "/v1/limit-groups/{group}/limits",
    tag = "limits",
    params(("group" = String, Path, description = "The group")),
    responses((status = 200, body = LimitStat), (status = 404, body = ErrorBody))
)]
async fn group_limits(State(app): On, name: Named<String>) -> Answer {
    let name = path(name)?;
    let groups = (app.shared.limit_groups)();
    if let Some(group) = groups.iter().find(|group| group.name == name) {
        return json(&group.limits);
    }
    let names = groups.iter().map(|group| group.name.as_str());
    let remedy = match groups.is_empty() {
        true => "set a limit of it to make it".to_owned(),
        false => suggest(&name, names, "the groups are"),
    };
    let message = format!("there is no group of limits `{}`", shorten(&name));
    Err(ApiRefusal::new(StatusCode::NOT_FOUND, "unknown_limit_group", message, remedy))
}
