"""TrainerFactory at Paddle's path; defined in `jaxfleet.contrib.downpour.trainer_desc`."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from jaxfleet.fluid.lazy_modules import forward as _forward

if _TYPE_CHECKING:
    from jaxfleet.contrib.downpour.trainer_desc import TrainerFactory as TrainerFactory

__getattr__, __dir__ = _forward(__name__, "jaxfleet.contrib.downpour.trainer_desc")
