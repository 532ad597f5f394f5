"""The sources obey the laws of the tree, and each law is seen to catch what breaks it."""

import ast
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

from tests import layers

ROOT = Path(__file__).parents[1]
FOLDERS = {package: ROOT / "packages" / package.replace("_", "-") for package in layers.PACKAGES}
SOURCES = [
    pytest.param(package, path, id=path.relative_to(folder / "src").as_posix())
    for package, folder in FOLDERS.items()
    for path in sorted((folder / "src").rglob("*.py"))
]

# The last package that is installed where the tests of a folder run.
TESTED = {
    "core": "quantwm_core", "kernels": "quantwm_kernels", "parity": "quantwm_kernels", "models": "quantwm_models",
    "eval": "quantwm_eval",
}  # fmt: skip

Check = Callable[[str], list[str]]


def test_every_package_has_sources() -> None:
    assert {package for package, _ in (param.values for param in SOURCES)} == set(layers.PACKAGES)


@pytest.mark.parametrize(("package", "path"), SOURCES)
def test_sources_obey_the_laws(package: str, path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    inside = PurePath(path.relative_to(FOLDERS[package] / "src"))
    assert layers.forbidden_imports(source, package) == []
    assert layers.printing(source, inside) == []
    assert layers.nameless(inside) == []
    assert layers.pickling(source) == []
    if package in layers.SEEDED_PACKAGES:
        assert layers.global_random_state(source) == []


@pytest.mark.parametrize(("folder", "package"), TESTED.items())
def test_tests_import_what_is_installed_for_them(folder: str, package: str) -> None:
    paths = sorted((ROOT / "tests" / folder).rglob("*.py"))
    later = layers.PACKAGES[layers.PACKAGES.index(package) + 1 :]
    absent = (*later, *(f"tests.{name}" for name, last in TESTED.items() if last in later))
    assert paths
    for path in paths:
        statements = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        imported = [node.module for node in statements if isinstance(node, ast.ImportFrom) and node.module]
        assert [module for module in imported if module.startswith(absent)] == [], path


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_packages_are_complete(folder: Path) -> None:
    package = folder.name.replace("-", "_")
    expected = ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", f"src/{package}/py.typed")
    assert [name for name in expected if not (folder / name).is_file()] == []
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_versions_agree() -> None:
    versions, dependencies = {}, {}
    for package, folder in FOLDERS.items():
        versions[package] = layers.version((folder / "src" / package / "__init__.py").read_text(encoding="utf-8"))
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        dependencies[package] = project["dependencies"]
    assert layers.disagreeing_versions(versions, dependencies) == []
    # The chain of siblings carries the order of the imports.
    for left, right in zip(layers.PACKAGES, layers.PACKAGES[1:], strict=False):
        assert any(text.startswith(left.replace("_", "-")) for text in dependencies[right])


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("quantwm_core", "import quantwm_kernels"),
        ("quantwm_core", "from quantwm_eval.metrics import psnr"),
        ("quantwm_core", "import numpy, torch"),
        ("quantwm_core", "import torch.nn as nn"),
        ("quantwm_core", "def f():\n    from triton import jit"),
        ("quantwm_core", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("quantwm_core", "import importlib\nimportlib.import_module('torch')"),
        ("quantwm_core", "__import__('torch')"),
        ("quantwm_kernels", "from quantwm_models import cache"),
        ("quantwm_models", "import quantwm_eval.run"),
    ],
)
def test_an_import_to_the_right_is_caught(package: str, source: str) -> None:
    assert len(layers.forbidden_imports(source, package)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("quantwm_core", "import numpy as np\nfrom quantwm_core import affine\nfrom . import packing"),
        ("quantwm_kernels", "import torch, triton, quantwm_core.affine"),
        ("quantwm_models", "from quantwm_kernels import affine"),
        ("quantwm_eval", "import quantwm_core, quantwm_kernels, quantwm_models, quantwm_eval"),
        ("quantwm_core", "torch = 'a word'\nimport torchlike"),
    ],
)
def test_an_import_to_the_left_is_not_caught(package: str, source: str) -> None:
    assert layers.forbidden_imports(source, package) == []


