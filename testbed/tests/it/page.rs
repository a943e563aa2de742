//! The page in a headless Chromium, with a real daemon and real requests: what it shows, what it changes, and that it
//! loads nothing from elsewhere.

mod relay;

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use relay::Relay;
use serde_json::{Value, json};
use testbed::harness::binary::{Build, ebbd};
use testbed::harness::browser::Browser;
use testbed::harness::nbd::Client;
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, Tool, check};

const SIZE: u64 = 16 << 20;

struct Rig {
    server: Server,
    control: PathBuf,
    page: String,
    browser: Browser,
}

impl Rig {
    /// A daemon with a volume that has requests, one without, and one that cannot be opened.
    fn start() -> Result<Rig> {
        let setup = Setup::new()?.image("disk", SIZE)?.volume("idle=null:1M");
        let missing = setup.dir().join("missing.img");
        Rig::of(setup.volume(&format!("lost=file:{}", missing.display())))
    }

    fn of(setup: Setup) -> Result<Rig> {
        let port = free_port()?;
        let control = setup.dir().join("control.sock");
        let server = setup
            .log_level("warn")
            .arg("--control")
            .arg(&control)
            .arg("--web")
            .arg(format!("127.0.0.1:{port}"))
            .start()?;
        Ok(Rig { server, control, page: format!("127.0.0.1:{port}"), browser: Browser::start()? })
    }

    fn requests(&self) -> Result {
        let mut client = Client::open(&self.server.socket(), "disk")?;
        for block in 0..64 {
            client.write(block * 4096, &[7; 4096], 0)?;
            client.read(block * 4096, 4096)?;
        }
        client.disconnect()?;
        Ok(())
    }

    fn is_clean_of_problems(&self) -> Result {
        let problems = self.browser.problems();
        check(problems.is_empty(), || format!("the console shows {problems:?}"))
    }

