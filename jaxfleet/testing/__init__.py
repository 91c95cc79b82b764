"""Test helpers for passes, jaxfleet's and users'."""

from jaxfleet.testing.check import check_pass as check_pass
from jaxfleet.testing.check import docstring_programs as docstring_programs
