#!/usr/bin/env bash
# The GPU tests on the emulator in all that takes too long for every run of the tests; the everyday part is ctest -L emu.
#   tests/emu/matrix.sh          some hours on 2 cores; a line per run; status 1 when one failed
#   tests/emu/matrix.sh PART...  of: orders archs sanitizers races
# orders      every stream policy with every order of lanes, more seeds
# archs       the same for sm_70 and sm_75, with real shuffles in sums and two threads of blocks
# sanitizers  address and undefined behaviour (alignment, shifts, bounds, conversions), three orders
# races       the thread sanitizer with every order; blocks that are unknown to each other
# BEFORE in the environment: a command that runs each test.
set -uo pipefail
cd "$(dirname "$0")/../.."

failed=0
run() { # run BUILD PROGRAM [NAME=VALUE...]
    local dir=$1 program=$2 began=$SECONDS rc=0 log
    shift 2
    log=$(mktemp)
    env "$@" UBSAN_OPTIONS=print_stacktrace=1 ${BEFORE-} "build/$dir/$program" >"$log" 2>&1 || rc=$?
    echo "$([ $rc = 0 ] && echo passed || echo "FAILED ($rc)") $dir $program $* $((SECONDS - began)) s"
    [ $rc = 0 ] || { failed=1; tail -n 30 "$log"; }
    rm -f "$log"
}
build() { # build PRESET
    cmake --preset "$1" -DLONGHAUL_WERROR=ON >/dev/null && cmake --build "build/$1" -j "$(nproc)" >/dev/null || exit 1
}
programs() { # programs BUILD ENDING: the test programs of gpu/ with this ending
    (cd "build/$1" && ls -d test_gpu_*"$2")
}

orders() {
    build release
    for t in $(programs release _emu); do run release "$t" TEST_ORDERS=all; done
}
archs() {
    build release
    for sm in 700 750; do
        for t in $(programs release "_emu$sm"); do
            run release "$t" TEST_ORDERS=all
            run release "$t" TEST_ORDERS=few EMU_SHUFFLE_SUM=1
            run release "$t" TEST_ORDERS=few EMU_WORKERS=2
        done
    done
}
sanitizers() {
    build asan
    for ending in _emu _emu700 _emu750; do
        for t in $(programs asan $ending); do run asan "$t" TEST_ORDERS=few; done
    done
}
races() {
    build release
    for t in $(programs release _race); do
        run release "$t" TEST_ORDERS=all
        run release "$t" TEST_ORDERS=2 EMU_TSAN_FRESH=1
    done
}

for part in "${@:-orders archs sanitizers races}"; do
    for p in $part; do
        case $p in
        orders | archs | sanitizers | races) "$p" ;;
        *)
            sed -n '2,10p' "$0" >&2
            exit 2
            ;;
        esac
    done
done
exit $failed
