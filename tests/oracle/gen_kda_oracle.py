"""Writes fixtures/*.safetensors and MANIFEST.sha256 from the installed FLA 0.6.0. `--check`: regenerate elsewhere and compare.

Inputs are float32, answers float64 (FLA's naive functions run in float64). Tensors are named `case/tensor`; the one metadata key
`cases` holds sorted JSON with each case's options. See README.md.
"""

import os

# One thread and one code path of the math libraries, so that the same machine gives the same bytes at any load.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MKL_CBWR="COMPATIBLE", ATEN_CPU_CAPABILITY="default")

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import fla_source

HERE = Path(__file__).resolve().parent


def write(folder, name, tensors, meta):
    from safetensors.torch import save_file

    tensors = {n: t.detach().contiguous().clone() for n, t in tensors.items()}
    # One key only: safetensors writes several metadata keys in no fixed order.
    save_file(tensors, folder / f"{name}.safetensors", metadata={"cases": json.dumps(meta, sort_keys=True)})


def generate(folder, quiet):
    fla = fla_source.Reference(fla_source.verify())
    import torch

    import layer_cases
    import operator_cases as op

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False

    def report(name, worst):
        if not quiet:
            print(f"  {name}: FLA's own float32 is off by {worst[0]:.1e} ({worst[1:]})")

    for name, cases in dict(lengths=op.length_cases, shapes=op.shape_cases, scale=op.scale_cases, regimes=op.regime_cases, packed=op.packed_cases).items():
        write(folder, name, *op.operator_file(fla, cases(), report))
    write(folder, "chunked_wy", *op.operator_file(fla, op.wy_cases(), report, form="chunk"))
    write(folder, "gates", *op.gate_cases(fla, report))
    for name, make in dict(l2norm=layer_cases.l2norm, conv=layer_cases.conv, norm=layer_cases.norm, layer=layer_cases.layer).items():
        write(folder, name, *make(fla, report))


def manifest(folder):
    files = sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
    return "".join(f"{hashlib.sha256((folder / f).read_bytes()).hexdigest()}  fixtures/{f}\n" for f in files)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="regenerate into a temporary folder and compare with MANIFEST.sha256")
    parser.add_argument("--quiet", action="store_true", help="do not print FLA's own float32 errors")
    args = parser.parse_args()
    fixtures = HERE / "fixtures"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        generate(folder, args.quiet)
        # Not from FLA: a hand-made set with its own answers, listed so that it is checked like the rest.
        (folder / "cases.json").write_bytes((fixtures / "cases.json").read_bytes())
        # Written by gen_checkpoints.py.
        shutil.copytree(fixtures / "checkpoints", folder / "checkpoints")
        new = manifest(folder)
        if args.check:
            old = (HERE / "MANIFEST.sha256").read_text()
            for line in sorted(set(new.splitlines()) ^ set(old.splitlines())):
                print("differs:", line)
            print("same bytes" if new == old else "NOT the same bytes")
            sys.exit(new != old)
        for f in folder.glob("*.*"):
            (fixtures / f.name).write_bytes(f.read_bytes())
        (HERE / "MANIFEST.sha256").write_text(manifest(fixtures))


if __name__ == "__main__":
    main()
