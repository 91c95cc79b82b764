"""Encodings of gradients in messages: lossy compression with error feedback, and sparse rows.

The part of a gradient that compression loses is added to the next one (error feedback: Seide et
al., 1-bit stochastic gradient descent, 2014; Stich et al., Sparsified SGD with memory, 2018), so
nothing is lost permanently. It travels as one array of bytes, with `[method, *shape]` in the
message's body.

| method | bytes for n elements | content |
| --- | --- | --- |
| `fp16` | 2 n | each element as a float16, clipped to its range |
| `int8` | n + n / 256 | each element in 255 steps of the largest of its chunk of 1024 |
| `topk` | 8 k | the k largest, each with its index |

A sparse gradient travels as two arrays: some rows of a slice, and their numbers.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.lower import HostType
from jaxfleet.transport.messages import Tensor

METHODS = ("fp16", "int8", "topk")
_CHUNK = 1024  # elements that share a scale
_MOST_FP16 = float(np.finfo(np.float16).max)


@dataclass
class Residuals:
    """Compression errors of gradients, by name, to be added to the next one."""

    _left: dict[str, np.ndarray] = field(default_factory=dict)

    def encode(self, name: str, array: np.ndarray, method: str, ratio: float) -> np.ndarray:
        """Encodes a gradient, float32 of any shape, plus its residual; returns uint8[bytes].

        `topk` sends a fraction of the elements, `ratio`.
        """
        left = self._left.get(name)
        whole = array if left is None else array + left
        made = _encode(whole.reshape(-1), method, ratio)
        rest = whole - decode(made, method, whole.shape)
        # A nonfinite residual would stay forever; it was sent, and the server has its own check.
        self._left[name] = np.where(np.isfinite(rest), rest, np.float32(0))
        return made


def decode(data: np.ndarray, method: str, shape: Sequence[int]) -> np.ndarray:
    """Decodes uint8[bytes] to a gradient, float32 of a shape.

    Raises:
        ValueError: the bytes do not encode such an array.
    """
    count = math.prod(shape)
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1).tobytes()
    if method == "fp16":
        flat = np.frombuffer(raw, np.float16).astype(np.float32)
    elif method == "int8":
        flat = _from_int8(raw, count)
    elif method == "topk":
        flat = _from_topk(raw, count)
    else:
        raise ValueError(f"no gradient is encoded by '{method}'")
    if flat.size != count:
        raise ValueError(f"{flat.size} elements came of {count}")
    return flat.reshape(tuple(shape))


def decode_gradients(
    arrays: Mapping[str, np.ndarray], how: Mapping[str, object], shapes: Mapping[str, Sequence[int]]
) -> dict[str, np.ndarray]:
    """Decodes the encoded arrays of a message and returns all of its arrays.

    Args:
        arrays: the received arrays.
        how: method and shape of each encoded array.
        shapes: the expected shape of each name; no other memory is allocated.

    Raises:
        ValueError: an array does not match its description.
    """
    found = dict(arrays)
    for name, entry in how.items():
        if name not in arrays or name not in shapes or not isinstance(entry, list) or not entry:
            raise ValueError(f"'{name}' is listed as encoded, and is missing")
        method, *shape = entry
        if list(shapes[name]) != shape:
            raise ValueError(f"'{name}' comes with shape {shape}, not {list(shapes[name])}")
        found[name] = decode(arrays[name], str(method), shapes[name])
    return found


def _encode(flat: np.ndarray, method: str, ratio: float) -> np.ndarray:
    if method == "fp16":
        halves: np.ndarray = np.clip(flat, -_MOST_FP16, _MOST_FP16).astype(np.float16)
        return halves.view(np.uint8)
    return _to_int8(flat) if method == "int8" else _to_topk(flat, ratio)


def _to_int8(flat: np.ndarray) -> np.ndarray:
    chunks = _chunked(flat)
    scales = (np.abs(chunks).max(1, initial=0) / 127).astype(np.float32)
    with np.errstate(invalid="ignore"):  # the scale of a chunk with a NaN is NaN
        steps = np.rint(chunks / np.where(scales > 0, scales, 1)[:, None])
        values = steps.astype(np.int8).reshape(-1)[: flat.size]
    made: np.ndarray = np.concatenate([scales.view(np.uint8), values.view(np.uint8)])
    return made


def _from_int8(raw: bytes, count: int) -> np.ndarray:
    heads = 4 * -(-count // _CHUNK)
    if len(raw) != heads + count:
        raise ValueError(f"{len(raw)} bytes came of {heads + count}")
    scales = np.frombuffer(raw, np.float32, heads // 4)
    chunks = _chunked(np.frombuffer(raw, np.int8, count, heads).astype(np.float32))
    made: np.ndarray = (chunks * scales[:, None]).reshape(-1)[:count]
    return made


def _chunked(flat: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-flat.size // _CHUNK) * _CHUNK, np.float32)
    padded[: flat.size] = flat
    return padded.reshape(-1, _CHUNK)


def _to_topk(flat: np.ndarray, ratio: float) -> np.ndarray:
    k = min(flat.size, max(1, round(ratio * flat.size)))
    places = np.sort(np.argpartition(np.abs(flat), flat.size - k)[flat.size - k :])
    parts = [places.astype(np.uint32).view(np.uint8), flat[places].view(np.uint8)]
    made: np.ndarray = np.concatenate(parts)
    return made


def _from_topk(raw: bytes, count: int) -> np.ndarray:
    if len(raw) % 8:
        raise ValueError(f"{len(raw)} bytes are no places with their values")
    k = len(raw) // 8
    places = np.frombuffer(raw, np.uint32, k)
    if k > count or (k and places.max() >= count):
        raise ValueError(f"a place is beyond the {count} elements")
    made = np.zeros(count, np.float32)
    made[places] = np.frombuffer(raw, np.float32, k, 4 * k)
    return made


_NUMBERS = "@ROWS"  # suffix of the array with the numbers of a gradient's rows


@dataclass(frozen=True, eq=False)
class RowGradient:
    """A gradient of a slice that is zero except for some rows.

    Attributes:
        numbers: i32[n], distinct.
        rows: [n, ...].
        height: number of rows of the slice.
    """

    numbers: np.ndarray
    rows: np.ndarray
    height: int

    @classmethod
    def none(cls, whole: HostType) -> "RowGradient":
        return cls(
            np.empty(0, np.int32), np.empty((0, *whole.shape[1:]), whole.dtype), whole.shape[0]
        )

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.rows.nbytes

    def whole(self) -> np.ndarray:
        found = np.zeros((self.height, *self.rows.shape[1:]), self.rows.dtype)
        found[self.numbers] = self.rows
        return found


@dataclass(frozen=True)
class RowTensor(Tensor):
    """Validated rows of a pushed gradient."""

    numbers: np.ndarray
    height: int


def gradient_of(tensor: Tensor) -> np.ndarray | RowGradient:
    """Returns a pushed tensor as a gradient, dense or by rows."""
    if isinstance(tensor, RowTensor):
        return RowGradient(tensor.numbers, tensor.array, tensor.height)
    return tensor.array


def row_tensors(name: str, numbers: np.ndarray, rows: np.ndarray) -> list[Tensor]:
    """Returns the tensors of a sparse gradient: row numbers, i32[n], and rows, f32[n, ...]."""
    return [Tensor(name + _NUMBERS, numbers), Tensor(name, rows)]


def has_rows(tensors: Iterable[Tensor]) -> bool:
    """Whether some gradients are sparse."""
    return any(tensor.name.endswith(_NUMBERS) for tensor in tensors)


def fit_gradients(
    tensors: Iterable[Tensor], types: Mapping[str, HostType], by_rows: Collection[str]
) -> tuple[tuple[Tensor, ...], str | None]:
    """Returns pushed gradients in the form that blocks expect, or the reason that they do not fit.

    A sparse gradient stays sparse where its block updates only those rows. Otherwise it is made
    dense, with zeros for the missing rows, so that a server updates exactly as one process with
    dense gradients does: including rows without a look-up, if the optimizer moves them.
    """
    given = {tensor.name: tensor for tensor in tensors}
    numbers = {name: given.pop(name) for name in list(given) if name.endswith(_NUMBERS)}
    found = []
    for name, tensor in given.items():
        at = numbers.pop(name + _NUMBERS, None)
        if at is None:
            found.append(tensor)
            continue
        wanted = types.get(name)
        misfit = _misfit(at.array, tensor.array, wanted)
        if wanted is None or misfit is not None:
            return (), f"'{name}': {misfit}"
        rows = RowTensor(name, tensor.array, at.array, wanted.shape[0])
        found.append(rows if name in by_rows else Tensor(name, _whole(rows)))
    if numbers:
        return (), f"numbers of rows came without rows: {', '.join(numbers)}"
    return tuple(found), None


def _whole(rows: RowTensor) -> np.ndarray:
    return RowGradient(rows.numbers, rows.array, rows.height).whole()


def row_mismatch(numbers: np.ndarray, held: HostType) -> str | None:
    """Returns the reason that the requested rows of a slice do not exist, if so."""
    if numbers.ndim != 1 or numbers.dtype.kind != "i":
        return f"rows are asked for by {numbers.dtype}{list(numbers.shape)}"
    if not _are_there(numbers, held.shape[0]):
        return f"rows from {numbers.min()} to {numbers.max()} are asked for, of {held.shape[0]}"
    return None


def _misfit(numbers: np.ndarray, rows: np.ndarray, wanted: HostType | None) -> str | None:
    if wanted is None:
        return "there is no such gradient here"
    if numbers.ndim != 1 or numbers.dtype.kind != "i" or rows.shape[:1] != numbers.shape:
        return f"{list(rows.shape)} rows have {list(numbers.shape)} numbers"
    if rows.dtype != wanted.dtype or rows.shape[1:] != wanted.shape[1:]:
        return f"rows are {rows.dtype}{list(rows.shape)}, of {wanted.dtype}{list(wanted.shape)}"
    if not _are_there(numbers, wanted.shape[0]):
        return f"rows from {numbers.min()} to {numbers.max()}, of {wanted.shape[0]}"
    return None


def _are_there(numbers: np.ndarray, count: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < count)
