"""Weights pass through every layout of two processes bit for bit: into Megatron, out as a stream, into a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from backend_models import make_policy  # noqa: E402
from processes import run  # noqa: E402


def test_round_trips_at_every_layout(tmp_path: Path) -> None:
    for moe in (True, False):
        for tied in (True, False):
            folder = tmp_path / f"{'moe' if moe else 'dense'}_{'tied' if tied else 'untied'}"
            model = make_policy(folder, moe=moe, tied=tied)
            if tied:  # both dtypes pass by
                model.to(torch.bfloat16).save_pretrained(folder)
    assert run(Path(__file__).with_name("weights_worker.py"), 2, tmp_path).strip().endswith("done")
