"""Datasets: files of training samples, read and parsed ahead in threads."""

from jaxfleet.fluid.dataset.base import DatasetBase as DatasetBase
from jaxfleet.fluid.dataset.base import FileInstantDataset as FileInstantDataset
from jaxfleet.fluid.dataset.base import QueueDataset as QueueDataset
from jaxfleet.fluid.dataset.in_memory import CoreDataset as CoreDataset
from jaxfleet.fluid.dataset.in_memory import DatasetFactory as DatasetFactory
from jaxfleet.fluid.dataset.in_memory import InMemoryDataset as InMemoryDataset
