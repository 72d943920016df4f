"""Forwards on a CPU by ONNX Runtime, without its telemetry, unless the environment asks for that."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when onnxruntime is imported
