//! One file per backend that does more than run the plain algorithm.

#[cfg(feature = "autodiff")]
mod autodiff;

/// A backend of Burn's dispatch as one of the operator; with the plain algorithm unless it says otherwise.
#[allow(unused_macros)] // Without a backend feature there is none.
macro_rules! tensor_bridge {
    ($backend:ty) => {
        impl crate::ops::TensorBridge for $backend {
            fn tensor<const D: usize>(primitive: burn::backend::tensor::FloatTensor<Self>) -> burn::tensor::Tensor<D> {
                burn::tensor::Tensor::from_primitive::<Self>(primitive)
            }

            fn primitive<const D: usize>(tensor: burn::tensor::Tensor<D>) -> burn::backend::tensor::FloatTensor<Self> {
                tensor.try_into_primitive::<Self>().expect("a tensor of this backend")
            }
        }
    };
}

#[cfg(feature = "ndarray")]
#[allow(deprecated)]
mod ndarray {
    use burn::backend::NdArray;

    tensor_bridge!(NdArray);
    impl crate::ops::KdaOps for NdArray {}
}

#[cfg(feature = "flex")]
mod flex {
    use burn::backend::Flex;

    tensor_bridge!(Flex);
    impl crate::ops::KdaOps for Flex {}
}

#[cfg(any(
    feature = "cuda",
    feature = "rocm",
    feature = "metal",
    feature = "vulkan",
    feature = "wgpu",
    feature = "webgpu",
    feature = "cpu",
))]
mod cubecl {
    use burn::backend::Cube;

    tensor_bridge!(Cube);
    impl crate::ops::KdaOps for Cube {}
}
