"""A token tree for any model: `open_tree` chooses the columns that reproduce the model's logits, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from outrider.engine import trial
from outrider.engine.columns import Columns, OneRow
from outrider.engine.draws import Draws
from outrider.engine.joint_row import JointRow
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.columns import OrtRow
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.reading import PromptReader, ReadColumns
from outrider.engine.rows import Rows
from outrider.engine.sampling import Sampler
from outrider.engine.selfcheck import agrees, agrees_in_company
from outrider.engine.tree import Tree
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import CannotDraft, InvalidRequest
from outrider.protocol.kv import KvCost
from outrider.protocol.sampling import SamplingParams

Form = type[OrtRow] | type[JointRow] | type[OneRow] | type[Rows]

_columns_of: WeakKeyDictionary[LoadedModel, Form] = WeakKeyDictionary()


def open_tree(
    model: LoadedModel,
    tokens: Sequence[int],
    params: SamplingParams,
    progress: Callable[[int, int], None] | None = None,
    draws: Draws | None = None,
    reader: PromptReader | None = None,
    cache: PromptCache | None = None,
    constraint: Constraint | None = None,
) -> Tree:
    """Prefills `tokens` (at least one) and returns the tree whose root is the last of them.

    Args:
        progress: called as (tokens done, tokens in all) after each chunk of a long prompt; may raise to end the call.
        draws: how nodes' own continuations are drawn, for residual sampling; None: they are the best.
        reader: reads prompts in the model's place where it says so.
        cache: what it has of the tokens is not read, and what the tree has read goes there in the end.
        constraint: what the text's grammar allows, if it has one.

    Raises:
        InvalidRequest: no tokens, or one the model does not have.
        ModelError: no form of tree reproduces this model's logits.
    """
    if not tokens:
        raise InvalidRequest("the prompt has no tokens; expected at least one")
    if not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        raise InvalidRequest(f"a prompt token is outside 0..{model.vocab_size - 1}, the draft's vocabulary")
    return _open(model, tree_form(model), params, progress, tokens, draws, reader, cache, constraint)


def tree_form(model: LoadedModel) -> Form:
    """The columns that carry trees of this model; found by a self-check the first time it is asked, then remembered.

    Raises:
        CannotDraft: no form reproduces this model's logits.
    """
    if model not in _columns_of:
        forms: list[Form] = [JointRow, OneRow, Rows] if model.attention_only else [Rows]
        if model.cpu is not None:
            forms.insert(0, OrtRow)
        _columns_of[model] = _first_that_agrees(model, forms)
    return _columns_of[model]


def open_form(model: LoadedModel, form: Form, tokens: Sequence[int]) -> Tree:
    """A greedy tree of this form, whether or not it is the model's own."""
    return _open(model, form, SamplingParams(), None, tokens)


def open_columns(model: LoadedModel, reader: PromptReader | None = None) -> Columns:
    """Empty columns for one text; `reader` reads its prompt where it says so. Raises ModelError as `tree_form` does."""
    return _columns(model, tree_form(model), reader)


def tree_cost(model: LoadedModel) -> KvCost:
    """What a tree of this model takes in memory. Raises ModelError as `tree_form` does."""
    columns = open_columns(model)
    columns.prefill([0], None, 1)
    return columns.save(1).cost


def _first_that_agrees(model: LoadedModel, forms: Sequence[Form]) -> Form:
    reason = ""
    for form in forms:
        opened = partial(open_form, model, form)
        reason = trial.fault(model, "a tree of it", partial(_agrees, model, opened))
        if not reason:
            return form
    raise CannotDraft(f"a {model.model_type} model can't be a draft model ({reason}); choose another")


def _agrees(model: LoadedModel, opened: Callable[[Sequence[int]], Tree]) -> bool:
    return agrees(model, opened) and agrees_in_company(model, opened)


def _open(
    model: LoadedModel,
    form: Form,
    params: SamplingParams,
    progress: Callable[[int, int], None] | None,
    tokens: Sequence[int],
    draws: Draws | None = None,
    reader: PromptReader | None = None,
    cache: PromptCache | None = None,
    constraint: Constraint | None = None,
) -> Tree:
    sampler = Sampler(params, model.vocab_size, normalised=False, constraint=constraint)
    return Tree(_columns(model, form, reader), sampler, model.context_length, tokens, progress, draws, cache)


def _columns(model: LoadedModel, form: Form, reader: PromptReader | None) -> Columns:
    columns = form(model)
    if reader is None or isinstance(columns, Rows):  # a recurrent state comes from the model alone
        return columns
    return ReadColumns(columns, reader)
