"""One rank's failure stops all ranks, with its text.

The rank that fails first leaves its message in the process group's store and exits. The others notice through their
broken collectives, look the message up, and say whose failure stopped them instead of printing a second traceback.
"""

from __future__ import annotations

import torch.distributed as dist

_KEY = "treeopsd/first_failure"


class PeerFailure(RuntimeError):
    """Another rank failed first; the message names it and quotes its error."""


def explain(error: BaseException) -> BaseException:
    """What this rank should report for `error`: itself if it came first, else a `PeerFailure`.

    Call it once, before the process group is torn down.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return error
    rank = dist.get_rank()
    summary = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
    try:
        store = dist.distributed_c10d._get_default_store()
        if store.add(_KEY + "/count", 1) == 1:
            store.set(_KEY, f"{rank}\n{summary}")
            return error
        first, _, text = store.get(_KEY).decode().partition("\n")
    except (RuntimeError, dist.DistError):  # the store went down with the rank that held it
        return error
    return PeerFailure(f"stopped because rank {first} failed: {text}")
