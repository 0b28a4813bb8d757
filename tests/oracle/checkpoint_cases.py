"""Small random checkpoints of each family: config, tensors under the published names, inputs and float64 answers."""

import copy
import json

import native_source
import numpy as np
import torch
from operator_cases import rel_rms, rng
from transformers.cache_utils import DynamicCache
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

LENGTH, PREFILL = 20, 13
AGREE = 3e-5  # the published layer in float32 against the same source in float64, relative RMS
HIDDEN, HEADS, HEAD_DIM = 40, 2, 16  # hidden is neither D nor the rank: a matrix that is not transposed does not fit


def rounded(x, dtype):
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


def values(name, param, r, bounded):
    """Shipped scales, and no parameter at a value that hides it. The bounded gate is kept inside its sigmoid."""
    if name == "A_log":
        return r.uniform(-0.5, 0.5, param) if bounded else np.log(r.uniform(1, 16, param))
    if name == "dt_bias":
        dt = np.exp(r.uniform(np.log(0.001), np.log(0.1), param))
        return r.standard_normal(param) - 3 if bounded else dt + np.log(-np.expm1(-dt))
    if name == "o_norm.weight":
        return r.uniform(0.5, 1.5, param)
    return r.standard_normal(param) * (0.5 if "conv" in name else param[1] ** -0.5)


def published(name):
    """transformers' own name of a parameter to the one it has in a checkpoint (transformers/conversion_mapping.py)."""
    return name.removeprefix("forget_gate.")


class FullRankGate:
    """Kimi K3 from the GLM layer: the output gate is one matrix, `g_proj`."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, config, layer_idx):
        module = self.layer(config, layer_idx)
        module.g_a_proj = torch.nn.Identity()
        module.g_b_proj = torch.nn.Linear(module.hidden_size, module.qkv_dim, bias=False)
        return module


def run(module, config, x):
    """All tokens at once, then prefill and single tokens with transformers' cache."""
    with torch.no_grad():
        out, cache, pieces = dict(y=module(x)), DynamicCache(config=config), []
        for a, b in [(0, PREFILL)] + [(t, t + 1) for t in range(PREFILL, LENGTH)]:
            pieces.append(module(x[:, a:b], cache=cache))
            if b in (PREFILL, LENGTH):
                stage = "prefill" if b == PREFILL else "decode"
                out[f"{stage}.recurrent"] = cache.get_recurrent_state(module.layer_idx, state_idx=0).clone()
                conv = cache.get_conv_state(module.layer_idx, state_idx=0)
                for n, state in zip("qkv", conv.chunk(3, 1)):
                    out[f"{stage}.conv_{n}"] = state[..., 1:].clone()
        out["y_cached"] = torch.cat(pieces, 1)
    return out


class Native:
    """One layer of a transformers model, with parameters rounded to the dtypes of its checkpoint."""

    def __init__(self, sources, model, config, index, name, dtypes, full_gate=False):
        wrap = FullRankGate if full_gate else lambda layer: layer
        self.name, self.config = name, config
        self.layer64 = wrap(native_source.layer_class(sources, model, True))(config, index).double()
        self.layer32 = wrap(native_source.layer_class(sources, model, False))(config, index).float()
        self.bounded = model != "kimi_linear"
        r, self.params = rng("checkpoint " + name), {}
        with torch.no_grad():
            for own, p in self.layer64.named_parameters():
                n = published(own)
                if full_gate:
                    n = n.replace("g_b_proj", "g_proj")
                self.params[n] = rounded(values(n, tuple(p.shape), r, self.bounded), dtypes(n))
                p.copy_(self.params[n])
                self.layer32.get_parameter(own).copy_(self.params[n])
        self.x = rounded(r.standard_normal((2, LENGTH, config.hidden_size)), torch.bfloat16).float()

    def half(self):
        """The published layer in bfloat16, with its decay parameters in float32, as a checkpoint is served."""
        layer = copy.deepcopy(self.layer32)
        for n, p in layer.named_parameters():
            if published(n) not in ("A_log", "dt_bias"):
                p.data = p.data.to(torch.bfloat16)
        return layer

    def answers(self, report):
        """Inputs and answers, and how far the published layer is from them in bfloat16."""
        want, own = run(self.layer64, self.config, self.x.double()), run(self.layer32, self.config, self.x)
        worst = max((rel_rms(own[n], want[n]), n) for n in want)
        report(self.name, worst)
        assert worst[0] <= AGREE, f"{self.name}: the published layer in float32 is off by {worst}"
        assert rel_rms(want.pop("y_cached"), want["y"]) < 1e-13  # chunked and recurrent form, one copy is enough
        half = run(self.half(), self.config, self.x.to(torch.bfloat16))
        return {"x": self.x, **want}, dict(bf16={n: float(f"{rel_rms(half[n], want[n]):.2e}") for n in want})

    def tensors(self, prefix, native=False):
        """As published: three convolutions; or as transformers holds them: one, and the decay in `forget_gate`."""
        if native:
            gate = {"A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight", "f_proj.weight"}
            return {prefix + ("forget_gate." if n in gate else "") + n: p for n, p in self.params.items()}
        out = {n: p for n, p in self.params.items() if n != "conv1d.weight"}
        for n, part in zip("qkv", self.params["conv1d.weight"].chunk(3, 0)):
            out[f"{n}_conv1d.weight"] = part
        return {prefix + n: p for n, p in out.items()}


