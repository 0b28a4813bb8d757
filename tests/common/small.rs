//! `cases.json`: small inputs that have broken other implementations, with answers of their own.

use burn::tensor::{DType, Device, Tensor};
use burn_kda::{DecayFn, decay_gate, l2_normalize, write_strength};
use serde_json::Value;

use super::array::Array;
use super::compare::Report;
use super::fixture;
use super::operator::{FORMS, Form, Problem};
use super::platform;

fn file() -> Value {
    serde_json::from_slice(&fixture::read("cases.json")).expect("JSON")
}

fn flat(value: &Value, values: &mut Vec<f64>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| flat(item, values)),
        number => values.push(number.as_f64().expect("a number")),
    }
}

/// One batch and one head; the loss is `sum(o) + sum(final_state)`.
fn problem(name: &str) -> Problem {
    let file = file();
    let case = file["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).expect("a case of that name");
    let size = |key: &str| case[key].as_u64().unwrap() as usize;
    let (time, key_dim, value_dim) = (size("T"), size("K"), size("V"));
    let array = |value: &Value, shape: Vec<usize>| {
        let mut values = Vec::new();
        flat(value, &mut values);
        Array::new(shape, values)
    };
    let (keys, values) = (vec![1, time, 1, key_dim], vec![1, time, 1, value_dim]);
    let (beta, state) = (vec![1, time, 1], vec![1, 1, key_dim, value_dim]);
    let ones = |shape: &[usize]| Array::new(shape.to_vec(), vec![1.0; shape.iter().product()]);
    let grad = &case["grad"];
    Problem {
        name: name.into(),
        group: name.into(),
        q: array(&case["q"], keys.clone()),
        k: array(&case["k"], keys.clone()),
        v: array(&case["v"], values.clone()),
        g: array(&case["g"], keys.clone()),
        beta: array(&case["beta"], beta.clone()),
        initial_state: Some(array(&case["initial_state"], state.clone())),
        scale: case["scale"].as_f64(),
        cu_seqlens: None,
        d_o: ones(&values),
        d_final_state: ones(&state),
        o: array(&case["o"], values.clone()),
        final_state: array(&case["final_state"], state.clone()),
        gradients: vec![
            ("dq", array(&grad["q"], keys.clone())),
            ("dk", array(&grad["k"], keys.clone())),
            ("dv", array(&grad["v"], values)),
            ("dg", array(&grad["g"], keys)),
            ("dbeta", array(&grad["beta"], beta)),
            ("dinitial_state", array(&grad["initial_state"], state)),
        ],
        reflecting: false,
    }
}

pub fn check(name: &str, report: &mut Report) {
    let mut problem = problem(name);
    if name == "one_key" {
        let gradients = problem.gradients.split_off(3);
        contracted(&problem, &gradients, report);
    }
    problem.check(&FORMS, report);
}

/// `dg`, `dbeta` and `dinitial_state` of `one_key`, where 64 factors of `1 - beta = 3e-4` contract the gradient of the
/// state: of a cotangent of ones, 6e-5 is left in `dg` and 8e-5 in `dinitial_state`. Rounding `beta` to f32 alone moves
/// these by 4e-5 of themselves, so they are measured against the ones they are left of.
fn contracted(problem: &Problem, want: &[(&str, Array)], report: &mut Report) {
    let of_ones = |x: &Array| Array::new(x.shape.clone(), x.values.iter().map(|x| x + 1.0).collect());
    for (platform, device, dtype) in platform::platforms() {
        for form in FORMS.into_iter().filter(|form| *form != Form::Step) {
            let gradients = problem.backward(form, &device, dtype);
            for (name, want) in want {
                let (_, got) = gradients.iter().find(|(other, _)| other == name).expect("a gradient of that name");
                let (got, want) =
                    if *name == "dbeta" { (got.clone(), want.clone()) } else { (of_ones(got), of_ones(want)) };
                let group = format!("{platform} {}", problem.group);
                report.check(group, format!("{form:?} {name}"), &got, &want, dtype, platform::bar(dtype));
            }
        }
    }
}

/// Single values of the norm, the gates and the write strength.
pub fn check_units(platform: &str, device: &Device, dtype: DType, report: &mut Report) {
    let units = &file()["units"];
    let bar = platform::bar(dtype);
    // The file takes softplus(z) as z above 20, which is 6e-13 off at 25.
    let softplus_bar = |z: f64| if dtype == DType::F64 && z > 20.0 { 1e-12 } else { bar };
    let rows = |key: &str| units[key].as_array().unwrap().clone();
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap();
    let one = |x: f64| Array::new(vec![1], vec![x]);
    let single = |x: f64| Array::new(vec![1, 1, 1, 1], vec![x]).tensor::<4>(device, dtype);
    let mut check = |what: String, got: f64, want: f64, bar: f64| {
        report.check(platform, what, &one(got), &one(want), dtype, bar);
    };

    for row in rows("l2_normalize") {
        let mut x = Vec::new();
        flat(&row["x"], &mut x);
        let y = Array::of(l2_normalize(Array::new(vec![1, x.len()], x).tensor::<2>(device, dtype)));
        check(format!("l2_normalize to {}", row["first"]), y.values[0], number(&row, "first"), bar);
    }
    for (key, decay) in [("sigmoid_gate", None), ("softplus_gate", Some(DecayFn::Softplus))] {
        for row in rows(key) {
            let decay = decay.unwrap_or_else(|| DecayFn::Sigmoid { lower_bound: number(&row, "lower_bound") });
            let a_log = one(number(&row, "a_log")).tensor::<1>(device, dtype);
            let g = Array::of(decay_gate(single(number(&row, "z")), Some(a_log), None, decay));
            let bar = if key == "softplus_gate" { softplus_bar(number(&row, "z")) } else { bar };
            check(format!("{key} of {}", row["z"]), g.values[0], number(&row, "g"), bar);
        }
    }
    for row in rows("beta") {
        let logit: Tensor<3> = Array::new(vec![1, 1, 1], vec![number(&row, "logit")]).tensor(device, dtype);
        for (twice, factor) in [(false, 1.0), (true, 2.0)] {
            let beta = Array::of(write_strength(logit.clone(), twice));
            check(format!("beta, doubled: {twice}"), beta.values[0], factor * number(&row, "beta"), bar);
        }
    }
}
