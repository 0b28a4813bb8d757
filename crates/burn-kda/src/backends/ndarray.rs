//! NdArray: the native kernels on its arrays.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_ndarray::{NdArray, NdArrayTensor, SharedArray};
use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD};

use super::native::{self, Host, native_ops};
use crate::gate::DecayFn;
use crate::ops::{self, ConvParams, KdaGradients, KdaOps, KdaParams, KdaTensors, MaybeTensor, Mode, WantedGradients};

tensor_bridge!(NdArray);
native_ops!(NdArray);

macro_rules! host {
    ($float:ty, $variant:ident) => {
        impl Host<$float> for NdArray {
            type Held = SharedArray<$float>;

            fn hold(tensor: NdArrayTensor) -> Self::Held {
                match tensor {
                    NdArrayTensor::$variant(storage) => storage.into_shared(),
                    _ => unreachable!("all inputs have one dtype"),
                }
            }

            fn view(held: &Self::Held) -> ArrayViewD<'_, $float> {
                held.view()
            }

            fn is_own(held: &mut Self::Held) -> bool {
                held.is_unique() && held.is_standard_layout()
            }

            fn view_mut(held: &mut Self::Held) -> ArrayViewMutD<'_, $float> {
                held.view_mut()
            }

            fn release(held: Self::Held) -> NdArrayTensor {
                held.into()
            }

            fn from_array(array: ArrayD<$float>) -> NdArrayTensor {
                array.into_shared().into()
            }
        }
    };
}

host!(f32, F32);
host!(f64, F64);
