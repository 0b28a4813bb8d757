//! Gradients of the recurrence, one task per value head of a batch row.

use ndarray::{Array3, Array4, ArrayView4, Axis, s};

use super::forward::{cut, forward, run_all};
use super::lane::Lane;
use super::{Gradients, KEEP_EVERY, Real, Views};

/// Gradients from the cotangents of output and final state; a missing cotangent is zero. `kept` is what [`forward`]
/// kept every [`KEEP_EVERY`] tokens; it runs again without.
pub(crate) fn backward<T: Real>(
    inputs: &Views<T>,
    kept: Option<ArrayView4<T>>,
    d_o: Option<ArrayView4<T>>,
    d_final_state: Option<ArrayView4<T>>,
    scale: f64,
) -> Gradients<T> {
    let (batch, time, heads, key_dim) = inputs.q.dim();
    let (_, _, value_heads, value_dim) = inputs.v.dim();
    let (lanes, group) = (batch * value_heads, value_heads / heads);
    let again = match &kept {
        None if time > KEEP_EVERY => forward(inputs, scale, Some(KEEP_EVERY)).kept,
        _ => None,
    };
    let kept = kept.or(again.as_ref().map(|kept| kept.view()));

    // Of queries and keys as each value head reads them.
    let per_value_head = || Array4::<T>::zeros([batch, time, value_heads, key_dim]);
    let (mut q, mut k, mut g) = (per_value_head(), per_value_head(), per_value_head());
    let mut v = Array4::zeros([batch, time, value_heads, value_dim]);
    let mut beta = Array3::zeros([batch, time, value_heads]);
    let mut state = Array4::zeros([batch, value_heads, key_dim, value_dim]);
    let tasks: Vec<_> = {
        let [mut dq, mut dk, mut dv, mut dg] = [&mut q, &mut k, &mut v, &mut g].map(|x| {
            cut(x.view_mut(), Axis(0), 1).flat_map(|x| cut(x, Axis(2), 1)).map(|x| x.slice_move(s![0, .., 0, ..]))
        });
        let mut d_beta =
            cut(beta.view_mut(), Axis(0), 1).flat_map(|x| cut(x, Axis(2), 1)).map(|x| x.slice_move(s![0, .., 0]));
        let d_states =
            cut(state.view_mut(), Axis(0), 1).flat_map(|x| cut(x, Axis(1), 1)).map(|x| x.slice_move(s![0, 0, .., ..]));
        d_states
            .enumerate()
            .map(|(lane, d_state)| {
                let (b, hv) = (lane / value_heads, lane % value_heads);
                Lane {
                    q: inputs.q.slice(s![b, .., hv / group, ..]),
                    k: inputs.k.slice(s![b, .., hv / group, ..]),
                    v: inputs.v.slice(s![b, .., hv, ..]),
                    g: inputs.g.slice(s![b, .., hv, ..]),
                    beta: inputs.beta.slice(s![b, .., hv]),
                    state: inputs.initial_state.as_ref().map(|state| state.slice(s![b, hv, .., ..])),
                    kept: kept.as_ref().map(|kept| kept.slice(s![.., lane, .., ..])),
                    d_o: d_o.as_ref().map(|d_o| d_o.slice(s![b, .., hv, ..])),
                    d_final_state: d_final_state.as_ref().map(|d_state| d_state.slice(s![b, hv, .., ..])),
                    scale: T::from(scale).expect("a float"),
                    dq: dq.next().expect("one per lane"),
                    dk: dk.next().expect("one per lane"),
                    dv: dv.next().expect("one per lane"),
                    dg: dg.next().expect("one per lane"),
                    d_beta: d_beta.next().expect("one per lane"),
                    d_state,
                }
            })
            .collect()
    };
    run_all(tasks, lanes * time * key_dim * value_dim, Lane::run);

    let of_heads = |x: Array4<T>| match group {
        1 => x,
        _ => {
            let grouped = x.into_shape_with_order((batch, time, heads, group, key_dim)).expect("row-major");
            grouped.sum_axis(Axis(3))
        }
    };
    let initial_state = inputs.initial_state.is_some().then_some(state);
    Gradients { q: of_heads(q), k: of_heads(k), v, g, beta, initial_state }
}
