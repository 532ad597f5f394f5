"""Metrics, experiments, reports, the quantwm command and a bundled demo world model.

:class:`Experiment` says what to measure, :func:`quantwm_eval.run.run` does it on a :class:`Host`, and every finished video
comes back as an :class:`Outcome`; :mod:`quantwm_eval.produce` turns them into a folder with a page. Metrics alone are
used through :func:`quantwm_eval.metrics.get` on an :class:`Evidence`.
"""

from quantwm_eval.evidence import CacheBytes, Evidence, LookAway, Recording, Seconds
from quantwm_eval.experiment import Experiment, MethodChoice, with_control
from quantwm_eval.host import CacheUse, Episode, Host
from quantwm_eval.metric import Measurement, Metric, Quantity
from quantwm_eval.recorder import Recorder
from quantwm_eval.results import Cell, Results
from quantwm_eval.run import Outcome

__version__ = "0.1.0"
__all__ = [
    "CacheBytes",
    "CacheUse",
    "Cell",
    "Episode",
    "Evidence",
    "Experiment",
    "Host",
    "LookAway",
    "Measurement",
    "MethodChoice",
    "Metric",
    "Outcome",
    "Quantity",
    "Recorder",
    "Recording",
    "Results",
    "Seconds",
    "__version__",
    "with_control",
]
