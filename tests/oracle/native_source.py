"""transformers' native KDA layers, in float64 and as published, from sources checked against their sha256.

The classes and functions of a layer are taken from the very bytes that were hashed: parsed, stripped of the decorators that
would send them to other kernels, float32 renamed to float64, executed. Nothing is imported from the modeling files.
"""

import __future__
import ast
import hashlib
import importlib.util
from pathlib import Path

PINS = {
    "models/kimi_linear/modeling_kimi_linear.py": "294c4445e2f14b003d27289578bf4b000ebc6733c69559e031cc4e423c3a2ab3",
    "models/kimi_linear/configuration_kimi_linear.py": "d32c766a2c7c240c5c5114454b3a494775b60642d14e7c9c99f2740fba46c1ba",
    "models/glm5_next/modeling_glm5_next.py": "39b3b1125db9ab2f4cc284af77bbbfca334ed6ab9994c1cdb85a9156db87730d",
    "models/glm5_next/configuration_glm5_next.py": "717e96bc8d24da5a69fcf20f886e5877a95a204780c27a3f85230bf3fbc058c7",
    "models/bailing_hybrid/modeling_bailing_hybrid.py": "d6ed07166bc33a4c8b18e82fdd60a7588db222a1505de80a6073c041ae240b69",
    "models/bailing_hybrid/configuration_bailing_hybrid.py": "777d3b2bf12703f0edd6f3b3e9b0a3d1c959f0cd5300558e782f87d91219f595",
    "cache_utils.py": "29651e0d89cc34d1af4b7d5d7f2c5dd81b584c8c5336f15652218640ea8465e5",
    "activations.py": "5b20c0a3625edc0001a98f09ce3c6b5baa1100e1d7ad8dee649e4d45c8468665",
}
FUNCTIONS = ["apply_mask_to_padding_states", "causal_conv1d_update", "causal_conv1d_fn", "l2norm", "recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"]
# Model: its file, its classes (the last is the layer), and how many places name a float32 dtype or call `.float()`.
MODELS = {
    "kimi_linear": ("models/kimi_linear/modeling_kimi_linear.py", ["KimiLinearRMSNormGated", "KimiLinearForgetGate", "KimiLinearDeltaAttention"], (7, 4)),
    "glm5_next": ("models/glm5_next/modeling_glm5_next.py", ["Glm5NextTextRMSNormGated", "Glm5NextTextForgetGate", "Glm5NextTextLinearAttention"], (9, 4)),
    "bailing_hybrid": ("models/bailing_hybrid/modeling_bailing_hybrid.py", ["BailingHybridRMSNormGated", "BailingHybridForgetGate", "BailingHybridDeltaAttention"], (9, 2)),
}


def verify():
    """The bytes of the pinned files."""
    spec = importlib.util.find_spec("transformers")  # finds the folder without executing the package
    if spec is None:
        raise SystemExit("transformers is not installed: pip install -r requirements.txt")
    root = Path(spec.submodule_search_locations[0])
    sources = {name: (root / name).read_bytes() for name in PINS}
    for name, data in sources.items():
        digest = hashlib.sha256(data).hexdigest()
        if digest != PINS[name]:
            raise SystemExit(f"transformers/{name} differs from 5.24.0: want {PINS[name]}, got {digest}")
    return sources


class _Double(ast.NodeTransformer):
    """`torch.float32` -> `torch.float64`, `.float()` -> `.double()`."""

    def __init__(self):
        self.dtypes = self.casts = 0

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr == "float32":
            node.attr, self.dtypes = "float64", self.dtypes + 1
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "float" and not node.args:
            node.func.attr, self.casts = "double", self.casts + 1
        return node


class _Plain(ast.NodeTransformer):
    """No decorators: they look for FLA's kernels and for hooks of other packages."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.decorator_list = []
        return node

    visit_ClassDef = visit_FunctionDef


def layer_class(sources, model, double):
    """The layer of `model`; with `double` in float64, having changed exactly the expected number of places."""
    import torch
    from transformers.activations import ACT2FN

    file, classes, places = MODELS[model]
    wanted = FUNCTIONS + classes
    nodes = [n for n in ast.parse(sources[file]).body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name in wanted]
    assert sorted(n.name for n in nodes) == sorted(wanted), f"{file}: found {[n.name for n in nodes]}"
    tree = _Plain().visit(ast.Module(nodes, []))
    if double:
        rename = _Double()
        tree = rename.visit(tree)
        assert (rename.dtypes, rename.casts) == places, f"{file}: changed {rename.dtypes, rename.casts} places, expected {places}"
    scope = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "ACT2FN": ACT2FN}
    # Annotations name types that are not imported here.
    exec(compile(ast.fix_missing_locations(tree), f"<transformers {file}>", "exec", __future__.annotations.compiler_flag), scope)
    return scope[classes[-1]]
