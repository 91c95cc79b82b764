"""`jaxfleet.contrib.downpour.trainer_desc` at Paddle's path: descriptions of trainers."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from jaxfleet.fluid.lazy_modules import forward as _forward

if _TYPE_CHECKING:
    from jaxfleet.contrib.downpour.trainer_desc import DistMultiTrainer as DistMultiTrainer
    from jaxfleet.contrib.downpour.trainer_desc import MultiTrainer as MultiTrainer
    from jaxfleet.contrib.downpour.trainer_desc import TrainerDesc as TrainerDesc

__getattr__, __dir__ = _forward(__name__, "jaxfleet.contrib.downpour.trainer_desc")
