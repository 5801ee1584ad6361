#!/usr/bin/env python3
"""bench/device.sh on the emulated card: the table comes last, a failure shows in the status, and without a card it says so.
Arguments: source folder, folder of the built programs. Programs and benches are the emulated ones, with small sizes."""
import os
import pathlib
import subprocess
import sys
import tempfile

SOURCE, BUILD = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()


def script(path, text):
    path.write_text("#!/bin/sh\n" + text + "\n")
    path.chmod(0o755)


def pack(folder, handover):
    folder.mkdir()
    script(folder / "longhaul", f'exec "{BUILD}/longhaul-emu" "$@"')
    script(folder / "bench_gpu", f'exec "{BUILD}/bench_gpu_emu" --small --op matmul --type Q4_0')
    script(folder / "bench_gpu_handover", handover)
    for test in (SOURCE / "tests").glob("test_gpu_*.c"):
        quick = test.stem == "test_gpu_handover"
        script(folder / test.stem, f'exec "{BUILD}/{test.stem}_emu"' if quick else "echo skipped: not in this test; exit 77")


def device(folder, **env):
    r = subprocess.run(["bash", SOURCE / "bench" / "device.sh"], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                       env={**os.environ, "PACKED": str(folder / "packed"), "OUT": str(folder / "out"), **env})
    return r.returncode, r.stdout, r.stderr


def main():
    bad = []
    handover = f'exec "{BUILD}/bench_gpu_handover_emu" --small'
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pack(folder / "packed", handover)
        rc, out, err = device(folder)
        lines = out.strip().splitlines() or [""]
        for want in ("GPU back end: 0: Emulated", "test_gpu_handover", "Passed", "flags", "Q4_0 256x256", "tests passed"):
            if want not in out:
                bad.append(f"no '{want}' in the table")
        if rc or not lines[-1].endswith("all passed"):
            bad.append(f"status {rc}, last line '{lines[-1]}'")
        for log in ("tests.log", "bench_gpu.csv", "bench_gpu_handover.csv"):
            if not (folder / "out" / log).is_file():
                bad.append(f"no {log}")
        script(folder / "packed" / "bench_gpu_handover", "echo wrong >&2; exit 1")
        rc, out, err = device(folder)
        if rc != 1 or "SOMETHING FAILED" not in out or "bench_gpu_handover: status 1" not in out:
            bad.append(f"a failing bench: status {rc}")
        if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/dxg"):
            rc, out, err = device(folder, EMU_DEVICES="0")
            if rc != 77 or "no NVIDIA GPU" not in err:
                bad.append(f"without a card: status {rc}, '{err}'")
        if bad:
            print(out, err, sep="\n")
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
