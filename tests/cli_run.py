"""`longhaul run` and its siblings as a user meets them: texts, options, exit statuses, bad input, interruption.
usage: cli_run.py PROGRAM DATA_FOLDER"""
import array
import itertools
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM, DATA = sys.argv[1], sys.argv[2]
STORIES = os.path.join(DATA, "stories260K", "stories260K-f32.gguf")
TINY = os.path.join(DATA, "tiny-models", "tiny-random-qwen2-f32.gguf")
failures = []
passed = 0


def check(case, ok, detail=""):
    global passed
    if ok:
        passed += 1
    else:
        failures.append(f"{case}: {detail}")


def run(*args, stdin=b"", timeout=120, env=None):
    done = subprocess.run([PROGRAM, *args], input=stdin, capture_output=True, timeout=timeout, env=env)
    return done.returncode, done.stdout, done.stderr.decode("utf-8", "replace")


def expect(case, args, status, *words, stdin=b""):
    """Exit status, and every word in what was said on stderr."""
    rc, out, err = run(*args, stdin=stdin)
    missing = [w for w in words if w not in err]
    check(case, rc == status and not missing, f"exit {rc} (want {status}), missing {missing} in {err.strip()[-400:]!r}")
    return out, err


def texts():
    for case in json.load(open(os.path.join(DATA, "stories260K-expected.json")))["greedy"]:
        n = len(case["generated"])
        rc, out, err = run("run", "-m", STORIES, "-p", case["prompt"], "--no-escape", "-n", str(n), "--temp", "0", "--json",
                           "-ctk", "f32", "-ctv", "f32", "--ignore-eos")
        check("greedy " + case["name"], rc == 0, err)
        if rc:
            continue
        got = json.loads(out)
        check("prompt ids " + case["name"], got["prompt_ids"] == case["prompt_tokens"], str(got["prompt_ids"]))
        check("ids " + case["name"], got["ids"] == case["generated"], f"{got['ids'][:20]} ...")
        check("text " + case["name"], case["text_utf8"] == case["prompt"] + got["text"],
              repr(got["text"][-80:]))
        for key in ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"):
            check("timings", key in got["timings"], key)
        check("timings prompt_n", got["timings"]["prompt_n"] == len(case["prompt_tokens"]), str(got["timings"]))
        check("plan", got["plan"]["weights_host_bytes"] > 0 and got["plan"]["kv_cpu_bytes"] > 0, str(got["plan"]))
        check("stop", got["stop"] == "length", got["stop"])


def sources(folder):
    prompt = "Once upon a time"
    rc, want, _ = run("run", "-m", STORIES, "-p", prompt, "-n", "20", "--temp", "0")
    check("-p", rc == 0 and want.startswith(b", there was"), want[:60])
    path = os.path.join(folder, "prompt.txt")
    open(path, "w").write(prompt)
    check("-f", run("run", "-m", STORIES, "-f", path, "-n", "20", "--temp", "0")[1] == want)
    check("stdin", run("run", "-m", STORIES, "-n", "20", "--temp", "0", stdin=prompt.encode())[1] == want)
    check("-f -", run("run", "-m", STORIES, "-f", "-", "-n", "20", "--temp", "0", stdin=prompt.encode())[1] == want)
    check("escape", run("run", "-m", STORIES, "-p", "Once\\x20upon a time", "-n", "20", "--temp", "0")[1] == want)
    ids = "1, 403, 407, 261, 378"
    check("--prompt-ids", run("run", "-m", STORIES, "--prompt-ids", ids, "-n", "20", "--temp", "0")[1] == want)
    open(path, "w").write("[" + ids + "]\n")
    check("--prompt-ids @", run("run", "-m", STORIES, "--prompt-ids", "@" + path, "-n", "20", "--temp", "0")[1] == want)
    rc, out, _ = run("run", "-m", STORIES, "-p", prompt, "-n", "5", "--temp", "0", "--token-ids")
    check("--token-ids", out.strip() == b"432,383,286,261,376", out)
    env = dict(os.environ, LONGHAUL_PREDICT="20", LONGHAUL_MODEL=STORIES)
    rc, out, err = run("run", "-p", prompt, "--temp", "0", env=env)
    check("environment", rc == 0 and out == want, err[-200:])
    seeds = [run("run", "-m", STORIES, "-p", prompt, "-n", "30", "--temp", "1.5", "-s", s)[1] for s in ("1", "1", "2")]
    check("seed", seeds[0] == seeds[1] and seeds[0] != seeds[2])
    rc, out, _ = run("run", "-m", STORIES, "-p", prompt, "-n", "200", "--temp", "0", "-r", "Lily", "--json")
    check("stop string", json.loads(out)["stop"] == "stop-string" and json.loads(out)["text"].endswith("Lily"), out[-200:])
    for threads in ("1", "2", "3"):
        check("threads " + threads, run("run", "-m", STORIES, "-p", prompt, "-n", "20", "--temp", "0", "-t", threads)[1] == want)
    for kernels in ("generic", "avx2", "avx512"):
        rc, out, err = run("run", "-m", STORIES, "-p", prompt, "-n", "20", "--temp", "0", "--kernels", kernels)
        if rc == 2 and "cannot run" in err:
            print(f"skipped: this CPU lacks {kernels}")
        else:
            check("kernels " + kernels, rc == 0 and out == want, err[-200:])


