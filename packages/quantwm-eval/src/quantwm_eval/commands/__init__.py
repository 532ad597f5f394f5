"""The commands of ``quantwm``, one file each: what can be typed, and one call.

A command prints nothing: it returns an :class:`~quantwm_eval.commands.answer.Answer`, which ``cli`` prints.
"""
