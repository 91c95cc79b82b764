"""Seeing what a job does while it runs: spans for a timeline, figures for `jaxfleet top`."""

from jaxfleet.watch.board import Board as Board
from jaxfleet.watch.notices import Progress as Progress
from jaxfleet.watch.notices import notify as notify
from jaxfleet.watch.scrape import Sample as Sample
from jaxfleet.watch.scrape import scrape as scrape
from jaxfleet.watch.spans import NO_SPANS as NO_SPANS
from jaxfleet.watch.spans import FileSpans as FileSpans
from jaxfleet.watch.spans import Spans as Spans
from jaxfleet.watch.spans import spans_of as spans_of
from jaxfleet.watch.timeline import merge as merge
from jaxfleet.watch.tokens import read_token as read_token
from jaxfleet.watch.tokens import write_token as write_token
from jaxfleet.watch.waits import LongWait as LongWait
