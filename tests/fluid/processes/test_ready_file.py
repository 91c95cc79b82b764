"""A server reports in a file that it listens, and ends on a signal, as fluid's does."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxfleet.fluid.pserver.connections import ReadyFile

SCRIPT = """
import sys
from jaxfleet import fluid

x, y = fluid.layers.data("x", [13]), fluid.layers.data("y", [1])
loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))
fluid.optimizer.SGD(0.001).minimize(loss)
transpiler = fluid.DistributeTranspiler()
transpiler.transpile(0, pservers=sys.argv[1], trainers=1)
exe = fluid.Executor(fluid.CPUPlace())
main, startup = transpiler.get_pserver_programs(sys.argv[1])
exe.run(startup)
exe.run(main)
"""


BY_HAND = """
import sys
from jaxfleet import fluid

program = fluid.Program()
block = program._create_block()
program._rollback()
attrs = {"optimize_blocks": [block], "endpoint": sys.argv[1], "Fanin": 1, "grad_to_block_id": []}
program.global_block().append_op("listen_and_serv", inputs={"X": []}, outputs={}, attrs=attrs)
fluid.Executor(fluid.CPUPlace()).run(program)
"""


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "number"), [(SCRIPT, signal.SIGTERM), (BY_HAND, signal.SIGINT)], ids=["job", "by hand"]
)
def test_a_server_that_listens_is_seen_by_its_file_and_ends_on_a_signal(
    text: str, number: signal.Signals, tmp_path: Path
) -> None:
    endpoint = "127.0.0.1:0"  # a free port
    script = tmp_path / "server.py"
    script.write_text(text)
    environment = os.environ | {"JAXFLEET_INSECURE": "1"}
    server = subprocess.Popen([sys.executable, str(script), endpoint], env=environment)
    ready = Path(f"/tmp/paddle.{server.pid}.port")  # noqa: S108  # fluid's
    try:
        deadline = time.monotonic() + 90
        while not ready.exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while not ready.read_text():
            time.sleep(0.01)
        socket.create_connection(("127.0.0.1", int(ready.read_text())), 10).close()
        server.send_signal(number)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
    assert not ready.exists()


def test_a_file_of_another_kind_is_not_followed(tmp_path: Path) -> None:
    aim = tmp_path / "aim"
    aim.write_text("mine")
    (tmp_path / f"paddle.{os.getpid()}.port").symlink_to(aim)
    with ReadyFile(tmp_path) as ready:
        ready.announce("127.0.0.1:6174")
        assert (tmp_path / f"paddle.{os.getpid()}.port").read_text() == "6174"
    assert aim.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [aim]
