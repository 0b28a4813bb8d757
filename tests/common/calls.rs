//! A sequence cut into calls that hand the state on.

use std::ops::Range;

use burn::tensor::Tensor;
use burn_kda::{KdaInput, KdaOutput};

use super::operator::{Form, Problem, Tensors};

/// The bounds of every way to cut `len` tokens into calls.
pub fn every_split(len: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..1_usize << (len - 1)).map(move |cuts| {
        let inner = (1..len).filter(|t| cuts >> (t - 1) & 1 == 1);
        std::iter::once(0).chain(inner).chain([len]).collect()
    })
}

/// One call per span of `bounds`, by the forms in turn.
pub fn run_in_calls(
    problem: &Problem,
    Tensors { input, mut state }: Tensors,
    bounds: &[usize],
    forms: &[Form],
) -> KdaOutput {
    let mut outputs = Vec::new();
    for (span, &form) in bounds.windows(2).zip(forms.iter().cycle()) {
        let output = problem.run(form, Tensors { input: rows(&input, span[0]..span[1]), state });
        outputs.push(output.o);
        state = Some(output.final_state);
    }
    KdaOutput { o: Tensor::cat(outputs, 1), final_state: state.expect("a call") }
}

fn rows(input: &KdaInput, span: Range<usize>) -> KdaInput {
    KdaInput {
        q: input.q.clone().slice_dim(1, span.clone()),
        k: input.k.clone().slice_dim(1, span.clone()),
        v: input.v.clone().slice_dim(1, span.clone()),
        g: input.g.clone().slice_dim(1, span.clone()),
        beta: input.beta.clone().slice_dim(1, span),
    }
}
