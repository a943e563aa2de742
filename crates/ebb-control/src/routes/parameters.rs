//! `/v1/parameters`, and the same below a volume, a backing device and a group of limits: the run-time parameters.

use std::sync::Arc;

use axum::extract::State;
use ebb_api::{ChangeBody, ChangeView, ParameterView, SetBody};
use ebb_config::params::{ParameterChange, ParameterOwner, ParameterScope, Reading, TABLE};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, Named, On, RequestBody, parse, path};
use crate::access::RequestedBy;
use crate::answer::{Answer, json};

/// The body that sets a parameter, as a remedy.
const SET_FORM: &str = "send {\"value\": ...}";
/// The body that changes several, as a remedy.
const CHANGE_FORM: &str = "send {\"NAME\": VALUE, ...}; null unsets a parameter";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_parameters, change_parameters))
        .routes(routes!(read_parameter, set_parameter, unset_parameter))
        .routes(routes!(list_volume_parameters, change_volume_parameters))
        .routes(routes!(read_volume_parameter, set_volume_parameter, unset_volume_parameter))
        .routes(routes!(list_bdi_parameters, change_bdi_parameters))
        .routes(routes!(read_bdi_parameter, set_bdi_parameter, unset_bdi_parameter))
        .routes(routes!(list_group_parameters, change_group_parameters))
        .routes(routes!(read_group_parameter, set_group_parameter, unset_group_parameter))
}

/// The parameters of the daemon.
#[utoipa::path(get, path = "/v1/parameters", tag = "parameters", responses((status = 200, body = Vec<ParameterView>)))]
async fn list_parameters(State(app): On) -> Answer {
    app.list(ParameterOwner::Daemon)
}

/// Changes several parameters of the daemon, all or none.
#[utoipa::path(
    patch, path = "/v1/parameters", tag = "parameters",
    request_body = ChangeBody, responses((status = 200, body = Vec<ChangeView>))
)]
async fn change_parameters(State(app): On, by: RequestedBy, body: RequestBody) -> Answer {
    app.change(ParameterOwner::Daemon, body, &by)
}

/// A parameter of the daemon.
#[utoipa::path(
    get, path = "/v1/parameters/{name}", tag = "parameters",
    params(("name" = String, Path, description = "The parameter")),
    responses((status = 200, body = ParameterView))
)]
async fn read_parameter(State(app): On, name: Named<String>) -> Answer {
    app.read(&path(name)?, ParameterOwner::Daemon)
}

/// Sets a parameter of the daemon.
#[utoipa::path(
    put, path = "/v1/parameters/{name}", tag = "parameters",
    params(("name" = String, Path, description = "The parameter")),
    request_body = SetBody, responses((status = 200, body = ChangeView))
)]
async fn set_parameter(
    State(app): On,
    by: RequestedBy,
    name: Named<String>,
    body: RequestBody,
) -> Answer {
    app.set(&path(name)?, ParameterOwner::Daemon, body, &by)
}

/// Unsets a parameter of the daemon, so that the configuration applies.
#[utoipa::path(
    delete, path = "/v1/parameters/{name}", tag = "parameters",
    params(("name" = String, Path, description = "The parameter")),
    responses((status = 200, body = ChangeView))
)]
async fn unset_parameter(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    app.unset(&path(name)?, ParameterOwner::Daemon, &by)
}

/// The parameters of a volume.
#[utoipa::path(
    get, path = "/v1/volumes/{volume}/parameters", tag = "parameters",
    params(("volume" = String, Path, description = "The volume")),
    responses((status = 200, body = Vec<ParameterView>))
)]
async fn list_volume_parameters(State(app): On, of: Named<String>) -> Answer {
    app.list(ParameterOwner::Volume(&path(of)?))
}

/// Changes several parameters of a volume, all or none.
#[utoipa::path(
    patch, path = "/v1/volumes/{volume}/parameters", tag = "parameters",
    params(("volume" = String, Path, description = "The volume")),
    request_body = ChangeBody, responses((status = 200, body = Vec<ChangeView>))
)]
async fn change_volume_parameters(
    State(app): On,
    by: RequestedBy,
    of: Named<String>,
    body: RequestBody,
) -> Answer {
    app.change(ParameterOwner::Volume(&path(of)?), body, &by)
}

/// A parameter of a volume.
#[utoipa::path(
    get, path = "/v1/volumes/{volume}/parameters/{name}", tag = "parameters",
    params(
        ("volume" = String, Path, description = "The volume"),
        ("name" = String, Path, description = "The parameter")
    ),
    responses((status = 200, body = ParameterView))
)]
async fn read_volume_parameter(State(app): On, names: Named<(String, String)>) -> Answer {
    let (of, name) = path(names)?;
    app.read(&name, ParameterOwner::Volume(&of))
}

