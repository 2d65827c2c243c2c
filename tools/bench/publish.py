"""What does it cost to publish weights to an engine in another process?

    python tools/bench/publish.py [--tensors 1000 4000 16000] [--bucket-mb N] [--engine sglang] [--json] [key=value ...]

Three questions, none of which needs an engine that answers:

    bytes      over two expert-parallel processes: bytes that one of them sends so that the other has the whole model,
               over the least possible, which is its shard of the experts once and nothing of what both hold
    requests   updates that the engine is asked for; one a bucket, however many tensors
    seconds    processor time of checking, laying out and announcing a set, for sets of many small tensors; a cost that
               grew faster than the number of tensors would be minutes for the 18,867 tensors of Qwen3-30B-A3B

What SGLang itself does with a bucket is not in these seconds. With `--engine sglang` a real engine is started for each
number of tensors, and gets them by each transport; see `publish_sglang.py`. Without a GPU that says how the cost grows
with the number of tensors, and nothing about seconds of a production run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_treeopsd.config import RecipeError
from megatron_treeopsd.engine.handover import hand_over
from megatron_treeopsd.engine.staging import StagedWeights, checkpoint_shapes
from megatron_treeopsd.engine.transport.shared_memory import SharedMemory
from megatron_treeopsd.recipes import load_recipe

TENSOR_VALUES = 64
REPEATS = 5
TENSORS_OF_A_LAYER = 393
"""Three of each of 128 experts, a router, and eight more."""
TRANSPORTS = ("shared_memory", "cuda_ipc", "distributed", "disk")


class Listener:
    """Takes the part of the engine: counts, and says what an engine would."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(self, call: str, **fields: Any) -> Any:
        self.calls[call] = self.calls.get(call, 0) + 1
        json.dumps(fields)  # what is sent
        if call == "update":
            itemsize = {"float32": 4, "bfloat16": 2}
            sizes = [torch.Size(shape).numel() * itemsize[dtype] for _, shape, dtype, _ in fields["tensors"]]
            return {"tensors": len(sizes), "bytes": sum(sizes)}
        return {"cached_tokens": 0} if call == "score" else None


def publish_once(weights: dict[str, torch.Tensor], *, bucket_bytes: int) -> tuple[float, int, int]:
    """Processor seconds, requests and buckets of one publish of `weights`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    listener = Listener()
    started = time.process_time()
    staged = StagedWeights(weights.items(), shapes=shapes, tied=False, dtype=torch.float32, bucket_bytes=bucket_bytes)
    with staged:
        hand_over(listener, staged, transport=SharedMemory(), version=1, vocabulary=100)
        return time.process_time() - started, listener.calls["update"], len(staged.buckets)


def seconds_by_tensors(counts: Sequence[int], *, bucket_bytes: int) -> tuple[dict[str, float], int, int]:
    """Least seconds of several publishes for each number of tensors; requests and buckets of the largest."""
    seconds: dict[str, float] = {}
    requests = buckets = 0
    for count in counts:
        weights = {f"model.layers.{i}.weight": torch.zeros(TENSOR_VALUES) for i in range(count)}
        runs = [publish_once(weights, bucket_bytes=bucket_bytes) for _ in range(REPEATS)]
        seconds[str(count)] = min(run[0] for run in runs)
        _, requests, buckets = runs[0]
    return seconds, requests, buckets


def traffic(words: Sequence[str]) -> dict[str, int]:
    """Bytes over two expert-parallel processes; see `publish_traffic.py`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = Path(__file__).with_name("publish_traffic.py")
    done = subprocess.run(
        [sys.executable, *launcher, str(worker), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def real_engine(counts: Sequence[int], *, bucket_mb: int, transports: Sequence[str]) -> list[dict[str, Any]]:
    """What a real SGLang engine takes for about so many tensors each; see `publish_sglang.py`."""
    worker = Path(__file__).with_name("publish_sglang.py")
    found = []
    for count in counts:
        layers = max(1, round(count / TENSORS_OF_A_LAYER))
        done = subprocess.run(
            [sys.executable, str(worker), str(bucket_mb), str(layers), *transports],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    recipe = load_recipe(["steps=1", *options.words])
    shapes = checkpoint_shapes(recipe.model.checkpoint)
    moved = traffic(options.words)
    seconds, requests, buckets = seconds_by_tensors(options.tensors, bucket_bytes=options.bucket_mb * 2**20)
    return {
        **moved,
        "bytes_over_shard": moved["bytes"] / moved["shard_bytes"],
        "model_bytes": sum(4 * torch.Size(shape).numel() for shape in shapes.values()),
        "requests": requests,
        "buckets": buckets,
        "seconds_by_tensors": seconds,
        **({"sglang": real_engine(options.tensors, bucket_mb=options.bucket_mb, transports=options.transports)}
           if options.engine == "sglang" else {}),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"a rank sends {found['bytes']:,} bytes: {found['bytes_over_shard']:.2f}x its expert shard of "
        f"{found['shard_bytes']:,} (model: {found['model_bytes']:,})",
        f"{found['requests']} requests for {found['buckets']} buckets",
        "",
        f"{'tensors':>9}{'seconds':>10}{'us/tensor':>12}",
        *(f"{n:>9}{s:>10.3f}{s / int(n) * 1e6:>12.1f}" for n, s in found["seconds_by_tensors"].items()),
    ]
    if "sglang" in found:
        lines += ["", *sglang_table(found["sglang"])]
    return "\n".join(lines)


def sglang_table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for people about the real engine."""
    lines = [
        "a real engine; processor time of trainer and engine, of the whole publish:",
        f"{'tensors':>9}{'MiB':>7}{'transport':>16}{'requests':>10}{'trainer s':>11}{'engine s':>10}{'us/tensor':>11}",
    ]
    for each in found:
        for name in (name for name in TRANSPORTS if name in each):
            cost = each[name]
            total = cost["trainer_seconds"] + cost["engine_seconds"]
            lines.append(
                f"{each['tensors']:>9}{each['bytes'] / 2**20:>7.1f}{name:>16}{cost['requests']:>10}"
                f"{cost['trainer_seconds']:>11.3f}{cost['engine_seconds']:>10.2f}{total / each['tensors'] * 1e6:>11.0f}"
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--bucket-mb", type=int, default=1)
    parser.add_argument("--engine", choices=["none", "sglang"], default="none", help="also ask a real engine")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="of the real engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("words", nargs="*", help="recipe words, as for treeopsd train")
    options = parser.parse_args(arguments)
    try:
        found = measure(options)
    except RecipeError as error:
        print(f"publish.py: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
