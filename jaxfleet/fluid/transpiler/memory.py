"""`memory_optimize` and `release_memory`, where scripts of fluid look for them."""

from jaxfleet.runtime.reuse import memory_optimize as memory_optimize
from jaxfleet.runtime.reuse import release_memory as release_memory
