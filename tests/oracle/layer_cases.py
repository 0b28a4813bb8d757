"""The pieces around the operator and the whole layer: float64 answers, each held against FLA's own kernels as they are computed.

FLA has no float64 and no plain-torch form of these, so float64 torch stands in for its leaf kernels, and every answer is
compared with FLA's float32 kernels (run by the Triton interpreter) when it is made; a disagreement stops the generator.
"""

import copy
import types

import cpu_triton
import numpy as np
import torch
import torch.nn.functional as F
from operator_cases import rel_rms, rng

cpu_triton.patch_ranges()

import fla.layers.kda as fla_layer  # noqa: E402
from fla.models.utils import Cache  # noqa: E402
from fla.modules.causal_conv1d import ShortConvolution  # noqa: E402
from fla.modules.norm.fused_norm_gate import FusedRMSNormGated  # noqa: E402
from fla.modules.norm.l2norm import l2norm as fla_l2norm  # noqa: E402

AGREE = 3e-5  # float32 kernels against float64, relative RMS; FLA's chunk backward alone is at 1.4e-5 for strong gates
LENGTH, PREFILL = 70, 66  # 66 > 64: FLA prefills with its chunk kernels and decodes with its recurrent one


def f32(x):
    return torch.from_numpy(np.ascontiguousarray(x)).float()


def agree(name, pairs, report):
    worst = max((rel_rms(got.detach(), want.detach()), n) for n, (got, want) in pairs.items())
    report(name, worst)
    assert worst[0] <= AGREE, f"{name}: FLA's own kernels disagree by {worst}"
    return float(f"{worst[0]:.0e}")


def l2norm64(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def l2norm(fla, report):
    tensors, meta = {}, {}
    for name, size, why in (("ordinary", 1.0, "rows of length about 5"), ("at_eps", 2e-4, "rows whose square is about eps"), ("tiny", 1e-7, "eps dominates"),
                            ("large", 1e4, "eps vanishes"), ("zero", 0.0, "a zero row gives 0 with a finite gradient, 1/sqrt(eps)")):
        r = rng("l2norm" + name)
        x, dy = f32(size * r.standard_normal((2, 3, 2, 24))), f32(r.standard_normal((2, 3, 2, 24)))
        a, b = x.double().requires_grad_(), x.clone().requires_grad_()
        y, own = l2norm64(a), fla_l2norm(b)
        (dx,), (dx_own,) = torch.autograd.grad(y, a, dy.double()), torch.autograd.grad(own, b, dy)
        agreed = agree(f"l2norm {name}", dict(y=(own, y), dx=(dx_own, dx)), report)
        tensors |= {f"{name}/{n}": t for n, t in dict(x=x, dy=dy, y=y, dx=dx).items()}
        meta[name] = dict(why=why, fla_f32=agreed, source="fla.modules.norm.l2norm.l2norm, as float64 torch")
    return tensors, meta


class Conv64(torch.nn.Module):
    """FLA's ShortConvolution in float64: the nn.Conv1d that it derives from, then silu. Cache [N,D,W], of which the last W-1 count."""

    def __init__(self, conv):
        super().__init__()
        assert conv.activation == "silu"
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x, cache=None, output_final_state=False, cu_seqlens=None):
        assert cu_seqlens is None
        D, _, W = self.weight.shape
        past = x.new_zeros(x.shape[0], D, W) if cache is None else cache
        line = torch.cat([past, x.transpose(1, 2)], -1)
        y = F.silu(F.conv1d(line[..., 1:], self.weight, self.bias, groups=D))
        return y.transpose(1, 2), line[..., -W:] if output_final_state else None


