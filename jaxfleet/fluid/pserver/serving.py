"""Serves what a server's program says, with the state that its startup program has left."""

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.pserver.connections import Connections
from jaxfleet.fluid.pserver.facts import facts_of
from jaxfleet.fluid.pserver.programs import plain_server
from jaxfleet.ir import Program
from jaxfleet.ps.server import ServerCore
from jaxfleet.ps.server.plan import ServerPlan
from jaxfleet.ps.server.plan_reader import read_plan
from jaxfleet.runtime.scope import Scope


def serve_program(program: Program, scope: Scope, process: Connections) -> None:
    """Serves until all trainers have closed; the scope then holds what the server does.

    Args:
        program: a server's, in the IR.
        scope: has its state, and gets it back, also where serving ends by an error.
        process: what trainers come over, and where executables are kept.

    Raises:
        FeedError: a value is not in the scope, or of another shape.
        ConnectError: the endpoint is taken, or may not be bound.
        JaxfleetError: a block failed, or no trainer lives.
    """
    facts, plan = facts_of(program), read_plan(plain_server(program), process.cache)
    arrays = _state(plan, scope)
    served: list[ServerCore] = []

    def begin(core: ServerCore) -> None:
        rows = [scope.rows[spec.name] for spec in plan.tables if spec.name in scope.rows]
        core.begin(plan, arrays, facts.digest, rows)
        served.append(core)

    try:
        process.wires.serve(facts, begin)
    finally:
        for core in served:
            values = core.state.items()
            scope.keep({name: value for name, value in values if not value.is_deleted()})
            scope.rows.update(core.stores)


def _state(plan: ServerPlan, scope: Scope) -> dict[str, np.ndarray]:
    found = {}
    for name, variable in plan.state.items():
        if name not in scope:
            what = (
                f"'{name}' ({variable.type}) is not in the scope, and the server's blocks need it"
            )
            hint = "run the server's startup program first, in the same scope"
            raise FeedError(what, hint=hint)
        array, wanted = np.asarray(scope.peek(name)), plan.types[name]
        if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
            what = f"'{name}' is {array.dtype}{list(array.shape)} in the scope, and the server's"
            raise FeedError(f"{what} program declares {variable.type}", hint="run its own startup")
        found[name] = array
    return found
