//! Gradients by autodiff: right against finite differences in f64, and the same by every form in f32.

mod common;
#[path = "gradients/finite_differences.rs"]
mod finite_differences;
#[path = "gradients/limits.rs"]
mod limits;
#[path = "gradients/node.rs"]
mod node;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Gradients, Shape, Tensor};
use burn_kda::*;
use common::array::Array;
use common::compare::Report;
use common::operator::{Form, Problem, Tensors};
use common::parameters::parameters;
use common::platform::{bar, platforms};
use common::recipe::{Decay, Keys, Random, Recipe, Strength};

const FORMS: [Form; 3] = [Form::Chunk(16), Form::Chunk(64), Form::Recurrent];

fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.flatten(0, D - 1)
}

/// Every kind of parameter, few numbers.
fn small_layers() -> [(&'static str, KdaConfig); 3] {
    let low_rank = KdaConfig::new(4, 1, 3)
        .with_num_v_heads(Some(2))
        .with_expand_v(2.0 / 3.0)
        .with_output_gate_bias(true)
        .with_conv_bias(true)
        .with_chunk_size(2);
    let full = KdaConfig::new(4, 2, 3)
        .with_decay(DecayFn::SIGMOID)
        .with_decay_projection(Projection::Full)
        .with_output_gate(Projection::Full)
        .with_conv_size(Some(2))
        .with_allow_neg_eigval(true)
        .with_chunk_size(4);
    let bare = KdaConfig::new(4, 1, 4).with_conv_size(None);
    [("low rank", low_rank), ("full rank", full), ("without convolution", bare)]
}

struct Trained<'a>(&'a Gradients, usize);

impl ModuleVisitor for Trained<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = Array::of(param.val().grad(self.0).expect("a gradient"));
        assert!(gradient.values.iter().all(|x| x.is_finite()) && gradient.values.iter().any(|&x| x != 0.0));
        self.1 += 1;
    }
}

/// As initialised, by way of the parameters themselves.
#[test]
fn every_parameter_is_trained() {
    for (name, config) in small_layers() {
        for (_, device, _) in platforms() {
            let layer = config.init(&device.autodiff());
            let x =
                Random::new(7).normal(vec![2, 5, config.hidden_size]).tensor::<3>(&layer.a_log.device(), DType::F32);
            let gradients = layer.forward(x).square().sum().backward();
            let mut trained = Trained(&gradients, 0);
            layer.visit(&mut trained);
            assert_eq!(trained.1, parameters(&layer).len(), "{name}");
        }
    }
}

/// Wide enough that the error of a gradient is a mean over many channels, not the luck of the slowest one.
fn wide() -> Recipe {
    Recipe { key_dim: 24, value_dim: 16, ..Recipe::default() }
}

/// The problem with gradients by the definition in f64.
fn with_gradients(mut problem: Problem) -> Problem {
    problem.gradients = problem.backward(Form::Definition, &Device::flex(), DType::F64);
    problem
}

#[test]
fn every_form_has_the_same_gradients_in_every_regime() {
    let mut report = Report::new("gradients of every form");
    for decay in Decay::ALL {
        for (keys, strength) in [
            (Keys::Random, Strength::Single),
            (Keys::Random, Strength::Double),
            (Keys::NearIdentical, Strength::Single),
            (Keys::Identical, Strength::NearTwo),
            (Keys::Zero, Strength::Single),
            (Keys::Random, Strength::Zero),
            (Keys::Random, Strength::One),
        ] {
            let state = keys != Keys::NearIdentical;
            let recipe = Recipe { time: 37, decay, keys, strength, state, ..wide() };
            with_gradients(recipe.problem()).check(&FORMS, &mut report);
        }
    }
    report.finish();
}

#[test]
fn losses_on_one_output_and_packed_sequences() {
    let mut report = Report::new("gradients of parts");
    let recipe = || Recipe { decay: Decay::Uniform, ..wide() };
    let zero = |x: &Array| Array::zeros(x.shape.clone());

    // Nothing reads the state for the queries: their gradient is zero to the bit.
    let problem = recipe().problem();
    let on_state =
        with_gradients(Problem { d_o: zero(&problem.o), group: "final state only".into(), ..problem.clone() });
    assert!(on_state.gradients[0].1.values.iter().all(|&x| x == 0.0));
    on_state.check(&FORMS, &mut report);
    let on_outputs = Problem { d_final_state: zero(&problem.final_state), group: "outputs only".into(), ..problem };
    with_gradients(on_outputs).check(&FORMS, &mut report);

    for (what, time, state) in [
        ("one token", 1, true),
        ("one token from nothing", 1, false),
        ("less than a chunk", 9, true),
        ("long", 300, true),
        ("long from nothing", 260, false),
    ] {
        let problem = Recipe { time, state, ..recipe() }.problem();
        with_gradients(Problem { group: what.into(), ..problem }).check(&FORMS, &mut report);
    }
    // Several vectors of both kinds of channels, several segments, and heads that threads share.
    for (what, time, value_dim) in [("long and wide", 130, 72), ("wider than a task", 70, 130)] {
        let problem = Recipe { time, key_dim: 40, value_dim, ..recipe() }.problem();
        with_gradients(Problem { group: what.into(), ..problem }).check(&FORMS, &mut report);
    }
    for (what, state) in [("packed", true), ("packed from nothing", false)] {
        let problem = Recipe { time: 40, state, cu_seqlens: Some(vec![0, 0, 1, 20, 20, 40]), ..recipe() }.problem();
        with_gradients(Problem { group: what.into(), ..problem }).check(&FORMS, &mut report);
    }
    report.finish();
}

