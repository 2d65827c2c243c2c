"""What the compiler makes of the kernels, without a GPU: registers, spills, shared memory, width of memory accesses.

    python tools/bench/kernel_resources.py [--arch 90] [--json]

Compiles every kernel of `megatron_treeopsd.objective.kernels`, for the types and options that training uses, with the
compiler and assembler that come with Triton. Registers and spilled bytes are what the assembler reports (ptxas
--verbose); the width of loads and stores is read from the machine code (nvdisasm). Needs TRITON_INTERPRET unset: an
interpreted kernel cannot be compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_treeopsd.objective.kernels import token_logprobs, turn_kl

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel with the types of its arguments and the values of its constants.

    `aligned` names pointers and integers that are multiples of 16, as those of torch's allocations and of padded
    vocabularies are; Triton compiles them with that knowledge.
    """

    label: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    aligned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one build: registers a thread, bytes spilled to memory, bytes of stack and of shared memory, threads.

    `access_bits`: the widest access to global memory.
    """

    label: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    access_bits: int


def builds() -> Iterator[Build]:
    """All that training may launch in float32 and bfloat16, options that change the code included."""
    for real, entropy in itertools.product(("bf16", "fp32"), (False, True)):
        yield _build(
            f"row_statistics {real}{' with entropy' if entropy else ''}",
            token_logprobs.row_statistics_kernel,
            {"logits": f"*{real}", "labels": "*i64", "statistics": "*fp32"},
            {"INVERSE_TEMPERATURE": 1 / 0.7, "ENTROPY": entropy, **token_logprobs.FORWARD},
        )
    for real in ("bf16", "fp32"):
        yield _build(
            f"write_gradient {real}",
            token_logprobs.write_gradient_kernel,
            {"logits": f"*{real}", "labels": "*i64", "normalizers": "*fp32", "coefficient": "*fp32"},
            {"INVERSE_TEMPERATURE": 1 / 0.7, **token_logprobs.GRADIENT},
        )
    for entropy in (False, True):
        yield _build(
            f"combine_ranks{' with entropy' if entropy else ''}",
            token_logprobs.combine_ranks_kernel,
            {"statistics": "*fp32", "combined": "*fp32"},
            {"ENTROPY": entropy, **token_logprobs.COMBINE},
        )
    turn = dict.fromkeys(turn_kl.turn_kl_kernel.arg_names[:11], "*fp32") | {
        "offsets": "*i64",
        "leaves": "*i64",
        "finished_programs": "*i32",
    }
    for teacher, (ratio, kappa, one_sided) in itertools.product(
        ("affine_prob", "affine_odds", "logistic"),
        (("sum", "sqrt_leaves", "none"), ("mean", "max", "negative"), ("sqrt", 1.0, "both")),
    ):
        yield _build(
            f"turn_kl {teacher} {ratio} {kappa} {one_sided}",
            turn_kl.turn_kl_kernel,
            turn,
            {
                "TEACHER": teacher,
                "RATIO": ratio,
                "RADIUS": 0.1,
                "KAPPA": kappa,
                "ONE_SIDED": one_sided,
                "MIXTURE_WEIGHT": teacher == "affine_odds",
                "SCALE": "policy_gradient",
                "MAX_LOG_RATIO": 5.0,
                "BLOCK": turn_kl.BLOCK,
                "num_warps": turn_kl.WARPS,
            },
        )


def _build(label: str, kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> Build:
    """Arguments that are neither pointers nor constants are 32-bit integers, as Triton passes Python's small ones."""
    constants = dict(constants)
    warps = constants.pop("num_warps")
    integers = {name: "i32" for name in kernel.arg_names if name not in pointers and name not in constants}
    aligned = (*pointers, *(name for name in integers if name in ("vocabulary", "stride")))
    return Build(label, kernel, pointers | integers, constants, warps, aligned)


def compile_build(build: Build, arch: int, *, max_registers: int | None = None) -> Resources:
    """Compile for a GPU of compute capability `arch`, e.g. 90, and look at the result.

    `max_registers` bounds the registers of a thread, which makes the assembler spill. Raises RuntimeError with its
    words if it refuses the kernel.
    """
    names = build.kernel.arg_names
    source = ASTSource(
        fn=build.kernel,
        signature={name: build.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned},
    )
    options = {"num_warps": build.warps, "maxnreg": max_registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory(prefix="kernel-") as name:
        ptx, cubin = Path(name) / "kernel.ptx", Path(name) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
        assert target is not None
        said = _run(str(TOOLS / "ptxas"), "--verbose", f"--gpu-name={target[1]}", str(ptx), "--output-file", str(cubin))
        cubin.write_bytes(compiled.asm["cubin"])
        code = _run(str(TOOLS / "nvdisasm"), "--print-code", str(cubin))

    def reported(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, said))

    # "LDG.E.128 ..." accesses 128 bits, "LDG.E ..." 32
    accesses = re.findall(r"\b(?:LDG|STG)\.E((?:\.\w+)*)", code)
    widths = [max([32, *(int(part) for part in suffix.split(".") if part in ("64", "128"))]) for suffix in accesses]
    return Resources(
        label=build.label,
        registers=reported(r"Used (\d+) registers"),
        spill_bytes=reported(r"(\d+) bytes spill (?:stores|loads)"),
        stack_bytes=reported(r"(\d+) bytes stack frame"),
        shared_bytes=compiled.metadata.shared,
        threads=32 * build.warps,
        access_bits=max(widths, default=0),
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def table(found: Sequence[Resources], arch: int) -> str:
    lines = [f"{f'compiled for sm_{arch}':52}{'registers':>10}{'spilled':>9}{'stack':>7}{'shared':>8}{'access':>8}"]
    for each in found:
        lines.append(
            f"{each.label:52}{each.registers:>10}{each.spill_bytes:>7} B{each.stack_bytes:>5} B"
            f"{each.shared_bytes:>6} B{each.access_bits:>4} bit"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability; 90: H100, H200")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line instead of a table")
    options = parser.parse_args(arguments)
    found = [compile_build(build, options.arch) for build in builds()]
    print(json.dumps({"kernels": [asdict(each) for each in found]}) if options.json else table(found, options.arch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
