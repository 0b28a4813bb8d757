//! What surrounds the operator, by the native kernels and by tensor operations; threads and states of the operator.
#![allow(deprecated)] // Burn's NdArray.

use std::cell::RefCell;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::gate::DecayFn;
use crate::ops::{self, ConvParams, KdaOps, MaybeTensor, TensorBridge};
use crate::{KdaInput, KdaOptions, plain};

/// The same in every call of [`Case::run`].
struct Random<'a> {
    generator: RefCell<StdRng>,
    device: &'a Device,
    dtype: DType,
}

impl Random<'_> {
    fn tensor<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let mut generator = self.generator.borrow_mut();
        let numbers = (0..shape.iter().product()).map(|_| generator.random_range(-2.5..2.5)).collect::<Vec<f64>>();
        Tensor::from_data(TensorData::new(numbers, shape), (self.device, self.dtype))
    }
}

/// The same numbers with the first two axes swapped in memory.
fn strided<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::cat(vec![x.swap_dims(0, 1)], 0).swap_dims(0, 1)
}

/// Numbers in order, as f64.
fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn primitive<const D: usize>(tensor: Option<Tensor<D>>) -> MaybeTensor<Dispatch> {
    MaybeTensor::of(tensor)
}

struct Case {
    sizes: [usize; 4],
    width: usize,
    is_normalised: bool,
    /// Of the convolution: bias, state, and both cotangents.
    has: [bool; 4],
    decay: DecayFn,
}

