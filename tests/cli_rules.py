#!/usr/bin/env python3
"""Rules of the tree that no compiler checks: who may include whom, what library code must not do, sizes, and that nothing
of the machine it was written on stays in it. Looks at the files that git tracks (without git: all but what .gitignore
names).
Exit status 0 kept, 1 broken (each case on a line)."""
import os
import pathlib
import re
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOP = {"CMakeLists.txt", "CMakePresets.json", "README.md", "LICENSE", "core", "cpu", "gpu", "offload", "tests", "bench",
       "docs", ".ci", ".clang-format", ".gitignore"}
MAX_LINES = 900
MAX_DATA_BYTES = 40 * 1000 * 1000

# Folder: whose headers its files may include. offload/cli may include everything that offload may.
LAYERS = {"core": {"core"}, "cpu": {"core", "cpu"}, "gpu": {"core", "gpu"}, "offload": {"core", "cpu", "gpu", "offload"}}

# System or library header (pattern): files that may include it, as patterns of whole paths.
ONLY_IN = {
    r"hwloc.*": [r"offload/topo\.c"],
    r"pcre2.*": [r"core/tokenizer\w*\.[ch]"],
    r"cblas.*|openblas.*": [r"cpu/gemm\.c"],
    r"cuda.*|cublas.*|nvml.*|driver_types\.h": [r"gpu/.*", r"tests/emu/.*"],
    r"pthread\.h|threads\.h|semaphore\.h|linux/futex\.h": [r"cpu/.*", r"gpu/.*", r"offload/.*", r"tests/.*", r"bench/.*"],
    r"jansson.*": [r"offload/.*", r"tests/.*", r"bench/.*"],
    r"cmocka.*": [r"tests/.*"],
}

# What only programs may do.
PRINTS = re.compile(r"\b(printf|puts|putchar|perror|exit|_exit|abort|quick_exit)\s*\(|\b(fprintf|fputs|fputc|fwrite)\s*\([^;]*\b(stdout|stderr)\b")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SOURCE = {".c", ".h", ".cu", ".cuh", ".py", ".sh", ".md", ".1", ".txt", ".json", ""}
CODE = {".c", ".h", ".cu", ".cuh", ".cpp"}


def tracked():
    try:
        out = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True).stdout
        names = [n for n in out.decode().split("\0") if n]
    except (OSError, subprocess.CalledProcessError):
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")
                 if p.is_file() and not re.match(r"build|models/|rival/|\.git/|.*__pycache__/|.*\.o$", str(p.relative_to(ROOT)))]
    return sorted(n for n in names if (ROOT / n).is_file())


