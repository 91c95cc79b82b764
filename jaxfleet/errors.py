"""Every exception that jaxfleet raises, sorted by who can act on it.

::

    JaxfleetError
      ProgramError         the user's program is wrong
        CaptureError         a training step cannot be captured as it is written
        TextError            IR text does not parse
        VerifyError          a program breaks a rule of the IR
        FeedError            what was fed or fetched does not fit the program
          RaggedError          a feed of sequences of different lengths, as a list
        NonFiniteError       an operator made NaN or Inf, which the script asked to be checked
        WrongTypeError       something of another type was given
        AssertedError        what fluid asserts of a program or an argument does not hold
        NotReadyError        something is asked before what makes it known: a NameError in fluid
        UnknownServerError   an endpoint that is that of no server: a KeyError in fluid
        TableError           distributed tables that cannot be: a RuntimeError in fluid
        DatasetError         a dataset is missing, or not ready: a RuntimeError in fluid
      PassError            a pass cannot run: its options, or what it was given
      StrategyError        a strategy's fields contradict each other or the machine
        FieldError           a strategy has no such field
        FinalError           a strategy is changed after a program was made with it
        UnsetError           a variable of the environment is not set: a KeyError in fluid
        UnsupportedError     what is asked for does not run here
      ConnectError         a peer never answered; try again
      PeerLostError        a peer answered, then went
      ClosedError          this end was closed
      EndOfDataError       a loader has given all: fluid's EOFException
      CheckpointError      a checkpoint cannot be written, or is damaged, or has not what is asked
        SavedError           the same of what `fluid.io` saves: variables, programs

The first line of an error says what happened, with the values. Where it happened and what to do
are notes, which Python prints under the message.
"""

from typing import Protocol


class Located(Protocol):
    """Describes what an error can point at: a line of the user's program."""

    def where(self) -> str:
        """Returns `file:line, in function` and the line itself, or an empty string."""
        ...


class JaxfleetError(Exception):
    """Says what happened, where, and what to do.

    Args:
        what: the message; names the values that are wrong.
        source: the line of the user's program it is about.
        op: the operator it is about; printed, and its source is used where `source` is not given.
        hint: what the user can do.

    Attributes:
        what: the message.
        op: the operator it is about, or None.
    """

    def __init__(
        self,
        what: str,
        *,
        source: Located | None = None,
        op: object | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.op = op
        located = source if source is not None else getattr(op, "source", None)
        if located is not None and (where := located.where()):
            self.add_note(f"  {where}")
        if op is not None:
            self.add_note(f"  op: {op}")
        if hint is not None:
            self.add_note(f"  hint: {hint}")

    def __str__(self) -> str:
        return self.what


class ProgramError(JaxfleetError, ValueError):
    """The user's program is wrong."""


class CaptureError(ProgramError):
    """A training step cannot be captured as it is written."""


class TextError(ProgramError):
    """IR text does not parse."""


class VerifyError(ProgramError):
    """A program breaks a rule of the IR."""


class FeedError(ProgramError):
    """What was fed or fetched does not fit the program."""


class RaggedError(FeedError, RuntimeError):
    """A feed is a list, which fluid takes for sequences of different lengths."""


class NonFiniteError(ProgramError, ArithmeticError):
    """An operator made NaN or Inf, and `FLAGS_check_nan_inf` asked for none."""


class WrongTypeError(ProgramError, TypeError):
    """Something of another type was given."""


class AssertedError(ProgramError, AssertionError):
    """What fluid asserts of a program or an argument does not hold."""


class NotReadyError(ProgramError, NameError):
    """Something is asked before what makes it known: fluid raises a NameError."""


class UnknownServerError(ProgramError, KeyError):
    """An endpoint is that of no server: fluid raises a KeyError."""


class TableError(ProgramError, RuntimeError):
    """A program's distributed tables are not one: fluid raises a RuntimeError."""


class DatasetError(ProgramError, RuntimeError):
    """A dataset is missing, or not ready to be read: fluid raises a RuntimeError."""


class PassError(JaxfleetError, ValueError):
    """A pass cannot run: its options, or the program that it was given."""


class StrategyError(JaxfleetError, ValueError):
    """A strategy's fields contradict each other or the machine."""


class FieldError(StrategyError, AttributeError):
    """A strategy has no such field."""


class FinalError(StrategyError, RuntimeError):
    """A strategy is changed after a program was made with it."""


class UnsetError(StrategyError, KeyError):
    """A variable of the environment is not set: fluid raises a KeyError."""


class UnsupportedError(StrategyError, NotImplementedError):
    """What is asked for does not run here."""


class ConnectError(JaxfleetError, ConnectionError):
    """A peer never answered; trying again may help."""


class PeerLostError(JaxfleetError, ConnectionError):
    """A peer answered, then went."""


class ClosedError(JaxfleetError, RuntimeError):
    """This end was closed."""


class EndOfDataError(JaxfleetError, EOFError):
    """A loader has given all batches of a pass: fluid's EOFException."""


class CheckpointError(JaxfleetError, OSError):
    """A checkpoint cannot be written, or is damaged, or has not what is asked of it."""


class SavedError(CheckpointError, RuntimeError):
    """What `fluid.io` saves cannot be written, or is damaged, or does not fit the program."""
