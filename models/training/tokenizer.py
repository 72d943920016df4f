"""The pair's tokenizer: byte-level BPE for Python source.

Every byte is a token, so any text can be encoded and decoded. Id 0 begins every document and ends generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from models.training.corpus import Source

END_OF_TEXT = "<|endoftext|>"
# A newline and the indentation after it are one pre-token; words, digits and runs of punctuation are separate.
_PRETOKENS = r"\n[ ]*| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+"


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Returns a tokenizer with `vocab` ids, or fewer if the texts are too small."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRETOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B:1", special_tokens=[(END_OF_TEXT, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, sources: Sequence[Source]) -> NDArray[np.uint16]:
    """Returns all sources as one stream of ids [tokens], each beginning with id 0."""
    encodings = tokenizer.encode_batch_fast([source.text for source in sources])
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])
