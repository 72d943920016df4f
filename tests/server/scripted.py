"""The scripted chat model, by the names that these tests use."""

from tests.harness.scripted_model import ANSWER, PLAIN, text_of, write_scripted

__all__ = ["ANSWER", "PLAIN", "text_of", "write_scripted"]
