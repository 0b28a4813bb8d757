//! Gradients of the recurrence, one task per value head of a batch row.

use ndarray::{Array4, ArrayView2, ArrayView4, ArrayViewMut2, ArrayViewMut4, Axis, s};

use super::forward::{forward, groups};
use super::lane::{Group, Lane};
use super::pages::unwritten;
use super::work::{cut, run_all};
use super::{Gradients, OfOutput, Real, Views};
use crate::ops::WantedGradients;

/// The wanted gradients from the cotangents of output and final state; a missing cotangent is zero. `kept` is what [`forward`]
/// kept; it runs again without.
pub(crate) fn backward<T: Real>(
    inputs: &Views<T>,
    kept: Option<ArrayView2<T>>,
    d_o: OfOutput<T>,
    d_final_state: Option<ArrayView4<T>>,
    scale: f64,
    wanted: WantedGradients,
) -> Gradients<T> {
    let (batch, time, heads, key_dim) = inputs.q.dim();
    let (_, _, value_heads, value_dim) = inputs.v.dim();
    let (lanes, group) = (batch * value_heads, value_heads / heads);
    let of_output = match &d_o {
        OfOutput::Zero => None,
        OfOutput::Given(d_o) => Some(d_o.dim()),
        OfOutput::ForValues(d_o) => Some(d_o.dim()),
    };
    assert!(of_output.is_none_or(|shape| shape == inputs.v.dim()), "the cotangent of the output, in its shape");
    let again = if kept.is_none() { forward(inputs, scale, true).kept } else { None };
    let kept = kept.or(again.as_ref().map(|kept| kept.view())).expect("kept just now");
    let (states_shape, errors_shape) = inputs.kept_shapes();

    // Of queries and keys as each value head reads them.
    let per_value_head = || unwritten::<T, _>([batch, time, value_heads, key_dim]);
    let [mut q, mut k, mut g] = [wanted.q, wanted.k, wanted.g].map(|wanted| wanted.then(per_value_head));
    let (given, replaced) = match d_o {
        OfOutput::Zero => (None, None),
        OfOutput::Given(d_o) => (Some(d_o), None),
        OfOutput::ForValues(dv) => (None, Some(dv)),
    };
    let mut v = (wanted.v && replaced.is_none()).then(|| unwritten([batch, time, value_heads, value_dim]));
    let mut beta = wanted.beta.then(|| unwritten([batch, time, value_heads]));
    let mut initial_state = wanted.initial_state.then(|| unwritten([batch, value_heads, key_dim, value_dim]));
    let tasks = {
        let [mut dq, mut dk, mut dv, mut dg] =
            [&mut q, &mut k, &mut v, &mut g].map(|x| parts(x.as_mut().map(|x| x.view_mut()), Axis(2)));
        let mut replaced = parts(replaced, Axis(2));
        let mut d_state = parts(initial_state.as_mut().map(|x| x.view_mut()), Axis(1));
        let mut d_beta = beta.iter_mut().flat_map(|beta| {
            cut(beta.view_mut(), Axis(0), 1).flat_map(|x| cut(x, Axis(2), 1)).map(|x| x.slice_move(s![0, .., 0]))
        });
        let tasks = (0..lanes).map(|lane| {
            let (b, hv) = (lane / value_heads, lane % value_heads);
            let (states, errors) =
                kept.index_axis_move(Axis(0), lane).split_at(Axis(0), states_shape.0 * key_dim * value_dim);
            Lane {
                q: inputs.q.slice(s![b, .., hv / group, ..]),
                k: inputs.k.slice(s![b, .., hv / group, ..]),
                g: inputs.g.slice(s![b, .., hv, ..]),
                beta: inputs.beta.slice(s![b, .., hv]),
                state: inputs.initial_state.as_ref().map(|state| state.slice(s![b, hv, .., ..])),
                kept: states.into_shape_with_order(states_shape).expect("so many numbers"),
                errors: errors.into_shape_with_order(errors_shape).expect("so many numbers"),
                d_o: match (given, replaced.next()) {
                    (_, Some(dv)) => OfOutput::ForValues(dv),
                    (Some(d_o), None) => OfOutput::Given(d_o.slice_move(s![b, .., hv, ..])),
                    (None, None) => OfOutput::Zero,
                },
                d_final_state: d_final_state.as_ref().map(|d_state| d_state.slice(s![b, hv, .., ..])),
                scale: T::from(scale).expect("a float"),
                dq: dq.next(),
                dk: dk.next(),
                dv: dv.next(),
                dg: dg.next(),
                d_beta: d_beta.next(),
                d_state: d_state.next(),
            }
        });
        groups(tasks, lanes, Group)
    };
    run_all(tasks, lanes * time * key_dim * value_dim);

    let of_heads = |x: Array4<T>| match group {
        1 => x,
        _ => {
            let grouped = x.into_shape_with_order((batch, time, heads, group, key_dim)).expect("row-major");
            grouped.sum_axis(Axis(3))
        }
    };
    // SAFETY: the tasks have all lanes between them, and each writes every token of the gradients that are wanted of it, and
    // that of its state.
    #[allow(unsafe_code)]
    unsafe {
        Gradients {
            q: q.map(|q| of_heads(q.assume_init())),
            k: k.map(|k| of_heads(k.assume_init())),
            v: v.map(|v| v.assume_init()),
            g: g.map(|g| g.assume_init()),
            beta: beta.map(|beta| beta.assume_init()),
            initial_state: initial_state.map(|state| state.assume_init()),
        }
    }
}

/// The matrices of a wanted gradient, one per lane; `heads` is its axis of heads.
fn parts<T>(gradient: Option<ArrayViewMut4<T>>, heads: Axis) -> impl Iterator<Item = ArrayViewMut2<T>> {
    gradient.into_iter().flat_map(move |gradient| {
        cut(gradient, Axis(0), 1)
            .flat_map(move |row| cut(row, heads, 1))
            .map(move |lane| lane.index_axis_move(heads, 0).index_axis_move(Axis(0), 0))
    })
}
