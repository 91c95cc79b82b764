"""Help for tests of passes, ours and those that users write."""

from jaxfleet.testing.check import check_pass as check_pass
from jaxfleet.testing.docs import docstring_programs as docstring_programs
