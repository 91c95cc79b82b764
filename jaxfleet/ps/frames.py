"""What a message is sent as: frames, how long they are, and the error that they are none."""

from typing import TypeAlias

from jaxfleet.errors import JaxfleetError

Frame: TypeAlias = bytes | memoryview


class FrameError(JaxfleetError, ValueError):
    """What came is no message, or what is to be sent cannot be one.

    Args:
        what: what is wrong, with the values.
        number: the request's number, where the header got that far.
        hint: what the user can do.
    """

    def __init__(self, what: str, *, number: int = 0, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.number = number


def frame_bytes(frame: Frame) -> int:
    """Returns how many bytes a frame has."""
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def check_at_most(what: str, size: int, limit: int) -> None:
    """Raises FrameError where a size is larger than its limit."""
    if size > limit:
        raise FrameError(f"{what} is {size}, and may be {limit}", hint="set Limits higher")
