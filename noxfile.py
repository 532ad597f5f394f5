"""What the repository can be asked to do: ``nox -l`` lists it, ``nox -s NAME`` does one.

Every session installs with pip, under the exact versions of constraints.txt. Those name torch by its version alone;
which build comes is the index's choice, and on Linux the default one brings several gigabytes of CUDA libraries.
Set ``PIP_EXTRA_INDEX_URL`` to an index that serves CPU builds to get one of those.
"""

import os
import shutil
import sys
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "typing", "tests", "parity", "hosts", "docs", "build"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml("pyproject.toml")
# A URI, because pip splits the variable at spaces.
CONSTRAINTS = (ROOT / "constraints.txt").as_uri()
PINNED = {"PIP_CONSTRAINT": CONSTRAINTS, "PIP_BUILD_CONSTRAINT": CONSTRAINTS, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
# Two test processes with a thread pool each would fight over the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TWO_PROCESSES = ("-n", "2", "--dist", "worksteal")
EXAMPLES = ("-p", "tests.examples")

HOSTS_ON_THE_INDEX = ("diffsynth", "fastvideo")
# What puts LoRA into a host's layers.
ADAPTING = ("accelerate", "peft", "psutil")

# In the order of the imports: each package may use those before it.
PACKAGES = ("core", "kernels", "models", "eval")
LARGEST_WHEEL = {"core": 150_000, "kernels": 300_000, "models": 1_000_000, "eval": 40_000_000}


def folder(package: str) -> Path:
    """Return where a package stands."""
    return ROOT / "packages" / f"quantwm-{package}"


def up_to(package: str) -> tuple[str, ...]:
    """Return a package and all that it may import, in the order of the imports."""
    return PACKAGES[: PACKAGES.index(package) + 1]


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of the root pyproject."""
    return list(nox.project.dependency_groups(PROJECT, name))


def install(session: nox.Session, *requirements: str, through: str | None = None, extra: str = "") -> None:
    """Install pinned requirements, and the packages up to ``through`` from their folders, editable.

    All folders are named in one command: pip then takes each sibling from its folder and never asks an index for it.
    """
    session.env.update(PINNED)
    if through not in (None, "core") and sys.platform == "linux" and "PIP_EXTRA_INDEX_URL" not in os.environ:
        session.log("torch comes as the index serves it; for a CPU build instead of CUDA see CONTRIBUTING.md")
    editable = [] if through is None else [f"--editable={folder(package)}" for package in up_to(through)]
    if extra:
        editable[-1] += f"[{extra}]"
    session.install(*editable, *requirements)


def pytest(session: nox.Session, *arguments: str, **environment: str) -> None:
    """Run pytest as a module, so that the repository root is importable for its plugins."""
    session.run("python", "-m", "pytest", *arguments, *session.posargs, env=environment)


def existing(*patterns: str, without: str = "") -> list[str]:
    """Return the paths under the root that match; pytest and mypy refuse one that is not there."""
    found = (path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern))
    return sorted(str(path) for path in found if not (without and path.match(without)))


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Run each package's tests, docstring examples and README with nothing to its right installed."""
    last = package == PACKAGES[-1]
    install(session, *group("test"), *(group("eval") if last else []), through=package, extra="flow" if last else "")
    # What concerns all four runs where all four are.
    everything = existing("tests/test_*.py", "README.md", "docs/**/*.md", without="docs/course/*") if last else []
    paths = [f"tests/{package}", f"packages/quantwm-{package}/src", f"packages/quantwm-{package}/README.md"]
    arguments = (*TWO_PROCESSES, *EXAMPLES, "--doctest-modules", *paths, *everything)
    pytest(session, *arguments, **ONE_THREAD)


@nox.session
def parity(session: nox.Session) -> None:
    """Hold each Triton kernel against the reference: on the GPU, or under Triton's interpreter without one."""
    install(session, *group("test"), through="kernels", extra="gpu")
    answer = session.run("python", "-c", "import torch; print(torch.cuda.is_available())", silent=True)
    if str(answer).strip() == "True":
        pytest(session, "tests/parity")
    else:
        pytest(session, *TWO_PROCESSES, "tests/parity", TRITON_INTERPRET="1", **ONE_THREAD)


@nox.session(name="compile")
def compile_launches(session: nox.Session) -> None:
    """Compile all that tests launch, without a GPU: for sm_90 and sm_86, or ``nox -s compile -- ARCHITECTURE ...``."""
    install(session, *group("test"), through="kernels", extra="gpu")
    install(session, through="models")
    launches = Path(session.create_tmp()).resolve() / "launches"  # what came of them before lies beside it
    launches.unlink(missing_ok=True)
    folders = ("tests/parity", "tests/kernels", "tests/models", "--ignore=tests/parity/test_compilation.py")
    record = ("-m", "pytest", *TWO_PROCESSES, "-p", "tests.parity.record_launches", "--launches", str(launches))
    for architecture in session.posargs or ("90", "86"):
        environment = {"TRITON_INTERPRET": "1", "CI": "1", **ONE_THREAD}
        session.run("python", *record, "--architecture", architecture, *folders, env=environment)
    session.run("python", "-m", "tests.parity.compile_launches", str(launches), "--processes", str(os.cpu_count()))


@nox.session
def sanitize(session: nox.Session) -> None:
    """Let compute-sanitizer watch every kernel on a GPU: accesses out of bounds, and races in shared memory."""
    install(session, *group("test"), through="kernels", extra="gpu")
    for tool in ("memcheck", "racecheck"):
        session.run(
            "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "python", "-m", "tests.parity.sanitize",
            external=True, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip


@nox.session
def hosts(session: nox.Session) -> None:
    """Hold adapters against live hosts: those on the index, and ``nox -s hosts -- --checkout NAME=PATH``; others are skipped."""
    install(
        session,
        *group("test"),
        through="models",
        extra="causal_forcing,fastvideo,hy_world,lingbot_world,longcat_video,matrix_game,sglang",
    )
    # What they ask for are servers, trainers and CUDA libraries; the extras above are what their models import.
    session.install("--no-deps", *HOSTS_ON_THE_INDEX, *ADAPTING, f"--editable={ROOT / 'docs' / 'anyflow'}")
    if session.posargs:  # checkouts, which experiments load, too
        session.install(f"--editable={folder('eval')}")
    pytest(session, *TWO_PROCESSES, "tests/hosts", **ONE_THREAD)


@nox.session
def docs(session: nox.Session) -> None:
    """Run the examples of the course, with quantwm-core alone and warnings as errors."""
    install(session, *group("test"), through="core")
    pytest(session, *EXAMPLES, *existing("docs/course/*.md"))


@nox.session
def lint(session: nox.Session) -> None:
    """Check the code's rules and its format."""
    install(session, *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Check the types of the sources, the tests and this file, strictly."""
    tools = [*group("typing"), *group("test"), *group("eval")]
    install(session, *tools, through="eval", extra="flow")
    places = ("packages/*/src", "tests", "benchmarks", "scripts", "docs/**/*.py", "noxfile.py", "conftest.py")
    session.run("mypy", *existing(*places))


@nox.session
def build(session: nox.Session) -> None:
    """Build each wheel and sdist, check what is in them, and import each wheel in a fresh environment."""
    install(session, *group("build"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    wheels = {package: build_and_check(session, package) for package in PACKAGES}
    for package in PACKAGES:
        check_installed(session, package, [wheels[sibling] for sibling in up_to(package)])


def build_and_check(session: nox.Session, package: str) -> Path:
    """Build one package into dist/ and return its wheel, after holding wheel and sdist against the sources."""
    wheel = hatchling(session, folder(package), "wheel", ROOT / "dist")
    sdist = hatchling(session, folder(package), "sdist", ROOT / "dist")
    size, limit = wheel.stat().st_size, LARGEST_WHEEL[package]
    session.log(f"{wheel.name}: {size:,} of at most {limit:,} bytes")
    if size > limit:
        session.error(f"{wheel.name} has {size:,} bytes, more than {limit:,}: what was added does not belong there")

    source = folder(package) / "src"
    sources = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if sources != shipped:
        session.error(f"{wheel.name} and src differ in {sorted(sources ^ shipped)}")

    unpacked = Path(session.create_tmp()).resolve() / "sdist"
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.unpack_archive(sdist, unpacked)
    (top,) = unpacked.iterdir()
    allowed = {"src", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    if strangers := {path.name for path in top.iterdir()} ^ allowed:
        session.error(f"{sdist.name} has or lacks {sorted(strangers)}")
    again = hatchling(session, top, "wheel", unpacked / "dist")
    if zipfile.ZipFile(again).namelist() != zipfile.ZipFile(wheel).namelist():
        session.error(f"{sdist.name} does not build into the same files as the repository")
    return wheel


def hatchling(session: nox.Session, project: Path, target: str, destination: Path) -> Path:
    """Build one distribution file and return it.

    The backend is called directly: a frontend would set up an environment for it once more.
    """
    before = set(destination.glob("*"))
    with session.chdir(project):
        session.run("python", "-m", "hatchling", "build", "-t", target, "-d", str(destination), silent=True)
    (built,) = set(destination.glob("*")) - before
    return built


def check_installed(session: nox.Session, package: str, wheels: list[Path]) -> None:
    """Install a wheel with what it declares, and nothing else, into a fresh environment, and import it there.

    The siblings are named by path in the same command, so that none of them can come from an index.
    """
    environment = Path(session.create_tmp()).resolve() / "environment"
    session.run("python", "-m", "venv", "--clear", str(environment), silent=True)
    python = str(environment / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    session.run(python, "-m", "pip", "install", "--quiet", *map(str, wheels), external=True)
    session.run(python, "-m", "pip", "check", external=True)
    session.run(python, "-I", "-W", "error", "-c", f"import quantwm_{package}", external=True)
    if package == "core":
        absent = "import importlib.util; assert importlib.util.find_spec('torch') is None, 'core installs torch'"
        session.run(python, "-I", "-c", absent, external=True)
    if package == "eval":
        session.run(str(Path(python).with_name("quantwm")), "--help", external=True, silent=True)
    shutil.rmtree(environment)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the bundled demo world model: ``nox -s demo -- ARGUMENTS`` passes them on to ``quantwm demo``."""
    install(session, through="eval")
    session.run("quantwm", "demo", *session.posargs)
