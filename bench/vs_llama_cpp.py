#!/usr/bin/env python3
"""Compares `longhaul bench` with llama.cpp's llama-bench: same model file, same threads, same machine.

One question per test: how many tokens per second does each engine reach? The two programs run in turn (ours, theirs,
ours, theirs, ...), each run a fresh process with its own warm-up and one sample, so that a machine that slows down
slows both. The figures are medians of N such runs. llama.cpp runs at its better setting: where -fa 0 and -fa 1 are
both legal (quantised V needs -fa 1) one run of each decides before the test.

Tests, separated by commas:
    decode[N]@DEPTH[:K[:V]]    N (default 32) tokens generated after DEPTH positions
    prefillN@DEPTH[:K[:V]]     a prompt of N tokens after DEPTH positions
    start                      (needs --llama-completion) both programs from their start to the first character that they
                               write after a prompt of a few words, as starts per second; the model is in the page cache
K and V are cache types (f16, q8_0, ...; default f16, V as K). llama-bench reaches a depth by a real prefill. Ours
does with --fill prefill too; the default --fill synthetic writes random values into the KV cache instead, which takes
seconds, and decode reads the same bytes either way. Neither is inside the timed interval. The CSV says which was used.

A prefill of llama.cpp to a depth can take minutes, so at a depth > 0 one of its processes takes all its samples: it is
stopped (SIGSTOP) when its prefill is done, half of our runs follow, then its samples (the first, which the stop disturbs,
is left out), then the other half of our runs. Where both values of -fa are legal this is done with both. With --lock FILE
an exclusive flock of the file is held while something is timed, for machines on which other jobs take it shared.

The CSV gets one row per test as soon as it is done. Exit status: 0 all tests measured, 1 some failed (each failure is
printed with its command and what the program said), 2 wrong usage.
"""
import argparse
import csv
import contextlib
import datetime
import fcntl
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

DEFAULT_TESTS = "decode@0,decode@8192,decode@8192:q8_0,prefill512@0,prefill512@8192"
FLOAT_TYPES = ("f32", "f16", "bf16")

COLUMNS = (
    "model", "test", "n_prompt", "n_gen", "depth", "type_k", "type_v", "threads", "repetitions",
    "ours_median_ts", "ours_min_ts", "ours_max_ts", "theirs_median_ts", "theirs_min_ts", "theirs_max_ts",
    "theirs_setting", "theirs_other_setting", "ratio", "ours_fill", "theirs_fill", "ours_version", "theirs_version",
    "ours_command", "theirs_command", "cpu", "load_before", "date",
)


class Failure(Exception):
    """A run that gave no figure; the text has the command and the reason."""


@dataclass(frozen=True)
class Test:
    name: str
    n_prompt: int
    n_gen: int
    depth: int
    type_k: str
    type_v: str

    def arguments(self, model, threads, samples=1):
        """Options that both programs understand; JSON."""
        return ["-m", model, "-p", str(self.n_prompt), "-n", str(self.n_gen), "-d", str(self.depth), "-t", str(threads),
                "-ctk", self.type_k, "-ctv", self.type_v, "-r", str(samples), "-o", "json"]

    def legal_fa(self):
        """llama.cpp's -fa values that work for these cache types."""
        return ("0", "1") if self.type_v in FLOAT_TYPES else ("1",)


def parse_test(text):
    if text == "start":
        return Test(text, 0, 0, 0, "f16", "f16")
    m = re.fullmatch(r"(decode|prefill)(\d*)@(\d+)(?::(\w+))?(?::(\w+))?", text)
    if not m or (m[1] == "prefill" and not m[2]):
        raise ValueError(f"test {text!r} is not decode[N]@DEPTH[:K[:V]] or prefillN@DEPTH[:K[:V]]")
    count = int(m[2] or 32)
    if count < 1:
        raise ValueError(f"test {text!r} times no token")
    type_k = m[4] or "f16"
    type_v = m[5] or type_k
    decode = m[1] == "decode"
    return Test(text, 0 if decode else count, count if decode else 0, int(m[3]), type_k, type_v)


