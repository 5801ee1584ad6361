#!/usr/bin/env python3
"""Compiles the demonstration kernels, the same text that the emulator runs, with nvcc for several architectures; fails on
errors, warnings and register spills. Arguments: source folder of the project. 77: no nvcc."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ARCHS = (75, 80, 90, 120)


def main():
    root = pathlib.Path(sys.argv[1])
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        print("SKIPPED: no nvcc, kernels are only built against the emulator")
        return 77
    with tempfile.TemporaryDirectory() as tmp:
        command = [nvcc, "-std=c++17", "-O3", "-I", root, "-Xptxas", "-v", "-Werror", "all-warnings", "-c", root / "tests/emu/demo.cu",
                   "-o", f"{tmp}/demo.o", *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHS)]
        r = subprocess.run(command, capture_output=True, text=True)
    spills = re.findall(r"(\d+) bytes spill stores", r.stderr)
    if r.returncode or len(spills) != 3 * len(ARCHS) or any(int(s) for s in spills):
        print(r.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
