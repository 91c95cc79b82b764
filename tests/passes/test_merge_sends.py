"""Sends and receives that become one message."""

from jaxfleet.ir import Program, parse
from jaxfleet.passes import MergeSends
from jaxfleet.testing import check_pass
from tests.passes.jobs import placed, trainer_of

HEAD = """program p {role="trainer"}
  data  a: f32[4]
  data  b: f32[2]
  data  c: f32[2]
  param w: f32[4]
  param v: f32[2]
  block 0
    rpc
"""


def program(*lines: str) -> str:
    return HEAD + "\n".join(f"      {line}" for line in lines)


def test_sends_side_by_side_are_one_and_keep_their_order() -> None:
    check_pass(
        MergeSends(),
        before=program(
            'send(X=a) {epmap=["s:1"]} for (w, a)',
            'send(X=[b, c]) {epmap=["s:2", "s:1"]} for (v, b)',
        ),
        after=program(
            'send(X=[a, b, c]) {epmap=["s:1", "s:2", "s:1"]} for (w, a), (v, b)',
        ),
    )


def test_receives_side_by_side_are_one() -> None:
    check_pass(
        MergeSends(),
        before=program(
            'Out=w = recv() {epmap=["s:1"], trainer_id=0}',
            'Out=v = recv() {epmap=["s:2"], trainer_id=0}',
        ),
        after=program('Out=[w, v] = recv() {epmap=["s:1", "s:2"], trainer_id=0}'),
    )


def test_a_barrier_stops_the_merge() -> None:
    lines = (
        'send(X=a) {epmap=["s:1"]}',
        'send_barrier() {endpoints=["s:1"]}',
        'send(X=b) {epmap=["s:1"]}',
    )
    check_pass(MergeSends(), before=program(*lines), after=program(*lines))


def test_a_send_and_a_receive_are_not_one() -> None:
    lines = ('send(X=a) {epmap=["s:1"]}', 'Out=w = recv() {epmap=["s:1"]}')
    check_pass(MergeSends(), before=program(*lines), after=program(*lines))


def test_a_program_with_nothing_to_merge_is_the_same_program() -> None:
    same = parse(program('send(X=a) {epmap=["s:1"]}'))
    assert MergeSends().run(same) is same


def sent(found: Program) -> list[tuple[str, object]]:
    ops = [op for op in found.root.ops if op.type in {"send", "recv"}]
    names = [(op.type, name) for op in ops for name in (*op.reads, *op.writes)]
    where = [at for op in ops for at in op.attrs["epmap"]]  # type: ignore[union-attr]
    return list(zip(names, where, strict=True))  # type: ignore[arg-type]


def test_everything_still_goes_where_it_went() -> None:
    before = trainer_of(placed())
    assert sent(MergeSends().run(before)) == sent(before)
