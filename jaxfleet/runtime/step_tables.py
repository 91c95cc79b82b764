"""The tables of a step that has no servers: what its host does around the compiled function."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxfleet.ir import Kind, Program
from jaxfleet.lower import Interface
from jaxfleet.tables.access import TableAccess
from jaxfleet.tables.host import HostTables, Joined, on_device, row_count


@dataclass(frozen=True)
class StepTables:
    """A program's tables, and the part of it that devices run.

    Attributes:
        host: what the host does.
        program: what devices run.
        interface: of that: the batch without keys, and then what the host brings; the metrics,
            and then what it takes.
    """

    host: HostTables
    program: Program
    interface: Interface
    _names: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, interface: Interface) -> "StepTables | None":
        """Returns the tables of a transpiled program, or None where it has none."""
        host = HostTables.of(program)
        if not host.lookups:
            return None
        made = on_device(program, host)
        known = {v.name for v in made.of_kind(Kind.DATA)}
        batch = [name for name in interface.batch if name in known]
        batch += [name for each in host.lookups for name in (each.rows, *each.index)]
        metrics = [*interface.metrics, *(x.gradient for x in host.lookups if x.gradient)]
        inside = replace(
            interface,
            batch=tuple(batch),
            metrics=tuple(metrics),
            batch_tree=jax.tree_util.tree_structure(batch),
            metrics_tree=jax.tree_util.tree_structure(metrics),
        )
        return cls(host, made, inside, interface.batch)

    def bring(self, access: TableAccess, data: Sequence[Any]) -> tuple[list[Any], Joined]:
        """Returns what devices are fed for a batch's leaves, and the keys that it has."""
        values = dict(zip(self._names, data, strict=True))
        arrays, _, joined = self.host.bring(access, values)
        values.update(arrays)
        return [values[name] for name in self.interface.batch], joined

    def types(self, data: Sequence[Any]) -> list[Any]:
        """Returns the types of what devices are fed where no key of a batch comes twice."""
        values = dict(zip(self._names, data, strict=True))
        for each in self.host.lookups:
            shapes = [np.shape(values[name]) for name in each.keys]
            count = row_count(sum(map(math.prod, shapes)))
            values[each.rows] = jax.ShapeDtypeStruct((count, each.dim), np.float32)
            for name, shape in zip(each.index, shapes, strict=True):
                values[name] = jax.ShapeDtypeStruct(shape, np.int32)
        return [values[name] for name in self.interface.batch]

    def hand_over(self, access: TableAccess, joined: Joined, fetched: list[Any]) -> list[Any]:
        """Pushes gradients, and returns the metrics without them."""
        known = len(fetched) - sum(each.gradient is not None for each in self.host.lookups)
        gradients = iter(fetched[known:])
        for each in self.host.lookups:
            if each.gradient is not None:
                self.host.hand_over(access, each, joined, np.asarray(next(gradients)))
        return fetched[:known]
