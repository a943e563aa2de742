//! The name of the pre-shared key that a client has: with TLS 1.3 OpenSSL does not keep it, so it is kept in a place of the
//! connection's OpenSSL object.

use std::sync::OnceLock;

use openssl::error::ErrorStack;
use openssl::ex_data::Index;
use openssl::ssl::{Ssl, SslRef};

/// The place of the name.
pub(crate) fn place() -> Result<Index<Ssl, Box<[u8]>>, ErrorStack> {
    static PLACE: OnceLock<Index<Ssl, Box<[u8]>>> = OnceLock::new();
    if let Some(place) = PLACE.get() {
        return Ok(*place);
    }
    let place = Ssl::new_ex_index()?;
    Ok(*PLACE.get_or_init(|| place))
}

/// The name of the key that the client of an accepted session has.
pub(crate) fn of(ssl: &SslRef) -> Option<&[u8]> {
    ssl.ex_data(place().ok()?).map(|name| &**name)
}
