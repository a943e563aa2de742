//! Every kind of entry against every kind of client; and any text as an entry.

use std::io;

use ebb_access::{
    AccessEntry, AccessError, AccessList, ClientIdentity, ENTRIES_MAX, ENTRY_BYTES_MAX, NameLookup,
    SocketCredentials, XenGuest,
};
use proptest::prelude::*;

struct Names;

impl NameLookup for Names {
    fn user(&self, name: &str) -> io::Result<Option<u32>> {
        match name {
            "alice" => Ok(Some(1000)),
            "broken" => Err(io::Error::other("the directory does not answer")),
            _ => Ok(None),
        }
    }

    fn group(&self, name: &str) -> io::Result<Option<u32>> {
        Ok((name == "disk").then_some(6))
    }
}

fn entry(text: &str) -> Result<AccessEntry, AccessError> {
    AccessEntry::parse_with(text, &Names)
}

fn tls(name: &str) -> ClientIdentity {
    let address = Some("10.0.0.9".parse().unwrap());
    ClientIdentity { tls: Some(name.into()), address, ..ClientIdentity::default() }
}

fn tcp(address: &str) -> ClientIdentity {
    ClientIdentity { address: Some(address.parse().unwrap()), ..ClientIdentity::default() }
}

fn unix(uid: u32, gid: u32, groups: &[u32]) -> ClientIdentity {
    let socket = Some(SocketCredentials { pid: 7, uid, gid, groups: groups.into() });
    ClientIdentity { socket, ..ClientIdentity::default() }
}

fn guest(domain: u32, name: &str, uuid: &str) -> ClientIdentity {
    let (name, uuid) = (Some(name.into()), Some(uuid.into()));
    ClientIdentity { guest: Some(XenGuest { domain, name, uuid }), ..ClientIdentity::default() }
}

const UUID: &str = "0aB3c4d5-0000-1111-2222-333344445555";

