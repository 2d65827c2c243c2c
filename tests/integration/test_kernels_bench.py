"""tools/bench/objective.py: what our kernels do to the logits, counted, and that the others are counted too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


def bench(script: str, *words: str) -> str:
    done = subprocess.run([sys.executable, str(BENCH / script), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loss_by_numbers() -> None:
    """A vocabulary that is not a multiple of a block, and four chunks, the last one not full."""
    found = json.loads(
        bench(
            "objective.py", "--rows", "26", "--vocabulary", "5008", "--chunk-rows", "8", "--turns", "5", "--json"
        ).splitlines()[-1]
    )
    assert found["logit_passes"] == 3
    assert found["peak_chunks"] == 1
    assert found["launches"] <= 2
    assert found["spills"] == 0
    arms = found["arms"]
    assert (arms["ours, kernels"]["reads"], arms["ours, kernels"]["writes"]) == (2, 1)
    assert arms["eager"]["passes"] == 10
    assert arms["eager"]["peak_chunks"] > 3 * 26 / 8
    assert arms["eager"]["launches"] > 20
    assert {"ours, kernels", "ours, torch", "eager"} <= set(arms)


def test_the_gpu_script_in_a_dry_run() -> None:
    """Every line of it but those that ask the GPU itself."""
    found = json.loads(bench("gpu.py", "--device", "cpu", "--interpret", "--json").splitlines()[-1])
    assert found["dry_run"]
    names = {check["name"].split()[0] for check in found["checks"]}
    assert names >= {"log-probs", "entropies", "gradient", "turn_kl", "projection", "tree"}
    assert [check for check in found["checks"] if not check["found"] <= check["limit"]] == []
    assert len(found["rates"]) >= 8
