//! A Ceph cluster: one monitor and one OSD with its objects in memory, from Debian's packages, which are unpacked and
//! not installed.
//!
//! It starts in about ten seconds, listens on the loopback interface only, and has a pool `rbd` without replicas.
//! There is no manager, which only usage figures need, and no authentication.
//!
//! Invariants:
//! * The daemons end with the [`Ceph`], also if a test fails.
//! * The packages are unpacked once, while a lock is held: tests may start side by side.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::harness::process::{self, PATIENCE};
use crate::harness::{cache, tool::Outcome};
use crate::{Error, Result, Tool, check};

const FETCH: &str = include_str!("ceph/fetch.sh");

/// The id of the OSD in the cluster; its UUID must be the same when the OSD is registered and when it is formatted.
const OSD_UUID: &str = "7c1f1c64-4a53-4d0e-9c7b-0d6a0f1b5a01";
const FSID: &str = "2d9d3c4e-1f2a-4b6e-8f0c-6b1d8c2e7f10";
/// Where packages have their libraries, below the root.
const LIBRARIES: [&str; 3] =
    ["usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph", "lib/x86_64-linux-gnu"];

/// A running cluster.
#[derive(Debug)]
pub struct Ceph {
    tree: PathBuf,
    dir: TempDir,
    monitor: Option<Child>,
    osd: Option<Child>,
}

/// Unpacks the packages (50 MB to download) unless that was done.
fn tree() -> Result<PathBuf> {
    let cache = cache::folder("ceph")?;
    fs::create_dir_all(&cache).map_err(Error::io(cache.display().to_string()))?;
    let lock = File::create(cache.join("lock")).map_err(Error::io("make a lock"))?;
    lock.lock().map_err(Error::io("lock the packages"))?;
    let script = TempDir::with_prefix("ceph-").map_err(Error::io("make a directory"))?;
    let path = script.path().join("fetch.sh");
    fs::write(&path, FETCH).map_err(Error::io(path.display().to_string()))?;
    Tool::new("bash").arg(path).arg(&cache).limit(Duration::from_secs(900)).ok()?;
    Ok(cache.join("tree"))
}

/// A free port of the loopback interface.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::io("find a port"))?;
    Ok(listener.local_addr().map_err(Error::io("find a port"))?.port())
}

impl Ceph {
    /// Starts a cluster, and waits until its pool can be used.
    ///
    /// # Errors
    /// The packages cannot be had, or a daemon does not start; the error shows its output.
    pub fn start() -> Result<Ceph> {
        let dir = TempDir::with_prefix("ceph-").map_err(Error::io("make a directory"))?;
        let mut ceph = Ceph { tree: tree()?, dir, monitor: None, osd: None };
        let port = free_port()?;
        ceph.write_configuration(port)?;
        let map = ceph.path("monmap");
        let address = format!("[v2:127.0.0.1:{port}]");
        let made = ceph.tool("monmaptool").args(["--create", "--addv", "a", &address]);
        made.args(["--fsid", FSID]).arg(&map).ok()?;
        ceph.tool("ceph-mon").args(["-i", "a", "--mkfs", "--monmap"]).arg(&map).ok()?;
        ceph.start_monitor()?;
        ceph.command(&["osd", "create", OSD_UUID])?;
        ceph.tool("ceph-osd").args(["-i", "0", "--mkfs", "--osd-uuid", OSD_UUID]).ok()?;
        ceph.start_osd()?;
        ceph.command(&["osd", "pool", "create", "rbd", "8", "8"])?;
        ceph.command(&["osd", "pool", "application", "enable", "rbd", "rbd"])?;
        // A request waits until the pool's placement groups are active.
        ceph.rbd(&["create", "--size", "1M", "rbd/first"])?;
        ceph.rbd(&["rm", "--no-progress", "rbd/first"])?;
        Ok(ceph)
    }

