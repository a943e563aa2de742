//! A stopped worker leaves no descriptor open, of all that the process has.

use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::time::Duration;

use ebb_io::{Budget, Signal, Worker, fd_from};

use crate::common::{HANG, within};

fn open_descriptors() -> Vec<String> {
    let mut list: Vec<_> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            std::fs::read_link(&path).map(|p| p.display().to_string()).unwrap_or_default()
        })
        .filter(|target| !target.ends_with("/fd"))
        .collect();
    list.sort();
    list
}

/// Every kind of operation is in flight when the worker is stopped.
fn stop_in_the_middle(round: u32) {
    let path = std::env::temp_dir().join(format!("ebb-io-fds-{}-{round}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let worker = Worker::start_alone("stops").unwrap();
    let for_task = path.clone();
    worker.handle().block_on(move |io| async move {
        let listener = fd_from(listener);
        let (here, there) = UnixStream::pair().unwrap();
        let (here, there) = (fd_from(here), Rc::new(there));
        let budget = Budget::new(1);
        for _ in 0..50 {
            let (io2, fd) = (io.clone(), here.clone());
            io.spawn(async move { drop(io2.recv(&fd, io2.pool().get_for_test(4096), 0..1).await) })
                .detach();
            let (io2, fd) = (io.clone(), here.clone());
            io.spawn(async move { drop(io2.readable(&fd).await) }).detach();
            let (io2, fd) = (io.clone(), listener.clone());
            io.spawn(async move { drop(io2.accept(&fd).await) }).detach();
            let (io2, owned) = (io.clone(), there.clone());
            io.spawn(async move {
                io2.sleep(HANG * 10).await;
                drop(owned);
            })
            .detach();
            let (budget, owned) = (budget.clone(), there.clone());
            io.spawn(async move {
                let _part = budget.take(1).await;
                std::future::pending::<()>().await;
                drop(owned);
            })
            .detach();
            // A task that only its own waker refers to.
            let (io2, owned, signal) = (io.clone(), there.clone(), Rc::new(Signal::default()));
            io.spawn(async move {
                signal.wait().await;
                drop((io2, owned));
            })
            .detach();
        }
        let buf = io.pool().get_for_test(4096);
        let file = fd_from(std::fs::File::open("/proc/self/exe").unwrap());
        let mut reads = vec![];
        for _ in 0..3000 {
            let (io2, fd) = (io.clone(), file.clone());
            reads.push(io.spawn(async move {
                io2.read_at(&fd, io2.pool().get_for_test(512), 0..512, 0).await.0
            }));
        }
        io.yield_now().await;
        reads.into_iter().for_each(async_task_detach);
        drop(buf);
        // Some clients connect, possibly while the accept is being dropped.
        for _ in 0..20 {
            let _ = UnixStream::connect(&for_task);
        }
        if round.is_multiple_of(2) {
            io.sleep(Duration::from_millis(5)).await;
        }
    });
    drop(worker);
    std::fs::remove_file(&path).unwrap();
}

fn async_task_detach<T>(task: ebb_io::Task<T>) {
    task.detach();
}

#[test]
fn a_worker_stopped_in_the_middle_of_everything_leaks_no_descriptor() {
    let before = open_descriptors();
    for round in 0..10 {
        within(move || stop_in_the_middle(round));
    }
    assert_eq!(open_descriptors(), before);
}
