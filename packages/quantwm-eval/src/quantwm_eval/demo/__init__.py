"""The bundled demo world model: a small video world model of a toy room, driven through a real KV cache.

``load`` gives the live pipeline, ``draw_scene``, ``step`` and ``render`` the true room, ``look_away`` and
``random_walk`` episodes with true video.
"""

from quantwm_eval.demo.episodes import LookAway, Walk, constant_program, look_away, random_walk
from quantwm_eval.demo.rendering import render
from quantwm_eval.demo.room import ACTIONS, HELD_OUT_SEEDS, TRAINING_SEEDS, Scene, draw_scene, draw_scenes, follow, step
from quantwm_eval.demo.sampler import WorldInputError, WorldPipeline, load

__all__ = [
    "ACTIONS",
    "HELD_OUT_SEEDS",
    "TRAINING_SEEDS",
    "LookAway",
    "Scene",
    "Walk",
    "WorldInputError",
    "WorldPipeline",
    "constant_program",
    "draw_scene",
    "draw_scenes",
    "follow",
    "load",
    "look_away",
    "random_walk",
    "render",
    "step",
]
