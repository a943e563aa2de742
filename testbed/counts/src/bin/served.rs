//! x
use counts::served::{Export, VolumeKind};
fn main() {
    let arg: Vec<String> = std::env::args().collect();
    let e = Export::ALL.into_iter().find(|e| e.name() == arg[1]).unwrap();
    let v = VolumeKind::ALL.into_iter().find(|e| e.name() == arg[2]).unwrap();
    counts::served::measure(e, v, arg[3].parse().unwrap(), || 0, |l, c| println!("{l} {c}")).unwrap();
}
