//! Certificates and pre-shared keys, in directories laid out as NBD programs look for them:
//! `ca-cert.pem`, `server-cert.pem`, `server-key.pem`, `client-cert.pem`, `client-key.pem`.

use crate::{Error, Result, Tool};
use std::fs;
use std::path::{Path, PathBuf};

/// A certificate authority with the directory it keeps its own key in.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
}

/// The subject of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A server on this machine: `localhost`, `127.0.0.1`, `::1`.
    Server,
    /// A client.
    Client,
}

impl Authority {
    /// Makes a new authority; its key stays in `dir`, which is made.
    ///
    /// # Errors
    /// `certtool` is missing or fails.
    pub fn new(dir: impl Into<PathBuf>) -> Result<Authority> {
        let dir = dir.into();
        fs::create_dir_all(&dir).map_err(Error::io(dir.display().to_string()))?;
        key(Key::EcdsaP256, &dir.join("ca-key.pem"))?;
        let template = dir.join("ca.template");
        write(&template, "cn = Authority of a test\nca\ncert_signing_key\nexpiration_days = 2\n")?;
        Tool::new("certtool")
            .args(["--generate-self-signed", "--load-privkey", "ca-key.pem"])
            .args(["--template", "ca.template", "--outfile", "ca-cert.pem"])
            .dir(&dir)
            .ok()?;
        Ok(Authority { dir })
    }

    /// Makes a directory with this authority's certificate and a key and certificate for `role`.
    ///
    /// # Errors
    /// `certtool` is missing or fails.
    pub fn issue(&self, role: Role, dir: impl Into<PathBuf>) -> Result<PathBuf> {
        self.issue_for(role, Key::EcdsaP256, "expiration_days = 2\n", dir)
    }

    /// As [`Authority::issue`], with an RSA key of so many bits.
    ///
    /// # Errors
    /// `certtool` is missing or fails.
    pub fn issue_rsa(&self, role: Role, bits: u32, dir: impl Into<PathBuf>) -> Result<PathBuf> {
        self.issue_for(role, Key::Rsa(bits), "expiration_days = 2\n", dir)
    }

    /// As [`Authority::issue`], with a certificate that is not valid any more.
    ///
    /// # Errors
    /// `certtool` is missing or fails.
    pub fn issue_expired(&self, role: Role, dir: impl Into<PathBuf>) -> Result<PathBuf> {
        let dates = "activation_date = \"2001-01-01\"\nexpiration_date = \"2002-01-01\"\n";
        self.issue_for(role, Key::EcdsaP256, dates, dir)
    }

    /// As [`Authority::issue`] for a client, with this common name.
    ///
    /// # Errors
    /// `certtool` is missing or fails.
    pub fn issue_named(&self, name: &str, dir: impl Into<PathBuf>) -> Result<PathBuf> {
        let subject = (Role::Client, name);
        self.issue_to(subject, Key::EcdsaP256, "expiration_days = 2\n", dir.into())
    }

    fn issue_for(
        &self,
        role: Role,
        kind: Key,
        dates: &str,
        dir: impl Into<PathBuf>,
    ) -> Result<PathBuf> {
        self.issue_to((role, "a client"), kind, dates, dir.into())
    }

    /// `client` is the common name of a client.
    fn issue_to(
        &self,
        (role, client): (Role, &str),
        kind: Key,
        dates: &str,
        dir: PathBuf,
    ) -> Result<PathBuf> {
        fs::create_dir_all(&dir).map_err(Error::io(dir.display().to_string()))?;
        let ca = dir.join("ca-cert.pem");
        fs::copy(self.dir.join("ca-cert.pem"), &ca).map_err(Error::io("copy ca-cert.pem"))?;
        let (name, template) = match role {
            Role::Server => (
                "server",
                "cn = localhost\ndns_name = localhost\nip_address = 127.0.0.1\nip_address = ::1\n\
                 tls_www_server\nsigning_key\n"
                    .to_owned(),
            ),
            Role::Client => ("client", format!("cn = {client}\ntls_www_client\nsigning_key\n")),
        };
        key(kind, &dir.join(format!("{name}-key.pem")))?;
        let file = dir.join("template");
        write(&file, &format!("{template}{dates}"))?;
        Tool::new("certtool")
            .args(["--generate-certificate", "--load-ca-privkey"])
            .arg(self.dir.join("ca-key.pem"))
            .args(["--load-ca-certificate", "ca-cert.pem", "--load-privkey"])
            .arg(format!("{name}-key.pem"))
            .args(["--template", "template", "--outfile"])
            .arg(format!("{name}-cert.pem"))
            .dir(&dir)
            .ok()?;
        Ok(dir)
    }
}

/// Makes `DIR/keys.psk` with a fresh key for each user, and gives its path.
///
/// # Errors
/// `psktool` is missing or fails.
pub fn pre_shared_keys(dir: &Path, users: &[&str]) -> Result<PathBuf> {
    fs::create_dir_all(dir).map_err(Error::io(dir.display().to_string()))?;
    let path = dir.join("keys.psk");
    for user in users {
        Tool::new("psktool").args(["-u", user, "-p"]).arg(&path).ok()?;
    }
    Ok(path)
}

/// What a private key is made for.
#[derive(Debug, Clone, Copy)]
enum Key {
    EcdsaP256,
    /// Of so many bits.
    Rsa(u32),
}

fn key(kind: Key, path: &Path) -> Result {
    let certtool = Tool::new("certtool").args(["--generate-privkey", "--key-type"]);
    let certtool = match kind {
        Key::EcdsaP256 => certtool.args(["ecdsa", "--curve", "secp256r1"]),
        Key::Rsa(bits) => certtool.args(["rsa", "--bits", &bits.to_string()]),
    };
    certtool.arg("--outfile").arg(path).ok().map(drop)
}

fn write(path: &Path, text: &str) -> Result {
    fs::write(path, text).map_err(Error::io(path.display().to_string()))
}
