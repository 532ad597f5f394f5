"""Compiles what :mod:`tests.parity.record_launches` wrote down: ``python -m tests.parity.compile_launches FILE``.

No GPU is needed. Prints a line of JSON for each specialisation that does not compile, needs more shared memory than its device
has, or multiplies operands that are too short, and exits with 1 if there is one. What came of each is kept in FILE.done, so
that an interrupted run goes on where it was, and compiles nothing again as long as the sources of core and kernels stay.
Triton's interpreter replaces the compiler, so this runs without ``TRITON_INTERPRET``.
"""

import argparse
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import triton

import quantwm_core
import quantwm_kernels
from tests.parity import specialization
from tests.parity.specialization import DEVICES, PACKAGE, Specialization, compiled

Answer = dict[str, Any]
"""What :func:`compiled` returns, or ``error``."""

# Forks processes that have imported Triton: a compiler that aborts takes one of them with it and no more.
PROCESSES = multiprocessing.get_context("forkserver")


def compiled_beside(case: Specialization) -> Answer:
    """What comes of a specialisation, from a process of its own."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=report, args=(case, sender))
    process.start()
    sender.close()
    try:
        answer: Answer = receiver.recv()
    except EOFError:
        process.join()
        answer = {"error": f"the compiler ended its process with {process.exitcode}"}
    process.join()
    return answer


def report(case: Specialization, sender: Connection) -> None:
    """Compile and send what comes of it."""
    try:
        answer = compiled(case)
    except Exception as error:  # noqa: BLE001 - whatever stops the compiler is the answer
        answer = {"error": "\nbecause of ".join(f"{type(each).__name__}: {each}" for each in causes(error))}
    sender.send(answer)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on: Triton names a line of each function on the way to the one at fault."""
    while error is not None:
        yield error
        error = error.__cause__


def problem(case: Specialization, answer: Answer) -> str:
    """What is wrong with a specialisation; empty if nothing is."""
    if "error" in answer:
        return str(answer["error"])
    if answer["shared"] > DEVICES[case.architecture].shared_nbytes:
        return f"{answer['shared']} bytes of shared memory, of {DEVICES[case.architecture].shared_nbytes}"
    return "; ".join(answer["crowded"])


def key_of(case: Specialization, sources: str) -> str:
    """What an answer depends on; Triton's own key of a kernel depends on what its process has looked at before."""
    return hashlib.sha256(f"{triton.__version__}\n{sources}\n{case.to_json()}".encode()).hexdigest()


def answers(cases: Sequence[Specialization], done: Path, processes: int) -> Iterator[tuple[Specialization, Answer]]:
    """Each specialisation with what came of it, before or now."""
    known = dict(json.loads(line) for line in done.read_text().splitlines()) if done.exists() else {}
    folders = [Path(str(package.__file__)).parent for package in (quantwm_core, quantwm_kernels)]
    files = [*(path for folder in folders for path in sorted(folder.rglob("*.py"))), Path(str(specialization.__file__))]
    sources = "".join(path.read_text() for path in files)
    keyed = [(key_of(case, sources), case) for case in cases]
    yield from ((case, known[key]) for key, case in keyed if key in known)
    with ThreadPoolExecutor(processes) as pool, done.open("a") as lines:
        running = {pool.submit(compiled_beside, case): (key, case) for key, case in keyed if key not in known}
        for future in as_completed(running):
            (key, case), answer = running[future], future.result()
            lines.write(json.dumps([key, answer]) + "\n")
            lines.flush()
            yield case, answer


def main(arguments: Sequence[str]) -> int:
    """Compile what a file lists; 1 if something is wrong with any of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.compile_launches")
    parser.add_argument("file", type=Path, metavar="FILE", help="what was recorded")
    parser.add_argument("--architectures", type=int, nargs="+", choices=sorted(DEVICES), help="of these alone")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="of these alone, such as attention.attend_kernel")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="how many compile at a time")
    asked = parser.parse_args(arguments)
    cases = [
        case
        for case in map(Specialization.from_json, asked.file.read_text().splitlines())
        if case.architecture in (asked.architectures or DEVICES) and case.kernel in (asked.kernels or (case.kernel,))
    ]
    modules = {f"{PACKAGE}.{case.kernel.partition('.')[0]}" for case in cases}
    PROCESSES.set_forkserver_preload([compiled.__module__, *sorted(modules)])
    wrong = 0
    for case, answer in answers(cases, asked.file.with_name(f"{asked.file.name}.done"), asked.processes):
        if found := problem(case, answer):
            wrong += 1
            sys.stdout.write(json.dumps({"problem": found} | asdict(case)) + "\n")
            sys.stdout.flush()
    sys.stderr.write(f"{len(cases)} specialisations, {wrong} of them with a problem\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
