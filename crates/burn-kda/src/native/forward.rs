//! One task per value head of a batch row, or per part of its columns where there are fewer heads than cores.

use ndarray::{Axis, s};

use super::pages::unwritten;
use super::task::{Group, Task};
use super::work::{cut, run_all};
use super::{Outputs, Real, Views};

/// Columns of a task at least, so that what all columns share is not computed too often.
const COLUMNS: usize = 64;

/// Tasks that take turns at most: a state is fetched again for every turn.
const GROUP: usize = 16;

/// Output, final state and, if asked for, what the backward pass would compute again.
pub(crate) fn forward<T: Real>(inputs: &Views<T>, scale: f64, keep: bool) -> Outputs<T> {
    let (batch, time, heads, key_dim) = inputs.q.dim();
    let (_, _, value_heads, value_dim) = inputs.v.dim();
    let lanes = batch * value_heads;
    let group = value_heads / heads;
    let scale = T::from(scale).expect("a float");

    let mut o = unwritten([batch, time, value_heads, value_dim]);
    let mut final_state = unwritten([batch, value_heads, key_dim, value_dim]);
    let (states_shape, errors_shape) = inputs.kept_shapes();
    let of_states = states_shape.0 * key_dim * value_dim;
    let mut kept = keep.then(|| unwritten([lanes, of_states + time * value_dim]));

    let threads = rayon::current_num_threads();
    let columns = if threads == 1 || lanes >= 4 * threads { value_dim } else { COLUMNS };
    let lane = |lane: usize| (lane / value_heads, lane % value_heads);
    let parts =
        |lane: usize| (0..value_dim).step_by(columns).map(move |start| (lane, start..value_dim.min(start + columns)));
    let o_parts = cut(o.view_mut(), Axis(0), 1).flat_map(|o| cut(o, Axis(2), 1)).flat_map(|o| cut(o, Axis(3), columns));
    let final_parts = cut(final_state.view_mut(), Axis(0), 1)
        .flat_map(|state| cut(state, Axis(1), 1))
        .flat_map(|state| cut(state, Axis(3), columns));
    let mut kept_parts = kept.iter_mut().flat_map(|kept| kept.rows_mut()).flat_map(|kept| {
        let (states, errors) = kept.split_at(Axis(0), of_states);
        let states = states.into_shape_with_order(states_shape).expect("so many numbers");
        let errors = errors.into_shape_with_order(errors_shape).expect("so many numbers");
        cut(states, Axis(2), columns).zip(cut(errors, Axis(1), columns))
    });
    let tasks = ((0..lanes).flat_map(parts).zip(o_parts).zip(final_parts)).map(|(((l, part), o), final_state)| {
        let (b, hv) = lane(l);
        Task {
            q: inputs.q.slice(s![b, .., hv / group, ..]),
            k: inputs.k.slice(s![b, .., hv / group, ..]),
            v: inputs.v.slice(s![b, .., hv, part.clone()]),
            g: inputs.g.slice(s![b, .., hv, ..]),
            beta: inputs.beta.slice(s![b, .., hv]),
            state: inputs.initial_state.as_ref().map(|state| state.slice(s![b, hv, .., part])),
            scale,
            o: o.slice_move(s![0, .., 0, ..]),
            final_state: final_state.slice_move(s![0, 0, .., ..]),
            kept: kept_parts.next(),
        }
    });
    let count = lanes * value_dim.div_ceil(columns);
    let groups = groups(tasks, count, Group);
    drop(kept_parts);
    run_all(groups, lanes * time * key_dim * value_dim);
    // SAFETY: the tasks have all lanes and columns between them, and each writes every token of its outputs, its final state
    // and, if they are kept, the state before every `KEEP_EVERY`th token and the errors of every token.
    #[allow(unsafe_code)]
    unsafe {
        Outputs {
            o: o.assume_init(),
            final_state: final_state.assume_init(),
            kept: kept.map(|kept| kept.assume_init()),
        }
    }
}

/// Tasks that take turns, `count` all in all, in as few groups as give each thread the same. With more, a thread that comes
/// late would matter less, but two heads in turn are up to a fifth slower than four.
pub(super) fn groups<T, G>(tasks: impl Iterator<Item = T>, count: usize, group: impl Fn(Vec<T>) -> G) -> Vec<G> {
    let mut tasks = tasks.peekable();
    let threads = rayon::current_num_threads();
    let size = count.div_ceil(threads * count.div_ceil(threads * GROUP).max(1)).max(1);
    std::iter::from_fn(|| {
        tasks.peek()?;
        Some(group(tasks.by_ref().take(size).collect()))
    })
    .collect()
}
