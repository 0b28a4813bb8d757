//! Gradients of the chunked WY form: segments, tiles and chunks in reverse, each computed again from its inputs and the
//! state before its segment.

use burn::tensor::Tensor;

use super::forward::{Advance, advance, chunk_forward, nth};
use super::intra::{Chunk, Intra, IntraCotangents, unstack};
use super::tiles::{Segment, Tile, Tiling, chunked, lanes_of, unchunked};
use crate::functions::{Dims, KdaInput, pad_time};
use crate::ops::WantedGradients;

/// The backward pass solves with the inverse of a chunk twice, so it needs shorter chunks for the same error.
const GRADIENT_ROWS: usize = 8;

/// Cotangents of the results; none is zero.
pub(crate) struct Cotangents {
    /// `[B, T, HV, V]`.
    pub o: Option<Tensor<4>>,
    /// `[B, HV, K, V]`.
    pub final_state: Option<Tensor<4>>,
}

/// As [`KdaGradients`](crate::ops::KdaGradients).
#[derive(Default)]
pub(crate) struct Gradients {
    pub q: Option<Tensor<4>>,
    pub k: Option<Tensor<4>>,
    pub v: Option<Tensor<4>>,
    pub g: Option<Tensor<4>>,
    pub beta: Option<Tensor<3>>,
    pub initial_state: Option<Tensor<4>>,
}

/// The wanted gradients.
///
/// `states` is what [`chunk_forward`] kept; it runs again without.
pub(crate) fn chunk_backward(
    input: KdaInput,
    initial_state: Option<Tensor<4>>,
    states: Option<Tensor<4>>,
    cotangents: Cotangents,
    scale: f64,
    chunk_size: usize,
    wanted: WantedGradients,
) -> Gradients {
    let dims @ Dims { batch, time, heads, value_heads, key_dim, value_dim } = input.dims();
    let tiling = Tiling::backward(dims, chunk_size.min(GRADIENT_ROWS), &input.q.device());
    let lanes = dims.lanes();
    let spans = tiling.segments(time);
    let states = match states {
        None if spans.len() > 1 => chunk_forward(input.clone(), initial_state.clone(), scale, chunk_size, true).1,
        states => states,
    };
    let of_lanes = |state: Tensor<4>| state.reshape([lanes, key_dim, value_dim]);
    let initial_state = initial_state.map(of_lanes);
    let d_o = match cotangents.o {
        Some(d_o) => d_o * scale,
        None => input.v.zeros_like(),
    };
    let d_final_state: Option<Tensor<3>> = cotangents.final_state.map(of_lanes);
    let mut d_states: Vec<_> =
        tiling.tiles(lanes).map(|lanes| d_final_state.clone().map(|d_state| d_state.slice_dim(0, lanes))).collect();

    let mut gradients: [Vec<Tensor<4>>; 5] = Default::default();
    for (n, span) in spans.enumerate().rev() {
        let chunks = span.len().div_ceil(tiling.chunk);
        let state: Option<Tensor<3>> = match n {
            0 => initial_state.clone(),
            _ => states.as_ref().map(|states| states.clone().slice_dim(0, n - 1..n).squeeze_dim(0)),
        };
        let d_o = pad_time(d_o.clone().slice_dim(1, span.clone()), chunks * tiling.chunk);
        let d_o = chunked(d_o, tiling.chunk);
        let segment = Segment::new(&input, span.clone(), tiling.chunk);

        let mut tiles: [Vec<Tensor<3>>; 5] = Default::default();
        for (lanes, d_state) in tiling.tiles(lanes).zip(&mut d_states) {
            let state = state.clone().map(|state| state.slice_dim(0, lanes.clone()));
            let of_tile = tile_backward(
                segment.tile(lanes.clone()),
                lanes_of(d_o.clone(), lanes),
                state,
                d_state,
                chunks,
                wanted,
            );
            tiles.iter_mut().zip(of_tile).for_each(|(tiles, gradient)| tiles.extend(gradient));
        }
        for (gradient, tiles) in gradients.iter_mut().zip(tiles) {
            if !tiles.is_empty() {
                gradient.push(unchunked(tiles, chunks, batch).slice_dim(1, 0..span.len()));
            }
        }
    }

    let [q, k, v, g, beta] = gradients.map(|mut segments| {
        segments.reverse();
        (!segments.is_empty()).then(|| Tensor::cat(segments, 1))
    });
    let group = value_heads / heads;
    let of_heads = |x: Tensor<4>| match group {
        1 => x,
        _ => x.reshape([batch, time, heads, group, key_dim]).sum_dim(3).squeeze_dim(3),
    };
    let initial_state = wanted.initial_state.then(|| {
        Tensor::cat(d_states.into_iter().map(|d_state| d_state.expect("T >= 1")).collect(), 0).reshape([
            batch,
            value_heads,
            key_dim,
            value_dim,
        ])
    });
    Gradients { q: q.map(of_heads), k: k.map(of_heads), v, g, beta: beta.map(|x| x.squeeze_dim(3)), initial_state }
}

