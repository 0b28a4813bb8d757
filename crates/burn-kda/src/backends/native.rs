//! [`KdaOps`] by the native kernels, for backends whose tensors lie in this process's memory.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use ndarray::{Array, ArrayD, ArrayView, ArrayViewD, ArrayViewMutD, Dimension, IxDyn};

use crate::gate::DecayFn;
use crate::native::layer::{self, Convolution, ConvolutionGradients, Gate, GateGradients, Norm, NormGradients};
use crate::native::{self, Gradients, OfOutput, Outputs, Real, Views};
use crate::ops::{ConvParams, KdaGradients, KdaOps, KdaTensors, MaybeTensor, Mode, WantedGradients};

/// A backend with tensors of `T` in memory.
pub(super) trait Host<T>: KdaOps {
    /// What a tensor is held by while its memory is read.
    type Held;

    fn hold(tensor: FloatTensor<Self>) -> Self::Held;
    fn view(held: &Self::Held) -> ArrayViewD<'_, T>;
    /// Whether nothing else holds the tensor, which lies row-major.
    fn is_own(held: &mut Self::Held) -> bool;
    /// Of the memory itself if nothing else holds it, and of a copy otherwise.
    fn view_mut(held: &mut Self::Held) -> ArrayViewMutD<'_, T>;
    fn release(held: Self::Held) -> FloatTensor<Self>;
    fn from_array(array: ArrayD<T>) -> FloatTensor<Self>;
}

/// [`KdaOps::kda_chunk`].
pub(super) fn forward<B: Host<T>, T: Real>(
    inputs: KdaTensors<B>,
    initial_state: MaybeTensor<B>,
    scale: f64,
    keep_states: bool,
) -> (FloatTensor<B>, FloatTensor<B>, MaybeTensor<B>) {
    let inputs = hold(inputs);
    let initial_state = hold_maybe(initial_state);
    if B::view(&inputs[0]).shape()[1] == 1 {
        let (o, state) = step::<B, T>(inputs, initial_state, scale);
        return (o, state, None.into());
    }
    let views = Views::new(inputs.each_ref().map(B::view), initial_state.as_ref().map(B::view));
    let Outputs { o, final_state, kept } = native::forward(&views, scale, keep_states);
    let [o, final_state] = [o, final_state].map(|x| B::from_array(x.into_dyn()));
    (o, final_state, kept.map(|x| B::from_array(x.into_dyn())).into())
}

/// One token.
fn step<B: Host<T>, T: Real>(
    inputs: [B::Held; 5],
    state: Option<B::Held>,
    scale: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let views = Views::new(inputs.each_ref().map(B::view), None);
    // Zeros without a state, so that a NaN in `g` passes.
    let mut state = state.unwrap_or_else(|| B::hold(B::from_array(ArrayD::zeros(IxDyn(&views.state_shape())))));
    let o = native::step(&views, native::four(B::view_mut(&mut state)), scale);
    (B::from_array(o.into_dyn()), B::release(state))
}

/// [`KdaOps::kda_backward`].
pub(super) fn backward<B: Host<T>, T: Real>(
    inputs: KdaTensors<B>,
    initial_state: MaybeTensor<B>,
    states: MaybeTensor<B>,
    cotangents: [MaybeTensor<B>; 2],
    scale: f64,
    wanted: WantedGradients,
) -> KdaGradients<B> {
    let inputs = hold(inputs);
    let initial_state = hold_maybe(initial_state);
    let views = Views::new(inputs.each_ref().map(B::view), initial_state.as_ref().map(B::view));
    let [d_o, d_final_state] = cotangents;
    let [states, mut d_o, d_final_state] = [states, d_o, d_final_state].map(hold_maybe);
    // Both have one shape: the gradient of the values takes the memory of a cotangent that nothing else needs.
    let in_place = wanted.v && d_o.as_mut().is_some_and(B::is_own);
    let of_output = match &mut d_o {
        Some(d_o) if in_place => OfOutput::ForValues(native::four(B::view_mut(d_o))),
        Some(d_o) => OfOutput::Given(view::<B, T, _>(d_o)),
        None => OfOutput::Zero,
    };
    let (kept, d_final_state) = (states.as_ref().map(view::<B, T, _>), d_final_state.as_ref().map(view::<B, T, _>));
    let Gradients { q, k, v, g, beta, initial_state } =
        native::backward(&views, kept, of_output, d_final_state, scale, wanted);
    let [q, k, v, g, initial_state] = [q, k, v, g, initial_state].map(|x| x.map(|x| B::from_array(x.into_dyn())));
    let v = if in_place { d_o.map(B::release) } else { v };
    let beta = beta.map(|x| B::from_array(x.into_dyn()));
    let [q, k, v, g, beta, initial_state] = [q, k, v, g, beta, initial_state].map(MaybeTensor::from);
    KdaGradients { q, k, v, g, beta, initial_state }
}

