//! Sequences packed along the time axis, as FLA's `cu_seqlens`.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use super::problem::{KdaInput, KdaOutput};

pub(crate) fn check_cu_seqlens(function: &str, bounds: &[usize], time: usize) {
    assert!(bounds.len() >= 2, "{function}: `cu_seqlens` must have N + 1 entries for N >= 1 sequences, got {bounds:?}",);
    assert!(bounds[0] == 0, "{function}: `cu_seqlens` must start at 0, got {}", bounds[0]);
    if let Some(i) = (1..bounds.len()).find(|&i| bounds[i] < bounds[i - 1]) {
        panic!("{function}: `cu_seqlens` must not decrease, got {} after {} at index {i}", bounds[i], bounds[i - 1]);
    }
    let end = bounds[bounds.len() - 1];
    assert!(end == time, "{function}: `cu_seqlens` must end at T = {time}, got {end}");
}

/// Runs each sequence of a packed batch from its own state.
///
/// Sequences whose lengths round up to one number run together, padded with rows that change nothing
/// (`k = 0`, `beta = 0`, `g = 0`), so a call costs one batch per distinct rounded length.
pub(crate) fn run(
    input: KdaInput,
    states: Option<Tensor<4>>,
    bounds: &[usize],
    form: impl Fn(KdaInput, Option<Tensor<4>>) -> KdaOutput,
) -> KdaOutput {
    let spans: Vec<_> = bounds.windows(2).map(|pair| (pair[0], pair[1])).collect();
    let mut batches = BTreeMap::<usize, Vec<usize>>::new();
    for (n, (start, end)) in spans.iter().enumerate() {
        batches.entry(rounded_len(end - start)).or_default().push(n);
    }

    let mut outputs = vec![None; spans.len()];
    let mut finals = vec![None; spans.len()];
    for (len, members) in batches {
        let batch =
            KdaInput::cat(members.iter().map(|&n| input.slice_time(spans[n].0, spans[n].1).pad_time(len)).collect());
        let state = states
            .as_ref()
            .map(|states| Tensor::cat(members.iter().map(|&n| states.clone().slice_dim(0, n..n + 1)).collect(), 0));
        let result = form(batch, state);
        for (row, &n) in members.iter().enumerate() {
            let live = spans[n].1 - spans[n].0;
            outputs[n] = Some(result.o.clone().slice([row..row + 1, 0..live]));
            finals[n] = Some(result.final_state.clone().slice_dim(0, row..row + 1));
        }
    }
    KdaOutput {
        o: Tensor::cat(outputs.into_iter().flatten().collect(), 1),
        final_state: Tensor::cat(finals.into_iter().flatten().collect(), 0),
    }
}

/// The next multiple of 16, or power of two for short sequences: few batches, little padding.
fn rounded_len(len: usize) -> usize {
    len.next_multiple_of(len.next_power_of_two().min(16))
}

impl KdaInput {
    /// Appends rows that change nothing until the time axis has `len` rows.
    pub(crate) fn pad_time(self, len: usize) -> Self {
        Self {
            q: pad_time(self.q, len),
            k: pad_time(self.k, len),
            v: pad_time(self.v, len),
            g: pad_time(self.g, len),
            beta: pad_time(self.beta, len),
        }
    }

    fn cat(inputs: Vec<Self>) -> Self {
        let stack = |field: fn(&Self) -> Tensor<4>| Tensor::cat(inputs.iter().map(field).collect(), 0);
        Self {
            q: stack(|x| x.q.clone()),
            k: stack(|x| x.k.clone()),
            v: stack(|x| x.v.clone()),
            g: stack(|x| x.g.clone()),
            beta: Tensor::cat(inputs.iter().map(|x| x.beta.clone()).collect(), 0),
        }
    }
}

/// Appends zeros until the time axis, the second, has `len` rows.
pub(crate) fn pad_time<const D: usize>(x: Tensor<D>, len: usize) -> Tensor<D> {
    let mut shape = x.dims();
    if shape[1] == len {
        return x;
    }
    shape[1] = len - shape[1];
    let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
    Tensor::cat(vec![x, zeros], 1)
}
