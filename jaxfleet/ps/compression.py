"""Makes gradients smaller on their way to servers, and gives them back there.

What a message loses of a gradient is added to the next one (error feedback: Seide et al., 1-bit
stochastic gradient descent, 2014; Stich et al., Sparsified SGD with memory, 2018), so nothing is
lost for good. An encoded gradient is one array of bytes, and `[method, *shape]` in the message.

| method | bytes for n elements | what travels |
| --- | --- | --- |
| `fp16` | 2 n | each element as a float16, held within its range |
| `int8` | n + n / 256 | each element in 255 steps of the greatest among the 1024 around it |
| `topk` | 8 k | the k greatest, each with its place |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

METHODS = ("fp16", "int8", "topk")
_CHUNK = 1024  # elements that share a scale
_MOST_FP16 = float(np.finfo(np.float16).max)


@dataclass
class Residuals:
    """What messages did not say yet of each gradient, by its name."""

    _left: dict[str, np.ndarray] = field(default_factory=dict)

    def encode(self, name: str, array: np.ndarray, method: str, ratio: float) -> np.ndarray:
        """Returns a gradient with what was left of those before it, as bytes.

        Args:
            name: whose gradient it is.
            array: float32 of any shape; it stays as it is.
            method: one of `METHODS`.
            ratio: `topk`: the share of elements that travel.

        Returns:
            uint8[bytes].
        """
        left = self._left.get(name)
        whole = array if left is None else array + left
        made = _encode(whole.reshape(-1), method, ratio)
        rest = whole - decode(made, method, whole.shape)
        # What is not finite would stay for ever; it was sent, and the server has its own rule.
        self._left[name] = np.where(np.isfinite(rest), rest, np.float32(0))
        return made


def decode(data: np.ndarray, method: str, shape: Sequence[int]) -> np.ndarray:
    """Returns an encoded gradient.

    Args:
        data: uint8[bytes].
        method: one of `METHODS`.
        shape: of the result.

    Returns:
        float32 of that shape.

    Raises:
        ValueError: the bytes are not those of such an array.
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


def decoded(
    arrays: Mapping[str, np.ndarray], how: Mapping[str, object], shapes: Mapping[str, Sequence[int]]
) -> dict[str, np.ndarray]:
    """Returns the arrays of a message, those that are encoded decoded.

    Args:
        arrays: as they came.
        how: method and shape of those that are encoded.
        shapes: what a receiver takes by each name: nothing else is made room for.

    Raises:
        ValueError: an array is not as the message says.
    """
    found = dict(arrays)
    for name, entry in how.items():
        if name not in arrays or name not in shapes or not isinstance(entry, list) or not entry:
            raise ValueError(f"'{name}' is said to be encoded, and is not there")
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
    with np.errstate(invalid="ignore"):  # a chunk that has a NaN has a scale that says so
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
