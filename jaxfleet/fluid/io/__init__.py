"""Saving and loading of variables, inference models and whole training states.

A file holds arrays by name as `.npz`, with checksums. Files are written atomically, and those of
one call are renamed together. Loading reads and validates everything before it changes the scope.
"""

from jaxfleet.fluid.io.programs import load as load
from jaxfleet.fluid.io.programs import load_inference_model as load_inference_model
from jaxfleet.fluid.io.programs import load_program_state as load_program_state
from jaxfleet.fluid.io.programs import save as save
from jaxfleet.fluid.io.programs import save_inference_model as save_inference_model
from jaxfleet.fluid.io.programs import set_program_state as set_program_state
from jaxfleet.fluid.io.variables import get_program_parameter as get_program_parameter
from jaxfleet.fluid.io.variables import get_program_persistable_vars as get_program_persistable_vars
from jaxfleet.fluid.io.variables import is_belong_to_optimizer as is_belong_to_optimizer
from jaxfleet.fluid.io.variables import is_parameter as is_parameter
from jaxfleet.fluid.io.variables import is_persistable as is_persistable
from jaxfleet.fluid.io.variables import load_params as load_params
from jaxfleet.fluid.io.variables import load_persistables as load_persistables
from jaxfleet.fluid.io.variables import load_vars as load_vars
from jaxfleet.fluid.io.variables import save_params as save_params
from jaxfleet.fluid.io.variables import save_persistables as save_persistables
from jaxfleet.fluid.io.variables import save_vars as save_vars
from jaxfleet.fluid.reader import DataLoader as DataLoader
from jaxfleet.fluid.reader import PyReader as PyReader
from jaxfleet.fluid.readers import batch as batch
from jaxfleet.fluid.readers import buffered as buffered
from jaxfleet.fluid.readers import cache as cache
from jaxfleet.fluid.readers import chain as chain
from jaxfleet.fluid.readers import compose as compose
from jaxfleet.fluid.readers import firstn as firstn
from jaxfleet.fluid.readers import map_readers as map_readers
from jaxfleet.fluid.readers import shuffle as shuffle
