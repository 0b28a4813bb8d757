//! The operator as one node of the autodiff graph, as FLA's autograd function: it saves its inputs and the states
//! between segments, and computes the rest again.

use std::sync::{Arc, Mutex};

use burn::backend::tensor::FloatTensor;
use burn::backend::{DispatchKindConversion, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};

use crate::ops::{KdaGradients, KdaOps, KdaParams, KdaTensors, MaybeTensor, TensorBridge, WantedGradients};

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
        let [o, final_state] = node(inputs, initial_state, params, |inputs, initial_state, tracked| {
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
        let [o, final_state] = node(inputs, initial_state, params, |inputs, initial_state, _| {
            let (o, final_state) = B::kda_recurrent(inputs, initial_state, scale);
            (o, final_state, MaybeTensor::None)
        });
        (o, final_state)
    }
}

/// What a node saves. Inputs are named by their own nodes, so that a checkpointing strategy may compute them again.
#[derive(Debug, Clone)]
struct Saved<B: KdaOps> {
    inputs: [NodeId; 5],
    initial_state: Option<NodeId>,
    states: MaybeTensor<B>,
    d_final_state: FinalStateCotangent<B>,
    output: Shape,
    params: KdaParams,
}

/// Where the node of the final state leaves its cotangent for the node of the operator.
type FinalStateCotangent<B> = Arc<Mutex<Option<FloatTensor<B>>>>;

/// Of [`KdaOps::kda_chunk`].
type ChunkResult<B> = (FloatTensor<B>, FloatTensor<B>, MaybeTensor<B>);

/// Registers the operator under its output, and the final state as a child of it.
fn node<B: KdaOps, C: CheckpointStrategy>(
    inputs: KdaTensors<Autodiff<B, C>>,
    initial_state: MaybeTensor<Autodiff<B, C>>,
    params: KdaParams,
    forward: impl FnOnce(KdaTensors<B>, MaybeTensor<B>, bool) -> ChunkResult<B>,
) -> [FloatTensor<Autodiff<B, C>>; 2] {
    let KdaTensors { q, k, v, g, beta } = &inputs;
    let initial_state = initial_state.into_option();
    // A node has a fixed number of parents; without an initial state the last one is a second `q` that gets nothing.
    let parents = [q, k, v, g, beta, initial_state.as_ref().unwrap_or(q)].map(|x| x.node());
    let prep = Operator.prepare::<C>(parents).compute_bound().stateful();
    let primitives = KdaTensors {
        q: q.primitive().clone(),
        k: k.primitive().clone(),
        v: v.primitive().clone(),
        g: g.primitive().clone(),
        beta: beta.primitive().clone(),
    };
    let tracked = matches!(prep, OpsKind::Tracked(_));
    let (o, final_state, states) =
        forward(primitives, initial_state.as_ref().map(|x| x.primitive().clone()).into(), tracked);

    let d_final_state = FinalStateCotangent::<B>::default();
    let o = match prep {
        OpsKind::Tracked(mut prep) => {
            let saved = Saved {
                inputs: [q, k, v, g, beta].map(|x| prep.checkpoint(x)),
                initial_state: initial_state.as_ref().map(|x| prep.checkpoint(x)),
                states,
                d_final_state: d_final_state.clone(),
                output: o.shape(),
                params,
            };
            prep.finish(saved, o)
        }
        OpsKind::UnTracked(prep) => prep.finish(o),
    };
    let final_state = match FinalState.prepare::<C>([o.node()]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((d_final_state, o.dtype()), final_state),
        OpsKind::UnTracked(prep) => prep.finish(final_state),
    };
    [o, final_state]
}

/// The final state depends on the inputs only by way of the operator's node, which runs after this one.
#[derive(Debug)]
struct FinalState;

impl<B: KdaOps> Backward<B, 1> for FinalState {
    /// And the dtype of the output.
    type State = (FinalStateCotangent<B>, DType);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let d_final_state = grads.consume::<B>(&ops.node);
        if let [Some(operator)] = ops.parents {
            // A node runs only if it has a gradient: one zero, which any gradient of the output absorbs.
            let (cotangent, dtype) = ops.state;
            let zero = B::float_zeros([1; 4].into(), &d_final_state.device(), dtype.into());
            grads.register::<B>(operator.id, zero);
            *cotangent.lock().expect("no panic while the lock is held") = Some(d_final_state);
        }
    }
}

#[derive(Debug)]
struct Operator;

impl<B: KdaOps> Backward<B, 6> for Operator {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 6>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Saved { inputs, initial_state, states, d_final_state, output, params } = ops.state;
        let d_o = Some(grads.consume::<B>(&ops.node)).filter(|d_o| d_o.shape() == output);
        let d_final_state = d_final_state.lock().expect("no panic while the lock is held").take();
        let [q, k, v, g, beta] = inputs.map(|id| checkpointer.retrieve_node_output(id));
        let inputs = KdaTensors { q, k, v, g, beta };
        let initial_state = initial_state.map(|id| checkpointer.retrieve_node_output(id));
        let [q, k, v, g, beta, state] = ops.parents.each_ref().map(Option::is_some);
        let wanted = WantedGradients { q, k, v, g, beta, initial_state: state && initial_state.is_some() };
        let KdaGradients { q, k, v, g, beta, initial_state } =
            B::kda_backward(inputs, initial_state.into(), states, d_o.into(), d_final_state.into(), params, wanted);
        for (parent, gradient) in ops.parents.into_iter().zip([q, k, v, g, beta, initial_state]) {
            if let (Some(parent), Some(gradient)) = (parent, gradient.into_option()) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}
