"""The Pass base class, the registry, pipelines as text, and instruments that observe a run."""

from jaxfleet.pipeline.dump import Dump as Dump
from jaxfleet.pipeline.dump import dump_folders as dump_folders
from jaxfleet.pipeline.dump import new_dump_folder as new_dump_folder
from jaxfleet.pipeline.dump import read_index as read_index
from jaxfleet.pipeline.dump import remove_dumps as remove_dumps
from jaxfleet.pipeline.instruments import Instrument as Instrument
from jaxfleet.pipeline.instruments import Record as Record
from jaxfleet.pipeline.instruments import Stage as Stage
from jaxfleet.pipeline.instruments import Statistics as Statistics
from jaxfleet.pipeline.instruments import Timing as Timing
from jaxfleet.pipeline.instruments import communicates as communicates
from jaxfleet.pipeline.instruments import table as table
from jaxfleet.pipeline.pipelines import parse_pipeline as parse_pipeline
from jaxfleet.pipeline.pipelines import pass_text as pass_text
from jaxfleet.pipeline.pipelines import pipeline_text as pipeline_text
from jaxfleet.pipeline.pipelines import run_pipeline as run_pipeline
from jaxfleet.pipeline.registry import Option as Option
from jaxfleet.pipeline.registry import Pass as Pass
from jaxfleet.pipeline.registry import load_plugins as load_plugins
from jaxfleet.pipeline.registry import made_by as made_by
from jaxfleet.pipeline.registry import make_pass as make_pass
from jaxfleet.pipeline.registry import options_of as options_of
from jaxfleet.pipeline.registry import register_pass as register_pass
from jaxfleet.pipeline.registry import registered_passes as registered_passes
