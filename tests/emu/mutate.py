#!/usr/bin/env python3
"""Leaves out, one at a time, every barrier and wait of the kernels and every wait and record of the host code in gpu/, and runs
the tests on the emulator until one of them fails. A site that no test misses is listed as SURVIVED: the tests lack a case, or the
site is not needed.

    tests/emu/mutate.py BUILD [FILE...] [--before COMMAND] [--out CSV]

BUILD: a build folder with the test_gpu_*_emu and test_gpu_*_race programs built. FILE: names of files in gpu/ (all of them).
COMMAND runs each test (its arguments follow). Kernels are not built anew: the emulator leaves out the line that EMU_SKIP names.
Host code is: a copy of the file without the call, linked into copies of the test programs."""
import argparse
import csv
import os
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEVICE = re.compile(r"__syncthreads\(\)|__syncwarp\(|cp_async_wait<\d+>\(\)")
HOST = re.compile(r"cudaStreamSynchronize|cudaEventRecord|cudaStreamWaitEvent|cudaEventSynchronize"
                  r"|= gpu_(?:stream_sync|event_record|event_sync|stream_wait)\(|\(void\)gpu_stream_sync\(")

# Which tests to ask first: programs without their ending, and a pattern of cases ("": all).
FIRST = {
    "attn_decode.cu": [("test_gpu_ops", "stored*"), ("test_gpu_ops", "attention_in*"), ("test_gpu_ops", "bad_values*"),
                       ("test_gpu_kv_store", "")],
    "attn_prefill.cu": [("test_gpu_prefill", "attention_masks*"), ("test_gpu_prefill", "batches*"), ("test_gpu_prefill", "")],
    "common.cuh": [("test_gpu_ops", "norms*"), ("test_gpu_ops", "stored*"), ("test_gpu_ops", "attention_in*")],
    "delta.cu": [("test_gpu_delta", "the_layer*"), ("test_gpu_delta", "hard*"), ("test_gpu_delta", "")],
    "dequant.cu": [("test_gpu_prefill", "products*"), ("test_gpu_prefill", "experts*"), ("test_gpu_prefill", "")],
    "experts.cu": [("test_gpu_prefill", "experts*"), ("test_gpu_prefill", "expert_tiles*"), ("test_gpu_prefill", "")],
    "matvec.cu": [("test_gpu_ops", "products*")],
}
ALL = [("test_gpu_ops", ""), ("test_gpu_delta", ""), ("test_gpu_prefill", "")]
HOST_TESTS = ["test_gpu_device_emu", "test_gpu_handover_emu", "test_gpu_faults_emu"]
VARIANTS = [("_emu", {"TEST_ORDERS": "1"}), ("_emu", {"TEST_ORDERS": "2"}), ("_race", {"TEST_ORDERS": "1"})]
LIMIT_S = 900


