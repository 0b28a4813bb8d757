//! How a problem is cut: chunks of rows, segments of chunks, tiles of lanes. A lane is one value head of one batch row.

use std::ops::Range;

use burn::tensor::{Device, Tensor};

use crate::functions::{Dims, KdaInput};

/// Longer chunks are not faster on a CPU, and in f32 they lose digits where keys nearly repeat and little decays: the
/// inverse of a chunk grows with its rows (`longer_chunks_are_exact_but_lose_digits`).
pub(super) const EXACT_ROWS: usize = 16;

/// Tokens of a segment: whole chunks of any size. Forward and backward passes have the same segments, and the state
/// before each is what the second needs of the first.
pub(crate) const SEGMENT_TOKENS: usize = 128;

/// Sizes chosen so that the working tensors of one tile stay in cache and do not grow with `T`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiling {
    /// Rows of a chunk.
    pub chunk: usize,
    /// Lanes of a tile.
    pub tile: usize,
}

impl Tiling {
    pub fn new(dims: Dims, chunk_size: usize, device: &Device) -> Self {
        Self::with_rows(dims, chunk_size.min(EXACT_ROWS), device)
    }

    /// Chunks of up to `max_rows`; a sequence shorter than a chunk gets a smaller one.
    pub fn with_rows(dims: Dims, max_rows: usize, device: &Device) -> Self {
        let Dims { time, key_dim, value_dim, .. } = dims;
        let chunk = max_rows.min(time.next_power_of_two());
        let (width, lanes) = (key_dim.max(value_dim), dims.lanes());
        let tile = (tile_elements(device) / (width * time.min(SEGMENT_TOKENS))).clamp(1, lanes);
        Self { chunk, tile }
    }

    pub fn tiles(&self, lanes: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
        ranges(lanes, self.tile)
    }
}

pub(super) fn segments(time: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
    ranges(time, SEGMENT_TOKENS)
}

/// `0..len` in ranges of `step`.
fn ranges(len: usize, step: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
    (0..len.div_ceil(step)).map(move |i| i * step..len.min((i + 1) * step))
}

/// Working tensors that small are read back from the cache of one CPU core; an accelerator wants large launches.
fn tile_elements(device: &Device) -> usize {
    let name = format!("{device:?}");
    if name.contains("NdArray") || name.contains("Flex") { 1 << 15 } else { 1 << 22 }
}

/// The inputs of one segment in chunks, `[N, lanes, C, D]`: chunk-major, so that one chunk of all lanes is one slice.
/// The last chunk is padded with rows that change nothing.
pub(super) struct Segment {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    g: Tensor<4>,
    beta: Tensor<4>,
}

/// The part of a [`Segment`] that some lanes hold, `[N * lanes, C, D]`.
pub(super) struct Tile {
    /// `[2, N * lanes, C, K]`.
    pub qk: Tensor<4>,
    pub v: Tensor<3>,
    pub g: Tensor<3>,
    /// `[N * lanes, C, 1]`.
    pub beta: Tensor<3>,
}

impl Segment {
    /// The rows `span` of `input`.
    pub fn new(input: &KdaInput, span: Range<usize>, chunk: usize) -> Self {
        let Dims { heads, value_heads, .. } = input.dims();
        let padded = span.len().next_multiple_of(chunk);
        let KdaInput { q, k, v, g, beta } = input.slice_time(span.start, span.end).pad_time(padded);
        let group = value_heads / heads;
        Self {
            q: per_value_head(chunked(q, chunk), group),
            k: per_value_head(chunked(k, chunk), group),
            v: chunked(v, chunk),
            g: chunked(g, chunk),
            beta: chunked(beta.unsqueeze_dim(3), chunk),
        }
    }

    pub fn tile(&self, lanes: Range<usize>) -> Tile {
        let [q, k, v, g, beta] =
            [&self.q, &self.k, &self.v, &self.g, &self.beta].map(|x| lanes_of(x.clone(), lanes.clone()));
        Tile { qk: Tensor::stack(vec![q, k], 0), v, g, beta }
    }
}

/// Some lanes of all chunks: `[N, all lanes, C, D]` to `[N * lanes, C, D]`.
pub(super) fn lanes_of(x: Tensor<4>, lanes: Range<usize>) -> Tensor<3> {
    let [chunks, _, rows, dim] = x.dims();
    let count = lanes.len();
    x.slice_dim(1, lanes).reshape([chunks * count, rows, dim])
}

/// `[B, N * C, H, D]` to `[N, B * H, C, D]`.
pub(super) fn chunked(x: Tensor<4>, chunk: usize) -> Tensor<4> {
    let [batch, time, heads, dim] = x.dims();
    let chunks = time / chunk;
    let x = x.reshape([batch, chunks, chunk, heads, dim]).permute([1, 0, 3, 2, 4]);
    materialize(x, [chunks, batch * heads, chunk, dim])
}

/// The inverse of [`chunked`] for tiles that together hold all lanes.
pub(super) fn unchunked(tiles: Vec<Tensor<3>>, chunks: usize, batch: usize) -> Tensor<4> {
    let tiles = tiles.into_iter().map(|x| {
        let [blocks, rows, dim] = x.dims();
        x.reshape([chunks, blocks / chunks, rows, dim])
    });
    let x = Tensor::cat(tiles.collect(), 1);
    let [_, lanes, rows, dim] = x.dims();
    let heads = lanes / batch;
    let x = x.reshape([chunks, batch, heads, rows, dim]).permute([1, 0, 3, 2, 4]);
    materialize(x, [batch, chunks * rows, heads, dim])
}

/// Repeats each query or key head for the value heads that read it.
fn per_value_head(x: Tensor<4>, group: usize) -> Tensor<4> {
    let [chunks, lanes, rows, dim] = x.dims();
    match group {
        1 => x,
        _ => x.unsqueeze_dim::<5>(2).expand([chunks, lanes, group, rows, dim]).reshape([
            chunks,
            lanes * group,
            rows,
            dim,
        ]),
    }
}

/// Reshapes a permuted tensor. The sum lays it out row by row; `reshape` alone would copy element by element on
/// NdArray and Flex, five times slower.
fn materialize<const D: usize, const D2: usize>(x: Tensor<D>, shape: [usize; D2]) -> Tensor<D2> {
    let zero = Tensor::zeros([1; D], (&x.device(), x.dtype()));
    (x + zero).reshape(shape)
}
