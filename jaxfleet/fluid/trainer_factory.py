"""TrainerFactory: makes the trainer that a program's `_fleet_opt` names."""

from collections.abc import Mapping
from typing import Any, TypeVar

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.device_worker import DeviceWorker, DownpourSGD, DownpourSGDOPT, Hogwild
from jaxfleet.fluid.distributed.descriptions import PSParameter
from jaxfleet.fluid.distributed.messages import description_of
from jaxfleet.fluid.trainer_desc import DistMultiTrainer, MultiTrainer, TrainerDesc

T = TypeVar("T")
_TRAINERS: Mapping[str, type[TrainerDesc]] = {
    "MultiTrainer": MultiTrainer,
    "DistMultiTrainer": DistMultiTrainer,
}
_WORKERS: Mapping[str, type[DeviceWorker]] = {
    "Hogwild": Hogwild,
    "DownpourSGD": DownpourSGD,
    "DownpourSGDOPT": DownpourSGDOPT,
}


class TrainerFactory:
    """Makes trainers."""

    def _create_trainer(self, opt_info: Mapping[str, Any] | None = None) -> TrainerDesc:
        """Returns the trainer with the device worker that are named; without names, the plain ones.

        Raises:
            ProgramError: there is no such trainer or worker.
        """
        said = opt_info or {}
        trainer = _named(_TRAINERS, said.get("trainer", "MultiTrainer"))()
        trainer._set_device_worker(_named(_WORKERS, said.get("device_worker", "Hogwild"))())
        trainer._set_opt_info(said)
        desc = description_of(said.get("fleet_desc"))
        if isinstance(desc, PSParameter):
            trainer._set_fleet_desc(desc)
        return trainer


def _named(known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise mistake(f"there is no {name!r} here", f"one of {', '.join(known)}")
    return known[name]