/// Sets a parameter of a volume.
#[utoipa::path(
    put, path = "/v1/volumes/{volume}/parameters/{name}", tag = "parameters",
    params(
        ("volume" = String, Path, description = "The volume"),
        ("name" = String, Path, description = "The parameter")
    ),
    request_body = SetBody, responses((status = 200, body = ChangeView))
)]
async fn set_volume_parameter(
    State(app): On,
    by: RequestedBy,
    names: Named<(String, String)>,
    body: RequestBody,
) -> Answer {
    let (of, name) = path(names)?;
    app.set(&name, ParameterOwner::Volume(&of), body, &by)
}

/// Unsets a parameter of a volume, so that the daemon's value applies.
#[utoipa::path(
    delete, path = "/v1/volumes/{volume}/parameters/{name}", tag = "parameters",
    params(
        ("volume" = String, Path, description = "The volume"),
        ("name" = String, Path, description = "The parameter")
    ),
    responses((status = 200, body = ChangeView))
)]
async fn unset_volume_parameter(
    State(app): On,
    by: RequestedBy,
    names: Named<(String, String)>,
) -> Answer {
    let (of, name) = path(names)?;
    app.unset(&name, ParameterOwner::Volume(&of), &by)
}

/// The parameters of a backing device.
#[utoipa::path(
    get, path = "/v1/bdis/{bdi}/parameters", tag = "parameters",
    params(("bdi" = String, Path, description = "The backing device")),
    responses((status = 200, body = Vec<ParameterView>))
)]
async fn list_bdi_parameters(State(app): On, of: Named<String>) -> Answer {
    app.list(ParameterOwner::Bdi(&path(of)?))
}

/// Changes several parameters of a backing device, all or none.
#[utoipa::path(
    patch, path = "/v1/bdis/{bdi}/parameters", tag = "parameters",
    params(("bdi" = String, Path, description = "The backing device")),
    request_body = ChangeBody, responses((status = 200, body = Vec<ChangeView>))
)]
async fn change_bdi_parameters(
    State(app): On,
    by: RequestedBy,
    of: Named<String>,
    body: RequestBody,
) -> Answer {
    app.change(ParameterOwner::Bdi(&path(of)?), body, &by)
}

/// A parameter of a backing device.
#[utoipa::path(
    get, path = "/v1/bdis/{bdi}/parameters/{name}", tag = "parameters",
    params(
        ("bdi" = String, Path, description = "The backing device"),
        ("name" = String, Path, description = "The parameter")
    ),
    responses((status = 200, body = ParameterView))
)]
async fn read_bdi_parameter(State(app): On, names: Named<(String, String)>) -> Answer {
    let (of, name) = path(names)?;
    app.read(&name, ParameterOwner::Bdi(&of))
}

/// Sets a parameter of a backing device.
#[utoipa::path(
    put, path = "/v1/bdis/{bdi}/parameters/{name}", tag = "parameters",
    params(
        ("bdi" = String, Path, description = "The backing device"),
        ("name" = String, Path, description = "The parameter")
    ),
    request_body = SetBody, responses((status = 200, body = ChangeView))
)]
async fn set_bdi_parameter(
    State(app): On,
    by: RequestedBy,
    names: Named<(String, String)>,
    body: RequestBody,
) -> Answer {
    let (of, name) = path(names)?;
    app.set(&name, ParameterOwner::Bdi(&of), body, &by)
}

/// Unsets a parameter of a backing device.
#[utoipa::path(
    delete, path = "/v1/bdis/{bdi}/parameters/{name}", tag = "parameters",
    params(
        ("bdi" = String, Path, description = "The backing device"),
        ("name" = String, Path, description = "The parameter")
    ),
    responses((status = 200, body = ChangeView))
)]
async fn unset_bdi_parameter(
    State(app): On,
    by: RequestedBy,
    names: Named<(String, String)>,
) -> Answer {
    let (of, name) = path(names)?;
    app.unset(&name, ParameterOwner::Bdi(&of), &by)
}

/// The parameters of a group of limits.
#[utoipa::path(
    get, path = "/v1/limit-groups/{group}/parameters", tag = "parameters",
    params(("group" = String, Path, description = "The group")),
    responses((status = 200, body = Vec<ParameterView>))
)]
async fn list_group_parameters(State(app): On, of: Named<String>) -> Answer {
    app.list(ParameterOwner::LimitGroup(&path(of)?))
}

/// Changes several parameters of a group of limits, all or none.
#[utoipa::path(
    patch, path = "/v1/limit-groups/{group}/parameters", tag = "parameters",
    params(("group" = String, Path, description = "The group")),
    request_body = ChangeBody, responses((status = 200, body = Vec<ChangeView>))
)]
async fn change_group_parameters(
    State(app): On,
    by: RequestedBy,
    of: Named<String>,
    body: RequestBody,
) -> Answer {
    app.change(ParameterOwner::LimitGroup(&path(of)?), body, &by)
}

