"""DESIGN.md's "Never" list, enforced on the syntax tree: who may import whom, and what no file may contain.

Every rule is a function from sources to a list of violations. It is run on the package, which must have none, and on
a small made-up package, which must have exactly the one that the test put there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_treeopsd"

Sources = Mapping[str, str]
"""Source text by file name relative to the package: "tree.py", "engine/__init__.py"."""

Rule = Callable[[Sources], list[str]]


# ---------------------------------------------------------------------------------------------------- reading imports
@dataclass(frozen=True)
class Import:
    """One imported module, and when the import runs: with the module, in a call, or for type checkers only."""

    target: str
    when: Literal["module", "call", "typing"]


def package_sources() -> dict[str, str]:
    folder = REPOSITORY / PACKAGE
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}


def module_name(file: str) -> str:
    """ "engine/base.py" is "megatron_treeopsd.engine.base"; "engine/__init__.py" is "megatron_treeopsd.engine"."""
    parts = [PACKAGE, *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(sources: Sources) -> dict[str, set[Import]]:
    """By module of the package: what it imports."""
    known = {module_name(file) for file in sources}
    return {module_name(file): set(_imports_of(file, text, known)) for file, text in sources.items()}


def _imports_of(file: str, text: str, known: set[str]) -> Iterator[Import]:
    here = module_name(file).split(".")
    folder = here if file.endswith("__init__.py") else here[:-1]

    def visit(node: ast.AST, when: Literal["module", "call", "typing"]) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield Import(name if name in known else module, when)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.body:
                yield from visit(statement, "typing")
            for statement in node.orelse:
                yield from visit(statement, when)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, "call" if inside and when == "module" else when)

    yield from visit(ast.parse(text, file), "module")


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def ours(*names: str) -> tuple[str, ...]:
    return tuple(f"{PACKAGE}.{name}" for name in names)


def ancestors(module: str) -> list[str]:
    """The packages whose `__init__` runs before the module: of "a.b.c" these are "a" and "a.b"."""
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def reachable(start: str, graph: Mapping[str, set[Import]]) -> dict[str, list[str]]:
    """Everything that runs or may run when `start` is used, with the chain of imports that leads there."""
    chains = {start: [start]}
    pending = [start]
    while pending:
        module = pending.pop()
        for each in sorted(graph.get(module, ()), key=lambda item: item.target):
            for target in [*ancestors(each.target), each.target] if each.when != "typing" else ():
                if target not in chains:
                    chains[target] = [*chains[module], target]
                    pending.append(target)
    return chains


# --------------------------------------------------------------------------------------------------------------- rules
FOUNDATION = ours("tree", "config")
ROLLOUT = ours("expansion", "episode", "environment", "reward", "credit")
KERNELS = ours("objective.kernels")
DISTRIBUTED = ("megatron", "torch.distributed", "transformer_engine", *ours("backend"))


def foundation_imports_ours(sources: Sources) -> list[str]:
    """tree.py and config.py import nothing of ours."""
    return [
        f"{module} imports {each.target}"
        for module, found in imports(sources).items()
        if module in FOUNDATION
        for each in found
        if within(each.target, PACKAGE)
    ]


def rollout_reaches_training(sources: Sources) -> list[str]:
    """Rollout code never imports megatron, our backend or process groups, through whatever chain of ours."""
    return _forbidden_reach(sources, ROLLOUT, DISTRIBUTED)


def backend_reaches_rollout(sources: Sources) -> list[str]:
    """The backend never imports engines, environments, expansions, episodes: they meet in train.py only."""
    return _forbidden_reach(sources, ours("backend"), ours("engine", "environment", "expansion", "episode"))


def _forbidden_reach(sources: Sources, start: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    """One chain of imports for each module of `start` from which something forbidden can be reached."""
    graph = imports(sources)
    found = []
    for module in (module for module in graph if within(module, *start)):
        chains = [chain for target, chain in reachable(module, graph).items() if within(target, *forbidden)]
        if chains:
            found.append(" -> ".join(sorted(chains, key=len)[0]))
    return found


def objective_imports_more_than_torch(sources: Sources) -> list[str]:
    """objective imports torch, the standard library, itself and the foundation, at no time anything else.

    Its kernels may import triton.
    """
    allowed = (*sys.stdlib_module_names, "torch", *FOUNDATION, *ours("objective"))
    return [
        f"{module} imports {each.target}"
        for module, found in imports(sources).items()
        if within(module, *ours("objective"))
        for each in found
        if not within(each.target, *allowed, *(["triton"] if within(module, *KERNELS) else []))
        or within(each.target, "torch.distributed")
    ]


def triton_needed_everywhere(sources: Sources) -> list[str]:
    """triton is not on every machine: a kernel is imported by the call that needs it, never with a module."""
    graph = {module: {each for each in found if each.when == "module"} for module, found in imports(sources).items()}
    others = [module for module in graph if module in KERNELS or not within(module, *KERNELS)]
    return [module for module in others if "triton" in reachable(module, graph)]


def import_cycles(sources: Sources) -> list[str]:
    """Modules that import each other when they are first imported, whichever of them comes first."""
    edges: dict[str, set[str]] = {}
    for module, found in imports(sources).items():
        targets = [each.target for each in found if each.when == "module" and within(each.target, PACKAGE)]
        # Importing a.b.c also runs a and a.b, unless the importer lies in them: then they run already.
        implied = {package for target in targets for package in ancestors(target)} - {module, *ancestors(module)}
        edges[module] = (set(targets) | implied) - {module}
    cycles: list[str] = []
    finished: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in finished:
            for target in sorted(edges.get(module, ())):
                walk(target, [*path, module])
            finished.add(module)

    for module in sorted(edges):
        walk(module, [])
    return cycles


METHODS = {path.stem for path in (REPOSITORY / "launch" / "recipes" / "method").glob("*.yaml")} | {
    "treeopsd", "grpo", "gspo", "treepo", "dapo", "rloo", "ppo", "igrpo", "sft",
}  # fmt: skip
ALLOWED_NAMES = {
    ("cli.py", "treeopsd"): "the name of the program",
    ("recipes.py", "treeopsd"): "which recipe is the default",
}


def method_names(sources: Sources) -> list[str]:
    """Code that knows a method: an identifier with its name in it, or a string that is its name.

    Prose (comments, docstrings, descriptions that mention a method among other words) may, and so may a file that is
    named after the method.
    """
    found = []
    for file, text in sources.items():
        for node in ast.walk(ast.parse(text, file)):
            for word in _words(node) & METHODS:
                if Path(file).stem != word and (file, word) not in ALLOWED_NAMES:
                    found.append(f"{file}:{getattr(node, 'lineno', 0)} knows {word}")
    return found


def _words(node: ast.AST) -> set[str]:
    """The lower-case words of the identifiers that a node itself holds; a string is one word."""
    if isinstance(node, ast.Constant):
        return {node.value.lower()} if isinstance(node.value, str) else set()
    values = [
        value for name, value in ast.iter_fields(node) if name in ("name", "id", "attr", "arg", "asname", "module")
    ]
    identifiers = [value.replace(PACKAGE, "") for value in values if isinstance(value, str)]
    whole = {part.lower() for identifier in identifiers for part in re.split(r"[._]", identifier)}
    camel = {
        part.lower() for identifier in identifiers for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    }
    return whole | camel


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unsafe_loading(sources: Sources) -> list[str]:
    """Reading a file must never run code that is in it."""
    inert = {module_name(file) for file, text in sources.items() if _unpickles_inertly(text)}
    found = [
        f"{module} imports {each.target}"
        for module, all_imports in imports(sources).items()
        for each in all_imports
        if each.target.split(".")[0] in UNSAFE_MODULES and not (each.target == "pickle" and module in inert)
    ]
    for file, text in sources.items():
        for node in ast.walk(ast.parse(text, file)):
            if isinstance(node, ast.Call):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                unsafe_torch = ast.unparse(node.func) == "torch.load" and given.get("weights_only") != "True"
                if unsafe_torch or given.get("allow_pickle", "False") != "False":
                    found.append(f"{file}:{node.lineno} {ast.unparse(node)}")
    return found


def _unpickles_inertly(text: str) -> bool:
    """Whether pickle serves only as the base of readers that decide themselves what a name stands for."""
    nodes = list(ast.walk(ast.parse(text)))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"}
    readers = [
        {statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)}
        for node in nodes
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases)
    ]
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return (
        used <= {"Unpickler", "UnpicklingError"}
        and "pickle.Unpickler" not in calls
        and "Unpickler" not in names
        and all({"find_class", "persistent_load"} <= methods for methods in readers)
        and bool(readers)
    )


MACHINE_FOLDERS = ("work", "root", "home", "farm", "tmp", "Users", "mnt", "data1", "scratch")
FORBIDDEN_TEXT = {
    # Listening on every address hands an unauthenticated service to the whole network.
    "listens on every address": re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])"),
    "names a path of one machine": re.compile(rf"(?<![\w.$}})/])/({'|'.join(MACHINE_FOLDERS)})/[\w.-]"),
}


def forbidden_text(files: Mapping[str, str]) -> list[str]:
    """Lines of tracked text files that bind to every address or hold a path of somebody's machine."""
    return [
        f"{file}:{number} {what}: {line.strip()[:80]}"
        for file, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN_TEXT.items()
        if pattern.search(line)
    ]


