#!/usr/bin/env bash
# From a fresh clone to a policy that learned to search, on a CPU: ./launch/quickstart.sh [key=value ...]
#
# Words are passed on to `treeopsd train` and win over those below: seed=2, budget=60, method=grpo, ...
# Paths in them are relative to the repository root. The last line of output is "summary: PATH".
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
PATH="$("$root/launch/env.sh" cpu)"
export PATH
cd -- "$root"

recipe=(model=tiny task=factbook method=treeopsd cluster=cpu budget=240 evaluation.every_steps=20 \
    "run=runs/quickstart-$(date +%Y%m%d-%H%M%S)")
treeopsd prepare "${recipe[@]}" "$@"
exec treeopsd train "${recipe[@]}" "$@"
