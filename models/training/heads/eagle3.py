"""EAGLE-3 heads (arXiv 2503.01840): a layer over hidden states of three layers and the next token's embedding.

Parameters have the official checkpoint's names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from models.training.export import llama_config
from models.training.heads.chains import ChainAttention, ChainHead, KeysValues, StepPositions
from models.training.heads.head import Target, principal_directions
from models.training.heads.store import Batch
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

    def forward(
        self, x: Tensor, embedded: Tensor, at: StepPositions, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        inputs = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), dim=-1)
        mixed, past = self.self_attn(inputs, at, past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), past


class Eagle3(ChainHead):
    """An EAGLE-3 head of `shape`, where `vocab` is the size of the draft vocabulary."""

    def __init__(self, target: Target, shape: Shape, steps: int, seed: int) -> None:
        super().__init__(shape, steps, _DECAY)
        self._shape, self._target = shape, target
        target_hidden = target.model.shape.hidden
        self.fc = nn.Linear(len(target.taps) * target_hidden, shape.hidden, bias=False)
        self.embed_tokens = nn.Embedding(target.model.shape.vocab, shape.hidden)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.set_vocabulary(target)
        self.init_random(seed)
        self._init_from_target()

    def features(self, batch: Batch, count: int) -> Tensor:
        fused: Tensor = self.fc(batch.hidden[:, :count].flatten(2)).float()
        return fused

    def step(
        self, features: Tensor, tokens: Tensor, at: StepPositions, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        x, past = self.midlayer(features, self.embed_tokens(tokens), at, past)
        return x, past

    def output_input(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed

    def next_features(self, x: Tensor) -> Tensor:
        return x

    @property
    def output_weight(self) -> Tensor:
        return self.lm_head.weight

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns SpecForge's layout: SafeAI's with the layers' ids and the head's own embedding."""
        shape, target = self._shape, self._target.model.shape
        config = {
            **llama_config(replace(shape, vocab=target.vocab)),
            "architectures": ["LlamaForCausalLMEagle3"],
            "target_hidden_size": target.hidden,
            "draft_vocab_size": shape.vocab,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self._target.taps), "use_aux_hidden_state": True},
        }
        tensors = {name: value.half() for name, value in self.state_dict().items()}
        if shape.vocab == target.vocab:
            return config, tensors
        ids = self._target.vocab_ids.cpu()
        known = torch.zeros(target.vocab, dtype=torch.bool)
        known[ids] = True
        return config, tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": known}

    @torch.no_grad()
    def _init_from_target(self) -> None:
        """Initialises embedding, output layer and fusion with the target's, projected to its principal directions."""
        target, vocab_ids = self._target.model, self._target.vocab_ids.cpu()
        directions = principal_directions(target.output_weight, self._shape.hidden)
        normed_output = target.output_weight.float().cpu() * target.norm.weight.float().cpu()
        self.embed_tokens.weight.copy_(target.embed_tokens.weight.float().cpu() @ directions)
        self.lm_head.weight.copy_(normed_output[vocab_ids] @ directions)
        self.fc.weight[:, -target.shape.hidden :] = directions.T