def conv(fla, report):
    tensors, meta = {}, {}
    for name, T, W, bias, cached in (("T1", 1, 4, False, True), ("T2", 2, 4, False, True), ("T3", 3, 4, True, True), ("T9", 9, 4, True, True), ("T9_fresh", 9, 4, False, False),
                                     ("T1_fresh", 1, 4, True, False), ("T2_fresh", 2, 4, True, False), ("W2", 7, 2, True, True), ("W3", 7, 3, False, True)):
        r, B, D = rng("conv" + name), 2, 6
        x = dict(x=f32(r.standard_normal((B, T, D))), weight=f32(r.standard_normal((D, 1, W))))
        if bias:
            x["bias"] = f32(r.standard_normal(D))
        if cached:
            x["cache"] = f32(r.standard_normal((B, D, W - 1)))
        dy, dstate = f32(r.standard_normal((B, T, D))), f32(r.standard_normal((B, D, W - 1)))

        def run(dtype, wrap):
            p = {n: t.to(dtype).requires_grad_() for n, t in x.items()}
            module = ShortConvolution(D, W, bias=bias, activation="silu")
            module.weight = torch.nn.Parameter(p["weight"].detach().clone())
            module.bias = torch.nn.Parameter(p["bias"].detach().clone()) if bias else None
            cache = F.pad(p["cache"], (1, 0)) if cached else None
            y, state = wrap(module)(x=p["x"], cache=cache, output_final_state=True)
            state = state[..., 1:]
            leaves = {**{n: p[n] for n in ("x", "cache") if n in p}, **dict(module.named_parameters())}
            grads = torch.autograd.grad((y * dy.to(dtype)).sum() + (state * dstate.to(dtype)).sum(), list(leaves.values()))
            return dict(y=y, state=state, **{"d" + n: g for n, g in zip(leaves, grads)})

        want, own = run(torch.float64, Conv64), run(torch.float32, lambda m: m)
        agreed = agree(f"conv {name}", {n: (own[n], want[n]) for n in want}, report)
        tensors |= {f"{name}/{n}": t for n, t in {**x, "dy": dy, "dstate": dstate, **want}.items()}
        meta[name] = dict(why="a call shorter than the filter keeps part of the old cache" if T < W - 1 else "", fla_f32=agreed,
                          source="fla.modules.ShortConvolution: its nn.Conv1d in float64, then silu; states without FLA's unused first column")
    return tensors, meta


class Norm64(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        assert norm.activation == "sigmoid" and norm.bias is None
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x, gate):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight * gate.sigmoid()


def norm(fla, report):
    tensors, meta = {}, {}
    for name, size, why in (("ordinary", 1.0, ""), ("small", 3e-3, "the mean square is about eps"), ("zero", 0.0, "a zero row gives 0 with a finite gradient"), ("large", 1e4, "")):
        r, shape = rng("norm" + name), (2, 3, 2, 10)
        x = dict(x=f32(size * r.standard_normal(shape)), gate=f32(3 * r.standard_normal(shape)), weight=f32(r.uniform(0.5, 1.5, shape[-1])))
        dy = f32(r.standard_normal(shape))

        def run(dtype, wrap):
            p = {n: t.to(dtype).requires_grad_() for n, t in x.items()}
            module = FusedRMSNormGated(shape[-1], activation="sigmoid", eps=1e-5)
            module.weight = torch.nn.Parameter(p["weight"].detach().clone())
            y = wrap(module)(p["x"], p["gate"])
            leaves = dict(x=p["x"], gate=p["gate"], weight=module.weight)
            return dict(y=y, **{"d" + n: g for n, g in zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy.to(dtype)))})

        want, own = run(torch.float64, Norm64), run(torch.float32, lambda m: m)
        agreed = agree(f"norm {name}", {n: (own[n], want[n]) for n in want}, report)
        tensors |= {f"{name}/{n}": t for n, t in {**x, "dy": dy, **want}.items()}
        meta[name] = dict(why=why, eps=1e-5, fla_f32=agreed, source="fla.modules.FusedRMSNormGated(activation='sigmoid'), as float64 torch")
    return tensors, meta


def kda64(fla):
    """What FLA's layer asks of chunk_kda and fused_recurrent_kda, from FLA's naive functions in float64."""

    def kda(q, k, v, g, beta, A_log, dt_bias, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens, safe_gate=False):
        assert use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel and state_v_first and cu_seqlens is None
        g = fla.softplus_gate64(g, A_log, dt_bias) if lower_bound is None else fla.sigmoid_gate64(g, A_log, dt_bias, lower_bound)
        state = None if initial_state is None else initial_state.transpose(-1, -2)
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
        o, state = fla.recurrent64(l2norm64(q), l2norm64(k), v, g, beta, initial_state=state, output_final_state=True)
        return o, state.transpose(-1, -2) if output_final_state else None

    return kda


def double_layer(fla, layer):
    """FLA's own layer and its own forward, in float64: only the leaf kernels it calls are replaced."""
    twin = copy.deepcopy(layer).double()
    for n in ("q_conv1d", "k_conv1d", "v_conv1d"):
        if hasattr(twin, n):
            setattr(twin, n, Conv64(getattr(twin, n)))
    twin.o_norm = Norm64(twin.o_norm)
    forward = type(layer).forward
    names = {**forward.__globals__, "chunk_kda": kda64(fla), "fused_recurrent_kda": kda64(fla)}
    twin.forward = types.MethodType(types.FunctionType(forward.__code__, names, "forward", forward.__defaults__), twin)
    return twin


