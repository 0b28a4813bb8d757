"""A checkpoint of FLA's own model: its layer in float64, its cache, and proof that its cache may come from elsewhere."""

import torch
from checkpoint_cases import HIDDEN, LENGTH, PREFILL, rounded, values
from fla.models.utils import Cache
from layer_cases import agree, double_layer, fla_layer
from operator_cases import rel_rms, rng


def run(layer, x):
    """All tokens at once, then prefill and single tokens with FLA's cache: states V first, convolutions of W columns."""
    layer.eval()
    with torch.no_grad():
        out, cache, pieces = dict(y=layer(x)[0]), Cache(), []
        for a, b in [(0, PREFILL)] + [(t, t + 1) for t in range(PREFILL, LENGTH)]:
            piece, _, cache = layer(x[:, a:b], past_key_values=cache, use_cache=True)
            pieces.append(piece)
            if b in (PREFILL, LENGTH):
                stage = "prefill" if b == PREFILL else "decode"
                out[f"{stage}.cache_recurrent"] = cache[0]["recurrent_state"].clone()
                for n, state in zip("qkv", cache[0]["conv_state"]):
                    out[f"{stage}.cache_{n}"] = state.clone()
        out["y_cached"] = torch.cat(pieces, 1)
    return out


def first_column_is_unused(layer, x):
    """FLA's own layer decodes alike from a cache whose first column is zero: a state without it can become a cache."""
    with torch.no_grad():
        _, _, cache = layer(x[:, :PREFILL], past_key_values=Cache(), use_cache=True)
        state = {n: cache[0][n] for n in ("recurrent_state", "conv_state")}
        state["conv_state"] = tuple(torch.nn.functional.pad(c[..., 1:], (1, 0)) for c in state["conv_state"])
        other = Cache()
        other.update(**{n: s if n == "recurrent_state" else tuple(c.clone() for c in s) for n, s in state.items()}, layer_idx=0, offset=PREFILL)
        for t in range(PREFILL, LENGTH):
            a, _, cache = layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)
            b, _, other = layer(x[:, t : t + 1], past_key_values=other, use_cache=True)
            assert torch.equal(a, b), t


def kda(fla, report):
    config = dict(hidden_size=HIDDEN, num_heads=2, num_v_heads=4, head_dim=16, expand_v=0.5, norm_eps=1e-6)
    written = dict(config, architectures=["KDAForCausalLM"], model_type="kda", num_hidden_layers=2, use_short_conv=True, conv_size=4, allow_neg_eigval=True, safe_gate=False, lower_bound=None,
                   attn=dict(layers=[1], num_heads=2))
    torch.manual_seed(0)
    own, r = fla_layer.KimiDeltaAttention(layer_idx=0, allow_neg_eigval=True, **config), rng("checkpoint kda")
    params = {}
    with torch.no_grad():
        for n, p in own.named_parameters():
            value = r.standard_normal(p.shape) * 0.5 if n == "g_proj.1.bias" else values(n, tuple(p.shape), r, bounded=False)
            params[n] = rounded(value, torch.float32 if n in ("A_log", "dt_bias") else torch.float16)
            p.copy_(params[n])
    x = rounded(r.standard_normal((2, LENGTH, HIDDEN)), torch.float16).float()
    want, got = run(double_layer(fla, own), x.double()), run(own, x)
    for n in want:
        if ".cache_" in n and not n.endswith("recurrent"):
            got[n][..., 0] = want[n][..., 0]  # FLA leaves it undefined in places
    agree("kda/0", {n: (got[n], want[n]) for n in want}, report)
    first_column_is_unused(own, x)
    assert rel_rms(want.pop("y_cached"), want["y"]) < 1e-13
    attn = {"model.layers.1.attn.q_proj.weight": rounded(r.standard_normal((HIDDEN, HIDDEN)), torch.float16)}
    return written, [{f"model.layers.0.attn.{n}": p for n, p in params.items()} | attn], {0: ({"x": x, **want}, {})}