/// A parameter of a group of limits.
#[utoipa::path(
    get, path = "/v1/limit-groups/{group}/parameters/{name}", tag = "parameters",
    params(
        ("group" = String, Path, description = "The group"),
        ("name" = String, Path, description = "The parameter")
    ),
    responses((status = 200, body = ParameterView))
)]
async fn read_group_parameter(State(app): On, names: Named<(String, String)>) -> Answer {
    let (of, name) = path(names)?;
    app.read(&name, ParameterOwner::LimitGroup(&of))
}

/// Sets a parameter of a group of limits.
#[utoipa::path(
    put, path = "/v1/limit-groups/{group}/parameters/{name}", tag = "parameters",
    params(
        ("group" = String, Path, description = "The group"),
        ("name" = String, Path, description = "The parameter")
    ),
    request_body = SetBody, responses((status = 200, body = ChangeView))
)]
async fn set_group_parameter(
    State(app): On,
    by: RequestedBy,
    names: Named<(String, String)>,
    body: RequestBody,
) -> Answer {
    let (of, name) = path(names)?;
    app.set(&name, ParameterOwner::LimitGroup(&of), body, &by)
}

/// Unsets a parameter of a group of limits.
#[utoipa::path(
    delete, path = "/v1/limit-groups/{group}/parameters/{name}", tag = "parameters",
    params(
        ("group" = String, Path, description = "The group"),
        ("name" = String, Path, description = "The parameter")
    ),
    responses((status = 200, body = ChangeView))
)]
async fn unset_group_parameter(
    State(app): On,
    by: RequestedBy,
    names: Named<(String, String)>,
) -> Answer {
    let (of, name) = path(names)?;
    app.unset(&name, ParameterOwner::LimitGroup(&of), &by)
}

impl App {
    fn list(&self, owner: ParameterOwner) -> Answer {
        let readings = self.shared.parameters.list(owner)?;
        json(&readings.iter().map(parameter_view).collect::<Vec<_>>())
    }

    fn read(&self, name: &str, owner: ParameterOwner) -> Answer {
        let reading = self.shared.parameters.get(name, owner)?;
        json(&parameter_view(&reading))
    }

    fn set(
        &self,
        name: &str,
        owner: ParameterOwner,
        body: RequestBody,
        by: &RequestedBy,
    ) -> Answer {
        // An unknown name is reported first, whatever the body.
        TABLE.parse(name)?;
        let body: SetBody = parse(body, SET_FORM)?;
        json(&changed(&self.shared.parameters.set(name, owner, &body.value)?, by))
    }

    fn change(&self, owner: ParameterOwner, body: RequestBody, by: &RequestedBy) -> Answer {
        let ChangeBody(wanted) = parse(body, CHANGE_FORM)?;
        let changes = self.shared.parameters.change(owner, &wanted)?;
        json(&changes.iter().map(|change| changed(change, by)).collect::<Vec<_>>())
    }

    fn unset(&self, name: &str, owner: ParameterOwner, by: &RequestedBy) -> Answer {
        json(&changed(&self.shared.parameters.unset(name, owner)?, by))
    }
}

fn parameter_view(reading: &Reading) -> ParameterView {
    let definition = reading.key.definition();
    ParameterView {
        name: reading.key.name(),
        value: definition.json(reading.value),
        text: definition.text(reading.value),
        origin: reading.origin.as_str().to_owned(),
        default: definition.json(definition.default),
        range: definition.range(),
        unit: definition.unit.to_owned(),
        scope: match definition.scope {
            ParameterScope::Daemon => "daemon".to_owned(),
            ParameterScope::Volume | ParameterScope::VolumeAndGroup => "volume".to_owned(),
            ParameterScope::LimitGroup => "limit-group".to_owned(),
            ParameterScope::Bdi => "bdi".to_owned(),
        },
        since: definition.since.to_owned(),
        effect: definition.effect.to_owned(),
    }
}

/// Logs a change, and makes its view.
fn changed(change: &ParameterChange, by: &RequestedBy) -> ChangeView {
    let definition = change.key.definition();
    let view = ChangeView {
        name: change.key.name(),
        volume: change.volume.clone(),
        bdi: change.bdi.clone(),
        limit_group: change.limit_group.clone(),
        from: definition.text(change.from),
        to: definition.text(change.to),
    };
    if change.from != change.to {
        let (volume, bdi) = (change.volume.as_deref(), change.bdi.as_deref());
        let (from, to) = (&view.from, &view.to);
        let (limit_group, by) = (change.limit_group.as_deref(), by.as_str());
        tracing::info!(
            parameter = view.name,
            volume,
            bdi,
            limit_group,
            from,
            to,
            by,
            "parameter set"
        );
    }
    view
}