/// The wanted gradients of `q`, `k`, `v`, `g` and `beta` of one tile, `[chunks * lanes, C, ..]`; `d_state` is the cotangent of the
/// state after the tile on entry, of the state before it on return.
fn tile_backward(
    tile: Tile,
    d_o: Tensor<3>,
    mut state: Option<Tensor<3>>,
    d_state: &mut Option<Tensor<3>>,
    chunks: usize,
    wanted: WantedGradients,
) -> [Option<Tensor<3>>; 5] {
    let Tile { qk, v, g, beta } = tile;
    let (intra, trace) = Intra::traced(qk, g, beta.clone());

    let mut steps = Vec::with_capacity(chunks);
    for i in 0..chunks {
        let chunk = intra.chunk(i, chunks);
        let advance = advance(&chunk, nth(&v, i, chunks), state.clone());
        let before = state.replace(advance.next.clone());
        steps.push((chunk, before, advance));
    }
    let mut steps: Vec<_> = (steps.into_iter().enumerate().rev())
        .map(|(i, (chunk, before, advance))| Step::back(chunk, before, advance, nth(&d_o, i, chunks), d_state))
        .collect();
    steps.reverse();
    let all = |of: fn(&Step) -> &Tensor<3>| Tensor::cat(steps.iter().map(|step| of(step).clone()).collect(), 0);

    let (write, d_error) = (all(|step| &step.write), all(|step| &step.d_error));
    let d_beta = wanted.beta.then(|| {
        // The error that `beta` scales: without what the chunk's earlier writes have taken from it already.
        let left = all(|step| &step.error) - intra.taken_by(write.clone());
        (all(|step| &step.d_solve) * left).sum_dim(2)
    });
    let d_v = wanted.v.then(|| d_error.clone());
    if !(wanted.q || wanted.k || wanted.g) {
        return [None, None, d_v, None, d_beta];
    }
    let d_reads = reads(d_o, d_error);
    let [dq, dk, dg] = trace.backward(IntraCotangents {
        scores: d_reads.matmul(write.swap_dims(1, 2).unsqueeze_dim(0)),
        from_start: Tensor::cat(steps.iter().map(|step| step.d_from_start.clone()).collect(), 1),
        k_to_end: all(|step| &step.d_k_to_end),
        log_decay: all(|step| &step.d_log_decay),
    });
    [wanted.q.then_some(dq), wanted.k.then_some(dk), d_v, wanted.g.then_some(dg), d_beta]
}

/// Cotangents of what queries and keys read, `[2, M, C, V]`: what keys read is subtracted from the values.
fn reads(d_o: Tensor<3>, d_error: Tensor<3>) -> Tensor<4> {
    Tensor::stack(vec![d_o, d_error.neg()], 0)
}

/// The backward pass of [`advance`] and of the read, of one chunk of some lanes.
struct Step {
    error: Tensor<3>,
    write: Tensor<3>,
    /// Of `beta error`, `[lanes, C, V]`.
    d_solve: Tensor<3>,
    /// Of `error`, and so of `v`, `[lanes, C, V]`.
    d_error: Tensor<3>,
    /// As [`IntraCotangents`], of one chunk.
    d_from_start: Tensor<4>,
    d_k_to_end: Tensor<3>,
    d_log_decay: Tensor<3>,
}

impl Step {
    /// `before` is the state before the chunk; `d_state` the cotangent of the state after it, and before it on return.
    fn back(
        chunk: Chunk,
        before: Option<Tensor<3>>,
        advance: Advance,
        d_o: Tensor<3>,
        d_state: &mut Option<Tensor<3>>,
    ) -> Self {
        let Advance { error, write, .. } = advance;
        let mut d_write = chunk.scores_qk.swap_dims(1, 2).matmul(d_o.clone());
        let d_after = d_state.take();
        let d_k_to_end = match &d_after {
            Some(d_after) => {
                d_write = d_write + chunk.k_to_end.clone().matmul(d_after.clone());
                write.clone().matmul(d_after.clone().swap_dims(1, 2))
            }
            None => chunk.k_to_end.zeros_like(),
        };
        let d_solve = chunk.inverse.swap_dims(1, 2).matmul(d_write);
        let d_error = d_solve.clone() * chunk.beta;

        let [lanes, _, key_dim] = chunk.k_to_end.dims();
        let mut d_from_start = chunk.from_start.zeros_like();
        let mut d_log_decay = Tensor::zeros([lanes, 1, key_dim], (&d_o.device(), d_o.dtype()));
        let d_reads = reads(d_o, d_error.clone());
        if let Some(before) = before {
            d_from_start = d_reads.clone().matmul(before.clone().swap_dims(1, 2).unsqueeze_dim(0));
            if let Some(d_after) = &d_after {
                d_log_decay = ((before * d_after.clone()).sum_dim(2) * chunk.decay.clone().exp_g()).swap_dims(1, 2);
            }
        }
        let [by_q, by_k] = unstack(chunk.from_start.swap_dims(2, 3).matmul(d_reads));
        let d_before = by_q + by_k;
        *d_state = Some(match d_after {
            Some(d_after) => chunk.decay.apply(d_after) + d_before,
            None => d_before,
        });
        Self { error, write, d_solve, d_error, d_from_start, d_k_to_end, d_log_decay }
    }
}
