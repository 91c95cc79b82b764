"""DatasetFactory: makes datasets by name."""

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.dataset.base import DatasetBase
from jaxfleet.fluid.dataset.in_memory import InMemoryDataset
from jaxfleet.fluid.dataset.queue_dataset import FileInstantDataset, QueueDataset

_KINDS: dict[str, type[DatasetBase]] = {
    "FileInstantDataset": FileInstantDataset,
    "InMemoryDataset": InMemoryDataset,
    "QueueDataset": QueueDataset,
}


class DatasetFactory:
    """Makes datasets."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> DatasetBase:
        """Returns a dataset of a kind.

        Args:
            datafeed_class: `QueueDataset`, `InMemoryDataset` or `FileInstantDataset`.

        Raises:
            ValueError: there is no such kind.
        """
        if datafeed_class not in _KINDS:
            what = f"datafeed class {datafeed_class} does not exist"
            raise mistake(what, f"one of {', '.join(sorted(_KINDS))}")
        return _KINDS[datafeed_class]()
