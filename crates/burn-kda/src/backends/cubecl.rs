//! Every runtime of CubeCL: the operator and what surrounds it in kernels, and the plain algorithm where the device or the
//! dtype is not one for them.

mod layer;

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl::client::Client;
use cubecl::ir::DeviceProperties;

use crate::functions::Dims;
use crate::gate::DecayFn;
#[cfg(feature = "fusion")]
use crate::kernel::kept_states;
use crate::kernel::{self, BackwardPlan, ForwardPlan, Gradients, Outputs, has_kernels};
use crate::ops::{
    ConvParams, KdaGradients, KdaOps, KdaParams, KdaTensors, MaybeTensor, Mode, WantedGradients, plain_backward,
    plain_chunk, plain_recurrent,
};
#[cfg(feature = "fusion")]
use crate::ops::{KdaGradientsMetadata, KdaTensorsMetadata, MaybeTensorMetadata};

tensor_bridge!(Cube);

impl KdaOps for Cube {
    fn kda_chunk(
        inputs: KdaTensors<Self>,
        initial_state: MaybeTensor<Self>,
        params: KdaParams,
        keep_states: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>) {
        let tensor_cores = params.tensor_cores || is_half(&inputs.q);
        match plan(&inputs, |dims, properties| ForwardPlan::new(dims, tensor_cores, properties)) {
            Some(plan) => <Self as KernelOps>::forward(inputs, initial_state, params.scale, keep_states, plan),
            None => plain_chunk(inputs, initial_state, params, keep_states),
        }
    }

    fn kda_recurrent(
        inputs: KdaTensors<Self>,
        initial_state: MaybeTensor<Self>,
        scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let Some(plan) = plan(&inputs, ForwardPlan::recurrent) else {
            return plain_recurrent(inputs, initial_state, scale);
        };
        let (o, final_state, _) = <Self as KernelOps>::forward(inputs, initial_state, scale, false, plan);
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
        let tensor_cores = params.tensor_cores || is_half(&inputs.q);
        match plan(&inputs, |dims, properties| BackwardPlan::new(dims, tensor_cores, properties)) {
            Some(plan) => {
                let dtype = inputs.v.dtype();
                let (d_o, d_final_state) = (given_in_dtype(d_o, dtype), given_in_dtype(d_final_state, DType::F32));
                <Self as KernelOps>::backward(
                    inputs,
                    initial_state,
                    states,
                    d_o,
                    d_final_state,
                    params.scale,
                    wanted,
                    plan,
                )
            }
            None => plain_backward(inputs, initial_state, states, [d_o, d_final_state], params, wanted),
        }
    }

    fn kda_convolution(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        state: MaybeTensor<Self>,
        params: ConvParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        layer::convolution(x, weight, bias, state, params)
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
        layer::convolution_backward(x, weight, bias, state, [d_y, d_next], params)
    }

    fn kda_decay_gate(
        raw: FloatTensor<Self>,
        a_log: MaybeTensor<Self>,
        dt_bias: MaybeTensor<Self>,
        decay: DecayFn,
    ) -> FloatTensor<Self> {
        layer::decay_gate(raw, a_log, dt_bias, decay)
    }

    fn kda_decay_gate_backward(
        raw: FloatTensor<Self>,
        a_log: MaybeTensor<Self>,
        dt_bias: MaybeTensor<Self>,
        d_g: FloatTensor<Self>,
        decay: DecayFn,
    ) -> (FloatTensor<Self>, MaybeTensor<Self>, MaybeTensor<Self>) {
        layer::decay_gate_backward(raw, a_log, dt_bias, d_g, decay)
    }

    fn kda_write_strength(logit: FloatTensor<Self>, factor: f64) -> FloatTensor<Self> {
        layer::write_strength(logit, factor)
    }

    fn kda_write_strength_backward(
        logit: FloatTensor<Self>,
        d_beta: FloatTensor<Self>,
        factor: f64,
    ) -> FloatTensor<Self> {
        layer::write_strength_backward(logit, d_beta, factor)
    }

    fn kda_output_norm(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        eps: f64,
        dtype: DType,
    ) -> FloatTensor<Self> {
        layer::output_norm(o, weight, gate, eps, dtype)
    }

    fn kda_output_norm_backward(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        d_y: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        layer::output_norm_backward(o, weight, gate, d_y, eps)
    }
}

/// None if the plain algorithm has to run.
fn plan<P>(inputs: &KdaTensors<Cube>, of: impl FnOnce(Dims, &DeviceProperties) -> Option<P>) -> Option<P> {
    of(dims(inputs), client([&inputs.q, &inputs.g, &inputs.beta])?.properties())
}

/// Of the tensors' device; none if kernels are ruled out, or have no such dtype.
fn client<'a>(tensors: impl IntoIterator<Item = &'a FloatTensor<Cube>>) -> Option<Client> {
    let mut tensors = tensors.into_iter();
    let first = tensors.next().expect("a tensor");
    let runs = has_kernels(first.dtype()) && tensors.all(|x| has_kernels(x.dtype()));
    (runs && Mode::current() == Mode::Accelerated).then(|| first.device().client())
}

/// As a kernel reads it, whatever the graph made of it.
fn in_dtype(x: FloatTensor<Cube>, dtype: DType) -> FloatTensor<Cube> {
    if x.dtype() == dtype { x } else { Cube::float_cast(x, dtype.into()) }
}

