#!/usr/bin/env bash
# Installs the packages that are missing, builds and runs all tests. The last line is "N passed, N failed, N skipped".
#   tests/run_all.sh                   the optimised build
#   tests/run_all.sh --sanitizers      then the fast tests under the address and undefined-behaviour sanitizers
set -euo pipefail
cd "$(dirname "$0")/.."

presets=(release)
case "${1-}" in
'') ;;
--sanitizers) presets=(release asan) ;;
*)
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

cores=$(nproc)
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export CTEST_OUTPUT_ON_FAILURE=1
export UBSAN_OPTIONS=print_stacktrace=1

step() { # step WHAT COMMAND...: runs it, says how long it took
    local what=$1 began=$SECONDS rc=0
    shift
    echo "== $what"
    "$@" || rc=$?
    echo "== $what: $((SECONDS - began)) s$([ $rc = 0 ] || echo ", FAILED")"
    return $rc
}

# Fast tests share the cores; slow ones (books, long contexts, timing) run one by one.
tests() { # tests PRESET
    local rc=0
    local common=(--test-dir "build/$1" --test-output-size-passed 1000000 --test-output-size-failed 1000000)
    ctest "${common[@]}" -j "$cores" -LE slow --output-junit "$results/$1-fast.xml" || rc=1
    if [ "$1" = release ]; then
        ctest --no-tests=ignore "${common[@]}" -L slow --output-junit "$results/$1-slow.xml" || rc=1
    else
        echo "-- $1: tests with the label slow are left out"
    fi
    return $rc
}

build() { # build PRESET
    cmake --preset "$1" -DLONGHAUL_WERROR=ON && cmake --build "build/$1" -j "$cores"
}

step packages .ci/packages qemu-user # old CPUs: tests/cli_old_cpu.py
for p in "${presets[@]}"; do
    if step "build $p" build "$p" >"$results/build.log" 2>&1; then
        grep -E '^(==|-- GPU)' "$results/build.log"
        step "tests $p" tests "$p" || true # what failed is counted below
    else
        cat "$results/build.log"
        touch "$results/$p-did-not-build"
    fi
done
python3 tests/count_results.py "$results"
