//! Elements of tensors in whatever float dtype they have; the arithmetic is f32.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;

/// Dtypes of a kernel's tensors: `q`, `k`, `v` and the output; `g`; `beta`. States are f32.
pub(super) type Dtypes = [ElemType; 3];

pub(super) fn dtypes(qkv: DType, g: DType, beta: DType) -> Dtypes {
    [qkv, g, beta].map(float)
}

/// Whether the kernels read and write it.
pub(crate) fn has_kernels(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

pub(super) fn float(dtype: DType) -> ElemType {
    ElemType::Float(match dtype {
        DType::F32 => FloatKind::F32,
        DType::F16 => FloatKind::F16,
        DType::BF16 => FloatKind::BF16,
        _ => unreachable!("the kernels have no plan for {dtype:?}"),
    })
}

/// A kernel's argument that may be missing.
pub(super) fn maybe<T: From<Option<TensorArg>>>(tensor: &Option<CubeTensor>) -> T {
    tensor.clone().map(CubeTensor::into_tensor_arg).into()
}

/// Wide enough for every tensor of a launch.
pub(super) fn address<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> AddressType {
    tensors.into_iter().map(CubeTensor::required_address_type).max().unwrap_or_default()
}

/// `cubes` cubes of `units` units in a row.
pub(super) fn grid(client: &Client, cubes: usize, units: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(units as u32);
    (calculate_cube_count_elemwise(client, cubes * units, dim), dim)
}

#[cube]
pub(super) fn read<X: Float>(from: &Tensor<X>, a: usize, b: usize, c: usize, d: usize) -> f32 {
    f32::cast_from(from[at(from, a, b, c, d)])
}

#[cube]
pub(super) fn write<X: Float>(to: &mut Tensor<X>, a: usize, b: usize, c: usize, d: usize, value: f32) {
    let place = at(&*to, a, b, c, d);
    to[place] = X::cast_from(value);
}

#[cube]
fn at<X: Float>(x: &Tensor<X>, a: usize, b: usize, c: usize, d: usize) -> usize {
    a * x.stride(0) + b * x.stride(1) + c * x.stride(2) + d * x.stride(3)
}

/// Of a tensor `[B, T, HV]`.
#[cube]
pub(super) fn beta_of<B: Float>(beta: &Tensor<B>, batch: usize, t: usize, head: usize) -> f32 {
    f32::cast_from(beta[batch * beta.stride(0) + t * beta.stride(1) + head * beta.stride(2)])
}

/// As [`beta_of`]: CUDA's allocator pads rows.
#[cube]
pub(super) fn write_beta<B: Float>(to: &mut Tensor<B>, batch: usize, t: usize, head: usize, value: f32) {
    let place = batch * to.stride(0) + t * to.stride(1) + head * to.stride(2);
    to[place] = B::cast_from(value);
}

/// What the tiles of value channels have left, together.
#[cube]
pub(super) fn over_tiles(sums: &Tensor<f32>, at: usize, tiles: usize, tile_size: usize) -> f32 {
    let mut sum = 0.0f32;
    for tile in 0..tiles {
        sum += sums[tile * tile_size + at];
    }
    sum
}
