"""Times public implementations of KDA on a CPU at the shapes of the operator benchmark, and prints its columns.

    pip install -r benches/peers/requirements.txt
    python benches/peers/peers.py [--threads 1] [--quick]

- a plain C loop, by the machine's own compiler, on one thread
- ggml's `ggml_gated_delta_net`, from the library inside the wheel pywhispercpp
- flash-linear-attention's naive PyTorch functions
- the PyTorch functions that transformers falls back to for Kimi Linear

What is not installed is skipped. Every output is compared with that of the C loop.
"""

import argparse
import ctypes
import importlib.metadata
import inspect
import pathlib
import subprocess
import tempfile
import time

import numpy as np

SHAPES = [(1, 1024, 8, 64, 64), (1, 4096, 16, 128, 128), (1, 1, 32, 128, 128), (8, 1, 32, 128, 128)]
FLOAT = ctypes.POINTER(ctypes.c_float)


def compiled():
    """loop.c as a library."""
    source = pathlib.Path(__file__).with_name("loop.c")
    library = pathlib.Path(tempfile.mkdtemp()) / "loop.so"
    options = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run(["cc", *options, "-o", library, source, "-lm"], check=True)
    loop = ctypes.CDLL(str(library))
    loop.recurrence.argtypes = [ctypes.c_int64] * 5 + [ctypes.c_float] + [FLOAT] * 7
    loop.fma_chains.argtypes = [ctypes.c_int64, ctypes.c_float, FLOAT]
    loop.fma_chains.restype = ctypes.c_int64
    return loop


def fma_peak(loop):
    """GFLOP/s of one core."""

    def once():
        sums = (ctypes.c_float * 12)(*range(12))
        start = time.perf_counter()
        count = loop.fma_chains(2_000_000, 0.999, sums)
        return 2 * count / (time.perf_counter() - start) / 1e9

    return max(once() for _ in range(5))


def inputs(shape):
    batch, length, heads, keys, values = shape
    random = np.random.default_rng(0)
    normal = lambda width: random.standard_normal((batch, length, heads, width), dtype=np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v, g = unit(normal(keys)), unit(normal(keys)), normal(values), -np.abs(normal(keys))
    return q, k, v, g, random.random((batch, length, heads), dtype=np.float32)


def best(run, least_runs=3, least_seconds=0.5):
    """Seconds of the fastest call, after one that warms up."""
    run()
    times = []
    while len(times) < least_runs or sum(times) < least_seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def c_loop(loop, shape, tensors):
    batch, length, heads, keys, values = shape
    o = np.empty((batch, length, heads, values), np.float32)
    state = np.zeros((batch, heads, keys, values), np.float32)
    arguments = [x.ctypes.data_as(FLOAT) for x in (*tensors, state, o)]
    run = lambda: loop.recurrence(*shape, keys**-0.5, *arguments)
    run()
    first = o.copy()
    return first, {"C loop": run}


class Ggml:
    """As much of ggml's C interface as one operator needs."""

    F32 = 0

    class Parameters(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

    def __init__(self):
        files = importlib.metadata.files("pywhispercpp") or []
        base, cpu = (next(str(f.locate()) for f in files if f.name == name) for name in ("libggml-base.so", "libggml-cpu.so"))
        self.base = ctypes.CDLL(base, ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(cpu, ctypes.RTLD_GLOBAL)
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in [
            ("ggml_init", pointer, [self.Parameters]),
            ("ggml_free", None, [pointer]),
            ("ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int] + [size] * 4),
            ("ggml_get_data", pointer, [pointer]),
            ("ggml_gated_delta_net", pointer, [pointer] * 7 + [size]),
            ("ggml_new_graph", pointer, [pointer]),
            ("ggml_build_forward_expand", None, [pointer] * 2),
        ]:
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]

    def prepare(self, shape, tensors, threads):
        """A call, and its output afterwards."""
        batch, length, heads, keys, values = shape
        numbers = 2 * batch * heads * (length * (3 * keys + 2 * values + 1) + 2 * keys * values)
        context = self.base.ggml_init(self.Parameters(4 * numbers + (64 << 20), None, False))

        def tensor(array, *sizes):
            made = self.base.ggml_new_tensor_4d(context, self.F32, *sizes)
            ctypes.memmove(self.base.ggml_get_data(made), array.ctypes.data, array.nbytes)
            return made

        q, k, v, g, beta = tensors
        state = np.zeros((batch, heads, values, keys), np.float32)
        given = [tensor(x, x.shape[-1], heads, length, batch) for x in (q, k, v, g)]
        given += [tensor(beta, 1, heads, length, batch), tensor(state, state[0].size, 1, batch, 1)]
        result = self.base.ggml_gated_delta_net(context, *given, 1)
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, result)

        def run():
            self.cpu.ggml_graph_compute_with_ctx(context, graph, threads)

        def output():
            data = ctypes.cast(self.base.ggml_get_data(result), FLOAT)
            return np.ctypeslib.as_array(data, (batch, length, heads, values)).copy()

        return run, output


def ggml(shape, tensors, threads):
    run, output = Ggml().prepare(shape, tensors, threads)
    run()
    return output(), {"ggml_gated_delta_net": run}


def torch_functions(named, shape, tensors, threads):
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(x) for x in tensors]
    batch, _, heads, keys, values = shape
    state = torch.zeros(batch, heads, keys, values)

    def call(function):
        with torch.no_grad():
            return function(*tensors, initial_state=state, output_final_state=True)

    # One step needs no chunk, and no one would run a long sequence token by token.
    name, function = named[1 if shape[1] == 1 else 0]
    return call(function)[0].numpy(), {name: lambda: call(function)}


def fla(*arguments):
    from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

    return torch_functions(
        [("FLA naive_chunk_kda", naive_chunk_kda), ("FLA naive_recurrent_kda", naive_recurrent_kda)], *arguments
    )


def transformers(*arguments):
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    functions = [kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention]
    # Beneath FLA's kernels, which need a GPU and are called instead where FLA is installed.
    return torch_functions([(f"transformers {x.__name__}", inspect.unwrap(x)) for x in functions], *arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="short sequences")
    arguments = parser.parse_args()
    loop = compiled()
    peak = fma_peak(loop)
    print(f"threads: {arguments.threads}; FMA peak of one core: {peak:.0f} GFLOP/s (f32)\n")
    print("| peer | (B, T, H, K, V) | ms | GFLOP/s (7KV) | share of the peak |\n|---|---|---:|---:|---:|")
    for shape in SHAPES:
        batch, length, heads, keys, values = shape
        if arguments.quick:
            shape = (batch, min(length, 64), heads, keys, values)
        tensors = inputs(shape)
        want, runs = c_loop(loop, shape, tensors)
        for peer in (ggml, fla, transformers):
            try:
                got, more = peer(shape, tensors, arguments.threads)
            except (ImportError, OSError) as error:
                print(f"skipped, not installed: {peer.__name__} ({error})")
                continue
            difference = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert difference < 1e-4, f"{peer.__name__} at {shape} differs by {difference:.1e}"
            runs |= more
        for name, run in runs.items():
            seconds = best(run)
            speed = 7 * np.prod(shape) / seconds / 1e9
            print(f"| {name} | {shape} | {1e3 * seconds:.2f} | {speed:.2f} | {100 * speed / peak:.1f} % |", flush=True)


main()
