"""Block: a list of operators with the variables that are declared in it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.infer import infer_sizes
from jaxfleet.fluid.operator import ROLE, ROLE_VAR, Operator
from jaxfleet.fluid.to_ir import ir_operator
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.ir import Source
from jaxfleet.ops.fluid import EMPTY, schema_of
from jaxfleet.ops.frames import line_of_caller

if TYPE_CHECKING:
    from jaxfleet.fluid.program import Program

Given: TypeAlias = "Variable | str | Sequence[Variable | str]"
_AS_DECLARED = ("type", "dtype", "lod_level", "persistable")


class Block:
    """A block of a program.

    Attributes:
        program: whose it is.
        idx: its number.
        parent_idx: the number of the block around it, -1 for block 0.
        vars: its variables by name.
        ops: its operators, in order.
    """

    def __init__(self, program: "Program", idx: int, parent_idx: int = -1) -> None:
        self.program, self.idx, self.parent_idx = program, idx, parent_idx
        self.vars: dict[str, Variable] = {}
        self.ops: list[Operator] = []

    # --- variables ---------------------------------------------------------------------------

    def var(self, name: str) -> Variable:
        """Returns a variable of this block.

        Raises:
            TypeError: the name is no string.
            ValueError: there is none.
        """
        if not isinstance(name, str):
            raise TypeError(f"a variable's name is a string, not {type(name).__name__}")
        if name not in self.vars:
            raise ProgramError(f"var {name} not in this block", hint=self._near(name))
        return self.vars[name]

    def has_var(self, name: str) -> bool:
        """Tells whether a variable is declared here."""
        return name in self.vars

    def _var_recursive(self, name: str) -> Variable:
        for block in self._outwards():
            if name in block.vars:
                return block.vars[name]
        raise ProgramError(f"var {name} not in this program", hint=self._near(name))

    def create_var(self, **declared: Any) -> Variable:
        """Declares a variable; the same name again must be the same in type, shape and dtype."""
        name = declared.get("name") or self.program.unique_name("_generated_var")
        made = Variable(self, **{**declared, "name": name})
        known = self.vars.get(name)
        if known is None:
            self.vars[name] = made
            return made
        self._check_same(known, made)
        return known

    def create_parameter(self, **declared: Any) -> Parameter:
        """Declares a parameter, in block 0 wherever this is."""
        home = self.program.global_block()
        made = Parameter(home, **declared)
        if made.name in home.vars:
            self._check_same(home.vars[made.name], made)
        home.vars[made.name] = made
        return made

    def all_parameters(self) -> list[Parameter]:
        """Returns the parameters declared here."""
        return [v for v in self.vars.values() if isinstance(v, Parameter)]

    def iter_parameters(self) -> Iterator[Parameter]:
        """Yields the parameters declared here."""
        return iter(self.all_parameters())

    # --- operators ---------------------------------------------------------------------------

    def append_op(
        self,
        type: str,
        inputs: Mapping[str, Given] | None = None,
        outputs: Mapping[str, Given] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> Operator:
        """Adds an operator at the end; outputs whose shapes are not declared get theirs.

        Raises:
            ProgramError: there is no such type, or it does not take these.
        """
        return self._insert_op(len(self.ops), type, inputs, outputs, attrs)

    def _prepend_op(
        self,
        type: str,
        inputs: Mapping[str, Given] | None = None,
        outputs: Mapping[str, Given] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> Operator:
        return self._insert_op(0, type, inputs, outputs, attrs)

    def _insert_op(
        self,
        index: int,
        type: str,
        inputs: Mapping[str, Given] | None = None,
        outputs: Mapping[str, Given] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> Operator:
        given = {k: v for k, v in (attrs or {}).items() if v is not None}
        given.setdefault(ROLE, self.program.op_role)
        given.setdefault(ROLE_VAR, list(self.program.op_role_var))
        source = line_of_caller() or Source()
        op = Operator(self, type, _named(inputs), _named(outputs), given, source)
        self._infer(op)
        self.ops.insert(index, op)
        self.program.version += 1
        return op

    def _remove_op(self, index: int) -> None:
        del self.ops[index]
        self.program.version += 1

    def _infer(self, op: Operator) -> None:
        """Says the shapes of what an operator writes, where nothing has said them yet."""
        written = [name for name in op.output_arg_names if name != EMPTY]
        unknown = [n for n in written if self._var_recursive(n).sizes is None]
        if not unknown or schema_of(op.type) is None or "sub_block" in op.attrs:
            return
        made = ir_operator(op)
        read = {name: self._var_recursive(name) for name in made.reads}
        for name, sizes in zip(made.writes, infer_sizes(made, read), strict=True):
            variable = self._var_recursive(name)
            variable.sizes = sizes if variable.sizes is None else variable.sizes

    def _outwards(self) -> Iterator["Block"]:
        block = self
        yield block
        while block.parent_idx >= 0:
            block = self.program.block(block.parent_idx)
            yield block

    def _near(self, name: str) -> str | None:
        import difflib  # noqa: PLC0415  # only an error needs it

        near = difflib.get_close_matches(name, [n for b in self._outwards() for n in b.vars])
        return f"did you mean {', '.join(near)}?" if near else None

    def _check_same(self, known: Variable, made: Variable) -> None:
        for what in _AS_DECLARED:
            if getattr(known, what) != getattr(made, what):
                text = f"variable '{known.name}' has {what} {getattr(known, what)!r}"
                raise ProgramError(f"{text}, and is declared again with {getattr(made, what)!r}")
        if made.sizes is not None and known.sizes is not None and made.shape != known.shape:
            text = f"variable '{known.name}' has shape {known.shape}"
            raise ProgramError(f"{text}, and is declared again with {made.shape}")

    def __str__(self) -> str:
        lines = [f"block {self.idx} in {self.parent_idx}", *map(str, self.vars.values())]
        return "\n  ".join([*lines, *map(str, self.ops)])


def _named(given: Mapping[str, Given] | None) -> dict[str, list[str]]:
    """Returns names by slot, of variables or names, one or many."""
    found = {}
    for slot, value in (given or {}).items():
        if value is None:
            continue
        many = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        found[slot] = [x if isinstance(x, str) else x.name for x in many]
    return found
