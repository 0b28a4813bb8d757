//! Flex: the native kernels on its buffers.

use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Element, TensorData};
use bytemuck::Pod;
use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD, IxDyn, ShapeBuilder};

use super::native::{self, Host, native_ops};
use crate::gate::DecayFn;
use crate::native::Real;
use crate::ops::{self, ConvParams, KdaGradients, KdaOps, KdaParams, KdaTensors, MaybeTensor, Mode, WantedGradients};

tensor_bridge!(Flex);
native_ops!(Flex);

impl<T: Real + Element + Pod> Host<T> for Flex {
    /// A tensor that can be viewed.
    type Held = FlexTensor;

    fn hold(tensor: FlexTensor) -> FlexTensor {
        if view::<T>(&tensor).is_some() { tensor } else { tensor.to_contiguous() }
    }

    fn view(held: &FlexTensor) -> ArrayViewD<'_, T> {
        view(held).expect("viewable")
    }

    fn is_own(held: &mut FlexTensor) -> bool {
        held.is_unique() && held.is_contiguous() && held.storage::<T>().len() == held.layout().num_elements()
    }

    fn view_mut(held: &mut FlexTensor) -> ArrayViewMutD<'_, T> {
        let shape = IxDyn(&held.layout().shape()[..]);
        if !<Self as Host<T>>::is_own(held) {
            // Not Flex's own copy, which is of everything that the tensor is a part of.
            *held = Self::from_array(<Self as Host<T>>::view(held).as_standard_layout().into_owned());
        }
        ArrayViewMutD::from_shape(shape, held.storage_mut::<T>()).expect("contiguous")
    }

    fn release(held: FlexTensor) -> FlexTensor {
        held
    }

    fn from_array(array: ArrayD<T>) -> FlexTensor {
        let shape = array.shape().to_vec();
        FlexTensor::from_data(TensorData::new(array.into_raw_vec_and_offset().0, shape))
    }
}

/// The tensor in place; none if it is flipped.
fn view<T: Element + Pod>(tensor: &FlexTensor) -> Option<ArrayViewD<'_, T>> {
    let layout = tensor.layout();
    let strides: Vec<_> = layout.strides().iter().map(|&x| usize::try_from(x).ok()).collect::<Option<_>>()?;
    let shape = IxDyn(&layout.shape()[..]).strides(IxDyn(&strides));
    ArrayViewD::from_shape(shape, &tensor.storage::<T>()[layout.start_offset()..]).ok()
}
