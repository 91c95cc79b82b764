"""Says which operators of a step are its optimize section."""

from jaxfleet.analysis.groups.inner import Inner
from jaxfleet.ir import Kind, Operator, Program, Role, grad_name

OPTIMIZE_ROLES = frozenset({Role.OPTIMIZE, Role.LR_SCHED, Role.OPTIMIZE_LR_SCHED})


def optimize_section(program: Program, inner: Inner) -> frozenset[int]:
    """Returns the places, in block 0, of the operators of the optimize section.

    They are those of the optimizer's roles. In a step with two optimizers the second one's loss may
    depend on what the first one updates (a GAN), and then the first one's update has the roles of
    what comes before a gradient; so whatever stands between a parameter and its gradients, and
    reads no data, is of the section too.
    """
    by_role = {at for at, op in enumerate(program.root.ops) if op.role in OPTIMIZE_ROLES}
    written = {name for at in by_role for name in program.root.ops[at].writes}
    roots = {v.name for v in program.of_kind(Kind.PARAM)} - written
    fed = _fed(program, inner)
    state = {v.name for v in program.of_kind(Kind.STATE)}
    while True:
        found, needed = _updates(program, inner, roots, fed)
        more = (needed & state) - written - roots
        if not more:
            return frozenset(by_role | found)
        roots |= more


def gradients_of(program: Program) -> dict[str, str]:
    """Returns the gradients that a program makes or is fed, and the parameter of each."""
    fed = [v.name for v in program.of_kind(Kind.PARAM) if grad_name(v.name) in program.variables]
    found = {grad_name(name): name for name in fed}
    for op in program.root.ops:
        found.update({gradient: param for param, gradient in op.role_var if gradient in op.writes})
    return found


def _fed(program: Program, inner: Inner) -> set[int]:
    """Returns the operators that depend on data otherwise than through a gradient."""
    gradients = gradients_of(program)
    names = {v.name for v in program.of_kind(Kind.DATA)} - gradients.keys()
    places: set[int] = set()
    for at, op in enumerate(program.root.ops):
        reads, writes = _uses(op, inner)
        if names.isdisjoint(reads):
            names -= writes
        else:
            places.add(at)
            names |= writes - gradients.keys()
    return places


def _updates(
    program: Program, inner: Inner, roots: set[str], fed: set[int]
) -> tuple[set[int], set[str]]:
    """Returns the operators that make the roots, and the variables that these start from."""
    gradients, needed = gradients_of(program), set(roots)
    places: set[int] = set()
    for at in reversed(range(len(program.root.ops))):
        reads, writes = _uses(program.root.ops[at], inner)
        if needed.isdisjoint(writes):
            continue
        needed -= writes
        if at not in fed:
            places.add(at)
            needed |= reads - gradients.keys()
    return places, needed


def _uses(op: Operator, inner: Inner) -> tuple[set[str], set[str]]:
    reads = {*op.reads, *inner.outer_reads(op)}
    return reads, {*op.writes, *inner.outer_writes(op)}
