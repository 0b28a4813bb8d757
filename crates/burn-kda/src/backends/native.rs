//! [`KdaOps`] by the native kernels, for backends whose tensors lie in this process's memory.

use burn::backend::tensor::FloatTensor;
use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD, IxDyn};

use crate::native::{self, Gradients, KEEP_EVERY, OfOutput, Outputs, Real, Views};
use crate::ops::{KdaGradients, KdaOps, KdaTensors, MaybeTensor, WantedGradients};

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
    let initial_state = initial_state.into_option().map(B::hold);
    if B::view(&inputs[0]).shape()[1] == 1 {
        let (o, state) = step::<B, T>(inputs, initial_state, scale);
        return (o, state, None.into());
    }
    let views = Views::new(inputs.each_ref().map(B::view), initial_state.as_ref().map(B::view));
    let Outputs { o, final_state, kept } = native::forward(&views, scale, keep_states.then_some(KEEP_EVERY));
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
    let initial_state = initial_state.into_option().map(B::hold);
    let views = Views::new(inputs.each_ref().map(B::view), initial_state.as_ref().map(B::view));
    let [d_o, d_final_state] = cotangents;
    let [states, mut d_o, d_final_state] = [states, d_o, d_final_state].map(|x| x.into_option().map(B::hold));
    let view = |held| native::four(B::view(held));
    // Both have one shape: the gradient of the values takes the memory of a cotangent that nothing else needs.
    let in_place = wanted.v && d_o.as_mut().is_some_and(B::is_own);
    let of_output = match &mut d_o {
        Some(d_o) if in_place => OfOutput::ForValues(native::four(B::view_mut(d_o))),
        Some(d_o) => OfOutput::Given(view(d_o)),
        None => OfOutput::Zero,
    };
    let (kept, d_final_state) = (states.as_ref().map(view), d_final_state.as_ref().map(view));
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
        }
    };
}
pub(super) use native_ops;
