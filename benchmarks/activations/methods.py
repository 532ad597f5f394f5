"""Labels that are measured on each model."""

from __future__ import annotations

BASELINES = ("rtn", "kivi:residual_length=0", "qvg", "qvg:quantizer=affine")
LABELS: dict[str, tuple[str, ...]] = {
    "room": (*BASELINES, "quantwm", "quantwm:preset=sharp"),
    "whisper": (*BASELINES, "quantwm", "quantwm:rank=4", "quantwm:preset=sharp", "quantwm:preset=sharp:rank=8"),
    "minilm": (*BASELINES, "quantwm", "quantwm:rank=2", "quantwm:preset=sharp", "quantwm:preset=sharp:rank=4"),
}