impl Case {
    /// Results and gradients by the kernels and by tensor operations, named.
    fn run(&self, device: &Device, dtype: DType) -> Vec<(&'static str, Vec<f64>, Vec<f64>)> {
        let Self { sizes: [batch, time, heads, dim], width, is_normalised, has, decay } = *self;
        let channels = heads * dim;
        let random = Random { generator: RefCell::new(StdRng::seed_from_u64(7)), device, dtype };
        let heads_of = || random.tensor([batch, time, heads, dim]);
        let vector = |len: usize| random.tensor([len]);
        let past = [batch, channels, width - 1];
        let [has_bias, has_state, has_d_y, has_d_next] = has;
        let has_past = width > 1;

        let (x, weight) = (strided(random.tensor([batch, time, channels])), random.tensor([channels, 1, width]));
        let bias = vector(channels);
        let state = (has_state && has_past).then(|| strided(random.tensor(past)));
        let [d_y, d_next] = [random.tensor([batch, time, channels]), random.tensor(past)];
        let (bias, d_y, d_next) =
            (has_bias.then_some(bias), has_d_y.then_some(d_y), (has_d_next && has_past).then_some(d_next));
        let params = ConvParams { head_dim: is_normalised.then_some(dim), dtype };
        let of = |x: Tensor<3>| numbers(x);
        let [y, next] = ops::convolution(x.clone(), weight.clone(), bias.clone(), state.clone(), params);
        let [want_y, want_next] = plain::convolution(x.clone(), weight.clone(), bias.clone(), state.clone(), params);
        let mut all = vec![("y", of(y), of(want_y)), ("next state", of(next), of(want_next))];
        let (dx, dw, db, ds) = <Dispatch as KdaOps>::kda_convolution_backward(
            Dispatch::primitive(x.clone()),
            Dispatch::primitive(weight.clone()),
            primitive(bias.clone()),
            primitive(state.clone()),
            primitive(d_y.clone()),
            primitive(d_next.clone()),
            params,
        );
        let (want_dx, want_dw, want_db, want_ds) =
            plain::convolution_backward(x, weight, bias, state, [d_y, d_next], params);
        all.push(("dx", of(Dispatch::tensor(dx)), of(want_dx)));
        all.push(("dw", of(Dispatch::tensor(dw)), of(want_dw)));
        all.extend(want_db.map(|want| ("dbias", numbers(db.tensor::<1>().expect("one")), numbers(want))));
        all.extend(want_ds.map(|want| ("dstate", of(ds.tensor::<3>().expect("one")), of(want))));

        let (raw, d_g) = (strided(heads_of()), strided(heads_of()));
        let a_log = has_bias.then(|| Tensor::cat(vec![vector(heads - 1), Tensor::full([1], 21.0, (device, dtype))], 0));
        let dt_bias = has_state.then(|| vector(channels));
        let g = ops::decay_gate(raw.clone(), a_log.clone(), dt_bias.clone(), decay);
        let want = plain::decay_gate(raw.clone(), a_log.clone(), dt_bias.clone(), decay);
        all.push(("g", numbers(g), numbers(want)));
        let (d_raw, d_a_log, d_bias) = <Dispatch as KdaOps>::kda_decay_gate_backward(
            Dispatch::primitive(raw.clone()),
            primitive(a_log.clone()),
            primitive(dt_bias.clone()),
            Dispatch::primitive(d_g.clone()),
            decay,
        );
        let (want_raw, want_a_log, want_bias) = plain::decay_gate_backward(raw, a_log, dt_bias, d_g, decay);
        all.push(("draw", numbers(Dispatch::tensor::<4>(d_raw)), numbers(want_raw)));
        all.extend(want_a_log.map(|want| ("da_log", numbers(d_a_log.tensor::<1>().expect("one")), numbers(want))));
        all.extend(want_bias.map(|want| ("ddt_bias", numbers(d_bias.tensor::<1>().expect("one")), numbers(want))));

        let (o, gate, d_y, weight) = (strided(heads_of()), heads_of(), strided(heads_of()), vector(dim));
        let y = ops::output_norm(o.clone(), weight.clone(), gate.clone(), 1e-5, dtype);
        let want = plain::output_norm(o.clone(), weight.clone(), gate.clone(), 1e-5, dtype);
        all.push(("normed", numbers(y), numbers(want)));
        let tensors = [o.clone(), gate.clone(), d_y.clone()].map(Dispatch::primitive);
        let [o_primitive, gate_primitive, d_y_primitive] = tensors;
        let (d_o, d_weight, d_gate) = <Dispatch as KdaOps>::kda_output_norm_backward(
            o_primitive,
            Dispatch::primitive(weight.clone()),
            gate_primitive,
            d_y_primitive,
            1e-5,
        );
        let (want_o, want_weight, want_gate) = plain::output_norm_backward(o, weight, gate, d_y, 1e-5);
        all.push(("do", numbers(Dispatch::tensor::<4>(d_o)), numbers(want_o)));
        all.push(("dweight", numbers(Dispatch::tensor::<1>(d_weight)), numbers(want_weight)));
        all.push(("dgate", numbers(Dispatch::tensor::<4>(d_gate)), numbers(want_gate)));
        all
    }
}

/// Spans, blocks of channels and vectors that end in the middle; what may be missing, missing in turn.
fn cases() -> Vec<Case> {
    let sizes = [[1, 1, 1, 3], [2, 2, 3, 5], [2, 33, 2, 20], [1, 70, 3, 64], [1, 100, 2, 130], [3, 31, 9, 16]];
    let mut cases = Vec::new();
    for (n, sizes) in sizes.into_iter().enumerate() {
        for width in [1, 2, 4, 6] {
            let bits = n + width;
            let has = [bits % 2 == 0, bits % 3 > 0, bits % 5 > 0, bits % 4 > 0];
            let decay = if n % 2 == 0 { DecayFn::Softplus } else { DecayFn::SIGMOID };
            cases.push(Case { sizes, width, is_normalised: width > 1, has, decay });
        }
    }
    cases
}

#[test]
fn native_kernels_are_the_tensor_operations() {
    for device in [Device::ndarray(), Device::flex()] {
        for case in cases() {
            for (name, got, want) in case.run(&device, DType::F64) {
                assert_eq!(got.len(), want.len(), "{name}");
                let square = |x: f64| x * x;
                let error: f64 = got.iter().zip(&want).map(|(a, b)| square(a - b)).sum();
                let size: f64 = want.iter().map(|&x| square(x)).sum();
                assert!(
                    error <= 1e-26 * size,
                    "{name} of {:?}, width {}: {error:e} of {size:e}",
                    case.sizes,
                    case.width
                );
            }
        }
    }
}

