//! The chunked WY form: segments in turn, tile by tile, chunk by chunk. Exact for every decay, because [`Intra`] is.

use burn::tensor::Tensor;

use super::intra::{Chunk, Intra};
use super::tiles::{EXACT_ROWS, SEGMENT_TOKENS, Segment, Tile, Tiling, unchunked};
use crate::functions::{Dims, KdaInput, KdaOutput};

/// Output, final state and, with `keep_states`, the states the backward pass starts from: before every
/// [`SEGMENT_TOKENS`]th token but the first, `[N, lanes, K, V]`.
pub(crate) fn chunk_forward(
    input: KdaInput,
    state: Option<Tensor<4>>,
    scale: f64,
    chunk_size: usize,
    keep_states: bool,
) -> (KdaOutput, Option<Tensor<4>>) {
    let tiling = Tiling::forward(input.dims(), chunk_size.min(EXACT_ROWS), &input.q.device());
    forward(input, state, scale, tiling, keep_states)
}

fn forward(
    input: KdaInput,
    state: Option<Tensor<4>>,
    scale: f64,
    tiling: Tiling,
    keep_states: bool,
) -> (KdaOutput, Option<Tensor<4>>) {
    let dims @ Dims { batch, time, value_heads, key_dim, value_dim, .. } = input.dims();
    let lanes = dims.lanes();
    let mut states: Vec<Option<Tensor<3>>> = match state {
        Some(state) => {
            let state: Tensor<3> = state.reshape([lanes, key_dim, value_dim]);
            tiling.tiles(lanes).map(|lanes| Some(state.clone().slice_dim(0, lanes))).collect()
        }
        None => vec![None; tiling.tiles(lanes).len()],
    };
    let all_lanes = |states: &[Option<Tensor<3>>]| Tensor::cat(states.iter().flatten().cloned().collect::<Vec<_>>(), 0);

    let mut outputs = Vec::new();
    let mut kept = Vec::new();
    for span in tiling.segments(time) {
        if keep_states && span.start > 0 && span.start.is_multiple_of(SEGMENT_TOKENS) {
            kept.push(all_lanes(&states));
        }
        let chunks = span.len().div_ceil(tiling.chunk);
        let segment = Segment::new(&input, span, tiling.chunk);
        let tiles = tiling.tiles(lanes).zip(&mut states).map(|(lanes, state)| scan(segment.tile(lanes), state, chunks));
        outputs.push(unchunked(tiles.collect(), chunks, batch));
    }
    let kept = (!kept.is_empty()).then(|| Tensor::stack(kept, 0));
    let o = Tensor::cat(outputs, 1).reshape([batch, time.next_multiple_of(tiling.chunk), value_heads * value_dim]);
    let output = KdaOutput {
        // Reshaped last: a slice leaves a batch of one with a stride of 0 on NdArray, whose sums over such a tensor go
        // another way round, so that a sequence alone would differ from the same one in a batch in the last bit.
        o: (o.slice_dim(1, 0..time) * scale).reshape([batch, time, value_heads, value_dim]),
        final_state: all_lanes(&states).reshape([batch, value_heads, key_dim, value_dim]),
    };
    (output, kept)
}

/// Takes the state of a tile's lanes through its chunks; returns the unscaled outputs `[chunks * lanes, C, V]`.
fn scan(tile: Tile, state: &mut Option<Tensor<3>>, chunks: usize) -> Tensor<3> {
    let Tile { qk, v, g, beta } = tile;
    let intra = Intra::new(qk, g, beta);
    let outputs = (0..chunks).map(|i| {
        let chunk = intra.chunk(i, chunks);
        let Advance { read, write, next, .. } = advance(&chunk, nth(&v, i, chunks), state.take());
        *state = Some(next);
        let o = chunk.scores_qk.matmul(write);
        match read {
            Some(read) => o + read,
            None => o,
        }
    });
    Tensor::cat(outputs.collect(), 0)
}

/// The blocks of chunk `i` of `chunks`.
pub(super) fn nth(x: &Tensor<3>, i: usize, chunks: usize) -> Tensor<3> {
    let lanes = x.dims()[0] / chunks;
    x.clone().slice_dim(0, i * lanes..(i + 1) * lanes)
}

/// What one chunk does to the state of some lanes.
pub(super) struct Advance {
    /// `(q exp(G)) S`, `[lanes, C, V]`; none without a state.
    pub read: Option<Tensor<3>>,
    /// `v - (k exp(G)) S`, `[lanes, C, V]`: what the values differ from the state's prediction.
    pub error: Tensor<3>,
    /// `(I + A_kk)^-1 (beta error)`, `[lanes, C, V]`.
    pub write: Tensor<3>,
    /// `[lanes, K, V]`.
    pub next: Tensor<3>,
}

/// Without a state there is nothing to read or to erase, and the first decay has no effect at all.
pub(super) fn advance(chunk: &Chunk, v: Tensor<3>, state: Option<Tensor<3>>) -> Advance {
    let (read, error) = match &state {
        Some(state) => {
            let [read, predicted] = chunk.read(state);
            (Some(read), v - predicted)
        }
        None => (None, v),
    };
    let write = chunk.inverse.clone().matmul(error.clone() * chunk.beta.clone());
    let written = chunk.k_to_end.clone().swap_dims(1, 2).matmul(write.clone());
    let next = match state {
        Some(state) => chunk.decay.clone().apply(state) + written,
        None => written,
    };
    Advance { read, error, write, next }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution};

    use super::*;
    use crate::{KdaOptions, l2_normalize, recurrent_kda};

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

    fn in_chunks(input: KdaInput, rows: usize) -> Tensor<4> {
        let tiling = Tiling::forward(input.dims(), rows, &input.q.device());
        forward(input, None, 1.0, tiling, false).0.o
    }

    #[test]
    fn longer_chunks_are_exact_but_lose_digits() {
        // Whatever else this build has, it has float64 here.
        let device = Device::flex();
        device.seed(3);
        let input = nearly_repeating_keys(&device);
        let wide = input.clone().cast(DType::F64);
        let want = recurrent_kda(wide.clone(), KdaOptions::default().with_scale(1.0)).o;
        for rows in [1, 2, 4, 8, 16, 32, 64, 128] {
            let exact = relative_rms(in_chunks(wide.clone(), rows), want.clone());
            let single = relative_rms(in_chunks(input.clone(), rows), want.clone());
            println!("chunks of {rows:3} rows: f64 {exact:.1e}, f32 {single:.1e}");
            assert!(exact <= 1e-13, "f64, {rows} rows: {exact:e}");
            assert!(rows > EXACT_ROWS || single <= 1e-6, "f32, {rows} rows: {single:e}");
        }
    }
}
