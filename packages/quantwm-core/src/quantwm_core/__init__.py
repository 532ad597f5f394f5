"""Two-bit caches for video world models: the mathematics, in NumPy, written to be read.

Start with :func:`scheme`: it chooses how keys and values are stored, seals units of tokens and decodes them again.
"""

from quantwm_core.chunk import SealedChunk, SealedTensor, load, save
from quantwm_core.errors import QuantWMError
from quantwm_core.method import Method, Scheme, decode, scheme
from quantwm_core.statistics import QueryMoment, QueryStatistics, second_moment

__version__ = "0.1.0"
__all__ = [
    "Method",
    "QuantWMError",
    "QueryMoment",
    "QueryStatistics",
    "Scheme",
    "SealedChunk",
    "SealedTensor",
    "__version__",
    "decode",
    "load",
    "save",
    "scheme",
    "second_moment",
]
