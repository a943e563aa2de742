//! `GET /v1/openapi.json`: the description of all routes, made from the code.
//!
//! It is made when it is asked for and not kept: it takes some hundred KiB while it is made.

use std::sync::Arc;

use axum::http::Method;
use ebb_api::ErrorBody;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::path::{HttpMethod, Operation, PathItem};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, ResponseBuilder};
use utoipa::{PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use crate::access::{Role, needed_role};
use crate::answer::{Answer, json};

/// The name of the security scheme.
const TOKEN: &str = "token";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(openapi))
}

/// This description.
#[utoipa::path(
    get, path = "/v1/openapi.json", tag = "interface",
    responses((status = 200, description = "An OpenAPI document", content_type = "application/json"))
)]
async fn openapi() -> Answer {
    json(&document())
}

/// The description of all routes.
pub(super) fn document() -> OpenApi {
    let mut document = super::all().into_openapi();
    document.info = utoipa::openapi::InfoBuilder::new()
        .title("ebbd")
        .version("v1")
        .description(Some(
            "The interface of ebbd's control socket and page. A failure is an ErrorBody.",
        ))
        .license(Some(
            utoipa::openapi::LicenseBuilder::new()
                .name("Apache-2.0 OR MIT")
                .identifier(Some("Apache-2.0 OR MIT"))
                .build(),
        ))
        .build();
    let name = ErrorBody::name().into_owned();
    let components = document.components.get_or_insert_default();
    components.schemas.insert(name.clone(), ErrorBody::schema());
    let failure = ResponseBuilder::new()
        .description("A failure: 4xx if the request is at fault, 5xx otherwise")
        .content("application/json", Content::new(Some(Ref::from_schema_name(name))))
        .build();
    let token = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some("A token of `ebbd token`. The control socket needs none."))
        .build();
    components.security_schemes.insert(TOKEN.to_owned(), SecurityScheme::Http(token).into());
    let all = document.paths.paths.iter_mut();
    let all =
        all.flat_map(|(path, item)| operations(item).map(move |(method, one)| (path, method, one)));
    for (path, method, operation) in all {
        describe_role(operation, needed_role(&http_method(&method), path));
        // A description is required, and the operation's says what a success replies.
        let summary = operation.summary.clone().unwrap_or_default();
        for response in operation.responses.responses.values_mut() {
            if let RefOr::T(response) = response
                && response.description.is_empty()
            {
                response.description.clone_from(&summary);
            }
        }
        operation.responses.responses.insert("default".to_owned(), failure.clone().into());
    }
    document
}

/// Adds the role that an operation needs: to its text, as `x-role`, and as the token that a generated client sends.
fn describe_role(operation: &mut Operation, role: Role) {
    let (needs, security) = match role {
        Role::None => ("Needs no role.".to_owned(), Vec::new()),
        _ => {
            let needs = format!("Needs the role `{}`.", role.as_str());
            (needs, vec![SecurityRequirement::new(TOKEN, Vec::<String>::new())])
        }
    };
    operation.security = Some(security);
    operation.extensions = Some(Extensions::builder().add("x-role", role.as_str()).build());
    let text = operation.description.take().filter(|text| !text.is_empty());
    operation.description = Some(text.map_or(needs.clone(), |text| format!("{text}\n\n{needs}")));
}

fn http_method(method: &HttpMethod) -> Method {
    match method {
        HttpMethod::Get => Method::GET,
        HttpMethod::Put => Method::PUT,
        HttpMethod::Post => Method::POST,
        HttpMethod::Delete => Method::DELETE,
        HttpMethod::Options => Method::OPTIONS,
        HttpMethod::Head => Method::HEAD,
        HttpMethod::Patch => Method::PATCH,
        HttpMethod::Trace => Method::TRACE,
    }
}

