"""`longhaul check` as a program: names, malformed claims, machine files, the JSON form, one screen.
The arithmetic is tested in test_claim.c. usage: cli_check.py PROGRAM DATA_FOLDER"""
import json
import os
import subprocess
import sys
import tempfile

PROGRAM, DATA = sys.argv[1], sys.argv[2]
SHAPE = ("--shape", "generic-27b:q4")
CUSTOM = "custom:layers=40,heads=40,kv_heads=4,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e9"
HEADLINE = ("--claim-ctx", "256K", "--claim-decode", "60", "--claim-prefill", "1000")
failures = []


def fail(case, text):
    failures.append(f"{case}: {text}")


def check(*options):
    env = {k: v for k, v in os.environ.items() if not k.startswith("LONGHAUL_")}
    done = subprocess.run([PROGRAM, "check", *options], capture_output=True, text=True, timeout=60, env=env)
    return done.returncode, done.stdout, done.stderr


def answer(*options):
    """The JSON answer, figures by name."""
    rc, out, err = check(*options, "--json")
    case = " ".join(options)
    if rc:
        fail(case, f"exit status {rc}: {err}")
        return None
    got = json.loads(out)
    got["by_name"] = {f["figure"]: f for f in got["figures"]}
    if len(got["by_name"]) != len(got["figures"]):
        fail(case, "two figures have the same name")
    for f in got["figures"]:
        if set(f) - {"at_tokens"} != {"figure", "claimed", "ceiling", "unit", "verdict", "why", "origin"}:
            fail(case, f"{f['figure']} has the keys {sorted(f)}")
        if f["verdict"] not in ("possible", "only-if", "impossible") or len(f["why"]) < 5:
            fail(case, f"{f['figure']}: {f['verdict']} {f['why']!r}")
        if f["origin"] not in ("measured", "datasheet", "edited") or f["unit"] not in ("bytes", "tokens", "tokens/s"):
            fail(case, f"{f['figure']}: {f['origin']} {f['unit']}")
    if not got["open_questions"]:
        fail(case, "no open questions")
    return got


def expect(case, got, want):
    """want: figure -> verdict, or (verdict, ceiling) within 1 %."""
    for name, value in want.items():
        verdict, ceiling = value if isinstance(value, tuple) else (value, None)
        f = got and got["by_name"].get(name)
        if not f or f["verdict"] != verdict:
            fail(case, f"{name} is {f}, want {verdict}")
        elif ceiling is not None and abs(f["ceiling"] - ceiling) > 0.01 * ceiling:
            fail(case, f"{name}: ceiling {f['ceiling']}, want {ceiling}")


def verdicts():
    want = {"context": "only-if", "decode_depth_0": ("only-if", 62.1), "decode": ("impossible", 2.13), "prefill_short": "only-if",
            "prefill": ("impossible", 694), "together": "impossible"}
    expect("headline", answer("--gpu", "v100-16g", *SHAPE, *HEADLINE), want)
    # The same by hand, name for name and number for number.
    hand = answer("--shape", CUSTOM, "--vram-bytes", "16G", "--vram-gbps", "900", "--tflops", "112", "--link-gbps", "12", "--dram-gbps", "40",
                  *HEADLINE)
    expect("by hand", hand, want)
    if hand and hand["by_name"]["decode"]["origin"] != "edited":
        fail("by hand", f"origin {hand['by_name']['decode']['origin']}")
    new = answer("--gpu", "v100-16g", "--shape", "qwen3.8-27b:q4_k_m", *HEADLINE)
    if new and (new["memory"]["kv_bytes_per_tok"], new["memory"]["kv_bytes"]) != (65536, 16 << 30):
        fail("qwen3.8-27b", f"memory {new['memory']}")
    q4 = ("-ctk", "q4_0", "-ctv", "q4_0", "--claim-ctx", "256K", "--claim-all-vram")
    expect("3090 q4_0", answer("--gpu", "3090", "--shape", "qwen3.8-27b:q4_k_m", *q4), {"memory": "possible", "context": "possible"})
    expect("v100 q4_0", answer("--gpu", "v100-16g", *SHAPE, *q4), {"memory": "impossible", "context": "impossible"})
    sparse = answer("--gpu", "v100-16g", *SHAPE, "--claim-ctx", "256K", "--claim-decode", "30", "--claim-attended", "4096")
    expect("sparse", sparse, {"attended": "only-if", "decode": ("only-if", 2.13)})
    # A faster bus or memory changes the answer where it should.
    fast = answer("--gpu", "v100-16g", *SHAPE, "--claim-ctx", "256K", "--claim-decode", "10", "--dram-gbps", "400")
    expect("fast DRAM", fast, {"decode": ("only-if", 21.3)})


