#!/usr/bin/env bash
# Compile every CUDA source for every architecture and print what each kernel uses: registers, spills, shared memory.
#
#   scripts/dev/cuda_report.sh [--arch "75 80 86 90 100 120"] [--sources FOLDER] [--jobs N]
#   scripts/dev/cuda_report.sh --speed [--update] [NAME …]
#
# Needs nvcc in PATH (or CUDA_HOME), but no GPU. Prints a table to standard output: registers per thread, bytes of
# spilled registers (stores + loads), bytes of stack and of static shared memory. The exit status is 1 if a source does
# not compile, or if a kernel spills or uses a stack (arrays that are not in registers).
#
# --speed counts what the kernels of some calls do on an H200 by executing their machine code on this CPU, and prints
# their best possible speed. It also needs nvdisasm, g++ and torch, and takes minutes; see tests/cuda/speed/report.py.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

architectures="75 80 86 90 100 120" sources=$ROOT/cuda jobs=$(nproc)
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --speed)
            shift
            use_python
            cd "$ROOT"
            exec "$PY" -m tests.cuda.speed.report "$@"
            ;;
        --arch | --sources | --jobs)
            [[ $# -ge 2 ]] || die "$1 needs a value"
            case $1 in
                --arch) architectures=$2 ;;
                --sources) sources=$2 ;;
                --jobs) jobs=$2 ;;
            esac
            shift
            ;;
        *) usage >&2; die "unknown option $1" ;;
    esac
    shift
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || die "--jobs must be a number of processes, got \"$jobs\""
[[ $architectures =~ ^[0-9]+[af]?(\ [0-9]+[af]?)*$ ]] || die "--arch must be numbers such as \"80 90\", got \"$architectures\""
[[ -d $sources ]] || die "--sources must be a folder, got \"$sources\""
# The largest sources first, so that all cores are busy until the end.
mapfile -t files < <(find "$sources" -name '*.cu' -printf '%s\t%p\n' | sort -rn | cut -f 2-)
((${#files[@]})) || die "no .cu files in $sources"
if ! nvcc=$(command -v nvcc); then
    nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
    [[ -x $nvcc ]] || die "nvcc is needed: put it in PATH or name the toolkit's folder in CUDA_HOME"
fi

scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT

# One log per source and architecture. Source names must be unique, since objects are named after them.
compile() {
    local arch=$1 source=$2 log
    log=$scratch/$arch.$(basename "$source" .cu)
    "$nvcc" -std=c++17 -O3 -cubin -arch="sm_$arch" -Xptxas -v -I "$sources" -o "$log.cubin" "$source" >"$log.log" 2>&1 ||
        touch "$log.failed"
}

running=0
for arch in $architectures; do
    for file in "${files[@]}"; do
        if ((running >= jobs)); then
            wait -n
            running=$((running - 1))
        fi
        compile "$arch" "$file" &
        running=$((running + 1))
    done
done
wait

if compgen -G "$scratch/*.failed" >/dev/null; then
    for failed in "$scratch"/*.failed; do
        log=${failed%.failed}.log
        say "does not compile: $(basename "${failed%.failed}")"
        grep -v '^ptxas info' -- "$log" >&2 || true
    done
    exit 1
fi

# c++filt prints "void lightconv::kernel<float, true>(lightconv::ConvParams)": kernel<float, true> is enough.
readable() {
    if command -v c++filt >/dev/null; then c++filt; else cat; fi |
        sed -E 's/lightconv::|_GLOBAL__N_[A-Za-z0-9_]*::|\(anonymous namespace\):://g; s/^void //; s/\(.*\)$//'
}

for arch in $architectures; do
    cat -- "$scratch/$arch".*.log | awk -v arch="$arch" '
        /Compiling entry function/ { split($0, part, "\047"); name = part[2] }
        /bytes stack frame/ { stack = $1; spill = $5 + $9 }
        /Used [0-9]+ registers/ {
            registers = shared = 0
            for (i = 2; i <= NF; ++i) {
                if ($i ~ /^registers/) registers = $(i - 1)
                if ($i ~ /^smem/) shared = $(i - 2)
            }
            printf "%s\t%d\t%d\t%d\t%d\t%s\n", arch, registers, spill, stack, shared, name
        }' | sort -t$'\t' -k6
done >"$scratch/raw"

paste <(cut -f 1-5 "$scratch/raw") <(cut -f 6 "$scratch/raw" | readable) >"$scratch/table"
[[ -s $scratch/table ]] || die "nvcc reported no kernel"
printf '%5s %9s %6s %6s %7s  %s\n' sm registers spill stack shared kernel
while IFS=$'\t' read -r arch registers spill stack shared name; do
    printf '%5s %9s %6s %6s %7s  %s\n' "$arch" "$registers" "$spill" "$stack" "$shared" "$name"
done <"$scratch/table"
count=$(wc -l <"$scratch/table")
spilling=$(awk -F'\t' '$3 > 0' "$scratch/table" | wc -l) stacked=$(awk -F'\t' '$4 > 0' "$scratch/table" | wc -l)
((!spilling)) || say "$spilling of $count kernels spill registers"
((!stacked)) || say "$stacked of $count kernels have a stack"
((!spilling && !stacked)) || exit 1
say "$count kernels, no spills, no stack"
