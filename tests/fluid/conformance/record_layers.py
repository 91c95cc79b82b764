"""Records results and gradients of fluid 1.8.5 for the cases of `tests/fluid/layer_cases.py`.

Run by a Python 3.7 that has paddlepaddle 1.8.5 and protobuf below 4::

    python tests/fluid/conformance/record_layers.py
"""

import json
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import layer_cases  # type: ignore[import-not-found]  # noqa: E402  # in the folder above
import paddle.fluid  # type: ignore[import-not-found]  # noqa: E402

found = {}
for name, case in layer_cases.CASES.items():
    found[name] = layer_cases.run(paddle.fluid, case)
lines = ",\n".join(f"{json.dumps(n)}: {json.dumps(found[n])}" for n in sorted(found))
(HERE / "layer_cases.json").write_text("{\n" + lines + "\n}\n")
