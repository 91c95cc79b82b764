"""TrainStatus: how far a training has come, as a checkpoint says it."""

import json
from typing import Any

from jaxfleet.errors import SavedError


class TrainStatus:
    """How far a training has come.

    Args:
        epoch_no: the last epoch that was finished; -1 before the first.
    """

    def __init__(self, epoch_no: int = -1) -> None:
        self._epoch_no = epoch_no

    def next(self) -> int:
        """Returns the epoch to go on with."""
        return self._epoch_no + 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainStatus) and other._epoch_no == self._epoch_no

    def __hash__(self) -> int:
        return hash(self._epoch_no)

    def __repr__(self) -> str:
        return f"TrainStatus({self._epoch_no})"

    def to_text(self) -> str:
        """Returns it as a checkpoint has it."""
        return json.dumps({"epoch_no": self._epoch_no})

    @classmethod
    def from_text(cls, text: str, where: str) -> "TrainStatus":
        """Returns what a checkpoint says.

        Raises:
            SavedError: it says nothing of it.
        """
        try:
            plain: Any = json.loads(text)
            return cls(int(plain["epoch_no"]))
        except (ValueError, KeyError, TypeError) as error:
            hint = "the checkpoint is damaged; an older one may be whole"
            raise SavedError(f"{where} does not say how far training came", hint=hint) from error
