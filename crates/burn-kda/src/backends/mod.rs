//! One file per backend that does more than run the plain algorithm.

/// [`TensorBridge`](crate::TensorBridge) of a backend of Burn's dispatch.
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
#[cfg(feature = "autodiff")]
mod autodiff;

#[cfg(any(feature = "ndarray", feature = "flex"))]
mod native;

// Burn's NdArray is deprecated in favour of Flex; this crate supports both.
#[cfg(feature = "ndarray")]
#[allow(deprecated)]
mod ndarray;

#[cfg(feature = "flex")]
mod flex;

#[cfg(feature = "cubecl")]
mod cubecl;

// The operations of the plain algorithm are what a server or a replay runs: neither has to know this crate.
#[cfg(feature = "remote")]
mod remote {
    tensor_bridge!(burn::backend::Remote);
    impl crate::ops::KdaOps for burn::backend::Remote {}
}
#[cfg(feature = "capture")]
mod capture {
    tensor_bridge!(burn::backend::Capture);
    impl crate::ops::KdaOps for burn::backend::Capture {}
}