    fn write_configuration(&self, port: u16) -> Result {
        let (tree, dir) = (self.tree.display(), self.dir.path().display());
        let libraries = format!("{tree}/usr/lib/x86_64-linux-gnu");
        for folder in ["mon", "osd", "run"] {
            fs::create_dir(self.path(folder)).map_err(Error::io("make a directory"))?;
        }
        let text = format!(
            "[global]\n\
             fsid = {FSID}\n\
             mon_host = v2:127.0.0.1:{port}\n\
             auth_cluster_required = none\n\
             auth_service_required = none\n\
             auth_client_required = none\n\
             osd_pool_default_size = 1\n\
             osd_pool_default_min_size = 1\n\
             mon_allow_pool_size_one = true\n\
             osd_crush_chooseleaf_type = 0\n\
             osd_objectstore = memstore\n\
             osd_fast_shutdown = false\n\
             memstore_device_bytes = 4294967296\n\
             osd_class_dir = {libraries}/rados-classes\n\
             erasure_code_dir = {libraries}/ceph/erasure-code\n\
             plugin_dir = {libraries}/ceph\n\
             run_dir = {dir}/run\n\
             admin_socket =\n\
             log_file = {dir}/run/$name.log\n\
             mon_cluster_log_file = {dir}/run/cluster.log\n\
             mon_data_avail_crit = 0\n\
             ms_bind_ipv6 = false\n\
             public_addr = 127.0.0.1\n\
             cluster_addr = 127.0.0.1\n\
             osd_max_object_name_len = 256\n\
             osd_max_object_namespace_len = 64\n\
             [client]\n\
             log_file =\n\
             [mon.a]\n\
             mon_data = {dir}/mon\n\
             [osd.0]\n\
             osd_data = {dir}/osd\n"
        );
        fs::write(self.configuration(), text).map_err(Error::io("write ceph.conf"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Its `ceph.conf`.
    #[must_use]
    pub fn configuration(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    /// The value of `LD_LIBRARY_PATH` with which a program finds librbd.
    #[must_use]
    pub fn library_path(&self) -> String {
        let folders = LIBRARIES.map(|folder| self.tree.join(folder).display().to_string());
        folders.join(":")
    }

    /// The libraries that librbd needs, and librbd, in an order in which each can be opened by its path: a test that
    /// uses librbd in its own process opens them first.
    #[must_use]
    pub fn libraries(&self) -> Vec<PathBuf> {
        let folder = |name: &str| self.tree.join("usr/lib/x86_64-linux-gnu").join(name);
        let names = ["libboost_context.so.1.74.0", "ceph/libceph-common.so.2", "librados.so.2"];
        names.iter().chain(&["librbd.so.1"]).map(|name| folder(name)).collect()
    }

    /// The URI of an image of the pool `rbd`.
    #[must_use]
    pub fn uri(&self, image: &str) -> String {
        format!("rbd:rbd/{image}?conf={}", self.configuration().display())
    }

    /// A program of the packages, for this cluster.
    #[must_use]
    pub fn tool(&self, name: &str) -> Tool {
        let tool = Tool::new(self.tree.join("usr/bin").join(name));
        tool.env("LD_LIBRARY_PATH", self.library_path()).env("CEPH_CONF", self.configuration())
    }

    /// Runs `ceph` with these arguments.
    ///
    /// # Errors
    /// It fails.
    pub fn command(&self, arguments: &[&str]) -> Result<Outcome> {
        let packages = self.tree.join("usr/lib/python3/dist-packages");
        let program = self.tree.join("usr/bin/ceph");
        let tool = Tool::new("/usr/bin/python3").arg(program).args(arguments);
        let tool = tool.env("LD_LIBRARY_PATH", self.library_path()).env("PYTHONPATH", packages);
        tool.env("CEPH_CONF", self.configuration()).ok()
    }

    /// Runs `rbd` with these arguments.
    ///
    /// # Errors
    /// It fails.
    pub fn rbd(&self, arguments: &[&str]) -> Result<Outcome> {
        self.tool("rbd").args(arguments).ok()
    }

    /// Makes an image of the pool `rbd`.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn create_image(&self, name: &str, mib: u64) -> Result {
        self.rbd(&["create", "--size", &format!("{mib}M"), &format!("rbd/{name}")]).map(drop)
    }

    /// The address of the client that has the lock of an image, as blocklists name it; `None` if none has.
    ///
    /// # Errors
    /// The image does not exist.
    pub fn lock_owner(&self, image: &str) -> Result<Option<String>> {
        let list =
            self.rbd(&["lock", "ls", "--format", "json", &format!("rbd/{image}")])?.json()?;
        let first = list.as_array().and_then(|list| list.first());
        let address = first.and_then(|lock| lock["address"].as_str());
        Ok(address.map(str::to_owned))
    }

    /// Adds an address to the blocklist, and waits until the OSD knows that.
    ///
    /// # Errors
    /// The monitor refuses.
    pub fn blocklist(&self, address: &str) -> Result {
        self.command(&["osd", "blocklist", "add", address])?;
        // A request of a client that has the new map is answered when the OSD has it.
        self.rbd(&["ls", "rbd"]).map(drop)
    }

    /// Sets the part of an OSD's space from which on it is full, and its pools with it.
    ///
    /// # Errors
    /// The monitor refuses.
    pub fn set_full_ratio(&self, ratio: &str) -> Result {
        // An OSD takes the highest of the three.
        for command in ["set-nearfull-ratio", "set-backfillfull-ratio", "set-full-ratio"] {
            self.command(&["osd", command, ratio])?;
        }
        Ok(())
    }

    fn daemon(&self, program: &str, id: &str) -> Result<Child> {
        let output = self.path(&format!("run/{program}.out"));
        let file = File::create(&output).map_err(Error::io(output.display().to_string()))?;
        let copy = file.try_clone().map_err(Error::io("copy a descriptor"))?;
        let mut command = Command::new(self.tree.join("usr/bin").join(program));
        command.args(["-f", "-i", id, "-c"]).arg(self.configuration());
        command.env("LD_LIBRARY_PATH", self.library_path()).process_group(0);
        command.stdin(Stdio::null()).stdout(file).stderr(copy);
        command.spawn().map_err(Error::io(program))
    }

    /// What a daemon wrote.
    fn output(&self, program: &str) -> String {
        fs::read_to_string(self.path(&format!("run/{program}.out"))).unwrap_or_default()
    }

    /// Starts the monitor, and waits until it replies.
    ///
    /// # Errors
    /// It does not start in time.
    pub fn start_monitor(&mut self) -> Result {
        self.monitor = Some(self.daemon("ceph-mon", "a")?);
        process::until("the monitor replies", PATIENCE, || {
            Ok(self.command(&["--connect-timeout", "2", "quorum_status"]).ok().map(drop))
        })
        .map_err(|error| Error::unexpected(format!("{error}\n{}", self.output("ceph-mon"))))
    }

    /// Starts the OSD, and waits until the monitor knows that it is up.
    ///
    /// # Errors
    /// It does not start in time.
    pub fn start_osd(&mut self) -> Result {
        self.osd = Some(self.daemon("ceph-osd", "0")?);
        process::until("the OSD is up", PATIENCE, || {
            let state = self.command(&["osd", "stat", "--format", "json"])?.json()?;
            Ok((state["num_up_osds"] == 1).then_some(()))
        })
        .map_err(|error| Error::unexpected(format!("{error}\n{}", self.output("ceph-osd"))))
    }

    /// Stops the OSD in order: it writes its objects to a file, and has them when it is started again.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn stop_osd(&mut self) -> Result {
        let child = self.osd.take();
        stop(child, Signal::TERM)
    }

    /// Stops the monitor.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn stop_monitor(&mut self) -> Result {
        let child = self.monitor.take();
        stop(child, Signal::TERM)
    }

    /// Halts the OSD with SIGSTOP, so that it keeps its connections and does not reply; or continues it.
    ///
    /// # Errors
    /// It does not run.
    pub fn halt_osd(&self, halt: bool) -> Result {
        let child = self.osd.as_ref().ok_or_else(|| Error::unexpected("the OSD does not run"))?;
        let signal = if halt { Signal::STOP } else { Signal::CONT };
        kill_process(process::pid_of(child)?, signal)
            .map_err(|error| Error::io("signal the OSD")(error.into()))
    }

    /// The directory of the cluster, for a failed test.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

fn stop(child: Option<Child>, signal: Signal) -> Result {
    let Some(mut child) = child else { return Ok(()) };
    let pid = process::pid_of(&child)?;
    kill_process(pid, signal).map_err(|error| Error::io("signal a daemon")(error.into()))?;
    let ended = process::wait(&mut child, PATIENCE)?;
    if ended.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    check(ended.is_some(), || "a daemon of Ceph did not end".to_owned())
}

impl Drop for Ceph {
    fn drop(&mut self) {
        for mut child in [self.osd.take(), self.monitor.take()].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
