"""What every program of a server says of itself and its blocks: `listen_and_serv`, and facts."""

from collections.abc import Iterable, Mapping, Sequence

from jaxfleet.ir import Attr, Attrs, BlockRef, Operands, Operator, Program, Role
from jaxfleet.passes._job import Job


def facts_of(step: Program, job: Job, endpoint: str, holds: Iterable[Attr]) -> dict[str, Attr]:
    """Returns the attributes of a server's program.

    Args:
        step: the program that the job trains.
        job: where everything is.
        endpoint: the server's.
        holds: of each variable of a slice its name, its leaf and its first row, -1 for a copy.
    """
    facts: dict[str, Attr] = {
        "endpoint": endpoint,
        "endpoints": job.endpoints,
        "holds": tuple(holds),
        "pserver_id": job.endpoints.index(endpoint),
        "role": "pserver",
        "slices": step.attrs.get("slices", ()),
        "trainers": job.trainers,
        **job.mode.facts(),
    }
    if "tables" in step.attrs:
        facts["tables"] = step.attrs["tables"]
    return facts


def listen_and_serv(
    job: Job,
    endpoint: str,
    sent: Sequence[str],
    *,
    runs: Iterable[int],
    merges: Mapping[str, int],
    lr: int,
    combine: int = -1,
    parts: Iterable[int] = (),
) -> Operator:
    """Returns the operator of a server's block 0, which says of each block what it is for.

    Args:
        job: where everything is.
        endpoint: the server's.
        sent: what trainers send.
        runs: the numbers of the blocks that it runs, in order.
        merges: the block that merges a slice's gradient, by the gradient's name there.
        lr: the block of learning rates, or of what else runs first; -1 for none.
        combine: the block that brings parameters together; -1 for none.
        parts: the blocks that make what crosses to other servers.
    """
    attrs: dict[str, Attr] = {
        "Fanin": job.trainers,
        "combine_block_id": combine,
        "distributed_mode": job.mode.distributed_mode,
        "endpoint": endpoint,
        "grad_to_block_id": tuple(f"{name}:{block}" for name, block in merges.items()),
        "lr_decay_block_id": lr,
        "optimize_blocks": tuple(BlockRef(index) for index in runs),
        "part_block_ids": tuple(parts),
        "pserver_id": job.endpoints.index(endpoint),
    }
    read = Operands.named(X=sent)
    return Operator("listen_and_serv", read, attrs=Attrs(attrs), role=Role.RPC)
