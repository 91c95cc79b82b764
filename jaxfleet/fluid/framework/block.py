"""Block: a list of operators with the variables declared in it."""

import copy
import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.guards import current_device, current_name_scope
from jaxfleet.fluid.framework.operator import DEVICE, NAME_SCOPE, ROLE, ROLE_VAR, Operator
from jaxfleet.fluid.framework.sequence_lengths import join_rows
from jaxfleet.fluid.framework.to_ir import infer_sizes, ir_operator
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.ir import Size, Source
from jaxfleet.ops.fluid import EMPTY, schema_of
from jaxfleet.ops.registry import known_ops
from jaxfleet.ops.user_frames import line_of_caller

if TYPE_CHECKING:
    from jaxfleet.fluid.framework.program import Program

_COMPARED = ("type", "shape", "dtype", "lod_level", "persistable")


def check_redeclaration(known: Variable, made: Variable, said: Collection[str]) -> None:
    """Raises ValueError if a redeclared variable differs in one of the given attributes."""
    for what in _COMPARED:
        if what not in said or (what == "shape" and None in (known.sizes, made.sizes)):
            continue
        before, now = getattr(known, what), getattr(made, what)
        if before != now:
            text = f"variable '{known.name}' has {what} {before!r}, and is declared again with"
            raise mistake(f"{text} {now!r}", "take another name, or declare it the same")


Given: TypeAlias = Variable | str | Sequence[Variable | str]
Slots: TypeAlias = Mapping[str, Given] | None


class OpParts(TypedDict, total=False):
    """The parts of an operator besides its type; see `Block.append_op`."""

    inputs: Slots
    outputs: Slots
    attrs: Mapping[str, Any] | None
    stop_gradient: bool


def names_by_slot(op_type: str, given: Slots) -> dict[str, list[str]]:
    """Returns the variable names of each slot."""
    found = {}
    for slot, value in (given or {}).items():
        if value is None:
            continue
        many = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for x in many:
            if not isinstance(x, str | Variable):
                what = f"'{slot}' of operator '{op_type}' is a {type(x).__name__}"
                raise mistake(what, "give a Variable, or the name of one", WrongTypeError)
        found[slot] = [x if isinstance(x, str) else x.name for x in many]
    return found


# Fluid's operators without shape inference; a transpiler writes some, a runtime reads others.
_WITHOUT_SHAPES = frozenset(
    """
    feed fetch read recurrent go rnn_memory_helper_grad conditional_block while send recv prefetch
    send_barrier fetch_barrier listen_and_serv fl_listen_and_serv ncclInit select checkpoint_notify
    gen_nccl_id c_gen_nccl_id c_comm_init c_comm_init_all c_sync_calc_stream c_sync_comm_stream
    delete_var
    """.split()  # noqa: SIM905  # a list of words is read more easily so
)

_SIZED_BY_VALUES = frozenset({"merge_ids", "split_ids"})  # the ids determine the size


