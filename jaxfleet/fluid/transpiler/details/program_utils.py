"""Transpiler utilities: operators of a program, its text, union-find, waiting for ports."""

import socket
import sys
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import TextIO

from jaxfleet.errors import ConnectError, ProgramError
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import ROLE, ROLE_VAR, Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable


class UnionFind:
    """Disjoint sets, with path halving (Tarjan and van Leeuwen, 1984)."""

    def __init__(self, elements: Iterable[Hashable] | None = None) -> None:
        self._parents: dict[Hashable, Hashable] = {x: x for x in elements or ()}

    def find(self, x: Hashable) -> Hashable | None:
        """Returns the representative of an element's set; None for an unknown element."""
        if x not in self._parents:
            return None
        while self._parents[x] != x:
            self._parents[x] = self._parents[self._parents[x]]
            x = self._parents[x]
        return x

    def union(self, x: Hashable, y: Hashable) -> None:
        """Joins the sets of two elements, adding unknown ones."""
        for element in (x, y):
            self._parents.setdefault(element, element)
        of_x, of_y = self.find(x), self.find(y)
        assert of_x is not None
        self._parents[of_x] = of_y

    def is_connected(self, x: Hashable, y: Hashable) -> bool:
        """Whether two elements are in one set."""
        return x in self._parents and self.find(x) == self.find(y)


_CONNECT_S = 2.0  # fluid's
_PAUSE_S = 0.5
_DEADLINE_S = 300.0  # fluid's job waits for ever; a wrong endpoint should be reported


def wait_server_ready(endpoints: Sequence[str], deadline_s: float = _DEADLINE_S) -> None:
    """Waits until a process listens at each endpoint, `host:port`.

    Raises:
        ConnectError: no process listened at an endpoint in time.
    """
    who, hint = "servers", "start the servers, or look why they ended"
    end = time.monotonic() + deadline_s
    waiting = _silent(endpoints)
    if waiting:
        shown = f"waiting up to {deadline_s:g} s for {who}: {', '.join(waiting)}"
        sys.stderr.write(f"{shown} ({hint})\n")
    while waiting:
        if time.monotonic() > end:
            what = f"{who}: nothing listens at {', '.join(waiting)} after {deadline_s:g} s"
            raise ConnectError(what, hint=hint)
        time.sleep(_PAUSE_S)
        waiting = _silent(waiting)


def _silent(endpoints: Sequence[str]) -> list[str]:
    return [endpoint for endpoint in endpoints if not _listens(endpoint)]


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            return True
    except OSError:
        return False


_NOT_SHOWN = (ROLE_VAR, "op_callstack")


def delete_ops(block: Block, ops: Iterable[Operator]) -> None:
    """Removes operators from a block.

    Raises:
        ProgramError: an operator is not in the block; none is removed then.
    """
    wanted = list(ops)
    strange = [op for op in wanted if not any(op is known for known in block.ops)]
    if strange:
        raise ProgramError(f"block {block.idx} has no such operator", op=strange[0])
    for op in wanted:
        block._remove_op(next(at for at, known in enumerate(block.ops) if known is op))


def find_op_by_input_arg(block: Block, arg_name: str) -> int:
    """Returns the index of the first operator that reads a variable, or -1."""
    return _find(range(len(block.ops)), [arg_name in op.input_arg_names for op in block.ops])


def find_op_by_output_arg(block: Block, arg_name: str, reverse: bool = False) -> int:
    """Returns the index of the first (or last) operator that writes a variable, or -1."""
    places = range(len(block.ops))
    found = [arg_name in op.output_arg_names for op in block.ops]
    return _find(reversed(places) if reverse else places, found)


def program_to_code(
    prog: Program, fout: TextIO | None = None, skip_op_callstack: bool = True
) -> None:
    """Prints a program to a file, standard output unless given.

    The script's source line of each operator is omitted unless `skip_op_callstack` is False.
    """
    for block in prog.blocks:
        block_to_code(block, block.idx, fout, skip_op_callstack)


def block_to_code(
    block: Block, block_idx: int, fout: TextIO | None = None, skip_op_callstack: bool = False
) -> None:
    """Prints a block."""
    lines = [f"{{ // block {block_idx}"]
    lines += [f"    {variable_to_code(variable)}" for variable in block.vars.values()]
    lines += [f"    {op_to_code(op, skip_op_callstack)}" for op in block.ops]
    (sys.stdout if fout is None else fout).write("\n".join([*lines, "}", ""]))


def op_to_code(op: Operator, skip_op_callstack: bool = True) -> str:
    """Returns an operator as a line of text."""
    shown = {name: value for name, value in op.all_attrs().items() if name not in _NOT_SHOWN}
    attrs = ", ".join(f"{name} = {_shown(value)}" for name, value in sorted(shown.items()))
    about = f", {ROLE_VAR} = {op.attr(ROLE_VAR)}" if op.attr(ROLE_VAR) else ""
    where = "" if skip_op_callstack else f"  // {op.source.where()}"
    return f"{op} [{ROLE} = {op.attr(ROLE)}{about}] {{{attrs}}}{where}"


def variable_to_code(var: Variable) -> str:
    """Returns a variable as a line of text."""
    return f"{var} ({var.type})"


def _find(places: Iterable[int], found: Sequence[bool]) -> int:
    return next((place for place in places if found[place]), -1)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_shown(one) for one in value)}]" if _has_block(value) else str(value)
    return f"block {value.idx}" if isinstance(value, Block) else str(value)


def _has_block(values: list[object]) -> bool:
    return any(isinstance(one, Block) for one in values)
