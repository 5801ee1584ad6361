#!/usr/bin/env python3
"""What the program says about cards: one that is there and not used, none, a driver that is too old, and -dev. Arguments: the
program built against the emulator, the folder of test data."""
import os
import pathlib
import subprocess
import sys

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
    print(*BAD, sep="\n", end="\n" if BAD else "")
    return 1 if BAD else 0


PROGRAM = sys.argv[1]
if __name__ == "__main__":
    sys.exit(main())
