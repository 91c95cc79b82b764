"""Does what a trainer's program says the host does: cuts, sends, receives, joins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator, Program, Variable
from jaxfleet.lower.host_arrays import all_to_device, host_type, to_host
from jaxfleet.ps.aligned import aligned_copy, is_aligned
from jaxfleet.ps.buffers import Buffers
from jaxfleet.ps.client import Client
from jaxfleet.ps.collectives import asked_for, finished
from jaxfleet.ps.compression import Residuals
from jaxfleet.ps.messages import Kind, Plain, Tensor
from jaxfleet.ps.parcels import Parcels
from jaxfleet.ps.requests import Request


@dataclass
class Copies:
    """Counts arrays that travelled, and the copies that were made of them in this process.

    Attributes:
        sent: arrays that went to servers.
        sent_copies: copies on their way from the device to the network.
        received: arrays that came.
        received_copies: copies on their way from the network to the device.
    """

    sent: int = 0
    sent_copies: int = 0
    received: int = 0
    received_copies: int = 0

    def __add__(self, other: "Copies") -> "Copies":
        return Copies(
            self.sent + other.sent,
            self.sent_copies + other.sent_copies,
            self.received + other.received,
            self.received_copies + other.received_copies,
        )


@dataclass
class Host:
    """What the operators of a program run on.

    Attributes:
        program: it.
        client: the lines to the servers.
        buffers: where what comes goes.
        ahead: how many more steps are computed with what is received, besides the next; servers
            that bound how old it may be then look at the last of them.
        copies: what was copied.
        push_rows: sends a gradient of which there are some rows, by its name.
        residuals: what compressed gradients have still to say.
    """

    program: Program
    client: Client
    push_rows: Callable[[str, np.ndarray], None] | None = None
    ahead: int = 0
    buffers: Buffers = field(default_factory=Buffers)
    copies: Copies = field(default_factory=Copies)
    residuals: Residuals = field(default_factory=Residuals)

    def variable(self, name: str) -> Variable:
        """Returns what a name means in the program."""
        return self.program.lookup(name)


@dataclass
class HostRun:
    """Does the operators of the host that stand together: asks for all, then waits for all.

    Attributes:
        host: what they run on.
        ops: they.
        values: what names hold; on the device, or on the host.
        targets: where parts that come from servers go.
        joined: buffers that parts come into, by the name that will hold them.
        parcels: gradients that are still to be sent.
    """

    host: Host
    ops: Sequence[Operator]
    values: dict[str, Any]
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    joined: dict[str, np.ndarray] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    answers: dict[str, np.ndarray] = field(default_factory=dict)
    parcels: Parcels = field(init=False)

    def __post_init__(self) -> None:
        self.parcels = Parcels(self.host.client)

    def run(self) -> None:
        """Does them all."""
        kinds = {op.type for op in self.ops}
        client = self.host.client
        with client.spans.span("send", step=client.step):
            self._send_all()
            self.parcels.send()
        if "send_barrier" in kinds:
            client.begin_step()
        collectives = [op for op in self.ops if op.type.startswith("c_")]
        self._reduce(collectives)
        if kinds & {"recv", "concat"}:
            self._receive()
        if self.requests:
            self.host.client.wait(self.requests)
            self.requests.clear()  # they hold this, and so all arrays of the step
        self._finish(collectives)

    def ask(self) -> None:
        """Asks for what is to be received, and waits for nothing."""
        self._receive()

    @property
    def is_answered(self) -> bool:
        """Whether all is there that was asked for."""
        return all(request.is_done for request in self.requests)

    def finish(self) -> dict[str, Any]:
        """Waits for what was asked for; returns it, on the device, by name."""
        self.host.client.wait(self.requests)
        self.requests.clear()
        self._finish(())
        return self.values

    def _send_all(self) -> None:
        for op in self.ops:
            if op.type == "split_byref":
                self._split(op)
            elif op.type == "send":
                self._send(op)
            elif op.type == "send_rows":
                assert self.host.push_rows is not None
                self.host.push_rows(op.reads[0], self._on_host(op.reads[0]))

    def _split(self, op: Operator) -> None:
        whole, start = self._on_host(op.reads[0]), 0
        for name in op.writes:
            rows = self.host.variable(name).shape[0]
            assert isinstance(rows, int)
            self.values[name] = whole[start : start + rows]
            start += rows

    def _send(self, op: Operator) -> None:
        for name, server in zip(op.reads, self._servers(op), strict=True):
            self._push(server, *self.encoded(op, self._wire_name(name), self._on_host(name)))

    def encoded(self, op: Operator, name: str, array: np.ndarray) -> tuple[Tensor, Plain]:
        """Returns what travels of a gradient, and how it is encoded; None where it is not."""
        method, least = op.attrs.get("compress"), op.attrs.get("min_elements")
        if method is None or array.dtype != np.float32 or array.size < int(str(least)):
            return Tensor(name, array), None
        ratio = float(str(op.attrs.get("ratio", 1.0)))
        data = self.host.residuals.encode(name, array, str(method), ratio)
        return Tensor(name, data), [str(method), *array.shape]

    def _push(self, server: int, tensor: Tensor, how: Plain) -> None:
        """Sends a gradient, now or with others."""
        self.parcels.add(server, tensor, how)

    def _reduce(self, ops: Sequence[Operator]) -> None:
        asked: dict[tuple[int, str], list[Tensor]] = {}
        for op in ops:
            for name, output in zip(op.reads, op.writes, strict=True):
                value = self._on_host(name)
                key = (self._server(op.attrs["endpoint"]), asked_for(op, value.dtype))
                asked.setdefault(key, []).append(Tensor(output, value))
        for (server, how), tensors in asked.items():
            names = [tensor.name for tensor in tensors]
            self.requests.append(
                self.host.client.request(
                    server,
                    Kind.REDUCE,
                    body={"key": f"{how} {names[0]}", "how": how},
                    tensors=tensors,
                    wants=names,
                    sink=self._answer,
                )
            )

    def _answer(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.answers[tensor.name] = aligned_copy(tensor.array)
        self.host.copies.received += len(tensors)
        self.host.copies.received_copies += len(tensors)

    def _receive(self) -> None:
        receives = [op for op in self.ops if op.type == "recv"]
        for op in (op for op in self.ops if op.type == "concat"):
            self._prepare(op)
        by_server: dict[int, list[str]] = {}
        for op in receives:
            for name, server in zip(op.writes, self._servers(op), strict=True):
                by_server.setdefault(server, []).append(name)
        lacking = self.targets.keys() - {name for op in receives for name in op.writes}
        if lacking:  # else what joins them would hold any bytes
            what = f"{', '.join(sorted(lacking))}: joined apart from where they are received"
            raise ProgramError(what)
        until: dict[str, Plain] = {}
        if self.host.ahead:
            until["until"] = self.host.client.step + self.host.ahead
        for server, names in by_server.items():
            body: dict[str, Plain] = {"names": list(names), **until}
            self.requests.append(
                self.host.client.request(server, Kind.PULL, body=body, wants=names, sink=self._take)
            )

    def _prepare(self, op: Operator) -> None:
        """Makes the buffer of what is joined, so that its parts come where they belong."""
        whole, start = self._buffer(op.writes[0]), 0
        for name in op.reads:
            rows = self.host.variable(name).shape[0]
            assert isinstance(rows, int)
            self.targets[name] = whole[start : start + rows]
            start += rows
        self.joined[op.writes[0]] = whole

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Takes values that came; those that are whole go to the device while others travel."""
        whole = {}
        for tensor in tensors:
            if tensor.name in self.targets:
                self._copy(tensor, self.targets[tensor.name])
            else:
                whole[tensor.name] = self._readable(tensor)
        self.host.copies.received += len(tensors)
        self._to_device(whole)

    def _readable(self, tensor: Tensor) -> np.ndarray:
        """Returns what came as it is where the device can read it there, or else a copy."""
        array, held = tensor.array, host_type(self.host.variable(tensor.name))
        if is_aligned(array) and (array.shape, array.dtype) == (held.shape, held.dtype):
            return array
        buffer = self._buffer(tensor.name)
        self._copy(tensor, buffer)
        return buffer

    def _copy(self, tensor: Tensor, target: np.ndarray) -> None:
        np.copyto(target, tensor.array, casting="no")
        self.host.copies.received_copies += 1

    def _finish(self, collectives: Sequence[Operator]) -> None:
        me = self.host.client.me
        came = dict(self.joined)
        for op in collectives:
            for name in op.writes:
                answer = self.answers[name]
                came[name] = finished(op, answer, trainer=me.trainer, trainers=me.trainers)
        self._to_device(came)

    def _to_device(self, arrays: Mapping[str, np.ndarray]) -> None:
        typed = [(array, self.host.variable(name).dtype) for name, array in arrays.items()]
        for name, (value, copied) in zip(arrays, all_to_device(typed), strict=True):
            self.values[name] = value
            self.host.copies.received_copies += copied

    def _buffer(self, name: str) -> np.ndarray:
        held = host_type(self.host.variable(name))
        return self.host.buffers.take(held.shape, held.dtype)

    def _on_host(self, name: str) -> np.ndarray:
        value, copied = self.values[name], False
        if not isinstance(value, np.ndarray):
            value, copied = to_host(value)
        self.host.copies.sent += 1
        self.host.copies.sent_copies += copied
        found: np.ndarray = value
        return found

    def _wire_name(self, name: str) -> str:
        return name.removesuffix(f".trainer_{self.host.client.me.trainer}")

    def _servers(self, op: Operator, attr: str = "epmap") -> list[int]:
        endpoints = op.attrs[attr]
        assert isinstance(endpoints, tuple)
        return [self._server(endpoint) for endpoint in endpoints]

    def _server(self, endpoint: object) -> int:
        return self.host.client.me.endpoints.index(str(endpoint))
