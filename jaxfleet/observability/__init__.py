"""Observation of running jobs: spans for a timeline, metrics for `jaxfleet top`."""

from jaxfleet.observability.notices import LongWait as LongWait
from jaxfleet.observability.notices import notify as notify
from jaxfleet.observability.plain_text import printable as printable
from jaxfleet.observability.process_memory import resident_bytes as resident_bytes
from jaxfleet.observability.progress import Progress as Progress
from jaxfleet.observability.scrape import Sample as Sample
from jaxfleet.observability.scrape import read_token as read_token
from jaxfleet.observability.scrape import scrape as scrape
from jaxfleet.observability.scrape import write_token as write_token
from jaxfleet.observability.step_spans import StepSpans as StepSpans
from jaxfleet.observability.step_spans import StepTimes as StepTimes
from jaxfleet.observability.timeline import NO_SPANS as NO_SPANS
from jaxfleet.observability.timeline import FileSpans as FileSpans
from jaxfleet.observability.timeline import Spans as Spans
from jaxfleet.observability.timeline import merge as merge
from jaxfleet.observability.timeline import spans_of as spans_of
from jaxfleet.observability.top_view import Board as Board
