"""Methods, adapters, metrics and hosts of other distributions: one rule for all four."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quantwm_core import methods
from quantwm_core.errors import PluginError
from quantwm_eval import hosts, metrics
from quantwm_models import adapters
from tests.distributions import install


class Family(NamedTuple):
    group: str
    names: Callable[[], tuple[str, ...]]
    get: Callable[[str], Any]
    own: str
    value: str  # what registers it once more


FAMILIES = (
    Family("quantwm.methods", methods.names, methods.implementation, "rtn", "quantwm_core.methods.rtn:METHOD"),
    Family("quantwm.adapters", adapters.names, adapters.get, "demo", "quantwm_models.adapters.demo"),
    Family("quantwm.metrics", metrics.names, metrics.get, "psnr", "quantwm_eval.metrics.psnr:METRIC"),
    Family("quantwm.hosts", hosts.names, hosts.get, "demo", "quantwm_eval.hosts.demo:LOAD"),
)
BROKEN = {
    "no_such_module:MINE": ModuleNotFoundError,
    "json:MINE": AttributeError,
    "lacks_a_library:MINE": OSError,
    "of_another_python:MINE": SyntaxError,
    "quits:MINE": RuntimeError,
}
SOURCES = {
    "lacks_a_library": "raise OSError('libmine.so: cannot open shared object file')",
    "of_another_python": "print 'mine'",
    "quits": "raise RuntimeError",
    "serves": "class MINE:\n    matches = staticmethod('mine'.__eq__)\n    attach = None.__init__\nMINE = MINE()",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the path with modules to register; what is known by name is forgotten before and after."""
    for module, source in SOURCES.items():
        (tmp_path / f"{module}.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    methods.implementation.cache_clear()
    yield tmp_path
    methods.implementation.cache_clear()


@pytest.fixture(params=FAMILIES, ids=[family.group for family in FAMILIES])
def family(request: pytest.FixtureRequest) -> Family:
    made: Family = request.param
    return made


def test_what_is_registered_is_known_by_its_name(family: Family, folder: Path) -> None:
    own = family.names()
    install(folder, "mine-for-worlds", family.group, {"mine": family.value})
    assert family.names() == tuple(sorted((*own, "mine")))
    assert family.get("mine") is family.get(family.own)


def test_the_projects_own_is_not_replaced(family: Family, folder: Path) -> None:
    before = family.get(family.own)
    install(folder, "mine-for-worlds", family.group, {family.own: "no_such_module:MINE"})
    assert family.get(family.own) is before


@pytest.mark.parametrize(("value", "cause"), BROKEN.items())
def test_what_cannot_be_loaded_is_named(value: str, cause: type[Exception], family: Family, folder: Path) -> None:
    install(folder, "mine-for-worlds", family.group, {"mine": value})
    told = rf"entry point mine = {value} of {family.group} \(registered by mine-for-worlds\) cannot be loaded"
    with pytest.raises(PluginError, match=rf"^{told} \({cause.__name__}: .*\); mend .* or uninstall") as caught:
        family.get("mine")
    assert type(caught.value.__cause__) is cause


def test_what_is_no_member_is_named(family: Family, folder: Path) -> None:
    install(folder, "mine-for-worlds", family.group, {"mine": "math:pi"})
    told = rf"entry point mine = math:pi of {family.group} \(registered by mine-for-worlds\): got float, need a"
    with pytest.raises(PluginError, match=told):
        family.get("mine")


def test_a_name_that_stands_for_several_things_is_refused(family: Family, folder: Path) -> None:
    install(folder, "mine-for-worlds", family.group, {"mine": family.value})
    install(folder, "yours-for-worlds", family.group, {"mine": "math:pi"})
    kind = family.group.removeprefix("quantwm.").removesuffix("s")
    told = sorted((f"{family.value} (registered by mine-for-worlds)", "math:pi (registered by yours-for-worlds)"))
    with pytest.raises(PluginError) as caught:
        family.get("mine")
    assert str(caught.value) == (
        f"{kind} 'mine' stands for several entry points of {family.group}: {', '.join(told)}; uninstall all but one"
    )


def test_one_thing_may_be_registered_twice(family: Family, folder: Path) -> None:
    for distribution in ("mine-for-worlds", "mine-renamed"):
        install(folder, distribution, family.group, {"mine": family.value})
    assert family.get("mine") is family.get(family.own)


@pytest.mark.parametrize("found", [methods, metrics, hosts], ids=["methods", "metrics", "hosts"])
def test_whose_it_is_and_of_which_version_is_known(found: Any, folder: Path) -> None:
    family = next(each for each in FAMILIES if each.names is found.names)
    install(folder, "mine-for-worlds", family.group, {"mine": family.value, family.own: family.value}, version="0.2")
    install(folder, "yours-for-worlds", family.group, {"yours": "no_such_module:YOURS"}, version="3")
    assert found.distributions(["mine", family.own, "neither"]) == {"mine-for-worlds": "0.2"}
    assert found.distributions(iter(["mine", "yours"])) == {"mine-for-worlds": "0.2", "yours-for-worlds": "3"}
    assert found.distributions([family.own]) == {}


@pytest.fixture
def spoiled(folder: Path) -> set[str]:
    """Names under which nothing can be loaded, in all four groups."""
    values = {f"broken{number}": value for number, value in enumerate((*BROKEN, "math:pi", "math:pi"))}
    for each in FAMILIES:
        group = each.group.removeprefix("quantwm.")
        install(folder, f"mine-{group}", each.group, values)
        install(folder, f"yours-{group}", each.group, {[*values][-1]: "math:e"})
    install(folder, "serving", "quantwm.adapters", {"serving": "serves:MINE"})
    return set(values)


def left_out(kind: str, names: set[str], call: Callable[[], Any]) -> Any:
    """What a call returns that leaves out these, and nothing else, with a warning each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert sorted(str(each.message).partition(" is left out: ")[0] for each in caught) == [
        f"{kind} {name!r}" for name in sorted(names)
    ]
    return result


def test_no_host_is_kept_from_the_adapter_that_serves_it(spoiled: set[str]) -> None:
    adapter = left_out("adapter", spoiled, lambda: adapters.find("mine"))
    assert adapter is adapters.get("serving")


def test_no_metric_is_lost_with_others(spoiled: set[str]) -> None:
    found = left_out("metric", spoiled, metrics.loaded)
    assert tuple(found) == tuple(name for name in metrics.names() if name not in spoiled)


def test_methods_and_hosts_are_loaded_beside_what_cannot_be(spoiled: set[str]) -> None:
    for each in FAMILIES:
        assert spoiled < set(each.names())
        assert each.get(each.own)
