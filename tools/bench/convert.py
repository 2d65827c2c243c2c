"""How fast is a conversion, beside `cp` of the same files, and how much memory does it take?

    .venv/bin/python tools/bench/convert.py [--quick] [--sizes 1 2 4] [--rounds 3] [--folder DIR] [--json]

A synthetic Qwen3-MoE checkpoint of each size is converted to Megatron and back, and its files are copied by `cp`, in
turn:

    cp SOURCE      to-megatron SOURCE      cp MEGATRON      to-hf MEGATRON      cp SOURCE ...

A conversion is timed in a process of its own, from opening the folder until the result is synced to the disk and has
its name; what Python takes to start and to import is not counted. It uses up to four cores, `cp` one. `cp` is timed
from its start to its end; it leaves its data to be written later, so the time of syncing them is measured too and a
second ratio counts it: that one compares like with like. All files are in the page cache when they are read, in either
arm. What the arm before has written is removed just before either, and free memory is touched: a virtual machine may
have given it back to its host, and the first to use it again then pays several times what copying costs. Tensors of the
source start where other programs put them, not on pages.

Rates are bytes of the source over seconds, ratios medians over the rounds; processor time tells more where others use
the machine. The largest size gives the ratios; the others show how cost grows: `growth` is the cost of a byte at the
largest size over that at the smallest, of seconds (medians) and of processor time (from the round with the least,
because what else happens on a machine only adds). What does not vary is counted: bytes read and written for each byte
of the model, and calls of the system.

Memory is the peak of resident pages of the converting process: its own and those of files that it maps (programs and
libraries, no checkpoint), not the page cache.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = """
import json, re, sys, time
from pathlib import Path
from megatron_treeopsd.convert.processes import Processes
from megatron_treeopsd.convert.run import convert
from megatron_treeopsd.convert.to_hf import ToHuggingFace
from megatron_treeopsd.convert.to_megatron import ToMegatron
from megatron_treeopsd.weights.families import read_config
direction, source, destination, layout = sys.argv[1:]
read_config(Path(source))  # imports transformers
print("ready", flush=True)
sys.stdin.readline()
def asked():
    return {key: int(value) for key, value in re.findall(r"(\\w+): (\\d+)", Path("/proc/self/io").read_text())}
begin, cpu, before = time.perf_counter(), time.process_time(), asked()
conversion = (
    ToMegatron(Path(source), dtype=None, **json.loads(layout))
    if direction == "to_megatron"
    else ToHuggingFace(Path(source), dtype=None)
)
convert(conversion, Path(destination), Processes(), overwrite=False, verify=False, progress=False)
print(json.dumps({
    "seconds": time.perf_counter() - begin,
    "cpu_seconds": time.process_time() - cpu,
    "io": {key: value - before[key] for key, value in asked().items()},
    # What getrusage tells includes the parent, of which this process was a copy for a moment.
    "peak_rss_bytes": int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024,
}))
"""
SHAPE: dict[str, Any] = {
    "vocab_size": 32_768, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
"""Widths of Qwen3-30B-A3B, with fewer experts and a smaller vocabulary so that a layer is small."""


def make_checkpoint(folder: Path, nbytes: int, experts: int, *, vocabulary: int = SHAPE["vocab_size"]) -> None:
    """A bfloat16 checkpoint of at least `nbytes`, in files of at most 1 GB; its values repeat every 64 MiB."""
    import torch
    from transformers import Qwen3MoeConfig

    from megatron_treeopsd.weights.families import weights_of
    from megatron_treeopsd.weights.folder import divide
    from megatron_treeopsd.weights.safetensors_file import NAMES
    from megatron_treeopsd.weights.source import INDEX
    from megatron_treeopsd.weights.writer import TensorInfo

    shape = {**SHAPE, "vocab_size": vocabulary}
    layers = 0
    tensors: list[TensorInfo] = []
    while sum(tensor.nbytes for tensor in tensors) < nbytes:
        layers += 1
        config = Qwen3MoeConfig(
            **shape, num_hidden_layers=layers, num_experts=experts, tie_word_embeddings=False,
            architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
        )  # fmt: skip
        tensors = [
            TensorInfo(name, size, torch.bfloat16)
            for weight in weights_of(config)
            for name, size in zip(weight.hf, weight.shapes, strict=True)
        ]
    noise = torch.randn(2**25).mul_(0.02).bfloat16()
    raw = memoryview(noise.view(torch.uint8).numpy())
    folder.mkdir()
    files = divide(tensors, 10**9)
    for file, members in files.items():
        header, end = {}, 0
        for tensor in members:
            entry = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (end, end + tensor.nbytes)}
            header[tensor.name] = entry
            end += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            while end:
                end -= handle.write(raw[:end])
    weight_map = {tensor.name: file for file, members in files.items() for tensor in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if len(files) == 1:
        (folder / INDEX).unlink()
    config.save_pretrained(folder)


def copy(source: Path, destination: Path) -> dict[str, float]:
    """Seconds of `cp -r`, and of syncing what it wrote."""
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    copied = time.perf_counter()
    for file in destination.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    return {"seconds": copied - begin, "sync_seconds": time.perf_counter() - copied}


class Conversion:
    """A process that has started, and converts when it is told to."""

    def __init__(self, direction: str, source: Path, destination: Path, layout: dict[str, int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, direction, str(source), str(destination), json.dumps(layout)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def run(self) -> dict[str, float]:
        """What it took. Raises `CalledProcessError` if it failed."""
        output, _ = self._process.communicate("go\n")
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, "convert")
        return json.loads(output.splitlines()[-1])


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def warm(folder: Path) -> None:
    """Bring a folder's files into the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                while handle.read(2**24):
                    pass


