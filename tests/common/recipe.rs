//! Seeded problems in every decay regime, key kind and write strength, solved by the definition in f64 scalars.

use burn::tensor::{DType, Distribution, TensorData};
use rand::{SeedableRng, rngs::StdRng};

use super::array::Array;
use super::operator::Problem;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    Mild,
    Zero,
    Tiny,
    Uniform,
    Constant,
    Strong,
    Extreme,
    Split,
    Spikes,
    Reset,
    HardReset,
}

impl Decay {
    pub const ALL: [Self; 11] = [
        Self::Mild,
        Self::Zero,
        Self::Tiny,
        Self::Uniform,
        Self::Constant,
        Self::Strong,
        Self::Extreme,
        Self::Split,
        Self::Spikes,
        Self::Reset,
        Self::HardReset,
    ];
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Keys {
    Random,
    NearIdentical,
    Identical,
    Zero,
}

impl Keys {
    pub const ALL: [Self; 4] = [Self::Random, Self::NearIdentical, Self::Identical, Self::Zero];
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Strength {
    Zero,
    One,
    /// Uniform in (0, 1).
    Single,
    /// Uniform in (0, 2).
    Double,
    NearTwo,
}

impl Strength {
    pub const ALL: [Self; 5] = [Self::Zero, Self::One, Self::Single, Self::Double, Self::NearTwo];
}

#[derive(Debug, Clone)]
pub struct Recipe {
    pub batch: usize,
    pub time: usize,
    pub heads: usize,
    /// Value heads per head.
    pub group: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub decay: Decay,
    pub keys: Keys,
    pub strength: Strength,
    pub state: bool,
    pub scale: Option<f64>,
    pub cu_seqlens: Option<Vec<usize>>,
    pub seed: u64,
}

impl Default for Recipe {
    /// A chunk of 16 and a bit, odd dims, grouped values.
    fn default() -> Self {
        Self {
            batch: 1,
            time: 21,
            heads: 2,
            group: 2,
            key_dim: 5,
            value_dim: 3,
            decay: Decay::Mild,
            keys: Keys::Random,
            strength: Strength::Single,
            state: true,
            scale: None,
            cu_seqlens: None,
            seed: 0,
        }
    }
}

impl Recipe {
    /// Numbers that f32 holds exactly, so that f32 and f64 see the same problem.
    pub fn problem(&self) -> Problem {
        let mut random = Random::new(self.seed);
        let Self { batch, time, heads, group, key_dim, value_dim, .. } = *self;
        let value_heads = heads * group;
        let sequences = self.cu_seqlens.as_ref().map_or(batch, |bounds| bounds.len() - 1);
        let state_shape = vec![sequences, value_heads, key_dim, value_dim];
        let value_shape = vec![batch, time, value_heads, value_dim];
        let v = random.normal(value_shape.clone());
        let initial_state = self.state.then(|| random.normal(state_shape.clone()));
        Problem {
            name: format!(
                "{:?} keys, {:?} strength, B {batch}, T {time}, H {heads}x{group}, {key_dim}x{value_dim}",
                self.keys, self.strength,
            ),
            group: format!("{:?}", self.decay),
            q: unit_rows(random.normal(vec![batch, time, heads, key_dim])),
            k: self.keys(&mut random),
            g: self.log_decay(&mut random),
            beta: self.write_strength(&mut random),
            scale: self.scale,
            cu_seqlens: self.cu_seqlens.clone(),
            d_o: random.normal(value_shape.clone()),
            d_final_state: random.normal(state_shape.clone()),
            o: Array::zeros(value_shape),
            final_state: initial_state.clone().unwrap_or_else(|| Array::zeros(state_shape)),
            initial_state,
            v,
            gradients: Vec::new(),
            reflecting: self.strength == Strength::NearTwo
                && matches!(self.keys, Keys::Identical | Keys::NearIdentical),
        }
        .solved()
    }

    fn keys(&self, random: &mut Random) -> Array {
        let shape = vec![self.batch, self.time, self.heads, self.key_dim];
        let noise = random.normal(shape.clone());
        let one_key = random.normal(vec![self.key_dim]).values;
        let around = |width: f64| {
            let rows = noise.values.chunks(self.key_dim);
            let values = rows.flat_map(|row| row.iter().zip(&one_key).map(|(noise, key)| key + width * noise));
            unit_rows(Array::new(shape.clone(), values.collect()))
        };
        match self.keys {
            Keys::Random => unit_rows(noise),
            Keys::NearIdentical => around(1e-3),
            Keys::Identical => around(0.0),
            Keys::Zero => Array::zeros(shape),
        }
    }

