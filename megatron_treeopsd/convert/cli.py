"""`treeopsd convert`: what can be asked for, and what is printed."""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

DESCRIPTION = """\
Convert checkpoints between Hugging Face folders and Megatron's distributed format (torch_dist), bit for bit.

  treeopsd convert to-megatron HF_FOLDER MEGATRON_FOLDER --tp 4 --ep 8 --pp 2 --verify
  treeopsd convert to-hf MEGATRON_FOLDER HF_FOLDER --verify
  treeopsd convert to-megatron HF_FOLDER MEGATRON_FOLDER --tp 4 --dry-run

One process is enough, on a machine without a GPU; it holds a few megabytes at a time. Under torchrun each
process writes its share of the files, and the result is the same. The destination appears when it is complete.

The Megatron folder loads at any layout (Megatron-LM: --load, --ckpt-format torch_dist --finetune --no-load-optim
--no-load-rng); at the layout named here each rank finds its part in one piece. It also serves as model.checkpoint.
"""
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_parser(commands: Any) -> None:
    """Add `convert` to the subparsers of the program; its `command` does the work."""
    text = "convert checkpoints between Hugging Face and Megatron"
    form = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("convert", help=text, description=DESCRIPTION, formatter_class=form)
    directions = parser.add_subparsers(required=True, metavar="DIRECTION", dest="direction")
    for name, text in (
        ("to-megatron", "Hugging Face folder -> Megatron's torch_dist, for a layout"),
        ("to-hf", "Megatron's torch_dist, of any layout -> Hugging Face folder"),
    ):
        direction = directions.add_parser(name, help=text, description=text)
        direction.set_defaults(command=run)
        _arguments(direction, name)


def _arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=lambda text: Path(os.path.abspath(text)))  # "." has no name of its own
    unused = "" if name == "to-megatron" else "; of no effect in this direction, where the layout is in the source"
    for size, what in (("tp", "tensor"), ("ep", "expert"), ("etp", "expert tensor"), ("pp", "pipeline")):
        parser.add_argument(f"--{size}", type=int, default=1, help=f"{what} parallel size{unused}")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="dtype of all tensors (default: as they are)")
    parser.add_argument("--verify", action="store_true", help="read both sides back; compare every bit, and logits")
    parser.add_argument("--dry-run", action="store_true", help="check and print everything, read and write no tensor")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    if name == "to-hf":
        text = "largest file, such as 5GB (default: that, or a quarter of the model if it is less)"
        parser.add_argument("--shard-size", type=_bytes, help=text)
        parser.add_argument("--hf-config", type=Path, help="folder of config.json and tokenizer, if not in the source")


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", text.strip().upper())
    unit = found and (found[2] if found[2] in ("", "B") else f"{found[2][0]}B")
    if not found or (size := int(float(found[1]) * _UNITS["" if unit == "B" else str(unit)])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 5GB or 500MB")
    return size


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line asks for. Raises `WeightsError` unless all of it was done."""
    import torch

    from megatron_treeopsd.convert.processes import processes
    from megatron_treeopsd.convert.run import Conversion, check, convert, describe
    from megatron_treeopsd.convert.to_hf import ToHuggingFace
    from megatron_treeopsd.convert.to_megatron import ToMegatron

    dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
    _allow_many_files()
    with _ended_by_sigterm(), processes() as here:
        made: list[Conversion] = []

        def prepare() -> None:
            if arguments.direction == "to-megatron":
                sizes = {name: getattr(arguments, name) for name in ("tp", "ep", "etp", "pp")}
                made.append(ToMegatron(arguments.source, dtype=dtype, **sizes))
            else:
                options = {"shard_bytes": arguments.shard_size, "companions": arguments.hf_config}
                made.append(ToHuggingFace(arguments.source, dtype=dtype, **options))

        here.together(prepare)
        (conversion,) = made
        if here.first:
            for what, which in describe(conversion, arguments.destination, here):
                print(f"{what:<12} {which}", flush=True)
        if arguments.dry_run:
            here.on_first(lambda: check(conversion, arguments.destination, overwrite=arguments.overwrite))
            if here.first:
                print("dry run: nothing was written")
            return
        report = convert(
            conversion, arguments.destination, here,
            overwrite=arguments.overwrite, verify=arguments.verify, progress=arguments.progress,
        )  # fmt: skip
        if here.first:
            _print(report, arguments.destination)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, which SLURM sends at the end of a job's time, leaves nothing half written, as Ctrl-C does not."""

    def end(signum: int, _: FrameType | None) -> None:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _allow_many_files() -> None:
    """A folder of a large layout has a file or four for each rank, and all are open at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _print(report: Any, destination: Path) -> None:
    from megatron_treeopsd.convert.watch import gigabytes
    from megatron_treeopsd.weights.rules import listing

    if report.not_finite:
        total = sum(report.not_finite.values())
        names = listing(f"{name}: {count}" for name, count in report.not_finite.items())
        print(f"warning: {total} values are NaN or infinite, in {len(report.not_finite)} tensors:{names}")
    if report.verified is not None:
        print(f"verified: {report.verified} tensors are equal bit for bit")
        equal = f"equal to {report.logits:.1e} of the largest" if isinstance(report.logits, float) else None
        print(f"logits: {equal or f'not compared: {report.logits}'}")
    rate = report.nbytes / max(report.seconds, 1e-9)
    print(
        f"wrote {gigabytes(report.nbytes)} in {report.seconds:.1f} s ({gigabytes(rate)}/s): {destination}", flush=True
    )