def run_layer(layer, x, dy):
    x = x.clone().requires_grad_()
    layer.train()
    y = layer(x)[0]
    params = dict(layer.named_parameters())
    grads = torch.autograd.grad(y, [x, *params.values()], dy.to(y))
    out = dict(y=y, dx=grads[0], **{f"d.{n}": g for n, g in zip(params, grads[1:])})
    layer.eval()
    with torch.no_grad():
        cache, pieces = Cache(), []
        for a, b in [(0, PREFILL)] + [(t, t + 1) for t in range(PREFILL, x.shape[1])]:
            piece, _, cache = layer(x[:, a:b], past_key_values=cache, use_cache=True)
            pieces.append(piece)
            if b in (PREFILL, x.shape[1]):
                stage = "prefill" if b == PREFILL else "decode"
                out[f"{stage}.recurrent"] = cache[0]["recurrent_state"].clone()
                for n, state in zip("qkv", cache[0]["conv_state"] or ()):
                    out[f"{stage}.conv_{n}"] = state[..., 1:].clone()
        out["y_cached"] = torch.cat(pieces, 1)
    return out


def layer(fla, report):
    tensors, meta = {}, {}
    # A strong gate leaves single tokens with a tiny output, which the norm enlarges together with its rounding: with a larger eps the
    # gradients are well enough conditioned for float32. The softplus cases keep FLA's own 1e-5.
    safe = dict(safe_gate=True, lower_bound=-5.0, norm_eps=1e-3)
    base = dict(hidden_size=20, num_heads=2, head_dim=8)
    cases = dict(
        softplus=(base, "Kimi Linear's gate"),
        sigmoid=(base | safe, "the bounded gate of K3, GLM and Ling"),
        softplus_neg_eigval=(base | dict(allow_neg_eigval=True), "beta in (0,2)"),
        sigmoid_neg_eigval=(base | safe | dict(allow_neg_eigval=True), "beta in (0,2), bounded gate"),
        gva=(base | dict(num_v_heads=4), "two value heads per key head"),
        gva3_sigmoid=(base | safe | dict(num_v_heads=6, expand_v=0.5), "three value heads per key head and V = K/2"),
        expand_v=(base | dict(expand_v=1.5, conv_bias=True), "V = 1.5 K, a bias in the convolutions"),
        conv3=(base | safe | dict(conv_size=3), "convolution of width 3"),
        no_conv=(base | dict(use_short_conv=False), "silu without a convolution"),
    )
    for name, (config, why) in cases.items():
        r = rng("layer" + name)
        torch.manual_seed(0)
        own = fla_layer.KimiDeltaAttention(layer_idx=0, **config)
        with torch.no_grad():  # FLA's shapes and scales, but no parameter left at a value that hides it
            for n, p in own.named_parameters():
                # The bounded gate is kept inside its sigmoid: exp(A_log) z = 50 would amplify the rounding of z 50 times.
                bounded = "lower_bound" in config
                if n == "A_log":
                    p.copy_(f32(r.uniform(-0.5, 0.5, p.shape) if bounded else np.log(r.uniform(1, 16, p.shape))))
                elif n == "dt_bias" and bounded:
                    p.copy_(f32(r.standard_normal(p.shape) - 3))
                elif n == "dt_bias":
                    dt = np.exp(r.uniform(np.log(0.001), np.log(0.1), p.shape))
                    p.copy_(f32(dt + np.log(-np.expm1(-dt))))
                elif n == "o_norm.weight":
                    p.copy_(f32(r.uniform(0.5, 1.5, p.shape)))
                else:
                    p.copy_(f32(r.standard_normal(p.shape) * (0.5 if p.ndim == 1 or "conv" in n else p.shape[1] ** -0.5)))
        params = {f"p.{n}": p.detach().clone() for n, p in own.named_parameters()}
        batch = 2 if name in ("softplus", "sigmoid", "sigmoid_neg_eigval") else 1
        x, dy = (f32(r.standard_normal((batch, LENGTH, config["hidden_size"]))) for _ in range(2))
        want = run_layer(double_layer(fla, own), x.double(), dy)
        got = run_layer(own, x, dy)
        agreed = agree(f"layer {name}", {n: (got[n], want[n]) for n in want}, report)
        # Prefill and decode with the cache give the same outputs: one copy is enough.
        assert rel_rms(want.pop("y_cached"), want["y"]) < 1e-13
        tensors |= {f"{name}/{n}": t for n, t in {**params, "x": x, "dy": dy, **want, "y_fla": got["y"]}.items()}
        meta[name] = dict(why=why, config=config, prefill=PREFILL, fla_f32=agreed, conv_state="[B,D,W-1], oldest first", recurrent_state="[B,HV,V,K], V first")
    return tensors, meta
