#!/usr/bin/env bash
# All checks, style and types included: ./launch/test.sh [pytest arguments]; the fast ones: ./launch/test.sh -m fast
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
PATH="$("$root/launch/env.sh" cpu dev)"
export PATH
cd -- "$root"
exec python -m pytest "$@"
