#!/usr/bin/env bash
# Tests and benches of the GPU back end on a machine with a GPU, which needs no network. One table comes last; logs and CSV files
# are left in $OUT (build/device-out if not set). Complete in under 8 minutes; a part that hangs is ended and named.
#
#   bench/device.sh pack [SM]      on a machine with the build's packages and nvcc, with or without a GPU: builds programs for the
#                                  chips SM ("90", "75;86"; 90 if not given) and puts them into build/device, with the libraries
#                                  that they load but for glibc, the driver and cuBLAS. Take the tree with build/device along.
#   bench/device.sh pack-blas [SM] the same with cuBLAS (600 MB), for a machine that has none
#   bench/device.sh                on the machine with the GPU: runs what was packed. Without build/device it builds first, for
#                                  the card that is there; that needs gcc, cmake, nvcc and the packages that .ci/packages names.
#
# cuBLAS that was not packed is looked for where the loader, toolkits and Python packages keep it. PACKED names another folder
# than build/device.
# Exit status: 0 all passed, 1 something failed, 77 no GPU here.
set -uo pipefail
cd "$(dirname "$0")/.."

packed=$(realpath -m "${PACKED-build/device}")
out=$(realpath -m "${OUT-build/device-out}")
benches="bench_gpu bench_gpu_handover"
began=$SECONDS

die() {
    echo "device.sh: $1" >&2
    exit "${2-1}"
}

build() { # build FOLDER ARCHS TEST_DATA: configures, then builds the GPU tests, the benches and the program
    local common=(-DCMAKE_BUILD_TYPE=Release -DLONGHAUL_CUDA=ON "-DLONGHAUL_CUDA_ARCHS=$2" "-DLONGHAUL_TEST_DATA=$3")
    cmake -S . -B "$1" "${common[@]}" >"$out/configure.log" 2>&1 || { tail -n 20 "$out/configure.log" >&2; return 1; }
    grep -e '-- GPU' "$out/configure.log"
    # shellcheck disable=SC2086
    cmake --build "$1" -j "$(nproc)" --target longhaul_cli $benches $(gpu_tests) >"$out/build.log" 2>&1 ||
        { tail -n 30 "$out/build.log" >&2; return 1; }
}

gpu_tests() { for t in tests/test_gpu_*.c; do basename "$t" .c; done; }

libraries() { # libraries PROGRAM...: what they load and a machine may lack
    ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
        grep -vE '/(ld-linux|libc|libm|libdl|librt|libpthread|libcuda|libcublas|libcublasLt)(-[^/]*)?\.so'
}

pack() {
    local from=$PWD/build/device-build t l
    build "$from" "$1" tests/data || die "the build failed; its log is $out/build.log"
    rm -rf "$packed" && mkdir -p "$packed/lib"
    for t in longhaul $benches $(gpu_tests); do
        cp "$from/$t" "$packed/" || die "$from/$t is missing"
        strip --strip-debug "$packed/$t"
    done
    for l in $(libraries "$packed"/longhaul "$packed"/bench_* "$packed"/test_*); do cp -L "$l" "$packed/lib/"; done
    if [ "$2" = blas ]; then
        ldd "$packed/bench_gpu" | awk '/libcublas/ && $3 ~ /^\// {print $3}' | while read -r l; do cp -L "$l" "$packed/lib/"; done
    fi
    git rev-parse --short=8 HEAD >"$packed/commit" 2>/dev/null || echo unknown >"$packed/commit"
    du -sh "$packed" | sed 's/^/packed: /'
}

# The folder of a libcublas of the version that the programs ask for.
find_blas() {
    local want
    want=$(objdump -p "$1" 2>/dev/null | awk '/NEEDED.*libcublas\.so/ {print $2}')
    want=${want:-libcublas.so.13}
    [ -e "$packed/lib/$want" ] && return 0
    ldconfig -p 2>/dev/null | grep -q "$want" && return 0
    local f
    for f in /usr/local/cuda*/lib64/"$want" /usr/local/cuda*/targets/*/lib/"$want" /opt/cuda/lib64/"$want" \
        $(python3 -c 'import sys; [print(p + "/nvidia/*/lib/'"$want"'") for p in sys.path if p]' 2>/dev/null); do
        [ -e "$f" ] && dirname "$f" && return 0
    done
    echo "device.sh: $want is nowhere to be found; pack it with pack-blas" >&2
}

