#!/usr/bin/env python3
"""What the program says about cards: one that is there and not used, none, a driver that is too old, and -dev; and a text written with
layers streamed and split on a described card: the same as without one, every speed marked as simulated. Arguments: the
program built against the emulator, the folder of test data."""
import os
import pathlib
import subprocess
import sys
import tempfile

BAD = []


def run(env, *args):
    r = subprocess.run([PROGRAM, *args], capture_output=True, text=True, env={**os.environ, **env}, stdin=subprocess.DEVNULL)
    return r.returncode, r.stdout, r.stderr


def expect(env, args, status, out=(), err=(), not_err=()):
    rc, o, e = run(env, *args)
    for where, text, words in (("stdout", o, out), ("stderr", e, err)):
        BAD.extend(f"{env} {args}: no '{w}' in {where}: {text}" for w in words if w not in text)
    BAD.extend(f"{env} {args}: '{w}' in stderr: {e}" for w in not_err if w in e)
    if rc != status:
        BAD.append(f"{env} {args}: status {rc}, want {status}\n{o}{e}")


def main():
    model = str(pathlib.Path(sys.argv[2]) / "stories260K" / "stories260K-f32.gguf")
    write = ("run", "-m", model, "-p", "Once", "-n", "1")
    none, old = {"EMU_DEVICES": "0"}, {"EMU_DRIVER": "11000"}
    expect({}, ("--version",), 0, out=["GPU back end: 0: ", "sm_80", "PCI "])
    expect(none, ("--version",), 0, out=["GPU back end: no GPU found"])
    expect(old, ("--version",), 0, out=["GPU driver too old", "11.0", "13.0"])
    # cudaErrorNoKernelImageForDevice where the kernels are loaded
    expect({"EMU_FAIL": "cudaFuncGetAttributes:1"}, ("--version",), 0, out=["GPU back end: GPU 0", "-DLONGHAUL_CUDA_ARCHS=80"])
    expect({}, write, 0, err=["sm_80", "not used"])
    expect({}, (*write, "-dev", "none"), 0, not_err=["not used"])
    expect({}, (*write, "-dev", "0"), 0, err=["not used"])
    expect({}, (*write, "-dev", "CUDA0"), 0, err=["not used"])
    expect({}, (*write, "-dev", "0", "--strict"), 5, err=["-dev 0", "--strict"])
    for wrong in ("1", "cuda1", "-1", "1x", "99999999999999999999", "", "cuda"):
        expect({}, (*write, "-dev", wrong), 2, err=["-dev " + wrong])
    expect({}, (*write, "-dev", "1"), 2, err=["there is 1 GPU", "-dev none"])
    expect(none, write, 0, not_err=["GPU"])
    expect(none, (*write, "-dev", "0"), 2, err=["there are 0 GPUs", "-dev none"])
    expect(old, write, 1, err=["GPU driver too old", "-dev none"])
    expect(old, (*write, "-dev", "none"), 0)
    expect({}, ("plan", "-m", model), 0, out=["GPU back end: 0: "], err=["not used"])
    expect({}, ("bench", "-m", model, "-p", "1", "-n", "0", "-dev", "0"), 2, err=["-dev 0"])
    expect({}, ("bench", "-m", model, "-p", "1", "-n", "0", "-r", "1"), 0, err=["not used"])
    text = ("run", "-m", model, "-p", "Once upon", "-n", "40", "--temp", "0")
    _, plain, _ = run({}, *text, "-dev", "none")
    for mib in ("1", "64"):
        rc, out, err = run({}, *text, "--machine", "v100-16g-pcie3", "--vram-mib", mib)
        streamed = [line for line in err.splitlines() if line.startswith("streamed")]
        if rc or out != plain:
            BAD.append(f"--vram-mib {mib}: status {rc}, wrote {out!r}, without a GPU {plain!r}\n{err}")
        if not streamed or (mib == "1") == (" 0.0 KiB in all" in streamed[0]):
            BAD.append(f"--vram-mib {mib}: {err}")
        for line in err.splitlines():
            if ("per second" in line or "GB/s" in line or " ms" in line) and "simulated" not in line:
                BAD.append(f"--vram-mib {mib}: a speed that is not marked: {line}")
    rc, out, _ = run({}, *text, "--machine", "v100-16g-pcie3", "--vram-mib", "1", "--json")
    if rc or '"simulated": true' not in out.replace('"simulated":true', '"simulated": true') or '"vram_planned_bytes":0' in out:
        BAD.append(f"--json: {out}")
    for layers in (0, 2, 5):
        rc, out, err = run({}, *text, "--machine", "v100-16g-pcie3", "-ngl", str(layers), "--dry-run")
        parts = [line.split() for line in out.splitlines() if "attention parts" in line]
        if rc or parts != [["attention", "parts", str(layers), str(5 - layers), "0"]]:
            BAD.append(f"-ngl {layers}: status {rc}, {parts} {err}")
    expect({}, (*text, "--vram-mib", "1"), 2, err=["--machine"])
    expect({}, (*text, "--machine", "nosuch"), 2, err=["nosuch"])
    expect(none, (*text, "--machine", "v100-16g-pcie3"), 2, err=["no GPU"])
    # the arena is refused once: planned again with less (a file: simulations begin with a fresh card, without faults)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        f.write('{"name": "card", "origin": "edited", "date": "2026-12-01", "gpu": {"name": "V100", "sm": 70, "vram_bytes": 16.94e9}}')
        f.flush()
        expect({"EMU_FAIL": "cudaMalloc:1"}, (*text, "--machine", f.name, "--vram-mib", "8"), 0, out=[plain], err=["planning with"])
        kv = (*text, "--machine", f.name, "--vram-mib", "1", "-c", "512")
        expect({"EMU_FAIL": "cudaHostRegister:2"}, kv, 0, out=[plain], err=["of KV in host memory cannot be page-locked"])
        expect({"EMU_FAIL": "cudaHostRegister:2"}, (*kv, "--strict"), 5, err=["of KV in host memory", "--strict"])
        expect({}, kv, 0, out=[plain], not_err=["page-locked:"])
    print(*BAD, sep="\n", end="\n" if BAD else "")
    return 1 if BAD else 0


PROGRAM = sys.argv[1]
if __name__ == "__main__":
    sys.exit(main())
