"""Old names, so that an old script runs unchanged.

::

    import jaxfleet.compat

    jaxfleet.compat.install()

    import paddle.fluid as fluid  # jaxfleet.fluid, by its old name

`install` registers `paddle`, `paddle.fluid` and their submodules, and starts nothing: `CPU_NUM`
may still be set afterwards. `installing.MODULES` lists the target of each name.
"""

from jaxfleet.compat.installing import install as install
from jaxfleet.compat.installing import uninstall as uninstall