def touch(nbytes: int) -> None:
    """Use so much memory once, as far as it is free and nothing has to make room for it."""
    free = int(re.search(r"MemFree:\s*(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]
    if (nbytes := min(nbytes, free - 2**30)) > 0:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def measure(source: Path, scratch: Path, *, rounds: int, layout: dict[str, int]) -> dict[str, Any]:
    """Both directions and both copies, `rounds` times."""
    megatron, target = scratch / "megatron", scratch / "out"
    Conversion("to_megatron", source, megatron, layout).run()  # a first time, for something to convert back
    found: dict[str, list[dict[str, Any]]] = {"to_megatron": [], "to_hf": []}
    for number in range(rounds):
        for direction, folder in (("to_megatron", source), ("to_hf", megatron)):
            arms: dict[str, dict[str, float]] = {}
            conversion = Conversion(direction, folder, target, layout)
            for arm in ("copy", "convert") if number % 2 else ("convert", "copy"):
                shutil.rmtree(target, ignore_errors=True)
                warm(folder)
                touch(4 * size_of(folder))
                arms[arm] = copy(folder, target) if arm == "copy" else conversion.run()
            found[direction].append(arms)
            shown = ", ".join(f"{arm} {values['seconds']:.2f} s" for arm, values in sorted(arms.items()))
            print(f"  round {number} {direction:<12} {shown}", file=sys.stderr, flush=True)
    nbytes = {"to_megatron": size_of(source), "to_hf": size_of(megatron)}
    shutil.rmtree(megatron)
    shutil.rmtree(target)
    return {direction: summarise(arms, nbytes[direction]) for direction, arms in found.items()}


def summarise(rounds: Sequence[dict[str, Any]], nbytes: int) -> dict[str, Any]:
    """Medians of what one direction took."""

    def median(arm: str, what: str) -> float:
        return statistics.median(entry[arm][what] for entry in rounds)

    io = rounds[0]["convert"]["io"]
    plain = [entry["copy"]["seconds"] / entry["convert"]["seconds"] for entry in rounds]
    synced = [
        (entry["copy"]["seconds"] + entry["copy"]["sync_seconds"]) / entry["convert"]["seconds"] for entry in rounds
    ]
    return {
        "bytes": nbytes,
        "seconds": round(median("convert", "seconds"), 3),
        "cpu_seconds": round(median("convert", "cpu_seconds"), 3),
        "cp_seconds": round(median("copy", "seconds"), 3),
        "cp_synced_seconds": round(median("copy", "seconds") + median("copy", "sync_seconds"), 3),
        "seconds_per_gb": round(median("convert", "seconds") / nbytes * 1e9, 3),
        "cpu_seconds_per_gb": round(median("convert", "cpu_seconds") / nbytes * 1e9, 3),
        "least_cpu_seconds_per_gb": round(min(entry["convert"]["cpu_seconds"] for entry in rounds) / nbytes * 1e9, 3),
        "read_per_byte": round(io["rchar"] / nbytes, 4),
        "written_per_byte": round(io["wchar"] / nbytes, 4),
        "calls_per_gb": round((io["syscr"] + io["syscw"]) / nbytes * 1e9),
        "vs_cp": round(statistics.median(plain), 3),
        "vs_cp_rounds": [round(value, 3) for value in plain],
        "vs_cp_synced": round(statistics.median(synced), 3),
        "peak_rss_bytes": int(max(entry["convert"]["peak_rss_bytes"] for entry in rounds)),
    }


def result(by_size: dict[float, dict[str, Any]]) -> dict[str, Any]:
    """The JSON object: ratios of the largest size, and what every size took."""
    largest, smallest = by_size[max(by_size)], by_size[min(by_size)]
    return {
        "to_megatron_vs_cp": largest["to_megatron"]["vs_cp"],
        "to_hf_vs_cp": largest["to_hf"]["vs_cp"],
        "to_megatron_vs_cp_synced": largest["to_megatron"]["vs_cp_synced"],
        "to_hf_vs_cp_synced": largest["to_hf"]["vs_cp_synced"],
        "to_megatron_growth": _growth("seconds_per_gb", smallest["to_megatron"], largest["to_megatron"]),
        "to_hf_growth": _growth("seconds_per_gb", smallest["to_hf"], largest["to_hf"]),
        "to_megatron_cpu_growth": _growth("least_cpu_seconds_per_gb", smallest["to_megatron"], largest["to_megatron"]),
        "to_hf_cpu_growth": _growth("least_cpu_seconds_per_gb", smallest["to_hf"], largest["to_hf"]),
        "bytes": largest["to_megatron"]["bytes"],
        "peak_rss_bytes": max(found[way]["peak_rss_bytes"] for found in by_size.values() for way in found),
        "sizes": [{"gigabytes": size, **found} for size, found in sorted(by_size.items())],
    }


def _growth(what: str, small: dict[str, Any], large: dict[str, Any]) -> float:
    """What a byte costs at the large size over what it costs at the small one: 1 if cost is linear."""
    return round(large[what] / max(small[what], 1e-3), 3)


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{'':24}{'GB':>7}{'seconds':>9}{'CPU':>7}{'cp':>7}{'cp+sync':>9}{'vs cp':>7}{'vs cp+sync':>12}"
        f"{'s/GB':>7}{'CPU s/GB':>10}{'read':>7}{'written':>9}{'calls/GB':>10}"
    ]
    for entry in found["sizes"]:
        for way in ("to_megatron", "to_hf"):
            values = entry[way]
            size = values["bytes"] / 1e9
            lines.append(
                f"{way:24}{size:>7.2f}{values['seconds']:>9.2f}{values['cpu_seconds']:>7.2f}{values['cp_seconds']:>7.2f}"
                f"{values['cp_synced_seconds']:>9.2f}{values['vs_cp']:>7.2f}{values['vs_cp_synced']:>12.2f}"
                f"{values['seconds_per_gb']:>7.2f}{values['cpu_seconds_per_gb']:>10.2f}{values['read_per_byte']:>7.3f}"
                f"{values['written_per_byte']:>9.3f}{values['calls_per_gb']:>10}"
            )
    lines.append(
        "cost of a byte, largest size over smallest: seconds "
        f"to_megatron {found['to_megatron_growth']:.2f}, to_hf {found['to_hf_growth']:.2f}; least CPU seconds "
        f"to_megatron {found['to_megatron_cpu_growth']:.2f}, to_hf {found['to_hf_cpu_growth']:.2f}"
    )
    lines.append(f"peak resident memory of a conversion: {found['peak_rss_bytes'] / 1e6:.0f} MB")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 2, 4], metavar="GB", help="of the checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--experts", type=int, default=32, help="of a layer")
    parser.add_argument("--layout", default="{}", help='of the Megatron side, such as {"tp": 2, "ep": 4}')
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="100 MB, once: only whether it works")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    vocabulary = SHAPE["vocab_size"]
    if options.quick:
        options.sizes, options.rounds, options.experts, vocabulary = [0.1], 1, 2, 1024
    by_size: dict[float, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=options.folder) as name:
        for size in options.sizes:
            source = Path(name) / "source"
            make_checkpoint(source, int(size * 1e9), options.experts, vocabulary=vocabulary)
            print(f"{size_of(source) / 1e9:.2f} GB", file=sys.stderr, flush=True)
            by_size[size] = measure(source, Path(name), rounds=options.rounds, layout=json.loads(options.layout))
            shutil.rmtree(source)
    found = result(by_size)
    print(table(found))
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
