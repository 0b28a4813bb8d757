"""Inputs and float64 answers for the gates and for the operator in every decay regime."""

import zlib

import numpy as np
import torch

REGIMES = ("mild", "zero", "tiny", "uniform", "constant5", "strong", "extreme", "split", "spikes", "reset", "hard_reset")


def rng(name):
    return np.random.default_rng(zlib.crc32(name.encode()))


def rel_rms(got, want):
    got, want = got.detach().double(), want.detach().double()
    scale = want.square().mean().sqrt()
    error = (got - want).square().mean().sqrt()
    return float(error / scale) if scale > 0 else (0.0 if error == 0 else float("inf"))


def softplus(x):
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def decay(r, regime, T, HV, K):
    """g [1,T,HV,K] of a regime. Zeros and large numbers stand next to each other in the later ones."""
    shape = (1, T, HV, K)
    if regime == "mild":  # softplus(dt) in [.001, .1], A in [1, 16]: FLA's initialisation
        return -r.uniform(1, 16, (1, 1, HV, 1)) * np.exp(r.uniform(np.log(0.001), np.log(0.1), shape))
    if regime == "zero":
        return np.zeros(shape)
    if regime == "tiny":
        return np.full(shape, -1e-4)
    if regime == "uniform":
        return r.uniform(-5, 0, shape)
    if regime == "constant5":
        return np.full(shape, -5.0)
    if regime == "strong":
        return -16 * softplus(r.standard_normal(shape))
    if regime == "extreme":
        return -16 * softplus(r.uniform(-30, 30, shape))
    if regime == "split":
        return np.broadcast_to(np.where(np.arange(K) % 2 == 0, 0.0, -50.0), shape).copy()
    mild = -0.05 * np.exp(r.standard_normal(shape))
    if regime == "spikes":
        return np.where(r.random(shape) < 0.1, -1e4, mild)
    mild[:, 12::13] = -200.0 if regime == "reset" else -np.inf
    return mild


def keys(r, kind, T, H, K):
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    random = r.standard_normal((1, T, H, K))
    base = r.standard_normal((1, 1, H, K))
    if kind == "near_identical":
        return unit(base + 0.01 * random)
    if kind == "identical":
        return unit(np.broadcast_to(base, random.shape))
    if kind == "zero":
        return np.zeros_like(random)
    if kind == "some_zero":
        random[:, ::5] = 0.0
    return unit(random)


def write_strength(r, kind, T, HV):
    low, high = {"zero": (0, 0), "one": (1, 1), "unit": (0, 1), "double": (0, 2), "near_two": (1.9, 2)}[kind]
    return r.uniform(low, high, (1, T, HV))


def operator_case(name, T, H=1, HV=None, K=8, V=5, B=1, regime="mild", key_kind="random", beta_kind="unit",
                  state=True, scale=None, cu_seqlens=None, why=""):
    r, HV = rng(name), HV or H
    one = []  # batches are drawn one by one, so that their rows are unrelated
    for _ in range(B):
        one.append(dict(
            q=keys(r, "random", T, H, K), k=keys(r, key_kind, T, H, K), v=r.standard_normal((1, T, HV, V)),
            g=decay(r, regime, T, HV, K), beta=write_strength(r, beta_kind, T, HV), do=r.standard_normal((1, T, HV, V))))
    tensors = {n: np.concatenate([x[n] for x in one]) for n in one[0]}
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if state:
        tensors["initial_state"] = r.standard_normal((N, HV, K, V))
    tensors["dht"] = r.standard_normal((N, HV, K, V))
    options = dict(regime=regime, key_kind=key_kind, beta_kind=beta_kind, scale=scale, cu_seqlens=cu_seqlens, why=why)
    return name, {n: torch.from_numpy(np.ascontiguousarray(x)).float() for n, x in tensors.items()}, options


