"""Stand-ins for state leaves whose values are not in this process."""

from typing import Any, NoReturn, Self

from jaxfleet.errors import FeedError


class Handle:
    """A leaf of the state that lives on servers; it holds no memory, and cannot be read.

    Attributes:
        name: the variable's.
        shape: of ints.
        dtype: numpy's, or jax's dtype of random keys.
        servers: the servers that hold it.
    """

    __slots__ = ("__weakref__", "dtype", "name", "servers", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any, servers: str) -> None:
        self.name, self.shape, self.dtype, self.servers = name, shape, dtype, servers

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def again(self) -> Self:
        return type(self)(self.name, self.shape, self.dtype, self.servers)

    def __repr__(self) -> str:
        return f"<'{self.name}' {self.dtype}{list(self.shape)} on {self.servers}>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        what = f"'{self.name}' lives on {self.servers} and cannot be read here"
        raise FeedError(what, hint="state = step.pull(state) brings it to this process")

    # jax checks for it before it reads an argument; its own error would not mention servers.
    __jax_array__ = property(_refuse)
    __array__ = __float__ = __int__ = __bool__ = __index__ = _refuse
    __getitem__ = __iter__ = __len__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    # Common array attributes in scripts: an AttributeError would not show where the value is.
    sum = mean = max = min = std = var = prod = any = all = argmax = argmin = _refuse
    astype = reshape = ravel = flatten = squeeze = transpose = dot = copy = item = tolist = _refuse
    at = T = property(_refuse)