def tracked_files() -> dict[str, str]:
    """Text of every file that a commit of this tree would hold (all files that are not ignored, without git)."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    files = {}
    for name in filter(None, listed.split("\0")):
        path = REPOSITORY / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            files[name] = data.decode()
    return files


# --------------------------------------------------------------------------------------------------------------- tests
RULES = [
    foundation_imports_ours,
    rollout_reaches_training,
    backend_reaches_rollout,
    objective_imports_more_than_torch,
    triton_needed_everywhere,
    import_cycles,
    method_names,
    unsafe_loading,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_to(rule: Rule) -> None:
    assert rule(package_sources()) == [], rule.__doc__


def test_no_file_holds_forbidden_text() -> None:
    assert forbidden_text(tracked_files()) == []


OURS = f"from {PACKAGE}"
TRITON = "import triton.language as tl"
INERT = """import pickle
class Reader(pickle.Unpickler):
    def find_class(self, module, name): ...
    def persistent_load(self, key): ...
"""


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (foundation_imports_ours, {"tree.py": f"{OURS}.episode import play", "episode.py": ""}),
        (foundation_imports_ours, {"config.py": "def f():\n    from . import tree", "tree.py": ""}),
        (rollout_reaches_training, {"credit/outcome.py": "import megatron.core"}),
        (rollout_reaches_training, {"episode.py": "import torch.distributed as dist"}),
        (rollout_reaches_training, {"reward/f1.py": f"{OURS}.backend import parallel", "backend/parallel.py": ""}),
        (rollout_reaches_training, {"expansion/chains.py": f"def f():\n    {OURS}.backend.step import g"}),
        pytest.param(
            rollout_reaches_training,
            {"reward/a.py": f"{OURS}.b import f", "b.py": f"import {PACKAGE}.c", "c.py": "import megatron"},
            id="over two modules of ours",
        ),
        pytest.param(
            rollout_reaches_training,
            {"environment/a.py": f"{OURS}.util.b import c", "util/__init__.py": "import megatron", "util/b.py": ""},
            id="through the package of what is imported",
        ),
        (backend_reaches_rollout, {"backend/step.py": f"{OURS}.engine.base import Engine", "engine/base.py": ""}),
        (backend_reaches_rollout, {"backend/a.py": f"{OURS} import b", "b.py": f"import {PACKAGE}.episode"}),
        (objective_imports_more_than_torch, {"objective/a.py": "import numpy as np"}),
        (objective_imports_more_than_torch, {"objective/a.py": "import torch.distributed"}),
        (objective_imports_more_than_torch, {"objective/a.py": f"{OURS}.batch.packed import PackedTrees"}),
        (objective_imports_more_than_torch, {"objective/a.py": "def f():\n    import triton"}),
        (triton_needed_everywhere, {"a.py": f"{OURS}.objective.kernels.k import f", "objective/kernels/k.py": TRITON}),
        (import_cycles, {"a.py": f"{OURS}.b import x", "b.py": f"{OURS} import a"}),
        (import_cycles, {"a.py": "from .p import x", "p/__init__.py": "from ..c import y", "c.py": "from . import a"}),
        (import_cycles, {"a.py": f"{OURS}.p.q import x", "p/__init__.py": f"{OURS} import a", "p/q.py": ""}),
        (method_names, {"train.py": "if recipe.method == 'grpo': pass"}),
        (method_names, {"train.py": "class GRPOTrainer: pass"}),
        (method_names, {"train.py": "use_treepo = True"}),
        (method_names, {"train.py": "run(treeopsd=True)"}),
        (method_names, {"train.py": "def dapo_loss(): pass"}),
        (unsafe_loading, {"a.py": "def f():\n    import pickle"}),
        (unsafe_loading, {"a.py": INERT + "pickle.load(file)"}),
        (unsafe_loading, {"a.py": INERT + "pickle.Unpickler(file).load()"}),
        (unsafe_loading, {"a.py": INERT.replace("find_class", "other")}),
        (unsafe_loading, {"a.py": "torch.load(path)"}),
        (unsafe_loading, {"a.py": "torch.load(path, weights_only=False)"}),
        (unsafe_loading, {"a.py": "np.load(path, allow_pickle=True)"}),
        (forbidden_text, {"serve.sh": "serve --host 0.0." + "0.0"}),
        (forbidden_text, {"README.md": "as in /" + "home/somebody/project"}),
        (forbidden_text, {"recipe.yaml": "data: /" + "work/data"}),
    ],
)  # fmt: skip
def test_rule_finds_its_violation(rule: Rule, sources: Sources) -> None:
    assert len(rule(sources)) == 1


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (foundation_imports_ours, {"tree.py": "import json\nfrom numpy import array"}),
        (
            rollout_reaches_training,
            {"episode.py": f"if TYPE_CHECKING:\n    {OURS}.backend import x", "backend/x.py": ""},
        ),
        (rollout_reaches_training, {"train.py": f"{OURS}.backend import x\n{OURS} import episode", "episode.py": ""}),
        (objective_imports_more_than_torch, {"objective/a.py": f"import math\n{OURS}.objective.base import Objective"}),
        (objective_imports_more_than_torch, {"objective/kernels/k.py": TRITON}),
        (
            triton_needed_everywhere,
            {"a.py": f"def f():\n    {OURS}.objective.kernels import k", "objective/kernels/k.py": TRITON},
        ),
        (import_cycles, {"a.py": f"{OURS} import b", "b.py": f"if TYPE_CHECKING:\n    {OURS} import a"}),
        (import_cycles, {"a.py": f"{OURS} import b", "b.py": f"def f():\n    {OURS} import a"}),
        (import_cycles, {"p/__init__.py": f"{OURS}.p.q import x", "p/q.py": f"{OURS}.p.r import y", "p/r.py": ""}),
        (method_names, {"a.py": '"""As in GRPO and TreePO."""\nf(help="the rollouts of GRPO")  # grpo'}),
        (method_names, {"objective/igrpo.py": "class IGRPO: pass"}),
        (method_names, {"a.py": f"import {PACKAGE}.tree\nsupport = opportunity = 1"}),
        (unsafe_loading, {"a.py": "torch.load(path, weights_only=True)\nnp.load(path)"}),
        (unsafe_loading, {"a.py": INERT}),
        (forbidden_text, {"a.py": "version 10.0.0.0 of tools/home/x, $HOME/work, https://x.org/home/y"}),
    ],
)
def test_rule_allows(rule: Rule, sources: Sources) -> None:
    assert rule(sources) == []
