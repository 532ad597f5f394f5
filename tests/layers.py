"""The laws of the source tree, as functions from source text to what breaks them.

Nothing is imported from the packages: the laws are read off the syntax, so that they hold for code that a test
never runs as well.
"""

import ast
from collections.abc import Iterator
from pathlib import PurePath

# In the order of the imports: each package may use those before it.
PACKAGES = ("quantwm_core", "quantwm_kernels", "quantwm_models", "quantwm_eval")
NOT_IN_CORE = ("torch", "triton", "torchvision")
# A library that draws from the global generator changes its host's video.
SEEDED_PACKAGES = ("quantwm_core", "quantwm_kernels", "quantwm_models")

NAMELESS = ("utils", "util", "common", "helper", "helpers", "misc")
TALKING = ("cli.py", "__main__.py", "train.py", "gates.py")

PICKLING = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")

# Generators as objects are welcome; every other name of these modules is, or draws from, the global one.
RANDOM_MODULES = ("random", "numpy.random", "torch.random", "torch.cuda.random")
RANDOM_OBJECTS = (
    *("random.Random", "random.SystemRandom"),
    *(f"numpy.random.{name}" for name in ("default_rng", "Generator", "BitGenerator", "SeedSequence")),
    *(f"numpy.random.{name}" for name in ("PCG64", "PCG64DXSM", "Philox", "SFC64")),
)
RANDOM_STATE = (
    *("torch.manual_seed", "torch.seed", "torch.initial_seed", "torch.get_rng_state", "torch.set_rng_state"),
    *(f"torch.cuda.{name}" for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
)
# These draw from the global generator unless they are given another.
RANDOM_DRAWS = (
    *(f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")),
    *(f"torch.{name}" for name in ("normal", "bernoulli", "multinomial", "poisson")),
    *("scipy.cluster.vq.kmeans", "scipy.cluster.vq.kmeans2"),
)
RANDOM_TENSOR_METHODS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_")
GENERATOR_KEYWORDS = ("generator", "rng", "seed")


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every module that is imported, by statement or by a call with a literal name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name("__import__") | ast.Name("import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(module)), *_],
            ):
                yield node.lineno, module


def forbidden_imports(source: str, package: str) -> list[str]:
    """List imports that go to the right, and in core those of torch and Triton."""
    right = PACKAGES[PACKAGES.index(package) + 1 :]
    forbidden = (*right, *(NOT_IN_CORE if package == "quantwm_core" else ()))
    return [
        f"line {line}: {package} imports {module}"
        for line, module in imports(ast.parse(source))
        if module.split(".")[0] in forbidden
    ]


def printing(source: str, path: PurePath) -> list[str]:
    """List the calls of print, in a module that has no business with the terminal."""
    if path.name in TALKING:
        return []
    names = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return [f"line {node.lineno}: print" for node in names if node.id == "print"]


def nameless(path: PurePath) -> list[str]:
    """List the parts of a path that say nothing about what is inside."""
    return [f"{part}: name it after what it holds" for part in (*path.parts[:-1], path.stem) if part in NAMELESS]


def pickling(source: str) -> list[str]:
    """List what reads or writes pickles."""
    tree = ast.parse(source)
    lines = [(line, name) for line, name in imports(tree) if name.split(".")[0] in PICKLING]
    lines += [(node.lineno, name) for node, name in references(tree) if name in ("torch.load", "torch.save")]
    keywords = (node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "allow_pickle")
    lines += [(word.value.lineno, "allow_pickle") for word in keywords if not _is_constant(word.value, value=False)]
    return [f"line {line}: {name}" for line, name in lines]


def global_random_state(source: str) -> list[str]:
    """List what reads, seeds or draws from a random generator that was not passed in."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = {id(call.func) for call in calls if _has_generator(call)}
    found = []
    for node, name in references(tree):
        of_random_module = name.rpartition(".")[0] in RANDOM_MODULES and name not in RANDOM_OBJECTS
        if name in RANDOM_STATE or of_random_module or (name in RANDOM_DRAWS and id(node) not in given):
            found.append(f"line {node.lineno}: {name}")
    methods = ((call.lineno, call.func) for call in calls if id(call.func) not in given)
    found += [
        f"line {line}: .{method.attr}() without a generator"
        for line, method in methods
        if isinstance(method, ast.Attribute) and method.attr in RANDOM_TENSOR_METHODS
    ]
    return found


def references(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield every name and attribute chain that leads to an imported module, with its name in full.

    ``import numpy as np; np.random.rand`` gives ``numpy.random.rand``, ``numpy.random`` and ``numpy``.
    """
    known: dict[str, str] = {}
    for statement in ast.walk(tree):
        match statement:
            case ast.Import(names=names):
                for alias in names:
                    top = alias.name.split(".")[0]
                    known[alias.asname or top] = alias.name if alias.asname else top
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    known[alias.asname or alias.name] = f"{module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and (name := _full_name(node, known)):
            yield node, name


def version(source: str) -> str:
    """Return the ``__version__`` that a module assigns.

    Raises:
        LookupError: It assigns none.
    """
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name("__version__")], value=ast.Constant(str(value))):
                return value
    raise LookupError("no __version__")


def disagreeing_versions(versions: dict[str, str], dependencies: dict[str, list[str]]) -> list[str]:
    """List packages of another minor version than core's, and siblings that are not pinned to that minor."""
    minor = ".".join(versions[PACKAGES[0]].split(".")[:2])
    found = [f"{name} is {v}, not {minor}.*" for name, v in versions.items() if v.split(".")[:2] != minor.split(".")]
    for package, requirements in dependencies.items():
        siblings = [text.replace(" ", "") for text in requirements if text.startswith("quantwm-")]
        found += [f"{package} needs {text}, not =={minor}.*" for text in siblings if not text.endswith(f"=={minor}.*")]
    return found


def _full_name(node: ast.expr, known: dict[str, str]) -> str | None:
    match node:
        case ast.Name(id=name):
            return known.get(name)
        case ast.Attribute(value=value, attr=attribute):
            owner = _full_name(value, known)
            return owner and f"{owner}.{attribute}"
    return None


def _is_constant(node: ast.expr, *, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _has_generator(call: ast.Call) -> bool:
    given = (keyword for keyword in call.keywords if keyword.arg in GENERATOR_KEYWORDS)
    return any(not _is_constant(keyword.value, value=None) for keyword in given)
