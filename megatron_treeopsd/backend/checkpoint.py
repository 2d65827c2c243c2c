"""Training checkpoints: complete or invisible, and bit-exact to continue from.

    run/checkpoints/step_00000012/
        manifest.json             written last: which piece of what is in which file; scheduler, step counts, `extra`
        rank_00000.safetensors    flat pieces of weights and optimizer state, states of the random generators
        rank_00001.safetensors

Every rank writes what no other rank writes for it (`state.py`), into a hidden folder that rank 0 renames when all is on
the disk. Whatever happens before that leaves the earlier checkpoint in place. Pieces are found by name, so a checkpoint
can be continued at another layout: all of tensor, expert, pipeline and data parallel sizes and the distributed
optimizer may change; only the random states then start anew.

Why not Megatron's `torch_dist`: its metadata is read with pickle, its folder is visible before it is complete, and in
0.19.2 it needs patches for torch's Adam under the distributed optimizer and cannot move optimizer state between expert
parallel 1 and larger sizes. The cause of the last: experts count as expert-parallel parameters only above 1, and such
parameters have an optimizer of their own. So there are two chained optimizers, whose state lies under "0" and "1", or
one, whose state lies at the top, and neither form loads as the other. Here state is written by the names of parameters,
whatever optimizer holds it, so it moves both ways.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_treeopsd.backend import parallel
from megatron_treeopsd.backend.state import (
    Piece,
    pieces,
    random_states,
    set_random_states,
    set_step_counts,
    step_counts,
)
from megatron_treeopsd.weights import durable
from megatron_treeopsd.weights.rules import Shape, WeightsError, join, listing, shard
from megatron_treeopsd.weights.writer import SafetensorsWriter, TensorInfo

if TYPE_CHECKING:
    from megatron_treeopsd.backend.policy import Policy

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})")
_RANDOM = "random/"
_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why, and what is left."""


