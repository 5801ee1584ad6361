"""`longhaul info` on every test file: verdicts of the manifest through the program, and what it shows of sound files.
usage: cli_info.py PROGRAM DATA_FOLDER"""
import json
import lzma
import os
import resource
import subprocess
import sys
import tempfile

PROGRAM, DATA = sys.argv[1], sys.argv[2]
failures = []


def fail(case, text):
    failures.append(f"{case}: {text}")


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def info(path, *options):
    """(exit status, stdout, stderr, CPU seconds: other programs may be busy); a signal is a negative status."""
    before = cpu_seconds()
    done = subprocess.run([PROGRAM, "info", "-m", path, *options], capture_output=True, timeout=60)
    return done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"), cpu_seconds() - before


def unpacked(name, folder):
    path = os.path.join(DATA, name)
    if os.path.exists(path):
        return path
    out = os.path.join(folder, os.path.basename(name))
    with open(out, "wb") as f:
        f.write(lzma.open(path + ".xz").read())
    return out


def manifest(folder):
    # A file with hyper-parameters and no tensors is a vocabulary, which `info` shows and `run` refuses.
    shown = {"hdr_tensor_count_zero.gguf"}
    rows = 0
    for line in open(os.path.join(DATA, "bad-gguf", "manifest.tsv"), encoding="utf-8").read().splitlines()[1:]:
        name, verdict, must_name = line.split("\t")[:3]
        path = unpacked("bad-gguf/" + name, folder)
        rows += 1
        for options in ((), ("--json", "--tensors", "--kv"), ("--tensors", "--kv")):
            rc, out, err, seconds = info(path, *options)
            case = " ".join([name, *options])
            if rc < 0 or rc not in (0, 3):
                fail(case, f"exit status {rc}: {err}")
            if seconds > 1.0:
                fail(case, f"took {seconds:.2f} s")
            if verdict == "valid" and rc:
                fail(case, f"refused: {err}")
            if verdict == "reject" and name not in shown:
                if rc != 3 or not err.strip():
                    fail(case, f"exit status {rc}, stderr {err!r}")
                if must_name not in err:
                    fail(case, f"{err!r} does not name {must_name}")
            if rc == 0 and "--json" in options:
                json.loads(out)
            if len(err.splitlines()) > 1:
                fail(case, f"more than one line on stderr: {err!r}")
    if rows != 91:
        fail("manifest", f"{rows} rows")


def expect(case, got, **want):
    for key, value in want.items():
        if got.get(key) != value:
            fail(case, f"{key} is {got.get(key)!r}, want {value!r}")


def as_json(name, *options):
    rc, out, err, _ = info(os.path.join(DATA, name), "--json", *options)
    if rc:
        fail(name, f"exit status {rc}: {err}")
        return {}
    return json.loads(out)


def sound_files():
    j = as_json("tiny-models/tiny-random-qwen3moe-f32.gguf", "--tensors", "--kv")
    expect("qwen3moe", j, architecture="qwen3moe", runs=True, n_layer=3, dim=64, n_head=4, n_kv=2, n_expert=8, n_expert_used=3,
           n_ctx_train=2048, tied=False, n_tensors=39, n_tensors_unused=0, parts=1)
    expect("qwen3moe rope", j["rope"], base=1e6, dims=32, scaling="none", pairing="neox")
    expect("qwen3moe tokenizer", j["tokenizer"], model="gpt2", pre="qwen2", n_vocab=512, n_merges=240, eos=498)
    expect("qwen3moe KV", j["kv_bytes_per_token"], F16=3 * 2 * 2 * 32 * 2, Q8_0=3 * 2 * 2 * 34, Q4_0=3 * 2 * 2 * 18)
    if len(j["tensors"]) != 39 or sum(t["bytes"] for t in j["tensors"]) != j["tensor_bytes"]:
        fail("qwen3moe", "the listed tensors are not the file's")
    if j["kv"]["tokenizer.ggml.tokens"]["count"] != 512:
        fail("qwen3moe", "metadata differs")

    j = as_json("tiny-models/tiny-random-gemma3-f32.gguf")
    expect("gemma3", j, windows=[64, 64, 64, 64, 64, 0, 64], tied=True)
    expect("gemma3 windows", j["rope_window"], base=1e4)

    j = as_json("bad-gguf/valid_split-00001-of-00002.gguf")
    expect("split", j, parts=2, runs=True, n_tensors=21)

    j = as_json("tiny-models/tiny-random-qwen35-f32.gguf")
    expect("qwen35", j, architecture="qwen35", n_tensors=124, runs=True, n_layer=8, n_delta_layers=6, n_mtp=1, n_tensors_unused=15,
           state_bytes=6 * 4 * (3 * 256 + 4 * 32 * 32))

    j = as_json("gguf-fixtures/all-types.gguf", "--kv")
    expect("all-types", j, runs=False, architecture="test", tokenizer=None)
    expect("all-types kv", j["kv"], **{"t.u64": "18446744073709551615", "t.i64": -2**63, "t.f64": -2.5e-300, "t.bool_true": True,
                                       "t.str_utf8": "你好 😀", "t.ключ": 7})


def usage():
    for args, status in (([], 2), (["-m"], 2), (["--nonsense"], 2), (["-m", "/no/such/file.gguf"], 3), (["-m", DATA], 3), (["--help"], 0)):
        done = subprocess.run([PROGRAM, "info", *args], capture_output=True, timeout=60)
        if done.returncode != status:
            fail(f"info {args}", f"exit status {done.returncode}, want {status}")


with tempfile.TemporaryDirectory() as tmp:
    manifest(tmp)
sound_files()
usage()
print("\n".join(failures), end="\n" if failures else "")
sys.exit(1 if failures else 0)
