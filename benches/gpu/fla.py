"""Times flash-linear-attention at the shapes of benches/gpu, on a CUDA device; prints the same CSV.

    pip install flash-linear-attention==0.6.0 torch
    python benches/gpu/fla.py > fla.csv
"""

import statistics
import time

import torch
from fla.ops.kda import chunk_kda, fused_recurrent_kda

SHAPES = [(1, 8192, 64, 128, 128), (1, 8192, 16, 128, 128), (1, 1024, 64, 128, 128), (1, 1, 64, 128, 128), (64, 1, 64, 128, 128)]


def inputs(shape, dtype):
    batch, length, heads, key_dim, value_dim = shape
    normal = lambda width: torch.randn(batch, length, heads, width, device="cuda")
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1)
    q, k, v, g = unit(normal(key_dim)), unit(normal(key_dim)), normal(value_dim), -normal(key_dim).abs()
    beta = torch.rand(batch, length, heads, device="cuda")
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype)]


def median(run, calls=1):
    """Milliseconds of one call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return statistics.median(times)


def main():
    print("batch,time,heads,key_dim,value_dim,dtype,pass,ms")
    for shape in SHAPES:
        for name, dtype in {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}.items():
            row = lambda what, ms: print(*shape, name, what, ms, sep=",", flush=True)
            tensors = inputs(shape, dtype)
            if shape[1] == 1:
                batch, _, heads, key_dim, value_dim = shape
                state = torch.zeros(batch, heads, key_dim, value_dim, device="cuda")
                step = lambda: fused_recurrent_kda(*tensors, initial_state=state, output_final_state=True)
                with torch.no_grad():
                    row("step", median(step, calls=100))
                continue
            with torch.no_grad():
                row("forward", median(lambda: chunk_kda(*tensors, output_final_state=True)))
            leaves = [x.requires_grad_() for x in tensors]
            row("forward and backward", median(lambda: chunk_kda(*leaves)[0].float().sum().backward()))


main()
