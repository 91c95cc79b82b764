"""FleetUtil: metrics over all workers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ConnectError
from jaxfleet.fluid.incubate.fleet.base.role_maker import Role, UserDefinedRoleMaker
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib import PSLib
from jaxfleet.fluid.incubate.fleet.utils.fleet_barrier_util import check_all_trainers_ready
from jaxfleet.fluid.incubate.fleet.utils.fleet_util import FleetUtil
from jaxfleet.fluid.metrics import area
from tests.fluid.nets import fresh


class Other:
    """Rendezvous with one other worker that gives the same values."""

    def gather(self, group: str, value: np.ndarray, what: str) -> list[np.ndarray]:
        assert (group, what) == ("trainer", "all_reduce sum")
        return [value, value[::-1].copy()]

    def close(self) -> None:
        pass


def fleet_of(number: int) -> PSLib:
    role, fleet = UserDefinedRoleMaker(number, Role.WORKER, 2, ["a:1"]), PSLib()
    role.meet_by(Other())
    fleet.init(role)
    return fleet


def by_pairs(positive: np.ndarray, negative: np.ndarray) -> float:
    """Returns the share of pairs with the positive sample above the negative; ties count half."""
    p = np.repeat(np.arange(len(positive)), positive)[:, None]
    n = np.repeat(np.arange(len(negative)), negative)[None]
    return float(((p > n) + 0.5 * (p == n)).mean())


def test_the_area_is_that_of_all_workers_samples(capsys: pytest.CaptureFixture[str]) -> None:
    random, exe, scope = np.random.default_rng(0), fluid.Executor(), fluid.Scope()
    with fresh() as (main, startup):
        chance, label = fluid.data("p", [None, 2]), fluid.data("y", [None, 1], dtype="int64")
        _, _, [_, _, pos, neg] = fluid.layers.auc(chance, label, num_thresholds=64)
    exe.run(startup, scope=scope)
    y = random.integers(0, 2, (40, 1))
    p = np.clip(0.3 * y + 0.7 * random.random((40, 1)), 0, 1).astype(np.float32)
    exe.run(main, {"p": np.concatenate([1 - p, p], 1), "y": y}, scope=scope)
    util = FleetUtil(fleet=fleet_of(0))
    found = util.get_global_auc(scope, pos.name, neg.name)
    counts = [np.array(scope[one.name]).reshape(-1) for one in (pos, neg)]
    assert counts[0].sum() == y.sum()
    assert found == pytest.approx(by_pairs(*(each + each[::-1] for each in counts)))
    util.print_global_auc(scope, pos.name, neg.name, "pass 1:")
    assert capsys.readouterr().out == f"pass 1: global auc = {found}\n"
    util.set_zero(pos.name, scope)
    assert not np.any(np.array(scope[pos.name]))
    assert util.get_global_auc(scope, pos.name, neg.name) == 0.5


def test_the_first_worker_speaks_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        util = FleetUtil("transpiler", fleet=fleet_of(number))
        util.rank0_print("printed")
        util.rank0_info("said")
        util.rank0_error("wrong")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("printed\nsaid\n", "wrong\n")


def test_what_is_no_metric_and_no_mode() -> None:
    assert area(np.array([3, 0]), np.array([0, 0])) == 0.5
    with pytest.raises(ValueError, match="Please choose one mode from"):
        FleetUtil("collective")
    with pytest.raises(ValueError, match="is not in the scope"):
        FleetUtil(fleet=fleet_of(0)).get_global_auc(fluid.Scope())


def test_trainers_wait_for_each_other_by_files(tmp_path: Path) -> None:
    class Job:
        def __init__(self, at: int) -> None:
            self.at = at

        def worker_num(self) -> int:
            return 2

        def worker_index(self) -> int:
            return self.at

    def comes(at: int) -> None:
        check_all_trainers_ready(str(tmp_path / "ready"), 3, fleet=Job(at), timeout_s=20)  # type: ignore[arg-type]

    with pytest.raises(ConnectError, match=r"for trainers \[1\] at epoch 2"):
        check_all_trainers_ready(str(tmp_path), 2, fleet=Job(0), timeout_s=0.05)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(comes, range(2))) == [None, None]
