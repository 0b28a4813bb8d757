//! One operator problem through every form of the operator, forward and backward.

use burn::tensor::{DType, Device, Tensor};
use burn_kda::{KdaInput, KdaOptions, KdaOutput, chunk_kda, fla_read_scale, kda_step, recurrent_kda};

use super::array::{Array, gradient};
use super::compare::Report;
use super::definition::definition;
use super::fixture::Case;
use super::platform;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    Chunk(usize),
    Recurrent,
    Step,
    /// Not of the crate: see [`definition`].
    Definition,
}

pub const CHUNKS: [Form; 3] = [Form::Chunk(16), Form::Chunk(32), Form::Chunk(64)];
pub const FORMS: [Form; 5] = [CHUNKS[0], CHUNKS[1], CHUNKS[2], Form::Recurrent, Form::Step];

/// Inputs, cotangents and right answers.
#[derive(Clone)]
pub struct Problem {
    pub name: String,
    /// What errors are grouped by when they are printed.
    pub group: String,
    pub q: Array,
    pub k: Array,
    pub v: Array,
    pub g: Array,
    pub beta: Array,
    pub initial_state: Option<Array>,
    pub scale: Option<f64>,
    pub cu_seqlens: Option<Vec<usize>>,
    pub d_o: Array,
    pub d_final_state: Array,
    pub o: Array,
    pub final_state: Array,
    /// Of q, k, v, g, beta and the initial state, if there is one.
    pub gradients: Vec<(&'static str, Array)>,
    /// The state is reflected without contracting: see [`platform::reflecting_bar`].
    pub reflecting: bool,
}

#[derive(Clone)]
pub struct Tensors {
    pub input: KdaInput,
    pub state: Option<Tensor<4>>,
}

impl Problem {
    pub fn of_fixture(case: &Case) -> Self {
        let initial_state = case.find("initial_state");
        let mut gradients: Vec<_> = [("dq", "q"), ("dk", "k"), ("dv", "v"), ("dg", "g"), ("dbeta", "beta")]
            .map(|(d, _)| (d, case.get(d)))
            .into();
        if initial_state.is_some() {
            gradients.push(("dinitial_state", case.get("dinitial_state")));
        }
        let cu_seqlens = case.option("cu_seqlens").as_array();
        Self {
            name: case.name.clone(),
            group: case.text("regime").into(),
            q: case.get("q"),
            k: case.get("k"),
            v: case.get("v"),
            g: case.get("g"),
            beta: case.get("beta"),
            initial_state,
            scale: case.option("scale").as_f64(),
            cu_seqlens: cu_seqlens.map(|bounds| bounds.iter().map(|x| x.as_u64().unwrap() as usize).collect()),
            d_o: case.get("do"),
            d_final_state: case.get("dht"),
            o: case.get("o"),
            final_state: case.get("final_state"),
            gradients,
            reflecting: case.text("beta_kind") == "near_two" && case.text("key_kind").ends_with("identical"),
        }
    }

    /// The same sequences `times` over in one batch, each time with other powers of two before what the answers are
    /// linear in, so that rows that change places are seen.
    pub fn repeated(mut self, times: usize) -> Self {
        // Periods that share no factor with a number of rows that are worked on together.
        let of_values = |n: usize| [1.0, -2.0, 0.5, -1.0, 2.0][n % 5];
        let of_cotangents = |n: usize| [1.0, 2.0, -1.0][n % 3];
        let of_both = |n: usize| of_values(n) * of_cotangents(n);
        let repeat = |array: &mut Array, factor: &dyn Fn(usize) -> f64| {
            array.shape[0] *= times;
            array.values = (0..times).flat_map(|n| array.values.iter().map(move |x| x * factor(n))).collect();
        };
        for array in [&mut self.q, &mut self.k, &mut self.g, &mut self.beta] {
            repeat(array, &|_| 1.0);
        }
        let state = self.initial_state.iter_mut();
        for array in [&mut self.v, &mut self.o, &mut self.final_state].into_iter().chain(state) {
            repeat(array, &of_values);
        }
        for array in [&mut self.d_o, &mut self.d_final_state] {
            repeat(array, &of_cotangents);
        }
        for (name, gradient) in &mut self.gradients {
            match *name {
                "dv" | "dinitial_state" => repeat(gradient, &of_cotangents),
                _ => repeat(gradient, &of_both),
            }
        }
        self
    }

    /// One batch row after `tokens` rows that change nothing, so that the initial state comes a long way undiminished.
    pub fn delayed(mut self, tokens: usize) -> Self {
        let state = self.initial_state.as_ref().expect("a state that waits");
        let (_, d_state) = self.gradients.iter().find(|(name, _)| *name == "dinitial_state").expect("its gradient");
        let [1, .., value_dim] = state.shape[..] else { panic!("one batch row, not {:?}", state.shape) };
        // The decay of such a row is a factor of the initial state; nothing else of it has a gradient.
        let products: Vec<_> = state.values.iter().zip(&d_state.values).map(|(s, d_s)| s * d_s).collect();
        let dg: Vec<f64> = products.chunks(value_dim).map(|row| row.iter().sum()).collect();

        let delay = |array: &mut Array, row: &[f64]| {
            array.shape[1] += tokens;
            array.values.splice(0..0, row.repeat(tokens));
        };
        let nothing = |array: &mut Array| delay(array, &vec![0.0; array.shape[2..].iter().product()]);
        let Self { q, k, v, g, beta, d_o, o, .. } = &mut self;
        [q, k, v, g, beta, d_o, o].into_iter().for_each(nothing);
        for (name, gradient) in &mut self.gradients {
            match *name {
                "dinitial_state" => {}
                "dg" => delay(gradient, &dg),
                _ => nothing(gradient),
            }
        }
        self
    }

