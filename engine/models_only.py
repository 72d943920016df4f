"""Imports mlx-lm's models without its tokenizers and downloads, for a process that only computes.

`import mlx_lm` also imports transformers and huggingface_hub, which took two thirds of a worker's import time. Code
that needs them can still import them. `python -m outrider.engine.models_only MODULE` runs such a module.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType

LEFT_OUT = {"mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"), "huggingface_hub": ("snapshot_download",)}
"""Modules that `mlx_lm.utils` imports and a model on disk doesn't need, and the names it imports from each."""


def models_only() -> None:
    """Makes `mlx_lm` a package whose __init__ is not run, and whose `utils` read local models only.

    Does nothing if mlx_lm is imported already. Imports all of it if it imports more names from those modules.
    """
    if "mlx_lm" in sys.modules or (package := find_spec("mlx_lm")) is None:
        return
    sys.modules["mlx_lm"] = module_from_spec(package)  # without its __init__, which imports everything
    stubs = {name: ModuleType(name) for name in LEFT_OUT if name not in sys.modules}
    for name, stub in stubs.items():
        vars(stub).update(dict.fromkeys(LEFT_OUT[name], object))  # used in annotations
    sys.modules.update(stubs)
    try:
        import_module("mlx_lm.utils")
    except ImportError:
        del sys.modules["mlx_lm"]
    finally:
        for name in stubs:
            del sys.modules[name]


if __name__ == "__main__":
    models_only()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
