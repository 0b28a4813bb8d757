//! How the operator stands in a graph: shared, permuted and constant inputs, several calls, recomputed activations.

use super::*;
use crate::common::array::gradient;

fn recipe() -> Recipe {
    Recipe { time: 40, key_dim: 16, value_dim: 16, decay: Decay::Uniform, ..Recipe::default() }
}

/// `<o, cotangent>` summed up.
fn loss(output: &KdaOutput, cotangent: &Array) -> Tensor<1> {
    (output.o.clone() * cotangent.tensor(&output.o.device(), output.o.dtype())).sum()
}

fn sum(arrays: &[&Array]) -> Array {
    let values = (0..arrays[0].values.len()).map(|i| arrays.iter().map(|x| x.values[i]).sum());
    Array::new(arrays[0].shape.clone(), values.collect())
}

/// One tensor as queries, keys and values.
#[test]
fn an_input_used_three_times_gets_the_sum() {
    let mut report = Report::new("gradients of a repeated input");
    let problem = Recipe { group: 1, ..recipe() }.problem();
    let x = problem.k.clone();
    let zero = Array::zeros(problem.d_final_state.shape.clone());
    let problem = with_gradients(Problem { q: x.clone(), v: x.clone(), d_final_state: zero, ..problem });
    let want = sum(&[&problem.gradients[0].1, &problem.gradients[1].1, &problem.gradients[2].1]);
    for (platform, device, dtype) in platforms() {
        let x = x.leaf::<4>(&device, dtype);
        let mut tensors = problem.constants(&device.clone().autodiff(), dtype);
        (tensors.input.q, tensors.input.k, tensors.input.v) = (x.clone(), x.clone(), x.clone());
        let gradients = loss(&problem.run(Form::Chunk(64), tensors), &problem.d_o).backward();
        report.check(&platform, "q + k + v", &gradient(&x, &gradients), &want, dtype, bar(dtype));
    }
    report.finish();
}

/// Heads before time in memory, as attention often has them, and every second row of a longer tensor.
#[test]
fn permuted_and_sliced_inputs_get_their_gradients_in_place() {
    let mut report = Report::new("gradients of strided inputs");
    let problem = with_gradients(recipe().problem());
    for (platform, device, dtype) in platforms() {
        let device = device.autodiff();
        let mut tensors = problem.constants(&device, dtype);
        let heads_first = tensors.input.k.clone().swap_dims(1, 2).require_grad();
        let longer = Tensor::stack::<5>(vec![tensors.input.v.clone(), tensors.input.v.ones_like()], 2);
        let [batch, time, _, heads, width] = longer.dims();
        let longer = longer.reshape([batch, 2 * time, heads, width]).require_grad();
        tensors.input.k = heads_first.clone().swap_dims(1, 2);
        tensors.input.v = longer.clone().reshape([batch, time, 2, heads, width]).slice_dim(2, 0..1).squeeze_dim(2);
        let output = problem.run(Form::Chunk(64), tensors);
        let total = loss(&output, &problem.d_o)
            + (output.final_state.clone() * problem.d_final_state.tensor(&device, dtype)).sum();
        let gradients = total.backward();
        let dk = Array::of(heads_first.grad(&gradients).expect("a gradient").swap_dims(1, 2));
        report.check(&platform, "dk", &dk, &problem.gradients[1].1, dtype, bar(dtype));
        let dv = longer.grad(&gradients).expect("a gradient").reshape([batch, time, 2, heads, width]);
        let [live, dead] = [0, 1].map(|i| Array::of(dv.clone().slice_dim(2, i..i + 1).squeeze_dim::<4>(2)));
        report.check(&platform, "dv", &live, &problem.gradients[2].1, dtype, bar(dtype));
        assert!(dead.values.iter().all(|&x| x == 0.0));
    }
    report.finish();
}

