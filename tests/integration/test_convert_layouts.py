"""What was converted for one layout loads at all others, by our loader and by Megatron's, with transformers' logits."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]

from checkpoints import make_checkpoint  # noqa: E402
from processes import run  # noqa: E402

from megatron_treeopsd.convert.processes import Processes  # noqa: E402
from megatron_treeopsd.convert.run import convert  # noqa: E402
from megatron_treeopsd.convert.to_megatron import ToMegatron  # noqa: E402

DENSE = {"tp4": {"tp": 4}, "tp2pp2": {"tp": 2, "pp": 2}}
MOE = {"tp4ep2": {"tp": 4, "ep": 2}, "ep4pp4": {"ep": 4, "pp": 4}, "tp2ep2etp2": {"tp": 2, "ep": 2, "etp": 2}}


def test_logits_at_every_layout_from_every_layout(tmp_path: Path) -> None:
    """In two processes. Also back: what Megatron saves at these layouts converts to the folder that it came from."""
    for family, tied in (("qwen3", True), ("qwen3_moe", False), ("qwen3_moe", True), ("llama", False), ("llama", True)):
        folder = tmp_path / "models" / f"{family}_{'tied' if tied else 'untied'}"
        make_checkpoint(folder / "hf", family, tied=tied)
        for name, sizes in (MOE if "moe" in family else DENSE).items():
            convert(
                ToMegatron(folder / "hf", dtype=None, **sizes), folder / name, Processes(),
                overwrite=False, verify=False, progress=False,
            )  # fmt: skip
    printed = run(Path(__file__).with_name("convert_worker.py"), 2, tmp_path / "models")
    assert float(printed.split()[-1]) <= 1e-5