/// The clients, and the entries that match each; no other entry of the table does.
fn clients() -> Vec<(&'static str, ClientIdentity, &'static [&'static str])> {
    const TEN: &str = "net:10.0.0.0/8";
    const ALL: &str = "net:0.0.0.0/0";
    vec![
        ("psk alice", tls("psk:alice"), &["psk:alice", TEN, ALL]),
        ("psk bob", tls("psk:bob"), &[TEN, ALL]),
        // A name that begins like another kind.
        ("psk cn:a.host", tls("psk:cn:a.host"), &[TEN, ALL]),
        ("certificate", tls("cn:a.host"), &["cn:*.host", "cn:a.host", TEN, ALL]),
        ("certificate below", tls("cn:b.a.host"), &["cn:*.host", TEN, ALL]),
        ("certificate psk:alice", tls("cn:psk:alice"), &[TEN, ALL]),
        ("tcp", tcp("10.1.2.3"), &[TEN, ALL]),
        ("tcp, mapped", tcp("::ffff:10.1.2.3"), &[TEN, ALL]),
        ("tcp elsewhere", tcp("192.0.2.1"), &[ALL]),
        ("tcp, IPv6", tcp("fd00::1"), &["net:fd00::/8"]),
        ("user alice", unix(1000, 100, &[]), &["uid:1000", "uid:alice"]),
        ("group disk", unix(5, 6, &[]), &["gid:6", "gid:disk"]),
        ("supplementary", unix(5, 100, &[4, 6]), &["gid:6", "gid:disk"]),
        // The numbers of a user and of a group are not the same thing.
        ("user 6 of group 1000", unix(6, 1000, &[]), &[]),
        ("root", unix(0, 0, &[]), &["uid:0"]),
        (
            "guest",
            guest(3, "guest1", UUID),
            &["xen:guest1", "xen:3", "xen:0AB3C4D5-0000-1111-2222-333344445555"],
        ),
        ("other guest", guest(4, "guest12", ""), &[]),
        ("guest called 3", guest(5, "3", ""), &[]),
        ("unknown", ClientIdentity::default(), &[]),
    ]
}

const ENTRIES: &[&str] = &[
    "psk:alice",
    "cn:*.host",
    "cn:a.host",
    "net:10.0.0.0/8",
    "net:0.0.0.0/0",
    "net:fd00::/8",
    "uid:1000",
    "uid:alice",
    "uid:0",
    "gid:6",
    "gid:disk",
    "xen:guest1",
    "xen:3",
    "xen:0AB3C4D5-0000-1111-2222-333344445555",
];

#[test]
fn every_entry_against_every_client() {
    for (name, client, matching) in clients() {
        for text in ENTRIES {
            let admitted = AccessList::new(vec![entry(text).unwrap()]).unwrap().admits(&client);
            assert_eq!(admitted, matching.contains(text), "{name} against {text}");
        }
        let all = ENTRIES.iter().map(|text| entry(text).unwrap()).collect();
        assert_eq!(AccessList::new(all).unwrap().admits(&client), !matching.is_empty(), "{name}");
        assert!(!AccessList::new(Vec::new()).unwrap().admits(&client), "an empty list: {name}");
    }
}

#[test]
fn a_mistake_has_a_remedy() {
    let unknown = |what| AccessError::UnknownName { what };
    for (text, error) in [
        ("", AccessError::NoKind),
        ("alice", AccessError::NoKind),
        ("user:alice", AccessError::UnknownKind),
        ("PSK:alice", AccessError::UnknownKind),
        (" uid:0", AccessError::UnknownKind),
        ("psk:", AccessError::Empty { kind: "psk" }),
        ("cn:", AccessError::Empty { kind: "cn" }),
        ("uid:", AccessError::Empty { kind: "uid" }),
        ("gid:", AccessError::Empty { kind: "gid" }),
        ("net:", AccessError::Empty { kind: "net" }),
        ("xen:", AccessError::Empty { kind: "xen" }),
        ("uid:alcie", unknown("user")),
        ("gid:dsik", unknown("group")),
        ("uid:-1", unknown("user")),
        ("uid:4294967295", AccessError::BadNumber { what: "user" }),
        ("gid:99999999999999999999", AccessError::BadNumber { what: "group" }),
        (
            "uid:broken",
            AccessError::LookUp { what: "user", why: "the directory does not answer".into() },
        ),
        ("net:10.0.0.0/33", AccessError::BadNetwork),
        ("net:10.0.0.1/8", AccessError::BitsBeyondPrefix { network: "10.0.0.0/8".into() }),
        ("psk:a\nb", AccessError::Control),
    ] {
        let refused = entry(text).unwrap_err();
        assert_eq!(refused, error, "{text}");
        assert!(!refused.remedy().is_empty() && !refused.to_string().is_empty(), "{text}");
    }
    let long = format!("psk:{}", "x".repeat(ENTRY_BYTES_MAX));
    assert_eq!(entry(&long), Err(AccessError::TooLong));
    let many = vec![entry("psk:a").unwrap(); ENTRIES_MAX + 1];
    assert_eq!(AccessList::new(many), Err(AccessError::TooMany { count: ENTRIES_MAX + 1 }));
}

#[test]
fn the_log_names_a_client_without_its_control_characters() {
    let shown = |client: &ClientIdentity| client.to_string();
    assert_eq!(shown(&tls("cn:a\nb")), r"cn:a\nb, 10.0.0.9");
    assert_eq!(shown(&unix(5, 6, &[7])), "uid 5, pid 7");
    assert_eq!(shown(&guest(3, "guest1", UUID)), "Xen guest 3, guest1");
    assert_eq!(shown(&tcp("::ffff:10.1.2.3")), "10.1.2.3");
    assert_eq!(shown(&ClientIdentity::default()), "unknown");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    /// Any text is an entry that is shown as it was written and checked without a panic, or an error.
    #[test]
    fn any_text_is_an_entry_or_an_error(
        kind in prop::sample::select(vec!["", "psk", "cn", "uid", "gid", "net", "xen", "x"]),
        value in prop_oneof![".*", "[0-9a-f.:/]{0,40}", "[*a.]{0,20}", "[0-9]{0,12}"],
    ) {
        let text = format!("{kind}:{value}");
        for text in [text.as_str(), value.as_str()] {
            match entry(text) {
                Ok(entry) => {
                    prop_assert_eq!(entry.text(), text);
                    for (_, client, _) in clients() {
                        entry.matches(&client);
                    }
                    prop_assert!(!entry.matches(&ClientIdentity::default()));
                }
                Err(error) => prop_assert!(!error.remedy().is_empty()),
            }
        }
    }

    /// A pattern with a star matches what its parts enclose, and a pattern without one matches itself only.
    #[test]
    fn a_pattern_matches_what_it_describes(
        before in "[a-c.]{0,4}", inside in "[a-c.]{1,5}", after in "[a-c.]{0,4}",
    ) {
        let matches = |pattern: &str, name: &str| {
            entry(&format!("cn:{pattern}")).unwrap().matches(&tls(&format!("cn:{name}")))
        };
        let name = format!("{before}{inside}{after}");
        let pattern = format!("{before}*{after}");
        prop_assert!(matches(&pattern, &name));
        prop_assert!(matches(&name, &name));
        let shorter = format!("{before}{after}");
        if !shorter.is_empty() {
            prop_assert!(!matches(&pattern, &shorter));
        }
        let longer = format!("{name}x");
        prop_assert!(!matches(&name, &longer));
    }
}
