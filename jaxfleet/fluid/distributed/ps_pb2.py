"""`jaxfleet.contrib.downpour.ps_pb2` at Paddle's path: pslib's messages, each made by a call."""

from jaxfleet.fluid.lazy_modules import forward as _forward

__getattr__, __dir__ = _forward(__name__, "jaxfleet.contrib.downpour.ps_pb2")
