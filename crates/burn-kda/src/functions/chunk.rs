//! The chunked WY form on plain tensors: layout, tiles, and the scan over chunks. Exact for every decay, because
//! [`Intra`] is.

use std::ops::Range;

use burn::tensor::{Device, Tensor};

use super::intra::{Intra, unstack};
use super::problem::{self, Dims, KdaInput, KdaOptions, KdaOutput};

/// The operator in chunks: the form to train and prefill with (Kimi Linear, section 3; FLA's `chunk_kda`).
///
/// Takes any `T >= 0`. No decay is too strong for it: `g` may be `-inf`. Differentiable in all inputs.
///
/// # Shapes
///
/// As [`KdaInput`], [`KdaOptions`] and [`KdaOutput`] say. Arithmetic and states are f32, or f64 for f64 input.
///
/// # Panics
///
/// If a shape, a dtype or an option does not fit; the message names the argument.
pub fn chunk_kda(input: KdaInput, options: KdaOptions) -> KdaOutput {
    let exact = if input.q.device().is_autodiff() { EXACT_ROWS_WITH_GRADIENT } else { EXACT_ROWS };
    let max = options.chunk_size.min(exact);
    let padded_len = move |len: usize| len.next_multiple_of(chunk_rows(len, max));
    problem::run("chunk_kda", input, options, padded_len, move |input, state, scale| forward(input, state, scale, max))
}

/// Longer chunks are not faster on a CPU, and in f32 they lose digits where keys nearly repeat and little decays: the
/// inverse of a chunk grows with its rows (`longer_chunks_are_exact_but_lose_digits`).
const EXACT_ROWS: usize = 16;

/// The gradient passes the inverse twice: with one key for all tokens and `beta` near 1, 16 rows are at 3e-6 and 8 at
/// the bar.
const EXACT_ROWS_WITH_GRADIENT: usize = 4;

/// A sequence shorter than a chunk gets a smaller one.
fn chunk_rows(len: usize, max: usize) -> usize {
    max.min(len.next_power_of_two())
}

/// Runs time segments of whole chunks in turn, each in tiles of some lanes (a lane is one value head of one batch row),
/// so that the working tensors stay in cache and do not grow with `T`.
fn forward(input: KdaInput, state: Option<Tensor<4>>, scale: f64, max_chunk: usize) -> KdaOutput {
    let Dims { batch, time, value_heads, key_dim, value_dim, .. } = input.dims();
    let (chunk, lanes) = (chunk_rows(time, max_chunk), batch * value_heads);
    let budget = tile_elements(&input.q.device());
    let lane_elements = chunk * key_dim.max(value_dim);
    let tile = (budget / lane_elements).clamp(1, lanes);
    // Several chunks share a segment only when one tile holds all lanes.
    let segment = chunk * (budget / (lane_elements * lanes)).clamp(1, time.div_ceil(chunk));

    let state = state.map(|state| state.reshape([lanes, key_dim, value_dim]));
    let mut states = tiled(lanes, tile, |lanes| state.clone().map(|state| state.slice_dim(0, lanes)));
    drop(state);
    let outputs = tiled(time, segment, |span| {
        let input = input.slice_time(span.start, span.end);
        forward_segment(input.pad_time(span.len().next_multiple_of(chunk)), &mut states, tile, chunk)
    });
    let states = states.into_iter().map(|state| state.expect("T >= 1")).collect();
    let padded = time.next_multiple_of(chunk);
    let o = Tensor::cat(outputs, 1).reshape([batch, padded, value_heads * value_dim]).slice_dim(1, 0..time) * scale;
    KdaOutput {
        // Reshaped last: a slice leaves a batch of one with a stride of 0 on NdArray, whose sums over such a tensor go
        // another way round, so that a sequence alone would differ from the same one in a batch in the last bit.
        o: o.reshape([batch, time, value_heads, value_dim]),
        final_state: Tensor::cat(states, 0).reshape([batch, value_heads, key_dim, value_dim]),
    }
}

/// Working tensors that small are read back from the cache of one CPU core; an accelerator wants large launches.
fn tile_elements(device: &Device) -> usize {
    let name = format!("{device:?}");
    if name.contains("NdArray") || name.contains("Flex") { 1 << 15 } else { 1 << 22 }
}

/// Runs `f` over `0..len` in ranges of `tile`.
fn tiled<T>(len: usize, tile: usize, mut f: impl FnMut(Range<usize>) -> T) -> Vec<T> {
    (0..len).step_by(tile).map(|start| f(start..len.min(start + tile))).collect()
}

