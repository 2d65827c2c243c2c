"""What a real SGLang engine takes for a publish, by transport and number of tensors; part of tools/bench/publish.py.

    python tools/bench/publish_sglang.py BUCKET_MB LAYERS TRANSPORT ...

A random Qwen3-MoE policy with LAYERS tiny layers of 128 experts, as many as Qwen3-30B-A3B has in each of its 48, is
published a few times by each transport. The last line is JSON:
{"tensors", "bytes", "buckets", TRANSPORT: {"requests", "trainer_seconds", "engine_seconds", "wall_seconds"}}, where
seconds are the least of the repetitions, of processor time but for the last.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from megatron_treeopsd import config
from megatron_treeopsd.engine.sglang import SGLangEngine

EXPERTS, REPEATS = 128, 3
SERVED_FIELDS = ("update", "update_by_handle", "update_by_broadcast", "update_from_disk")


def save_policy(folder: Path, layers: int) -> None:
    """A policy whose tensors are many and small."""
    shape = Qwen3MoeConfig(
        vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, moe_intermediate_size=4, num_experts=EXPERTS,
        num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)


def group_seconds(group: int) -> float:
    """Processor time that the processes of a group have used."""
    ticks = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def publishes(engine: SGLangEngine, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Several publishes of one set."""
    runs = []
    for _ in range(REPEATS):
        started = (time.process_time(), group_seconds(engine.pid), time.monotonic())
        engine.publish(weights.items(), version=engine.version + 1 if engine.version >= 0 else 1)
        ended = (time.process_time(), group_seconds(engine.pid), time.monotonic())
        runs.append([after - before for before, after in zip(started, ended, strict=True)])
    trainer, served, wall = (min(column) for column in zip(*runs, strict=True))
    return {"trainer_seconds": trainer, "engine_seconds": served, "wall_seconds": wall}


def counted(engine: SGLangEngine) -> list[str]:
    """Names of the updates that the engine's process is asked for from now on."""
    calls: list[str] = []
    ask = engine._process.call

    def call(name: str, /, **fields: Any) -> Any:
        if name in SERVED_FIELDS:
            calls.append(name)
        return ask(name, **fields)

    engine._process.call = call  # type: ignore[method-assign]
    return calls


def main() -> None:
    bucket_mb, layers, transports = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    section = config.SGLangEngine(name="sglang", max_batch=4, cache_tokens=1024, bucket_mb=bucket_mb)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        save_policy(folder, layers)
        weights: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= load_file(file)
        engine = SGLangEngine(section, checkpoint=folder, dtype=torch.float32)
        try:
            found: dict[str, Any] = {"tensors": len(weights), "bytes": sum(t.nbytes for t in weights.values())}
            calls = counted(engine)
            for transport in transports:
                engine.take_weights_by(transport)  # type: ignore[arg-type]
                calls.clear()
                found[transport] = publishes(engine, weights)
                found[transport]["requests"] = len(calls) // REPEATS
            assert engine._weights is not None
            found["buckets"] = len(engine._weights.buckets)
        finally:
            engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
