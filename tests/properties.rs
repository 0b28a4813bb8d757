//! Random shapes and options: every form of the operator against its definition in f64 scalars.
//!
//! Seeds are fixed, so a run is the same everywhere; `PROPTEST_CASES` asks for more cases.

mod common;

use std::ops::Range;

use burn::tensor::{DType, Tensor};
use burn_kda::KdaOutput;
use common::array::Array;
use common::calls::run_in_calls;
use common::compare::relative_rms;
use common::operator::{Form, Problem};
use common::platform::{self, platforms};
use common::recipe::{Decay, Keys, Recipe, Strength};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestCaseResult};

fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { cases };
    ProptestConfig { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(2602), ..default }
}

fn recipes(times: Range<usize>) -> impl Strategy<Value = Recipe> {
    let shape = (1..4_usize, times, 1..4_usize, 1..4_usize, 1..18_usize, 1..18_usize);
    let kinds = (
        prop::sample::select(&Decay::ALL[..]),
        prop::sample::select(&Keys::ALL[..]),
        prop::sample::select(&Strength::ALL[..]),
    );
    let options = (any::<bool>(), prop::option::of(-2.0..2.0_f64), any::<u64>());
    (shape, kinds, options).prop_map(|(shape, kinds, options)| {
        let (batch, time, heads, group, key_dim, value_dim) = shape;
        let (decay, keys, strength) = kinds;
        let (state, scale, seed) = options;
        let cu_seqlens = None;
        Recipe { batch, time, heads, group, key_dim, value_dim, decay, keys, strength, state, scale, cu_seqlens, seed }
    })
}

fn chunk_sizes() -> impl Strategy<Value = Form> {
    (0..8_u32).prop_map(|log| Form::Chunk(1 << log))
}

/// `0 = c_0 <= c_1 <= .. <= c_N`, short sequences and empty ones among them.
fn bounds() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![Just(0), Just(1), 2..9_usize, 9..70_usize];
    prop::collection::vec(len, 1..6).prop_map(|lens| {
        let end = lens.into_iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        std::iter::once(0).chain(end).collect()
    })
}

/// Every form on every device and in every precision.
fn check(problem: &Problem, forms: &[Form]) -> TestCaseResult {
    for (platform, device, dtype) in platforms() {
        for &form in forms {
            let output = problem.run(form, problem.constants(&device, dtype));
            check_output(&format!("{platform} {form:?}"), output, problem, dtype)?;
        }
    }
    Ok(())
}

fn check_output(what: &str, output: KdaOutput, problem: &Problem, dtype: DType) -> TestCaseResult {
    let bar = if problem.reflecting { platform::reflecting_bar(dtype) } else { platform::bar(dtype) };
    let tensors = [("o", output.o, &problem.o), ("final_state", output.final_state, &problem.final_state)];
    for (name, got, want) in tensors {
        let error = relative_rms(&Array::of(got), want, dtype);
        prop_assert!(error <= bar, "{what} {name}: {error:.2e} > {bar:.0e}");
    }
    Ok(())
}

/// The problem with `len` rows put in at each of `places` whose key, write strength and log decay are zero, and
/// where the old rows are then. Queries and values of the new rows are not zero: they must not matter.
fn with_inert_rows(problem: &Problem, places: &[usize], len: usize) -> (Problem, Vec<usize>) {
    let (batch, time) = (problem.q.shape[0], problem.q.shape[1]);
    let before = |t: usize| len * places.iter().filter(|&&place| place <= t).count();
    let live: Vec<_> = (0..time).map(|t| t + before(t)).collect();
    let total = time + len * places.len();
    let spread = |x: &Array, fill: f64| {
        let width: usize = x.shape[2..].iter().product();
        let mut values = vec![fill; batch * total * width];
        for (row, old) in x.values.chunks(width).enumerate() {
            let new = row / time * total + live[row % time];
            values[new * width..(new + 1) * width].copy_from_slice(old);
        }
        Array::new([&[batch, total], &x.shape[2..]].concat(), values)
    };
    let padded = Problem {
        q: spread(&problem.q, 3.0),
        k: spread(&problem.k, 0.0),
        v: spread(&problem.v, -7.0),
        g: spread(&problem.g, 0.0),
        beta: spread(&problem.beta, 0.0),
        ..problem.clone()
    };
    (padded, live)
}

