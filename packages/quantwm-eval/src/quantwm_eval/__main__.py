"""``python -m quantwm_eval``: the same as ``quantwm``."""

from quantwm_eval.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
