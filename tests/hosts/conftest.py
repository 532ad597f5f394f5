"""The option that names checkouts of hosts."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--checkout",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="checkout of the host that the adapter NAME serves; may be given several times",
    )
