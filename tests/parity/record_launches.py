"""A pytest plugin that writes down what a GPU would have to compile for the launches of a run under Triton's interpreter.

    TRITON_INTERPRET=1 pytest -p tests.parity.record_launches --launches FILE --architecture 90 tests/parity

Every kernel is launched as on a device of that compute capability: launchers see as many processors and as much shared
memory as it has, so that they choose what they would choose there. FILE gains a line of JSON for each specialisation that it
has not yet, as :class:`tests.parity.specialization.Specialization` describes it; ``python -m tests.parity.compile_launches``
compiles them. Workers of pytest-xdist hand theirs to the process that started them.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import native_specialize_impl

from quantwm_core.errors import QuantWMError
from quantwm_kernels import launch
from quantwm_kernels.triton.kernel import Kernel
from tests.parity.specialization import ALIGNMENT, DEVICES, PACKAGE, Specialization

NAMESPACE = "quantwm"
WORKER = "launches"
ZEROS = torch.zeros
# No status tells of a NaN where nothing was launched, so that linear algebra meets it.
REFUSED = (QuantWMError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]  # which torch documents and does not list


def specialization(
    kernel: Kernel, arguments: Sequence[Any], options: Mapping[str, Any], architecture: int
) -> Specialization:
    """What a GPU would compile for a launch of an interpreted kernel."""
    function = kernel.function
    names = list(inspect.signature(function.fn).parameters)
    named = {**dict(zip(names, arguments, strict=False)), **options}
    general = function.kwargs["do_not_specialize"] or ()
    return Specialization(
        f"{function.fn.__module__.removeprefix(f'{PACKAGE}.')}.{kernel.__name__}",
        {name: typed(named[name], special=name not in general) for name in names if not name.isupper()},
        {name: named[name] for name in names if name.isupper()},
        {name: value for name, value in named.items() if name not in names},
        architecture,
    )


def typed(value: Any, *, special: bool) -> str:
    """Type of a run-time argument and, if a binary is made for more than that, what it takes for granted.

    >>> typed(torch.zeros(4, dtype=torch.bfloat16)[1:], special=True), typed(48, special=True), typed(1, special=True)
    ('*bf16', 'i32:16', 'i32:1')
    >>> typed(48, special=False), typed(2**31, special=True), typed(0.5, special=True)
    ('i32', 'i64:16', 'fp32')
    """
    short, known = native_specialize_impl(BaseBackend, value, False, special, True)
    if short == "constexpr":
        return "i32:1"
    return f"{short}:{ALIGNMENT}" if known == "D" else short


class Recorder:
    """What was launched, each specialisation once.

    Args:
        architecture: Compute capability that launches are made for.
    """

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self.holds_back, self.lock = False, threading.RLock()
        self.lines: set[str] = set()

    def record(self, kernel: Kernel, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note a launch of one of the package's kernels."""
        source = getattr(kernel.function, "fn", None)
        if source is not None and source.__module__.startswith(f"{PACKAGE}."):  # a test may launch what is none
            self.lines.add(specialization(kernel, arguments, options, self.architecture).to_json())

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Note each launch from here on, and let launchers that are imported from here on see the device."""
        device, original = DEVICES[self.architecture], Kernel._launch

        def launched(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
            self.record(kernel, arguments, options)
            return nothing if self.holds_back else original(kernel, grid, *arguments, **options)

        patch.setattr(Kernel, "_launch", launched)
        patch.setattr(launch, "processors", lambda _: device.processors)
        patch.setattr(launch, "shared_memory", lambda _: device.shared_nbytes)

    def both(self, kernels: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
        """What answers as the reference does, once what ``kernels`` would launch is noted.

        Nothing is launched then, so what would have been written is zero; what is refused for that, or because the reference
        refuses it too, launches no more.
        """

        def answer(*arguments: Any) -> Any:
            with self.lock, pytest.MonkeyPatch.context() as patch, contextlib.suppress(*REFUSED):
                patch.setattr(self, "holds_back", True)
                for name in ("empty", "zeros"):  # a test may count what a host asks for
                    patch.setattr(torch, name, ZEROS)
                patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
                kernels(*arguments)
            return reference(*arguments)

        return answer

    def pytest_collection_finish(self) -> None:
        """Note what operators would launch, too, that serve tensors in the memory of the CPU by the reference."""
        for operator in OPDEFS.values():
            if operator._namespace == NAMESPACE:
                serving = operator._backend_fns
                operator.register_kernel("cpu")(self.both(serving["cuda"], serving[None]))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker has noted."""
        self.lines.update(getattr(node, "workeroutput", {}).get(WORKER, ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand over what was noted: a worker to who started it, who writes it down."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[WORKER] = sorted(self.lines)
            return
        file = Path(session.config.getoption("launches"))
        known = set(file.read_text().splitlines()) if file.exists() else set()
        with file.open("a") as lines:
            lines.writelines(f"{line}\n" for line in sorted(self.lines - known))


def nothing() -> None:
    """Launch nothing again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write, and for which device."""
    group = parser.getgroup("launches of Triton kernels")
    group.addoption("--launches", metavar="FILE", help="gains a line of JSON for each specialisation that is launched")
    group.addoption("--architecture", type=int, default=90, choices=sorted(DEVICES), help="launch as on such a device")


def pytest_configure(config: pytest.Config) -> None:
    """Begin, before a launcher is imported."""
    if not config.getoption("launches"):
        raise pytest.UsageError("--launches FILE: where is what is launched to be written?")
    if not launch.interpreted():
        raise pytest.UsageError("launches are recorded under the interpreter: set TRITON_INTERPRET=1")
    recorder, patch = Recorder(config.getoption("architecture")), pytest.MonkeyPatch()
    recorder.install(patch)
    config.add_cleanup(patch.undo)
    config.pluginmanager.register(recorder, "recorder of launches")
