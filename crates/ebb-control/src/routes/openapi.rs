//! `GET /v1/openapi.json`: the description of all routes, made from the code.
//!
//! It is made when it is asked for and not kept: it takes some hundred KiB while it is made.

use std::sync::Arc;

use ebb_api::ErrorBody;
use utoipa::openapi::path::{HttpMethod, Operation, PathItem};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, ResponseBuilder};
use utoipa::{PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use crate::answer::{Answer, json};

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
    for (_, operation) in document.paths.paths.values_mut().flat_map(operations) {
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

/// The paths without names in them, for suggestions.
pub(super) fn plain_paths() -> Vec<String> {
    let paths = super::all().into_openapi().paths.paths;
    paths.into_keys().filter(|path| !path.contains('{')).collect()
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
        let served = quoted.filter(|text| text.starts_with("GET,") || text.starts_with("POST"));
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
