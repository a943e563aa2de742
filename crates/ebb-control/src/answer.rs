//! Replies: JSON, or a failure as JSON with its status.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ebb_api::ErrorBody;
use ebb_config::params::{ParameterError, ParameterErrorKind};
use serde::Serialize;

/// A failure and its status.
#[derive(Debug)]
pub(super) struct ApiRefusal(pub(super) StatusCode, pub(super) ErrorBody);

/// The result of a handler.
pub(super) type Answer = Result<Response, ApiRefusal>;

impl ApiRefusal {
    pub(super) fn new(
        status: StatusCode,
        error: &str,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (message, remedy) = (message.into(), remedy.into());
        Self(status, ErrorBody { error: error.to_owned(), message, remedy })
    }
}

impl From<ParameterError> for ApiRefusal {
    fn from(error: ParameterError) -> Self {
        let status = match error.kind {
            ParameterErrorKind::UnknownParameter
            | ParameterErrorKind::UnknownVolume
            | ParameterErrorKind::UnknownBdi
            | ParameterErrorKind::NotPerVolume
            | ParameterErrorKind::NotPerBdi
            | ParameterErrorKind::UnknownLimitGroup
            | ParameterErrorKind::NotPerLimitGroup => StatusCode::NOT_FOUND,
            ParameterErrorKind::InvalidValue | ParameterErrorKind::OutOfRange => {
                StatusCode::UNPROCESSABLE_ENTITY
            }
            ParameterErrorKind::Conflict => StatusCode::CONFLICT,
        };
        Self::new(status, error.kind.as_str(), error.message, error.remedy)
    }
}

impl IntoResponse for ApiRefusal {
    fn into_response(self) -> Response {
        let mut answer = (self.0, body(&self.1)).into_response();
        if self.0 == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"ebbd\"");
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        answer
    }
}

/// A successful reply.
pub(super) fn json(value: &impl Serialize) -> Answer {
    Ok(body(value).into_response())
}

fn body(value: &impl Serialize) -> impl IntoResponse {
    // Plain data with string keys always serialises.
    let mut text = serde_json::to_vec(value).unwrap_or_default();
    text.push(b'\n');
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text)
}
