"""Downpour: jobs whose servers update tables by what workers push, as fluid's pslib has it.

`DownpourSGD.minimize` describes such a job; `Executor.train_from_dataset` runs it.
"""

from jaxfleet.fluid.distributed.descriptions import PSParameter as PSParameter
from jaxfleet.fluid.distributed.downpour import DownpourSGD as DownpourSGD
from jaxfleet.fluid.distributed.job import DownpourJob as DownpourJob
from jaxfleet.fluid.distributed.node import DownpourServer as DownpourServer
from jaxfleet.fluid.distributed.node import DownpourWorker as DownpourWorker
from jaxfleet.fluid.distributed.text import from_text as from_text
from jaxfleet.fluid.distributed.text import to_text as to_text
