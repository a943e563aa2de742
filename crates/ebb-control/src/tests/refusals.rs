//! Texts of refused requests.

use super::*;

#[test]
fn refusals_name_no_types_and_no_form_for_a_long_body() {
    let daemon = start();
    let pages = "/v1/parameters/max_buffer_pages";
    let ask = |method: &str, path: &str, body: &str| -> Value {
        serde_json::from_str(&daemon.ask(method, path, body).1).unwrap()
    };
    let long = " ".repeat(crate::MAX_BODY_BYTES + 1);
    let said = ask("PUT", pages, "5");
    let message = said["message"].as_str().unwrap_or_default();
    assert!(message.contains("expected an object") && !message.contains("SetBody"), "{said}");
    let said = ask("PUT", pages, &long);
    let remedy = said["remedy"].as_str().unwrap_or_default();
    assert!(remedy.contains("send a shorter one") && !remedy.contains("\"value\""), "{said}");
    let sized = "{\"name\": \"a\", \"store\": \"file:/a\", \"size\": 5}";
    let said = ask("POST", "/v1/volumes", sized);
    assert!(said["remedy"].as_str().unwrap_or_default().contains("\"size\": \"1G\""), "{said}");
}
