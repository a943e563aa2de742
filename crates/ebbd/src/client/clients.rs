//! `ebbd client`: who is connected, and disconnecting a client.

use ebb_api::ClientView;

use super::show::bytes;
use super::table::TextTable;
use super::{ClientError, DaemonClient, encoded, json_text};
use crate::cli::{ClientAction, ClientArgs, OneClient};

/// Lists, shows or disconnects clients.
///
/// # Errors
/// [`ClientError`].
pub fn clients(args: &ClientArgs) -> Result<String, ClientError> {
    let one = |one: &OneClient, method: &str| {
        let daemon = DaemonClient::new(one.options.control.as_deref())?;
        daemon.json::<ClientView>(method, &format!("/v1/clients/{}", encoded(&one.id)), None)
    };
    Ok(match &args.action {
        ClientAction::List(options) => {
            let daemon = DaemonClient::new(options.control.as_deref())?;
            let views: Vec<ClientView> = daemon.json("GET", "/v1/clients", None)?;
            if options.json { json_text(&views) } else { list(&views) }
        }
        ClientAction::Show(given) => {
            let view = one(given, "GET")?;
            if given.options.json { json_text(&view) } else { show(&view) }
        }
        ClientAction::Disconnect(given) => {
            let view = one(given, "DELETE")?;
            match given.options.json {
                true => json_text(&view),
                false => disconnecting(&view),
            }
        }
    })
}

fn disconnecting(view: &ClientView) -> String {
    let when = match view.export.as_str() {
        "vhost-user" => {
            "after its requests in flight; QEMU with the option `reconnect` of its chardev connects again"
        }
        _ => "in at most 5 s",
    };
    format!("{}: disconnecting from volume {}, {when}\n", view.id, view.volume)
}

fn list(views: &[ClientView]) -> String {
    if views.is_empty() {
        return "no client is connected\n".to_owned();
    }
    let titles = [
        "CLIENT",
        "VOLUME",
        "ADDRESS",
        "IDENTITY",
        "TLS",
        "CONNECTED",
        "IN FLIGHT",
        "REQUESTS",
        "READ",
        "WRITTEN",
    ];
    let mut table = TextTable::new(&titles, 0b1_1111);
    for view in views {
        table.row([
            view.id.clone(),
            view.volume.clone(),
            view.address.clone(),
            view.identity.clone().unwrap_or_else(|| "-".to_owned()),
            if view.tls { "yes" } else { "no" }.to_owned(),
            format!("{:.0}s", view.connected_seconds),
            view.in_flight.to_string(),
            view.requests.to_string(),
            bytes(view.read_bytes),
            bytes(view.written_bytes),
        ]);
    }
    table.text()
}

fn show(view: &ClientView) -> String {
    let pid = view.pid.map(|pid| format!(", process {pid}")).unwrap_or_default();
    let identity = view.identity.as_deref().unwrap_or("not known");
    let tls = if view.tls { "TLS" } else { "plain text" };
    let waits = view.waits_for.as_ref().map(|writer| format!("waits for {writer}"));
    let access = if view.read_only { "read-only" } else { "read and write" };
    let access = waits.as_deref().unwrap_or(access);
    format!(
        "{}: volume {} ({access})\naddress   {}{pid} ({tls})\nidentity  {identity}\n\
         connected {:.0} s\nrequests  {} ({} in flight), {} read, {} written\n",
        view.id,
        view.volume,
        view.address,
        view.connected_seconds,
        view.requests,
        view.in_flight,
        bytes(view.read_bytes),
        bytes(view.written_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_client_has_a_row_and_a_page() {
        let view = ClientView {
            id: "nbd-17".into(),
            volume: "disk".into(),
            address: "unix".into(),
            identity: Some("uid:1000".into()),
            pid: Some(42),
            requests: 9,
            read_bytes: 4096,
            ..ClientView::default()
        };
        let text = list(std::slice::from_ref(&view));
        assert!(text.starts_with("CLIENT") && text.contains("TLS  CONNECTED  IN FLIGHT"), "{text}");
        let row: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(row, ["nbd-17", "disk", "unix", "uid:1000", "no", "0s", "0", "9", "4.0K", "0"]);
        assert!(
            show(&view).contains("address   unix, process 42 (plain text)\nidentity  uid:1000")
        );
        assert_eq!(list(&[]), "no client is connected\n");
        assert!(disconnecting(&view).ends_with("disk, in at most 5 s\n"));
        let waits_for = Some("KVM guest vhost-2".into());
        let guest = ClientView { export: "vhost-user".into(), waits_for, ..view };
        assert!(show(&guest).contains("volume disk (waits for KVM guest vhost-2)"));
        assert!(disconnecting(&guest).contains("after its requests in flight; QEMU"));
    }
}
