"""mlx-lm's models without what it has for text and downloads, for a process that computes and does nothing else.

`import mlx_lm` brings transformers and huggingface_hub along, two thirds of what a worker's imports took. Whoever needs
them can still import them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType

LEFT_OUT = {"mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"), "huggingface_hub": ("snapshot_download",)}
"""What `mlx_lm.utils` imports and a model on this disk doesn't need: modules, and the names that it takes of each."""


def models_only() -> None:
    """Makes `mlx_lm` the folder of its modules, whose `utils` read local models alone. Later than its import: nothing.

    Of a mlx-lm that takes more of those modules all is imported.
    """
    package = find_spec("mlx_lm")
    if "mlx_lm" in sys.modules or package is None:
        return
    sys.modules["mlx_lm"] = module_from_spec(package)  # and its __init__, which imports everything, is not run
    standing_in = {name: _module(name, names) for name, names in LEFT_OUT.items() if name not in sys.modules}
    sys.modules.update(standing_in)
    try:
        import_module("mlx_lm.utils")
    except ImportError:
        del sys.modules["mlx_lm"]
    finally:
        for name in standing_in:
            del sys.modules[name]


def _module(name: str, names: tuple[str, ...]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(dict.fromkeys(names, object))  # they stand in annotations
    return module
