"""Threads: what an option says holds for all that computes."""

import os
import subprocess
import sys

LIMITED = """
import scipy.linalg, torch
from threadpoolctl import threadpool_info
from quantwm_eval.threads import limit_threads
limit_threads(1)
assert torch.get_num_threads() == 1
assert {pool["num_threads"] for pool in threadpool_info()} == {1}, threadpool_info()
"""


def test_no_library_computes_with_more_threads_than_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False, env=_unlimited()
    )
    assert done.returncode == 0, done.stderr


def _unlimited() -> dict[str, str]:
    """The environment, less what limits threads before a library is loaded."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
