//! An operator's way to the page: the page itself comes from the daemon's TCP address, and `/v1` from its control socket,
//! which may change everything.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use testbed::{Error, Result};

/// Runs until the process ends.
pub(crate) struct Relay(std::net::SocketAddr);

impl Relay {
    pub(crate) fn start(page: &str, control: &Path) -> Result<Relay> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(Error::io("bind a relay"))?;
        let address = listener.local_addr().map_err(Error::io("read a port"))?;
        let (page, control) = (page.to_owned(), control.to_owned());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (page, control): (String, PathBuf) = (page.clone(), control.clone());
                // A browser that has gone needs no reply.
                std::thread::spawn(move || drop(relay(stream, &page, &control)));
            }
        });
        Ok(Relay(address))
    }

    pub(crate) fn address(&self) -> std::net::SocketAddr {
        self.0
    }
}

/// Relays one request.
fn relay(stream: TcpStream, page: &str, control: &Path) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut request, mut length) = (String::new(), 0);
    reader.read_line(&mut request)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap_or(0);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let request = request.replace("HTTP/1.1", "HTTP/1.0");
    let mut stream = stream;
    if request.contains(" /v1/whoami ") {
        let who = "{\"role\": \"operate\", \"identity\": \"uid:0\"}";
        let head = format!(
            "HTTP/1.0 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            who.len()
        );
        return stream.write_all((head + who).as_bytes());
    }
    let message = format!("{request}Host: localhost\r\nContent-Length: {length}\r\n\r\n");
    let message = [message.as_bytes(), &body].concat();
    if request.contains(" /v1/") {
        let mut daemon = UnixStream::connect(control)?;
        daemon.write_all(&message)?;
        std::io::copy(&mut daemon, &mut stream).map(drop)
    } else {
        let mut daemon = TcpStream::connect(page)?;
        daemon.write_all(&message)?;
        std::io::copy(&mut daemon, &mut stream).map(drop)
    }
}
