"""What stands in the lines of a results file."""

from __future__ import annotations

from quantwm_eval.schema import by_name, each, fields, grid, number, text, truth, whole

HEAD = fields(
    {
        "experiment": fields(
            {
                **dict.fromkeys(("methods", "kinds", "metrics"), each(text)),
                **dict.fromkeys(("scenes", "seeds"), each(whole(0))),
                **dict.fromkeys(("frames", "degrees", "chunks_per_seal", "batch"), whole(1)),
                "samples": whole(0),
                "model": text,
            },
            {"name": text},  # early files have none
        ),
        "provenance": fields(
            {
                **dict.fromkeys(("command", "date", "platform"), text),
                **dict.fromkeys(("cores", "threads"), whole(1)),
                "versions": by_name(text),
            },
            # early files are of a CPU, and do not say of which commit, nor what the host was made from
            {"device": text, "commit": text, "host": by_name(text)},
        ),
    },
    others=True,
)
"""What stands in the first line of a file, beside format and version."""

_CURVES = by_name(each(number))
CELL = fields(
    {
        **dict.fromkeys(("kind", "method"), text),
        **dict.fromkeys(("scene", "seed"), whole(0)),
        "valid": truth,
        "values": by_name(number),
    },
    {
        **dict.fromkeys(("curves", "ages", "positions"), _CURVES),  # early files have no ages and no positions
        "maps": by_name(grid(number)),
        "reference": text,
    },
    others=True,
)
"""What stands in every further one."""