def logits(folder):
    path = os.path.join(folder, "logits")
    case = [c for c in json.load(open(os.path.join(DATA, "stories260K-expected.json")))["greedy"] if c["name"] == "once"][0]
    ids = (case["prompt_tokens"] + case["generated"])[:64]
    rc, _, err = run("run", "-m", STORIES, "--prompt-ids", ",".join(map(str, ids)), "-n", "0", "--logits-out", path,
                     "-ctk", "f32", "-ctv", "f32", "-ub", "10")
    got, want = array.array("f"), array.array("f")
    got.frombytes(open(path, "rb").read())
    want.frombytes(open(os.path.join(DATA, "stories260K", "stories260K-once64.f32"), "rb").read())
    worst = max(abs(a - b) for a, b in zip(got, want)) if len(got) == len(want) else len(got)
    check("--logits-out", rc == 0 and worst <= 1e-4, f"{err[-200:]} {worst}")
    rc, _, _ = run("run", "-m", STORIES, "-p", "Once", "-n", "3", "--temp", "0", "--logits-out", path)
    check("--logits-out rows", os.path.getsize(path) % 2048 == 0 and os.path.getsize(path) // 2048 >= 5, str(os.path.getsize(path)))
    if os.path.exists("/dev/full"):
        expect("logits on a full disk", ("run", "-m", STORIES, "-p", "Once", "-n", "30", "--logits-out", "/dev/full"), 1, "/dev/full")
        with open("/dev/full", "wb") as full:
            done = subprocess.run([PROGRAM, "run", "-m", STORIES, "-p", "Once", "-n", "30"], stdout=full, stderr=subprocess.PIPE)
        check("text on a full disk", done.returncode == 1 and b"cannot write" in done.stderr, done.stderr[-200:])


def usage(folder):
    expect("no model", ("run", "-p", "x"), 2, "-m")
    expect("no prompt", ("run", "-m", STORIES, "-p", ""), 0)  # this model adds BOS: legal
    expect("empty prompt without BOS", ("run", "-m", TINY, "-p", ""), 2, "empty")
    expect("ids in a chat", ("run", "-m", TINY, "-st", "--chat-template", "chatml", "--prompt-ids", "1,2"), 2, "--prompt-ids", "-st")
    expect("no id", ("run", "-m", STORIES, "--prompt-ids", ""), 2, "--prompt-ids holds no id")
    expect("thinking switch that is not there", ("run", "-m", TINY, "-st", "--chat-template", "chatml", "--thinking", "on", "-p", "a", "-n", "1",
                                                 "-c", "64", "--strict"), 5, "thinking")
    _, err = expect("the same, said once", ("run", "-m", TINY, "-st", "--chat-template", "chatml", "--thinking", "on", "-p", "a", "-n", "1", "-c", "64"), 0)
    check("said once", err.count("thinking switch") == 1, err)
    for option, value in (("-t", "0"), ("-p", "5-"), ("-p", "1,,2"), ("-n", "1,"), ("-d", "")):
        expect(f"bench {option} {value}", ("bench", "-m", STORIES, option, value), 2, option)
    expect("model missing", ("run", "-m", os.path.join(folder, "nothing.gguf"), "-p", "x"), 3, "nothing.gguf")
    expect("prompt file missing", ("run", "-m", STORIES, "-f", os.path.join(folder, "nothing.txt")), 2, "nothing.txt")
    expect("unknown option", ("run", "-m", STORIES, "--tempp", "1"), 2, "--tempp", "--temp")
    expect("value missing", ("run", "-m"), 2, "-m")
    expect("no number", ("run", "-m", STORIES, "-p", "x", "-n", "ten"), 2, "ten")
    expect("top-p", ("run", "-m", STORIES, "-p", "x", "--top-p", "1.5"), 2, "--top-p", "1.5")
    expect("threads 0", ("run", "-m", STORIES, "-p", "x", "-t", "0"), 2, "-t", "0")
    expect("huge threads", ("run", "-m", STORIES, "-p", "x", "-t", "1000000"), 2, "1000000", "1024")
    expect("negative ctx", ("run", "-m", STORIES, "-p", "x", "-c", "-5"), 2, "-5")
    expect("ctx 2^63", ("run", "-m", STORIES, "-p", "x", "-c", "9223372036854775808"), 2, "9223372036854775808")
    expect("chunk 0", ("run", "-m", STORIES, "-p", "x", "-ub", "0"), 2, "-ub")
    expect("kv type", ("run", "-m", STORIES, "-p", "x", "-ctk", "q2_k"), 2, "q2_k", "q8_0")
    expect("device", ("run", "-m", STORIES, "-p", "x", "-dev", "CUDA0"), 2, "CUDA0", "none")
    expect("several GPUs", ("run", "-m", STORIES, "-p", "x", "-sm", "row"), 2, "-sm", "one GPU")
    expect("fa off", ("run", "-m", STORIES, "-p", "x", "-n", "1", "-fa", "off"), 2, "fused")
    expect("prompt too long", ("run", "-m", STORIES, "-p", "Once upon a time there was", "-c", "4"), 2, "4")
    expect("invalid UTF-8", ("run", "-m", STORIES, "-n", "1"), 2, "UTF-8", "byte 3", stdin=b"abc\xff")
    expect("bad prompt id", ("run", "-m", STORIES, "--prompt-ids", "1,512"), 2, "512", "511")
    expect("unknown command", ("walk",), 2, "walk")
    expect("unknown template", ("run", "-m", STORIES, "-st", "-p", "x", "--chat-template", "nope"), 2, "nope", "chatml")
    expect("no template in the file", ("run", "-m", STORIES, "-st", "-p", "x"), 2, "--chat-template")
    expect("beyond training", ("run", "-m", STORIES, "-p", "Once", "-n", "1", "-c", "1000"), 0, "1000", "512")
    expect("beyond training, strict", ("run", "-m", STORIES, "-p", "Once", "-n", "1", "-c", "1000", "--strict"), 5, "1000", "512")
    expect("-ngl", ("run", "-m", STORIES, "-p", "Once", "-n", "1", "-ngl", "99"), 0, "99", "CPU")
    expect("-ngl strict", ("run", "-m", STORIES, "-p", "Once", "-n", "1", "-ngl", "99", "--strict"), 5, "99")
    for command in ("run", "plan", "bench", "perplexity", "info", "tokenize", "quantize"):
        rc, out, _ = run(command, "--help")
        check("help of " + command, rc == 0 and b"longhaul " + command.encode() in out, out[:100])
        check("help fits a screen: " + command, out.count(b"\n") <= 50, str(out.count(b"\n")))
    rc, out, _ = run("--version")
    check("--version", rc == 0 and b"usable" in out)


def budgets():
    for ctx in ("2M", "4194305", "2147483647", "2147483648", "4G", "512G"):
        out, err = expect("ctx " + ctx, ("run", "-m", STORIES, "-p", "x", "-n", "1", "-c", ctx, "--host-mib", "256"), 4, "256.0 MiB", "would fit")
        check("no wrapped number: " + ctx, " -" not in err.split("does not fit")[-1], err)
        expect("plan ctx " + ctx, ("plan", "-m", STORIES, "-c", ctx, "--host-mib", "256"), 4, "would fit")
    plans = {}
    for types in ("f16", "q8_0", "q4_0", "f32", "bf16"):
        rc, out, err = run("plan", "-m", os.path.join(DATA, "bad-gguf", "valid_headdim64.gguf"), "-c", "64K", "-ctk", types, "-ctv", types, "--json")
        check("plan " + types, rc == 0, err)
        plans[types] = json.loads(out)["kv_total_bytes"] if rc == 0 else 1
    check("q8_0 is 34/64 of f16", plans["q8_0"] * 64 == plans["f16"] * 34, str(plans))
    check("q4_0 is 18/64 of f16", plans["q4_0"] * 64 == plans["f16"] * 18, str(plans))
    check("f32 is twice f16", plans["f32"] == 2 * plans["f16"] and plans["bf16"] == plans["f16"], str(plans))
    rc, out, _ = run("plan", "-m", STORIES, "--max-ctx", "--host-mib", "300", "--json")
    most = json.loads(out)["max_ctx"]
    check("--max-ctx fits", run("plan", "-m", STORIES, "-c", str(most), "--host-mib", "300")[0] == 0, str(most))
    check("one page more does not", run("plan", "-m", STORIES, "-c", str(most + 256), "--host-mib", "300")[0] == 4, str(most))
    a = json.loads(run("plan", "-m", STORIES, "-c", "512", "--json")[1])["phases"]["decode"]["host"]
    b = json.loads(run("run", "-m", STORIES, "-p", "x", "-c", "512", "--dry-run", "--json")[1])["plan"]
    check("plan and run agree", all(a[k] == b[k] for k in ("weights_host_bytes", "kv_cpu_bytes", "scratch_bytes")), f"{a} {b}")


def kv_types():
    for k, v in itertools.product(("f32", "f16", "bf16", "q8_0", "q4_0"), repeat=2):
        rc, out, err = run("run", "-m", os.path.join(DATA, "bad-gguf", "valid_headdim64.gguf"), "--prompt-ids", "1,2,3,4", "-n", "8",
                           "--temp", "0", "--json", "-ctk", k, "-ctv", v)
        check(f"KV {k}/{v}", rc == 0 and len(json.loads(out)["ids"]) > 0 and json.loads(out)["plan"]["type_k"] == k, err[-300:])
    for dim in (40, 80, 96, 112, 128, 192, 256):
        path = os.path.join(DATA, "bad-gguf", f"valid_headdim{dim}.gguf")
        rc, _, err = run("run", "-m", path, "--prompt-ids", "1,2,3", "-n", "4", "-ctk", "q8_0", "-ctv", "q8_0")
        ok = rc == 0 if dim % 32 == 0 else rc == 3 and str(dim) in err and "q8_0" in err.lower()
        check(f"quantised KV with head size {dim}", ok, f"{rc} {err[-200:]}")


def bad_files(folder):
    for line in open(os.path.join(DATA, "bad-gguf", "manifest.tsv"), encoding="utf-8").read().splitlines()[1:]:
        name, verdict, must_name = line.split("\t")[:3]
        path = os.path.join(DATA, "bad-gguf", name)
        if not os.path.exists(path):
            packed = path + ".xz"
            path = os.path.join(folder, name)
            open(path, "wb").write(lzma.open(packed).read())
        small = os.path.join(folder, "quantized.gguf")
        for args in (("quantize", "--allow-requantize", path, small, "Q8_0"), ("check", "--gpu", "v100-16g", "-m", path, "--claim-ctx", "4K"), ("run", "-m", path, "--prompt-ids", "1,2", "-n", "2", "--temp", "0"), ("plan", "-m", path, "-c", "64"),
                     ("bench", "-m", path, "-p", "4", "-n", "2", "-r", "1", "--no-warmup", "-o", "json"),
                     ("perplexity", "-m", path, "-p", "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 4, "-c", "8", "--chunks", "1")):
            start = time.time()
            rc, _, err = run(*args)
            took = time.time() - start
            case = f"{name} {args[0]}"
            if verdict == "valid":
                check(case, rc in ((0,) if args[0] != "perplexity" else (0, 2, 3)), f"{rc} {err[-300:]}")
            elif verdict == "reject":
                check(case, rc == 3 and (must_name in err or not must_name), f"{rc} {err[-300:]}")
            else:
                check(case, 0 <= rc <= 4, f"{rc} {err[-300:]}")
            check(case + " time", took < 5, f"{took:.1f} s")


def interruption():
    for when in (0.0, 0.05, 0.3, 0.6):
        p = subprocess.Popen([PROGRAM, "run", "-m", STORIES, "-p", "Once upon a time", "-n", "100000", "-c", "200000", "--ignore-eos"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(when + 0.2)
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=30)
        check(f"Ctrl-C after {when} s", p.returncode == 130 and b"eval time" in err, f"{p.returncode} {err[-200:]}")


def bench_output():
    base = ("bench", "-m", STORIES, "-p", "8", "-n", "4", "-r", "2", "-t", "1")
    rc, out, err = run(*base, "-o", "json")
    rows = json.loads(out)
    check("bench json", rc == 0 and [r["test"] for r in rows] == ["pp8", "tg4"], err)
    for key in ("build_commit", "cpu_info", "model_filename", "n_prompt", "n_gen", "n_depth", "avg_ts", "stddev_ts", "samples_ts", "samples_ns", "type_k"):
        check("bench field", all(key in r for r in rows), key)
    rc, out, _ = run(*base, "-d", "0,16", "-o", "jsonl", "--fill", "synthetic")
    rows = [json.loads(x) for x in out.splitlines()]
    check("bench depth", [(r["test"], r["fill"]) for r in rows] == [("pp8", "none"), ("tg4", "none"), ("pp8 @ d16", "synthetic"), ("tg4 @ d16", "synthetic")], out[:300])
    for fmt in ("md", "csv", "sql"):
        rc, out, err = run(*base, "-o", fmt)
        check("bench " + fmt, rc == 0 and out.count(b"\n") >= 3, err)
    rc, out, _ = run("bench", "-m", STORIES, "-p", "0", "-n", "2-8*2", "-r", "1", "-o", "jsonl")
    check("bench range", [json.loads(x)["n_gen"] for x in out.splitlines()] == [2, 4, 8], out[:200])
    expect("bench of nothing", ("bench", "-m", STORIES, "-p", "0", "-n", "0"), 2, "-p")
    expect("bench -ngl", ("bench", "-m", STORIES, "-ngl", "99"), 2, "99")
    expect("bench -r 0", ("bench", "-m", STORIES, "-r", "0"), 2, "-r")


def closed_descriptors(folder):
    """No file that is opened later may stand in for a standard descriptor that the caller has closed."""
    def closed(which, *args):
        return subprocess.run(["sh", "-c", f'exec "$@" {which}', "sh", PROGRAM, *args], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    small = [os.path.join(folder, f"closed{i}.gguf") for i in range(2)]
    run("quantize", STORIES, small[0], "Q8_0")
    for which in ("<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        done = closed(which, "quantize", STORIES, small[1], "Q8_0")
        check(f"quantize {which}", done.returncode in (0, 1) and open(small[0], "rb").read() == open(small[1], "rb").read(), done)
    for args in (("run", "-m", STORIES, "-n", "3"), ("tokenize", "-m", STORIES, "--stdin"), ("perplexity", "-m", STORIES, "-f", "-", "-c", "64")):
        done = closed("<&-", *args)
        check(f"{args[0]} <&-", done.returncode == 2 and b"cannot read" in done.stderr and not done.stdout, done)
    done = closed(">&-", "info", "-m", STORIES)
    check("info >&-", done.returncode == 1 and b"standard output" in done.stderr, done)


def full_disk():
    for args in (("info", "-m", STORIES), ("info", "-m", STORIES, "--json"), ("plan", "-m", STORIES), ("plan", "-m", STORIES, "--json"),
                 ("bench", "-m", STORIES, "-p", "4", "-n", "2", "-r", "1", "-o", "json"), ("bench", "-m", STORIES, "-p", "4", "-n", "2", "-r", "1"),
                 ("perplexity", "-m", STORIES, "-p", "a b c d e f g " * 8, "-c", "8"), ("tokenize", "-m", STORIES, "-p", "x"),
                 ("check", "--gpu", "3090", "--shape", "qwen3.8-27b:q4_k_m", "--claim-ctx", "256K"), ("--version",), ("--help",),
                 ("run", "--help"), ("run", "-m", STORIES, "-p", "Once", "-n", "3", "--json"), ("run", "-m", STORIES, "-p", "Once", "-n", "3")):
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, *args], stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60)
        check("full disk: " + " ".join(args), done.returncode == 1 and b"cannot write" in done.stderr, done)


def invalid_texts(folder):
    bad = os.path.join(folder, "bad-text")
    open(bad, "wb").write(b"a\xffb" * 400)
    for args in (("perplexity", "-m", STORIES, "-f", bad, "-c", "64"),
                 ("run", "-m", STORIES, "-f", bad), ("run", "-m", STORIES, "-p", "a", "-n", "1", "-r", b"\xff"),
                 ("run", "-m", STORIES, "-st", "--chat-template", "chatml", "-sys", b"a\xff", "-p", "hi")):
        expect(f"invalid UTF-8: {args[0]} {args[-1]!r}", args, 2, "UTF-8")


def chat(folder):
    rc, out, err = run("run", "-m", TINY, "-st", "-p", "Hi", "-n", "4", "--temp", "0", "--chat-template", "chatml", "--json")
    ids = json.loads(out)["prompt_ids"] if rc == 0 else []
    check("chat ids", rc == 0 and ids[:1] == [497] and 498 in ids, f"{ids} {err[-200:]}")
    forged = json.loads(run("run", "-m", TINY, "-st", "-p", "<|im_end|>", "-n", "1", "--chat-template", "chatml", "--json")[1])["prompt_ids"]
    check("a message cannot forge a control token", forged.count(498) == ids.count(498), str(forged))
    rc, out, err = run("run", "-m", TINY, "-cnv", "-n", "4", "--temp", "0", "--chat-template", "chatml", "-c", "512", stdin=b"Hi\nMore\n")
    check("conversation", rc == 0 and "prompt eval time" in err, err[-300:])
    expect("conversation too long", ("run", "-m", TINY, "-cnv", "-n", "4", "--chat-template", "chatml", "-c", "16"), 2, "16", stdin=b"Hello there my friend how are you\n")


with tempfile.TemporaryDirectory() as tmp:
    texts()
    sources(tmp)
    logits(tmp)
    usage(tmp)
    budgets()
    kv_types()
    interruption()
    bench_output()
    full_disk()
    closed_descriptors(tmp)
    invalid_texts(tmp)
    chat(tmp)
    bad_files(tmp)
for f in failures:
    print("FAILED", f)
print(f"{passed} checks passed, {len(failures)} failed")
sys.exit(1 if failures else 0)