def test_print_is_caught_in_a_library_module_only() -> None:
    source = "def f(x):\n    print(x)"
    assert layers.printing(source, PurePath("quantwm_core/affine.py")) == ["line 2: print"]
    assert layers.printing("log = print", PurePath("quantwm_core/affine.py")) == ["line 1: print"]
    assert layers.printing("'print(x)'  # print(x)", PurePath("quantwm_core/affine.py")) == []
    for name in layers.TALKING:
        assert layers.printing(source, PurePath("quantwm_eval") / name) == []


@pytest.mark.parametrize("path", ["a/utils.py", "a/common.py", "a/helpers.py", "a/misc.py", "a/utils/psnr.py"])
def test_a_nameless_file_is_caught(path: str) -> None:
    assert len(layers.nameless(PurePath(path))) == 1
    assert layers.nameless(PurePath("quantwm_core/affine.py")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.save({}, 'x')",
        "from torch import load\nload('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
    ],
)
def test_a_pickle_is_caught(source: str) -> None:
    assert layers.pickling(source)


@pytest.mark.parametrize(
    "source",
    ["import json\njson.load(f)", "import numpy as np\nnp.load('x', allow_pickle=False)", "def load(): ...\nload()"],
)
def test_other_reading_is_not_caught(source: str) -> None:
    assert layers.pickling(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.random.seed(0)",
        "import numpy as np\nnp.random.rand(3)",
        "from numpy import random\nrandom.shuffle(x)",
        "from numpy.random import standard_normal\nstandard_normal(3)",
        "import numpy.random as r\nf(r.rand)",
        "import random\nrandom.random()",
        "from random import choice\nchoice(x)",
        "import torch\ntorch.manual_seed(0)",
        "import torch\ntorch.cuda.manual_seed_all(0)",
        "import torch\ntorch.rand(3)",
        "import torch\ntorch.randn(3, generator=None)",
        "from torch import randint\nrandint(0, 4, (3,))",
        "import torch\ndraw = torch.randn",
        "import torch\ntorch.empty(3).normal_()",
        "from scipy.cluster.vq import kmeans2\nkmeans2(x, 4)",
    ],
)
def test_the_global_generator_is_caught(source: str) -> None:
    assert layers.global_random_state(source)


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nrng = np.random.default_rng(0)\nrng.random(3)",
        "import numpy as np\ndef f(rng: np.random.Generator): ...",
        "import random\nrandom.Random(0).random()",
        "import torch\ntorch.rand(3, generator=generator)",
        "import torch\ntorch.empty(3).normal_(generator=generator)",
        "from scipy.cluster.vq import kmeans2\nkmeans2(x, 4, seed=0)",
        "random = 'a word'\nrandom.title()",
    ],
)
def test_a_generator_that_is_passed_is_not_caught(source: str) -> None:
    assert layers.global_random_state(source) == []


@pytest.mark.parametrize(
    ("changed_version", "requirement"),
    [("0.2.0", "quantwm-core==0.1.*"), ("0.1.5", "quantwm-core>=0.1"), ("0.1.5", "quantwm-core==0.2.*")],
)
def test_a_version_that_disagrees_is_caught(changed_version: str, requirement: str) -> None:
    versions = {"quantwm_core": "0.1.0", "quantwm_kernels": changed_version}
    assert len(layers.disagreeing_versions(versions, {"quantwm_kernels": ["torch>=2.6", requirement]})) == 1


def test_a_patch_release_agrees() -> None:
    versions = {"quantwm_core": "0.1.0", "quantwm_kernels": "0.1.5"}
    assert layers.disagreeing_versions(versions, {"quantwm_kernels": ["quantwm-core == 0.1.*"]}) == []


def test_a_missing_version_is_caught() -> None:
    assert layers.version('__version__ = "1.2.3"') == "1.2.3"
    with pytest.raises(LookupError):
        layers.version("version = 1")
