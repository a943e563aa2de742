//! A full ring is back pressure: all operations complete, in order of arrival, and waits do not
//! delay storage operations.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;

use common::{on_worker, until};
use ebb_io::{Fd, Io, Signal, WriteFlags, fd_from};

const OPERATIONS: usize = 5000;
const BYTES: usize = 512;

/// A file of [`OPERATIONS`] pieces, each filled with its number.
struct Pieces(PathBuf);

impl Pieces {
    fn make(name: &str) -> Pieces {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("{name}-{}", std::process::id()));
        let mut content = Vec::new();
        for number in 0..OPERATIONS {
            content.extend_from_slice(&piece(number));
        }
        std::fs::write(&path, content).unwrap();
        Pieces(path)
    }

    fn open(&self) -> Fd {
        fd_from(std::fs::File::options().read(true).write(true).open(&self.0).unwrap())
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn piece(number: usize) -> Vec<u8> {
    u16::try_from(number).unwrap().to_le_bytes().repeat(BYTES / 2)
}

/// Polls of a future, counted.
async fn counted<F: Future>(polls: Rc<Cell<usize>>, future: F) -> F::Output {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| {
        polls.set(polls.get() + 1);
        future.as_mut().poll(cx)
    })
    .await
}

async fn read_one(io: Io, fd: Fd, number: usize) {
    let (result, buf) =
        io.read_at(&fd, io.pool().get_for_test(BYTES), 0..BYTES, (number * BYTES) as u64).await;
    assert_eq!(result.unwrap(), BYTES);
    assert!(*buf == *piece(number), "piece {number}");
}

#[test]
fn more_reads_than_the_ring_has_room_for_all_complete() {
    let file = Pieces::make("reads");
    let fd = file.open();
    on_worker(move |io| async move {
        let tasks: Vec<_> = (0..OPERATIONS)
            .map(|number| io.spawn(read_one(io.clone(), fd.clone(), number)))
            .collect();
        for task in tasks {
            task.await;
        }
        assert_eq!(io.stats().operations, OPERATIONS as u64);
        assert_eq!(io.pool().used_bytes(), 0);
    });
}

/// With a slow store, completions arrive one by one: not all waiting operations must be polled
/// for each completion.
#[test]
fn waiting_operations_are_not_polled_while_other_operations_complete() {
    let polls = on_worker(move |io| async move {
        let (read_end, mut write_end) = std::io::pipe().unwrap();
        let pipe = fd_from(read_end);
        let (polls, one_more) = (Rc::new(Cell::new(0)), Rc::new(Signal::default()));
        let tasks: Vec<_> = (0..OPERATIONS)
            .map(|_| {
                let (io2, pipe, one_more) = (io.clone(), pipe.clone(), one_more.clone());
                io.spawn(counted(polls.clone(), async move {
                    let (result, buf) =
                        io2.read_at(&pipe, io2.pool().get_for_test(1), 0..1, 0).await;
                    assert_eq!((result.unwrap(), buf[0]), (1, 7));
                    one_more.set();
                }))
            })
            .collect();
        io.yield_now().await;
        for task in tasks {
            write_end.write_all(&[7]).unwrap();
            one_more.wait().await;
            task.detach();
        }
        polls.get()
    });
    assert!(polls <= 6 * OPERATIONS, "{polls} polls for {OPERATIONS} reads");
}

#[test]
fn operations_dropped_while_waiting_do_not_block_later_ones() {
    let file = Pieces::make("given-up");
    let fd = file.open();
    on_worker(move |io| async move {
        let mut tasks: Vec<_> = (0..OPERATIONS)
            .map(|number| Some(io.spawn(read_one(io.clone(), fd.clone(), number))))
            .collect();
        // All are polled once, so that most of them wait for room.
        io.yield_now().await;
        for task in tasks.iter_mut().step_by(2) {
            drop(task.take());
        }
        for task in tasks.into_iter().flatten() {
            task.await;
        }
        until(&io, "all buffers are freed", || io.pool().used_bytes() == 0).await;
        // The ring continues to work.
        read_one(io.clone(), fd, 17).await;
    });
}

