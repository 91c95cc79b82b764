"""How much a message may hold, checked before anything is allocated for it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is larger than this is no message.

    The defaults let whole models through. Whoever knows the job sets them closer: a hostile peer
    can make a process hold a message of the greatest size, and no more.

    Attributes:
        max_tensors: the most arrays in one message.
        max_bytes: the most bytes in one array.
        max_message_bytes: the most bytes in one message, with its header.
        max_body_bytes: the most bytes in a header, which holds the body and the arrays' names.
        max_values: the most entries of all lists and maps in a header, together. A value of one
            byte on the wire may be 64 bytes in memory, so the bytes alone do not bound it.
        max_name: the most characters in a name.
        max_rank: the most axes of an array.
        max_depth: the most lists and maps in each other in a body.
    """

    max_tensors: int = 4096
    max_bytes: int = 2 << 30
    max_message_bytes: int = 4 << 30
    max_body_bytes: int = 64 << 20
    max_values: int = 1 << 20
    max_name: int = 1024
    max_rank: int = 32
    max_depth: int = 16

    @property
    def max_frames(self) -> int:
        """The most frames of one message: its header, and one for each array."""
        return self.max_tensors + 1

    @property
    def max_parts(self) -> int:
        """The most parts that one message travels in.

        One more than its frames: where arrays are in shared memory, the first part says where
        (`shared_frames.place`). Packing makes fewer of them, and a piece of a large message is two.
        """
        return self.max_frames + 1
