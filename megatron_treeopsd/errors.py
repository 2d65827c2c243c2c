"""Which exceptions are mistakes in what was asked, shown in plain words and without a traceback."""

from __future__ import annotations

import sys


def is_user_error(error: BaseException) -> bool:
    """True for errors whose message alone says what to do.

    Error types stay with the modules that raise them; only modules that are already imported are asked, so that this
    one imports nothing.
    """
    return isinstance(error, (FileNotFoundError, PermissionError, *_known_types()))


_TYPES = (
    ("megatron_treeopsd.config", "RecipeError"),
    ("megatron_treeopsd.tree", "TreeError"),
    ("megatron_treeopsd.environment.data", "DataError"),
    ("megatron_treeopsd.environment.base", "EnvironmentSetupError"),
    ("megatron_treeopsd.engine.base", "EngineError"),
    ("megatron_treeopsd.weights", "WeightsError"),
    ("megatron_treeopsd.backend.parallel", "LayoutError"),
    ("megatron_treeopsd.backend.checkpoint", "CheckpointError"),
    ("megatron_treeopsd.observe.run_folder", "RunFolderError"),
)


def _known_types() -> tuple[type[BaseException], ...]:
    found = [getattr(sys.modules.get(module), name, None) for module, name in _TYPES]
    return tuple(kind for kind in found if isinstance(kind, type))
