"""Learner of EAGLE-3 heads (arXiv 2503.01840): a layer over three tapped rows and the next token's embedding.

Parameters have the official checkpoint's names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.training.heads.chains import ChainAttention, ChainLearner, Known, Place
from models.training.heads.learner import Subject, directions
from models.training.heads.store import Lesson
from models.training.llama import Mlp
from models.training.recipe import Shape

_DECAY = 0.8


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = ChainAttention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, embedded: Tensor, place: Place, known: Known | None) -> tuple[Tensor, Known]:
        seen = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), dim=-1)
        mixed, known = self.self_attn(seen, place, known)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), known


class Eagle3(ChainLearner):
    """An EAGLE-3 head of `shape`, where `vocab` is the size of the draft vocabulary."""

    def __init__(self, subject: Subject, shape: Shape, steps: int, seed: int) -> None:
        super().__init__(shape, steps, _DECAY)
        target = subject.model.shape
        self._shape, self._target, self._taps, self._ids = shape, target, subject.taps, subject.ids.cpu()
        self.fc = nn.Linear(len(subject.taps) * target.hidden, shape.hidden, bias=False)
        self.embed_tokens = nn.Embedding(target.vocab, shape.hidden)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.know(subject)
        self.draw(seed)
        self._begin_with(subject)

    def features(self, lesson: Lesson, count: int) -> Tensor:
        fused: Tensor = self.fc(lesson.rows[:, :count].flatten(2)).float()
        return fused

    def advance(self, features: Tensor, tokens: Tensor, place: Place, known: Known | None) -> tuple[Tensor, Known]:
        x, known = self.midlayer(features, self.embed_tokens(tokens), place, known)
        return x, known

    def last(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed

    def next_features(self, x: Tensor) -> Tensor:
        return x

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns SpecForge's layout: SafeAI's with the layers' ids and the head's own embedding."""
        shape = self._shape
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "target_hidden_size": self._target.hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.mlp,
            "rms_norm_eps": shape.norm_epsilon,
            "rope_theta": shape.rope_base,
            "max_position_embeddings": shape.context,
            "vocab_size": self._target.vocab,
            "draft_vocab_size": shape.vocab,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self._taps), "use_aux_hidden_state": True},
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "float16",
        }
        tensors = {name: value.half() for name, value in self.state_dict().items()}
        if shape.vocab == self._target.vocab:
            return config, tensors
        known = torch.zeros(self._target.vocab, dtype=torch.bool)
        known[self._ids] = True
        return config, tensors | {"d2t": self._ids - torch.arange(len(self._ids)), "t2d": known}

    @torch.no_grad()
    def _begin_with(self, subject: Subject) -> None:
        """Initialises embedding, output layer and fusion with the target's, projected to its principal directions."""
        chosen = directions(subject.words, self._shape.hidden)
        words = subject.words.float().cpu() * subject.model.norm.weight.float().cpu()
        self.embed_tokens.weight.copy_(subject.model.embed_tokens.weight.float().cpu() @ chosen)
        self.lm_head.weight.copy_(words[self._ids] @ chosen)
        self.fc.weight[:, -self._target.hidden :] = chosen.T
