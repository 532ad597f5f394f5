"""Metrics, experiments, reports, the quantwm command and a bundled demo world model."""

__version__ = "0.1.0"
