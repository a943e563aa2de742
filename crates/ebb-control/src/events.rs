//! The last events: what the daemon has logged at `info` and above, for the interface and the page.
//!
//! # Invariants
//! - Events are numbered from 1 without gaps. The list is bounded in number and in bytes: the oldest make way.
//! - Adding one takes as long as copying it; a slow reader keeps no one waiting, and misses events, which it can tell by
//!   their numbers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_api::EventView;
use tokio::sync::watch;

/// The most events that are kept, and the most bytes of their texts.
const EVENTS_MOST: usize = 1000;
const BYTES_MOST: usize = 256 << 10;
/// The longest text and value, bytes, and the most fields; the rest is cut off.
const TEXT_MOST: usize = 1024;
const FIELDS_MOST: usize = 16;

/// The events; clones share them.
#[derive(Clone, Debug, Default)]
pub struct EventLog(Arc<EventShared>);

#[derive(Debug, Default)]
struct EventShared {
    state: Mutex<EventList>,
    /// The number of the last event.
    last: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct EventList {
    events: VecDeque<Arc<EventView>>,
    bytes: usize,
    last: u64,
}

impl EventLog {
    fn list(&self) -> MutexGuard<'_, EventList> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an event; its number is set here.
    pub fn add(&self, mut event: EventView) {
        cut(&mut event.message);
        while event.fields.len() > FIELDS_MOST {
            event.fields.pop_last();
        }
        event.fields.values_mut().for_each(cut);
        let size = size(&event);
        let mut list = self.list();
        list.last += 1;
        event.id = list.last;
        list.bytes += size;
        list.events.push_back(Arc::new(event));
        while list.events.len() > EVENTS_MOST || list.bytes > BYTES_MOST {
            let Some(oldest) = list.events.pop_front() else { break };
            list.bytes -= self::size(&oldest);
        }
        let last = list.last;
        drop(list);
        // Later than another thread's, but never less than what is known.
        self.0.last.send_if_modified(|known| {
            let newer = last > *known;
            *known = last.max(*known);
            newer
        });
    }

    /// The events after number `since`, the oldest first and at most `limit`.
    pub(crate) fn after(&self, since: u64, limit: usize) -> Vec<Arc<EventView>> {
        let list = self.list();
        let from = list.events.partition_point(|event| event.id <= since);
        list.events.iter().skip(from).take(limit).cloned().collect()
    }

    /// The last `limit` events, the oldest first.
    pub(crate) fn latest(&self, limit: usize) -> Vec<Arc<EventView>> {
        let list = self.list();
        let from = list.events.len().saturating_sub(limit);
        list.events.iter().skip(from).cloned().collect()
    }

    /// All events that are kept, the oldest first.
    pub fn all(&self) -> Vec<Arc<EventView>> {
        self.after(0, usize::MAX)
    }

    /// Tells of new events.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.0.last.subscribe()
    }
}

fn size(event: &EventView) -> usize {
    let fields = event.fields.iter().map(|(name, value)| name.len() + value.len() + 64);
    128 + event.message.len() + fields.sum::<usize>()
}

/// Cuts a text off at a character.
fn cut(text: &mut String) {
    if text.len() > TEXT_MOST {
        let end = (0..=TEXT_MOST).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
    }
    text.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(message: &str) -> EventView {
        EventView { message: message.to_owned(), ..EventView::default() }
    }

    fn ids(events: &[Arc<EventView>]) -> Vec<u64> {
        events.iter().map(|event| event.id).collect()
    }

    #[test]
    fn events_have_numbers_without_gaps_and_the_oldest_make_way() {
        let log = EventLog::default();
        assert!(log.latest(10).is_empty() && log.after(0, 10).is_empty());
        (0..EVENTS_MOST + 5).for_each(|_| log.add(event("x")));
        let all = log.after(0, usize::MAX);
        assert_eq!(all.len(), EVENTS_MOST);
        let numbers: Vec<u64> = (6..=1005).collect();
        assert_eq!(ids(&all), numbers);
        assert_eq!(ids(&log.after(1002, 2)), [1003, 1004]);
        assert_eq!(ids(&log.latest(2)), [1004, 1005]);
        assert!(log.after(1005, 9).is_empty() && log.after(u64::MAX, 9).is_empty());
        assert_eq!(*log.watch().borrow(), 1005);
    }

    #[test]
    fn however_long_its_texts_the_list_is_bounded() {
        let log = EventLog::default();
        for _ in 0..2000 {
            let fields = (0..100).map(|number| (format!("f{number:03}"), "ü".repeat(9000)));
            log.add(EventView { fields: fields.collect(), ..event(&"ä".repeat(9001)) });
        }
        let list = log.list();
        assert!(list.bytes <= BYTES_MOST && !list.events.is_empty(), "{}", list.bytes);
        assert_eq!(list.bytes, list.events.iter().map(|event| size(event)).sum::<usize>());
        let one = &list.events[0];
        assert_eq!((one.fields.len(), one.message.len()), (FIELDS_MOST, TEXT_MOST));
    }

    #[test]
    fn threads_that_add_at_the_same_time_leave_no_gap() {
        let log = EventLog::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|_| log.add(event("x"))));
            }
        });
        assert_eq!(ids(&log.after(0, 1000)), (1..=800).collect::<Vec<u64>>());
        assert_eq!(*log.watch().borrow(), 800);
    }
}