def run_operator(recurrent, tensors, options, dtype):
    """o, final state and all gradients of <o, do> + <final state, dht>, by autograd through FLA's naive recurrence.

    FLA's naive function has no cu_seqlens: each sequence is one call, which is what FLA's kernels define packing to mean.
    """
    x = {n: t.to(dtype).requires_grad_(n not in ("do", "dht")) for n, t in tensors.items()}
    names = [n for n in ("q", "k", "v", "g", "beta") if n in x]
    cu, h0 = options["cu_seqlens"], x.get("initial_state")
    if cu is None:
        o, s = recurrent(*(x[n] for n in names), scale=options["scale"], initial_state=h0, output_final_state=True)
    else:
        parts = []
        for n, (a, b) in enumerate(zip(cu, cu[1:])):
            state = None if h0 is None else h0[n:n + 1]
            parts.append(recurrent(*(x[m][:, a:b] for m in names), scale=options["scale"], initial_state=state, output_final_state=True))
        o, s = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])
    if h0 is not None:
        names.append("initial_state")
    loss = (o * x["do"]).sum() + (s * x["dht"]).sum()
    grads = torch.autograd.grad(loss, [x[n] for n in names], allow_unused=True)
    out = dict(o=o.detach(), final_state=s.detach())
    for n, g in zip(names, grads):
        out["d" + n] = torch.zeros_like(x[n]) if g is None else g
    return out


def operator_file(fla, cases, report, form="recurrent"):
    tensors, meta = {}, {}
    for name, inputs, options in cases:
        want = run_operator(getattr(fla, f"{form}64"), inputs, options, torch.float64)
        # FLA's own float32 on the same input: a bar that it could not keep by far would be a bar on the input, not on the code.
        own = run_operator(fla.recurrent32, inputs, options, torch.float32)
        worst = max((rel_rms(own[n], want[n]), n) for n in want)
        report(name, worst)
        assert all(torch.isfinite(t).all() for t in want.values()), name
        options["source"] = f"fla.ops.kda.naive.naive_{form}_kda in float64"
        for n, t in {**inputs, **{n: w.double() for n, w in want.items()}}.items():
            tensors[f"{name}/{n}"] = t
        meta[name] = options
    return tensors, meta


def length_cases():
    for T in (1, 2, 15, 16, 17, 63, 64, 65, 100, 130, 257):
        yield operator_case(f"T{T}", T, H=2, K=8, V=4, regime="uniform" if T % 2 else "mild", why="a length at, next to or across a chunk border")
    for T in (1, 64, 65):
        yield operator_case(f"T{T}_no_state", T, H=2, K=8, V=4, state=False, why="dg of the first token is exactly 0: there is nothing to decay")


def shape_cases():
    yield operator_case("k_larger", 37, H=2, K=16, V=8, why="K != V: a transposed state cannot pass")
    yield operator_case("v_larger", 37, H=2, K=8, V=24, why="V > K")
    yield operator_case("odd", 35, H=3, K=7, V=5, regime="uniform", why="odd K and V")
    yield operator_case("prime", 67, H=1, K=13, V=11, why="odd K and V over two chunks of 64")
    yield operator_case("gva2", 67, H=2, HV=4, K=8, V=6, why="two value heads per key head: value head hv reads key head hv / 2")
    yield operator_case("gva3", 41, H=2, HV=6, K=6, V=5, B=2, regime="uniform", why="three value heads per key head, in a batch")
    yield operator_case("gva_all", 33, H=1, HV=4, K=8, V=6, state=False, why="one key head for all value heads")
    yield operator_case("batch", 65, H=2, K=8, V=6, B=2, why="unrelated sequences and states in a batch")
    yield operator_case("scalar", 21, H=3, K=1, V=1, B=2, why="K = V = 1")
    yield operator_case("k1", 21, H=2, K=1, V=9, why="one key channel")
    yield operator_case("v1", 21, H=2, K=9, V=1, why="one value channel")
    yield operator_case("square", 40, H=1, K=64, V=64, why="a head of real size")


def scale_cases():
    for label, scale in (("default", None), ("one", 1.0), ("three_tenths", 0.3)):
        for state in (True, False):
            yield operator_case(f"{label}{'' if state else '_no_state'}", 67, H=2, K=8, V=6, scale=scale, state=state,
                                why="the scale touches the read and nothing else: it must not reach the final state")


