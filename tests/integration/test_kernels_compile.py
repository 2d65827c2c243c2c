"""All kernels compiled for sm_90 (H100, H200), which needs no GPU: nothing spilled, memory accessed 128 bits wide."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "kernel_resources.py"
REGISTERS_OF_A_MULTIPROCESSOR = 65536


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    assert importlib.util.find_spec("triton"), "Triton is not installed; it belongs to the extra dev: ./launch/test.sh"
    spec = importlib.util.spec_from_file_location("kernel_resources", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_resources"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _compile_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_no_spills(tool: ModuleType) -> None:
    found = [tool.compile_build(build, 90) for build in tool.builds()]
    print(f"\n{tool.table(found, 90)}")
    kernels = {each.label.split()[0] for each in found}
    assert kernels == {"row_statistics", "write_gradient", "combine_ranks", "turn_kl"}
    for each in found:
        assert each.registers > 0, f"{each.label}: the assembler's report was not understood"
        assert (each.spill_bytes, each.stack_bytes) == (0, 0), each
        # Two blocks at a time, so that one computes while the other waits for memory.
        assert 2 * each.registers * each.threads <= REGISTERS_OF_A_MULTIPROCESSOR, each
        if each.label.startswith(("row_statistics", "write_gradient")):
            assert each.access_bits == 128, each


def test_spills_would_be_seen(tool: ModuleType) -> None:
    build = next(build for build in tool.builds() if build.label.startswith("turn_kl"))
    squeezed = tool.compile_build(build, 90, max_registers=32)
    assert squeezed.registers <= 32
    assert squeezed.spill_bytes > 0
