"""Downpour: jobs whose servers update tables with gradients that workers push, as in pslib.

`DownpourSGD.minimize` describes such a job; `Executor.train_from_dataset` runs it. Scripts reach
these names as `fluid.distributed`, and those of `jaxfleet.contrib.downpour.pslib` as
`fluid.incubate.fleet.parameter_server.pslib`.
"""

from jaxfleet.contrib.downpour.descriptions import PSParameter as PSParameter
from jaxfleet.contrib.downpour.job import DownpourJob as DownpourJob
from jaxfleet.contrib.downpour.node import DownpourServer as DownpourServer
from jaxfleet.contrib.downpour.node import DownpourWorker as DownpourWorker
from jaxfleet.contrib.downpour.optimizer import DownpourSGD as DownpourSGD
from jaxfleet.contrib.downpour.text_format import from_text as from_text
from jaxfleet.contrib.downpour.text_format import to_text as to_text