    /// Nothing went wrong in the page, and it sent no request elsewhere.
    fn is_clean(&self, origin: &str) -> Result {
        self.is_clean_of_problems()?;
        let elsewhere: Vec<_> =
            self.browser.requests().iter().filter(|url| !url.starts_with(origin)).collect();
        check(elsewhere.iter().all(|url| *url == "about:blank"), || format!("asked {elsewhere:?}"))
    }
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16> {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").map_err(Error::io("bind a port"))?;
    Ok(socket.local_addr().map_err(Error::io("read a port"))?.port())
}

/// Whether the text of an element has that part.
fn shows(selector: &str, text: &str) -> String {
    format!("document.querySelector({})?.innerText.includes({})", json!(selector), json!(text))
}

const NARROW: &str = "document.documentElement.scrollWidth <= innerWidth";

#[test]
fn it_shows_the_volumes_and_what_they_do() -> Result {
    let mut rig = Rig::start()?;
    let origin = format!("http://{}/", rig.page);
    rig.browser.show_as(1400, 900, false)?;
    rig.browser.open(&origin)?;
    rig.browser.wait_for("document.querySelectorAll('.space .row').length === 3")?;
    rig.browser.wait_for(&shows("#state", "up "))?;
    rig.browser.wait_for(&shows(".space", "failed"))?;
    rig.browser.wait_for("document.querySelectorAll('.uplot canvas').length === 4")?;
    // Requests arrive in the plot: some second of the last five minutes has more than none.
    let page = "fetch('/v1/history?range=5m').then((r) => r.json()).then((v) => v.series.read_iops.some((n) => n > 0))";
    rig.requests()?;
    while rig.browser.eval(page)? != json!(true) {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    // A search leaves one row; sorted by state from the worst down, the lost one is first.
    rig.browser.eval("{ const s = document.querySelector('#search'); s.value = 'DIS'; s.dispatchEvent(new Event('input')); }")?;
    rig.browser.wait_for("document.querySelectorAll('.space .row').length === 1")?;
    rig.browser.eval("{ const s = document.querySelector('#search'); s.value = ''; s.dispatchEvent(new Event('input')); }")?;
    rig.browser.eval("document.querySelector('.head .c-state button').click()")?;
    rig.browser.wait_for("document.querySelector('.space .row .c-name').innerText === 'lost'")?;
    // What may only be seen has no actions.
    let buttons = rig
        .browser
        .eval("[...document.querySelectorAll('main button')].map((b) => b.innerText).join()")?;
    check(!buttons.as_str().unwrap_or_default().contains("Add"), || format!("{buttons}"))?;

    rig.browser.eval(
        "document.querySelector('.space .row:last-child a, .space .row a[href$=disk]').click()",
    )?;
    rig.browser.eval("location.hash = '#/volume/disk'")?;
    rig.browser.wait_for(&shows(".panel", "16 MiB"))?;
    rig.browser.wait_for("document.querySelectorAll('.uplot canvas').length >= 6")?;
    let filled = "(() => { const c = document.querySelector('.heat canvas'); if (!c.width) return false; \
        const d = c.getContext('2d').getImageData(70, 0, c.width - 70, c.height - 24).data; \
        const a = getComputedStyle(document.documentElement).getPropertyValue('--a'); \
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 40 && d[i + 2] > d[i] + 60) return a !== ''; return false; })()";
    rig.browser.wait_for(filled)?;
    // The requests took about a second: a sample without neighbours is drawn, too.
    let drawn = "(() => { const all = [...document.querySelectorAll('figure')]; \
        const one = all.find((f) => f.querySelector('figcaption')?.textContent.startsWith('Latency')); \
        const c = one?.querySelector('canvas'); if (!c?.width) return false; \
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; \
        for (let i = 0; i < d.length; i += 4) { const rgb = [d[i], d[i + 1], d[i + 2]]; \
          if (d[i + 3] > 100 && Math.max(...rgb) - Math.min(...rgb) > 60) return true; } return false; })()";
    rig.browser.wait_for(drawn)?;
    rig.browser.eval("location.hash = '#/volume/lost'")?;
    rig.browser.wait_for(&shows("main .error", "missing.img"))?;
    rig.browser.eval("location.hash = '#/memory'")?;
    rig.browser.wait_for(&shows("main", "Returned by proactive reclaim"))?;
    let help =
        rig.browser.eval("[...document.querySelectorAll('dt')].map((t) => t.title).join()")?;
    check(help.as_str().unwrap_or_default().contains("bufspace"), || format!("{help}"))?;
    rig.is_clean(&origin)?;
    rig.server.stop()
}

#[test]
fn it_fits_a_phone_and_a_screen_dark_and_light() -> Result {
    let mut rig = Rig::start()?;
    let origin = format!("http://{}/", rig.page);
    rig.requests()?;
    let mut papers = Vec::new();
    for (width, dark) in [(400, false), (400, true), (1400, false), (1400, true)] {
        rig.browser.show_as(width, 900, dark)?;
        for (hash, ready) in
            [("", ".space .row"), ("#/volume/disk", ".facts dd"), ("#/memory", ".facts dd")]
        {
            rig.browser.open(&format!("{origin}?{width}{dark}{hash}"))?;
            rig.browser.wait_for(&format!("document.querySelector({})", json!(ready)))?;
            rig.browser.wait_for("document.querySelector('.uplot canvas')")?;
            rig.browser.wait_for(NARROW)?;
            if let Some(folder) = std::env::var_os("EBBD_PICTURES") {
                let name = format!(
                    "{}-{width}-{}.png",
                    hash.replace(['#', '/'], ""),
                    if dark { "dark" } else { "light" }
                );
                rig.browser.screenshot(&PathBuf::from(folder).join(name))?;
            }
        }
        papers.push(rig.browser.eval("getComputedStyle(document.body).backgroundColor")?);
        // Cards have no heads of columns.
        rig.browser.eval("location.hash = '#/'")?;
        rig.browser.wait_for("document.querySelector('.head')")?;
        let heads =
            rig.browser.eval("getComputedStyle(document.querySelector('.head')).display")?;
        check((heads == json!("none")) == (width == 400), || format!("{width}: {heads}"))?;
    }
    check(papers[0] == papers[2] && papers[1] == papers[3] && papers[0] != papers[1], || {
        format!("{papers:?}")
    })?;
    // Whatever is shown, small text keeps a contrast of 4.5 to 1.
    let contrast = rig.browser.eval(include_str!("page/contrast.js"))?;
    let bad: Vec<&Value> = contrast.as_array().into_iter().flatten().collect();
    check(bad.is_empty(), || format!("too little contrast: {bad:?}"))?;
    rig.is_clean(&origin)?;
    rig.server.stop()
}

#[test]
fn who_may_operate_changes_a_parameter_and_resizes_a_volume() -> Result {
    let mut rig = Rig::start()?;
    let relay = Relay::start(&rig.page, &rig.control)?;
    let origin = format!("http://{}/", relay.address());
    rig.browser.show_as(1400, 900, true)?;
    rig.browser.open(&format!("{origin}#/parameters"))?;
    rig.browser.wait_for(&shows("#nav", "Parameters"))?;
    rig.browser.eval("location.hash = '#/parameters'")?;
    rig.browser
        .wait_for("document.querySelector('button[aria-label=\"Set max_buffer_pages\"]')")?;
    rig.browser
        .eval("document.querySelector('button[aria-label=\"Set max_buffer_pages\"]').click()")?;
    let submit = |value: &str| {
        format!(
            "{{ const d = document.querySelector('dialog'); d.querySelector('input').value = {}; d.querySelector('form').requestSubmit(); }}",
            json!(value)
        )
    };
    // A value that is refused is explained in the dialog, which stays.
    rig.browser.eval(&submit("many"))?;
    rig.browser.wait_for("document.querySelector('dialog .error').innerText.length > 10")?;
    rig.browser.eval(&submit("77"))?;
    rig.browser.wait_for("!document.querySelector('dialog')")?;
    rig.browser.wait_for(&shows("tbody", "77"))?;

    rig.browser.eval("location.hash = '#/volume/disk'")?;
    rig.browser.wait_for(&shows(".actions", "Resize"))?;
    rig.browser.wait_for(&shows(".panel", "16 MiB"))?;
    rig.browser.eval("[...document.querySelectorAll('.actions button')].find((b) => b.innerText === 'Resize').click()")?;
    rig.browser.eval(&submit("24M"))?;
    rig.browser.wait_for(&shows(".panel", "24 MiB"))?;
    // A volume is not removed before its name was typed.
    rig.browser.eval("[...document.querySelectorAll('.actions button')].find((b) => b.innerText === 'Remove').click()")?;
    rig.browser.wait_for("document.querySelector('dialog button.danger').disabled")?;
    rig.browser.eval("{ const i = document.querySelector('dialog input'); i.value = 'disk'; i.dispatchEvent(new Event('input')); }")?;
    rig.browser.wait_for("!document.querySelector('dialog button.danger').disabled")?;
    // The refusal of a value is a reply 422, which the browser shows in its console.
    let refused = |problem: &&String| problem.contains("422");
    check(rig.browser.problems().iter().filter(refused).count() == 1, || "one refusal".into())?;
    rig.server.stop()
}

#[test]
fn an_overlay_shows_what_it_shares_and_gets_a_snapshot() -> Result {
    let setup = Setup::new()?;
    let dir = setup.dir().to_owned();
    std::fs::write(dir.join("golden.raw"), vec![7; 16 << 20]).map_err(Error::io("write a base"))?;
    let setup = setup
        .volume(&format!("golden=file:{}/golden.raw,read-only=true", dir.display()))
        .volume(&format!("disk=file:{}/disk.delta,base=golden,create=true", dir.display()))
        .volume("plain=null:1M")
        .arg("--state")
        .arg(dir.join("state"));
    let mut rig = Rig::of(setup)?;
    rig.requests()?;
    let button = |name: &str| {
        format!(
            "[...document.querySelectorAll('.actions button')].find((b) => !b.hidden && b.innerText === {})",
            json!(name)
        )
    };
    let row = |name: &str| {
        format!(
            "[...document.querySelectorAll('.facts dt')].find((t) => t.innerText === {})?.nextSibling.innerText",
            json!(name)
        )
    };
    // The role that may only view sees the layers, and no actions.
    rig.browser.show_as(1400, 900, false)?;
    rig.browser.open(&format!("http://{}/#/volume/disk", rig.page))?;
    rig.browser.wait_for(&format!("{} === 'golden'", row("Base")))?;
    rig.browser.wait_for(&format!("{}?.includes('golden.raw')", row("Below 1")))?;
    rig.browser.wait_for(&format!("/^[1-9].* cached/.test({})", row("Own")))?;
    let actions = rig.browser.eval("document.querySelector('.actions')")?;
    check(actions.is_null(), || format!("{actions}"))?;
    rig.is_clean(&format!("http://{}/", rig.page))?;

    let relay = Relay::start(&rig.page, &rig.control)?;
    let origin = format!("http://{}/", relay.address());
    rig.browser.open(&format!("{origin}#/volume/plain"))?;
    rig.browser.wait_for(&format!("Boolean({})", button("Flush")))?;
    rig.browser.wait_for(&shows(".panel", "1 MiB"))?;
    let other = rig.browser.eval(&format!("Boolean({})", button("Snapshot")))?;
    check(other == json!(false), || "a volume that is no overlay has no snapshots".into())?;
    rig.browser.eval("location.hash = '#/volume/disk'")?;
    rig.browser.wait_for(&format!("Boolean({})", button("Snapshot")))?;
    rig.browser.eval(&format!("{}.click()", button("Snapshot")))?;
    let submit = |value: &str| {
        format!(
            "{{ const d = document.querySelector('dialog'); d.querySelector('input').value = {}; d.querySelector('form').requestSubmit(); }}",
            json!(value)
        )
    };
    rig.browser.eval(&submit("monday"))?;
    rig.browser.wait_for("!document.querySelector('dialog')")?;
    rig.browser.wait_for(&format!("{}?.includes('snapshot monday, ')", row("Below 1")))?;
    rig.browser.wait_for(&format!("{}?.includes('golden.raw')", row("Below 2")))?;
    // A snapshot is read-only: it has the layers, and is not flattened.
    rig.browser.eval("location.hash = '#/volume/disk%40monday'")?;
    rig.browser.wait_for(&format!("{}?.includes('golden.raw')", row("Below 1")))?;
    let flatten = rig.browser.eval(&format!("Boolean({})", button("Flatten")))?;
    check(flatten == json!(false), || "a snapshot cannot be flattened".into())?;
    rig.browser.eval("location.hash = '#/volume/disk'")?;
    rig.browser.wait_for(&format!("Boolean({})", button("Flatten")))?;
    rig.browser.eval(&format!("{}.click()", button("Flatten")))?;
    rig.browser.eval("document.querySelector('dialog form').requestSubmit()")?;
    rig.browser.wait_for(&shows("#operations", "done"))?;
    rig.is_clean_of_problems()?;
    let mut client = Client::open(&rig.server.socket(), "disk")?;
    let read = client.read(0, 8192)?;
    check(read == [7; 8192], || "other data after the flatten".into())?;
    client.disconnect()?;
    rig.server.stop()
}

/// A wrong token leaves a page that can be used, and asks again; so does a token that the daemon no longer knows.
#[test]
fn wrong_token_is_dropped_and_asked_for_again() -> Result {
    let setup = Setup::new()?.image("disk", SIZE)?;
    let made = Tool::new(ebbd(Build::AsTests)?).args(["token", "view", "viewer"]).ok()?;
    let tokens = setup.dir().join("tokens");
    std::fs::write(&tokens, &made.stdout).map_err(Error::io("write the tokens"))?;
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&tokens, mode).map_err(Error::io("protect the tokens"))?;
    let setup = setup.arg("--web-tokens").arg(&tokens);
    let mut rig = Rig::of(setup)?;
    rig.browser.show_as(1400, 900, false)?;
    rig.browser.open(&format!("http://{}/", rig.page))?;
    let submit = |token: &str| {
        format!(
            "{{ const d = document.querySelector('dialog'); d.querySelector('input').value = {}; d.querySelector('form').requestSubmit(); }}",
            json!(token)
        )
    };
    rig.browser.wait_for("document.querySelector('dialog')")?;
    rig.browser.eval(&submit("no-such-token"))?;
    rig.browser.wait_for(&shows("dialog .error", "does not know this token"))?;
    let kept = rig.browser.eval("sessionStorage.getItem('ebbd-token')")?;
    check(kept.is_null(), || format!("the wrong token is kept: {kept}"))?;
    // The dialog may be closed: the page offers to log in.
    rig.browser.eval("document.querySelector('dialog').close()")?;
    rig.browser.wait_for(&shows("#who", "Log in"))?;
    rig.browser.eval("document.querySelector('#who button').click()")?;
    rig.browser.eval(&submit(made.stderr.trim()))?;
    rig.browser.wait_for("document.querySelectorAll('.space .row').length === 1")?;
    rig.browser.wait_for(&shows("#who", "Log out"))?;
    // A token of an earlier start is dropped as well.
    rig.browser.eval("sessionStorage.setItem('ebbd-token', 'old'); location.reload()")?;
    rig.browser
        .wait_for("document.querySelector('dialog') && !sessionStorage.getItem('ebbd-token')")?;
    rig.server.stop()
}
