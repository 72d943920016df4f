"""The scripted chat model, under the names of these tests."""

from tests.harness.scripted_model import ANSWER, PLAIN, text_of, write_scripted

__all__ = ["ANSWER", "PLAIN", "text_of", "write_scripted"]