fn given_in_dtype(x: MaybeTensor<Cube>, dtype: DType) -> MaybeTensor<Cube> {
    x.into_option().map(|x| in_dtype(x, dtype)).into()
}

fn is_half(x: &FloatTensor<Cube>) -> bool {
    matches!(x.dtype(), DType::F16 | DType::BF16)
}

fn dims<B: Backend>(KdaTensors { q, v, .. }: &KdaTensors<B>) -> Dims {
    Dims::new(q.shape().dims(), v.shape().dims())
}

/// The kernels on the tensors of [`CubeBackend`]; with fusion, the same kernels as operations of its graph.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
trait KernelOps: Backend {
    /// As [`KdaOps::kda_chunk`]; the plan is one for these inputs.
    #[fusion(meta = forward_specs)]
    fn forward(
        #[extension_type] inputs: KdaTensors<Self>,
        #[extension_type] initial_state: MaybeTensor<Self>,
        scale: f64,
        keep_states: bool,
        plan: ForwardPlan,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>);

    /// As [`KdaOps::kda_backward`]; the plan is one for these inputs.
    #[fusion(meta = backward_specs)]
    #[allow(clippy::too_many_arguments)]
    fn backward(
        #[extension_type] inputs: KdaTensors<Self>,
        #[extension_type] initial_state: MaybeTensor<Self>,
        #[extension_type] states: MaybeTensor<Self>,
        #[extension_type] d_o: MaybeTensor<Self>,
        #[extension_type] d_final_state: MaybeTensor<Self>,
        scale: f64,
        wanted: WantedGradients,
        plan: BackwardPlan,
    ) -> KdaGradients<Self>;
}

impl KernelOps for CubeBackend {
    fn forward(
        inputs: KdaTensors<Self>,
        initial_state: MaybeTensor<Self>,
        scale: f64,
        keep_states: bool,
        plan: ForwardPlan,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>) {
        let dims = dims(&inputs);
        let KdaTensors { q, k, v, g, beta } = inputs;
        let Outputs { o, final_state, kept } =
            kernel::forward(dims, [q, k, v, g, beta], initial_state.into_option(), scale, keep_states, plan);
        (o, final_state, kept.into())
    }

    fn backward(
        inputs: KdaTensors<Self>,
        initial_state: MaybeTensor<Self>,
        states: MaybeTensor<Self>,
        d_o: MaybeTensor<Self>,
        d_final_state: MaybeTensor<Self>,
        scale: f64,
        wanted: WantedGradients,
        plan: BackwardPlan,
    ) -> KdaGradients<Self> {
        let dims = dims(&inputs);
        let KdaTensors { q, k, v, g, beta } = inputs;
        let [initial_state, states, d_o, d_final_state] =
            [initial_state, states, d_o, d_final_state].map(MaybeTensor::into_option);
        let cotangents = [d_o, d_final_state];
        let Gradients { q, k, v, g, beta, initial_state } =
            kernel::backward(dims, [q, k, v, g, beta], initial_state, states, cotangents, scale, wanted, plan);
        KdaGradients {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            g: g.into(),
            beta: beta.into(),
            initial_state: initial_state.into(),
        }
    }
}

/// Shapes and dtypes of the results.
#[cfg(feature = "fusion")]
fn forward_specs(
    inputs: &KdaTensorsMetadata,
    _initial_state: &MaybeTensorMetadata,
    _scale: &f64,
    keep_states: &bool,
    _plan: &ForwardPlan,
) -> (TensorSpec, TensorSpec, MaybeTensorMetadata) {
    let [batch, time, heads, key_dim] = inputs.g.shape.dims();
    let [_, _, _, value_dim] = inputs.v.shape.dims();
    let states = |shape: [usize; 4]| TensorSpec::new(shape.into(), DType::F32);
    let kept = match kept_states(time, *keep_states) {
        0 => MaybeTensorMetadata::None,
        count => MaybeTensorMetadata::Some(states([count, batch * heads, key_dim, value_dim])),
    };
    (inputs.v.clone(), states([batch, heads, key_dim, value_dim]), kept)
}

/// As [`forward_specs`]: each gradient is like its input.
#[cfg(feature = "fusion")]
#[allow(clippy::too_many_arguments)]
fn backward_specs(
    inputs: &KdaTensorsMetadata,
    initial_state: &MaybeTensorMetadata,
    _states: &MaybeTensorMetadata,
    _d_o: &MaybeTensorMetadata,
    _d_final_state: &MaybeTensorMetadata,
    _scale: &f64,
    wanted: &WantedGradients,
    _plan: &BackwardPlan,
) -> KdaGradientsMetadata {
    let like = |wanted: bool, input: &TensorSpec| match wanted {
        true => MaybeTensorMetadata::Some(input.clone()),
        false => MaybeTensorMetadata::None,
    };
    KdaGradientsMetadata {
        q: like(wanted.q, &inputs.q),
        k: like(wanted.k, &inputs.k),
        v: like(wanted.v, &inputs.v),
        g: like(wanted.g, &inputs.g),
        beta: like(wanted.beta, &inputs.beta),
        initial_state: if wanted.initial_state { initial_state.clone() } else { MaybeTensorMetadata::None },
    }
}

#[cfg(all(test, feature = "fusion"))]
mod tests;
