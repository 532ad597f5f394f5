"""``python -m quantwm_eval``: the same as ``quantwm``."""

from quantwm_eval.cli import main

raise SystemExit(main())