/// Nothing to decay, so no gradient, to the bit; with packed sequences in each of them.
#[test]
fn first_decay_without_a_state_has_no_gradient() {
    for decay in Decay::ALL {
        for bounds in [None, Some(vec![0, 0, 1, 9, 40])] {
            let first = bounds.as_ref().map_or(vec![0], |bounds| vec![bounds[0], bounds[1], bounds[2], bounds[3]]);
            let problem = Recipe { time: 40, decay, state: false, cu_seqlens: bounds, ..Recipe::default() }.problem();
            let width: usize = problem.g.shape[2..].iter().product();
            for (platform, device, dtype) in platforms() {
                for form in FORMS {
                    let (_, dg) = &problem.backward(form, &device, dtype)[3];
                    for &t in &first {
                        let row = &dg.values[t * width..(t + 1) * width];
                        assert!(row.iter().all(|&x| x == 0.0), "{platform} {form:?} {decay:?} t = {t}: {row:?}");
                    }
                }
            }
        }
    }
}

/// Not even by the memory that heads share.
#[test]
fn a_nan_stays_in_its_row() {
    let right = Recipe { batch: 3, time: 70, key_dim: 5, value_dim: 3, decay: Decay::Uniform, ..wide() }.problem();
    for (platform, device, dtype) in platforms() {
        for form in FORMS {
            let clean = right.backward(form, &device, dtype);
            for input in ["q", "k", "v", "g", "beta", "d_o"] {
                let mut problem = right.clone();
                let Problem { q, k, v, g, beta, d_o, .. } = &mut problem;
                let inputs = [("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("d_o", d_o)];
                let (_, x) = inputs.into_iter().find(|(name, _)| *name == input).expect("an input");
                let row = x.values.len() / 3;
                x.values[row..2 * row].fill(f64::NAN);
                for ((name, got), (_, clean)) in problem.backward(form, &device, dtype).iter().zip(&clean) {
                    let row = got.values.len() / 3;
                    let what = format!("{platform} {form:?}, NaN in {input}: {name}");
                    assert_eq!(got.values[..row], clean.values[..row], "{what} of row 0");
                    assert_eq!(got.values[2 * row..], clean.values[2 * row..], "{what} of row 2");
                }
            }
        }
    }
}

#[test]
fn gradients_of_a_batch_are_those_of_its_rows() {
    let mut report = Report::new("gradients of rows");
    for decay in [Decay::Uniform, Decay::HardReset] {
        let problem = Recipe { batch: 3, decay, ..Recipe::default() }.problem();
        for (platform, device, dtype) in platforms() {
            for form in FORMS {
                let batch = problem.backward(form, &device, dtype);
                for row in 0..3 {
                    let at = |x: &Array| {
                        let len = x.values.len() / 3;
                        let shape = [&[1], &x.shape[1..]].concat();
                        Array::new(shape, x.values[row * len..(row + 1) * len].to_vec())
                    };
                    let alone = Problem {
                        q: at(&problem.q),
                        k: at(&problem.k),
                        v: at(&problem.v),
                        g: at(&problem.g),
                        beta: at(&problem.beta),
                        initial_state: problem.initial_state.as_ref().map(at),
                        d_o: at(&problem.d_o),
                        d_final_state: at(&problem.d_final_state),
                        ..problem.clone()
                    };
                    for ((name, got), (_, want)) in alone.backward(form, &device, dtype).iter().zip(&batch) {
                        report.check(&platform, format!("{form:?} {name}"), got, &at(want), dtype, bar(dtype));
                    }
                }
            }
        }
    }
    report.finish();
}

/// A head of queries and keys that several value heads read gets the sum of what each of them sends back.
#[test]
fn grouped_heads_sum_over_their_group() {
    let mut report = Report::new("gradients of groups");
    let (heads, group, width) = (2, 3, 5);
    let grouped = Recipe { heads, group, key_dim: width, decay: Decay::Uniform, ..Recipe::default() }.problem();
    let repeat = |x: &Array| {
        let rows = x.values.chunks(width).flat_map(|row| std::iter::repeat_n(row, group)).flatten();
        Array::new(vec![x.shape[0], x.shape[1], heads * group, width], rows.copied().collect())
    };
    let sum = |x: &Array| {
        let sums = x
            .values
            .chunks(group * width)
            .flat_map(|rows| (0..width).map(|i| rows.iter().skip(i).step_by(width).sum()));
        Array::new(vec![x.shape[0], x.shape[1], heads, width], sums.collect())
    };
    let repeated = Problem { q: repeat(&grouped.q), k: repeat(&grouped.k), ..grouped.clone() };
    for (platform, device, dtype) in platforms() {
        for form in FORMS {
            let want = repeated.backward(form, &device, dtype);
            for ((name, got), (_, want)) in grouped.backward(form, &device, dtype).iter().zip(&want) {
                let want = if matches!(*name, "dq" | "dk") { sum(want) } else { want.clone() };
                report.check(&platform, format!("{form:?} {name}"), got, &want, dtype, bar(dtype));
            }
        }
    }
    report.finish();
}

#[test]
fn the_plain_algorithm_passes_them_too() {
    common::platform::again_in_plain_operations();
}

#[test]
fn older_machines_pass_them_too() {
    common::platform::again_on_older_machines();
}
