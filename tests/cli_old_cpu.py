"""One program on every x86-64 CPU, also those without AVX: on emulated CPUs it chooses the kernels that they have and gives
the ids that the same kernels give here; kernels that a CPU lacks are refused. Skipped where qemu-x86_64 is not installed.
usage: cli_old_cpu.py PROGRAM DATA_FOLDER"""
import json
import os
import platform
import shutil
import subprocess
import sys

PROGRAM, DATA = sys.argv[1], sys.argv[2]
MODELS = [os.path.join(DATA, "stories260K", "stories260K-q8_0.gguf"), os.path.join(DATA, "tiny-models", "tiny-random-qwen2-f32.gguf")]
CPUS = {"Nehalem": "generic", "IvyBridge": "generic", "Haswell": "avx2"}  # ... and the kernels that it has


def ids(prefix, model, *extra):
    done = subprocess.run([*prefix, PROGRAM, "run", "-m", model, "--prompt-ids", "1,5,9,30,2,77", "-n", "16", "--temp", "0", "-t", "1",
                           "--ignore-eos", "--json", *extra], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None, done.stderr


qemu = shutil.which("qemu-x86_64")
if not qemu or platform.machine() != "x86_64":
    print("skipped: qemu-x86_64 (Debian's qemu-user) is not installed")
    sys.exit(77)
bad = []
for cpu, kernels in CPUS.items():
    for model in MODELS:
        name = f"{cpu} {os.path.basename(model)}"
        rc, got, err = ids([qemu, "-cpu", cpu], model)
        if rc:
            bad.append(f"{name}: exit {rc}: {err[-300:]}")
            continue
        rc, want, err = ids([], model, "--kernels", kernels)
        if rc:
            print(f"{name}: not compared, this CPU has no {kernels}")
        elif got["ids"] != want["ids"]:
            bad.append(f"{name}: ids {got['ids']}, {kernels} kernels here give {want['ids']}")
rc, _, err = ids([qemu, "-cpu", "Nehalem"], MODELS[0], "--kernels", "avx2")
if rc != 2 or "avx2" not in err:
    bad.append(f"avx2 on a Nehalem: exit {rc} (want 2): {err[-300:]}")
for b in bad:
    print("FAILED", b)
sys.exit(1 if bad else 0)
