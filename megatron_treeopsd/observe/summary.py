"""`summary.json`: the outcome of a run in one small file for people and for programs that compare runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_treeopsd import __version__
from megatron_treeopsd.observe.files import write_atomically

PACKAGES = (
    "torch", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy", "bm25s",
    "transformer-engine", "sglang",
)  # fmt: skip


def write_summary(
    path: Path,
    *,
    method: str,
    seed: int,
    steps: int,
    spans: Mapping[str, float],
    excluded: Mapping[str, float],
    generated_tokens: int,
    cached_tokens: int,
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write `summary.json`, whole or not at all, and return what was written.

    Args:
        steps: rollout batches trained on.
        spans: `Spans.totals()`, seconds by name; `train_seconds` is their sum.
        excluded: `Spans.excluded()`; `total_seconds` is `train_seconds` and these.
        generated_tokens: tokens sampled in training rollouts; cached_tokens: prompt tokens found in the prefix cache.
        before, after: the evaluations before and after training (`exact_match_greedy`, `questions`, ...); None or {}
            if there was none, which gives null.
        extra: more keys for the file.
    """
    train_seconds = sum(spans.values())
    first, last = dict(before or {}), dict(after or {})
    summary: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "steps": steps,
        "train_seconds": train_seconds,
        "total_seconds": train_seconds + sum(excluded.values()),
        "exact_match_before": first.get("exact_match_greedy"),
        "exact_match_after": last.get("exact_match_greedy"),
        "questions_evaluated": int((last or first).get("questions", 0)),
        "generated_tokens": generated_tokens,
        "cached_tokens": cached_tokens,
        "spans": dict(spans),
        "excluded": dict(excluded),
        "evaluation_before": first,
        "evaluation_after": last,
        "versions": versions(),
        **(extra or {}),
    }
    write_atomically(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def versions() -> dict[str, str]:
    """Installed versions of this package and of those that a result may depend on."""
    found = {"megatron-treeopsd": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # an optional part that is not installed
            continue
    return found
