"""Layers of fluid that are refused by name, each with the reason and another way."""

from typing import Any, NoReturn

from jaxfleet.errors import UnsupportedError
from jaxfleet.ops.frames import line_of_caller


def beam_search(
    pre_ids: Any,
    pre_scores: Any,
    ids: Any,
    scores: Any,
    beam_size: int,
    end_id: int,
    level: int = 0,
    is_accumulated: bool = True,
    name: str | None = None,
    return_parent_idx: bool = False,
) -> NoReturn:
    """Would keep the best ways of decoding.

    Raises:
        NotImplementedError: always.
    """
    del pre_ids, pre_scores, ids, scores, beam_size, end_id, level, is_accumulated, name
    del return_parent_idx
    raise _beams("beam_search")


def beam_search_decode(
    ids: Any, scores: Any, beam_size: int, end_id: int, name: str | None = None
) -> NoReturn:
    """Would put the steps of a `beam_search` together.

    Raises:
        NotImplementedError: always.
    """
    del ids, scores, beam_size, end_id, name
    raise _beams("beam_search_decode")


def _beams(layer: str) -> UnsupportedError:
    what = f"{layer}: its beams are two levels of sequences, fewer in each step, and a loop's "
    hint = "keep [batch, beam_size] scores in a while_loop: reshape, topk, and gather what they are"
    return UnsupportedError(f"{what}values have one size here", source=line_of_caller(), hint=hint)


class ListenAndServ:
    """Would serve a block that a script wrote.

    Raises:
        NotImplementedError: always.
    """

    def __init__(
        self, endpoint: str, inputs: Any, fan_in: int = 1, optimizer_mode: bool = True
    ) -> NoReturn:
        del endpoint, inputs, fan_in, optimizer_mode
        raise _messages("ListenAndServ")


def Send(  # noqa: N802  # fluid's name
    endpoints: str, send_vars: Any, dummy_output: Any = None, sync: bool = True
) -> NoReturn:
    """Would send variables to a server of a script's own.

    Raises:
        NotImplementedError: always.
    """
    del endpoints, send_vars, dummy_output, sync
    raise _messages("Send")


def Recv(  # noqa: N802  # fluid's name
    endpoints: str, get_vars: Any, dummy_input: Any = None, sync: bool = True
) -> NoReturn:
    """Would receive variables from a server of a script's own.

    Raises:
        NotImplementedError: always.
    """
    del endpoints, get_vars, dummy_input, sync
    raise _messages("Recv")


def _messages(name: str) -> UnsupportedError:
    what = f"layers.io.{name}: servers here serve the updates of a job that all processes know"
    hint = "write the job's programs by DistributeTranspiler"
    return UnsupportedError(what, source=line_of_caller(), hint=hint)


def _pull_box_sparse(input: Any, size: int, dtype: Any = "float32") -> NoReturn:
    """Would look rows up in BoxPS, tables on GPUs that another library holds.

    Raises:
        NotImplementedError: always.
    """
    del input, size, dtype
    what = "_pull_box_sparse: the tables of BoxPS are in a library of their own"
    hint = "layers.embedding(ids, size, is_sparse=True, is_distributed=True)"
    raise UnsupportedError(what, source=line_of_caller(), hint=hint)
