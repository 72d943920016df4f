"""Forwards on a CPU by ONNX Runtime."""
