"""The operations of quantwm-core on torch tensors: the reference on CPUs, Triton on GPUs."""

__version__ = "0.1.0"
