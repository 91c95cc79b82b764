"""The old names: an old script runs as it is.

::

    import jaxfleet.compat

    jaxfleet.compat.install()

    import paddle.fluid as fluid  # jaxfleet.fluid, by its old name

`install` registers `paddle`, `paddle.fluid` and their submodules, and starts nothing: `CPU_NUM`
may still be set afterwards. What the names stand for, `names` lists.
"""

from jaxfleet.compat.installing import install as install
from jaxfleet.compat.installing import uninstall as uninstall
