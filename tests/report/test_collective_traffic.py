"""What collectives send over each link between devices."""

import json
from itertools import pairwise
from typing import Any

import pytest

from jaxfleet.ir import Program, parse
from jaxfleet.report import build_report, of_program
from jaxfleet.report.collective_traffic import device_links
from jaxfleet.report.serialization import report_json
from tests.report.drawn import deep_history

_TEXT = """
program p {{devices={devices}}}
  param w: f32[1000]
  state v: f32[1000]
  block 0
    optimize
      {op}
"""
_BYTES = 4000


def program(op: str, devices: int = 4) -> Program:
    return parse(_TEXT.format(devices=devices, op=op))


def on_links(op: str, devices: int = 4) -> dict[tuple[int, int], int]:
    found = device_links(program(op, devices), {})
    assert found is not None
    return {(a, b): size for a, b, size in found.links}


def _ring(size: float, devices: int = 4) -> dict[tuple[int, int], int]:
    return {(n, (n + 1) % devices): round(size) for n in range(devices)}


def _moved_by_hand(devices: int) -> int:
    """Plays a ring all-reduce of `_BYTES`, in a chunk a device; returns one link's bytes."""
    chunk, sums = _BYTES // devices, [[1] * devices for _ in range(devices)]
    for turn in range(2 * (devices - 1)):
        sent = [(n, (n - turn) % devices) for n in range(devices)]
        values = [sums[n][part] for n, part in sent]
        for (n, part), value in zip(sent, values, strict=True):
            there = sums[(n + 1) % devices]
            there[part] = there[part] + value if turn < devices - 1 else value
    assert sums == [[devices] * devices for _ in range(devices)]
    return chunk * 2 * (devices - 1)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_an_all_reduce_sends_what_a_ring_of_it_sends(devices: int) -> None:
    found = on_links("w = c_allreduce_sum(w) {ring_id=0}", devices)
    assert found == _ring(_moved_by_hand(devices), devices)


@pytest.mark.parametrize(
    ("op", "size"),
    [
        ("w = c_allreduce_max(w)", 1.5 * _BYTES),
        ("w = c_allreduce_prod(w)", 3 * _BYTES),  # gathered
        ("w = c_broadcast(w) {root=0}", 1.5 * _BYTES),  # a sum with zeros
        ("w = c_allreduce_sum(w, v) {flat=true}", 3 * _BYTES),
        ("y: f32[250] = c_reducescatter(w)", 0.75 * _BYTES),
        ("y: f32[4000] = c_allgather(w)", 3 * _BYTES),
        ("y: f32[1000] = c_alltoall(w) {axis=0, from_axis=0}", 1.5 * _BYTES),
    ],
)
def test_each_collective_sends_its_share(op: str, size: float) -> None:
    assert on_links(op) == _ring(size)


def test_two_levels_send_less_between_groups() -> None:
    found = on_links("w = c_allreduce_sum(w) {within=4}", 8)
    assert found[0, 1] == found[3, 0] == found[7, 4] == 1.5 * _BYTES
    assert found[0, 4] == found[4, 0] == _BYTES / 4
    assert (3, 4) not in found


def test_an_exchange_sends_all_of_it_to_each_partner() -> None:
    found = on_links("w = c_allreduce_sum(w) {exchange=true}", 4)
    assert found == {(a, a ^ b): _BYTES for a in range(4) for b in (1, 2)}


def test_a_loop_sends_in_every_turn() -> None:
    text = """
program p {devices=2}
  param w: f32[1000]
  block 0
    optimize
      w = jax.scan(w) {body=^1, length=5, num_carry=1, num_consts=0, reverse=false, unroll=1}
  block 1 (x: f32[1000]) -> (y)
    optimize
      y: f32[1000] = c_allreduce_sum(x)
"""
    found = device_links(parse(text), {})
    assert found is not None
    assert found.kinds[0].bytes == 5 * _BYTES


def test_what_sends_nothing_has_no_links() -> None:
    assert device_links(program("w = c_allreduce_sum(w)", 1), {}) is None
    assert device_links(program("w = c_summand(w)"), {}) is None
    assert device_links(program("w = jax.neg(w)"), {}) is None


def test_many_devices_are_not_listed_one_by_one() -> None:
    found = device_links(program("w = c_allreduce_sum(w)", 64), {})
    assert found is not None
    assert found.links == ()
    assert found.kinds[0].links == 64


def _links(history: Any) -> Any:
    return json.loads(report_json(build_report([history])))["programs"][0]["links"]


def test_a_step_without_servers_has_bytes_on_every_link() -> None:
    history = deep_history(2)
    links = _links(history)
    reads = [op.reads for op in history.last.root.ops if op.type == "c_allreduce_sum"]
    total = sum(
        4 * (256 * 256 if "kernel" in name else 256 if "bias" in name else 1)
        for names in reads
        for name in names
    )
    assert [kind["bytes"] for kind in links["kinds"]] == [round(1.5 * total)]
    assert {a for a, _, _ in links["links"]} == {0, 1, 2, 3}
    assert all(b - a in {1, -3} for a, b, _ in links["links"])
    assert all(x[2] == y[2] for x, y in pairwise(links["links"]))
    assert _links(of_program(history.stages[0].program)) is None