def wy_cases():
    for label, scale in (("default", None), ("one", 1.0), ("three_tenths", 0.3)):
        yield operator_case(f"{label}/mild", 128, scale=scale, why="FLA's naive_chunk_kda (chunk 64), not its recurrence")
    yield operator_case("gva/uniform", 64, H=1, HV=2, scale=0.3, regime="uniform", beta_kind="double", state=False, why="FLA's naive_chunk_kda (chunk 64), not its recurrence")


def regime_cases():
    two_chunks = 67

    def size(regime, key_kind):
        # Without decay, 64 random keys in 8 dimensions are nearly dependent, which no shipped head (K = 128) is: more channels there.
        return dict(K=32, V=8) if regime in ("zero", "tiny") and key_kind == "random" else {}

    for regime in REGIMES:
        for key_kind in ("random", "near_identical"):
            yield operator_case(f"{regime}/{key_kind}/unit", two_chunks, regime=regime, key_kind=key_kind, why="beta in (0,1)")
            yield operator_case(f"{regime}/{key_kind}/double", two_chunks, regime=regime, key_kind=key_kind, beta_kind="double", state=False,
                                why="beta in (0,2): negative eigenvalues", **size(regime, key_kind))
    for regime in ("mild", "constant5", "tiny", "zero"):
        for key_kind in ("random", "near_identical"):
            yield operator_case(f"{regime}/{key_kind}/one", two_chunks, regime=regime, key_kind=key_kind, beta_kind="one",
                                why="the old value is erased whole", **size(regime, key_kind))
        yield operator_case(f"{regime}/random/zero", two_chunks, regime=regime, beta_kind="zero", why="nothing is written")
    for regime in ("mild", "constant5", "hard_reset"):
        yield operator_case(f"{regime}/zero_keys", two_chunks, regime=regime, key_kind="zero", why="k = 0: nothing is written or erased")
    for regime in ("mild", "zero"):
        yield operator_case(f"{regime}/some_zero_keys", two_chunks, regime=regime, key_kind="some_zero", why="every fifth key is 0")
    for regime in ("zero", "tiny", "mild"):
        for key_kind in ("identical", "near_identical"):
            yield operator_case(f"{regime}/{key_kind}/near_two", two_chunks, regime=regime, key_kind=key_kind, beta_kind="near_two",
                                why="the state is reflected again and again: a Neumann inverse loses every digit")


def packed_cases():
    cu = [0, 0, 1, 18, 18, 83, 99, 100, 100]
    yield operator_case("state", cu[-1], H=2, K=8, V=6, cu_seqlens=cu, why="lengths 0,1,17,0,65,16,1,0: an empty sequence hands its state through")
    yield operator_case("no_state", cu[-1], H=2, K=8, V=6, cu_seqlens=cu, state=False, why="no state may leak over a border")
    yield operator_case("gva", 67, H=2, HV=4, K=6, V=5, cu_seqlens=[0, 66, 67], regime="uniform", why="GVA, and a last sequence of one token")
    yield operator_case("hard_reset", 40, cu_seqlens=[0, 20, 20, 40], regime="hard_reset", why="g = -inf beside sequence borders")
    yield operator_case("single", 33, cu_seqlens=[0, 33], why="one packed sequence is the plain call")


