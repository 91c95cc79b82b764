"""Processes of a collective job that go together, one rank each.

`initialize` joins; `joined() -> Joined | None` is then this process as a rank, with what steps and
executors need: `rank`, `size`, `gather`, `barrier`, `agree`, `next_step`, `run_step`, `run`.
`jaxfleet.group.arrays` makes arrays over all ranks' devices of what each rank has.
"""

from jaxfleet.group.apart import check_has_joined as check_has_joined
from jaxfleet.group.apart import not_joined as not_joined
from jaxfleet.group.files import split_files as split_files
from jaxfleet.group.joining import Place as Place
from jaxfleet.group.joining import has_started as has_started
from jaxfleet.group.joining import initialize as initialize
from jaxfleet.group.joining import joined as joined
from jaxfleet.group.membership import Joined as Joined
from jaxfleet.group.place import is_first as is_first
from jaxfleet.group.place import rank as rank
from jaxfleet.group.place import size as size
