"""The shape of the house: who imports whom, how long files are, what an import does to others, what is never used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import editable_cache

PACKAGE = Path(editable_cache.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in zip(NAMES, FILES, strict=True)}

MAX_LINES = 400

TOP = {"editable", "holding", "published", "repairable", "skill", "report", "vision", "__init__"}
INNER = ("errors", "spec", "chunk", "ops", "adapters", "cache", "forward", "repair", "hub")
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "spec": {"errors"},
    "chunk": {"errors", "spec"},
    "ops": {"errors", "spec", "chunk"},
    "adapters": {"errors", "spec", "chunk", "ops"},
    "cache": {"errors", "spec", "chunk", "ops", "adapters"},
    "forward": {"errors", "spec", "chunk", "ops", "adapters", "cache"},
    "repair": {"errors", "spec", "chunk", "ops", "adapters", "cache", "forward"},
    "hub": {"errors", "spec", "chunk", "ops", "adapters", "cache"},
    "evaluation": {*INNER, *TOP},
    "comparison": {*INNER, *TOP, "evaluation"},
    "cli": {*INNER, *TOP, "evaluation", "comparison"},
}
"""For each room, the rooms that its files may import. Files at the top may import any but those of ``ABOVE``."""

ABOVE = {"testing", "cli", "evaluation", "comparison"}

THIRD_PARTY: dict[str, set[str]] = {
    "errors": set(),
    "spec": set(),
    "chunk": {"torch"},
    "ops": {"torch"},
    "adapters": {"torch", "transformers", "peft", "huggingface_hub"},
    "cache": {"torch", "transformers"},
    "forward": {"torch", "transformers", "tqdm"},
    "repair": {"torch"},
    "hub": {"torch", "safetensors", "huggingface_hub", "peft"},
    "evaluation": {"torch", "transformers", "tqdm", "numpy", "scipy", "statsmodels", "matplotlib"},
    "comparison": {"torch", "transformers", "safetensors", "tqdm", "peft"},
    "cli": {"typer", "rich", "torch", "transformers", "peft", "huggingface_hub"},
}

CACHE_ARGUMENT = "past_key_values"

HASATTR = {
    ("cache/watch.py", "generate"): "a bare decoder has no generate to watch",
    ("testing/real_models.py", "leftover"): "a config loaded from GGUF carries leftovers, or not, by version",
}
"""Every ``hasattr`` of the package, by file and attribute, and why it can't be avoided."""

FORBIDDEN_IMPORTS = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.save", "numpy.load", "np.load"}

EXPECTED_MODULES = {"editable_cache", "huggingface_hub", "rich", "safetensors", "tqdm", "torch", "transformers"}
"""What importing the package may load besides the standard library: its dependencies, and theirs already loaded."""


def room_of(name: str) -> str:
    first = Path(name).parts[0]
    return first.removesuffix(".py")


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported, with the imported names of the package itself spelled out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            if module == "editable_cache":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def rooms_imported(tree: ast.AST) -> set[str]:
    own = [module for module in imported_modules(tree) if module.split(".")[0] == "editable_cache"]
    return {module.split(".")[1] for module in own if "." in module}


def wrong_arrows(name: str, tree: ast.AST) -> set[str]:
    """Rooms that the file ``name`` imports though it may not."""
    room, imported = room_of(name), rooms_imported(tree)
    if room == "testing":
        return set()
    if room in TOP:
        return imported & ABOVE
    return imported - ALLOWED[room] - {room}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the constants that only document: strings that stand alone as a statement."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def mentions(tree: ast.AST, word: str) -> list[int]:
    """Lines where ``word`` is used in code: as a name, an argument, an attribute or a string that is no docstring."""
    skipped, lines = docstrings(tree), []
    for node in ast.walk(tree):
        used = (
            (
                isinstance(node, ast.Constant)
                and id(node) not in skipped
                and isinstance(node.value, str)
                and word in node.value
            )
            or (isinstance(node, ast.Name) and node.id == word)
            or (isinstance(node, ast.Attribute) and node.attr == word)
            or (isinstance(node, (ast.keyword, ast.arg)) and node.arg == word)
        )
        if used:
            lines.append(node.lineno)
    return lines


# -- arrows


def test_every_room_has_its_arrows() -> None:
    rooms = {room_of(name) for name in NAMES}
    assert rooms == {*ALLOWED, *TOP, "testing"}


@pytest.mark.parametrize("name", NAMES)
def test_imports_follow_the_arrows(name: str) -> None:
    assert wrong_arrows(name, TREES[name]) == set()


def test_a_wrong_arrow_is_seen() -> None:
    assert wrong_arrows("ops/turn.py", ast.parse("from editable_cache.cache import Ledger")) == {"cache"}
    assert wrong_arrows("spec/new.py", ast.parse("def f():\n    from editable_cache import ops")) == {"ops"}
    assert wrong_arrows("skill.py", ast.parse("import editable_cache.testing.oracles")) == {"testing"}


def test_rooms_have_no_cycle() -> None:
    for room, below in ALLOWED.items():
        assert all(room not in ALLOWED.get(other, set()) for other in below)


@pytest.mark.parametrize("name", [name for name in NAMES if room_of(name) in THIRD_PARTY])
def test_rooms_know_only_their_libraries(name: str) -> None:
    roots = {module.split(".")[0] for module in imported_modules(TREES[name])}
    foreign = roots - set(sys.stdlib_module_names) - {"editable_cache", "typing_extensions"}
    assert foreign <= THIRD_PARTY[room_of(name)]


def test_oracles_import_nothing_of_what_they_judge() -> None:
    assert rooms_imported(TREES[str(Path("testing/oracles.py"))]) == set()


