"""Finds the installed FLA 0.6.0, refuses any other source, and gives its reference functions in float64.

The naive functions are taken from the very bytes that were hashed: parsed, float32 renamed to float64, executed.
"""

import ast
import hashlib
import importlib.util
from pathlib import Path

# Every file whose code the generator runs for a value, one by one, so that a mismatch names the file.
PINS = {
    "ops/kda/naive.py": "60a32285d4b67068ff633b48bbe8ab31028066d24f00d27e12199a88fc73f016",
    "ops/kda/gate.py": "65cfcd169e3b382f127200a3a23b837412dd39ec063363ddd6e195d57509a2be",
    "ops/kda/chunk.py": "6c1239499e767db31f9b507ea15072671dc54f68d367105520111ff2d2f43cd6",
    "ops/kda/chunk_fwd.py": "11caf397a1af5fb3cace7e46ee1b601682fc4060ccc083aaf160803fec05ce7c",
    "ops/kda/chunk_bwd.py": "2fef18dc85dec9a7300fb28f1b0af566c12da14e4bb35bce24fcbfa8d296a47b",
    "ops/kda/chunk_intra.py": "aa3699a807cc41d40e10bee1828d69a42b7b624958bc99d7b595da18c299eab9",
    "ops/kda/chunk_intra_token_parallel.py": "e60bf7a08f11675716dc9cce550b6c9b26eb0a5c6dbc0e474050701c1a7596c3",
    "ops/kda/fused_recurrent.py": "37fed62f57152473d8f305cd45cf86864e69c27a5325d695ab7d4adefd10d0db",
    "ops/kda/wy_fast.py": "40fd108cf7c13e9d829c526f472f4f1d1061c0ccd2dd67f2992a1229178a68c2",
    "ops/common/chunk_delta_h.py": "ac9d7c0b841e8bab354ac1e6336b289460709fa5cfa3d466e0d87577b3e5d651",
    "ops/common/gate.py": "66b67a152457cf2e3bf6f154d4b2375d8ed5fd3895aae173d65254ec3e678871",
    "ops/gla/chunk.py": "4b8e6d4e1b9536f0d2151ae47d618c0cff11cac8e57102b5a125a25e46162c27",
    "ops/utils/cumsum.py": "4929c2f22adcb2b6cb57179a4aaee0ee75b970e6dd931c67ab6deeae68a2f324",
    "ops/utils/index.py": "f9c337ce1db1b27168b7d95fb741c695270f7d03131664b7a4898822f7af02cf",
    "ops/utils/op.py": "18cfb14ed285d6f4cc664b2d7e2e471d322fc897594eb13c61d179978bc50d0f",
    "ops/utils/softplus.py": "b36b5796abf6a75e216dd60aedb2804b16290c1a7dac75c91fc84b7ed72266f2",
    "ops/utils/cache.py": "a8ffda1ca609efaf366207a87ad5002253d39fd4b5e1fd9446345245d110e6f9",
    "ops/utils/constant.py": "b952bdcf039dee433f0cf49093c725971e6791878ad0afca655c82bb464574f8",
    "layers/kda.py": "13f49c331554eaa065727ff3977728dd29cbd7c55f0fa616f466c3af9b8071ac",
    "layers/utils.py": "99936599a5055da5473d3da52666c69f7c417188ca1a2648edb1d24f48398653",
    "models/cache_utils.py": "77edcffd849c63534eaae03145ae2623f873e0dd606affc901f35873a5b9d6bd",
    "modules/causal_conv1d/ops.py": "9b59b5004b843bdface81164c0850c0b0e791df688f046fcee1c1810e06f7b16",
    "modules/norm/fused_norm_gate.py": "481d5f635ddda176c648fcd7f6625042d6c86662f1ee90b702366bf1a4079dfb",
    "modules/norm/l2norm.py": "c33ae99f25e15b4b336978dcb6bf3e8ce7e0b18f1fd1c2ece0d92c4b4b532210",
    "backends.py": "05b20ee02d6b242f98db4fdd281f8861fc8f973a45d05ed07911a48774a84971",
    "utils/__init__.py": "faf4ad68120774f1c5735f529884f4ee639caf5e0f6403e210b1c1ef8c6840a1",
    "utils/decorators.py": "2aceb321ef16e942a67e7b675e40bd6c0d0496a898fd201c669729d496de6e9a",
    "utils/hardware.py": "5203bcd38df89f94419ef0a00f1bfa823894ba8521075282ca59288be43a7ae3",
}
# And the whole package (importing any FLA kernel imports all of it): sha256 over "<sha256>  <path>\n" of every fla/**/*.py, sorted.
TREE = "d4428438d7a2faee246ce8451557190f12cfd3de61ceb80f4553a9156dccbb7a"


