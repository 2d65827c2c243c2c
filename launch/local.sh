#!/usr/bin/env bash
# Several processes on this machine: ./launch/local.sh PROCESSES train [key=value ...]
#
# For instance tensor and sequence parallel over two: ./launch/local.sh 2 train layout.tp=2 budget=60
# They meet on the loopback interface at a port that the system picks. If one fails, torchrun ends the others.
set -euo pipefail

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ || $# -lt 2 ]]; then
    echo "usage: launch/local.sh PROCESSES COMMAND [key=value ...]   (COMMAND: any of treeopsd --help)" >&2
    exit 2
fi
processes="$1"
shift

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
PATH="$("$root/launch/env.sh" cpu)"
export PATH
cd -- "$root"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun --nnodes 1 --nproc-per-node "$processes" --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 \
    --local-addr 127.0.0.1 --max-restarts 0 --no-python treeopsd "$@"
