"""A wrong secret: both sides report it within seconds."""

import time

import pytest

from jaxfleet.transport.messages import Kind, Message
from jaxfleet.transport.zmq.network import ZmqNetwork
from tests.tiers import grid
from tests.transport.test_zmq_network import SECRET

OTHER = b"another secret of this job"


@pytest.mark.parametrize(
    ("server", "client"),
    [(SECRET, OTHER), grid(SECRET, None), grid(None, OTHER)],
    ids=["other", "c", "s"],
)
def test_both_sides_say_so(
    server: bytes | None, client: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    listener = ZmqNetwork(secret=server).listen("127.0.0.1:0")
    network = ZmqNetwork(secret=client)
    lines, beats = (network.connect([listener.endpoint]) for _ in range(2))
    try:
        until = time.monotonic() + 60.0  # takes seconds, and more on a busy machine
        lines.send(0, Message(Kind.HELLO, "trainer 0"))
        while time.monotonic() < until and not (
            said(caplog, "ends every handshake") and said(caplog, "refused a peer")
        ):
            assert lines.receive(0.2) is None
            assert beats.receive(0.0) is None
        assert listener.receive(0.0) is None
    finally:
        lines.close()
        beats.close()
        listener.close()
    assert said(caplog, f"the listener at {listener.endpoint} ends every handshake") == 1
    assert said(caplog, f"the listener at {listener.endpoint} refused a peer") == 1


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """Returns the number of log messages that contain a text."""
    return sum(text in record.getMessage() for record in caplog.records)
