//! Flex: the native kernels on its buffers.

use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Element, TensorData};
use bytemuck::Pod;
use ndarray::{Array4, ArrayViewD, IxDyn, ShapeBuilder};

use crate::native::{self, Outputs, Real, Views};
use crate::ops::{KdaOps, KdaTensors, MaybeTensor, recurrence};
use crate::plain::SEGMENT_TOKENS;

tensor_bridge!(Flex);

impl KdaOps for Flex {
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

fn forward<T: Real + Element + Pod>(
    KdaTensors { q, k, v, g, beta }: KdaTensors<Flex>,
    initial_state: MaybeTensor<Flex>,
    scale: f64,
    keep_states: bool,
) -> (FlexTensor, FlexTensor, MaybeTensor<Flex>) {
    let inputs = [q, k, v, g, beta].map(viewable::<T>);
    let initial_state = initial_state.into_option().map(viewable::<T>);
    let of = |x| view::<T>(x).expect("viewable");
    let views = Views::new(inputs.each_ref().map(of), initial_state.as_ref().map(of));
    let Outputs { o, final_state, kept } = native::forward(&views, scale, keep_states.then_some(SEGMENT_TOKENS));
    (tensor(o), tensor(final_state), kept.map(tensor).into())
}

/// The tensor in place; none if it is flipped.
fn view<T: Element + Pod>(tensor: &FlexTensor) -> Option<ArrayViewD<'_, T>> {
    let layout = tensor.layout();
    let strides: Vec<_> = layout.strides().iter().map(|&x| usize::try_from(x).ok()).collect::<Option<_>>()?;
    let shape = IxDyn(&layout.shape()[..]).strides(IxDyn(&strides));
    ArrayViewD::from_shape(shape, &tensor.storage::<T>()[layout.start_offset()..]).ok()
}

fn viewable<T: Element + Pod>(tensor: FlexTensor) -> FlexTensor {
    if view::<T>(&tensor).is_some() { tensor } else { tensor.to_contiguous() }
}

fn tensor<T: Element>(array: Array4<T>) -> FlexTensor {
    let shape = array.shape().to_vec();
    FlexTensor::from_data(TensorData::new(array.into_raw_vec_and_offset().0, shape))
}
