//! The operator on the device that `BURN_DEVICE` names, with whatever kernels it has; on NdArray and Flex without it.
//!
//! `BURN_DEVICE=wgpu cargo test -p burn-kda --no-default-features --features std,autodiff,webgpu --test backends`

#[cfg(feature = "capture")]
#[path = "backends/capture.rs"]
mod capture;
mod common;
#[path = "backends/half.rs"]
mod half;
#[cfg(feature = "cubecl")]
#[path = "backends/launches.rs"]
mod launches;
#[path = "backends/layer.rs"]
mod layer;

use burn::tensor::{DType, Device, Tensor};
use burn_kda::{KdaInput, KdaOutput};
use common::array::Array;
use common::calls::run_in_calls;
use common::compare::Report;
use common::fixture::Fixture;
use common::operator::{Form, Problem, Tensors};
use common::platform::{bar, platforms, reflecting_bar};
use common::recipe::{Decay, Keys, Recipe, Strength};

const FORMS: [Form; 3] = [Form::Chunk(64), Form::Recurrent, Form::Step];

/// Outputs, final states and gradients of all cases.
fn fixture(file: &str, forms: &[Form]) {
    let fixture = Fixture::open(file);
    let mut report = Report::new(file);
    for case in fixture.row("") {
        Problem::of_fixture(&case).check(forms, &mut report);
    }
    report.finish();
}

#[test]
fn lengths() {
    fixture("lengths", &FORMS);
}

#[test]
fn shapes() {
    fixture("shapes", &FORMS[..2]);
}

#[test]
fn read_scales() {
    fixture("scale", &FORMS);
}

#[test]
fn regimes() {
    fixture("regimes", &FORMS[..2]);
}

#[test]
fn packed_sequences() {
    fixture("packed", &FORMS[..2]);
}

/// Output and final state, the sequence in calls that end at `bounds`.
fn check(problem: &Problem, forms: &[Form], bounds: &[usize], report: &mut Report) {
    for (platform, device, dtype) in platforms() {
        let bar = if problem.reflecting { reflecting_bar(dtype) } else { bar(dtype) };
        for &form in forms {
            let output = run_in_calls(problem, problem.constants(&device, dtype), bounds, &[form]);
            let group = format!("{platform} {}", problem.group);
            let what = |tensor: &str| format!("{} {form:?} {tensor}", problem.name);
            report.check(&group, what("o"), &Array::of(output.o), &problem.o, dtype, bar);
            let final_state = Array::of(output.final_state);
            report.check(&group, what("final_state"), &final_state, &problem.final_state, dtype, bar);
        }
    }
}

#[test]
fn every_regime_in_one_call_and_in_several() {
    let mut report = Report::new("regimes in calls");
    for decay in Decay::ALL {
        for (keys, strength) in [
            (Keys::Random, Strength::Single),
            (Keys::Random, Strength::Double),
            (Keys::NearIdentical, Strength::Single),
            (Keys::Identical, Strength::NearTwo),
            (Keys::Zero, Strength::One),
        ] {
            let recipe = Recipe { time: 40, key_dim: 24, value_dim: 16, decay, keys, strength, ..Recipe::default() };
            for bounds in [&[0, 40][..], &[0, 1, 2, 17, 40]] {
                check(&recipe.problem(), &[Form::Chunk(64), Form::Recurrent], bounds, &mut report);
            }
        }
    }
    report.finish();
}

/// Up to 256 channels, odd numbers of them, and fewer than a unit of a kernel takes.
#[test]
fn sizes_of_heads() {
    let mut report = Report::new("sizes of heads");
    for (key_dim, value_dim) in [(256, 256), (255, 129), (200, 7), (128, 128), (65, 130), (3, 251), (1, 1)] {
        for (batch, heads, group, time) in [(1, 1, 1, 5), (2, 2, 3, 20)] {
            let recipe = Recipe { batch, time, heads, group, key_dim, value_dim, ..Recipe::default() };
            check(&recipe.problem(), &[Form::Chunk(64), Form::Recurrent], &[0, 2, 3, time], &mut report);
        }
    }
    report.finish();
}

/// So many keys that a unit could have more value channels than there are.
#[test]
fn gradients_of_wide_keys() {
    let mut report = Report::new("gradients of wide keys");
    let problem = Recipe { time: 10, heads: 1, key_dim: 200, value_dim: 7, ..Recipe::default() }.problem();
    let want = problem.backward(Form::Definition, &Device::flex(), DType::F64);
    for (platform, device, dtype) in platforms() {
        let got = problem.backward(Form::Chunk(64), &device, dtype);
        for ((tensor, got), (_, want)) in got.iter().zip(&want) {
            report.check(&platform, *tensor, got, want, dtype, bar(dtype));
        }
    }
    report.finish();
}

