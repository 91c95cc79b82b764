"""What the distributed table of a program is: how rows begin, and what updates them.

Rows of such a table are made when they are first looked up, by its initializer and their number, so
the table has any int64 ids and takes the memory of those that were seen. As in fluid, its optimizer
is SGD whatever the program's is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxfleet.analysis.updates import Updates
from jaxfleet.ir import Attr, Literal, Operator, Program
from jaxfleet.tables import Constant, Normal, Sgd, TableSpec, Uniform
from jaxfleet.tables.spec import Part

SPECS = "distributed_tables"  # in a program's facts: what they are, as text
REASON = "distributed_tables_not"  # why servers cannot keep them


@dataclass(frozen=True)
class Found:
    """What was found out of a program's distributed table.

    Attributes:
        spec: what it is; None where there is none, or servers cannot keep it.
        reason: why they cannot, and what to do.
    """

    spec: TableSpec | None = None
    reason: str = ""

    @property
    def facts(self) -> Mapping[str, Attr]:
        """What programs say of it."""
        if self.spec is not None:
            return {SPECS: (self.spec.to_text(),)}
        return {REASON: self.reason} if self.reason else {}


def find_table(main: Program, startup: Program) -> Found:
    """Finds out what the distributed table of a step is.

    Args:
        main: the step.
        startup: what begins it.
    """
    updates = Updates(main)
    if len(updates.tables) != 1:
        return Found()
    (name,) = updates.tables
    begins = _maker(startup, name)
    initializer = None if begins is None else _initializer(begins)
    if initializer is None:
        how = "nothing" if begins is None else f"'{begins.type}'"
        what = f"rows of '{name}' are begun by {how}, which servers cannot do row by row"
        return Found(reason=f"{what}; give the table a Constant, Uniform or Normal initializer")
    update = next(op for op in updates.of(name) if op.inputs.slot("Param"))
    rate = _rate(main, startup, str(update.inputs.slot("LearningRate")[0]))
    if rate is None:
        what = f"the rate of the distributed table '{name}' is computed at every step"
        return Found(reason=f"{what}, which servers do not; give the optimizer a number")
    dim = updates.variable(name).shape[1]
    assert isinstance(dim, int)
    spec = TableSpec(name=name, dim=dim, initializer=initializer, optimizer=Sgd(rate))
    return Found(spec)


def _maker(program: Program, name: str) -> Operator | None:
    found = [op for op in program.root.ops if name in op.writes]
    return found[0] if len(found) == 1 else None


def _initializer(op: Operator) -> Part | None:
    number = {name: _number(value) for name, value in op.attrs.items()}
    seed = int(number.get("seed", 0.0))
    match op.type:
        case "fill_constant":
            return Constant(number.get("value", 0.0))
        case "uniform_random":
            return Uniform(number.get("min", -1.0), number.get("max", 1.0), seed)
        case "gaussian_random":
            return Normal(number.get("mean", 0.0), number.get("std", 1.0), seed)
    return None


def _rate(main: Program, startup: Program, name: str) -> float | None:
    """Returns the rate of the table's updates, None where it is not the same at every step."""
    made = _maker(main, name)
    if made is not None and made.type == "scale" and not _number(made.attrs.get("bias", 0.0)):
        whole = _rate(main, startup, made.reads[0])  # times what ParamAttr says
        return None if whole is None else whole * _number(made.attrs.get("scale", 1.0))
    begins = _maker(startup, name)
    if made is not None or begins is None or begins.type != "fill_constant":
        return None
    return _number(begins.attrs.get("value", 0.0))


def _number(value: Attr) -> float:
    """Returns a number that an attribute holds; 0 for anything else."""
    if isinstance(value, int | float):
        return float(value)
    return float(value.text) if isinstance(value, Literal) else 0.0
