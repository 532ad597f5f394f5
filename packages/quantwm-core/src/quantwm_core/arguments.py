"""Naming the argument that a function stumbled over.

Most functions of the package check what only they can know, and nothing else: so the mathematics stays readable, and what
runs in an inner loop is not checked again and again. What is no array at all, or of another number format or rank than the
annotation says, makes NumPy or Python raise. :func:`explain_errors` looks at the arguments then, and only then.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from jaxtyping import AbstractArray, jaxtyped

from quantwm_core.errors import DtypeError, ParameterError, QuantWMError, ShapeError

RAISED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What Python and NumPy raise over arguments that are not what a function takes."""

_EXPLAINS = "_explains"  # attribute of an error that says which one it explains
_NUMBERS: dict[object, type] = {int: numbers.Integral, float: numbers.Real}


def explain_errors(namespace: dict[str, Any]) -> None:
    """Let the public functions of a module say which argument is at fault, where they fail because one is.

    What is raised then is a :class:`DtypeError`, :class:`ShapeError` or :class:`ParameterError`, from the error that it
    explains and whose words it ends with. Of functions that call each other the outermost whose argument is at fault says so.
    An error that no argument explains stays what it is, and a call that succeeds takes about 0.1 us longer.

    Args:
        namespace: ``globals()`` of the module, at its end.

    >>> def half(values: Float32[np.ndarray, "tokens channels"]) -> Float32[np.ndarray, "tokens channels"]:
    ...     return values / np.float32(2)
    >>> from jaxtyping import Float32
    >>> module = {"__name__": half.__module__, "half": half}
    >>> explain_errors(module)
    >>> module["half"](None)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.DtypeError: values: got None, need an array, Float32 [tokens, channels] (TypeError: unsupported operand type(s) for /: 'NoneType' and 'float')
    """
    for name, member in list(namespace.items()):
        if inspect.isfunction(member) and member.__module__ == namespace["__name__"] and not name.startswith("_"):
            namespace[name] = _explained(member)


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = function(*args, **kwargs)
        except RAISED as error:
            _explain(error, function, args, kwargs)
            raise
        return generate(given, args, kwargs) if type(given) is GeneratorType else given

    def generate(given: Iterator[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        try:
            yield from given
        except RAISED as error:
            _explain(error, function, args, kwargs)
            raise

    return call


def _explain(error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise what says more than ``error``, if an argument is at fault."""
    inner = getattr(error, _EXPLAINS, None)  # of a function that this one calls
    if isinstance(error, QuantWMError) and inner is None:
        return
    cause = inner or error
    for fault in _faults(function, args, kwargs):
        told = type(fault)(f"{fault} ({type(cause).__name__}: {cause})")
        setattr(told, _EXPLAINS, cause)
        raise told from cause


def _faults(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[QuantWMError]:
    """What is wrong with the arguments of a call: arrays of nothing, what is not as annotated, and other things that are empty."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # an argument too many or too few, which Python says itself
        return
    hints = get_type_hints(function)
    known: list[tuple[str, object]] = []
    for name, value in given.items():
        kind = signature.parameters[name].kind
        if name in hints and kind is not inspect.Parameter.VAR_KEYWORD:
            known += [(name, each) for each in (value if kind is inspect.Parameter.VAR_POSITIONAL else [value])]
    for name, value in known:
        if isinstance(value, np.ndarray) and not value.size:
            yield ShapeError(f"{name}: got shape {value.shape}, which holds no element")
    with jaxtyped("context"):  # in which axes of one name are of one size
        for name, value in known:
            if not _fits(value, hints[name]):
                yield _fault(name, value, hints[name])
    for name, value in known:
        needed = signature.parameters[name].default is inspect.Parameter.empty
        if needed and isinstance(value, Sequence | Mapping) and not value:
            yield ShapeError(f"{name}: got {value!r}, which is empty")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is what an annotation says, as far as an annotation can be asked."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(hint))
    if origin in (Sequence, Iterable, list) and isinstance(value, Sequence):
        return all(_fits(each, *get_args(hint)) for each in value)
    kind = origin or _NUMBERS.get(hint, hint)
    try:
        return not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # Any, and protocols that cannot be asked
        return True


def _fault(name: str, value: object, hint: Any) -> QuantWMError:
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    arrays = [each for each in choices if isinstance(each, type) and issubclass(each, AbstractArray | np.ndarray)]
    needed = " or ".join(_words(each) for each in choices)
    if not arrays:
        return ParameterError(f"{name}: got {reprlib.repr(value)}, need {needed}")
    if not isinstance(value, np.ndarray):
        return DtypeError(f"{name}: got {reprlib.repr(value)}, need an array, {needed}")
    if not any(_fits(value, _of_any_shape(each)) for each in arrays):
        return DtypeError(f"{name}: got {value.dtype}, need {needed}")
    return ShapeError(f"{name}: got shape {value.shape}, need {needed}")


def _of_any_shape(hint: Any) -> Any:
    return hint.dtype[np.ndarray, "..."]


def _words(hint: Any) -> str:
    """An annotation as one says it."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return f"{hint.dtype.__name__} [{', '.join(hint.dim_str.split())}]"
    if hint is type(None):
        return "None"
    return hint.__name__ if get_origin(hint) is None and isinstance(hint, type) else str(hint)
