"""The text form of messages, under the names of protocol buffers."""

from jaxfleet.fluid.distributed.messages import Message
from jaxfleet.fluid.distributed.text import from_text


def Merge(text: str, message: Message) -> Message:  # noqa: N802  # protocol buffers' name
    """Takes the fields that a text sets; returns the message.

    Raises:
        TextError: it is not such a text, or sets an unknown field.
    """
    message.MergeFrom(from_text(text, message._kind))
    return message


Parse = Merge


def MessageToString(message: Message) -> str:  # noqa: N802
    """Returns a message as text."""
    return str(message)
