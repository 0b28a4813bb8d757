//! The operator, and each part of the layer around it, as one node of the autodiff graph, as FLA's autograd functions
//! are: a node saves its inputs, the operator what its forward pass keeps besides, and computes the rest again.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use burn::backend::tensor::FloatTensor;
use burn::backend::{DispatchKindConversion, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};

use crate::gate::DecayFn;
use crate::ops::{ConvParams, KdaGradients, KdaOps, KdaParams, KdaTensors, MaybeTensor, TensorBridge, WantedGradients};

impl<B: KdaOps, C: CheckpointStrategy> TensorBridge for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<Self>,
{
    fn tensor<const D: usize>(primitive: FloatTensor<Self>) -> Tensor<D> {
        Tensor::from_primitive::<Self>(primitive)
    }

    fn primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Self> {
        tensor.try_into_primitive::<Self>().expect("a tensor of this backend")
    }
}

impl<B: KdaOps, C: CheckpointStrategy> KdaOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<Self>,
{
    fn kda_chunk(
        inputs: KdaTensors<Self>,
        initial_state: MaybeTensor<Self>,
        params: KdaParams,
        _keep_states: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>) {
        let [o, final_state] = operator(inputs, initial_state, params, |inputs, initial_state, tracked| {
            B::kda_chunk(inputs, initial_state, params, tracked)
        });
        (o, final_state, MaybeTensor::None)
    }

    fn kda_recurrent(
        inputs: KdaTensors<Self>,
        initial_state: MaybeTensor<Self>,
        scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        // The recurrent form has the gradients of the chunked one.
        let params = KdaParams { scale, chunk_size: 64, tensor_cores: false };
        let [o, final_state] = operator(inputs, initial_state, params, |inputs, initial_state, _| {
            let (o, final_state) = B::kda_recurrent(inputs, initial_state, scale);
            (o, final_state, MaybeTensor::None)
        });
        (o, final_state)
    }

    fn kda_convolution(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        state: MaybeTensor<Self>,
        params: ConvParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let inputs = [Some(x), Some(weight), bias.into_option(), state.into_option()];
        let [y, next] = node::<B, C, _, 4, 2>(inputs, |[x, weight, bias, state], _| {
            let (y, next) = B::kda_convolution(given(x), given(weight), bias.into(), state.into(), params);
            ([y, next], Convolution(params))
        });
        (y, next)
    }

    fn kda_decay_gate(
        raw: FloatTensor<Self>,
        a_log: MaybeTensor<Self>,
        dt_bias: MaybeTensor<Self>,
        decay: DecayFn,
    ) -> FloatTensor<Self> {
        let inputs = [Some(raw), a_log.into_option(), dt_bias.into_option()];
        let [g] = node::<B, C, _, 3, 1>(inputs, |[raw, a_log, dt_bias], _| {
            ([B::kda_decay_gate(given(raw), a_log.into(), dt_bias.into(), decay)], DecayGate(decay))
        });
        g
    }

    fn kda_write_strength(logit: FloatTensor<Self>, factor: f64) -> FloatTensor<Self> {
        let [beta] = node::<B, C, _, 1, 1>([Some(logit)], |[logit], _| {
            ([B::kda_write_strength(given(logit), factor)], WriteStrength(factor))
        });
        beta
    }

    fn kda_output_norm(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        eps: f64,
        dtype: DType,
    ) -> FloatTensor<Self> {
        let [y] = node::<B, C, _, 3, 1>([o, weight, gate].map(Some), |[o, weight, gate], _| {
            ([B::kda_output_norm(given(o), given(weight), given(gate), eps, dtype)], OutputNorm(eps))
        });
        y
    }
}

/// Gradients of a function of `N` inputs, some of which may be missing, with `M` outputs.
trait Function<B: KdaOps, const N: usize, const M: usize>: Clone + Debug + Send + 'static {
    /// From the inputs and the cotangents of the outputs, those of which are zero missing: the gradients of the inputs
    /// that are there, if they are `wanted`.
    fn gradients(
        self,
        inputs: [Option<FloatTensor<B>>; N],
        cotangents: [Option<FloatTensor<B>>; M],
        wanted: [bool; N],
    ) -> [Option<FloatTensor<B>>; N];
}

fn given<T>(input: Option<T>) -> T {
    input.expect("an input that is not optional")
}

#[derive(Debug, Clone)]
struct Convolution(ConvParams);

