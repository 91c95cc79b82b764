"""Jobs under SLURM: a batch script that launches a job on all its machines, and its submission.

SLURM starts one task on each machine, the launch of that machine. It ends the job when one of them
fails, and queues it again when it loses a machine, if the job goes on from checkpoints.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.launch.engines.request import Request

_FIRST_PORT, _PORTS = 20_000, 16_000  # one batch job's ports follow those of another
_OWN = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "output")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_DIRECTIVE = re.compile(r"[a-z][a-z-]*(=\S+)?")
_SUBMIT_S = 60.0
_MAKES_SECRET = (
    "trap 'rm -f \"$SECRET\"' EXIT",
    "(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >\"$SECRET\")",
    "",
)


@dataclass(frozen=True)
class Batch:
    """How a job is submitted.

    Attributes:
        name: of the batch job, and of the file of its output.
        directives: more options of sbatch, such as `time=01:00:00` and `partition=gpu`.
    """

    name: str
    directives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            hint = "use letters, digits, and . _ -"
            raise StrategyError(f"{self.name!r} is not a valid name for a batch job", hint=hint)
        for each in self.directives:
            if not _DIRECTIVE.fullmatch(each):
                hint = "write --sbatch time=01:00:00, without dashes and spaces"
                raise StrategyError(f"{each!r} is not an option of sbatch", hint=hint)
            if each.partition("=")[0] in _OWN:
                hint = "the launch's own options determine it"
                raise StrategyError(f"--sbatch {each} contradicts the job", hint=hint)


def batch_script(request: Request, batch: Batch) -> str:
    """Returns the script that `sbatch` takes.

    >>> from jaxfleet.launch import CollectiveJob
    >>> from jaxfleet.launch.engines.request import any_machines
    >>> nodes = any_machines(2)
    >>> job = CollectiveJob(command=("train.py",), nproc=4, nodes=nodes, insecure=True)
    >>> text = batch_script(Request(job, ("--nproc", "4", "train.py")), Batch("digits"))
    >>> print(text.partition("set -")[0], end="")
    #!/usr/bin/env bash
    # A job of jaxfleet, as `jaxfleet launch --on slurm --dry-run` wrote it; sbatch takes it.
    #SBATCH --job-name=digits
    #SBATCH --nodes=2
    #SBATCH --ntasks-per-node=1
    #SBATCH --cpus-per-task=4
    #SBATCH --no-requeue
    #SBATCH --output=digits-%j.log
    #SBATCH --open-mode=append
    """
    variables = {
        "NODES": '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)',
        "PORT": f"{_port(request.ports)} # other jobs may run on these machines",
    }
    secret, option = request.secret_file, "--insecure"
    if not request.insecure:
        option = '--secret-file "$SECRET"'
        variables["SECRET"] = (
            f"$PWD/{batch.name}-$SLURM_JOB_ID.secret" if secret is None else _quoted(secret)
        )
    lines = [
        "#!/usr/bin/env bash",
        "# A job of jaxfleet, as `jaxfleet launch --on slurm --dry-run` wrote it; sbatch takes it.",
        *(f"#SBATCH --{each}" for each in _directives(request, batch)),
        "set -euo pipefail",
        "",
        *(f"{name}={value}" for name, value in variables.items()),
        f"export {' '.join(variables)}",
        "",
    ]
    if secret is None and not request.insecure:
        lines += _MAKES_SECRET
    return "\n".join(
        [
            *lines,
            "# One task on each machine, which gets its name from SLURMD_NODENAME.",
            "srun --kill-on-bad-exit=1 bash -c '",
            '  exec jaxfleet launch --job "slurm-$SLURM_JOB_ID" --nodes "$NODES" \\',
            f'    --node "$SLURMD_NODENAME" --port "$PORT" {option} "$@"',
            f"' launch {' '.join(map(shlex.quote, request.words))}",
            "",
        ]
    )


def _directives(request: Request, batch: Batch) -> list[str]:
    found = [
        f"job-name={batch.name}",
        f"nodes={request.machines}",
        "ntasks-per-node=1",
        f"cpus-per-task={request.cpus}",
    ]
    if request.gpus:
        found.append(f"gpus-per-node={request.gpus}")
    found.append("requeue" if request.goes_on else "no-requeue")
    # When the job starts again, its output follows that of its former start.
    return [*found, f"output={batch.name}-%j.log", "open-mode=append", *batch.directives]


def _port(ports: int) -> str:
    """Returns the shell's words for a job's first port: other jobs may run on its machines."""
    each = max(16, 1 << (ports - 1).bit_length())
    return f"$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS // each} * {each}))"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path.resolve()))


def submit(script: str) -> str:
    """Submits a batch script; returns the number of its job.

    Raises:
        ConnectError: SLURM is not here, does not answer, or refuses the job.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],  # noqa: S607  # where SLURM is, the path has it
            input=script,
            capture_output=True,
            text=True,
            timeout=_SUBMIT_S,
            check=False,
        )
    except FileNotFoundError:
        hint = "submit from a machine that has SLURM's commands, or write the script by --dry-run"
        raise ConnectError("there is no sbatch here", hint=hint) from None
    except subprocess.TimeoutExpired:
        what = f"sbatch has not answered within {_SUBMIT_S:.0f} s"
        raise ConnectError(what, hint="ask SLURM with sinfo whether it is up") from None
    if done.returncode:
        raise ConnectError(f"sbatch refuses the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
