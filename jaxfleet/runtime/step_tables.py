"""Tables of a step without servers: host work around the compiled function."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxfleet.ir import Kind, Program
from jaxfleet.lower import Interface
from jaxfleet.tables.access import TableAccess
from jaxfleet.tables.host_lookup import HostTables, Joined, on_device, row_count


@dataclass(frozen=True)
class StepTables:
    """A program's tables, and the part of it that devices run.

    Attributes:
        host: the host's work.
        program: for devices.
        interface: of that program: the batch without keys, followed by the host's inputs; the
            metrics, followed by the host's outputs.
    """

    host: HostTables
    program: Program
    interface: Interface
    _names: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, interface: Interface) -> "StepTables | None":
        """Returns the tables of a transpiled program, or None without any."""
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
        """Returns the device inputs for a batch's leaves, and its keys."""
        values = dict(zip(self._names, data, strict=True))
        arrays, _, joined = self.host.bring(access, values)
        values.update(arrays)
        return [values[name] for name in self.interface.batch], joined

    def types(self, data: Sequence[Any]) -> list[Any]:
        """Returns the types of the device inputs for a batch of unique keys."""
        values = dict(zip(self._names, data, strict=True))
        for each in self.host.lookups:
            shapes = [np.shape(values[name]) for name in each.keys]
            count = row_count(sum(map(math.prod, shapes)))
            values[each.rows] = jax.ShapeDtypeStruct((count, each.dim), np.float32)
            for name, shape in zip(each.index, shapes, strict=True):
                values[name] = jax.ShapeDtypeStruct(shape, np.int32)
        return [values[name] for name in self.interface.batch]

    def hand_over(self, access: TableAccess, joined: Joined, fetched: list[Any]) -> list[Any]:
        known = len(fetched) - sum(each.gradient is not None for each in self.host.lookups)
        gradients = iter(fetched[known:])
        for each in self.host.lookups:
            if each.gradient is not None:
                self.host.hand_over(access, each, joined, np.asarray(next(gradients)))
        return fetched[:known]
