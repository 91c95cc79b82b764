"""`jaxfleet.contrib.downpour` at Paddle's path.

`DownpourSGD.minimize` describes a job whose servers update tables with what workers push, as in
fluid's pslib; `Executor.train_from_dataset` runs it.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from jaxfleet.fluid.lazy_modules import forward as _forward

if _TYPE_CHECKING:
    from jaxfleet.contrib.downpour import DownpourJob as DownpourJob
    from jaxfleet.contrib.downpour import DownpourServer as DownpourServer
    from jaxfleet.contrib.downpour import DownpourSGD as DownpourSGD
    from jaxfleet.contrib.downpour import DownpourWorker as DownpourWorker
    from jaxfleet.contrib.downpour import PSParameter as PSParameter
    from jaxfleet.contrib.downpour import from_text as from_text
    from jaxfleet.contrib.downpour import to_text as to_text

__getattr__, __dir__ = _forward(__name__, "jaxfleet.contrib.downpour")
