"""Run by Python at its start: lets torchvision be imported where torch has no CUDA.

The wheel of torchvision on the package index links CUDA, so its C extension cannot be loaded and its operators do not
exist; its Python code registers more about two of them when it is imported. Their schemas, declared just before that
import, are all it needs. Nobody here calls them.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators when torchvision is first looked for, then steps aside."""

    library: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is None:
                self.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