#[test]
fn two_calls_on_the_same_tensors_add_up() {
    let mut report = Report::new("gradients of two calls");
    let first = with_gradients(recipe().problem());
    let second = with_gradients(Problem { d_o: first.v.clone(), scale: Some(1.0), ..first.clone() });
    let zero = |problem: &Problem| Array::zeros(problem.d_final_state.shape.clone());
    let first = with_gradients(Problem { d_final_state: zero(&first), ..first });
    let second = with_gradients(Problem { d_final_state: zero(&second), ..second });
    for (platform, device, dtype) in platforms() {
        for form in [Form::Chunk(64), Form::Recurrent] {
            let leaves = first.leaves(&device, dtype);
            let outputs = [first.run(form, leaves.clone()), second.run(form, leaves.clone())];
            let gradients = (loss(&outputs[0], &first.d_o) + loss(&outputs[1], &second.d_o)).backward();
            for (i, x) in [&leaves.input.q, &leaves.input.k, &leaves.input.v, &leaves.input.g].into_iter().enumerate() {
                let (name, want) = &first.gradients[i];
                let want = sum(&[want, &second.gradients[i].1]);
                report.check(&platform, format!("{form:?} {name}"), &gradient(x, &gradients), &want, dtype, bar(dtype));
            }
        }
    }
    report.finish();
}

/// Only what asks for a gradient gets one, and it is the same as among others.
#[test]
fn each_input_alone_has_its_gradient_and_constants_have_none() {
    let problem = recipe().problem();
    for (platform, device, dtype) in platforms() {
        let all = problem.backward(Form::Chunk(64), &device, dtype);
        for (alone, (name, want)) in all.iter().enumerate() {
            let mut tensors = problem.constants(&device.clone().autodiff(), dtype);
            let Tensors { input: KdaInput { q, k, v, g, beta }, state } = &mut tensors;
            match alone {
                4 => *beta = beta.clone().require_grad(),
                _ => {
                    let of_rank_4 = [q, k, v, g, state.as_mut().expect("a state")];
                    let leaf = of_rank_4.into_iter().nth(alone.min(4)).expect("six inputs");
                    *leaf = leaf.clone().require_grad();
                }
            }
            let output = problem.run(Form::Chunk(64), tensors.clone());
            let d_final_state = problem.d_final_state.tensor(&output.o.device(), dtype);
            let gradients = (loss(&output, &problem.d_o) + (output.final_state * d_final_state).sum()).backward();

            let Tensors { input: KdaInput { q, k, v, g, beta }, state } = &tensors;
            let of = |x: &Tensor<4>| x.grad(&gradients).map(Array::of);
            let got = [of(q), of(k), of(v), of(g), beta.grad(&gradients).map(Array::of), state.as_ref().and_then(of)];
            for (i, got) in got.iter().enumerate() {
                assert_eq!(got.is_some(), i == alone, "{platform}: {name} alone, gradient {i}");
            }
            assert_eq!(got[alone].as_ref().expect("just checked").values, want.values, "{platform}: {name}");
        }
    }
}

/// Inputs that the graph computes again instead of keeping them.
#[test]
fn checkpointed_inputs_have_the_same_gradients() {
    let problem = recipe().problem();
    for (platform, device, dtype) in platforms() {
        let [kept, recomputed] =
            [device.clone().autodiff(), device.autodiff().gradient_checkpointing()].map(|device| {
                let mut tensors = problem.constants(&device, dtype);
                let leaf = tensors.input.k.clone().require_grad();
                tensors.input.k = leaf.clone() * 2.0 * 0.5;
                tensors.input.g =
                    tensors.input.g - leaf.clone().abs().repeat_dim(2, problem.g.shape[2] / problem.k.shape[2]);
                let gradients = loss(&problem.run(Form::Chunk(64), tensors), &problem.d_o).backward();
                gradient(&leaf, &gradients)
            });
        assert_eq!(kept.values, recomputed.values, "{platform}");
        assert!(kept.values.iter().any(|&x| x != 0.0));
    }
}
