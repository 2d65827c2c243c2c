"""Loads converted folders at other layouts, by our loader and by Megatron's, in one of two processes.

convert_worker.py ROOT     with ROOT/<model>/hf, and ROOT/<model>/<layout> converted from it

Started by test_convert_layouts.py. Prints the largest difference of logits from those of transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from processes import layout
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatron_treeopsd.backend.model import build_model
from megatron_treeopsd.batch.packed import PackedTrees
from megatron_treeopsd.convert.logits import load_by_megatron, logits
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.run import convert
from megatron_treeopsd.convert.to_hf import ToHuggingFace
from megatron_treeopsd.weights import load_pretrained

DENSE: list[dict[str, int]] = [{}, {"tp": 2}, {"pp": 2}]
MOE: list[dict[str, int]] = [*DENSE, {"ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}]
TOLERANCE = 1e-5


def forward(model: nn.Module, packed: PackedTrees) -> None:
    """One forward pass at any layout."""

    def step(batches: Iterator[PackedTrees], part: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return part(next(batches)), lambda output: (output.sum(), {})

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter([packed]), model=[model], num_microbatches=1, seq_length=1,
            micro_batch_size=1, forward_only=True,
        )  # fmt: skip


def loaders(folder: Path, config: Any) -> dict[str, Callable[[nn.Module], None]]:
    """Every way into a model: from the Hugging Face folder, and from each converted one by either reader."""
    found: dict[str, Callable[[nn.Module], None]] = {"hf": lambda model: load_pretrained(model, folder / "hf", config)}
    for made in sorted(path for path in folder.iterdir() if path.name != "hf"):
        found[f"{made.name}, ours"] = lambda model, made=made: load_pretrained(model, made, config)  # type: ignore[misc]
        found[f"{made.name}, Megatron's"] = lambda model, made=made: load_by_megatron(model, made)  # type: ignore[misc]
    return found


def same_logits(folder: Path, sizes: dict[str, int], ids: Tensor, expected: Tensor, config: Any) -> float:
    """All ways lead to the same weights; returns the largest difference from `expected`."""
    worst = 0.0
    with layout(**sizes) as (chosen, state):
        model = build_model(config, chosen, state, dtype=torch.float32).eval()
        first: list[Tensor] = []
        for name, load in loaders(folder, config).items():
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
            load(model)
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            first = first or weights
            assert all(torch.equal(a, b) for a, b in zip(weights, first, strict=True)), (folder, sizes, name)
        found = logits(model, ids, partial(forward, model))
        if found is not None:
            worst = float((found - expected).abs().max())
            assert worst <= TOLERANCE, (folder, sizes, worst)
        return worst


def saved_by_megatron(folder: Path, sizes: dict[str, int], config: Any) -> None:
    """What Megatron itself saves at this layout becomes the Hugging Face folder that it came from."""
    expected = load_file(folder / "hf" / "model.safetensors")
    with layout(**sizes) as (chosen, state):
        model = build_model(config, chosen, state, dtype=torch.float32)
        load_pretrained(model, folder / "hf", config)
        for single in (False, True):
            name = f"{folder.name}_{'_'.join(map(str, sizes.items()))}_{single}"
            saved = folder.parent / "saved" / name / "iter_0000003"
            if state.rank == 0:
                saved.mkdir(parents=True)
                (saved.parent / "latest_checkpointed_iteration.txt").write_text("3")
            dist.barrier()
            settings = {
                "singleton_local_shards": single,
                "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
            }
            stored = {"model": model.sharded_state_dict(metadata=settings), "iteration": 3}
            dist_checkpointing.save(stored, str(saved), content_metadata={"singleton_local_shards": single})
            if state.rank == 0:
                conversion = ToHuggingFace(saved.parent, dtype=None, companions=folder / "hf")
                back = saved.parent.with_name(f"{name}_hf")
                convert(conversion, back, Processes(), overwrite=False, verify=False, progress=False)
                found = load_file(back / "model.safetensors")
                assert found.keys() == expected.keys(), name
                assert all(torch.equal(found[key], expected[key]) for key in expected), name
            dist.barrier()


def main(root: Path) -> None:
    worst = 0.0
    torch.set_num_threads(1)
    for folder in sorted(path for path in root.iterdir() if path.name != "saved"):
        reference = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
        ids = torch.randint(0, reference.config.vocab_size, (37,), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = reference(ids[None]).logits[0]
        for sizes in MOE if reference.config.model_type == "qwen3_moe" else DENSE:
            worst = max(worst, same_logits(folder, sizes, ids, expected, reference.config))
            if sizes:
                saved_by_megatron(folder, sizes, reference.config)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, worst)
    if os.environ["RANK"] == "0":
        print(f"{max(everyone):.3e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
