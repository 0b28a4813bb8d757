//! That the kernels run, and how often.

use std::process::Command;
use std::sync::{Arc, Mutex};

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_kda::{KdaConfig, KdaOps, KdaParams, KdaTensors, MaybeTensor, WantedGradients};
use cubecl::logging::{LaunchObservation, LaunchObserver};

use crate::common::operator::{Form, Problem, Tensors};
use crate::common::platform::devices;
use crate::common::recipe::Recipe;
use crate::half::imitating;

/// The kernels that the process launches.
#[derive(Default)]
struct Launches(Mutex<Vec<&'static str>>);

impl LaunchObserver for Launches {
    fn launched(&self, kernel: &'static str) {
        self.0.lock().unwrap().push(kernel);
    }
}

fn launches(run: impl FnOnce()) -> Vec<&'static str> {
    let launches = Arc::new(Launches::default());
    let observation = LaunchObservation::new(launches.clone());
    run();
    drop(observation);
    launches.0.lock().unwrap().clone()
}

/// As a call in half precision is on tensor cores, here by imitation.
#[test]
fn imitated_calls_are_two_launches_and_backward_passes_three() {
    if let Some(device) = imitating() {
        for (time, again) in [(32, false), (300, true)] {
            let problem = Recipe { time, key_dim: 16, value_dim: 40, ..Recipe::default() }.problem();
            let forward = ["chunk_scores_kernel", "chunk_scan_kernel"];
            let tensors = problem.constants(&device, DType::F32);
            check(&device, &forward, || drop(problem.run(Form::Chunk(64), tensors)));
            let mut expected = vec!["chunk_scores_kernel", "chunk_back_kernel", "chunk_inputs_kernel"];
            if again {
                expected.splice(0..0, forward);
            }
            check(&device, &expected, backward(&problem, &device));
        }
    }
}

/// The CubeCL device under test, in a process where no other test launches anything: with fusion, kernels come from
/// another thread than the one that asks for them.
fn alone(test: &str) -> Option<Device> {
    const ALONE: &str = "BURN_KDA_TEST_ALONE";
    let (name, device) = devices().remove(0);
    if !name.contains("Cube") {
        return None;
    }
    if std::env::var_os(ALONE).is_some() {
        return Some(device);
    }
    let tests = std::env::current_exe().expect("the test binary");
    let output = Command::new(tests).args(["--exact", test]).env(ALONE, "1").output().expect("runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    None
}

/// That `run` launches the `expected` kernels.
fn check(device: &Device, expected: &[&str], run: impl FnOnce()) {
    device.sync().expect("the inputs arrive");
    let kernels = launches(|| {
        run();
        device.sync().expect("the kernels run");
    });
    assert_eq!(kernels.len(), expected.len(), "{kernels:?}");
    assert!(kernels.iter().zip(expected).all(|(got, want)| got.contains(&format!("{want}::"))), "{kernels:?}");
}

/// All gradients, without the states that a forward pass would have kept.
fn backward(problem: &Problem, device: &Device) -> impl FnOnce() + use<> {
    let Tensors { input, state } = problem.constants(device, DType::F32);
    let d_o = problem.d_o.tensor::<4>(device, DType::F32).into_dispatch();
    let inputs = KdaTensors {
        q: input.q.into_dispatch(),
        k: input.k.into_dispatch(),
        v: input.v.into_dispatch(),
        g: input.g.into_dispatch(),
        beta: input.beta.into_dispatch(),
    };
    let state = MaybeTensor::Some(state.expect("a state").into_dispatch());
    let wanted = WantedGradients { q: true, k: true, v: true, g: true, beta: true, initial_state: true };
    move || {
        let none = MaybeTensor::None;
        let params = KdaParams { scale: 1.0, chunk_size: 64, tensor_cores: false };
        let d_o = MaybeTensor::Some(d_o);
        <Dispatch as KdaOps>::kda_backward(inputs, state, none.clone(), d_o, none, params, wanted);
    }
}

/// Any number of tokens, and heads of any size.
#[test]
fn a_call_is_one_launch() {
    if let Some(device) = alone("launches::a_call_is_one_launch") {
        for (time, key_dim, value_dim) in [(1, 5, 3), (1, 128, 128), (100, 64, 256), (300, 256, 65)] {
            let problem = Recipe { time, key_dim, value_dim, ..Recipe::default() }.problem();
            for form in [Form::Chunk(64), Form::Recurrent] {
                let tensors = problem.constants(&device, DType::F32);
                check(&device, &["recurrent_kernel"], || drop(problem.run(form, tensors)));
            }
        }
    }
}

/// Three, and the forward pass again where the states between segments are not given.
#[test]
fn a_backward_pass_is_three_launches() {
    if let Some(device) = alone("launches::a_backward_pass_is_three_launches") {
        for (time, again) in [(1, false), (100, false), (300, true)] {
            let problem = Recipe { time, key_dim: 24, value_dim: 65, ..Recipe::default() }.problem();
            let mut expected = vec!["scores_kernel", "scan_kernel", "inputs_kernel"];
            if again {
                expected.insert(0, "recurrent_kernel");
            }
            check(&device, &expected, backward(&problem, &device));
        }
    }
}

/// Beside the projections: three convolutions, two gates, the operator, and the norm.
#[test]
fn a_layer_is_seven_launches_and_its_projections() {
    if let Some(device) = alone("launches::a_layer_is_seven_launches_and_its_projections") {
        let layer = KdaConfig::new(32, 2, 16).init(&device);
        let kernels = ["convolution", "convolution", "convolution", "decay_gate", "write_strength"];
        let expected: Vec<_> = kernels.into_iter().chain(["recurrent", "output_norm"]).collect();
        let x = Tensor::<3>::random([1, 41, 32], Distribution::Default, &device);
        let (_, state) = layer.forward_with_state(x.clone().slice_dim(1, 0..1), None);
        for time in [1, 40] {
            let (x, state) = (x.clone().slice_dim(1, 0..time), state.clone());
            device.sync().expect("the inputs arrive");
            let kernels = launches(|| {
                drop(layer.forward_with_state(x, Some(state)));
                device.sync().expect("the kernels run");
            });
            let ours: Vec<_> = kernels.iter().filter(|name| !name.contains("matmul")).collect();
            assert_eq!(ours.len(), expected.len(), "{time} tokens: {kernels:?}");
            let same = ours.iter().zip(&expected).all(|(got, want)| got.contains(&format!("{want}_kernel::")));
            assert!(same, "{time} tokens: {kernels:?}");
        }
    }
}
