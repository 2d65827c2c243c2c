#!/usr/bin/env bash
# Makes .venv-sglang, the Python environment of the SGLang engine's own process: launch/sglang_env.sh
#
# About 3 GB and 3 minutes the first time, nothing afterwards. On a machine without a GPU it holds exactly what
# launch/sglang_cpu/requirements.txt lists. Variables and behaviour are those of launch/env.sh. Recipes with
# engine=sglang find it by themselves, `./launch/test.sh` makes it when a test needs it.
set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/env.sh" sglang