def blank_comments_and_strings(text):
    """The C text with comments and literals blanked, line breaks kept."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    return token.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def included(text):
    """(line, is a project header, name) of each include; commented-out ones do not count."""
    code = blank_comments_and_strings(text).splitlines()
    for number, line in enumerate(text.splitlines(), 1):
        m = INCLUDE.match(line)
        if m and "include" in code[number - 1]:
            yield number, m[1] == '"', m[2]


def check_includes(name, text):
    folder = name.split("/")[0]
    for number, ours, header in included(text):
        top = header.split("/")[0]
        if ours and folder in LAYERS:
            if "/" not in header and not header.startswith("lh_"):
                yield f"{name}:{number}: includes \"{header}\" without its folder"
            elif "/" in header and top not in LAYERS[folder]:
                yield f"{name}:{number}: {folder} must not include {header}"
            elif header.startswith("offload/cli/") and not name.startswith("offload/cli/"):
                yield f"{name}:{number}: only offload/cli may include {header}"
        for pattern, places in ONLY_IN.items():
            if re.fullmatch(pattern, header) and not any(re.fullmatch(p, name) for p in places):
                yield f"{name}:{number}: {header} may only be included in {' '.join(places)}"


def check_library(name, text):
    if name.split("/")[0] not in LAYERS or name.startswith("offload/cli/"):
        return
    for number, line in enumerate(blank_comments_and_strings(text).splitlines(), 1):
        m = PRINTS.search(line)
        if m:
            yield f"{name}:{number}: library code must not call {(m[1] or m[2])}"


def traces():
    """Patterns of what must not be in the tree: folders and names of the machine that runs this, hosts of its package
    sources. Put together here so that this file does not hold them."""
    words = {"/" + w + "/" for w in ("work", "farm", "home/" + os.environ.get("USER", "nobody"))}
    words |= {"pypi" + ".org", "python" + "hosted.org"}
    host = socket.gethostname()
    if len(host) > 5 and host != "localhost":
        words.add(host)
    sources = [pathlib.Path("/etc/apt/sources.list"), *pathlib.Path("/etc/apt").glob("sources.list.d/*"),
               *map(pathlib.Path, ("/etc/pip.conf", os.path.expanduser("~/.config/pip/pip.conf"), os.path.expanduser("~/.pip/pip.conf")))]
    for path in sources:
        try:
            words.update(re.findall(r"https?://(?:[^/@\s]*@)?([\w.-]+\.[\w-]+)", path.read_text(errors="replace")))
        except OSError:
            pass
    return re.compile("|".join(re.escape(w) for w in sorted(words)))


def self_check(trace):
    """Rules that no longer catch their plainest case are themselves broken."""
    include, call = "#include ", "pri" + "ntf"
    planted = [
        (check_includes("core/a.c", include + '"cpu/pool.h"'), 1),
        (check_includes("cpu/a.c", include + '"gpu/gpu.h"'), 1),
        (check_includes("cpu/a.c", include + '"pool.h"'), 1),
        (check_includes("core/a.c", include + "<pthread.h>"), 1),
        (check_includes("offload/plan.c", include + "<hwloc.h>"), 1),
        (check_includes("offload/topo.c", include + "<hwloc.h>"), 0),
        (check_includes("offload/plan.c", include + '"offload/cli/cli.h"'), 1),
        (check_includes("core/a.c", "/* " + include + '"cpu/pool.h" */'), 0),
        (check_library("core/a.c", f'{call}("x");'), 1),
        (check_library("offload/a.c", "fprintf(stderr, x);"), 1),
        (check_library("offload/cli/a.c", "exit(1);"), 0),
        (check_library("core/a.c", f's{call}(out, "exit(1)"); /* abort() */'), 0),
        (trace.findall("see /" + "work/notes"), 1),
    ]
    for i, (found, want) in enumerate(planted):
        got = list(found)
        if len(got) != want:
            yield f"planted case {i}: {len(got)} findings, want {want}: {got}"


def main():
    names, bad, data_bytes = tracked(), [], 0
    trace = traces()
    bad += self_check(trace)
    for name in names:
        path = ROOT / name
        if name.split("/")[0] not in TOP:
            bad.append(f"{name}: not one of the top-level entries")
        if name.startswith("tests/data/"):
            data_bytes += path.stat().st_size
            if path.suffix not in (".md", ".py"):
                continue
        if path.suffix not in SOURCE and path.suffix not in CODE and path.suffix not in (".csv", ".xml", ".in"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix in CODE:
            bad += check_includes(name, text)
            bad += check_library(name, text)
        lines = text.count("\n")
        if path.suffix in SOURCE | CODE and not name.startswith("tests/golden/") and lines > MAX_LINES:
            bad.append(f"{name}: {lines} lines, limit {MAX_LINES}")
        for number, line in enumerate(text.splitlines(), 1):
            m = trace.search(line)
            if m:
                bad.append(f"{name}:{number}: names '{m[0]}', which belongs to one machine")
    if data_bytes > MAX_DATA_BYTES:
        bad.append(f"tests/data: {data_bytes} bytes, limit {MAX_DATA_BYTES}")
    if not names or "core/err.h" not in names:
        bad.append(f"{ROOT}: found no tree to check")
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
