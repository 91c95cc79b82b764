"""The rank of a process in every mode, and its share of files."""

import re

import pytest

import jaxfleet as jf
from jaxfleet.cluster import check_has_joined
from jaxfleet.env import PserverRole, Rank, cluster_environment, rank_environment
from jaxfleet.errors import StrategyError

SERVERS = ("127.0.0.1:6174", "127.0.0.1:6175")
RANKS = ("127.0.0.1:6170", "127.0.0.1:6171", "127.0.0.1:6172")


def started_with(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_process_on_its_own_is_the_first_of_one() -> None:
    assert (jf.rank(), jf.size(), jf.is_first()) == (0, 1, True)


@pytest.mark.parametrize("number", [0, 2])
def test_a_trainer_of_servers_has_its_number_as_rank(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    started_with(monkeypatch, cluster_environment(PserverRole("trainer", 3, SERVERS, number)))
    assert (jf.rank(), jf.size(), jf.is_first()) == (number, 3, number == 0)


def test_a_server_has_no_rank_and_is_never_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PserverRole("pserver", 3, SERVERS, current_endpoint=SERVERS[0])
    started_with(monkeypatch, cluster_environment(server))
    assert not jf.is_first()
    assert jf.split_files(["part-0"]) == []
    with pytest.raises(StrategyError, match="this process is a server"):
        jf.rank()


def test_a_launched_rank_knows_its_place_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    started_with(monkeypatch, rank_environment(Rank(1, RANKS, "job")))
    assert (jf.rank(), jf.size(), jf.is_first()) == (1, 3, False)


def test_trainers_of_servers_share_files_out(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [f"part-{n}" for n in range(8)]
    started_with(monkeypatch, cluster_environment(PserverRole("trainer", 3, SERVERS, 1)))
    assert jf.split_files(files) == files[3:6]


def test_a_trainer_whose_strategy_uses_no_servers_is_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started_with(monkeypatch, cluster_environment(PserverRole("trainer", 3, SERVERS, 1)))
    with pytest.warns(UserWarning, match="trainer 1 of 3 of a job with servers trains by itself"):
        check_has_joined()


def test_the_version_is_that_of_the_installed_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", jf.__version__)
