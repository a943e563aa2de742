//! A headless Chromium, driven over a pipe by its DevTools protocol: JSON messages that end in a zero byte.
//!
//! No library is needed for this: messages are lines of JSON on two pipes, which a shell puts where Chromium wants them.
//!
//! Invariants:
//! * A browser has a profile of its own, and no connection but to the page it is told to open.
//! * Everything that the console shows and every request is kept ([`Browser::problems`], [`Browser::requests`]).
//! * Dropping it ends it.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::process::PATIENCE;
use crate::{Error, Result};

/// How long a page may take between two looks at it.
const PAUSE: Duration = Duration::from_millis(50);

/// A browser with one tab.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    next: u64,
    problems: Vec<String>,
    requests: Vec<String>,
    _profile: TempDir,
}

impl Browser {
    /// Starts Chromium with an empty tab.
    ///
    /// # Errors
    /// It is not installed, or does not reply.
    pub fn start() -> Result<Browser> {
        let profile =
            TempDir::with_prefix("ebbd-browser-").map_err(Error::io("make a directory"))?;
        let mut child = Command::new("sh")
            // Chromium reads from descriptor 3 and writes to descriptor 4.
            .args([
                "-c",
                "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null",
                "chromium",
            ])
            // Root may not use its sandbox, nor may a container.
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
            ])
            .args([
                "--disable-sync",
                "--disable-extensions",
                "--hide-scrollbars",
                "--no-default-browser-check",
            ])
            .args(["--remote-debugging-pipe", "--window-size=1400,900"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(Error::io("start a browser"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::unexpected("a browser without pipes"));
        };
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(output).split(0).map_while(std::io::Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { return };
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Browser {
            child,
            input,
            messages,
            session: None,
            next: 0,
            problems: Vec::new(),
            requests: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attach)?;
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network", "Performance"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method of the protocol.
    ///
    /// # Errors
    /// The browser has ended, refuses, or does not reply in time.
    pub fn call(&mut self, method: &str, parameters: impl Into<Value>) -> Result<Value> {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": parameters.into()});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut text = message.to_string().into_bytes();
        text.push(0);
        let gone = "is chromium installed? run testbed/install";
        self.input.write_all(&text).map_err(Error::io(format!("the browser: {gone}")))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(left) {
                Ok(reply) if reply["id"] == json!(self.next) => {
                    return match reply.get("error") {
                        Some(error) => Err(Error::unexpected(format!("{method}: {error}"))),
                        None => Ok(reply["result"].clone()),
                    };
                }
                Ok(event) => self.note(&event),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Error::unexpected(format!("{method}: no reply in {PATIENCE:?}")));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::unexpected(format!("the browser has ended: {gone}")));
                }
            }
        }
    }

    fn note(&mut self, event: &Value) {
        let of = &event["params"];
        match event["method"].as_str() {
            Some("Network.requestWillBeSent") => {
                self.requests.extend(of["request"]["url"].as_str().map(str::to_owned));
            }
            Some("Runtime.exceptionThrown") => {
                self.problems.push(of["exceptionDetails"].to_string());
            }
            Some("Runtime.consoleAPICalled")
                if ["error", "warning", "assert"]
                    .contains(&of["type"].as_str().unwrap_or_default()) =>
            {
                self.problems.push(of["args"].to_string());
            }
            Some("Log.entryAdded") if of["entry"]["level"] == "error" => {
                let entry = &of["entry"];
                let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
                self.problems.push(format!("{} {}", text("url"), text("text")));
            }
            _ => {}
        }
    }

    /// Opens an address and waits until the page is loaded.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn open(&mut self, url: &str) -> Result {
        self.call("Page.navigate", json!({"url": url}))?;
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
    }

    /// The value of an expression in the page; that of a promise is awaited.
    ///
    /// # Errors
    /// As [`Browser::call`], and if it throws.
    pub fn eval(&mut self, expression: &str) -> Result<Value> {
        let parameters = json!({
            "expression": expression, "awaitPromise": true, "returnByValue": true, "userGesture": true,
        });
        let result = self.call("Runtime.evaluate", parameters)?;
        match result.get("exceptionDetails") {
            Some(thrown) => Err(Error::unexpected(format!("{expression}: {thrown}"))),
            None => Ok(result["result"]["value"].clone()),
        }
    }

    /// Waits until an expression in the page is true.
    ///
    /// # Errors
    /// It is not in time; the error has the text of the page.
    pub fn wait_for(&mut self, expression: &str) -> Result {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // While a page is being loaded there may be nothing to ask.
            if self.eval(&format!("Boolean({expression})")).is_ok_and(|value| value == json!(true))
            {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let text = self.eval("document.body.innerText")?;
                let problems = self.problems.join("\n");
                return Err(Error::unexpected(format!(
                    "not in time: {expression}\n{text}\n{problems}"
                )));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// The width and height of the tab, CSS pixels, and whether the colours are dark. A narrow one is a phone.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn show_as(&mut self, width: u32, height: u32, dark: bool) -> Result {
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", metrics)?;
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", media).map(drop)
    }

    /// Writes a picture of the whole page as PNG.
    ///
    /// # Errors
    /// As [`Browser::call`], or the file cannot be written.
    pub fn screenshot(&mut self, path: &Path) -> Result {
        let parameters = json!({"format": "png", "captureBeyondViewport": true});
        let picture = self.call("Page.captureScreenshot", parameters)?;
        let bytes = decode_base64(picture["data"].as_str().unwrap_or_default());
        std::fs::write(path, bytes).map_err(Error::io(path.display().to_string()))
    }

    /// What the console has shown as an error or warning, exceptions included, since the start.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// The addresses of all requests since the start.
    pub fn requests(&self) -> &[String] {
        &self.requests
    }

    /// The seconds that the page's scripts have run so far.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn script_seconds(&mut self) -> Result<f64> {
        let metrics = self.call("Performance.getMetrics", json!({}))?;
        let all = metrics["metrics"].as_array().into_iter().flatten();
        let sum = all
            .filter(|one| one["name"] == "ScriptDuration")
            .filter_map(|one| one["value"].as_f64());
        Ok(sum.sum())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.call("Browser.close", json!({}));
        if !matches!(
            crate::harness::process::wait(&mut self.child, Duration::from_secs(10)),
            Ok(Some(_))
        ) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Decodes base64 without line breaks; other bytes are left out.
fn decode_base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> = text.bytes().filter_map(digit).collect();
    let group = |group: &[u8]| {
        let bits = group.iter().fold(0u32, |bits, digit| bits << 6 | u32::from(*digit));
        let [_, bytes @ ..] = (bits << (6 * (4 - group.len()))).to_be_bytes();
        bytes.into_iter().take(group.len() * 3 / 4).collect::<Vec<u8>>()
    };
    digits.chunks(4).flat_map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::decode_base64;

    #[test]
    fn base64_is_decoded() {
        for (text, bytes) in
            [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYmFy", "foobar")]
        {
            assert_eq!(decode_base64(text), bytes.as_bytes());
        }
    }
}