def parse_result(text, test, threads, n_sample=1):
    """The one result object in a bench program's JSON, checked to be the test that was asked for."""
    try:
        results = json.loads(text)
    except ValueError as e:
        raise Failure(f"output is not JSON ({e}): {text[:200]!r}") from None
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], dict):
        raise Failure(f"output is not a list of one result: {text[:200]!r}")
    result = results[0]
    asked = {"n_prompt": test.n_prompt, "n_gen": test.n_gen, "n_depth": test.depth, "n_threads": threads,
             "type_k": test.type_k, "type_v": test.type_v}
    for key, want in asked.items():
        if result.get(key) != want:
            raise Failure(f"{key} is {result.get(key)!r}, asked for {want!r}")
    samples = result.get("samples_ts")
    if not isinstance(samples, list) or len(samples) != n_sample:
        raise Failure(f"samples_ts is {samples!r}, not {'one sample' if n_sample == 1 else f'{n_sample} samples'}")
    for sample in samples:
        if not isinstance(sample, (int, float)) or not 0 < sample < float("inf"):
            raise Failure(f"samples_ts has {sample!r}, not a positive rate")
    return result


def run(command, timeout_s):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              timeout=timeout_s)
    except FileNotFoundError:
        raise Failure(f"{command[0]}: no such program") from None
    except PermissionError:
        raise Failure(f"{command[0]}: not executable") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"{shlex.join(command)}\n  did not end within {timeout_s} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise Failure(f"{shlex.join(command)}\n  exit status {done.returncode}: {said}")
    return done.stdout


def measure(command, test, args):
    """Runs one bench process; its result object."""
    output = run(command, args.timeout)
    try:
        return parse_result(output, test, args.threads)
    except Failure as e:
        raise Failure(f"{shlex.join(command)}\n  {e}") from None


def rate(result):
    return result["samples_ts"][0]


@contextlib.contextmanager
def alone(args):
    """Holds --lock."""
    if not args.lock:
        yield
        return
    with open(args.lock, "a", encoding="utf-8") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


class DeepRun:
    """One llama-bench process that takes n_sample samples after a single prefill; halted after the prefill until go()."""

    def __init__(self, command, test, args, n_sample):
        self.command, self.test, self.args, self.n_sample = command, test, args, n_sample
        self.out = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.out, stderr=subprocess.PIPE,
                                            text=True, errors="replace", start_new_session=True)
        except OSError as e:
            raise Failure(f"{command[0]}: {e.strerror}") from None
        self.timer = threading.Timer(args.timeout, self.process.kill)
        self.timer.start()
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if re.search(rf"(?<!warmup )(prompt|generation) run 1/{n_sample}", line):
                self.process.send_signal(signal.SIGSTOP)
                return
        self.fail("ended before its first sample")

    def fail(self, what):
        self.close()
        raise Failure(f"{shlex.join(self.command)}\n  {what}: {''.join(self.said)[-2000:].strip()}")

    def is_stopped(self):
        """A signal takes a while to act on a busy machine."""
        for _ in range(200):
            with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as f:
                state = f.read().rpartition(")")[2].split()[0]
            if state in "TZ":
                return state == "T"
            time.sleep(0.01)
        return False

    def go(self):
        """Lets it take its samples: the rates but the first, and its result object."""
        if not self.is_stopped():
            self.fail("did not stay stopped after its prefill")
        self.process.send_signal(signal.SIGCONT)
        self.said += self.process.stderr.readlines()
        if self.process.wait() != 0:
            self.fail(f"exit status {self.process.returncode}")
        self.out.seek(0)
        result = parse_result(self.out.read(), self.test, self.args.threads, self.n_sample)
        return result["samples_ts"][1:], result

    def close(self):
        self.timer.cancel()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()
        self.out.close()


