#!/usr/bin/env python3
"""Compile gates of gpu/: what the emulator cannot see. Every gpu/*.cu is compiled for real chips with warnings as errors, and
what ptxas says about each kernel is read: a kernel that spills registers, or keeps an array in memory of its own because
it is indexed at run time, fails unless EXEMPT says why it may.

  gates.py kernels SOURCE WORK [--archs ci|full|75,80]   nvcc; what it cannot build for is named
  gates.py sm70 SOURCE WORK                              clang in CUDA mode makes PTX, ptxas 12.8 the code: CUDA 13 has no sm_70
  gates.py host SOURCE WORK [--cc CC]                    gpu/*.c as C11 against the real headers
  gates.py program SOURCE WORK [--cc CC] --files @FILE   links and starts the program with the real back end; FILE lists its
                                                         objects and libraries without gpu/
  gates.py table SOURCE WORK [--out CSV]                 all of the full list and sm_70 as a table

WORK keeps objects and findings by a hash of all that goes in, so that only what changed is compiled. Toolkits: CUDA_HOME,
CUDA_PATH, nvcc in PATH, the usual places, then what .ci/toolkits fetched (LONGHAUL_TOOLKITS, or build/toolkits);
LONGHAUL_GATES_PYPI=1 looks only there. Exit status 0 passed, 1 failed, 77 no toolkit."""
import argparse
import concurrent.futures
import csv
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

CI = (75, 80, 90, 120)
FULL = (75, 80, 86, 89, 90, 100, 120)
PROGRAM_ARCH = 80

# Kernel (the name without template arguments): why a stack frame or spills do no harm.
EXEMPT = {
    "rope_table_k": "once per pass: exact range reduction of double angles (cos, sin) keeps its digits in memory",
}

# A gate that finds nothing in these is broken.
SPILLS = """#include "gpu/compat.h"
__global__ void __launch_bounds__(1024) spill_k(float *y, const float *x) {
    float v[96];
#pragma unroll
    for (int i = 0; i < 96; i++) v[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) v[i] = v[i] * v[(7 * i + 1) % 96] + v[(i + 13) % 96];
#pragma unroll
    for (int i = 0; i < 96; i++) y[i * 1024 + threadIdx.x] = v[i];
}
"""
STACK = """#include "gpu/compat.h"
__global__ void stack_k(float *y, const float *x, int at) {
    float v[64];
    for (int i = 0; i < 64; i++) v[i] = x[i * at];
    for (int i = 0; i < 64; i++) y[i] = v[(i * at) & 63];
}
"""
WARNS = """#include "gpu/compat.h"
__global__ void warn_k(float *y) {
    int unused = 3;
    y[0] = 1;
}
"""


class Failed(Exception):
    pass


class Skipped(Exception):
    pass


# --- toolkits -------------------------------------------------------------------------------------------------------------


def fetched(source, name):
    base = pathlib.Path(os.environ.get("LONGHAUL_TOOLKITS") or source / "build" / "toolkits")
    return base / name


def find_cuda(source):
    """The folder of a CUDA toolkit that has nvcc, cuBLAS headers and a runtime library."""
    places = []
    if os.environ.get("LONGHAUL_GATES_PYPI") != "1":
        nvcc = shutil.which("nvcc")
        places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", "/opt/cuda",
                  nvcc and pathlib.Path(nvcc).resolve().parent.parent, "/usr/lib/cuda"]
    for p in [*places, fetched(source, "cuda13")]:
        if p and (pathlib.Path(p) / "bin" / "nvcc").is_file() and (pathlib.Path(p) / "include" / "cuda_runtime.h").is_file():
            return pathlib.Path(p).resolve()
    raise Skipped("no CUDA toolkit (nvcc with headers); .ci/toolkits fetches one")


def find_ptxas12(source):
    kit = fetched(source, "cuda12")
    clang = shutil.which("clang++-19")
    if not clang or not (kit / "bin" / "ptxas").is_file():
        raise Skipped(f"{'no clang++-19' if not clang else 'no ptxas 12.8'}; .ci/toolkits fetches it")
    return clang, kit.resolve()


def output_of(command):
    r = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return r.returncode, r.stdout


