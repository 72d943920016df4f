"""Writes graphs and weights as a multifunction .mlpackage.

The program is built in its final types, so no graph pass is run: what is built is what is saved, in seconds where a
conversion for each function takes minutes. Needs coremltools, on any system.
"""

from __future__ import annotations

import errno
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from outrider.drafting.coreml.converter import graph
from outrider.drafting.coreml.converter.constants import Constants
from outrider.drafting.coreml.converter.weights import Weights
from outrider.drafting.coreml.package import quiet
from outrider.drafting.coreml.package.layout import Layout


def write(
    layout: Layout, weights: Weights, destination: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Saves every function of `layout` to `destination` (a new directory ending in .mlpackage).

    Args:
        progress: called with (functions built, functions + 1); the last step is the export.

    Raises:
        OSError: the disk is full or not writable.
    """
    program, steps = quiet.mil().Program(), len(layout.functions) + 1
    constants = Constants(weights)
    for built, function in enumerate(layout.functions):
        program.add_function(function.name, graph.build(layout, constants, function))
        if progress:
            progress(built + 1, steps)
    program.default_function_name = layout.functions[0].name
    program.export_as_multifunction = True
    coremltools = quiet.coremltools()
    export = importlib.import_module("coremltools.converters.mil.backend.mil.load").load
    # weight.bin grows here first, so it must be on the disk whose space was looked at
    with tempfile.TemporaryDirectory(dir=destination.parent) as weights_dir:
        try:
            spec = export(program, weights_dir, specification_version=coremltools.target.iOS18.value)
            coremltools.utils.save_spec(spec, str(destination), weights_dir=weights_dir)
        except RuntimeError as error:  # what coremltools' own writers make of a full disk
            raise OSError(errno.EIO, str(error)) from error
    if progress:
        progress(steps, steps)
