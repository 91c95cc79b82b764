"""Placement of slices, and rejected imbalance."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.analysis.optimizer_groups import find_optimizer_groups
from jaxfleet.analysis.placement.policies import (
    METHODS,
    LoadBalance,
    SliceLoad,
    dispatch_slices,
    slice_loads,
    stable_hash,
)
from jaxfleet.analysis.placement.sliced_layout import Slice, endpoints_of, placement_of
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse
from jaxfleet.passes import Dispatch
from jaxfleet.passes.pserver.placement import local_endpoints
from jaxfleet.pipeline import parse_pipeline, pipeline_text, run_pipeline
from jaxfleet.runtime import DistributedStrategy

A, B, C, D = local_endpoints(4)


def step(params: dict[str, str], *, state: bool = False) -> Program:
    """Returns a step that updates parameters of these shapes, optionally with a moment each."""
    head, backward, optimize = [], [], []
    for name, shape in params.items():
        kind = f"f32[{shape}]"
        head += [f"data {name}.x: {kind}", f"param {name}: {kind}"]
        backward.append(f"{name}@GRAD: {kind} = jax.neg({name}.x) for ({name}, {name}@GRAD)")
        used = f"{name}@GRAD"
        if state:
            head.append(f"state {name}.m: {kind}")
            optimize.append(f"{name}.m = jax.add({name}.m, {used})")
            used = f"{name}.m"
        optimize.append(f"{name} = jax.sub({name}, {used})")
    sections = [
        "backward",
        *(f"  {x}" for x in backward),
        "optimize",
        *(f"  {x}" for x in optimize),
    ]
    lines = ["program p", *(f"  {x}" for x in head), "  block 0", *(f"    {x}" for x in sections)]
    return parse("\n".join(lines))


def placed(program: Program, slicing: str, placing: str) -> dict[str, str]:
    done = run_pipeline(program, parse_pipeline(f"slice_var{slicing},dispatch{placing}"))
    assert parse(str(done)) == done
    return placement_of(done)


FC = {"fc_b": "1000", "fc_w": "1000,1000"}
FC1 = {**FC, "out_b": "1", "out_w": "1000,1"}
MLP = {
    "b0": "513",
    "b1": "257",
    "b2": "10",
    "w0": "784,513",
    "w1": "513,257",
    "w2": "257,10",
}
CASES = [
    (FC, "{}", 2, {A: "fc_b fc_w.block1", B: "fc_w.block0"}),
    (FC, "{servers=3}", 3, {A: "fc_b fc_w.block2", B: "fc_w.block0", C: "fc_w.block1"}),
    (
        *(FC, "{servers=4}", 4),
        {A: "fc_b fc_w.block3", B: "fc_w.block0", C: "fc_w.block1", D: "fc_w.block2"},
    ),
    (FC, "{min_block_size=1048576}", 2, {A: "fc_b", B: "fc_w"}),
    (FC, "{slice=false}", 2, {A: "fc_b", B: "fc_w"}),
    (FC, "{servers=1}", 1, {A: "fc_b fc_w"}),
    (FC1, "{}", 2, {A: "fc_b fc_w.block1 out_w", B: "fc_w.block0 out_b"}),
    (FC1, "{min_block_size=1048576}", 3, {A: "fc_b out_w", B: "fc_w", C: "out_b"}),
    (MLP, "{}", 2, {A: "b0 b2 w0.block1 w1.block1", B: "b1 w0.block0 w1.block0 w2"}),
    (
        *(MLP, "{servers=3}", 3),
        {
            A: "b0 w0.block0 w1.block0 w2",
            B: "b1 w0.block1 w1.block1",
            C: "b2 w0.block2 w1.block2",
        },
    ),
    (MLP, "{min_block_size=1048576}", 3, {A: "b0 w0", B: "b1 w1", C: "b2 w2"}),
]


@pytest.mark.parametrize(("params", "slicing", "servers", "expected"), CASES)
def test_round_robin_places_what_fluid_places(
    params: dict[str, str], slicing: str, servers: int, expected: dict[str, str]
) -> None:
    found = placed(step(params), slicing, f"{{servers={servers}}}")
    there = {x: " ".join(name for name in found if found[name] == x) for x in expected}
    assert there == expected


def parts_of(sizes: list[int]) -> list[SliceLoad]:
    """Returns slices of these sizes in bytes."""
    names = [f"w{place}" for place in range(len(sizes))]
    return [
        SliceLoad(Slice(name, name, 0, 0, 1, (1,), 1, is_whole=True), size, 0, size, 0)
        for name, size in zip(names, sizes, strict=True)
    ]


def test_balanced_gives_the_largest_first_to_the_emptiest_server() -> None:
    found = dispatch_slices("balanced", parts_of([1, 5, 3, 3, 2]), [A, B])
    assert found == {"w0": B, "w1": A, "w2": B, "w3": B, "w4": A}
    assert list(found) == ["w0", "w1", "w2", "w3", "w4"]


def test_balanced_breaks_ties_by_order() -> None:
    assert dispatch_slices("balanced", parts_of([4, 4, 4]), [A, B, C]) == {
        "w0": A,
        "w1": B,
        "w2": C,
    }


@given(sizes=st.lists(st.integers(0, 99), min_size=1, max_size=20), servers=st.integers(1, 7))
def test_every_method_places_every_slice_on_a_server(sizes: list[int], servers: int) -> None:
    parts, endpoints = parts_of(sizes), local_endpoints(servers)
    for method in METHODS:
        found = dispatch_slices(method, parts, endpoints)
        assert list(found) == [part.slice.name for part in parts]
        assert set(found.values()) <= set(endpoints)
        assert sum(LoadBalance.of(parts, found, endpoints).held_bytes.values()) == sum(sizes)
    even = LoadBalance.of(parts, dispatch_slices("balanced", parts, endpoints), endpoints)
    assert even.fullest <= sum(sizes) / servers + max(sizes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("", 0),
        ("w", 476252946),
        ("state/0/w1.block0", 3221789899),
        ("fc_w.block1", 2587300460),
        ("größe", 1540598153),
    ],
)
def test_a_names_hash_is_the_same_in_every_process(name: str, value: int) -> None:
    assert stable_hash(name) == value


def test_hash_name_does_not_move_a_slice_when_others_come() -> None:
    few = placed(step(FC), "{}", "{method=hash_name}")
    more = placed(step({"aa": "7", **FC1}), "{}", "{method=hash_name}")
    assert few == {name: more[name] for name in few}
    assert few == {name: (A, B)[stable_hash(name) % 2] for name in few}


def test_hash_name_may_put_several_blocks_of_a_parameter_on_one_server() -> None:
    found = placed(step({"w": "64,64"}), "{servers=4,min_block_size=1}", "{method=hash_name}")
    assert len(found) == 4
    assert set(found.values()) <= {A, B}


def test_bytes_count_the_state_that_follows_a_slice() -> None:
    done = run_pipeline(
        step({"w": "9,16"}, state=True), parse_pipeline("slice_var{min_block_size=1}")
    )
    first, second = slice_loads(done, find_optimizer_groups(done))
    assert (first.param_bytes, first.state_bytes, first.push_bytes) == (320, 320, 320)
    assert (second.param_bytes, second.state_bytes, second.push_bytes) == (256, 256, 256)
    assert first.held_bytes == 640


EMBEDDING = {"b": "8", "e": "3000,100", "f": "8", "g": "8", "h": "3000,100", "i": "8"}


def test_a_placement_that_leaves_the_servers_uneven_is_refused_with_a_way_out() -> None:
    with pytest.raises(PassError) as caught:
        placed(step(EMBEDDING), "{slice=false}", "{servers=3,max_imbalance=2}")
    assert caught.value.what == (
        "dispatch: round_robin puts 3.00 times the mean on one server, more than max_imbalance=2; "
        f"bytes: {A} 64, {B} 2,400,000, {C} 64"
    )
    (hint, *_) = [note for note in caught.value.__notes__ if "hint" in note]
    assert "method=balanced puts 1.50 times the mean there" in hint
    assert "max_imbalance=0 allows it" in hint


@pytest.mark.parametrize(
    ("slicing", "placing"),
    [
        ("{slice=false}", "{servers=3,max_imbalance=0}"),
        ("{slice=false}", "{servers=3,max_imbalance=3}"),
        ("{slice=false}", "{servers=3,max_imbalance=2,method=balanced}"),
        ("{servers=3}", "{servers=3,max_imbalance=2}"),
    ],
)
def test_the_way_out_is_one(slicing: str, placing: str) -> None:
    assert placed(step(EMBEDDING), slicing, placing)


def test_unless_told_otherwise_the_fullest_may_hold_four_times_the_mean() -> None:
    five = {"b": "8", "e": "3000,100", "f": "8", "g": "8", "h": "8", "i": "8", "j": "3000,100"}
    assert placed(step(EMBEDDING), "{slice=false}", "{servers=3}")["h"] == B
    with pytest.raises(PassError, match=r"5\.00 times the mean on one server"):
        placed(step(five), "{slice=false}", "{servers=5}")
    assert Dispatch().max_imbalance == DistributedStrategy().max_imbalance


def test_one_large_block_that_nothing_can_spread_is_not_refused() -> None:
    params = {"b": "8", "e": "3000,100", "f": "8"}
    assert placed(step(params), "{slice=false}", "{servers=3}")["e"] == B


def test_what_is_small_in_all_is_not_refused() -> None:
    params = {name: shape.replace("3000", "30") for name, shape in EMBEDDING.items()}
    assert placed(step(params), "{slice=false}", "{servers=3}")["e"] == B


def test_endpoints_can_be_given_in_a_pipelines_text() -> None:
    text = 'dispatch{endpoints=["10.0.0.1:7000","[::1]:7001"],method=balanced}'
    (pass_,) = parse_pipeline(text)
    assert isinstance(pass_, Dispatch)
    assert pass_.endpoints == ("10.0.0.1:7000", "[::1]:7001")
    assert parse_pipeline(pipeline_text([pass_])) == (pass_,)
    done = run_pipeline(step(FC), [*parse_pipeline("slice_var"), pass_])
    assert endpoints_of(done) == pass_.endpoints


def test_a_server_may_get_nothing() -> None:
    done = run_pipeline(step({"w": "8"}), parse_pipeline("slice_var,dispatch"))
    assert endpoints_of(done) == (A, B)
    assert placement_of(done) == {"w": A}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("method=random", "method is 'random'"),
        ("servers=0", "servers is 0"),
        ("max_imbalance=0.5", "max_imbalance is 0.5"),
        ("max_imbalance=nan", "max_imbalance is nan"),
        ('endpoints=["localhost"]', "'localhost' is not an endpoint"),
        ("endpoints=[h:65536]", "'h:65536' is not an endpoint"),
        ("endpoints=[h:1,h:1]", "'h:1' is given twice"),
    ],
)
def test_wrong_options_are_refused(options: str, what: str) -> None:
    with pytest.raises(PassError, match=f"dispatch: .*{what}"):
        parse_pipeline(f"dispatch{{{options}}}")


def test_it_runs_once_and_after_slicing() -> None:
    with pytest.raises(PassError, match="has no attribute 'slices'") as caught:
        Dispatch().run(step(FC))
    assert "  hint: run slice_var first" in caught.value.__notes__
    done = run_pipeline(step(FC), parse_pipeline("slice_var,dispatch"))
    with pytest.raises(PassError, match="program 'p' is already placed"):
        Dispatch().run(done)
    with pytest.raises(PassError, match="dispatch stands before slice_var"):
        run_pipeline(step(FC), parse_pipeline("dispatch,slice_var"))


def test_a_program_that_was_not_placed_says_what_to_run() -> None:
    (slicing,) = parse_pipeline("slice_var")
    for read in (placement_of, endpoints_of):
        with pytest.raises(PassError) as caught:
            read(slicing.run(step(FC)))
        assert "  hint: run dispatch first" in caught.value.__notes__


@pytest.mark.parametrize(
    ("endpoints", "placement", "why"),
    [
        ('["h:1"]', "[[w]]", "is not a slice and an endpoint"),
        ('["h:1"]', '[[w, "h:1"]]', "is not a slice and an endpoint"),
        ('["h:1"]', '[["v", "h:1"]]', "does not place each slice once, in order: .'v', 'w'."),
        ('["h:1"]', '[["w", "h:2"]]', "'h:2' is not among the endpoints"),
        ("[1]", '[["w", "h:1"]]', "are not all strings"),
    ],
)
def test_a_placement_that_is_not_the_programs_is_refused(
    endpoints: str, placement: str, why: str
) -> None:
    attrs = f'endpoints={endpoints}, placement={placement}, slices=[["w", [4]]]'
    program = parse(f"program p {{{attrs}}}\n  param w: f32[4]\n  block 0\n")
    with pytest.raises(PassError, match=why):
        placement_of(program)


def test_round_robin_goes_on_where_it_stopped() -> None:
    found = [*placed(step({f"p{place}": "4" for place in range(5)}), "{}", "{}").values()]
    assert found == [A, B, A, B, A]
    assert all(one != other for one, other in pairwise(found))
