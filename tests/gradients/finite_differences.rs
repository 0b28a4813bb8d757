//! In f64, in every coordinate of every input.

use super::*;
use crate::common::differences::{self, NORMED, SMOOTH};
use crate::common::operator::Tensors;
use crate::common::parameters::{layer, with_tensors};

/// Inputs by name, and the problem with other tensors in their place.
fn inputs(problem: &Problem) -> Vec<(&'static str, Array)> {
    let Problem { q, k, v, g, beta, initial_state, .. } = problem.clone();
    let state = initial_state.map(|state| ("initial_state", state));
    [("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)].into_iter().chain(state).collect()
}

fn tensors(problem: &Problem, flat: &[Tensor<1>]) -> Tensors {
    let at = |i: usize, like: &Array| flat[i].clone().reshape(Shape::from(like.shape.clone()));
    Tensors {
        input: KdaInput {
            q: at(0, &problem.q),
            k: at(1, &problem.k),
            v: at(2, &problem.v),
            g: at(3, &problem.g),
            beta: flat[4].clone().reshape(Shape::from(problem.beta.shape.clone())),
        },
        state: problem.initial_state.as_ref().map(|state| at(5, state)),
    }
}

#[test]
fn operator_matches_finite_differences() {
    let small = || Recipe { heads: 1, key_dim: 3, value_dim: 2, decay: Decay::Uniform, ..Recipe::default() };
    let recipes = [
        ("one token", Recipe { time: 1, ..small() }),
        ("one token from nothing", Recipe { time: 1, state: false, ..small() }),
        ("less than a chunk", Recipe { time: 3, ..small() }),
        ("a chunk and a bit", Recipe { batch: 2, time: 5, ..small() }),
        ("from nothing", Recipe { time: 6, state: false, ..small() }),
        ("packed", Recipe { time: 6, cu_seqlens: Some(vec![0, 0, 1, 6]), ..small() }),
        ("packed from nothing", Recipe { time: 6, state: false, cu_seqlens: Some(vec![0, 1, 1, 6]), ..small() }),
        ("nothing written", Recipe { time: 5, strength: Strength::Zero, ..small() }),
        ("zero keys", Recipe { time: 5, keys: Keys::Zero, ..small() }),
        ("one key", Recipe { time: 5, keys: Keys::Identical, strength: Strength::Double, ..small() }),
        ("no decay", Recipe { time: 5, decay: Decay::Zero, ..small() }),
        ("strong decay", Recipe { time: 2, decay: Decay::Strong, ..small() }),
        ("hard resets", Recipe { time: 5, decay: Decay::HardReset, ..small() }),
    ];
    let mut report = Report::new("operator against finite differences");
    for (what, recipe) in recipes {
        let problem = recipe.problem();
        for form in [Form::Chunk(4), Form::Recurrent, Form::Step] {
            differences::check(&mut report, &format!("{what} {form:?}"), SMOOTH, &inputs(&problem), |flat_inputs| {
                let KdaOutput { o, final_state } = problem.run(form, tensors(&problem, flat_inputs));
                vec![flat(o), flat(final_state)]
            });
        }
    }
    report.finish();
}

#[test]
fn gates_match_finite_differences() {
    let mut report = Report::new("gates against finite differences");
    let mut random = Random::new(3);
    let raw = random.uniform(vec![1, 3, 2, 3], -4.0, 4.0);
    let (a_log, dt_bias) = (random.uniform(vec![2], -1.0, 1.0), random.normal(vec![6]));
    for decay in [DecayFn::Softplus, DecayFn::SIGMOID] {
        let all = [("raw", raw.clone()), ("a_log", a_log.clone()), ("dt_bias", dt_bias.clone())];
        differences::check(&mut report, &format!("{decay:?}"), SMOOTH, &all, |x| {
            let raw = x[0].clone().reshape([1, 3, 2, 3]);
            vec![flat(decay_gate(raw, Some(x[1].clone()), Some(x[2].clone()), decay))]
        });
    }
    differences::check(&mut report, "sigmoid gate alone", SMOOTH, &[("raw", raw.clone())], |x| {
        vec![flat(decay_gate(x[0].clone().reshape([1, 3, 2, 3]), None, None, DecayFn::SIGMOID))]
    });
    for doubled in [false, true] {
        differences::check(&mut report, &format!("beta, doubled: {doubled}"), SMOOTH, &[("logit", raw.clone())], |x| {
            vec![flat(write_strength(x[0].clone().reshape([1, 3, 6]), doubled))]
        });
    }
    report.finish();
}

#[test]
fn norms_and_convolution_match_finite_differences() {
    let mut report = Report::new("pieces against finite differences");
    let mut random = Random::new(4);
    let shape = vec![2, 2, 2, 3];
    let (o, gate) = (random.normal(shape.clone()), random.normal(shape));
    let weight = random.normal(vec![3]);
    differences::check(&mut report, "l2_normalize", NORMED, &[("x", o.clone())], |x| {
        vec![flat(l2_normalize(x[0].clone().reshape([2, 2, 2, 3])))]
    });
    differences::check(&mut report, "gated_rms_norm", NORMED, &[("o", o), ("weight", weight), ("gate", gate)], |x| {
        let rows = |x: &Tensor<1>| x.clone().reshape([2, 2, 2, 3]);
        vec![flat(gated_rms_norm(rows(&x[0]), x[1].clone(), rows(&x[2]), 1e-5))]
    });
    for (time, width) in [(5, 4), (2, 4), (1, 4), (1, 2)] {
        let inputs = [
            ("x", random.normal(vec![2, time, 3])),
            ("weight", random.normal(vec![3, 1, width])),
            ("bias", random.normal(vec![3])),
            ("state", random.normal(vec![2, 3, width - 1])),
        ];
        differences::check(&mut report, &format!("convolution T = {time}, W = {width}"), SMOOTH, &inputs, |x| {
            let state = x[3].clone().reshape([2, 3, width - 1]);
            let (x, weight, bias) =
                (x[0].clone().reshape([2, time, 3]), x[1].clone().reshape([3, 1, width]), x[2].clone());
            let ConvOutput { y, state } = short_convolution(x, weight, Some(bias), Some(state));
            vec![flat(y), flat(state)]
        });
    }
    report.finish();
}

#[test]
fn layer_matches_finite_differences() {
    let mut report = Report::new("layer against finite differences");
    for (name, config) in small_layers() {
        let template = layer(&config, 5, &Device::flex(), DType::F64);
        let names = parameters(&template);
        let mut inputs: Vec<_> = names.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        inputs.push(("x", Random::new(6).normal(vec![1, 5, config.hidden_size])));
        differences::check(&mut report, name, NORMED, &inputs, |tensors| {
            let (x, parameters) = tensors.split_last().expect("inputs");
            let layer = with_tensors(template.clone(), parameters.to_vec());
            let x = x.clone().reshape([1, 5, config.hidden_size]);
            // Two calls, so that the gradient passes through the state.
            let (first, state) = layer.forward_with_state(x.clone().slice_dim(1, 0..3), None);
            let (second, state) = layer.forward_with_state(x.slice_dim(1, 3..5), Some(state));
            vec![flat(first), flat(second), flat(state.recurrent)]
        });
    }
    report.finish();
}
