//! What surrounds the operator.

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Cube, ExtensionType, TensorMetadata, backend_extension};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;

use super::{client, given_in_dtype, in_dtype};
use crate::gate::DecayFn;
use crate::kernel::has_kernels;
use crate::kernel::layer::{self, HeadPlan};
#[cfg(feature = "fusion")]
use crate::ops::MaybeTensorMetadata;
use crate::ops::{
    ConvParams, MaybeTensor, TensorBridge, plain_convolution, plain_convolution_backward, plain_decay_gate,
    plain_decay_gate_backward, plain_output_norm, plain_output_norm_backward, plain_write_strength,
    plain_write_strength_backward,
};

/// Channels for a cube where there are no heads.
const CHANNELS: usize = 128;

/// Taps of a convolution at most: as many numbers of a unit are in registers.
const WIDTH: usize = 16;

fn some(tensor: &MaybeTensor<Cube>) -> Option<&FloatTensor<Cube>> {
    match tensor {
        MaybeTensor::Some(tensor) => Some(tensor),
        MaybeTensor::None => None,
    }
}

pub(super) fn convolution(
    x: FloatTensor<Cube>,
    weight: FloatTensor<Cube>,
    bias: MaybeTensor<Cube>,
    state: MaybeTensor<Cube>,
    params: ConvParams,
) -> (FloatTensor<Cube>, FloatTensor<Cube>) {
    match convolution_plan(&x, &weight, &bias, params, |_| 0, 1) {
        Some((heads, plan)) => <Cube as LayerOps>::convolution(x, weight, bias, state, params, heads, plan),
        None => plain_convolution(x, weight, bias, state, params),
    }
}

/// As [`KdaOps::kda_convolution_backward`](crate::KdaOps::kda_convolution_backward).
pub(super) fn convolution_backward(
    x: FloatTensor<Cube>,
    weight: FloatTensor<Cube>,
    bias: MaybeTensor<Cube>,
    state: MaybeTensor<Cube>,
    [d_y, d_next]: [MaybeTensor<Cube>; 2],
    params: ConvParams,
) -> (FloatTensor<Cube>, FloatTensor<Cube>, MaybeTensor<Cube>, MaybeTensor<Cube>) {
    let plan = convolution_plan(&x, &weight, &bias, params, |width| 2 * (width - 1), 2);
    let Some((heads, plan)) = plan else {
        return plain_convolution_backward(x, weight, bias, state, [d_y, d_next], params);
    };
    let bias_dtype = some(&bias).map(|bias| bias.dtype());
    let (weight_dtype, weight_dims) = (weight.dtype(), weight.shape().dims::<3>());
    let (d_y, d_next) = (given_in_dtype(d_y, params.dtype), given_in_dtype(d_next, x.dtype()));
    let ConvGradients { x, sums, state } =
        <Cube as LayerOps>::convolution_gradients(x, weight, bias, state, d_y, d_next, params, heads, plan);
    let [channels, _, width] = weight_dims;
    let sums = Cube::tensor::<3>(sums).sum_dim(0);
    let weight = sums.clone().slice_dim(1, 0..width).reshape([width, channels, 1]).permute([1, 2, 0]);
    let bias = bias_dtype.map(|dtype| sums.slice_dim(1, width..width + 1).reshape([channels]).cast(dtype));
    (x, Cube::primitive(weight.cast(weight_dtype)), MaybeTensor::of::<1>(bias), state)
}

pub(super) fn decay_gate(
    raw: FloatTensor<Cube>,
    a_log: MaybeTensor<Cube>,
    dt_bias: MaybeTensor<Cube>,
    decay: DecayFn,
) -> FloatTensor<Cube> {
    let tensors = [&raw].into_iter().chain(some(&a_log)).chain(some(&dt_bias));
    match client(tensors) {
        Some(_) => <Cube as LayerOps>::decay_gate(raw, a_log, dt_bias, decay),
        None => plain_decay_gate(raw, a_log, dt_bias, decay),
    }
}

