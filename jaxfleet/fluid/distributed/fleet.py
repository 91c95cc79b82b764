"""Fleet: what began pslib's jobs before `fluid.incubate.fleet`; refused, with the way to go."""

from jaxfleet.errors import UnsupportedError
from jaxfleet.fluid.argument_checks import mistake


class Fleet:
    """Begins and ends jobs by what `minimize` returned, with pslib's own library.

    Raises:
        NotImplementedError: always. What it is given names no programs, which processes here know
            their tables by; `pslib.fleet` receives them from `minimize`.
    """

    def __init__(self) -> None:
        what = "fluid.distributed.Fleet begins jobs by pslib's own library, which is not here"
        hint = "incubate.fleet.parameter_server.pslib.fleet: init(role), init_worker, run_server"
        raise mistake(what, hint, UnsupportedError)