fn hold<B: Host<T>, T>(KdaTensors { q, k, v, g, beta }: KdaTensors<B>) -> [B::Held; 5] {
    [q, k, v, g, beta].map(B::hold)
}

fn hold_maybe<B: Host<T>, T>(tensor: MaybeTensor<B>) -> Option<B::Held> {
    tensor.into_option().map(B::hold)
}

fn view<B: Host<T>, T, D: Dimension>(held: &B::Held) -> ArrayView<'_, T, D> {
    B::view(held).into_dimensionality().expect("a checked shape")
}

fn array<B: Host<T>, T, D: Dimension>(array: Array<T, D>) -> FloatTensor<B> {
    B::from_array(array.into_dyn())
}

/// Holds the tensors of a convolution while `f` looks at them.
fn with_convolution<B: Host<T>, T: Real, R>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    [bias, state]: [MaybeTensor<B>; 2],
    head_dim: Option<usize>,
    f: impl FnOnce(&Convolution<T>) -> R,
) -> R {
    let [_, _, channels] = x.shape().dims();
    assert!(
        head_dim.is_none_or(|dim| channels.is_multiple_of(dim)),
        "`head_dim` {head_dim:?} does not divide {channels}"
    );
    let (x, weight) = (B::hold(x), B::hold(weight));
    let (bias, state) = (hold_maybe(bias), hold_maybe(state));
    f(&Convolution {
        x: view::<B, T, _>(&x),
        weight: view::<B, T, _>(&weight),
        bias: bias.as_ref().map(view::<B, T, _>),
        state: state.as_ref().map(view::<B, T, _>),
        head_dim,
    })
}

/// [`KdaOps::kda_convolution`].
pub(super) fn convolution<B: Host<T>, T: Real>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    others: [MaybeTensor<B>; 2],
    params: ConvParams,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let [y, next] = with_convolution::<B, T, _>(x, weight, others, params.head_dim, layer::convolution);
    (array::<B, T, _>(y), array::<B, T, _>(next))
}

/// [`KdaOps::kda_convolution_backward`].
#[allow(clippy::type_complexity)]
pub(super) fn convolution_backward<B: Host<T>, T: Real>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    others: [MaybeTensor<B>; 2],
    cotangents: [MaybeTensor<B>; 2],
    params: ConvParams,
) -> (FloatTensor<B>, FloatTensor<B>, MaybeTensor<B>, MaybeTensor<B>) {
    let [d_y, d_next] = cotangents.map(hold_maybe::<B, T>);
    let gradients = with_convolution::<B, T, _>(x, weight, others, params.head_dim, |inputs| {
        let [d_y, d_next] = [&d_y, &d_next].map(|x| x.as_ref().map(view::<B, T, _>));
        layer::convolution_gradients(inputs, d_y, d_next)
    });
    let ConvolutionGradients { x, weight, bias, state } = gradients;
    let (bias, state) = (bias.map(array::<B, T, _>), state.map(array::<B, T, _>));
    (array::<B, T, _>(x), array::<B, T, _>(weight), bias.into(), state.into())
}

/// Holds the tensors of a decay gate while `f` looks at them.
fn with_gate<B: Host<T>, T: Real, R>(
    raw: FloatTensor<B>,
    parameters: [MaybeTensor<B>; 2],
    decay: DecayFn,
    f: impl FnOnce(&Gate<T>) -> R,
) -> R {
    let raw = B::hold(raw);
    let [a_log, dt_bias] = parameters.map(hold_maybe::<B, T>);
    f(&Gate {
        raw: view::<B, T, _>(&raw),
        a_log: a_log.as_ref().map(view::<B, T, _>),
        dt_bias: dt_bias.as_ref().map(view::<B, T, _>),
        decay,
    })
}

/// [`KdaOps::kda_decay_gate`].
pub(super) fn decay_gate<B: Host<T>, T: Real>(
    raw: FloatTensor<B>,
    parameters: [MaybeTensor<B>; 2],
    decay: DecayFn,
) -> FloatTensor<B> {
    array::<B, T, _>(with_gate::<B, T, _>(raw, parameters, decay, layer::decay_gate))
}