def wide(*names):
    """float32 for these parameters and bfloat16 for the rest."""
    return lambda n: torch.float32 if n in names else torch.bfloat16


def noise(name, shape, dtype=torch.bfloat16):
    return rounded(rng("other " + name).standard_normal(shape), torch.float32).to(dtype)


def mla(prefix):
    """A full-attention layer beside the KDA layers, whose tensors must not be taken for theirs."""
    return {prefix + n: noise(prefix + n, s) for n, s in {"q_proj.weight": (24, HIDDEN), "kv_a_proj_with_mqa.weight": (20, HIDDEN), "o_proj.weight": (HIDDEN, 24)}.items()}


def kimi_linear(sources, report):
    config = KimiLinearConfig(hidden_size=HIDDEN, num_hidden_layers=5, linear_attn_config=dict(kda_layers=[1, 2, 3, 5], full_attn_layers=[4], num_heads=HEADS, head_dim=HEAD_DIM, short_conv_kernel_size=4))
    written = dict(architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", hidden_size=HIDDEN, num_hidden_layers=5, num_attention_heads=HEADS, head_dim=12, rms_norm_eps=1e-5, dtype="bfloat16",
                   linear_attn_config=dict(kda_layers=[1, 2, 3, 5], full_attn_layers=[4], num_heads=HEADS, head_dim=HEAD_DIM, short_conv_kernel_size=4))
    layers = {i: Native(sources, "kimi_linear", config, i, f"kimi_linear/{i}", wide("A_log", "dt_bias")) for i in (0, 1, 2, 4)}
    at = "model.layers.{}.self_attn.".format
    shards = [{}, {}]
    for i, layer in layers.items():
        for k, (n, p) in enumerate(sorted(layer.tensors(at(i)).items())):
            shards[k % 2 if i == 1 else i > 1][n] = p  # layer 1 lies in both shards
    expert = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    shards[0][expert] = noise(expert, (8, HIDDEN), torch.float8_e4m3fn)  # a dtype that Burn does not have
    shards[1] |= mla(at(3))
    return written, shards, {i: layers[i].answers(report) for i in (0, 1, 4)}


def kimi_linear_native(sources, report):
    config = KimiLinearConfig(hidden_size=HIDDEN, num_hidden_layers=2, linear_num_heads=HEADS, linear_head_dim=HEAD_DIM, layer_types=["full_attention", "linear_attention"])
    layer = Native(sources, "kimi_linear", config, 1, "kimi_linear_native/1", lambda n: torch.float32)
    return json.loads(config.to_json_string()), [layer.tensors("model.layers.1.self_attn.", native=True)], {1: layer.answers(report)}


def kimi_k3(sources, report):
    heads = 3
    config = Glm5NextTextConfig(hidden_size=HIDDEN, num_hidden_layers=4, linear_num_heads=heads, linear_head_dim=HEAD_DIM, layer_types=["linear_attention"] * 2 + ["full_attention"] * 2)
    text = dict(architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=heads, rms_norm_eps=1e-5,
                linear_attn_config=dict(kda_layers=[1, 2], full_attn_layers=[3, 4], num_heads=heads, head_dim=HEAD_DIM, short_conv_kernel_size=4, gate_lower_bound=-5.0, use_full_rank_gate=True))
    written = dict(architectures=["KimiK3ForConditionalGeneration"], model_type="kimi_k3", dtype="bfloat16", text_config=text)
    tensors, answers = {}, {}
    for i in (0, 1):
        layer = Native(sources, "glm5_next", config, i, f"kimi_k3/{i}", wide("A_log", "dt_bias", "conv1d.weight", "o_norm.weight"), full_gate=True)
        answers[i] = layer.answers(report)
        layer.params["A_log"] = torch.nn.functional.pad(layer.params["A_log"], (0, 1))  # 128 numbers for 96 heads, the tail 0
        tensors |= layer.tensors(f"language_model.model.layers.{i}.self_attn.")
    expert = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"
    return written, [tensors | {expert: torch.arange(64, dtype=torch.uint8).reshape(4, 16)}], answers


