"""Processes of one collective job, one rank each.

`initialize` joins the group. Afterwards `joined() -> Joined | None` returns this process as a rank,
with the members that steps and executors need: `rank`, `size`, `gather`, `barrier`, `agree`,
`next_step`, `run_step`, `run`. `jaxfleet.cluster.global_arrays` builds arrays over the devices of
all ranks from each rank's own data.
"""

from jaxfleet.cluster.bootstrap import RankPlace as RankPlace
from jaxfleet.cluster.bootstrap import has_started as has_started
from jaxfleet.cluster.bootstrap import initialize as initialize
from jaxfleet.cluster.bootstrap import joined as joined
from jaxfleet.cluster.process_group import ProcessGroup as ProcessGroup
from jaxfleet.cluster.ranks import check_has_joined as check_has_joined
from jaxfleet.cluster.ranks import is_first as is_first
from jaxfleet.cluster.ranks import not_joined as not_joined
from jaxfleet.cluster.ranks import rank as rank
from jaxfleet.cluster.ranks import size as size
from jaxfleet.cluster.ranks import split_files as split_files
