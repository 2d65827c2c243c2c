"""A conversion from its checks to the folder's name.

    check ─► claim ─► write beside the destination ─► read both sides back ─► rename
    └ all that needs no tensors                       └ --verify

Whatever fails, or kills the process, before the rename leaves nothing under the destination's name.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_treeopsd.convert import destination as place
from megatron_treeopsd.convert.logits import MAX_PARAMETERS, TOLERANCE, NotComparable, difference
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.to_hf import ToHuggingFace
from megatron_treeopsd.convert.to_megatron import PIECE_BYTES, ToMegatron
from megatron_treeopsd.convert.verify import VerificationError, compare, share
from megatron_treeopsd.convert.watch import Watch, gigabytes
from megatron_treeopsd.weights import durable

Conversion = ToMegatron | ToHuggingFace
BLOCKS_BYTES = 64 * 2**20  # tensors on their way, and what the libraries need besides
INDEX_BYTES = 4096  # what is remembered of each piece, all in all


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    Attributes:
        tensors, nbytes, seconds: how much was written, and how long it took until it was on the disk, without
            verification.
        not_finite: Hugging Face name(s) -> number of values that are NaN or infinite.
        verified: tensors that were compared; None without verification.
        logits: largest difference relative to the largest logit, or why they were not compared.
    """

    tensors: int
    nbytes: int
    seconds: float
    not_finite: dict[str, int] = field(default_factory=dict)
    verified: int | None = None
    logits: float | str | None = None


def describe(conversion: Conversion, destination: Path, here: Processes) -> Iterator[tuple[str, str]]:
    """(what, which) of all that is known before anything is read."""
    yield "source", str(conversion.folder)
    yield "destination", str(destination)
    yield from conversion.describe()
    yield (
        "memory",
        f"about {gigabytes(expected_peak(conversion, here))} at the highest, in each process, without logits",
    )


def expected_peak(conversion: Conversion, here: Processes) -> int:
    """Resident bytes of a process at the highest: what is loaded now, what is on its way, and the index."""
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    pieces = len(conversion.tensors) + conversion.nbytes // PIECE_BYTES
    return now + BLOCKS_BYTES + INDEX_BYTES * pieces


def check(conversion: Conversion, destination: Path, *, overwrite: bool) -> None:
    """Raise `WeightsError` for a destination that cannot be used."""
    place.check(destination, conversion.folder, nbytes=conversion.nbytes, overwrite=overwrite)


def convert(
    conversion: Conversion, destination: Path, here: Processes, *, overwrite: bool, verify: bool, progress: bool
) -> Report:
    """Convert; collective. The destination appears, or is replaced, only when everything was written and verified.

    Raises `WeightsError` on every process otherwise.
    """
    here.together(lambda: check(conversion, destination, overwrite=overwrite))
    conversion.check_contents(here)
    shown = progress and here.first
    with contextlib.ExitStack() as stack:
        here.on_first(lambda: stack.enter_context(place.claimed(destination)))
        try:
            here.on_first(lambda: durable.begin(destination))
            folder = durable.staging(destination)
            with Watch("write", conversion.share_bytes(here), shown=shown) as watch:
                conversion.write(folder, here, watch)
            verified: int | None = None
            logits: float | str | None = None
            if verify:
                verified, logits = _verify(conversion, folder, here, shown)
            here.together(conversion.source.files.check_unchanged)
            here.on_first(lambda: durable.commit(destination))
        except BaseException:
            if here.first:
                place.abandon(destination)
            raise
    not_finite: dict[str, int] = {}
    for found in here.together(lambda: watch.not_finite):
        for names, count in found.items():
            not_finite[names] = not_finite.get(names, 0) + count
    return Report(len(conversion.tensors), conversion.nbytes, watch.seconds, not_finite, verified, logits)


def _verify(conversion: Conversion, folder: Path, here: Processes, shown: bool) -> tuple[int, float | str]:
    with Watch("verify", sum(tensor.nbytes for tensor in share(conversion.tensors, here)), shown=shown) as watch:
        count = compare(conversion.source, conversion.read_back(folder), conversion.tensors, here, watch)
    if here.size > 1:
        return count, "only a single process compares them"
    hf, megatron = conversion.sides(folder)
    parameters = sum(math.prod(tensor.shape) for tensor in conversion.tensors)
    if parameters > MAX_PARAMETERS:
        return count, f"{parameters / 1e9:.1f} billion parameters are too many to run here"
    dtypes = {tensor.dtype for tensor in conversion.tensors}
    try:
        found = difference(
            hf, megatron, conversion.hf_config, dtypes.pop() if len(dtypes) == 1 else None,
            own=isinstance(conversion, ToMegatron),
        )  # fmt: skip
    except NotComparable as reason:
        return count, str(reason)
    if not found <= TOLERANCE:
        raise VerificationError(f"logits of {hf} and {megatron} differ by {found:.2e} of the largest")
    return count, found
