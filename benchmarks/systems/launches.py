"""How each system's job is launched on the two hosts, and which of its processes a fault kills."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from systems import task
from systems.hosts import address
from systems.jobs import Member

HERE = Path(__file__).parent
RESTARTS = "3"  # that launchers may use
PORT = 29500


@dataclass(frozen=True)
class System:
    """A system beside jaxfleet, or itself.

    Attributes:
        package: what has its version.
        members: makes the members from the path of its Python interpreter and the folder of
            checkpoints.
        victims: what is killed in the faults "server", "trainer" and "both", as far as there are
            such processes.
        started_again: members that this program starts again after they were killed, since the
            system has no launcher that does.
        line: whether its job has processes on both hosts.
        environment: what its processes get beside what all do.
    """

    package: str
    members: Callable[[str, Path], list[Member]]
    victims: Mapping[str, tuple[str, ...]]
    started_again: tuple[str, ...] = ()
    line: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def _torch(python: str, _: Path, *options: str) -> list[Member]:
    words = [python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{PORT}", "--rdzv-id=faults"]
    words += [f"--max-restarts={RESTARTS}"]
    members = []
    for host in (0, 1):
        own = [f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr={address(host)}"]
        own += [str(HERE / "torch_training.py"), *options]
        members.append(Member(f"agent-{host}", host, [*words, *own], main=True))
    return members


def _tensorflow(python: str, _: Path) -> list[Member]:
    places = {"ps": (0, 0), "worker": (0, 1), "chief": (0,)}
    ports = iter(range(PORT, PORT + 10))
    cluster = {
        role: [f"{address(host)}:{next(ports)}" for host in hosts] for role, hosts in places.items()
    }
    script = [python, str(HERE / "tensorflow_training.py")]
    return [
        Member(
            f"{role}-{number}",
            host,
            [*script, role, str(number), json.dumps(cluster)],
            main=role == "chief",
        )
        for role, hosts in places.items()
        for number, host in enumerate(hosts)
    ]


def _ray(python: str, _: Path) -> list[Member]:
    start = [python, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    start += ["--object-store-memory=100000000", "--disable-usage-stats"]
    head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    script = [python, str(HERE / "ray_training.py"), f"{address(0)}:{PORT}"]
    return [
        Member("head", 0, [*start, *head, f"--node-ip-address={address(0)}"]),
        Member(
            "node",
            1,
            [*start, f"--address={address(0)}:{PORT}", f"--node-ip-address={address(1)}"],
            after_s=10.0,
        ),
        Member("driver", 0, script, main=True, after_s=20.0),
    ]


def _fluid(python: str, _: Path) -> list[Member]:
    servers = ",".join(f"{address(0)}:{PORT + number}" for number in (0, 1))
    script = [python, str(HERE / "fluid_training.py")]
    return [
        Member("server-0", 0, [*script, "PSERVER", "0", servers]),
        Member("server-1", 0, [*script, "PSERVER", "1", servers]),
        Member("trainer-0", 0, [*script, "TRAINER", "0", servers], main=True),
        Member("trainer-1", 1, [*script, "TRAINER", "1", servers]),
    ]


def _jaxfleet(python: str, saves: Path) -> list[Member]:
    words = _launch(python, saves)
    words += [f"--max-restarts={RESTARTS}", f"--save-every={task.SAVE_EVERY}steps"]
    words += [f"--save-to={saves}", str(HERE / "jaxfleet_training.py")]
    return [Member("launch", 0, words, main=True)]


def _jaxfleet_hosts(python: str, saves: Path) -> list[Member]:
    secret = saves / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    words = [*_launch(python, saves), f"--nodes={address(0)},{address(1)}"]
    words += [f"--secret-file={secret}"]
    script = str(HERE / "jaxfleet_training.py")
    return [
        Member(f"launch-{host}", host, [*words, f"--node={address(host)}", script], main=True)
        for host in (0, 1)
    ]


def _launch(python: str, saves: Path) -> list[str]:
    words = [python, "-m", "jaxfleet", "launch", "--job=faults", "--servers=2", "--trainers=2"]
    words += ["--threads=1", f"--checkpoint-dir={saves}"]
    return [*words, f"--restarts={RESTARTS}", f"--trainer-restarts={RESTARTS}"]


SYSTEMS = {
    "torch": System(
        "torch",
        _torch,
        {"trainer": ("worker-1",)},
        environment={"GLOO_SOCKET_IFNAME": "eth0"},
    ),
    "tensorflow": System(
        "tensorflow-cpu",
        _tensorflow,
        {"server": ("ps-1",), "trainer": ("worker-1",), "both": ("ps-1", "worker-1")},
        started_again=("worker-1",),
        environment={"TF_CPP_MIN_LOG_LEVEL": "1"},
    ),
    "ray": System(
        "ray",
        _ray,
        {"trainer": ("worker-1",)},
        environment={"GLOO_SOCKET_IFNAME": "eth0"},
    ),
    "fluid": System(
        "paddlepaddle",
        _fluid,
        {"server": ("server-1",), "trainer": ("trainer-1",), "both": ("server-1", "trainer-1")},
        started_again=("trainer-1",),
    ),
    # On one host, since a job on several does not begin again as a whole by itself.
    "jaxfleet": System(
        "jaxfleet",
        _jaxfleet,
        {"server": ("server-1",), "trainer": ("trainer-1",), "both": ("server-1", "trainer-1")},
        line=False,
    ),
    "jaxfleet-hosts": System(
        "jaxfleet",
        _jaxfleet_hosts,
        {"server": ("server-1",), "trainer": ("trainer-1",), "both": ("server-1", "trainer-1")},
    ),
}
SYSTEMS["torch-replaced"] = System(
    "torch",
    lambda python, saves: _torch(python, saves, "--save=replaced"),
    SYSTEMS["torch"].victims,
    environment=SYSTEMS["torch"].environment,
)
