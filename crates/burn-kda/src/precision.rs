//! Which dtype the arithmetic runs in.

use burn::tensor::DType;

/// f64 for f64 tensors, f32 for every other float dtype.
pub(crate) fn accumulation(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
