"""Keeps the examples of every package collectable on a machine without Triton."""

import importlib.util

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob.append("packages/quantwm-kernels/src/quantwm_kernels/triton/*")