class Block:
    """A block of a program; block 0 has the parent -1."""

    def __init__(self, program: "Program", idx: int, parent_idx: int = -1) -> None:
        self.program, self.idx, self.parent_idx = program, idx, parent_idx
        self.forward_block_idx = -1
        self.vars: dict[str, Variable] = {}
        self.ops: list[Operator] = []

    # --- variables ---------------------------------------------------------------------------

    def var(self, name: str) -> Variable:
        """Returns a variable of this block.

        Raises:
            TypeError: the name is not a string.
            ValueError: there is no such variable.
        """
        check_type(name, "a variable's name", str)
        if name not in self.vars:
            raise mistake(f"block {self.idx} has no variable '{name}'", self._near(name))
        return self.vars[name]

    def has_var(self, name: str) -> bool:
        return name in self.vars

    def has_var_recursive(self, name: str) -> bool:
        """Whether a variable is declared in this block or an enclosing one."""
        return self._find_var_recursive(name) is not None

    def _find_var_recursive(self, name: str) -> Variable | None:
        return next((b.vars[name] for b in self._outwards() if name in b.vars), None)

    def _var_recursive(self, name: str) -> Variable:
        found = self._find_var_recursive(name)
        if found is None:
            what = f"neither block {self.idx} nor one around it has a variable '{name}'"
            raise mistake(what, self._near(name))
        return found

    def create_var(self, **declared: Any) -> Variable:
        """Declares a variable, or returns the one of that name if the declarations agree.

        Raises:
            ValueError: the name is already declared differently.
        """
        made = Variable(self, **declared)
        known = self.vars.get(made.name)
        if known is not None:
            check_redeclaration(known, made, declared)
            return known
        return self._declare(made)

    def create_parameter(self, **declared: Any) -> Parameter:
        """Declares a parameter in block 0, regardless of the current block.

        Raises:
            ValueError: the name is already declared differently.
        """
        home = self.program.global_block()
        made = Parameter(home, **declared)
        known = home.vars.get(made.name)
        if known is not None:
            check_redeclaration(known, made, {**declared, "persistable": True})
        home._declare(made)
        return made

    def all_parameters(self) -> list[Parameter]:
        return [v for v in self.vars.values() if isinstance(v, Parameter)]

    def iter_parameters(self) -> Iterator[Parameter]:
        return iter(self.all_parameters())

    def _declare(self, made: Variable) -> Variable:
        self.vars[made.name] = made
        self.program.version += 1
        return made

    def _clone_variable(self, var: Variable, force_persistable: bool = True) -> Variable:
        """Declares a copy of another program's variable, persistable by default."""
        check_type(var, "what is cloned", Variable)
        made = Variable(self, type=var.type, name=var.name, dtype=var.dtype)
        made.sizes, made.lod_level = var.sizes, var.lod_level
        is_tensor = var.type not in {VarType.STEP_SCOPES, VarType.RAW}
        made._persistable = var.persistable or (force_persistable and is_tensor)
        made.is_data, made.need_check_feed = var.is_data, var.need_check_feed
        return self._declare(made)

    def _rename_var(self, name: str, new_name: str) -> Variable:
        """Renames a variable, also in the operators of this block, but not in `op_role_var`."""
        renamed = self.var(name)
        if new_name in self.vars:
            raise mistake(f"block {self.idx} has a variable '{new_name}' already")
        renamed.name = new_name
        self.vars = {v.name: v for v in self.vars.values()}
        for op in self.ops:
            op._rename_input(name, new_name)
            op._rename_output(name, new_name)
        return renamed

    def _remove_var(self, name: str) -> None:
        del self.vars[self.var(name).name]
        self.program.version += 1

    # --- operators ---------------------------------------------------------------------------

    def append_op(
        self,
        type: str,
        inputs: Slots = None,
        outputs: Slots = None,
        attrs: Mapping[str, Any] | None = None,
        stop_gradient: bool = False,
    ) -> Operator:
        """Appends an operator and infers the undeclared shapes of its outputs.

        Args:
            type: the operator type.
            inputs: variables or their names, one or many, by slot.
            outputs: as `inputs`.
            attrs: attributes; one whose value is None is ignored.
            stop_gradient: ignored; only fluid's eager mode used it.

        Raises:
            ProgramError: the type is unknown, or does not accept these arguments.
        """
        del stop_gradient
        return self._insert_op(len(self.ops), type, inputs=inputs, outputs=outputs, attrs=attrs)

    def _prepend_op(self, type: str, **parts: Unpack[OpParts]) -> Operator:
        return self._insert_op(0, type, **parts)

    def _insert_op(self, index: int, type: str, **parts: Unpack[OpParts]) -> Operator:
        op = self._made(type, **parts)
        if schema_of(type) is None and type not in _WITHOUT_SHAPES:
            self._check_known(op)
        self._infer(op)
        return self._put(index, op)

    def _insert_op_without_sync(self, index: int, type: str, **parts: Unpack[OpParts]) -> Operator:
        """Inserts an operator whose outputs are fully declared."""
        return self._put(index, self._made(type, **parts))

    def _remove_op(self, index: int) -> None:
        del self.ops[index]
        self.program.version += 1

    def _slice_ops(self, start: int, end: int) -> list[Operator]:
        return self.ops[start:end]

    def _made(self, type: str, **parts: Unpack[OpParts]) -> Operator:
        attrs = parts.get("attrs") or {}
        given = {
            ROLE: self.program.op_role,
            ROLE_VAR: list(self.program.op_role_var),
            NAME_SCOPE: current_name_scope(),
            DEVICE: current_device(),
            **{name: value for name, value in attrs.items() if value is not None},
        }
        source = line_of_caller(nested=True) or Source()
        named = names_by_slot(type, parts.get("inputs")), names_by_slot(type, parts.get("outputs"))
        return Operator(self, type, *named, given, source)

    def _put(self, index: int, op: Operator) -> Operator:
        self.ops.insert(index, op)
        self.program.version += 1
        return op

    def _check_known(self, op: Operator) -> None:
        known = known_ops()
        if op.type not in known:
            near = difflib.get_close_matches(op.type, known)
            hint = f"did you mean {', '.join(near)}?" if near else None
            what = f"operator '{op.type}' has not been registered"
            raise ProgramError(what, source=op.source, hint=hint)

    def _infer(self, op: Operator) -> None:
        """Infers the undeclared shapes of an operator's outputs."""
        written = [name for name in op.output_arg_names if name != EMPTY]
        unknown = [n for n in written if self._var_recursive(n).sizes is None]
        if not unknown or schema_of(op.type) is None or "sub_block" in op.attrs:
            return
        if op.type in _SIZED_BY_VALUES:
            return
        made = ir_operator(op)
        read = {name: self._var_recursive(name) for name in made.reads}
        try:
            found = infer_sizes(made, read)
        except ProgramError:
            if not join_rows(self.program, read.values()):
                raise
            found = infer_sizes(made, read)
        for name, sizes in zip(made.writes, found, strict=True):
            variable = self._var_recursive(name)
            if variable.sizes is None:
                variable.sizes = sizes
                variable.lod_level = _lod_level(sizes, read.values())

    # --- the block as a whole ----------------------------------------------------------------

    def _copied(self, program: "Program") -> "Block":
        """Returns a copy in another program; attributes still refer to the old program's blocks."""
        made = copy.copy(self)
        made.program = program
        made.vars = {name: v._copied(made) for name, v in self.vars.items()}
        made.ops = [op._copied(made) for op in self.ops]
        return made

    def _outwards(self) -> Iterator["Block"]:
        block = self
        yield block
        while block.parent_idx >= 0:
            block = self.program.block(block.parent_idx)
            yield block

    def _near(self, name: str) -> str | None:
        near = difflib.get_close_matches(name, [n for b in self._outwards() for n in b.vars])
        return f"did you mean {', '.join(near)}?" if near else None

    def to_string(self, throw_on_error: bool, with_details: bool = False) -> str:
        """Returns the block as text: its variables, then its operators.

        Args:
            throw_on_error: raise if the shape of a variable is unknown.
            with_details: print more about variables, and the attributes of operators.

        Raises:
            TypeError: an argument is not a bool.
            ValueError: a shape is unknown and `throw_on_error` is set.
        """
        check_type(throw_on_error, "throw_on_error", bool)
        check_type(with_details, "with_details", bool)
        lines = [v.to_string(throw_on_error, with_details) for v in self.vars.values()]
        shown = [op.to_string(throw_on_error, with_details) for op in self.ops]
        head = f"block {self.idx} in {self.parent_idx}"
        return "\n  ".join([head, *lines, *shown])

    def __str__(self) -> str:
        return self.to_string(throw_on_error=False)


def _lod_level(sizes: Sequence[Size], read: Iterable[Variable]) -> int:
    """Returns the LoD level of the input with as many rows, whose sequences the output shares."""
    levels = (v.lod_level for v in read if v.lod_level and v.sizes and v.sizes[:1] == sizes[:1])
    return next(levels, 0)
