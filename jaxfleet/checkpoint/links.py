"""What a checkpoint of changes says of the one that the changes are of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from jaxfleet.checkpoint.fields import as_table


@dataclass(frozen=True)
class Link:
    """Names another checkpoint of the same series.

    Attributes:
        step: its step.
        sha256: of its manifest, which has those of its parts; so it is that one and no other.
    """

    step: int
    sha256: str

    def to_plain(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> Self | None:
        """Returns the link that a manifest says under `after`, None where it says none.

        Raises:
            ValueError: it says something else.
        """
        if plain.get("after") is None:
            return None
        fields = as_table("`after`", plain["after"])
        return cls(fields.count("step"), fields.digest("sha256"))