fn on_one_and_on_three_threads<R: Send>(run: impl Fn() -> R + Sync) -> [R; 2] {
    [1, 3].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(&run))
}

/// To the bit.
#[test]
fn threads_change_nothing() {
    let device = Device::ndarray();
    for case in cases() {
        let [one, three] = on_one_and_on_three_threads(|| {
            let all = case.run(&device, DType::F32);
            all.into_iter().map(|(name, got, _)| (name, got)).collect::<Vec<_>>()
        });
        assert!(one == three, "{:?}, width {}", case.sizes, case.width);
    }
}

/// To the bit: enough work for threads, forward, one token at a time and, where Burn differentiates, backward.
#[test]
fn threads_change_nothing_of_the_operator() {
    for (device, time) in [(Device::ndarray(), 70), (Device::flex(), 1)] {
        #[cfg(feature = "autodiff")]
        let device = device.autodiff();
        let run = || {
            let random =
                Random { generator: RefCell::new(StdRng::seed_from_u64(7)), device: &device, dtype: DType::F32 };
            let leaf = |width| {
                let leaf = random.tensor([3, time, 11, width]);
                if cfg!(feature = "autodiff") { leaf.require_grad() } else { leaf }
            };
            let (q, k, v, g) = (leaf(64), leaf(64) / 16.0, leaf(80), leaf(64));
            let input = KdaInput { q, k, v, g: g.clone().abs().neg(), beta: random.tensor([3, time, 11]).abs() / 5.0 };
            let initial_state = Some(random.tensor([3, 11, 64, 80]));
            let output = crate::chunk_kda(input, KdaOptions { initial_state, ..KdaOptions::default() });
            let all = [output.o, output.final_state];
            #[cfg(feature = "autodiff")]
            let gradients = all[0].clone().sum().backward();
            #[cfg(feature = "autodiff")]
            let all = [all[0].clone(), all[1].clone(), g.grad(&gradients).expect("a leaf")];
            all.map(numbers)
        };
        let [one, three] = on_one_and_on_three_threads(run);
        assert!(one == three, "{device:?}");
    }
}

/// A state that is swapped in memory, or a part of another, gives what the same numbers by themselves do, and stays.
#[test]
fn a_step_takes_any_state() {
    // Less than a vector, and several.
    for (device, dim) in [(Device::ndarray(), 6), (Device::ndarray(), 56), (Device::flex(), 6), (Device::flex(), 56)] {
        let random = Random { generator: RefCell::new(StdRng::seed_from_u64(7)), device: &device, dtype: DType::F64 };
        let vector = || random.tensor([1, 2, dim]);
        let (q, k, v, g, beta) = (vector(), vector(), vector(), vector().abs().neg(), random.tensor([1, 2]));
        let step = |state: Tensor<4>| {
            let (o, next) = crate::kda_step(state, q.clone(), k.clone(), v.clone(), g.clone(), beta.clone(), 0.3);
            (numbers(o), numbers(next))
        };
        let many = random.tensor([3, 2, dim, dim]);
        let row = many.clone().slice_dim(0, 1..2);
        let alone = Tensor::from_data(row.clone().into_data(), (&device, DType::F64));
        let swapped = Tensor::from_data(row.clone().swap_dims(2, 3).into_data(), (&device, DType::F64)).swap_dims(2, 3);
        let (before, want) = (numbers(many.clone()), step(alone));
        assert!(step(row) == want && step(swapped.clone()) == want && step(swapped) == want);
        assert_eq!(numbers(many), before);
    }
}

#[test]
#[should_panic(expected = "does not divide 8")]
fn heads_that_do_not_fit_are_refused() {
    let random =
        Random { generator: RefCell::new(StdRng::seed_from_u64(7)), device: &Device::flex(), dtype: DType::F32 };
    let params = ConvParams { head_dim: Some(3), dtype: DType::F32 };
    ops::convolution(random.tensor([1, 2, 8]), random.tensor([8, 1, 4]), None, None, params);
}
