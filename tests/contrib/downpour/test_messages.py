"""Descriptions compose as protocol buffers do."""

import pytest

from jaxfleet.contrib.downpour import messages, ps_pb2
from jaxfleet.contrib.downpour.descriptions import PSParameter, ServerParameter
from jaxfleet.contrib.downpour.messages import description_of
from jaxfleet.errors import FieldError, TextError
from jaxfleet.fluid.distributed import DownpourServer


def test_fields_that_are_not_set_read_as_nothing() -> None:
    made = ps_pb2.PSParameter()
    assert made.init_gflags == ""
    assert not made.server_param.downpour_server_param.downpour_table_param
    assert not made.HasField("server_param")
    assert made.SerializeToString() == b""
    made.server_param.downpour_server_param.downpour_table_param.add().table_id = 3
    assert made.HasField("server_param")
    assert [t.table_id for t in made.tables] == [3]


def test_a_message_is_copied_and_goes_on_by_itself() -> None:
    one, two = ps_pb2.ProgramConfig(), ps_pb2.ProgramConfig()
    one.program_id = "7"
    one.pull_dense_table_id.extend([1, 2])
    two.CopyFrom(one)
    assert one == two
    two.pull_dense_table_id.append(3)
    assert (list(one.pull_dense_table_id), list(two.pull_dense_table_id)) == ([1, 2], [1, 2, 3])


def test_a_message_is_read_back_from_its_bytes_and_its_text() -> None:
    server = DownpourServer()
    server.add_dense_table(1, 0.5, [], [])
    made = ps_pb2.PSParameter()
    made.server_param.CopyFrom(server.get_desc())
    made.trainer_param.skip_op.extend(["lookup_table"])
    read = ps_pb2.PSParameter()
    read.ParseFromString(made.SerializeToString())
    assert read == made
    merged = messages.Merge('trainer_param { skip_op: "mine" }', read)
    assert [list(t.skip_op) for t in merged.trainer_param] == [["lookup_table"], ["mine"]]
    assert messages.MessageToString(made) == str(made)
    with pytest.raises(TextError, match="has no field 'nothing'"):
        messages.Merge("nothing: 1", made)


def test_a_message_is_one_job_as_long_as_it_says_the_same() -> None:
    made, other = ps_pb2.PSParameter(), ps_pb2.PSParameter()
    made.init_gflags = other.init_gflags = "-v 1"
    first = description_of(made)
    assert isinstance(first, PSParameter)
    assert description_of(made) is first
    assert description_of(other) is not first
    made.trainer_param.add()
    assert description_of(made) is not first


def test_what_a_message_has_not_is_refused() -> None:
    made = ps_pb2.PSParameter()
    with pytest.raises(AttributeError, match="PSParameter has no field 'nothing'"):
        made.nothing = 1
    with pytest.raises(FieldError, match="'server_param' of PSParameter cannot be assigned"):
        made.server_param = ServerParameter()
    with pytest.raises(TypeError, match="what CopyFrom is given"):
        made.server_param.CopyFrom(ps_pb2.ProgramConfig())
    with pytest.raises(AttributeError):
        ps_pb2.NoSuchParameter  # noqa: B018


def test_a_table_of_another_type_is_refused() -> None:
    server = DownpourServer()
    server.add_dense_table(0, 0.5, [], [])
    with pytest.raises(ValueError, match="table 0 is PS_DENSE_TABLE, and is to be PS_SPARSE"):
        server.add_sparse_table(0, 0.5, [], [])
