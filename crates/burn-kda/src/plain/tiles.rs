//! How a problem is cut: chunks of rows, segments of chunks, tiles of lanes. A lane is one value head of one batch row.

use std::ops::Range;

use burn::tensor::{Device, Tensor};

use crate::functions::{Dims, KdaInput};

/// Longer chunks are not faster on a CPU, and in f32 they lose digits where keys nearly repeat and little decays: the
/// inverse of a chunk grows with its rows (`longer_chunks_are_exact_but_lose_digits`).
pub(super) const EXACT_ROWS: usize = 16;

/// The backward pass runs over segments of this many tokens, whole chunks of any size, and starts each from the state
/// before it.
pub(crate) const SEGMENT_TOKENS: usize = 128;

/// Sizes chosen so that the working tensors of one tile stay in cache and do not grow with `T`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiling {
    /// Rows of a chunk.
    pub chunk: usize,
    /// Tokens of a segment: whole chunks, and [`SEGMENT_TOKENS`] or a power of two below.
    segment: usize,
    /// Lanes of a tile.
    tile: usize,
}

impl Tiling {
    /// Short segments of many lanes: few operations per token.
    pub fn forward(dims: Dims, max_rows: usize, device: &Device) -> Self {
        let tokens = tile_elements(device) / (dims.width() * dims.lanes());
        let segment = (tokens / 2 + 1).next_power_of_two().clamp(chunk_rows(dims, max_rows), SEGMENT_TOKENS);
        Self::new(dims, max_rows, segment, device)
    }

    /// Long segments of few lanes: few states to keep.
    pub fn backward(dims: Dims, max_rows: usize, device: &Device) -> Self {
        Self::new(dims, max_rows, SEGMENT_TOKENS, device)
    }

    fn new(dims: Dims, max_rows: usize, segment: usize, device: &Device) -> Self {
        let elements_of_lane = dims.width() * segment.min(dims.time);
        let tile = (tile_elements(device) / elements_of_lane).clamp(1, dims.lanes());
        Self { chunk: chunk_rows(dims, max_rows), segment, tile }
    }

    pub fn segments(&self, time: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
        ranges(time, self.segment)
    }

    pub fn tiles(&self, lanes: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
        ranges(lanes, self.tile)
    }
}

/// A sequence shorter than a chunk gets a smaller one.
fn chunk_rows(dims: Dims, max_rows: usize) -> usize {
    max_rows.min(dims.time.next_power_of_two())
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
