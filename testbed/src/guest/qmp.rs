//! QEMU's monitor: one command at a time, and events.
//!
//! Source: QEMU's `interop/qmp-spec.rst`.

use crate::harness::process::PATIENCE;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Qmp {
    /// Connects, and leaves the negotiation mode.
    ///
    /// # Errors
    /// No QEMU listens there, or it does not reply.
    pub fn connect(path: &Path) -> Result<Qmp> {
        let stream = UnixStream::connect(path).map_err(Error::io("connect to the monitor"))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(Error::io("set a timeout"))?;
        let mut qmp = Qmp { stream: BufReader::new(stream), events: Vec::new() };
        let greeting = qmp.read()?;
        if greeting["QMP"].is_null() {
            return Err(Error::unexpected(format!("no greeting of a monitor: {greeting}")));
        }
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Executes a command, and returns its result.
    ///
    /// # Errors
    /// QEMU refuses it, or has ended.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        let stream = self.stream.get_mut();
        stream.write_all(line.as_bytes()).map_err(Error::io("write to the monitor"))?;
        loop {
            let mut reply = self.read()?;
            if !reply["event"].is_null() {
                self.events.push(reply);
            } else if reply["error"].is_null() {
                return Ok(reply["return"].take());
            } else {
                return Err(Error::unexpected(format!("{command} {arguments}: {reply}")));
            }
        }
    }

    /// Waits for an event of this name, or takes one that came while commands were executed.
    ///
    /// # Errors
    /// It does not come.
    pub fn event(&mut self, name: &str) -> Result<Value> {
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return Ok(self.events.remove(at));
            }
            let event = self.read()?;
            self.events.push(event);
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).map_err(Error::io("read from the monitor"))?;
        if read == 0 {
            return Err(Error::unexpected("QEMU has closed its monitor"));
        }
        serde_json::from_str(&line)
            .map_err(|e| Error::unexpected(format!("no JSON of a monitor: {line} ({e})")))
    }
}