# --- one source for one chip ----------------------------------------------------------------------------------------------


def text_with_headers(source, path, seen):
    """The text of a file and of the project's headers that it includes, each once."""
    if path in seen:
        return ""
    seen.add(path)
    text = path.read_text()
    for header in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M):
        if (source / header).is_file():
            text += text_with_headers(source, source / header, seen)
    return text


class Nvcc:
    def __init__(self, source, cuda):
        self.source, self.nvcc = source, cuda / "bin" / "nvcc"
        _, self.version = output_of([self.nvcc, "--version"])
        _, codes = output_of([self.nvcc, "--list-gpu-code"])
        self.archs = {int(a) for a in re.findall(r"sm_(\d+)\b", codes)}

    def key(self):
        return self.version + repr(self.command("", "", 0))

    def command(self, src, obj, arch):
        return [self.nvcc, "-std=c++17", "-O3", "-I", self.source, f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Werror",
                "all-warnings", "-Xcompiler", "-Wall,-Wextra", "-Xptxas", "-v,--warning-as-error", "-c", "-o", obj, src]

    def run(self, src, obj, arch):
        return output_of(self.command(src, obj, arch))


class Clang:
    def __init__(self, source, clang, kit):
        self.source, self.clang, self.kit = source, clang, kit
        self.version = output_of([clang, "--version"])[1] + output_of([kit / "bin" / "ptxas", "--version"])[1]

    def key(self):
        return self.version + repr(self.command("", "", 0))

    def command(self, src, ptx, arch):
        # The optimiser's remark that it did not unroll a loop is its opinion; what comes of it is seen in the registers.
        return [self.clang, "-std=c++17", "-x", "cuda", f"--cuda-path={self.kit}", f"--cuda-gpu-arch=sm_{arch}",
                "--cuda-device-only", "-O3", "-S", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-cuda-version",
                "-Wno-pass-failed", "-I", self.source, "-o", ptx, src]

    def run(self, src, obj, arch):
        ptx = obj.with_suffix(".ptx")
        rc, text = output_of(self.command(src, ptx, arch))
        if rc:
            return rc, text
        rc, said = output_of([self.kit / "bin" / "ptxas", f"-arch=sm_{arch}", "-v", "--warning-as-error", ptx, "-o", obj])
        ptx.unlink(missing_ok=True)
        return rc, text + said