proptest! {
    #![proptest_config(config(128))]

    #[test]
    fn every_form_is_the_definition(recipe in recipes(1..40), chunk in chunk_sizes()) {
        check(&recipe.problem(), &[chunk, Form::Recurrent, Form::Step])?;
    }

    #[test]
    fn long_sequences_are_the_definition(recipe in recipes(40..150), chunk in chunk_sizes()) {
        check(&recipe.problem(), &[chunk, Form::Chunk(64), Form::Recurrent])?;
    }

    #[test]
    fn no_tokens_leave_the_state(recipe in recipes(0..1), chunk in chunk_sizes()) {
        check(&recipe.problem(), &[chunk, Form::Recurrent])?;
    }

    #[test]
    fn packed_sequences_are_the_definition(recipe in recipes(0..1), bounds in bounds(), chunk in chunk_sizes()) {
        let time = bounds[bounds.len() - 1];
        let problem = Recipe { batch: 1, time, cu_seqlens: Some(bounds), ..recipe }.problem();
        check(&problem, &[chunk, Form::Recurrent])?;
    }

    #[test]
    fn rows_that_hold_nothing_change_nothing(
        recipe in recipes(1..60),
        chunk in chunk_sizes(),
        places in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
        len in 1..20_usize,
    ) {
        let problem = recipe.problem();
        let places: Vec<_> = places.iter().map(|place| place.index(recipe.time + 1)).collect();
        let (padded, live) = with_inert_rows(&problem, &places, len);
        for (platform, device, dtype) in platforms() {
            for form in [chunk, Form::Recurrent] {
                let KdaOutput { o, final_state } = padded.run(form, padded.constants(&device, dtype));
                let rows = live.iter().map(|&t| o.clone().slice_dim(1, t..t + 1)).collect();
                let output = KdaOutput { o: Tensor::cat(rows, 1), final_state };
                check_output(&format!("{platform} {form:?}"), output, &problem, dtype)?;
            }
        }
    }

    #[test]
    fn any_split_into_calls_is_the_definition(
        recipe in recipes(1..90),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
        forms in prop::collection::vec(prop_oneof![chunk_sizes(), Just(Form::Recurrent)], 1..4),
    ) {
        let problem = recipe.problem();
        let mut bounds: Vec<_> = cuts.iter().map(|cut| cut.index(recipe.time + 1)).chain([0, recipe.time]).collect();
        bounds.sort();
        for (platform, device, dtype) in platforms() {
            let output = run_in_calls(&problem, problem.constants(&device, dtype), &bounds, &forms);
            check_output(&format!("{platform} {forms:?} {bounds:?}"), output, &problem, dtype)?;
        }
    }
}

/// A NaN of any input reaches the outputs of its batch row, at the first token already, and no other row.
#[test]
fn a_nan_passes_and_stays_in_its_row() {
    for time in [1, 2, 40] {
        let right = Recipe { batch: 3, time, state: false, decay: Decay::Uniform, ..Recipe::default() }.problem();
        for (platform, device, dtype) in platforms() {
            for form in [Form::Chunk(64), Form::Recurrent] {
                let clean = Array::of(right.run(form, right.constants(&device, dtype)).o).values;
                for input in ["q", "k", "v", "g", "beta"] {
                    let mut problem = right.clone();
                    let Problem { q, k, v, g, beta, .. } = &mut problem;
                    let x = match input {
                        "q" => q,
                        "k" => k,
                        "v" => v,
                        "g" => g,
                        _ => beta,
                    };
                    let row = x.values.len() / 3;
                    x.values[row..row + row / time].fill(f64::NAN);
                    let got = Array::of(problem.run(form, problem.constants(&device, dtype)).o).values;
                    let row = got.len() / 3;
                    let what = format!("{platform} {form:?}, T = {time}, NaN in {input}");
                    assert!(got[row..row + row / time].iter().all(|x| x.is_nan()), "{what}: hidden");
                    assert_eq!(got[..row], clean[..row], "{what}: row 0");
                    assert_eq!(got[2 * row..], clean[2 * row..], "{what}: row 2");
                }
            }
        }
    }
}
