//! Half precision: f16 and bf16 in and out of f32 arithmetic, and the kernels for tensor cores.

use std::process::Command;

use burn::tensor::{DType, Device, Tensor};
use burn_kda::{KdaInput, KdaOutput};

use crate::common::array::{Array, gradient};
use crate::common::calls::run_in_calls;
use crate::common::compare::{Report, relative_rms};
use crate::common::operator::{Form, Problem, Tensors};
use crate::common::platform::{bar, devices};
use crate::common::recipe::{Decay, Keys, Recipe, Strength};

/// The half-precision dtypes of a device, and the largest relative error of rounding to them.
fn halves(device: &Device) -> Vec<(DType, f64)> {
    let all = [(DType::F16, 2_f64.powi(-11)), (DType::BF16, 2_f64.powi(-8))];
    all.into_iter().filter(|(dtype, _)| device.supports_dtype(*dtype)).collect()
}

/// `q`, `k` and `v` in `dtype`, `g` and `beta` in `gates`, the state in f32.
fn tensors(problem: &Problem, device: &Device, dtype: DType, gates: DType) -> Tensors {
    let Problem { q, k, v, g, beta, initial_state, .. } = problem;
    Tensors {
        input: KdaInput {
            q: q.tensor(device, dtype),
            k: k.tensor(device, dtype),
            v: v.tensor(device, dtype),
            g: g.tensor(device, gates),
            beta: beta.tensor(device, gates),
        },
        state: initial_state.as_ref().map(|state| state.tensor(device, DType::F32)),
    }
}

fn leaves(Tensors { input: KdaInput { q, k, v, g, beta }, state }: Tensors) -> Tensors {
    let leaf = |x: Tensor<4>| x.require_grad();
    let input = KdaInput { q: leaf(q), k: leaf(k), v: leaf(v), g: leaf(g), beta: beta.require_grad() };
    Tensors { input, state: state.map(leaf) }
}

/// Each half-precision tensor is the rounded answer for the rounded inputs.
#[test]
fn half_precision_is_rounding_of_inputs_and_outputs() {
    let mut report = Report::new("half precision");
    for (name, device) in devices() {
        for (dtype, unit) in halves(&device) {
            for (decay, gates) in [(Decay::Mild, dtype), (Decay::Reset, DType::F32)] {
                let recipe = Recipe { batch: 2, time: 40, key_dim: 20, value_dim: 17, decay, ..Recipe::default() };
                let problem = recipe.problem().rounded(dtype, gates);
                let group = format!("{name} {dtype:?} {decay:?}");
                for form in [Form::Chunk(64), Form::Recurrent, Form::Step] {
                    let output = problem.run(form, tensors(&problem, &device, dtype, gates));
                    assert_eq!([output.o.dtype(), output.final_state.dtype()], [dtype, DType::F32]);
                    let what = |tensor: &str| format!("{form:?} {tensor}");
                    report.check(&group, what("o"), &Array::of(output.o), &problem.o, dtype, unit);
                    let state = Array::of(output.final_state);
                    let bar = if form == Form::Chunk(64) { chunk_bar(&name) } else { bar(DType::F32) };
                    report.check(&group, what("final state"), &state, &problem.final_state, DType::F32, bar);
                }
                let leaves = leaves(tensors(&problem, &device.clone().autodiff(), dtype, gates));
                let want = problem.backward(Form::Definition, &Device::flex(), DType::F64);
                let gradients = half_gradients(&problem, &leaves, &device, dtype);
                for ((tensor, got), (_, want)) in gradients.iter().zip(&want) {
                    let is_f32 = gates == DType::F32 && ["dg", "dbeta"].contains(tensor);
                    let bar = if is_f32 { chunk_bar(&name) } else { unit };
                    report.check(&group, *tensor, got, want, dtype, bar);
                }
            }
        }
    }
    if report.is_empty() {
        return println!("skipped: the device has no half precision");
    }
    report.finish();
}

fn half_gradients(problem: &Problem, leaves: &Tensors, device: &Device, dtype: DType) -> Vec<(&'static str, Array)> {
    let KdaOutput { o, final_state } = problem.run(Form::Chunk(64), leaves.clone());
    let device = device.clone().autodiff();
    let loss = (o.cast(DType::F32) * problem.d_o.tensor(&device, DType::F32)).sum()
        + (final_state * problem.d_final_state.tensor(&device, DType::F32)).sum();
    let gradients = loss.backward();
    let KdaInput { q, k, v, g, beta } = &leaves.input;
    assert_eq!(q.grad(&gradients).expect("a gradient").dtype(), dtype);
    vec![
        ("dq", gradient(q, &gradients)),
        ("dk", gradient(k, &gradients)),
        ("dv", gradient(v, &gradients)),
        ("dg", gradient(g, &gradients)),
        ("dbeta", gradient(beta, &gradients)),
    ]
}