def save(folder: Path, policy: Policy, *, step: int, extra: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint `folder`/step_<step>; collective. Returns its path, on every rank, when it is on the disk.

    `extra` is anything JSON can hold (data position, elapsed seconds, ...); rank 0's is kept. The newest `keep`
    checkpoints stay; older ones, and what killed processes left, are removed after the new one is visible (leftovers
    before). A step that has its checkpoint already is not written again.

    Raises `CheckpointError` on every rank if any of them cannot write (no space, no rights). Earlier checkpoints are
    then untouched and nothing of the new one is left.
    """
    path = folder / f"step_{step:08d}"
    if any(_together(path, "it cannot be looked for", (path / MANIFEST).is_file)):
        return path
    try:
        _on_rank_zero(path, "its folder cannot be made", lambda: _begin(path))
        written = _together(path, "it cannot be written", lambda: _write_own(durable.staging(path), policy))
        manifest = {
            "format": FORMAT,
            "step": step,
            "layout": layout_of(policy),
            "schedule": {"num_steps": policy.scheduler.num_steps},
            "extra": extra,
            **_merge(written),
        }
        _on_rank_zero(path, "it cannot be completed", lambda: _complete(path, manifest))
    except CheckpointError:
        if policy.parallel.rank == 0:
            shutil.rmtree(durable.staging(path), ignore_errors=True)
        raise
    _on_rank_zero(path, "it is complete, but older ones cannot be removed", lambda: _prune(folder, keep))
    return path


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None."""
    found = _complete_ones(folder)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise CheckpointError(f"{path}: not a checkpoint; its folder would be named step_<number>")
    return int(found[1])


def load(path: Path, policy: Policy) -> dict[str, Any]:
    """Restore model, optimizer, schedule and random states; collective. Returns the checkpoint's `extra`.

    At the layout that wrote it everything is restored bit for bit. At another layout weights and optimizer state are,
    and the random states stay as they are (a warning says so).

    Raises `CheckpointError`, on every rank, if the checkpoint is damaged, or listing all state that it lacks or has in
    excess.
    """
    stored = _Stored(path)
    _together(path, "it cannot be read", stored.open)
    mine = pieces(policy)
    _check_names(stored, mine, policy)
    _together(path, "it cannot be read", lambda: stored.restore(mine))
    set_step_counts(policy.optimizer, stored.manifest["step_counts"])
    # The schedule's settings come from the recipe; its position decides the rates of the next step.
    policy.scheduler.num_steps = stored.manifest["schedule"]["num_steps"]
    policy.scheduler.step(0)
    written_at, here = stored.manifest["layout"], layout_of(policy)
    if written_at == here:
        set_random_states(stored.random_states(policy.parallel.rank))
    elif policy.parallel.rank == 0:
        _logger.warning(
            "%s was written at layout %s and is continued at %s: the random states start anew, so the run goes on "
            "as it might have, not bit for bit as it would have", path, written_at, here,
        )  # fmt: skip
    return stored.manifest["extra"]


def layout_of(policy: Policy) -> dict[str, int]:
    place = policy.parallel
    return {key: getattr(place, key) for key in ("world", "tp", "cp", "pp", "ep", "etp")}


# ------------------------------------------------------------------------------------------------------------ writing
def _begin(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(".step_*"):
        shutil.rmtree(leftover)
    durable.begin(path)


def _write_own(folder: Path, policy: Policy) -> dict[str, Any]:
    """Write this rank's file. Returns what the manifest has to know of it."""
    mine = [piece for piece in pieces(policy) if piece.written_here]
    tensors = {piece.name: piece.tensor for piece in mine}
    tensors |= {_RANDOM + name: state for name, state in random_states().items()}
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with SafetensorsWriter(folder / _file(policy.parallel.rank), infos) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return {
        "bytes": writer.nbytes,
        "pieces": {piece.name: [piece.part, piece.start, piece.stop] for piece in mine},
        "shapes": {piece.weight.key: piece.shape for piece in mine},
        "step_counts": step_counts(policy.optimizer),
    }


def _merge(written: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's view of all ranks' files."""
    places: dict[str, list[list[int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    counts: dict[str, float] = {}
    for rank, part in enumerate(written):
        for name, (index, start, stop) in part["pieces"].items():
            places.setdefault(name, []).append([rank, index, start, stop])
        shapes |= part["shapes"]
        for name, count in part["step_counts"].items():
            if counts.setdefault(name, count) != count:
                raise ValueError(f"{name} has counted {count} steps on rank {rank} and {counts[name]} on another")
    sizes = {_file(rank): part["bytes"] for rank, part in enumerate(written)}
    return {"files": sizes, "step_counts": counts, "shapes": shapes, "pieces": places}


def _complete(path: Path, manifest: dict[str, Any]) -> None:
    file = durable.staging(path) / MANIFEST
    file.write_text(json.dumps(manifest))
    durable.sync(file)
    durable.commit(path)


def _prune(folder: Path, keep: int) -> None:
    for path in _complete_ones(folder)[:-keep]:
        durable.discard(path)


def _complete_ones(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


# ------------------------------------------------------------------------------------------------------------ reading
class _Stored:
    """A checkpoint on the disk. Files are opened when first read from, and only slices are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = {}
        self._files: dict[int, Any] = {}

    def open(self) -> None:
        """Read the manifest. Raises `CheckpointError` if the checkpoint is not complete."""
        step_of(self.path)
        file = self.path / MANIFEST
        if not file.is_file():
            raise CheckpointError(f"there is no {file.name}, so it is not complete")
        try:
            self.manifest = json.loads(file.read_text())
        except ValueError as error:
            raise CheckpointError(f"{file.name} is damaged: {error}") from None
        if self.manifest.get("format") != FORMAT:
            raise CheckpointError(f"it has format {self.manifest.get('format')}; this version reads {FORMAT}")
        for name, size in self.manifest["files"].items():
            if not (self.path / name).is_file() or (self.path / name).stat().st_size != size:
                raise CheckpointError(f"{name} is missing or is not {size} bytes long")

    def restore(self, own: Sequence[Piece]) -> None:
        """Fill the live memory of the pieces."""
        for piece in own:
            value = self._value(piece)
            if value.dtype != piece.tensor.dtype:
                raise CheckpointError(f"{piece.name} is {value.dtype} in the file and {piece.tensor.dtype} in this run")
            piece.tensor.copy_(value)

    def cut(self, piece: Piece) -> tuple[int, Shape]:
        """Into how many tensor-parallel parts the piece's weight was cut, and the shape of one."""
        parts = 1 + max(part for _, part, _, _ in self.manifest["pieces"][piece.name])
        return parts, tuple(self.manifest["shapes"][piece.weight.key])

    def _value(self, piece: Piece) -> Tensor:
        parts, shape = self.cut(piece)
        if (parts, shape) == (piece.parts, piece.shape):
            return self._range(piece.name, piece.part, piece.start, piece.stop)
        # Tensor parallelism cut it otherwise: put the whole together and cut again.
        size = torch.Size(shape).numel()
        whole = join(piece.weight, [self._range(piece.name, part, 0, size).view(shape) for part in range(parts)])
        by_name = dict(zip(piece.weight.hf, whole, strict=True))

        def read(name: str, dim: int, start: int, stop: int) -> Tensor:
            return by_name[name].narrow(dim, start, stop - start)

        local = shard(piece.weight, read, rank=piece.part, size=piece.parts, shape=piece.shape)
        return local.reshape(-1)[piece.start : piece.stop]

    def random_states(self, rank: int) -> dict[str, Tensor]:
        handle = self._handle(rank)
        names = [name for name in handle.keys() if name.startswith(_RANDOM)]  # noqa: SIM118 (not a dict)
        return {name.removeprefix(_RANDOM): handle.get_tensor(name) for name in names}

    def _range(self, name: str, part: int, start: int, stop: int) -> Tensor:
        """Elements start:stop of a flattened part, from however many files hold them."""
        found = []
        position = start
        for rank, index, first, last in sorted(self.manifest["pieces"][name], key=lambda place: place[2]):
            if index == part and first <= position < last and position < stop:
                end = min(last, stop)
                found.append(self._handle(rank).get_slice(name)[position - first : end - first])
                position = end
        if position != stop:
            raise CheckpointError(f"elements {position} to {stop} of part {part} of {name} are in no file")
        return found[0] if len(found) == 1 else torch.cat(found)

    def _handle(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self.path / _file(rank), framework="pt", device="cpu")
        return self._files[rank]


def _check_names(stored: _Stored, own: Sequence[Piece], policy: Policy) -> None:
    """All state of the run must be in the checkpoint and the other way round. Collective."""
    wanted = set().union(*parallel.all_gather_objects({piece.name for piece in own}))
    found = set(stored.manifest["pieces"])
    cuts = {p.name: (p.weight, *stored.cut(p)) for p in own if p.kind == "weight" and p.name in found}
    misfits = {f"{name} {shape}" for name, (weight, parts, shape) in cuts.items() if not weight.fits(shape, parts)}
    misshaped = set().union(*parallel.all_gather_objects(misfits))
    problems = [
        ("state that this run needs is missing", wanted - found),
        ("there is state that this run has no place for", found - wanted),
        ("shapes are those of another model", misshaped),
        ("the steps are of other optimizers", set(step_counts(policy.optimizer)) ^ set(stored.manifest["step_counts"])),
    ]
    if text := "\n".join(f"{what}:{listing(names)}" for what, names in problems if names):
        raise CheckpointError(
            f"checkpoint {stored.path}: {text}\nIt was written by a run with another model or optimizer; continue it "
            "with the recipe that wrote it."
        )


def _together(path: Path, what: str, action: Callable[[], _T]) -> list[_T]:
    """Do `action` on every rank; collective. Returns its results by rank, or raises on all ranks if one failed."""
    result: Any = None
    problem: str | None = None
    try:
        result = action()
    except (OSError, SafetensorError, CheckpointError, WeightsError) as error:
        problem = str(error)
    outcomes = parallel.all_gather_objects((result, problem))
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None]
    if problems:
        raise CheckpointError(f"checkpoint {path}: {what}. {'; '.join(problems)}")
    return [value for value, _ in outcomes]


def _on_rank_zero(path: Path, what: str, action: Callable[[], None]) -> None:
    """`_together`, with something to do on rank 0 only; the others wait for it."""

    def nothing() -> None: ...

    _together(path, what, action if dist.get_rank() == 0 else nothing)
