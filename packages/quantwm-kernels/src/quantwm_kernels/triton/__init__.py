"""The Triton kernels, a file per concept, named as in quantwm-core; only what runs on a GPU imports them.

Each file holds device functions, kernels and the launchers of the latter. A launcher takes and returns tensors, checks
what a kernel cannot, and never waits for the device.
"""
