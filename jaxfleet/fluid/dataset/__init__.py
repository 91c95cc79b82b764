"""Datasets: files that a program is trained on, read and parsed ahead in threads."""

from jaxfleet.fluid.dataset.base import DatasetBase as DatasetBase
from jaxfleet.fluid.dataset.factory import DatasetFactory as DatasetFactory
from jaxfleet.fluid.dataset.in_memory import CoreDataset as CoreDataset
from jaxfleet.fluid.dataset.in_memory import InMemoryDataset as InMemoryDataset
from jaxfleet.fluid.dataset.queue_dataset import FileInstantDataset as FileInstantDataset
from jaxfleet.fluid.dataset.queue_dataset import QueueDataset as QueueDataset
