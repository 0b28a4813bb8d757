//! The inputs of some tokens in shared memory.

use cubecl::prelude::*;

use super::decay::decay_parts;
use super::element::{beta_of, read};
use super::plan::Plan;

/// What all columns of a lane share for some tokens, and the values of the cube; tokens by channels.
#[derive(CubeType)]
pub(super) struct Segment {
    /// The decay: see [`decay_parts`].
    pub power: Shared<[f32]>,
    pub change: Shared<[f32]>,
    pub k: Shared<[f32]>,
    /// Keys times their own decay.
    pub k_decayed: Shared<[f32]>,
    pub q: Shared<[f32]>,
    pub v: Shared<[f32]>,
    pub beta: Shared<[f32]>,
}

#[cube]
impl Segment {
    pub fn new(#[comptime] plan: Plan) -> Segment {
        let keys = comptime!(plan.tokens * plan.padded_keys());
        Segment {
            power: Shared::new_slice(keys),
            change: Shared::new_slice(keys),
            k: Shared::new_slice(keys),
            k_decayed: Shared::new_slice(keys),
            q: Shared::new_slice(keys),
            v: Shared::new_slice(comptime!(plan.tokens * plan.values())),
            beta: Shared::new_slice(plan.tokens),
        }
    }

    /// Brings `tokens` tokens from `start` on, and the value channels from `first` on; zeros for channels that no input
    /// has. Value head `head` reads query and key head `head / (HV / H)`.
    #[allow(clippy::too_many_arguments)]
    pub fn load<X: Float, G: Float, B: Float>(
        &mut self,
        q: &Tensor<X>,
        k: &Tensor<X>,
        v: &Tensor<X>,
        g: &Tensor<G>,
        beta: &Tensor<B>,
        batch: usize,
        head: usize,
        start: usize,
        tokens: usize,
        first: usize,
        #[comptime] plan: Plan,
    ) {
        let (key_dim, value_dim) = (k.shape(3), v.shape(3));
        let key_head = head / (v.shape(2) / k.shape(2));
        let unit = UNIT_POS as usize;
        let units = comptime!(plan.units());

        for i in range_stepped(unit, tokens * comptime!(plan.padded_keys()), units) {
            let (t, d) = (start + i / comptime!(plan.padded_keys()), i % comptime!(plan.padded_keys()));
            self.power[i] = 0.0f32;
            self.change[i] = 0.0f32;
            self.k[i] = 0.0f32;
            self.k_decayed[i] = 0.0f32;
            self.q[i] = 0.0f32;
            if d < key_dim {
                let (power, change) = decay_parts(read(g, batch, t, head, d));
                let key = read(k, batch, t, key_head, d);
                self.power[i] = power;
                self.change[i] = change;
                self.k[i] = key;
                self.k_decayed[i] = (power + power * change) * key;
                self.q[i] = read(q, batch, t, key_head, d);
            }
        }
        for i in range_stepped(unit, tokens * comptime!(plan.values()), units) {
            let (t, e) = (start + i / comptime!(plan.values()), first + i % comptime!(plan.values()));
            self.v[i] = 0.0f32;
            if e < value_dim {
                self.v[i] = read(v, batch, t, head, e);
            }
        }
        for i in range_stepped(unit, tokens, units) {
            self.beta[i] = beta_of(beta, batch, start + i, head);
        }
    }
}
