//! Student's t for a handful of runs: is there a difference, and how sure can one be?

/// Two-sided 95 % points of Student's distribution for 1 to 30 degrees of freedom (any table of
/// statistics).
const POINTS: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

/// What a comparison of two rows of figures came to, in per cent of the second row's mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// How much larger the first row is.
    pub percent: f64,
    /// Half the width of the 95 % confidence interval around that.
    pub half_width: f64,
    /// Degrees of freedom.
    pub freedom: usize,
}

impl Difference {
    /// Whether a difference is proven at 95 %: the interval leaves out zero.
    #[must_use]
    pub fn proven(&self) -> bool {
        self.percent.abs() > self.half_width
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Sum of squared deviations from the mean.
fn spread(values: &[f64]) -> f64 {
    let mean = mean(values);
    values.iter().map(|value| (value - mean).powi(2)).sum()
}

/// Compares figures that were taken in pairs: what both of a pair had to bear alike, such as a busy
/// machine, cancels out. `None` for fewer than two pairs, more than 31, or rows of unlike length.
#[must_use]
pub fn paired(first: &[f64], second: &[f64]) -> Option<Difference> {
    if first.len() != second.len() {
        return None;
    }
    let differences: Vec<f64> = first.iter().zip(second).map(|(a, b)| a - b).collect();
    let freedom = differences.len().checked_sub(1)?;
    let point = POINTS.get(freedom.checked_sub(1)?)?;
    let count = differences.len() as f64;
    let error = (spread(&differences) / freedom as f64 / count).sqrt();
    in_percent(mean(&differences), point * error, mean(second), freedom)
}

/// Compares two independent rows, taking their spread as the same (the textbook's pooled test).
/// `None` for rows of one, or of more than 32 together.
#[must_use]
pub fn pooled(first: &[f64], second: &[f64]) -> Option<Difference> {
    if first.len() < 2 || second.len() < 2 {
        return None;
    }
    let freedom = first.len() + second.len() - 2;
    let point = POINTS.get(freedom - 1)?;
    let variance = (spread(first) + spread(second)) / freedom as f64;
    let error = (variance * (1.0 / first.len() as f64 + 1.0 / second.len() as f64)).sqrt();
    in_percent(mean(first) - mean(second), point * error, mean(second), freedom)
}

fn in_percent(difference: f64, half_width: f64, whole: f64, freedom: usize) -> Option<Difference> {
    (whole > 0.0).then(|| Difference {
        percent: difference / whole * 100.0,
        half_width: half_width / whole * 100.0,
        freedom,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-3
    }

    #[test]
    fn pairs_cancel_what_they_share() {
        // Differences 1, 2, 3: mean 2, standard deviation 1, error 1/sqrt(3), point 4.303.
        let result = paired(&[101.0, 202.0, 303.0], &[100.0, 200.0, 300.0]).unwrap();
        assert!(close(result.percent, 1.0), "{result:?}");
        assert!(close(result.half_width, 4.303 / 3f64.sqrt() / 2.0), "{result:?}");
        assert_eq!((result.freedom, result.proven()), (2, false));
        assert!(paired(&[102.0, 202.0, 302.0], &[100.0, 200.0, 300.1]).unwrap().proven());
        assert!(!pooled(&[102.0, 202.0, 302.0], &[100.0, 200.0, 300.1]).unwrap().proven());
    }

    #[test]
    fn published_figures_prove_no_difference() {
        // Averages 419.4 and 417.8, deviations 2.51 and 4.44, five runs each.
        let (zero, full) =
            ([417.0, 418.0, 420.0, 423.0, 419.0], [414.0, 416.0, 416.0, 418.0, 425.0]);
        let result = pooled(&zero, &full).unwrap();
        assert!(!result.proven() && result.half_width < 3.0, "{result:?}");
        assert_eq!(result.freedom, 8);
    }

    #[test]
    fn too_few_and_unlike_rows_say_nothing() {
        assert_eq!(paired(&[1.0], &[1.0]), None);
        assert_eq!(paired(&[1.0, 2.0], &[1.0]), None);
        assert_eq!(pooled(&[1.0], &[1.0, 2.0]), None);
        assert_eq!(paired(&[0.0; 3], &[0.0; 3]), None);
        assert_eq!(paired(&[1.0; 40], &[1.0; 40]), None);
    }
}