/// A decay near 1 rounds the same way at every token, which adds up where the roundings are not undone.
#[test]
fn long_sequences_do_not_drift() {
    let mut report = Report::new("long sequences");
    for (decay, keys) in [(Decay::Tiny, Keys::Zero), (Decay::Tiny, Keys::Random), (Decay::Mild, Keys::Random)] {
        let problem = Recipe { time: 1500, key_dim: 16, decay, keys, ..Recipe::default() }.problem();
        check(&problem, &[Form::Chunk(64)], &[0, 1500], &mut report);
        check(&problem, &[Form::Recurrent], &[0, 700, 1500], &mut report);
    }
    report.finish();
}

/// The same numbers, whatever the layout of the inputs in memory.
#[test]
fn strided_inputs() {
    let problem = Recipe { batch: 2, key_dim: 6, value_dim: 6, group: 1, ..Recipe::default() }.problem();
    for (platform, device, dtype) in platforms() {
        let Tensors { input, state } = problem.constants(&device, dtype);
        let KdaInput { q, k, v, g, beta } = input.clone();
        let head_first = |x: Tensor<4>| Tensor::cat(vec![x.swap_dims(1, 2)], 0).swap_dims(1, 2);
        // As one projection gives them.
        let joint = Tensor::cat(vec![q, k, v], 3);
        let part = |n: usize| joint.clone().slice_dim(3, 6 * n..6 * (n + 1));
        let strided = KdaInput {
            q: part(0),
            k: part(1),
            v: part(2),
            g: head_first(g),
            beta: Tensor::cat(vec![beta.swap_dims(1, 2)], 0).swap_dims(1, 2),
        };
        let strided_state = state.clone().map(|state| Tensor::cat(vec![state.swap_dims(2, 3)], 0).swap_dims(2, 3));
        for form in [Form::Chunk(64), Form::Recurrent] {
            let want = problem.run(form, Tensors { input: input.clone(), state: state.clone() });
            let got = problem.run(form, Tensors { input: strided.clone(), state: strided_state.clone() });
            let values = |output: KdaOutput| [output.o, output.final_state].map(|x| Array::of(x).values);
            assert_eq!(values(got), values(want), "{platform} {form:?}");
        }
    }
}

/// To the bit, and again in a second run.
#[test]
fn a_sequence_alone_is_the_sequence_in_a_batch() {
    let problem = Recipe { time: 33, key_dim: 40, value_dim: 20, ..Recipe::default() }.problem();
    for (platform, device, dtype) in platforms() {
        for form in FORMS {
            let Tensors { input: KdaInput { q, k, v, g, beta }, state } = problem.constants(&device, dtype);
            let many = |x: &Tensor<4>| x.clone().repeat_dim(0, 40);
            let batch =
                KdaInput { q: many(&q), k: many(&k), v: many(&v), g: many(&g), beta: beta.clone().repeat_dim(0, 40) };
            let batch = Tensors { input: batch, state: state.as_ref().map(many) };
            let batch = Array::of(problem.run(form, batch).o).values;
            let alone = Tensors { input: KdaInput { q, k, v, g, beta }, state };
            let alone = Array::of(problem.run(form, alone).o).values;
            assert!(batch.chunks(alone.len()).all(|row| row == alone), "{platform} {form:?}");
        }
    }
}

/// What no number depends on does not change it, not even to the bit: other rows of a batch, other heads, later tokens.
#[test]
fn a_nan_reaches_nothing_before_or_beside_it() {
    let recipe = Recipe { batch: 2, time: 75, heads: 6, group: 1, key_dim: 20, value_dim: 20, ..Recipe::default() };
    let clean = recipe.problem();
    for (row, token, head) in [(0, 0, 0), (0, 13, 2), (1, 66, 5), (1, 74, 0)] {
        for input in 0..5 {
            let mut problem = recipe.problem();
            let Problem { q, k, v, g, beta, .. } = &mut problem;
            let place = (row * 75 + token) * 6 + head;
            match input {
                4 => beta.values[place] = f64::NAN,
                _ => [q, k, v, g][input].values[place * 20 + 3] = f64::NAN,
            }
            for (platform, device, dtype) in platforms() {
                for form in [Form::Chunk(64), Form::Recurrent] {
                    let run = |problem: &Problem| Array::of(problem.run(form, problem.constants(&device, dtype)).o);
                    let (got, want) = (run(&problem).values, run(&clean).values);
                    let is_reached = |n: usize| n / (75 * 6) == row && n / 6 % 75 >= token && n % 6 == head;
                    let what = format!("{platform} {form:?} input {input} at {row}, {token}, {head}");
                    for (n, (got, want)) in got.chunks(20).zip(want.chunks(20)).enumerate() {
                        assert!(is_reached(n) || got == want, "{what}: head {n} of the output");
                    }
                    assert!(got[place * 20..][..20].iter().any(|x| x.is_nan()), "{what}: nowhere");
                }
            }
        }
    }
}