    fn log_decay(&self, random: &mut Random) -> Array {
        let heads = self.heads * self.group;
        let shape = vec![self.batch, self.time, heads, self.key_dim];
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        let rates = random.uniform(vec![heads], 1.0, 16.0).values;
        let steps = random.uniform(shape.clone(), 0.001_f64.ln(), 0.1_f64.ln());
        let unit = random.uniform(shape.clone(), 0.0, 1.0);
        let normal = random.normal(shape.clone());
        let value = |i: usize| {
            let (channel, row) = (i % self.key_dim, i / self.key_dim);
            let (head, token) = (row % heads, row / heads % self.time);
            let mild = -rates[head] * steps.values[i].exp();
            match self.decay {
                Decay::Mild => mild,
                Decay::Zero => 0.0,
                Decay::Tiny => -1e-4,
                Decay::Uniform => -5.0 * unit.values[i],
                Decay::Constant => -5.0,
                Decay::Strong => -16.0 * softplus(normal.values[i]),
                Decay::Extreme => -16.0 * softplus(60.0 * unit.values[i] - 30.0),
                Decay::Split if channel % 2 == 0 => 0.0,
                Decay::Split => -50.0,
                Decay::Spikes if unit.values[i] < 0.1 => -1e4,
                Decay::Reset if token % 13 == 3 => -200.0,
                Decay::HardReset if token % 13 == 3 => f64::NEG_INFINITY,
                Decay::Spikes | Decay::Reset | Decay::HardReset => mild,
            }
        };
        let len = shape.iter().product();
        Array::new(shape, (0..len).map(|i| f64::from(value(i) as f32)).collect())
    }

    fn write_strength(&self, random: &mut Random) -> Array {
        let shape = vec![self.batch, self.time, self.heads * self.group];
        let (low, high) = match self.strength {
            Strength::Zero => (0.0, 0.0),
            Strength::One => (1.0, 1.0),
            Strength::Single => (0.0, 1.0),
            Strength::Double => (0.0, 2.0),
            Strength::NearTwo => (1.9, 2.0),
        };
        random.uniform(shape, low, high)
    }
}

impl Problem {
    /// The problem that half precision leaves of this one: `q`, `k`, `v` and the cotangent of the output in
    /// `dtype`, `g` and `beta` in `gates`.
    pub fn rounded(mut self, dtype: DType, gates: DType) -> Self {
        let Self { q, k, v, g, beta, d_o, .. } = &mut self;
        for (array, dtype) in [(q, dtype), (k, dtype), (v, dtype), (d_o, dtype), (g, gates), (beta, gates)] {
            let data = TensorData::new(std::mem::take(&mut array.values), array.shape.clone());
            array.values = data.convert_dtype(dtype).iter::<f64>().collect();
        }
        self.o.values.fill(0.0);
        self.final_state.values.fill(0.0);
        if let Some(state) = &self.initial_state {
            self.final_state = state.clone();
        }
        self.solved()
    }

    /// Fills `o` and `final_state`: the definition, token by token.
    fn solved(mut self) -> Self {
        let ([_, time, heads, dk], [batch, _, value_heads, dv]) = (dims(&self.q), dims(&self.v));
        let scale = self.scale.unwrap_or((dk as f64).powf(-0.5));
        let spans = match &self.cu_seqlens {
            Some(bounds) => bounds.windows(2).map(|pair| (pair[0], pair[1])).collect(),
            None => (0..batch).map(|row| (row * time, (row + 1) * time)).collect::<Vec<_>>(),
        };
        for (n, (start, end)) in spans.into_iter().enumerate() {
            for h in 0..value_heads {
                let s = &mut self.final_state.values[(n * value_heads + h) * dk * dv..][..dk * dv];
                for t in start..end {
                    let (key_row, row) = (t * heads + h * heads / value_heads, t * value_heads + h);
                    let q = &self.q.values[key_row * dk..][..dk];
                    let k = &self.k.values[key_row * dk..][..dk];
                    let v = &self.v.values[row * dv..][..dv];
                    let decay = |i: usize| self.g.values[row * dk + i].exp();
                    s.iter_mut().enumerate().for_each(|(e, s)| *s *= decay(e / dv));
                    for j in 0..dv {
                        let read = |x: &[f64], s: &[f64]| (0..dk).map(|i| x[i] * s[i * dv + j]).sum::<f64>();
                        let write = self.beta.values[row] * (v[j] - read(k, s));
                        (0..dk).for_each(|i| s[i * dv + j] += k[i] * write);
                        self.o.values[row * dv + j] = scale * read(q, s);
                    }
                }
            }
        }
        self
    }
}

fn dims(x: &Array) -> [usize; 4] {
    x.shape[..].try_into().expect("four dimensions")
}

/// Rows of length 1, as [`burn_kda::l2_normalize`] gives them.
fn unit_rows(x: Array) -> Array {
    let width = *x.shape.last().expect("rows");
    let rows = x.values.chunks(width);
    let values = rows.flat_map(|row| {
        let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        row.iter().map(move |x| f64::from((x / norm) as f32))
    });
    Array { values: values.collect(), shape: x.shape }
}

/// Seeded arrays of numbers that f32 holds exactly.
pub struct Random(StdRng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    pub fn normal(&mut self, shape: Vec<usize>) -> Array {
        self.array(shape, Distribution::Normal(0.0, 1.0))
    }

    pub fn uniform(&mut self, shape: Vec<usize>, low: f64, high: f64) -> Array {
        if low == high {
            let len = shape.iter().product();
            return Array::new(shape, vec![low; len]);
        }
        self.array(shape, Distribution::Uniform(low, high))
    }

    fn array(&mut self, shape: Vec<usize>, distribution: Distribution) -> Array {
        let data = TensorData::random::<f32, _, _>(shape.clone(), distribution, &mut self.0);
        Array::new(shape, data.iter::<f64>().collect())
    }
}