def choose_fa(base, test, args):
    """llama.cpp's faster -fa value for this test, and a note about the other one."""
    legal = test.legal_fa()
    if len(legal) == 1:
        return legal[0], "not legal"
    with alone(args):
        rates = {fa: rate(measure(base + ["-fa", fa], test, args)) for fa in legal}
    best = max(legal, key=rates.get)
    return best, "; ".join(f"-fa {fa}: {rates[fa]:.2f} t/s in the pre-run" for fa in legal if fa != best)


def in_turn(ours, theirs, test, args):
    """Runs of both, one after the other: our rates, theirs, their last result."""
    ours_ts, theirs_ts = [], []
    with alone(args):
        for _ in range(args.repetitions):
            ours_ts.append(rate(measure(ours, test, args)))
            result = measure(theirs, test, args)
            theirs_ts.append(rate(result))
    return ours_ts, theirs_ts, result


def around(ours, theirs, test, args):
    """The same at a depth: half of our runs, all of theirs, the other half."""
    n = args.repetitions
    deep = DeepRun(theirs, test, args, n + 1)
    try:
        with alone(args):
            ours_ts = [rate(measure(ours, test, args)) for _ in range((n + 1) // 2)]
            theirs_ts, result = deep.go()
            ours_ts += [rate(measure(ours, test, args)) for _ in range(n // 2)]
    finally:
        deep.close()
    return ours_ts, theirs_ts, result


def seconds_to_first_text(command, args):
    """From the start of a program to the first character that is no blank."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as e:
        raise Failure(f"{command[0]}: {e.strerror}") from None
    timer = threading.Timer(args.timeout, process.kill)
    timer.start()
    with process:
        char = process.stdout.read(1)
        while char.isspace():
            char = process.stdout.read(1)
        took = time.monotonic() - began
        process.stdout.read()
    timer.cancel()
    if not char or process.returncode:
        raise Failure(f"{shlex.join(command)}\n  exit status {process.returncode}, {'some' if char else 'no'} text")
    return took


def compare_starts(model, args):
    """Commands and starts per second of both."""
    if not args.llama_completion:
        raise Failure("test start: --llama-completion is needed")
    said = ["-m", model, "-p", "The capital of France is", "-n", "2", "--temp", "0", "-t", str(args.threads)]
    ours = [args.ours, "run"] + said
    theirs = [args.llama_completion] + said + ["-no-cnv", "--no-display-prompt"]
    rates = ([], [])
    with alone(args):
        seconds_to_first_text(ours, args), seconds_to_first_text(theirs, args)  # the page cache
        for _ in range(args.repetitions):
            for command, into in ((ours, rates[0]), (theirs, rates[1])):
                into.append(1 / seconds_to_first_text(command, args))
    return ours, theirs, *rates


def ours_version(program, timeout_s):
    lines = run([program, "--version"], timeout_s).splitlines()
    if not lines:
        raise Failure(f"{program} --version prints nothing")
    return lines[0].strip()


def theirs_version(result):
    return f"llama.cpp build {result.get('build_number', '?')} ({result.get('build_commit', '?')})"


def cpu_model():
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        for line in f:
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({os.cpu_count()} logical CPUs)"
    return "unknown"


def spread(prefix, rates):
    return {f"{prefix}_median_ts": f"{statistics.median(rates):.3f}", f"{prefix}_min_ts": f"{min(rates):.3f}",
            f"{prefix}_max_ts": f"{max(rates):.3f}"}


def portable(command):
    """A command line without the folders of this machine."""
    return shlex.join(os.path.basename(word) if "/" in word else word for word in command)


def compare(model, test, args, version):
    """Measures one test on one model; the CSV row."""
    load = os.getloadavg()[0]
    ours = [args.ours, "bench"] + test.arguments(model, args.threads)
    if args.kernels != "auto":
        ours += ["--kernels", args.kernels]
    if test.depth > 0:
        ours += ["--fill", args.fill]
    n = args.repetitions
    result = {}
    if test.name == "start":
        ours, theirs, ours_ts, theirs_ts = compare_starts(model, args)
        return row_of(model, test, args, version, load, ours, theirs, ours_ts, theirs_ts, "default", "", result)
    base = [args.llama_bench] + test.arguments(model, args.threads, n + 1 if test.depth > 0 else 1)
    if test.depth > 0:
        runs = {fa: around(ours, base + ["-fa", fa, "--progress"], test, args) for fa in test.legal_fa()}
        fa = max(runs, key=lambda value: statistics.median(runs[value][1]))
        other = "; ".join(f"-fa {value}: {statistics.median(runs[value][1]):.2f} t/s, ours then {statistics.median(runs[value][0]):.2f}"
                          for value in runs if value != fa) or "not legal"
        theirs = base + ["-fa", fa, "--progress"]
        ours_ts, theirs_ts, result = runs[fa]
    else:
        fa, other = choose_fa(base, test, args)
        theirs = base + ["-fa", fa]
        ours_ts, theirs_ts, result = in_turn(ours, theirs, test, args)
    return row_of(model, test, args, version, load, ours, theirs, ours_ts, theirs_ts, f"-fa {fa}", other, result)


def row_of(model, test, args, version, load, ours, theirs, ours_ts, theirs_ts, setting, other, result):
    for i in range(args.repetitions):
        progress(f"  {i + 1}/{args.repetitions}: ours {ours_ts[i]:.2f}, theirs {theirs_ts[i]:.2f} /s")
    return {
        "model": os.path.basename(model), "test": test.name, "n_prompt": test.n_prompt, "n_gen": test.n_gen,
        "depth": test.depth, "type_k": test.type_k, "type_v": test.type_v, "threads": args.threads,
        "repetitions": args.repetitions, **spread("ours", ours_ts), **spread("theirs", theirs_ts),
        "theirs_setting": setting, "theirs_other_setting": other,
        "ratio": f"{statistics.median(ours_ts) / statistics.median(theirs_ts):.3f}",
        "ours_fill": args.fill if test.depth > 0 else "none", "theirs_fill": "prefill" if test.depth > 0 else "none",
        "ours_version": version, "theirs_version": args.llama_version or theirs_version(result),
        "ours_command": portable(ours), "theirs_command": portable(theirs), "cpu": cpu_model(),
        "load_before": f"{load:.2f}", "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def progress(text):
    print(text, file=sys.stderr, flush=True)


def print_table(rows):
    head = ("model", "test", "ours t/s", "theirs t/s", "their setting", "ratio")
    lines = [(r["model"], r["test"], f"{r['ours_median_ts']} ({r['ours_min_ts']}-{r['ours_max_ts']})",
              f"{r['theirs_median_ts']} ({r['theirs_min_ts']}-{r['theirs_max_ts']})", r["theirs_setting"], r["ratio"])
             for r in rows]
    widths = [max(len(line[i]) for line in [head] + lines) for i in range(len(head))]
    for line in [head, tuple("-" * w for w in widths)] + lines:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |")


def compare_all(args, tests):
    """Measures every test on every model; rows go to the CSV one by one. Returns the exit status."""
    try:
        version = ours_version(args.ours, args.timeout)
    except Failure as e:
        progress(f"vs_llama_cpp: {e}")
        return 1
    rows, failures = [], []
    with open(args.output, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for model in args.model:
            for test in tests:
                progress(f"{os.path.basename(model)} {test.name}")
                try:
                    row = compare(model, test, args, version)
                except Failure as e:
                    failures.append(f"{os.path.basename(model)} {test.name}")
                    progress(f"FAILED {failures[-1]}: {e}")
                    continue
                rows.append(row)
                writer.writerow(row)
                f.flush()
    if rows:
        print_table(rows)
    if failures:
        progress(f"vs_llama_cpp: {len(failures)} of {len(failures) + len(rows)} tests gave no figure: "
                 + "; ".join(failures))
    return 1 if failures else 0


# --- self-test: parsers and a whole comparison on canned output, no engine needed ------------------------------------

CANNED = {"build_commit": "abc1234", "build_number": 7, "model_filename": "m.gguf", "n_threads": 2, "type_k": "q8_0",
          "type_v": "q8_0", "n_prompt": 0, "n_gen": 32, "n_depth": 8192, "avg_ts": 12.5, "stddev_ts": 0.0,
          "samples_ts": [12.5]}


def expect(condition, what):
    if not condition:
        raise SystemExit(f"self-test: {what}")


def expect_refused(call, error, fragment):
    try:
        call()
    except error as e:
        expect(fragment in str(e), f"refusal {str(e)!r} does not say {fragment!r}")
        return
    expect(False, f"accepted what it should refuse with {fragment!r}")


def self_test_tests():
    expect(parse_test("decode@0") == Test("decode@0", 0, 32, 0, "f16", "f16"), "decode@0")
    expect(parse_test("decode16@8192:q8_0") == Test("decode16@8192:q8_0", 0, 16, 8192, "q8_0", "q8_0"), "decode16")
    expect(parse_test("prefill512@4096:q8_0:f16") == Test("prefill512@4096:q8_0:f16", 512, 0, 4096, "q8_0", "f16"),
           "prefill512")
    for bad in ("decode", "prefill@0", "decode0@0", "decode@-1", "prefill512@0:", "decode@0:a:b:c", ""):
        expect_refused(lambda: parse_test(bad), ValueError, "test " + repr(bad))
    expect(parse_test("decode@1:f16:q4_0").legal_fa() == ("1",), "quantised V without -fa 1")
    expect(parse_test("decode@1:q4_0:f16").legal_fa() == ("0", "1"), "-fa 0 not tried")


def self_test_results():
    test = parse_test("decode@8192:q8_0")
    expect(rate(parse_result(json.dumps([CANNED]), test, 2)) == 12.5, "rate of the canned result")
    wrong = {"n_depth is 0": {"n_depth": 0}, "n_threads is 4": {"n_threads": 4}, "type_v is 'f16'": {"type_v": "f16"},
             "not one sample": {"samples_ts": [1.0, 2.0]}, "not a positive rate": {"samples_ts": [0]},
             "n_gen is 1": {"n_gen": 1}}
    for fragment, change in wrong.items():
        text = json.dumps([{**CANNED, **change}])
        expect_refused(lambda: parse_result(text, test, 2), Failure, fragment)
    for text, fragment in (("", "not JSON"), ("{}", "list of one"), ("[]", "list of one"),
                           (json.dumps([CANNED, CANNED]), "list of one")):
        expect_refused(lambda: parse_result(text, test, 2), Failure, fragment)


def self_test_comparison(folder):
    """Two shell scripts stand for the engines: order of the runs, choice of -fa, medians, and a failing engine."""
    log = os.path.join(folder, "log")

    def script(name, body):
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write("#!/bin/sh\n" + body)
        os.chmod(path, 0o755)
        return path

    canned = json.dumps([{**CANNED, "type_k": "f16", "type_v": "f16", "n_depth": 0, "samples_ts": ["RATE"]}])
    say = "echo '" + canned.replace('"RATE"', "'$R'") + "'\n"
    ours = script("ours", f'[ "$1" = --version ] && {{ echo "longhaul 0"; exit; }}\n'
                          f'echo ours >>{log}\nR=$(grep -c ours {log})0\n{say}')
    theirs = script("theirs", f'R=5; case "$*" in *"-fa 1"*) R=4;; esac\necho "theirs $R" >>{log}\n{say}')
    output = os.path.join(folder, "out.csv")
    args = make_parser().parse_args(["--ours", ours, "--llama-bench", theirs, "-m", "m.gguf", "-t", "2", "-r", "3",
                                     "-o", output, "--tests", "unused"])
    sys.stdout.flush()
    expect(compare_all(args, [parse_test("decode@0")]) == 0, "comparison of two scripts failed")
    with open(log, encoding="utf-8") as f:
        expect(f.read().split("\n") == ["theirs 5", "theirs 4"] + ["ours", "theirs 5"] * 3 + [""], "order of the runs")
    with open(output, encoding="utf-8") as f:
        row = list(csv.DictReader(f))[0]
    expect((row["ours_median_ts"], row["ours_max_ts"], row["theirs_setting"], row["ratio"]) ==
           ("20.000", "30.000", "-fa 0", "4.000"), f"row {row}")
    deep = json.dumps([{**CANNED, "type_k": "q8_0", "type_v": "q8_0", "samples_ts": [1.0, 7.0, 8.0, 9.0]}])
    args.llama_bench = script("deep", "echo '... warmup generation run' >&2; echo '... depth run 1/4' >&2\n"
                                      "echo '... generation run 1/4' >&2; sleep 2\n"
                                      f"echo deep >>{log}; echo '{deep}'\n")
    args.ours = script("ours_deep", f'[ "$1" = --version ] && {{ echo "longhaul 0"; exit; }}\n'
                                    f"echo ours >>{log}; echo '{json.dumps([CANNED])}'\n")
    os.remove(log)
    args.lock = os.path.join(folder, "lock")
    expect(compare_all(args, [parse_test("decode@8192:q8_0")]) == 0, "comparison at a depth failed")
    with open(log, encoding="utf-8") as f:
        expect(f.read().split() == ["ours", "ours", "deep", "ours"], "order of the runs at a depth")
    with open(output, encoding="utf-8") as f:
        row = list(csv.DictReader(f))[0]
    expect((row["theirs_median_ts"], row["theirs_min_ts"], row["ratio"]) == ("8.000", "7.000", "1.562"), f"row {row}")
    args.llama_bench = script("broken", "echo out of paper >&2; exit 3\n")
    expect(compare_all(args, [parse_test("decode@0")]) == 1, "a failing engine gave exit status 0")


def self_test():
    import contextlib
    import io
    import tempfile
    self_test_tests()
    self_test_results()
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        self_test_comparison(folder)
    for fragment in ("exit status 3: out of paper", "1 of 1 tests gave no figure", "20.000 (10.000-30.000)"):
        expect(fragment in said.getvalue(), f"output does not say {fragment!r}:\n{said.getvalue()}")
    return 0


# --- command line ----------------------------------------------------------------------------------------------------


def make_parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ours", metavar="PATH", help="the longhaul program")
    p.add_argument("--llama-bench", metavar="PATH", help="llama.cpp's llama-bench")
    p.add_argument("--llama-completion", metavar="PATH", help="llama.cpp's llama-completion, for the test start")
    p.add_argument("--llama-version", metavar="TEXT", help="what the CSV calls that build (default: its own words)")
    p.add_argument("-m", "--model", nargs="+", metavar="GGUF")
    p.add_argument("--kernels", default="auto", metavar="SET", help="ours: auto, avx2 ...; the other build is your choice")
    p.add_argument("-t", "--threads", type=int, default=os.cpu_count(), metavar="N")
    p.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="runs of each engine (default 5)")
    p.add_argument("--tests", default=DEFAULT_TESTS, metavar="LIST", help=f"default {DEFAULT_TESTS}")
    p.add_argument("--fill", choices=("synthetic", "prefill"), default="synthetic", help="how ours reaches a depth")
    p.add_argument("--lock", metavar="FILE", help="hold an exclusive flock of this file while timing")
    p.add_argument("--timeout", type=float, default=3600, metavar="S", help="limit for one process (default 3600)")
    p.add_argument("-o", "--output", metavar="FILE.csv")
    p.add_argument("--self-test", action="store_true", help="check the script itself; needs no engine")
    return p


def main():
    parser = make_parser()
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    for name in ("ours", "llama_bench", "model", "output"):
        if not getattr(args, name):
            parser.error(f"--{name.replace('_', '-')} is needed")
    if args.threads < 1 or args.repetitions < 1:
        parser.error("-t and -r start at 1")
    try:
        tests = [parse_test(t) for t in args.tests.split(",")]
    except ValueError as e:
        parser.error(str(e))
    return compare_all(args, tests)


if __name__ == "__main__":
    sys.exit(main())
