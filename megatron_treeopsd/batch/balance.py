"""Sharing out items that cost several things at once, so that no rank gets more of any of them than the others."""

from __future__ import annotations

import numpy as np

GOOD_ENOUGH = 1.01
"""Largest load over mean load at which the exchange of items between ranks ends."""

MAX_EXCHANGES = 1000


def balance(costs: np.ndarray, ranks: int) -> np.ndarray:
    """int64 [n]: the rank of each item. `costs` is [n, k]: k things that each item costs (tokens, query-key pairs).

    Minimises the largest load of any rank in any of the k, each measured in its own mean over ranks. Largest item
    first to the rank where that measure stays lowest (list scheduling in k dimensions), then exchanges: the fullest
    rank hands over an item, or swaps it for another one, whichever relieves the two ranks most, until that no longer
    helps or is no longer needed.
    """
    costs = np.asarray(costs, dtype=np.float64)
    mean = costs.sum(0) / ranks
    share = costs / np.where(mean > 0, mean, 1.0)
    owner = np.zeros(len(share), dtype=np.int64)
    loads = np.zeros((ranks, share.shape[1]))
    for item in np.argsort(-share.max(1), kind="stable"):
        owner[item] = (loads + share[item]).max(1).argmin()
        loads[owner[item]] += share[item]
    for _ in range(MAX_EXCHANGES):
        full = int(loads.max(1).argmax())
        if loads[full].max() <= GOOD_ENOUGH or not _exchange(share, owner, loads, full):
            break
    return owner


def _exchange(share: np.ndarray, owner: np.ndarray, loads: np.ndarray, full: int) -> bool:
    """Move one item away from rank `full`, or swap it for another. False if nothing lowers the larger of two loads."""
    mine, theirs = np.flatnonzero(owner == full), np.flatnonzero(owner != full)
    others = np.arange(len(loads))
    # What a rank may give in return: each of its items, or nothing.
    returned = np.concatenate((share[theirs], np.zeros_like(loads)))
    partner = np.concatenate((owner[theirs], others))
    moved = share[mine][:, None] - returned
    worst = np.maximum((loads[full] - moved).max(-1), (loads[partner] + moved).max(-1))
    worst[:, partner == full] = np.inf
    given, taken = np.unravel_index(worst.argmin(), worst.shape)
    if worst[given, taken] >= loads[full].max() - 1e-9:
        return False
    rank = partner[taken]
    owner[mine[given]] = rank
    if taken < len(theirs):
        owner[theirs[taken]] = full
    loads[full] -= moved[given, taken]
    loads[rank] += moved[given, taken]
    return True
