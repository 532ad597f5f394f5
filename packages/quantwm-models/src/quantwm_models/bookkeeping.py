"""Whether what a snapshot says of a cache can be so: numbers, where its tokens are, how its units were sealed.

JSON that was damaged is still JSON. What would be believed without a word, and lead to a wrong read or a late error, is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from quantwm_core import methods
from quantwm_core.chunk import Kind
from quantwm_core.errors import FormatError, ParameterError
from quantwm_core.method import Method
from quantwm_core.stream import Span, Stream, is_whole, join, overlap


def whole(name: str, told: object, least: int = 0, most: int = 2**63 - 1) -> int:
    """A whole number of 64 bits.

    >>> whole("chunks_sealed", True)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.FormatError: chunks_sealed: got True, need a whole number from 0 to 9223372036854775807
    """
    if not isinstance(told, int) or not is_whole(told) or not least <= told <= most:
        raise FormatError(f"{name}: got {told!r}, need a whole number from {least} to {most}")
    return told


def seconds(name: str, told: object) -> float:
    """A time, neither negative nor NaN nor endless.

    >>> seconds("seal_seconds", 3)
    3.0
    """
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told <= sys.float_info.max:
        raise FormatError(f"{name}: got {told!r}, need a finite number of at least 0")
    return float(told)


def listed(name: str, told: object) -> list[Any]:
    """A list."""
    if not isinstance(told, list):
        raise FormatError(f"{name}: got {told!r}, need a list")
    return told


def span_told(name: str, told: object) -> Span:
    """Tokens, at least one."""
    start, stop = (whole(name, each) for each in listed(name, told))
    if start >= stop:
        raise FormatError(f"{name}: got tokens {start} to {stop}, need at least one")
    return Span(start, stop)


def sizes_told(told: object) -> tuple[int, int, int, int] | None:
    """Batch, heads, key channels and value channels; None of a cache to which nothing was appended."""
    if told is None:
        return None
    batch, heads, key_channels, value_channels = (whole("geometry", each, 1) for each in listed("geometry", told))
    return batch, heads, key_channels, value_channels


def stream_told(told: Mapping[str, Any], empty: Stream) -> Stream:
    """A stream with the settings of ``empty``.

    Raises:
        FormatError: No stream can be like that after a call of its cache.

    >>> told = {"ends": [4, 8], "active": True, "live": [[0, 8]], "units": [[0, 4]], "sealed_end": 4}
    >>> stream_told(told, Stream()).active_span
    Span(start=4, stop=8)
    >>> stream_told(told | {"sealed_end": 8}, Stream())
    Traceback (most recent call last):
    ...
    quantwm_core.errors.FormatError: sealed_end: got 8, chunks that end at [4, 8] are sealed up to 4
    """
    if not isinstance(told["active"], bool):
        raise FormatError(f"active: got {told['active']!r}, need true or false")
    stream = replace(
        empty,
        ends=tuple(whole("ends", each) for each in listed("ends", told["ends"])),
        active=told["active"],
        live=tuple(span_told("live", each) for each in listed("live", told["live"])),
        units=tuple(span_told("units", each) for each in listed("units", told["units"])),
        sealed_end=whole("sealed_end", told["sealed_end"]),
    )
    ends, active = stream.ends, stream.active_span
    if not all(first < second for first, second in pairwise((0, *ends))):
        raise FormatError(f"ends: got {list(ends)}, need each above the one before")
    if join(stream.live) != stream.live or not _ascend(stream.live, stream.end):
        raise FormatError(f"live: got {list(stream.live)}, need spans apart and ascending up to {stream.end}")
    if active is not None and not any(overlap(active, live) == active for live in stream.live):
        raise FormatError(f"active: tokens {active.start} to {active.stop} are not all live")
    sealed_end = replace(stream, sealed_end=0).sealed().sealed_end
    if stream.sealed_end != sealed_end:
        raise FormatError(
            f"sealed_end: got {stream.sealed_end}, chunks that end at {list(ends)} are sealed up to {sealed_end}"
        )
    if not _ascend(stream.units, sealed_end):
        raise FormatError(f"units: got {list(stream.units)}, need them ascending up to {sealed_end}")
    return stream


def check_cover(stream: Stream, exact: Sequence[Span]) -> None:
    """Refuse units and BF16 tokens that are not together the live tokens, each once."""
    parts = [[part for live in stream.live if (part := overlap(held, live))] for held in (*stream.units, *exact)]
    for held, found in zip((*stream.units, *exact), parts, strict=True):
        if not found:
            raise FormatError(f"tokens {held.start} to {held.stop} are there, and none of them is live")
    sealed = tuple(part for found in parts[: len(stream.units)] for part in found)
    if join((*sealed, *exact)) != stream.live or any(span.start < stream.sealed_end for span in exact):
        raise FormatError(
            f"units {list(stream.units)} and BF16 tokens {list(exact)} are not the live tokens {list(stream.live)}"
        )


def check_groups(stream: Stream, starts: Sequence[int]) -> None:
    """Refuse groups of queries that do not begin where groups of chunks do, up to the newest."""
    begins = [0, *stream.ends][: len(stream.ends) or 1 : stream.chunks_per_seal]
    known = all(start in begins for start in starts) and list(starts) == sorted(starts)
    if not known or (stream.ends and (not starts or starts[-1] != begins[-1])):
        raise FormatError(f"groups: got those that begin at {list(starts)}, need ascending ones of {begins}")


def check_sealing(kind: Kind, told: Mapping[str, Any], method: Method) -> None:
    """Refuse a unit's keys or values that ``method``, which the cache seals with, could not have written.

    Another method can have, if it takes the parameters.
    """
    name, parameters, names = told["method"], told["parameters"], listed("names", told["names"])
    if not isinstance(name, str) or not isinstance(parameters, dict):
        raise FormatError(f"{kind}: method {name!r} with {parameters!r}: need a name and its parameters")
    try:
        made = methods.get(name, **parameters)
    except ParameterError as error:
        raise FormatError(f"{kind}: {error}") from error
    if name == method.name and (made != method or not methods.settings(method).keys() <= parameters.keys()):
        raise FormatError(f"{kind}: a unit of {parameters}, the cache seals with {methods.settings(method)}")
    if len(set(names)) < len(names) or not set(names) <= set(made.array_names(kind)):
        raise FormatError(f"{kind}: arrays {names}, {name} writes some of {', '.join(made.array_names(kind))}")


def _ascend(spans: Sequence[Span], end: int) -> bool:
    """Whether none of the spans begins before the end of another, and none ends after ``end``."""
    return all(first.stop <= second.start for first, second in pairwise((*spans, Span(end, end))))