def package_root():
    spec = importlib.util.find_spec("fla")  # finds the folder without executing the package
    if spec is None:
        raise SystemExit("fla is not installed: pip install -r requirements.txt")
    return Path(spec.submodule_search_locations[0])


def verify():
    """Reads every FLA source once and compares it with the pins. Returns the bytes of the pinned files."""
    root, seen = package_root(), {}
    for path in sorted(root.rglob("*.py")):
        seen[path.relative_to(root).as_posix()] = path.read_bytes()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in seen.items()}
    wrong = [f"fla/{name}: want {pin}, got {digests.get(name, 'no file')}" for name, pin in PINS.items() if digests.get(name) != pin]
    if wrong:
        raise SystemExit("FLA sources differ from 0.6.0:\n  " + "\n  ".join(wrong))
    tree = hashlib.sha256("".join(f"{digests[n]}  {n}\n" for n in sorted(digests)).encode()).hexdigest()
    if tree != TREE:
        raise SystemExit(f"the fla package as a whole differs from 0.6.0: want {TREE}, got {tree}")
    return {name: seen[name] for name in PINS}


class _Double(ast.NodeTransformer):
    """`torch.float`, `torch.float32` -> `torch.float64`; `.float()` -> `.double()`; and softplus never short-cut below 40.

    torch's softplus returns x itself above 20, which is 1e-10 off: invisible in float32, not in float64. At 40 it is exact.
    """

    def __init__(self):
        self.dtypes = self.casts = self.softplus = 0

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in ("float", "float32"):
            node.attr, self.dtypes = "float64", self.dtypes + 1
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "float" and not node.args:
            node.func.attr, self.casts = "double", self.casts + 1
        if isinstance(node.func, ast.Attribute) and node.func.attr == "softplus":
            node.keywords.append(ast.keyword("threshold", ast.Constant(40.0)))
            self.softplus += 1
        return node


def function(source, name, double=None):
    """Function `name` of `source`; with `double=(dtypes, casts, softplus)` in float64, having changed exactly that many places."""
    import torch
    import torch.nn.functional as F
    from einops import rearrange

    (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    if double is not None:
        rename = _Double()
        node = ast.fix_missing_locations(rename.visit(node))
        changed = (rename.dtypes, rename.casts, rename.softplus)
        assert changed == double, f"{name}: changed {changed} places, expected {double}"
    scope = {"torch": torch, "F": F, "rearrange": rearrange}
    exec(compile(ast.Module([node], []), f"<fla {name}>", "exec"), scope)
    return scope[name]


class Reference:
    """FLA's naive functions: `*64` in float64, `recurrent32` as published."""

    def __init__(self, sources):
        naive, gate = sources["ops/kda/naive.py"], sources["ops/kda/gate.py"]
        self.recurrent64 = function(naive, "naive_recurrent_kda", (1, 0, 0))
        self.chunk64 = function(naive, "naive_chunk_kda", (5, 0, 0))
        self.recurrent32 = function(naive, "naive_recurrent_kda")
        self.softplus_gate64 = function(gate, "naive_kda_gate", (1, 3, 1))
        self.softplus_gate32 = function(gate, "naive_kda_gate")
        self.sigmoid_gate64 = function(gate, "naive_kda_lowerbound_gate", (1, 2, 0))
        self.sigmoid_gate32 = function(gate, "naive_kda_lowerbound_gate")
