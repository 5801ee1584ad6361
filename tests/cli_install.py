#!/usr/bin/env python3
"""What is installed works: the program, the library through pkg-config, the manual page; and the manual page names every
command and option that the program has. Arguments: the built program (its folder is the build), the test data."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

COMMANDS = ("run", "plan", "bench", "check", "perplexity", "info", "tokenize", "quantize")
# Meets the library as a stranger would: opens a file that is not there and wants the sentence.
CONSUMER = r"""
#include <offload/engine.h>
#include <stdio.h>
#include <string.h>
int main(void) {
    struct engine *e = NULL;
    int rc = engine_open(&e, "/no/such/model.gguf", NULL);
    if (rc != ERR_FORMAT || !strstr(err_text(), "/no/such/model.gguf")) {
        printf("engine_open gave %d, want %d; text '%s'\n", rc, ERR_FORMAT, err_text());
        return 1;
    }
    engine_close(e);
    return 0;
}
"""


def call(*command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, **more)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def cached(build, name):
    m = re.search(rf"^{name}:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M)
    return m[1] if m else ""


def check_library(build, prefix, tmp):
    pc = next(prefix.rglob("longhaul.pc"), None) or sys.exit("no longhaul.pc was installed")
    env = dict(os.environ, PKG_CONFIG_PATH=str(pc.parent))
    flags = call("pkg-config", "--cflags", "--libs", "longhaul", env=env).split()
    sanitize = cached(build, "LONGHAUL_SANITIZE")
    (tmp / "consumer.c").write_text(CONSUMER)
    call(cached(build, "CMAKE_C_COMPILER") or "cc", "-std=c11", tmp / "consumer.c", "-o", tmp / "consumer",
         *([f"-fsanitize={sanitize}"] if sanitize else []), *flags)
    call(tmp / "consumer")


def check_manual(program, page):
    text = page.read_text().replace("\\-", "-").replace("\\&", "")
    words = set(re.findall(r"--?[\w-]+", text))
    bad = []
    commands = re.findall(r"^  ([a-z]+)  ", call(program, "--help"), re.M)
    if "run" not in commands:
        sys.exit(f"longhaul --help names these commands: {commands}")
    for command in commands:
        if not re.search(rf"^\.B {command}$", text, re.M):
            bad.append(f"command {command}")
        shown = call(program, command, "--help-all")
        options = [o for line in shown.splitlines() for o in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", line.split("  ")[1] if line.startswith("  ") else "")]
        if not options:
            bad.append(f"{command} --help-all shows no options")
        bad += [f"{command} {o}" for o in options if o not in words]
    for status in (0, 1, 2, 3, 4, 5, 130):
        if not re.search(rf"^\.B {status}$", text, re.M):
            bad.append(f"exit status {status}")
    if bad:
        sys.exit("missing in the manual page: " + ", ".join(dict.fromkeys(bad)))


def main():
    program = pathlib.Path(sys.argv[1])
    build = program.parent
    with tempfile.TemporaryDirectory() as folder:
        tmp = pathlib.Path(folder)
        prefix = tmp / "prefix"
        call("cmake", "--install", build, "--prefix", prefix)
        installed = prefix / "bin" / "longhaul"
        if not call(installed, "--version").startswith("longhaul "):
            sys.exit("longhaul --version does not begin with its name")
        check_library(build, prefix, tmp)
        check_manual(installed, prefix / "share" / "man" / "man1" / "longhaul.1")


if __name__ == "__main__":
    main()