    /// Every form on every platform, forward; and backward through those that are differentiable as a whole.
    pub fn check(&self, forms: &[Form], report: &mut Report) {
        for (platform, device, dtype) in platform::platforms() {
            let bar = if self.reflecting { platform::reflecting_bar(dtype) } else { platform::bar(dtype) };
            for &form in forms {
                let group = format!("{platform} {}", self.group);
                let what = |tensor: &str| format!("{} {form:?} {tensor}", self.name);
                let output = self.run(form, self.constants(&device, dtype));
                report.check(&group, what("o"), &Array::of(output.o), &self.o, dtype, bar);
                report.check(
                    &group,
                    what("final_state"),
                    &Array::of(output.final_state),
                    &self.final_state,
                    dtype,
                    bar,
                );
                if form == Form::Step {
                    continue;
                }
                for ((name, got), (_, want)) in self.backward(form, &device, dtype).iter().zip(&self.gradients) {
                    report.check(&group, what(name), got, want, dtype, bar);
                }
            }
        }
    }

    /// Gradients of `<o, d_o> + <final state, d_final_state>`, in the order of `gradients`.
    pub fn backward(&self, form: Form, device: &Device, dtype: DType) -> Vec<(&'static str, Array)> {
        let leaves = self.leaves(device, dtype);
        let output = self.run(form, leaves.clone());
        let device = device.clone().autodiff();
        let loss = (output.o * self.d_o.tensor(&device, dtype)).sum()
            + (output.final_state * self.d_final_state.tensor(&device, dtype)).sum();
        let gradients = loss.backward();
        let KdaInput { q, k, v, g, beta } = &leaves.input;
        let mut all = vec![
            ("dq", gradient(q, &gradients)),
            ("dk", gradient(k, &gradients)),
            ("dv", gradient(v, &gradients)),
            ("dg", gradient(g, &gradients)),
            ("dbeta", gradient(beta, &gradients)),
        ];
        if let Some(state) = &leaves.state {
            all.push(("dinitial_state", gradient(state, &gradients)));
        }
        all
    }

    pub fn constants(&self, device: &Device, dtype: DType) -> Tensors {
        Tensors {
            input: KdaInput {
                q: self.q.tensor(device, dtype),
                k: self.k.tensor(device, dtype),
                v: self.v.tensor(device, dtype),
                g: self.g.tensor(device, dtype),
                beta: self.beta.tensor(device, dtype),
            },
            state: self.initial_state.as_ref().map(|state| state.tensor(device, dtype)),
        }
    }

    pub fn leaves(&self, device: &Device, dtype: DType) -> Tensors {
        let Tensors { input, state } = self.constants(&device.clone().autodiff(), dtype);
        Tensors {
            input: KdaInput {
                q: input.q.require_grad(),
                k: input.k.require_grad(),
                v: input.v.require_grad(),
                g: input.g.require_grad(),
                beta: input.beta.require_grad(),
            },
            state: state.map(Tensor::require_grad),
        }
    }

    pub fn run(&self, form: Form, Tensors { input, state }: Tensors) -> KdaOutput {
        let mut options = KdaOptions::default();
        (options.scale, options.initial_state, options.cu_seqlens) = (self.scale, state, self.cu_seqlens.clone());
        match form {
            Form::Chunk(size) => chunk_kda(input, options.with_chunk_size(size)),
            Form::Recurrent => recurrent_kda(input, options),
            Form::Step => steps(input, options),
            Form::Definition => definition(input, options),
        }
    }
}

/// One `kda_step` per token, each sequence from its own state.
fn steps(KdaInput { q, k, v, g, beta }: KdaInput, options: KdaOptions) -> KdaOutput {
    let [batch, time, _, key_dim] = q.dims();
    let [_, _, value_heads, value_dim] = v.dims();
    let scale = options.scale.unwrap_or_else(|| fla_read_scale(key_dim));
    let bounds = options.cu_seqlens.clone().unwrap_or_else(|| vec![0, time]);
    let sequences = if options.cu_seqlens.is_some() { bounds.len() - 1 } else { batch };
    let states = options
        .initial_state
        .unwrap_or_else(|| Tensor::zeros([sequences, value_heads, key_dim, value_dim], (&v.device(), v.dtype())));

    let at = |x: &Tensor<4>, t: usize| x.clone().slice_dim(1, t..t + 1).squeeze_dim::<3>(1);
    let (mut outputs, mut finals) = (Vec::new(), Vec::new());
    for (n, span) in bounds.windows(2).enumerate() {
        let mut state = states.clone().slice_dim(0, n..n + batch);
        for t in span[0]..span[1] {
            let beta = beta.clone().slice_dim(1, t..t + 1).squeeze_dim::<2>(1);
            let (o, next) = kda_step(state, at(&q, t), at(&k, t), at(&v, t), at(&g, t), beta, scale);
            outputs.push(o.unsqueeze_dim::<4>(1));
            state = next;
        }
        finals.push(state);
    }
    KdaOutput { o: Tensor::cat(outputs, 1), final_state: Tensor::cat(finals, 0) }
}
