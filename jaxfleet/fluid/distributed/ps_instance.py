"""PaddlePSInstance: servers and workers of an mpirun, for the old Fleet; refused, as that is."""

from jaxfleet.errors import UnsupportedError
from jaxfleet.fluid.argument_checks import mistake


class PaddlePSInstance:
    """Divides the processes of an mpirun into servers and workers, for `Fleet` alone.

    Raises:
        NotImplementedError: always; `MPISymetricRoleMaker` divides them so, and any fleet takes it.
    """

    def __init__(self, server_worker_mode: int = 1, proc_per_node: int = 2) -> None:
        del server_worker_mode, proc_per_node
        what = "PaddlePSInstance serves fluid.distributed.Fleet, which is not here"
        raise mistake(what, "fleet.init(MPISymetricRoleMaker())", UnsupportedError)
