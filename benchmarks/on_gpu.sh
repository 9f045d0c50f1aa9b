#!/usr/bin/env bash
# Builds te_jax on a machine with an NVIDIA GPU and nvcc 13, installs it next to the source tree, and runs stages:
#
#   benchmarks/on_gpu.sh [tests] [sanitize] [bench] [scaling] [hlo] [trace] [train]     (no stage: all; build always runs)
#
# Needs nothing from the network: jax[cuda13], flax, nanobind, scikit-build-core, cmake, ninja and pytest are there.
# All stages run, also after one that failed; the summary comes last, and the exit status says whether all passed.
#
# Variables (the ..._ARGS are words as a shell reads them: BENCH_ARGS="--only 'gpt layer'"):
#
# OUT_DIR                 log.txt, tests.xml, bench.json and .png, scaling.json, hlo.json, trace_*.json, train/
#                         [default: runs/on_gpu]
# PREFIX                  where te_jax is installed [default: a temporary folder]
# BUILD                   0: use what an earlier run installed into PREFIX
# PYTHON                  [default: python3]
# CUDNN_FRONTEND_INCLUDE  cudnn_frontend.h's folder, if it is not where cmake/locate.py looks
# TE_JAX_CUDA_ARCHS       [default: 90a-real]
# TESTS, TEST_ARGS        files and arguments of pytest [default: tests, -n 8 --dist worksteal]
# SUITE, BENCH_ARGS       of `python -m benchmarks`: the suite [default: all], and its arguments
# COMPARE                 an earlier bench.json: each row's time against its own
# SCALING_ARGS            of `python -m benchmarks scaling`
# TRACE_ARGS              of `python -m benchmarks trace`, which runs once for the GPT and once for the Llama layer
# HLO_ARGS                of `python -m benchmarks hlo`
# SANITIZE_TIMEOUT        seconds for each of the twelve sanitizer runs [default: 300]
# TRAIN_ARGS              of examples/train_gpt.py [default: --preset medium --compare --check-gap 0.01 --no-checkpoint]
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
OUT_DIR=${OUT_DIR:-$ROOT/runs/on_gpu}
mkdir -p "$OUT_DIR"
OUT_DIR=$(cd "$OUT_DIR" && pwd)
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
# The stages run in another folder, where Python finds the source tree's benchmarks, but not its te_jax.
ln -s "$ROOT/benchmarks" "$SCRATCH/benchmarks"
absolute() { [[ $1 == /* ]] && echo "$1" || echo "$PWD/$1"; }
[[ $PYTHON == */* ]] && PYTHON=$(absolute "$PYTHON")
[[ -n ${COMPARE-} ]] && COMPARE=$(absolute "$COMPARE")
PREFIX=$(absolute "${PREFIX:-$SCRATCH/site}")
[[ -n ${CUDNN_FRONTEND_INCLUDE-} ]] && CUDNN_FRONTEND_INCLUDE=$(absolute "$CUDNN_FRONTEND_INCLUDE") && export CUDNN_FRONTEND_INCLUDE
export PYTHONUNBUFFERED=1
export PYTHONPATH=$PREFIX${PYTHONPATH:+:$PYTHONPATH}
export TE_JAX_CUDA_ARCHS=${TE_JAX_CUDA_ARCHS:-90a-real}
export TE_JAX_BUILD_CUDA=${TE_JAX_BUILD_CUDA:-1}

stages=("$@")
((${#stages[@]})) || stages=(tests sanitize bench scaling hlo trace train)
summary=()
failed=0

# stage NAME COMMAND...: its output goes to the screen and to $OUT_DIR/log.txt, its end to the summary.
stage() {
  local name=$1 began=$SECONDS status
  shift
  echo "==== $name" | tee -a "$OUT_DIR/log.txt"
  (cd "$SCRATCH" && "$@") 2>&1 | tee "$SCRATCH/$name.log" | tee -a "$OUT_DIR/log.txt"
  status=${PIPESTATUS[0]}
  ((status)) && failed=1
  summary+=("$(printf '%-10s %-9s %4d s' "$name" "$( ((status)) && echo "FAILED($status)" || echo passed)" $((SECONDS - began)))")
  return "$status"
}

build() {
  if [[ ${BUILD:-1} != 0 ]]; then
    "$PYTHON" -m pip install --no-build-isolation --no-deps --no-index --no-cache-dir --quiet --upgrade \
      --target "$PREFIX" "$ROOT" || return
  fi
  # From here on the source tree, whose te_jax has no extension, must not be what is imported.
  "$PYTHON" - "$PREFIX" <<'PY' && "$PYTHON" -m te_jax
import os, sys
import te_jax
prefix, found = os.path.realpath(sys.argv[1]), os.path.realpath(te_jax.__file__)
sys.exit(None if found.startswith(prefix + os.sep) else f"te_jax is imported from {found}, not from {prefix}")
PY
}

# run_pytest [LAUNCHER...] -- ARGS...: on $TESTS, whose paths are relative to the source tree. Neither the working folder
# nor pytest (`pythonpath`) puts that on Python's path, so that the installed te_jax is what is tested.
run_pytest() {
  local launcher=() paths=() path
  while [[ $1 != -- ]]; do
    launcher+=("$1")
    shift
  done
  shift
  for path in $TESTS; do
    paths+=("$ROOT/$path")
  done
  "${launcher[@]}" "$PYTHON" -m pytest -c "$ROOT/pyproject.toml" --rootdir "$ROOT" -o pythonpath= -p no:cacheprovider -q \
    "$@" "${paths[@]}"
}

tests() {
  local args
  eval "args=(${TEST_ARGS--n 8 --dist worksteal})"
  # Workers share one GPU: none may take most of its memory for itself.
  XLA_PYTHON_CLIENT_PREALLOCATE=false TESTS=${TESTS:-tests} run_pytest -- -m "gpu or not gpu" "${args[@]}" \
    --junitxml "$OUT_DIR/tests.xml"
}

OURS='tests/ops/test_cuda_ops.py tests/ops/test_cuda_block.py tests/ops/test_cuda_rope.py'
# Odd sizes of each op, in few types: the sanitizers are slow.
SMALL_OURS='(test_quantize and 199) or test_quantize_not_finite or (block and chosen) or
  (test_norm and 199 and (bfloat16 or float32)) or (test_norm and (257 or 4097) and bfloat16) or
  (test_activation and 199 and bfloat16 and (gelu or squared_relu)) or (test_rope and 199 and bfloat16) or
  (test_scale_update and 1024)'
# racecheck follows each access to shared memory, and takes some 20 s for a million elements: one case of each source with
# shared memory (quantize, activation, norm_fwd, norm_fwd_t, norm_bwd, rope, scaling and the ..._block ones), of several
# tiles with odd ends, and both widths of rows of the norms (in registers, and looped over). attention_segments.cu and
# gemm_empty.cu have no shared memory.
RACES='(test_quantize and 63 and bfloat16 and e4m3) or (test_activation and 257 and gelu-linear-bfloat16 and not quick) or
  (test_norm_fwd and (1032 or 20000) and bfloat16 and layernorm and False) or
  (test_norm_bwd and (1032 or 20000) and bfloat16 and layernorm and residual) or
  (test_scale_update and 1024 and True and 1.5) or (test_rope and 199 and alternate-bfloat16 and -6]) or
  (test_quantize_block_chosen and data_t) or (test_activation_block_chosen and dbias and data_t) or
  (test_norm_block_chosen and data_t)'
SMALL_GEMM='test_gemm_fp8 and 333 and bfloat16'
SMALL_GROUPED='test_rows and 144 or test_wgrads and 130 or test_rows_of_weights and 1300'
# Not products whose scales a bulk copy brings, for racecheck does not follow the barrier that tells of its end.
RACES_GROUPED='test_rows and 144'
# The ops of experts run where jax runs, so their tests have no marker. Not all of them: compute-sanitizer 13.0 itself has
# ended in a segmentation fault after some twenty tests of a process.
EXPERTS='tests/ops/test_router.py tests/ops/test_permute.py'
SMALL_EXPERTS='test_many_experts or (test_against_loops and 8-2-37-24) or test_group_alone or
  (test_blocks_against_loops and bfloat16)'
RACES_EXPERTS='128-8-sigmoid-groups or 8-2-37-24-bfloat16 or (test_group_alone and 1024) or True-200-bfloat16'
SMALL_ATTENTION='test_cudnn and bfloat16 and (odd or gqa)'

# The kernel that writes over what it reads, and products of what it writes.
PAIRED='test_gradient_of_an_activation and not 500'
SMALL_PAIRED="($PAIRED) or (test_products and (37-128 or 136-128))"

# sanitize TOOL KERNELS FILES SELECTION: KERNELS is a part of their mangled names, or empty for all.
sanitize() {
  local options=(--tool "$1" --error-exitcode 99 --target-processes all --report-api-errors no)
  [[ -n $2 ]] && options+=(--kernel-name "kns=$2")
  echo "-- $1 $3"
  # One cudaMalloc per buffer: inside XLA's own pool no access would be out of bounds.
  XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false TESTS=$3 \
    run_pytest timeout -k 5 "${SANITIZE_TIMEOUT:-300}" compute-sanitizer "${options[@]}" -- \
    -m "gpu or not gpu" -p no:xdist --timeout 0 -k "${4//$'\n'/ }"
}

CALLED="csrc/ssm/scan csrc/ssm/scan_hopper csrc/ssm/scan_bwd csrc/ssm/scan_bwd_states csrc/ssm/scan_bwd_chunks
  csrc/ssm/scan_bwd_hopper csrc/ssm/steps csrc/ssm/conv csrc/delta/delta_chunks csrc/delta/delta_fwd csrc/delta/delta_hopper csrc/delta/delta_halves
  csrc/delta/channel_chunks csrc/delta/channel_bwd_chunks csrc/delta/delta_bwd csrc/delta/delta_bwd_walk csrc/delta/delta_bwd_hopper csrc/delta/delta_bwd_chunks
  csrc/delta/delta_bwd_chunks_hopper
  csrc/norm/gated_norm_fwd csrc/norm/gated_norm_block csrc/norm/gated_norm_bwd csrc/base/finish csrc/base/device
  csrc/base/tensor_map csrc/base/dl benchmarks/sanitize"

# sanitize_calls TOOL FLAGS...: kernels at which compute-sanitizer itself fails where jax runs them, called by a program
# without jax.
sanitize_calls() {
  local tool=$1 out=$SCRATCH/calls.$1 jobs=() source job
  echo "-- $tool benchmarks/sanitize.cu"
  mkdir -p "$out"
  for source in $CALLED; do
    nvcc -std=c++20 -O2 -lineinfo -gencode arch=compute_90a,code=sm_90a -DTE_HAS_90A --expt-relaxed-constexpr "${@:2}" \
      -I "$ROOT/csrc" -x cu -c "$ROOT/$source".c[uc] -o "$out/${source##*/}.o" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || return 1; done
  nvcc -arch=sm_90a -cudart static "$out"/*.o -o "$out/calls" &&
    timeout -k 5 "${SANITIZE_TIMEOUT:-300}" compute-sanitizer --tool "$tool" --error-exitcode 99 "$out/calls"
}

sanitize_all() {
  command -v compute-sanitizer >/dev/null || {
    echo "compute-sanitizer is not in PATH"
    return 1
  }
  # memcheck watches all kernels: cuDNN's and cuBLASLt's too, which get their workspace from us. racecheck breaks on
  # cuBLASLt's Hopper kernels (an internal error of the sanitizer), so it runs the tests of our own kernels, and watches
  # only these.
  # All at once: a single run leaves the GPU idle while it compiles.
  local status=0 number=0 run
  local runs=()
  aside() {
    "$@" >"$SCRATCH/sanitize.$number" 2>&1 &
    runs+=($!)
    number=$((number + 1))
  }
  aside sanitize memcheck "" "$OURS" "$SMALL_OURS"
  aside sanitize memcheck "" tests/ops/test_cuda_ops.py "$SMALL_GEMM"
  aside sanitize memcheck "" tests/ops/test_cuda_grouped.py "$SMALL_GROUPED"
  aside sanitize memcheck "" tests/ops/test_attention_cudnn.py "$SMALL_ATTENTION"
  aside sanitize memcheck "" "$EXPERTS" "$SMALL_EXPERTS"
  aside sanitize racecheck _ZN2te "$OURS" "$RACES"
  aside sanitize racecheck _ZN2te "$EXPERTS" "$RACES_EXPERTS"
  aside sanitize racecheck _ZN2te tests/ops/test_cuda_grouped.py "$RACES_GROUPED"
  aside sanitize memcheck "" tests/layers/test_paired.py "$SMALL_PAIRED"
  aside sanitize racecheck _ZN2te tests/layers/test_paired.py "$PAIRED"
  aside sanitize_calls memcheck
  aside sanitize_calls racecheck -DTE_ALL_LANES_ARRIVE
  for run in "${!runs[@]}"; do
    wait "${runs[run]}" || status=1
    cat "$SCRATCH/sanitize.$run"
  done
  return $status
}

bench() {
  local args
  eval "args=(${BENCH_ARGS-})"
  [[ -n ${COMPARE-} ]] && args+=(--compare "$COMPARE")
  "$PYTHON" -m benchmarks "${SUITE:-all}" --out "$OUT_DIR/bench.json" "${args[@]}"
}

scaling() {
  local args
  eval "args=(${SCALING_ARGS---repeat 2})"
  "$PYTHON" -m benchmarks scaling --out "$OUT_DIR/scaling.json" "${args[@]}"
}

trace() {
  local args layer status=0
  eval "args=(${TRACE_ARGS-})"
  for layer in gpt llama; do
    "$PYTHON" -m benchmarks trace --model "$layer layer" --out "$OUT_DIR/trace_$layer.json" "${args[@]}" || status=1
  done
  return $status
}

hlo() {
  local args
  eval "args=(${HLO_ARGS-})"
  "$PYTHON" -m benchmarks hlo --out "$OUT_DIR/hlo.json" "${args[@]}"
}

train() {
  local args
  eval "args=(${TRAIN_ARGS---preset medium --compare --check-gap 0.01 --no-checkpoint})"
  "$PYTHON" "$ROOT/examples/train_gpt.py" --out "$OUT_DIR/train" "${args[@]}"
}

# of NAME FILTER...: what the filter leaves of the stage's output.
of() {
  local log=$SCRATCH/$1.log
  shift
  [[ ! -f $log ]] || tr '\r' '\n' <"$log" | "$@" | cut -c 1-160
}

summarize() {
  echo
  echo "==== summary"
  of tests grep -E '^(FAILED|ERROR) |[0-9]+ (passed|failed).* in ' | tail -25
  of sanitize grep -E '^-- |ERROR SUMMARY|RACECHECK SUMMARY|[0-9]+ (passed|failed)'
  of bench sed -n '/^case  /,$p'
  of scaling sed -n '/^case  /,$p'
  of hlo head -16
  of trace grep -vE '^ceilings|^[0-9]+x '
  of train grep -vE '%\||^ *$' | tail -8
  printf '%s\n' "${summary[@]}"
}

: >"$OUT_DIR/log.txt"
if stage build build; then
  for name in "${stages[@]}"; do
    case $name in
      build) ;;
      sanitize) stage sanitize sanitize_all ;;
      tests | bench | scaling | hlo | trace | train) stage "$name" "$name" ;;
      *)
        summary+=("$name: no such stage; tests, sanitize, bench, scaling, hlo, trace and train are")
        failed=1
        ;;
    esac
  done
fi
summarize | tee -a "$OUT_DIR/log.txt"
exit $failed
