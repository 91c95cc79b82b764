"""What a checkpoint says of a table as a whole, the same in every part."""

import json
from dataclasses import dataclass

import numpy as np

from jaxfleet.checkpoint.fields import as_table
from jaxfleet.errors import ProgramError
from jaxfleet.tables import TableSpec


@dataclass(frozen=True)
class About:
    """What is said of a table.

    Attributes:
        spec: what it is.
        since: the step after which changes are there; None where all of it is.
    """

    spec: TableSpec
    since: int | None

    def to_array(self) -> np.ndarray:
        """Returns it as bytes, uint8[n]."""
        text = json.dumps({"spec": self.spec.to_text(), "since": self.since})
        return np.frombuffer(text.encode(), np.uint8)

    @classmethod
    def from_array(cls, array: np.ndarray) -> "About":
        """Reads it.

        Raises:
            ValueError: it is something else.
        """
        fields = as_table("it", json.loads(array.tobytes()))
        since = None if fields.plain.get("since") is None else fields.count("since")
        try:
            return cls(TableSpec.from_text(fields.text("spec")), since)
        except ProgramError as error:
            raise ValueError(str(error)) from error
