//! One error measure for everything: relative RMS, which no NaN and no stray value passes.

use std::collections::BTreeMap;

use burn::tensor::DType;

use super::array::Array;

/// `rms(got - want) / rms(want)`; infinite, never NaN, for a NaN or an infinity.
///
/// Zeros must be exact: a tensor that should be zero has no scale to be relative to, and a leak into it is a fault
/// of structure, not of rounding. Numbers that f32 cannot hold at all (a state decayed to 1e-152) must underflow.
pub fn relative_rms(got: &Array, want: &Array, dtype: DType) -> f64 {
    assert_eq!(got.shape, want.shape, "shapes of got and want");
    assert!(want.values.iter().all(|x| x.is_finite()), "the reference is not finite");
    if got.values.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let peak = want.values.iter().fold(0.0_f64, |peak, x| peak.max(x.abs()));
    let smallest = if dtype == DType::F64 { f64::MIN_POSITIVE } else { f64::from(f32::MIN_POSITIVE) };
    if peak < smallest {
        let most = if peak == 0.0 { 0.0 } else { smallest };
        return if got.values.iter().all(|x| x.abs() <= most) { 0.0 } else { f64::INFINITY };
    }
    // By the peak, so that the squares of tiny numbers do not underflow.
    let square = |x: f64| (x / peak) * (x / peak);
    let error: f64 = got.values.iter().zip(&want.values).map(|(got, want)| square(got - want)).sum();
    let scale: f64 = want.values.iter().map(|&want| square(want)).sum();
    (error / scale).sqrt()
}

/// Collects errors against their bars, prints the worst of each group, and fails with all that went over.
pub struct Report {
    title: String,
    worst: BTreeMap<String, (f64, String)>,
    failures: Vec<String>,
}

impl Report {
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), worst: BTreeMap::new(), failures: Vec::new() }
    }

    pub fn check(
        &mut self,
        group: impl Into<String>,
        what: impl Into<String>,
        got: &Array,
        want: &Array,
        dtype: DType,
        bar: f64,
    ) {
        let (group, what) = (group.into(), what.into());
        let error = relative_rms(got, want, dtype);
        if error > bar {
            self.failures.push(format!("{group}: {what}: {error:.2e} > {bar:.0e}"));
        }
        let worst = self.worst.entry(group).or_insert((-1.0, String::new()));
        if error > worst.0 {
            *worst = (error, what);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.worst.is_empty()
    }

    pub fn finish(self) {
        assert!(!self.worst.is_empty(), "{}: nothing was compared", self.title);
        for (group, (error, what)) in &self.worst {
            println!("{}: {group}: worst {error:.1e} ({what})", self.title);
        }
        assert!(self.failures.is_empty(), "{}:\n  {}", self.title, self.failures.join("\n  "));
    }
}
