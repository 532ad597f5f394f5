"""A streaming compressed cache on the device, and the adapters that put it under a world model."""

from quantwm_models import snapshot
from quantwm_models.attach import Attachment, attach, attached
from quantwm_models.cache import LayerCache
from quantwm_models.errors import CacheMemoryError, HostError, UnknownHostError
from quantwm_models.observer import CacheObserver
from quantwm_models.offload import Offload
from quantwm_models.report import CacheReport
from quantwm_models.workspace import Workspace

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "CacheMemoryError",
    "CacheObserver",
    "CacheReport",
    "HostError",
    "LayerCache",
    "Offload",
    "UnknownHostError",
    "Workspace",
    "attach",
    "attached",
    "snapshot",
]