def names():
    for name in ("v100-16g", "V100-16G-PCIE3", "Tesla V100-PCIE-16GB", "rtx3090", "3090", "RTX 4090", "4090-24g", "2080ti", "5070ti", "5090", "h200"):
        if not answer("--gpu", name, *SHAPE, "--claim-ctx", "4K"):
            fail(name, "is not known")
    for shape in ("generic-27b:q4", "generic-27b", "qwen3.8-27b:q4_k_m", "Qwen3.8-27B", "llama-3.1-8b:q8_0", CUSTOM):
        answer("--gpu", "3090", "--shape", shape, "--claim-ctx", "4K")


def malformed():
    """Options -> what the sentence must name. All are wrong usage."""
    gpu, ctx = ("--gpu", "3090"), ("--claim-ctx", "4K")
    cases = [
        (("--gpu", "a100", *SHAPE, *ctx), ["--gpu", "a100", "3090-24g"]),
        (("--gpu", "", *SHAPE, *ctx), ["--gpu"]),
        (("--gpu", "nvidia", *SHAPE, *ctx), ["--gpu", "may be any of"]),
        (("--machine", "5090", *SHAPE, *ctx), ["--machine", "5090-32g-8ch"]),
        (("--machine", "no/such/file.json", *SHAPE, *ctx), ["--machine", "no/such/file.json"]),
        ((*gpu, "--machine", "3090-24g", *SHAPE, *ctx), ["--gpu", "--machine"]),
        ((*SHAPE, *ctx), ["--gpu", "--vram-bytes"]),
        ((*gpu, *ctx), ["--shape"]),
        ((*gpu, *SHAPE), ["--claim-ctx"]),
        ((*gpu, "--shape", "gpt-9:q4_k_m", *ctx), ["--shape", "gpt-9", "qwen3.8-27b"]),
        ((*gpu, "--shape", "qwen3.8-27b:q4", *ctx), ["--shape", "q4", "Q4_K_M"]),
        ((*gpu, "--shape", CUSTOM.replace("kv_heads=4", "kv_heads=80"), *ctx), ["--shape", "kv_heads=80", "heads=40"]),
        ((*gpu, "--shape", CUSTOM.replace("layers=40", "layers=0"), *ctx), ["--shape", "layers=0"]),
        ((*gpu, "--shape", CUSTOM + ",foo=1", *ctx), ["--shape", "foo"]),
        ((*gpu, *SHAPE, "-m", "x.gguf", *ctx), ["--shape", "-m"]),
        ((*gpu, *SHAPE, "--claim-ctx", "0"), ["--claim-ctx 0"]),
        ((*gpu, *SHAPE, "--claim-ctx", "-4096"), ["--claim-ctx -4096"]),
        ((*gpu, *SHAPE, "--claim-ctx", "99999999999999999999"), ["--claim-ctx"]),
        ((*gpu, *SHAPE, "--claim-ctx", "8388608T"), ["--claim-ctx"]),
        ((*gpu, *SHAPE, "--claim-ctx", "256Q"), ["--claim-ctx 256Q"]),
        ((*gpu, *SHAPE, "--claim-ctx", "4K tokens"), ["--claim-ctx"]),
        ((*gpu, *SHAPE, "--claim-decode", "-1"), ["--claim-decode -1"]),
        ((*gpu, *SHAPE, "--claim-decode", "0"), ["--claim-decode 0"]),
        ((*gpu, *SHAPE, "--claim-decode", "60t/s"), ["--claim-decode 60t/s"]),
        ((*gpu, *SHAPE, "--claim-decode", "inf"), ["--claim-decode inf"]),
        ((*gpu, *SHAPE, "--claim-decode", "nan"), ["--claim-decode nan"]),
        ((*gpu, *SHAPE, "--claim-prefill", "1e99"), ["--claim-prefill 1e99"]),
        ((*gpu, *SHAPE, "--claim-decode", "5", "--claim-depth", "-2"), ["--claim-depth"]),
        ((*gpu, *SHAPE, "--claim-depth", "5"), ["--claim-depth", "--claim-decode"]),
        ((*gpu, *SHAPE, "--claim-prompt", "5"), ["--claim-prompt", "--claim-prefill"]),
        ((*gpu, *SHAPE, *ctx, "--claim-decode", "5", "--claim-depth", "8K"), ["--claim-depth 8192", "--claim-ctx 4096"]),
        ((*gpu, *SHAPE, *ctx, "--claim-prefill", "5", "--claim-prompt", "8K"), ["--claim-prompt 8192", "--claim-ctx 4096"]),
        ((*gpu, *SHAPE, *ctx, "--claim-attended", "8K"), ["--claim-attended 8192"]),
        ((*gpu, *SHAPE, "--claim-decode", "5", "--claim-attended", "8K"), ["--claim-attended 8192", "--claim-depth"]),
        ((*gpu, *SHAPE, *ctx, "-ctk", "q5_1"), ["-ctk", "q5_1"]),
        ((*gpu, "--shape", CUSTOM.replace("head_dim=128", "head_dim=72"), *ctx, "-ctv", "q8_0"), ["--cache-type-v", "72"]),
        ((*gpu, *SHAPE, *ctx, "--vram-bytes", "lots"), ["--vram-bytes"]),
        ((*gpu, *SHAPE, *ctx, "--vram-bytes", "-16G"), ["--vram-bytes -16G"]),
        ((*gpu, *SHAPE, *ctx, "--vram-bytes", "nan"), ["--vram-bytes nan"]),
        ((*gpu, *SHAPE, *ctx, "--link-gbps", "0"), ["--link-gbps 0"]),
        ((*gpu, *SHAPE, *ctx, "--tflops", "-1"), ["--tflops -1"]),
        ((*SHAPE, "--vram-bytes", "16G", "--claim-decode", "5"), ["--vram-gbps"]),
        ((*SHAPE, "--vram-bytes", "16G", "--claim-prefill", "5"), ["--tflops"]),
        ((*gpu, *SHAPE, "--claim-contex", "4K"), ["--claim-ctx"]),
        ((*gpu, *SHAPE, *ctx, "more"), ["more"]),
    ]
    for options, named in cases:
        rc, out, err = check(*options)
        case = " ".join(options)
        if rc != 2 or out or len(err.splitlines()) != 1:
            fail(case, f"exit status {rc}, stdout {out[:80]!r}, stderr {err!r}")
        for name in named:
            if name not in err:
                fail(case, f"{err!r} does not name {name}")


