"""The board of `jaxfleet top --web`: the last hour of a job, in a browser."""

from jaxfleet.board.events import Event as Event
from jaxfleet.board.events import EventDetector as EventDetector
from jaxfleet.board.guard import check_host as check_host
from jaxfleet.board.guard import page_token as page_token
from jaxfleet.board.history import History as History
from jaxfleet.board.history import Series as Series
from jaxfleet.board.server import check_libraries as check_libraries
from jaxfleet.board.server import serve_board as serve_board
from jaxfleet.board.watch import Watch as Watch