def read_ptxas(text):
    """What `ptxas -v` said: a record per kernel."""
    kernels, at = {}, None
    for line in text.splitlines():
        if m := re.search(r"Compiling entry function '([^']+)'", line):
            at = kernels.setdefault(m[1], {"stack": 0, "spill": 0, "registers": None, "smem": 0})
        elif m := re.search(r"Function properties for (\S+)", line):
            at = kernels.get(m[1])  # None: a function that is no kernel
        elif at is not None and (m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            at["stack"], at["spill"] = int(m[1]), int(m[2]) + int(m[3])
        elif at is not None and (m := re.search(r"Used (\d+) registers", line)):
            at["registers"] = int(m[1])
            smem = re.search(r"(\d+) bytes smem", line)
            at["smem"] = int(smem[1]) if smem else 0
    return kernels


def compile_one(compiler, work, name, src, arch):
    """{mangled kernel: record}; raises Failed with the compiler's text. The object lies beside the record."""
    seen = set()
    text = text_with_headers(compiler.source, src, seen)
    digest = hashlib.sha256((compiler.key() + text).encode()).hexdigest()[:20]
    stem = f"{name}.{type(compiler).__name__.lower()}.sm_{arch}"
    record, obj = work / f"{stem}.{digest}.json", work / f"{stem}.{digest}.o"
    if record.is_file() and obj.is_file():
        return json.loads(record.read_text())
    for old in work.glob(f"{stem}.*"):
        old.unlink()
    rc, said = compiler.run(src, obj, arch)
    if rc:
        raise Failed(f"{src}: sm_{arch}:\n{said}")
    kernels = read_ptxas(said)
    if not kernels or any(k["registers"] is None for k in kernels.values()):
        raise Failed(f"{src}: sm_{arch}: no kernel, or the resources of one, in what ptxas said:\n{said}")
    record.write_text(json.dumps(kernels))
    return kernels


def demangle(names):
    r = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    # clang's mangled enum arguments carry their type: (quant_type)8
    return [re.sub(r"\(\w+\)(?=\d)", "", n).replace("void ", "") for n in r.stdout.split("\n")]


def findings(records):
    """Sentences about kernels that use memory of their own. records: {(file, arch): {kernel: record}}"""
    for (name, arch), kernels in sorted(records.items()):
        for kernel, k in sorted(kernels.items()):
            if (k["spill"] or k["stack"]) and re.sub(r"<.*", "", kernel) not in EXEMPT:
                yield (f"{name}: sm_{arch}: {kernel}: {k['spill']} bytes of spills, {k['stack']} bytes of stack with"
                       f" {k['registers']} registers")


def compile_all(compiler, work, jobs):
    """{(file, arch): {demangled kernel: record}}. All are compiled before what failed is told."""
    work.mkdir(parents=True, exist_ok=True)
    records, bad = {}, []
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        tasks = {pool.submit(compile_one, compiler, work, src.stem, src, arch): (src, arch) for src, arch in jobs}
        for done in concurrent.futures.as_completed(tasks):
            src, arch = tasks[done]
            try:
                kernels = done.result()
                records[src.name, arch] = dict(zip(demangle(kernels), kernels.values()))
            except Failed as e:
                bad.append(str(e))
    if bad:
        raise Failed("\n".join(sorted(bad)))
    return records


def check_planted(compiler, work, arch):
    work.mkdir(parents=True, exist_ok=True)
    for name, text in (("spill", SPILLS), ("stack", STACK)):
        src = work / f"planted_{name}.cu"
        if not src.is_file() or src.read_text() != text:
            src.write_text(text)
        if not list(findings(compile_all(compiler, work, [(src, arch)]))):
            raise Failed(f"planted: the {name} of a kernel for sm_{arch} was not found")
    src = work / "planted_warning.cu"
    src.write_text(WARNS)
    try:
        compile_one(compiler, work, "planted_warning", src, arch)
    except Failed:
        return
    raise Failed("planted: a warning was not an error")


def sources(source):
    found = sorted((source / "gpu").glob("*.cu"))
    if not found:
        raise Failed(f"{source}/gpu: no .cu file")
    return found


def gate(compiler, source, work, archs):
    check_planted(compiler, work, min(archs))
    # The largest first: what takes longest must not start last.
    order = sorted(sources(source), key=lambda p: -p.stat().st_size)
    return compile_all(compiler, work, [(src, arch) for src in order for arch in archs])


def judge(records):
    bad = list(findings(records))
    print(f"{sum(len(k) for k in records.values())} kernels of {len({f for f, _ in records})} files for"
          f" {' '.join(f'sm_{a}' for a in sorted({a for _, a in records}))}: {len(bad)} that spill or have a stack")
    if bad:
        raise Failed("\n".join(bad))


def nvcc_archs(compiler, wanted):
    have = [a for a in wanted if a in compiler.archs]
    for a in wanted:
        if a not in have:
            print(f"SKIPPED: sm_{a}: this nvcc does not build for it")
    if not have:
        raise Skipped(f"this nvcc builds for none of {wanted}")
    return have


# --- the gates ------------------------------------------------------------------------------------------------------------


def run_kernels(a):
    compiler = Nvcc(a.source, find_cuda(a.source))
    wanted = {"ci": CI, "full": FULL}.get(a.archs) or tuple(int(x) for x in a.archs.split(","))
    judge(gate(compiler, a.source, a.work, nvcc_archs(compiler, wanted)))


def run_sm70(a):
    judge(gate(Clang(a.source, *find_ptxas12(a.source)), a.source, a.work, [70]))


def host_objects(a, cuda, out):
    out.mkdir(parents=True, exist_ok=True)
    objects = []
    for src in sorted((a.source / "gpu").glob("*.c")):
        if src.name == "none.c":  # instead of the others
            continue
        objects.append(out / f"{src.stem}.c.o")
        rc, said = output_of([a.cc, "-std=c11", "-O2", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes",
                              "-Wpointer-arith", "-Wvla", "-Werror", "-I", a.source, "-isystem", cuda / "include", "-c", src,
                              "-o", objects[-1]])
        if rc:
            raise Failed(f"{src} with the headers of {cuda}:\n{said}")
    if len(objects) < 3:
        raise Failed("gpu/: hardly any .c file")
    return objects


def run_host(a):
    cuda = find_cuda(a.source)
    host_objects(a, cuda, a.work / "host")
    print(f"gpu/*.c is C11 with the headers of {cuda}")


def run_program(a):
    cuda = find_cuda(a.source)
    compiler = Nvcc(a.source, cuda)
    arch = nvcc_archs(compiler, (PROGRAM_ARCH,))[0]
    compile_all(compiler, a.work, [(src, arch) for src in sources(a.source)])
    kernels = [next(a.work.glob(f"{src.stem}.nvcc.sm_{arch}.*.o")) for src in sources(a.source)]
    program, lib = a.work / "longhaul", cuda / "lib64"
    rc, said = output_of([a.cc, "-o", program, "-Wl,--start-group", *a.files, *host_objects(a, cuda, a.work / "host"), *kernels,
                          "-Wl,--end-group", "-L", lib,
                          f"-Wl,-rpath,{lib}", "-Wl,--allow-shlib-undefined", "-lcublas", "-lcudart_static", "-lstdc++", "-pthread",
                          "-ldl", "-lrt", "-lm"])
    if rc:
        raise Failed(f"the program does not link with the real back end:\n{said}")
    rc, said = output_of([program, "--version"])
    line = re.search(r"^GPU back end: (.+)$", said, re.M)
    if rc or not line or "none in this build" in line[1]:
        raise Failed(f"longhaul --version of the program with the real back end: status {rc}\n{said}")
    print(f"linked with CUDA; it says 'GPU back end: {line[1]}'")


def run_table(a):
    """Kernels in rows; registers per chip. Shared memory may differ between chips, a stack and spills are given for each chip
    that has them."""
    nvcc = Nvcc(a.source, find_cuda(a.source))
    records = gate(nvcc, a.source, a.work, nvcc_archs(nvcc, FULL))
    records.update(gate(Clang(a.source, *find_ptxas12(a.source)), a.source, a.work, [70]))
    archs = sorted({arch for _, arch in records})
    rows = {}
    for (name, arch), kernels in records.items():
        for kernel, k in kernels.items():
            rows.setdefault((name, re.sub(r"\(.*", "", kernel)), {})[arch] = k
    out = a.out or a.source / "bench" / "results" / "gpu-resources.csv"
    release = re.search(r"release ([\d.]+), V([\d.]+)", nvcc.version)[2]
    with open(out, "w", newline="") as f:
        f.write(f"# tests/gates/gates.py table: what ptxas says of every kernel; nvcc {release}, sm_70 by clang 19 and ptxas 12.8\n")
        w = csv.writer(f, lineterminator="\n")
        w.writerow(["file", "kernel", *(f"registers_sm_{x}" for x in archs), "static_smem_bytes", "stack_bytes", "spill_bytes"])
        for (name, kernel), by in sorted(rows.items()):
            smem = sorted({k["smem"] for k in by.values()})
            only = {x: " ".join(f"sm_{arch}:{k[x]}" for arch, k in sorted(by.items()) if k[x]) or 0 for x in ("stack", "spill")}
            w.writerow([name, kernel, *(by[x]["registers"] if x in by else "" for x in archs),
                        smem[0] if len(smem) == 1 else f"{smem[0]}..{smem[-1]}", only["stack"], only["spill"]])
    print(f"wrote {out}")
    judge(records)


def main():
    modes = {"kernels": run_kernels, "sm70": run_sm70, "host": run_host, "program": run_program, "table": run_table}
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode", choices=modes)
    p.add_argument("source", type=lambda s: pathlib.Path(s).resolve())
    p.add_argument("work", type=pathlib.Path)
    p.add_argument("--archs", default="ci")
    p.add_argument("--cc", default="cc")
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--files", nargs="*", default=[])
    a = p.parse_args()
    try:
        a.work.mkdir(parents=True, exist_ok=True)
        modes[a.mode](a)
    except Skipped as e:
        print(f"SKIPPED: {e}")
        return 77
    except Failed as e:
        print(e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
