#!/usr/bin/env python3
"""longhaul quantize: bytes against files of another quantiser, refusals, full disk, Ctrl-C. Arguments: program, data."""
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time

PROGRAM, DATA = sys.argv[1], sys.argv[2]
STORIES = os.path.join(DATA, "stories260K")
TYPE_BYTES = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 14: (256, 210), 20: (32, 18)}
failures = []


def check(ok, what):
    if not ok:
        failures.append(what)


class Gguf:
    """Just enough of a reader: keys (scalars only) and tensor bytes."""

    def __init__(self, path):
        self.b = open(path, "rb").read()
        self.at = 8
        n_tensors, n_kv = self.take("<QQ")
        self.kv, self.tensors = {}, {}
        for _ in range(n_kv):
            key = self.text()
            self.kv[key] = self.value(self.take("<I")[0])
        infos = []
        for _ in range(n_tensors):
            name = self.text()
            dims = [self.take("<Q")[0] for _ in range(self.take("<I")[0])]
            infos.append((name, dims, *self.take("<IQ")))
        base = (self.at + 31) // 32 * 32
        for name, dims, kind, offset in infos:
            count = 1
            for d in dims:
                count *= d
            elems, size = TYPE_BYTES[kind]
            self.tensors[name] = (kind, dims, self.b[base + offset:base + offset + count // elems * size])

    def take(self, form):
        v = struct.unpack_from(form, self.b, self.at)
        self.at += struct.calcsize(form)
        return v

    def text(self):
        n = self.take("<Q")[0]
        self.at += n
        return self.b[self.at - n:self.at].decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, n = self.take("<IQ")
            return [self.value(inner) for _ in range(n)]
        return self.take("<" + "BbHhIif?  Qqd"[kind])[0]


def run(*args, **kw):
    p = subprocess.run([PROGRAM, "quantize", *args], capture_output=True, text=True, timeout=300, **kw)
    check(p.returncode >= 0, f"{args}: died by signal {-p.returncode}")
    return p


def expect(status, words, *args, **kw):
    p = run(*args, **kw)
    check(p.returncode == status, f"{args}: status {p.returncode}, expected {status}: {p.stderr[-300:]}")
    for w in words:
        check(w in p.stderr, f"{args}: '{w}' is missing in: {p.stderr[-300:]}")
    return p


def nothing_in(folder):
    check(os.listdir(folder) == [], f"{folder}: left behind {os.listdir(folder)}")


def write_gguf(path, rows, cols, one_row):
    """One F32 matrix whose rows are all alike, of an architecture that the engine does not check."""
    name = b"blk.0.ffn_up.weight"
    arch = b"general.architecture"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += struct.pack("<Q", len(arch)) + arch + struct.pack("<IQ", 8, 5) + b"other"
    head += struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, cols, rows, 0, 0)
    head += bytes(-len(head) % 32)
    with open(path, "wb") as f:
        f.write(head)
        for _ in range(rows):
            f.write(one_row)


def same_as_other_quantiser(tmp):
    """Tensor for tensor the bytes of files that were made by someone else, fallback for odd rows included."""
    for name, mix in (("q8_0", "Q8_0"), ("f16", "F16")):
        out = os.path.join(tmp, "out.gguf")
        expect(0, ["bits per weight"], f"{STORIES}/stories260K-f32.gguf", out, mix)
        got, want = Gguf(out), Gguf(f"{STORIES}/stories260K-{name}.gguf")
        check(got.tensors.keys() == want.tensors.keys(), f"{mix}: tensor names differ")
        for t in want.tensors:
            check(got.tensors[t] == want.tensors[t], f"{mix}: tensor {t} differs")
        for key, value in want.kv.items():
            if key not in ("general.file_type", "general.quantization_version"):
                check(got.kv.get(key) == value, f"{mix}: key {key} differs")
        check(got.kv["general.file_type"] == {"Q8_0": 7, "F16": 1}[mix], f"{mix}: file type {got.kv['general.file_type']}")
        os.unlink(out)


def threads_do_not_matter(tmp):
    source = os.path.join(tmp, "in.gguf")
    row = struct.pack("<512f", *[((i * 7919) % 1000 - 500) / 256 for i in range(512)])
    write_gguf(source, 700, 512, row)
    results = []
    for threads in ("1", "3"):
        out = os.path.join(tmp, "out.gguf")
        expect(0, ["F32 -> Q4_K"], source, out, "q4_k_m", threads)
        results.append(open(out, "rb").read())
        os.unlink(out)
    check(results[0] == results[1], "1 and 3 threads give different files")
    # the known answer for this row's first block
    check(b"\x13\x1c\xdc\x27\xff\xff\xfc\xff\xff\xfe\xfe\xfd" in results[0], "known Q4_K block is not in the file")
    os.unlink(source)


def refusals(tmp):
    f32, q8 = f"{STORIES}/stories260K-f32.gguf", f"{STORIES}/stories260K-q8_0.gguf"
    out = os.path.join(tmp, "out.gguf")
    expect(2, ["already packed", "--allow-requantize"], q8, out, "Q4_0")
    expect(2, ["Q9_X", "Q4_K_M"], f32, out, "Q9_X")
    expect(2, ["2 of 3"], f32, out)
    expect(2, ["threads"], f32, out, "Q8_0", "0")
    expect(2, ["same file"], f32, f32, "Q8_0")
    expect(2, ["importance"], "--imatrix", "x", f32, out, "Q8_0")
    expect(3, ["missing.gguf"], os.path.join(tmp, "missing.gguf"), out, "Q8_0")
    expect(1, ["no/such"], f32, os.path.join(tmp, "no/such/out.gguf"), "Q8_0")
    expect(2, ["regular file"], f32, "/dev/null", "Q8_0")
    nothing_in(tmp)
    p = expect(0, [], "--dry-run", f32, out, "Q4_0")
    check("dry run" in p.stderr, "--dry-run does not say so")
    nothing_in(tmp)
    expect(0, [], "--allow-requantize", q8, out, "Q4_0")
    kinds = {kind for kind, _, _ in Gguf(out).tensors.values()}
    check(2 in kinds, f"requantised types {kinds}")
    expect(0, [], "--pure", "-q", f32, out, "IQ4_NL")
    kinds = {kind for kind, dims, _ in Gguf(out).tensors.values() if len(dims) == 2 and dims[0] % 32 == 0}
    check(kinds == {20}, f"--pure IQ4_NL gives types {kinds}")
    os.unlink(out)


def bad_weights(tmp):
    source, out = os.path.join(tmp, "in.gguf"), os.path.join(tmp, "out.gguf")
    write_gguf(source, 4, 256, struct.pack("<256f", *[0.5] * 255, float("nan")))
    expect(1, ["blk.0.ffn_up.weight", "row 0", "value 255", "nan"], source, out, "Q4_0")
    os.unlink(source)
    nothing_in(tmp)


def full_disk(tmp):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    out = os.path.join(tmp, "out.gguf")
    expect(1, [out], f"{STORIES}/stories260K-f32.gguf", out, "F16", preexec_fn=limit)
    nothing_in(tmp)


def interrupt(tmp):
    source, out = os.path.join(tmp, "in.gguf"), os.path.join(tmp, "out.gguf")
    row = struct.pack("<4096f", *[((i * 7919) % 1000 - 500) / 256 for i in range(4096)])
    write_gguf(source, 8192, 4096, row)
    with subprocess.Popen([PROGRAM, "quantize", source, out, "q5_k_s", "1"], stderr=subprocess.PIPE, text=True) as p:
        end = time.time() + 60
        while not os.path.exists(out + ".tmp") and p.poll() is None and time.time() < end:
            time.sleep(0.005)
        time.sleep(0.05)
        p.send_signal(signal.SIGINT)
        p.wait(60)
        text = p.stderr.read()
    check(p.returncode == 130, f"interrupted: status {p.returncode}: {text[-300:]}")
    os.unlink(source)
    nothing_in(tmp)


for test in (same_as_other_quantiser, threads_do_not_matter, refusals, bad_weights, full_disk, interrupt):
    with tempfile.TemporaryDirectory() as folder:
        test(folder)
for f in failures:
    print("FAIL", f)
sys.exit(1 if failures else 0)
