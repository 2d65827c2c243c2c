"""A Hugging Face folder that the engine reads: the fallback where processes share nothing but files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from megatron_treeopsd.engine.staging import StagedWeights
from megatron_treeopsd.engine.transport.base import Call, Transport, check_taken


class Disk(Transport):
    """Writes each set into a folder of its own inside `folder`, and removes it when the engine has read it.

    Args:
        folder: has room for one set of weights.
        config: the model's `config.json`.
    """

    def __init__(self, folder: Path, config: Path) -> None:
        self._folder, self._config = folder, config

    def load(self, call: Call, weights: StagedWeights, *, version: int) -> None:
        """See `Transport.load`. SGLang opens and closes an update of this kind by itself."""
        place = self._folder / f"weights-{version}"
        try:
            write(weights, place, self._config)
            taken: Any = call("update_from_disk", path=str(place), version=str(version))
        finally:
            shutil.rmtree(place, ignore_errors=True)
        check_taken(taken, sum(len(bucket.tensors) for bucket in weights.buckets), weights.nbytes)


def write(weights: StagedWeights, folder: Path, config: Path) -> None:
    """A Hugging Face folder with one file a bucket, which appears under its name when it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    shutil.copyfile(config, partial / "config.json")
    files: dict[str, str] = {}
    for number, bucket in enumerate(weights.buckets, 1):
        name = f"model-{number:05d}-of-{len(weights.buckets):05d}.safetensors"
        save_file(bucket.views(), partial / name, metadata={"format": "pt"})
        files |= dict.fromkeys(bucket.views(), name)
    index = {"metadata": {"total_size": weights.nbytes}, "weight_map": files}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    partial.rename(folder)
