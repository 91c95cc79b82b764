"""Runs the host operators of a trainer's program: split, send, receive, concat, collectives.

For a collective, a server reduces the arrays of all trainers in their order, or returns all of
them. The rest of the collective runs here, identically on every trainer.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator, Program, Variable
from jaxfleet.lower.host_transfer import all_to_device, host_type, to_host
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.gradient_encoding import Residuals
from jaxfleet.transport.buffers import BufferPool, aligned_copy, is_aligned
from jaxfleet.transport.messages import Kind, Plain, Tensor

_BATCH_BYTES = 8 << 20  # of a push: a server can process one while the next is in flight
_BATCH_ARRAYS = 1024  # default limit of a message: 4096
_REDUCTIONS = frozenset({"sum", "max", "min", "prod", "and", "or", "xor"})


def server_reduction(op: Operator, dtype: np.dtype[Any]) -> str:
    """Returns the reduction that a server performs for a collective on arrays of a dtype."""
    how = op.type.removeprefix("c_allreduce_")
    if how in _REDUCTIONS:
        return how
    if how == "avg":
        return "sum" if _is_inexact(dtype) else "max"
    if op.type == "c_reducescatter":
        return "sum"
    if op.type in {"c_allgather", "c_alltoall"}:
        return "gather"
    what = f"'{op.type}' is not a collective that parameter servers do"
    raise ProgramError(what, op=op, hint="train with mode='collective'")


def finish_collective(
    op: Operator, answer: np.ndarray, *, trainer: int, trainers: int
) -> np.ndarray:
    """Returns a collective's output from the server's reply.

    The reply for `gather` has the trainers along a new axis 0.
    """
    if op.type == "c_allreduce_avg" and _is_inexact(answer.dtype):
        return np.asarray(answer / np.asarray(trainers, answer.dtype), answer.dtype)
    if op.type == "c_reducescatter":
        return np.split(answer, trainers, _axis(op, "axis"))[trainer]
    if op.type == "c_allgather":
        return np.concatenate(list(answer), _axis(op, "axis"))
    if op.type == "c_alltoall":
        parts = [np.split(value, trainers, _axis(op, "axis"))[trainer] for value in answer]
        return np.concatenate(parts, _axis(op, "from_axis"))
    return answer


def _axis(op: Operator, name: str) -> int:
    axis = op.attrs[name]
    assert isinstance(axis, int)
    return axis


def _is_inexact(dtype: np.dtype[Any]) -> bool:
    return np.issubdtype(dtype, np.inexact) or dtype.kind == "V" or dtype.name.startswith("bfloat")


@dataclass
class Copies:
    """Counts of arrays transferred, and of their copies between the device and the network."""

    sent: int = 0
    sent_copies: int = 0
    received: int = 0
    received_copies: int = 0

    def __add__(self, other: "Copies") -> "Copies":
        return Copies(*map(operator.add, astuple(self), astuple(other)))


@dataclass
class PushBatch:
    """Gradients sent to a server in one message."""

    tensors: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    encoded: dict[str, Plain] = field(default_factory=dict)

    def takes(self, tensor: Tensor) -> bool:
        """Whether there is room; an empty batch takes any array."""
        has_room = self.bytes + tensor.array.nbytes <= _BATCH_BYTES
        return not self.tensors or (has_room and len(self.tensors) < _BATCH_ARRAYS)

    def add(self, tensor: Tensor, how: Plain) -> None:
        self.tensors.append(tensor)
        self.bytes += tensor.array.nbytes
        if how is not None:
            self.encoded[tensor.name] = how


@dataclass
class PushBatcher:
    """Gradients still to be sent, by server."""

    client: Client
    _waiting: dict[int, PushBatch] = field(default_factory=dict)

    def add(self, server: int, tensor: Tensor, how: Plain) -> None:
        parcel = self._waiting.setdefault(server, PushBatch())
        if not parcel.takes(tensor):
            self.client.push(server, parcel.tensors, parcel.encoded)
            self._waiting[server] = parcel = PushBatch()
        parcel.add(tensor, how)

    def send(self) -> None:
        for server, parcel in self._waiting.items():
            self.client.push(server, parcel.tensors, parcel.encoded)
        self._waiting.clear()


@dataclass
class Host:
    """Context of a program's host operators.

    Received values are used by `ahead` steps beyond the next; servers that bound staleness check
    the last of them.
    """

    program: Program
    client: Client
    push_rows: Callable[[str, np.ndarray], None] | None = None
    ahead: int = 0
    buffers: BufferPool = field(default_factory=BufferPool)
    copies: Copies = field(default_factory=Copies)
    residuals: Residuals = field(default_factory=Residuals)

    def variable(self, name: str) -> Variable:
        return self.program.lookup(name)


@dataclass
class HostRun:
    """Runs consecutive host operators: sends all requests, then waits for all.

    Attributes:
        values: by name, on the device or the host.
        confirms: waits until servers have applied the step to all tables, too.
        targets: where parts from servers are received.
        joined: the buffers of these parts, by the name of the result.
    """

    host: Host
    ops: Sequence[Operator]
    values: dict[str, Any]
    confirms: bool = False
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    joined: dict[str, np.ndarray] = field(default_factory=dict)
    requests: list[PendingRequest] = field(default_factory=list)
    answers: dict[str, np.ndarray] = field(default_factory=dict)
    parcels: PushBatcher = field(init=False)

    def __post_init__(self) -> None:
        self.parcels = PushBatcher(self.host.client)

    def run(self) -> None:
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
        if self.confirms:
            self.requests += client.confirm()
        if self.requests:
            self.host.client.wait(self.requests)
            self.requests.clear()  # they reference this run, and so all arrays of the step
        self._finish(collectives)

    def ask(self) -> None:
        self._receive()

    @property
    def is_answered(self) -> bool:
        return all(request.is_done for request in self.requests)

    def finish(self) -> dict[str, Any]:
        """Waits for the requested values; returns them by name, on the device."""
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
        self.values.update(self._slices(self._on_host(op.reads[0]), op.writes))

    def _slices(self, whole: np.ndarray, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        start = 0
        for name in names:
            rows = self.host.variable(name).shape[0]
            assert isinstance(rows, int)
            yield name, whole[start : start + rows]
            start += rows

    def _send(self, op: Operator) -> None:
        for name, server in zip(op.reads, self._servers(op), strict=True):
            self._push(server, *self.encoded(op, self._wire_name(name), self._on_host(name)))

    def encoded(self, op: Operator, name: str, array: np.ndarray) -> tuple[Tensor, Plain]:
        """Returns a gradient's message tensor and its encoding; None if it is not encoded."""
        method, least = op.attrs.get("compress"), op.attrs.get("min_elements")
        if method is None or array.dtype != np.float32 or array.size < int(str(least)):
            return Tensor(name, array), None
        ratio = float(str(op.attrs.get("ratio", 1.0)))
        data = self.host.residuals.encode(name, array, str(method), ratio)
        return Tensor(name, data), [str(method), *array.shape]

    def _push(self, server: int, tensor: Tensor, how: Plain) -> None:
        self.parcels.add(server, tensor, how)

    def _reduce(self, ops: Sequence[Operator]) -> None:
        asked: dict[tuple[int, str], list[Tensor]] = {}
        for op in ops:
            for name, output in zip(op.reads, op.writes, strict=True):
                value = self._on_host(name)
                key = (self._server(op.attrs["endpoint"]), server_reduction(op, value.dtype))
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
        if lacking:  # otherwise part of the buffer would be uninitialized
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
        """Allocates the buffer of a concat, so that its parts are received in place."""
        whole = self.joined[op.writes[0]] = self._buffer(op.writes[0])
        self.targets.update(self._slices(whole, op.reads))

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Takes received values; whole ones go to the device while others are in flight."""
        whole = {}
        for tensor in tensors:
            if tensor.name in self.targets:
                self._copy(tensor, self.targets[tensor.name])
            else:
                whole[tensor.name] = self._readable(tensor)
        self.host.copies.received += len(tensors)
        self._to_device(whole)

    def _readable(self, tensor: Tensor) -> np.ndarray:
        """Returns a received array if the device can read it in place, otherwise a copy."""
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
                came[name] = finish_collective(op, answer, trainer=me.trainer, trainers=me.trainers)
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