def glm(sources, native):
    config = Glm5NextTextConfig(hidden_size=HIDDEN, num_hidden_layers=2 if native else 5, linear_num_heads=HEADS, linear_head_dim=HEAD_DIM)
    dtypes = (lambda n: torch.float32) if native else wide("A_log", "dt_bias")
    name = "glm5_next_native" if native else "glm5_next"
    return config, {i: Native(sources, "glm5_next", config, i, f"{name}/{i}", dtypes) for i in ([1] if native else [0, 4])}


def glm5_next(sources, report):
    config, layers = glm(sources, native=False)
    text = dict(model_type="glm5_next_text", hidden_size=HIDDEN, num_hidden_layers=5, rms_norm_eps=1e-5, linear_num_heads=HEADS, linear_head_dim=HEAD_DIM, linear_conv_kernel_dim=4, linear_lower_bound=-5.0)
    at = "model.language_model.layers.{}.self_attn.".format
    tensors = {n: p for i, layer in layers.items() for n, p in layer.tensors(at(i)).items()}
    written = dict(architectures=["Glm5NextForConditionalGeneration"], model_type="glm5_next", dtype="bfloat16", text_config=text)
    return written, [tensors | mla(at(3))], {i: layer.answers(report) for i, layer in layers.items()}


def glm5_next_native(sources, report):
    config, layers = glm(sources, native=True)
    written = dict(model_type="glm5_next", text_config=json.loads(config.to_json_string()))
    return written, [layers[1].tensors("model.language_model.layers.1.self_attn.", native=True)], {1: layers[1].answers(report)}


def ling(sources, native):
    config = BailingHybridConfig(hidden_size=HIDDEN, num_hidden_layers=3, layer_group_size=3, num_attention_heads=HEADS, head_dim=HEAD_DIM, qk_rope_head_dim=12)
    dtypes = (lambda n: torch.float32) if native else wide("A_log", "dt_bias", "conv1d.weight")
    name = "bailing_hybrid_native" if native else "bailing_hybrid"
    return config, {i: Native(sources, "bailing_hybrid", config, i, f"{name}/{i}", dtypes) for i in ([1] if native else [0, 1])}


def bailing_hybrid(sources, report):
    _, layers = ling(sources, native=False)
    at = "model.layers.{}.attention.".format
    tensors = {n: p for i, layer in layers.items() for n, p in layer.tensors(at(i)).items()}
    # `g_proj` and `o_proj`'s namesake `dense` are names of the full-attention layers as well.
    tensors |= {at(2) + n: noise(n, s) for n, s in {"g_proj.weight": (HEADS, HIDDEN), "kv_b_proj.weight": (24, 8), "dense.weight": (HIDDEN, 24)}.items()}
    written = dict(architectures=["BailingMoeV3ForCausalLM"], model_type="bailing_hybrid", dtype="bfloat16", hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=HEADS, head_dim=HEAD_DIM, rms_norm_eps=1e-6,
                   layer_group_size=3, short_conv_kernel_size=4, no_kda_lora=True, kda_safe_gate=True, kda_lower_bound=-5.0, num_nextn_predict_layers=1)
    return written, [tensors], {i: layer.answers(report) for i, layer in layers.items()}


def bailing_hybrid_native(sources, report):
    config, layers = ling(sources, native=True)
    return json.loads(config.to_json_string()), [layers[1].tensors("model.layers.1.self_attn.", native=True)], {1: layers[1].answers(report)}


def shapes():
    """Shape of every parameter of one layer at its published size, under its published name."""
    sources = native_source.verify()
    k3 = Glm5NextTextConfig(hidden_size=7168, linear_num_heads=96)
    layers = dict(
        kimi_linear_48b=native_source.layer_class(sources, "kimi_linear", False)(KimiLinearConfig(), 0),
        kimi_k3=FullRankGate(native_source.layer_class(sources, "glm5_next", False))(k3, 0),
        glm_5_3_flash=native_source.layer_class(sources, "glm5_next", False)(Glm5NextTextConfig(), 0),
        ling_3_flash=native_source.layer_class(sources, "bailing_hybrid", False)(BailingHybridConfig(), 0),
    )
    eps = {n: layer.o_norm.variance_epsilon for n, layer in layers.items()}
    out = {n: {published(p).replace("g_b_proj", "g_proj" if n == "kimi_k3" else "g_b_proj"): list(t.shape) for p, t in layer.named_parameters()} for n, layer in layers.items()}
    return {n: dict(shapes=out[n], norm_eps=eps[n]) for n in out}


NATIVE = [kimi_linear, kimi_linear_native, kimi_k3, glm5_next, glm5_next_native, bailing_hybrid, bailing_hybrid_native]
