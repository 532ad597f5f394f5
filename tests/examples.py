"""A pytest plugin that runs the Python examples of Markdown files: ``pytest -p tests.examples README.md docs``.

Every fenced block marked ``python`` is executed, in order, in one namespace per file; a block with ``>>>`` prompts
is held against the output it shows. A block that cannot run here is preceded by ``<!-- skip: next "reason" -->``.
"""

from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from pathlib import Path

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE),
        SkipParser(),
    ],
    path=str(Path(__file__).parents[1]),
    patterns=["*.md"],
).pytest()
