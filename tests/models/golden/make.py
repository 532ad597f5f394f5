"""Write the golden snapshot of the current version: ``python -m tests.models.golden.make``.

``world.vN.safetensors`` holds two layers in the middle of a video and, as what the caller added, what their reads gave. A
file that exists is never written again: a release that keeps something else has another version, and goes on reading
the files of this one.
"""

from pathlib import Path

from quantwm_core.method import scheme
from quantwm_models import LayerCache, snapshot
from tests.models.worlds import go_on

FOLDER = Path(__file__).parent


def world() -> list[LayerCache]:
    """Empty layers with the settings of the files."""
    stored = scheme(keys="klt", values="quantwm", centroids=4, group_size=8, chunks_per_seal=2)
    return [LayerCache(stored, layer=layer, sink=4, window=100) for layer in range(2)]


def main() -> None:
    """Write what is missing."""
    path = FOLDER / f"world.v{snapshot.VERSION}.safetensors"
    if path.exists():
        return
    caches = world()
    go_on(caches, 0, 6)
    reads = [[half.clone() for half in cache.read()] for cache in caches]
    names = ((layer, kind) for layer in range(len(caches)) for kind in (0, 1))
    snapshot.save(caches, path, {f"{layer}.{kind}": reads[layer][kind] for layer, kind in names})


if __name__ == "__main__":
    main()
