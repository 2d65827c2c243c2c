#!/usr/bin/env bash
# Makes the policy that the quick start begins with, launch/checkpoints/tiny-factbook: ./launch/make_checkpoint.sh
#
# A fresh random policy, warm-started by supervised learning on scripted, imperfect searches with the same trainer, and
# exported in Hugging Face format. The one that is there is replaced when the new one is complete. Words are passed on
# to `treeopsd train`: seed=2, steps=100, ... Another place than launch/checkpoints/tiny-factbook: DESTINATION=FOLDER.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
PATH="$("$root/launch/env.sh" cpu)"
export PATH
cd -- "$root"

destination="${DESTINATION:-launch/checkpoints/tiny-factbook}"
mkdir -p runs
work="$(mktemp -d "$root/runs/make-checkpoint.XXXXXX")"

recipe=(task=factbook method=sft cluster=cpu "$@")
treeopsd prepare "${recipe[@]}"
treeopsd create-policy "$work/random" "${recipe[@]}"
treeopsd train "${recipe[@]}" model.checkpoint="$work/random" run="$work/run"
treeopsd export "$work/run" "$work/policy"

mkdir -p -- "$(dirname -- "$destination")"
rm -rf -- "$destination"
mv -- "$work/policy" "$destination"
echo "policy: $destination"
