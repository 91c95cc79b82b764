"""`jaxfleet.contrib.downpour.pslib.node` at Paddle's path."""

from jaxfleet.fluid.lazy_modules import forward as _forward

__getattr__, __dir__ = _forward(__name__, "jaxfleet.contrib.downpour.pslib.node")