impl<B: KdaOps> Function<B, 4, 2> for Convolution {
    fn gradients(
        self,
        [x, weight, bias, state]: [Option<FloatTensor<B>>; 4],
        [d_y, d_next]: [Option<FloatTensor<B>>; 2],
        _: [bool; 4],
    ) -> [Option<FloatTensor<B>>; 4] {
        let (x, weight) = (given(x), given(weight));
        let (bias, state) = (bias.into(), state.into());
        let (x, weight, bias, state) =
            B::kda_convolution_backward(x, weight, bias, state, d_y.into(), d_next.into(), self.0);
        [Some(x), Some(weight), bias.into_option(), state.into_option()]
    }
}

#[derive(Debug, Clone)]
struct DecayGate(DecayFn);

impl<B: KdaOps> Function<B, 3, 1> for DecayGate {
    fn gradients(
        self,
        [raw, a_log, dt_bias]: [Option<FloatTensor<B>>; 3],
        [d_g]: [Option<FloatTensor<B>>; 1],
        _: [bool; 3],
    ) -> [Option<FloatTensor<B>>; 3] {
        let (raw, a_log, dt_bias) =
            B::kda_decay_gate_backward(given(raw), a_log.into(), dt_bias.into(), given(d_g), self.0);
        [Some(raw), a_log.into_option(), dt_bias.into_option()]
    }
}

#[derive(Debug, Clone)]
struct WriteStrength(f64);

impl<B: KdaOps> Function<B, 1, 1> for WriteStrength {
    fn gradients(
        self,
        [logit]: [Option<FloatTensor<B>>; 1],
        [d_beta]: [Option<FloatTensor<B>>; 1],
        _: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        [Some(B::kda_write_strength_backward(given(logit), given(d_beta), self.0))]
    }
}

#[derive(Debug, Clone)]
struct OutputNorm(f64);

impl<B: KdaOps> Function<B, 3, 1> for OutputNorm {
    fn gradients(
        self,
        inputs: [Option<FloatTensor<B>>; 3],
        [d_y]: [Option<FloatTensor<B>>; 1],
        _: [bool; 3],
    ) -> [Option<FloatTensor<B>>; 3] {
        let [o, weight, gate] = inputs.map(given);
        let (o, weight, gate) = B::kda_output_norm_backward(o, weight, gate, given(d_y), self.0);
        [o, weight, gate].map(Some)
    }
}

/// The operator, with what its forward pass kept.
#[derive(Debug, Clone)]
struct Operator<B: KdaOps> {
    states: MaybeTensor<B>,
    params: KdaParams,
}

impl<B: KdaOps> Function<B, 6, 2> for Operator<B> {
    fn gradients(
        self,
        [q, k, v, g, beta, initial_state]: [Option<FloatTensor<B>>; 6],
        [d_o, d_final_state]: [Option<FloatTensor<B>>; 2],
        wanted: [bool; 6],
    ) -> [Option<FloatTensor<B>>; 6] {
        let [q, k, v, g, beta] = [q, k, v, g, beta].map(given);
        let inputs = KdaTensors { q, k, v, g, beta };
        let [q, k, v, g, beta, initial] = wanted;
        let wanted = WantedGradients { q, k, v, g, beta, initial_state: initial };
        let KdaGradients { q, k, v, g, beta, initial_state } = B::kda_backward(
            inputs,
            initial_state.into(),
            self.states,
            d_o.into(),
            d_final_state.into(),
            self.params,
            wanted,
        );
        [q, k, v, g, beta, initial_state].map(MaybeTensor::into_option)
    }
}

/// Of [`KdaOps::kda_chunk`].
type ChunkResult<B> = (FloatTensor<B>, FloatTensor<B>, MaybeTensor<B>);

/// Output and final state of the operator in either form.
fn operator<B: KdaOps, C: CheckpointStrategy>(
    KdaTensors { q, k, v, g, beta }: KdaTensors<Autodiff<B, C>>,
    initial_state: MaybeTensor<Autodiff<B, C>>,
    params: KdaParams,
    forward: impl FnOnce(KdaTensors<B>, MaybeTensor<B>, bool) -> ChunkResult<B>,
) -> [FloatTensor<Autodiff<B, C>>; 2] {
    let inputs = [Some(q), Some(k), Some(v), Some(g), Some(beta), initial_state.into_option()];
    node::<B, C, _, 6, 2>(inputs, |[q, k, v, g, beta, initial_state], tracked| {
        let [q, k, v, g, beta] = [q, k, v, g, beta].map(given);
        let (o, final_state, states) = forward(KdaTensors { q, k, v, g, beta }, initial_state.into(), tracked);
        ([o, final_state], Operator { states, params })
    })
}

