"""Imports coremltools without the lines it prints where Core ML itself is missing, or torch, or scikit-learn."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from outrider.protocol.errors import ModelError

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # coremltools imports transformers, which then misses torch aloud


def coremltools() -> Any:
    """The coremltools module. Raises ModelError when it is not installed."""
    logger = logging.getLogger("coremltools")
    level, advice = logger.level, os.environ.get(_ADVICE)
    logger.setLevel(logging.ERROR)
    os.environ[_ADVICE] = "1"
    try:
        return importlib.import_module("coremltools")
    except ImportError as error:
        raise ModelError(f"the coreml drafter needs coremltools ({error}); pip install 'coremltools>=9.0'") from error
    finally:
        logger.setLevel(level)
        if advice is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = advice


def mil() -> Any:
    """coremltools' package of program builders: Builder, Function, Program, types."""
    coremltools()
    return importlib.import_module("coremltools.converters.mil.mil")


def model_proto() -> Any:
    """The protobuf module that model.mlmodel is written in."""
    coremltools()
    return importlib.import_module("coremltools.proto.Model_pb2")