/// [`KdaOps::kda_decay_gate_backward`].
pub(super) fn decay_gate_backward<B: Host<T>, T: Real>(
    raw: FloatTensor<B>,
    parameters: [MaybeTensor<B>; 2],
    d_g: FloatTensor<B>,
    decay: DecayFn,
) -> (FloatTensor<B>, MaybeTensor<B>, MaybeTensor<B>) {
    let d_g = B::hold(d_g);
    let GateGradients { raw, a_log, dt_bias } =
        with_gate::<B, T, _>(raw, parameters, decay, |gate| layer::decay_gate_gradients(gate, view::<B, T, _>(&d_g)));
    (array::<B, T, _>(raw), a_log.map(array::<B, T, _>).into(), dt_bias.map(array::<B, T, _>).into())
}

/// Holds the tensors of an output norm while `f` looks at them.
fn with_norm<B: Host<T>, T: Real, R>(tensors: [FloatTensor<B>; 3], eps: f64, f: impl FnOnce(&Norm<T>) -> R) -> R {
    let [o, weight, gate] = tensors.map(B::hold);
    f(&Norm { o: view::<B, T, _>(&o), weight: view::<B, T, _>(&weight), gate: view::<B, T, _>(&gate), eps })
}

/// [`KdaOps::kda_output_norm`], of `o`, `weight` and `gate`.
pub(super) fn output_norm<B: Host<T>, T: Real>(tensors: [FloatTensor<B>; 3], eps: f64) -> FloatTensor<B> {
    array::<B, T, _>(with_norm::<B, T, _>(tensors, eps, layer::output_norm))
}

/// [`KdaOps::kda_output_norm_backward`], of `o`, `weight` and `gate`.
pub(super) fn output_norm_backward<B: Host<T>, T: Real>(
    tensors: [FloatTensor<B>; 3],
    d_y: FloatTensor<B>,
    eps: f64,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let d_y = B::hold(d_y);
    let NormGradients { o, weight, gate } =
        with_norm::<B, T, _>(tensors, eps, |norm| layer::output_norm_gradients(norm, view::<B, T, _>(&d_y)));
    (array::<B, T, _>(o), array::<B, T, _>(weight), array::<B, T, _>(gate))
}

/// The dtype of the kernels for what surrounds the operator; none for the plain operations, as for tensors of several
/// dtypes and in half precision.
pub(super) fn layer_dtype(dtypes: impl IntoIterator<Item = DType>) -> Option<DType> {
    let mut dtypes = dtypes.into_iter();
    let first = dtypes.next().filter(|dtype| matches!(dtype, DType::F32 | DType::F64))?;
    (Mode::current() == Mode::Accelerated && dtypes.all(|dtype| dtype == first)).then_some(first)
}