/// What a node saves. Inputs are named by their own nodes, so that a checkpointing strategy may compute them again.
#[derive(Debug, Clone)]
struct Saved<B: KdaOps, F, const N: usize> {
    inputs: [Option<NodeId>; N],
    function: F,
    cotangents: Cotangents<B>,
    output: Shape,
}

/// Where the nodes of the outputs after the first leave their cotangents for the node of the function, in order.
type Cotangents<B> = Arc<Mutex<Vec<Option<FloatTensor<B>>>>>;

/// Registers a function under its first output, and the others as children of that. `forward` is told whether anything
/// is tracked, and the first input is one that is there.
fn node<B, C, F, const N: usize, const M: usize>(
    inputs: [Option<FloatTensor<Autodiff<B, C>>>; N],
    forward: impl FnOnce([Option<FloatTensor<B>>; N], bool) -> ([FloatTensor<B>; M], F),
) -> [FloatTensor<Autodiff<B, C>>; M]
where
    B: KdaOps,
    C: CheckpointStrategy,
    F: Function<B, N, M>,
{
    // A node has a fixed number of parents: a missing one is the first again, and gets nothing.
    let first = given(inputs[0].as_ref());
    let parents = inputs.each_ref().map(|x| x.as_ref().unwrap_or(first).node());
    let prep = Backward::<B, N>::prepare::<C>(Node::<F, M>(PhantomData), parents).compute_bound().stateful();
    let primitives = inputs.each_ref().map(|x| x.as_ref().map(|x| x.primitive().clone()));
    let tracked = matches!(prep, OpsKind::Tracked(_));
    let (outputs, function) = forward(primitives, tracked);

    let cotangents: Cotangents<B> = Arc::new(Mutex::new(vec![None; M - 1]));
    let mut outputs = outputs.into_iter();
    let output = outputs.next().expect("one output at least");
    let output = match prep {
        OpsKind::Tracked(mut prep) => {
            let saved = Saved {
                inputs: inputs.each_ref().map(|x| x.as_ref().map(|x| prep.checkpoint(x))),
                function,
                cotangents: cotangents.clone(),
                output: output.shape(),
            };
            prep.finish(saved, output)
        }
        OpsKind::UnTracked(prep) => prep.finish(output),
    };
    let others: Vec<_> = outputs
        .enumerate()
        .map(|(n, other)| match OtherOutput.prepare::<C>([output.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let rank = output.shape().num_dims();
                prep.finish((cotangents.clone(), n, Shape::from(vec![1; rank]), output.dtype()), other)
            }
            OpsKind::UnTracked(prep) => prep.finish(other),
        })
        .collect();
    let all: Vec<_> = [output].into_iter().chain(others).collect();
    all.try_into().expect("as many outputs")
}

/// An output after the first. It depends on the inputs only by way of the function's node, which runs after this one.
#[derive(Debug)]
struct OtherOutput;

impl<B: KdaOps> Backward<B, 1> for OtherOutput {
    /// Where the cotangent goes, and shape and dtype of a zero for the first output.
    type State = (Cotangents<B>, usize, Shape, DType);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let cotangent = grads.consume::<B>(&ops.node);
        if let [Some(function)] = ops.parents {
            // A node runs only if it has a gradient: one zero, which any gradient of the output absorbs.
            let (cotangents, n, shape, dtype) = ops.state;
            let zero = B::float_zeros(shape, &cotangent.device(), dtype.into());
            grads.register::<B>(function.id, zero);
            cotangents.lock().expect("no panic while the lock is held")[n] = Some(cotangent);
        }
    }
}

/// A function in the graph, with `M` outputs.
#[derive(Debug)]
struct Node<F, const M: usize>(PhantomData<F>);

impl<B: KdaOps, F: Function<B, N, M>, const N: usize, const M: usize> Backward<B, N> for Node<F, M> {
    type State = Saved<B, F, N>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Saved { inputs, function, cotangents, output } = ops.state;
        let first = Some(grads.consume::<B>(&ops.node)).filter(|cotangent| cotangent.shape() == output);
        let others = std::mem::take(&mut *cotangents.lock().expect("no panic while the lock is held"));
        let mut all = [first].into_iter().chain(others);
        let cotangents = std::array::from_fn(|_| all.next().flatten());
        let inputs = inputs.map(|id| id.map(|id| checkpointer.retrieve_node_output(id)));
        let wanted = std::array::from_fn(|n| inputs[n].is_some() && ops.parents[n].is_some());
        let gradients = function.gradients(inputs, cotangents, wanted);
        for ((parent, gradient), wanted) in ops.parents.into_iter().zip(gradients).zip(wanted) {
            if let (Some(parent), Some(gradient), true) = (parent, gradient, wanted) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}
