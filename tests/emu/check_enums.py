#!/usr/bin/env python3
"""Compares every enum value and flag of the shadow headers with the real ones: writes a C file of static assertions and
compiles it against the toolkit's headers. Arguments: shadow include folder, C compiler. 77: no toolkit."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile


def toolkit():
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda",
              nvcc and pathlib.Path(nvcc).resolve().parent.parent]
    for p in places:
        if p and (pathlib.Path(p) / "include" / "cuda_runtime_api.h").is_file():
            return pathlib.Path(p) / "include"
    return None


def values(text):
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    for body in re.findall(r"enum(?:\s+\w+)?\s*\{([^}]*)\}", text):
        yield from re.findall(r"(\w+)\s*=\s*(-?\w+(?:\s*<<\s*\w+)?)", body)
    yield from re.findall(r"^#define (cuda[A-Z]\w+) (0x[0-9a-f]+)$", text, flags=re.M)


def main():
    include, cc = pathlib.Path(sys.argv[1]), sys.argv[2]
    real = toolkit()
    if not real:
        print("SKIPPED: no CUDA toolkit, the shadow headers' values are not compared with the real ones")
        return 77
    found = {h: dict(values((include / h).read_text())) for h in ("cuda_runtime.h", "cuda.h", "cublas_v2.h")}
    lines = ["#include <cuda_runtime_api.h>", "#include <cuda.h>", "#include <cublas_v2.h>"]
    for table in found.values():
        lines += [f'_Static_assert({n} == ({v}), "{n}");' for n, v in table.items()]
    if len(lines) < 150 or any(not t for t in found.values()):
        print(f"only {len(lines)} values found: the headers are not read rightly")
        return 1
    # A wrong value must be found, or this test cannot fail.
    for extra, want in (("", 0), ('_Static_assert(cudaErrorNotReady == 601, "planted");', 1)):
        with tempfile.TemporaryDirectory() as tmp:
            src = pathlib.Path(tmp) / "enums.c"
            src.write_text("\n".join(lines + [extra]) + "\n")
            r = subprocess.run([cc, "-std=c11", "-fsyntax-only", "-I", real, src], capture_output=True, text=True)
        if (r.returncode != 0) != want:
            print(r.stderr or "a planted wrong value was not found")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