/// As [`KdaOps::kda_decay_gate_backward`](crate::KdaOps::kda_decay_gate_backward).
pub(super) fn decay_gate_backward(
    raw: FloatTensor<Cube>,
    a_log: MaybeTensor<Cube>,
    dt_bias: MaybeTensor<Cube>,
    d_g: FloatTensor<Cube>,
    decay: DecayFn,
) -> (FloatTensor<Cube>, MaybeTensor<Cube>, MaybeTensor<Cube>) {
    let dims @ [_, _, heads, dim] = raw.shape().dims();
    let plan = client([&raw].into_iter().chain(some(&a_log)).chain(some(&dt_bias)))
        .and_then(|client| HeadPlan::new(dims, 0, 1, client.properties()));
    let Some(plan) = plan else {
        return plain_decay_gate_backward(raw, a_log, dt_bias, d_g, decay);
    };
    let [rate_dtype, bias_dtype] = [&a_log, &dt_bias].map(|x| some(x).map(|x| x.dtype()));
    let d_g = in_dtype(d_g, DType::F32);
    let (d_raw, sums) = <Cube as LayerOps>::decay_gate_gradients(raw, a_log, dt_bias, d_g, decay, plan);
    let sums = Cube::tensor::<4>(sums).sum_dim(1);
    let part = |n: usize| sums.clone().slice_dim(0, n..n + 1);
    let bias = bias_dtype.map(|dtype| part(0).reshape([heads * dim]).cast(dtype));
    let rate = rate_dtype.map(|dtype| part(1).sum_dim(3).reshape([heads]).cast(dtype));
    (d_raw, MaybeTensor::of::<1>(rate), MaybeTensor::of::<1>(bias))
}

pub(super) fn write_strength(logit: FloatTensor<Cube>, factor: f64) -> FloatTensor<Cube> {
    match client([&logit]) {
        Some(_) => <Cube as LayerOps>::write_strength(logit, factor),
        None => plain_write_strength::<Cube>(logit, factor),
    }
}

/// As [`KdaOps::kda_write_strength_backward`](crate::KdaOps::kda_write_strength_backward).
pub(super) fn write_strength_backward(
    logit: FloatTensor<Cube>,
    d_beta: FloatTensor<Cube>,
    factor: f64,
) -> FloatTensor<Cube> {
    match client([&logit]) {
        Some(_) => <Cube as LayerOps>::write_strength_gradient(logit, in_dtype(d_beta, DType::F32), factor),
        None => plain_write_strength_backward::<Cube>(logit, d_beta, factor),
    }
}

pub(super) fn output_norm(
    o: FloatTensor<Cube>,
    weight: FloatTensor<Cube>,
    gate: FloatTensor<Cube>,
    eps: f64,
    dtype: DType,
) -> FloatTensor<Cube> {
    let plan = client([&o, &weight, &gate])
        .filter(|_| has_kernels(dtype))
        .and_then(|client| HeadPlan::new(o.shape().dims(), 0, 1, client.properties()));
    match plan {
        Some(plan) => <Cube as LayerOps>::output_norm(o, weight, gate, eps, dtype, plan),
        None => plain_output_norm::<Cube>(o, weight, gate, eps, dtype),
    }
}

/// As [`KdaOps::kda_output_norm_backward`](crate::KdaOps::kda_output_norm_backward).
pub(super) fn output_norm_backward(
    o: FloatTensor<Cube>,
    weight: FloatTensor<Cube>,
    gate: FloatTensor<Cube>,
    d_y: FloatTensor<Cube>,
    eps: f64,
) -> (FloatTensor<Cube>, FloatTensor<Cube>, FloatTensor<Cube>) {
    let dims @ [_, _, _, dim] = o.shape().dims();
    let plan = client([&o, &weight, &gate, &d_y]).and_then(|client| HeadPlan::new(dims, 0, 2, client.properties()));
    let Some(plan) = plan else {
        return plain_output_norm_backward::<Cube>(o, weight, gate, d_y, eps);
    };
    let dtype = weight.dtype();
    let (d_o, d_gate, sums) = <Cube as LayerOps>::output_norm_gradients(o, weight, gate, d_y, eps, plan);
    let d_weight = Cube::tensor::<2>(sums).sum_dim(0).reshape([dim]).cast(dtype);
    (d_o, Cube::primitive::<1>(d_weight), d_gate)
}

/// Heads and their channels, and how they are given to cubes, where the tokens at a time need `more` rows and `sums` over
/// the channels of each; none if there is no kernel for such a convolution.
fn convolution_plan(
    x: &FloatTensor<Cube>,
    weight: &FloatTensor<Cube>,
    bias: &MaybeTensor<Cube>,
    params: ConvParams,
    more: impl Fn(usize) -> usize,
    sums: usize,
) -> Option<([usize; 2], HeadPlan)> {
    let [batch, time, channels] = x.shape().dims();
    let [_, _, width] = weight.shape().dims();
    let dim = params.head_dim.unwrap_or(channels.min(CHANNELS));
    assert!(
        params.head_dim.is_none_or(|dim| channels.is_multiple_of(dim)),
        "`head_dim` {dim} does not divide {channels}"
    );
    let heads = channels.div_ceil(dim);
    let client = client([x, weight].into_iter().chain(some(bias)))?;
    if !(2..=WIDTH).contains(&width) || !has_kernels(params.dtype) {
        return None;
    }
    let plan = HeadPlan::new([batch, time, heads, dim], more(width), sums, client.properties())?;
    Some(([heads, dim], plan))
}

