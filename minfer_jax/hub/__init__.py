"""From the name of a model to a file on this machine.

This room downloads and checks files. It must not know what is inside them (that is `gguf`),
and it reads no environment variables: the cache's folder is handed to it.
"""

from minfer_jax.hub.aliases import Alias, Part, catalog
from minfer_jax.hub.names import cached, resolve

__all__ = ["Alias", "Part", "cached", "catalog", "resolve"]
