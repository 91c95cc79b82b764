"""Reports: what the compiler did to a step, as one HTML file that needs no network."""

from jaxfleet.report.builder import build_report as build_report
from jaxfleet.report.dump_reader import read_folders as read_folders
from jaxfleet.report.history import History as History
from jaxfleet.report.history import Measured as Measured
from jaxfleet.report.history import StageRecord as StageRecord
from jaxfleet.report.history import TimePart as TimePart
from jaxfleet.report.history import of_program as of_program
from jaxfleet.report.history import of_record as of_record
from jaxfleet.report.model import Report as Report
from jaxfleet.report.render import render as render
from jaxfleet.report.writer import write_report as write_report
