"""QueueDataset: files are read while the program is trained, and never held whole."""

from typing import Any

from jaxfleet.errors import UnsupportedError
from jaxfleet.fluid.dataset.base import DatasetBase


class QueueDataset(DatasetBase):
    """Samples in the order of the files, as they are read."""

    def local_shuffle(self) -> None:
        """Refuses: what is not held is not mixed.

        Raises:
            NotImplementedError: always.
        """
        raise self._refusal("local_shuffle")

    def global_shuffle(self, fleet: Any = None) -> None:
        """Refuses, as `local_shuffle`.

        Raises:
            NotImplementedError: always.
        """
        del fleet
        raise self._refusal("global_shuffle")

    def _refusal(self, what: str) -> UnsupportedError:
        said = f"{type(self).__name__} does not support {what}: it holds no samples"
        return UnsupportedError(said, hint="create_dataset('InMemoryDataset')")


class FileInstantDataset(QueueDataset):
    """Samples in the order of the files, as `QueueDataset`: fluid's other name for pipelines."""
