//! One figure of the report: the value of ebbd, that of the better peer, and whether it meets its
//! target.

use std::fmt;

/// Which direction of a figure is the better one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Rates.
    Higher,
    /// Costs.
    Lower,
}

/// No figure is as large, in whatever unit.
const MOST: f64 = 1e15;

/// What a figure has to reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bar {
    /// Informative only.
    None,
    /// Ours is at least this many times the better peer's.
    AtLeastRatio(f64),
    /// Ours is at most this many times the better peer's.
    AtMostRatio(f64),
    /// Ours is at most this, in the figure's unit.
    AtMost(f64),
    /// Ours differs from the peer's by at most this part of it, in either direction.
    Within(f64),
}

/// A line of the report. `Display` gives `name ours peer ratio bar ok|short`, blank-separated,
/// with `-` for missing parts, and `implausible` at the end if no machine could have that value.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// Name with the unit at its end; no blanks.
    pub name: String,
    /// Median of the daemon under test.
    pub ours: f64,
    /// Median of the better peer.
    pub peer: Option<f64>,
    /// What it is held against.
    pub bar: Bar,
}

impl Figure {
    /// Makes a figure from the rounds of each server, ours first. Servers without rounds are
    /// left out; `None` when ours has none.
    #[must_use]
    pub fn from_rounds(
        name: impl Into<String>,
        rounds: &[Vec<f64>],
        better: Better,
        bar: Bar,
    ) -> Option<Self> {
        let (ours, peers) = rounds.split_first()?;
        let peer = peers.iter().filter_map(|values| median(values)).reduce(match better {
            Better::Higher => f64::max,
            Better::Lower => f64::min,
        });
        Some(Self { name: name.into(), ours: median(ours)?, peer, bar })
    }

    /// Ours divided by the better peer's; `None` without a peer or when the peer's is not above 0.
    #[must_use]
    pub fn ratio(&self) -> Option<f64> {
        self.peer.filter(|peer| *peer > 0.0).map(|peer| self.ours / peer)
    }

    /// Returns true if both values can be what was measured: a wrapped difference or a division by zero is an error of
    /// the bench, whatever the bar.
    #[must_use]
    pub fn is_plausible(&self) -> bool {
        let is = |value: f64| value.is_finite() && (0.0..MOST).contains(&value);
        is(self.ours) && self.peer.is_none_or(is)
    }

    /// Whether the bar is met. A bar on a ratio that cannot be formed is not.
    #[must_use]
    pub fn meets_bar(&self) -> bool {
        self.is_plausible()
            && match self.bar {
                Bar::None => true,
                Bar::AtLeastRatio(least) => self.ratio().is_some_and(|ratio| ratio >= least),
                Bar::AtMostRatio(most) => self.ratio().is_some_and(|ratio| ratio <= most),
                Bar::AtMost(most) => self.ours <= most,
                Bar::Within(most) => self.ratio().is_some_and(|ratio| (ratio - 1.0).abs() <= most),
            }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.name, rounded(self.ours))?;
        match self.peer {
            Some(peer) => write!(f, "{} ", rounded(peer))?,
            None => f.write_str("- ")?,
        }
        match self.ratio() {
            Some(ratio) => write!(f, "{ratio:.3} ")?,
            None => f.write_str("- ")?,
        }
        match self.bar {
            Bar::None => f.write_str("- ")?,
            Bar::AtLeastRatio(least) => write!(f, ">={least:.2}x ")?,
            Bar::AtMostRatio(most) => write!(f, "<={most:.2}x ")?,
            Bar::AtMost(most) => write!(f, "<={most:.2} ")?,
            Bar::Within(most) => write!(f, "+-{most:.2} ")?,
        }
        f.write_str(match (self.is_plausible(), self.meets_bar()) {
            (false, _) => "implausible",
            (true, true) => "ok",
            (true, false) => "short",
        })
    }
}

/// About four significant digits: whole numbers for rates, decimals for small costs.
fn rounded(value: f64) -> String {
    if value.abs() >= 1000.0 {
        format!("{value:.0}")
    } else if value.abs() >= 10.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.4}")
    }
}

/// The middle value, or the mean of the middle two; `None` of nothing.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    Some((sorted[sorted.len() / 2 - 1] + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_nothing() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn the_better_peer_depends_on_the_direction() {
        let rounds = [vec![12.0], vec![10.0], vec![8.0]];
        let rate = Figure::from_rounds("r", &rounds, Better::Higher, Bar::None).unwrap();
        assert_eq!(rate.peer, Some(10.0));
        let cost = Figure::from_rounds("c", &rounds, Better::Lower, Bar::None).unwrap();
        assert_eq!(cost.peer, Some(8.0));
        assert_eq!(Figure::from_rounds("x", &[vec![], vec![1.0]], Better::Lower, Bar::None), None);
    }

    #[test]
    fn lines_say_what_is_met_and_what_is_short() {
        let line = |ours, peer, bar| Figure { name: "n".into(), ours, peer, bar }.to_string();
        let least = Bar::AtLeastRatio(1.2);
        assert_eq!(line(120_000.4, Some(100_000.0), least), "n 120000 100000 1.200 >=1.20x ok");
        assert_eq!(line(110_000.0, Some(100_000.0), least), "n 110000 100000 1.100 >=1.20x short");
        let most = Bar::AtMostRatio(0.6);
        assert_eq!(line(3.0, Some(6.0), most), "n 3.0000 6.0000 0.500 <=0.60x ok");
        assert_eq!(line(5.0, Some(6.0), most), "n 5.0000 6.0000 0.833 <=0.60x short");
        assert_eq!(line(0.25, Some(5.0), Bar::AtMost(0.3)), "n 0.2500 5.0000 0.050 <=0.30 ok");
        assert_eq!(line(9.5, None, Bar::AtMost(8.0)), "n 9.5000 - - <=8.00 short");
        assert_eq!(line(12.0, Some(6.0), Bar::None), "n 12.00 6.0000 2.000 - ok");
    }

    #[test]
    fn implausible_figure_meets_no_bar() {
        for ours in [f64::NAN, f64::INFINITY, -1.0, 2f64.powi(62)] {
            let figure = Figure { name: "n".into(), ours, peer: Some(ours), bar: Bar::None };
            assert!(!figure.meets_bar() && figure.to_string().ends_with(" implausible"), "{ours}");
        }
    }

    #[test]
    fn a_ratio_that_cannot_be_formed_meets_no_bar() {
        for peer in [None, Some(0.0)] {
            let figure = Figure { name: "n".into(), ours: 1.0, peer, bar: Bar::AtMostRatio(0.6) };
            assert!(!figure.meets_bar());
            assert!(!Figure { bar: Bar::AtLeastRatio(1.0), ..figure }.meets_bar());
        }
    }
}
