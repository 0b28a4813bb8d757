"""Writes fixtures/checkpoints/: small checkpoints of each family with float64 answers. `--check`: regenerate elsewhere and compare.

Each family has a folder as it would be published (config.json and safetensors); `answers.safetensors` holds inputs and answers
of their layers as `family/layer/tensor`. See README.md.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MKL_CBWR="COMPATIBLE", ATEN_CPU_CAPABILITY="default")

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import fla_source
import gen_kda_oracle

HERE = Path(__file__).resolve().parent


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_checkpoint(folder, config, shards):
    from safetensors.torch import save_file

    folder.mkdir()
    write_json(folder / "config.json", config)
    if len(shards) == 1:
        save_file({n: t.contiguous().clone() for n, t in shards[0].items()}, folder / "model.safetensors", metadata={"format": "pt"})
        return
    index = {}
    for k, shard in enumerate(shards, 1):
        file = f"model-{k:05}-of-{len(shards):05}.safetensors"
        save_file({n: t.contiguous().clone() for n, t in shard.items()}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def generate(folder, quiet):
    import layer_cases  # noqa: F401  before anything else imports Triton
    import torch

    import checkpoint_cases
    import checkpoint_fla
    import native_source

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    sources, fla = native_source.verify(), fla_source.Reference(fla_source.verify())

    def report(name, worst):
        if not quiet:
            print(f"  {name}: the published layer in float32 is off by {worst[0]:.1e} ({worst[1:]})")

    cases = [(make.__name__, make(sources, report)) for make in checkpoint_cases.NATIVE] + [("kda", checkpoint_fla.kda(fla, report))]
    tensors, meta = {}, {}
    for name, (config, shards, answers) in cases:
        write_checkpoint(folder / name, config, shards)
        for layer, (answer, notes) in answers.items():
            tensors |= {f"{name}/{layer}/{n}": t for n, t in answer.items()}
            meta[f"{name}/{layer}"] = dict(folder=name, layer=layer, prefill=checkpoint_cases.PREFILL, **notes)
    gen_kda_oracle.write(folder, "answers", tensors, meta)
    write_json(folder / "presets.json", checkpoint_cases.shapes())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="regenerate into a temporary folder and compare with the committed files")
    parser.add_argument("--quiet", action="store_true", help="do not print the published layers' own float32 errors")
    args = parser.parse_args()
    fixtures = HERE / "fixtures" / "checkpoints"

    def sums(folder):
        return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*") if f.is_file()}

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        generate(folder, args.quiet)
        if args.check:
            old, new = sums(fixtures), sums(folder)
            for name in sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n)):
                print("differs:", name)
            print("same bytes" if new == old else "NOT the same bytes")
            sys.exit(new != old)
        for name in sums(folder):
            (fixtures / name).parent.mkdir(parents=True, exist_ok=True)
            (fixtures / name).write_bytes((folder / name).read_bytes())
    (HERE / "MANIFEST.sha256").write_text(gen_kda_oracle.manifest(HERE / "fixtures"))


if __name__ == "__main__":
    main()
