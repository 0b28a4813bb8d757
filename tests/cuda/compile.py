"""Compiles CUDA C++ as a CUDA device would, without one: NVRTC to PTX, ptxas to machine code.

    python compile.py DIR

prints, for every `ARCHITECTURE/*.cu` in DIR, registers, spilled bytes, shared memory and tensor-core
instructions as CSV. Needs the wheels in requirements.txt; exits with 77 if they are not there.
"""

import concurrent.futures
import ctypes
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ABSENT = 77


def toolkit():
    """The folder that the wheels share."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else []:
        for root in pathlib.Path(place).glob("cu*"):
            if (root / "bin/ptxas").exists() and list((root / "lib").glob("libnvrtc.so*")):
                return root
    print("the wheels of requirements.txt are not installed", file=sys.stderr)
    sys.exit(ABSENT)


class Nvrtc:
    def __init__(self, root):
        self.lib = ctypes.CDLL(str(next((root / "lib").glob("libnvrtc.so*"))))
        self.include = root / "include"

    def ptx(self, source, architecture):
        program = ctypes.c_void_p()
        self.lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
        options = [f"--gpu-architecture={architecture.replace('sm', 'compute')}", f"--include-path={self.include}"]
        options = (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
        if self.lib.nvrtcCompileProgram(program, len(options), options):
            raise SystemExit(f"{self._text(program, 'ProgramLog')}\n{source}")
        return self._text(program, "PTX")

    def _text(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self.lib, f"nvrtcGet{what}")(program, text)
        return text.value.decode()


def assemble(root, ptx, architecture):
    """What ptxas says of a kernel: registers, spilled bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "kernel.ptx"
        file.write_text(ptx)
        command = [root / "bin/ptxas", "-v", f"--gpu-name={architecture}", file, "-o", f"{scratch}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    number = lambda pattern: sum(int(x) for x in re.findall(pattern, done.stderr))
    return number(r"Used (\d+) registers"), number(r"(\d+) bytes spill")


def main():
    root = toolkit()
    nvrtc = Nvrtc(root)

    def row(file):
        architecture = file.parent.name
        source = file.read_text()
        ptx = nvrtc.ptx(source, architecture)
        registers, spilled = assemble(root, ptx, architecture)
        shared = re.match(r"// (\d+) bytes", source)[1]  # Asked for at the launch, so ptxas does not know.
        tensor = len(re.findall(r"\b(?:wmma\.mma|mma\.sync|wgmma\.mma)", ptx))
        return f"{file.stem},{architecture},{registers},{spilled},{shared},{tensor}"

    print("kernel,architecture,registers,spilled bytes,shared bytes,tensor-core instructions")
    files = sorted(pathlib.Path(sys.argv[1]).glob("*/*.cu"), key=lambda file: (file.stem, file.parent.name))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for text in pool.map(row, files):
            print(text)


main()
