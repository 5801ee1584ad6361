"""Greedy continuations of two real models against llama.cpp's (tests/golden/make_reference.py). Skipped where the models are
not at hand: LONGHAUL_MODELS names the folder that holds them (bench/try.sh fetches one).
A first difference is accepted only where it is shown to be a near tie: our lead of our choice and llama.cpp's lead of its
own, after the same text, are together within what two roundings of activations to 8 bits move a pair of logits.
usage: cli_greedy.py PROGRAM DATA_FOLDER"""
import array
import json
import os
import subprocess
import sys
import tempfile

PROGRAM, DATA = sys.argv[1], sys.argv[2]
TIE = 0.6  # logits: llama.cpp's margins differ from the exact ones, recorded beside them, by up to that


def our_lead(path, ids, ours, theirs):
    """Our logit of `ours` minus that of `theirs` after ids."""
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "logits")
        subprocess.run([PROGRAM, "run", "-m", path, "--prompt-ids", ",".join(map(str, ids)), "-n", "0", "--logits-out", out, "--no-perf"],
                       check=True, stdout=subprocess.DEVNULL)
        rows = array.array("f")
        rows.frombytes(open(out, "rb").read())
        last = rows[len(rows) - len(rows) // len(ids):]
        return last[ours] - last[theirs]


folder = os.environ.get("LONGHAUL_MODELS", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "models"))
done = 0
bad = []
for name in ("greedy-smollm2.json", "greedy-gemma3.json"):
    ref = json.load(open(os.path.join(DATA, "reference", name)))
    path = os.path.join(folder, ref["model"])
    if not os.path.exists(path):
        print(f"skipped: {ref['model']} is not in {folder}")
        continue
    for case, c in ref["cases"].items():
        out = subprocess.run([PROGRAM, "run", "-m", path, "-p", c["prompt"], "--no-escape", "-n", "64", "--temp", "0", "--json", "--ignore-eos"],
                             capture_output=True)
        got = json.loads(out.stdout) if out.returncode == 0 else {"ids": [], "prompt_ids": []}
        if got["prompt_ids"] != c["prompt_ids"]:
            bad.append(f"{name} {case}: prompt ids {got['prompt_ids'][:10]}, expected {c['prompt_ids'][:10]} {out.stderr[-200:]}")
            continue
        done += 1
        first = next((i for i, (a, b) in enumerate(zip(got["ids"], c["ids"])) if a != b), None)
        if first is None:
            if len(got["ids"]) != len(c["ids"]):
                bad.append(f"{name} {case}: {len(got['ids'])} ids, expected {len(c['ids'])}")
            continue
        lead = our_lead(path, c["prompt_ids"] + c["ids"][:first], got["ids"][first], c["ids"][first])
        print(f"{name} {case}: differs at token {first}: our lead {lead:.3f}, llama.cpp's {c['margins'][first]:.3f}, exact {c['exact_margins'][first]:.3f}")
        if lead + c["margins"][first] > TIE:
            bad.append(f"{name} {case}: token {first} is {got['ids'][first]}, expected {c['ids'][first]}, no near tie")
for b in bad:
    print("FAILED", b)
sys.exit(1 if bad else 77 if not done else 0)