/// Whole chunks of all lanes: outputs `[B, T, HV, V]`, unscaled; `states` moves on, one `[lanes, K, V]` per tile.
fn forward_segment(input: KdaInput, states: &mut [Option<Tensor<3>>], tile: usize, chunk: usize) -> Tensor<4> {
    let Dims { batch, time, heads, value_heads, value_dim, .. } = input.dims();
    let group = value_heads / heads;
    let [q, k] = [input.q, input.k].map(|x| chunked(x, chunk, group));
    let [v, g, beta] = [input.v, input.g, input.beta.unsqueeze_dim(3)].map(|x| chunked(x, chunk, 1));

    let blocks = v.dims()[0];
    let mut states = states.iter_mut();
    let tile = if states.len() == 1 { blocks } else { tile };
    let outputs = tiled(blocks, tile, |blocks| {
        let [q, k, v, g, beta] = [&q, &k, &v, &g, &beta].map(|x| x.clone().slice_dim(0, blocks.clone()));
        let state = states.next().expect("one state per tile");
        let (o, next) = scan(Intra::new(Tensor::stack(vec![q, k], 0), g, beta), v, state.take(), time / chunk);
        *state = Some(next);
        o
    });
    let o = Tensor::cat(outputs, 0).reshape([time / chunk, batch, value_heads, chunk, value_dim]);
    materialize(o.permute([1, 0, 3, 2, 4]), [batch, time, value_heads, value_dim])
}

/// Takes the state of a tile's lanes through its `chunks`: unscaled outputs `[chunks * lanes, C, V]` and the new state.
fn scan(intra: Intra, v: Tensor<3>, mut state: Option<Tensor<3>>, chunks: usize) -> (Tensor<3>, Tensor<3>) {
    let lanes = v.dims()[0] / chunks;
    let outputs = tiled(lanes * chunks, lanes, |of_chunk| {
        let at = |x: &Tensor<3>| x.clone().slice_dim(0, of_chunk.clone());
        let value = at(&v);
        // Without a state there is nothing to read or to erase, and the first decay has no effect at all.
        let (read, error) = match &state {
            Some(state) => {
                let from_start = intra.qk_from_start.clone().slice_dim(1, of_chunk.clone());
                let [read, predicted] = unstack(from_start.matmul(state.clone().unsqueeze_dim(0)));
                (Some(read), value - predicted)
            }
            None => (None, value),
        };
        let write = at(&intra.inverse).matmul(error * at(&intra.beta));
        let o = at(&intra.scores).matmul(write.clone());
        let written = at(&intra.k_to_end).swap_dims(1, 2).matmul(write);
        state = Some(match state.take() {
            Some(state) => intra.decay.slice(of_chunk.clone()).apply(state) + written,
            None => written,
        });
        match read {
            Some(read) => o + read,
            None => o,
        }
    });
    (Tensor::cat(outputs, 0), state.expect("at least one chunk"))
}

/// `[B, T, H, D]` to `[N * B * H * group, C, D]`: chunk-major, so that one chunk of all heads is one slice.
fn chunked(x: Tensor<4>, chunk: usize, group: usize) -> Tensor<3> {
    let [batch, time, heads, dim] = x.dims();
    let blocks = time / chunk * batch * heads;
    let x = x.reshape([batch, time / chunk, chunk, heads, dim]).permute([1, 0, 3, 2, 4]);
    let x = materialize(x, [blocks, chunk, dim]);
    match group {
        1 => x,
        _ => x.unsqueeze_dim::<4>(1).expand([blocks, group, chunk, dim]).reshape([blocks * group, chunk, dim]),
    }
}

/// Reshapes a permuted tensor. The sum lays it out row by row; `reshape` alone would copy element by element on
/// NdArray and Flex, five times slower.
fn materialize<const D: usize, const D2: usize>(x: Tensor<D>, shape: [usize; D2]) -> Tensor<D2> {
    let zero = Tensor::zeros([1; D], (&x.device(), x.dtype()));
    (x + zero).reshape(shape)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Distribution};

    use super::*;
    use crate::{l2_normalize, recurrent_kda};

    /// Keys within 1 % of one direction, no decay, beta in (0, 2).
    fn nearly_repeating_keys(device: &Device) -> KdaInput {
        let normal = |heads, width| {
            let shape = [1, 260, heads, width];
            Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), (device, DType::F64)).cast(DType::F32)
        };
        let one = normal(2, 32).slice_dim(1, 0..1);
        KdaInput {
            q: l2_normalize(normal(2, 32)),
            k: l2_normalize(one + normal(2, 32) * 0.01),
            v: normal(2, 8),
            g: normal(2, 32).zeros_like(),
            beta: crate::write_strength(normal(2, 1).squeeze_dim(3), true),
        }
    }

    fn relative_rms(got: Tensor<4>, want: Tensor<4>) -> f64 {
        let rms = |x: Tensor<4>| x.square().mean().into_scalar::<f64>().sqrt();
        rms(got.cast(DType::F64) - want.clone()) / rms(want)
    }

    #[test]
    fn longer_chunks_are_exact_but_lose_digits() {
        let device = Device::default();
        device.seed(3);
        let input = nearly_repeating_keys(&device);
        let wide = input.clone().cast(DType::F64);
        let want = recurrent_kda(wide.clone(), KdaOptions::default().with_scale(1.0)).o;
        for rows in [1, 2, 4, 8, 16, 32, 64, 128] {
            let exact = relative_rms(forward(wide.clone(), None, 1.0, rows).o, want.clone());
            let single = relative_rms(forward(input.clone(), None, 1.0, rows).o, want.clone());
            println!("chunks of {rows:3} rows: f64 {exact:.1e}, f32 {single:.1e}");
            assert!(exact <= 1e-13, "f64, {rows} rows: {exact:e}");
            assert!(rows > EXACT_ROWS || single <= 1e-6, "f32, {rows} rows: {single:e}");
        }
    }
}
