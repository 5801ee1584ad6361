"""Perplexity of a real model over War and Peace against llama.cpp's on the same file, with f16, q8_0 and q4_0 KV, and what each
KV type costs. Without the model (LONGHAUL_MODELS, see cli_greedy.py) only the trained tiny model is scored.
usage: cli_perplexity.py PROGRAM DATA_FOLDER"""
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile

PROGRAM, DATA = sys.argv[1], sys.argv[2]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
bad = []


def ppl(model, text, *options):
    out = subprocess.run([PROGRAM, "perplexity", "-m", model, "-f", text, *options], capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+) \+/- ([0-9.]+)", out.stdout)
    if out.returncode or not found:
        bad.append(f"{' '.join(options)}: exit {out.returncode}: {out.stderr[-300:]}")
        return None, out.stdout
    return float(found.group(1)), out.stdout


def tiny(folder, book):
    """The trained tiny model: KV types in order of what they keep, and divergences that say so."""
    model = os.path.join(DATA, "stories260K", "stories260K-f32.gguf")
    text, base = os.path.join(folder, "tiny.txt"), os.path.join(folder, "base")
    open(text, "wb").write(book[:12000])
    want, _ = ppl(model, text, "-c", "256", "--chunks", "4", "-ctk", "f32", "-ctv", "f32", "--kl-divergence-base", base)
    seen = {}
    for kv in ("f32", "f16", "bf16"):
        got, out = ppl(model, text, "-c", "256", "--chunks", "4", "-ctk", kv, "-ctv", kv, "--kl-divergence-base", base, "--kl-divergence")
        found = re.search(r"Mean KLD +: +([-0-9.]+)", out)
        if not found:
            bad.append(f"no divergence in {out[-200:]!r}")
            continue
        seen[kv] = float(found.group(1))
        if want and abs(got / want - 1) > 0.01:
            bad.append(f"KV {kv}: perplexity {got}, with f32 {want}")
    # The base keeps log-probabilities in 16 bits of a range of at least 16: about 1e-4 is its own noise.
    if seen and not (abs(seen["f32"]) < 1e-4 and abs(seen["f16"]) < 2e-4 and seen["bf16"] < 0.01):
        bad.append(f"divergences {seen}")


def real(folder, book):
    ref = json.load(open(os.path.join(DATA, "reference", "perplexity-smollm2.json")))
    model = os.path.join(os.environ.get("LONGHAUL_MODELS", os.path.join(ROOT, "models")), ref["model"])
    if not os.path.exists(model):
        print(f"skipped: {ref['model']} is not there")
        return
    for name, part in ref["slices"].items():
        text = os.path.join(folder, name)
        data = book[part["start_byte"]:part["start_byte"] + part["bytes"]]
        assert hashlib.sha256(data).hexdigest() == part["sha256"]
        open(text, "wb").write(data)
        for n_ctx, runs in part["n_ctx"].items():
            for kv, want in runs.items():
                if kv not in ("f16", "q8_0", "q4_0"):
                    continue
                got, _ = ppl(model, text, "-c", n_ctx, "--chunks", str(len(want["running_ppl"])), "-ctk", kv, "-ctv", kv)
                if got is None:
                    continue
                print(f"{name} -c {n_ctx} KV {kv}: {got:.4f}, llama.cpp {want['ppl']:.4f} ({100 * (got / want['ppl'] - 1):+.2f} %)")
                if got > want["ppl"] * 1.005:
                    bad.append(f"{name} -c {n_ctx} KV {kv}: {got} against {want['ppl']}")
                if kv == "f16" and got < want["ppl"] * 0.995:
                    bad.append(f"{name} -c {n_ctx} KV {kv}: {got}, too good against {want['ppl']}")


with tempfile.TemporaryDirectory() as tmp:
    text = lzma.open(os.path.join(DATA, "texts", "war-and-peace.txt.xz")).read()
    tiny(tmp, text)
    real(tmp, text)
for b in bad:
    print("FAILED", b)
sys.exit(1 if bad else 0)
