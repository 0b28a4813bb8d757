//! The default bodies of [`KdaOps`], in plain tensor operations.

use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Tensor};

use super::{ConvParams, KdaGradients, KdaOps, KdaParams, KdaTensors, MaybeTensor, WantedGradients};
use crate::functions::KdaInput;
use crate::gate::DecayFn;
use crate::{plain, precision};

/// In the dtype of the arithmetic, and what the output is to have.
fn wide(inputs: KdaInput) -> (KdaInput, DType) {
    let dtype = inputs.v.dtype();
    (inputs.cast(precision::accumulation(dtype)), dtype)
}

/// [`KdaOps::kda_chunk`] in plain tensor operations.
pub(crate) fn plain_chunk<B: KdaOps>(
    inputs: KdaTensors<B>,
    initial_state: MaybeTensor<B>,
    KdaParams { scale, chunk_size, .. }: KdaParams,
    keep_states: bool,
) -> (FloatTensor<B>, FloatTensor<B>, MaybeTensor<B>) {
    let (inputs, dtype) = wide(inputs.tensors());
    let (output, states) = plain::chunk_forward(inputs, initial_state.tensor(), scale, chunk_size, keep_states);
    (B::primitive(output.o.cast(dtype)), B::primitive(output.final_state), MaybeTensor::of(states))
}

/// [`KdaOps::kda_recurrent`] by the definition.
pub(crate) fn plain_recurrent<B: KdaOps>(
    inputs: KdaTensors<B>,
    initial_state: MaybeTensor<B>,
    scale: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (inputs, dtype) = wide(inputs.tensors());
    let output = plain::recurrence(inputs, initial_state.tensor(), scale);
    (B::primitive(output.o.cast(dtype)), B::primitive(output.final_state))
}

/// [`KdaOps::kda_backward`] in plain tensor operations, from the cotangents of output and final state.
pub(crate) fn plain_backward<B: KdaOps>(
    inputs: KdaTensors<B>,
    initial_state: MaybeTensor<B>,
    states: MaybeTensor<B>,
    [d_o, d_final_state]: [MaybeTensor<B>; 2],
    KdaParams { scale, chunk_size, .. }: KdaParams,
    wanted: WantedGradients,
) -> KdaGradients<B> {
    let (inputs, initial_state, states) = (inputs.tensors(), initial_state.tensor(), states.tensor());
    let [dtype, g_dtype, beta_dtype] = [inputs.q.dtype(), inputs.g.dtype(), inputs.beta.dtype()];
    let (inputs, _) = wide(inputs);
    let d_o = d_o.tensor().map(|d_o: Tensor<4>| d_o.cast(inputs.v.dtype()));
    let cotangents = plain::Cotangents { o: d_o, final_state: d_final_state.tensor() };
    let plain::Gradients { q, k, v, g, beta, initial_state } =
        plain::chunk_backward(inputs, initial_state, states, cotangents, scale, chunk_size, wanted);
    KdaGradients {
        q: MaybeTensor::of(q.map(|x| x.cast(dtype))),
        k: MaybeTensor::of(k.map(|x| x.cast(dtype))),
        v: MaybeTensor::of(v.map(|x| x.cast(dtype))),
        g: MaybeTensor::of(g.map(|x| x.cast(g_dtype))),
        beta: MaybeTensor::of(beta.map(|x| x.cast(beta_dtype))),
        initial_state: MaybeTensor::of(initial_state),
    }
}

/// [`KdaOps::kda_convolution`] in plain tensor operations.
pub(crate) fn plain_convolution<B: KdaOps>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: MaybeTensor<B>,
    state: MaybeTensor<B>,
    params: ConvParams,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let [y, state] = plain::convolution(B::tensor(x), B::tensor(weight), bias.tensor(), state.tensor(), params);
    (B::primitive(y), B::primitive(state))
}

/// [`KdaOps::kda_convolution_backward`] in plain tensor operations.
#[allow(clippy::type_complexity)]
pub(crate) fn plain_convolution_backward<B: KdaOps>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: MaybeTensor<B>,
    state: MaybeTensor<B>,
    cotangents: [MaybeTensor<B>; 2],
    params: ConvParams,
) -> (FloatTensor<B>, FloatTensor<B>, MaybeTensor<B>, MaybeTensor<B>) {
    let cotangents = cotangents.map(MaybeTensor::tensor);
    let (x, weight, bias, state) =
        plain::convolution_backward(B::tensor(x), B::tensor(weight), bias.tensor(), state.tensor(), cotangents, params);
    (B::primitive(x), B::primitive(weight), MaybeTensor::of(bias), MaybeTensor::of(state))
}

/// [`KdaOps::kda_decay_gate_backward`] in plain tensor operations.
pub(crate) fn plain_decay_gate_backward<B: KdaOps>(
    raw: FloatTensor<B>,
    a_log: MaybeTensor<B>,
    dt_bias: MaybeTensor<B>,
    d_g: FloatTensor<B>,
    decay: DecayFn,
) -> (FloatTensor<B>, MaybeTensor<B>, MaybeTensor<B>) {
    let (raw, a_log, dt_bias) =
        plain::decay_gate_backward(B::tensor(raw), a_log.tensor(), dt_bias.tensor(), B::tensor(d_g), decay);
    (B::primitive(raw), MaybeTensor::of(a_log), MaybeTensor::of(dt_bias))
}

/// [`KdaOps::kda_write_strength_backward`] in plain tensor operations.
pub(crate) fn plain_write_strength_backward<B: KdaOps>(
    logit: FloatTensor<B>,
    d_beta: FloatTensor<B>,
    factor: f64,
) -> FloatTensor<B> {
    B::primitive(plain::write_strength_backward(B::tensor(logit), B::tensor(d_beta), factor))
}

/// [`KdaOps::kda_output_norm_backward`] in plain tensor operations.
pub(crate) fn plain_output_norm_backward<B: KdaOps>(
    o: FloatTensor<B>,
    weight: FloatTensor<B>,
    gate: FloatTensor<B>,
    d_y: FloatTensor<B>,
    eps: f64,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let (o, weight, gate) =
        plain::output_norm_backward(B::tensor(o), B::tensor(weight), B::tensor(gate), B::tensor(d_y), eps);
    (B::primitive(o), B::primitive(weight), B::primitive(gate))
}

/// [`KdaOps::kda_decay_gate`] in plain tensor operations.
pub(crate) fn plain_decay_gate<B: KdaOps>(
    raw: FloatTensor<B>,
    a_log: MaybeTensor<B>,
    dt_bias: MaybeTensor<B>,
    decay: DecayFn,
) -> FloatTensor<B> {
    B::primitive(plain::decay_gate(B::tensor(raw), a_log.tensor(), dt_bias.tensor(), decay))
}

/// [`KdaOps::kda_write_strength`] in plain tensor operations.
pub(crate) fn plain_write_strength<B: KdaOps>(logit: FloatTensor<B>, factor: f64) -> FloatTensor<B> {
    B::primitive(plain::write_strength(B::tensor(logit), factor))
}

/// [`KdaOps::kda_output_norm`] in plain tensor operations.
pub(crate) fn plain_output_norm<B: KdaOps>(
    o: FloatTensor<B>,
    weight: FloatTensor<B>,
    gate: FloatTensor<B>,
    eps: f64,
    dtype: DType,
) -> FloatTensor<B> {
    B::primitive(plain::output_norm(B::tensor(o), B::tensor(weight), B::tensor(gate), eps, dtype))
}
