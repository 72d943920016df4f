"""Imports mlx-lm's models without its tokenizers and downloads, for a process that only computes.

`import mlx_lm` also imports transformers and huggingface_hub, which took two thirds of a worker's import time. Code
that needs them can still import them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType

LEFT_OUT = {"mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"), "huggingface_hub": ("snapshot_download",)}
"""Modules that `mlx_lm.utils` imports and a model on disk doesn't need, and the names it imports from each."""


def models_only() -> None:
    """Makes `mlx_lm` a package whose __init__ is not run, and whose `utils` read local models only.

    Does nothing if mlx_lm is imported already. If this mlx-lm imports more names from those modules, all of it is
    imported.
    """
    package = find_spec("mlx_lm")
    if "mlx_lm" in sys.modules or package is None:
        return
    sys.modules["mlx_lm"] = module_from_spec(package)  # without its __init__, which imports everything
    stubs = {name: _stub(name, names) for name, names in LEFT_OUT.items() if name not in sys.modules}
    sys.modules.update(stubs)
    try:
        import_module("mlx_lm.utils")
    except ImportError:
        del sys.modules["mlx_lm"]
    finally:
        for name in stubs:
            del sys.modules[name]


def _stub(name: str, names: tuple[str, ...]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(dict.fromkeys(names, object))  # used in annotations
    return module
