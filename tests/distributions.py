"""Distributions as pip leaves them behind, for what entry points make known."""

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, distribution: str, group: str, entries: Mapping[str, str], version: str = "1.0") -> None:
    """Write a distribution's metadata into a folder of the path, before anything is looked for there."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
