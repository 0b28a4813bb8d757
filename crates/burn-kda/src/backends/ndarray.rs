//! NdArray: the native kernels on its arrays.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_ndarray::{NdArray, NdArrayTensor, SharedArray};
use ndarray::Array4;

use crate::native::{self, Outputs, Real, Views};
use crate::ops::{KdaOps, KdaTensors, MaybeTensor, recurrence};
use crate::plain::SEGMENT_TOKENS;

tensor_bridge!(NdArray);

impl KdaOps for NdArray {
    fn kda_chunk(
        inputs: KdaTensors<Self>,
        initial_state: MaybeTensor<Self>,
        scale: f64,
        _chunk_size: usize,
        keep_states: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>) {
        match inputs.q.dtype() {
            DType::F64 => forward::<f64>(inputs, initial_state, scale, keep_states),
            _ => forward::<f32>(inputs, initial_state, scale, keep_states),
        }
    }

    /// Many tokens by the definition, which the kernels are compared with; one token, a decoding step, by the kernels.
    fn kda_recurrent(
        inputs: KdaTensors<Self>,
        initial_state: MaybeTensor<Self>,
        scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if inputs.q.shape()[1] > 1 {
            return recurrence(inputs, initial_state, scale);
        }
        let (o, final_state, _) = Self::kda_chunk(inputs, initial_state, scale, 1, false);
        (o, final_state)
    }
}

fn forward<T: Element>(
    KdaTensors { q, k, v, g, beta }: KdaTensors<NdArray>,
    initial_state: MaybeTensor<NdArray>,
    scale: f64,
    keep_states: bool,
) -> (NdArrayTensor, NdArrayTensor, MaybeTensor<NdArray>) {
    let inputs = [q, k, v, g, beta].map(T::array);
    let initial_state = initial_state.into_option().map(T::array);
    let views = Views::new(inputs.each_ref().map(|x| x.view()), initial_state.as_ref().map(|x| x.view()));
    let Outputs { o, final_state, kept } = native::forward(&views, scale, keep_states.then_some(SEGMENT_TOKENS));
    (T::tensor(o), T::tensor(final_state), kept.map(T::tensor).into())
}

/// The arrays of tensors whose dtype is known.
trait Element: Real {
    fn array(tensor: NdArrayTensor) -> SharedArray<Self>;
    fn tensor(array: Array4<Self>) -> NdArrayTensor;
}

macro_rules! element {
    ($float:ty, $variant:ident) => {
        impl Element for $float {
            fn array(tensor: NdArrayTensor) -> SharedArray<Self> {
                match tensor {
                    NdArrayTensor::$variant(storage) => storage.into_shared(),
                    _ => unreachable!("all inputs have one dtype"),
                }
            }

            fn tensor(array: Array4<Self>) -> NdArrayTensor {
                array.into_dyn().into_shared().into()
            }
        }
    };
}

element!(f32, F32);
element!(f64, F64);
