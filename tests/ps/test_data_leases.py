"""Leases of a trainer, as their holder sees them."""

from types import SimpleNamespace
from typing import cast

from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.data_leases import DataLeases
from jaxfleet.ps.client.lease_log import LeaseLog
from jaxfleet.ps.server.data_ledger import DataLedger, DataOrder
from jaxfleet.ps.server.position_set import PositionSet


def test_a_restore_before_another_place_is_followed_makes_leases_void() -> None:
    log = LeaseLog(until_saved=True)
    before, after = (
        cast(Client, SimpleNamespace(leases=log, clock_s=lambda: 0.0)) for _ in range(2)
    )
    leases = DataLeases(before, {}, rows=1, epochs=1)
    log.clear()  # by a restore in the new place, before the loader was used there
    leases.follow(after)
    assert leases.client is after
    assert leases.is_void


def test_two_trainers_that_declare_the_same_leases_do_not_both_have_them() -> None:
    order = DataOrder(version=1, samples=8, batch_size=2, seed=0, shuffle=0, drop_last=0)
    ledger = DataLedger(order)
    ledger.adopt(0, PositionSet.of([(0, 4)]), alone=True)
    ledger.adopt(1, PositionSet.of([(2, 6)]), alone=True)
    assert ledger.leased == {0: PositionSet.of([(0, 4)]), 1: PositionSet.of([(4, 6)])}