def machine_files():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "mine.json")
        about = {"name": "mine", "origin": "measured", "date": "2026-12-01",
                 "gpu": {"name": "NVIDIA GeForce RTX 3090", "vram_gbps": 860, "vram_bytes": 25.3e9}, "host": {"dram_gbps": 50}}
        with open(path, "w") as f:
            json.dump(about, f)
        got = answer("--machine", path, *SHAPE, "--claim-decode", "30")
        expect("machine file", got, {"decode": ("possible", 860 / 14.5)})
        if got and (got["machine"]["name"], got["by_name"]["decode"]["origin"]) != ("mine", "measured"):
            fail("machine file", f"{got['machine']}")
        _, _, err = check("--machine", path, *SHAPE, "--claim-decode", "30")
        for name in ("gpu.peak_tflops", "link.h2d_gbps", "(from 3090-24g)"):
            if name not in err:
                fail("machine file", f"{err!r} does not say that {name} was filled")
        about["gpu"]["vram_gpbs"] = about["gpu"].pop("vram_gbps")
        with open(path, "w") as f:
            json.dump(about, f)
        rc, _, err = check("--machine", path, *SHAPE, "--claim-decode", "30")
        if rc != 2 or "--machine" not in err or "gpu.vram_gpbs" not in err:
            fail("machine file with a wrong key", f"exit status {rc}: {err!r}")
        del about["gpu"]
        with open(path, "w") as f:
            json.dump(about, f)
        rc, _, err = check("--machine", path, *SHAPE, "--claim-decode", "30")
        if rc != 2 or "VRAM" not in err:
            fail("machine without a GPU", f"exit status {rc}: {err!r}")


def models():
    got = answer("--gpu", "3090", "-m", os.path.join(DATA, "stories260K", "stories260K-f32.gguf"), "--claim-ctx", "512", "--claim-decode", "100")
    expect("stories260K", got, {"memory": "possible", "decode": "possible"})
    for path, status in ((os.path.join(DATA, "README.md"), 3), ("/no/such.gguf", 3)):
        rc, _, err = check("--gpu", "3090", "-m", path, "--claim-ctx", "512")
        if rc != status or os.path.basename(path) not in err:
            fail(path, f"exit status {rc}: {err!r}")


def screen():
    """The fullest answer and the help fit a screen."""
    rc, out, _ = check("--gpu", "v100-16g", *SHAPE, *HEADLINE, "--claim-attended", "4096")
    lines = out.splitlines()
    if rc or len(lines) > 45 or max(map(len, lines)) > 140:
        fail("screen", f"{len(lines)} lines, the longest of {max(map(len, lines), default=0)}")
    for word in ("IMPOSSIBLE", "ONLY IF", "together", "leaves open", "datasheet"):
        if word not in out:
            fail("screen", f"does not show {word}")
    _, out, _ = check("--help")
    if len(out.splitlines()) > 40:
        fail("help", f"{len(out.splitlines())} lines")


verdicts()
names()
malformed()
machine_files()
models()
screen()
for text in failures:
    print(text)
sys.exit(1 if failures else 0)