/// Gradients of a convolution.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
struct ConvGradients<B: Backend> {
    x: FloatTensor<B>,
    /// Of the weights and the bias by spans, `[N, W + 1, D]`.
    sums: FloatTensor<B>,
    #[extension_type]
    state: MaybeTensor<B>,
}

/// The kernels on the tensors of [`CubeBackend`], as [`KernelOps`](super::KernelOps).
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
trait LayerOps: Backend {
    /// As [`KdaOps::kda_convolution`](crate::KdaOps::kda_convolution); the plan is one for `heads` and their `dim`.
    #[fusion(meta = convolution_specs)]
    fn convolution(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] state: MaybeTensor<Self>,
        params: ConvParams,
        heads: [usize; 2],
        plan: HeadPlan,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// As [`layer::convolution_gradients`].
    #[fusion(meta = convolution_gradient_specs)]
    #[allow(clippy::too_many_arguments)]
    fn convolution_gradients(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] state: MaybeTensor<Self>,
        #[extension_type] d_y: MaybeTensor<Self>,
        #[extension_type] d_next: MaybeTensor<Self>,
        params: ConvParams,
        heads: [usize; 2],
        plan: HeadPlan,
    ) -> ConvGradients<Self>;

    /// As [`KdaOps::kda_decay_gate`](crate::KdaOps::kda_decay_gate).
    #[fusion(dtype = DType::F32, shape = raw)]
    fn decay_gate(
        raw: FloatTensor<Self>,
        #[extension_type] a_log: MaybeTensor<Self>,
        #[extension_type] dt_bias: MaybeTensor<Self>,
        decay: DecayFn,
    ) -> FloatTensor<Self>;

    /// As [`layer::decay_gate_gradients`].
    #[fusion(meta = decay_gate_gradient_specs)]
    fn decay_gate_gradients(
        raw: FloatTensor<Self>,
        #[extension_type] a_log: MaybeTensor<Self>,
        #[extension_type] dt_bias: MaybeTensor<Self>,
        d_g: FloatTensor<Self>,
        decay: DecayFn,
        plan: HeadPlan,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// As [`KdaOps::kda_write_strength`](crate::KdaOps::kda_write_strength).
    #[fusion(dtype = DType::F32, shape = logit)]
    fn write_strength(logit: FloatTensor<Self>, factor: f64) -> FloatTensor<Self>;

    /// As [`KdaOps::kda_write_strength_backward`](crate::KdaOps::kda_write_strength_backward).
    #[fusion(dtype = logit, shape = logit)]
    fn write_strength_gradient(logit: FloatTensor<Self>, d_beta: FloatTensor<Self>, factor: f64) -> FloatTensor<Self>;

    /// As [`KdaOps::kda_output_norm`](crate::KdaOps::kda_output_norm); the plan is one for `o`.
    #[fusion(dtype = *dtype, shape = o)]
    fn output_norm(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        eps: f64,
        dtype: DType,
        plan: HeadPlan,
    ) -> FloatTensor<Self>;

    /// As [`layer::output_norm_gradients`].
    #[fusion(meta = output_norm_gradient_specs)]
    fn output_norm_gradients(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        d_y: FloatTensor<Self>,
        eps: f64,
        plan: HeadPlan,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl LayerOps for CubeBackend {
    fn convolution(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        state: MaybeTensor<Self>,
        params: ConvParams,
        heads: [usize; 2],
        plan: HeadPlan,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        layer::convolution(x, weight, bias.into_option(), state.into_option(), params, heads, plan)
    }

    fn decay_gate(
        raw: FloatTensor<Self>,
        a_log: MaybeTensor<Self>,
        dt_bias: MaybeTensor<Self>,
        decay: DecayFn,
    ) -> FloatTensor<Self> {
        layer::decay_gate(raw, a_log.into_option(), dt_bias.into_option(), decay)
    }

    fn write_strength(logit: FloatTensor<Self>, factor: f64) -> FloatTensor<Self> {
        layer::write_strength(logit, factor)
    }

    fn output_norm(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        eps: f64,
        dtype: DType,
        plan: HeadPlan,
    ) -> FloatTensor<Self> {
        layer::output_norm(o, weight, gate, eps, dtype, plan)
    }

    fn convolution_gradients(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        state: MaybeTensor<Self>,
        d_y: MaybeTensor<Self>,
        d_next: MaybeTensor<Self>,
        params: ConvParams,
        heads: [usize; 2],
        plan: HeadPlan,
    ) -> ConvGradients<Self> {
        let (bias, state) = (bias.into_option(), state.into_option());
        let cotangents = [d_y, d_next].map(MaybeTensor::into_option);
        let (x, sums, state) = layer::convolution_gradients(x, weight, bias, state, cotangents, params, heads, plan);
        ConvGradients { x, sums, state: state.into() }
    }

    fn decay_gate_gradients(
        raw: FloatTensor<Self>,
        a_log: MaybeTensor<Self>,
        dt_bias: MaybeTensor<Self>,
        d_g: FloatTensor<Self>,
        decay: DecayFn,
        plan: HeadPlan,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (a_log, dt_bias) = (a_log.into_option(), dt_bias.into_option());
        layer::decay_gate_gradients(raw, a_log, dt_bias, d_g, decay, plan).into()
    }

    fn write_strength_gradient(logit: FloatTensor<Self>, d_beta: FloatTensor<Self>, factor: f64) -> FloatTensor<Self> {
        layer::write_strength_gradient(logit, d_beta, factor)
    }

    fn output_norm_gradients(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        d_y: FloatTensor<Self>,
        eps: f64,
        plan: HeadPlan,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        layer::output_norm_gradients(o, weight, gate, d_y, eps, plan).into()
    }
}

/// Shapes and dtypes of the results.
#[cfg(feature = "fusion")]
fn convolution_specs(
    x: &TensorSpec,
    weight: &TensorSpec,
    _bias: &MaybeTensorMetadata,
    _state: &MaybeTensorMetadata,
    params: &ConvParams,
    _heads: &[usize; 2],
    _plan: &HeadPlan,
) -> (TensorSpec, TensorSpec) {
    let [batch, _, channels] = x.shape.dims();
    let [_, _, width] = weight.shape.dims();
    let state = [batch, channels, width - 1];
    (TensorSpec::new(x.shape.clone(), params.dtype), TensorSpec::new(state.into(), x.dtype))
}

#[cfg(feature = "fusion")]
#[allow(clippy::too_many_arguments)]
fn convolution_gradient_specs(
    x: &TensorSpec,
    weight: &TensorSpec,
    _bias: &MaybeTensorMetadata,
    state: &MaybeTensorMetadata,
    _d_y: &MaybeTensorMetadata,
    _d_next: &MaybeTensorMetadata,
    _params: &ConvParams,
    _heads: &[usize; 2],
    _plan: &HeadPlan,
) -> ConvGradientsMetadata {
    let [batch, time, channels] = x.shape.dims();
    let [_, _, width] = weight.shape.dims();
    let sums = [layer::spans(batch, time), width + 1, channels];
    ConvGradientsMetadata { x: x.clone(), sums: TensorSpec::new(sums.into(), DType::F32), state: state.clone() }
}

#[cfg(feature = "fusion")]
fn decay_gate_gradient_specs(
    raw: &TensorSpec,
    _a_log: &MaybeTensorMetadata,
    _dt_bias: &MaybeTensorMetadata,
    _d_g: &TensorSpec,
    _decay: &DecayFn,
    _plan: &HeadPlan,
) -> (TensorSpec, TensorSpec) {
    let [batch, time, heads, dim] = raw.shape.dims();
    let sums = [2, layer::spans(batch, time), heads, dim];
    (raw.clone(), TensorSpec::new(sums.into(), DType::F32))
}

#[cfg(feature = "fusion")]
fn output_norm_gradient_specs(
    o: &TensorSpec,
    _weight: &TensorSpec,
    gate: &TensorSpec,
    _d_y: &TensorSpec,
    _eps: &f64,
    _plan: &HeadPlan,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    let [batch, time, heads, dim] = o.shape.dims();
    let sums = [layer::spans(batch, time) * heads, dim];
    (o.clone(), gate.clone(), TensorSpec::new(sums.into(), DType::F32))
}

#[cfg(all(test, feature = "fusion"))]
mod tests;
