#!/usr/bin/env python3
"""The tokenize command: ids, table, both directions, exit statuses. Usage: cli_tokenize.py PROGRAM DATA_FOLDER"""
import lzma
import pathlib
import subprocess
import sys
import tempfile

program, data = sys.argv[1], pathlib.Path(sys.argv[2])
folder = tempfile.TemporaryDirectory(prefix="longhaul-test-")
failed = 0


def vocabulary(name):
    path = pathlib.Path(folder.name) / pathlib.Path(name).stem
    path.write_bytes(lzma.open(data / name).read())
    return str(path)


QWEN = vocabulary("qwen2-tokenizer/qwen3-vocab.gguf.xz")
LLAMA = vocabulary("tokenizers/ggml-vocab-llama-spm.gguf.xz")


def check(args, out, status=0, text=b"", says=""):
    global failed
    r = subprocess.run([program, "tokenize", *args], input=text, capture_output=True)
    out = out if isinstance(out, bytes) else out.encode()
    if r.returncode != status or r.stdout != out or says.encode() not in r.stderr or (status and r.stderr.count(b"\n") != 1):
        print(f"tokenize {args}: status {r.returncode} (want {status})\n got  {r.stdout!r}\n want {out!r}\n said {r.stderr!r} ({says!r})")
        failed = 1


check(["-m", QWEN, "-p", "Hello world", "--ids"], "[9707, 1879]\n")
check(["-m", QWEN, "-p", r"a\nb\x21", "--ids"], "[64, 198, 65, 0]\n")
check(["-m", QWEN, "-p", r"a\nb", "--ids", "--no-escape"], "[64, 1699, 65]\n")
check(["-m", QWEN, "-p", "<|im_end|>", "--ids"], "[151645]\n")
check(["-m", QWEN, "-p", "<|im_end|>", "--ids", "--no-parse-special"], "[27, 91, 318, 6213, 91, 29]\n")
check(["-m", QWEN, "-p", "Hello world", "--show-count"], "  9707 -> 'Hello'\n  1879 -> ' world'\nTotal number of tokens: 2\n")
check(["-m", QWEN, "-p", " \U0001f999"], b" 11162 -> ' \xf0\x9f'\n    99 -> '\xa6'\n   247 -> '\x99'\n")
check(["-m", LLAMA, "-p", "Hello", "--ids"], "[1, 15043]\n")
check(["-m", LLAMA, "-p", "Hello", "--ids", "--no-bos"], "[15043]\n")
check(["-m", LLAMA, "-p", "<s>Hello", "--ids"], "[1, 15043]\n")
check(["-m", QWEN, "--stdin", "--ids"], "[9707]\n", text=b"Hello")
check(["-m", QWEN, "-f", "-", "--ids"], "[64, 1699, 65]\n", text=rb"a\nb")  # escapes are for -p only
check(["-m", QWEN, "--stdin", "--ids"], "[]\n")
check(["-m", QWEN, "--stdin", "--ids", "--show-count"], "[87, 187]\nTotal number of tokens: 2\n", text=b"x\xff")
file = pathlib.Path(folder.name) / "text"
file.write_bytes(b"a\0b")
check(["-m", QWEN, "-f", str(file), "--ids"], "[64, 188, 65]\n")
check(["-m", QWEN, "--detokenize", "9707,1879,151645"], "Hello world<|im_end|>\n")
check(["-m", QWEN, "--detokenize", "[9707, 1879]"], "Hello world\n")
check(["-m", QWEN, "--detokenize", "187"], b"\xff\n")
check(["-m", LLAMA, "--detokenize", "15043, 3186"], "Hello world\n")

check(["-m", QWEN, "--detokenize", "1,x"], "", 2, says='"x"')
check(["-m", QWEN, "--detokenize", "151936"], "", 2, says="151935")
check(["-m", QWEN, "--detokenize", "99999999999999999999"], "", 2, says="151935")
check(["-m", QWEN], "", 2, says="--stdin")
check(["-m", QWEN, "-p", "a", "--stdin"], "", 2, says="exactly one")
check(["-p", "a"], "", 2, says="-m")
check(["-m", QWEN, "-f", "/nonexistent/text"], "", 2, says="/nonexistent/text")
check(["-m", QWEN, "-p", "a", "--frobnicate"], "", 2, says="--frobnicate")
check(["-m", "/nonexistent/model.gguf", "-p", "a"], "", 3, says="/nonexistent/model.gguf")
for name, key in (("tok_missing", "tokens"), ("tok_scores_short", "scores"), ("tok_eos_out_of_range", "eos_token_id"), ("tok_unknown_model", "model")):
    check(["-m", str(data / "bad-gguf" / f"{name}.gguf"), "-p", "a"], "", 3, says=f"tokenizer.ggml.{key}")
sys.exit(failed)