/// Of what the chunk form in half precision leaves in f32: on a device that may have tensor cores, sums of products of 16
/// significant bits.
fn chunk_bar(device: &str) -> f64 {
    let has_none = device.contains("Wgpu") || !device.contains("Cube");
    if has_none && !imitates() { bar(DType::F32) } else { PRODUCTS }
}

const PRODUCTS: f64 = 5e-5;

/// With keys that reflect the state rounding errors stay: a hundred times the bar, as for f32.
const REFLECTED_PRODUCTS: f64 = PRODUCTS * 100.0;

const CORES: &str = "BURN_KDA_TENSOR_CORES";

fn imitates() -> bool {
    std::env::var_os(CORES).is_some_and(|value| value == "imitated")
}

/// Runs the tests that begin with `imitated` in processes where the units of the device imitate tensor cores; launches
/// are counted where nothing else runs.
#[test]
fn tensor_cores() {
    let tests = std::env::current_exe().expect("the test binary");
    for filter in ["half::imitated", "launches::imitated"] {
        let output = Command::new(&tests).args([filter, "--nocapture"]).env(CORES, "imitated").output().expect("runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        println!("{text}");
    }
}

/// The device, in the process where its units imitate tensor cores.
pub fn imitating() -> Option<Device> {
    let (name, device) = devices().remove(0);
    (imitates() && name.contains("Cube")).then_some(device)
}

/// Output, final state and gradients of the chunk form, in calls that end at `bounds`.
fn check(problem: &Problem, device: &Device, bounds: &[usize], report: &mut Report) {
    let bar = if problem.reflecting { REFLECTED_PRODUCTS } else { PRODUCTS };
    let keys = if problem.reflecting { ", keys that reflect" } else { "" };
    let group = format!("{}{keys}", problem.group);
    let form = Form::Chunk(64);
    let output = run_in_calls(problem, problem.constants(device, DType::F32), bounds, &[form]);
    let mut check = |what: &str, got: Array, want: &Array| {
        report.check(&group, format!("{} {bounds:?} {what}", problem.name), &got, want, DType::F32, bar);
    };
    check("o", Array::of(output.o), &problem.o);
    check("final state", Array::of(output.final_state), &problem.final_state);
    if bounds.len() == 2 {
        let want = problem.backward(Form::Definition, &Device::flex(), DType::F64);
        for ((what, got), (_, want)) in problem.backward(form, device, DType::F32).into_iter().zip(&want) {
            check(what, got, want);
        }
    }
}

#[test]
fn imitated_in_every_regime() {
    let Some(device) = imitating() else { return };
    let mut report = Report::new("tensor cores");
    for decay in Decay::ALL {
        for (keys, strength) in [
            (Keys::Random, Strength::Double),
            (Keys::NearIdentical, Strength::Single),
            (Keys::Identical, Strength::NearTwo),
            (Keys::Zero, Strength::One),
        ] {
            let recipe = Recipe { time: 75, key_dim: 16, value_dim: 20, decay, keys, strength, ..Recipe::default() };
            check(&recipe.problem(), &device, &[0, 75], &mut report);
        }
    }
    report.finish();
}

/// Heads of several tiles, parts of tiles, chunks of 16 and 32 rows, lengths that are not a multiple, several segments.
#[test]
fn imitated_at_every_size() {
    let Some(device) = imitating() else { return };
    let mut report = Report::new("tensor cores");
    for (key_dim, value_dim, time, group) in [(16, 40, 300, 1), (31, 17, 64, 3), (5, 3, 33, 2)] {
        let recipe = Recipe { batch: 3, group, time, key_dim, value_dim, state: group > 1, ..Recipe::default() };
        check(&recipe.problem(), &device, &[0, time], &mut report);
    }
    let recipe = Recipe { time: 110, key_dim: 16, value_dim: 20, decay: Decay::Uniform, ..Recipe::default() };
    check(&recipe.problem(), &device, &[0, 50, 51, 110], &mut report);
    let packed = Recipe { cu_seqlens: Some(vec![0, 40, 40, 110]), ..recipe };
    check(&packed.problem(), &device, &[0, 110], &mut report);
    report.finish();
}

/// To the bit, and again in a second run.
#[test]
fn imitated_in_a_batch() {
    let Some(device) = imitating() else { return };
    let recipe = Recipe { time: 70, key_dim: 16, value_dim: 40, ..Recipe::default() };
    let (alone, many) = (recipe.problem(), recipe.problem().repeated(5));
    let run = |problem: &Problem| problem.run(Form::Chunk(64), problem.constants(&device, DType::F32));
    let [one, batch] = [&alone, &many].map(|problem| Array::of(run(problem).o).values);
    // `repeated` multiplies values by powers of two, which changes no rounding.
    for (row, factor) in batch.chunks(one.len()).zip([1.0, -2.0, 0.5, -1.0, 2.0]) {
        assert!(row.iter().zip(&one).all(|(row, one)| *row == one * factor));
    }
    assert_eq!(relative_rms(&Array::of(run(&alone).o), &Array::new(alone.o.shape.clone(), one), DType::F32), 0.0);
}