/// `KdaOps` of a backend that is a `Host` of f32 and f64.
macro_rules! native_ops {
    ($backend:ty) => {
        impl KdaOps for $backend {
            fn kda_chunk(
                inputs: KdaTensors<Self>,
                initial_state: MaybeTensor<Self>,
                params: KdaParams,
                keep_states: bool,
            ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>) {
                if Mode::current() == Mode::Plain {
                    return ops::plain_chunk(inputs, initial_state, params, keep_states);
                }
                match inputs.q.dtype() {
                    DType::F64 => native::forward::<Self, f64>(inputs, initial_state, params.scale, keep_states),
                    _ => native::forward::<Self, f32>(inputs, initial_state, params.scale, keep_states),
                }
            }

            /// Many tokens by the definition, which the kernels are compared with; one token by the kernels.
            fn kda_recurrent(
                inputs: KdaTensors<Self>,
                initial_state: MaybeTensor<Self>,
                scale: f64,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                if inputs.q.shape()[1] > 1 || Mode::current() == Mode::Plain {
                    return ops::plain_recurrent(inputs, initial_state, scale);
                }
                let params = KdaParams { scale, chunk_size: 1, tensor_cores: false };
                let (o, final_state, _) = Self::kda_chunk(inputs, initial_state, params, false);
                (o, final_state)
            }

            fn kda_backward(
                inputs: KdaTensors<Self>,
                initial_state: MaybeTensor<Self>,
                states: MaybeTensor<Self>,
                d_o: MaybeTensor<Self>,
                d_final_state: MaybeTensor<Self>,
                params: KdaParams,
                wanted: WantedGradients,
            ) -> KdaGradients<Self> {
                let cotangents = [d_o, d_final_state];
                if Mode::current() == Mode::Plain {
                    return ops::plain_backward(inputs, initial_state, states, cotangents, params, wanted);
                }
                match inputs.q.dtype() {
                    DType::F64 => {
                        native::backward::<Self, f64>(inputs, initial_state, states, cotangents, params.scale, wanted)
                    }
                    _ => native::backward::<Self, f32>(inputs, initial_state, states, cotangents, params.scale, wanted),
                }
            }

            fn kda_convolution(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: MaybeTensor<Self>,
                state: MaybeTensor<Self>,
                params: ConvParams,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let dtypes = [x.dtype(), weight.dtype(), params.dtype].into_iter();
                match native::layer_dtype(dtypes.chain(bias.dtype()).chain(state.dtype())) {
                    Some(DType::F32) => native::convolution::<Self, f32>(x, weight, [bias, state], params),
                    Some(_) => native::convolution::<Self, f64>(x, weight, [bias, state], params),
                    None => ops::plain_convolution(x, weight, bias, state, params),
                }
            }

            fn kda_convolution_backward(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: MaybeTensor<Self>,
                state: MaybeTensor<Self>,
                d_y: MaybeTensor<Self>,
                d_next: MaybeTensor<Self>,
                params: ConvParams,
            ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>, MaybeTensor<Self>) {
                let dtypes = [x.dtype(), weight.dtype(), params.dtype].into_iter();
                let others = [&bias, &state, &d_y, &d_next].map(MaybeTensor::dtype);
                let cotangents = [d_y, d_next];
                match native::layer_dtype(dtypes.chain(others.into_iter().flatten())) {
                    Some(DType::F32) => {
                        native::convolution_backward::<Self, f32>(x, weight, [bias, state], cotangents, params)
                    }
                    Some(_) => native::convolution_backward::<Self, f64>(x, weight, [bias, state], cotangents, params),
                    None => ops::plain_convolution_backward(x, weight, bias, state, cotangents, params),
                }
            }

            fn kda_decay_gate(
                raw: FloatTensor<Self>,
                a_log: MaybeTensor<Self>,
                dt_bias: MaybeTensor<Self>,
                decay: DecayFn,
            ) -> FloatTensor<Self> {
                match native::layer_dtype([raw.dtype()].into_iter().chain(a_log.dtype()).chain(dt_bias.dtype())) {
                    Some(DType::F32) => native::decay_gate::<Self, f32>(raw, [a_log, dt_bias], decay),
                    Some(_) => native::decay_gate::<Self, f64>(raw, [a_log, dt_bias], decay),
                    None => ops::plain_decay_gate(raw, a_log, dt_bias, decay),
                }
            }

            fn kda_decay_gate_backward(
                raw: FloatTensor<Self>,
                a_log: MaybeTensor<Self>,
                dt_bias: MaybeTensor<Self>,
                d_g: FloatTensor<Self>,
                decay: DecayFn,
            ) -> (FloatTensor<Self>, MaybeTensor<Self>, MaybeTensor<Self>) {
                let dtypes = [raw.dtype(), d_g.dtype()].into_iter();
                match native::layer_dtype(dtypes.chain(a_log.dtype()).chain(dt_bias.dtype())) {
                    Some(DType::F32) => native::decay_gate_backward::<Self, f32>(raw, [a_log, dt_bias], d_g, decay),
                    Some(_) => native::decay_gate_backward::<Self, f64>(raw, [a_log, dt_bias], d_g, decay),
                    None => ops::plain_decay_gate_backward(raw, a_log, dt_bias, d_g, decay),
                }
            }

            fn kda_output_norm(
                o: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                gate: FloatTensor<Self>,
                eps: f64,
                dtype: DType,
            ) -> FloatTensor<Self> {
                match native::layer_dtype([o.dtype(), weight.dtype(), gate.dtype(), dtype]) {
                    Some(DType::F32) => native::output_norm::<Self, f32>([o, weight, gate], eps),
                    Some(_) => native::output_norm::<Self, f64>([o, weight, gate], eps),
                    None => ops::plain_output_norm::<Self>(o, weight, gate, eps, dtype),
                }
            }

            fn kda_output_norm_backward(
                o: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                gate: FloatTensor<Self>,
                d_y: FloatTensor<Self>,
                eps: f64,
            ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
                match native::layer_dtype([&o, &weight, &gate, &d_y].map(|x| x.dtype())) {
                    Some(DType::F32) => native::output_norm_backward::<Self, f32>([o, weight, gate], d_y, eps),
                    Some(_) => native::output_norm_backward::<Self, f64>([o, weight, gate], d_y, eps),
                    None => ops::plain_output_norm_backward::<Self>(o, weight, gate, d_y, eps),
                }
            }
        }
    };
}
pub(super) use native_ops;

#[cfg(all(test, feature = "ndarray", feature = "flex"))]
mod tests;
