//! `ebbd volume changes`: what was written since a snapshot. It is printed page by page: the list may be long.

use ebb_api::{ChangedBlocksView, ChangedRun};
use ebb_config::plural;
use serde_json::json;

use super::volume::path;
use super::{ClientError, DaemonClient, encoded};
use crate::cli::volume::ChangesArgs;

/// Prints pages as one list.
struct ChangeList {
    json: bool,
    /// Not printed yet: the next page may begin with the rest of it.
    last: Option<ChangedRun>,
    runs: u64,
    bytes: u64,
}

impl ChangeList {
    fn new(json: bool) -> ChangeList {
        ChangeList { json, last: None, runs: 0, bytes: 0 }
    }

    /// What is printed before the runs.
    fn head(&self, first: &ChangedBlocksView) -> String {
        if !self.json {
            return format!("{:>16} {:>16}\n", "OFFSET", "LENGTH");
        }
        let head = json!({
            "volume": first.volume, "since": first.since, "until": first.until, "size_bytes": first.size_bytes,
        });
        // The runs are a further field of this object.
        format!("{},\"runs\":[", head.to_string().trim_end_matches('}'))
    }

    fn run(&mut self, run: &ChangedRun, out: &mut String) {
        let &ChangedRun { offset, length } = run;
        out.push_str(&match (self.json, self.runs) {
            (false, _) => format!("{offset:>16} {length:>16}\n"),
            (true, 0) => json!(run).to_string(),
            (true, _) => format!(",{}", json!(run)),
        });
        self.runs += 1;
        self.bytes = self.bytes.saturating_add(length);
    }

    fn page(&mut self, page: ChangedBlocksView) -> String {
        let mut out = String::new();
        for run in page.runs {
            match &mut self.last {
                Some(last) if last.offset.checked_add(last.length) == Some(run.offset) => {
                    last.length = last.length.saturating_add(run.length);
                }
                last => {
                    if let Some(complete) = last.replace(run) {
                        self.run(&complete, &mut out);
                    }
                }
            }
        }
        out
    }

    fn end(&mut self) -> String {
        let mut out = String::new();
        if let Some(last) = self.last.take() {
            self.run(&last, &mut out);
        }
        out.push_str(&match self.json {
            true => format!("],\"changed_bytes\":{}}}\n", self.bytes),
            false => {
                format!("{} changed in {}\n", plural(self.bytes, "byte"), plural(self.runs, "part"))
            }
        });
        out
    }
}

/// Passes the list to `show`, until that returns false.
///
/// # Errors
/// [`ClientError`].
pub(super) fn changes(
    args: &ChangesArgs,
    show: &mut dyn FnMut(&str) -> bool,
) -> Result<(), ClientError> {
    let daemon = DaemonClient::new(args.output.control.as_deref())?;
    let most = ChangedBlocksView::RUNS_MOST;
    let query = format!("/changes?since={}&limit={most}", encoded(&args.since));
    let until = args.until.as_deref().map(|until| format!("&until={}", encoded(until)));
    let target = path(&args.volume, &query) + &until.unwrap_or_default();
    let mut list = ChangeList::new(args.output.json);
    let mut page: ChangedBlocksView = daemon.json("GET", &target, None)?;
    let mut text = list.head(&page);
    loop {
        let next = page.next_offset;
        text.push_str(&list.page(page));
        let Some(next) = next else { break };
        if !show(&std::mem::take(&mut text)) {
            return Ok(());
        }
        page = daemon.json("GET", &format!("{target}&offset={next}"), None)?;
        if page.next_offset.is_some_and(|after| after <= next) {
            return Err(daemon.invalid("a page of the list ends where it begins"));
        }
    }
    text.push_str(&list.end());
    show(&text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages() -> [ChangedBlocksView; 2] {
        let page = |runs: &[(u64, u64)]| ChangedBlocksView {
            volume: "a\"b".into(),
            since: "monday".into(),
            size_bytes: 1 << 20,
            runs: runs.iter().map(|&(offset, length)| ChangedRun { offset, length }).collect(),
            ..ChangedBlocksView::default()
        };
        [page(&[(0, 4096), (8192, 4096)]), page(&[(12288, 4096), (40960, 512)])]
    }

    fn text(json: bool, pages: impl IntoIterator<Item = ChangedBlocksView>) -> String {
        let mut list = ChangeList::new(json);
        let mut text = list.head(&pages_head());
        for page in pages {
            text += &list.page(page);
        }
        text + &list.end()
    }

    fn pages_head() -> ChangedBlocksView {
        let [first, _] = pages();
        first
    }

    #[test]
    fn pages_are_one_list() {
        let shown = text(false, pages());
        let words: Vec<Vec<&str>> =
            shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["OFFSET", "LENGTH"]);
        assert_eq!(words[1..4], [["0", "4096"], ["8192", "8192"], ["40960", "512"]]);
        assert_eq!(words[4].join(" "), "12800 bytes changed in 3 parts");
        let shown = text(true, pages());
        let value: serde_json::Value = serde_json::from_str(&shown).unwrap();
        let run = |offset: u64, length: u64| json!({"offset": offset, "length": length});
        let runs = json!([run(0, 4096), run(8192, 8192), run(40960, 512)]);
        assert_eq!((&value["runs"], &value["changed_bytes"]), (&runs, &json!(12800)));
        assert_eq!((&value["volume"], &value["until"]), (&json!("a\"b"), &json!(null)));
    }

    #[test]
    fn nothing_that_has_changed_is_a_list_of_nothing() {
        let empty: serde_json::Value = serde_json::from_str(&text(true, [])).unwrap();
        assert_eq!((&empty["runs"], &empty["changed_bytes"]), (&json!([]), &json!(0)));
        assert!(text(false, []).ends_with("0 bytes changed in 0 parts\n"));
    }
}