@pytest.mark.parametrize("name", [name for name in NAMES if name != str(Path("adapters/host.py"))])
def test_only_one_file_knows_the_cache_argument(name: str) -> None:
    if room_of(name) != "testing":
        assert mentions(TREES[name], CACHE_ARGUMENT) == []


def test_the_cache_argument_would_be_seen() -> None:
    source = f"'''{CACHE_ARGUMENT}'''\nmodel({CACHE_ARGUMENT}=cache)\nnames = ['{CACHE_ARGUMENT}']"
    assert mentions(ast.parse(source), CACHE_ARGUMENT) == [2, 3]
    assert mentions(TREES[str(Path("adapters/host.py"))], CACHE_ARGUMENT)


# -- size, words, habits


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_room_is_called_utils() -> None:
    assert not [name for name in NAMES if "util" in name or "helper" in name or "misc" in name]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_runs_code_from_data(name: str) -> None:
    imported = {module.split(".")[0] for module in imported_modules(TREES[name])}
    called = {dotted(node.func) for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)}
    assert imported & FORBIDDEN_IMPORTS == set()
    assert called & FORBIDDEN_CALLS == set()


def test_every_hasattr_is_listed() -> None:
    found = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func) == "hasattr":
                attribute = node.args[1]
                found.add((Path(name).as_posix(), ast.unparse(attribute).strip("'")))
    assert found <= set(HASATTR)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(TREES[name])


def undocumented(tree: ast.Module, names: set[str]) -> list[str]:
    """Public classes among ``names``, with their public methods, and functions, that have no docstring."""
    missing = []
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in names:
            if not ast.get_docstring(node):
                missing.append(node.name)
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                public = isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_")
                if public and not ast.get_docstring(inner):
                    missing.append(f"{node.name}.{inner.name}")
    return missing


def test_public_names_are_documented() -> None:
    public = set(editable_cache.__all__)
    assert sorted(public) == editable_cache.__all__
    defined = {
        node.name for tree in TREES.values() for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    assert public <= defined
    assert [item for tree in TREES.values() for item in undocumented(tree, public)] == []


# -- what an import does

COLD_IMPORT = """
import json, sys
import torch, transformers
from transformers import cache_utils, modeling_utils, masking_utils
from transformers.generation import utils as generation

def state():
    holders = {
        "transformers": transformers, "cache_utils": cache_utils, "modeling_utils": modeling_utils,
        "masking_utils": masking_utils, "generation": generation, "GenerationMixin": generation.GenerationMixin,
        "PreTrainedModel": modeling_utils.PreTrainedModel, "Module": torch.nn.Module, "Tensor": torch.Tensor,
        "Cache": cache_utils.Cache, "DynamicCache": cache_utils.DynamicCache, "DynamicLayer": cache_utils.DynamicLayer,
    }
    seen = {}
    for where, holder in holders.items():
        for name, value in vars(holder).items():
            if name in ("__builtins__", "_abc_impl", "__abstractmethods__"):
                continue
            content = sorted(map(str, value)) if isinstance(value, (dict, list, set)) else None
            seen[f"{where}.{name}"] = (id(value), content)
    return seen

state()  # reading some names may load others lazily: once before
before, modules, threads, seed = state(), set(sys.modules), torch.get_num_threads(), torch.initial_seed()
grad, hooks = torch.is_grad_enabled(), len(torch.nn.modules.module._global_forward_hooks)
import editable_cache
public = [getattr(editable_cache, name) for name in editable_cache.__all__]
after = state()
print(json.dumps({
    "changed": sorted(name for name in before if before[name] != after.get(name)),
    "modules": sorted({m.split(".")[0] for m in set(sys.modules) - modules}),
    "testing": sorted(m for m in sys.modules if m.startswith("editable_cache.testing")),
    "same": [threads == torch.get_num_threads(), seed == torch.initial_seed(), grad == torch.is_grad_enabled(),
             hooks == len(torch.nn.modules.module._global_forward_hooks)],
}))
"""


@pytest.fixture(scope="module")
def cold_import() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", COLD_IMPORT], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_importing_changes_nothing_of_others(cold_import: dict[str, list[str]]) -> None:
    assert cold_import["changed"] == []
    assert cold_import["same"] == [True] * 4


def test_importing_loads_nothing_heavy(cold_import: dict[str, list[str]]) -> None:
    foreign = set(cold_import["modules"]) - set(sys.stdlib_module_names)
    assert foreign <= EXPECTED_MODULES


def test_importing_alone_loads_nothing_at_all() -> None:
    """The public names come when they are used, so that the command line is there at once."""
    code = (
        "import sys; before = set(sys.modules); import editable_cache\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))\n"
        "assert set(editable_cache.__all__) <= set(dir(editable_cache))\n"
        "try: editable_cache.nonsense\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "editable_cache\nmodule 'editable_cache' has no attribute 'nonsense'\n"


def test_every_public_name_has_its_home() -> None:
    homes = [name for names in vars(editable_cache)["_HOMES"].values() for name in names]
    assert sorted(homes) == editable_cache.__all__


def test_importing_does_not_load_the_test_kit(cold_import: dict[str, list[str]]) -> None:
    assert cold_import["testing"] == []


@pytest.mark.parametrize("room", ["errors", "spec", "chunk", "ops"])
def test_inner_rooms_work_without_transformers(room: str) -> None:
    """With the package's own front door out of the way, the inner rooms load where transformers can't be imported."""
    code = (
        "import sys, types\n"
        "sys.modules['transformers'] = None\n"
        f"package = types.ModuleType('editable_cache'); package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['editable_cache'] = package\n"
        f"import editable_cache.{room}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
