"""Every exception that jaxfleet raises, sorted by who can act on it.

::

    JaxfleetError
      ProgramError         the user's program is wrong
        CaptureError         the training step cannot be captured as written
        TextError            IR text does not parse
        VerifyError          a program breaks a rule of the IR
        FeedError            a feed or fetch does not fit the program
          RaggedError          a feed is a list of sequences of different lengths
        NonFiniteError       an operator produced NaN or Inf while the check is enabled
        WrongTypeError       a value has the wrong type
        AssertedError        an assertion of fluid about a program or argument fails
        NotReadyError        a value is requested before it exists: a NameError in fluid
        UnknownServerError   an endpoint belongs to no server: a KeyError in fluid
        TableError           invalid distributed tables: a RuntimeError in fluid
        DatasetError         a dataset is missing or not ready: a RuntimeError in fluid
      PassError            a pass rejects its options or its program
      StrategyError        a strategy's fields contradict each other or the machine
        FieldError           a strategy has no such field
        FinalError           a strategy is changed after a program was made with it
        UnsetError           an environment variable is not set: a KeyError in fluid
        UnsupportedError     the requested feature does not run here
      ConnectError         a peer never answered; try again
      PeerLostError        a peer answered, then disappeared
      ClosedError          this end was closed
      EndOfDataError       a loader is exhausted: fluid's EOFException
      CheckpointError      a checkpoint cannot be written, is damaged, or lacks the requested data
        SavedError           the same for variables and programs saved by `fluid.io`

The first line of an error states what happened, with the values; it is `str(error)`, which tests
match. The location and the hint are notes (PEP 678), which Python and the command line print below
the message; code that logs an error itself can read `error.hint`.
"""

from typing import Protocol


class Located(Protocol):
    """A location in the user's program that an error can point at."""

    def where(self) -> str:
        """Returns `file:line, in function` and the line itself, or an empty string."""
        ...


class JaxfleetError(Exception):
    """Base of all errors: the message, the location and a hint.

    Args:
        what: the message; names the values that are wrong.
        source: the line of the user's program to blame.
        op: the operator to blame; printed, and its source is used unless `source` is given.
        hint: what the user can do.

    Attributes:
        what: the message.
        op: the operator, or None.
        hint: the hint, or None.
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
        self.hint = hint
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
    """The training step cannot be captured as written."""


class TextError(ProgramError):
    """IR text does not parse."""


class VerifyError(ProgramError):
    """A program breaks a rule of the IR."""


class FeedError(ProgramError):
    """A feed or fetch does not fit the program."""


class RaggedError(FeedError, RuntimeError):
    """A feed is a list, which fluid takes for sequences of different lengths."""


class NonFiniteError(ProgramError, ArithmeticError):
    """An operator produced NaN or Inf while `FLAGS_check_nan_inf` is set."""


class WrongTypeError(ProgramError, TypeError):
    """A value has the wrong type."""


class AssertedError(ProgramError, AssertionError):
    """An assertion of fluid about a program or an argument fails."""


class NotReadyError(ProgramError, NameError):
    """A value is requested before it exists: fluid raises a NameError."""


class UnknownServerError(ProgramError, KeyError):
    """An endpoint belongs to no server: fluid raises a KeyError."""


class TableError(ProgramError, RuntimeError):
    """A program's distributed tables are invalid: fluid raises a RuntimeError."""


class DatasetError(ProgramError, RuntimeError):
    """A dataset is missing or not ready to be read: fluid raises a RuntimeError."""


class PassError(JaxfleetError, ValueError):
    """A pass rejects its options or the program it was given."""


class StrategyError(JaxfleetError, ValueError):
    """A strategy's fields contradict each other or the machine."""


class FieldError(StrategyError, AttributeError):
    """A strategy has no such field."""


class FinalError(StrategyError, RuntimeError):
    """A strategy is changed after a program was made with it."""


class UnsetError(StrategyError, KeyError):
    """An environment variable is not set: fluid raises a KeyError."""


class UnsupportedError(StrategyError, NotImplementedError):
    """The requested feature does not run here."""


class ConnectError(JaxfleetError, ConnectionError):
    """A peer never answered; trying again may help."""


class PeerLostError(JaxfleetError, ConnectionError):
    """A peer answered, then disappeared."""


class ClosedError(JaxfleetError, RuntimeError):
    """This end was closed."""


class EndOfDataError(JaxfleetError, EOFError):
    """A loader has yielded all batches of an epoch: fluid's EOFException."""


class CheckpointError(JaxfleetError, OSError):
    """A checkpoint cannot be written, is damaged, or lacks the requested data."""


class SavedError(CheckpointError, RuntimeError):
    """Data of `fluid.io` cannot be written, is damaged, or does not fit the program."""
