#!/usr/bin/env bash
# Everything that can only be known on a GPU, in one run of less than 8 minutes on an H100 or H200:
#
#   tools/bench/gpu.sh [--out FILE] [--json]
#
# The kernels against float64 and their launches, tree attention against flattened attention, and the bytes/s and
# FLOP/s that they reach beside ceilings measured in the same run. See tools/bench/gpu.py, which also does a dry run
# of itself without a GPU: tools/bench/gpu.sh --device cpu --interpret
#
#   PYTHON   interpreter of an environment with the extra gpu (or cpu) and Triton; default: .venv's, else python3
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)"
python="${PYTHON:-$root/.venv/bin/python}"
[[ -x "$(command -v -- "$python")" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=10 470 "$python" "$root/tools/bench/gpu.py" "$@"