/// The operations of a path.
fn operations(item: &mut PathItem) -> impl Iterator<Item = (HttpMethod, &mut Operation)> {
    let all = [
        (HttpMethod::Get, &mut item.get),
        (HttpMethod::Put, &mut item.put),
        (HttpMethod::Post, &mut item.post),
        (HttpMethod::Patch, &mut item.patch),
        (HttpMethod::Delete, &mut item.delete),
    ];
    all.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// The paths without names in them; and of the others those with the names of `given`, if they
/// have as many parts and begin alike.
pub(super) fn paths_like(given: &str) -> Vec<String> {
    let given: Vec<&str> = given.split('/').collect();
    let paths = super::all().into_openapi().paths.paths;
    paths.into_keys().filter_map(|path| with_names(path, &given)).collect()
}

fn with_names(path: String, given: &[&str]) -> Option<String> {
    if !path.contains('{') {
        return Some(path);
    }
    let parts: Vec<&str> = path.split('/').collect();
    if parts.len() != given.len() || parts.get(..3) != given.get(..3) {
        return None;
    }
    let named = parts.iter().zip(given).map(|(part, given)| match part.starts_with('{') {
        true => *given,
        false => *part,
    });
    Some(named.collect::<Vec<_>>().join("/"))
}

/// The method and path of every operation.
#[cfg(test)]
pub(crate) fn described() -> Vec<(String, String)> {
    let document = serde_json::to_value(document()).unwrap_or_default();
    let paths = document["paths"].as_object().into_iter().flatten();
    paths
        .flat_map(|(path, item)| {
            let methods = item.as_object().into_iter().flatten();
            methods.map(|(method, _)| (method.to_uppercase(), path.clone()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::Router;
    use serde_json::Value;

    use super::*;

    fn served() -> Value {
        serde_json::to_value(document()).unwrap()
    }

    /// The router's own list of paths, and of the methods of each, in its debug output.
    #[test]
    fn every_route_that_is_served_is_described_and_the_reverse() {
        let shown = format!("{:?}", Router::<Arc<App>>::from(crate::routes::all()));
        let quoted = shown.split('"');
        let paths = quoted
            .clone()
            .filter(|text| !text.starts_with("/{*") && text.len() > 1 && text.starts_with('/'));
        let paths: BTreeSet<&str> = paths.collect();
        let mut document = document();
        let described: BTreeSet<&str> = document.paths.paths.keys().map(String::as_str).collect();
        assert!(paths.len() > 10, "{shown}");
        assert_eq!(paths, described);
        let sorted = |methods: &mut Vec<&str>| {
            methods.retain(|method| *method != "HEAD");
            methods.sort_unstable();
            methods.join(",")
        };
        let is_method =
            |text: &&str| ["GET,", "POST", "DELETE"].iter().any(|m| text.starts_with(m));
        let served = quoted.filter(is_method);
        let mut served: Vec<String> =
            served.map(|methods| sorted(&mut methods.split(',').collect())).collect();
        let items = document.paths.paths.values_mut();
        let mut described: Vec<String> = items
            .map(|item| sorted(&mut operations(item).map(|(method, _)| name(&method)).collect()))
            .collect();
        served.sort_unstable();
        described.sort_unstable();
        assert_eq!(served, described);
    }

    fn name(method: &HttpMethod) -> &'static str {
        match method {
            HttpMethod::Get => "GET",
            HttpMethod::Put => "PUT",
            HttpMethod::Post => "POST",
            HttpMethod::Patch => "PATCH",
            HttpMethod::Delete => "DELETE",
            _ => "another",
        }
    }

    #[test]
    fn every_operation_has_a_unique_name_a_text_and_its_parameters() {
        let document = served();
        let mut names = BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                let name = operation["operationId"].as_str().unwrap();
                assert!(names.insert(name.to_owned()), "{name} twice");
                assert!(!operation["summary"].as_str().unwrap_or_default().is_empty(), "{name}");
                let given: BTreeSet<String> = operation["parameters"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default()
                    .iter()
                    .filter(|parameter| parameter["in"] == "path")
                    .map(|parameter| format!("{{{}}}", parameter["name"].as_str().unwrap()))
                    .collect();
                let wanted: BTreeSet<String> = path
                    .split('/')
                    .filter(|part| part.starts_with('{'))
                    .map(str::to_owned)
                    .collect();
                assert_eq!(given, wanted, "{method} {path}");
                let responses = operation["responses"].as_object().unwrap();
                assert!(responses.len() > 1 && responses.contains_key("default"), "{name}");
                for (status, response) in responses {
                    let text = response["description"].as_str().unwrap_or_default();
                    assert!(!text.is_empty(), "{name}: {status} has no description");
                }
            }
        }
    }

    #[test]
    fn every_operation_names_its_role_and_the_token_that_gives_it() {
        let document = served();
        assert_eq!(document["components"]["securitySchemes"][TOKEN]["scheme"], "bearer");
        let of = |path: &str, method: &str| {
            let operation = &document["paths"][path][method];
            let security = operation["security"].to_string();
            let text = operation["description"].as_str().unwrap_or_default().to_owned();
            (operation["x-role"].as_str().unwrap().to_owned(), security, text)
        };
        let token = r#"[{"token":[]}]"#;
        let (role, security, text) = of("/v1/stat", "get");
        assert_eq!((&*role, &*security), ("view", token));
        assert!(text.ends_with("Needs the role `view`."), "{text}");
        let (role, security, _) = of("/v1/parameters/{name}", "put");
        assert_eq!((&*role, &*security), ("operate", token));
        let (role, security, _) = of("/healthz", "get");
        assert_eq!((&*role, &*security), ("none", "[]"));
    }

    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => {
                if let Some(Value::String(to)) = fields.get("$ref") {
                    found.insert(to.clone());
                }
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_to_a_schema() {
        let document = served();
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        assert!(found.len() > 10, "{found:?}");
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
        }
    }
}