#[test]
fn writes_and_flushes_wait_for_room_like_reads() {
    let file = Pieces::make("writes");
    let fd = file.open();
    on_worker(move |io| async move {
        let tasks: Vec<_> = (0..OPERATIONS)
            .map(|number| {
                let (io2, fd) = (io.clone(), fd.clone());
                io.spawn(async move {
                    let reversed = OPERATIONS - 1 - number;
                    let mut buf = io2.pool().get_for_test(BYTES);
                    buf.copy_from_slice(&piece(reversed));
                    let at = (number * BYTES) as u64;
                    let flags = WriteFlags::default();
                    let (result, _) = io2.write_at(&fd, buf, 0..BYTES, at, flags).await;
                    assert_eq!(result.unwrap(), BYTES);
                    if number % 1000 == 0 {
                        io2.fdatasync(&fd).await.unwrap();
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    });
    let content = std::fs::read(&file.0).unwrap();
    for (number, found) in content.chunks(BYTES).enumerate() {
        assert!(found == piece(OPERATIONS - 1 - number), "piece {number}");
    }
}

/// More receives wait than the completion queue has entries: storage operations are not delayed, and when
/// all receives complete at once none is lost.
#[test]
fn waits_do_not_starve_storage_and_complete_all_at_once() {
    let file = Pieces::make("waits");
    let fd = file.open();
    on_worker(move |io| async move {
        let (here, mut there) = UnixStream::pair().unwrap();
        let socket = fd_from(here);
        let got = Rc::new(Cell::new(0));
        let tasks: Vec<_> = (0..OPERATIONS)
            .map(|_| {
                let (io2, socket, got) = (io.clone(), socket.clone(), got.clone());
                io.spawn(async move {
                    let (result, buf) = io2.recv(&socket, io2.pool().get_for_test(1), 0..1).await;
                    assert_eq!((result.unwrap(), buf[0]), (1, 7));
                    got.set(got.get() + 1);
                })
            })
            .collect();
        for number in 0..100 {
            read_one(io.clone(), fd.clone(), number).await;
        }
        assert_eq!(got.get(), 0);
        there.write_all(&[7; OPERATIONS]).unwrap();
        for task in tasks {
            task.await;
        }
        assert_eq!(got.get(), OPERATIONS);
    });
}

#[test]
fn a_polling_task_does_not_delay_completions() {
    on_worker(|io| async move {
        let (mut write_end, read_end) = UnixStream::pair().unwrap();
        let read_end = fd_from(read_end);
        let woken = Rc::new(Cell::new(false));
        let reader = io.spawn({
            let (io, woken) = (io.clone(), woken.clone());
            async move {
                io.readable(&read_end).await.unwrap();
                woken.set(true);
            }
        });
        // After this the wait has been submitted.
        for _ in 0..3 {
            io.next_iteration().await;
        }
        assert!(!woken.get() && !io.has_other_work());
        write_end.write_all(b"x").unwrap();
        assert!(io.has_other_work(), "a completion waits");
        let mut iterations = 0;
        while !woken.get() {
            io.next_iteration().await;
            iterations += 1;
        }
        assert!(iterations <= 3, "{iterations} iterations for a completion from before the first");
        reader.await;
    });
}

#[test]
fn bulk_tasks_yield_to_all_tasks_except_other_bulk_tasks() {
    on_worker(|io| async move {
        let order = Rc::new(RefCell::new(Vec::new()));
        let busy = |name: &'static str| {
            let (io, order) = (io.clone(), order.clone());
            async move {
                for _ in 0..3 {
                    order.borrow_mut().push((name, io.has_other_work()));
                    io.yield_iteration().await;
                }
            }
        };
        let (one, two) = (io.spawn(busy("one")), io.spawn(busy("two")));
        one.await;
        two.await;
        let seen = order.take();
        // The first one sees that the second is ready; from then on both yield.
        assert_eq!(seen[0], ("one", true));
        assert_eq!(
            seen[1..],
            [("two", false), ("one", false), ("two", false), ("one", false), ("two", false)]
        );
        let polling = io.spawn({
            let io = io.clone();
            async move {
                for _ in 0..3 {
                    io.next_iteration().await;
                }
            }
        });
        let one = io.spawn(busy("one"));
        one.await;
        polling.await;
        assert!(order.take().iter().take(2).all(|(_, wanted)| *wanted), "a task polls");
    });
}

/// Thousands of operations on some files hang, in the ring and waiting for room: those of another file complete.
#[test]
fn files_that_hang_leave_room_for_other_files() {
    let file = Pieces::make("beside");
    let fd = file.open();
    on_worker(move |io| async move {
        let pipes: Vec<_> = (0..4).map(|_| std::io::pipe().unwrap()).collect();
        let hanging: Vec<_> = pipes
            .iter()
            .flat_map(|pipe| {
                let end = fd_from(pipe.0.try_clone().unwrap());
                (0..OPERATIONS / 4).map(move |_| end.clone())
            })
            .map(|end| {
                let io2 = io.clone();
                io.spawn(async move {
                    let _ = io2.read_at(&end, io2.pool().get_for_test(1), 0..1, 0).await;
                })
            })
            .collect();
        io.yield_now().await;
        for number in 0..100 {
            read_one(io.clone(), fd.clone(), number).await;
        }
        drop(hanging);
    });
}
