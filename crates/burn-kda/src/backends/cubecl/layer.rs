//! What surrounds the operator, for inference: under autodiff it is tensor operations, which Burn differentiates.

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;

use super::client;
use crate::gate::DecayFn;
use crate::kernel::has_kernels;
use crate::kernel::layer::{self, HeadPlan};
#[cfg(feature = "fusion")]
use crate::ops::MaybeTensorMetadata;
use crate::ops::{
    ConvParams, MaybeTensor, plain_convolution, plain_decay_gate, plain_output_norm, plain_write_strength,
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
    let [batch, time, channels] = x.shape().dims();
    let [_, _, width] = weight.shape().dims();
    let dim = params.head_dim.unwrap_or(channels.min(CHANNELS));
    let heads = channels.div_ceil(dim);
    let plan = client([&x, &weight].into_iter().chain(some(&bias)))
        .filter(|_| (2..=WIDTH).contains(&width) && has_kernels(params.dtype))
        .and_then(|client| HeadPlan::new([batch, time, heads, dim], client.properties()));
    match plan {
        Some(plan) => <Cube as LayerOps>::convolution(x, weight, bias, state, params, [heads, dim], plan),
        None => plain_convolution(x, weight, bias, state, params),
    }
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

pub(super) fn write_strength(logit: FloatTensor<Cube>, factor: f64) -> FloatTensor<Cube> {
    match client([&logit]) {
        Some(_) => <Cube as LayerOps>::write_strength(logit, factor),
        None => plain_write_strength::<Cube>(logit, factor),
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
        .and_then(|client| HeadPlan::new(o.shape().dims(), client.properties()));
    match plan {
        Some(plan) => <Cube as LayerOps>::output_norm(o, weight, gate, eps, dtype, plan),
        None => plain_output_norm::<Cube>(o, weight, gate, eps, dtype),
    }
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

    /// As [`KdaOps::kda_decay_gate`](crate::KdaOps::kda_decay_gate).
    #[fusion(dtype = DType::F32, shape = raw)]
    fn decay_gate(
        raw: FloatTensor<Self>,
        #[extension_type] a_log: MaybeTensor<Self>,
        #[extension_type] dt_bias: MaybeTensor<Self>,
        decay: DecayFn,
    ) -> FloatTensor<Self>;

    /// As [`KdaOps::kda_write_strength`](crate::KdaOps::kda_write_strength).
    #[fusion(dtype = DType::F32, shape = logit)]
    fn write_strength(logit: FloatTensor<Self>, factor: f64) -> FloatTensor<Self>;

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
