//! Common code of the tests of the worker.

use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use ebb_io::{Io, Worker};
pub(crate) use seeded::Random;

/// How long a test waits before it reports a hang: generous, since only a failing test waits
/// that long.
pub(crate) const HANG: Duration = Duration::from_secs(180);

/// Runs `test` on a new worker.
pub(crate) fn on_worker<F, Fut, T>(test: F) -> T
where
    F: FnOnce(Io) -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
    T: Send + 'static,
{
    within(move || {
        let worker = Worker::start_alone("test").unwrap();
        worker.handle().block_on(test).expect("the test panicked on its worker; see above")
    })
}

/// Runs `call` in a thread; panics if it panics or hangs.
pub(crate) fn within<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let _ = sender.send(call());
    });
    match receiver.recv_timeout(HANG) {
        Ok(value) => {
            let _ = thread.join();
            value
        }
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("this hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(cause) => std::panic::resume_unwind(cause),
            Ok(()) => unreachable!("a thread that ended well has sent its value"),
        },
    }
}

/// Polls once, with the waker of the caller's task.
pub(crate) async fn poll_once<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// Waits until `condition` holds; checks it every millisecond.
pub(crate) async fn until(io: &Io, what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..HANG.as_millis() {
        if condition() {
            return;
        }
        io.sleep(Duration::from_millis(1)).await;
    }
    panic!("never came true: {what}");
}