def gate_cases(fla, report):
    """g and gradients for raw [B,T,HV,K]. Heads differ by many powers of ten: compare per head."""
    tensors, meta = {}, {}

    def add(name, why, raw, a_log, dt_bias, lower_bound=None, clamp=False):
        x = dict(raw=raw, a_log=a_log, dt_bias=dt_bias)
        x = {n: torch.from_numpy(np.ascontiguousarray(t)).float() for n, t in x.items() if t is not None}
        # d A_log is one number per head: a cotangent that lets its terms cancel would test the input's luck. Softplus has one sign, sigmoid two.
        z = raw if dt_bias is None else raw + dt_bias.reshape(raw.shape[-2:])
        dg = torch.from_numpy(rng(name).uniform(0.5, 1.5, raw.shape) * (1 if lower_bound is None else np.sign(z))).float()

        def run(gate, dtype):
            y = {n: t.to(dtype).requires_grad_() for n, t in x.items()}
            a = y.get("a_log")
            a = a.clamp(-10, 20) if clamp else a
            more = {} if lower_bound is None else dict(lower_bound=lower_bound)
            g = gate(y["raw"], a, y.get("dt_bias"), **more)
            return dict(g=g.detach(), **dict(zip(("d" + n for n in y), torch.autograd.grad((g * dg.to(dtype)).sum(), list(y.values())))))

        kind = "softplus" if lower_bound is None else "sigmoid"
        want = run(getattr(fla, f"{kind}_gate64"), torch.float64)
        own = run(getattr(fla, f"{kind}_gate32"), torch.float32)
        report(name, max((rel_rms(own[n][..., h, :] if n in ("g", "draw") else own[n].reshape(raw.shape[2], -1)[h],
                                  want[n][..., h, :] if n in ("g", "draw") else want[n].reshape(raw.shape[2], -1)[h]), n, h)
                         for n in want for h in range(raw.shape[2])))
        assert all(torch.isfinite(t).all() for t in want.values()), name
        for n, t in {**x, "dg": dg, **want}.items():
            tensors[f"{name}/{n}"] = t
        meta[name] = dict(decay=kind, lower_bound=lower_bound, why=why, source=f"fla.ops.kda.gate.{'naive_kda_gate' if kind == 'softplus' else 'naive_kda_lowerbound_gate'} in float64")

    heads = np.array([-10, -3, 0, np.log(4), np.log(16), 20.0])
    K, r = 8, rng("gates")
    wide = r.uniform(-30, 30, (2, 5, len(heads), K))
    wide[0, 0, :, :6] = (0.0, 20.5, -20.0, 25.0, -30.0, 30.0)
    normal, bias = r.standard_normal((2, 5, len(heads), K)), 2 * r.standard_normal(len(heads) * K)
    # Some z inside each head's sigmoid: else a steep head's gradient is made of saturated entries alone, which no float32 can hold.
    wide[1, 1] = r.uniform(-1.5, 1.5, wide[1, 1].shape) / np.maximum(1, np.exp(heads))[:, None] - bias.reshape(len(heads), K)
    init = np.exp(r.uniform(np.log(0.001), np.log(0.1), len(heads) * K))
    init = init + np.log(-np.expm1(-init))
    every = "A_log from -10 to 20"
    add("softplus_bias", f"{every}, z ~ N(0,1)", normal, heads, bias)
    add("softplus_no_bias", f"{every}, no dt_bias", normal, heads, None)
    add("softplus_wide", f"{every}, z in +-30", wide, heads, bias)
    add("softplus_init", "A in [1,16] and dt_bias of FLA's initialisation", normal, np.log(r.uniform(1, 16, len(heads))), init)
    add("sigmoid_bias", f"{every}, z ~ N(0,1)", normal, heads, bias, -5.0)
    add("sigmoid_no_bias", f"{every}, no dt_bias", normal, heads, None, -5.0)
    add("sigmoid_wide", f"{every}, z in +-30", wide, heads, bias, -5.0)
    add("sigmoid_no_a_log", "without A_log the factor is 1", normal, None, bias, -5.0)
    add("sigmoid_bare", "neither A_log nor dt_bias", normal, None, None, -5.0)
    add("sigmoid_other_bound", "a bound that is not -5", normal, np.log(r.uniform(1, 16, len(heads))), bias, -1.25)
    beyond = np.array([-40.0, -10.5, -9.5, 19.5, 20.5, 60.0])
    clamped = "A_log is clamped to [-10, 20] (FLA does not clamp: this is its gate at the clamped value, through torch's clamp)"
    add("softplus_clamp", clamped, normal, beyond, bias, clamp=True)
    add("sigmoid_clamp", clamped, normal, beyond, bias, -5.0, clamp=True)
    # Whole heads far out, where nothing larger hides them: log(1 + exp(z)) is 0 in float32 below -17 and overflows above 88.
    add("softplus_low", "z from -30 to -18 in every entry", r.uniform(-30, -18, normal.shape), heads, None)
    add("softplus_high", "z from 90 to 200 in every entry", r.uniform(90, 200, normal.shape), heads, None)
    add("sigmoid_low", "z from -30 to -18 in every entry: g is 1e-8 and less, not 0", r.uniform(-30, -18, normal.shape), None, None, -5.0)
    return tensors, meta