def sites(names):
    """(file, line, text) of everything that can be left out."""
    for name in sorted(os.listdir(os.path.join(ROOT, "gpu"))):
        if (names and name not in names) or name in ("none.c", "ptx.h", "compat.h"):
            continue
        pattern = HOST if name.endswith(".c") else DEVICE if name.endswith((".cu", ".cuh")) else None
        if not pattern:
            continue
        with open(os.path.join(ROOT, "gpu", name), encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                code = line.split("/*")[0]
                if pattern.search(code):
                    yield name, number, " ".join(code.split())


def run(command, extra, before):
    """Whether a test fails, how, and whether it came to the site."""
    env = dict(os.environ, TSAN_OPTIONS="halt_on_error=1", CMOCKA_MESSAGE_OUTPUT="STDOUT", **extra)
    try:
        p = subprocess.run(before + command, env=env, capture_output=True, text=True, errors="replace", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True, "does not end", True
    text = p.stdout + p.stderr
    reached = "EMU: leaves out" in text
    if p.returncode in (0, 77):
        return False, "", reached
    if "WARNING: ThreadSanitizer: data race" in text:
        return True, "data race", reached
    report = re.search(r"^EMU: (?!leaves out)(.*)$", text, re.M)
    failed = re.search(r"ERROR\s*\] --- (?:\[[^]]*\] ---)?\s*(.*)|^ERROR: (.*)$", text, re.M)
    return True, "report" if report else "wrong result" if failed else "status %d" % p.returncode, reached


def try_kernel(build, name, number, before):
    skip = {"EMU_SKIP": "gpu/%s:%d" % (name, number)}
    met, tried = False, set()
    for tests in (FIRST.get(name, []), ALL):
        for ending, extra in VARIANTS:
            for program, pattern in tests:
                key = (program + ending, pattern, extra["TEST_ORDERS"])
                if key in tried:
                    continue
                tried.add(key)
                command = [os.path.join(build, program + ending)] + ([pattern] if pattern else [])
                if not os.path.exists(command[0]):
                    continue
                fails, how, reached = run(command, dict(extra, **skip), before)
                met |= reached
                if fails and reached:
                    return how, "%s %s" % (program + ending, pattern)
                if fails:
                    sys.exit("%s fails without having left out anything: %s" % (" ".join(command), how))
    return ("SURVIVED" if met else "NOT REACHED"), ""


def commands(build, target):
    return subprocess.run(["ninja", "-C", build, "-t", "commands", target], capture_output=True, text=True, check=True).stdout.splitlines()


def without(line):
    """The line without its call."""
    if "GPU_TRY(" in line:
        return "    ;\n"
    line = re.sub(r"\(void\)gpu_stream_sync\([^;]*\)", "(void)0", line)
    return re.sub(r"= gpu_\w+\([^;]*\);", "= 0;", line)


def try_host(build, name, number, before):
    """Builds the file without the call in a folder of its own."""
    with tempfile.TemporaryDirectory() as work:
        source = os.path.join(ROOT, "gpu", name)
        with open(source, encoding="utf-8") as f:
            lines = f.readlines()
        if without(lines[number - 1]) == lines[number - 1]:
            sys.exit("gpu/%s:%d: cannot leave out: %s" % (name, number, lines[number - 1]))
        lines[number - 1] = without(lines[number - 1])
        copy = os.path.join(work, name)
        with open(copy, "w", encoding="utf-8") as f:
            f.writelines(lines)
        archive = "liblh_gpu_emu_800.a"
        made = os.path.join(work, name + ".o")
        compile_it = [c for c in commands(build, archive) if c.endswith(source)][-1]
        compile_it = re.sub(r" -o \S+ ", " -o %s " % made, compile_it)[: -len(source)] + copy + " -Wno-unused-label -Wno-error"
        subprocess.run(compile_it, shell=True, cwd=build, check=True)
        subprocess.run("cp %s %s && ar r %s %s" % (archive, work, os.path.join(work, archive), made), shell=True, cwd=build, check=True,
                       stderr=subprocess.DEVNULL)
        for test in HOST_TESTS:
            out = os.path.join(work, test)
            link = commands(build, test)[-1].replace(" " + archive, " " + os.path.join(work, archive))
            subprocess.run(link.replace("-o " + test + " ", "-o %s " % out), shell=True, cwd=build, check=True)
            fails, how, _ = run([out], {"TEST_ORDERS": "few"}, before)
            if fails:
                return how, test
    return "SURVIVED", ""


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("build")
    p.add_argument("files", nargs="*")
    p.add_argument("--before", default="", help="command that runs each test")
    p.add_argument("--out", help="CSV file; standard output otherwise")
    a = p.parse_args()
    build, before = os.path.abspath(a.build), shlex.split(a.before)
    out = open(a.out, "w", newline="", encoding="utf-8") if a.out else sys.stdout
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["file", "line", "left out", "outcome", "test"])
    survived = 0
    for name, number, text in sites(a.files):
        outcome, test = (try_host if name.endswith(".c") else try_kernel)(build, name, number, before)
        survived += outcome in ("SURVIVED", "NOT REACHED")
        table.writerow([name, number, text, outcome, test.strip()])
        out.flush()
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
