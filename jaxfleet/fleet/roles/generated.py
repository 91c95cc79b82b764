"""Role makers whose role is found out once: by whoever asks first."""

from jaxfleet.fleet.roles.meets import MeetingRoleMaker
from jaxfleet.fleet.roles.role import Role


class GeneratedRoleMaker(MeetingRoleMaker):
    """Answers by what `generate_role` has found, which each question calls first."""

    def __init__(self) -> None:
        super().__init__()
        self._workers = 0

    def is_worker(self) -> bool:
        self.generate_role()
        return self._role == Role.WORKER

    def is_server(self) -> bool:
        self.generate_role()
        return self._role == Role.SERVER

    def is_first_worker(self) -> bool:
        return self.is_worker() and self._current_id == 0

    def worker_num(self) -> int:
        self.generate_role()
        return self._workers

    def worker_index(self) -> int:
        self.generate_role()
        return self._current_id

    def server_index(self) -> int:
        self.generate_role()
        return self._current_id

    def get_trainer_endpoints(self) -> list[str]:
        self.generate_role()
        return self._worker_endpoints

    def get_pserver_endpoints(self) -> list[str]:
        self.generate_role()
        return self._server_endpoints

    def to_string(self) -> str:
        self.generate_role()
        return super().to_string()