# The driver's device files; or a packed program that sees a card, an emulated one say.
have_gpu() {
    [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || { [ -x "$packed/longhaul" ] && "$packed/longhaul" --version 2>/dev/null | grep -q '^GPU back end: 0: '; }
}

# Packed programs look for their data from the top of the tree.
list_tests() { # list_tests FOLDER
    mkdir -p "$out/ctest"
    for t in $(gpu_tests); do
        echo "add_test($t \"$1/$t\")"
        echo "set_tests_properties($t PROPERTIES LABELS gpu SKIP_RETURN_CODE 77 WORKING_DIRECTORY \"$PWD\")"
    done >"$out/ctest/CTestTestfile.cmake"
}

run_tests() { # run_tests FOLDER: ctest where there is one
    if command -v ctest >/dev/null; then
        list_tests "$1"
        timeout 200 ctest --test-dir "$out/ctest" -L gpu --output-on-failure --timeout 100 >"$out/tests.log" 2>&1
        return
    fi
    local t rc bad=0
    for t in $(gpu_tests); do
        rc=0
        timeout 100 "$1/$t" >"$out/$t.log" 2>&1 || rc=$?
        case $rc in 0) echo "$t Passed" ;; 77) echo "$t Skipped" ;; *) echo "$t Failed ($rc)" && bad=1 ;; esac
    done >"$out/tests.log"
    return $bad
}

bench() { # bench FOLDER NAME SECONDS ARGUMENTS...
    local folder=$1 name=$2 limit=$3 rc=0
    shift 3
    timeout "$limit" "$folder/$name" "$@" >"$out/$name.csv" 2>"$out/$name.log" || rc=$?
    [ $rc = 0 ] || echo "$name: status $rc$([ $rc = 124 ] && echo " (did not end in $limit s)"): $(tail -n 1 "$out/$name.log")"
    return $rc
}

table() {
    echo
    echo "== $(cat "$packed/commit" 2>/dev/null || git rev-parse --short=8 HEAD 2>/dev/null || echo unknown): $("$1/longhaul" --version | grep '^GPU back end')"
    grep -E '(Passed|Failed|Skipped|\*\*\*|tests passed)' "$out/tests.log" | sed 's/^ *//'
    grep -h '^#' "$out"/bench_*.csv
    echo
    [ -s "$out/bench_gpu_handover.csv" ] && grep -v '^#' "$out/bench_gpu_handover.csv" | awk -F, '{printf "%-10s %-10s %7s %18s %18s  %s\n", $1, $2, $3, $4, $5, $6}'
    echo
    [ -s "$out/bench_gpu.csv" ] && grep -v '^#' "$out/bench_gpu.csv" |
        awk -F, '{printf "%-11s %-24s %5s %7s %11s %9s %10s %9s %10s  %s\n", $1, $2, $3, $4, $7, $10, $11, $12, $13, $15}'
    echo "device.sh: $((SECONDS - began)) s; logs in $out: $2"
}

mkdir -p "$out" || die "cannot write to $out"
case "${1-run}" in
pack) pack "${2-90}" none; exit ;;
pack-blas) pack "${2-90}" blas; exit ;;
run) ;;
*) sed -n '2,19s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

have_gpu || die "no NVIDIA GPU (no driver's device files) on this machine: nothing to run; 'bench/device.sh pack' prepares for one that has" 77
folder=$packed
if [ ! -x "$packed/bench_gpu" ]; then
    folder=$PWD/build/device-here
    for tool in cmake gcc nvcc pkg-config; do
        PATH=$PATH:/usr/local/cuda/bin command -v $tool >/dev/null || die "no $tool here, and nothing packed in $packed: run 'bench/device.sh pack' where the packages are"
    done
    PATH=$PATH:/usr/local/cuda/bin build "$folder" native "$PWD/tests/data" || die "the build failed here; pack elsewhere: 'bench/device.sh pack'"
fi
blas=$(find_blas "$folder/bench_gpu")
export LD_LIBRARY_PATH="$packed/lib${blas:+:$blas}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
nvidia-smi >"$out/nvidia-smi.log" 2>&1

bad=0
run_tests "$folder" || bad=1
bench "$folder" bench_gpu_handover 40 || bad=1
bench "$folder" bench_gpu 200 --n 1,8,512 --reps 5 || bad=1
if [ $bad = 0 ]; then table "$folder" "all passed"; else table "$folder" "SOMETHING FAILED"; fi
exit $bad
